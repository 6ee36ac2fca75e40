"""From a graph to walks: what is accumulated tile by tile, by which rules, and what must be stored after
all.

A reduction whose operand uses another reduction of the same row (a row *statistic*) resists: the statistic
is known only at the end of the walk. Three rules remove it, tried in this order, each proved on the
expression at hand:

1. *defer*: a factor constant along the walk leaves the sum, if what stays is no larger than what the
   program itself computes;
2. *rescale*: a maximum in the exponent of an exponential factor may be replaced by its running value, if
   what was accumulated is multiplied by the ratio of that factor when the maximum changes (Milakov and
   Gimelshein, Online normalizer calculation for softmax, 2018; FlashAttention's recurrence is the case of
   softmax). It must bound the exponent, so that running values are no larger than final ones;
3. *several walks*: what neither removes is computed in a later walk, where the statistic is known.

What no walk can hold (a contraction over an own axis of values that have the walk's axis) is stored and
becomes the input of a later stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, TypeAlias

from fagen.derive.equations import letters
from fagen.derive.fit import reach, unfit, weigh
from fagen.derive.notes import summary
from fagen.derive.outer import along, product_walk
from fagen.derive.separate import Reduction, nearest, reductions
from fagen.derive.stage import build_stage
from fagen.derive.walk import Derivation, Note, Stage
from fagen.ir import graph as ir
from fagen.ir.graph import (
    OPEN_AXES,
    Axis,
    Contract,
    Graph,
    Input,
    Map,
    Node,
    Output,
    Reduce,
    Scatter,
)

_Place: TypeAlias = tuple[Axis | None, tuple[Axis, ...], tuple[Axis, ...]]
"""The axis a result's stage walks along, its own axes and its outer ones."""

Fusion: TypeAlias = Literal["full", "products", "none"]


@lru_cache(maxsize=16)
def derive(graph: Graph, fusion: Fusion = "full", deterministic: bool = False) -> Derivation:
    """The stages of ``graph``, the same object for the last few graphs: plans for other sizes share them.

    ``fusion`` is ``full`` (as few stages as the rules allow), ``products`` (each contraction and each row
    statistic a stage, with element-wise work fused into them) or ``none`` (each operation on tiles a stage
    of its own). ``deterministic`` says how what is added to in no order is kept.
    """
    return _Deriver(graph, fusion, deterministic).run()


