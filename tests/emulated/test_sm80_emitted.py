"""Emitted kernels on tensor cores: right from any memory, free of races, nothing in them that could be left
out."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import fagen as fg
from emitted import Run, problem_of
from fagen.emit.program import emit
from fagen.errors import EmulatorFinding
from fagen.ir.graph import Graph
from fagen.ir.reference import compare, eager, evaluate
from fagen.plan import tiling
from fagen.plan.plan import Plan
from fagen.plan.planner import plan
from fagen.plan.space import FRAGMENT, Tiles, round_up
from fagen.run.emulate import SCHEDULES, Checker

pytestmark = pytest.mark.cxx

HEAD_DIM, V_HEAD_DIM = 24, 40


@fg.program
def causal(q: fg.Tensor["b h q d"], k: fg.Tensor["b hk kv d"], v: fg.Tensor["b hk kv dv"]):
    s = fg.where(fg.kv <= fg.q, fg.dot(q, k, over="d") * 0.2, -fg.inf)
    return fg.dot(fg.softmax(s, over="kv"), v, over="kv")


@fg.program
def sums_of_two_walks(q: fg.Tensor["b h q d"], k: fg.Tensor["b hk kv d"], v: fg.Tensor["b hk kv dv"]):
    """The mean of v, then what lies above it by the weights of its scores: a sum in each walk."""
    p = fg.softmax(fg.where(fg.kv <= fg.q + 10, fg.dot(q, k, over="d") * 0.2, -fg.inf), over="kv")
    return fg.dot(p, v, over="kv"), fg.dot(fg.relu(p - 0.01), v, over="kv")


PROGRAMS = {"causal": causal, "two walks": sums_of_two_walks}


def tensors(dtype: torch.dtype = torch.float16, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (1, 1, 40, HEAD_DIM), (1, 1, 70, HEAD_DIM), (1, 1, 70, V_HEAD_DIM)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def small_plan(graph: Graph, values: Sequence[Any], aligned: tuple[bool, ...] = (), held: int = 0) -> Plan:
    """A plan with 32 x 32 tiles of two warps: several blocks, several tiles, few threads."""

    def small(counts: Any, *_: Any) -> list[Tiles]:
        whole = max(size for step in counts.passes for size in step.terms)
        return [Tiles("fragments", 32, 32, round_up(whole, FRAGMENT), 0, 16, 4, held=held)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "candidates", small)
        return plan(replace(problem_of(graph, values), family="sm80", aligned=aligned))


def test_a_vector_of_weights_is_read_in_pieces() -> None:
    """It has no row: the same for all."""

    @fg.program
    def gated(
        q: fg.Tensor["b h q d"], k: fg.Tensor["b hk kv d"], v: fg.Tensor["b hk kv dv"], w: fg.Tensor["d"]
    ):
        s = fg.dot(q, k, over="d") * 0.2
        return fg.dot(fg.softmax(s, over="kv"), v, over="kv") * fg.sigmoid(fg.dot(q, w, over="d"))

    values = [*tensors(), torch.linspace(-1, 1, HEAD_DIM).half()]
    graph = gated.trace().graph
    run = Run(plan(replace(problem_of(graph, values), family="sm80")))
    assert "load_vector<8>(&p.B[first])" in run.emitted.text
    assert is_right(run, values)


class Without(Run):
    """A plan's text with the part from ``begin`` to ``end`` left out."""

    def __init__(self, plan: Plan, begin: int, end: int, checker: Checker) -> None:
        self.part = slice(begin, end)
        super().__init__(plan, checker)

    def compile(self, text: str) -> None:
        super().compile(text[: self.part.start] + text[self.part.stop :])


def is_right(run: Run, values: Sequence[torch.Tensor], **how: Any) -> bool:
    graph = run.plan.problem.graph
    outputs = run(values, **how)
    references, plain = evaluate(graph, values), eager(graph, values, values[0].dtype)
    return all(compare(*each).ok for each in zip(outputs, references, plain, strict=True))


# ------------------------------------------------------------------------------------- what holds it together

STEP = re.compile(r"copy_async_wait<0>\(\);|__syncthreads\(\);")
STEPS = {"causal": 5, "two walks": 8}
"""Waits and barriers: two of each in a step of a tile; a wait behind the last, for copies of no tile."""


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, count in STEPS.items() for number in range(count)]
)
def test_each_wait_and_each_barrier_is_needed(name: str, number: int) -> None:
    """Without it a race is found, or the result is wrong."""
    values = tensors()
    plan = small_plan(PROGRAMS[name].trace().graph, values)
    steps = [match.span() for match in STEP.finditer(emit(plan).text)]
    assert len(steps) == STEPS[name]
    without = Without(plan, *steps[number], checker="race")
    with pytest.raises(EmulatorFinding, match="data race"):
        assert all(is_right(without, values, schedule=schedule) for schedule in SCHEDULES)


