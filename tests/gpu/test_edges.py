"""Meaning at the edges, on a GPU."""

import pytest
import torch

import fagen as fg
from edges import *  # noqa: F403
from edges import need, tensors

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
