"""Gradients on a GPU: public reports, and the sample with all kernels built in parallel at the start."""

import os
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch

import fagen as fg
from edges import need
from public_gradients import *  # noqa: F403
from sampler import Case, build_all, check_gradients, differentiable, sample

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

FAMILIES = ("simt", "sm80", "sm90")
CASES = [(family, case) for family in FAMILIES for case in differentiable(sample(family), family)]


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture
def repeats() -> int:
    return 1000


@pytest.fixture(scope="module", autouse=True)
def _built(request: pytest.FixtureRequest) -> None:
    """Build what the selected tests of the sample run."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # others build at the same time, each what it runs
    wanted: dict[str, list[Case]] = defaultdict(list)
    for item in request.session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and "case" in parameters:
            wanted[parameters["family"]].append(parameters["case"])
    for family, cases in wanted.items():
        build_all(cases, family, workers=os.cpu_count() or 1, backward=True)


@pytest.mark.parametrize(
    ("family", "case"), [pytest.param(family, case, id=f"{family}-{case}") for family, case in CASES]
)
def test_the_gradients_of_the_sample_are_right(family: str, case: Case) -> None:
    need("cuda", family)
    check_gradients(case, "cuda", family)


@pytest.fixture(params=["simt", "sm80", "sm90"])
def family(request: pytest.FixtureRequest) -> str:
    need("cuda", request.param)
    return str(request.param)


@pytest.mark.parametrize("everything", [False, True], ids=["alone", "everything"])
def test_b35_bits_are_equal_while_the_gpu_is_busy(family: str, everything: bool) -> None:
    """Gradients of q, k and v, and of whatever else has one: slopes, a temperature, biases and a sink."""
    wanted = [torch.randn(2, 8, 1024, 128, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    q, k, v = wanted
    parts: dict[str, Any] = {"mask": fg.causal(), "family": family, "deterministic": True}
    if everything:
        slopes, temperature, bias, sink = (
            torch.rand(shape, device="cuda").add_(0.1).requires_grad_()
            for shape in ((8,), (), (1, 8, 1, 1024), (8,))
        )
        wanted += [slopes, temperature, bias, sink]
        score = [fg.alibi(slopes), fg.temperature(temperature)]
        parts |= {"score": score, "bias": bias, "sink": sink, "dropout": 0.1}
    out = fg.attention(q, k, v, **parts)
    incoming = torch.randn_like(out)
    first = torch.autograd.grad(out, wanted, incoming, retain_graph=True)
    other, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for number in range(30):
        with torch.cuda.stream(other):
            for _ in range(1 + number % 5):
                x = x @ x.T / 2048
        again = torch.autograd.grad(out, wanted, incoming, retain_graph=True)
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("length", [33, 128])
def test_b35_bits_of_a_thousand_short_backwards_are_equal(family: str, length: int) -> None:
    q, k, v = (torch.randn(1, 2, length, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    out = fg.attention(q, k, v, mask=fg.causal(), family=family, deterministic=True)
    incoming = torch.randn_like(out)
    first = torch.autograd.grad(out, (k, v), incoming, retain_graph=True)
    differ = torch.zeros((), device="cuda")
    for _ in range(1000):
        again = torch.autograd.grad(out, (k, v), incoming, retain_graph=True)
        for one, other in zip(first, again, strict=True):
            differ += (one != other).sum()
    assert int(differ) == 0


def test_b57_backward_is_the_first_work_of_its_thread() -> None:
    q, k, v = (torch.randn(1, 2, 70, 16, device="cuda", requires_grad=True) for _ in range(3))
    expected = torch.autograd.grad(fg.attention(q, k, v).sum(), (q, k, v))
    found: list[tuple[torch.Tensor, ...]] = []

    def work() -> None:
        found.append(torch.autograd.grad(fg.attention(q, k, v).sum(), (q, k, v)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 4
    assert all(all(map(torch.equal, expected, each)) for each in found)
