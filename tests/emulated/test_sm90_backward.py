"""Gradients by warps with roles on the emulator: right under every schedule, and the same bits but for what
is added to memory."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fagen as fg
from edges import require_right
from fagen.calls.prepared import emulation
from fagen.errors import EmulatorFinding
from fagen.plan import cost
from fagen.plan.planner import plan as planned
from fagen.run import emulate
from fagen.run.emulate import SCHEDULES

pytestmark = pytest.mark.cxx

IDS = torch.tensor([[0] * 70 + [1] * 130])
CASES: Mapping[str, dict[str, Any]] = {
    "causal": {"head_dim": 64, "lengths": (150, 260), "heads": (4, 2), "mask": fg.causal()},
    "many tiles": {"head_dim": 64, "lengths": (400, 130), "heads": (1, 1)},
    "causal, apart": {"head_dim": 64, "lengths": (260, 150), "heads": (2, 1), "mask": fg.causal()},
    "in turns": {"head_dim": 64, "lengths": (260, 150), "heads": (2, 1)},
    "causal, in turns": {
        "head_dim": 64,
        "lengths": (150, 400),
        "heads": (2, 1),
        "mask": fg.causal(align="top_left"),
    },
    "window, in turns": {
        "head_dim": 128,
        "lengths": (150, 300),
        "heads": (2, 1),
        "mask": fg.sliding_window(60, 20),
    },
    "window, fp16": {
        "head_dim": 128,
        "lengths": (210, 150),
        "heads": (2, 2),
        "mask": fg.sliding_window(40, 0),
    },
    "alibi, fp16": {"head_dim": 80, "lengths": (130, 70), "heads": (2, 1), "score": fg.alibi()},
    "softcap": {
        "head_dim": 64,
        "lengths": (100, 150),
        "heads": (2, 1),
        "mask": fg.causal(),
        "score": fg.softcap(3.0),
    },
    "softcap, window": {
        "head_dim": 64,
        "lengths": (70, 60),
        "heads": (2, 1),
        "mask": fg.sliding_window(16, 5),
        "score": fg.softcap(3.0),
    },
    "documents": {
        "head_dim": 64,
        "lengths": (200, 200),
        "heads": (2, 2),
        "mask": fg.document(IDS) & fg.causal(),
    },
    "divided": {"head_dim": 256, "lengths": (150, 100), "heads": (2, 1), "mask": fg.causal()},
    "divided, in turns": {
        "head_dim": 192,
        "lengths": (100, 140),
        "heads": (2, 1),
        "mask": fg.causal(),
    },
    "divided, apart": {"head_dim": 192, "lengths": (40, 100), "heads": (2, 1), "mask": fg.causal()},
    "divided, softcap": {
        "head_dim": 192,
        "lengths": (100, 150),
        "heads": (2, 1),
        "mask": fg.causal(),
        "score": fg.softcap(3.0),
    },
    "each result alone": {"head_dim": 256, "lengths": (70, 100), "heads": (2, 1), "score": fg.softcap(3.0)},
}
"""Values of columns and of elements, products that are read twice, rows that pass over tiles, several walks
for one head of keys, also where threads read values of columns themselves; sums that are added to memory,
also where each consumer makes another of the same rows, and the same in a fixed order, in turns or in kernels
apart; buffers that are filled again and again."""
FREED_EARLY = {
    "columns": (
        r"wgmma_wait<0>\(acc0, rounded_weights0, weights1\);\n( +column_pipe\.pass_behind_wait)",
        r"\1",
        r"a copy overwrites bytes \d+ to \d+, which what line \d+ issued still uses",
    ),
    "what is handed over": (
        r"(wgmma_wait<0>\(part\);\n)( +if [^;]+hand_pipe\.free_by_warp\(hand_at\);\n)",
        r"\2\1",
        r"writes to bytes \d+ to \d+, which what line \d+ issued still uses",
    ),
}
"""Edits of the text of "many tiles": a product may still read a buffer that is filled again; and what is said
of them."""


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_right_under_every_schedule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dict(CASES[name])
    (q_len, kv_len), (q_heads, kv_heads), head_dim = (
        case.pop(each) for each in ("lengths", "heads", "head_dim")
    )
    fused = head_dim != 80 and "alone" not in name
    in_turns = "in turns" in name
    # taken wherever it is right, or nowhere
    monkeypatch.setattr(cost, "WARPGROUP_TURN_CYCLES", 0 if in_turns else 10**6)
    added = fused and "apart" not in name and not in_turns
    torch.manual_seed(7)
    shapes = [(1, q_heads, q_len, head_dim), *[(1, kv_heads, kv_len, head_dim)] * 2]
    dtype = torch.float16 if "fp16" in name else torch.bfloat16
    tensors = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    fixed = in_turns or "apart" in name
    out = fg.attention(*tensors, family="sm90", deterministic=fixed, **case)
    incoming = torch.randn_like(out)
    plan = fg.compile(
        head_dim=head_dim,
        dtype="fp16" if "fp16" in name else "bf16",
        arch="emulator",
        family="sm90",
        direction="backward",
        **case,
    ).plan
    roles = [kernel.roles for kernel in plan.kernels if kernel.schedule != "rowwise"]
    assert all(roles)
    assert any(each is not None and each.adders for each in roles) == fused
    assert any(each is not None and each.divided for each in roles) == ("divided" in name)
    asked = plan.problem if not fixed else replace(plan.problem, deterministic=True)
    roles = [kernel.roles for kernel in planned(asked).kernels]
    assert any(each is not None and each.in_turns for each in roles) == in_turns
    first: tuple[torch.Tensor, ...] | None = None
    orders = 2 if added or in_turns else 0  # in which blocks add to the gradient of q, besides
    for seed, schedule in enumerate((*SCHEDULES, *["random"] * orders)):
        with emulation(schedule=schedule, seed=seed):
            found = torch.autograd.grad(out, tensors, incoming, retain_graph=True)
        print(f"{schedule}, seed {seed}")
        require_right(tensors, found, [incoming], **case)
        first = first or found
        same = [torch.equal(a, b) for a, b in zip(found, first, strict=True)]
        assert all(same[added:]), (same, schedule, seed)


@pytest.mark.parametrize(("q_len", "mask"), [(40, None), (140, fg.kv <= fg.q + 5)], ids=["all pairs", "some"])
def test_a_block_adds_when_its_turn_has_come_and_not_later(
    q_len: int, mask: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whose turn it is, is known of each tile of each head."""
    torch.manual_seed(7)
    q, k, v = (torch.randn(1, 2, length, 64).bfloat16().requires_grad_() for length in (q_len, 270, 270))
    out = fg.attention(q, k, v, mask=mask, family="sm90", deterministic=True)
    checked = r"\1if (*turn != turns[part_at.stage()]) p.dQ_sum[0] = NAN;\n\1add_part("

    def edited(name: str, text: str) -> str:
        text, count = re.subn(r"( +)add_part\(", checked, text)
        assert count == 1, name
        return text

    monkeypatch.setattr(emulate, "overridden", edited)
    monkeypatch.setenv("FAGEN_OVERRIDE", str(tmp_path))  # another text than what this process knows
    with emulation(schedule="random", seed=1, multiprocessors=3):
        (found,) = torch.autograd.grad(out, [q], torch.randn_like(out))
    assert not found.isnan().any()


@pytest.mark.parametrize("buffer", FREED_EARLY)
def test_a_buffer_that_is_freed_early_is_found_by_some_schedule(
    buffer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(7)
    tensors = [torch.randn(1, 1, length, 64).bfloat16().requires_grad_() for length in (400, 130, 130)]
    out = fg.attention(*tensors, family="sm90")
    pattern, instead, told = FREED_EARLY[buffer]

    def edited(name: str, text: str) -> str:
        text, count = re.subn(pattern, instead, text)
        assert count == 1, name
        return text

    monkeypatch.setattr(emulate, "overridden", edited)
    monkeypatch.setenv("FAGEN_OVERRIDE", str(tmp_path))  # another text than what this process knows

    def run(seed: int) -> None:
        with emulation(schedule="random", seed=seed, workers=1):
            torch.autograd.grad(out, tensors, out, retain_graph=True)

    with pytest.raises(EmulatorFinding, match=told):
        any(map(run, range(64)))
