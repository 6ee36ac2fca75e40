"""What the cost model says of a cell, without a GPU."""

from __future__ import annotations

from dataclasses import replace

from fagen.bench.cells import Cell
from fagen.bench.variants import VARIANTS
from fagen.calls.values import STORAGE_OF
from fagen.compile import backward_of, problem_of
from fagen.errors import PlanError
from fagen.ir.check import bind_sizes
from fagen.ir.graph import Input
from fagen.lang.attention import attention
from fagen.plan.arch import arch_for
from fagen.plan.cost import cost_of, live_parts
from fagen.plan.plan import Problem, Storage
from fagen.plan.planner import plan
from fagen.study.explain import plan_lengths

_STORAGES: dict[str, Storage] = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}


def problem_for(cell: Cell, family: str | None, arch: str) -> tuple[Problem, dict[str, int]]:
    """What is planned for a cell, and its lengths by axis."""
    made = VARIANTS[cell.variant].make(cell.batch, cell.q_heads, cell.kv_len, "cpu")
    traced = attention(**made.parts)
    shapes = [
        (cell.batch, cell.q_heads, cell.q_len, cell.head_dim),
        (cell.batch, cell.kv_heads, cell.kv_len, cell.head_dim),
        (cell.batch, cell.kv_heads, cell.kv_len, cell.v_head_dim),
        *(tuple(getattr(value, "shape", ())) for value in traced.captured),
    ]
    arguments = traced.graph.arguments
    sizes = bind_sizes(
        traced.graph,
        [shape if isinstance(each, Input) else None for each, shape in zip(arguments, shapes, strict=True)],
    )
    captured = zip(arguments[3:], traced.captured, strict=True)
    inputs = (
        *(_STORAGES[cell.dtype],) * 3,
        *(STORAGE_OF[value.dtype] for argument, value in captured if isinstance(argument, Input)),
    )
    problem = problem_of(traced.graph, arch_for(arch).name, family, inputs, sizes)
    if cell.direction == "backward":
        other, _ = backward_of(problem)
        problem = problem_of(other.graph, other.arch, other.family, other.inputs, sizes)
        problem = replace(problem, outputs=other.outputs)
    return problem, sizes


def predicted_seconds(cell: Cell, family: str | None, arch: str) -> float | str:
    """The time of a call by the cost model; a sentence where nothing fits."""
    try:
        problem, sizes = problem_for(cell, family, arch)
        chosen = plan(problem)
    except PlanError as error:
        return error.sentence
    known, row = plan_lengths(chosen, sizes), arch_for(problem.arch)
    return sum(
        cost_of(kernel, problem, known, row, live_parts(kernel, known)).seconds for kernel in chosen.kernels
    )
