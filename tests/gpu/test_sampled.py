"""The sample on a GPU, some of it at larger lengths, with all kernels built in parallel at the start."""

import os
from collections import defaultdict

import pytest

from masks import MASKS
from sampler import Case, build_all, check, longer, of_the_file, sample

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

FAMILIES = ("simt", "sm80", "sm90")


@pytest.fixture(scope="module", autouse=True)
def _built(request: pytest.FixtureRequest) -> None:
    """Build what the selected tests run."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # others build at the same time, each what it runs
    wanted: dict[str, list[Case]] = defaultdict(list)
    for item in request.session.items:
        if item.path == request.path:
            wanted[item.callspec.params["family"]].append(item.callspec.params["case"])
    for family, cases in wanted.items():
        build_all(cases, family, workers=os.cpu_count() or 1)


def _named(cases: list[tuple[str, Case]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("family", "case"), [pytest.param(family, case, id=f"{family}-{case}") for family, case in cases]
    )


@_named([(family, case) for family in FAMILIES for case in sample(family)])
def test_the_sample_is_right(family: str, case: Case) -> None:
    check(case, "cuda", family)


@_named([(family, of_the_file(name, family)) for family in FAMILIES for name in MASKS])
def test_masks_at_the_lengths_of_the_file(family: str, case: Case) -> None:
    check(case, "cuda", family)


@_named([(family, case) for family in FAMILIES for case in longer(sample(family), 6)])
def test_larger_lengths_are_right(family: str, case: Case) -> None:
    check(case, "cuda", family)
