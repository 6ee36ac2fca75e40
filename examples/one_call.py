"""One call: attention on tensors, with a mask and a score from the library.

On a GPU where there is one; CPU tensors run the same kernel on the emulator.
"""

import torch

import fagen as fg

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q = torch.randn(1, 4, 100, 64, device=device)
k, v = (torch.randn(1, 2, 100, 64, device=device) for _ in range(2))  # two query heads share a key head

mask = fg.causal() & fg.sliding_window(32)
out, lse = fg.attention(q, k, v, mask=mask, score=fg.softcap(30.0), return_lse=True)

# The same in float64, by the meaning of each operation.
exact = fg.attention(q, k, v, mask=mask, score=fg.softcap(30.0), family="reference")
error = (out - exact).abs().max().item()
print(f"out {tuple(out.shape)}, lse {tuple(lse.shape)}, largest error {error:.1e}")
assert error < 1e-5
