"""Two stages with the same products as one, which adds its part of the other's sums to memory."""

from dataclasses import replace

import pytest
import torch

import fagen as fg
from fagen.compile import backward_of, problem_of
from fagen.derive.gradient import gradient
from fagen.derive.levels import by_products
from fagen.derive.magnitudes import may_exceed_fp16
from fagen.derive.partials import merged
from fagen.derive.streaming import derive
from fagen.ir.graph import Input
from fagen.ir.reference import evaluate
from fagen.lang.attention import attention
from fagen.plan.arch import arch_for
from fagen.plan.cost import Model, cost_of, tiles_of
from fagen.plan.interpret import interpret, interpret_plan
from fagen.plan.plan import Problem
from fagen.plan.planner import plan
from fagen.plan.profile import profile
from fagen.study.explain import explain
from tests.gradients import by_autograd, by_graph, floats, incoming_for

SINK = torch.zeros(4)


@fg.program
def squares(q: fg.Tensor["b h q d"], k: fg.Tensor["b hk kv d"], v: fg.Tensor["b hk kv dv"]):
    s = fg.dot(q, k, over="d")
    return fg.dot(fg.where(fg.kv <= fg.q + 3, s * s, 0.0), v, over="kv")


PROGRAMS = {
    "full": lambda: attention().graph,
    "causal": lambda: attention(mask=fg.causal(), return_lse=True).graph,
    "window_softcap": lambda: attention(mask=fg.sliding_window(8, 0), score=fg.softcap(5.0)).graph,
    "sink": lambda: attention(mask=fg.causal(), sink=SINK).graph,
    "dropout": lambda: attention(dropout=0.3).graph,
    "squares": lambda: squares.trace().graph,
}


def values_of(graph, seed=0):
    draw = torch.Generator().manual_seed(seed)
    sizes = {"b": 2, "hk": 2, "g": 2, "h": 4, "q": 21, "kv": 27, "d": 5, "dv": 3}
    return [
        torch.randn([sizes[axis] for axis in a.layout], generator=draw, dtype=torch.float64)
        for a in graph.arguments
        if isinstance(a, Input)
    ]


def backward(graph, wanted=None):
    return gradient(graph, floats(graph) if wanted is None else wanted).backward


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_stage_that_adds_what_others_own(name):
    graph = PROGRAMS[name]()
    both = backward(graph)
    apart = derive(both)
    joined = merged(apart, both)
    assert joined is not None
    products = [sum(len(walk.products) for s in way.stages for walk in s.walks) for way in (apart, joined)]
    assert products[1] < products[0]
    (partial,) = (p for stage in joined.stages for walk in stage.walks for p in walk.partials)
    assert partial.over == "kv"
    assert partial.features == ("d",)
    assert joined.notes[-1].rule == "partials"
    assert f"adds its part of {partial.name} to memory, in no fixed order" in joined.notes[-1].text


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_agrees_with_autograd(name):
    graph = PROGRAMS[name]()
    values, wanted = values_of(graph), floats(graph)
    incoming = incoming_for(graph, values)

    def compute(both, found, seed):
        joined = merged(derive(both), both)
        assert joined is not None
        return interpret(joined, both, found, block_own=8, block_walk=16, seed=seed)

    found = by_graph(graph, values, incoming, wanted, compute)
    expected = by_autograd(graph, values, incoming, wanted)
    for place, gradient_ in expected.items():
        assert torch.allclose(found[place], gradient_, rtol=1e-9, atol=1e-9), place


def test_what_only_one_direction_asks_for_is_not_joined():
    graph = PROGRAMS["causal"]()
    for wanted in ({0}, {1, 2}):
        both = backward(graph, frozenset(wanted))
        assert merged(derive(both), both) is None


def test_running_sums_are_not_passed_on():
    graph = PROGRAMS["causal"]()
    assert merged(derive(graph), graph) is None


def test_results_do_not_depend_on_which_stage_comes_first():
    both = backward(PROGRAMS["causal"]())
    apart = derive(both)
    before, first, second = apart.stages
    turned = type(apart)((before, second, first), apart.notes)
    one, other = merged(apart, both), merged(turned, both)
    assert one is not None
    assert other is not None
    assert one.stages == other.stages


