"""The sample on the emulator: any mask with any score, length, dtype and layout is right."""

import itertools

import pytest

from sampler import FACTORS, LEAST, Case, check, sample

FAMILIES = ("simt",)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_pair_of_choices_meets(family: str) -> None:
    cases = sample(family)
    assert len(cases) >= LEAST
    for one, other in itertools.combinations(FACTORS, 2):
        met = {(getattr(case, one), getattr(case, other)) for case in cases}
        levels = [
            [level for level in FACTORS[name] if family == "simt" or level != "fp32"] for name in (one, other)
        ]
        assert met == set(itertools.product(*levels)), (one, other)


@pytest.mark.cxx
@pytest.mark.parametrize(
    ("family", "case"),
    [pytest.param(family, case, id=f"{family}-{case}") for family in FAMILIES for case in sample(family)],
)
def test_the_sample_is_right(family: str, case: Case) -> None:
    check(case, "cpu", family)
