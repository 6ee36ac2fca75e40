"""One stage under construction: its reductions become states, each in the first walk that can hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fagen.derive.fit import Weighed, reach, sides, weigh
from fagen.derive.invariance import free_references
from fagen.derive.notes import listed, plainly
from fagen.derive.own_maximum import from_own_maxima
from fagen.derive.proof import defer_by_proof
from fagen.derive.running import Placed, are_bounded, old, ratio
from fagen.derive.separate import Reduction, Separated, Separator, leave_maximum, nearest
from fagen.derive.signs import nonnegative, positive
from fagen.derive.vanish import limits, live
from fagen.derive.walk import Note, Product, Rule, Stage, State, Term, Walk
from fagen.ir import graph as ir
from fagen.ir.graph import (
    MINUS_INF,
    ONE,
    ZERO,
    Axis,
    Const,
    Contract,
    Map,
    Node,
    Output,
    Random,
    Reduce,
    Scatter,
    Symbol,
)


def build_stage(name: str, axis: Axis, outputs: tuple[Output, ...]) -> tuple[Stage, list[Note]]:
    """The stage that walks along ``axis`` for ``outputs``, all of which one can compute (`fit.unfit`)."""
    computed = frozenset(ir.walk(output.node for output in outputs))
    return _StageBuilder(name, axis, outputs, computed).build()


@dataclass(frozen=True)
class _Fact:
    """A note in the making: ``nodes`` stand in the ``{}`` of ``text``, under their final names."""

    rule: Rule
    text: str
    nodes: tuple[Node, ...]


@dataclass
class _StageBuilder:
    """What is known of a stage so far."""

    name: str
    axis: Axis
    outputs: tuple[Output, ...]
    computed: frozenset[Node]
    """Every node of the outputs."""
    products: dict[Node, Product] = field(default_factory=dict)
    states: list[Placed] = field(default_factory=list)
    row: dict[Node, Node] = field(default_factory=dict)
    """Each reduction over the axis as an expression of states."""
    level: dict[Node, int] = field(default_factory=dict)
    symbols: dict[Node, Symbol] = field(default_factory=dict)
    """Each reduction over the axis as the symbol of its state, for notes."""
    facts: list[_Fact] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def build(self) -> tuple[Stage, list[Note]]:
        for node in ir.walk(output.node for output in self.outputs):
            if isinstance(node, Reduction) and node.over == self.axis:
                self._add(node)
        results, stores = [], []
        for output in self.outputs:
            if self.axis in reach(output.node):
                level = self._known_after(output.node)
                stores.append((level, replace(output, node=self._tile(output.node))))
                if level:
                    self._wait(output.name, level, self._statistics(output.node))
            else:
                results.append(replace(output, node=ir.substitute(output.node, self.row)))
        levels = range(1 + max([placed.level for placed in self.states] + [level for level, _ in stores]))
        walks = tuple(self._walk(level, stores) for level in levels)
        features = {axis for placed in self.states for axis in placed.state.features}
        axes = {axis for placed in self.states for axis in placed.state.symbol.axes}
        axes |= {axis for output in self.outputs for axis in reach(output.node)}
        own = ir.sort_axes(axes - features - {self.axis})
        names = self._names()
        stage = from_own_maxima(_renamed(Stage(self.name, own, self.axis, walks, tuple(results)), names))
        return stage, self._notes(stage, names)

    def _known_after(self, x: Node) -> int:
        """The first walk in which every statistic below ``x`` is known."""
        return max((self.level[r] + 1 for r in self._statistics(x)), default=0)

    def _statistics(self, x: Node) -> list[Reduction]:
        return [r for r in nearest([x]) if r.over == self.axis]

    # ----------------------------------------------------------------------------------------------- states

    def _add(self, node: Reduction) -> None:
        weighed = weigh(node, self.axis) if isinstance(node, Contract) else Weighed(node.x, None, (), ONE)
        is_max = isinstance(node, Reduce) and node.op == "max"
        identity = MINUS_INF if is_max else ZERO
        statistics = self._statistics(weighed.weights)
        level = max((self.level[s] for s in statistics), default=0)
        waiting = [s for s in statistics if self.level[s] == level]
        found = (self._leave_max if is_max else self._leave_sum)(weighed.weights, waiting)
        conditions, kept = live(self._tile(found.kept), identity)
        running = [placed for placed in self.states if placed.level == level]
        late = not found.complete or (bool(found.exponents) and not are_bounded(kept, conditions, running))
        if late:
            level += 1
            found = Separated(ONE, weighed.weights)
            conditions, kept = live(self._tile(weighed.weights), identity)
        kept, outer = leave_maximum(kept, node.axes) if is_max else (kept, _itself)
        state = State(
            symbol=Symbol("", node.axes, "float"),
            op="max" if is_max else "sum",
            value=kept,
            operand=weighed.rows,
            features=weighed.features,
            rescale=ratio(found.exponents, self.row, running) if found.exponents else None,
        )
        symbol = self._place(Placed(level, state, conditions))
        self.level[node] = level
        self.symbols[node] = symbol
        result = ir.mul(self._result(found, outer(symbol), is_max), weighed.factor)
        self.row[node] = ir.substitute(result, self.row)
        if late:
            self._wait(symbol, level, waiting)
        what = "maximum" if is_max else "sum"
        for part, neutral in ((found.deferred, ONE), (found.added, ZERO)):
            if part is not neutral:
                self._fact(
                    "defer", f"{{}} is constant along {self.axis} and leaves the {what} {{}}", part, symbol
                )

    def _place(self, placed: Placed) -> Symbol:
        """The symbol of a state: that of an equal one, or a new one."""
        for other in self.states:
            if replace(other, state=replace(other.state, symbol=placed.state.symbol)) == placed:
                return other.state.symbol
        letter = "m" if placed.state.op == "max" else "acc" if placed.state.operand else "l"
        symbol = Symbol(self._fresh(letter), placed.state.symbol.over, "float")
        self.states.append(replace(placed, state=replace(placed.state, symbol=symbol)))
        return symbol

    def _leave_sum(self, value: Node, waiting: list[Reduction]) -> Separated:
        """``sum value`` by rules 1 and 2."""
        separator = Separator(self.axis, waiting, self.computed)
        found = separator.factors(value)
        if not found.complete and not separator.out_of_range:
            return defer_by_proof(value, self.axis, waiting) or found
        return found

    def _leave_max(self, value: Node, waiting: list[Reduction]) -> Separated:
        """``max value``: factors that are not negative leave it, and summands, also of an exponent."""
        separator = Separator(self.axis, waiting, self.computed)
        added, rest = separator.summands(value)
        if separator.free(rest):
            return Separated(ONE, rest, added=added)
        found = separator.factors(value)
        if not nonnegative(found.deferred):
            return replace(found, complete=False)
        if found.complete and found.exponents:
            if not isinstance(found.kept, Map) or found.kept.op not in ("exp", "exp2"):
                return replace(found, complete=False)
            added, rest = separator.summands(found.kept.args[0])
            return Separated(found.deferred, rest, added=added, outer=found.kept.op)
        return found

    def _result(self, found: Separated, state: Node, is_max: bool) -> Node:
        """What a state stands for. Where no element counted that is 0 or -inf, too."""
        value = ir.add(found.added, state)
        if found.outer:
            value = ir.mul(found.deferred, ir.function(found.outer, value))
            return ir.where(ir.le(Const(1), ir.size(self.axis)), value, MINUS_INF)
        value = ir.mul(found.deferred, value)
        if is_max and not (positive(found.deferred) and self._settles(found.added)):
            return ir.where(ir.lt(MINUS_INF, state), value, MINUS_INF)
        if not self._settles(found.deferred):
            return ir.where(ir.eq(state, ZERO), ZERO, value)
        return value

    def _settles(self, x: Node) -> bool:
        """Whether ``x`` is a number in a row where every sum is 0 and every maximum -inf."""
        empty: dict[Node, Node] = {
            r: MINUS_INF if isinstance(r, Reduce) and r.op == "max" else ZERO for r in self._statistics(x)
        }
        value = limits(ir.substitute(x, empty)) if empty else x
        return not any(
            (isinstance(node, Const) and node.value in (float("inf"), float("-inf")))
            or (isinstance(node, Map) and node.op == "div" and node.args[1] is ZERO)
            for node in ir.walk([value])
        )

    def _fresh(self, letter: str) -> str:
        number = self.counts.get(letter, 0)
        self.counts[letter] = number + 1
        return f"{letter}{number}"

    # ------------------------------------------------------------------------------------------------ tiles

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
            found = sides(x, self.axis)
            assert found is not None
            return (Term(*found, x.over),)
        if isinstance(x, Map) and x.op == "add" and x.kind == "float":
            parts = [self._terms(arg) for arg in x.args]
            if all(part is not None for part in parts):
                return tuple(term for part in parts if part is not None for term in part)
        return None

    def _walk(self, level: int, stores: list[tuple[int, Output]]) -> Walk:
        placed = [p for p in self.states if p.level == level]
        counted = [_counted(output) for at, output in stores if at == level]
        written = tuple(output for _, output in counted)
        first, *others = [*(p.conditions for p in placed), *(c for c, _ in counted)] or [()]
        shared = [c for c in first if _is_positional(c) and all(c in other for other in others)]
        guarded = []
        for p in placed:
            rest = ir.conjunction(*(c for c in p.conditions if c not in shared))
            identity = MINUS_INF if p.state.op == "max" else ZERO
            guarded.append(replace(p.state, value=ir.where(rest, p.state.value, identity)))
        used = {node for state in guarded for node in ir.walk([state.value])}
        used |= {node for output in written for node in ir.walk([output.node])}
        return Walk(
            guard=ir.conjunction(*shared),
            products=tuple(product for product in self.products.values() if product.symbol in used),
            states=tuple(guarded),
            stores=written,
        )

    # ------------------------------------------------------------------------------------------------ notes

    def _fact(self, rule: Rule, text: str, *nodes: Node) -> None:
        self.facts.append(_Fact(rule, text, nodes))

    def _wait(self, what: Node | str, level: int, statistics: list[Reduction]) -> None:
        """Note that ``what`` is computed in a later walk."""
        needed = sorted((self.symbols[s] for s in statistics), key=lambda symbol: symbol.name)
        subject, shown = (what, needed) if isinstance(what, str) else ("{}", [what, *needed])
        marks = listed("{}" for _ in needed)
        self._fact(
            "several walks", f"{subject} needs {marks} of the whole row: walk {level + 1} computes it", *shown
        )

    def _names(self) -> dict[Node, Node]:
        """New names for symbols: the number is left out where there is only one of a letter."""
        symbols = [product.symbol for product in self.products.values()]
        symbols += [placed.state.symbol for placed in self.states]
        names: dict[Node, Node] = {}
        for symbol in symbols:
            letter = symbol.name.rstrip("0123456789")
            if self.counts[letter] == 1:
                names[symbol] = new = Symbol(letter, symbol.over, symbol.stored)
                names[old(symbol)] = old(new)
        return names

    def _notes(self, stage: Stage, names: Mapping[Node, Node]) -> list[Note]:
        states = [state for walk in stage.walks for state in walk.states]
        known = {**self.symbols, **{node: product.symbol for node, product in self.products.items()}}
        notes = []
        if self.products and not self.facts and not any(state.rescale for state in states):
            text = f"no value along {self.axis} waits for a statistic of its row"
            notes.append(Note("nothing to stream", text))
        for fact in self.facts:
            shown = (plainly(ir.substitute(ir.substitute(x, known), names)) for x in fact.nodes)
            notes.append(Note(fact.rule, fact.text.format(*shown)))
        ratios: dict[Node, list[str]] = {}
        for state in states:
            if state.rescale is not None:
                ratios.setdefault(state.rescale, []).append(state.symbol.name)
        for change, scaled in ratios.items():
            standing = {node.name for node in ir.walk([change]) if isinstance(node, Symbol)}
            running = listed(sorted(name for name in standing if f"{name}_old" in standing))
            verb = "uses" if len(scaled) == 1 else "use"
            text = f"{listed(scaled)} {verb} the running {running}, times {plainly(change)} when it changes"
            notes.append(Note("rescale", text))
        notes += (Note("free reference", reference.proof) for reference in free_references(stage))
        return notes


def _itself(x: Node) -> Node:
    return x


def _counted(output: Output) -> tuple[tuple[Node, ...], Output]:
    """Conditions without which an element of ``output`` is not needed, and ``output`` that asks for no more.

    What is stored is needed anyway; what is added to a table is not where it is 0.
    """
    node = output.node
    if not isinstance(node, Scatter):
        return (), output
    conditions, kept = live(node.value, ZERO)
    value = ir.where(ir.conjunction(*conditions), kept, ZERO)
    return conditions, replace(output, node=Scatter(node.table, node.indices, value))


def _is_positional(condition: Node) -> bool:
    """Whether ``condition`` depends on positions, tables and scalars alone."""
    return not any(isinstance(node, Symbol | Random) for node in ir.walk([condition]))


def _renamed(stage: Stage, names: Mapping[Node, Node]) -> Stage:
    """``stage`` with other symbols."""

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
