"""Walks made in parts, on the emulator: right for any number of parts, the same bits every time, no race."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen as fg
from emitted import Run, problem_of
from fagen.derive.walk import PART_AXIS
from fagen.ir.graph import Graph
from fagen.ir.reference import compare, eager, evaluate
from fagen.lang.attention import attention
from fagen.plan.plan import Plan
from fagen.plan.planner import plan
from fagen.run.emulate import SCHEDULES, EmulatedKernels

pytestmark = pytest.mark.cxx

DTYPES = {"simt": torch.float32, "sm80": torch.float16}
by_family = pytest.mark.parametrize("family", list(DTYPES))
Q, K, V = fg.Tensor["b h q d"], fg.Tensor["b hk kv d"], fg.Tensor["b hk kv dv"]


@fg.program
def two_walks(q: Q, k: K, v: V, shift: fg.Tensor["h"]):
    """What lies above a threshold of the softmax: the second walk knows the statistics of all parts."""
    s = fg.where(fg.kv <= fg.q + 60, fg.dot(q, k, over="d") * 0.2 + shift, -fg.inf)
    return fg.dot(fg.relu(fg.softmax(s, over="kv") - 0.01), v, over="kv")


@fg.program
def by_sigmoid(q: Q, k: K, v: V):
    """Sums alone, of two ranges and of rows without a key."""
    near = (fg.kv < 9) | ((fg.kv > fg.q + 50) & (fg.kv < fg.q + 130))
    w = fg.where(near & (fg.q != 2), fg.sigmoid(fg.dot(q, k, over="d") * 0.2), 0.0)
    return fg.dot(w, v, over="kv"), fg.sum(w, over="kv")


@fg.program
def own_document(q: Q, k: K, v: V, ids: fg.Tensor["b kv", int], bias: fg.Tensor["h kv"]):
    """A table in no order: blocks skip tiles of their part; a bias may be -inf."""
    own = ids[fg.b, fg.q + 40] == ids[fg.b, fg.kv]
    s = fg.where(own, fg.dot(q, k, over="d") * 0.2 + bias, -fg.inf)
    return fg.dot(fg.softmax(s, over="kv"), v, over="kv"), fg.logsumexp(s, over="kv")


def tensors(dtype: torch.dtype, q_len: int, kv_len: int, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = (2, 6, q_len, 16), (2, 2, kv_len, 16), (2, 2, kv_len, 24)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def in_parts(graph: Graph, values: Sequence[Any], family: str) -> Plan:
    """The plan of a few long walks, which serves any lengths."""
    classes = (("q", "few"), ("kv", "long"))
    made = plan(replace(problem_of(graph, values, lengths=classes, group=3, arch="H200"), family=family))
    assert PART_AXIS in [kernel.stage.parts for kernel in made.kernels]
    return made


def require(run: Run, values: Sequence[Any], label: str, **how: Any) -> list[Tensor]:
    graph, seed = run.plan.problem.graph, how.get("seed", 0)
    outputs = run(values, **how)
    exact = evaluate(graph, values, seed=seed)
    plain = eager(graph, values, values[0].dtype, seed=seed)
    for found, ref, near, output in zip(outputs, exact, plain, graph.outputs, strict=True):
        compare(found, ref, near).require(f"{label}, {output.name}")
    return outputs


@by_family
def test_any_number_of_parts_is_right(family: str) -> None:
    """No multiples of tiles, fewer tiles than parts, no key at all; random numbers are those of the pair."""
    traced = attention(mask=fg.causal(), dropout=0.2, sink=torch.linspace(-1, 1, 6), return_lse=True)
    (sink,) = traced.captured
    assert isinstance(sink, Tensor)
    made = in_parts(traced.graph, [*tensors(DTYPES[family], 3, 7), sink], family)
    assert {kernel.group for kernel in made.kernels} == {3, 1}
    run = Run(made)
    for q_len, kv_len, parts in ((1, 300, 3), (3, 131, 2), (5, 64, 1), (9, 4, 1), (2, 33, 20), (3, 0, 2)):
        values = [*tensors(DTYPES[family], q_len, kv_len), sink]
        outputs = require(run, values, f"{q_len} x {kv_len} in {parts} parts", seed=4, parts=parts)
        again = run(values, seed=4, parts=parts, schedule="backward", dice=parts)
        assert all(torch.equal(x, y) for x, y in zip(outputs, again, strict=True))


@by_family
@pytest.mark.parametrize("program", [two_walks, by_sigmoid], ids=lambda program: program.name)
def test_sums_and_several_walks_are_right(family: str, program: fg.Program) -> None:
    graph = program.trace().graph
    shift = [torch.linspace(-1, 1, 6)] * (program is two_walks)
    run = Run(in_parts(graph, [*tensors(DTYPES[family], 3, 7), *shift], family))
    for q_len, kv_len, parts in ((1, 200, 4), (4, 150, 3), (3, 40, 7), (2, 0, 2)):
        values = [*tensors(DTYPES[family], q_len, kv_len, seed=q_len), *shift]
        require(run, values, f"{q_len} x {kv_len} in {parts} parts", parts=parts)


@by_family
def test_parts_without_a_tile_and_rows_without_a_score_are_right(family: str) -> None:
    graph = own_document.trace().graph
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 3, (2, 260), generator=draw, dtype=torch.int32).sort(dim=1).values.flip(1)
    ids = ids.contiguous()
    bias = torch.randn(6, 260, generator=draw)
    bias[1], bias[2, :200], bias[3, 100:] = -torch.inf, -torch.inf, -torch.inf
    values = [*tensors(DTYPES[family], 3, 260), ids, bias]
    run = Run(in_parts(graph, values, family))
    for parts in (2, 9):
        require(run, values, f"{parts} parts", parts=parts)


def test_no_race_is_found() -> None:
    q, k, v = (each[:1, :1] for each in tensors(torch.float16, 1, 70))
    values = [q.expand(1, 3, 1, 16), k, v]
    run = Run(in_parts(attention(return_lse=True).graph, values, "sm80"), "race")
    require(run, values, "two parts", parts=2, schedule=SCHEDULES[2], dice=1)


def test_a_call_with_few_long_walks_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the public way: the launch has a block for each part."""
    grids: list[tuple[int, int, int]] = []
    launch = EmulatedKernels.launch

    def watched(self: EmulatedKernels, name: str, grid: tuple[int, int, int], *rest: Any, **how: Any) -> None:
        grids.append(grid)
        launch(self, name, grid, *rest, **how)

    monkeypatch.setattr(EmulatedKernels, "launch", watched)
    q, k, v = tensors(torch.float32, 1, 1100)
    found = fg.attention(q, k, v, mask=fg.causal(), family="simt")
    parts = 18  # as many as it has tiles
    assert grids[0] == (2 * 2 * parts, 1, 1)
    assert len(grids) == 2
    graph = attention(mask=fg.causal()).graph
    exact, plain = evaluate(graph, [q, k, v]), eager(graph, [q, k, v], torch.float32)
    compare(found, exact[0], plain[0]).require("attention")
