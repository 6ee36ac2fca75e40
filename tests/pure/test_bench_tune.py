"""What measurements say of plans: how a winner is found, kept, used by later calls, shown and forgotten."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import fagen as fg
from command_line import fagen
from fagen.bench import tune
from fagen.bench.cells import Given, cells_of
from fagen.bench.model import problem_for
from fagen.compile import Compiled
from fagen.run import tuned as kept
from fagen.run.build import Built, Resources
from fagen.run.toolchain import Target
from fagen.run.tuned import Tuned, every, forget, recall, remember

compiling = sys.modules["fagen.compile"]  # `fagen.compile` is the function

CELLS = cells_of("short", Given(dims=[(64, 64)], variants=["causal"]))
GPU = "NVIDIA A100-SXM4-80GB"


def problem(family: str | None = "sm80") -> Any:
    return problem_for(CELLS[-1], family, "A100")[0]


def tuning(seconds: dict[int | None, list[float]]) -> tune.Tuning:
    names: dict[int | None, str] = {each: f"tiles {each}" for each in seconds}
    return tune.Tuning(problem(), CELLS[: len(seconds[None])], names, seconds)


def test_the_winner_is_clearly_faster_over_all_its_cells():
    found = tuning({None: [2.0, 8.0], 1: [1.0, 8.0], 2: [4.0, 2.0], 3: [1.0, 16.0]})
    assert [found.gain(each) for each in (None, 1, 2, 3)] == pytest.approx([1.0, 2**0.5, 2**0.5, 1.0])
    assert found.winner in (1, 2)
    assert tuning({None: [1.0], 1: [0.995]}).winner is None, "less than a hundredth is noise"
    assert tuning({None: [1.0], 1: [0.9], 2: [0.8]}).winner == 2
    assert tuning({None: [1.0]}).winner is None


def test_what_is_kept_and_shown_of_it():
    found = tuning({None: [2.0], 1: [1.0]})
    found.reasons[2] = "spills"
    assert found.tuned(GPU) == Tuned(Compiled(problem()).name, GPU, 1, "tiles 1", 2.0, 2)
    lost = tune.Tuning(problem(), CELLS, reasons={None: "does not build"})
    assert tune.rows([found, lost]) == [
        {"d": "64", "mask": "causal", "S": "1,024", "family": "sm80", "measured": "2", "taken": "tiles 1",
         "time": "1 s", "gain": "2.000"},
        {"d": "64", "mask": "causal", "S": "1,024, 8,192", "family": "sm80", "measured": "0",
         "taken": "does not build", "time": "", "gain": ""},
    ]  # fmt: skip
    first, second = json.loads(json.dumps(tune.to_json([found, lost])))
    assert [(each["rank"], each["seconds"], each["reason"]) for each in first["plans"]] == [
        (None, [2.0], None), (1, [1.0], None), (2, None, "spills"),
    ]  # fmt: skip
    assert (first["taken"], first["gain"], second["taken"], second["gain"]) == (1, 2.0, None, None)


def test_cells_that_share_a_plan_are_tuned_together():
    long = cells_of("short", Given(variants=["full"], lengths=[4096, 8192]))
    found = tune.problems(long, ["sm80", None], "A100")
    assert [(each.family, len(cells)) for each, cells in found.items()] == [("sm80", 2), (None, 2)]


def test_each_gpu_has_a_result_of_its_own(cold_cache: Path, monkeypatch: pytest.MonkeyPatch):
    parts, one = {"problem": 1}, Tuned("k", "b", 2, "tiles", 1.5, 4)
    other = Tuned("k", "a", None, "tiles", 1.0, 4)
    assert (recall(parts), every()) == ({}, [])
    remember(parts, one)
    remember(parts, other)
    remember({"problem": 2}, one)
    assert recall(parts) == {"a": other, "b": one}
    assert every() == [other, one, one]
    forget(parts, "b")
    forget(parts, "nobody's")
    assert recall(parts) == {"a": other}
    monkeypatch.setattr(kept, "package_digest", lambda: "another version")
    assert every() == []


def fake_build(text: str, *, name: str, arch: Any) -> Built:
    resources = Resources("forward", 100, 0, 0, 0, 0, 0)
    return Built(text, Target("sm_80"), text.encode(), {"forward": resources}, (), 0.1, True)


def test_a_later_call_takes_what_measured_best_on_its_gpu(cold_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiling, "build", fake_build)
    monkeypatch.setattr(compiling, "built_as", lambda key: None)
    usual, other = Compiled(problem()), Compiled(problem(), 1)
    assert usual.source != other.source
    text = {name: each.binary("sm_80").image.decode() for name, each in (("usual", usual), ("other", other))}
    assert text == {"usual": usual.source, "other": other.source}
    tiles = tune.plan_name(other.plan)
    usual.tune(Tuned(usual.name, GPU, 1, tiles, 1.07, 3))
    assert usual.binary("sm_80", GPU).image.decode() == text["other"]
    assert (usual.source, usual.plan.kernels) == (text["other"], other.plan.kernels)
    later = Compiled(problem())
    assert later.source == text["usual"], "text does not depend on the cache"
    assert later.binary("sm_80", "another GPU").image.decode() == text["usual"]
    assert later.binary("sm_80", GPU).image.decode() == text["other"]
    later.binary("sm_80", "another GPU")
    assert later.source == text["usual"]
    later.untune(GPU)
    assert later.binary("sm_80", GPU).image.decode() == text["usual"]
    assert later.source == text["usual"]
    later.tune(Tuned(later.name, GPU, None, "", 1.0, 3))
    assert Compiled(problem()).binary("sm_80", GPU).image.decode() == text["usual"]


def test_a_plan_the_model_does_not_have_is_no_plan(cold_cache: Path):
    with pytest.raises(IndexError, match="has 0 candidates"):
        Compiled(problem(), 10_000).candidate(0)


def test_explain_and_cache_tell_of_it_and_clear_forgets(cold_cache: Path):
    arguments = [
        "--mask",
        "causal",
        "--head-dim",
        64,
        "--dtype",
        "bf16",
        "--family",
        "sm80",
        "--arch",
        "A100",
    ]
    lengths = ["--batch", 2, "--q-heads", 32, "--q-len", 8192]
    explained = fagen("explain", *arguments, *lengths).out
    assert "Tuned" not in explained
    kernel = Compiled(problem())
    kernel.tune(Tuned(kernel.name, GPU, 1, "64 x 64 x 64", 1.07, 3))
    told = f"Tuned on {GPU}: of 3 plans measured there 64 x 64 x 64 is taken, 1.07 times as fast as the"
    assert told in fagen("explain", *arguments, *lengths).out
    assert fagen("explain", *arguments, *lengths).out.replace("\n", " ").count("model's best") == 1
    listed = f"  {kernel.name} on {GPU}: 64 x 64 x 64, 1.07 times, of 3 measured\n"
    assert fagen("cache").out.endswith(listed)
    assert fagen("cache", "--json").json["tuned"][0]["gpu"] == GPU
    kernel.tune(Tuned(kernel.name, GPU, None, "64 x 64 x 64", 1.0, 3))
    assert "the model's best is the fastest, and is taken" in fagen("explain", *arguments, *lengths).out
    assert "the model's best, of 3 measured" in fagen("cache", "--clear").out
    assert kernel.tuned() == {}
    assert "Tuned" not in fg.compile(
        mask=fg.causal(), head_dim=64, dtype="bf16", arch="A100", family="sm80"
    ).explain(batch=2)
