"""Results as people and programs read them: figures, a table, JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fagen.bench.cells import Cell
from fagen.bench.measure import Measured, Protocol, Result
from fagen.bench.variants import VARIANTS

FORMULAS: Mapping[str, str] = {
    "pairs": "pairs of a query and a key that the mask allows, over batch and heads; causal: half of all",
    "forward": "2 * pairs * (d + dv) flops; q, k, v and the output once, in bytes",
    "backward": "2.5 times the flops of forward; q, k, v, the output, its gradient, fp32 statistics of rows "
    "and three gradients once, in bytes",
    "ratio": "the median time of the fastest peer over the own",
}

_LISTED = 3
"""Cells that a reason is listed with."""


@dataclass(frozen=True)
class Report:
    """All cells of a run, and what they were measured on, by whom and how.

    ``own`` and ``peers`` are names of contenders, ``about`` says what each name stands for.
    """

    device: str
    versions: Mapping[str, str]
    protocol: Protocol
    own: tuple[str, ...]
    peers: tuple[str, ...]
    about: Mapping[str, str]
    cells: list[Measured] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        """All contenders, fagen's first."""
        return (*self.own, *self.peers)

    @property
    def ok(self) -> bool:
        """Whether every result of fagen's was right."""
        return not any(each.results[name].is_wrong for each in self.cells for name in self.own)


def seconds_of(result: Result | None) -> float:
    """The median time of a result; infinite where there is none."""
    return result.timing.median if result is not None and result.timing is not None else math.inf


def best_peer(report: Report, measured: Measured) -> str | None:
    """The fastest peer of a cell."""
    timed = {name: seconds_of(measured.results.get(name)) for name in report.peers}
    best = min(timed, key=lambda name: timed[name], default=None)
    return best if best is not None and math.isfinite(timed[best]) else None


def ratio(report: Report, measured: Measured, name: str) -> float | None:
    """How many times as fast as the best peer a contender is."""
    peer, seconds = best_peer(report, measured), seconds_of(measured.results.get(name))
    if peer is None or not math.isfinite(seconds):
        return None
    return seconds_of(measured.results[peer]) / seconds


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def rate(cell: Cell, seconds: float) -> str:
    """The figure that suits a cell, as text: TFLOP/s, or of one query TB/s."""
    figure = per_second(cell, seconds) / 1e12
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}"


def per_second(cell: Cell, seconds: float) -> float:
    """Operations per second, or of one query bytes per second."""
    return (cell.moved_bytes if cell.q_len == 1 else cell.flops) / seconds


def unit(cells: Sequence[Cell]) -> str:
    """What `rate` counts in."""
    return "TB/s of q, k, v and the output" if all(cell.q_len == 1 for cell in cells) else "TFLOP/s"


def told(protocol: Protocol) -> str:
    """How it was measured, in a line."""
    also = "; in parentheses launches alone, replayed by a CUDA graph" if protocol.replay else ""
    return (
        f"medians over {protocol.rounds} rounds, in each of which everybody has a burst of calls, "
        f"{1e3 * protocol.pause_seconds:g} ms after the last, nothing in L2{also}"
    )


# --------------------------------------------------------------------------------------------------- table


def rows(report: Report) -> list[dict[str, str]]:
    """The table, a row a cell: rates, then how many times as fast as the best peer each of fagen's is.

    A contender without any time has no column; `notes` says why.
    """
    shown = [name for name in report.names if any(_timed(each, name) for each in report.cells)]
    found = []
    for measured in report.cells:
        cell, peer = measured.cell, best_peer(report, measured)
        row = {
            "d": cell.dims,
            "mask": cell.variant,
            "S": cell.length,
            "B x H": f"{cell.batch} x {cell.q_heads}",
        }
        row |= {name: _figure(cell, measured.results.get(name)) for name in shown}
        row["best peer"] = peer or ""
        for name in report.own:
            if name in shown:
                times = ratio(report, measured, name)
                row[f"{name} /peer"] = "" if times is None else f"{times:.2f}"
        found.append(row)
    return found


