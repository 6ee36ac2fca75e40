"""The model's best few plans of each problem measured, and the fastest kept for later calls on this GPU.

The plan that a call takes without measuring is measured first, the others alternately with it; one that is
not clearly faster does not replace it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from fagen.bench.cells import Cell
from fagen.bench.model import problem_for
from fagen.compile import Compiled, compile_problem
from fagen.errors import FagenError
from fagen.plan.cost import tiles_of
from fagen.plan.plan import Plan, Problem
from fagen.run.tuned import Tuned

if TYPE_CHECKING:
    import torch

    from fagen.bench.measure import Protocol, Tell
    from fagen.bench.stopwatch import Stopwatch

_CLEARLY = 1.01
"""Times as fast as the plan without measuring: less is noise."""


@dataclass(frozen=True)
class Job:
    """A plan to be built: of a cell, by its rank (None: the one taken without measuring)."""

    cell: Cell
    family: str | None
    arch: str
    finalist: int | None
    capability: tuple[int, int]


@dataclass
class Tuning:
    """The plans of a problem: seconds of each in each of the cells that the problem stands for.

    ``None`` among the names of plans is the one taken without measuring.
    """

    problem: Problem
    cells: tuple[Cell, ...]
    tiles: dict[int | None, str] = field(default_factory=dict)
    seconds: dict[int | None, list[float]] = field(default_factory=dict)
    reasons: dict[int | None, str] = field(default_factory=dict)

    def gain(self, finalist: int | None) -> float:
        """How many times as fast a plan is as the one without measuring, on (geometric) average."""
        pairs = list(zip(self.seconds[None], self.seconds[finalist], strict=True))
        return math.exp(sum(math.log(usual / own) for usual, own in pairs) / len(pairs))

    @property
    def winner(self) -> int | None:
        """The fastest plan; None where it is the one without measuring, or not clearly another."""
        best = max(self.seconds, key=self.gain)
        return best if best is not None and self.gain(best) > _CLEARLY else None

    def tuned(self, gpu: str) -> Tuned:
        """What is kept."""
        best = self.winner
        return Tuned(
            name=compile_problem(self.problem).name,
            gpu=gpu,
            finalist=best,
            tiles=self.tiles[best],
            gain=self.gain(best),
            measured=len(self.seconds),
        )


def problems(
    cells: Sequence[Cell], families: Sequence[str | None], arch: str
) -> dict[Problem, tuple[Cell, ...]]:
    """What is planned for each cell in each family, each with the cells it stands for."""
    found: dict[Problem, tuple[Cell, ...]] = {}
    for family in families:
        for cell in cells:
            problem, _ = problem_for(cell, family, arch)
            found[problem] = (*found.get(problem, ()), cell)
    return found


def build_one(job: Job) -> None:
    """Build a plan of a problem, so that it is in the cache."""
    problem, _ = problem_for(job.cell, job.family, job.arch)
    Compiled(problem, job.finalist).binary(job.capability)


def plan_name(plan: Plan) -> str:
    """The tiles of a plan, as `explain` shows them."""
    return ", then ".join(str(tiles_of(kernel)) for kernel in plan.kernels)


def tune(
    cells: Mapping[Problem, tuple[Cell, ...]],
    few: int,
    watch: Stopwatch,
    protocol: Protocol,
    device: torch.device,
    tell: Tell = lambda what, done, parts: None,
) -> Iterator[Tuning]:
    """Measure ``few`` plans of each problem and keep the fastest, problem by problem."""
    from fagen.study.versions import device_name

    gpu = device_name(device)
    for number, (problem, known) in enumerate(cells.items()):
        tell(known[0].label, number, len(cells))
        compile_problem(problem).untune(gpu)
        tuning = Tuning(problem, known)
        _measure(tuning, few, watch, protocol, device)
        if None in tuning.seconds:
            compile_problem(problem).tune(tuning.tuned(gpu))
        yield tuning


def _measure(tuning: Tuning, few: int, watch: Stopwatch, protocol: Protocol, device: torch.device) -> None:
    """Fill in what each plan is and takes."""
    from fagen.bench.check import Expected
    from fagen.bench.contenders import Inputs, Ready, told
    from fagen.bench.measure import Timing, alternate, disagreement
    from fagen.calls.prepared import OnEmulator, OnGpu
    from fagen.calls.values import read

    prepared = OnGpu if device.type == "cuda" else OnEmulator
    kernels = _plans(tuning, few, device)
    for cell in tuning.cells:
        inputs = Inputs(cell, device)
        expected, given = Expected(inputs), (*inputs.tensors, *inputs.traced.captured)
        ready: dict[str, Ready] = {}
        for finalist, kernel in kernels.items():
            try:
                values = read(tuning.problem.graph, given)
                called = Ready(partial(_first, prepared(values, kernel, values.sizes()), given))
                if reason := disagreement(expected.compare(called), is_peer=False):
                    tuning.reasons[finalist] = reason
                else:
                    ready[str(finalist)] = called
            except (FagenError, RuntimeError) as error:
                tuning.reasons[finalist] = told(error)
        times = alternate(ready, watch, protocol)
        for finalist in kernels:
            if str(finalist) in times:
                tuning.seconds.setdefault(finalist, []).append(Timing.of(times[str(finalist)]).median)
    whole = {finalist: each for finalist, each in tuning.seconds.items() if len(each) == len(tuning.cells)}
    tuning.seconds = whole if None in whole else {}


def _first(run: Callable[..., tuple[torch.Tensor, ...]], given: Sequence[object]) -> torch.Tensor:
    return run(given)[0]


def _plans(tuning: Tuning, few: int, device: torch.device) -> dict[int | None, Compiled]:
    """The plans that build well, each content once."""
    import torch

    on_gpu = device.type == "cuda"
    found: dict[int | None, Compiled] = {}
    keys: set[str] = set()
    for finalist in (None, *range(few)):
        kernel = Compiled(tuning.problem, finalist)
        try:
            capability = torch.cuda.get_device_capability(device) if on_gpu else None
            key = kernel.binary(capability).key if on_gpu else kernel.source
        except IndexError:  # the model has no more
            break
        except FagenError as error:
            tuning.reasons[finalist] = error.sentence
            continue
        if key not in keys:
            keys.add(key)
            tuning.tiles[finalist] = plan_name(kernel.plan)
            found[finalist] = kernel
    return found


def rows(tunings: Sequence[Tuning]) -> list[dict[str, str]]:
    """The table: what was taken for each problem, and what that gains."""
    from fagen.study.explain import seconds

    found = []
    for tuning in tunings:
        cell = tuning.cells[-1]
        row = {
            "d": cell.dims,
            "mask": cell.variant,
            "S": ", ".join(each.length for each in tuning.cells),
            "family": tuning.problem.family or "any",
        }
        if not tuning.seconds:
            reason = next(iter(tuning.reasons.values()), "")
            found.append({**row, "measured": "0", "taken": reason, "time": "", "gain": ""})
            continue
        best = tuning.winner
        row["measured"] = str(len(tuning.seconds))
        row["taken"] = tuning.tiles[best] + (" (the model's best)" if best is None else "")
        row["time"] = seconds(tuning.seconds[best][-1])
        row["gain"] = f"{tuning.gain(best):.3f}"
        found.append(row)
    return found


def to_json(tunings: Sequence[Tuning]) -> list[dict[str, Any]]:
    """All figures: seconds of each plan in each cell."""
    return [
        {
            "kernel": compile_problem(tuning.problem).name,
            "family": tuning.problem.family,
            "cells": [asdict(cell) for cell in tuning.cells],
            "plans": [
                {
                    "rank": finalist,
                    "tiles": tuning.tiles.get(finalist),
                    "seconds": tuning.seconds.get(finalist),
                    "reason": tuning.reasons.get(finalist),
                }
                for finalist in {**tuning.tiles, **tuning.reasons}
            ],
            "taken": tuning.winner if tuning.seconds else None,
            "gain": tuning.gain(tuning.winner) if tuning.seconds else None,
        }
        for tuning in tunings
    ]
