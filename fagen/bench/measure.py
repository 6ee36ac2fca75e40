"""Cells timed, all contenders of a cell alternately and with the same pauses.

A GPU that is kept busy slows down to stay within its power, and one that rests is fast: what is measured
first, or beside a heavier neighbour, would look better. So each round gives every contender in turn an idle
moment and a short burst of calls, in another order each time, and the median is over all calls of all rounds.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from fagen.bench.cells import Cell
from fagen.bench.check import Expected
from fagen.bench.contenders import Contender, Inputs, Ready, directed, told
from fagen.bench.stopwatch import Call, Stopwatch
from fagen.ir.reference import Comparison

Tell = Callable[[str, int, int], None]

_OTHER_THAN_ASKED = 4.0
"""Of a peer's error over the tolerance: beyond it the peer computes something else, and is not timed."""


@dataclass(frozen=True)
class Protocol:
    """How a cell is timed: see the module."""

    rounds: int = 5
    pause_seconds: float = 0.02
    burst_seconds: float = 0.01
    most_calls: int = 10
    """In a burst."""
    replay: bool = False
    """Whether launches alone, replayed by a CUDA graph, are timed too."""


@dataclass(frozen=True)
class Timing:
    """Many times of one thing, in seconds: their median, and what a quarter of them stay below and above."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """The statistics of single times."""
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, len(seconds))


@dataclass(frozen=True)
class Result:
    """What became of a contender in a cell: times, or the reason why there are none.

    ``is_wrong``: it was not timed, because its result is not what the cell asks for. ``peak_bytes`` is the
    device memory held during a call, q, k and v included.
    """

    timing: Timing | None = None
    replayed: Timing | None = None
    reason: str = ""
    max_error: float = math.nan
    tolerance: float = math.nan
    is_wrong: bool = False
    peak_bytes: int | None = None


@dataclass
class Measured:
    """A cell and the result of each contender by name."""

    cell: Cell
    results: dict[str, Result] = field(default_factory=dict)


def measure(
    cells: Sequence[Cell],
    contenders: Sequence[Contender],
    watch: Stopwatch,
    protocol: Protocol,
    device: torch.device,
    tell: Tell = lambda what, done, parts: None,
) -> Iterator[Measured]:
    """The results of each cell, as soon as it is measured."""
    for number, cell in enumerate(cells):
        tell(cell.label, number, len(cells))
        yield measure_cell(cell, contenders, watch, protocol, device)
    tell("done", len(cells), len(cells))


def measure_cell(
    cell: Cell,
    contenders: Sequence[Contender],
    watch: Stopwatch,
    protocol: Protocol,
    device: torch.device,
) -> Measured:
    """The results of one cell. Whatever fails for one contender is its result's reason."""
    found = Measured(cell)
    able: list[Contender] = []
    for contender in contenders:
        if reason := contender.refusal(cell):
            found.results[contender.name] = Result(reason=reason)
        else:
            able.append(contender)
    try:
        inputs = Inputs(cell, device)
        expected = Expected(inputs)
    except torch.cuda.OutOfMemoryError as error:
        found.results |= {each.name: Result(reason=told(error)) for each in able}
        return found
    ready: dict[str, Ready] = {}
    for contender in able:
        result, call = _prepared(contender, inputs, expected, watch)
        found.results[contender.name] = result
        if call is not None:
            ready[contender.name] = call
    times = alternate(ready, watch, protocol)
    replays = _replays(ready, watch) if protocol.replay else {}
    replay_times = alternate(replays, watch, protocol)
    for name, seconds in times.items():
        again = replay_times.get(name)
        found.results[name] = replace(
            found.results[name], timing=Timing.of(seconds), replayed=Timing.of(again) if again else None
        )
    return found


def _prepared(
    contender: Contender, inputs: Inputs, expected: Expected, watch: Stopwatch
) -> tuple[Result, Ready | None]:
    """What there is to say of a contender before it is timed, and its call if it can be."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            ready = contender.prepare(inputs.cell, inputs)
            comparison = expected.compare(ready)
            if reason := disagreement(comparison, contender.is_peer):
                return _compared(comparison, reason), None
            timed = directed(ready, inputs)
            with timed.around():
                peak_bytes = watch.added_bytes(timed.call) + inputs.held_bytes
            return replace(_compared(comparison), peak_bytes=peak_bytes), timed
        except Exception as error:  # whatever another's code raises
            return Result(reason=told(error, warned)), None


def _compared(comparison: Comparison, reason: str = "") -> Result:
    return Result(
        reason=reason,
        max_error=comparison.max_error,
        tolerance=comparison.tolerance,
        is_wrong=bool(reason),
    )


def disagreement(comparison: Comparison, is_peer: bool) -> str:
    """Why a result is not timed, or "": fagen keeps the tolerance, a peer may be a little less precise."""
    allowed = comparison.tolerance * (_OTHER_THAN_ASKED if is_peer else 1)
    if comparison.ok or comparison.max_error <= allowed:
        return ""
    error = f"its error is {comparison.max_error:.2g}, and {allowed:.2g} is allowed"
    return error if math.isfinite(comparison.max_error) else comparison.reason


def _replays(ready: Mapping[str, Ready], watch: Stopwatch) -> dict[str, Ready]:
    """Those calls that can be captured."""
    found = {}
    for name, each in ready.items():
        try:
            with each.around():
                found[name] = Ready(watch.replayed(each.call))
        except Exception:  # a call that cannot be captured has no such time
            continue
    return found


def alternate(ready: Mapping[str, Ready], watch: Stopwatch, protocol: Protocol) -> dict[str, list[float]]:
    """Seconds of single calls, for each of several: in rounds, in which each has its burst after a pause."""
    counts = {}
    for name, each in ready.items():
        with _entered(each) as call:
            counts[name] = burst(min(watch.times(call, 2)), protocol)
    found: dict[str, list[float]] = {name: [] for name in ready}
    names = list(ready)
    for number in range(protocol.rounds if names else 0):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            watch.pause(protocol.pause_seconds)
            with _entered(ready[name]) as call:
                found[name] += watch.times(call, counts[name])
    return found


@contextmanager
def _entered(ready: Ready) -> Iterator[Call]:
    with ready.around():
        yield ready.call


def burst(seconds: float, protocol: Protocol) -> int:
    """Calls in a burst, for a call that takes so long: two at least."""
    return min(max(int(protocol.burst_seconds / max(seconds, 1e-9)), 2), protocol.most_calls)
