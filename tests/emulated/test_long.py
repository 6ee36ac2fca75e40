"""What a GPU gets where lengths fill it, which is not what calls of the emulator's size get there.

The emulator's own row has other tiles, and so have few rows. What an H200 gets for gradients of 4,096
positions, sums in any order and in a fixed one, is read by a C++ compiler, and some of it run on few.
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
from fagen.calls import dispatch
from fagen.compile import Compiled, backward_of, problem_of
from fagen.ir.graph import Graph, Input
from fagen.lang.attention import attention
from fagen.plan.arch import arch_for
from fagen.plan.plan import Problem, Storage
from fagen.plan.tiling import length_classes
from fagen.run import emulate
from fagen.run.toolchain import find_cxx
from sampler import FACTORS, SEED, Case, check_gradients, covering, differentiable, sample

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
EVERY = {"simt": 6, "sm80": 2, "sm90": 4}
"""Of a family every how many of these programs are read."""
RUN = {"simt": 80, "sm80": 30, "sm90": 50}
"""And of the sample's gradients every how many are run."""


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


@pytest.fixture
def _by_plans_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on the emulator have the plans of a GPU and of lengths that fill it."""

    def long(graph: Graph, arch: str, family: str | None, inputs: Any, sizes: Any, **rest: Any) -> Problem:
        lengths = {**sizes, "b": 4, "hk": HEADS, "q": LENGTH, "kv": LENGTH}
        return problem_of(graph, arch, family, inputs, lengths, **rest)

    monkeypatch.setattr(dispatch, "arch_of", lambda device: GPU)
    monkeypatch.setattr(dispatch, "problem_of", long)
    monkeypatch.setattr(dispatch, "_entries", {})
    monkeypatch.setattr(dispatch, "_recent", {})


@pytest.mark.usefixtures("_by_plans_of_a_gpu")
@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(family, case, id=f"{family}-{case}")
        for family, every in RUN.items()
        for case in [c for c in differentiable(sample(family), family) if c.q_len * c.kv_len <= 2**13][
            5::every
        ]
    ],
)
def test_gradients_by_plans_of_a_gpu_are_right(family: str, case: Case) -> None:
    check_gradients(case, "cpu", family)


@pytest.mark.usefixtures("_by_plans_of_a_gpu")
def test_sums_of_rows_beside_sums_of_columns() -> None:
    """A walk that sums rows as well, here of one head, has no loop that adds what columns sum to memory."""
    plain = {name: levels[0] for name, levels in FACTORS.items()}
    lengths = {"head_dim": 64, "q_len": 63, "kv_len": 127}
    case = Case(4, **{**plain, **lengths, "dtype": "bf16", "bias": "b 1 q 1", "dropout": 0.3})
    check_gradients(case, "cpu", "sm80")
