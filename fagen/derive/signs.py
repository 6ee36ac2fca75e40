"""What is proven of the value of an expression: bounds, its sign, and how it moves with a part of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TypeAlias
from weakref import WeakKeyDictionary

from fagen.ir import graph as ir
from fagen.ir.graph import MINUS_INF, Const, Contract, Map, Node, Reduce

Slope: TypeAlias = tuple[float, float]
Interval: TypeAlias = tuple[float, float]

_ANY: Interval = (-math.inf, math.inf)
_UNIT: Interval = (-1.0, 1.0)
_FROM_ZERO: Interval = (0.0, math.inf)
_UP_TO_UNIT = frozenset(("tanh", "tanh_fast", "erf", "sin", "cos"))
LOGARITHMS = {"log": "exp", "log2": "exp2"}
"""Each logarithm, and the power that it undoes."""
_NEAR = 2.0**16
"""Up to there fp32 rounds a logarithm, and so weights, by no more than bf16 rounds these."""


class Bounds:
    """Two numbers between which the value of an expression lies for all finite inputs, if it is no NaN.

    ``nonpositive`` says of which exponents more is known than they show, ``longest`` how long an axis is.
    """

    def __init__(
        self, nonpositive: Callable[[Node], bool] = lambda _: False, longest: float = math.inf
    ) -> None:
        self._nonpositive = nonpositive
        self._position = (0.0, longest)
        self._known: WeakKeyDictionary[Node, Interval] = WeakKeyDictionary()

    def of(self, x: Node) -> Interval:
        """The bounds of ``x``; infinities where none are seen."""
        found = self._known.get(x)
        if found is None:
            low, high = self._of(x)
            found = self._known[x] = (low, high) if low <= high else _ANY  # infinities of both signs met
        return found

    def _of(self, x: Node) -> Interval:
        if isinstance(x, Const):
            return float(x.value), float(x.value)
        if x.kind == "bool":
            return 0.0, 1.0
        if isinstance(x, ir.Size | ir.Index):
            return self._position
        if isinstance(x, ir.Random):
            return _FROM_ZERO
        if isinstance(x, ir.Input) and x.holds is not None:
            return self.of(x.holds)
        if isinstance(x, Reduce):
            low, high = self.of(x.x)
            if x.op == "max":  # of nothing it is -inf
                return -math.inf, high
            return _FROM_ZERO if low >= 0 else _ANY
        if isinstance(x, Contract):
            return _FROM_ZERO if min(self.of(x.x)[0], self.of(x.y)[0]) >= 0 else _ANY
        return self._map(x) if isinstance(x, Map) else _ANY

    def _map(self, x: Map) -> Interval:
        if x.op in _UP_TO_UNIT:
            return _UNIT
        parts = [self.of(arg) for arg in x.args]
        (low, high), (least, most) = parts[0], parts[-1]
        if x.op == "where":
            return min(parts[1][0], least), max(parts[1][1], most)
        if x.op == "neg":
            return -high, -low
        if x.op == "add":
            return sum(part[0] for part in parts), sum(part[1] for part in parts)
        if x.op == "maximum":
            return max(low, least), max(high, most)
        if x.op == "minimum":
            return min(low, least), min(high, most)
        if x.op == "finite":  # 0 for -inf
            return min(low, 0.0), max(high, 0.0)
        if x.op == "abs":
            return max(low, -high, 0.0), max(-low, high)
        if x.op in ("exp", "exp2"):
            high = min(high, 0.0) if self._nonpositive(x.args[0]) else high
            return _power(x.op, low), _power(x.op, high)
        if x.op == "mul" and len(parts) == 2:
            low, high = _product((low, high), (least, most))
            return (max(low, 0.0), high) if x.args[0] is x.args[1] else (low, high)
        if x.op in ("div", "quotient"):
            if x.op == "quotient" and _attains_one(x.args[1]):
                low, high = _divided("div", (low, high), (1.0, max(most, 1.0)))
                return min(low, 0.0), max(high, 0.0)
            return _divided(x.op, (low, high), (least, most))
        if x.op in ("sqrt", "rsqrt") and high >= 0:
            low, high = math.sqrt(max(low, 0.0)), math.sqrt(high)
            return (low, high) if x.op == "sqrt" else (_inverse(high), _inverse(low))
        if x.op in ("log", "log2"):
            return (0.0 if low >= 1 else -math.inf), math.inf
        if x.op in ("to_float", "to_int", "floor"):
            return (math.floor(low) if math.isfinite(low) else low), high
        return _ANY


def exponentials(total: Node) -> Iterator[tuple[str, Node, Node, ir.Axis | None]]:
    """The (base, value, top, axis) of each ``base(value - top)`` that ``total`` adds up, along an axis."""
    for term in _summands(total):
        power = term.x if isinstance(term, Reduce) and term.op == "sum" else term
        if isinstance(power, Map) and power.op in LOGARITHMS.values():
            (exponent,) = power.args
            if isinstance(exponent, Map) and exponent.op == "add" and len(exponent.args) == 2:
                for value, top in (exponent.args, exponent.args[::-1]):
                    if isinstance(top, Map) and top.op == "neg":
                        yield power.op, value, top.args[0], term.over if isinstance(term, Reduce) else None


def _summands(x: Node, op: str = "add") -> list[Node]:
    """What ``op`` joins to ``x``."""
    return (
        [part for arg in x.args for part in _summands(arg, op)] if isinstance(x, Map) and x.op == op else [x]
    )


def _attains_one(total: Node) -> bool:
    """Whether ``total`` is 0 or at least 1: it sums exponentials of values measured from the largest."""
    if isinstance(total, ir.Input):
        return total.holds is not None and _attains_one(total.holds)
    found = list(exponentials(total))
    if len(found) < len(_summands(total)) or len({top for _, _, top, _ in found}) != 1:
        return False
    top = found[0][2]
    top = top.args[0] if isinstance(top, Map) and top.op == "finite" else top
    values = {value if axis is None else ir.largest(value, axis) for _, value, _, axis in found}
    return all(each in values for each in _summands(top, "maximum"))


def _product(x: Interval, y: Interval) -> Interval:
    corners = [a * b if a and b else 0.0 for a in x for b in y]
    return min(corners), max(corners)


def _divided(op: str, x: Interval, y: Interval) -> Interval:
    if y[0] < 0 <= y[1]:
        return _ANY
    low, high = _product(x, (_inverse(y[1]), _inverse(y[0])))
    if op == "quotient" and y[0] == 0:  # where the divisor is 0, so is the quotient
        return min(low, 0.0), max(high, 0.0)
    return low, high


def _inverse(x: float) -> float:
    return 1.0 / x if x else math.inf


def _power(base: str, exponent: float) -> float:
    try:
        return math.exp(exponent) if base == "exp" else 2.0**exponent
    except OverflowError:
        return math.inf


interval = Bounds().of
_interval_of_short_axes = Bounds(longest=_NEAR).of


def nonnegative(x: Node) -> bool:
    """Whether ``x`` is proven to be at least 0 (or NaN)."""
    return interval(x)[0] >= 0


def at_least_one(x: Node) -> bool:
    """Whether ``x`` is proven to be 1 or more (or NaN)."""
    return interval(x)[0] >= 1


def _remembered(prove: Callable[[Node], bool]) -> Callable[[Node], bool]:
    """``prove``, asked once of each node: expressions share their parts."""
    known: WeakKeyDictionary[Node, bool] = WeakKeyDictionary()

    @wraps(prove)
    def ask(x: Node) -> bool:
        answer = known.get(x)
        if answer is None:
            answer = known[x] = prove(x)
        return answer

    return ask


@_remembered
def positive(x: Node) -> bool:
    """Whether ``x`` is proven to be above 0 (or NaN), the length of an axis being at least 1."""
    if interval(x)[0] > 0 or isinstance(x, ir.Size):
        return True
    if isinstance(x, Map):
        if x.op in ("exp", "exp2"):
            return True
        if x.op == "add":
            return any(map(positive, x.args)) and all(map(nonnegative, x.args))
        if x.op in ("mul", "div", "sqrt", "rsqrt", "to_float", "minimum"):
            return all(map(positive, x.args))
        if x.op == "maximum":
            return any(map(positive, x.args))
        if x.op == "where":
            return positive(x.args[1]) and positive(x.args[2])
    return False


def may_be_far(x: Node) -> bool:
    """Whether ``x`` may lie so far from 0 that fp32 rounds it by more than bf16 rounds its exponential, and
    was not rounded by as much where it was made: products of tensors are. Positions are taken to be near."""
    if x.kind == "bool" or x is MINUS_INF or not _is_beyond(x) or isinstance(x, Contract):
        return False
    if not isinstance(x, Map):
        return not isinstance(x, Reduce) or may_be_far(x.x)
    args = x.args[1:] if x.op == "where" else x.args
    far = [may_be_far(arg) for arg in args]
    made = (_is_beyond(arg) and not is_far for arg, is_far in zip(args, far, strict=True))
    return any(far) and not (x.op in ("mul", "div", "quotient") and any(made))


def _is_beyond(x: Node) -> bool:
    """Whether ``x`` may lie far from 0."""
    low, high = _interval_of_short_axes(x)
    return max(-low, high) > _NEAR


def slope(x: Node, of: Node) -> Slope | None:
    """Between which numbers the derivative of ``x`` by ``of`` lies; None where that is not seen."""
    if x is of:
        return 1.0, 1.0
    if not ir.depends(x, [of]):
        return 0.0, 0.0
    if not isinstance(x, Map):
        return None
    if x.op in ("mul", "div"):
        a, b = x.args
        inner = slope(a, of) if isinstance(b, Const) and b.value else None
        if inner is None or not isinstance(b, Const):
            return None
        k = float(b.value) if x.op == "mul" else 1 / float(b.value)
        return min(k * inner[0], k * inner[1]), max(k * inner[0], k * inner[1])
    operands = x.args
    if x.op == "where":
        if ir.depends(x.args[0], [of]):
            return None
        operands = tuple(arg for arg in x.args[1:] if arg is not MINUS_INF)
    parts = [slope(arg, of) for arg in operands]
    if x.op not in ("add", "neg", "finite", "maximum", "minimum", "where") or None in parts:
        return None
    slopes = [part for part in parts if part is not None]
    if x.op == "add":
        return sum(low for low, _ in slopes), sum(high for _, high in slopes)
    if x.op == "neg":
        return -slopes[0][1], -slopes[0][0]
    return min(low for low, _ in slopes), max(high for _, high in slopes)


def falls(x: Node, axis: ir.Axis) -> bool:
    """Whether ``x`` falls steadily along ``axis``, apart from values that may be anything."""
    trend = _trend(x, axis)
    return trend is not None and trend < 0


def _trend(x: Node, axis: ir.Axis) -> int | None:
    """Whether ``x`` rises (1), falls (-1) or does neither (0) along ``axis``; None where that is not seen."""
    if not ir.depends(x, [ir.Index(axis)]):
        return 0
    if not isinstance(x, Map):
        return None
    if x.op == "to_float" and x.args[0].kind == "int":
        rate = _rate(x.args[0], axis)
        return (rate > 0) - (rate < 0) if rate else None
    if x.op == "neg":
        trend = _trend(x.args[0], axis)
        return None if trend is None else -trend
    if x.op == "mul":
        for factor, moved in (x.args, x.args[::-1]):
            trend = _trend(moved, axis)
            if trend is not None and positive(factor):
                return trend
            if trend is not None and positive(ir.neg(factor)):
                return -trend
        return None
    if x.op != "add":
        return None
    trends = {_trend(arg, axis) for arg in x.args} - {0}
    return trends.pop() if len(trends) == 1 else None


def _rate(x: Node, axis: ir.Axis) -> int:
    """By how much an integer rises from one position of ``axis`` to the next; 0 if not steadily."""
    terms, _ = ir.linear(x)
    rate = terms.get(ir.Index(axis), 0)
    others = (term for term in terms if term is not ir.Index(axis))
    return 0 if any(axis in term.axes for term in others) else rate
