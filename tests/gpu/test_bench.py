"""``fagen bench`` on a GPU: clocks, one small cell beside torch's own kernels, and a plan that is tuned."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from fagen.bench import overhead
from fagen.bench.cells import Given, cells_of
from fagen.bench.contenders import Inputs
from fagen.bench.measure import Protocol
from fagen.bench.stopwatch import GpuStopwatch
from fagen.bench.tune import problems, tune
from fagen.calls.dispatch import arch_of
from fagen.compile import Compiled

pytestmark = pytest.mark.gpu


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_longer_work_takes_longer_and_a_replay_does_the_same():
    watch, large = GpuStopwatch(), torch.randn(8192, 8192, device=device())
    small, out = large[:64, :64].contiguous(), torch.empty_like(large)
    short = min(watch.times(lambda: small @ small, 20))
    long = min(watch.times(lambda: torch.mm(large, large, out=out), 3))
    assert 0 < short < long
    replay = watch.replayed(lambda: torch.mm(large, large, out=out))
    out.zero_()
    assert short < min(watch.times(replay, 3))
    torch.testing.assert_close(out, large @ large)
    assert watch.added_bytes(lambda: torch.empty(1 << 24, device=device())) == 4 << 24


def test_the_command_measures_a_cell(tmp_path: Path, cold_cache: Path):
    pytest.importorskip("typer", reason="needs typer: it reads the command line")
    from command_line import fagen

    path = tmp_path / "x.json"
    done = fagen(
        "bench", "--head-dim", 64, "--variant", "causal", "--length", 256, "--batch", 2, "--q-heads", 4,
        "--family", "fagen,simt", "--peer", "flash,math", "--launch", "--workers", 1, "--rounds", 2,
        "--json", path,
    )  # fmt: skip
    assert done.code == 0, done
    found = json.loads(path.read_text())
    assert found["device"] == torch.cuda.get_device_name()
    results = found["cells"][0]["results"]
    assert set(results) == {"fagen", "simt", "flash", "math"}
    for name in ("fagen", "simt", "math"):
        result = results[name]
        assert result["reason"] is None, result
        assert 0 < result["replayed_seconds"]["median"] < 1
        assert 0 < result["seconds"]["low"] <= result["seconds"]["median"] <= result["seconds"]["high"]
        assert result["seconds"]["count"] >= 2
        assert result["peak_bytes"] >= 4 * 2 * 4 * 256 * 64 * 2
    assert results["simt"]["max_error"] <= results["simt"]["tolerance"]


def test_a_tuned_plan_is_what_a_later_call_takes(cold_cache: Path):
    where = device()
    given = Given(dims=[(64, 64)], variants=["causal"], lengths=[300], batch=2, q_heads=4)
    known = problems(cells_of("short", given), ["simt"], arch_of(where))
    (tuning,) = tune(known, 3, GpuStopwatch(), Protocol(rounds=2), where)
    assert len(tuning.seconds) > 1, tuning.reasons
    capability, gpu = torch.cuda.get_device_capability(where), torch.cuda.get_device_name(where)
    later = Compiled(tuning.problem)
    assert later.tuned()[gpu].finalist == tuning.winner
    taken = Compiled(tuning.problem, tuning.winner).binary(capability)
    assert later.binary(capability, gpu).key == taken.key
    assert Inputs(tuning.cells[0], where).q.shape == (2, 4, 300, 64)


def test_the_command_tunes_and_says_what_it_keeps(tmp_path: Path, cold_cache: Path):
    pytest.importorskip("typer", reason="needs typer: it reads the command line")
    from command_line import fagen

    path, gpu = tmp_path / "x.json", torch.cuda.get_device_name()
    done = fagen(
        "bench", "--tune", "--head-dim", 64, "--variant", "causal", "--length", 2048, "--batch", 1,
        "--q-heads", 4, "--family", "sm80", "--rounds", 2, "--json", path,
    )  # fmt: skip
    assert done.code == 0, done
    assert re.match(rf"fastest of \d+ plans each on {re.escape(gpu)}, kept for later calls", done.out)
    (found,) = json.loads(path.read_text())
    assert sum(each["seconds"] is not None for each in found["plans"]) > 1
    assert f"  {found['kernel']} on {gpu}: " in fagen("cache").out
    options = ["--mask", "causal", "--head-dim", 64, "--dtype", "bf16", "--family", "sm80"]
    options += ["--arch", arch_of(device()), "--batch", 1, "--q-heads", 4, "--q-len", 2048]
    assert f"Tuned on {gpu}: " in fagen("explain", *options).out


def test_the_time_of_the_host_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overhead, "_LOAD_SCRIPT", "print(1.0)")
    found = {each.call: each.microseconds for each in overhead.measure(arch_of(device()), lambda *told: None)}
    assert {"kernel", "program", "attention", overhead.LOAD} < set(found)
    assert all(0 < each < 1e5 for each in found.values()), found
