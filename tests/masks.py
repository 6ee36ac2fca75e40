"""Every mask of ``data/masks.json`` in the language, and its tables redrawn for other lengths.

`MASKS` maps a case's name to its `Case`; `Case.build` gives the mask for the file's lengths and tables, or,
with other lengths and a seed, for tables drawn anew. Captured tables ride along in the expression:
`tables_of`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fagen as fg
from fagen.ir.graph import Input, Node
from fagen.lang.expr import Expr

FILE = Path(__file__).parent / "data" / "masks.json"

Draw = Callable[[dict[str, Any], int, int, random.Random], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One mask: its parameters, and what the file counted for its own lengths."""

    name: str
    q_len: int
    kv_len: int
    params: dict[str, Any]
    attended: int
    checksum: int
    empty_rows: int
    write: Callable[..., Expr]
    draw: Draw | None

    def build(self, q_len: int | None = None, kv_len: int | None = None, seed: int | None = None) -> Expr:
        """The mask; ``seed`` draws its tables anew for the lengths given."""
        q_len = self.q_len if q_len is None else q_len
        kv_len = self.kv_len if kv_len is None else kv_len
        params = self.params
        if self.draw is not None and seed is not None:
            params = params | self.draw(params, q_len, kv_len, random.Random(f"{self.name} {seed}"))
        return self.write(q_len=q_len, kv_len=kv_len, **params)


def tables_of(mask: Expr) -> dict[Node, Any]:
    """The captured tensors of a mask, as `reference.evaluate_nodes` takes them."""
    return {held.node: held.value for held in mask.captures if isinstance(held.node, Input)}


def dense(mask: Expr, q_len: int, kv_len: int, **sizes: int) -> torch.Tensor:
    """The mask of one head of one sequence as a bool tensor (q, kv)."""
    from fagen.ir.reference import evaluate_nodes

    lengths = {"q": q_len, "kv": kv_len, "b": 1, "hk": 1, "g": 1} | sizes
    (value,) = evaluate_nodes([mask.node], tables_of(mask), lengths)
    others = [d for d, axis in enumerate(mask.node.axes) if axis not in ("q", "kv")]
    for d in reversed(others):
        value = value.select(d, 0)
    if "q" not in mask.node.axes:
        value = value.unsqueeze(0)
    if "kv" not in mask.node.axes:
        value = value.unsqueeze(-1)
    return value.expand(q_len, kv_len)


# ------------------------------------------------------------------------------------------------ the masks


def _table(values: list[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def _ids(lengths: list[int]) -> torch.Tensor:
    return _table([i for i, length in enumerate(lengths) for _ in range(length)])


def _cut(total: int, rng: random.Random) -> list[int]:
    """Document lengths that fill ``total`` positions, some of them 1."""
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, rng.choice([1, 2, rng.randint(1, 40), rng.randint(1, max(total, 1))])))
    return lengths or [1]


def _draw_documents(params: dict[str, Any], q_len: int, kv_len: int, rng: random.Random) -> dict[str, Any]:
    return {"doc_lengths": _cut(max(q_len, kv_len, 1), rng)}


def _global_window(w: int, g_true_at: list[int], q_len: int, kv_len: int) -> Expr:
    flags = torch.zeros(max(q_len, kv_len, 1), dtype=torch.bool)
    flags[[i for i in g_true_at if i < len(flags)]] = True
    return (abs(fg.q - fg.kv) <= w) | fg.global_tokens(flags)


