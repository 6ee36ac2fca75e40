"""Programs whose derivation is known, and arguments for them.

`PROGRAMS` maps a name to a program. Where scores are masked, a query sees the keys from 5 before to 1 after
its own position, the last query standing at the last key; with more queries than keys some see none.
"""

from collections.abc import Callable, Mapping

import fagen as fg
from fagen.ir.graph import Axis, Graph, Input

Q = fg.Tensor["b h q d"]
K = fg.Tensor["b hk kv d"]
V = fg.Tensor["b hk kv dv"]

PROGRAMS: dict[str, fg.Program] = {}


def named(name: str) -> Callable[[Callable], fg.Program]:
    """Keep a program under a name."""

    def keep(function: Callable) -> fg.Program:
        PROGRAMS[name] = fg.program(function)
        return PROGRAMS[name]

    return keep


def scores(q, k):
    return fg.dot(q, k, over="d") * fg.rsqrt(fg.size("d"))


def masked(s):
    return fg.where(fg.sliding_window(5, 1), s, -fg.inf)


@named("softmax")
def softmax(q: Q, k: K, v: V):
    return fg.dot(fg.softmax(masked(scores(q, k))), v, over="kv")


@named("softmax and logsumexp")
def with_lse(q: Q, k: K, v: V):
    s = masked(scores(q, k))
    return fg.dot(fg.softmax(s), v, over="kv"), fg.logsumexp(s)


@named("softmax with a sink")
def with_sink(q: Q, k: K, v: V, sink: fg.Tensor["h"]):
    return fg.dot(fg.softmax(masked(scores(q, k)), sink=sink), v, over="kv")


@named("softmax in base 2")
def base_2(q: Q, k: K, v: V):
    s = masked(scores(q, k)) * 1.4426950408889634
    e = fg.exp2(s - fg.max(s, over="kv"))
    return fg.dot(e / fg.sum(e, over="kv"), v, over="kv")


@named("logsumexp")
def only_lse(q: Q, k: K):
    return fg.logsumexp(masked(scores(q, k)))


@named("weights from a logsumexp")
def from_lse(q: Q, k: K, v: V):
    s = masked(scores(q, k))
    return fg.dot(fg.exp(s - fg.logsumexp(s)), v, over="kv")


@named("ReLU over its sum")
def relu_over_sum(q: Q, k: K, v: V):
    r = fg.relu(masked(scores(q, k)))
    return fg.dot(r / fg.sum(r, over="kv"), v, over="kv")


@named("sigmoid")
def sigmoid(q: Q, k: K, v: V):
    return fg.dot(fg.sigmoid(masked(scores(q, k))), v, over="kv")


@named("decayed linear attention")
def decayed(q: Q, k: K, v: V, decay: fg.Tensor["h"]):
    w = fg.where(fg.kv <= fg.q, fg.dot(q, k, over="d") * fg.exp2(decay * (fg.kv - fg.q)), 0.0)
    return fg.dot(w, v, over="kv")


@named("two statistics")
def two_statistics(q: Q, k: K, v: V):
    s = masked(scores(q, k))
    return fg.dot(fg.exp(s) / fg.sqrt(fg.sum(fg.exp(2 * s), over="kv")), v, over="kv")


@named("weights above a constant")
def above_constant(q: Q, k: K, v: V):
    return fg.dot(fg.relu(fg.softmax(masked(scores(q, k))) - 0.2), v, over="kv")


@named("weights above a scalar")
def above_scalar(q: Q, k: K, v: V, t: fg.Scalar):
    return fg.dot(fg.relu(fg.softmax(masked(scores(q, k))) - t), v, over="kv")


@named("weights and a constant")
def and_constant(q: Q, k: K, v: V):
    return fg.dot(fg.relu(fg.softmax(masked(scores(q, k))) + 0.1), v, over="kv")


@named("softmax with dropout")
def dropped(q: Q, k: K, v: V):
    return fg.dot(fg.dropout(fg.softmax(masked(scores(q, k))), 0.25), v, over="kv")


@named("talking heads")
def talking_heads(q: Q, k: K, v: fg.Tensor["b t kv dv"], mix: fg.Tensor["h t"]):
    p = fg.softmax(masked(scores(q, k)))
    return fg.dot(fg.dot(p, mix, over="h"), v, over="kv")


