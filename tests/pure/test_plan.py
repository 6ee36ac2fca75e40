"""Planning: schedules, tiles that fit, what is refused and how."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

import fagen as fg
from fagen.compile import backward_of, problem_of
from fagen.errors import PlanError
from fagen.ir import graph as ir
from fagen.ir.graph import Graph, Input, Output
from fagen.ir.reference import evaluate
from fagen.lang.attention import attention
from fagen.lang.expr import kv, q
from fagen.plan.arch import ROWS, arch_for
from fagen.plan.cost import Model, buffer_lives, tiles_of
from fagen.plan.interpret import interpret_plan
from fagen.plan.plan import KernelPlan, Plan, Storage
from fagen.plan.planner import plan, plans
from fagen.plan.profile import LOOPS, profile
from fagen.plan.space import registers, registers_limit, shared_bytes
from fagen.plan.tiling import candidates, length_classes, misfit, registers_allowed, tile_axis_of
from fagen.study.explain import explain
from plans import attention_graph, lengths, matmul_problem, problem

ARCHS = [row.name for row in ROWS]


def check_fits(made: Plan) -> None:
    arch = arch_for(made.problem.arch)
    for kernel in made.kernels:
        assert kernel.shared_bytes <= arch.shared_block_bytes
        assert 1 <= kernel.threads <= arch.threads_block
        assert kernel.block_own % kernel.rows == 0 or kernel.block_own == 1
        counts = profile(kernel.stage, kernel.schedule, kernel.tile_axis, made.problem, kernel.group)
        assert registers(counts, tiles_of(kernel)) <= registers_allowed(tiles_of(kernel), arch, counts)
        assert shared_bytes(counts, tiles_of(kernel)) == kernel.shared_bytes
        assert len(kernel.ranges) == len(kernel.stage.walks)
        check_shared(kernel)
        counted = prod(-(-97 // block) for block in kernel.grid.values())
        assert counted == Model(counts, Lengths97(), arch).blocks(tiles_of(kernel))


class Lengths97(dict[str, int]):
    def __missing__(self, axis: str) -> int:
        return 97


def check_shared(kernel: KernelPlan) -> None:
    """Tiles are aligned to a vector and overlap only between walks."""
    for tile in kernel.shared:
        assert tile.address % 16 == 0
        assert tile.pitch % 4 == 0 or kernel.schedule == "rowwise" or tile.storage == "int32"
    for a, b in itertools.combinations(kernel.shared, 2):
        walks = {match[1] for t in (a, b) if (match := re.match(r"[a-z]+(\d+)_?\d*$", t.name))}
        if len(kernel.stage.walks) == 1 or len(walks) == 1:
            assert a.address + a.bytes <= b.address or b.address + b.bytes <= a.address, (a, b)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_usual_head_dim_fits_everywhere(arch: str) -> None:
    """Head dims 1 to 256 (a sample of them where limits are wider), v's at random, each storage."""
    seed = 20260
    draw = random.Random(seed)
    graph = attention_graph(return_lse=True)
    every = range(1, 257)
    for head_dim in every if arch == "generic" else [1, 64, 256, *draw.sample(every, 20)]:
        v_head_dim = draw.choice([head_dim, draw.randint(1, 256)])
        storage: Storage = draw.choice(["fp32", "fp16", "bf16"])
        made = plan(problem(graph, head_dim, v_head_dim, storage, arch))
        check_fits(made)
        if made.family != "simt":
            made = plan(problem(graph, head_dim, v_head_dim, storage, arch, family="simt"))
            check_fits(made)
        assert [kernel.schedule for kernel in made.kernels] == ["forward_loop"], (seed, head_dim)
        (kernel,) = made.kernels
        assert kernel.tile_axis == "q"
        assert kernel.grid_axes == ("b", "hk", "g")
        assert kernel.columns in (8, 16, 32)
        assert kernel.block_walk % kernel.columns == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_gradients_of_usual_head_dims_fit_everywhere(arch: str) -> None:
    sizes: list[tuple[int, int, Storage]] = [(64, 64, "bf16"), (72, 40, "fp16"), (192, 128, "bf16")]
    for head_dim, v_head_dim, storage in (*sizes, (256, 256, "bf16"), (256, 256, "fp32")):
        asked, _ = backward_of(problem(attention_graph(), head_dim, v_head_dim, storage, arch))
        made = plan(asked)
        check_fits(made)
        assert not [buffer for buffer in made.buffers if {"q", "kv"} <= set(buffer.axes)]


