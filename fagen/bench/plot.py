"""Pictures of reports, by matplotlib, the extra ``bench``."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fagen.bench.contenders import NO_ROOM
from fagen.bench.measure import Measured
from fagen.bench.report import Report, per_second, seconds_of, unit
from fagen.errors import ToolchainError, UsageError, pip_install

_FORMATS = (".png", ".svg")
_COLUMNS = 3
_PANEL_INCHES = (4.4, 3.3)


def require(path: Path) -> None:
    """Refuse a file or a machine that no picture can be drawn on."""
    if path.suffix not in _FORMATS:
        raise UsageError(f"--plot: {path.name} is no picture's name", works="it ends with .png or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise ToolchainError("drawing needs matplotlib, which is not installed", works=pip_install("bench"))


def figure(panels: int) -> tuple[Any, list[Any]]:
    """A figure and its panels, drawn on no screen."""
    from matplotlib.figure import Figure

    columns = min(panels, _COLUMNS)
    lines = -(-panels // columns)
    made = Figure(figsize=(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * lines), layout="constrained")
    axes = [made.add_subplot(lines, columns, number + 1) for number in range(panels)]
    return made, axes


def save(made: Any, path: Path) -> None:
    """Write a figure, the same bytes each time."""
    from matplotlib import rc_context

    dated = {"Date": None} if path.suffix == ".svg" else None
    with rc_context({"svg.hashsalt": path.stem}):
        made.savefig(path, dpi=150, metadata=dated)


def draw_report(report: Report, path: Path) -> None:
    """Rates of all contenders: against the length, a panel a head dim and variant; or bars."""
    groups = _groups(report)
    made, axes = figure(len(groups))
    for panel, (title, cells) in zip(axes, groups, strict=True):
        (_lines if len({each.cell.kv_len for each in cells}) > 1 else _bars)(panel, report, cells)
        panel.set_title(title, fontsize=10)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    first = report.cells[0].cell
    axes[0].set_ylabel(unit([each.cell for each in report.cells]))
    axes[0].legend(fontsize=8)
    made.suptitle(f"{report.device}, {first.dtype}, {first.direction}", fontsize=11)
    save(made, path)


def _groups(report: Report) -> list[tuple[str, list[Measured]]]:
    """Cells that share a panel."""
    lengths: dict[tuple[str, str], set[int]] = {}
    for each in report.cells:
        lengths.setdefault((each.cell.dims, each.cell.variant), set()).add(each.cell.kv_len)
    is_curve = any(len(found) > 1 for found in lengths.values())
    groups: dict[str, list[Measured]] = {}
    for each in report.cells:
        cell = each.cell
        title = f"d = {cell.dims}, {cell.variant}" if is_curve else f"S = {cell.length}"
        title += f", {cell.batch} x {cell.q_heads} heads" if is_curve and cell.q_len != cell.kv_len else ""
        groups.setdefault(title, []).append(each)
    return list(groups.items())


def _rate(each: Measured, name: str) -> float:
    seconds = seconds_of(each.results.get(name))
    return per_second(each.cell, seconds) / 1e12 if math.isfinite(seconds) else math.nan


def _lines(panel: Any, report: Report, cells: Sequence[Measured]) -> None:
    for name in report.names:
        rates = [_rate(each, name) for each in cells]
        if not all(map(math.isnan, rates)):
            width = 2.2 if name in report.own else 1.2
            panel.plot([each.cell.kv_len for each in cells], rates, marker="o", ms=3, lw=width, label=name)
    panel.set_xscale("log", base=2)
    panel.set_xlabel("sequence length")


def _bars(panel: Any, report: Report, cells: Sequence[Measured]) -> None:
    names = [name for name in report.names if not all(math.isnan(_rate(each, name)) for each in cells)]
    wide = 0.8 / max(len(names), 1)
    for number, name in enumerate(names):
        places = [place + wide * (number - (len(names) - 1) / 2) for place in range(len(cells))]
        heights = [0 if math.isnan(height := _rate(each, name)) else height for each in cells]
        panel.bar(places, heights, wide, label=name)
    labels = [f"{each.cell.dims} {each.cell.variant}" for each in cells]
    panel.set_xticks(range(len(cells)), labels, rotation=45, ha="right", fontsize=7)


# ------------------------------------------------------------------------------------- against the length


def draw_lengths(report: Report, path: Path) -> None:
    """Time and peak memory of each contender against the length; where one finds no memory is marked."""
    made, (times, memories) = figure(2)
    for name in report.names:
        results = [(each.cell.kv_len, each.results[name]) for each in report.cells]
        timed = [(n, each.timing.median) for n, each in results if each.timing is not None]
        held = [(n, each.peak_bytes) for n, each in results if each.peak_bytes is not None]
        if not timed:
            continue
        (line,) = times.plot(*zip(*timed, strict=True), marker="o", ms=3, label=name)
        memories.plot(*zip(*held, strict=True), marker="o", ms=3, color=line.get_color(), label=name)
        refused = next((n for n, each in results if each.reason == NO_ROOM), None)
        if refused is not None:
            _mark(times, timed[-1], refused, line.get_color())
            _mark(memories, held[-1], refused, line.get_color())
    for panel, label in ((times, "seconds of a call"), (memories, "bytes of device memory held")):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("sequence length")
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
    times.legend(fontsize=8)
    cell = report.cells[0].cell
    shape = f"{cell.variant}, d = {cell.dims}, {cell.q_heads} heads, batch {cell.batch}, {cell.dtype}"
    made.suptitle(f"{report.device}: {shape}", fontsize=10)
    save(made, path)


def _mark(panel: Any, last: tuple[int, float], refused: int, color: Any) -> None:
    """The length at which there is no memory, at the height of the last that was measured."""
    panel.plot(refused, last[1], marker="x", ms=8, ls="", color=color)
    panel.annotate(NO_ROOM, (refused, last[1]), fontsize=7, ha="right", va="top")
