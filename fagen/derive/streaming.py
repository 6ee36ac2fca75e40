"""From a graph to walks: which values are accumulated tile by tile, by which rules, and what must be stored after all.

A reduction whose operand uses another reduction of the same row (a row *statistic*) resists: the statistic is known only
at the end of the walk. Three rules remove it, tried in this order, each proved on the expression at hand:

1. *defer*: a factor constant along the walk leaves the sum;
2. *rescale*: a statistic in the exponent of an exponential factor may be replaced by its running value, if what was
   accumulated is multiplied by the ratio of that factor when the statistic changes (Milakov and Gimelshein, Online
   normalizer calculation for softmax, 2018; FlashAttention's recurrence is the case of softmax);
3. *several walks*: what neither removes is computed in a later walk, where the statistic is known.

What no walk can hold (a contraction over an own axis of values that have the walk's axis) is stored and becomes the
input of a later stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from fagen.derive.separate import Separated, Separator, live, nonnegative
from fagen.derive.walk import Derivation, Note, Product, Rule, Stage, State, Term, Walk
from fagen.ir import graph as ir
from fagen.ir.graph import (
    MINUS_INF,
    ONE,
    ZERO,
    Axis,
    Contract,
    Graph,
    Input,
    Map,
    Node,
    Output,
    Random,
    Reduce,
    Symbol,
)
from fagen.ir.show import show

Fusion: TypeAlias = Literal["full", "products", "none"]
Reduction: TypeAlias = Reduce | Contract


def derive(graph: Graph, fusion: Fusion = "full") -> Derivation:
    """The stages of ``graph``.

    ``fusion`` is ``full`` (as few stages as the rules allow), ``products`` (each contraction and each row statistic a
    stage, with element-wise work fused into them) or ``none`` (each operation on tiles a stage of its own).
    """
    return _Deriver(graph, fusion).run()


def _nearest(roots: Iterable[Node], through: Axis | None = None) -> list[Reduction]:
    """Reductions below ``roots`` with no other on the way, unless that is over the axis ``through``."""
    found: dict[Reduction, None] = {}
    seen: set[Node] = set()
    stack = list(roots)[::-1]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Reduction):
            if node.over != through:
                found[node] = None
                continue
        stack.extend(node.args[::-1])
    return list(found)


def _reductions(x: Node) -> list[Reduction]:
    return [node for node in ir.walk([x]) if isinstance(node, Reduction)]


@dataclass
class _Deriver:
    """The program's outputs turned into stages; ``stored`` maps a value kept in memory to the input that reads it."""

    graph: Graph
    fusion: Fusion
    stages: list[Stage] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    stored: dict[Node, Node] = field(default_factory=dict)
    buffers: int = 0

    def run(self) -> Derivation:
        if self.fusion != "full":
            self._cut()
        pending = list(self.graph.outputs)
        while pending:
            first = self._axis_of(self._current(pending[0].node))
            group = [output for output in pending if self._axis_of(self._current(output.node)) == first]
            pending = [output for output in pending if output not in group]
            self._stage(self.graph.name, group)
        return Derivation(tuple(self.stages), tuple(self.notes))

    def note(self, rule: Rule, text: str) -> None:
        note = Note(rule, text)
        if note not in self.notes:
            self.notes.append(note)

    def _current(self, x: Node) -> Node:
        return ir.substitute(x, self.stored)

    # ----------------------------------------------------------------------------------- what goes through memory

    def _store(self, x: Node, why: str | None = None) -> None:
        """Make ``x`` a stage of its own, read back as an input."""
        if x in self.stored:
            return
        if why:
            self.note("materialise", f"{show(x)} is stored: {why}")
        value = self._current(x)
        name, position = f"t{self.buffers}", len(self.graph.arguments) + self.buffers
        self.buffers += 1
        self._stage(name, [Output(value, name, value.axes)])
        self.stored[x] = self.stored[value] = Input(name, position, value.axes, "float")

    def _cut(self) -> None:
        """Store what ``fusion`` says goes through memory."""
        nodes = ir.walk(output.node for output in self.graph.outputs)
        outputs = {output.node for output in self.graph.outputs}
        overs = {node.over for node in nodes if isinstance(node, Reduction)}
        for node in nodes:
            if self.fusion == "none":
                tile = (
                    isinstance(node, Map)
                    and node.kind == "float"
                    and bool(overs & set(node.axes))
                    and bool(_reductions(node))
                )
                if (tile or isinstance(node, Reduction)) and node not in outputs:
                    self._store(node)
            elif isinstance(node, Reduction):
                for operand in node.args:
                    tops = _nearest([self._current(operand)])
                    if tops and not any(_reductions(arg) for top in tops for arg in top.args):
                        if not any(isinstance(top, Reduce) for top in tops):
                            self._store(self._current(operand))
                if isinstance(node, Reduce):
                    self._store(node)

    # ------------------------------------------------------------------------------------------------ one stage

    def _axis_of(self, root: Node) -> Axis | None:
        """The axis to walk along for ``root``: every nearest reduction is over it, or has it as an axis."""
        tops = _nearest([root])
        axes = dict.fromkeys(top.over for top in tops)
        for axis in axes:
            if all(top.over == axis or axis in top.axes for top in tops):
                return axis
        return max(tops, key=lambda top: top.size).over if tops else None

    def _stage(self, name: str, outputs: list[Output]) -> None:
        while True:
            outputs = [replace(output, node=self._current(output.node)) for output in outputs]
            axis = self._axis_of(outputs[0].node)
            unfit = self._unfit([output.node for output in outputs], axis) if axis else None
            if unfit is None:
                break
            self._store(*unfit)
        if axis is None:
            own = ir.sort_axes(a for output in outputs for a in output.node.axes)
            self.stages.append(Stage(name, own, None, (), tuple(outputs)))
        else:
            self.stages.append(_StageBuilder(self, name, axis, tuple(outputs)).build())

    def _unfit(self, roots: list[Node], axis: Axis) -> tuple[Node, str] | None:
        """A value below ``roots`` that a walk along ``axis`` can't compute, and why; None if it can compute all."""
        results = {a for root in roots for a in root.axes}
        inners = _nearest(roots, through=axis)
        fits = [inner for inner in inners if inner.over not in results and _is_product(inner, axis)]
        for inner in inners:
            if inner in fits:
                continue
            for top in _nearest(roots):
                for operand in top.args:
                    below = _reductions(operand)
                    if inner in below and not any(r in fits or r.over == axis for r in below):
                        return operand, f"the sum over {top.over} needs all of it"
            reducing = [arg for arg in inner.args if _reductions(arg)]
            if reducing:
                return reducing[0], f"the sum over {inner.over} needs whole rows along {axis} of it"
            if inner.over in results:
                return inner, f"the sum over {inner.over} lies inside a result with an axis {inner.over}"
            return inner, f"it is no product of a row and a column of the walk along {axis}"
        return None


