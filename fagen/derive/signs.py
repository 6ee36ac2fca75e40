"""What is proven of the value of an expression: its sign, and how it moves with a part of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeAlias
from weakref import WeakKeyDictionary

from fagen.ir import graph as ir
from fagen.ir.graph import MINUS_INF, Const, Contract, Map, Node, Reduce

Slope: TypeAlias = tuple[float, float]


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
def nonnegative(x: Node) -> bool:
    """Whether ``x`` is proven to be at least 0 (or NaN)."""
    if isinstance(x, Const):
        return x.value >= 0
    if isinstance(x, ir.Size | ir.Index | ir.Random) or x.kind == "bool":
        return True
    if isinstance(x, Reduce):
        return x.op == "sum" and nonnegative(x.x)  # the maximum of nothing is -inf
    if isinstance(x, Contract):
        return nonnegative(x.x) and nonnegative(x.y)
    if isinstance(x, Map):
        if x.op in ("exp", "exp2", "sqrt", "rsqrt", "abs"):
            return True
        if x.op == "mul" and x.args[0] is x.args[1]:
            return True
        if x.op == "maximum":
            return any(map(nonnegative, x.args))
        if x.op in ("log", "log2"):
            return at_least_one(x.args[0])
        if x.op in ("add", "mul", "div", "quotient", "minimum", "finite", "to_float", "to_int", "floor"):
            return all(map(nonnegative, x.args))
        if x.op == "where":
            return nonnegative(x.args[1]) and nonnegative(x.args[2])
    return False


@_remembered
def positive(x: Node) -> bool:
    """Whether ``x`` is proven to be above 0 (or NaN), the length of an axis being at least 1."""
    if isinstance(x, Const):
        return x.value > 0
    if isinstance(x, ir.Size):
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


@_remembered
def at_least_one(x: Node) -> bool:
    """Whether ``x`` is proven to be 1 or more (or NaN)."""
    if isinstance(x, Const):
        return x.value >= 1
    if isinstance(x, Map):
        if x.op == "add":
            return any(map(at_least_one, x.args)) and all(map(nonnegative, x.args))
        if x.op in ("exp", "exp2"):
            return nonnegative(x.args[0])
        if x.op == "maximum":
            return any(map(at_least_one, x.args))
        if x.op in ("mul", "sqrt", "to_float", "minimum"):
            return all(map(at_least_one, x.args))
    return False


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
