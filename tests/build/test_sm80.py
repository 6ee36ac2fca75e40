"""Kernels on tensor cores from sm_80 on as a compiler takes them: in little time, and without spilling."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fagen as fg
from fagen.run.build import build

COLD_COMPILE_SECONDS = 4.0
IDS = fg.capture(torch.tensor([[0, 0, 1, 1]], dtype=torch.int32), "b q", sorted=True)
LONGEST: Mapping[str, Mapping[str, Any]] = {
    "softcap 256": {"head_dim": 256, "mask": fg.causal(), "score": fg.softcap(30.0)},
    "alibi 192": {"head_dim": 192, "mask": fg.causal(), "score": fg.alibi()},
    "bias 64": {"head_dim": 64, "score": fg.relative_bias(torch.zeros(2, 99))},
}
"""Parts of the library that take a compiler longest."""
CASES: Mapping[str, Mapping[str, Any]] = {
    "causal 64": {"head_dim": 64, "mask": fg.causal()},
    "softcap 64": {"head_dim": 64, "mask": fg.causal(), "score": fg.softcap(30.0)},
    "prefix 64": {"head_dim": 64, "mask": fg.prefix_lm(2048)},
    "causal 96": {"head_dim": 96, "mask": fg.causal()},
    "full 112": {"head_dim": 112},
    "causal 112": {"head_dim": 112, "mask": fg.causal()},
    "full 128": {"head_dim": 128},
    "causal 128": {"head_dim": 128, "mask": fg.causal()},
    "window 128": {"head_dim": 128, "mask": fg.sliding_window(1024, 0)},
    "documents 128": {"head_dim": 128, "mask": fg.document(IDS) & fg.causal()},
    "prefix 128": {"head_dim": 128, "mask": fg.prefix_lm(2048)},
    "softcap 176": {"head_dim": 176, "mask": fg.causal(), "score": fg.softcap(30.0)},
    "causal 192": {"head_dim": 192, "mask": fg.causal()},
    "softcap 192": {"head_dim": 192, "mask": fg.causal(), "score": fg.softcap(30.0)},
    "alibi 96": {"head_dim": 96, "mask": fg.causal(), "score": fg.alibi()},
    "softcap 96": {"head_dim": 96, "mask": fg.causal(), "score": fg.softcap(30.0)},
    "alibi 128": {"head_dim": 128, "mask": fg.causal(), "score": fg.alibi()},
    "softcap 128": {"head_dim": 128, "mask": fg.causal(), "score": fg.softcap(30.0)},
}
"""Head dims and parts of the library of which registers are just enough."""
SPILLED: Mapping[str, int] = {"alibi 128": 4, "softcap 128": 4}
"""Bytes of those that are not: a maximum, across the products of a tile."""


def text_of(**of: Any) -> str:
    kernel = fg.compile(**of, dtype="bf16", arch="H200", family="sm80")
    return kernel.compiled.candidate(0).emitted.text


def children_seconds() -> float:
    """Processor time of this process' children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.nvcc
@pytest.mark.parametrize("name", LONGEST)
def test_a_cold_compile_takes_less_than_four_seconds_of_a_core(name: str, cold_cache: Path) -> None:
    text, before = text_of(**LONGEST[name]), children_seconds()
    built = build(text, name="test", arch="sm_90a")
    assert built.fresh
    assert 0.1 < children_seconds() - before < COLD_COMPILE_SECONDS


@pytest.mark.nvcc
@pytest.mark.parametrize("name", CASES)
def test_the_first_candidate_keeps_all_in_registers(name: str) -> None:
    built = build(text_of(**CASES[name]), name="test", arch="sm_90a")
    for used in built.functions.values():
        assert max(used.spill_store_bytes, used.spill_load_bytes) <= SPILLED.get(name, 0), used