@pytest.mark.parametrize("arch", ["A100", "RTX 3090"])
def test_tensor_cores_pad_head_dims_to_the_next_multiple_of_16(arch: str) -> None:
    graph = attention_graph()
    for head_dim in (1, 16, 40, 63, 72, 80, 96, 104, 112, 130, 160, 192, 200, 255):
        whole = -(-head_dim // 16) * 16
        padded, exact = (plan(problem(graph, d, d, "bf16", arch)).kernels[0] for d in (head_dim, whole))
        assert padded.family == "sm80"
        assert {tile.width for tile in padded.shared if tile.storage == "bf16"} == {whole}
        assert (tiles_of(padded), padded.shared) == (tiles_of(exact), exact.shared)


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "storage"),
    [(192, 128, "bf16"), (256, 256, "fp32"), (512, 512, "bf16"), (512, 512, "fp32"), (576, 512, "bf16")],
)
@pytest.mark.parametrize(("arch", "limit"), [("sm_86", 101_376), ("sm_120", 101_376), ("sm_75", 65_536)])
def test_b12_large_head_dims_get_a_smaller_tile(
    head_dim: int, v_head_dim: int, storage: Storage, arch: str, limit: int
) -> None:
    assert arch_for(arch).shared_block_bytes == limit
    check_fits(plan(problem(attention_graph(), head_dim, v_head_dim, storage, arch)))


@pytest.mark.parametrize("arch", ["sm_86", "generic", "H200"])
def test_what_can_not_fit_is_refused_with_what_would(arch: str) -> None:
    graph = attention_graph()
    with pytest.raises(PlanError) as error:
        plan(problem(graph, 16_384, arch=arch))
    text = str(error.value)
    target, limit = arch_for(arch).target, arch_for(arch).shared_block_bytes
    match = re.fullmatch(
        rf"head_dim 16384 in fp32 needs at least ([\d,]+) bytes of shared memory, {target} has {limit:,}; "
        r"up to (\d+) fits",
        text,
    )
    assert match, text
    needed, largest = int(match[1].replace(",", "")), int(match[2])
    assert needed > limit
    check_fits(plan(problem(graph, largest, arch=arch)))
    for larger in (largest + 1, largest + 100):
        with pytest.raises(PlanError, match=f"up to {largest} fits"):
            plan(problem(graph, larger, arch=arch))
    axis = plan(problem(graph, arch=arch)).kernels[0]
    counts = profile(axis.stage, "forward_loop", "q", problem(graph, 16_384, arch=arch))
    assert needed == min(shared_bytes(counts, tiles) for tiles in candidates(counts, problem(graph)))


def test_a_refusal_for_cpu_tensors_names_the_emulator() -> None:
    with pytest.raises(PlanError, match=r"bytes of shared memory, the emulator has 232,448; up to \d+ fits"):
        plan(problem(attention_graph(), 40_000, arch="emulator"))


def test_the_larger_of_two_head_dims_is_named() -> None:
    with pytest.raises(PlanError, match=r"^v_head_dim 9000 in bf16 needs at least .* up to \d+ fits$"):
        plan(problem(attention_graph(), 64, 9000, "bf16", "A100"))


