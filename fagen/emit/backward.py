"""A stage with products, as `schedule/backward_loop` writes it: what is read along the walk is copied once.

The steps on a tile are those of `forward`. What is added: the tiles of a walk serve products and sums, warps
that share rows, or sum by columns what was made by rows, pass weights on, and a tile's part of a sum over the
block's rows is added to memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from fagen.derive.intervals import OWN_FIRST, OWN_LAST
from fagen.derive.levels import by_products
from fagen.derive.walk import Partial, State, Walk
from fagen.emit.code import COLUMN
from fagen.emit.forward.kernel import ForwardLoop
from fagen.emit.forward.walks import LoopBuilder
from fagen.emit.paper import added
from fagen.emit.scope import Scope, axis_name
from fagen.emit.texts import LevelText, PartText, TileText, WalkText
from fagen.ir import graph as ir
from fagen.ir.graph import Axis, Index, Node
from fagen.plan.plan import GROUP_AXIS
from fagen.plan.profile import own_tiles, walk_tiles
from fagen.plan.space import BARRIER_WORDS, CHUNK, part_shape

_WORD = ("float", "int32")
"""Types of four bytes."""
USUAL_COLUMNS = 64
"""Of a tile; the step of a larger one is so long that two of them take more time than a test in one."""


@dataclass(frozen=True)
class BackwardLoop(ForwardLoop):
    """What the template reads of a kernel."""

    passed: tuple[tuple[str, str], ...]
    """Of each array of weights that passes through shared memory: its name, and the byte where it lies."""
    sum_groups: int
    """Warps that share the rows of weighted sums, each with some of the features."""
    barriers_at: str
    """Where the barriers of the block lie."""
    staged: str
    """Where what is read of columns lies, a tile ahead; empty where each thread reads it itself."""
    levels: tuple[LevelText, ...]
    """What is made of a tile one after another; empty where all its products come first."""

    @property
    def even(self) -> bool:
        """Whether tiles of rows follow each other from block to block: no later one has more to do."""
        (ranges,) = self.scope.kernel.ranges
        own = (OWN_FIRST, OWN_LAST)
        grows = ranges is not None and any(
            ir.depends(each.end, own) and not ir.depends(each.begin, own) for each in ranges.ranges
        )
        return not grows

    @property
    def once_a_warp(self) -> bool:
        """Nowhere: registers are left."""
        return False

    def full(self, walk: WalkText) -> str:
        """Whether every element of a tile counts; of a sum over rows, one past the end is no part."""
        if not walk.parts or self.row_axis is None:
            return super().full(walk)
        last = f"block.{self.row_axis}_start + {self.own}"
        return f"{super().full(walk)} && {last} <= {self.length(self.row_axis)}"

    @property
    def column_read(self) -> str:
        """What is known of a thread's column ``c`` of a tile."""
        return super().column_read if self.held_columns else "known_column(turn, lane, c)"

    @property
    def sum_rows(self) -> str:
        """Rows of which a thread has a share of weighted sums."""
        return "ROWS" if self.sum_groups == self.groups else "SUM_ROWS"

    @property
    def rows_at_once(self) -> bool:
        """Always: products and sums read the same tiles."""
        return True

    @property
    def walk_text(self) -> WalkText:
        """Its one walk."""
        return self.walks[0]

    @property
    def steps(self) -> Sequence[LevelText | WalkText]:
        """The levels of its walk, or all of it at once."""
        return self.levels or self.walks

    def mode_of(self, step: LevelText | WalkText) -> str:
        """When a step asks which elements count."""
        return self.walk_text.mode if not isinstance(step, LevelText) or step.tests else "never"

    @property
    def rows_again(self) -> bool:
        """Whether where rows are is computed wherever a mask asks, as nothing else does."""
        walk = self.walk_text
        if not self.levels or walk.mode != "both" or (walk.row and not self.outer_axes):
            return False
        texts = [
            *(s.text for s in walk.row),
            *(self.text_of(step.phase, walk, False) for step in self.levels),
        ]
        places = rf"\brow\.(inside|{self.row_name}|{GROUP_AXIS})\b"
        return not any(re.search(places, text) for text in texts)

    @property
    def early(self) -> list[str]:
        """Weights that are summed, from registers, beside what the next level makes of its products."""
        if self.groups > 1:
            return []
        return [weights for level in self.levels[:-1] for weights in level.weights]

    @property
    def late(self) -> tuple[list[str], list[str]]:
        """Weights that are summed when all are there: before a tile's parts of other sums, and after."""
        late = [weights for weights in self.walk_text.weights if weights not in self.early]
        after = late[-1:] if self.groups > 1 else []
        return [weights for weights in late if weights not in after], after

    @property
    def held_columns(self) -> bool:
        """Whether a thread keeps what it has read of its columns: a level reads what it needs by itself."""
        return bool(self.column) and not (self.staged and self.levels)

    def update_parameters(self, walk: WalkText) -> list[str]:
        """As `ForwardLoop.update_parameters`, a tile's buffer, and what a level keeps for a later one."""
        arrays = walk.arrays if self.levels else ()
        kept = [f"{array.ctype} (&{array.name})[ROWS][COLUMNS]" for array in arrays]
        return [*super().update_parameters(walk), "int turn", *kept]

    @property
    def barriers(self) -> list[tuple[str, int]]:
        """The name of each barrier, and the byte where it lies from the first on."""
        names = "tile_there", "tile_read", *(f"{weights}_there" for weights, _ in self.passed)
        return [(name, 4 * BARRIER_WORDS * i) for i, name in enumerate(names)]

    def passes(self, weights: str) -> bool:
        """Whether an array of weights passes through shared memory."""
        return any(weights == name for name, _ in self.passed)