def test_evaluated_as_the_reference():
    both = backward(PROGRAMS["causal"]())
    draw = torch.Generator().manual_seed(1)
    sizes = {"b": 1, "hk": 1, "h": 2, "q": 19, "kv": 33, "d": 4, "dv": 4}
    values = [
        torch.randn([sizes[axis] for axis in a.layout], generator=draw, dtype=torch.float64)
        for a in both.arguments
    ]
    joined = merged(derive(both), both)
    assert joined is not None
    for found, expected in zip(interpret(joined, both, values), evaluate(both, values), strict=True):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


def planned(dtype="bf16", family="sm80", deterministic=False, head_dim=64):
    graph = attention(mask=fg.causal()).graph
    sizes = {"d": head_dim, "dv": head_dim, "b": 2, "hk": 8, "g": 1, "q": 4096, "kv": 4096}
    problem, _ = backward_of(problem_of(graph, "H200", family, (dtype,) * 3, sizes))
    return plan(replace(problem, deterministic=deterministic))


def said(made):
    return " ".join(explain(made).split())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tensor_cores_compute_each_product_once(head_dim):
    made = planned(head_dim=head_dim)
    (kernel,) = (kernel for kernel in made.kernels if kernel.stage.walks[0].products)
    assert kernel.schedule == "backward_loop"
    (partial,) = kernel.stage.walks[0].partials
    (buffer,) = (buffer for buffer in made.buffers if buffer.name == partial.name)
    assert buffer.zeroed
    text = said(made)
    assert "adds its part of dQ_sum to memory, in no fixed order" in text
    assert "each product computed by two kernels: " in text


def test_each_sum_stands_at_the_level_of_the_last_product_that_it_needs():
    (kernel,) = (kernel for kernel in planned().kernels if kernel.stage.walks[0].products)
    (walk,) = kernel.stage.walks
    first, last = by_products(walk.products, walk.states)
    assert (first.products, last.products) == (walk.products[:1], walk.products[1:])
    assert [len(level.states) for level in (first, last)] == [1, 1]
    assert walk.partials[0].value is last.states[0].value
    graph = attention().graph
    (running,) = derive(graph).stages[0].walks
    assert by_products(running.products, running.states) == ()


def test_the_model_counts_five_products_and_what_is_added():
    made = planned()
    (kernel,) = (kernel for kernel in made.kernels if kernel.stage.walks[0].products)
    lengths = {"b": 2, "hk": 8, "g": 1, "q": 1024, "kv": 2048, "d": 64, "dv": 64}
    arch = arch_for("H200")
    pairs = 2 * 8 * 1024 * 2048
    assert cost_of(kernel, made.problem, lengths, arch).flops == 2 * pairs * 64 * 5
    counts = profile(kernel.stage, kernel.schedule, kernel.tile_axis, made.problem)
    added = Model(counts, lengths, arch).added(tiles_of(kernel))
    assert added == 4 * pairs // kernel.block_own * 64


@pytest.mark.parametrize("asked", [{"deterministic": True}, {"dtype": "fp32", "family": "simt"}])
def test_a_fixed_order_or_fp32_computes_them_twice(asked):
    made = planned(**asked)
    assert not any(walk.partials for kernel in made.kernels for walk in kernel.stage.walks)
    assert len([kernel for kernel in made.kernels if kernel.stage.walks[0].products]) > 1
    assert not any(buffer.zeroed for buffer in made.buffers)


def test_a_program_asks_for_a_fixed_order():
    asked = {"head_dim": 64, "dtype": "bf16", "arch": "H200", "direction": "backward"}
    free, fixed = fg.program(squares.function), squares.options(deterministic=True, family="sm80")
    made = fg.compile(free, family="sm80", **asked).plan
    assert any(walk.partials for kernel in made.kernels for walk in kernel.stage.walks)
    made = fg.compile(fixed, **asked).plan
    assert made.family == "sm80"
    assert not any(walk.partials for kernel in made.kernels for walk in kernel.stage.walks)


def test_a_gathered_table_is_added_to_exactly_where_an_order_is_asked_for():
    @fg.program
    def far(q: fg.Tensor["b h q d"], k: fg.Tensor["b h kv d"], table: fg.Tensor["n"]):
        s = fg.dot(q, k, over="d") + table[fg.minimum(abs(fg.q - fg.kv), 7)]
        return fg.dot(s, k, over="kv")

    for deterministic, dtype, storage in (
        (False, "bf16", "fp32"),
        (False, "fp32", "fp64"),  # as exact as sums in parts
        (True, "bf16", "exact"),
        (True, "fp32", "exact"),
    ):
        program = far.options(deterministic=deterministic)
        kernel = fg.compile(program, head_dim=16, dtype=dtype, direction="backward")
        (added,) = (buffer for buffer in kernel.plan.buffers if buffer.zeroed)
        assert added.storage == storage
        assert ('#include "exact.cuh"' in kernel.source) == deterministic


