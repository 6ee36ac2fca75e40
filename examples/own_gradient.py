"""Gradients of a program of your own: derived from it, through every output, of every tensor."""

import torch

import fagen as fg


@fg.program
def alibi(
    q: fg.Tensor["b h q d"],
    k: fg.Tensor["b hk kv d"],
    v: fg.Tensor["b hk kv dv"],
    slopes: fg.Tensor["h"],
):
    """Causal attention whose scores fall with distance by slopes that are learned, and its log-sum-exp."""
    s = fg.dot(q, k, over="d") * fg.rsqrt(fg.size("d"))
    s = fg.where(fg.kv <= fg.q, s + slopes * (fg.kv - fg.q), -fg.inf)
    return fg.dot(fg.softmax(s, over="kv"), v, over="kv"), fg.logsumexp(s, over="kv")


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q = torch.randn(1, 4, 40, 16, device=device, requires_grad=True)
k, v = (torch.randn(1, 2, 40, 16, device=device, requires_grad=True) for _ in range(2))
slopes = (2.0 ** -torch.arange(1, 5, device=device)).requires_grad_()


def gradients(program):
    out, lse = program(q, k, v, slopes)
    loss = out.square().mean() + 1e-3 * lse.square().mean()
    return torch.autograd.grad(loss, (q, k, v, slopes))


for name, mine, exact in zip(
    ("q", "k", "v", "slopes"), gradients(alibi), gradients(alibi.options(family="reference")), strict=True
):
    error = ((mine - exact).abs().max() / exact.abs().max()).item()
    print(f"gradient of {name:<6} {tuple(mine.shape)}, largest relative error {error:.1e}")
    assert error < 1e-4
