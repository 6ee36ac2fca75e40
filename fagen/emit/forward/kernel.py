"""What the template `schedule/forward_loop` reads of a kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fagen.emit.code import BLOCK, COLUMN, ROW, Statement, Variable
from fagen.emit.scope import Scope, axis_name, block_name, said
from fagen.emit.texts import (
    Phase,
    ScoreText,
    StateText,
    StoresText,
    StoreText,
    TileText,
    WalkText,
    rows_name,
)
from fagen.ir.graph import Axis
from fagen.plan.cost import tiles_of
from fagen.plan.plan import GROUP_AXIS, SharedTile
from fagen.plan.profile import axes_along
from fagen.plan.space import groups

LINE = 64
"""Elements of 16 bits in a line of shared memory."""


@dataclass(frozen=True)
class ForwardLoop:
    """What the template reads of a kernel."""

    scope: Scope
    walks: tuple[WalkText, ...]
    column: Sequence[Statement]
    own_tiles: tuple[TileText, ...]
    row_outputs: StoresText | None
    feature_outputs: tuple[StoresText, ...]
    finish: Sequence[Statement]
    constants: Sequence[tuple[str, str, str]]
    """(type, names and values, comment) of the kernel's constants, in order."""
    branches: bool
    """Whether tiles past the end are not copied; else zeros are, which needs no branch."""

    functions = True
    """Whether it has functions of its own."""

    # ------------------------------------------------------------------------------------ where a block works

    @property
    def grid_axes(self) -> tuple[Axis, ...]:
        """Axes of which a block has one position."""
        return self.scope.kernel.grid_axes

    @property
    def outer_axes(self) -> tuple[Axis, ...]:
        """Axes at each position of which the walk is made again."""
        return self.scope.kernel.stage.outer

    @property
    def outer_parameters(self) -> list[str]:
        """Their positions as a function takes them."""
        return [f"int {axis_name(axis)}" for axis in self.outer_axes]

    @property
    def this_block(self) -> str:
        """Where a block works, at these positions of the outer axes."""
        return f"this_block({', '.join(['p', *map(axis_name, self.outer_axes)])})"

    @property
    def first_block(self) -> str:
        """Where a block works, at the first position of each outer axis."""
        return f"this_block({', '.join(['p', *('0' for _ in self.outer_axes)])})"

    @property
    def row_axis(self) -> Axis | None:
        """The axis of the block's rows."""
        return self.scope.kernel.tile_axis

    @property
    def walk_axis(self) -> Axis:
        """The axis of columns."""
        assert self.scope.kernel.stage.walk is not None
        return self.scope.kernel.stage.walk

    @property
    def part_axis(self) -> Axis | None:
        """The axis along which blocks take the tiles of a walk in turn."""
        return self.scope.kernel.stage.parts

    @property
    def near_axes(self) -> tuple[Axis, ...]:
        """Axes of which some positions together have what the L2 cache is to hold: the first of the grid, up
        to the last that an operand of the walk has. Empty where that does not matter."""
        if not self.scope.kernel.near or self.even:
            return ()
        axes = axes_along(self.scope.kernel.stage)
        count = max((i + 1 for i, axis in enumerate(self.grid_axes) if axis in axes), default=0)
        return self.grid_axes[:count]

    @property
    def once_a_warp(self) -> bool:
        """Whether where a block works is kept once for all threads of a warp."""
        return self.scope.kernel.tiling == "fragments"

    @property
    def has_block(self) -> bool:
        """Whether anything is the same for a block and not for all."""
        return bool(self.grid_axes or self.row_axis or self.scope.fields(BLOCK))

    # --------------------------------------------------------------------------------------- rows and columns

    @property
    def row_name(self) -> str:
        """What a row's position is called."""
        return axis_name(self.row_axis) if self.row_axis is not None else ""

    @property
    def walk_name(self) -> str:
        """What a column's position is called."""
        return axis_name(self.walk_axis)

    @property
    def own(self) -> str:
        """Rows of a block."""
        return rows_name(self.scope.kernel)

    @property
    def positions(self) -> str:
        """Positions of the row axis that a block owns."""
        return block_name(self.row_axis) if self.row_axis is not None else self.own

    @property
    def walk(self) -> str:
        """Columns of a tile."""
        return block_name(self.walk_axis)

    @property
    def shared(self) -> bool:
        """Whether the rows of a position are heads of a group."""
        return self.scope.kernel.group > 1

    @property
    def idle(self) -> bool:
        """Whether the last rows of a block are no whole group."""
        kernel = self.scope.kernel
        return kernel.block_own % kernel.group > 0

    @property
    def one_row(self) -> bool:
        """Whether only the first of a block's rows is there: tensor cores take no fewer than sixteen."""
        return self.row_axis is None and self.own != "1"

    @property
    def even(self) -> bool:
        """Whether every tile of rows visits all columns."""
        return not any(walk.loop.ranges or walk.loop.skip for walk in self.walks)

    @property
    def guards_rows(self) -> bool:
        """Whether some rows of a block may not be there."""
        return self.row_axis is not None or self.one_row

    @property
    def rows_again(self) -> bool:
        """Whether where rows are is computed wherever a mask asks, as nothing else does."""
        return False

    @property
    def masks_rows(self) -> bool:
        """Whether a mask is of rows that are not there as well."""
        return False

    @property
    def by_sets(self) -> bool:
        """Whether warps leave out sets of their rows that have nothing to do in a tile."""
        return any(walk.by_sets for walk in self.walks)

    @property
    def groups(self) -> int:
        """Warps that share the rows of a tile on tensor cores, each with a part of its columns."""
        return groups(tiles_of(self.scope.kernel)) if self.scope.kernel.tiling == "fragments" else 1

    @property
    def column_read(self) -> str:
        """What is known of a thread's column ``c`` of a tile."""
        return "columns[c]"

    def length(self, axis: Axis) -> str:
        """The length of an axis in the text."""
        return self.scope.length(axis)

    def count(self, axes: Sequence[Axis], *others: str) -> str:
        """How many positions some axes have together, times ``others``."""
        return " * ".join([*others, *map(self.length, axes)])

    # -------------------------------------------------------------------------------------------------- tiles

    @property
    def own_shared(self) -> list[SharedTile]:
        """Tiles of rows in shared memory."""
        return [tile for tile in self.scope.kernel.shared if tile.name.startswith("own")]

    @property
    def rows_at_once(self) -> bool:
        """Whether where a warp's rows begin is computed once: addresses of permuted chunks are no sums.

        It takes a register. Beside rows of one line tiles are wide, and leave none where all elements may be
        masked or scored.
        """
        own = self.own_shared
        asked = not self.by_sets and any(walk.score or walk.loop.ranges for walk in self.walks)
        return all(tile.pitch == tile.width and (tile.width > LINE or not asked) for tile in own)

    @property
    def held_in_part(self) -> bool:
        """Whether registers have the first columns of rows, but not all."""
        kernel = self.scope.kernel
        return 0 < kernel.held < max((tile.width for tile in self.own_shared), default=0)

    def held_of(self, tile: TileText) -> str:
        """Of how many columns of a tile of rows registers have the fragments."""
        return str(self.scope.kernel.held) if self.held_in_part else tile.width

    def first_of(self, tile: TileText) -> str:
        """The position of a tile's first row; of rows of a group, its number in the block."""
        if tile.own and self.shared:
            return "0"
        return (
            f"block.{self.row_axis}_start"
            if tile.own and self.row_axis
            else ("0" if tile.own else f"{self.walk_axis}_start")
        )

    def length_of(self, tile: TileText) -> str:
        """How many rows a tile could have."""
        if tile.own and self.shared and tile.row_axis is not None:
            left = f"{self.length(tile.row_axis)} - block.{self.row_axis}_start"
            return f"minimum({self.positions}, {left}) * {self.length(GROUP_AXIS)}"
        return self.length(tile.row_axis) if tile.row_axis is not None else "1"

    # --------------------------------------------------------------------------------------- sums and results

    @property
    def products(self) -> bool:
        """Whether any walk has one."""
        return any(walk.products for walk in self.walks)

    @property
    def sum_rows(self) -> str:
        """Rows of which a thread has a share of weighted sums."""
        return "ROWS"

    @property
    def summed(self) -> str:
        """The rows of a thread whose weighted sums it has."""
        return "rows" if self.sum_rows == "ROWS" else "sums"

    @property
    def sums(self) -> list[str]:
        """Weighted sums that are no part of a row: what functions on results take beside the rows."""
        return []

    @property
    def all_outputs(self) -> list[StoreText]:
        """What is written after the last walk."""
        groups = [*([self.row_outputs] if self.row_outputs else []), *self.feature_outputs]
        return [store for group in groups for store in group.stores]

    @property
    def quads(self) -> bool:
        """Whether lanes exchange results before they store them."""
        return bool(self.feature_outputs) and all(outputs.eights for outputs in self.feature_outputs)

    def outputs_of(self, level: None) -> tuple[StoresText, ...]:
        """What is written by feature, of a level where they are made apart."""
        return self.feature_outputs

    def stores_of(self, level: None) -> list[StoreText]:
        """All that is written of it."""
        return self.all_outputs

    def number_of(self, level: None) -> str:
        """What is put behind the names of its functions."""
        return ""

    # --------------------------------------------------------------------------------------- what a step says

    def update_parameters(self, walk: WalkText) -> list[str]:
        """What the functions of a walk's tile may take."""
        return [
            "const Params& p",
            "const Block& block",
            "Row (&rows)[ROWS]",
            "const Row& sought",
            "const Columns& mine",
            "const Column (&columns)[COLUMNS]",
            f"int {walk.loop.start}",
            "int row0",
            "int lane",
            *(f"float (&{product.name})[ROWS][COLUMNS]" for product in walk.products),
            *(f"float (&{weights})[ROWS][COLUMNS]" for weights in walk.weights),
            *(f"const RandomTests<ROWS, COLUMNS>& {draw.name}" for draw in walk.draws),
        ]

    def text_of(self, phase: Phase, walk: WalkText, first: bool) -> str:
        """All that stands in the loop over columns of a phase."""
        texts = [statement.text for statement in phase.element]
        texts += [text for state in phase.states for text in (state.value, state.condition or "")]
        texts += phase.wholes
        tested = first and not walk.ends_values
        return "\n".join([*texts, walk.counts_in(phase.guard)] if tested else texts)

    @staticmethod
    def text_of_mask(walk: WalkText) -> str:
        """All that stands in the loop over columns of a mask."""
        tested = walk.beyond if walk.bounds[1] else walk.test
        return "\n".join([*(statement.text for statement in walk.mask), tested])

    @staticmethod
    def text_of_score(score: ScoreText) -> str:
        """All that stands in the loop over columns that makes values of products."""
        return "\n".join([*(statement.text for statement in score.element), score.value])

    @staticmethod
    def text_of_stores(stores: StoresText) -> str:
        """All that stands in the loop over the columns that are stored."""
        texts = [statement.text for statement in stores.statements]
        return "\n".join([*texts, *(text for store in stores.stores for text in (store.target, store.value))])

    @staticmethod
    def says(name: str, text: str) -> bool:
        """Whether ``text`` says ``name`` by itself, not as a member."""
        return re.search(rf"(?<![.\w]){name}\b", text) is not None

    def known_after(self, walk: WalkText, cut: int) -> list[Statement]:
        """Values of a row that the elements of phase ``cut`` or of a later one read, and earlier ones too."""
        later = walk.phases[cut + 1 :]
        texts = [self.text_of(phase, walk, first=False) for phase in walk.phases[cut:]]
        texts += [s.text for phase in later for s in phase.row]
        texts += [state.rescale or "" for phase in later for state in phase.states]
        known: list[Statement] = []
        for statement in reversed([s for phase in walk.phases[: cut + 1] for s in phase.row]):
            if statement.kind == "local" and self.says(statement.target, "\n".join(texts)):
                known.insert(0, statement)
                texts.append(statement.text)
        return known

    # ------------------------------------------------------------------------------------- maxima that change

    def kept(self, walk: WalkText) -> str:
        """Whether all maxima that may lag behind are what they were; empty where none may."""
        lagging = [state.name for phase in walk.phases for state in phase.states if state.slack is not None]
        return " && ".join(f"row.{name} == {name}_old" for name in lagging)

    def rescaled(self, walk: WalkText) -> list[StateText]:
        """Weighted sums that are multiplied when a maximum changes."""
        return [state for state in walk.weighted if state.rescale]

    def rescale_of(self, walk: WalkText, state: StateText) -> str:
        """The array that holds what a weighted sum is multiplied by."""
        return f"{next(other for other in walk.weighted if other.rescale == state.rescale).name}_rescale"

    def rescale_fields(self, walk: WalkText) -> list[str]:
        """All such arrays of a walk."""
        return list(dict.fromkeys(self.rescale_of(walk, state) for state in self.rescaled(walk)))

    def rescale_test(self, walk: WalkText, rows: Sequence[str] = ("0", "1")) -> str:
        """Whether one of them says anything."""
        return " || ".join(f"{name}[{r}] != 1.0f" for name in self.rescale_fields(walk) for r in rows)

    def rescales_at(self, walk: WalkText) -> int | None:
        """The phase before whose elements sums are multiplied together; None where they are not, or where
        elements are kept for it from the phase before."""
        phases = [n for n, phase in enumerate(walk.phases) if set(phase.states) & set(self.rescaled(walk))]
        simple = len(phases) == 1 and walk.masked and not walk.arrays
        if not simple or not walk.in_parts:
            return None
        of_sums = {state.rescale for state in self.rescaled(walk)}
        states = walk.phases[phases[0]].states
        return phases[0] if {state.rescale for state in states if state.rescale} <= of_sums else None

    # ------------------------------------------------------------------------------------ the loop over tiles

    def loop_first(self, walk: WalkText) -> str:
        """The first position of the first tile."""
        ranges, block, axis = walk.loop.ranges, self.walk, self.walk_axis
        if len(ranges) > 1:
            return self._next_of_ranges("0")
        begin = f"{axis}_begin / {block} * {block}" if ranges and ranges[0][0] != "0" else "0"
        if self.part_axis is None:
            return begin
        own = f"block.{self.part_axis} * {block}"
        return own if begin == "0" else f"{begin} + {own}"

    def loop_end(self, walk: WalkText) -> str:
        """Where the tiles of a walk end."""
        return f"{self.walk_axis}_end" if len(walk.loop.ranges) == 1 else walk.loop.length

    def loop_next(self, walk: WalkText) -> str:
        """The first position of the next tile."""
        if len(walk.loop.ranges) > 1:
            return self._next_of_ranges(f"{walk.loop.start} + {self.walk}")
        return f"{walk.loop.start} + {self.to_next}"

    def loop_step(self, walk: WalkText) -> str:
        """The step of a loop over the tiles."""
        start = walk.loop.start
        if len(walk.loop.ranges) > 1:
            return f"{start} = {self.loop_next(walk)}"
        return f"{start} += {self.to_next}"

    def loop_found(self, walk: WalkText, start: str) -> str:
        """The first tile from ``start`` on that is not skipped."""
        return f"find({start})" if walk.loop.skip else start

    def _next_of_ranges(self, start: str) -> str:
        """The first tile from ``start`` on that lies in one of several ranges."""
        if self.part_axis is None:
            return f"next_tile<{self.walk}>(begin, end, {start})"
        part, parts = f"block.{self.part_axis}", self.length(self.part_axis)
        return f"next_tile_of<{self.walk}>(begin, end, {start}, {part}, {parts})"

    @property
    def to_next(self) -> str:
        """Columns from a tile of the one range to the next."""
        return self.walk if self.part_axis is None else f"{self.length(self.part_axis)} * {self.walk}"

    def full(self, walk: WalkText) -> str:
        """Whether every element of a tile counts."""
        inside = f"{walk.loop.start} + {self.walk} <= {walk.loop.length}"
        return f"{walk.loop.full} && {inside}" if walk.loop.full else inside

    def says_last(self, walk: WalkText) -> bool:
        """Whether the last position of a tile is read."""
        loop = walk.loop
        texts = [*(s.text for s in loop.tile), loop.skip or "", loop.full or ""]
        return any(re.search(rf"\b{loop.last}\b", text) for text in texts)

    # ------------------------------------------------------------------------------------------------ structs

    def block_members(self, text: str) -> list[Variable]:
        """Fields of a block that ``text`` says."""
        own = [Variable("int32", axis_name(axis)) for axis in (*self.grid_axes, *self.outer_axes, "h")]
        if self.row_axis is not None:
            own += [Variable("int32", f"{self.row_axis}_{end}") for end in ("start", "last")]
        return said([*own, *self.scope.fields(BLOCK)], "block", text)

    def row_members(self, text: str) -> list[Variable]:
        """Fields of a row that ``text`` says; a state starts as what nothing was summed to."""
        own = []
        if self.row_axis is not None:
            own = [
                Variable("int32", name) for name in (self.row_name, *([GROUP_AXIS] if self.shared else []))
            ]
        own.append(Variable("bool", "inside"))
        states = [
            Variable(
                "float",
                f"{state.name}[{state.share}] = {{}}" if state.share else f"{state.name} = {state.initial}",
            )
            for walk in self.walks
            for state in walk.states
        ]
        lost = [
            Variable("float", f"{state.lost}[{state.share}] = {{}}")
            for walk in self.walks
            for state in walk.states
            if state.lost
        ]
        return said([*own, *self.scope.fields(ROW), *states, *lost], "row", text)

    def column_members(self, text: str) -> list[Variable]:
        """Fields of a column that ``text`` says."""
        return said(self.scope.fields(COLUMN), "column", text)
