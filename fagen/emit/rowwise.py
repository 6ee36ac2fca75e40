"""A stage without tiles, as `schedule/rowwise` writes it: lanes of a warp for each row, along the row.

A map stores elements; a reduction keeps a state in each lane, brought up to date element by element, and the
lanes join theirs at the end of the row. Where a state uses a running one, joining rescales it once more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fagen.derive.running import old
from fagen.derive.terms import term_of
from fagen.derive.walk import State, Walk
from fagen.emit.code import COLUMN, ELEMENT, ROW, SUM, UNARY, Code, Place, Split, Statement
from fagen.emit.flat import Flat
from fagen.emit.forward.levels import levels_of
from fagen.emit.params import Tensor
from fagen.emit.scope import Scope, axis_name
from fagen.emit.texts import StoreText
from fagen.ir import graph as ir
from fagen.ir.graph import TRUE, Axis, Index, Input, Load, Node, Output, Random, Scatter, split_heads
from fagen.plan.arch import arch_for
from fagen.plan.plan import STORAGE_BYTES

VECTOR_BYTES = 16
"""What one access reads or writes, at most."""


@dataclass(frozen=True)
class LaneState:
    """A state of a lane."""

    name: str
    op: str
    initial: str
    value: str
    rescale: str | None
    joined: str | None
    """``rescale`` where the lanes join what they have."""
    keeps_old: bool
    """Whether its value before an update is needed."""
    equation: str


@dataclass(frozen=True)
class LanePhase:
    """States that are updated together, and what their values need."""

    statements: Sequence[Statement]
    states: tuple[LaneState, ...]


@dataclass(frozen=True)
class VectorText:
    """Neighbours of a row, from ``pointer`` on, that one access reads or writes."""

    name: str
    storage: str
    pointer: str
    load: str
    """The function that reads them."""


@dataclass(frozen=True)
class RowWalk:
    """One pass along a row."""

    before: Sequence[Statement]
    columns: Sequence[Statement]
    """For each element, whatever the row."""
    guard: str | None
    """Elements of which it does not hold are passed over."""
    comment: str
    phases: tuple[LanePhase, ...]
    stored: Sequence[Statement]
    stores: tuple[StoreText, ...]
    joins: Sequence[Statement]
    """What joining the lanes' states needs."""
    width: int
    """How many neighbours a lane takes at once."""
    reads: tuple[VectorText, ...]
    writes: tuple[VectorText, ...]

    def says(self, name: str) -> bool:
        """Whether an element needs ``name``."""
        statements = [
            *self.columns,
            *self.stored,
            *(each for phase in self.phases for each in phase.statements),
        ]
        texts = [*(each.text for each in statements), *(state.value for state in self.states)]
        texts += [text for store in self.stores for text in (store.target, store.number)]
        return any(re.search(rf"\b{name}\b", text) for text in texts)

    @property
    def states(self) -> list[LaneState]:
        """All of its states, in order."""
        return [state for phase in self.phases for state in phase.states]


@dataclass(frozen=True)
class ClearedText:
    """A row that is made 0, ``width`` neighbours at once."""

    vector: VectorText
    length: str
    width: int


@dataclass(frozen=True)
class Rowwise(Flat):
    """What the template reads of a kernel."""

    clearing: Sequence[Statement]
    """For each row, what finding the rows of ``cleared`` needs."""
    cleared: tuple[ClearedText, ...]
    walks: tuple[RowWalk, ...]
    after: Sequence[Statement]
    outputs: tuple[StoreText, ...]

    functions = False
    """All of it is one function."""

    @property
    def shares_warps(self) -> bool:
        """Whether rows past the end have lanes in a warp that joins what its lanes have."""
        warp = arch_for(self.scope.plan.problem.arch).warp
        return self.scope.kernel.columns < warp and any(walk.states for walk in self.walks)

    def once(self, store: StoreText) -> str:
        """Before what is the same for all rows of a block: the first of them stores it."""
        axis = self.row_axis
        if axis is None or axis in split_heads(store.tensor.layout):
            return ""
        return f"if ({axis_name(axis)} == 0) "

    @property
    def text(self) -> str:
        """All expressions of the kernel."""
        statements, texts = [*self.clearing, *self.after], [each.vector.pointer for each in self.cleared]
        stores = list(self.outputs)
        for walk in self.walks:
            statements += [*walk.before, *walk.columns, *walk.stored, *walk.joins]
            statements += [statement for phase in walk.phases for statement in phase.statements]
            stores += walk.stores
            texts += [walk.guard or "", *(state.value for state in walk.states)]
            texts += [text or "" for state in walk.states for text in (state.rescale, state.joined)]
            texts += [vector.pointer for vector in (*walk.reads, *walk.writes)]
        texts += [text for store in stores for text in (store.target, store.value)]
        return "\n".join([*texts, *(statement.text for statement in statements)])


