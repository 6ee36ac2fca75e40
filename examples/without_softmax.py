"""No softmax: what fuses is derived from the formula, and `explain` says by which rule."""

import torch

import fagen as fg

Q, K, V = fg.Tensor["b h q d"], fg.Tensor["b hk kv d"], fg.Tensor["b hk kv dv"]


@fg.program
def sigmoid_attention(q: Q, k: K, v: V):
    """Each weight on its own: nothing to stream."""
    s = fg.dot(q, k, over="d") * fg.rsqrt(fg.size("d")) - fg.log(fg.size("kv"))
    return fg.dot(fg.sigmoid(s), v, over="kv")


@fg.program
def relu_attention(q: Q, k: K, v: V):
    """Normalised by the sum of a row: the division leaves the loop."""
    w = fg.relu(fg.dot(q, k, over="d"))
    return fg.dot(w / (fg.sum(w, over="kv") + 1e-6), v, over="kv")


@fg.program
def decayed_linear_attention(q: Q, k: K, v: V, decay: fg.Tensor["h"]):
    """Scores as they are, times a decay with distance."""
    s = fg.dot(q, k, over="d") * fg.exp(decay * (fg.kv - fg.q))
    return fg.dot(fg.where(fg.kv <= fg.q, s, 0.0), v, over="kv")


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 70, 32, device=device) for _ in range(3))
decay = torch.tensor([0.1, 0.5], device=device)

for program, tensors in (
    (sigmoid_attention, (q, k, v)),
    (relu_attention, (q, k, v)),
    (decayed_linear_attention, (q, k, v, decay)),
):
    out = program(*tensors)
    exact = program.options(family="reference")(*tensors)
    error = ((out - exact).abs().max() / exact.abs().max()).item()
    print(f"{program.name}: largest error {error:.1e} of the largest value")
    print(fg.compile(program, head_dim=32, dtype="fp32").explain(q_len=4096).partition("\nKernel")[0])
    assert error < 1e-5
