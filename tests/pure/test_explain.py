"""What `explain` prints agrees with the plan and with its arithmetic."""

from __future__ import annotations

import re

import pytest

from fagen.lang.masks import causal, sliding_window
from fagen.plan.arch import arch_for
from fagen.plan.cost import cost_of, live_parts
from fagen.plan.planner import plan
from fagen.study.explain import explain, plan_lengths, quantity, seconds
from plans import attention_graph, lengths, problem


def test_one_kernel() -> None:
    made = plan(problem(attention_graph(dropout=0.1), 128, storage="bf16", arch="A100", family="simt"))
    (kernel,) = made.kernels
    sizes = lengths(8192, 128, b=2, hk=4, g=2)
    text = explain(made, sizes)
    cost = cost_of(kernel, made.problem, sizes, arch_for("A100"), live_parts(kernel, sizes))
    for said in (
        "attention, forward, bf16: one kernel of family simt for A100 (sm_80)",
        "at batch 2, kv_heads 4, group 2, q_len 8,192, kv_len 8,192, head_dim 128, v_head_dim 128",
        "rescale: ",
        "defer: ",
        f"{cost.blocks:,} blocks",
        f"{kernel.shared_bytes:,} of 166,912 bytes of shared memory",
        "only where kv <= q",
        quantity(cost.flops, "flop"),
        quantity(cost.asked_bytes, "B"),
        quantity(cost.memory_bytes, "B"),
        f"predicted {seconds(cost.seconds)}",
        f"bound by {cost.bound}",
        "Runners-up",
    ):
        assert said in text, said
    assert all(len(line) <= 120 for line in text.splitlines())
    visited = re.search(r"([\d.]+) % of the tiles are visited", text)
    assert visited
    assert 50 < float(visited[1]) < 53


def test_the_mask_decides_what_is_visited() -> None:
    from fagen.lang.attention import attention

    graph = attention(mask=causal() & sliding_window(255, 0)).graph
    text = explain(plan(problem(graph)), lengths(16_384))
    visited = re.search(r"([\d.]+) % of the tiles are visited", text)
    assert visited
    assert float(visited[1]) < 5


def test_several_kernels_and_what_lies_between() -> None:
    made = plan(problem(attention_graph(dropout=0.1), fusion="products"))
    text = explain(made, lengths(4096, hk=8), measured=1.0)
    for kernel in made.kernels:
        assert f"Kernel {kernel.function}: {kernel.schedule}" in text
    assert "t0[b, h, q, kv] lies between kernels: 536.9 MB" in text
    assert re.search(r"measured 1 s, [\d,.]+ of what was predicted", text)


def test_lengths_not_given_stand_for_the_class() -> None:
    made = plan(problem(attention_graph()))
    assert plan_lengths(made, {"q": 5})["q"] == 5
    assert plan_lengths(made, {})["d"] == 64
    assert "q_len 4,096" in explain(made)


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0 B"), (999, "999 B"), (134_217_728, "134.2 MB"), (549_755_813_888, "549.8 GB"), (2e12, "2.0 TB")],
)
def test_quantities(value: float, said: str) -> None:
    assert quantity(value, "B") == said


@pytest.mark.parametrize(("value", "said"), [(2.5, "2.5 s"), (0.00123, "1.23 ms"), (4.2e-6, "4.2 us")])
def test_times(value: float, said: str) -> None:
    assert seconds(value) == said
