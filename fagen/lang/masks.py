"""Masks: true where a query may see a key. Combine them with ``& | ~``, or write your own the same way."""

from __future__ import annotations

from typing import Any, Literal

from fagen.ir.graph import TRUE
from fagen.lang.expr import (
    Expr,
    Value,
    b,
    capture,
    fault,
    is_number,
    is_tensor,
    kv,
    q,
    shown,
    size,
    stored_kind,
    table_axes,
)
from fagen.lang.library import labelled
from fagen.lang.ops import maximum, minimum


def _whole(call: str, name: str, value: Any, least: int) -> Value:
    """A parameter that is a whole number, or an integer expression, for which any value is taken."""
    if isinstance(value, Expr):
        if value.node.kind != "int":
            raise fault(f"{call}: {name} is {value!r}", works="it is a whole number")
        return value
    if not is_number(value, whole=True):
        raise fault(f"{call}: {name} is {value!r}", works="it is a whole number")
    if value < least:
        raise fault(f"{call}: {name} is {value}", works=f"it is {least} or more")
    return int(value)


ALIGNED = q + (size("kv") - size("q"))
"""The query's position counted so that the last query stands at the last key."""


def _integers(call: str, name: str, value: Any, shape: str) -> Any:
    """A tensor of integers, or an expression of one."""
    kind = value.node.kind if isinstance(value, Expr) else is_tensor(value) and stored_kind(value.dtype)
    if kind != "int":
        said = f"a tensor of {value.dtype}" if is_tensor(value) else repr(value)
        raise fault(f"{call}: {name} is {said}", works=f"it is an integer tensor {shape}")
    return value


@labelled
def causal(align: Literal["bottom_right", "top_left"] = "bottom_right") -> Expr:
    """Keys up to the query; the last of them stand at one place, or with ``top_left`` the first of them."""
    if align not in ("bottom_right", "top_left"):
        raise fault(f"causal: align is {align!r}", works="it is 'bottom_right' or 'top_left'")
    return kv <= (ALIGNED if align == "bottom_right" else q)


@labelled
def sliding_window(left: Value | None, right: Value | None = None) -> Expr:
    """Keys at most ``left`` before and ``right`` after the query, aligned as in `causal`; None: any."""
    mask = Expr(TRUE)
    if left is not None:
        mask &= ALIGNED - kv <= _whole("sliding_window", "left", left, 0)
    if right is not None:
        mask &= kv - ALIGNED <= _whole("sliding_window", "right", right, 0)
    return mask


@labelled
def prefix_lm(prefix: Any) -> Expr:
    """All keys before ``prefix``, a number or a tensor (B,), and keys up to the query."""
    if is_tensor(prefix):
        end: Value = capture(_integers("prefix_lm", "prefix", prefix, "(B,)"), "b", name="prefix")
    else:
        end = _whole("prefix_lm", "prefix", prefix, 0)
    return (kv < end) | (kv <= q)


@labelled
def document(ids: Any) -> Expr:
    """Keys of the query's own document; ``ids`` is the document of each position, (S,) or (B, S)."""
    table, row = _by_position("document", "ids", ids)
    return table[(*row, q)] == table[(*row, kv)]


@labelled
def document_lengths(lengths: Any) -> Expr:
    """Keys of the query's own document, for documents of ``lengths`` (n,) or (B, n), one after the other.

    Positions behind the last document see one another alone.
    """
    if not is_tensor(lengths) or len(lengths.shape) not in (1, 2):
        raise fault(
            f"document_lengths: lengths is {shown(lengths)}", works="it is an integer tensor (n,) or (B, n)"
        )
    import torch

    ends = _integers("document_lengths", "lengths", lengths, "(n,) or (B, n)").cumsum(-1)
    count = int(ends.max()) + 1 if ends.numel() else 1
    positions = torch.arange(count, device=lengths.device, dtype=ends.dtype)
    ids = torch.searchsorted(ends, positions.expand(*ends.shape[:-1], count).contiguous(), right=True)
    table, row = _by_position("document_lengths", "ids", ids.to(torch.int32), promise=True)
    return table[(*row, q)] == table[(*row, kv)]


