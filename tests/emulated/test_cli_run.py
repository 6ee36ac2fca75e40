"""``fagen run`` and ``fagen ladder`` on the emulator: what they report, watch for, and exit with."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fagen as fg
from command_line import fagen, mistake
from fagen.compile import Compiled
from fagen.plan.plan import Problem
from fagen.study import trial
from fagen.study.ladder import attention_ladder, attention_lengths, climb, matmul_ladder, matmul_lengths

pytestmark = pytest.mark.cxx

COMPILE = importlib.import_module("fagen.compile")  # the package has a function of that name
SMALL = ("--device", "emulator", "--q-len", 20, "--head-dim", 8)

PROGRAM = """
import fagen as fg


@fg.program
def mixed(q: fg.Tensor["b h q d"], k: fg.Tensor["b hk kv d"], v: fg.Tensor["b hk kv dv"],
          rope: fg.Tensor["b h q r"], rope_k: fg.Tensor["b hk kv r"],
          doc: fg.Tensor["b position", int], keep: fg.Tensor["q kv", bool], t: fg.Scalar, w: fg.Scalar[int]):
    s = t * (fg.dot(q, k, over="d") + fg.dot(rope, rope_k, over="r"))
    mask = (doc[fg.b, fg.q] == doc[fg.b, fg.kv]) & keep & (fg.q - fg.kv < w)
    s = fg.where(mask, s, -fg.inf)
    return fg.dot(fg.softmax(s, over="kv"), v, over="kv"), fg.logsumexp(s, over="kv")


@fg.program
def summed_over_queries(q: fg.Tensor["b h q d"], k: fg.Tensor["b h kv d"]):
    return fg.sum(fg.relu(fg.dot(q, k, over="d")), over="q")
"""


PROGRAM_WITH_MAXIMUM = """
import fagen as fg


@fg.program
def with_maximum(q: fg.Tensor["b h q d"], k: fg.Tensor["b h kv d"]):
    s = fg.dot(q, k, over="d")
    return fg.logsumexp(fg.where(fg.kv <= fg.q, s, -fg.inf), over="kv"), fg.max(s, over="kv")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "programs.py"
    path.write_text(PROGRAM)
    return path


def test_both_directions_under_a_watch_for_races():
    done = fagen("run", *SMALL, "--mask", "causal & document", "--direction", "both", "--race", "--json")
    assert (done.code, done.err) == (0, "")
    assert set(done.json) == {"forward", "backward"}
    assert [done.json[direction]["ok"] for direction in ("forward", "backward")] == [True, True]
    assert done.json["backward"]["kernels"] > 1
    shown = fagen("run", *SMALL, "--dropout", 0.3, "--direction", "backward", "--schedule", 3)
    assert "agrees with its meaning" in shown.out
    assert fagen("emit", "--direction", "sideways").code != 0


def test_a_maximum_is_found_again_by_the_backward_direction(program: Path):
    """Its gradient goes where the score is the maximum that the forward kernel gave, to the last bit."""
    program.write_text(PROGRAM_WITH_MAXIMUM)
    options = ["--program", f"{program}:with_maximum", "--dtype", "fp32", "--direction", "backward"]
    done = fagen("run", *SMALL, *options, "--json")
    assert done.json["ok"], done.json


def test_the_report():
    options = ["--mask", "causal & document", "--score", "softcap(5)", "--dropout", 0.2, "--dtype", "bf16"]
    done = fagen(
        "run", *SMALL, *options, "--q-heads", 4, "--kv-heads", 2, "--batch", 2, "--seed", 5, "--json"
    )
    told = done.json
    assert (done.code, done.err) == (0, "")
    assert set(told) == {
        "device", "family", "kernels", "max_error", "eager_error", "tolerance", "ok", "reason", "seconds",
        "peak_bytes", "source", "rows", "watched",
    }  # fmt: skip
    assert (told["device"], told["family"], told["ok"], told["rows"]) == ("emulator", "simt", True, 20)
    assert 0 < told["max_error"] <= told["tolerance"]
    assert 0 < told["eager_error"] < told["tolerance"]
    assert told["seconds"] > 0
    q_bytes, kv_bytes = 2 * 2 * 4 * 20 * 8, 2 * 2 * 2 * 20 * 8
    table = 2 * 20 * 4
    assert (
        2 * q_bytes + 2 * kv_bytes + table <= told["peak_bytes"] < 2 * q_bytes + 2 * kv_bytes + table + 4096
    )
    source = Path(told["source"]).read_text()
    assert len(re.findall(r"\b__global__\b", source)) == told["kernels"]


