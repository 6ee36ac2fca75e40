"""The records that `schedule/forward_loop` and `schedule/forward_roles` write a stage with products from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fagen.emit.code import BLOCK, COLUMN, ROW, Statement, Variable
from fagen.emit.loops import LoopText
from fagen.emit.params import Tensor
from fagen.emit.scope import Scope, axis_name, block_name, said
from fagen.ir.graph import Axis
from fagen.plan.cost import tiles_of
from fagen.plan.plan import GROUP_AXIS, KernelPlan, SharedTile
from fagen.plan.profile import axes_along
from fagen.plan.space import ON_TENSOR_CORES, groups

LINE = 64
"""Elements of 16 bits in a line of shared memory."""


@dataclass(frozen=True)
class TileText:
    """A tile in shared memory and the expression that fills it."""

    name: str
    rows: str
    row_axis: Axis | None
    """That its rows are along; None: the one row of the block."""
    row_name: str
    column_axis: Axis
    length: str
    """Of ``column_axis``."""
    width: str
    """Columns that are filled, those past ``length`` with 0."""
    address: str
    statements: Sequence[Statement]
    value: str
    chunked: bool
    """Only ``width`` columns are there at a time."""
    own: bool
    """It holds rows of the block, not of the walk."""
    by_rows: bool
    """Whether neighbours along the rows lie side by side in memory."""
    plain: str
    """What a copy reads, where the tile holds a tensor as it is (`plain_read`)."""
    storage: str
    """Of its elements in shared memory."""
    vectors: bool
    """Whether the tensor's rows are aligned to 16 bytes and hold what the tile holds."""
    of_sum: bool
    """Operand of a weighted sum, not of a product."""


@dataclass(frozen=True)
class ProductText:
    """A product: ``name[r][c] += own * walk`` over each pair of tiles."""

    name: str
    factors: tuple[tuple[TileText, TileText], ...]
    equation: str


@dataclass(frozen=True)
class PartText:
    """Where the part of a tile is added: ``target`` is the piece of a warp's first features, from which the
    next one is ``step`` away."""

    tensor: Tensor
    target: str
    step: str
    statements: Sequence[Statement]
    """What finding it needs."""
    rows: str
    """Of a thread."""
    share: str
    """Features of each, of a thread."""
    warps: str
    """That have features of the same rows."""
    idle: bool
    """Whether some warps have nothing of it."""
    ragged: str
    """How many features there are, if the last of a tile are none."""


@dataclass(frozen=True)
class StateText:
    """A state; ``value`` stands inside the loop over columns of its phase."""

    name: str
    op: str
    initial: str
    value: str
    rescale: str | None
    running: bool
    """Another state of this walk waits for it: threads of a row join it on every tile, else after the
    walk."""
    old: bool
    """Whether its value before this tile is kept."""
    share: str | None
    """Of a weighted sum: how many of its features a thread has."""
    vector: int
    operand: TileText | None
    weights: str
    """Of a weighted sum: the array of its values; equal values share one."""
    weight: str
    """Of a weighted sum on tensor cores: what a value is rounded to."""
    condition: str | None
    """Of a weighted sum: where it does not hold, the term is no part of it, whatever the guard says."""
    slack: str | None
    """Of a maximum: by how much it may be exceeded before it is replaced; None: not at all."""
    lost: str | None
    """Of a weighted sum: what rounding took away from it so far, and the next term makes up for."""
    equation: str
    part: PartText | None = None
    """Of a sum in memory, to which a tile adds its part."""


@dataclass(frozen=True)
class Phase:
    """A step of a walk's update: row values, the loop over columns, what is joined."""

    row: Sequence[Statement]
    element: Sequence[Statement]
    states: tuple[StateText, ...]
    guard: str | None
    """The condition of the walk, as this step says it."""
    wholes: tuple[str, ...] = ()
    """What weights are selected from, where it is kept: element by element."""


@dataclass(frozen=True)
class LevelText:
    """What is made of a tile at once: products, then what they are weighed to, then the sums of that."""

    number: int
    products: tuple[ProductText, ...]
    phase: Phase
    tests: bool
    """Whether it asks which elements count; weights of those that don't are 0, which may be all it needs."""
    multiplied: Mapping[str, str]
    """Its arrays of weights that lack a factor, and which rounded ones of an earlier level that is."""

    @property
    def sums(self) -> list[StateText]:
        """Sums of products."""
        return [state for state in self.phase.states if state.share]

    @property
    def weights(self) -> list[str]:
        """The arrays of weights that it fills, each once."""
        return list(dict.fromkeys(state.weights for state in self.sums))


@dataclass(frozen=True)
class ScoreText:
    """``product[r][c] = value``: what is made of a product before it is masked and weighed."""

    product: str
    value: str
    equation: str
    element: Sequence[Statement]
    late: Sequence[Statement]
    """Row values that are computed beside it."""
    early: Sequence[Statement]
    """Row values that are computed before the walk."""