def _is_product(x: Reduction, axis: Axis) -> bool:
    """Whether a tile of ``x`` along ``axis`` is a product of a row and a column, computed from inputs."""
    return isinstance(x, Contract) and not any(map(_reductions, x.args)) and _sides(x, axis) is not None


def _sides(product: Contract, axis: Axis) -> tuple[Node, Node] | None:
    """The operands of a tile's product as (own side, walk side), if only one has the walk's axis."""
    for own, walk in ((product.x, product.y), (product.y, product.x)):
        if axis not in own.axes and axis in walk.axes:
            return own, walk
    return None


@dataclass
class _StageBuilder:
    """One stage under construction: its reductions over ``axis`` become states, each in the first walk that can hold it."""

    parent: _Deriver
    name: str
    axis: Axis
    outputs: tuple[Output, ...]
    products: dict[Node, Product] = field(default_factory=dict)
    states: list[tuple[int, State, tuple[Node, ...]]] = field(default_factory=list)
    """(walk, state, conditions under which an element counts)"""
    row: dict[Node, Node] = field(default_factory=dict)
    """Each reduction over the axis as an expression of states."""
    level: dict[Node, int] = field(default_factory=dict)
    names: dict[Node, Node] = field(default_factory=dict)
    """Each reduction over the axis as the symbol of its state, for notes."""
    counts: dict[str, int] = field(default_factory=dict)

    def build(self) -> Stage:
        for node in ir.walk(output.node for output in self.outputs):
            if isinstance(node, Reduction) and node.over == self.axis:
                self._add(node)
        results, stores = [], []
        for output in self.outputs:
            if self.axis in output.node.axes:
                stores.append((self._known_after(output.node), replace(output, node=self._tile(output.node))))
            else:
                results.append(replace(output, node=ir.substitute(output.node, self.row)))
        if len(self.states) == 1 and not self.products and not stores:
            pass
        elif not any(state.rescale for _, state, _ in self.states) and len(self._levels(stores)) == 1:
            self.parent.note("nothing to stream", "no value along the walk waits for a statistic of its row")
        walks = tuple(self._walk(level, stores) for level in self._levels(stores))
        features = {axis for _, state, _ in self.states for axis in state.features}
        own = ir.sort_axes(
            axis
            for node in (
                *(state.symbol for _, state, _ in self.states),
                *(output.node for output in self.outputs),
            )
            for axis in node.axes
            if axis not in features and axis != self.axis
        )
        return _renamed(Stage(self.name, own, self.axis, walks, tuple(results)))

    def _levels(self, stores: list[tuple[int, Output]]) -> range:
        return range(1 + max([level for level, _, _ in self.states] + [level for level, _ in stores]))

    def _known_after(self, x: Node) -> int:
        """The first walk in which every statistic below ``x`` is known."""
        return max((self.level[r] + 1 for r in self._statistics(x)), default=0)

    def _statistics(self, x: Node) -> list[Reduction]:
        return [r for r in _nearest([x]) if r.over == self.axis]

    # ------------------------------------------------------------------------------------------------- states

    def _add(self, node: Reduction) -> None:
        value, operand = _weights(node) if isinstance(node, Contract) else (node.x, None)
        statistics = self._statistics(value)
        level = max((self.level[s] for s in statistics), default=0)
        waiting = frozenset(s for s in statistics if self.level[s] == level)
        separator = Separator(self.axis, waiting)
        if isinstance(node, Reduce) and node.op == "max":
            found, summand = _leave_max(separator, value)
        else:
            found, summand = separator.factors(value), ZERO
        if not found.complete:
            level += 1
            self.parent.note(
                "several walks",
                f"{self._named(value)} needs {', '.join(sorted(self._named(s) for s in waiting))} of its whole row: "
                f"walk {level + 1} computes it",
            )
            found, summand = Separated(ONE, value), ZERO
        identity = MINUS_INF if isinstance(node, Reduce) and node.op == "max" else ZERO
        conditions, kept = live(self._tile(found.kept), identity)
        features = [a for a in operand.axes if a != self.axis and a not in value.axes][-1:] if operand else ()
        symbol = Symbol(
            self._fresh("m" if identity is MINUS_INF else "acc" if operand else "l"), node.axes, "float"
        )
        state = State(
            symbol=symbol,
            op="max" if identity is MINUS_INF else "sum",
            value=kept,
            operand=operand,
            features=tuple(features),
            rescale=self._ratio(found.exponents) if found.exponents else None,
        )
        self.states.append((level, state, conditions))
        self.level[node] = level
        text = f"{state.op}_{self.axis} {show(kept)}" + (f" * {show(operand)}" if operand else "")
        result = ir.add(summand, ir.mul(found.deferred, symbol))
        if waiting and result is not symbol:
            self.parent.note(
                "defer", f"{self._named(node)} = {self._named(result)} with {symbol.name} = {text}"
            )
        if state.rescale is not None:
            self.parent.note(
                "rescale",
                f"{symbol.name} uses the running {', '.join(s.name for s in self._running(state))} "
                f"and is multiplied by {show(state.rescale)} when it changes",
            )
        self.row[node] = ir.substitute(result, self.row)
        self.names[node] = symbol

    def _named(self, x: Node) -> str:
        symbols = {node: product.symbol for node, product in self.products.items()}
        return show(ir.substitute(x, {**symbols, **self.names}))

    def _running(self, state: State) -> list[Symbol]:
        own = {s.symbol for _, s, _ in self.states}
        return [node for node in ir.walk([state.value]) if isinstance(node, Symbol) and node in own]

    def _fresh(self, letter: str) -> str:
        number = self.counts.get(letter, 0)
        self.counts[letter] = number + 1
        return f"{letter}{number}"

    def _ratio(self, exponents: tuple[tuple[str, Node], ...]) -> Node:
        """What the factors ``exp(exponent)`` are multiplied by when the states in them change.

        Before the first element a maximum is -inf and what was accumulated is 0: the ratio is then made 0.
        """
        ratio: Node = ONE
        for base, exponent in exponents:
            new = ir.substitute(exponent, self.row)
            states = [node for node in ir.walk([new]) if isinstance(node, Symbol)]
            maxima = {s.symbol for _, s, _ in self.states if s.op == "max"}
            old = ir.substitute(new, {s: _old(s) for s in states})
            # exp(-m) shrinks as the maximum grows: with m_old = -inf itself in its place, the ratio is 0
            falls = (
                isinstance(new, Map)
                and new.op == "neg"
                and isinstance(new.args[0], Map)
                and new.args[0].op == "finite"
            )
            if falls:
                assert isinstance(old, Map) and isinstance(old.args[0], Map)
                change = ir.sub(new, ir.neg(old.args[0].args[0]))
                ratio = ir.mul(ratio, ir.function(base, change))
            else:
                factor = ir.function(base, ir.sub(new, old))
                for s in states:
                    if s in maxima:
                        factor = ir.where(ir.lt(MINUS_INF, _old(s)), factor, ZERO)
                ratio = ir.mul(ratio, factor)
        return ratio

    # --------------------------------------------------------------------------------------------------- tiles

    def _tile(self, x: Node) -> Node:
        """``x`` with its products and statistics replaced by their symbols."""
        return ir.substitute(x, {**self.row, **self._products_in(x)})

    def _products_in(self, x: Node) -> Mapping[Node, Node]:
        found: dict[Node, Node] = {}
        stack, seen = [x], set[Node]()
        while stack:
            node = stack.pop()
            if node in seen or node in self.row:
                continue
            seen.add(node)
            terms = self._terms(node)
            if terms is None:
                stack.extend(node.args[::-1])
                continue
            if node not in self.products:
                self.products[node] = Product(Symbol(self._fresh("s"), node.axes, "float"), terms)
            found[node] = self.products[node].symbol
        return found

    def _terms(self, x: Node) -> tuple[Term, ...] | None:
        """``x`` as a sum of products of a tile, or None."""
        if isinstance(x, Contract) and x.over != self.axis:
            sides = _sides(x, self.axis)
            assert sides is not None
            return (Term(*sides, x.over),)
        if isinstance(x, Map) and x.op == "add" and x.kind == "float":
            parts = [self._terms(arg) for arg in x.args]
            if all(part is not None for part in parts):
                return tuple(term for part in parts if part is not None for term in part)
        return None

    def _walk(self, level: int, stores: list[tuple[int, Output]]) -> Walk:
        states = [(state, conditions) for at, state, conditions in self.states if at == level]
        written = tuple(output for at, output in stores if at == level)
        shared: list[Node] = []
        if states and not written:
            shared = [c for c in states[0][1] if _positional(c) and all(c in others for _, others in states)]
        guarded = []
        for state, conditions in states:
            rest = ir.conjunction(*(c for c in conditions if c not in shared))
            identity = MINUS_INF if state.op == "max" else ZERO
            guarded.append(replace(state, value=ir.where(rest, state.value, identity)))
        used = {node for state in guarded for node in ir.walk([state.value])}
        used |= {node for output in written for node in ir.walk([output.node])}
        return Walk(
            guard=ir.conjunction(*shared),
            products=tuple(product for product in self.products.values() if product.symbol in used),
            states=tuple(guarded),
            stores=written,
        )


