"""Calls for a process of its own, under compute-sanitizer: ``sanitized.py FAMILY DIRECTION NAME...``.

Tensors are made on the CPU: torch's generator on a GPU does not come back under that tool.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

import fagen as fg

LENGTH = 150
CALLS: Mapping[str, Mapping[str, Any]] = {
    "causal 64": {"head_dim": 64},
    "documents 64": {"head_dim": 64, "ids": (torch.arange(LENGTH) // 40).int().expand(2, -1)},
    "causal 96": {"head_dim": 96},
    "causal 128": {"head_dim": 128},
    "softcap 128": {"head_dim": 128, "score": fg.softcap(20.0)},
    "causal 256": {"head_dim": 256},
}


def call(family: str, backward: bool, head_dim: int, ids: torch.Tensor | None = None, **parts: Any) -> None:
    """Attention, and its gradients; heads share keys, and no length is a whole number of tiles.

    Gradients are computed by the thread that asks for them. One of torch's own lets go of them a moment after
    they are there, and a process that ends meanwhile is aborted.
    """
    given = [torch.randn(2, heads, LENGTH, head_dim).bfloat16().cuda() for heads in (4, 2, 2)]
    mask = fg.causal() if ids is None else fg.causal() & fg.document(ids.cuda())
    out = fg.attention(*(x.requires_grad_(backward) for x in given), mask=mask, family=family, **parts)
    if backward:
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad(out, given, torch.randn(out.shape).bfloat16().cuda())
    torch.cuda.synchronize()


if __name__ == "__main__":
    family, direction, *names = sys.argv[1:]
    torch.manual_seed(0)
    for name in names:
        call(family, direction == "backward", **CALLS[name])
        print("done", name, flush=True)
