"""A kernel ahead of time: no tensors, no torch and no GPU needed. Give a folder to save it in."""

import sys

import fagen as fg

kernel = fg.compile(
    mask=fg.causal() & fg.sliding_window(1024), head_dim=128, dtype="bf16", arch="sm_90a", direction="forward"
)
print(kernel.source)
print(kernel.explain(batch=2, q_heads=16, q_len=8192))

if len(sys.argv) > 1:
    folder = kernel.save(sys.argv[1])  # .cu, headers, plan, and a launcher that checks it
    print(f"saved in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
assert "torch" not in sys.modules or "pytest" in sys.modules
