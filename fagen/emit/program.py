"""A plan as one CUDA file: its kernels in launch order, and what a launch must know of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fagen.emit.backward import backward_loop
from fagen.emit.code import declarations
from fagen.emit.forward.walks import forward_loop
from fagen.emit.paper import head
from fagen.emit.params import Field, Parameters
from fagen.emit.prepare import preparations
from fagen.emit.product import product
from fagen.emit.render import laid_out, render
from fagen.emit.roles.build import forward_roles
from fagen.emit.rowwise import rowwise
from fagen.emit.scope import Routines, Scope, axis_name
from fagen.ir.graph import Axis
from fagen.ir.stack import room_for
from fagen.plan.plan import Plan
from fagen.version import VERSION

_SCHEDULES: Mapping[str, tuple[Callable[[Scope], Any], bool]] = {
    "forward_loop": (forward_loop, False),
    "forward_roles": (forward_roles, False),
    "backward_loop": (backward_loop, False),
    "product": (product, True),
    "rowwise": (rowwise, True),
}
"""For each template of `schedule/`, what it reads of a kernel, and whether all of that is one function."""


@dataclass(frozen=True)
class Function:
    """How a kernel is launched: one-dimensional, ``threads`` a block.

    The number of blocks is the product over ``grid`` of an axis' length divided by the block's positions,
    rounded up. A launch of no blocks does nothing and is left out. ``persistent`` blocks take one such work
    after another: of them there is one for each multiprocessor.
    """

    name: str
    threads: int
    shared_bytes: int
    grid: tuple[tuple[Axis, int], ...]
    persistent: bool = False


@dataclass(frozen=True)
class Emitted:
    """A program's text, its kernels in launch order, and the members of their one parameter ``Params``."""

    text: str
    functions: tuple[Function, ...]
    params: tuple[Field, ...]


def emit(plan: Plan) -> Emitted:
    """The CUDA of a plan. The same plan gives the same text in every process."""
    with room_for(plan.problem.graph):
        return _emitted(plan)


def _emitted(plan: Plan) -> Emitted:
    parameters = Parameters(plan)
    kernels = []
    for kernel in plan.kernels:
        steps, flat = _SCHEDULES[kernel.schedule]
        kernels.append(steps(Scope(plan, kernel, parameters, flat)))
    first = preparations(plan, parameters)
    routines = Routines()
    body = render(
        "kernels.j2",
        plan=plan,
        first=first,
        kernels=kernels,
        axis_name=axis_name,
        declarations=declarations,
        define=routines.define,
        call=routines.call,
    )
    fields = parameters.fields(body)
    text = render(
        "program.j2",
        plan=plan,
        head=head(plan, [kernel.scope for kernel in kernels], VERSION),
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
            kernel.roles is not None,
        )
        for kernel in plan.kernels
    )
    return Emitted(laid_out(text), (*prepared, *functions), fields)
