import copy
import pickle

import pytest

from fagen.errors import (
    BuildError,
    DtypeError,
    EmulatorFinding,
    FagenError,
    LaunchError,
    PlanError,
    ToolchainError,
    UsageError,
)


def test_sentence_names_call_failure_values_and_what_works():
    error = UsageError(
        "heads are not divisible",
        call="attention(q, k, v)",
        values={"q_heads": 12, "kv_heads": 5, "q_len": 65_536},
        works="kv_heads 1, 2, 3, 4, 6 or 12 fits",
    )
    assert str(error) == (
        "attention(q, k, v): heads are not divisible (q_heads = 12, kv_heads = 5, q_len = 65,536); "
        "kv_heads 1, 2, 3, 4, 6 or 12 fits"
    )


def test_parts_not_given_leave_no_trace():
    assert str(PlanError("head_dim 0 has no meaning")) == "head_dim 0 has no meaning"
    assert str(PlanError("it fails", works="less fits")) == "it fails; less fits"


def test_details_follow_the_sentence_and_are_no_part_of_it():
    error = BuildError("nvcc rejects it", details="line 1\nline 2")
    assert error.sentence == "nvcc rejects it"
    assert str(error) == "nvcc rejects it\nline 1\nline 2"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (UsageError, ValueError),
        (DtypeError, TypeError),
        (PlanError, ValueError),
        (ToolchainError, RuntimeError),
        (BuildError, RuntimeError),
        (LaunchError, RuntimeError),
        (EmulatorFinding, RuntimeError),
    ],
)
def test_each_is_caught_as_its_builtin_and_as_the_base(kind, builtin):
    for caught in (builtin, FagenError):
        with pytest.raises(caught, match="what failed"):
            raise kind("what failed")


@pytest.mark.parametrize("twin", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_survives_the_way_between_processes(twin):
    error = BuildError("it fails", call="f(q)", values={"d": 3}, works="less fits", details="log")
    again = twin(error)
    assert type(again) is BuildError
    assert (str(again), again.sentence, again.values, again.details) == (
        str(error), error.sentence, {"d": 3}, "log"
    )  # fmt: skip
