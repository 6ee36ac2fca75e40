"""A program: the whole computation over named axes, and not a hook inside somebody else's."""

import torch

import fagen as fg


@fg.program
def alibi(
    q: fg.Tensor["b h q d"],
    k: fg.Tensor["b hk kv d"],
    v: fg.Tensor["b hk kv dv"],
    slopes: fg.Tensor["h"],
):
    """Causal attention whose scores fall with distance (Press et al. 2022)."""
    s = fg.dot(q, k, over="d") * fg.rsqrt(fg.size("d"))
    s = s + slopes * (fg.kv - fg.q)
    s = fg.where(fg.kv <= fg.q, s, -fg.inf)
    p = fg.softmax(s, over="kv")
    return fg.dot(p, v, over="kv")


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q, k, v = (torch.randn(2, 4, 80, 32, device=device) for _ in range(3))
slopes = 2.0 ** -torch.arange(1, 5, device=device)

out = alibi(q, k, v, slopes)  # compiled at the first call with such head dims and dtypes

exact = alibi.options(family="reference")(q, k, v, slopes)
error = (out - exact).abs().max().item()
print(f"out {tuple(out.shape)}, largest error {error:.1e}")
assert error < 1e-5
