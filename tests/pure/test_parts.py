"""Walks made in parts by several blocks, and merged: what is derived, what is planned, how many there are."""

import json
from collections.abc import Mapping
from math import isqrt
from typing import Any

import pytest
import torch

import fagen as fg
from fagen.compile import problem_of
from fagen.derive.parts import in_parts
from fagen.derive.streaming import derive
from fagen.derive.walk import PART_AXIS
from fagen.emit.program import emit
from fagen.ir.graph import Axis, Graph, Input
from fagen.ir.reference import evaluate
from fagen.lang.attention import attention
from fagen.plan.interpret import interpret, interpret_plan
from fagen.plan.parts import parts_of, shares_of, with_parts
from fagen.plan.plan import Plan
from fagen.plan.planner import plan
from fagen.run.recipe import Recipe, recipe_of
from fagen.study.explain import explain
from streams import PROGRAMS, arguments

SEED = 11
SHAPES = [(3, 30, 9), (40, 30, 30)]
"""Parts, rows of a block, columns of a tile: of forty parts most have no tile."""
WALKED = [
    "softmax",
    "softmax and logsumexp",
    "softmax with a sink",
    "softmax in base 2",
    "ReLU over its sum",
    "sigmoid",
    "decayed linear attention",
    "two statistics",
    "weights above a scalar",
    "softmax with dropout",
    "two score contractions",
    "one query",
    "projection",
]


def lengths(**others: int) -> dict[Axis, int]:
    return {"b": 1, "hk": 8, "g": 4, "q": 1, "kv": 32_768, "d": 64, "dv": 64, **others}


def planned(graph: Graph, arch: str = "H200", family: str | None = None, **others: int) -> Plan:
    tensors = (argument for argument in graph.arguments if isinstance(argument, Input))
    inputs = tuple("bf16" if tensor.stored == "float" else "int32" for tensor in tensors)
    return plan(problem_of(graph, arch, family, inputs, lengths(**others)))


def in_walks(made: Plan) -> list[str | None]:
    """What each kernel walks along."""
    return [kernel.stage.walk for kernel in made.kernels]


# ------------------------------------------------------------------------------------------- what is derived


@pytest.mark.parametrize("name", WALKED)
def test_parts_merged_are_the_whole(name: str) -> None:
    graph = PROGRAMS[name].trace().graph
    values = arguments(graph)
    made = in_parts(derive(graph), graph, "kv")
    assert made is not None
    assert PART_AXIS in {stage.parts for stage in made.stages}
    expected = evaluate(graph, values, seed=SEED)
    for parts, own, walk in SHAPES:
        found = interpret(made, graph, values, block_own=own, block_walk=walk, parts=parts, seed=SEED)
        for mine, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, exact, rtol=1e-11, atol=1e-12)


def test_every_tile_is_in_one_part() -> None:
    graph = PROGRAMS["softmax"].trace().graph
    whole = derive(graph)
    shared = in_parts(whole, graph, "kv")
    assert shared is not None
    seen: dict[int, list[tuple[str, int]]] = {1: [], 3: []}
    for parts, way in ((1, whole), (3, shared)):
        tiles = seen[parts]

        def watch(stage: str, walk: int, tile: int, _: str, tiles: list[Any] = tiles) -> None:
            tiles.append((stage, tile))

        interpret(way, graph, arguments(graph), block_own=100, block_walk=4, parts=parts, watch=watch)
    first = [tile for stage, tile in seen[3] if stage == shared.stages[0].name]
    every = [tile for _, tile in seen[1]]
    assert sorted(first) == sorted(every)
    assert first != every


def test_a_running_maximum_merges_as_it_runs() -> None:
    """What rescales sums when a tile comes rescales what another block has summed."""
    graph = attention().graph
    (whole,) = derive(graph).stages
    made = in_parts(derive(graph), graph, "kv")
    assert made is not None
    first, merge = made.stages
    of_part = {state.symbol.name: state for state in merge.walks[0].states}
    for state in whole.walks[0].states:
        assert of_part[state.symbol.name].rescale is state.rescale
        assert of_part[state.symbol.name].op == state.op
    assert merge.walk == PART_AXIS
    assert [output.name for output in first.outputs] == ["m_parts", "l_parts", "acc_parts"]
    assert "times exp(m_old - m)" in made.notes[-1].text


def test_what_stores_along_its_walk_or_has_no_products_stays_whole() -> None:
    for name in ("weights as an output", "softmax of given scores", "matrix product"):
        graph = PROGRAMS[name].trace().graph
        assert in_parts(derive(graph), graph, "kv") is None


def test_an_axis_of_that_name_is_left_to_its_user() -> None:
    @fg.program
    def taken(q: fg.Tensor["b h q part"], k: fg.Tensor["b hk kv part"], v: fg.Tensor["b hk kv dv"]):
        return fg.dot(fg.softmax(fg.dot(q, k, over="part"), over="kv"), v, over="kv")

    graph = taken.trace().graph
    assert in_parts(derive(graph), graph, "kv") is None
    values = [torch.randn(2, heads, length, 8) for heads, length in ((4, 5), (2, 20), (2, 20))]
    (found,) = interpret(derive(graph), graph, values)
    (exact,) = evaluate(graph, values)
    torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-12)


