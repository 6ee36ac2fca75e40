"""Kernels on tensor cores from sm_80 on as a compiler takes them: in little time."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fagen as fg
from fagen.run.build import build

COLD_COMPILE_SECONDS = 4.0
LONGEST: Mapping[str, Mapping[str, Any]] = {
    "softcap 256": {"head_dim": 256, "mask": fg.causal(), "score": fg.softcap(30.0)},
    "alibi 192": {"head_dim": 192, "mask": fg.causal(), "score": fg.alibi()},
}
"""Parts of the library that take a compiler longest."""


def children_seconds() -> float:
    """Processor time of this process' children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.nvcc
@pytest.mark.parametrize("name", LONGEST)
def test_a_cold_compile_takes_less_than_four_seconds_of_a_core(name: str, cold_cache: Path) -> None:
    kernel = fg.compile(**LONGEST[name], dtype="bf16", arch="H200", family="sm80")
    text = kernel.compiled.candidate(0).emitted.text
    before = children_seconds()
    built = build(text, name="test", arch="sm_90a")
    assert built.fresh
    assert 0.1 < children_seconds() - before < COLD_COMPILE_SECONDS
