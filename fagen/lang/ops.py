"""Operations of a program, each spelled with the constructors of the graph.

Only a sum, a maximum and a contraction over an axis are primitive: softmax and logsumexp are written out
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from fagen.errors import DtypeError
from fagen.ir import graph as ir
from fagen.ir.graph import Axis, Node
from fagen.lang.axes import check_name
from fagen.lang.expr import (
    CACHE_SIZE,
    Expr,
    Value,
    captures_of,
    describe,
    fault,
    is_number,
    node_of,
    tracing,
)

RANDOM_STEPS = 65_536
"""A dropout rate is a multiple of one part in this many."""

DROPOUT_AXES = frozenset(("b", "hk", "g", "q", "kv"))


# ---------------------------------------------------------------------------------------------------- axes


def _parts(axis: Axis) -> tuple[Axis, ...]:
    return ("g", "hk") if axis == "h" else (axis,)


def _require_axis(what: str, node: Node, axis: Axis) -> None:
    """Refuse a reduction over an axis its operand does not have."""
    axes = node.axes
    if axis == "hk" and "hk" in axes and "g" in axes:
        raise fault(
            f"{what} is over hk, and {describe(node)} has an axis h, which is hk and the place in its group",
            works='reduce over="h"',
        )
    if not set(_parts(axis)) <= set(axes):
        shown = " ".join(_joined(axes)) or "none"
        raise fault(
            f"{what} is over {axis}, an axis that {describe(node)} does not have",
            works=f"its axes: {shown}",
        )


def _joined(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Axes as a user names them: the pair ``hk, g`` is ``h``."""
    if "hk" in axes and "g" in axes:
        return tuple("h" if axis == "hk" else axis for axis in axes if axis != "g")
    return axes


def _reduce(build: Callable[[Node, Axis], Node], x: Node, axis: Axis) -> Node:
    for part in _parts(axis):
        x = build(x, part)
    return x


def _total(x: Node, axis: Axis) -> Node:
    return _reduce(ir.total, x, axis)


def _largest(x: Node, axis: Axis) -> Node:
    return _reduce(ir.largest, x, axis)


# --------------------------------------------------------------------------------------- over a whole axis


@lru_cache(maxsize=CACHE_SIZE)
def _dot(x: Node, y: Node, over: Axis) -> Node:
    for operand in (x, y):
        if operand.kind == "bool":
            raise fault(f"dot takes numbers, and {describe(operand)} is a truth value", kind=DtypeError)
        _require_axis("dot", operand, check_name(over))
    inner, *outer = _parts(over)
    node: Node = ir.contract(x, y, inner)
    for part in outer:
        node = ir.total(node, part)
    return node


def dot(x: Value, y: Value, over: str) -> Expr:
    """The sum of ``x * y`` over an axis both have, accumulated in fp32."""
    return Expr(_dot(node_of(x), node_of(y), over), captures_of(x, y))


@lru_cache(maxsize=CACHE_SIZE)
def _over(what: str, x: Node, over: Axis) -> Node:
    _require_axis(what, x, check_name(over))
    return (_total if what == "sum" else _largest)(ir.to_float(x), over)


def sum(x: Value, over: str) -> Expr:
    """The sum of ``x`` over an axis; 0 where it is empty."""
    return Expr(_over("sum", node_of(x), over), captures_of(x))


def max(x: Value, over: str) -> Expr:
    """The largest ``x`` over an axis; -inf where it is empty. Ties share the gradient."""
    return Expr(_over("max", node_of(x), over), captures_of(x))


def _softmax_parts(s: Node, over: Axis, sink: Node | None) -> tuple[Node, Node, Node]:
    """The reference point ``m``, ``exp(s - m)`` and the sum of those with ``exp(sink - m)``."""
    s = ir.to_float(s)
    m = _largest(s, over)
    if sink is not None:
        m = ir.maximum(m, ir.to_float(sink))
    weight = ir.function("exp", ir.sub(s, m))
    total = _total(weight, over)
    if sink is not None:
        total = ir.add(total, ir.function("exp", ir.sub(ir.to_float(sink), m)))
    return m, weight, total


