"""What is measured: a cell is one attention with its lengths, a grid is a list of cells, a name some grids.

Work is counted by these formulas, the same for everybody, for P the allowed pairs of a query and a key of all
batches and heads (causal: half of all pairs):

    forward   2 P (d + dv) flops; each element of q, k, v and of the output crosses device memory once
    backward  2.5 times the flops; q, k, v, the output, its gradient and fp32 statistics of the rows are read
              once, the three gradients are written once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from fagen.bench.variants import VARIANTS
from fagen.errors import UsageError

Direction: TypeAlias = Literal["forward", "backward"]

ITEM_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
TOKENS = 16_384
"""Of all sequences together, where no batch is given: longer sequences are fewer."""
_WIDTH = 2048
"""Of all heads together, where no number of heads is given."""
_BACKWARD_FLOPS = 2.5


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One attention: a variant, lengths and dtype, and which direction of it is timed."""

    variant: str
    head_dim: int
    v_head_dim: int
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dtype: str = "bf16"
    direction: Direction = "forward"

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that the mask allows, over batch and heads."""
        return self.q_heads * VARIANTS[self.variant].pairs(self.batch, self.q_len, self.kv_len)

    @property
    def flops(self) -> float:
        """Operations of one call."""
        forward = 2 * self.pairs * (self.head_dim + self.v_head_dim)
        return forward if self.direction == "forward" else _BACKWARD_FLOPS * forward

    @property
    def moved_bytes(self) -> int:
        """Bytes that one call cannot but move through device memory."""
        rows, columns = self.batch * self.q_heads * self.q_len, self.batch * self.kv_heads * self.kv_len
        q, o = rows * self.head_dim, rows * self.v_head_dim
        k, v = columns * self.head_dim, columns * self.v_head_dim
        item = ITEM_BYTES[self.dtype]
        if self.direction == "forward":
            return item * (q + k + v + o)
        return item * (2 * (q + k + v) + 2 * o) + 4 * rows

    @property
    def dims(self) -> str:
        """Head dims as a table has them: ``128``, or ``192/128``."""
        same = self.head_dim == self.v_head_dim
        return f"{self.head_dim}" if same else f"{self.head_dim}/{self.v_head_dim}"

    @property
    def length(self) -> str:
        """Lengths as a table has them: ``8,192``, or ``1 x 8,192``."""
        same = self.q_len == self.kv_len
        return f"{self.kv_len:,}" if same else f"{self.q_len:,} x {self.kv_len:,}"

    @property
    def label(self) -> str:
        """The cell in a few words."""
        return f"{self.variant} d={self.dims} S={self.length}"


@dataclass(frozen=True)
class Grid:
    """Every head dim with every variant at every length.

    ``dims`` are pairs of head dims, of q and k and of v. ``batch`` and ``q_heads`` of None follow from the
    length (`TOKENS` in all) and from the head dim; ``kv_heads`` of None are as many as query heads.
    """

    dims: tuple[tuple[int, int], ...]
    variants: tuple[str, ...]
    lengths: tuple[int, ...]
    batch: int | None = None
    q_heads: int | None = None
    kv_heads: int | None = None
    q_len: int | None = None
    """Of queries, where there are not as many as keys."""

    def cells(self, dtype: str = "bf16", direction: Direction = "forward") -> tuple[Cell, ...]:
        """Its cells, in the order of a table."""
        return tuple(
            self._cell(dims, variant, length, dtype, direction)
            for dims in self.dims
            for variant in self.variants
            for length in self.lengths
        )

    def _cell(
        self, dims: tuple[int, int], variant: str, length: int, dtype: str, direction: Direction
    ) -> Cell:
        q_heads = self.q_heads or max(round(_WIDTH / dims[0]), 1)
        return Cell(
            variant=variant,
            head_dim=dims[0],
            v_head_dim=dims[1],
            batch=self.batch or max(TOKENS // length, 1),
            q_heads=q_heads,
            kv_heads=self.kv_heads or q_heads,
            q_len=self.q_len or length,
            kv_len=length,
            dtype=dtype,
            direction=direction,
        )


def _square(*dims: int) -> tuple[tuple[int, int], ...]:
    return tuple((dim, dim) for dim in dims)


_BOTH = ("full", "causal")


def _decode(batch: int, *lengths: int) -> Grid:
    return Grid(_square(128), ("full",), lengths, batch=batch, q_heads=32, kv_heads=8, q_len=1)


GRIDS: Mapping[str, tuple[Grid, ...]] = {
    "short": (Grid(_square(128), _BOTH, (1024, 8192)),),
    "lengths": (Grid(_square(64, 128, 256), _BOTH, (512, 1024, 2048, 4096, 8192, 16384)),),
    "dims": (Grid((*_square(72, 80, 96, 112, 160, 192), (192, 128)), _BOTH, (2048, 8192)),),
    "variants": (Grid(_square(128), tuple(VARIANTS), (8192,), batch=2, q_heads=16),),
    "decode": (
        _decode(1, 1024, 4096, 16_384, 131_072),
        _decode(4, 1024, 4096, 16_384, 131_072),
        _decode(16, 1024, 4096, 32_768, 131_072),
        _decode(64, 1024, 4096, 16_384),
    ),
}
"""A few cells in a minute; the usual head dims; others; masks and scores; one query for many keys."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What is asked for in place of a grid's own."""

    dims: Sequence[tuple[int, int]] = ()
    variants: Sequence[str] = ()
    lengths: Sequence[int] = ()
    batch: int | None = None
    q_heads: int | None = None
    kv_heads: int | None = None
    dtype: str = "bf16"
    direction: str = "forward"


def cells_of(name: str, given: Given) -> tuple[Cell, ...]:
    """The cells of a named grid. Raises UsageError for what is unknown."""
    if name not in GRIDS:
        raise UsageError(f"--grid is {name!r}", works=f"it is {', '.join(GRIDS)}")
    return tuple(dict.fromkeys(cell for grid in GRIDS[name] for cell in replaced(grid, given)))


def replaced(grid: Grid, given: Given) -> tuple[Cell, ...]:
    """The cells of a grid, what is given in place of its own. Raises UsageError for what is unknown."""
    if given.dtype not in ITEM_BYTES:
        raise UsageError(f"--dtype is {given.dtype!r}", works=f"it is {', '.join(ITEM_BYTES)}")
    if given.direction not in ("forward", "backward"):
        raise UsageError(f"--direction is {given.direction!r}", works="it is forward or backward")
    for variant in given.variants:
        if variant not in VARIANTS:
            raise UsageError(f"--variant: {variant!r} is not known", works=f"there are {', '.join(VARIANTS)}")
    grid = replace(
        grid,
        dims=tuple(given.dims) or grid.dims,
        variants=tuple(given.variants) or grid.variants,
        lengths=tuple(given.lengths) or grid.lengths,
        batch=given.batch or grid.batch,
        q_heads=given.q_heads or grid.q_heads,
        kv_heads=given.kv_heads or grid.kv_heads,
    )
    cells = grid.cells(given.dtype, "forward" if given.direction == "forward" else "backward")
    for cell in cells:
        if cell.q_len != cell.kv_len and not VARIANTS[cell.variant].is_plain:
            raise UsageError(
                f"{cell.variant} is asked for with {cell.q_len:,} queries and {cell.kv_len:,} keys",
                works="the variant is full there: peers differ in where other masks begin",
            )
        if cell.q_heads % cell.kv_heads:
            raise UsageError(
                f"--q-heads is {cell.q_heads} and --kv-heads is {cell.kv_heads}",
                works="the first has to be a multiple of the second",
            )
    return cells
