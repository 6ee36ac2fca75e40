"""Kernels of warps with roles as a compiler for Hopper takes them: nothing serialised, nothing spilled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import fagen as fg
from fagen.run.build import build

IDS = torch.tensor([[0, 0, 1, 1]])
LINES, LINES_OF_GRADIENTS = 420, 650
CASES: Mapping[str, Mapping[str, Any]] = {
    "causal 64": {"head_dim": 64, "mask": fg.causal(), "return_lse": True},
    "softcap 64": {"head_dim": 64, "mask": fg.causal(), "score": fg.softcap(30.0)},
    "full 128": {"head_dim": 128},
    "causal 128": {"head_dim": 128, "mask": fg.causal(), "return_lse": True},
    "window 128": {"head_dim": 128, "mask": fg.sliding_window(1024, 0)},
    "documents 128": {"head_dim": 128, "mask": fg.document(IDS) & fg.causal()},
    "alibi 128": {"head_dim": 128, "mask": fg.causal(), "score": fg.alibi()},
    "bias 128": {"head_dim": 128, "score": fg.relative_bias(torch.zeros(2, 99))},
    "causal 256": {"head_dim": 256, "mask": fg.causal(), "return_lse": True},
    "causal 192, 128": {"head_dim": 192, "v_head_dim": 128, "mask": fg.causal()},
    "causal 80": {"head_dim": 80, "mask": fg.causal()},
    "prefixes 64": {"head_dim": 64, "mask": fg.prefix_lm(torch.tensor([3, 4]))},
    "temperatures 128": {"head_dim": 128, "mask": fg.causal(), "score": fg.temperature(torch.ones(2))},
}
"""Parts of the library, at head dims of each design."""
BACKWARD: Mapping[str, Mapping[str, Any]] = {
    "gradients, causal 64": {"head_dim": 64, "mask": fg.causal(), "direction": "backward"},
    "gradients, causal 128": {"head_dim": 128, "mask": fg.causal(), "direction": "backward"},
    "gradients, full 128": {"head_dim": 128, "direction": "backward"},
}
ALL = (*CASES, *BACKWARD)


def text_of(name: str) -> str:
    kernel = fg.compile(**{**CASES, **BACKWARD}[name], dtype="bf16", arch="H100", family="sm90")
    return kernel.compiled.candidate(0).emitted.text


@pytest.mark.nvcc
@pytest.mark.parametrize("name", ALL)
def test_the_first_candidate_builds_well(name: str) -> None:
    found = build(text_of(name), name="test", arch="sm_90a")
    assert not [line for line in found.warnings if "(C75" in line]
    for used in found.functions.values():
        assert (used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) == (0, 0, 0), used


@pytest.mark.parametrize("name", ALL)
def test_a_kernel_is_no_longer_than_a_person_reads(name: str) -> None:
    """Apart from what sums up tables, which are kernels of their own."""
    text = text_of(name)
    first = text.index("constexpr int CONSUMERS")
    tables = (
        text[text.find("// One warp computes") : first].count("\n") if "// One warp computes" in text else 0
    )
    lines = text.count("\n") - tables
    assert lines <= (LINES_OF_GRADIENTS if name in BACKWARD else LINES), lines


def test_a_walk_goes_the_way_in_which_maxima_fall() -> None:
    upwards = {}
    scores = {
        "falls": lambda s: s - 0.5 * fg.kv,
        "rises": fg.alibi(),
        "neither": lambda s: s - fg.abs(fg.q - fg.kv),
    }
    for name, score in scores.items():
        kernel = fg.compile(head_dim=64, dtype="bf16", arch="H100", family="sm90", score=score)
        text = kernel.compiled.candidate(0).emitted.text
        upwards[name] = "const int next = kv_start + BLOCK_KV < p.kv_len ? kv_start + BLOCK_KV : -1;" in text
    assert upwards == {"falls": True, "rises": False, "neither": False}


def test_no_branch_stands_between_products_of_gradients() -> None:
    """Not even where a weight asks more than what was kept: a compiler would wait for all products there."""
    kernel = fg.compile(
        head_dim=16,
        v_head_dim=24,
        dtype="fp16",
        arch="H100",
        family="sm90",
        direction="backward",
        mask=fg.causal(),
        score=fg.softcap(5.0, exact=True),
        dropout=0.3,
    )
    text = kernel.compiled.candidate(0).emitted.text
    assert "const float x0 = tanhf(kept(0, r, c)" in text
    second = text.partition("void update1(")[2].partition("// dK = ")[0]
    assert "whole(0, r, c) * (" in second, "it is 0 where no element counts"
    assert "counts" not in second
