"""From a program to its gradient: another program, which the same planner fuses.

Its inputs are the program's own, the gradients of its outputs, and what of each row the forward direction
keeps: results it has anyway, or one number a row more. These rules make it the backward of FlashAttention
where the program is softmax's (Dao et al., 2022, algorithm 4), and leave it right where it is not:

1. *free reference*: a maximum that no output depends on is a constant to the gradient;
2. *exchange*: a row's sum over keys is a product with a result that is known;
3. *saved*: where nothing changes when such a maximum moves, it may be moved to where its sum is 1: then one
   number a row stands for both. It is a logarithm, and rounds by more than the weights of fp32 do, and far
   from 0 by more than any: there the two are kept;
4. *level*: what moves results by a known amount, as a number added to all scores of a row does, has the
   gradient of what it moves, and that is no sum of weights that cancel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from fagen.derive.adjoint import adjoints, spread, summed
from fagen.derive.exchange import Exchange, exchanges
from fagen.derive.invariance import Reference, free_maxima, moved_by, shift_power, unchanged_by
from fagen.derive.notes import listed, plainly, summary
from fagen.derive.separate import Reduction, reductions
from fagen.derive.signs import LOGARITHMS, may_be_far
from fagen.derive.walk import Note
from fagen.ir import graph as ir
from fagen.ir.graph import (
    KEY_AXIS,
    MINUS_INF,
    ONE,
    OPEN_AXES,
    ZERO,
    Axis,
    Const,
    Contract,
    Graph,
    Input,
    Load,
    Map,
    Node,
    Output,
    Scalar,
    split_heads,
)
from fagen.ir.names import names_of
from fagen.ir.stack import room_for

_POSITIONS = frozenset(("q", KEY_AXIS))

Source: TypeAlias = tuple[Literal["argument", "output", "gradient"], int]
"""Where a value of the backward direction comes from: an argument of the program by its position, an output
of the forward direction or the gradient of one by its place."""


@dataclass(frozen=True)
class Gradient:
    """Both directions of a program.

    ``forward`` has the program's outputs, then those kept for ``backward``, whose arguments come from
    ``sources``; its outputs are the gradients of the arguments at the positions ``wanted``. An argument that
    has none depends on nothing: its gradient is 0.
    """

    forward: Graph
    backward: Graph
    sources: tuple[Source, ...]
    wanted: tuple[int, ...]
    notes: tuple[Note, ...]


Broadcast: TypeAlias = tuple[tuple[int, Axis], ...]
"""(argument's position, axis of its layout): it has length 1 there and the axis has more."""


@lru_cache(maxsize=1024)
def gradient(
    graph: Graph,
    wanted: frozenset[int],
    given: frozenset[int] | None = None,
    broadcast: Broadcast = (),
    precise: bool = False,
) -> Gradient:
    """The gradients of the arguments at the positions ``wanted``, for gradients of the outputs ``given``.

    ``given`` is None for all outputs. Gradients are laid out as their argument is, without the axes along
    which it was broadcast. ``precise`` is for tensors of fp32: both directions then have the same weights,
    to the last bit.
    """
    with room_for(graph):
        return _Differentiator(graph, wanted, given, broadcast, precise).run()


class _Differentiator:
    """A program on its way to its gradient."""

    def __init__(
        self,
        graph: Graph,
        wanted: frozenset[int],
        given: frozenset[int] | None,
        broadcast: Broadcast,
        precise: bool,
    ) -> None:
        self.graph, self.precise = graph, precise
        self.notes: list[Note] = []
        self.sources: dict[Input | Scalar, Source] = {
            argument: ("argument", place) for place, argument in enumerate(graph.arguments)
        }
        self.outputs = list(graph.outputs)
        self.wanted = [a for i, a in enumerate(graph.arguments) if i in wanted and isinstance(a, Input)]
        self.broadcast = broadcast
        self.given = range(len(graph.outputs)) if given is None else sorted(given)
        self.read: dict[int, Input] = {}
        self.levels: dict[Node, Node] = {}
        self.nodes = ir.walk(output.node for output in graph.outputs)

    def run(self) -> Gradient:
        """Both directions."""
        seeds: dict[Node, Node] = {}
        for place in self.given:
            output = self.graph.outputs[place]
            seed = self._input(f"d{output.name}", output.layout, ("gradient", place), is_gradient=True)
            seeds[output.node] = ir.add(seeds[output.node], seed) if output.node in seeds else seed
        references = free_maxima(output.node for output in self.graph.outputs)
        constants = [node for each in references for node in (each.point, ir.finite(each.point))]
        self.levels = self._levels(seeds)
        found = adjoints(seeds, self.wanted, constants, self.levels)
        kept = [argument for argument in self.wanted if argument in found]
        roots = [_rows_first(self._shaped(argument, found[argument])) for argument in kept]
        roots = self._reading(roots if self.precise else self._exchanged(roots))
        for reference in references:
            self.notes.append(Note("free reference", reference.proof))
            roots = self._saved(roots, reference)
        roots = [_tidied(root, self.sources) for root in roots]
        return self._finished(kept, roots)

    def _input(
        self,
        name: str,
        layout: tuple[Axis, ...],
        source: Source,
        holds: Node | None = None,
        is_gradient: bool = False,
    ) -> Input:
        """A new argument of the backward direction, for now at a position of its own."""
        new = Input(name, len(self.sources), layout, "float", False, holds, is_gradient)
        self.sources[new] = source
        return new

    def _shaped(self, argument: Input, x: Node) -> Node:
        """The gradient with the axes of its argument, summed over those it was broadcast along."""
        once = self._once(argument)
        for axis in ir.sort_axes(once)[::-1]:
            if axis in x.axes or argument not in self.levels:
                x = ir.total(spread(x, (axis,)), axis)
        return spread(x, (axis for axis in argument.axes if axis not in once))

    def _once(self, argument: Input) -> frozenset[Axis]:
        """The axes along which an argument has length 1 and others have more."""
        once = {axis for position, axis in self.broadcast if position == argument.position}
        return frozenset(split_heads(tuple(axis for axis in argument.layout if axis in once)))

    # ------------------------------------------------------------------------------------------------- rules

    def _levels(self, seeds: Mapping[Node, Node]) -> dict[Node, Node]:
        """Rule *level*: the gradients of what moves results by a known amount, as what is added to all scores
        of a row does; by its value, as its arguments are read.

        A result of -inf is one of no keys, in which nothing was added to a score; what is added to the result
        itself moves that as well, and has no sum of weights for its gradient.
        """
        tables = {node.table for node in self.nodes if isinstance(node, Load)}
        found: dict[Node, Node] = {}
        for node in self.nodes:
            argument = node.table if isinstance(node, Load) else node
            if argument not in self.wanted or node in tables:
                continue
            once = self._once(node) if isinstance(node, Input) else frozenset()
            moves = moved_by(node, frozenset(node.axes) - once, seeds)
            if moves is None or any(_beside_sums(node, result) for result in seeds):
                continue
            total: Node = ZERO
            for (result, seed), by in zip(seeds.items(), moves, strict=True):
                if by:
                    moved = ir.where(ir.lt(MINUS_INF, self._kept(result)), ir.mul(seed, Const(by)), ZERO)
                    total = ir.add(total, summed(moved, ONE, set(seed.axes) - set(node.axes)))
            found[node] = total
            self.notes.append(Note("level", self._why_level(node, moves, seeds)))
        return found

    def _exchanged(self, roots: list[Node]) -> list[Node]:
        """Rule *exchange*, with every weighted sum of the forward direction along keys."""
        sums = [x for x in self.nodes if isinstance(x, Contract) and x.over == KEY_AXIS]
        for found in exchanges(roots, sums):
            alone = [_by_rows(root, found.total) for root in roots]
            others = [root for root, row in zip(roots, alone, strict=True) if row is None]
            there: dict[Node, Node] = {}
            if any(ir.depends(root, [found.total]) for root in others):
                read = ir.substitute(found.value, {found.known: self._kept(found.known)})
                self.notes.append(Note("exchange", self._why(found)))
                there[found.total] = read
            roots = [
                ir.substitute(root, there) if row is None else row
                for root, row in zip(roots, alone, strict=True)
            ]
        return roots

    def _why(self, found: Exchange) -> str:
        """The two sides of an exchange, and what makes them equal."""
        known, product = self._kept(found.known), found.product
        values = product.y if product.y in found.known.args else product.x
        there = plainly(ir.substitute(product, {values: known}))
        right = there if found.ratio is ONE else f"({there}) * ({summary(found.ratio)})"
        return (
            f"{summary(found.total)} = {right}: {plainly(product)} is summed along {found.total.over} by the "
            f"weights that sum {plainly(values)} to {known.name}, so that the two sums may change places"
        )

    def _why_level(self, level: Node, moves: Iterable[float], results: Iterable[Node]) -> str:
        """How a level moves the results, and what its gradient is for that."""
        names = {output.node: output.name for output in self.graph.outputs}
        by = {names[result]: amount for result, amount in zip(results, moves, strict=True)}
        left = [name for name, amount in by.items() if not amount]
        said = [f"is {amount:g} more of {name}" for name, amount in by.items() if amount]
        said += [f"leaves {listed(left)}"] if left else []
        parts = [f"d{name}" if a == 1 else f"{a:g} d{name}" for name, a in by.items() if a]
        total = f"the sum of {' + '.join(parts)}" if parts else "0"
        return f"1 more of {plainly(level)} {' and '.join(said)}: its gradient is {total}"

    def _saved(self, roots: list[Node], reference: Reference) -> list[Node]:
        """Rule *saved*: the reference moved to where the sum that grows with it is 1."""
        shift = {reference.point: reference.shifted, ir.finite(reference.point): reference.shifted}
        moved = [ir.substitute(root, shift) for root in roots]
        if not unchanged_by(reference.shifted, moved):
            return roots
        best: tuple[int, list[Node], Node, Node] | None = None
        for total in _divisors(self.nodes):
            power = shift_power(reference, total)
            if power is None or KEY_AXIS in total.axes:
                continue
            level = ir.add(reference.point, _logarithm(total, power))
            stand_in = ir.Symbol("kept", level.axes, "float")
            there = {total: ONE, ir.finite(reference.point): ir.finite(stand_in), reference.point: stand_in}
            tried = [ir.substitute(root, there) for root in roots]
            count = _statistics(tried)
            if best is None or count < best[0]:
                best = count, tried, level, total
        if best is None or best[0] >= _statistics(roots):
            return roots
        _, tried, level, total = best
        stand_in = ir.Symbol("kept", level.axes, "float")
        if self.precise:
            point, sums = self._stand_for_all(reference.point, total)
            both = {total: sums, ir.finite(reference.point): ir.finite(point), reference.point: point}
            return [ir.substitute(root, both) for root in roots]
        if may_be_far(reference.maximum):
            point, share = self._stand_for_all(reference.point, ir.quotient(ONE, total))
            bases = [
                LOGARITHMS[part.op] for part in level.args if isinstance(part, Map) and part.args == (total,)
            ]
            tried = [_shared(root, stand_in, point, share, bases) for root in tried]
            if not any(ir.depends(root, [stand_in]) for root in tried):
                return tried
        (kept,) = self._stand_for_all(level)
        return [ir.substitute(root, {stand_in: kept}) for root in tried]

    def _stand_for_all(self, *values: Node) -> list[Input]:
        """Numbers of each row from which the other direction has all sums."""
        kept = [self._kept(value) for value in values]
        said = " and ".join(f"{plainly(x)} = {summary(value)}" for x, value in zip(kept, values, strict=True))
        stand = "stand" if len(kept) > 1 else "stands"
        self.notes.append(Note("saved", f"{said} {stand} for all sums of a row"))
        return kept

    def _kept(self, x: Node) -> Input:
        """``x`` as the backward direction reads it: an output of the forward one, a new one if it is none."""
        place = next((i for i, output in enumerate(self.outputs) if output.node is x), len(self.outputs))
        if place == len(self.outputs):
            taken = {argument.name for argument in self.sources} | {output.name for output in self.outputs}
            name = next(n for i in range(len(taken) + 1) if (n := f"kept{i}") not in taken)
            self.outputs.append(Output(x, name, _layout(x.axes)))
        if place not in self.read:
            output = self.outputs[place]
            self.read[place] = self._input(output.name, output.layout, ("output", place), output.node)
        return self.read[place]

    def _reading(self, roots: list[Node]) -> list[Node]:
        """``roots`` with the program's own results read instead of computed again."""
        found: dict[Node, Node] = {}
        for output in self.graph.outputs:
            known = reductions(output.node) and KEY_AXIS not in output.node.axes
            if known and any(ir.depends(root, [output.node]) for root in roots):
                found[output.node] = self._kept(output.node)
        return [ir.substitute(root, found) for root in roots]

    # ---------------------------------------------------------------------------------------------- finished

    def _finished(self, kept: list[Input], roots: list[Node]) -> Gradient:
        """The two graphs, the arguments of the second numbered as they stand."""
        used = {node for node in ir.walk(roots) if isinstance(node, Input | Scalar)}
        arguments = [a for a in self.sources if a in used or a in kept]
        numbered: dict[Node, Node] = {}
        taken: set[str] = set()
        for place, argument in enumerate(arguments):
            name = argument.name
            while name in taken:
                name += "_"
            taken.add(name)
            numbered[argument] = _placed(argument, name, place, numbered)
        read_outputs = {place for a in arguments for kind, place in [self.sources[a]] if kind == "output"}
        own = len(self.graph.outputs)
        outputs = [o for i, o in enumerate(self.outputs) if i < own or i in read_outputs]
        places = {i: outputs.index(o) for i, o in enumerate(self.outputs) if o in outputs}
        sources: list[Source] = []
        for argument in arguments:
            kind, place = self.sources[argument]
            sources.append((kind, places[place] if kind == "output" else place))
        once = set(self.broadcast)
        results = tuple(
            Output(
                ir.substitute(root, numbered),
                f"d{argument.name}",
                tuple(axis for axis in argument.layout if (argument.position, axis) not in once),
            )
            for argument, root in zip(kept, roots, strict=True)
        )
        forward = Graph(self.graph.name, self.graph.arguments, tuple(outputs), self.graph.about)
        if len(outputs) == own:
            forward = self.graph
        backward = Graph(
            self.graph.name,
            tuple(numbered[a] for a in arguments),  # type: ignore[misc]
            results,
            self.graph.about,
            "backward",
            _labels(
                forward, [s for s, a in zip(sources, arguments, strict=True) if isinstance(a, Input)], kept
            ),
        )
        return Gradient(
            forward,
            backward,
            tuple(sources),
            tuple(argument.position for argument in kept),
            tuple(dict.fromkeys(self.notes)),
        )


def _rows_first(root: Node) -> Node:
    """``root``, which has no positions, with sums over other axes outside of those over keys, so that rows
    are summed as they are computed and no pair of positions is kept."""
    if _POSITIONS & set(root.axes):
        return root
    done: dict[Node, Node] = {}
    for node in ir.walk([root]):
        new = ir.rebuild(node, tuple(done[arg] for arg in node.args)) if node.args else node
        done[node] = _keys_inside(new) if isinstance(new, Reduction) and new.over == KEY_AXIS else new
    return done[root]


def _beside_sums(level: Node, result: Node) -> bool:
    """Whether ``level`` stands in ``result`` elsewhere than in what is summed along keys."""
    sums: dict[Node, Node] = {
        x: ir.Symbol("sum", x.axes, "float") for x in reductions(result) if x.over == KEY_AXIS
    }
    return ir.depends(ir.substitute(result, sums), [level])


def _keys_inside(x: Reduction) -> Node:
    """``x``, a sum over keys, of which an operand may be a sum over an axis that the other has not."""
    for place, operand in enumerate(x.args):
        if not isinstance(operand, ir.Reduce) or operand.op != "sum" or operand.over not in OPEN_AXES:
            continue
        if not any(operand.over in other.axes for other in x.args):
            inner = ir.rebuild(x, (*x.args[:place], operand.x, *x.args[place + 1 :]))
            assert isinstance(inner, Reduction)
            return ir.total(_keys_inside(inner), operand.over)
    return x


def _by_rows(root: Node, total: Node) -> Node | None:
    """``root``, which has no positions or is a number of each row, with ``total`` taken out of sums of rows.

    ``sum_kv w (x - total) = sum_kv w x - total sum_kv w``: one walk sums all three from the same weights, and
    a number made of many terms rounds less than where ``total`` is made of results that were rounded to be
    stored. None where it stands elsewhere.
    """
    if _POSITIONS & set(root.axes) and (KEY_AXIS in root.axes or not OPEN_AXES.issuperset(root.axes)):
        return None
    found: dict[Node, Node] = {}
    for node in ir.walk([root]):
        if isinstance(node, Reduction) and node.over == KEY_AXIS and node is not total:
            term = ir.mul(node.x, node.y) if isinstance(node, Contract) else node.x
            parts = _affine(term, total)
            if parts is not None and parts[1] is not ZERO:
                rest, factor = (ir.total(part, KEY_AXIS) for part in parts)
                found[node] = ir.add(rest, ir.mul(total, factor))
    bare = ir.substitute(root, dict.fromkeys(found, ZERO))
    return ir.substitute(root, found) if found and not ir.depends(bare, [total]) else None


def _affine(x: Node, at: Node) -> tuple[Node, Node] | None:
    """(a, b) with ``x = a + b * at``; None where ``x`` is no such sum."""
    if x is at or x is ir.finite(at):
        return ZERO, ONE
    if not ir.depends(x, [at]):
        return x, ZERO
    if not isinstance(x, Map) or x.op not in ("add", "neg", "finite", "where", "mul", "div", "quotient"):
        return None
    fixed = {"where": (0,), "div": (1,), "quotient": (1,)}.get(x.op, ())
    if x.op == "mul":
        fixed = (1,) if ir.depends(x.args[0], [at]) else (0,)
    if any(ir.depends(x.args[i], [at]) for i in fixed):
        return None
    parts = [(arg, arg) if i in fixed else _affine(arg, at) for i, arg in enumerate(x.args)]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return ir.rebuild(x, tuple(a for a, _ in known)), ir.rebuild(x, tuple(b for _, b in known))


def _labels(forward: Graph, sources: Iterable[Source], kept: Iterable[Input]) -> tuple[str, ...]:
    """What text calls the tensors: as that of the forward direction, ``dX`` for the gradient of X."""
    arguments, outputs = names_of(forward)
    found = []
    for kind, place in sources:
        name = arguments[place] if kind == "argument" else outputs[place]
        found.append(f"d{name}" if kind == "gradient" else name)
    return (*found, *(f"d{arguments[argument.position]}" for argument in kept))


def _placed(argument: Input | Scalar, name: str, place: int, numbered: Mapping[Node, Node]) -> Input | Scalar:
    """``argument`` at its place, behind those ``numbered``; others are names in what it holds."""
    if isinstance(argument, Scalar):
        return Scalar(name, place, argument.stored)
    holds = argument.holds
    if holds is not None:
        others = [
            node for node in ir.walk([holds]) if isinstance(node, Input | Scalar) and node not in numbered
        ]
        names: dict[Node, Node] = {
            node: ir.Symbol(f"other{node.position}", node.axes, node.kind) for node in others
        }
        holds = ir.substitute(holds, {**numbered, **names})
    return Input(name, place, argument.layout, argument.stored, argument.sorted, holds, argument.is_gradient)


def _layout(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Axes as a tensor has them: the pair of heads as one."""
    axes = tuple(axes)
    pair = "hk" in axes and "g" in axes
    return tuple("h" if axis == "hk" and pair else axis for axis in axes if not (axis == "g" and pair))


def _divisors(nodes: Iterable[Node]) -> list[Node]:
    """Values of a row that something is divided by, or that a logarithm is taken of."""
    found: dict[Node, None] = {}
    for node in nodes:
        if isinstance(node, Map) and node.op in ("div", "quotient", "log", "log2"):
            total = node.args[-1]
            if reductions(total):
                found[total] = None
    return list(found)


def _logarithm(total: Node, power: float) -> Node:
    """By how much a reference is moved for ``total``, which grows by ``exp(power * d)``, to become 1."""
    if power == -1.0:
        return ir.function("log", total)
    if math.isclose(power, -math.log(2.0)):
        return ir.function("log2", total)
    return ir.mul(ir.function("log", total), Const(-1.0 / power))


def _shared(root: Node, level: Node, point: Node, share: Node, bases: Iterable[str]) -> Node:
    """``root`` with exponentials measured from ``level`` measured from ``point`` and multiplied by ``share``,
    which that differs by: rounding takes nothing from the two."""
    taken = ir.neg(ir.finite(level))
    done: dict[Node, Node] = {}
    for node in ir.walk([root]):
        new = ir.rebuild(node, tuple(done[arg] for arg in node.args)) if node.args else node
        if isinstance(new, Map) and new.op in bases:
            (exponent,) = new.args
            if isinstance(exponent, Map) and exponent.op == "add" and taken in exponent.args:
                from_point = ir.substitute(exponent, {taken: ir.neg(ir.finite(point))})
                new = ir.mul(ir.function(new.op, from_point), share)
        done[node] = new
    return done[root]


def _statistics(roots: Iterable[Node]) -> int:
    """How many sums and maxima over keys stand in ``roots``."""
    return sum(isinstance(node, ir.Reduce) and node.over == KEY_AXIS for node in ir.walk(roots))


def _tidied(root: Node, arguments: Mapping[Input | Scalar, Source]) -> Node:
    """``root`` without divisions by 1 and what guards against maxima that no longer stand in it, and with one
    constant in a product: two that cancel would round."""
    done: dict[Node, Node] = {}
    for node in ir.walk([root]):
        new = ir.rebuild(node, tuple(done.get(arg, arg) for arg in node.args)) if node.args else node
        if isinstance(new, Map) and _says_nothing(new, arguments):
            new = new.args[0]
        done[node] = _with_one_constant(new)
    return done[root]


def _with_one_constant(x: Node) -> Node:
    """``x``, the product of a constant and of what has one already, with the product of the two."""
    if isinstance(x, Map) and x.op == "mul":
        for factor, other in (x.args, x.args[::-1]):
            if isinstance(factor, Const) and (found := _scaled(other, float(factor.value))) is not None:
                return found
    return x


def _scaled(x: Node, by: float) -> Node | None:
    """``by * x`` by changing a constant that ``x`` is a multiple of; None where it is of none."""
    if isinstance(x, Const):
        return Const(x.value * by)
    if not isinstance(x, Map) or x.op not in ("mul", "div", "quotient", "neg"):
        return None
    if x.op == "div" and isinstance(x.args[1], Const) and x.args[1].value:
        return ir.mul(x.args[0], Const(by / x.args[1].value))
    for i, arg in enumerate(x.args if x.op == "mul" else x.args[:1]):
        found = _scaled(arg, by)
        if found is not None:
            return ir.rebuild(x, (*x.args[:i], found, *x.args[i + 1 :]))
    return None


def _says_nothing(x: Map, arguments: Mapping[Input | Scalar, Source]) -> bool:
    """Whether ``x`` is its first operand in any case."""
    if x.op == "quotient":
        return x.args[1] is ONE
    value = x.args[0]
    is_kept = isinstance(value, Input) and arguments[value][0] == "output"
    return x.op == "finite" and not x.maxima and not is_kept
