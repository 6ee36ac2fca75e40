"""The traffic model reproduces known figures, for any length, and its formulas agree with the plans."""

from __future__ import annotations

from math import prod

import pytest

from fagen.plan.arch import arch_for
from fagen.plan.cost import Cost, cost_of, live_parts, peak_buffer_bytes
from fagen.plan.plan import Plan, Tiling
from fagen.plan.planner import plan
from fagen.plan.profile import output_storages
from fagen.plan.space import registers_limit, resident_blocks
from plans import attention_graph, lengths, matmul_problem, problem


def matmul_cost(n: int, tiling: Tiling, arch: str = "A100") -> Cost:
    problem_ = matmul_problem(arch, tiling=tiling)
    sizes = {"i": n, "j": n, "k": n}
    (kernel,) = plan(problem_, sizes).kernels
    return cost_of(kernel, problem_, sizes, arch_for(arch))


@pytest.mark.parametrize("tiling", ["element", "shared", "registers"])
def test_least_traffic_of_a_matrix_product(tiling: Tiling) -> None:
    cost = matmul_cost(4096, tiling)
    assert cost.least_read_bytes == 134_217_728
    assert cost.write_bytes == 67_108_864
    assert cost.flops == 2 * 4096**3


def test_one_thread_an_element_reads_everything_each_time() -> None:
    assert matmul_cost(4096, "element").asked_read_bytes == 4 * 2 * 4096**3 == 549_755_813_888