def rowwise(scope: Scope) -> Rowwise:
    """The steps of ``scope.kernel``."""
    return _Builder(scope).build()


class _Builder:
    def __init__(self, scope: Scope) -> None:
        self.scope, self.stage = scope, scope.kernel.stage
        self.before: list[Statement] = []
        self.written: list[VectorText] = []
        scope.splitter.lasting = (*scope.splitter.lasting, ROW)
        leaf = scope.codes.leaf
        assert self.stage.walk is not None
        self.walk_axis = self.stage.walk
        self.leaves: dict[Node, Code] = {
            Index(self.walk_axis): leaf(axis_name(self.walk_axis), "int32", COLUMN)
        }
        if scope.kernel.tile_axis is not None:
            self.leaves[Index(scope.kernel.tile_axis)] = leaf(axis_name(scope.kernel.tile_axis), "int32", ROW)

    def build(self) -> Rowwise:
        cleared = tuple(map(self.cleared, self.scope.kernel.clears))
        clearing, self.before = self.before, []
        walks = tuple(map(self.walk, self.stage.walks))
        split, outputs = self.stores(self.stage.outputs, self.leaves, ROW)
        return Rowwise(self.scope, clearing, cleared, walks, split.at(ROW), outputs)

    def cleared(self, name: str) -> ClearedText:
        """How a row of a buffer is made 0."""
        tensor = self.scope.parameters.buffer(name)
        axis = tensor.layout[-1]
        size = dict(self.scope.plan.problem.sizes).get(axis, 1)
        most = VECTOR_BYTES // STORAGE_BYTES[tensor.storage]
        width = next(width for width in (4, 2, 1) if width <= most and size % width == 0)
        return ClearedText(self.vector(tensor, axis), self.scope.length(axis), width)

    def walk(self, walk: Walk) -> RowWalk:
        scope, leaf = self.scope, self.scope.codes.leaf
        levels = levels_of(walk.states)
        inside, joining = dict(self.leaves), dict(self.leaves)
        end = Place(row=True, phase=1)
        for state, level in levels.items():
            name = state.symbol.name
            place = ELEMENT._replace(phase=level + 1)
            inside[state.symbol] = leaf(name, "float", place)
            inside[old(state.symbol)] = leaf(f"{name}_old", "float", place)
            joining[state.symbol] = leaf(name, "float", end)
            joining[old(state.symbol)] = leaf(f"{name}_old", "float", end)
        width = self.width(walk)
        reads = self.vectors(walk, width)
        inside |= {table: leaf(text, "float", ELEMENT) for table, (_, text) in reads.items()}
        lower, joined = scope.lowering(inside), scope.lowering(joining)
        roots: list[tuple[Code, Place]] = []
        if walk.guard is not TRUE:
            roots.append((lower(walk.guard), ELEMENT))
        for state, level in levels.items():
            at = ELEMENT._replace(phase=level)
            roots.append((lower(term_of(state)[0]), at))
            if state.rescale is not None:
                roots.append((lower(state.rescale), at))
        split = scope.split(roots)
        rescales = [state.rescale for state in walk.states if state.rescale is not None]
        join = scope.split([(joined(rescale), end) for rescale in rescales])
        phases = []
        for level in range(1 + max(levels.values(), default=-1)):
            at = ELEMENT._replace(phase=level)
            states = tuple(
                LaneState(
                    name=state.symbol.name,
                    op=state.op,
                    initial="-INFINITY" if state.op == "max" else "0.0f",
                    value=split.text(lower(term_of(state)[0]), SUM),
                    rescale=split.text(lower(state.rescale), UNARY) if state.rescale is not None else None,
                    joined=join.text(joined(state.rescale), UNARY) if state.rescale is not None else None,
                    keeps_old=any(ir.depends(rescale, [old(state.symbol)]) for rescale in rescales),
                    equation=self.equation(state),
                )
                for state, its in levels.items()
                if its == level
            )
            phases.append(LanePhase(split.at(at), states))
        of_stores = {**self.leaves, **{table: inside[table] for table in reads}}
        stored, stores = self.stores(walk.stores, of_stores, ELEMENT, width)
        for state in walk.states:
            self.leaves[state.symbol] = leaf(state.symbol.name, "float", ROW)
        return RowWalk(
            before=[*self.before, *split.at(ROW), *stored.at(ROW)],
            columns=[*split.at(COLUMN), *stored.at(COLUMN)],
            guard=split.text(lower(walk.guard)) if walk.guard is not TRUE else None,
            comment=scope.shown(walk.guard),
            phases=tuple(phases),
            stored=stored.at(ELEMENT),
            stores=stores,
            joins=join.at(end),
            width=width,
            reads=tuple(vector for vector, _ in reads.values()),
            writes=tuple(self.written),
        )

    def width(self, walk: Walk) -> int:
        """How many neighbours a lane takes at once: of all tensors they are known to be one access."""
        problem, axis = self.scope.plan.problem, self.walk_axis
        size = dict(problem.sizes).get(axis, 1)
        if walk.guard is not TRUE or problem.family == "simt":
            return 1
        values = [term_of(state)[0] for state in walk.states]
        nodes = ir.walk([*values, *(out.node for out in walk.stores)])
        tables = [node for node in nodes if isinstance(node, Input) and axis in node.axes]
        aligned = all(
            node.stored == "float"
            and node.layout[-1] == axis
            and (node.position >= len(problem.graph.arguments) or problem.is_aligned(node))
            for node in tables
        )
        found = any(isinstance(node, Load | Random | Scatter) and axis in node.axes for node in nodes)
        stored = all(self.scope.written(out).layout[-1] == axis for out in walk.stores)
        if not tables or not aligned or not stored or found:
            return 1
        tensors = [*map(self.scope.parameters.tensor, tables), *map(self.scope.written, walk.stores)]
        most = min(VECTOR_BYTES // STORAGE_BYTES[tensor.storage] for tensor in tensors)
        return next((width for width in (8, 4, 2) if width <= most and size % width == 0), 1)

    def vectors(self, walk: Walk, width: int) -> dict[Node, tuple[VectorText, str]]:
        """What is read of each tensor at once, and how a number of it reads."""
        self.before, self.written = [], []
        if width == 1:
            return {}
        nodes = ir.walk([*(term_of(s)[0] for s in walk.states), *(out.node for out in walk.stores)])
        found: dict[Node, tuple[VectorText, str]] = {}
        for node in nodes:
            if isinstance(node, Input) and self.walk_axis in node.axes:
                tensor = self.scope.parameters.tensor(node)
                vector = self.vector(tensor)
                number = f"{vector.name}[i]"
                found[node] = vector, number if tensor.storage == "fp32" else f"to_float({number})"
        return found

    def vector(self, tensor: Tensor, axis: Axis | None = None) -> VectorText:
        """Where the neighbours of ``tensor`` are in a row, along the walk if no other ``axis`` is given."""
        scope, axis = self.scope, axis or self.walk_axis
        if tensor.layout == (axis,):  # the one row there is
            return VectorText(
                f"{tensor.name}_part", tensor.storage, f"&{tensor.pointer}[first]", "load_vector"
            )
        first = {axis: scope.codes.leaf("first" if tensor.whole else "0", "int32")}
        row = scope.store(scope.lowering(self.leaves, addresses=first), tensor)
        split = scope.split([(row, ROW)])
        self.before += split.at(ROW)
        at = split.text(row).removesuffix("]")
        first_of = f"{at.removesuffix('0')}first" if at.endswith("[0") else f"{at} + first"
        load = "load_pairs" if tensor.whole else "load_vector"
        return VectorText(
            f"{tensor.name}_part", tensor.storage, f"&{at if tensor.whole else first_of}]", load
        )

    def stores(
        self, outputs: Sequence[Output], leaves: dict[Node, Code], place: Place, width: int = 1
    ) -> tuple[Split, tuple[StoreText, ...]]:
        """Statements, and what is written at ``place``; ``width`` neighbours are written together."""
        scope = self.scope
        lower = scope.lowering(leaves)
        tensors = [scope.written(output) for output in outputs]
        pairs = [scope.stored(lower, out.node, t) for t, out in zip(tensors, outputs, strict=True)]
        if width > 1:
            self.written = [self.vector(tensor) for tensor in tensors]
            parts = (scope.codes.leaf(f"{vector.name}[i]", vector.storage) for vector in self.written)
            pairs = [(part, value) for part, (_, value) in zip(parts, pairs, strict=True)]
        # What is assigned gets no name of its own, wherever it is known.
        split = scope.split(
            [root for target, value in pairs for root in ((target, target.place), (value, place))]
        )
        found = tuple(
            StoreText(
                split.text(target),
                split.text(value),
                f"{tensor.name} = {scope.shown(output.node)}",
                tensor,
                isinstance(output.node, Scatter),
            )
            for (target, value), tensor, output in zip(pairs, tensors, outputs, strict=True)
        )
        return split, found

    def equation(self, state: State) -> str:
        """What a state is in the end."""
        return f"{state.symbol.name} = {state.op}_{self.walk_axis} {self.scope.shown(term_of(state)[0])}"
