"""The sample on the emulator: any mask with any score, length, dtype and layout is right."""

import itertools

import pytest

import fagen as fg
from fagen.calls.prepared import emulation
from fagen.calls.values import aligned, read, storages
from fagen.compile import problem_of
from fagen.plan.arch import arch_for
from fagen.plan.planner import plan
from masks import MASKS
from sampler import (
    FACTORS,
    LEAST,
    SCHEDULES,
    Case,
    bulk_copied,
    check,
    check_gradients,
    check_plan_of,
    differentiable,
    of_the_file,
    sample,
    with_few_queries,
)

FAMILIES = ("simt", "sm80", "sm90")
THINNED = {"sm80": 5, "sm90": 12}
"""Of these families every so many cases and a few of the rest: a GPU runs all of them."""
GPUS = ("A100", "RTX 3090", "RTX 4090", "H100")
GRADIENTS = 28
"""Every how many of the smaller cases that have gradients are run backward: a GPU runs all of them."""
CHECKED = {"address": 36, "race": 90}
"""For each checker, every how many cases it watches one: it takes several times as long."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_pair_of_choices_meets(family: str) -> None:
    cases = sample(family)
    assert len(cases) >= LEAST
    assert len({str(case) for case in cases}) == len(cases)
    for one, other in itertools.combinations(FACTORS, 2):
        met = {(getattr(case, one), getattr(case, other)) for case in cases}
        levels = [
            [level for level in FACTORS[name] if family == "simt" or level != "fp32"] for name in (one, other)
        ]
        assert met == set(itertools.product(*levels)), (one, other)


def _cases(family: str, every: int = 1, first: int = 0) -> list[Case]:
    return list(sample(family)[first::every])


@pytest.mark.parametrize("first", range(0, 8, 2))
def test_hopper_takes_16_bits_in_its_own_family(first: int) -> None:
    """But tensors that bulk copies can't reach: registers are for a compiler to find."""
    for case in _cases("sm90", 16, first):
        call = case.draw("cpu", "sm90")
        values = read(call.traced.graph, call.values)
        asked = problem_of(values.graph, "H200", None, storages(values), values.sizes())
        made = plan(asked.read_as(aligned(values)))
        if bulk_copied(call.tensors):
            assert made.family == "sm90", repr(case)
            continue
        assert made.family == "sm80", repr(case)
        reasons = [each.reason for each in made.rejected if each.candidate.startswith("sm90")]
        assert any("no multiple of 16 bytes" in each for each in reasons), reasons


def _named(*parts: object) -> str:
    return "-".join(map(str, parts))


@pytest.mark.cxx
@pytest.mark.parametrize(
    ("family", "case"),
    [pytest.param(f, case, id=_named(f, case)) for f in FAMILIES for case in _cases(f, THINNED.get(f, 1))],
)
def test_the_sample_is_right(family: str, case: Case) -> None:
    with emulation(schedule=SCHEDULES[case.number % 3], seed=case.seed):
        check(case, "cpu", family)


@pytest.mark.cxx
@pytest.mark.parametrize(
    ("family", "name"),
    [(f, name) for f in FAMILIES for name in list(MASKS)[:: 4 if f == "sm90" else 1]],
)
def test_masks_at_the_lengths_of_the_file(family: str, name: str) -> None:
    check(of_the_file(name, family), "cpu", family)


@pytest.mark.cxx
@pytest.mark.parametrize(
    ("family", "checker", "case"),
    [
        pytest.param(f, checker, case, id=_named(f, checker, case))
        for f in FAMILIES
        for checker, every in CHECKED.items()
        for case in _cases(f, every * (3 if f == "sm90" else 1), 5)
    ],
)
def test_checkers_find_nothing(family: str, checker: str, case: Case) -> None:
    with emulation(checker=checker, schedule="random", seed=case.seed, workers=1):
        check(case, "cpu", family)


@pytest.mark.cxx
@pytest.mark.parametrize(
    ("family", "gpu", "case"),
    [
        pytest.param(f, gpu, case, id=_named(f, gpu.replace(" ", ""), case))
        for f in FAMILIES
        for number, gpu in enumerate(GPUS)
        if f in arch_for(gpu).families
        for case in _cases(f, 120 if f == "sm90" else 60, 7 + 11 * number)
    ],
)
def test_tiles_of_gpus_are_right(family: str, gpu: str, case: Case) -> None:
    check_plan_of(case, gpu, family)


def test_an_unsound_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself fails where an output is wrong or has a NaN too many."""
    case = next(case for case in sample("simt") if case.q_len == case.kv_len == 64 and case.dtype == "fp32")
    right = fg.attention

    def replaced_by(change: float) -> None:
        def changed(*tensors: object, **parts: object) -> object:
            found = right(*tensors, **{**parts, "family": "reference"})
            out, *rest = found if isinstance(found, tuple) else (found,)
            return (out + change, *rest) if rest else out + change

        monkeypatch.setattr(fg, "attention", changed)

    replaced_by(0.0)
    check(case, "cpu", "simt")
    for change, said in ((1e-4, "error"), (float("nan"), "nan")):
        replaced_by(change)
        with pytest.raises(AssertionError, match=said):
            check(case, "cpu", "simt")


@pytest.mark.cxx
@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(f, case, id=_named(f, case))
        for f in FAMILIES
        for cases in [differentiable(sample(f), f)]
        for case in (
            *[c for c in cases if c.q_len * c.kv_len <= 2**13][::GRADIENTS],
            *with_few_queries(cases, len(cases)),
        )
    ],
)
def test_gradients_of_the_sample_are_right(family: str, case: Case) -> None:
    with emulation(schedule=SCHEDULES[case.number % 3], seed=case.seed):
        check_gradients(case, "cpu", family)


@pytest.mark.cxx
def test_gradients_of_several_ranges_stay_within_arrays() -> None:
    """Behind the last tile of several ranges there is no next one, of which nothing may be read either."""
    case = next(
        case
        for case in differentiable(sample("sm80"), "sm80")
        if "speculative_tree_training" in str(case) and case.q_len * case.kv_len <= 2**13
    )
    with emulation(checker="address", seed=case.seed):
        check_gradients(case, "cpu", "sm80")
