"""All gradients by one kernel on tensor cores, with the tiles a GPU has it with."""

import re
from dataclasses import replace

import pytest
import torch

import edges
import fagen as fg
from fagen.calls.dispatch import compute
from fagen.calls.prepared import emulation
from fagen.compile import Compiled, backward_of, problem_of
from fagen.errors import EmulatorFinding
from fagen.ir.reference import compare, eager, evaluate
from fagen.lang.attention import attention
from fagen.lang.program import Options
from fagen.plan import tiling
from fagen.plan.space import Tiles
from fagen.run.emulate import SCHEDULES

pytestmark = pytest.mark.cxx


def made(head_dim, kv_heads, group, q_len, kv_len, deterministic=False, causal=True):
    """A kernel for Hopper's tiles, its arguments, and its program."""
    graph = attention(mask=fg.causal() if causal else None).graph
    lengths = {"b": 4, "hk": 16, "g": group, "h": 16 * group, "q": 4096, "kv": 4096}
    sizes = {"d": head_dim, "dv": head_dim, **lengths}
    back, both = backward_of(problem_of(graph, "H200", "sm80", ("bf16",) * 3, sizes))
    draw = torch.Generator().manual_seed(head_dim)

    def random(heads, length):
        return torch.randn(1, heads, length, head_dim, generator=draw).bfloat16()

    values = [random(kv_heads * group, q_len), random(kv_heads, kv_len), random(kv_heads, kv_len)]
    out, kept = evaluate(both.forward, values)
    kinds = {
        "argument": values,
        "output": [out.bfloat16(), kept.float()],
        "gradient": [random(kv_heads * group, q_len)],
    }
    given = [kinds[kind][place] for kind, place in both.sources]
    return Compiled(replace(back, deterministic=deterministic)), given, both.backward


@pytest.mark.parametrize(
    ("head_dim", "group", "q_len", "kv_len", "checker"),
    [
        (64, 2, 70, 90, "none"),
        (128, 1, 90, 140, "none"),
        (256, 1, 70, 70, "none"),
        (64, 2, 150, 150, "race"),
    ],
)
def test_gradients_by_the_tiles_of_a_gpu(head_dim, group, q_len, kv_len, checker):
    kernel, given, graph = made(head_dim, 1, group, q_len, kv_len)
    assert any(walk.partials for each in kernel.plan.kernels for walk in each.stage.walks)
    with emulation(checker=checker, schedule=SCHEDULES[head_dim // 64 % 3], seed=head_dim):
        found = compute(graph, given, Options(family="sm80"), kernel)
    require_right(graph, given, found)


def require_right(graph, given, found):
    """By the rule of tolerance."""
    exact, rough = evaluate(graph, given), eager(graph, given, dtype=torch.bfloat16)
    for output, mine, ref, quick in zip(graph.outputs, found, exact, rough, strict=True):
        compare(mine, ref, quick.double(), gradient=True).require(output.name)


@pytest.mark.parametrize("number", range(4))
def test_each_wait_for_other_warps_is_needed(monkeypatch, number):
    """For a tile's copies, until the tile before is read, and for each array of weights."""
    small = Tiles("fragments", 32, 32, 16, 0, 16, 8)  # four warps, of which two share rows
    monkeypatch.setattr(tiling, "_twofold", lambda counts: [small])
    kernel, given, graph = made(16, 1, 1, 130, 40)
    candidate = kernel.candidate(0)
    waits = list(re.finditer(r"(?m)^ *wait\(.*\n", candidate.emitted.text))
    assert len(waits) == 4
    text = candidate.emitted.text.replace(waits[number][0], "")
    kernel._candidates[0] = replace(candidate, emitted=replace(candidate.emitted, text=text))
    with pytest.raises(EmulatorFinding, match="data race"), emulation(checker="race"):
        compute(graph, given, Options(family="sm80"), kernel)


@pytest.mark.parametrize("causal", [True, False])
def test_a_fixed_order_gives_the_same_bits(causal):
    kernel, given, graph = made(64, 1, 1, 70, 90, deterministic=True, causal=causal)
    assert not any(walk.partials for each in kernel.plan.kernels for walk in each.stage.walks)
    runs = []
    for seed, schedule in enumerate(SCHEDULES):
        with emulation(schedule=schedule, seed=seed):
            runs.append(compute(graph, given, Options(deterministic=True, family="sm80"), kernel))
    require_right(graph, given, runs[0])
    for again in runs[1:]:
        assert all(map(torch.equal, runs[0], again))


def test_heads_past_the_end_of_a_walk_along_them_are_not_read():
    """The gradient of a bias that all heads share is a walk along the heads of a group, here three."""
    draw = torch.Generator().manual_seed(3)
    sizes = ((1, 3, 9, 16), (1, 1, 20, 16), (1, 1, 20, 16), (1, 1, 9, 20))
    q, k, v, bias = (torch.randn(size, generator=draw).bfloat16().requires_grad_() for size in sizes)
    with emulation(checker="address"):
        out, lse = fg.attention(q, k, v, bias=bias, return_lse=True, family="sm80")
        (found,) = torch.autograd.grad((out, lse), (bias,), (torch.ones_like(out), torch.ones_like(lse)))
    assert found.shape == bias.shape
    assert torch.isfinite(found).all()


def test_rows_of_several_heads_are_added_to_a_table_as_no_diagonal():
    """Few queries of all heads of a key head share a tile: the next row is another head's."""
    torch.manual_seed(7)
    q, k, v = (
        torch.randn(1, heads, length, 64).bfloat16().requires_grad_()
        for heads, length in [(4, 2), *[(1, 129)] * 2]
    )
    table = torch.randn(4, 99).requires_grad_()
    parts = {"score": fg.relative_bias(table), "mask": fg.causal()}
    out = fg.attention(q, k, v, family="sm80", **parts)
    found = torch.autograd.grad(out.sum(), [q, k, v, table])
    edges.require_right([q, k, v], found, **parts)
