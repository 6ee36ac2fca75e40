"""Walks made in parts, on a GPU: right, the same bits every time, on any stream and in a captured graph."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fagen as fg
from edges import gradients, need, require, require_right, tensors, traced_attention, wanting
from fagen.calls.prepared import draw_seed
from fagen.compile import compile_problem, problem_of
from fagen.plan.arch import arch_for

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

by_family = pytest.mark.parametrize("family", ["simt", "sm80"])
DTYPES = {"simt": torch.float32, "sm80": torch.bfloat16}
PARTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": fg.causal(), "return_lse": True},
    "window": {"mask": fg.sliding_window(700, 0), "score": fg.softcap(20.0)},
    "window and prefix": {"mask": fg.sliding_window(300, 0) | (fg.kv < 70), "return_lse": True},
    "alibi and dropout": {"score": fg.alibi(), "mask": fg.causal(), "dropout": 0.3, "return_lse": True},
}


def given_of(
    family: str, group: int = 4, q_len: int = 1, kv_len: int = 5000, head_dim: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    need("cuda", family)
    shape = {"batch": 2, "heads": (2 * group, 2), "q_len": q_len, "kv_len": kv_len, "head_dim": head_dim}
    return tensors("cuda", DTYPES[family], **shape)


def in_parts(family: str, parts: dict[str, Any], group: int = 4, head_dim: int = 64) -> int:
    """Kernels of such calls; those of a walk in parts have a part more."""
    graph = traced_attention(**parts).graph
    arch = arch_for(torch.cuda.get_device_capability()).name
    sizes = {"b": 2, "hk": 2, "g": group, "q": 1, "kv": 5000, "d": head_dim, "dv": head_dim}
    storage = "fp32" if family == "simt" else "bf16"
    problem = problem_of(graph, arch, family, (storage,) * 3, sizes)
    return sum(kernel.stage.parts is not None for kernel in compile_problem(problem).plan.kernels)


@by_family
@pytest.mark.parametrize("name", list(PARTS))
def test_masks_scores_and_random_numbers(family: str, name: str) -> None:
    parts = PARTS[name]
    if "alibi" not in name:
        assert in_parts(family, parts)
    for q_len, kv_len in ((1, 1024), (3, 5003), (17, 2300)):
        given = given_of(family, q_len=q_len, kv_len=kv_len)
        torch.manual_seed(q_len)
        seed = int(draw_seed(given[0].device))
        torch.manual_seed(q_len)
        outputs = fg.attention(*given, **parts, family=family)
        require(outputs, traced_attention(**parts), given, seed)


@by_family
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_groups_and_head_dims(family: str, group: int, head_dim: int) -> None:
    traced = traced_attention(mask=fg.causal())
    for q_len in (1, 5):
        given = given_of(family, group, q_len, 3001, head_dim)
        require(fg.attention(*given, mask=fg.causal(), family=family), traced, given)


@by_family
def test_documents_of_which_few_tiles_are_live(family: str) -> None:
    """More parts than tiles that count: the others have found nothing."""
    ids = (torch.arange(6000, device="cuda") // 100).to(torch.int32).expand(2, 6000).contiguous()
    for rises in (True, False):
        own = fg.capture(ids, "b n", sorted=rises)
        mask = own[fg.b, fg.kv] == own[fg.b, fg.q + 2950]
        given = given_of(family, q_len=9, kv_len=6000)
        outputs = fg.attention(*given, mask=mask, return_lse=True, family=family)
        require(outputs, traced_attention(mask=mask, return_lse=True), given)


@by_family
def test_the_same_bits_every_time(family: str) -> None:
    given = given_of(family, q_len=2, kv_len=20_000, head_dim=128)
    first = fg.attention(*given, mask=fg.causal(), return_lse=True, family=family)
    for _ in range(200):
        found = fg.attention(*given, mask=fg.causal(), return_lse=True, family=family)
        assert all(torch.equal(x, y) for x, y in zip(found, first, strict=True))


@by_family
def test_captured_compiled_and_beside_another_stream(family: str) -> None:
    given = given_of(family)

    def call(*values: Tensor) -> Tensor:
        return fg.attention(*values, mask=fg.causal(), family=family)

    expected = call(*given)
    require(expected, traced_attention(mask=fg.causal()), given)
    assert torch.equal(torch.compile(call)(*given), expected)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch.equal(call(*given), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*given)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)


def test_gradients_of_a_forward_in_parts() -> None:
    """The log-sum-exp that the other direction reads is the one of all parts."""
    given = wanting(given_of("sm80", kv_len=3000))
    require_right(given, gradients(given, mask=fg.causal()), mask=fg.causal())