def test_the_same_seed_gives_the_same_run():
    options = ["--mask", "padding", "--dropout", 0.5, "--dtype", "fp32", "--json"]
    one, two, other = (fagen("run", *SMALL, *options, "--seed", seed).json for seed in (1, 1, 2))
    assert one["ok"]
    assert other["ok"]
    assert one["max_error"] == two["max_error"]
    assert one["eager_error"] != other["eager_error"]


def test_what_is_shown_and_saved(tmp_path: Path):
    done = fagen("run", *SMALL, "--mask", "causal", "--dtype", "fp32", "--out", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "1 kernel of family simt on emulator: agrees with its meaning"
    assert [line.split()[0] for line in lines[1:]] == ["error", "eager", "time", "memory", "source", "saved"]
    assert (tmp_path / "out" / "main.cu").is_file()
    ran = Path(lines[5].split(maxsplit=1)[1]).read_text()
    assert ran in [path.read_text() for path in (tmp_path / "out").glob("*.cu")]


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Compile, from now on, an edited text of the kernel that options ask for."""

    def edit(options: Sequence[object], pattern: str, text: str) -> None:
        made = fagen("emit", *options, "--arch", "emulator", "--json").json
        changed, count = re.subn(pattern, text, made["source"])
        assert count == 1
        folder = tmp_path / "override"
        folder.mkdir()
        (folder / f"{made['name']}.cu").write_text(changed)
        monkeypatch.setenv("FAGEN_OVERRIDE", str(folder))
        monkeypatch.setattr(COMPILE, "_compiled", {})  # what was compiled before is forgotten

    return edit


PLAIN = ("--q-len", 20, "--head-dim", 8, "--mask", "causal", "--dtype", "fp32")


def test_a_wrong_kernel_is_told(edited: Callable[..., None]):
    edited(PLAIN, r"(constexpr float SCALE = )[^;]*;", r"\g<1>0.5f;")
    done = fagen("run", *PLAIN, "--device", "emulator", "--json")
    assert done.code == 1
    assert not done.json["ok"]
    assert done.json["max_error"] > done.json["tolerance"]
    assert "constexpr float SCALE = 0.5f;" in Path(done.json["source"]).read_text()
    shown = fagen("run", *PLAIN, "--device", "emulator")
    assert shown.code == 1
    assert "on emulator: IS WRONG: " in shown.out


def test_a_finding_is_told_with_its_line(edited: Callable[..., None]):
    """A kernel that writes past a tensor: the checker's report, and no traceback."""
    edited(PLAIN, r"\brow\.q \* p\.O_q\b", "(row.q + 1) * p.O_q")
    done = fagen("run", *PLAIN, "--sanitize")
    assert (done.code, done.out) == (1, "")
    assert re.match(r"fagen: forward: line \d+: write of 4 bytes .*by thread", done.err), done.err
    assert "Traceback" not in done.err


def test_a_program_with_everything_made_up(program: Path):
    options = ["--program", f"{program}:mixed", "--let", "r=4", "--let", "t=0.25", "--let", "w=7"]
    done = fagen("run", *SMALL, *options, "--v-head-dim", 12, "--kv-len", 23, "--dtype", "fp16", "--json")
    assert done.json["ok"], done.json


def test_what_is_summed_over_queries_is_compared_as_a_whole(program: Path):
    done = fagen("run", *SMALL, "--program", f"{program}:summed_over_queries", "--json")
    assert (done.json["ok"], done.json["rows"]) == (True, 20)


def test_of_many_queries_a_sample_is_compared():
    options = ["--q-len", 5000, "--kv-len", 9, "--head-dim", 4, "--q-heads", 1, "--dtype", "fp32"]
    told = fagen("run", "--device", "emulator", *options, "--mask", "kv <= q", "--json").json
    assert (told["ok"], told["rows"]) == (True, 512)


@pytest.mark.parametrize(
    ("lengths", "rows"), [(("--q-len", 0), 0), (("--kv-len", 0), 20), (("--batch", 0), 20)]
)
def test_nothing_is_a_length_too(lengths: tuple[object, ...], rows: int):
    told = fagen("run", *SMALL, "--mask", "causal", "--dtype", "fp32", *lengths, "--json").json
    assert (told["ok"], told["max_error"], told["rows"]) == (True, 0, rows)


@pytest.mark.parametrize(
    ("watch", "seen"),
    [
        (("--sanitize",), "no access out of bounds was seen"),
        (("--race",), "no data race was seen"),
        (("--schedule", "backward"), None),
        (("--schedule", 11), None),
    ],
)
def test_a_watched_run(watch: tuple[object, ...], seen: str | None):
    done = fagen("run", *SMALL, "--mask", "causal", "--dtype", "fp32", *watch)
    assert "agrees with its meaning" in done.out
    assert re.findall(r"^  watched +(.*)", done.out, re.MULTILINE) == ([seen] if seen else [])


def test_a_kernel_for_another_gpu_runs_here():
    told = fagen("run", *SMALL, "--mask", "causal", "--arch", "H100", "--json").json
    assert told["ok"], told


def test_a_ladder_is_run_and_compared():
    told = fagen("ladder", "--device", "emulator", "--q-len", 24, "--head-dim", 8, "--seed", 1, "--json").json
    steps = climb(attention_ladder(head_dim=8), attention_lengths(24, q_heads=1))
    assert [rung["rung"] for rung in told] == [1, 2, 3, 4, 5]
    assert [rung["moved_bytes"] for rung in told] == [step.moved_bytes for step in steps]
    assert [rung["run"]["kernels"] for rung in told] == [rung["kernels"] for rung in told]
    assert all(rung["run"]["ok"] and rung["run"]["device"] == "emulator" for rung in told)


def test_a_ladder_of_a_product_is_shown():
    done = fagen("ladder", "--device", "emulator", "--matmul", 20)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith(
        "i_len 20, j_len 20, k_len 20 in fp32; predicted for A100, measured on emulator"
    )
    columns = ["rung", "kernels", "bytes moved", "extra memory", "predicted", "measured", "error"]
    assert re.split(r"\s{2,}", lines[2].strip()) == columns
    shown = [re.split(r"\s{2,}", line.strip()) for line in lines[4:7]]
    steps = climb(matmul_ladder(20), matmul_lengths(20))
    assert [row[0] for row in shown] == ["1", "2", "3"]
    assert all(len(row) == len(columns) for row in shown)
    assert "".join(line.strip() for line in lines[7:]).startswith(f"1. {steps[0].rung.title}.")


def test_a_rung_that_does_not_fit_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    def only_the_last(kernel: Compiled, values: Sequence[object], **options: Any) -> trial.Trial:
        if len(kernel.plan.kernels) > 1:
            raise trial.OutOfMemory("no")
        return real(kernel, values, **options)

    real = trial.try_kernel
    monkeypatch.setattr(trial, "try_kernel", only_the_last)
    done = fagen("ladder", "--device", "emulator", "--q-len", 24, "--head-dim", 8)
    shown = [re.split(r"\s{2,}", line.strip()) for line in done.out.splitlines()[4:9]]
    assert [row[5] for row in shown[:4]] == ["no room"] * 4
    assert shown[4][0] == "5"
    assert shown[4][5] != "no room"
    assert done.code == 0


def test_the_reference_is_no_kernel_to_run():
    assert mistake("run", *SMALL, "--family", "reference").startswith("family 'reference' does not run on ")


def test_the_kernel_is_that_of_a_call(monkeypatch: pytest.MonkeyPatch):
    """What `run` tries is what a call on such tensors runs."""
    known: dict[Problem, Compiled] = {}
    monkeypatch.setattr(COMPILE, "_compiled", known)
    assert fagen("run", *SMALL, "--mask", "causal & sliding_window(3)", "--dtype", "fp32").code == 0
    tried = set(known)
    q = torch.zeros(1, 2, 20, 8)
    fg.attention(q, q, q, mask=fg.causal() & fg.sliding_window(3))
    assert set(known) == tried


def test_run_explains_what_it_runs():
    done = fagen("run", *SMALL, "--mask", "causal", "--dtype", "fp32", "--explain")
    assert done.out.startswith("attention, forward, fp32: one kernel of family simt for emulator")
    assert "at batch 1, kv_heads 2, group 1, q_len 20, kv_len 20, head_dim 8" in done.out
    assert "agrees with its meaning" in done.out
    assert mistake("run", *SMALL, "--explain", "--json").startswith("--explain is for people; ")
