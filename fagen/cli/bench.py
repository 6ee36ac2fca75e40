"""Measurements: fagen beside its peers, and figures of them."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fagen.cli import show
from fagen.cli.app import app, row_of
from fagen.errors import UsageError

if TYPE_CHECKING:
    from fagen.bench.cells import Cell, Given
    from fagen.bench.contenders import Contender
    from fagen.bench.measure import Protocol
    from fagen.bench.report import Report

_WHAT, _WHO, _HOW, _OUT = "What to measure", "Who is measured", "How", "Where to"


@app.command()
def bench(
    grid: Annotated[
        str, typer.Option(metavar="short|lengths|dims|variants|decode", rich_help_panel=_WHAT)
    ] = "short",
    figure: Annotated[
        str | None,
        typer.Option(
            metavar="length|overhead",
            help="In place of a grid: time and memory against N, or time of the host for a call.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    head_dim: Annotated[
        str | None,
        typer.Option(metavar="64,192/128", help="Head dims in place of the grid's.", rich_help_panel=_WHAT),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(metavar="full,causal,...", help="Masks and scores.", rich_help_panel=_WHAT),
    ] = None,
    length: Annotated[
        str | None, typer.Option(metavar="512,8192", help="Lengths.", rich_help_panel=_WHAT)
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="By default 16,384 tokens in all.", rich_help_panel=_WHAT)
    ] = None,
    q_heads: Annotated[
        int | None, typer.Option(min=1, help="By default 2048 / head dim.", rich_help_panel=_WHAT)
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="By default as --q-heads.", rich_help_panel=_WHAT)
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="bf16|fp16|fp32", rich_help_panel=_WHAT)] = "bf16",
    direction: Annotated[str, typer.Option(metavar="forward|backward", rich_help_panel=_WHAT)] = "forward",
    family: Annotated[
        str | None,
        typer.Option(
            metavar="sm80,sm90", help="fagen's families; by default its own choice.", rich_help_panel=_WHO
        ),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(metavar="flash,cudnn,...", help="By default all; or none.", rich_help_panel=_WHO),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="In which each has a burst of calls in turn.", rich_help_panel=_HOW)
    ] = 5,
    pause: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Before each burst.", rich_help_panel=_HOW)
    ] = 0.02,
    launch: Annotated[
        bool,
        typer.Option(
            "--launch", help="Time launches alone, too, replayed by a CUDA graph.", rich_help_panel=_HOW
        ),
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that compile.", rich_help_panel=_HOW)
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="In place of peers: measure the model's best plans, keep the fastest for calls."
        ),
    ] = False,
    few: Annotated[
        int, typer.Option(min=1, help="Plans of --tune for each problem.", rich_help_panel=_HOW)
    ] = 4,
    model_only: Annotated[
        bool, typer.Option("--model-only", help="Print work and the model's times; run nothing.")
    ] = False,
    arch: Annotated[str, typer.Option(help="The GPU of --model-only.", rich_help_panel=_HOW)] = "H100",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown.", rich_help_panel=_OUT)
    ] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures.", rich_help_panel=_OUT)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png|svg", help="Draw them.", rich_help_panel=_OUT),
    ] = None,
) -> None:
    """Measure fagen beside what else computes attention here, all in one process and by one protocol.

    What fagen computes is compared with the reference before it is timed; exits with 1 where it is wrong.
    """
    from fagen.bench.cells import Given, cells_of
    from fagen.bench.measure import Protocol

    given = Given(
        dims=_dims(head_dim),
        variants=_words(variant),
        lengths=_numbers("--length", length),
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        dtype=dtype,
        direction=direction,
    )
    protocol = Protocol(rounds=rounds, pause_seconds=pause, replay=launch)
    if tune and (figure is not None or model_only or peer is not None or plot is not None):
        raise UsageError(
            "--tune measures fagen's plans alone", works="leave --figure, --model-only, --peer and --plot out"
        )
    if tune and direction != "forward":
        raise UsageError(
            f"--tune measures forward plans, and --direction is {direction}", works="leave it out"
        )
    if figure is not None:
        if figure not in ("length", "overhead"):
            raise UsageError(f"--figure is {figure!r}", works="it is length or overhead")
        if family is not None or peer is not None:
            raise UsageError(
                f"--figure {figure} has contenders of its own", works="leave --family, --peer out"
            )
        if figure == "overhead":
            if model_only:
                raise UsageError("no model predicts --figure overhead", works="leave --model-only out")
            _figure_overhead(json)
        _figure_length(given, protocol, workers, arch if model_only else None, json, plot)
    from fagen.bench.lineup import PLANNERS_CHOICE, own, peers

    cells, ours = cells_of(grid, given), own(_words(family))
    if tune:
        _require_writable(json, None)
        families = [None if each.name == PLANNERS_CHOICE else each.name for each in ours]
        _tune(cells, families, few, protocol, workers, json)
    if model_only:
        if peer is not None or json is not None or plot is not None or markdown:
            raise UsageError(
                "--model-only prints what is predicted of fagen alone",
                works="leave --peer, --json, --plot and --markdown out",
            )
        _show_model(cells, ours, arch)
        return
    others = () if peer == "none" else peers(_words(peer))
    _require_writable(json, plot)
    report = _measured(cells, ours, others, protocol, workers)
    _show(report, markdown)
    _save(report, json)
    if plot is not None:
        from fagen.bench.plot import draw_report

        draw_report(report, plot)
    raise typer.Exit(0 if report.ok else 1)


def _figure_length(
    given: Given,
    protocol: Protocol,
    workers: int | None,
    arch: str | None,
    json: Path | None,
    plot: Path | None,
) -> NoReturn:
    """Measure, or by the model of ``arch`` predict, and draw time and memory against the length."""
    from fagen.bench import length
    from fagen.bench.cells import replaced
    from fagen.bench.plot import draw_lengths

    if json is None and plot is None:
        json, plot = Path("length.json"), Path("length.png")
    _require_writable(json, plot)
    cells = replaced(length.GRID, given)
    if arch is not None:
        report = length.predicted(cells, arch)
    else:
        from fagen.bench.contenders import SEPARATE, of_family

        materialised, fused = length.both()
        ours = (fused, of_family(None))
        report = _measured(cells, ours, (materialised, SEPARATE), protocol, workers)
    print(report.device)
    show.table(length.rows(report))
    _save(report, json)
    if plot is not None:
        draw_lengths(report, plot)
    for path in (json, plot):
        if path is not None:
            print(f"saved {path}")
    raise typer.Exit(0 if report.ok else 1)


def _figure_overhead(json: Path | None) -> NoReturn:
    """Measure how long calls keep Python; 1 where a budget is exceeded."""
    device = _needs_gpu("bench --figure overhead")
    _require_writable(json, None)
    from fagen.bench import overhead
    from fagen.study.versions import device_name

    print(f"microseconds of the host a call, medians, {device_name(device)}", flush=True)
    found = []
    with show.progress() as progress:
        for each in overhead.measure(row_of(device), progress):
            print(overhead.line(each), flush=True)
            found.append(each)
    if json is not None:
        json.write_text(json_format.dumps([asdict(each) for each in found], indent=1) + "\n")
    raise typer.Exit(0 if all(each.ok for each in found) else 1)


def _tune(
    cells: Sequence[Cell],
    families: Sequence[str | None],
    few: int,
    protocol: Protocol,
    workers: int | None,
    json: Path | None,
) -> NoReturn:
    """Measure plans, keep the fastest, and show what was taken."""
    device = _needs_gpu("bench --tune")
    import torch

    from fagen.bench import tune
    from fagen.bench.stopwatch import GpuStopwatch
    from fagen.bench.warm import warm
    from fagen.bench.warm import workers as how_many
    from fagen.study.versions import device_name

    found: list[tune.Tuning] = []
    with show.progress() as progress:
        progress("compile", 0, 0)
        arch, capability = row_of(device), torch.cuda.get_device_capability(device)
        problems = tune.problems(cells, families, arch)
        jobs = [
            tune.Job(known[0], problem.family, arch, finalist, capability)
            for problem, known in problems.items()
            for finalist in (None, *range(few))
        ]
        warm(jobs, how_many(workers), progress, tune.build_one)
        found.extend(tune.tune(problems, few, GpuStopwatch(), protocol, device, progress))
    print(f"fastest of {few} plans each on {device_name(device)}, kept for later calls")
    show.table(tune.rows(found))
    if json is not None:
        json.write_text(json_format.dumps(tune.to_json(found), indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(0 if all(each.seconds for each in found) else 1)


def _save(report: Report, json: Path | None) -> None:
    """Write all figures of a report."""
    if json is not None:
        from fagen.bench.report import to_json

        json.write_text(json_format.dumps(to_json(report), indent=1) + "\n", encoding="utf-8")


# -------------------------------------------------------------------------------------------------- options


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


def _numbers(option: str, text: str | None) -> list[int]:
    return [_number(option, word) for word in _words(text)]


def _number(option: str, word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise UsageError(f"{option}: {word!r} is no number", works="write whole numbers, such as 64,128")
    return int(word)


def _dims(text: str | None) -> list[tuple[int, int]]:
    """``64,192/128``: of q and k, and behind a slash of v."""
    found = []
    for word in _words(text):
        first, _, second = word.partition("/")
        found.append((_number("--head-dim", first), _number("--head-dim", second or first)))
    return found


def _require_writable(json: Path | None, plot: Path | None) -> None:
    """Refuse files that cannot be written before anything is measured."""
    for option, path in (("--json", json), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{option}: {path.parent} is no folder", works="name a file in one that exists")
    if plot is not None:
        from fagen.bench.plot import require

        require(plot)


def _needs_gpu(what: str, predicted: bool = False) -> Any:
    """The GPU that is measured; ``predicted``: a model says what it would show."""
    import torch

    from fagen.errors import ToolchainError

    if not torch.cuda.is_available():
        raise ToolchainError(
            f"{what} needs a GPU, and torch sees none",
            works=("--model-only says what the cost model predicts; " if predicted else "")
            + "fagen doctor says what is missing",
        )
    return torch.device("cuda", torch.cuda.current_device())


# ----------------------------------------------------------------------------------------------------- run


def _measured(
    cells: Sequence[Cell],
    ours: Sequence[Contender],
    others: Sequence[Contender],
    protocol: Protocol,
    workers: int | None,
) -> Report:
    device = _needs_gpu("bench", predicted=True)
    from fagen.bench.measure import measure
    from fagen.bench.report import Report
    from fagen.bench.stopwatch import GpuStopwatch
    from fagen.bench.warm import call_once, warm
    from fagen.bench.warm import workers as how_many
    from fagen.study.versions import device_name, versions

    contenders = (*ours, *others)
    report = Report(
        device=device_name(device),
        versions=versions(),
        protocol=protocol,
        own=tuple(each.name for each in ours),
        peers=tuple(each.name for each in others),
        about={each.name: each.about for each in contenders},
    )
    with show.progress() as progress:
        progress("compile", 0, 0)
        jobs = [
            (each.name, cell)
            for cell in cells
            for each in contenders
            if each.compiles and not each.refusal(cell)
        ]
        warm(jobs, how_many(workers), progress, call_once)
        with suppress(KeyboardInterrupt):  # what is measured by then is shown
            for measured in measure(cells, contenders, GpuStopwatch(), protocol, device, progress):
                report.cells.append(measured)
    if not report.cells:
        raise typer.Abort()
    if len(report.cells) < len(cells):
        print(f"fagen: interrupted after {len(report.cells)} of {len(cells)} cells", file=sys.stderr)
    return report


def _show(report: Report, as_markdown: bool) -> None:
    from fagen.bench.report import markdown, notes, rows, told, unit

    cells = [each.cell for each in report.cells]
    first = cells[0]
    print(f"{unit(cells)}, {first.dtype}, {first.direction}, on {report.device}")
    print(told(report.protocol))
    if as_markdown:
        print(f"\n{markdown(report)}")
    else:
        show.table(rows(report))
    for note in notes(report):
        show.text(note)


def _show_model(cells: Sequence[Cell], ours: Sequence[Contender], arch: str) -> None:
    from fagen.bench.lineup import PLANNERS_CHOICE
    from fagen.bench.model import predicted_seconds
    from fagen.bench.report import rate
    from fagen.study.explain import quantity, seconds

    shown = []
    reasons: dict[str, None] = {}
    for cell in cells:
        row = {
            "d": cell.dims,
            "mask": cell.variant,
            "S": cell.length,
            "B x H": f"{cell.batch} x {cell.q_heads}",
            "work": quantity(cell.flops, "flop"),
            "memory": quantity(cell.moved_bytes, "B"),
        }
        for each in ours:
            found = predicted_seconds(cell, None if each.name == PLANNERS_CHOICE else each.name, arch)
            if isinstance(found, str):
                reasons.setdefault(f"{each.name}: {found}")
                row[each.name] = "-"
            else:
                row[each.name] = f"{seconds(found)} ({rate(cell, found)})"
        shown.append(row)
    print(f"predicted for {arch}, nothing is run; in parentheses the rate")
    show.table(shown)
    for reason in reasons:
        show.text(reason)