def test_a_family_is_honoured_or_refused() -> None:
    assert plan(problem(attention_graph(), family="simt")).family == "simt"
    with pytest.raises(PlanError, match=r"family 'sm90' does not run on A100 \(sm_80\); family= takes simt"):
        plan(problem(attention_graph(), arch="A100", family="sm90"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_operands_of_16_bits_are_multiplied_on_tensor_cores(arch: str) -> None:
    for storage in ("fp16", "bf16"):
        made = plan(problem(attention_graph(), storage=storage, arch=arch))
        assert made.family == made.kernels[0].family == ("sm90" if arch == "sm_90" else "sm80")
    assert plan(problem(attention_graph(), storage="fp32", arch=arch)).family == "simt"


@pytest.mark.parametrize("storage", ["fp16", "bf16"])
def test_a_family_is_not_refused_by_an_estimate(storage: Storage) -> None:
    """Of registers that a compiler takes for values it has ready early where there are some to spare."""
    ids = fg.document(torch.zeros(1, 9, dtype=torch.int32))
    graph = attention(mask=ids, bias=torch.ones(1, 4, 1, 9), score=fg.relative_bias(torch.ones(4, 9))).graph
    made = plan(problem(graph, 256, storage=storage, arch="H200"))
    assert [kernel.family for kernel in made.kernels] == ["sm90"]
    (kernel,) = made.kernels
    assert kernel.roles
    counts = profile(kernel.stage, kernel.schedule, kernel.tile_axis, made.problem)
    limit = registers_allowed(tiles_of(kernel), arch_for("H200"), counts)
    assert registers(counts, tiles_of(kernel), least=True) <= limit < registers(counts, tiles_of(kernel))
    assert kernel.spare == limit - registers(counts, tiles_of(kernel))
    assert plan(problem(graph, 256, storage=storage, arch="H200", family="sm90")).kernels == made.kernels


@pytest.mark.parametrize(
    ("head_dim", "shared", "in_turns"),
    [(64, False, True), (96, False, False), (128, False, True), (192, True, False), (256, True, False)],
)
def test_warps_with_roles_add_parts_of_a_sum(head_dim: int, shared: bool, in_turns: bool) -> None:
    """Where a consumer's registers have no room for the sums of its rows, two share the rows; blocks wait for
    their turns where that takes less time than one more kernel."""
    asked, _ = backward_of(problem(attention_graph(), head_dim, storage="bf16", arch="H200"))
    made = plan(asked)
    assert made.family == "sm90"
    (roles,) = (kernel.roles for kernel in made.kernels if kernel.roles)
    assert (roles.adders, roles.divided) == (1, shared)
    first, *_ = made.kernels
    assert first.clears == ("dQ_sum",)
    assert not any(buffer.zeroed for buffer in made.buffers)
    asked, _ = backward_of(problem(attention_graph(causal=False), head_dim, storage="bf16", arch="H200"))
    fixed = plan(replace(asked, deterministic=True))
    kernel, *others = (kernel for kernel in fixed.kernels if kernel.roles)
    assert bool(others) == (not in_turns)
    if others:
        assert not any(each.roles and each.roles.adders for each in (kernel, *others))
        return
    assert kernel.roles == replace(roles, in_turns=True)
    (turns,) = (buffer for buffer in fixed.buffers if buffer.zeroed)
    assert (turns.axes, turns.storage) == (("b", "hk", "g", "q"), "int32")
    assert turns.tiles == (1, 1, 1, kernel.block_walk)


@pytest.mark.parametrize("mask", [fg.causal(), fg.kv <= fg.q, fg.sliding_window(64, 8), fg.chunked(100)])
def test_turns_are_taken_where_rows_begin_no_earlier_than_those_before(mask: Any) -> None:
    asked, _ = backward_of(problem(attention(mask=mask).graph, storage="bf16", arch="H200"))
    kernel, *others = (kernel for kernel in plan(replace(asked, deterministic=True)).kernels if kernel.roles)
    assert not others
    assert kernel.roles is not None
    assert kernel.roles.in_turns


def test_turns_are_taken_for_small_tiles_only_where_kernels_of_their_own_take_longer() -> None:
    graph = attention(mask=fg.causal(), score=fg.softcap(30.0)).graph
    asked, _ = backward_of(problem(graph, 128, storage="bf16", arch="H200"))
    first, *others = plans(replace(asked, deterministic=True))
    assert any(kernel.roles and kernel.roles.in_turns for kernel in first.kernels)
    assert not any(kernel.roles and kernel.roles.in_turns for other in others for kernel in other.kernels)


@pytest.mark.parametrize("mask", [fg.sliding_window(64), fg.prefix_lm(32)])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_where_no_turn_is_known_a_kernel_more_makes_the_same_bits(mask: Any, head_dim: int) -> None:
    graph = attention(mask=mask).graph
    asked, _ = backward_of(problem(graph, head_dim, storage="bf16", arch="H200", family="sm90"))
    apart = plan(replace(asked, deterministic=True))
    found = [kernel.roles for kernel in apart.kernels if kernel.roles]
    assert not any(each.adders for each in found)
    assert [each.divided for each in found] == [False, head_dim == 256]
    (reason,) = (each.reason for each in apart.rejected if each.candidate == "partial sums")
    assert "blocks visit different tiles" in reason


def test_what_has_no_room_to_be_handed_over_says_so() -> None:
    """Softcap's scores are read by both consumers: at most so many features leave memory for them."""
    for head_dim, kernels in ((192, 1), (256, 3)):
        graph = attention_graph(score=fg.softcap(3.0))
        asked, _ = backward_of(problem(graph, head_dim, storage="bf16", arch="H200"))
        made = plan(asked)
        assert sum(kernel.roles is not None for kernel in made.kernels) == kernels
        said = [each.reason for each in made.rejected if each.candidate == "partial sums"]
        reason = "needs at least 247,312 bytes of shared memory, sm_90a has 232,448; up to 224 fits"
        assert any(each.endswith(reason) for each in said) == (kernels > 1)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"aligned": (False, True, True)}, "the address or a stride of q is no multiple of 16 bytes"),
        ({"aligned": (True, True, False)}, "the address or a stride of v is no multiple of 16 bytes"),
        ({"v_head_dim": 264}, "a product has at most 256 columns, axis 'dv' has 264"),
        ({"head_dim": 512}, "a product has at most 256 columns, axis 'dv' has 512"),
    ],
)
def test_where_bulk_copies_do_not_reach_the_next_family_says_why(asked: dict[str, Any], reason: str) -> None:
    made = plan(problem(attention_graph(), storage="bf16", arch="H200", **asked))
    assert made.family != "sm90"
    said = [each.reason for each in made.rejected if each.candidate.startswith("sm90")]
    assert said, made.rejected
    assert any(each.startswith(reason) for each in said)
    assert f"Families that come first, and why not sm90: {reason}" in " ".join(explain(made).split())


