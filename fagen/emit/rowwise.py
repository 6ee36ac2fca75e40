"""A stage without tiles, as `schedule/rowwise` writes it: a warp for each row, its lanes along the row.

A map stores elements; a reduction keeps a state in each lane, brought up to date element by element, and the
lanes join theirs at the end of the row. Where a state uses a running one, joining rescales it once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fagen.derive.running import old
from fagen.derive.terms import term_of
from fagen.derive.walk import State, Walk
from fagen.emit.code import COLUMN, ELEMENT, ROW, SUM, UNARY, Code, Place, Split, Statement
from fagen.emit.flat import Flat
from fagen.emit.forward import levels_of
from fagen.emit.scope import Scope, axis_name
from fagen.emit.texts import StoreText
from fagen.ir import graph as ir
from fagen.ir.graph import TRUE, Index, Node, Output


@dataclass(frozen=True)
class StateText:
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
class Phase:
    """States that are updated together, and what their values need."""

    statements: Sequence[Statement]
    states: tuple[StateText, ...]


@dataclass(frozen=True)
class RowWalk:
    """One pass along a row."""

    before: Sequence[Statement]
    columns: Sequence[Statement]
    """For each element, whatever the row."""
    guard: str | None
    """Elements of which it does not hold are passed over."""
    comment: str
    phases: tuple[Phase, ...]
    stored: Sequence[Statement]
    stores: tuple[StoreText, ...]
    joins: Sequence[Statement]
    """What joining the lanes' states needs."""

    @property
    def states(self) -> list[StateText]:
        """All of its states, in order."""
        return [state for phase in self.phases for state in phase.states]


@dataclass(frozen=True)
class Rowwise(Flat):
    """What the template reads of a kernel."""

    walks: tuple[RowWalk, ...]
    after: Sequence[Statement]
    outputs: tuple[StoreText, ...]

    functions = False
    """All of it is one function."""

    @property
    def text(self) -> str:
        """All expressions of the kernel."""
        statements, texts = [*self.after], list[str]()
        stores = list(self.outputs)
        for walk in self.walks:
            statements += [*walk.before, *walk.columns, *walk.stored, *walk.joins]
            statements += [statement for phase in walk.phases for statement in phase.statements]
            stores += walk.stores
            texts += [walk.guard or "", *(state.value for state in walk.states)]
            texts += [text or "" for state in walk.states for text in (state.rescale, state.joined)]
        texts += [text for store in stores for text in (store.target, store.value)]
        return "\n".join([*texts, *(statement.text for statement in statements)])


def rowwise(scope: Scope) -> Rowwise:
    """The steps of ``scope.kernel``."""
    return _Builder(scope).build()


class _Builder:
    def __init__(self, scope: Scope) -> None:
        self.scope, self.stage = scope, scope.kernel.stage
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
        walks = tuple(map(self.walk, self.stage.walks))
        split, outputs = self.stores(self.stage.outputs, self.leaves, ROW)
        return Rowwise(self.scope, walks, split.at(ROW), outputs)

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
                StateText(
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
            phases.append(Phase(split.at(at), states))
        stored, stores = self.stores(walk.stores, self.leaves, ELEMENT)
        for state in walk.states:
            self.leaves[state.symbol] = leaf(state.symbol.name, "float", ROW)
        return RowWalk(
            before=[*split.at(ROW), *stored.at(ROW)],
            columns=[*split.at(COLUMN), *stored.at(COLUMN)],
            guard=split.text(lower(walk.guard)) if walk.guard is not TRUE else None,
            comment=scope.shown(walk.guard),
            phases=tuple(phases),
            stored=stored.at(ELEMENT),
            stores=stores,
            joins=join.at(end),
        )

    def stores(
        self, outputs: Sequence[Output], leaves: dict[Node, Code], place: Place
    ) -> tuple[Split, tuple[StoreText, ...]]:
        """Statements, and what is written at ``place``."""
        scope = self.scope
        lower = scope.lowering(leaves)
        tensors = [scope.written(output) for output in outputs]
        pairs = [(scope.store(lower, t), lower(out.node)) for t, out in zip(tensors, outputs, strict=True)]
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
            )
            for (target, value), tensor, output in zip(pairs, tensors, outputs, strict=True)
        )
        return split, found

    def equation(self, state: State) -> str:
        """What a state is in the end."""
        return f"{state.symbol.name} = {state.op}_{self.walk_axis} {self.scope.shown(term_of(state)[0])}"
