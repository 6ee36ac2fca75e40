"""Meaning at the edges, on a GPU."""

import pytest

from edges import *  # noqa: F403

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture
def repeats() -> int:
    return 200


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
