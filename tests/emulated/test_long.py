"""What a GPU gets where lengths fill it, which is not what calls of the emulator's size get there.

The emulator's own row has other tiles, and so have few rows. What an H200 gets for gradients of 4,096
positions, sums in any order and in a fixed one, is read by a C++ compiler.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fagen as fg
from fagen.compile import Compiled, backward_of, problem_of
from fagen.ir.graph import Input
from fagen.lang.attention import attention
from fagen.plan.arch import arch_for
from fagen.plan.plan import Problem, Storage
from fagen.plan.tiling import length_classes
from fagen.run import emulate
from fagen.run.toolchain import find_cxx
from sampler import SEED, covering

pytestmark = pytest.mark.cxx

GPU, LENGTH, HEADS = "H200", 4096, 16
FAMILIES = ("simt", "sm80", "sm90")

MASKS: Mapping[str, Callable[[], Any]] = {
    "full": lambda: None,
    "causal": fg.causal,
    "window": lambda: fg.sliding_window(256, 256),
    "documents": lambda: fg.document(torch.zeros(1, LENGTH, dtype=torch.int32)) & fg.causal(),
}
PARTS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "dropout": lambda: {"dropout": 0.1, "score": fg.softcap(30.0)},
    "captured": lambda: {
        "score": fg.alibi(torch.ones(HEADS)),
        "bias": torch.zeros(1, HEADS, 1, LENGTH),
        "sink": torch.zeros(HEADS),
        "return_lse": True,
    },
}
ROWS = covering(
    [[(m, ordered) for m in MASKS for ordered in (False, True)], tuple(PARTS), (64, 128, 256), (1, 4)],
    0,
    random.Random(SEED),
)
"""Of a program its mask and whether its sums have a fixed order; its parts, its head dim, and its group."""
EVERY = {"simt": 3, "sm80": 1, "sm90": 2}


def problem(family: str, row: Sequence[Any]) -> Problem:
    """The gradients of a program."""
    (mask, deterministic), part, head_dim, group = row
    graph = attention(mask=MASKS[mask](), **PARTS[part]()).graph
    sizes = {"d": head_dim, "dv": head_dim, "b": 4, "hk": HEADS // group, "g": group, "h": HEADS}
    lengths = {**sizes, "q": LENGTH, "kv": LENGTH}
    tensors = [argument for argument in graph.arguments if isinstance(argument, Input)]
    kinds: Mapping[str, Storage] = {"float": "fp32", "int": "int32", "bool": "bool"}
    stored = tuple("bf16" if {"d", "dv"} & {*each.axes} else kinds[each.stored] for each in tensors)
    forward = problem_of(graph, GPU, family, stored, lengths, deterministic=deterministic)
    back, _ = backward_of(forward)
    return replace(back, lengths=length_classes(back.graph, back.sizes, lengths, arch_for(GPU)))


@pytest.mark.parametrize(
    ("family", "row"), [(family, row) for family, every in EVERY.items() for row in ROWS[::every]]
)
def test_texts_for_a_gpu_are_read(family: str, row: Sequence[Any], tmp_path: Path) -> None:
    kernel = Compiled(problem(family, row))
    best = kernel.candidate(0)
    (tmp_path / "kernel.cu").write_text(best.emitted.text)
    (tmp_path / "entry.cpp").write_text(emulate._entry_points([f.name for f in best.emitted.functions]))
    flags = [*emulate._FLAGS, "-w", "-fsyntax-only", f"-I{emulate._headers()}"]
    emulate._compile(find_cxx(), tmp_path, [*flags, "entry.cpp"], kernel.name)