def _check_softmax(what: str, s: Node, over: Axis, sink: Node | None) -> None:
    _require_axis(what, s, check_name(over))
    if s.kind == "bool":
        raise fault(
            f"{what} is of scores, and {describe(s)} is a mask",
            works="use fg.where(mask, score, -fg.inf)",
            kind=DtypeError,
        )
    if sink is not None and set(_parts(over)) & set(sink.axes):
        raise fault(
            f"the sink {describe(sink)} depends on {over}", works="a sink is one logit for a whole row"
        )


@lru_cache(maxsize=CACHE_SIZE)
def _softmax(s: Node, over: Axis, sink: Node | None) -> Node:
    _check_softmax("softmax", s, over, sink)
    _, weight, total = _softmax_parts(s, over, sink)
    return ir.div(weight, total)


@lru_cache(maxsize=CACHE_SIZE)
def _logsumexp(s: Node, over: Axis, sink: Node | None) -> Node:
    _check_softmax("logsumexp", s, over, sink)
    m, _, total = _softmax_parts(s, over, sink)
    return ir.add(m, ir.function("log", total))


def softmax(s: Value, over: str = "kv", sink: Value | None = None) -> Expr:
    """``exp(s)`` divided by its sum over an axis; 0 everywhere in a row where all ``s`` are -inf.

    ``sink`` adds ``exp(sink)`` to that sum: a logit for no key at all.
    """
    if sink is None:
        return Expr(_softmax(node_of(s), over, None), captures_of(s))
    return Expr(_softmax(node_of(s), over, node_of(sink)), captures_of(s, sink))


def logsumexp(s: Value, over: str = "kv") -> Expr:
    """The natural logarithm of the sum of ``exp(s)`` over an axis; -inf in a row where all ``s`` are -inf."""
    return Expr(_logsumexp(node_of(s), over, None), captures_of(s))


def logsumexp_with_sink(s: Value, sink: Value) -> Expr:
    """The logarithm of a softmax's denominator over keys, the sink's share included."""
    return Expr(_logsumexp(node_of(s), ir.KEY_AXIS, node_of(sink)), captures_of(s, sink))


# ------------------------------------------------------------------------------------------------ choosing


@lru_cache(maxsize=CACHE_SIZE)
def _where(condition: Node, x: Node, y: Node) -> Node:
    if condition.kind != "bool":
        raise fault(
            f"where chooses by a truth value, and {describe(condition)} is none",
            works="compare it, as in x != 0",
            kind=DtypeError,
        )
    return ir.where(condition, x, y)


def where(condition: Value, x: Value, y: Value) -> Expr:
    """``x`` where ``condition`` holds, else ``y``; what is not chosen reaches no result and no gradient."""
    return Expr(
        _where(node_of(condition), node_of(x), node_of(y)),
        captures_of(condition, x, y),
    )


@lru_cache(maxsize=CACHE_SIZE)
def _minimum(x: Node, y: Node) -> Node:
    return ir.minimum(x, y)


@lru_cache(maxsize=CACHE_SIZE)
def _maximum(x: Node, y: Node) -> Node:
    return ir.maximum(x, y)


def minimum(x: Value, y: Value) -> Expr:
    """The smaller of two values."""
    return Expr(_minimum(node_of(x), node_of(y)), captures_of(x, y))


def maximum(x: Value, y: Value) -> Expr:
    """The larger of two values."""
    return Expr(_maximum(node_of(x), node_of(y)), captures_of(x, y))


# ------------------------------------------------------------------------------------------ of one value


@lru_cache(maxsize=CACHE_SIZE)
def _function(op: str, x: Node) -> Node:
    return ir.function(op, x)


def _apply(op: str, x: Value) -> Expr:
    return Expr(_function(op, node_of(x)), captures_of(x))


