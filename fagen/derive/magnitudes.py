"""How large the values of a walk can be, by what is proven of its maxima and of what was kept of rows."""

from __future__ import annotations

from fagen.derive.running import old
from fagen.derive.signs import LOGARITHMS, Bounds, exponentials, positive
from fagen.derive.terms import conjuncts, term_of
from fagen.derive.unscale import common_factor, differences
from fagen.derive.walk import Stage, State, Walk
from fagen.ir import graph as ir
from fagen.ir.graph import MINUS_INF, ONE, TRUE, ZERO, Input, Map, Node, Reduce, Symbol

FP16_MAX = 65504.0


class Magnitudes:
    """Bounds of values, given the walks and maxima known so far."""

    def __init__(self) -> None:
        self._maxima: dict[Symbol, tuple[Node, Node]] = {}
        self._products: dict[Node, Node] = {}
        self._guard: Node = TRUE
        self._bounds = Bounds(self._at_most_0)

    def enter(self, walk: Walk) -> None:
        """Go on to ``walk``, with its products."""
        for product in walk.products:
            whole: Node = ZERO
            for term in product.terms:
                whole = ir.add(whole, ir.contract(term.own, term.walk, term.over))
            self._products[product.symbol] = whole
        self._guard = walk.guard
        self._bounds = Bounds(self._at_most_0)

    def add_maximum(self, state: State, guard: Node) -> None:
        """A state that is the maximum of its value wherever ``guard`` holds."""
        self._maxima[state.symbol] = state.value, guard
        self._bounds = Bounds(self._at_most_0)

    def largest(self, x: Node) -> float:
        """A bound on the size of ``x``, infinite where none is proven."""
        low, high = self._bounds.of(x)
        return max(-low, high)

    def fit_fp16(self, weights: Node) -> bool:
        """Whether ``weights`` may be rounded to fp16."""
        return self.weight(weights) <= FP16_MAX

    def weight(self, weights: Node) -> float:
        """A bound on the size of ``weights``; 0 for gradients, whose size a user chooses and which torch's
        own operations round to fp16, too."""
        whole = ir.walk([ir.substitute(weights, self._products)])
        is_gradient = any(isinstance(node, Input) and node.is_gradient for node in whole)
        return 0.0 if is_gradient else self.largest(weights)

    def nonpositive(self, exponent: Node) -> bool:
        """Whether a running or finished maximum is taken from a value it is the maximum of."""
        return any(positive(c) and self._at_most(a, b) for a, b, c in differences(exponent))

    def _at_most_0(self, exponent: Node) -> bool:
        """The same, also of maxima that were kept: those rounding may leave a little too low."""
        kept = (
            (ir.substitute(a, self._products), b.args[0] if isinstance(b, Map) and b.op == "finite" else b)
            for a, b, c in differences(exponent)
            if positive(c)
        )
        return self.nonpositive(exponent) or any(
            isinstance(b, Input) and b.holds is not None and self._is_below(a, b.holds) for a, b in kept
        )

    def _at_most(self, x: Node, top: Node) -> bool:
        """Whether ``x`` is at most ``top``, a maximum or the larger of one and something."""
        if isinstance(top, Map) and top.op == "finite":
            top = top.args[0]
        if x is top:
            return True
        inner, inner_top, factor = common_factor(x, top)
        if factor is not ONE:
            return positive(factor) and self._at_most(inner, inner_top)
        if isinstance(x, Map) and x.op == "where" and x.args[2] is MINUS_INF:
            conditions = conjuncts(x.args[0])
            value = next((m for m in self._maxima.values() if m[0] is x.args[1]), None)
            return (
                value is not None
                and all(condition in conditions for condition in conjuncts(value[1]))
                and self._at_most(x.args[1], top)
            )
        if isinstance(top, Symbol) and top in self._maxima and (x is self._maxima[top][0] or x is old(top)):
            return True
        if isinstance(top, Map) and top.op == "maximum":
            if isinstance(x, Map) and x.op == "maximum":
                return all(self._at_most(arg, top) for arg in x.args)
            return any(self._at_most(x, arg) for arg in top.args)
        return False

    def _is_below(self, x: Node, level: Node) -> bool:
        """Whether ``x`` is at most ``level``, an expression of the forward direction: the maximum of values
        of which it is one, the larger of that and something, or the logarithm of a sum of exponentials."""
        if isinstance(level, Reduce) and level.op == "max":
            return self._counts_as(x, level.x)
        if not isinstance(level, Map) or level.op not in ("finite", "maximum", "add"):
            return False
        if level.op != "add":
            return any(self._is_below(x, arg) for arg in level.args)
        return any(
            isinstance(log, Map)
            and log.op in LOGARITHMS
            and any(
                base == LOGARITHMS[log.op] and top is ir.finite(point) and self._counts_as(x, value)
                for base, value, top, _ in exponentials(log.args[0])
            )
            for point, log in (level.args, level.args[::-1])
        )

    def _counts_as(self, x: Node, value: Node) -> bool:
        """Whether ``x`` is ``value`` wherever an element counts."""
        if (
            isinstance(value, Map)
            and value.op == "where"
            and value.args[2] is MINUS_INF
            and x is value.args[1]
        ):
            return set(conjuncts(value.args[0])) <= set(conjuncts(self._guard))
        return x is value


def largest_weight(stage: Stage) -> float:
    """A bound on the size of the factors of a stage's weighted sums, gradients aside; infinite where none is
    proven."""
    magnitudes, largest = Magnitudes(), 0.0
    for walk in stage.walks:
        magnitudes.enter(walk)
        for state in walk.states:
            if state.op == "max":
                magnitudes.add_maximum(state, walk.guard)
        weighted = (state for state in walk.states if state.operand is not None and state.features)
        values = [*(term_of(state)[0] for state in weighted), *(partial.value for partial in walk.partials)]
        largest = max(largest, *map(magnitudes.weight, values), 0.0)
    return largest


def may_exceed_fp16(stage: Stage) -> bool:
    """Whether a factor of a stage's weighted sums may be larger than fp16 holds."""
    return largest_weight(stage) > FP16_MAX