def test_rows_along_an_axis_of_that_name_are_planned_as_others() -> None:
    @fg.program
    def total(x: fg.Tensor["n part"]):
        return fg.sum(x * 2.0, over="part")

    @fg.program
    def same(x: fg.Tensor["n m"]):
        return fg.sum(x * 2.0, over="m")

    made, other = planned(total.trace().graph, n=2000, part=40), planned(same.trace().graph, n=2000, m=40)
    assert in_walks(made) == ["part"]
    assert [kernel.threads for kernel in made.kernels] == [kernel.threads for kernel in other.kernels]
    assert [kernel.block_own for kernel in made.kernels] == [kernel.block_own for kernel in other.kernels]


# ------------------------------------------------------------------------------------------- what is planned


@pytest.mark.parametrize("arch", ["A100", "H200", "RTX 4090", "generic"])
def test_few_works_are_shared_out(arch: str) -> None:
    made = planned(attention(mask=fg.causal(), return_lse=True).graph, arch)
    assert in_walks(made) == ["kv", PART_AXIS]
    assert made.kernels[0].family == ("simt" if arch == "generic" else "sm80")
    assert made.kernels[1].schedule == "rowwise"
    told = explain(made, lengths())
    assert "kv in one walk: " in told
    assert "parts: blocks share the tiles along kv" in told
    assert "lies between kernels" in told


@pytest.mark.parametrize(("works", "kv"), [(8, 512), (16, 1024), (32, 2048), (192, 16_384)])
def test_the_more_works_the_longer_are_those_in_parts(works: int, kv: int) -> None:
    graph = attention().graph
    assert in_walks(planned(graph, hk=works, kv=kv)) == ["kv", PART_AXIS]
    assert PART_AXIS not in in_walks(planned(graph, hk=works, kv=kv // 2))


@pytest.mark.parametrize(
    "others",
    [{"b": 64}, {"b": 16, "kv": 8192}, {"kv": 400}, {"b": 4, "kv": 1024}, {"q": 33}, {"q": 4000}],
    ids=str,
)
def test_works_that_fill_the_machine_or_are_short_are_whole(others: Mapping[str, int]) -> None:
    assert PART_AXIS not in in_walks(planned(attention(mask=fg.causal()).graph, **others))


def test_warps_with_roles_take_no_parts() -> None:
    graph = attention(mask=fg.causal()).graph
    asked = planned(graph, family="sm90")
    assert in_walks(asked) == ["kv"]
    assert any(r.candidate == "kv in parts" and "no part of a walk" in r.reason for r in asked.rejected)
    free = planned(graph)
    assert free.family == "sm80"
    assert any("one work after another" in r.reason for r in free.rejected)


def test_gradients_are_whole() -> None:
    from fagen.compile import backward_of

    problem = problem_of(attention().graph, "H200", None, ("bf16",) * 3, lengths())
    assert all(kernel.stage.parts is None for kernel in plan(backward_of(problem)[0]).kernels)


@pytest.mark.parametrize("parts", [1, 2, 7, 50])
def test_a_plan_in_parts_is_right(parts: int) -> None:
    sink = torch.zeros(8)
    graph = attention(mask=fg.sliding_window(40, 0) | (fg.kv < 3), sink=sink, return_lse=True).graph
    made = planned(graph)
    assert in_walks(made) == ["kv", PART_AXIS]
    draw = torch.Generator().manual_seed(3)
    shapes = (2, 8, 3, 16), (2, 2, 300, 16), (2, 2, 300, 16), (8,)
    given = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    found = interpret_plan(made, given, parts=parts)
    for mine, exact in zip(found, evaluate(graph, given), strict=True):
        torch.testing.assert_close(mine, exact)


# --------------------------------------------------------------------------------------------- how many


def test_parts_fill_the_machine_once_and_are_not_too_short() -> None:
    assert parts_of(8, 1 << 20, 264) == 33
    assert parts_of(8, 20 * 20, 264) == 20
    assert parts_of(8, 20 * 20 - 1, 264) == 19
    assert parts_of(300, 1 << 20, 264) == 1
    assert parts_of(0, 0, 264) == 1


def count(made: Plan, multiprocessors: int = 132, **others: int) -> int:
    """Parts of a call."""
    return with_parts(lengths(**others), shares_of(made.kernels), multiprocessors)[PART_AXIS]


def test_parts_are_of_what_a_mask_leaves() -> None:
    """A window ends at the last key, a prefix is where it is; what a table says is known on the device."""
    window, prefix = fg.sliding_window(1000, 0), fg.kv < 128
    assert count(planned(attention(mask=window).graph)) == isqrt(1024)
    assert count(planned(attention(mask=window | prefix).graph)) == isqrt(1152)
    ids = fg.capture(torch.zeros(1, 40_000, dtype=torch.int32), "b n", sorted=True)
    assert count(planned(attention(mask=ids[fg.b, fg.kv] == ids[fg.b, fg.q + 30_000]).graph)) > 50


def test_parts_follow_the_call_and_the_machine() -> None:
    made = planned(attention().graph)
    assert 1 < count(made, b=4) < count(made, b=2) < count(made)
    assert count(made, multiprocessors=20) < count(made)
    assert count(made, kv=2 * made.kernels[0].block_walk) == 2
    assert count(made, kv=0) == 1


def test_a_recipe_keeps_how_many() -> None:
    made = planned(attention(mask=fg.sliding_window(1000, 0)).graph)
    recipe = recipe_of(made, emit(made))
    assert recipe.shares == shares_of(made.kernels)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