def _old(symbol: Symbol) -> Symbol:
    return Symbol(f"{symbol.name}_old", symbol.over, symbol.stored)


def _positional(condition: Node) -> bool:
    """Whether ``condition`` depends on positions, tables and scalars alone."""
    return not any(isinstance(node, Symbol | Random) for node in ir.walk([condition]))


def _weights(node: Contract) -> tuple[Node, Node | None]:
    """The operands of a sum along the walk as (weights, rows that are weighted)."""
    x, y = node.x, node.y
    if _reductions(y) and _reductions(x):
        return ir.mul(x, y), None
    if _reductions(y):
        return y, x
    if not _reductions(x) and len(set(y.axes) - set(x.axes)) > 1:
        return y, x
    if not _reductions(x) and (len(x.axes), x.order) < (len(y.axes), y.order):
        return y, x
    return x, y


def _leave_max(separator: Separator, value: Node) -> tuple[Separated, Node]:
    """``max value = summand + deferred * max kept``: what is constant along the walk leaves a maximum."""
    summand, rest = separator.summands(value)
    if separator.free(rest):
        return Separated(ONE, rest), summand
    found = separator.factors(value)
    if found.exponents or not nonnegative(found.deferred):
        return Separated(ONE, value, complete=False), ZERO
    return found, ZERO


