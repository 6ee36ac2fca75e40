"""How large the values of a walk can be, by what is proven of its maxima."""

from __future__ import annotations

from fagen.derive.running import old
from fagen.derive.signs import Bounds, positive
from fagen.derive.terms import conjuncts, term_of
from fagen.derive.unscale import common_factor, differences
from fagen.derive.walk import Stage, State
from fagen.ir.graph import MINUS_INF, ONE, Map, Node, Symbol

FP16_MAX = 65504.0


class Magnitudes:
    """Bounds of values, given the maxima known so far."""

    def __init__(self) -> None:
        self._maxima: dict[Symbol, tuple[Node, Node]] = {}
        self._bounds = Bounds(self.nonpositive)

    def add_maximum(self, state: State, guard: Node) -> None:
        """A state that is the maximum of its value wherever ``guard`` holds."""
        self._maxima[state.symbol] = state.value, guard
        self._bounds = Bounds(self.nonpositive)

    def largest(self, x: Node) -> float:
        """A bound on the size of ``x``, infinite where none is proven."""
        low, high = self._bounds.of(x)
        return max(-low, high)

    def nonpositive(self, exponent: Node) -> bool:
        """Whether a running or finished maximum is taken from a value it is the maximum of."""
        return any(positive(c) and self._at_most(a, b) for a, b, c in differences(exponent))

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


def largest_weight(stage: Stage) -> float:
    """A bound on the factors of a stage's weighted sums, infinite where none is proven."""
    magnitudes, largest = Magnitudes(), 0.0
    for walk in stage.walks:
        for state in walk.states:
            if state.op == "max":
                magnitudes.add_maximum(state, walk.guard)
        weighted = (state for state in walk.states if state.operand is not None and state.features)
        values = [*(term_of(state)[0] for state in weighted), *(partial.value for partial in walk.partials)]
        largest = max(largest, *map(magnitudes.largest, values), 0.0)
    return largest