@pytest.mark.parametrize("n", [1, 17, 100, 1000, 4096, 10_007])
@pytest.mark.parametrize("tiling", ["element", "shared", "registers"])
def test_traffic_of_a_matrix_product_for_any_length(n: int, tiling: Tiling) -> None:
    """Each tile of the result reads its rows of A and its columns of B, whole, and nothing past the ends."""
    problem_ = matmul_problem(tiling=tiling)
    (kernel,) = plan(problem_).kernels
    cost = cost_of(kernel, problem_, {"i": n, "j": n, "k": n}, arch_for("A100"))
    high, wide = (1, 1) if tiling == "element" else (kernel.block_own, kernel.block_feature)
    brute = 0
    for i in range(0, n, high):
        brute += 4 * n * (min(high, n - i) * -(-n // wide))
    for j in range(0, n, wide):
        brute += 4 * n * (min(wide, n - j) * -(-n // high))
    assert cost.asked_read_bytes == brute
    assert cost.write_bytes == 4 * n * n
    assert cost.least_read_bytes == 8 * n * n


def test_each_tiling_moves_less_and_takes_less_time() -> None:
    element, shared, registers = (
        matmul_cost(4096, tiling, "H200") for tiling in ("element", "shared", "registers")
    )
    assert element.asked_bytes > 10 * shared.asked_bytes > 20 * registers.asked_bytes
    assert element.seconds > shared.seconds > registers.seconds
    assert registers.flops / registers.seconds < 2 * 132 * 128 * 1.83e9  # not above the peak
    assert element.memory_bytes >= element.least_read_bytes + element.write_bytes


def attention_traffic(plan_: Plan, n: int) -> tuple[int, int, int]:
    """(bytes written and read between kernels, bytes of other tensors, flops)"""
    buffers = {buffer.name for buffer in plan_.buffers}
    between = other = flops = 0
    for kernel in plan_.kernels:
        cost = cost_of(kernel, plan_.problem, lengths(n), arch_for(plan_.problem.arch))
        flops += cost.flops
        if kernel.stage.name in buffers:
            between += cost.write_bytes
            between += cost.least_read_bytes
        else:
            other += cost.asked_bytes
    return between, other, flops


def test_scores_are_stored_or_never_stored() -> None:
    """N = 65,536: 4.29e9 scores a head; materialised, each is written and read several times."""
    n = 65_536
    scores_bytes = 4 * n * n
    assert f"{n * n:.2e}" == "4.29e+09"
    apart = plan(problem(attention_graph(dropout=0.1), fusion="none"))
    square = [buffer for buffer in apart.buffers if {"q", "kv"} <= set(buffer.axes)]
    assert len(square) >= 4
    for buffer in square:
        assert prod(lengths(n)[axis] for axis in buffer.axes) == n * n
    between, _, _ = attention_traffic(apart, n)
    assert between > 2 * len(square) * scores_bytes * 0.9
    assert peak_buffer_bytes(apart, lengths(n)) >= 2 * scores_bytes

    whole = plan(problem(attention_graph(dropout=0.1)))
    assert whole.buffers == ()
    assert peak_buffer_bytes(whole, lengths(n)) == 0
    (kernel,) = whole.kernels
    cost = cost_of(kernel, whole.problem, lengths(n), arch_for("H200"))
    assert cost.write_bytes == 4 * n * 64
    assert cost.least_read_bytes == 3 * 4 * n * 64
    assert cost.flops == 4 * n * n * 64
    assert cost.exp_ops >= n * n


def test_fused_products_lie_between() -> None:
    n = 4096
    apart, fused, whole = (
        plan(problem(attention_graph(dropout=0.1), fusion=fusion)) for fusion in ("none", "products", "full")
    )
    moved = []
    for each in (apart, fused, whole):
        arch = arch_for("H200")
        moved.append(sum(cost_of(k, each.problem, lengths(n), arch).asked_bytes for k in each.kernels))
        assert attention_traffic(each, n)[2] >= 4 * n * n * 64
    assert moved[0] > 2 * moved[1] > 4 * moved[2]
    assert len(apart.kernels) > len(fused.kernels) > len(whole.kernels) == 1
    assert peak_buffer_bytes(apart, lengths(n)) > peak_buffer_bytes(fused, lengths(n)) > 4 * n * n


def test_live_part_of_a_causal_walk() -> None:
    (kernel,) = plan(problem(attention_graph())).kernels
    n = 64 * kernel.block_own
    (part,) = live_parts(kernel, lengths(n))
    assert 0.5 < part < 0.52
    full = cost_of(kernel, problem(attention_graph()), lengths(n), arch_for("H200"))
    half = cost_of(kernel, problem(attention_graph()), lengths(n), arch_for("H200"), (part,))
    assert half.flops == pytest.approx(part * full.flops, rel=1e-6)
    assert half.seconds < 0.6 * full.seconds
    (whole,) = plan(problem(attention_graph(causal=False))).kernels
    assert live_parts(whole, lengths(n)) == (1.0,)


def test_walk_operands_are_read_by_every_block() -> None:
    problem_ = problem(attention_graph(causal=False), 128, storage="bf16")
    (kernel,) = plan(problem_).kernels
    sizes = lengths(4096, 128, b=2, hk=2, g=4)
    cost = cost_of(kernel, problem_, sizes, arch_for("H200"))
    q_bytes, kv_bytes = 2 * 16 * 4096 * 128, 2 * 2 * 2 * 2 * 4096 * 128
    blocks = 4 * -(-4096 // kernel.block_own)
    again = 1 if kernel.block_inner >= 128 else -(-4096 // kernel.block_walk)
    assert cost.asked_read_bytes == again * q_bytes + blocks * kv_bytes
    assert cost.least_read_bytes == q_bytes + kv_bytes
    assert cost.blocks == 4 * blocks


def test_storage_of_outputs() -> None:
    graph = attention_graph(return_lse=True)
    assert output_storages(problem(graph, storage="bf16")) == ("bf16", "fp32")
    assert output_storages(matmul_problem()) == ("fp32",)


def test_resident_blocks_obey_every_limit() -> None:
    a100, generic = arch_for("A100"), arch_for("generic")
    assert resident_blocks(a100, 256, 128, 0) == 2
    assert resident_blocks(a100, 256, 129, 0) == 1
    assert resident_blocks(a100, 64, 32, 0) == 32
    assert resident_blocks(a100, 1024, 65, 0) == 0
    assert resident_blocks(a100, 32, 32, 82_944) == 2
    assert resident_blocks(a100, 32, 32, 82_945) == 1
    assert resident_blocks(a100, 32, 32, 166_913) == 0
    assert resident_blocks(generic, 32, 32, 65_536) == 1
    assert registers_limit(a100, 256) == 255
    assert registers_limit(a100, 512) == 128