@dataclass(frozen=True)
class LaggingText:
    """How a tile is weighed from a maximum that stays what it is, as long as it is not exceeded by too much.

    The sum of positive weights shows whether it is: only then it is looked at.
    """

    top: StateText
    looked: Phase
    """How the maximum is made."""
    factors: Mapping[str, str]
    """By what each sum is multiplied then."""
    phase: Phase
    """What is weighed."""
    shown_by: str
    """The state whose sum shows it."""

    @property
    def sums(self) -> list[StateText]:
        """Sums of rows."""
        return [state for state in self.phase.states if not state.share]

    @property
    def weights(self) -> StateText:
        """A sum that is weighted, as all are by the same weights."""
        return next(state for state in self.phase.states if state.share)


@dataclass(frozen=True)
class StoreText:
    """``target = value``: an output written by each element of a tile, each feature of a row, or each row."""

    target: str
    number: str
    equation: str
    tensor: Tensor
    adds: bool = False
    """Whether ``number`` is added to it, as others are at the same time."""
    diagonal: bool = False
    """Whether all elements of a diagonal of a tile are added to the same: then they are added up first."""
    statements: Sequence[Statement] = ()
    """What finding ``target`` then needs."""

    @property
    def terms(self) -> str:
        """An array of what is added."""
        return f"{self.tensor.name}_terms"

    @property
    def place_text(self) -> str:
        """All that says where that is."""
        return "\n".join([*(statement.text for statement in self.statements), self.target])

    @property
    def pair(self) -> str:
        """An array of two neighbours."""
        return f"{self.tensor.name}_pair[2]"

    @property
    def eight(self) -> str:
        """An array of eight of them."""
        return f"{self.tensor.name}_eight[8]"

    @property
    def value(self) -> str:
        """The number as it is stored."""
        return f"from_float<{self.tensor.storage}>({self.number})"

    @property
    def statement(self) -> str:
        """What stores it."""
        return (
            f"atomic_add(&{self.target}, {self.number});" if self.adds else f"{self.target} = {self.value};"
        )


@dataclass(frozen=True)
class StoresText:
    """Outputs written in one loop, along ``axis`` (None: once a row)."""

    axis: Axis | None
    length: str
    share: str
    vector: int
    statements: Sequence[Statement]
    stores: tuple[StoreText, ...]
    pairs: bool = False
    """Whether two neighbours are always stored together."""
    eights: bool = False
    """Whether four lanes may exchange what they have, and each then store eight neighbours."""

    @property
    def says_position(self) -> bool:
        """Whether values depend on the position along ``axis``."""
        texts = [*(s.text for s in self.statements), *(store.number for store in self.stores)]
        return any(re.search(rf"\b{self.name}\b", text) for text in texts)

    @property
    def name(self) -> str:
        """What a position along ``axis`` is called."""
        return axis_name(self.axis) if self.axis is not None else ""


@dataclass(frozen=True)
class DrawText:
    """Whether random bits pass a test, known for a thread's elements of a tile before these are weighed."""

    name: str
    text: str
    """How that is found out."""