def _renamed(stage: Stage) -> Stage:
    """``stage`` with the number left out of the names of which there is only one."""
    symbols = [symbol for walk in stage.walks for symbol in _introduced(walk)]
    letters = [symbol.name.rstrip("0123456789") for symbol in symbols]
    names: dict[Node, Node] = {}
    for symbol, letter in zip(symbols, letters, strict=True):
        if letters.count(letter) == 1:
            names[symbol] = Symbol(letter, symbol.over, symbol.stored)
            names[_old(symbol)] = Symbol(f"{letter}_old", symbol.over, symbol.stored)

    def rename(x: Node) -> Node:
        return ir.substitute(x, names)

    def symbol_of(x: Symbol) -> Symbol:
        new = names.get(x, x)
        assert isinstance(new, Symbol)
        return new

    walks = tuple(
        Walk(
            guard=walk.guard,
            products=tuple(replace(product, symbol=symbol_of(product.symbol)) for product in walk.products),
            states=tuple(
                replace(
                    state,
                    symbol=symbol_of(state.symbol),
                    value=rename(state.value),
                    rescale=rename(state.rescale) if state.rescale is not None else None,
                )
                for state in walk.states
            ),
            stores=tuple(replace(output, node=rename(output.node)) for output in walk.stores),
        )
        for walk in stage.walks
    )
    outputs = tuple(replace(output, node=rename(output.node)) for output in stage.outputs)
    return replace(stage, walks=walks, outputs=outputs)


def _introduced(walk: Walk) -> list[Symbol]:
    return [*(product.symbol for product in walk.products), *(state.symbol for state in walk.states)]