@pytest.mark.parametrize("held", [32, 16], ids=["all columns", "half of them"])
def test_rows_are_read_into_registers_once_they_are_there(held: int) -> None:
    values = tensors()
    plan = small_plan(causal.trace().graph, values, held=held)
    text = emit(plan).text
    assert ("load_left(own" in text) == (held == 16)
    assert is_right(Run(plan, "race"), values)
    (barrier,) = re.finditer(r"__syncthreads\(\);  // Q is there", text)
    wait = text.rindex("copy_async_wait<0>();", 0, barrier.start())
    for begin, end in ((wait, barrier.start()), barrier.span()):
        without = Without(plan, begin, end, checker="race")
        with pytest.raises(EmulatorFinding, match="data race"):
            assert all(is_right(without, values, schedule=schedule) for schedule in SCHEDULES)


@pytest.mark.parametrize("aligned", [(), (False, False, False)])
def test_no_race_is_found_under_twenty_seeds(aligned: tuple[bool, ...]) -> None:
    values = tensors()
    run = Run(small_plan(sums_of_two_walks.trace().graph, values, aligned), "race")
    for dice in range(20 if not aligned else 3):
        assert is_right(run, values, schedule=SCHEDULES[dice % 3], dice=dice), dice


def test_heads_follow_each_other_as_many_as_the_cache_holds() -> None:
    """Of six there are four, and the two that are left; then even one is too many."""
    generator = torch.Generator().manual_seed(3)
    shapes = (3, 4, 40, HEAD_DIM), (3, 2, 70, HEAD_DIM), (3, 2, 70, V_HEAD_DIM)
    values = [torch.randn(shape, generator=generator).half() for shape in shapes]
    whole = small_plan(causal.trace().graph, values)
    for near in (300, 1):
        assert is_right(Run(replace(whole, kernels=(replace(whole.kernels[0], near=near),))), values), near


def test_bits_depend_on_no_seed() -> None:
    values = tensors()
    run = Run(small_plan(causal.trace().graph, values))
    (first,) = run(values)
    for dice in range(12):
        (out,) = run(values, schedule="random", dice=dice)
        assert torch.equal(out, first), dice


# ----------------------------------------------------------------------------------------------------- memory


def test_rows_that_are_not_aligned_are_read_another_way() -> None:
    def fills(aligned: tuple[bool, ...]) -> dict[str, list[str]]:
        text = emit(small_plan(causal.trace().graph, tensors(), aligned)).text
        return {way: re.findall(rf"{way}_operand<.*?>\((\w)", text, re.S) for way in ("copy", "fill")}

    assert fills(()) == {"copy": ["Q", "V", "K", "K"], "fill": []}
    assert fills((False, False, False)) == {"copy": [], "fill": ["Q", "V", "K", "K"]}
    assert fills((True, False, True)) == {"copy": ["Q", "V"], "fill": ["K", "K"]}


@pytest.mark.parametrize(
    ("d", "dv", "dtype"),
    [(1, 1, torch.float16), (7, 9, torch.bfloat16), (20, 12, torch.float16), (129, 72, torch.bfloat16)],
)
def test_head_dims_are_padded_inside(d: int, dv: int, dtype: torch.dtype) -> None:
    """The memory around each row is NaN: what lies past a head dim or a length reaches nothing."""
    generator = torch.Generator().manual_seed(1)
    values = []
    for heads, rows, width in ((2, 70, d), (1, 90, d), (1, 90, dv)):
        room = torch.full((1, heads, rows + 3, (width + 15) // 8 * 8), torch.nan, dtype=dtype)
        room[:, :, :rows, :width] = torch.randn(1, heads, rows, width, generator=generator).to(dtype)
        values.append(room[:, :, :rows, :width])
    graph = causal.trace().graph
    problem = replace(problem_of(graph, values), family="sm80")
    assert is_right(Run(plan(problem), "address"), values)


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
def test_a_call_takes_the_way_its_addresses_allow(offset: int) -> None:
    values = tensors()
    moved = [
        torch.cat([torch.zeros(offset, dtype=x.dtype), x.flatten()])[offset:].view(x.shape) for x in values
    ]
    for step in (slice(None), slice(None, None, 2)):
        parts = [x[..., step] for x in moved]
        out = fg.attention(*parts, mask=fg.causal(), family="sm80")
        expected = fg.attention(*(x.clone() for x in parts), mask=fg.causal(), family="sm80")
        assert torch.equal(out, expected)


def test_a_maximum_lags_behind_by_little() -> None:
    """Scores rise by 3 from tile to tile: that is little each time, and in the end more than fp16 holds."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 128, generator=generator).half() for n in (40, 400, 400))
    q[..., 0], k[..., 0] = 128**0.5, 3.0 * (torch.arange(400) // 64)
    found = fg.attention(q, k, v, family="sm80")
    weights = (q.double() @ k.double().mT / 128**0.5).softmax(-1)
    compare(found, weights @ v.double(), weights.half() @ v).require("rising maxima")
