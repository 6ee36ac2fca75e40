"""Time and memory against the length: the same attention planned with its scores in memory, and in one pass.

It is the picture that FlashAttention opens with (Dao et al. 2022, figure 1), of one planner's two answers:
``separate kernels`` is the ladder's fourth rung, where all that works element by element is fused into the
products and the scores lie in memory between them; ``one pass`` is its fifth, in the same family. Beside them
stand the family that a call takes, and torch's own separate kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fagen.bench.cells import Cell, Grid
from fagen.bench.measure import Measured, Protocol, Result, Timing
from fagen.bench.model import problem_for
from fagen.bench.report import Report
from fagen.compile import compile_problem
from fagen.errors import PlanError
from fagen.lang.program import Options
from fagen.plan.arch import arch_for
from fagen.plan.cost import cost_of, live_parts, peak_buffer_bytes
from fagen.plan.plan import Problem
from fagen.plan.planner import plan
from fagen.study.explain import plan_lengths
from fagen.study.ladder import RUNGS

if TYPE_CHECKING:
    from fagen.bench.contenders import Contender, Inputs, Ready

GRID = Grid(
    ((64, 64),),
    ("causal",),
    tuple(512 << doubling for doubling in range(8)),
    batch=1,
    q_heads=16,
)
"""N from 512 to 65,536."""

MATERIALISED, FUSED = "separate kernels", "one pass"
_FAMILY = "simt"
_PINNED = {MATERIALISED: RUNGS[-2], FUSED: RUNGS[-1]}


def pinned(name: str, cell: Cell, arch: str) -> tuple[Problem, Mapping[str, int]]:
    """A cell planned as a rung of the ladder pins it, and its lengths by axis; both in one family."""
    problem, sizes = problem_for(cell, _FAMILY, arch)
    rung = _PINNED[name]
    return replace(problem, lengths=(), fusion=rung.fusion, tiling=rung.tiling), sizes


def both() -> tuple[Contender, Contender]:
    """The materialised plan and the fused one."""
    return _contender(MATERIALISED), _contender(FUSED)


def _contender(name: str) -> Contender:
    from fagen.bench.contenders import Contender, Ready

    def prepare(cell: Cell, inputs: Inputs) -> Ready:
        from fagen.calls.dispatch import arch_of, call

        problem, _ = pinned(name, cell, arch_of(inputs.device))
        kernel, values = compile_problem(problem), (*inputs.tensors, *inputs.traced.captured)
        return Ready(lambda: call(problem.graph, values, Options(), kernel))

    about = f"family {_FAMILY}: {_PINNED[name].title.lower()}"
    return Contender(name, about, prepare, is_peer=name == MATERIALISED, compiles=True)


def predicted(cells: Sequence[Cell], arch: str) -> Report:
    """The figure by the cost model, without a GPU."""
    report = Report(
        device=f"predicted for {arch}, nothing was run",
        versions={},
        protocol=Protocol(),
        own=(FUSED,),
        peers=(MATERIALISED,),
        about={name: _PINNED[name].title for name in _PINNED},
    )
    report.cells.extend(
        Measured(cell, {name: _modelled(name, cell, arch) for name in report.names}) for cell in cells
    )
    return report


def _modelled(name: str, cell: Cell, arch: str) -> Result:
    try:
        problem, sizes = pinned(name, cell, arch)
        chosen = plan(problem)
    except PlanError as error:
        return Result(reason=error.sentence)
    known, row = plan_lengths(chosen, sizes), arch_for(problem.arch)
    seconds = sum(
        cost_of(kernel, problem, known, row, live_parts(kernel, known)).seconds for kernel in chosen.kernels
    )
    peak_bytes = cell.moved_bytes + peak_buffer_bytes(chosen, known)
    return Result(Timing(seconds, seconds, seconds, 1), peak_bytes=peak_bytes)


def rows(report: Report) -> list[dict[str, str]]:
    """The table: time and memory of each contender at each length."""
    from fagen.study.explain import quantity, seconds

    found = []
    for measured in report.cells:
        row = {"N": measured.cell.length}
        for name in report.names:
            result = measured.results[name]
            timing, peak_bytes = result.timing, result.peak_bytes
            row[name] = seconds(timing.median) if timing is not None else result.reason
            row[f"{name}: memory"] = quantity(peak_bytes, "B") if peak_bytes is not None else ""
        found.append(row)
    return found
