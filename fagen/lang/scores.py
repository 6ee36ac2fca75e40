"""Scores: functions of the score of a pair, applied before the mask. Write your own the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from fagen.errors import DtypeError
from fagen.lang.expr import (
    Expr,
    Value,
    capture,
    fault,
    h,
    is_number,
    is_tensor,
    kv,
    q,
    scalar,
    size,
    table_axes,
)
from fagen.lang.library import labelled
from fagen.lang.ops import exp2, tanh

Score: TypeAlias = Callable[[Expr], Expr]


def _positive(call: str, name: str, value: Any) -> Any:
    if isinstance(value, Expr):
        return value
    if not is_number(value) or not value > 0:
        raise fault(f"{call}: {name} is {value!r}", works="it is a number above 0")
    return float(value)


@labelled
def softcap(cap: Value, exact: bool = False) -> Score:
    """``cap * tanh(s / cap)``: scores between -cap and cap (Gemma 2, section 2).

    In 16-bit programs tanh is the hardware's, within about 2^-11 of its value; ``exact`` takes that of fp32.
    """
    limit = _positive("softcap", "cap", cap)
    return lambda s: limit * tanh(s * (1.0 / limit), exact)


@labelled
def alibi(slopes: Any = None) -> Score:
    """``s + slope * (kv - q)``, the slopes (H,) given or ``2 ** (-8 (h + 1) / H)`` (Press et al. 2022)."""
    if slopes is None:
        slope = exp2((h + 1) * (-8.0 / size("h")))
    else:
        slope = slopes if isinstance(slopes, Expr) else capture(slopes, "h", name="slopes")
    return lambda s: s + slope * (kv - q)


@labelled
def relative_bias(table: Any) -> Score:
    """``s + table[h, q - kv + n - 1]``, a table (H, 2n - 1) of learned biases by distance; clamped beyond."""
    axes = table_axes(table)
    if len(axes) != 2 or (is_tensor(table) and table.shape[1] % 2 == 0):
        shape = tuple(table.shape) if is_tensor(table) else table
        raise fault(f"relative_bias: the table is {shape!r}", works="it is a tensor (H, 2n - 1)")
    if isinstance(table, Expr):
        bias, centre = table, size(str(axes[1])) // 2
    else:
        bias = capture(table, "h distance", name="bias")
        centre = scalar(int(table.shape[1]) // 2, name="centre")
    return lambda s: s + bias[h, q - kv + centre]


@labelled
def temperature(t: Any) -> Score:
    """``s / t``, for a number, an expression, or a tensor () or (H,)."""
    if is_tensor(t):
        if len(t.shape) > 1:
            raise fault(
                f"temperature: t has the shape {tuple(t.shape)}", works="it is () or (H,)", kind=DtypeError
            )
        divisor: Value = capture(t, "h" if len(t.shape) else "", name="temperature")
    else:
        divisor = _positive("temperature", "t", t)
    return lambda s: s * (1.0 / divisor)


__all__ = ["alibi", "relative_bias", "softcap", "temperature"]