@dataclass
class _Deriver:
    """A program's outputs turned into stages."""

    graph: Graph
    fusion: Fusion
    deterministic: bool
    stages: list[Stage] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    stored: dict[Node, Node] = field(default_factory=dict)
    """Each value kept in memory, as the input that reads it."""
    buffers: int = 0
    letters: dict[Node, str] = field(default_factory=dict)
    """What equations call a value that is stored."""

    def run(self) -> Derivation:
        if self.graph.direction == "backward":
            self.letters = letters(self.graph)
        if self.fusion != "full":
            self._cut()
        outputs = [self._gathered_back(output) for output in self.graph.outputs]
        self._stages_of(outputs, products=self.fusion == "full")
        return Derivation(tuple(self.stages), tuple(self.notes))

    def _gathered_back(self, output: Output) -> Output:
        """``output`` with what is scattered in it read from memory that a stage of its own has added to."""
        for node in ir.walk([output.node]):
            if isinstance(node, Scatter) and node not in self.stored:
                name, position = f"t{self.buffers}", len(self.graph.arguments) + self.buffers
                self.buffers += 1
                why = "by atomic additions, in no fixed order"
                if self.deterministic:
                    why += ", of whole numbers: the sum is exact, and the same in any"
                self._note(Note("materialise", f"{name} adds up the gradient of {node.table.name} {why}"))
                self._store_shared([node], list(self.graph.outputs), self.fusion == "full")
                self._stage(name, [Output(node, name, node.table.layout)])
                self.stored[node] = Input(name, position, node.table.layout, "float")
        return replace(output, node=self._current(output.node))

    def _note(self, *notes: Note) -> None:
        self.notes += (note for note in notes if note not in self.notes)

    def _current(self, x: Node) -> Node:
        return ir.substitute(x, self.stored) if self.stored else x

    def _stages_of(self, pending: list[Output], products: bool) -> None:
        """Stages for results of the program; with ``products``, walks along several axes where one can."""
        while pending:
            (group, outer), *others = self._groups(pending, products)
            pending = [output for outputs, _ in others for output in outputs]
            self._store_shared([output.node for output in group], pending, products)
            self._stage(self.graph.name, group, outer)

    def _groups(self, outputs: list[Output], products: bool) -> list[tuple[list[Output], tuple[Axis, ...]]]:
        """Results that are computed in one place together, with their outer axes."""
        found: dict[_Place, list[Output]] = {}
        for output in outputs:
            found.setdefault(self._place_of(output, products), []).append(output)
        return [(group, outer) for (_, _, outer), group in found.items()]

    def _store_shared(self, nodes: list[Node], others: list[Output], products: bool) -> None:
        """Store sums of rows that stages of ``others`` have to read, and that ``nodes`` before them need."""
        for group, outer in self._groups(others, products):
            parts = self._current_parts(group, outer)
            axis = _axis_of(parts[0].node) if parts else None
            misfit = unfit([part.node for part in parts], axis) if parts and axis else None
            if misfit is None or not all(isinstance(x, Reduction) and x.over in OPEN_AXES for x in misfit[0]):
                continue
            first = [self._current(node) for node in nodes]
            if all(any(ir.depends(node, [x]) for node in first) for x in misfit[0]):
                self._store(*misfit)

    def _place_of(self, output: Output, products: bool) -> _Place:
        """Where ``output`` is computed: outputs that agree share a stage."""
        node = self._current(output.node)
        inner, outer = (product_walk(node) if products else None) or (node, ())
        axis = _axis_of(inner)
        return axis, _own_axes([inner], axis), outer

    # ------------------------------------------------------------------------------ what goes through memory

    def _store(self, values: list[Node], why: str = "") -> None:
        """Make ``values`` the outputs of a stage of their own, read back as inputs."""
        outputs, inputs = [], []
        for x in values:
            value = self._current(x)
            name = self.letters.get(x, f"t{self.buffers}")
            position = len(self.graph.arguments) + self.buffers
            self.buffers += 1
            outputs.append(Output(value, name, value.axes))
            inputs.append(Input(name, position, value.axes, "float"))
            if why:
                self._note(Note("materialise", f"{name} = {summary(value)} is stored: {why}"))
        self._stage("_".join(output.name for output in outputs), outputs)
        for x, output, stored in zip(values, outputs, inputs, strict=True):
            self.stored[x] = self.stored[output.node] = stored

    def _cut(self) -> None:
        """Store what ``fusion`` says goes through memory."""
        nodes = ir.walk(output.node for output in self.graph.outputs)
        outputs = {output.node for output in self.graph.outputs}
        overs = {node.over for node in nodes if isinstance(node, Reduction)}
        for node in nodes:
            if self.fusion == "none":
                tile = isinstance(node, Map) and node.kind == "float" and bool(overs & set(node.axes))
                if ((tile and reductions(node)) or isinstance(node, Reduction)) and node not in outputs:
                    self._store_once(node)
            elif isinstance(node, Reduction):
                for operand in node.args:
                    if _ends_in_products(self._current(operand)):
                        self._store_once(self._current(operand))
                if isinstance(node, Reduce):
                    self._store_once(node)

    def _store_once(self, x: Node) -> None:
        if x not in self.stored and self._current(x) not in self.stored.values():
            self._store([x])

    # --------------------------------------------------------------------------------------------- one stage

    def _current_parts(self, outputs: list[Output], outer: tuple[Axis, ...]) -> list[Output] | None:
        """What of ``outputs`` a walk makes; None where it is no sum along the axes ``outer``."""
        outputs = [replace(output, node=self._current(output.node)) for output in outputs]
        return _inner(outputs) if outer else outputs

    def _stage(self, name: str, outputs: list[Output], outer: tuple[Axis, ...] = ()) -> None:
        while True:
            outputs = [replace(output, node=self._current(output.node)) for output in outputs]
            parts = self._current_parts(outputs, outer)
            if parts is None:
                return self._stages_of(outputs, products=False)
            axis = _axis_of(parts[0].node)
            roots = [part.node for part in parts]
            misfit = unfit(roots, axis) if axis else None
            if axis is None and (sums := nearest(roots)):
                misfit = [*sums], "it is added to one element of a table"
            if misfit is None:
                break
            self._store(*misfit)
        if axis is None:
            own = ir.sort_axes(a for root in roots for a in reach(root))
            self.stages.append(Stage(name, own, None, (), tuple(parts)))
            return None
        stage, notes = build_stage(name, axis, tuple(parts))
        if outer:
            whole = along(stage, outer)
            if whole is None:
                return self._stages_of(outputs, products=False)
            stage = whole
        self.stages.append(stage)
        self._note(*notes)
        return None


def _inner(outputs: list[Output]) -> list[Output] | None:
    """What ``outputs`` sum along a walk; None where one is no such sum."""
    found = [(output, product_walk(output.node)) for output in outputs]
    parts = [replace(output, node=part[0]) for output, part in found if part is not None]
    return parts if len(parts) == len(outputs) else None


def _axis_of(root: Node) -> Axis | None:
    """The axis to walk along for ``root``: every nearest reduction is over it, or has it as an axis.

    A sum over features alone is a product of a tile, or a row's value, beside one over positions.
    """
    if isinstance(root, Scatter):
        return next((axis for axis in reversed(root.value.axes) if axis in OPEN_AXES), None)
    tops = nearest([root])
    long = [top for top in tops if top.over in OPEN_AXES] or tops
    for axis in dict.fromkeys(top.over for top in long):
        if all(top.over == axis or axis in top.axes for top in tops):
            return axis
    return max(long, key=lambda top: top.size).over if tops else None


def _own_axes(roots: Iterable[Node], axis: Axis | None) -> tuple[Axis, ...]:
    """The axes of ``roots`` and of the reductions over ``axis`` below, without features and ``axis``."""
    roots = list(roots)
    axes = {a for root in roots for a in reach(root)}
    features: set[Axis] = set()
    pending = [r for r in nearest(roots) if r.over == axis]
    while pending:
        node = pending.pop()
        axes.update(node.axes)
        if isinstance(node, Contract):
            features.update(weigh(node, node.over).features)
        pending += [r for r in nearest(node.args) if r.over == axis]
    return ir.sort_axes(axes - features - {axis})


def _ends_in_products(x: Node) -> bool:
    """Whether the nearest reductions below ``x`` are contractions of stored values."""
    tops = nearest([x])
    return bool(tops) and all(
        isinstance(top, Contract) and not any(map(reductions, top.args)) for top in tops
    )
