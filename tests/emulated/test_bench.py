"""Plans measured on the emulator by a watch that only pretends: all are right, and the fastest is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

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


def test_the_command_prints_a_table_and_writes_all_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pytest.importorskip("typer", reason="needs typer: it reads the command line")
    from command_line import fagen

    monkeypatch.setattr("fagen.cli.bench._needs_gpu", lambda what, predicted=False: CPU)
    monkeypatch.setattr("fagen.bench.stopwatch.GpuStopwatch", Watch)
    path = tmp_path / "x.json"
    done = fagen(
        "bench", "--head-dim", 16, "--variant", "causal", "--length", 40, "--batch", 1, "--q-heads", 2,
        "--family", "simt", "--peer", "math", "--rounds", 2, "--launch", "--markdown", "--json", path,
    )  # fmt: skip
    assert done.code == 0, done.err
    title, how, _, head, _, row, *notes = done.out.splitlines()
    assert title == "TFLOP/s, bf16, forward, on emulator"
    assert how.startswith("medians over 2 rounds, in each of which everybody has a burst of calls, 20 ms")
    assert head == "| d | mask | S | B x H | simt | math | best peer | simt /peer |"
    assert row.startswith("| 16 | causal | 40 | 1 x 2 | ")
    assert row.endswith(" | math | 0.50 |"), "the watch has each take half the time of the one before"
    assert notes[1].startswith("simt: 0.50 times as fast as the best peer (geometric mean), at least as fast")
    results = json.loads(path.read_text())["cells"][0]["results"]
    assert {name: each["seconds"]["count"] for name, each in results.items()} == {"simt": 4, "math": 4}
    assert results["simt"]["replayed_seconds"]["median"] > 0


def test_what_is_measured_before_an_interruption_is_shown(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("typer", reason="needs typer: it reads the command line")
    from command_line import fagen

    monkeypatch.setattr("fagen.cli.bench._needs_gpu", lambda what, predicted=False: CPU)
    monkeypatch.setattr("fagen.bench.stopwatch.GpuStopwatch", lambda: Interrupted(2))
    options = ["bench", "--head-dim", 16, "--batch", 1, "--q-heads", 2, "--family", "simt", "--peer", "none"]
    options += ["--workers", 1]
    done = fagen(*options, "--variant", "causal", "--length", "40,48", "--rounds", 1, "--markdown")
    assert (done.code, done.err) == (0, "fagen: interrupted after 1 of 2 cells\n")
    assert (done.out.count("| 16 | causal | 40 |"), done.out.count("| 16 | causal | 48 |")) == (1, 0)


class Interrupted(Watch):
    """Somebody presses a key after a few timings."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def times(self, call: Callable[[], object], count: int) -> list[float]:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().times(call, count)
