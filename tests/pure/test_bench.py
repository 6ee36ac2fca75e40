"""``fagen bench`` without a GPU: grids, formulas, the order of timings, statistics, tables and pictures."""

from __future__ import annotations

import itertools
import json
import math
import signal
import subprocess
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from command_line import fagen, mistake
from fagen.bench import contenders, length, overhead, plot, warm
from fagen.bench.cells import GRIDS, Cell, Given, cells_of
from fagen.bench.check import Expected, sampled_rows
from fagen.bench.contenders import NO_ROOM, PEERS, Contender, Inputs, Ready, directed, told
from fagen.bench.lineup import contender_of, own, peers
from fagen.bench.measure import Measured, Protocol, Result, Timing, alternate, burst, measure, measure_cell
from fagen.bench.model import predicted_seconds, problem_for
from fagen.bench.report import (
    Report,
    best_peer,
    geometric_mean,
    markdown,
    notes,
    ratio,
    rows,
    to_json,
)
from fagen.bench.variants import VARIANTS, document_lengths
from fagen.errors import UsageError
from fagen.ir.reference import Comparison, evaluate

CPU = torch.device("cpu")
QUICK = Protocol(rounds=3, pause_seconds=0.5, burst_seconds=1.0, most_calls=4)


def cell(variant: str = "full", n: int = 40, **given: Any) -> Cell:
    usual = {"head_dim": 8, "v_head_dim": 8, "batch": 2, "q_heads": 2, "kv_heads": 2, "q_len": n, "kv_len": n}
    return Cell(variant=variant, **{**usual, **given})


class FakeWatch:
    """Takes for each call what ``seconds`` says, and writes down what it is asked."""

    def __init__(self, seconds: Callable[[object], float] = lambda result: 0.25) -> None:
        self.seconds = seconds
        self.log: list[object] = []

    def pause(self, seconds: float) -> None:
        self.log.append(seconds)

    def times(self, call: Callable[[], object], count: int) -> list[float]:
        results = [call() for _ in range(count)]
        self.log.append((results[0] if isinstance(results[0], str) else "call", count))
        return [self.seconds(result) for result in results]

    def replayed(self, call: Callable[[], object]) -> Callable[[], object]:
        return lambda: ("replayed", call())

    def added_bytes(self, call: Callable[[], object]) -> int:
        call()
        return 1000


# -------------------------------------------------------------------------------------------------- grids


def test_a_grid_is_every_dim_with_every_variant_at_every_length():
    cells = cells_of("lengths", Given())
    assert len(cells) == len(set(cells)) == 3 * 2 * 6
    first, last = cells[0], cells[-1]
    assert (first.dims, first.variant, first.q_len, first.batch, first.q_heads) == ("64", "full", 512, 32, 32)
    assert (last.dims, last.variant, last.q_len, last.batch, last.q_heads) == ("256", "causal", 16384, 1, 8)
    assert {each.batch * each.q_len for each in cells} == {16384}


def test_other_dims_have_heads_of_their_own():
    heads = {each.dims: each.q_heads for each in cells_of("dims", Given())}
    assert heads == {"72": 28, "80": 26, "96": 21, "112": 18, "160": 13, "192": 11, "192/128": 11}