def test_results_of_the_forward_direction_are_never_added_to_memory():
    @fg.program
    def both_ways(
        q: fg.Tensor["b h q d"],
        k: fg.Tensor["b h kv d"],
        v: fg.Tensor["b h kv dv"],
        w: fg.Tensor["b h q dv"],
    ):
        weights = fg.sigmoid(fg.dot(q, k, over="d"))
        return fg.dot(weights, v, over="kv"), fg.dot(weights, w, over="q")

    graph = both_ways.trace().graph
    assert merged(derive(graph), graph) is not None
    made = fg.compile(both_ways, head_dim=64, dtype="bf16", arch="H200", family="sm80").plan
    assert not any(walk.partials for kernel in made.kernels for walk in kernel.stage.walks)


def test_weights_beyond_fp16_stay_in_registers():
    """Those of warps that share rows pass through memory, in the operands' type."""
    for head_dim in (64, 128, 192):
        made = squares_in_fp16(family="sm80", head_dim=head_dim)
        loops = [kernel for kernel in made.kernels if may_exceed_fp16(kernel.stage)]
        assert loops
        assert all(kernel.columns == 4 for kernel in loops)


def squares_in_fp16(**asked):
    return fg.compile(squares, dtype="fp16", arch="H200", direction="backward", **asked).plan


def test_what_keeps_fp16_from_it_is_said():
    made = squares_in_fp16(head_dim=64)
    assert {kernel.family for kernel in made.kernels if may_exceed_fp16(kernel.stage)} == {"sm80"}
    assert "weights that pass through memory in fp16 may be larger than it holds" in said(made)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"mask": fg.causal(), "return_lse": True},
        {"mask": fg.causal(), "sink": SINK},
        {"score": fg.alibi()},
        {"mask": fg.causal(), "score": fg.alibi(), "sink": SINK},
        {"score": fg.softcap(5.0)},
        {"dropout": 0.2},
    ],
)
def test_weights_of_softmax_are_known_to_fit_fp16(parts):
    """From what was kept of each row; gradients of scores are as large as a user makes them."""
    both = backward(attention(**parts).graph, frozenset((0, 1, 2)))
    for way in (derive(both), merged(derive(both), both)):
        assert not any(map(may_exceed_fp16, way.stages))


def test_weights_of_keys_that_a_sum_leaves_out_are_not_known_to_fit_fp16():
    @fg.program
    def program(q: fg.Tensor["b h q d"], k: fg.Tensor["b h kv d"], v: fg.Tensor["b h kv dv"]):
        s = fg.dot(q, k, over="d")
        masked = fg.where(fg.kv <= fg.q, s, -fg.inf)
        m = fg.max(masked, over="kv")
        return fg.dot(fg.exp(s - m), v, over="kv") / fg.sum(fg.exp(masked - m), over="kv")

    both = backward(program.trace().graph)
    assert any(map(may_exceed_fp16, derive(both).stages))


def test_plans_agree_with_autograd_tile_by_tile():
    graph = attention(mask=fg.sliding_window(9, 2), dropout=0.25).graph
    both = gradient(graph, frozenset((0, 1, 2)))
    stored = tuple("fp32" if a.layout == ("b", "h", "q") else "bf16" for a in both.backward.arguments)
    made = plan(Problem(both.backward, "H200", "sm80", (("d", 5), ("dv", 3)), stored, outputs=("bf16",) * 3))
    assert any(walk.partials for kernel in made.kernels for walk in kernel.stage.walks)
    values, wanted = values_of(graph), floats(graph)
    incoming = incoming_for(graph, values)
    found = by_graph(
        graph, values, incoming, wanted, lambda _, given, seed: interpret_plan(made, given, seed=seed)
    )
    for place, expected in by_autograd(graph, values, incoming, wanted).items():
        assert torch.allclose(found[place], expected, rtol=1e-9, atol=1e-9), place