def test_why_a_family_is_passed_over_is_said_of_few_queries_and_of_partial_sums() -> None:
    """Heads that share tiles, and kernels that were planned again, keep what was found before."""
    graph = attention_graph()
    asked = problem_of(graph, "H200", None, ("bf16",) * 3, dict(lengths(300), q=1, g=4))
    few = plan(asked.read_as((False, True, True)))
    assert (few.family, few.kernels[0].group) == ("sm80", 4)
    asked, _ = backward_of(problem(graph, storage="bf16", arch="H200"))
    again = plan(asked.read_as((False,) * len(asked.graph.arguments)))
    assert [kernel.family for kernel in again.kernels] == ["simt", "sm80", "simt"]
    assert any(walk.partials for walk in again.kernels[1].stage.walks)
    for made in (few, again):
        told = " ".join(explain(made).split())
        assert (
            "Families that come first, and why not sm90: the address or a stride of q is no multiple" in told
        )


@fg.program
def squares(q: fg.Tensor["b h q d"], k: fg.Tensor["b hk kv d"], v: fg.Tensor["b hk kv dv"]):
    s = fg.relu(fg.dot(q, k, over="d"))
    return fg.dot(s * s, v, over="kv") / (1.0 + fg.sum(s * s, over="kv"))


def test_weights_that_fp16_may_not_hold_are_not_rounded_to_it() -> None:
    graph = squares.trace().graph
    assert plan(problem(graph, storage="bf16", arch="H200")).family == "sm90"
    made = plan(problem(graph, storage="fp16", arch="H200"))
    assert made.family == "sm80"
    assert [each for each in made.rejected if "may be larger than it holds" in each.reason]
    capped = attention_graph(score=fg.softcap(8.0))  # at most exp(8), with no maximum taken off
    assert plan(problem(capped, storage="fp16", arch="H200")).family == "sm90"


@pytest.mark.parametrize("arch", ["sm_75", "emulator"])
def test_other_machines_take_the_plainest_family(arch: str) -> None:
    assert plan(problem(attention_graph(), storage="fp16", arch=arch)).family == "simt"


