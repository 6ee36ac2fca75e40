"""Kernels as Hopper gets them, on the emulator: right, and the same bits under fifty schedules.

One of each structure: what differs from kernel to kernel in who waits for whom. Blocks take one work after
another, and every buffer is filled again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen as fg
from fagen.calls import prepared
from fagen.calls.dispatch import compute
from fagen.compile import Compiled, backward_of, problem_of
from fagen.derive.gradient import Gradient
from fagen.ir.graph import Axis, Graph, Input
from fagen.ir.reference import compare, eager, evaluate
from fagen.lang.attention import attention
from fagen.lang.program import Options
from fagen.lang.trace import Traced
from fagen.plan.plan import KernelPlan
from schedules import require_same_bits

pytestmark = pytest.mark.cxx

LONG: Mapping[Axis, int] = {"b": 4, "hk": 16, "h": 16, "g": 1, "q": 4096, "kv": 4096}


def documents(n: int) -> Any:
    return fg.document((torch.arange(n)[None] // 70).int()) & fg.causal()


def pairs(n: int) -> Any:
    """A table that is read element by element."""
    table = torch.rand(5, n, generator=torch.Generator().manual_seed(n)) < 0.7
    return fg.capture(table, "row column", name="pairs")[fg.q % 5, fg.kv]


@dataclass(frozen=True)
class Case:
    """A call, its mask one of the longer of its lengths; ``group`` and ``q_len`` where heads share tiles."""

    head_dim: int = 64
    v_head_dim: int | None = None
    mask: Callable[[int], Any] = lambda _: fg.causal()
    parts: Mapping[str, Any] = field(default_factory=dict)
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    group: int = 1
    q_len: int | None = None
    deterministic: bool = False


FORWARD: Mapping[str, Case] = {
    "causal, 64": Case(),
    "causal, 128": Case(128),
    "causal, 256": Case(256),
    "all pairs, 192 and 128": Case(192, 128, mask=lambda _: None),
    "window, alibi, 80": Case(80, mask=lambda _: fg.sliding_window(90, 0), parts={"score": fg.alibi()}),
    "softcap": Case(parts={"score": fg.softcap(3.0)}),
    "documents": Case(mask=documents),
    "a table of pairs": Case(mask=pairs, dtype=torch.float16),
    "a bias": Case(bias=True),
    "random bits": Case(parts={"dropout": 0.3}),
    "statistics": Case(128, parts={"return_lse": True}),
    "heads share tiles": Case(group=4, q_len=3),
    "heads share tiles of two consumers": Case(group=32, q_len=3),
}
BACKWARD: Mapping[str, Case] = {
    "causal, 64": Case(),
    "causal, 128": Case(128),
    "causal, 256": Case(256),
    "all pairs": Case(mask=lambda _: None),
    "softcap, fp16": Case(parts={"score": fg.softcap(3.0)}, dtype=torch.float16),
    "documents": Case(mask=documents),
    "two kernels, 80": Case(80),
    "two kernels, 192 and 128": Case(192, 128, mask=lambda _: None),
    "in a fixed order": Case(mask=lambda _: fg.prefix_lm(9), deterministic=True),
    "in turns": Case(deterministic=True),
}


def drawn(graph: Graph, lengths: Mapping[Axis, int], captured: Sequence[Tensor], case: Case) -> list[Any]:
    """A value for each argument: what is captured, the rest at random."""
    generator = torch.Generator().manual_seed(lengths["kv"])
    inputs = [argument for argument in graph.arguments if isinstance(argument, Input)]
    free = inputs[: len(inputs) - len(captured)]
    shapes = [[lengths[axis] for axis in argument.layout] for argument in free]
    return [*(torch.randn(shape, generator=generator).to(case.dtype) for shape in shapes), *captured]


def traced_at(case: Case, q_len: int, kv_len: int) -> Traced:
    generator = torch.Generator().manual_seed(q_len)
    bias = torch.randn(case.group, q_len, kv_len, generator=generator).to(case.dtype) if case.bias else None
    return attention(mask=case.mask(max(q_len, kv_len)), bias=bias, **case.parts)


def lengths_of(case: Case, q_len: int, kv_len: int) -> dict[Axis, int]:
    v_head_dim = case.v_head_dim or case.head_dim
    heads = {"b": 1, "hk": 1, "g": case.group, "h": case.group}
    return {**heads, "q": q_len, "kv": kv_len, "d": case.head_dim, "dv": v_head_dim}


def planned(case: Case, direction: str) -> tuple[Compiled, Gradient | None]:
    """The kernel that Hopper gets for long sequences, or for few queries; backward with where its inputs
    come from."""
    traced = traced_at(case, 8, 8)
    few = {} if case.q_len is None else {"q": case.q_len, "g": case.group, "h": 16 * case.group}
    sizes = {**lengths_of(case, 0, 0), **LONG, **few}
    stored = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "int32", torch.bool: "bool"}
    values = drawn(traced.graph, lengths_of(case, 8, 8), traced.captured, case)
    storages: Any = tuple(stored[value.dtype] for value in values)
    problem = problem_of(traced.graph, "H200", "sm90", storages, sizes, deterministic=case.deterministic)
    if direction == "forward":
        return Compiled(problem), None
    back, both = backward_of(problem)
    return Compiled(back), both


def backward_inputs(both: Gradient, given: Sequence[Any], case: Case) -> list[Any]:
    """What the backward direction reads, for arguments of the forward one."""
    out, *kept = evaluate(both.forward, given)
    incoming = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(case.dtype)
    kinds = {
        "argument": given,
        "output": [out.to(case.dtype), *(each.float() for each in kept)],
        "gradient": [incoming],
    }
    return [kinds[kind][place] for kind, place in both.sources]


def small(case: Case, kernels: Sequence[KernelPlan]) -> tuple[int, int]:
    """Lengths of two works for a block, each of more tiles than a kernel has buffers for."""
    needed = {"q": 0, "kv": 0}
    for kernel in kernels:
        assert kernel.roles is not None
        assert kernel.tile_axis is not None
        walk = "kv" if kernel.tile_axis == "q" else "q"
        needed[kernel.tile_axis] = max(needed[kernel.tile_axis], kernel.block_own + 5)
        needed[walk] = max(needed[walk], kernel.roles.stages * kernel.block_walk + 3)
    return case.q_len or needed["q"], needed["kv"]


@pytest.fixture(autouse=True)
def _one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """All works are of one block: gradients that are added to memory have one order, too. Where blocks add in
    turns they have it anyhow."""
    monkeypatch.setattr(prepared, "_EMULATED_BLOCKS", 1)


@pytest.mark.parametrize(
    ("direction", "name"),
    [*(("forward", name) for name in FORWARD), *(("backward", name) for name in BACKWARD)],
)
def test_fifty_schedules_give_the_same_right_bits(
    direction: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {"forward": FORWARD, "backward": BACKWARD}[direction][name]
    kernel, both = planned(case, direction)
    kernels = [each for each in kernel.plan.kernels if each.roles]
    assert kernels
    in_turns = any(each.roles and each.roles.in_turns for each in kernels)
    assert in_turns == (name == "in turns")
    if in_turns:
        monkeypatch.setattr(prepared, "_EMULATED_BLOCKS", 3)
    q_len, kv_len = small(case, kernels)
    traced = traced_at(case, q_len, kv_len)
    given = drawn(traced.graph, lengths_of(case, q_len, kv_len), traced.captured, case)
    if both is not None:
        given = backward_inputs(both, given, case)
    graph = kernel.problem.graph
    options, seed = Options(case.deterministic, "sm90"), torch.tensor([5])
    found = require_same_bits(lambda: compute(graph, given, options, kernel, seed))
    exact, near = evaluate(graph, given, seed=5), eager(graph, given, dtype=case.dtype, seed=5)
    for output, mine, ref, quick in zip(graph.outputs, found, exact, near, strict=True):
        compare(mine, ref, quick.double(), gradient=both is not None).require(f"{name}.{output.name}")