def abs(x: Value) -> Expr:
    """The absolute value."""
    return x.__abs__() if isinstance(x, Expr) else Expr(node_of(-x if x < 0 else x))


def exp(x: Value) -> Expr:
    """e to the power ``x``."""
    return _apply("exp", x)


def exp2(x: Value) -> Expr:
    """2 to the power ``x``."""
    return _apply("exp2", x)


def log(x: Value) -> Expr:
    """The natural logarithm."""
    return _apply("log", x)


def log2(x: Value) -> Expr:
    """The logarithm to base 2."""
    return _apply("log2", x)


def tanh(x: Value, exact: bool = False) -> Expr:
    """The hyperbolic tangent; 16-bit programs use the hardware's approximation unless ``exact``."""
    return _apply("tanh" if exact else "tanh_fast", x)


def sqrt(x: Value) -> Expr:
    """The square root."""
    return _apply("sqrt", x)


def rsqrt(x: Value) -> Expr:
    """1 divided by the square root."""
    return _apply("rsqrt", x)


def sin(x: Value) -> Expr:
    """The sine of an angle in radians."""
    return _apply("sin", x)


def cos(x: Value) -> Expr:
    """The cosine of an angle in radians."""
    return _apply("cos", x)


def sigmoid(x: Value) -> Expr:
    """``1 / (1 + exp(-x))``."""
    return 1.0 / (1.0 + exp(-x))


def relu(x: Value) -> Expr:
    """The larger of ``x`` and 0."""
    return maximum(x, 0)


@lru_cache(maxsize=CACHE_SIZE)
def _gelu(x: Node) -> Node:
    x = ir.to_float(x)
    half = ir.mul(ir.Const(0.5), x)
    return ir.mul(half, ir.add(ir.ONE, ir.function("erf", ir.mul(x, ir.Const(math.sqrt(0.5))))))


def gelu(x: Value) -> Expr:
    """``x`` times the normal distribution function of ``x``, by erf (Hendrycks and Gimpel 2016)."""
    return Expr(_gelu(node_of(x)), captures_of(x))


# ------------------------------------------------------------------------------------------------- dropout


def dropout_threshold(rate: Any) -> int:
    """The number of 16-bit patterns an element is dropped for."""
    if not is_number(rate) or not 0 <= rate <= 1:
        raise fault(f"dropout has the rate {rate!r}", works="a rate is a Python number from 0 to 1")
    return round(float(rate) * RANDOM_STEPS)


@lru_cache(maxsize=CACHE_SIZE)
def _dropout(p: Node, threshold: int, ordinal: int) -> Node:
    extra = set(p.axes) - DROPOUT_AXES
    if extra or ir.KEY_AXIS not in p.axes:
        raise fault(
            f"dropout draws one number for each (b, h, q, kv), and {describe(p)} has the axes "
            f"{' '.join(_joined(p.axes)) or 'none'}",
            works="drop out scores or weights",
        )
    keep = ir.le(ir.Const(threshold), ir.Random(ordinal))
    scale = RANDOM_STEPS / (RANDOM_STEPS - threshold) if threshold < RANDOM_STEPS else 1.0
    return ir.where(keep, ir.mul(ir.to_float(p), ir.Const(scale)), ir.ZERO)


def dropout(p: Value, rate: float) -> Expr:
    """``p`` with elements dropped with probability ``rate``, and what stays divided by ``1 - rate``.

    The rate is rounded to a multiple of 1/65,536. Bits come from Philox4x32-10 (Salmon et al. 2011), counted
    by position, so that every kernel draws the same; 0 leaves ``p`` as it is, 1 leaves zeros.
    """
    program = tracing.get()
    if program is None:
        raise fault("dropout stands outside a program", works="use it in a program or a score function")
    threshold, ordinal = dropout_threshold(rate), program.dropouts
    program.dropouts += 1
    if threshold == 0 and isinstance(p, Expr):
        return p
    return Expr(_dropout(node_of(p), threshold, ordinal), captures_of(p))