def _timed(measured: Measured, name: str) -> bool:
    result = measured.results.get(name)
    return result is not None and (result.timing is not None or result.is_wrong)


def _figure(cell: Cell, result: Result | None) -> str:
    if result is None or (result.timing is None and not result.is_wrong):
        return "-"
    if result.timing is None:
        return "WRONG"
    figure = rate(cell, result.timing.median)
    return f"{figure} ({rate(cell, result.replayed.median)})" if result.replayed else figure


def notes(report: Report) -> list[str]:
    """Below the table: geometric means, and why what is missing is missing."""
    found = []
    for name in report.own:
        ratios = [times for each in report.cells if (times := ratio(report, each, name)) is not None]
        if ratios:
            mean, ahead = geometric_mean(ratios), sum(each >= 1 for each in ratios)
            each_peer = ", ".join(
                f"{geometric_mean(single):.2f} times {peer}"
                for peer in report.peers
                if (single := _against(report, name, peer))
            )
            found.append(
                f"{name}: {mean:.2f} times as fast as the best peer (geometric mean), at least as fast in "
                f"{ahead} of {len(ratios)} cells; {each_peer}"
            )
    reasons: dict[tuple[str, str], list[str]] = {}
    for measured in report.cells:
        for name in report.names:
            if reason := measured.results[name].reason:
                reasons.setdefault((name, reason), []).append(measured.cell.label)
    for (name, reason), labels in reasons.items():
        more = f" and {len(labels) - _LISTED} more" if len(labels) > _LISTED else ""
        where = "" if len(labels) == len(report.cells) else f" ({', '.join(labels[:_LISTED])}{more})"
        found.append(f"{name}: {reason}{where}")
    return found


def _against(report: Report, name: str, peer: str) -> list[float]:
    """How many times as fast as a peer, in each cell that both were timed in."""
    pairs = [
        (seconds_of(each.results.get(peer)), seconds_of(each.results.get(name))) for each in report.cells
    ]
    return [there / here for there, here in pairs if math.isfinite(there) and math.isfinite(here)]


def markdown(report: Report) -> str:
    """The table as a README has it."""
    table = rows(report)
    if not table:
        return ""
    lines = [list(table[0]), ["---"] * len(table[0]), *(list(row.values()) for row in table)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# ---------------------------------------------------------------------------------------------------- JSON


def to_json(report: Report) -> dict[str, Any]:
    """Everything, as JSON holds it: seconds, flops, bytes; what is not finite is null."""
    return {
        "device": report.device,
        "versions": dict(report.versions),
        "protocol": asdict(report.protocol),
        "formulas": dict(FORMULAS),
        "contenders": dict(report.about),
        "variants": {
            name: VARIANTS[name].about for name in dict.fromkeys(each.cell.variant for each in report.cells)
        },
        "cells": [_cell_json(report, each) for each in report.cells],
    }


def _cell_json(report: Report, measured: Measured) -> dict[str, Any]:
    cell = measured.cell
    return {
        **asdict(cell),
        "flops": cell.flops,
        "bytes": cell.moved_bytes,
        "best_peer": best_peer(report, measured),
        "results": {name: _result_json(report, measured, name) for name in report.names},
    }


def _result_json(report: Report, measured: Measured, name: str) -> dict[str, Any]:
    result = measured.results[name]
    found: dict[str, Any] = {
        "reason": result.reason or None,
        "wrong": result.is_wrong,
        "max_error": _finite(result.max_error),
        "tolerance": _finite(result.tolerance),
    }
    if result.peak_bytes is not None:
        found["peak_bytes"] = result.peak_bytes
    if result.timing is not None:
        found["seconds"] = asdict(result.timing)
        found["flops_per_second"] = measured.cell.flops / result.timing.median
        found["bytes_per_second"] = measured.cell.moved_bytes / result.timing.median
        found["ratio"] = ratio(report, measured, name)
    if result.replayed is not None:
        found["replayed_seconds"] = asdict(result.replayed)
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
