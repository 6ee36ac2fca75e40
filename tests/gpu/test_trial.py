"""Kernels tried on a GPU as ``fagen run`` and ``fagen ladder`` try them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fagen as fg
from fagen.calls.dispatch import arch_of
from fagen.compile import Compiled, compile_problem, problem_of
from fagen.study.ladder import attention_ladder, attention_lengths, climb, matmul_ladder, matmul_lengths
from fagen.study.tables import Lengths
from fagen.study.trial import Trial, make_values, try_kernel

pytestmark = pytest.mark.gpu

SPARE_BYTES = 64 << 20


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def planned(lengths: Lengths, **parts: Any) -> tuple[Compiled, Sequence[Any]]:
    """The kernel that a call with such lengths takes, and what it captured."""
    kernel = fg.compile(arch=arch_of(device()), **parts)
    found = kernel.compiled.problem
    sizes = lengths.by_axis() | dict(found.sizes)
    problem = problem_of(found.graph, found.arch, found.family, found.inputs, sizes)
    return compile_problem(problem), kernel.captured


def tried(lengths: Lengths, seed: int = 0, **parts: Any) -> Trial:
    kernel, captured = planned(lengths, **parts)
    sizes = lengths.by_axis() | dict(kernel.problem.sizes)
    values = make_values(kernel, captured, sizes, device=device(), seed=seed)
    return try_kernel(kernel, values, seed=seed)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_memory_grows_with_the_length_and_not_its_square(dtype: str):
    n, d = 65_536, 64
    trial = tried(Lengths(1, 1, 1, n, n), mask=fg.causal(), head_dim=d, dtype=dtype)
    assert trial.ok, trial
    assert trial.rows == 512
    inputs_and_outputs = 4 * n * d * (4 if dtype == "fp32" else 2)
    assert inputs_and_outputs <= trial.peak_bytes <= inputs_and_outputs + SPARE_BYTES
    assert trial.device == torch.cuda.get_device_name()
    assert "forward" in trial.source.read_text()


def test_dropout_and_masks_of_tables_are_compared_too():
    lengths = Lengths(2, 8, 2, 700, 900)
    ids = torch.arange(900, dtype=torch.int32).expand(2, -1) // 250
    mask = fg.causal() & fg.document(ids.to(device()))
    trial = tried(lengths, 3, mask=mask, score=fg.softcap(20), dropout=0.25, head_dim=80, dtype="bf16")
    assert trial.ok, trial
    assert trial.max_error > 0


def test_a_ladder_of_attention():
    steps = climb(attention_ladder(arch=arch_of(device())), attention_lengths(1000, q_heads=2))
    for step in steps:
        kernel = compile_problem(step.plan.problem)
        values = make_values(kernel, (), dict(step.lengths), device=device())
        trial = try_kernel(kernel, values)
        assert trial.ok, (step.rung.name, trial)
        assert trial.kernels == step.kernels
        needed = 4 * 2 * 1000 * 64 * 4 + step.extra_bytes
        assert needed <= trial.peak_bytes <= needed + SPARE_BYTES


def test_a_ladder_of_a_product():
    for step in climb(matmul_ladder(1024, arch=arch_of(device())), matmul_lengths(1024)):
        kernel = compile_problem(step.plan.problem)
        trial = try_kernel(kernel, make_values(kernel, (), dict(step.lengths), device=device()))
        assert trial.ok, (step.rung.name, trial)


def test_the_command_runs_on_the_gpu():
    pytest.importorskip("typer", reason="needs typer: it reads the command line")
    from command_line import fagen

    told = fagen("run", "--mask", "causal & padding", "--q-len", 300, "--kv-len", 400, "--json").json
    assert (told["ok"], told["device"]) == (True, torch.cuda.get_device_name())
    shown = fagen("run", "--mask", "causal", "--explain")
    assert shown.code == 0, shown.err
    assert "of what was predicted" in shown.out