@labelled
def chunked(size: Value) -> Expr:
    """Keys of the query's own chunk of ``size`` positions."""
    length = _whole("chunked", "size", size, 1)
    return q // length == kv // length


@labelled
def dilated(window: Value, step: Value) -> Expr:
    """Keys at most ``window`` away, in steps of ``step``."""
    distance = abs(q - kv)
    return (distance <= _whole("dilated", "window", window, 0)) & (
        distance % _whole("dilated", "step", step, 1) == 0
    )


@labelled
def global_tokens(flags: Any) -> Expr:
    """Pairs of which one is global: it sees all and is seen by all; ``flags`` is bool, (S,) or (B, S)."""
    table, row = _by_position("global_tokens", "flags", flags)
    return _true(table[(*row, q)]) | _true(table[(*row, kv)])


@labelled
def neighbourhood_2d(width: int, height: int, window_w: int, window_h: int) -> Expr:
    """Keys in a window around the query on a canvas, moved inward at its borders (Hassani et al. 2023).

    Positions count along rows of ``width``; ``window_w`` and ``window_h`` are odd.
    """
    name = "neighbourhood_2d"
    near = Expr(TRUE)
    for place_q, place_kv, side, window, label in (
        (q // _whole(name, "width", width, 1), kv // width, height, window_h, "h"),
        (q % width, kv % width, width, window_w, "w"),
    ):
        _whole(name, "height", height, 1)
        _whole(name, f"window_{label}", window, 1)
        if window % 2 == 0 or window > side:
            raise fault(f"{name}: window_{label} is {window}", works=f"it is odd and at most {side}")
        reach = window // 2
        centre = minimum(maximum(place_q, reach), side - 1 - reach)
        near &= abs(centre - place_kv) <= reach
    return near


@labelled
def block_diffusion(length: int, block: int) -> Expr:
    """Noisy tokens 0..length-1 before their clean copies, in blocks (Arriola et al. 2025, section 3).

    A noisy block sees itself and the clean blocks before it, a clean one the clean blocks up to itself.
    """
    name = "block_diffusion"
    size = _whole(name, "block", block, 1)
    noisy_q, noisy_kv = q < _whole(name, "length", length, 1), kv < length
    block_q, block_kv = q % length // size, kv % length // size
    return (
        ((block_q == block_kv) & (noisy_q == noisy_kv))
        | ((block_q > block_kv) & noisy_q & ~noisy_kv)
        | ((block_q >= block_kv) & ~noisy_q & ~noisy_kv)
    )


@labelled
def padding(lengths: Any) -> Expr:
    """Keys before the length of their sequence; ``lengths`` is an integer tensor (B,)."""
    _integers("padding", "lengths", lengths, "(B,)")
    return kv < (lengths if isinstance(lengths, Expr) else capture(lengths, "b", name="lengths"))


def _by_position(call: str, name: str, table: Any, promise: bool = False) -> tuple[Expr, tuple[Expr, ...]]:
    """A table over positions, of one sequence or of each in a batch, and the index of the sequence."""
    dimensions = len(table_axes(table))
    if dimensions not in (1, 2):
        raise fault(f"{call}: {name} is {shown(table)}", works="it is a tensor (S,) or (B, S)")
    row = (b,) if dimensions == 2 else ()
    if isinstance(table, Expr):
        return table, row
    return capture(table, "b position" if row else "position", promise, name=name), row


def _true(flag: Expr) -> Expr:
    return flag if flag.node.kind == "bool" else flag != 0


__all__ = [
    "block_diffusion",
    "causal",
    "chunked",
    "dilated",
    "document",
    "document_lengths",
    "global_tokens",
    "neighbourhood_2d",
    "padding",
    "prefix_lm",
    "sliding_window",
]
