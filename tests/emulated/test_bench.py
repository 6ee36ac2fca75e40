"""Plans measured on the emulator by a watch that only pretends: all are right, and the fastest is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fagen.bench.cells import Given, cells_of
from fagen.bench.lineup import own
from fagen.bench.measure import Protocol, measure_cell
from fagen.bench.tune import problems, tune
from fagen.compile import compile_problem

pytestmark = pytest.mark.cxx
CPU = torch.device("cpu")


class Watch:
    """Each plan takes half the time of the one before it."""

    def __init__(self) -> None:
        self.known: list[int] = []

    def pause(self, seconds: float) -> None:
        pass

    def times(self, call: Callable[[], object], count: int) -> list[float]:
        if id(call) not in self.known:
            call()
            self.known.append(id(call))
        return [0.5 ** self.known.index(id(call))] * count

    def replayed(self, call: Callable[[], object]) -> Callable[[], object]:
        return call

    def added_bytes(self, call: Callable[[], object]) -> int:
        return 1


def test_the_fastest_of_a_few_plans_is_kept():
    given = Given(dims=[(16, 16)], variants=["causal"], lengths=[40], batch=1, q_heads=2)
    (cell,) = cells_of("short", given)
    (tuning,) = tune(problems([cell], ["simt"], "emulator"), 2, Watch(), Protocol(rounds=1), CPU)
    assert tuning.reasons == {}
    assert tuning.seconds == {None: [1.0], 1: [0.5]}, "the first is what is taken without measuring"
    assert tuning.winner == 1
    kept = compile_problem(tuning.problem).tuned()["emulator"]
    compile_problem(tuning.problem).untune("emulator")
    assert (kept.finalist, kept.gain, kept.measured) == (1, 2.0, 2)
    found = measure_cell(cell, own(["simt"]), Watch(), Protocol(rounds=1), CPU).results["simt"]
    assert (found.reason, found.is_wrong) == ("", False)
    assert found.timing is not None
    assert found.max_error <= found.tolerance
