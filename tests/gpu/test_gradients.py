"""Gradients on a GPU: public reports, and the sample with all kernels built in parallel at the start."""

import os
import threading
from collections import defaultdict

import pytest
import torch

import fagen as fg
from public_gradients import *  # noqa: F403
from sampler import Case, build_all, check_gradients, differentiable, sample

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

FAMILIES = ("simt", "sm80")
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
    check_gradients(case, "cuda", family)


@pytest.mark.parametrize("family", ["simt", "sm80", "sm90"])
def test_b35_bits_are_equal_while_the_gpu_is_busy(family: str) -> None:
    if family == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the family is of compute capability 9.0")
    q, k, v = (torch.randn(2, 8, 1024, 128, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    out = fg.attention(q, k, v, mask=fg.causal(), family=family, deterministic=True)
    incoming = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), incoming, retain_graph=True)
    other, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(30):
        with torch.cuda.stream(other):
            x = x @ x.T / 2048
        again = torch.autograd.grad(out, (q, k, v), incoming, retain_graph=True)
        assert all(map(torch.equal, first, again))


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