def test_lengths_needed_when_compiling_are_asked_for() -> None:
    incomplete = problem(attention_graph())
    with pytest.raises(PlanError, match="the length of axis 'dv' must be known"):
        plan(type(incomplete)(attention_graph(), "A100", None, (("d", 64),), ("fp32",) * 3))


def test_rejected_candidates_are_kept_with_numbers() -> None:
    made = plan(problem(attention_graph(), 256, arch="generic"))
    reasons = [rejected.reason for rejected in made.rejected]
    assert any(re.fullmatch(r"needs [\d,]+ bytes of shared memory, sm_75 has 65,536", r) for r in reasons)
    assert any(
        re.fullmatch(r"needs about \d+ registers in each of \d+ threads, sm_75 has 255", r) for r in reasons
    )
    assert any(re.fullmatch(r"\d+ % slower, predicted \([\w ]+\)", r) for r in reasons)
    assert len({rejected.candidate for rejected in made.rejected}) == len(made.rejected)


def test_ranked_plans_differ_and_all_fit() -> None:
    made = plans(problem(attention_graph(), 128, arch="A100"), most=4)
    assert len(made) == 4
    assert len({tiles_of(each.kernels[0]) for each in made}) == 4
    for each in made:
        check_fits(each)
    assert made[0] == plan(problem(attention_graph(), 128, arch="A100"))


def test_planning_twice_gives_equal_plans() -> None:
    assert plan(problem(attention_graph(dropout=0.1))) == plan(problem(attention_graph(dropout=0.1)))


# --------------------------------------------------------------------------------------- schedules and axes


def test_ladder_rungs_use_the_schedules_of_their_work() -> None:
    graph = attention_graph(dropout=0.1)
    apart = plan(problem(graph, fusion="none", tiling="element"))
    assert [k.schedule for k in apart.kernels].count("product") == 2
    assert {k.schedule for k in apart.kernels} == {"product", "rowwise"}
    assert {k.tiling for k in apart.kernels if k.schedule == "product"} == {"element"}
    fused = plan(problem(graph, fusion="products"))
    assert [k.schedule for k in fused.kernels] == ["product", "rowwise", "rowwise", "product"]
    for each in (apart, fused):
        check_fits(each)
        for tiling in ("shared", "registers"):
            check_fits(plan(problem(graph, fusion=each.problem.fusion, tiling=tiling)))


@pytest.mark.parametrize("tiling", ["element", "shared", "registers"])
@pytest.mark.parametrize("arch", ARCHS)
def test_matrix_product_alone(arch: str, tiling: str) -> None:
    made = plan(matmul_problem(arch, tiling=tiling))
    check_fits(made)
    (kernel,) = made.kernels
    assert (kernel.schedule, kernel.tiling, kernel.tile_axis) == ("product", tiling, "i")
    if tiling == "shared":
        assert (kernel.block_own, kernel.block_feature) == (kernel.rows, kernel.columns)
        assert {tile.name for tile in kernel.shared} == {"own", "operand"}
    if tiling == "element":
        assert kernel.shared == ()


def test_products_without_anything_to_share_are_kernels_of_their_own() -> None:
    a, b, c = (
        Input("a", 0, ("i", "k"), "float"),
        Input("b", 1, ("k", "j"), "float"),
        Input("c", 2, ("k", "m"), "float"),
    )
    graph = Graph(
        "two",
        (a, b, c),
        (
            Output(ir.contract(a, b, "k"), "x", ("i", "j")),
            Output(ir.contract(a, c, "k"), "y", ("i", "m")),
        ),
    )
    made = plan(type(matmul_problem())(graph, "A100", None, (), ("fp32",) * 3))
    assert [k.schedule for k in made.kernels] == ["product", "product"]
    assert [[o.name for o in k.stage.outputs] for k in made.kernels] == [["x"], ["y"]]
    assert [k.stage.walks[0].states[0].features for k in made.kernels] == [("j",), ("m",)]


