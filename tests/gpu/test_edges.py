"""Meaning at the edges, on a GPU."""

import pytest
import torch

import fagen as fg
from edges import *  # noqa: F403
from edges import need, require, tensors, traced_attention
from fagen.calls.dispatch import problem_for
from fagen.calls.values import read
from fagen.compile import compile_problem
from fagen.lang.program import Options

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture
def repeats() -> int:
    return 200


@pytest.mark.parametrize("family", ["simt", "sm80", "sm90"])
@pytest.mark.parametrize("q_len", [4, 1000])
def test_two_hundred_calls_of_each_family_give_the_same_bits(family: str, q_len: int, repeats: int) -> None:
    need("cuda", family)
    given = tensors("cuda", torch.bfloat16, batch=2, heads=(8, 2), q_len=q_len, kv_len=1500, head_dim=128)
    parts = {"mask": fg.causal(), "score": fg.softcap(20.0), "return_lse": True, "family": family}
    first = fg.attention(*given, **parts)
    for _ in range(repeats):
        found = fg.attention(*given, **parts)
        assert all(torch.equal(x, y) for x, y in zip(found, first, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_a_thousand_calls_of_a_large_batch_give_the_same_bits(family: str, head_dim: int) -> None:
    need("cuda", family)
    torch.manual_seed(0)
    heads = 1024 // head_dim
    given = [torch.randn(60, heads, 512, head_dim, device="cuda").bfloat16() for _ in range(3)]
    first, lse = fg.attention(*given, mask=fg.causal(), family=family, return_lse=True)
    differ = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(1000):
        found, again = fg.attention(*given, mask=fg.causal(), family=family, return_lse=True)
        differ += (found.view(torch.int16) != first.view(torch.int16)).sum() + (again != lse).sum()
    assert int(differ) == 0


def lengths_around_tiles(block_q: int, block_kv: int) -> list[tuple[int, int]]:
    """Numbers of queries and keys beside whole tiles, and keys that are parts of one."""
    rows, columns = (
        [block * times + more for times in (1, 2, 3) for more in (-1, 0, 1)] for block in (block_q, block_kv)
    )
    lengths = [(q_len, kv_len) for q_len in rows for kv_len in columns]
    return lengths + [(rows[0], n) for n in range(15, columns[2] + 2, 16)]


def require_causal(
    family: str, head_dim: int, heads: tuple[int, int], lengths: list[tuple[int, int]]
) -> None:
    traced = traced_attention(mask=fg.causal(), return_lse=True)
    for q_len, kv_len in lengths:
        given = tensors("cuda", torch.bfloat16, heads=heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim)
        print(f"{q_len} queries, {kv_len} keys")
        found = fg.attention(*given, mask=fg.causal(), return_lse=True, family=family)
        require(found, traced, given)


by_head_dim = pytest.mark.parametrize("head_dim", [64, 128, 256])


@by_head_dim
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_lengths_around_every_edge_of_a_tile(family: str, head_dim: int) -> None:
    """As the planner has tiles for many queries."""
    need("cuda", family)
    arch = f"sm_{''.join(map(str, torch.cuda.get_device_capability()))}"
    asked = {"head_dim": head_dim, "dtype": "bf16", "arch": arch, "family": family}
    (kernel,) = fg.compile(mask=fg.causal(), **asked).plan.kernels
    require_causal(family, head_dim, (2, 1), lengths_around_tiles(kernel.block_own, kernel.block_walk))


@by_head_dim
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_lengths_around_every_edge_of_a_tile_of_few_queries(family: str, head_dim: int) -> None:
    """As calls of few queries have them: rows of a group of heads may lie in one."""
    need("cuda", family)
    most = 32
    few = tensors("cuda", torch.bfloat16, heads=(4, 1), q_len=1, head_dim=head_dim)
    values = read(traced_attention(mask=fg.causal(), return_lse=True).graph, few)
    problem = problem_for(values, Options(family=family), values.sizes())
    kernel = compile_problem(problem).plan.kernels[0]
    around = lengths_around_tiles(kernel.block_own // problem.group, kernel.block_walk)
    require_causal(family, head_dim, (4, 1), [pair for pair in around if 0 < pair[0] <= most])


def test_a_long_run_needs_little_more_memory_than_its_tensors() -> None:
    pytest.importorskip("typer", reason="needs typer: it reads the command line")
    from command_line import fagen

    q_len, head_dim, q_heads = 65_536, 64, 2
    told = fagen(
        *("run", "--device", "gpu", "--json", "--mask", "causal"),
        *("--q-len", q_len, "--head-dim", head_dim, "--q-heads", q_heads),
    ).json
    assert told["ok"], told
    inputs_and_outputs = 4 * q_heads * q_len * head_dim * 2  # q, k, v and out in fp16
    assert told["peak_bytes"] <= inputs_and_outputs + (64 << 20)
