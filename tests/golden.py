"""The programs whose kernels are kept in generated/, for study and as the emitter's golden set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

import fagen as fg
from fagen.compile import backward_of
from fagen.ir.graph import Graph, Input
from fagen.lang.attention import attention
from fagen.plan.plan import Problem, Storage

IDS = torch.tensor([[0, 0, 1, 1]])


@fg.program
def relu_by_its_sum(q: fg.Tensor["b h q d"], k: fg.Tensor["b hk kv d"], v: fg.Tensor["b hk kv dv"]):
    s = fg.relu(fg.dot(q, k, over="d"))
    s = fg.where(fg.kv <= fg.q, s, 0.0)
    return fg.dot(s / fg.sum(s, over="kv"), v, over="kv")


@fg.program
def above_a_threshold(q: fg.Tensor["b h q d"], k: fg.Tensor["b hk kv d"], v: fg.Tensor["b hk kv dv"]):
    s = fg.dot(q, k, over="d") * fg.rsqrt(fg.size("d"))
    s = fg.where(fg.kv <= fg.q, s, -fg.inf)
    return fg.dot(fg.relu(fg.softmax(s, over="kv") - 0.01), v, over="kv")


@fg.program
def latent(
    q: fg.Tensor["b h q d"],
    q_rope: fg.Tensor["b h q rope"],
    latents: fg.Tensor["b kv d"],
    k_rope: fg.Tensor["b kv rope"],
):
    s = fg.dot(q, latents, over="d") + fg.dot(q_rope, k_rope, over="rope")
    s = fg.where(fg.kv <= fg.q, s * 0.07, -fg.inf)
    return fg.dot(fg.softmax(s, over="kv"), latents, over="kv")


def documents() -> Graph:
    ids = fg.capture(IDS, "b position", sorted=True)
    return attention(mask=(ids[fg.b, fg.q] == ids[fg.b, fg.kv]) & (fg.kv <= fg.q)).graph


@dataclass(frozen=True)
class Golden:
    """A program, its head dims and its dtype."""

    graph: Callable[[], Graph]
    sizes: tuple[tuple[str, int], ...] = (("d", 64), ("dv", 64))
    storage: Storage = "fp16"
    backward: bool = False
    classes: tuple[tuple[str, str], ...] = ()
    """Of lengths, where they are no usual ones; of few rows, four heads have the same keys."""

    def problem(self, family: str, arch: str = "A100") -> Problem:
        """What is planned."""
        graph = self.graph()
        kinds: Mapping[str, Storage] = {"float": self.storage, "int": "int32", "bool": "bool"}
        inputs = tuple(kinds[a.stored] for a in graph.arguments if isinstance(a, Input))
        group = 4 if self.classes else 1
        problem = Problem(graph, arch, family, self.sizes, inputs, self.classes, group=group)
        return backward_of(problem)[0] if self.backward else problem


GOLDEN: Mapping[str, Golden] = {
    "plain": Golden(lambda: attention().graph, storage="fp32"),
    "causal": Golden(
        lambda: attention(mask=fg.causal(), return_lse=True).graph, (("d", 128), ("dv", 128)), "bf16"
    ),
    "causal_backward": Golden(
        lambda: attention(mask=fg.causal()).graph, (("d", 64), ("dv", 64)), "bf16", backward=True
    ),
    "window_softcap": Golden(
        lambda: attention(mask=fg.sliding_window(1024, 0), score=fg.softcap(30.0)).graph
    ),
    "prefix_sink": Golden(
        lambda: attention(mask=fg.prefix_lm(256), sink=torch.zeros(2), return_lse=True).graph,
        (("d", 72), ("dv", 40)),
    ),
    "documents": Golden(documents),
    "documents_unsorted": Golden(lambda: attention(mask=fg.document(IDS) & fg.causal()).graph),
    "alibi": Golden(lambda: attention(mask=fg.causal(), score=fg.alibi()).graph),
    "dropout": Golden(lambda: attention(mask=fg.causal(), dropout=0.1).graph),
    "block_diffusion": Golden(lambda: attention(mask=fg.block_diffusion(2048, 32)).graph),
    "relu_by_its_sum": Golden(lambda: relu_by_its_sum.trace().graph),
    "above_a_threshold": Golden(lambda: above_a_threshold.trace().graph),
    "latent": Golden(lambda: latent.trace().graph, (("d", 128), ("rope", 64)), "bf16"),
    "decoding": Golden(
        lambda: attention(mask=fg.causal()).graph,
        (("d", 128), ("dv", 128)),
        "bf16",
        classes=(("q", "few"), ("kv", "long")),
    ),
}

KEPT: Mapping[str, tuple[str, ...]] = {
    "simt": tuple(name for name in GOLDEN if name != "decoding"),
    "sm80": (
        "causal",
        "causal_backward",
        "window_softcap",
        "prefix_sink",
        "documents",
        "above_a_threshold",
        "decoding",
    ),
}
"""The programs of each family."""

GOLDEN_SM90: Mapping[str, Golden] = {
    f"causal_{head_dim}": Golden(
        lambda: attention(mask=fg.causal(), return_lse=True).graph,
        (("d", head_dim), ("dv", head_dim)),
        "bf16",
    )
    for head_dim in (64, 128, 256)
} | {
    f"causal_{head_dim}_backward": Golden(
        lambda: attention(mask=fg.causal()).graph,
        (("d", head_dim), ("dv", head_dim)),
        "bf16",
        backward=True,
    )
    for head_dim in (128, 256)
}
"""Those of the family for Hopper."""
