"""The records that `schedule/forward_loop` and `schedule/forward_roles` write a stage with products from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fagen.emit.code import Statement, Variable
from fagen.emit.loops import LoopText
from fagen.emit.params import Tensor
from fagen.emit.scope import axis_name, block_name
from fagen.ir.graph import Axis
from fagen.plan.plan import KernelPlan
from fagen.plan.space import ON_TENSOR_CORES


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
    lost: str | None
    """Of a weighted sum: what rounding took away from it so far, and the next term makes up for."""
    equation: str
    slack: str | None = None
    """Of a maximum: the factor of what it may be exceeded by before it is replaced; None: it may not be."""
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


def rows_name(kernel: KernelPlan) -> str:
    """The constant that says how many rows a block has."""
    if kernel.tile_axis is not None and kernel.group == 1:
        return block_name(kernel.tile_axis)
    return "BLOCK_ROWS" if kernel.group > 1 or kernel.tiling in ON_TENSOR_CORES else "1"
