"""The masks and scores that are measured, each as fagen's language has it and as its peers are told of it.

Nothing is imported until a variant is used: a grid can be shown without torch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

WINDOW, PREFIX, CAP, DOCUMENTS = 1024, 2048, 30.0, 12

Pairs: TypeAlias = Callable[[int, int, int], float]
"""Allowed pairs over a batch, for batch, q_len and kv_len."""


@dataclass(frozen=True)
class Made:
    """A variant made for tensors: ``parts`` of `fagen.attention`; functions that FlexAttention takes."""

    parts: Mapping[str, Any]
    flex_mask: Callable[..., Any] | None = None
    flex_score: Callable[..., Any] | None = None
    per_batch: bool = False
    """Whether the mask differs between the sequences of a batch."""


@dataclass(frozen=True)
class Variant:
    """A mask and a score.

    ``is_causal`` says that it is causal attention and nothing else, ``is_plain`` that it is full attention.
    ``flash`` are the options of flash-attn's functions for it beyond ``causal``; None: they have none.
    """

    about: str
    pairs: Pairs
    make: Callable[[int, int, int, Any], Made]
    """For batch, heads, length and device."""
    is_causal: bool = False
    is_plain: bool = False
    flash: Mapping[str, Any] | None = None


def _all(batch: int, q_len: int, kv_len: int) -> float:
    return float(batch * q_len * kv_len)


def _half(batch: int, q_len: int, kv_len: int) -> float:
    return batch * q_len * kv_len / 2


def _within_window(batch: int, q_len: int, kv_len: int) -> float:
    """Of ``kv <= q`` those at most `WINDOW` before."""
    offset = kv_len - q_len
    return float(batch * sum(min(q + offset, WINDOW) + 1 for q in range(q_len)))


def _with_prefix(batch: int, q_len: int, kv_len: int) -> float:
    return float(batch * sum(max(min(PREFIX, kv_len), min(q + 1, kv_len)) for q in range(q_len)))


def _within_documents(batch: int, q_len: int, kv_len: int) -> float:
    lengths = (length for row in document_lengths(batch, min(q_len, kv_len)) for length in row)
    return float(sum(length * (length + 1) // 2 for length in lengths))


@lru_cache(maxsize=64)
def document_lengths(batch: int, length: int) -> tuple[tuple[int, ...], ...]:
    """For each sequence of a batch, documents of random lengths that fill it: the same ones each time."""
    rows = []
    for row in range(batch):
        drawn = random.Random(row)
        count = min(DOCUMENTS, length)
        cuts = [0, *sorted(drawn.sample(range(1, length), count - 1)), length] if length > 1 else [0, length]
        rows.append(tuple(end - begin for begin, end in itertools.pairwise(cuts)))
    return tuple(rows)


def _full(batch: int, heads: int, length: int, device: Any) -> Made:
    return Made({})


def _flex_causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def _causal(batch: int, heads: int, length: int, device: Any) -> Made:
    from fagen.lang.masks import causal

    return Made({"mask": causal()}, _flex_causal)


def _window(batch: int, heads: int, length: int, device: Any) -> Made:
    from fagen.lang.masks import sliding_window

    def flex(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv <= WINDOW)

    return Made({"mask": sliding_window(WINDOW, 0)}, flex)


def _document_causal(batch: int, heads: int, length: int, device: Any) -> Made:
    import torch

    from fagen.lang.expr import b, capture, kv, q
    from fagen.lang.masks import causal

    lengths = document_lengths(batch, length)
    ids = torch.stack(
        [torch.arange(len(row), dtype=torch.int32).repeat_interleave(torch.tensor(row)) for row in lengths]
    ).to(device)
    table = capture(ids, "b s", sorted=True, name="ids")

    def flex(b_: Any, h: Any, q_: Any, kv_: Any) -> Any:
        return (q_ >= kv_) & (ids[b_, q_] == ids[b_, kv_])

    return Made({"mask": causal() & (table[b, q] == table[b, kv])}, flex, per_batch=True)


def _prefix_lm(batch: int, heads: int, length: int, device: Any) -> Made:
    from fagen.lang.masks import prefix_lm

    def flex(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv < PREFIX) | (q >= kv)

    return Made({"mask": prefix_lm(PREFIX)}, flex)


def _alibi_causal(batch: int, heads: int, length: int, device: Any) -> Made:
    import torch

    from fagen.lang.masks import causal
    from fagen.lang.scores import alibi

    def flex(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + torch.exp2(-8.0 * (h + 1) / heads) * (kv - q)

    return Made({"mask": causal(), "score": alibi()}, _flex_causal, flex)


def _softcap_causal(batch: int, heads: int, length: int, device: Any) -> Made:
    import torch

    from fagen.lang.masks import causal
    from fagen.lang.scores import softcap

    def flex(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return CAP * torch.tanh(score / CAP)

    return Made({"mask": causal(), "score": softcap(CAP)}, _flex_causal, flex)


def _rel_bias_full(batch: int, heads: int, length: int, device: Any) -> Made:
    from fagen.lang.expr import kv, q

    def score(s: Any) -> Any:
        return s + (q - kv)

    def flex(s: Any, b: Any, h: Any, q_: Any, kv_: Any) -> Any:
        return s + (q_ - kv_)

    return Made({"score": score}, None, flex)


VARIANTS: Mapping[str, Variant] = {
    "full": Variant("no mask", _all, _full, is_plain=True, flash={}),
    "causal": Variant("kv <= q", _half, _causal, is_causal=True, flash={}),
    "window": Variant(
        f"sliding_window({WINDOW}, 0)", _within_window, _window, flash={"window_size": (WINDOW, 0)}
    ),
    "document_causal": Variant(
        f"{DOCUMENTS} documents of random lengths, causal", _within_documents, _document_causal
    ),
    "prefix_lm": Variant(f"prefix_lm({PREFIX})", _with_prefix, _prefix_lm),
    "alibi_causal": Variant("alibi(), causal", _half, _alibi_causal),
    "softcap_causal": Variant(f"softcap({CAP:g}), causal", _half, _softcap_causal, flash={"softcap": CAP}),
    "rel_bias_full": Variant("score + (q - kv), no mask", _all, _rel_bias_full),
}
"""By name."""
