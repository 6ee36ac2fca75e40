"""Pictures of reports, by matplotlib, the extra ``bench``."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fagen.bench.measure import Measured
from fagen.bench.report import Report, per_second, seconds_of, unit
from fagen.errors import ToolchainError, UsageError

_FORMATS = (".png", ".svg")
_COLUMNS = 3
_PANEL_INCHES = (4.4, 3.3)


def require(path: Path) -> None:
    """Refuse a file or a machine that no picture can be drawn on."""
    if path.suffix not in _FORMATS:
        raise UsageError(f"--plot: {path.name} is no picture's name", works="it ends with .png or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise ToolchainError(
            "drawing needs matplotlib, which is not installed", works='pip install "fagen[bench]"'
        )


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
    dated = {"Date": None} if path.suffix == ".svg" else None
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