def _draw_flags(params: dict[str, Any], q_len: int, kv_len: int, rng: random.Random) -> dict[str, Any]:
    length = max(q_len, kv_len, 1)
    return {"g_true_at": sorted({0, length // 2, rng.randrange(length)})}


def _document_prefix(doc_lengths: list[int], prefix: int, **_: int) -> Expr:
    doc = fg.capture(_ids(doc_lengths), "position", sorted=True, name="doc")
    starts = [sum(doc_lengths[:i]) for i in range(len(doc_lengths))]
    start = fg.capture(_table(starts), "document", name="start")
    mine = doc[fg.q]
    return (mine == doc[fg.kv]) & ((fg.kv - start[mine] < prefix) | (fg.kv <= fg.q))


def _tree_training(P: int, bs: int, **_: int) -> Expr:
    own = fg.kv - P
    return (fg.kv < P) | ((fg.q // bs == own // bs) & (own % bs <= fg.q % bs))


def _vision(T: int, begin: list[int], end: list[int], **_: int) -> Expr:
    first = fg.capture(_table(begin), "image", name="begin")
    last = fg.capture(_table(end), "image", name="end")
    image = fg.kv // T
    return (first[image] <= fg.q) & (fg.q < last[image])


def _draw_images(params: dict[str, Any], q_len: int, kv_len: int, rng: random.Random) -> dict[str, Any]:
    count = -(-max(kv_len, 1) // params["T"])
    marks = sorted(rng.randint(0, q_len) for _ in range(2 * count))
    return {"begin": marks[::2], "end": marks[1::2]}


def _tree_decode(P: int, parents: list[int], **_: int) -> Expr:
    seen = []
    for i in range(len(parents)):
        row, j = [False] * len(parents), i
        while j >= 0:
            row[j], j = True, parents[j]
        seen.append(row)
    ancestor = fg.capture(_table(seen, torch.bool), "node other", name="ancestor")
    return (fg.kv < P) | ancestor[fg.q, fg.kv - P]


def _draw_tree(params: dict[str, Any], q_len: int, kv_len: int, rng: random.Random) -> dict[str, Any]:
    return {"P": max(kv_len - q_len, 0), "parents": [rng.randint(-1, i - 1) for i in range(max(q_len, 1))]}


def _strided(l: int, **_: int) -> Expr:  # noqa: E741
    return (fg.kv <= fg.q) & ((fg.q - fg.kv < l) | ((fg.q - fg.kv) % l == 0))


def _video(p: int, tpf: int, w: int, r: int, **_: int) -> Expr:
    return (fg.kv < p) | (fg.q < p) | (abs(fg.q - fg.kv) < (w * tpf // r) * r)


def _blocks(n: int, **_: int) -> Expr:
    return (fg.q // n == fg.kv // n) & (fg.kv % n <= fg.q % n)


_top_left = fg.causal(align="top_left")
_WRITE: dict[str, Callable[..., Expr]] = {
    "causal": lambda **_: fg.causal(align="top_left"),
    "causal, top-left, q_len < kv_len": lambda **_: fg.causal(align="top_left"),
    "causal, bottom-right, q_len < kv_len": lambda **_: fg.causal(),
    "causal, bottom-right, q_len > kv_len": lambda **_: fg.causal(),
    "sliding_window": lambda left, **_: fg.sliding_window(left, 0),
    "bidirectional window": lambda left, right, **_: fg.sliding_window(left, right),
    "dilated_sliding_window": lambda w, d, **_: fg.dilated(w, d),
    "global + sliding window": _global_window,
    "prefix_lm": lambda prefix, **_: fg.prefix_lm(prefix),
    "block_diffusion": lambda L, bs, **_: fg.block_diffusion(L, bs),
    "chunked local attention": lambda c, **_: fg.chunked(c) & _top_left,
    "speculative tree training": _tree_training,
    "document causal": lambda doc_lengths, **_: fg.document_lengths(_table(doc_lengths)) & _top_left,
    "document full": lambda doc_lengths, **_: fg.document(_ids(doc_lengths)),
    "document prefix-lm": _document_prefix,
    "batched independent causal blocks": _blocks,
    "vision cross-attention (rows with no key)": _vision,
    "neighbourhood 2-D, square": lambda W, H, K, **_: fg.neighbourhood_2d(W, H, K, K),
    "video spatial window": _video,
    "strided (sparse transformer)": _strided,
    "speculative tree decode": _tree_decode,
    "sliding_window, bottom-right, q_len < kv_len": lambda left, right, **_: fg.sliding_window(left, right),
    "prefix_lm, q_len > kv_len": lambda prefix, **_: fg.prefix_lm(prefix),
    "chunked local attention, q_len < kv_len": lambda c, **_: fg.chunked(c) & _top_left,
    "neighbourhood 2-D, 12 wide 20 high, window 5 wide 3 high": lambda W, H, KW, KH, **_: fg.neighbourhood_2d(
        W, H, KW, KH
    ),
    "causal with sink tokens": lambda sink, w, **_: _top_left & ((fg.kv < sink) | (fg.q - fg.kv < w)),
}
_DRAW: dict[str, Draw] = {
    "global + sliding window": _draw_flags,
    "document causal": _draw_documents,
    "document full": _draw_documents,
    "document prefix-lm": _draw_documents,
    "vision cross-attention (rows with no key)": _draw_images,
    "speculative tree decode": _draw_tree,
}

MASKS: dict[str, Case] = {
    row["name"]: Case(
        row["name"],
        row["q_len"],
        row["kv_len"],
        row["params"],
        row["attended"],
        row["checksum"],
        row["empty_rows"],
        _WRITE[row["name"]],
        _DRAW.get(row["name"]),
    )
    for row in json.loads(FILE.read_text(encoding="utf-8"))
}