def test_what_is_given_replaces_what_the_grid_has():
    given = Given(dims=[(32, 48)], variants=["causal"], lengths=[70], batch=3, q_heads=6, kv_heads=2,
                  dtype="fp16", direction="backward")  # fmt: skip
    assert cells_of("short", given) == (
        Cell(variant="causal", head_dim=32, v_head_dim=48, batch=3, q_heads=6, kv_heads=2, q_len=70,
             kv_len=70, dtype="fp16", direction="backward"),
    )  # fmt: skip
    long = cells_of("short", Given(lengths=[1 << 20]))[0]
    assert (long.batch, long.length) == (1, "1,048,576")
    (decode,) = cells_of("decode", Given(lengths=[4096], batch=2))
    assert (decode.length, decode.batch, decode.q_heads, decode.kv_heads) == ("1 x 4,096", 2, 32, 8)
    assert [each.batch for each in cells_of("decode", Given(lengths=[4096]))] == [1, 4, 16, 64]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--grid", "all"], "--grid is 'all'; it is short, lengths, dims, variants, decode"),
        (["--variant", "causal,no"], "--variant: 'no' is not known; there are full, causal, window"),
        (["--head-dim", "64/x"], "--head-dim: 'x' is no number; write whole numbers, such as 64,128"),
        (["--length", "0"], "--length: '0' is no number"),
        (["--dtype", "fp8"], "--dtype is 'fp8'; it is bf16, fp16, fp32"),
        (["--direction", "up"], "--direction is 'up'; it is forward or backward"),
        (["--grid", "decode", "--variant", "causal"], "causal is asked for with 1 queries and 1,024 keys"),
        (["--q-heads", "6", "--kv-heads", "4"], "--q-heads is 6 and --kv-heads is 4"),
        (["--family", "sm70"], "--family: 'sm70' is not known; there are fagen, simt, sm80, sm90"),
        (["--peer", "flash,me"], "--peer: 'me' is not known; there are flash, cudnn"),
        (["--figure", "width"], "--figure is 'width'; it is length or overhead"),
        (["--figure", "length", "--peer", "flash"], "--figure length has contenders of its own"),
        (["--figure", "overhead", "--model-only"], "no model predicts --figure overhead"),
        (
            ["--model-only", "--peer", "flash"],
            "--model-only prints what is predicted of fagen alone; leave --peer",
        ),
        (["--model-only", "--json", "x.json"], "--model-only prints what is predicted of fagen alone; leave"),
        (["--tune", "--plot", "x.png"], "--tune measures fagen's plans alone"),
        (["--tune", "--direction", "backward"], "--tune measures forward plans, and --direction is backward"),
        (["--plot", "x.gif"], "--plot: x.gif is no picture's name; it ends with .png or .svg"),
        (["--json", "nowhere/x.json"], "--json: nowhere is no folder"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str):
    assert mistake("bench", *arguments).startswith(sentence)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("arguments", "predicted"),
    [([], True), (["--tune"], False), (["--figure", "length"], True), (["--figure", "overhead"], False)],
)
def test_without_a_gpu_it_says_so(
    arguments: list[str], predicted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    told = mistake("bench", *arguments)
    model = "--model-only says what the cost model predicts; " if predicted else ""
    assert told.endswith(f" needs a GPU, and torch sees none; {model}fagen doctor says what is missing")
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------- formulas


def test_flops_and_bytes_by_hand():
    full = cell(n=100, head_dim=64, v_head_dim=32, batch=2, q_heads=6, kv_heads=3)
    assert full.pairs == 2 * 6 * 100 * 100
    assert full.flops == 2 * 120_000 * (64 + 32)
    causal = replace(full, variant="causal")
    assert causal.flops == full.flops / 2
    assert replace(causal, direction="backward").flops == 2.5 * causal.flops
    q, o, k, v = 1200 * 64, 1200 * 32, 600 * 64, 600 * 32
    assert full.moved_bytes == 2 * (q + o + k + v)
    assert replace(full, dtype="fp32").moved_bytes == 4 * (q + o + k + v)
    backward = replace(full, direction="backward")
    assert backward.moved_bytes == 2 * (2 * (q + k + v) + 2 * o) + 4 * 1200


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, prefixes and documents that fit short sequences."""
    for name, value in {"WINDOW": 7, "PREFIX": 11, "DOCUMENTS": 5}.items():
        monkeypatch.setattr(f"fagen.bench.variants.{name}", value)
    document_lengths.cache_clear()


@pytest.fixture
def short_variants(monkeypatch: pytest.MonkeyPatch):
    small(monkeypatch)
    yield
    document_lengths.cache_clear()


def allowed(inputs: Inputs) -> Tensor:
    """Of all pairs those that a peer is told of, (b, h, q, kv)."""
    one = inputs.cell
    mask = inputs.made.flex_mask
    axes = (one.batch, one.q_heads, one.q_len, one.kv_len)
    b, h, q, kv = torch.meshgrid(*(torch.arange(extent) for extent in axes), indexing="ij")
    return torch.ones(axes, dtype=torch.bool) if mask is None else mask(b, h, q, kv)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.usefixtures("short_variants")
def test_peers_are_told_of_what_fagen_computes(variant: str):
    """Attention with the functions that FlexAttention gets is the reference's value of fagen's program."""
    one = cell(variant, 40, dtype="fp32")
    inputs = Inputs(one, CPU)
    q, k, v = (tensor.double() for tensor in inputs.tensors)
    scores = q @ k.mT / math.sqrt(one.head_dim)
    if inputs.made.flex_score is not None:
        axes = (torch.arange(extent) for extent in scores.shape)
        scores = inputs.made.flex_score(scores, *torch.meshgrid(*axes, indexing="ij"))
    weights = scores.masked_fill(~allowed(inputs), -math.inf).softmax(-1)
    exact = evaluate(inputs.traced.graph, (*inputs.tensors, *inputs.traced.captured))[0]
    torch.testing.assert_close(weights @ v, exact)
    pairs = float(allowed(inputs).sum())
    assert one.pairs == (one.q_heads * 2 * 40 * 40 / 2 if variant[-6:] == "causal" and "doc" not in variant
                         else pairs)  # fmt: skip


def test_documents_fill_each_sequence_and_stay_the_same():
    lengths = document_lengths(3, 1000)
    assert [sum(row) for row in lengths] == [1000] * 3
    assert all(len(row) == 12 and min(row) > 0 for row in lengths)
    assert len(set(lengths)) == 3
    assert document_lengths.__wrapped__(3, 1000) == lengths
    assert document_lengths(1, 1) == ((1,),)


# ------------------------------------------------------------------------------------------------- timing


def test_contenders_take_turns_in_another_order_each_round_and_pause_alike():
    watch = FakeWatch({"a": 0.5, "b": 0.1}.__getitem__)
    ready = {name: Ready(lambda name=name: name) for name in ("a", "b")}
    times = alternate(ready, watch, QUICK)
    estimates, rounds = watch.log[:2], watch.log[2:]
    assert estimates == [("a", 2), ("b", 2)]
    assert rounds == [
        0.5, ("a", 2), 0.5, ("b", 4),
        0.5, ("b", 4), 0.5, ("a", 2),
        0.5, ("a", 2), 0.5, ("b", 4),
    ]  # fmt: skip
    assert times == {"a": [0.5] * 6, "b": [0.1] * 12}
    assert alternate({}, watch, QUICK) == {}


def test_bursts_are_short_and_have_two_calls_at_least():
    assert [burst(seconds, Protocol()) for seconds in (1.0, 0.004, 0.0011, 1e-6, 0.0)] == [2, 2, 9, 10, 10]


def test_statistics():
    timing = Timing.of([5.0, 1.0, 2.0, 100.0, 3.0])
    assert (timing.low, timing.median, timing.high, timing.count) == (2.0, 3.0, 5.0, 5)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)
    assert geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
    assert math.isnan(geometric_mean([]))


# ----------------------------------------------------------------------------------------------- contenders


def plain(name: str, change: Callable[[Tensor], Tensor] = lambda out: out, is_peer: bool = True) -> Contender:
    """Eager attention, changed."""

    def prepare(one: Cell, inputs: Inputs) -> Ready:
        q, k, v = inputs.tensors

        def call() -> Tensor:
            scores = (q.float() @ k.float().mT) / math.sqrt(one.head_dim)
            return change((scores.softmax(-1) @ v.float()).to(q.dtype))

        return Ready(call)

    return Contender(name, "eager", prepare, is_peer=is_peer)


def failing(name: str, error: Exception) -> Contender:
    def prepare(one: Cell, inputs: Inputs) -> Ready:
        raise error

    return Contender(name, "fails", prepare)


def test_every_result_is_compared_before_it_is_timed():
    never = Contender(
        "never", "", lambda one, inputs: pytest.fail("prepared"), lambda one: "takes no such mask"
    )
    found = measure_cell(
        cell(),
        [
            plain("right", is_peer=False),
            plain("wrong", lambda out: out * 1.1, is_peer=False),
            plain("rough", lambda out: out * (1 + 2**-5)),
            plain("other", lambda out: -out),
            plain("lost", lambda out: out * math.nan),
            failing("full", torch.cuda.OutOfMemoryError("much text")),
            failing("odd", RuntimeError("first line\nsecond " + "x" * 500)),
            never,
        ],
        FakeWatch(),
        replace(QUICK, replay=True),
        CPU,
    ).results
    assert [name for name, each in found.items() if each.timing] == ["right", "rough"]
    assert [name for name, each in found.items() if each.is_wrong] == ["wrong", "other", "lost"]
    assert found["right"].timing == Timing(0.25, 0.25, 0.25, 12) == found["right"].replayed
    assert found["right"].max_error <= found["right"].tolerance < found["rough"].max_error
    assert found["right"].peak_bytes == 1000 + 3 * 2 * 2 * 40 * 8 * 2
    assert found["wrong"].reason.startswith("its error is ")
    assert "nan" in found["lost"].reason
    assert found["full"].reason == NO_ROOM
    assert found["odd"].reason.startswith("first line second xxx")
    assert len(found["odd"].reason) == 160
    assert found["never"].reason == "takes no such mask"


def test_gradients_are_compared_too():
    one = cell(direction="backward", n=90)
    right = plain("right", is_peer=False)
    wrong = plain("wrong", lambda out: out + 0.1 * (out - out.detach()), is_peer=False)
    found = measure_cell(one, [right, wrong], FakeWatch(), QUICK, CPU).results
    assert found["right"].timing is not None, found["right"]
    assert (found["wrong"].is_wrong, found["wrong"].timing) == (True, None)
    inputs = Inputs(one, CPU)
    gradients = directed(right.prepare(one, inputs), inputs).call()
    assert [each.shape for each in gradients] == [each.shape for each in inputs.tensors]


def test_sampled_rows_are_the_edges_and_some_between():
    assert sampled_rows(50) == list(range(50))
    rows_ = sampled_rows(10_000)
    assert len(set(rows_)) == 64
    assert rows_ == sorted(rows_)
    assert rows_[:16] == list(range(16))
    assert rows_[-16:] == list(range(9984, 10_000))


def test_an_error_in_one_row_is_seen():
    inputs = Inputs(cell(n=300), CPU)
    expected, right = Expected(inputs), plain("right").prepare(inputs.cell, inputs)

    def off() -> Tensor:
        out = right.call().clone()
        out[1, 0, -1, 3] += 0.5
        return out

    assert expected.compare(right).ok
    assert not expected.compare(Ready(off)).ok


def test_sdpa_of_this_torch_is_measured_and_what_it_cannot_do_is_told():
    one = cell("causal", 64, head_dim=16, v_head_dim=16)
    found = measure_cell(one, peers(["flash", "math", "fa3"]), FakeWatch(), QUICK, CPU).results
    assert found["math"].timing is not None, found["math"]
    assert found["fa3"].reason == "flash-attn 3 is not installed"
    for peer in PEERS[:4]:
        assert peer.refusal(replace(one, variant="window")).startswith("has no scores and no masks")
        assert peer.refusal(one) == ""
    large = replace(one, q_len=65_536, kv_len=65_536)
    assert "would store all scores" in contender_of("math").refusal(large)
    assert contenders.SEPARATE.refusal(large) == ""


def test_flash_attn_is_given_what_it_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contenders, "_importable", lambda module: True)
    fa4 = contender_of("fa4")
    assert [name for name in VARIANTS if not fa4.refusal(cell(name))] == [
        "full", "causal", "window", "softcap_causal",
    ]  # fmt: skip
    assert fa4.refusal(cell(dtype="fp32")) == "takes 16-bit dtypes"
    given = {}

    class Module:
        @staticmethod
        def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
            given.update(options)
            return torch.nn.functional.scaled_dot_product_attention(
                *(each.transpose(1, 2) for each in (q, k, v)), is_causal=options["causal"]
            ).transpose(1, 2), None

    monkeypatch.setattr(contenders.importlib, "import_module", lambda name: Module)
    inputs = Inputs(cell("causal"), CPU)
    assert Expected(inputs).compare(fa4.prepare(inputs.cell, inputs)).ok
    assert given == {"causal": True}
    fa4.prepare(cell("window"), Inputs(cell("window"), CPU)).call()
    assert given == {"causal": True, "window_size": (1024, 0)}


def test_reasons_are_one_line():
    assert told(UsageError("what", works="do")) == "what; do"
    assert told(RuntimeError("")) == "RuntimeError"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warnings.warn("an old name", DeprecationWarning, stacklevel=1)
        warnings.warn("no kernel for this head dim", UserWarning, stacklevel=1)
    assert told(RuntimeError("no kernel"), warned) == "no kernel for this head dim"
    assert told(RuntimeError("no kernel"), warned[:1]) == "no kernel"


def test_whoever_compiles_is_found_by_name_in_another_process():
    for name in ("fagen", "sm90", "flex", "torch, separate", length.MATERIALISED, length.FUSED):
        assert contender_of(name).name == name
    assert [each.name for each in own([])] == ["fagen"]
    assert own(["sm80", "simt"])[0].compiles
    assert [each.name for each in peers([])][:3] == ["flash", "cudnn", "efficient"]


def test_work_is_done_in_other_processes_and_failures_there_are_left_for_later():
    seen: list[tuple[str, int, int]] = []
    with ThreadPoolExecutor(2) as pool:
        warm.warm([4, 0, 2], 2, lambda *told_: seen.append(told_), lambda job: [1 / job], pool)
    assert seen == [("compile", done, 3) for done in (1, 2, 3)]
    warm.warm([1], 8, lambda *told_: pytest.fail("one job needs no process"), print)
    assert (warm.workers(3), 1 <= warm.workers(None) <= 8) == (3, True)


# ------------------------------------------------------------------------------------------------- reports


def timed(seconds: float, **given: Any) -> Result:
    return Result(Timing(seconds, seconds * 0.9, seconds * 1.1, 50), max_error=0.01, tolerance=0.02, **given)


def report(cells: Sequence[Cell], results: Sequence[dict[str, Result]]) -> Report:
    return Report(
        device="a GPU",
        versions={"torch": "9"},
        protocol=QUICK,
        own=("sm80", "sm90"),
        peers=("flash", "flex", "fa4"),
        about=dict.fromkeys(("sm80", "sm90", "flash", "flex", "fa4"), "someone"),
        cells=[Measured(one, found) for one, found in zip(cells, results, strict=True)],
    )


ABSENT = Result(reason="flash-attn 4 is not installed")
FULL = cell("full", 8192, head_dim=128, v_head_dim=128, batch=2, q_heads=16)
CASES = (
    {"sm80": timed(4e-3), "sm90": timed(2e-3), "flash": timed(4e-3), "flex": timed(3e-3), "fa4": ABSENT},
    {
        "sm80": timed(2e-3, replayed=Timing(1e-3, 1e-3, 1e-3, 5)),
        "sm90": Result(reason="its error is 1", is_wrong=True, max_error=1.0, tolerance=0.1),
        "flash": timed(1e-3),
        "flex": Result(reason=NO_ROOM),
        "fa4": ABSENT,
    },
)
TWO = report([FULL, replace(FULL, variant="causal")], CASES)


def test_ratios_are_to_the_fastest_peer():
    first, second = TWO.cells
    assert (best_peer(TWO, first), best_peer(TWO, second)) == ("flex", "flash")
    assert ratio(TWO, first, "sm90") == pytest.approx(1.5)
    assert ratio(TWO, second, "sm80") == pytest.approx(0.5)
    assert ratio(TWO, second, "sm90") is None
    assert not TWO.ok
    assert report([FULL], CASES[:1]).ok
    alone = replace(TWO, peers=())
    assert (best_peer(alone, first), ratio(alone, first, "sm90")) == (None, None)


def test_the_table():
    table = rows(TWO)
    flops = 4 * 2 * 16 * 8192 * 8192 * 128
    assert table[0] == {
        "d": "128", "mask": "full", "S": "8,192", "B x H": "2 x 16", "sm80": f"{flops / 4e-3 / 1e12:.0f}",
        "sm90": f"{flops / 2e-3 / 1e12:.0f}", "flash": f"{flops / 4e-3 / 1e12:.0f}",
        "flex": f"{flops / 3e-3 / 1e12:.0f}", "best peer": "flex", "sm80 /peer": "0.75", "sm90 /peer": "1.50",
    }  # fmt: skip
    assert (table[1]["sm90"], table[1]["flex"], table[1]["sm90 /peer"]) == ("WRONG", "-", "")
    assert table[1]["sm80"] == f"{flops / 2 / 2e-3 / 1e12:.0f} ({flops / 2 / 1e-3 / 1e12:.0f})"
    lines = markdown(TWO).splitlines()
    assert lines[0].startswith("| d | mask | S | B x H | sm80 | sm90 | flash | flex | best peer |")
    assert (len(lines), {line.count("|") for line in lines}) == (4, {12})


def test_one_query_is_counted_in_bytes():
    one = cell("full", 4096, q_len=1, head_dim=128, v_head_dim=128)
    (row,) = rows(report([one], [{**CASES[0], "sm90": timed(1e-6)}]))
    assert row["sm90"] == f"{one.moved_bytes / 1e-6 / 1e12:.3g}"


def test_what_is_missing_is_listed_with_its_reason():
    assert notes(TWO) == [
        "sm80: 0.61 times as fast as the best peer (geometric mean), at least as fast in 0 of 2 cells; 0.71 "
        "times flash, 0.75 times flex",
        "sm90: 1.50 times as fast as the best peer (geometric mean), at least as fast in 1 of 1 cells; 2.00 "
        "times flash, 1.50 times flex",
        "fa4: flash-attn 4 is not installed",
        "sm90: its error is 1 (causal d=128 S=8,192)",
        "flex: out of memory (causal d=128 S=8,192)",
    ]


def test_json_has_every_figure():
    found = json.loads(json.dumps(to_json(TWO), allow_nan=False))
    assert found["protocol"] == asdict(QUICK)
    assert found["variants"] == {"full": "no mask", "causal": "kv <= q"}
    first, second = found["cells"]
    assert (first["q_len"], first["flops"], first["best_peer"]) == (8192, FULL.flops, "flex")
    assert first["results"]["sm90"]["seconds"] == pytest.approx(
        {"median": 2e-3, "low": 1.8e-3, "high": 2.2e-3, "count": 50}
    )
    assert first["results"]["sm90"]["ratio"] == pytest.approx(1.5)
    assert first["results"]["sm90"]["flops_per_second"] == FULL.flops / 2e-3
    assert second["results"]["sm80"]["replayed_seconds"]["median"] == 1e-3
    assert second["results"]["sm90"] == {
        "reason": "its error is 1", "wrong": True, "max_error": 1.0, "tolerance": 0.1,
    }  # fmt: skip
    assert second["results"]["fa4"]["max_error"] is None


def test_a_grid_is_measured_cell_by_cell():
    seen: list[tuple[str, int, int]] = []
    cells = [cell(n=n, dtype="fp32") for n in (20, 30)]
    found = list(measure(cells, [plain("a")], FakeWatch(), QUICK, CPU, lambda *each: seen.append(each)))
    assert [each.cell for each in found] == cells
    assert [part[1:] for part in seen] == [(0, 2), (1, 2), (2, 2)]


# -------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_rates_are_drawn(kind: str, tmp_path: Path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: it draws")
    curve = report(
        [replace(FULL, variant=name, q_len=n, kv_len=n) for name in ("full", "causal") for n in (512, 1024)],
        [*CASES, *CASES],
    )
    for name, drawn in (("curve", curve), ("bars", TWO)):
        files = [tmp_path / folder / f"{name}.{kind}" for folder in "ab"]
        for path in files:
            path.parent.mkdir(exist_ok=True)
            plot.draw_report(drawn, path)
        assert files[0].read_bytes() == files[1].read_bytes()
        assert files[0].read_bytes().startswith(b"\x89PNG" if kind == "png" else b"<?xml")


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    told_ = mistake("bench", "--plot", tmp_path / "x.svg")
    assert told_.startswith("drawing needs matplotlib, which is not installed; pip install '.[bench]'")


def test_where_there_is_no_memory_is_marked(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: it draws")
    cells = [replace(FULL, q_len=n, kv_len=n) for n in (512, 1024, 2048)]
    results = [{"a": timed(n * 1e-6, peak_bytes=n), "b": timed(n * 1e-5, peak_bytes=9 * n)} for n in (1, 2)]
    results.append({"a": timed(4e-6, peak_bytes=4), "b": Result(reason=NO_ROOM)})
    drawn = replace(report(cells, results), own=("a",), peers=("b",))
    plot.draw_lengths(drawn, tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert text.count(f"<!-- {NO_ROOM} -->") == 2
    assert [row["b"] for row in length.rows(drawn)] == ["10 us", "20 us", NO_ROOM]


# --------------------------------------------------------------------------------------------- by the model


def test_the_model_is_shown_without_a_gpu():
    done = fagen("bench", "--model-only", "--family", "simt,sm80", "--arch", "A100", "--length", "512",
                 "--head-dim", "64,300/64")  # fmt: skip
    assert done.code == 0, done.err
    assert "predicted for A100, nothing is run" in done.out
    shown = [line.split() for line in done.out.splitlines() if " causal " in line or " full " in line]
    assert [line[:3] for line in shown] == [
        [dims, mask, "512"] for dims in ("64", "300/64") for mask in ("full", "causal")
    ]


def test_the_model_plans_the_direction_that_is_asked_for():
    forward, backward = (cell("causal", 4096, head_dim=64, v_head_dim=64, direction=each)
                         for each in ("forward", "backward"))  # fmt: skip
    assert problem_for(backward, "simt", "A100")[0].graph.direction == "backward"
    seconds = [predicted_seconds(each, "simt", "A100") for each in (forward, backward)]
    assert 2 * seconds[0] < seconds[1] < 6 * seconds[0]
    told_ = predicted_seconds(replace(forward, dtype="fp32"), "sm90", "H100")
    assert isinstance(told_, str)
    assert "16-bit" in told_


def test_the_figure_of_the_model(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: it draws")
    files = {"--json": tmp_path / "x.json", "--plot": tmp_path / "x.svg"}
    done = fagen("bench", "--figure", "length", "--model-only", *itertools.chain(*files.items()))
    assert done.code == 0, done.err
    found = json.loads(files["--json"].read_text())["cells"]
    assert [each["kv_len"] for each in found] == [512 << i for i in range(8)]
    memory = [[each["results"][name]["peak_bytes"] for each in found] for name in _PLANS]
    scores = 16 * 65_536**2 * 4
    assert memory[0][-1] == pytest.approx(scores, rel=0.02)
    assert memory[1][-1] == 4 * 65_536 * 16 * 64 * 2
    assert "predicted for H100, nothing was run" in done.out


_PLANS = (length.MATERIALISED, length.FUSED)


# ----------------------------------------------------------------------------------------------- overhead


def test_the_time_of_a_call_is_a_median_over_rounds():
    ticks = itertools.count()
    assert overhead.microseconds(lambda: None, lambda: None, lambda: next(ticks) * 0.005) == pytest.approx(10)
    late = overhead.Overhead("kernel", 31.0, 30.0)
    assert [late.ok, overhead.Overhead("x", 30.0, 30.0).ok, overhead.Overhead("y", 9.0).ok] == [
        False,
        True,
        True,
    ]
    assert overhead.line(late) == f"{'kernel':<32}      31.0  at most 30  LATE"
    assert overhead.line(overhead.Overhead("y", 1234.56)) == f"{'y':<32}   1,234.6"


def test_kernels_are_compiled_before_a_call_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    log, filled = [], tmp_path / "filled"
    asked = {"kernel": lambda: log.append("kernel"), "other": lambda: log.append("other")}
    script = f"import sys\nprint(2500.0 if not sys.argv[1:] else open({str(filled)!r}, 'x'))"
    monkeypatch.setattr(overhead, "calls", lambda device, arch: asked)
    monkeypatch.setattr(overhead, "_LOAD_SCRIPT", script)
    monkeypatch.setattr(
        overhead, "microseconds", lambda call, _: log.append("timed" if filled.exists() else "cold") or 7.0
    )
    found = list(overhead.measure("H200", lambda *told: None))
    assert set(log[:2]) == {"kernel", "other"}
    assert log[2:] == ["timed"] * 4
    assert [(each.call, each.microseconds, each.budget) for each in found] == [
        ("kernel", 7.0, 20.0),
        ("other", 7.0, None),
        (overhead.LOAD, 2500.0, 20_000.0),
    ]


def test_a_process_is_ended_where_a_call_fails(monkeypatch: pytest.MonkeyPatch):
    begun, begin = [], subprocess.Popen
    monkeypatch.setattr(overhead, "calls", lambda device, arch: {"kernel": lambda: 1 / 0})
    monkeypatch.setattr(overhead, "_LOAD_SCRIPT", "import time; time.sleep(60)")
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **b: begun.append(begin(*a, **b)) or begun[-1])
    with pytest.raises(ZeroDivisionError):
        next(overhead.measure("H200", lambda *told: None))
    (process,) = begun
    assert process.returncode == -signal.SIGKILL


def test_every_call_whose_time_is_taken_is_one():
    found = {name: call() for name, call in overhead.calls("meta", "A100").items()}
    assert {name: tuple(out.shape) for name, out in found.items()} == dict.fromkeys(found, (1, 4, 64, 64))
    assert set(overhead.BUDGETS_US) < set(found)
    compile(overhead._LOAD_SCRIPT, "script", "exec")


def test_worst_comparison_is_the_one_that_fails():
    from fagen.bench.check import worst_of

    near = Comparison(0.9, 0.5, 1.0, True, "")
    bad = Comparison(0.2, 0.5, 0.1, False, "off")
    assert worst_of([near, bad]) is bad
    assert worst_of([near, Comparison(0.1, 0.5, 1.0, True, "")]) is near


def test_grids_have_what_they_say():
    (variants,) = GRIDS["variants"]
    assert variants.variants == tuple(VARIANTS)
    assert all(grid.cells() for grids in GRIDS.values() for grid in grids)
