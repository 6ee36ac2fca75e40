"""Rule *defer* where structure does not show it: a factor is refuted by numbers, then proved by sympy.

``f(x, r)`` has a factor of the statistics r alone if ``f(x, r) / f(x, 1)`` is free of x. A few random
points refute almost every expression that has none, in a millisecond; only what they leave is worth
importing sympy for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from fagen.derive.separate import Reduction, Separated, nearest
from fagen.derive.signs import nonnegative
from fagen.derive.vanish import limits
from fagen.ir import graph as ir
from fagen.ir.graph import ONE, Axis, Const, Map, Node, Reduce

MOST_CONDITIONS = 4
"""Every combination of truth values is tried, so a few at most."""

_TRIALS = 6
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class _Parts:
    """The leaves of an expression, largest first: what does not contain a statistic is one leaf."""

    statistics: tuple[Node, ...]
    along: tuple[Node, ...]
    """Numbers that change along the walk."""
    conditions: tuple[Node, ...]
    row: tuple[Node, ...]
    """Numbers that do not."""


def defer_by_proof(x: Node, walk: Axis, statistics: Iterable[Reduction]) -> Separated | None:
    """``x`` with a factor of ``statistics`` taken out, if it is proved that there is one; else None.

    Maxima, and statistics in exponents, are left alone: what would remain might be out of range.
    """
    parts = _parts(x, walk, tuple(statistics))
    if parts is None or _refuted(x, parts) or not _proved(x, parts):
        return None
    kept = ir.substitute(x, dict.fromkeys(parts.statistics, ONE))
    point: dict[Node, Node] = dict.fromkeys(parts.conditions, ir.TRUE)
    point.update((node, Const(0.75 + 0.5 * i)) for i, node in enumerate(parts.along))
    there = {**point, **{r: r for r in parts.statistics}}  # a statistic may hold what stands beside it
    factor = ir.div(ir.substitute(x, there), limits(ir.substitute(kept, point)))
    return Separated(factor, limits(kept))


def _parts(x: Node, walk: Axis, statistics: tuple[Reduction, ...]) -> _Parts | None:
    if any(isinstance(r, Reduce) and r.op == "max" for r in statistics):
        return None
    found: dict[str, list[Node]] = {"along": [], "conditions": [], "row": []}
    stack, seen = [x], set[Node]()
    while stack:
        node = stack.pop()
        if node in seen or node in statistics or isinstance(node, Const):
            continue
        seen.add(node)
        if any(r in statistics for r in nearest([node])):
            if not isinstance(node, Map) or (node.op in ("exp", "exp2")):
                return None
            stack.extend(node.args[::-1])
        else:
            found["conditions" if node.kind == "bool" else "along" if walk in node.axes else "row"].append(
                node
            )
    if not found["along"] or len(found["conditions"]) > MOST_CONDITIONS:
        return None
    return _Parts(statistics, tuple(found["along"]), tuple(found["conditions"]), tuple(found["row"]))


def _refuted(x: Node, parts: _Parts) -> bool:
    """Whether the ratio changes with what changes along the walk at some of a few random points."""
    draw = random.Random(1)
    for _ in range(_TRIALS):
        row: dict[Node, float | bool] = {node: draw.uniform(0.3, 2.0) for node in parts.row}
        first, second = (_statistics_at(parts, draw) for _ in range(2))
        ratios = []
        for _ in range(2):
            along: dict[Node, float | bool] = {node: draw.uniform(-2.0, 2.0) for node in parts.along}
            along.update((node, draw.random() < 0.7) for node in parts.conditions)
            ratios.append((_value(x, {**row, **along, **first}), _value(x, {**row, **along, **second})))
        (a, b), (c, d) = ratios
        if not all(map(math.isfinite, (a, b, c, d))):
            continue
        if abs(a * d - c * b) > _TOLERANCE * (abs(a * d) + abs(c * b)):
            return True
    return False


def _statistics_at(parts: _Parts, draw: random.Random) -> dict[Node, float]:
    return {
        r: draw.uniform(0.2, 3.0) * (1 if nonnegative(r) else draw.choice((1, -1))) for r in parts.statistics
    }


def _value(x: Node, values: Mapping[Node, float | bool]) -> float:
    result = limits(ir.substitute(x, {node: Const(value) for node, value in values.items()}))
    return float(result.value) if isinstance(result, Const) else math.nan


def _proved(x: Node, parts: _Parts) -> bool:
    """Whether sympy finds the ratio to ``x`` at statistics of 1 free of what changes along the walk."""
    import sympy

    def named(letter: str, nodes: tuple[Node, ...], **facts: bool) -> dict[Node, Any]:
        return {node: sympy.Symbol(f"{letter}{i}", **facts) for i, node in enumerate(nodes)}

    leaves = named("x", parts.along, real=True) | named("p", parts.row, real=True)
    statistics = {
        r: sympy.Symbol(f"r{i}", positive=True) if nonnegative(r) else sympy.Symbol(f"r{i}", real=True)
        for i, r in enumerate(parts.statistics)
    }
    along = {leaves[node] for node in parts.along}
    factors = set()
    for truths in product((ir.TRUE, ir.FALSE), repeat=len(parts.conditions)):
        branch = ir.substitute(x, dict(zip(parts.conditions, truths, strict=True)))
        value = _to_sympy(sympy, branch, {**leaves, **statistics})
        if value is None:
            return False
        if value == 0:
            continue
        ratio = value / value.subs(dict.fromkeys(statistics.values(), 1))
        factor = next((f for f in _simplified(sympy, ratio) if not f.free_symbols & along), None)
        if factor is None:
            return False
        factors.add(sympy.cancel(factor))
    return len(factors) == 1


def _simplified(sympy: Any, ratio: Any) -> Iterable[Any]:
    """Ever dearer forms of ``ratio``."""
    yield sympy.powsimp(ratio)
    yield sympy.cancel(sympy.powsimp(ratio))
    yield sympy.cancel(sympy.powsimp(sympy.expand_log(sympy.powdenest(ratio)), force=False))


def _to_sympy(sympy: Any, x: Node, leaves: Mapping[Node, Any]) -> Any:
    """``x`` for sympy; None where an operation has no counterpart there that is safe with infinities."""
    operations: dict[str, Callable[..., Any]] = {
        "add": sympy.Add,
        "mul": lambda a, b: a * b,
        "neg": lambda a: -a,
        "div": lambda a, b: a / b,
        "quotient": lambda a, b: a / b,
        "exp": sympy.exp,
        "exp2": lambda a: 2**a,
        "log": sympy.log,
        "log2": lambda a: sympy.log(a, 2),
        "tanh": sympy.tanh,
        "tanh_fast": sympy.tanh,
        "erf": sympy.erf,
        "sqrt": sympy.sqrt,
        "rsqrt": lambda a: 1 / sympy.sqrt(a),
        "sin": sympy.sin,
        "cos": sympy.cos,
        "abs": sympy.Abs,
        "to_float": lambda a: a,
    }
    if x in leaves:
        return leaves[x]
    if isinstance(x, Const) and math.isfinite(x.value):
        return sympy.nsimplify(x.value, rational=True)
    if not isinstance(x, Map) or x.op not in operations:
        return None
    args = [_to_sympy(sympy, arg, leaves) for arg in x.args]
    return None if None in args else operations[x.op](*args)
