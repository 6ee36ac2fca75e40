"""A walk made in parts: several blocks have some of its tiles each, and what they found is merged.

A walk's states say how what was found so far changes when more comes: a maximum is the larger one, a sum is
multiplied by its ``rescale`` where a running state changes, and what came is added. Nothing in that asks what
came in one step: it may be a tile, or all that another block has found. So a stage becomes two. In the first
a block has some tiles, and stores its states. The second walks along these parts as the first does along
tiles: a part of a sum counts ``rescale`` times, from the part's own running states to those of all. Then it
computes what the stage did after its walk.

The second has no rule of its own: with a running maximum its states are those of FlashDecoding (Dao et al.,
2023), of plain sums they are plain sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fagen.derive.notes import listed, plainly
from fagen.derive.partials import values_between
from fagen.derive.running import old
from fagen.derive.walk import PART_AXIS, Derivation, Note, Stage, State, Walk
from fagen.ir import graph as ir
from fagen.ir.graph import TRUE, Axis, Graph, Input, Node, Output, Symbol


def in_parts(derivation: Derivation, graph: Graph, axis: Axis) -> Derivation | None:
    """``derivation`` of ``graph`` with the walks along ``axis`` made in parts; None where none can be."""
    if has_such_axis(graph):
        return None
    maker = _Maker(graph, values_between(derivation.stages, graph))
    stages: list[Stage] = []
    for stage in derivation.stages:
        stages += maker.made_of(stage) if stage.walk == axis and _divides(stage) else [stage]
    if len(stages) == len(derivation.stages):
        return None
    return replace(derivation, stages=tuple(stages), notes=(*derivation.notes, *maker.notes))


def has_such_axis(graph: Graph) -> bool:
    """Whether a program has an axis of its own that is named as that of parts: no walk of it has any."""
    return any(PART_AXIS in argument.axes for argument in graph.arguments)


@dataclass
class _Maker:
    """Stages in parts, and the values between them."""

    graph: Graph
    values: int
    """How many values lie between stages so far."""
    notes: list[Note] = field(default_factory=list)

    def made_of(self, stage: Stage) -> list[Stage]:
        """``stage`` in parts that are merged, walk by walk."""
        known: dict[Node, Node] = {}  # states of earlier walks, merged
        made: list[Stage] = []
        for walk in stage.walks:
            last = walk is stage.walks[-1]
            first = _one_walk(stage, _renamed(walk, known))
            found = self._between([(s, f"{s.name}_parts") for s in _symbols(first.walks)])
            read = dict(zip(_symbols((walk,)), found, strict=True))
            self.notes.append(_note(walk, stage))
            outputs = [replace(each, node=ir.substitute(each.node, known)) for each in stage.outputs]
            if not last:
                kept = self._between([(s, f"{s.name}_all") for s in read])
                outputs = [Output(s, x.name, x.layout) for s, x in zip(read, kept, strict=True)]
                known |= dict(zip(read, kept, strict=True))
            stored = tuple(
                Output(symbol, each.name, each.layout)
                for symbol, each in zip(_symbols(first.walks), found, strict=True)
            )
            name = stage.name if last else f"{stage.name}_merged"
            made += [replace(first, outputs=stored), *_merged(name, walk, stage.own, read, outputs)]
        return made

    def _between(self, named: Sequence[tuple[Symbol, str]]) -> list[Input]:
        """Memory for values of these symbols, under these names where no other has them."""
        first = len(self.graph.arguments) + self.values
        again = f"_{self.values}" if self.notes else ""
        self.values += len(named)
        return [
            Input(f"{name}{again}", first + i, symbol.axes, "float") for i, (symbol, name) in enumerate(named)
        ]


def _divides(stage: Stage) -> bool:
    """Whether all that a stage's walks make are states of each of its rows."""
    if stage.outer:
        return False
    for walk in stage.walks:
        if walk.stores or walk.partials or not walk.products or not walk.states:
            return False
        if any({*state.symbol.axes} != {*stage.own, *state.features} for state in walk.states):
            return False
    return True


def _symbols(walks: Sequence[Walk]) -> list[Symbol]:
    return [state.symbol for walk in walks for state in walk.states]


def _one_walk(stage: Stage, walk: Walk) -> Stage:
    """A stage that makes ``walk`` alone, of which each block has a part."""
    names: dict[Node, Node] = {}
    for symbol in _symbols((walk,)):
        new = Symbol(symbol.name, ir.sort_axes((*symbol.axes, PART_AXIS)), symbol.stored)
        names |= {symbol: new, old(symbol): old(new)}
    own = ir.sort_axes((*stage.own, PART_AXIS))
    whole = _renamed(walk, names)
    return Stage(f"{stage.name}_parts", own, stage.walk, (whole,), (), parts=PART_AXIS)


def _renamed(walk: Walk, names: Mapping[Node, Node]) -> Walk:
    """``walk`` with other symbols, or with values in their place that are known before it."""

    def state_of(state: State) -> State:
        symbol = names.get(state.symbol, state.symbol)
        assert isinstance(symbol, Symbol)
        rescale = ir.substitute(state.rescale, names) if state.rescale is not None else None
        return replace(state, symbol=symbol, value=ir.substitute(state.value, names), rescale=rescale)

    return replace(walk, states=tuple(map(state_of, walk.states))) if names else walk


def _merged(
    name: str, walk: Walk, own: Sequence[Axis], read: Mapping[Symbol, Input], outputs: Sequence[Output]
) -> list[Stage]:
    """Stages that merge the parts of the states of ``walk`` in memory, and compute ``outputs`` of them: one
    for those of the same rows, and for those that are the same for several of its rows."""
    of_part: dict[Node, Node] = {old(symbol): part for symbol, part in read.items()}
    states = []
    for state in walk.states:
        part: Node = read[state.symbol]
        if state.rescale is not None:
            part = ir.mul(part, ir.substitute(state.rescale, of_part))
        states.append(replace(state, value=part, operand=None, features=()))
    axes_of: dict[Output, tuple[Axis, ...]] = {}
    for output in outputs:
        needed = _needed([output.node], states)
        of_states = (axis for state in needed for axis in state.symbol.axes)
        axes_of[output] = ir.sort_axes({*own, *output.node.axes, *of_states})
    stages: list[Stage] = []
    for axes in sorted(dict.fromkeys(axes_of.values()), key=len, reverse=True):
        group = tuple(each for each, its in axes_of.items() if {*its} <= {*axes})
        axes_of = {each: its for each, its in axes_of.items() if each not in group}
        if group:
            walked = Walk(TRUE, (), tuple(_needed([output.node for output in group], states)))
            stages.append(Stage(name, axes, PART_AXIS, (walked,), group))
    return stages


def _needed(roots: Sequence[Node], states: Sequence[State]) -> list[State]:
    """The ``states`` that ``roots`` depend on, and those that these do."""
    nodes = set(ir.walk(roots))
    needed: list[State] = []
    for state in reversed(states):  # a state depends on earlier ones alone
        if state.symbol in nodes:
            needed.insert(0, state)
            nodes |= set(ir.walk([x for x in (state.value, state.rescale) if x is not None]))
    return needed


def _note(walk: Walk, stage: Stage) -> Note:
    names = [state.symbol.name for state in walk.states]
    text = f"blocks share the tiles along {stage.walk}: each stores {listed(names)} of those it has, and a"
    text += " kernel merges them in their order"
    ratios = {state.rescale: state.symbol.name for state in walk.states if state.rescale is not None}
    if ratios:
        text += f": sums of a part, whose own are old, times {listed([plainly(ratio) for ratio in ratios])}"
    return Note("parts", text)
