"""Masks and scores of your own: conditions and functions over named positions, with tensors captured."""

import torch

import fagen as fg

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q, k, v = (torch.randn(2, 2, 96, 32, device=device) for _ in range(3))

# Three documents in each sequence: a key is seen from its own document, and only backwards.
lengths = torch.tensor([[40, 30, 26], [10, 70, 16]], device=device)
ids = torch.stack([torch.repeat_interleave(torch.arange(3, device=device), row) for row in lengths])
doc = fg.capture(ids, "b position", sorted=True)
mask = (doc[fg.b, fg.q] == doc[fg.b, fg.kv]) & (fg.kv <= fg.q)

# A learned bias for each head and distance: an argument of the kernel, however often it changes.
table = fg.capture(torch.randn(2, 96, device=device), "h distance")


def by_distance(s):
    return s + table[fg.h, fg.q - fg.kv]


out = fg.attention(q, k, v, mask=mask, score=by_distance)

exact = fg.attention(q, k, v, mask=mask, score=by_distance, family="reference")
error = (out - exact).abs().max().item()
print(f"out {tuple(out.shape)}, largest error {error:.1e}")
assert error < 1e-5