def backward_loop(scope: Scope) -> BackwardLoop:
    """The steps of ``scope.kernel``."""
    return _Builder(scope).backward()


class _Builder(LoopBuilder):
    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.parts: list[str] = []
        """Constants of each partial sum."""
        (walk,) = self.stage.walks
        sums = self.sums_of(walk)
        if not any(isinstance(node, ir.Random) for node in ir.walk([state.value for state in sums])):
            self.make_by_levels(by_products(walk.products, sums))  # random bits wait for all, or come by rows

    def backward(self) -> BackwardLoop:
        loop = self.build()
        (walk,) = loop.walks
        if walk.parts:
            walk = replace(walk, inside=f"row.inside && {walk.inside}")
        passed = walk.weights if loop.groups > 1 else walk.passed
        named = tuple(
            (name, self._address(f"{name}", self.shared[f"weights{i}"].address))
            for i, name in enumerate(passed)
        )
        columns = [variable.ctype for variable in self.scope.fields(COLUMN)]
        room = self.shared["columns"].rows // 2 if "columns" in self.shared else 0
        staged = 0 < len(columns) <= room and all(ctype in _WORD for ctype in columns)
        at = self._address("COLUMNS", self.shared["columns"].address) if staged else ""
        barriers = self._address("BARRIERS", self.shared["barriers"].address)
        sum_groups = self.sum_groups() if loop.groups > 1 else 1
        members = {each.name: getattr(loop, each.name) for each in fields(ForwardLoop)}
        return BackwardLoop(
            **{**members, "walks": (walk,), "constants": self.constants()},
            passed=named,
            sum_groups=sum_groups,
            barriers_at=barriers,
            staged=at,
            levels=self.level_texts(walk),
        )

    @property
    def many_features(self) -> int:
        return CHUNK

    def one_loop(self, begins: bool) -> bool:
        return begins or self.kernel.block_walk > USUAL_COLUMNS

    def in_parts(self, walk: Walk) -> bool:
        return False

    def sum_shape(self, width: int) -> tuple[int, int]:
        """(rows, features) of weighted sums that a warp has, where weights pass through memory."""
        return part_shape(self.kernel.block_own, width, self.kernel.threads // 32)

    def sum_groups(self) -> int:
        """Warps that share the rows of weighted sums."""
        (walk,) = self.stage.walks
        _, record = self.sum_tile(0, walk, walk.states[0])
        rows, _ = self.sum_shape(self.shared[record].width)
        return self.kernel.threads // 32 * rows // self.kernel.block_own

    def share(self, axis: Axis, width: int) -> tuple[str, int]:
        """The name of a thread's share of features along ``axis``, of which two lie side by side."""
        name, vector = super().share(axis, width)
        if self.kernel.columns > 4:
            self.shares[axis] = name, self.sum_shape(width)[1] // 4, vector
        return name, vector

    def constants(self) -> list[tuple[str, str, str]]:
        """As `LoopBuilder.constants`, and how sums are shared out where that is not as their values are."""
        found = super().constants()
        if self.kernel.columns > 4 and self.sum_groups() != self.kernel.columns // 4:
            rows = self.kernel.block_own // (self.kernel.threads // 32 // self.sum_groups()) // 8
            text = f"SUM_ROWS = {rows}, SUM_GROUPS = {self.sum_groups()}"
            found.insert(3, ("int", text, "rows of a thread, and warps that share them, of weighted sums"))
        said = "of a tile's part, each thread's share, and warps that have parts of the same rows"
        return [*found[:-1], *(("int", text, said) for text in dict.fromkeys(self.parts)), *found[-1:]]

    def sums_of(self, walk: Walk) -> tuple[State, ...]:  # type: ignore[override]
        if self.levels_made:
            return tuple(state for level in self.levels_made for state in level.states)
        return (*walk.states, *map(_as_state, walk.partials))

    def own_tile(self, node: Node, over: Axis) -> TileText:
        number = own_tiles(self.stage.walks[0]).index((node, over))
        return self.tile("own", f"own{number}", node, over)

    def walk_tile(self, number: int, walk: Walk, node: Node, over: Axis) -> TileText:
        return self.tile("walk0", f"walk{walk_tiles(walk).index((node, over))}", node, over)

    def sum_tile(self, number: int, walk: Walk, state: State) -> tuple[TileText, str]:
        assert state.operand is not None
        place = state.operand, state.features[0]
        if self._partial(state) is not None:
            return self.own_tile(*place), f"own{own_tiles(walk).index(place)}"
        return self.walk_tile(number, walk, *place), f"walk{walk_tiles(walk).index(place)}"

    def share_of(self, state: State, axis: Axis, width: int) -> tuple[str, int]:
        return ("PART_FEATURES", 2) if self._partial(state) is not None else self.share(axis, width)

    def part(self, state: State) -> PartText | None:
        partial = self._partial(state)
        if partial is None:
            return None
        (axis,) = partial.features
        codes, scope = self.scope.codes, self.scope
        lower = scope.lowering(
            {
                Index(self.walk_axis): codes.leaf(axis_name(self.walk_axis), "int32", COLUMN),
                Index(axis): codes.leaf("feature", "int32", COLUMN),
            }
        )
        tensor = scope.parameters.buffer(partial.name)
        row = scope.store(lower, tensor)
        split = scope.split([(row, COLUMN)])
        width = self.shared[f"own{own_tiles(self.stage.walks[0]).index((partial.operand, axis))}"].width
        columns, features = part_shape(self.kernel.block_walk, width, self.kernel.threads // 32)
        prefix = partial.symbol.name.upper()
        rows, share, warps = names = tuple(f"{prefix}_{word}" for word in ("ROWS", "FEATURES", "WARPS"))
        values = columns // 8, features // 4, width // features
        self.parts.append(", ".join(f"{name} = {n}" for name, n in zip(names, values, strict=True)))
        return PartText(
            tensor,
            f"&{split.text(row)}",
            dict(zip(tensor.layout, tensor.strides, strict=True))[axis],
            split.at(COLUMN),
            rows,
            share,
            warps,
            (self.kernel.block_walk // columns) * (width // features) < self.kernel.threads // 32,
            scope.length(axis) if width > dict(scope.plan.problem.sizes)[axis] else "",
        )

    def equation(self, state: State) -> str:
        partial = self._partial(state)
        return super().equation(state) if partial is None else added(self.scope, partial)

    def _partial(self, state: State) -> Partial | None:
        partials = (partial for walk in self.stage.walks for partial in walk.partials)
        return next((partial for partial in partials if partial.symbol is state.symbol), None)


def _as_state(partial: Partial) -> State:
    return State(partial.symbol, "sum", partial.value, partial.operand, partial.features)
