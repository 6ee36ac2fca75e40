"""Public reports, on a GPU: all of them, and those that take a large one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fagen as fg
from fagen.ir.reference import compare, eager, evaluate
from fagen.lang.attention import attention as traced_attention
from public_cases import *  # noqa: F403

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture
def repeats() -> int:
    return 200


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def require_rows(given: tuple[Tensor, ...], out: Tensor, mask: fg.Expr | None = None) -> None:
    """Hold the first rows, the last and some between to the reference."""
    traced = traced_attention(mask=mask)
    values = (*given, *traced.captured)
    q_len = out.shape[2]
    rows = torch.cat([torch.arange(8), torch.randint(8, q_len - 8, (16,)), torch.arange(q_len - 8, q_len)])
    (ref,) = evaluate(traced.graph, values, rows={"q": rows})
    (near,) = eager(traced.graph, values, given[0].dtype, rows={"q": rows})
    compare(out[:, :, rows.to(out.device)], ref, near).require()


def test_b12_a_large_model(device: str) -> None:
    q, k = (normal(1, 16, 2048, 192, dtype=torch.bfloat16, seed=i) for i in range(2))
    v = normal(1, 16, 2048, 128, dtype=torch.bfloat16, seed=2)
    require_rows((q, k, v), fg.attention(q, k, v, mask=fg.causal()), fg.causal())
    for head_dim, dtype in ((256, torch.float32), (512, torch.bfloat16)):
        given = tuple(normal(1, 2, 2048, head_dim, dtype=dtype, seed=i) for i in range(3))
        require_rows(given, fg.attention(*given, mask=fg.causal()), fg.causal())


def test_b13_a_head_dim_of_63_at_full_size(device: str) -> None:
    given = tuple(normal(2, 32, 4096, 63, dtype=torch.float16, seed=i) for i in range(3))
    require_rows(given, fg.attention(*given, mask=fg.causal()), fg.causal())


def test_b20_a_mask_of_more_than_2_to_the_31_pairs(device: str) -> None:
    length = 49_999
    given = tuple(normal(1, 8, length, 64, dtype=torch.bfloat16, seed=i) for i in range(3))
    everything = torch.ones(length, length, dtype=torch.bool, device=device)
    out = fg.attention(*given, mask=fg.capture(everything, "q kv"))
    require_rows(given, out)
    everything[:, 40_000:] = False
    q, k, v = given
    short = (q, k[:, :, :40_000], v[:, :, :40_000])
    require_rows(short, fg.attention(*given, mask=fg.capture(everything, "q kv")))


def test_b35_the_same_bits_while_another_stream_is_busy(device: str, repeats: int) -> None:
    given = tuple(normal(2, 8, 2048, 128, dtype=torch.bfloat16, seed=i) for i in range(3))
    first = fg.attention(*given, mask=fg.causal())
    side, noise = torch.cuda.Stream(), normal(4096, 4096, dtype=torch.bfloat16)
    for _ in range(repeats):
        with torch.cuda.stream(side):
            noise @ noise
        assert torch.equal(fg.attention(*given, mask=fg.causal()), first)
    torch.cuda.synchronize()
