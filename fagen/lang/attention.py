"""The usual program, built from parts: scale, scores, bias, mask, softmax, dropout, weighted sum."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from fagen.errors import DtypeError
from fagen.ir.graph import FALSE, Axis, Graph, Input, Node, Scalar, split_heads
from fagen.lang.axes import parse_layout
from fagen.lang.expr import (
    LARGEST,
    Expr,
    Tracing,
    beyond_fp32,
    capture,
    captures_of,
    describe,
    fault,
    inf,
    is_number,
    is_tensor,
    kv,
    node_of,
    scalar,
    shown,
    size,
)
from fagen.lang.ops import (
    RANDOM_STEPS,
    dot,
    dropout_threshold,
    logsumexp,
    logsumexp_with_sink,
    rsqrt,
    softmax,
    where,
)
from fagen.lang.ops import dropout as drop
from fagen.lang.trace import Traced, numbered

LAYOUTS = {"bhsd": ("b h q d", "b hk kv d", "b hk kv dv"), "bshd": ("b q h d", "b kv hk d", "b kv hk dv")}
"""The axes in memory of q, k and v for each ``layout``."""

PAIRS = ("b", "h", "q", "kv")
_PAIR_AXES = frozenset(split_heads(PAIRS))

ScoreLike = Callable[[Expr], Any]


@lru_cache(maxsize=8)
def _start(layout: str) -> tuple[tuple[Input, ...], Expr, Expr, Expr, tuple[Axis, ...]]:
    """What every such program has: its arguments, ``q k``, that by the default scale, v, and the layout of
    its result."""
    arguments = tuple(
        Input(name, place, parse_layout(axes), "float", False)
        for place, (name, axes) in enumerate(zip("qkv", LAYOUTS[layout], strict=True))
    )
    q, k, v = map(Expr, arguments)
    result = tuple("dv" if axis == "d" else axis for axis in arguments[0].layout)
    s = dot(q, k, over="d")
    return arguments, s, s * rsqrt(size("d")), v, result


def attention(
    *,
    mask: Any = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None,
    scale: float | Expr | None = None,
    bias: Any = None,
    sink: Any = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    layout: str = "bhsd",
) -> Traced:
    """The graph of ``attention(q, k, v, ...)`` and the values that follow q, k and v in it.

    q (b, h, q, d), k (b, hk, kv, d), v (b, hk, kv, dv), or with ``layout="bshd"`` positions before heads.
    Output 0 is laid out as q, output 1 (with ``return_lse``) is (b, h, q). ``scale`` is an argument and None
    is ``1 / sqrt(d)``; ``bias`` broadcasts to (b, h, q, kv); ``sink`` is (h,).
    """
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise fault(f"attention: layout is {layout!r}", works=f"it is {' or '.join(map(repr, LAYOUTS))}")
    several = isinstance(score, (list, tuple))  # "list | tuple" would be a new object each time
    scores: Sequence[Any] = score if several else () if score is None else (score,)  # type: ignore[assignment]
    names = tuple([_score_name(function) for function in scores])
    with Tracing("attention") as program:
        _, products, s, *_ = _start(layout)
        if scale is not None:
            s = products * _scale(scale)
        for i, function in enumerate(scores):
            s = _scored(function, names[i], s)
        if bias is not None:
            s = s + _bias(bias)
        kept = None if mask is None else _mask(mask)
        logit = None if sink is None else _sink(sink)
        captures = captures_of(kept, s, logit)
        graph, used = _weighted(
            s.node,
            None if kept is None else node_of(kept),
            None if logit is None else logit.node,
            dropout_threshold(dropout),
            program.dropouts,
            bool(return_lse),
            layout,
            tuple([each.node for each in captures]),
            (names, several, mask.label if isinstance(mask, Expr) else None, dropout),
        )
        return Traced(graph, tuple([captures[i].value for i in used]))


@lru_cache(maxsize=4096)
def _weighted(
    s: Node,
    kept: Node | None,
    sink: Node | None,
    threshold: int,
    ordinal: int,
    return_lse: bool,
    layout: str,
    held: tuple[Input | Scalar, ...],
    about: tuple[tuple[str, ...], bool, str | None, float],
) -> tuple[Graph, tuple[int, ...]]:
    """The program of scores: masked, weighed, dropped, summed; the ``ordinal`` is that of the dropout.

    ``held`` and the result are those of `numbered`, ``about`` what `_about` takes.
    """
    arguments, *_, v, result = _start(layout)
    scores, logit = Expr(s), None if sink is None else Expr(sink)
    if kept is not None:
        scores = where(Expr(kept), scores, -inf)
    _over_pairs(scores)
    p = drop(softmax(scores, over="kv", sink=logit), threshold / RANDOM_STEPS)
    out = dot(p, v, over="kv").node
    text = _about(*about)
    if not return_lse:
        return numbered("attention", arguments, (out,), ("out",), (result,), text, held)
    lse = (logsumexp(scores) if logit is None else logsumexp_with_sink(scores, logit)).node
    layouts = result, ("b", "h", "q")
    return numbered("attention", arguments, (out, lse), ("out", "lse"), layouts, text, held)


def _scale(scale: float | Expr) -> Expr:
    if isinstance(scale, Expr):
        return scale
    if not is_number(scale):
        works = 'it is a number; one on the device is fg.capture(scale, "")'
        raise fault(f"scale is {shown(scale)}", works=works, kind=DtypeError)
    if beyond_fp32(scale):
        raise fault("scale is too large a number", works=LARGEST)
    return scalar(float(scale), name="scale")


def _scored(function: Any, name: str, s: Expr) -> Expr:
    if isinstance(function, Expr):
        is_mask = function.node.kind == "bool"
        raise fault(
            f"score is {describe(function.node)}, {'a mask' if is_mask else 'an expression'}",
            works="give it as mask=" if is_mask else "a score is a function of the score: lambda s: s + ...",
            kind=DtypeError,
        )
    if not callable(function):
        raise fault(f"score is {function!r}", works="a score is a function of the score", kind=DtypeError)
    if getattr(function, "builds", False):
        raise fault(f"score is the function {name}", works=f"call it first: {name}()", kind=DtypeError)
    try:
        result = function(s)
    except TypeError:
        if _takes_one(function):
            raise
        raise fault(
            f"score {name} takes {inspect.signature(function)}",
            works="a score is a function of the score alone; positions in it are fg.b, fg.h, fg.q, fg.kv",
            kind=DtypeError,
        ) from None
    if callable(result) and not isinstance(result, Expr):
        raise fault(f"score {name} returned a function", works=f"call it first: {name}()", kind=DtypeError)
    if not isinstance(result, Expr):
        raise fault(
            f"score {name} returned {shown(result)}", works="it returns an expression", kind=DtypeError
        )
    if result.node.kind == "bool":
        raise fault(
            f"score {name} returned the mask {describe(result.node)}",
            works="give a mask as mask=, or return fg.where(mask, s, -fg.inf)",
            kind=DtypeError,
        )
    return result


def _takes_one(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with one value; true where that cannot be read."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # it has no signature, as some of Python's own
        return True
    return True


def _over_pairs(s: Expr) -> None:
    """Refuse scores that differ along another axis than pairs of positions have, or are alike along one."""
    if others := [axis for axis in s.axes if axis not in _PAIR_AXES]:
        raise fault(
            f"the scores depend on {' '.join(others)}",
            works="scores, masks and biases are over b, h, q and kv; a table is indexed: table[fg.q]",
        )
    if alike := [axis for axis in PAIRS if not {*split_heads((axis,))} <= {*s.axes}]:
        raise fault(
            f"the scores do not depend on {' '.join(alike)}",
            works="a score is made of the one it is given: 0.0 * s + ...",
        )


def _score_name(function: object) -> str:
    return str(getattr(function, "label", None) or getattr(function, "__name__", "score"))


_NEVER = kv < 0
"""A mask that allows nothing and still depends on the key, as one folded to False does not."""


def _mask(mask: Any) -> Expr | bool:
    if isinstance(mask, Expr) and mask.node.kind == "bool" and mask.node is not FALSE:
        return mask
    if is_tensor(mask):
        raise fault(
            f"mask is a tensor of shape {tuple(mask.shape)}",
            works='name its axes: fg.capture(mask, "q kv")',
            kind=DtypeError,
        )
    if callable(mask):
        name = getattr(mask, "__name__", "mask")
        works = "a mask is a condition such as fg.kv <= fg.q; a function of the score is given as score="
        if getattr(mask, "builds", False):
            works = f"call it first: {name}()"
        raise fault(f"mask is the function {name}", works=works, kind=DtypeError)
    if isinstance(mask, Expr) and mask.node.kind != "bool":
        raise fault(
            f"mask is {describe(mask.node)}, which is no truth value",
            works="a mask is a condition such as fg.kv <= fg.q; what is added to scores is a bias or a score",
            kind=DtypeError,
        )
    if mask is False or (isinstance(mask, Expr) and mask.node is FALSE):
        return _NEVER
    if not isinstance(mask, Expr | bool):
        raise fault(f"mask is {mask!r}", works="a mask is a condition such as fg.kv <= fg.q", kind=DtypeError)
    return mask


def _bias(bias: Any) -> Expr:
    if is_tensor(bias):
        rank = len(bias.shape)
        if rank > 4:
            raise fault(f"bias has the shape {tuple(bias.shape)}", works="it broadcasts to (B, H, Sq, Skv)")
        bias = capture(bias, " ".join(PAIRS[4 - rank :]), name="bias")
    if not isinstance(bias, Expr):
        raise fault(f"bias is {bias!r}", works="it is a tensor, or an expression", kind=DtypeError)
    if bias.node.kind == "bool":
        raise fault(
            "bias holds truth values", works='a mask is mask=fg.capture(tensor, "b h q kv")', kind=DtypeError
        )
    return bias


def _sink(sink: Any) -> Expr:
    if is_tensor(sink):
        sink = capture(sink, "h", name="sink")
    if not isinstance(sink, Expr) or sink.node.kind == "bool":
        raise fault(f"sink is {sink!r}", works="it is a tensor (H,), or an expression", kind=DtypeError)
    return sink


def _about(scores: tuple[str, ...], several: bool, mask: str | None, dropout: float) -> str:
    """The call as the user wrote it."""
    parts = []
    if scores or several:
        parts.append(f"score={'[' + ', '.join(scores) + ']' if several else scores[0]}")
    if mask:
        parts.append(f"mask={mask}")
    if dropout:
        parts.append(f"dropout={dropout}")
    return f"attention({', '.join(['q', 'k', 'v', *parts])})"