def test_the_group_is_a_tile_only_where_nothing_else_is() -> None:
    made = plan(problem(attention_graph()))
    stage = made.kernels[0].stage
    assert tile_axis_of(stage, "forward_loop") == "q"
    queries = Input("q", 0, ("b", "h", "d"), "float")
    keys, values = (
        Input("k", 1, ("b", "hk", "kv", "d"), "float"),
        Input("v", 2, ("b", "hk", "kv", "dv"), "float"),
    )
    s = ir.contract(queries, keys, "d")
    p = ir.function("exp", ir.sub(s, ir.largest(s, "kv")))
    out = ir.contract(ir.div(p, ir.total(p, "kv")), values, "kv")
    one = plan(problem(Graph("decode", (queries, keys, values), (Output(out, "o", ("b", "h", "dv")),))))
    assert one.kernels[0].tile_axis == "g"
    check_fits(one)


def few_queries(graph: Graph, group: int = 4, q_len: int = 3, family: str | None = None) -> Plan:
    inputs: tuple[Storage, ...] = ("fp32" if family == "simt" else "bf16",) * 3
    inputs += ("fp32",) * (sum(isinstance(each, Input) for each in graph.arguments) - 3)
    known = {"b": 2, "hk": 2, "g": group, "q": q_len, "kv": 50, "d": 16, "dv": 16}
    return plan(problem_of(graph, "H200", family, inputs, known))


