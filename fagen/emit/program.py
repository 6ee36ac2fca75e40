"""A plan as one CUDA file: its kernels in launch order, and what a launch must know of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fagen.emit.forward import forward_loop
from fagen.emit.params import Field, Parameters
from fagen.emit.prepare import preparations
from fagen.emit.product import product
from fagen.emit.render import laid_out, render
from fagen.emit.scope import Routines, Scope
from fagen.ir.graph import Axis
from fagen.plan.plan import Plan
from fagen.version import VERSION

_SCHEDULES: Mapping[str, Callable[[Scope], Any]] = {
    "forward_loop": forward_loop,
    "product": product,
    "rowwise": forward_loop,
}
"""For each template of `schedule/`, what it reads of a kernel."""


@dataclass(frozen=True)
class Function:
    """How a kernel is launched: one-dimensional, ``threads`` a block.

    The number of blocks is the product over ``grid`` of an axis' length divided by the block's positions,
    rounded up. A launch of no blocks does nothing and is left out.
    """

    name: str
    threads: int
    shared_bytes: int
    grid: tuple[tuple[Axis, int], ...]


@dataclass(frozen=True)
class Emitted:
    """A program's text, its kernels in launch order, and the members of their one parameter ``Params``."""

    text: str
    functions: tuple[Function, ...]
    params: tuple[Field, ...]


def emit(plan: Plan) -> Emitted:
    """The CUDA of a plan. The same plan gives the same text in every process."""
    parameters = Parameters(plan)
    kernels = [_SCHEDULES[kernel.schedule](Scope(plan, kernel, parameters)) for kernel in plan.kernels]
    first = preparations(plan, parameters)
    routines = Routines()
    body = render(
        "kernels.j2", plan=plan, first=first, kernels=kernels, define=routines.define, call=routines.call
    )
    fields = parameters.fields(body)
    text = render(
        "program.j2",
        plan=plan,
        version=VERSION,
        members=parameters.members(fields),
        lengths=parameters.lengths(body),
        constants=parameters.constants(body),
        body=body,
    )
    prepared = (Function(each.function, each.threads, 0, each.grid) for each in first)
    functions = tuple(
        Function(
            kernel.function,
            kernel.threads,
            kernel.shared_bytes,
            tuple(kernel.grid.items()),
        )
        for kernel in plan.kernels
    )
    return Emitted(laid_out(text), (*prepared, *functions), fields)