@named("weights as an output")
def with_weights(q: Q, k: K, v: V):
    p = fg.softmax(masked(scores(q, k)))
    return p, fg.dot(p, v, over="kv")


@named("projection")
def projection(q: Q, k: K, v: V, w: fg.Tensor["dv e"]):
    return fg.dot(fg.dot(fg.softmax(masked(scores(q, k))), v, over="kv"), w, over="dv")


@named("projected values")
def projected_values(q: Q, k: K, v: V, w: fg.Tensor["dv e"]):
    return fg.dot(fg.softmax(masked(scores(q, k))), fg.dot(v, w, over="dv"), over="kv")


@named("two score contractions")
def latent(q: Q, k: K, v: V, qr: fg.Tensor["b h q r"], kr: fg.Tensor["b kv r"]):
    s = (fg.dot(q, k, over="d") + fg.dot(qr, kr, over="r")) * 0.3
    return fg.dot(fg.softmax(masked(s)), v, over="kv")


@named("row gate")
def row_gate(q: Q, k: K, v: V, w: fg.Tensor["d"]):
    return fg.dot(fg.softmax(masked(scores(q, k))), v, over="kv") * fg.sigmoid(fg.dot(q, w, over="d"))


@named("normalised keys")
def normalised_keys(q: Q, k: K, v: V):
    s = fg.dot(q, k, over="d") / fg.sqrt(fg.dot(k, k, over="d"))
    return fg.dot(fg.softmax(masked(s)), v, over="kv")


@named("bias of a key")
def key_bias(q: Q, k: K, v: V, u: fg.Tensor["d"]):
    s = fg.dot(q, k, over="d") + fg.dot(u, k, over="d")
    return fg.dot(fg.softmax(masked(s)), v, over="kv")


@named("what each key receives")
def received(q: Q, k: K):
    return fg.sum(fg.softmax(masked(scores(q, k))), over="q")


@named("one query")
def one_query(q: fg.Tensor["b h d"], k: K, v: V, lengths: fg.Tensor["b", int]):
    s = fg.where(fg.kv < lengths, scores(q, k), -fg.inf)
    return fg.dot(fg.softmax(s), v, over="kv")


@named("rows of different walks")
def different_walks(q: Q, k: K, v: V):
    out = fg.dot(fg.softmax(masked(scores(q, k))), v, over="kv")
    return out, fg.sum(v, over="kv"), fg.max(k, over="kv")


@named("softmax of given scores")
def given_scores(s: fg.Tensor["b h q kv"], v: V):
    return fg.dot(fg.softmax(s), v, over="kv")


@named("matrix product")
def product(a: fg.Tensor["i k"], b: fg.Tensor["k j"]):
    return fg.dot(a, b, over="k")


LENGTHS: Mapping[Axis, int] = {
    "b": 2, "h": 4, "hk": 2, "t": 3, "q": 19, "kv": 23, "d": 4, "dv": 3, "e": 2, "r": 2,
    "i": 9, "j": 7, "k": 5,
}  # fmt: skip


def arguments(
    graph: Graph, lengths: Mapping[Axis, int] = LENGTHS, seed: int = 0, shift: float = 0.0
) -> dict[str, object]:
    """Random values for ``graph``: normal tensors, integers up to the number of keys, scalars of 0.15.

    ``shift`` is added to every score: the first feature of q is 1 and that of k ``shift`` over the scale.
    """
    import torch

    draw = torch.Generator().manual_seed(seed)
    values: dict[str, object] = {}
    for argument in graph.arguments:
        if not isinstance(argument, Input):
            values[argument.name] = 0.15 if argument.stored == "float" else 3
            continue
        shape = [lengths[axis] for axis in argument.layout]
        if argument.stored == "int":
            values[argument.name] = torch.randint(0, lengths["kv"] + 1, shape, generator=draw)
        else:
            values[argument.name] = torch.randn(shape, generator=draw, dtype=torch.float64)
    if shift:
        values["q"][..., 0] = 1.0
        values["k"][..., 0] = shift * lengths["d"] ** 0.5
    return values