@pytest.mark.parametrize("family", ["simt", "sm80", "sm90"])
@pytest.mark.parametrize("group", [4, 8])
def test_heads_of_a_group_share_tiles_where_queries_are_few(family: str, group: int) -> None:
    """Keys are read once for all of them: blocks are as many times fewer, and each visits what it did."""
    traced = attention(mask=fg.causal(), score=fg.alibi(), sink=torch.linspace(-1, 1, 2 * group))
    made = few_queries(traced.graph, group, family=family)
    (kernel,) = made.kernels
    check_fits(made)
    assert (kernel.group, kernel.positions) == (group, kernel.block_own // group)
    assert kernel.grid == {"b": 1, "hk": 1, "q": kernel.positions}
    assert any(note.rule == "group" for note in made.notes)
    assert few_queries(traced.graph, group, q_len=1000, family=family).kernels[0].group == 1

    generator = torch.Generator().manual_seed(1)
    queries, keys, values = (
        torch.randn(2, heads, length, 16, generator=generator, dtype=torch.float64)
        for heads, length in ((2 * group, 3), (2, 50), (2, 50))
    )
    given = (queries, keys, values, *traced.captured)
    for found, exact in zip(interpret_plan(made, given), evaluate(traced.graph, given), strict=True):
        torch.testing.assert_close(found, exact)


def test_what_differs_between_heads_keeps_them_apart() -> None:
    def reason(graph: Graph, group: int = 4, family: str | None = None) -> str:
        made = few_queries(graph, group, family=family)
        assert [kernel.group for kernel in made.kernels] == [1]
        return next(each.reason for each in made.rejected if each.candidate == f"rows of {group} heads")

    assert "other elements" in reason(attention(mask=fg.kv <= fg.q + fg.h).graph)
    queries, keys, values = attention_graph().arguments
    assert isinstance(values, Input)
    own_values = Input("v", 2, ("b", "h", "kv", "dv"), "float")
    weights = ir.function("exp", ir.contract(queries, keys, "d"))
    own = Graph(
        "own",
        (queries, keys, own_values),
        (Output(ir.contract(weights, own_values, "kv"), "o", values.layout),),
    )
    assert "other columns" in reason(own)
    assert "multiple of 3" in reason(attention_graph(), 3, "sm90")


def test_talking_heads_are_planned_through_memory() -> None:
    q_, k_, v_ = attention_graph().arguments
    mix = Input("w", 3, ("hk", "h2"), "float")
    assert isinstance(q_, Input)
    assert isinstance(k_, Input)
    assert isinstance(v_, Input)
    s = ir.contract(q_, k_, "d")
    p = ir.function("exp", ir.sub(s, ir.largest(s, "kv")))
    p = ir.div(p, ir.total(p, "kv"))
    mixed = ir.contract(ir.contract(p, mix, "hk"), v_, "kv")
    graph = Graph("talking", (q_, k_, v_, mix), (Output(mixed, "o", mixed.axes),))
    made = plan(problem(graph))
    check_fits(made)
    assert [k.schedule for k in made.kernels] == ["forward_loop", "product", "product"]
    assert made.kernels[1].tile_axis == "kv"
    assert [buffer.name for buffer in made.buffers] == ["t0", "t1"]
    lives = buffer_lives([kernel.stage for kernel in made.kernels], graph)
    assert {node.name: life for node, life in lives.items()} == {"t0": (0, 1), "t1": (1, 2)}
    assert any(note.rule == "materialise" for note in made.notes)


def test_buffers_share_memory_when_none_reads_the_first_any_more() -> None:
    made = plan(problem(attention_graph(dropout=0.1), fusion="none"))
    lives = list(buffer_lives([kernel.stage for kernel in made.kernels], made.problem.graph).items())
    assert [buffer.name for buffer in made.buffers] == [node.name for node, _ in lives]
    assert sum(buffer.reuses is not None for buffer in made.buffers) >= 4
    for i, (node, (written, last)) in enumerate(lives):
        assert written < last
        for j, (other, (earlier, until)) in enumerate(lives[:i]):
            roots = [made.buffers[k].reuses if made.buffers[k].reuses is not None else k for k in (i, j)]
            if roots[0] == roots[1]:
                assert until < written or earlier > last
                assert node.axes == other.axes
    square = [buffer for buffer in made.buffers if {"q", "kv"} <= set(buffer.axes) and buffer.reuses is None]
    assert len(square) <= 3


def test_ranges_follow_the_guard() -> None:
    (kernel,) = plan(problem(attention_graph())).kernels
    (bounds,) = kernel.ranges
    assert bounds is not None
    assert (bounds.own_axis, bounds.walk_axis) == ("q", "kv")
    (kernel,) = plan(problem(attention_graph(causal=False))).kernels
    assert kernel.ranges == (None,)


# ------------------------------------------------------------------------------------------ length classes


@pytest.mark.parametrize(("arch", "more"), [("A100", set()), ("H200", {(("q", "short"),)})])
def test_few_length_classes(arch: str, more: set[tuple[tuple[str, str], ...]]) -> None:
    graph, row = attention(mask=kv <= q).graph, arch_for(arch)
    sizes = (("d", 64), ("dv", 64))
    found = {
        length_classes(graph, sizes, lengths(n, b=b, hk=8), row)
        for n in (0, 1, 16, 33, 100, 1000, 5000, 70_000)
        for b in (0, 1, 2, 50, 5000)
    }
    assert found == {(("q", "few"),), (("q", "some"),), ()} | more


def test_works_that_end_with_a_document_are_short() -> None:
    classes = {}
    for rises in (False, True):
        ids = fg.capture(torch.zeros(2, 9000, dtype=torch.int32), "b s", sorted=rises)
        graph = attention(mask=ids[fg.b, q] == ids[fg.b, kv]).graph
        shape = lengths(9000, b=2, hk=8)
        classes[rises] = length_classes(graph, (("d", 64), ("dv", 64)), shape, arch_for("H200"))
    assert classes == {False: (), True: (("q", "short"),)}


def test_a_few_rows_get_a_small_tile() -> None:
    few = plan(problem(attention_graph(), arch="H200", lengths=(("q", "few"),))).kernels[0]
    many = plan(problem(attention_graph(), arch="H200")).kernels[0]
    assert few.block_own < many.block_own
    some = plan(problem(attention_graph(), arch="H200", lengths=(("q", "some"),))).kernels[0]
    assert some.block_own <= many.block_own


@pytest.mark.parametrize(("head_dim", "padded_to"), [(72, 128), (104, 128), (80, 96)])
def test_rows_that_begin_within_sectors_come_in_few_pieces_for_many_rows(
    head_dim: int, padded_to: int
) -> None:
    (kernel,) = plan(problem(attention_graph(), head_dim, storage="bf16", arch="H200")).kernels
    assert {tile.width for tile in kernel.shared if tile.storage == "bf16"} == {padded_to}
    assert kernel.roles
    assert kernel.roles.consumers == 3 or head_dim % 16 == 0


def test_misfit_names_what_is_missing() -> None:
    (kernel,) = plan(problem(attention_graph(), 256, arch="H200")).kernels
    counts = profile(kernel.stage, "forward_loop", "q", problem(attention_graph(), 256))
    small = arch_for("generic")
    reason = misfit(Model(counts, Lengths97(), small), tiles_of(kernel))
    assert reason == f"needs {kernel.shared_bytes:,} bytes of shared memory, sm_75 has 65,536"


def test_each_next_candidate_has_more_registers_to_spare() -> None:
    """What a compiler refuses for want of registers is not followed by tiles as tight."""
    for arch, head_dim in itertools.product(("A100", "H200"), (16, 40, 128)):
        asked = problem(attention_graph(), head_dim, arch=arch)
        spare = []
        for made in plans(asked, most=8):
            (kernel,) = made.kernels
            counts = profile(kernel.stage, kernel.schedule, kernel.tile_axis, asked)
            limit = registers_limit(arch_for(arch), kernel.threads * kernel.resident)
            spare.append(limit - registers(counts, tiles_of(kernel)))
        assert spare == sorted(set(spare))
        assert spare[-1] > 100


def test_candidates_differ_in_tiles_and_in_how_many_blocks_share_a_multiprocessor() -> None:
    for arch, head_dim, family in itertools.product(("A100", "H200"), (1, 16, 96, 128), ("simt", "sm80")):
        asked = problem(attention_graph(dropout=0.3), head_dim, arch=arch, family=family, storage="fp16")
        made = [each.kernels[0] for each in plans(asked, most=8)]
        assert len(made) > 1
        assert len({tiles_of(kernel) for kernel in made}) > 1
        assert len({(tiles_of(kernel), kernel.resident) for kernel in made}) == len(made)
        counts = profile(made[0].stage, made[0].schedule, made[0].tile_axis, asked)
        fewest = min(registers(counts, each) for each in candidates(counts, asked, family))
        last = made[-1]
        assert registers_limit(arch_for(arch), last.threads * last.resident) == 255
        assert registers(counts, tiles_of(last)) == fewest


def test_behind_all_candidates_every_result_is_computed_alone() -> None:
    """Where no kernel for several results builds, smaller ones may."""
    for arch, family in (("A100", "sm80"), ("H200", "sm80"), ("H200", "simt")):
        asked, _ = backward_of(problem(attention_graph(dropout=0.3), 128, 96, "bf16", arch, family=family))
        *others, last = plans(asked, most=8)
        results = [len(kernel.stage.outputs) for kernel in last.kernels if kernel.schedule in LOOPS]
        assert set(results) == {1}
        assert len(last.kernels) > len(others[-1].kernels)
        assert {each.family for each in others} == {last.family} == {family}
        check_fits(last)
        least = [min(spares(each)) for each in (others[-1], last)]
        assert least[0] < least[1]


def spares(made: Plan) -> list[int]:
    """Registers that the loops of a plan may have beyond those they are estimated to need."""
    found = []
    for kernel in made.kernels:
        if kernel.schedule in LOOPS:
            counts = profile(kernel.stage, kernel.schedule, kernel.tile_axis, made.problem)
            limit = registers_limit(arch_for(made.problem.arch), kernel.threads * kernel.resident)
            found.append(limit - registers(counts, tiles_of(kernel)))
    return found


@pytest.mark.parametrize("mask", [fg.causal(), fg.document(torch.zeros(2, 64, dtype=torch.int32))])
def test_roles_are_planned_for_the_registers_that_the_text_takes(mask: Any) -> None:
    """A producer whose whole warp looks for tiles leaves the consumers fewer."""
    kernel = fg.compile(mask=mask, head_dim=128, dtype="bf16", arch="H100", family="sm90")
    (made,) = (made for made in kernel.plan.kernels if made.roles is not None)
    counts = profile(made.stage, made.schedule, made.tile_axis, kernel.plan.problem)
    allowed = registers_allowed(tiles_of(made), arch_for("H100"), counts)
    assert counts.by_warp == ("elect_one()) produce(" not in kernel.source)
    assert re.findall(r"grow_registers<(\d+)>", kernel.source) == [str(allowed)]
