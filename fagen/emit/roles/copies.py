"""How tiles come: which there are, who reads them, and in which buffers they are."""

from __future__ import annotations

from fagen.emit.roles.texts import CopyText, RolesText
from fagen.emit.texts import ProductText, TileText
from fagen.plan.plan import GROUP_AXIS
from fagen.plan.warpgroups import GROUP_ROWS


class Copies(RolesText):
    """The tiles of a kernel, and the rows of each consumer."""

    @property
    def copies(self) -> list[CopyText]:
        """All tiles, each once."""
        own = *self.early_copies, *self.late_copies
        return [*own, *(c for group in (*self.walk_copies, *self.sum_copies) for c in group)]

    @property
    def early_copies(self) -> list[CopyText]:
        """Tiles of rows that come first."""
        return [copy for copy in self.own_copies if not copy.late]

    @property
    def late_copies(self) -> list[CopyText]:
        """Those that come later, and are done with before the others."""
        return [copy for copy in self.own_copies if copy.late]

    @property
    def holds_late(self) -> bool:
        """Whether those are in registers."""
        return any(copy.held for copy in self.late_copies)

    @property
    def kinds(self) -> list[CopyText]:
        """One copy for each type of a tile."""
        found = {copy.kind: copy for copy in (*self.copies, *([self.out] if self.out else []))}
        return list(found.values())

    @property
    def maps(self) -> list[str]:
        """The parameters that say how tensors are copied, each once."""
        return list(dict.fromkeys(c.map for c in (*self.copies, *([self.out] if self.out else []))))

    @property
    def has_sums(self) -> bool:
        """Whether any tiles are copied that the first products of a tile don't read."""
        return any(self.sum_copies)

    def copy_of(self, tile: TileText) -> CopyText:
        """How a tile is copied."""
        return next(copy for copy in self.copies if copy.tile is tile)

    def factors(self, product: ProductText) -> list[tuple[CopyText, CopyText]]:
        """The tiles that are multiplied and summed."""
        return [(self.copy_of(own), self.copy_of(other)) for own, other in product.factors]

    # --------------------------------------------------------------------------------- the rows of a consumer

    @property
    def of_consumer(self) -> str:
        """Positions that a consumer owns."""
        return f"{GROUP_ROWS} / {self.length(GROUP_AXIS)}" if self.shared else f"{GROUP_ROWS}"

    @property
    def first_row(self) -> str:
        """How far from those of its block the rows of a consumer begin."""
        return "0" if self.divided else f"{self.of_consumer} * group"

    @property
    def before_next(self) -> str:
        """From a consumer's first position to its last."""
        return f"{self.of_consumer} - 1" if self.shared else f"{GROUP_ROWS - 1}"

    def row_buffer(self, ring: str, group: str | int) -> str:
        """The number of a buffer of rows, of those of a consumer."""
        of_group = f" * CONSUMERS + {group}" if group else " * CONSUMERS"
        return f"{ring}.stage(){'' if self.divided else of_group}"

    def row_pipe(self, group: str) -> str:
        """The barriers of the rows of a consumer."""
        return "RowPipe(ROW_PIPE_AT)" if self.divided else f"buffer<RowPipe>(ROW_PIPE_AT, {group})"

    @property
    def each_group(self) -> str:
        """A loop over those who have rows of their own."""
        return "" if self.divided else "for (int group = 0; group < CONSUMERS; ++group) "

    @property
    def row_readers(self) -> int:
        """Who frees the rows of a consumer: its leader, or each warp that reads them."""
        if self.divided:
            return 4 * (self.roles.consumers + self.roles.adders)
        return 4 * (1 + self.roles.adders) if self.levels else 1

    @property
    def hand_stages(self) -> str:
        """How many buffers there are of what is handed over."""
        return "HANDED" if self.divided else "STAGES"