@dataclass(frozen=True)
class WalkText:
    """One pass along the walk axis."""

    number: str
    """What is put behind its functions' names where there are several."""
    products: tuple[ProductText, ...]
    phases: tuple[Phase, ...]
    arrays: Sequence[Variable]
    """Values of an element kept from one phase for a later one."""
    kept: Sequence[Statement]
    """Values that serve several columns, declared before the loops over them."""
    inside: str
    """Whether a column is one of the walk's axis."""
    guard: str | None
    guard_comment: str
    masked: str | None
    """What is -inf at an element that does not count, and then leaves every state as it is; None where each
    state is asked."""
    score: ScoreText | None
    """What is made of products first; None: nothing."""
    apart: bool
    """Whether a function of its own masks the products of a tile before it is weighed."""
    mask: Sequence[Statement]
    """What that function computes of each element."""
    bounds: tuple[str, str]
    """Between which columns of a row those lie that count; "" where nothing says it."""
    beyond: str
    """What the guard says of an element beyond that."""
    of_mask: Sequence[Statement]
    """Row values that its mask alone reads, computed there."""
    places: Sequence[Statement]
    """Numbers of a row that are searched for once the loop is known."""
    of_places: Sequence[Statement]
    """Row values that this search reads."""
    of_columns: Sequence[Statement]
    """Row values that say which columns of a row count, where each lane computes that of one row."""
    by_sets: bool
    """Whether a warp leaves out sets of its rows that have nothing to do in a tile."""
    told: bool
    """Whether its mask is told by that lane which columns of a row count; else it computes them again."""
    sought: bool
    """Whether of the lanes that share rows each finds those of one row, which the others are told."""
    together: bool
    """Whether partial tiles have no loop of their own: a step is long, or rows begin as well as end."""
    in_parts: bool
    """Whether what is summed is rescaled in a part of its own, before a tile is weighed."""
    row: Sequence[Statement]
    """Row values that this pass needs, computed before it."""
    draws: Sequence[DrawText]
    """What says of all elements of a tile whether their random bits pass a test."""
    lagging: LaggingText | None
    stores: StoresText | None
    tiles: tuple[TileText, ...]
    """Those filled as a whole for each tile of the walk."""
    views: tuple[TileText, ...]
    """All tiles of this walk."""
    weights_at: str
    """Where a tile of weights lies in shared memory."""
    overwrites: bool
    """Whether tiles of its products lie where those of the sums of the walk before lay."""
    loop: LoopText

    @property
    def mode(self) -> str:
        """When elements are tested: ``always``, as stored ones are, or ``both``: in partial tiles alone."""
        return "always" if self.loop.full is None or not self.states else "both"

    @property
    def one_loop(self) -> bool:
        """Whether one loop visits full and partial tiles, and asks which it is."""
        return self.together and self.mode == "both"

    def mode_of(self, state: StateText) -> str:
        """When the terms of a weighted sum are tested."""
        return "always" if state.condition is not None else self.mode

    @property
    def ends_values(self) -> bool:
        """Whether values of elements, not products, are masked from the end of their row on."""
        return self.masked is not None and not self.apart and bool(self.bounds[1])

    @property
    def counts(self) -> str:
        """The condition under which an element counts."""
        return self.counts_in(self.guard)

    def counts_in(self, guard: str | None) -> str:
        """The same, as a step says the condition of the walk."""
        test = self._test_in(guard)
        if self.mode == "always":
            return test
        return f"!MASKED || {test}" if guard is None else f"!MASKED || ({test})"

    @property
    def test(self) -> str:
        """The same, whatever the tile."""
        return self._test_in(self.guard)

    def _test_in(self, guard: str | None) -> str:
        return self.inside if guard is None else f"{self.inside} && {guard}"

    @property
    def product_tiles(self) -> list[TileText]:
        """Tiles of the walk that products read."""
        return [tile for tile in self.tiles if not tile.of_sum]

    @property
    def sum_tiles(self) -> list[TileText]:
        """Tiles of the walk that weighted sums read."""
        return [tile for tile in self.tiles if tile.of_sum]

    def weights_before(self, state: StateText) -> list[str]:
        """The arrays of weights that states before ``state`` fill."""
        return [other.weights for other in self.states[: self.states.index(state)] if other.share]

    def row_of(self, state: StateText) -> str | None:
        """The array of a row whose elements are the values of a state, each of which counts.

        That is what weighs another state, or what is known of each element anyway; None if there is neither.
        """
        if self.masked is None or state.share:
            return None
        for other in self.weighted:
            if other.value == state.value and other in self.states_beside(state):
                return f"{other.weights}[r]"
        return state.value.removesuffix("[c]") if re.fullmatch(r"[\w\[\]]+\[c\]", state.value) else None

    def states_beside(self, state: StateText) -> tuple[StateText, ...]:
        """The states that are updated with ``state``."""
        return next(phase.states for phase in self.phases if state in phase.states)

    @property
    def loose(self) -> list[StateText]:
        """States of which each thread of a row has a part until the end."""
        return [state for state in self.states if not state.running and not state.share]

    @property
    def states(self) -> list[StateText]:
        """All states, in the order in which they are updated."""
        return [state for phase in self.phases for state in phase.states]

    @property
    def weighted(self) -> list[StateText]:
        """States of rows with features."""
        return [state for state in self.states if state.share and state.part is None]

    @property
    def weights(self) -> list[str]:
        """The arrays of weights, each once."""
        return list(dict.fromkeys(state.weights for state in self.states if state.share))

    @property
    def parts(self) -> list[StateText]:
        """Sums in memory, to which a tile adds its part."""
        return [state for state in self.states if state.part is not None]

    @property
    def passed(self) -> list[str]:
        """The arrays of weights that those sum."""
        return list(dict.fromkeys(state.weights for state in self.parts))


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
    def near_axes(self) -> tuple[Axis, ...]:
        """Axes of which some positions together have what the L2 cache is to hold: the first of the grid, up
        to the last that an operand of the walk has. Empty where that does not matter."""
        if not self.scope.kernel.near or self.even:
            return ()
        axes = axes_along(self.scope.kernel.stage)
        count = max((i + 1 for i, axis in enumerate(self.grid_axes) if axis in axes), default=0)
        return self.grid_axes[:count]

    @property
    def guards_rows(self) -> bool:
        """Whether some rows of a block may not be there."""
        return self.row_axis is not None or self.one_row

    @property
    def rows_again(self) -> bool:
        """Whether where rows are is computed wherever a mask asks, as nothing else does."""
        return False

    @property
    def once_a_warp(self) -> bool:
        """Whether where a block works is kept once for all threads of a warp."""
        return self.scope.kernel.tiling == "fragments"

    @property
    def walk(self) -> str:
        """Columns of a tile."""
        return block_name(self.walk_axis)

    @property
    def has_block(self) -> bool:
        """Whether anything is the same for a block and not for all."""
        return bool(self.grid_axes or self.row_axis or self.scope.fields(BLOCK))

    @property
    def masks_rows(self) -> bool:
        """Whether a mask is of rows that are not there as well."""
        return False

    @property
    def column_read(self) -> str:
        """What is known of a thread's column ``c`` of a tile."""
        return "columns[c]"

    @property
    def products(self) -> bool:
        """Whether any walk has one."""
        return any(walk.products for walk in self.walks)

    @property
    def by_sets(self) -> bool:
        """Whether warps leave out sets of their rows that have nothing to do in a tile."""
        return any(walk.by_sets for walk in self.walks)

    @property
    def groups(self) -> int:
        """Warps that share the rows of a tile on tensor cores, each with a part of its columns."""
        return groups(tiles_of(self.scope.kernel)) if self.scope.kernel.tiling == "fragments" else 1

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
    def held_in_part(self) -> bool:
        """Whether registers have the first columns of rows, but not all."""
        kernel = self.scope.kernel
        return 0 < kernel.held < max((tile.width for tile in self.own_shared), default=0)

    def held_of(self, tile: TileText) -> str:
        """Of how many columns of a tile of rows registers have the fragments."""
        return str(self.scope.kernel.held) if self.held_in_part else tile.width

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

    @property
    def all_outputs(self) -> list[StoreText]:
        """What is written after the last walk."""
        groups = [*([self.row_outputs] if self.row_outputs else []), *self.feature_outputs]
        return [store for group in groups for store in group.stores]

    def length(self, axis: Axis) -> str:
        """The length of an axis in the text."""
        return self.scope.length(axis)

    def count(self, axes: Sequence[Axis], *others: str) -> str:
        """How many positions some axes have together, times ``others``."""
        return " * ".join([*others, *map(self.length, axes)])

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

    @property
    def part_axis(self) -> Axis | None:
        """The axis along which blocks take the tiles of a walk in turn."""
        return self.scope.kernel.stage.parts

    def _next_of_ranges(self, start: str) -> str:
        """The first tile from ``start`` on that lies in one of several ranges."""
        if self.part_axis is None:
            return f"next_tile<{self.walk}>(begin, end, {start})"
        part, parts = f"block.{self.part_axis}", self.length(self.part_axis)
        return f"next_tile_of<{self.walk}>(begin, end, {start}, {part}, {parts})"

    def loop_end(self, walk: WalkText) -> str:
        """Where the tiles of a walk end."""
        return f"{self.walk_axis}_end" if len(walk.loop.ranges) == 1 else walk.loop.length

    def loop_next(self, walk: WalkText) -> str:
        """The first position of the next tile."""
        if len(walk.loop.ranges) > 1:
            return self._next_of_ranges(f"{walk.loop.start} + {self.walk}")
        return f"{walk.loop.start} + {self.to_next}"

    @property
    def to_next(self) -> str:
        """Columns from a tile of the one range to the next."""
        return self.walk if self.part_axis is None else f"{self.length(self.part_axis)} * {self.walk}"

    def loop_step(self, walk: WalkText) -> str:
        """The step of a loop over the tiles."""
        start = walk.loop.start
        if len(walk.loop.ranges) > 1:
            return f"{start} = {self.loop_next(walk)}"
        return f"{start} += {self.to_next}"

    def loop_found(self, walk: WalkText, start: str) -> str:
        """The first tile from ``start`` on that is not skipped."""
        return f"find({start})" if walk.loop.skip else start

    def full(self, walk: WalkText) -> str:
        """Whether every element of a tile counts."""
        inside = f"{walk.loop.start} + {self.walk} <= {walk.loop.length}"
        return f"{walk.loop.full} && {inside}" if walk.loop.full else inside

    def says_last(self, walk: WalkText) -> bool:
        """Whether the last position of a tile is read."""
        loop = walk.loop
        texts = [*(s.text for s in loop.tile), loop.skip or "", loop.full or ""]
        return any(re.search(rf"\b{loop.last}\b", text) for text in texts)

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


def rows_name(kernel: KernelPlan) -> str:
    """The constant that says how many rows a block has."""
    if kernel.tile_axis is not None and kernel.group == 1:
        return block_name(kernel.tile_axis)
    return "BLOCK_ROWS" if kernel.group > 1 or kernel.tiling in ON_TENSOR_CORES else "1"
