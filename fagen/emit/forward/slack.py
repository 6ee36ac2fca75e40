"""How far a maximum may lag behind: while it stays what it is, so do the sums that are measured from it.

A free maximum (`derive.invariance`) only keeps exponents in range. Where it lags, weights are larger than 1
by a factor that what they are rounded to has to hold.
"""

from __future__ import annotations

import math
from functools import cached_property

from fagen.derive.invariance import free_references
from fagen.derive.magnitudes import FP16_MAX, largest_weight
from fagen.derive.running import old
from fagen.derive.unscale import common_factor
from fagen.derive.walk import State, Walk
from fagen.emit.code import PRODUCT
from fagen.emit.forward.elements import ElementBuilder
from fagen.ir import graph as ir
from fagen.ir.graph import ONE, Map, Node

SLACK, EXCEEDED = 5.5, 245.0
"""A free maximum stays as long as it is exceeded by no more, and what such powers are at most."""


class SlackBuilder(ElementBuilder):
    """Free maxima, and by how much they may be exceeded."""

    @cached_property
    def room(self) -> float:
        """How many times as large weights may be rounded as they are measured from their maximum."""
        if not any(tile.storage == "fp16" for tile in self.kernel.shared):
            return math.inf
        return FP16_MAX / (largest_weight(self.stage) or 1.0)

    @cached_property
    def free(self) -> frozenset[Node]:
        """Maxima that may lag."""
        if self.room < EXCEEDED:
            return frozenset()
        return frozenset(reference.maximum for reference in free_references(self.kernel.stage))

    def may_lag(self, walk: Walk) -> bool:
        """Whether it pays that maxima of a walk stay what they are."""
        raise NotImplementedError

    def slack(self, walk: Walk, state: State) -> str | None:
        """What multiplies by how much a maximum is exceeded: the factor of the exponents that are measured
        from it, if all have the same; None where it may not be."""
        if state.op != "max" or not self.may_lag(walk) or state.symbol not in self.free:
            return None
        rescales = [other.rescale for other in walk.states if other.rescale is not None]
        factors = {_factor_of(each, state.symbol) for each in rescales if ir.depends(each, [state.symbol])}
        if len(factors) != 1 or (factor := factors.pop()) is None:
            return None
        code = self.scope.lowering(self.thread_leaves())(factor)
        return "" if factor is ONE else f" * {self.scope.split([]).text(code, PRODUCT)}"

    def slack_constants(self) -> list[tuple[str, str, str]]:
        """How far maxima lag, if any do."""
        each = ((walk, state) for walk in self.stage.walks for state in walk.states)
        if all(self.slack(walk, state) is None for walk, state in each):
            return []
        return [("float", f"SLACK = {SLACK}f", "a free maximum may be exceeded by so much")]


def _factor_of(node: Node, maximum: ir.Symbol) -> Node | None:
    """What the change of a maximum is multiplied by in the exponential ``node``; None where it is another."""
    if not isinstance(node, Map) or node.op != "exp" or not isinstance(node.args[0], Map):
        return None
    exponent = node.args[0]
    if exponent.op != "add" or len(exponent.args) != 2:
        return None
    for was, now in (exponent.args, exponent.args[::-1]):
        if isinstance(now, Map) and now.op == "neg":
            value, top, factor = common_factor(was, now.args[0])
            if value is old(maximum) and top in (maximum, ir.finite(maximum)):
                return factor
    return None
