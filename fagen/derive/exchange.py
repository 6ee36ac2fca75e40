"""Rule *exchange*: a weighted sum of products is a product of a weighted sum.

``sum_kv w * Contract(g, v, dv) = (w / w') * Contract(g, O, dv)`` where ``O = Contract(w', v, kv)`` and
``w / w'`` does not change along kv. The row term of softmax's gradient is so ``rowsum(dO * O)``, for which no
scores are needed (Dao et al., FlashAttention, 2022, appendix B).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fagen.derive.separate import Reduction, nearest
from fagen.derive.signs import positive
from fagen.ir import graph as ir
from fagen.ir.graph import ONE, ZERO, Axis, Const, Contract, Map, Node, Reduce


@dataclass(frozen=True)
class Exchange:
    """``total``, a sum along the walk, equals ``value``, which reads the weighted sum ``known`` instead.

    ``product`` is what is summed, ``ratio`` how its weights differ from those of ``known``.
    """

    total: Reduction
    known: Contract
    value: Node
    product: Contract
    ratio: Node


def exchanges(roots: Iterable[Node], known: Iterable[Contract]) -> list[Exchange]:
    """Every sum below ``roots`` that one of the weighted sums ``known`` gives."""
    sums = list(known)
    totals = (x for x in ir.walk(roots) if isinstance(x, Reduction) and x not in sums)
    return [found for total in totals if (found := _exchange(total, sums)) is not None]


def _exchange(total: Reduction, known: list[Contract]) -> Exchange | None:
    if isinstance(total, Reduce) and total.op == "max":
        return None
    term = total.x if isinstance(total, Reduce) else ir.mul(total.x, total.y)
    for product in nearest([term]):
        if not isinstance(product, Contract) or product.over == total.over:
            continue
        weights = _coefficient(term, product)
        if weights is None:
            continue
        for g, v in ((product.x, product.y), (product.y, product.x)):
            if total.over in g.axes or product.over in weights.axes:
                continue
            for weighted in known:
                if weighted.over != total.over or v not in weighted.args:
                    continue
                other = weighted.x if v is weighted.y else weighted.y
                ratio = _ratio(weights, other, total.over)
                if ratio is not None and product.over not in ratio.axes:
                    value = ir.mul(ratio, ir.contract(g, weighted, product.over))
                    if set(value.axes) == set(total.axes):
                        return Exchange(total, weighted, value, product, ratio)
    return None


def _coefficient(x: Node, product: Node) -> Node | None:
    """What ``product`` is multiplied by in ``x``; None where ``x`` is no multiple of it."""
    if x is product:
        return ONE
    if not isinstance(x, Map) or not ir.depends(x, [product]):
        return None
    args = x.args
    if x.op == "add":
        parts = [_coefficient(arg, product) for arg in args]
        if parts[0] is None or parts[1] is None or len(parts) > 2:
            return None
        return ir.add(parts[0], parts[1])
    if x.op == "where" and args[2] is ZERO and not ir.depends(args[0], [product]):
        part = _coefficient(args[1], product)
        return None if part is None else ir.where(args[0], part, ZERO)
    if x.op in ("mul", "div", "quotient", "neg"):
        pairs = (args, args[::-1]) if x.op == "mul" else (args,)
        for first, *rest in pairs:
            if any(ir.depends(other, [product]) for other in rest):
                continue
            part = _coefficient(first, product)
            if part is not None:
                return ir.rebuild(x, (part, *rest))
    return None


@dataclass(frozen=True)
class _Factors:
    """A product: how often each factor stands in it (divisors count down), where all conditions hold."""

    powers: Counter[Node]
    conditions: frozenset[Node]

    def along(self, axis: Axis) -> tuple[dict[Node, int], frozenset[Node]]:
        """What of it changes along ``axis``."""
        powers = {x: n for x, n in self.powers.items() if n and axis in x.axes}
        return powers, frozenset(c for c in self.conditions if axis in c.axes)


def _factors(x: Node) -> _Factors:
    if isinstance(x, Map):
        if x.op in ("mul", "div", "quotient"):
            a, b = map(_factors, x.args)
            powers = Counter(a.powers)
            (powers.update if x.op == "mul" else powers.subtract)(b.powers)
            return _Factors(powers, a.conditions | b.conditions)
        if x.op == "neg":
            inner = _factors(x.args[0])
            return _Factors(Counter(inner.powers) + Counter({Const(-1.0): 1}), inner.conditions)
        if x.op == "where" and x.args[2] is ZERO:
            inner = _factors(x.args[1])
            condition = x.args[0]
            parts = condition.args if isinstance(condition, Map) and condition.op == "and" else (condition,)
            return _Factors(inner.powers, inner.conditions | frozenset(parts))
    return _Factors(Counter({} if x is ONE else {x: 1}), frozenset())


def _ratio(x: Node, y: Node, axis: Axis) -> Node | None:
    """``x / y`` if it does not change along ``axis`` and ``y`` is nowhere 0 where ``x`` is not."""
    top, bottom = _factors(x), _factors(y)
    if top.along(axis) != bottom.along(axis) or not bottom.conditions <= top.conditions:
        return None
    powers = Counter(top.powers)
    powers.subtract(bottom.powers)
    result: Node = ONE
    for factor, power in sorted(powers.items(), key=lambda item: item[0].order):
        for _ in range(power):
            result = ir.mul(result, factor)
    for factor, power in sorted(powers.items(), key=lambda item: item[0].order):
        if power < 0 and bottom.powers[factor] > 0 and not positive(factor):
            return None
        for _ in range(-power):
            result = ir.div(result, factor)
    rest = top.conditions - bottom.conditions
    return ir.where(ir.conjunction(*sorted(rest, key=lambda c: c.order)), result, ZERO) if rest else result
