"""The head of an emitted file: where it comes from, its symbols, and its computation as pseudocode."""

from __future__ import annotations

from collections.abc import Iterable

from fagen.derive.equations import equations
from fagen.derive.unscale import gathered, unscaled
from fagen.derive.walk import Partial, State, Walk
from fagen.emit.scope import Scope, block_name
from fagen.ir.graph import TRUE, Axis, Input, Map, Output, Symbol
from fagen.ir.show import LENGTHS, join_heads, with_axes
from fagen.plan.plan import GROUP_AXIS, Plan
from fagen.plan.profile import LOOPS

_AXES = {
    "b": "batch",
    "h": "query head",
    "hk": "key head",
    "q": "query",
    "kv": "key",
    "d": "feature",
    "dv": "feature of a value",
}
"""What a position along an axis is."""

_COLUMN = 60
"""Where the shapes of pseudocode stand."""


def head(plan: Plan, scopes: Iterable[Scope], version: str) -> list[str]:
    """The lines of the comment at the head of a file."""
    problem = plan.problem
    sizes = ", ".join(f"{LENGTHS.get(axis, axis)} {size}" for axis, size in plan.sizes)
    stored = " ".join(dict.fromkeys(problem.inputs))
    made = ", ".join(part for part in (f"family {plan.family}", sizes, stored) if part)
    lines = [f"{problem.graph.name}: {problem.graph.direction}, {made}", f"emitted by fagen {version}", ""]
    lines.append(", ".join(f"{axis} {_AXES[axis]}" for axis in _AXES if axis in _axes(plan)))
    if problem.graph.direction == "backward":
        lines += ["", *equations(problem.graph)]
    for scope in scopes:
        lines += ["", *pseudocode(scope)]
    return lines


def _axes(plan: Plan) -> set[Axis]:
    """The axes of all tensors in memory."""
    arguments = plan.problem.graph.arguments
    return {axis for each in arguments if isinstance(each, Input) for axis in each.layout}


def pseudocode(scope: Scope) -> list[str]:
    """A kernel's loops, and what is computed in them."""
    kernel = scope.kernel
    stage = unscaled(kernel.stage) if kernel.schedule in LOOPS else kernel.stage
    grid = join_heads(kernel.grid_axes)
    tile = []
    if kernel.tile_axis is not None:
        heads = f" of all {GROUP_AXIS}" if kernel.group > 1 else ""
        tile = [f"{block_name(kernel.tile_axis)} rows {kernel.tile_axis}{heads}"]
    places = [*grid, *tile]
    lines = [f"for each {_listed(places)} (a block):" if places else "one block:"]
    for axis in stage.outer:
        lines.append(f"  for each {axis}:")
    for walk in stage.walks:
        lines += [f"{'  ' * len(stage.outer)}{line}" for line in _walk(scope, walk)]
    lines += [f"  {_output(scope, output)}" for output in stage.outputs]
    return lines


def _walk(scope: Scope, walk: Walk) -> list[str]:
    axis = scope.kernel.stage.walk
    assert axis is not None
    condition = "" if walk.guard is TRUE else f" with some  {scope.shown(walk.guard)}"
    parts = scope.kernel.stage.parts
    turn = f", in turn with each other {parts}" if parts is not None else ""
    lines = [f"  for each {block_name(axis)} columns {axis}{condition}{turn}:"]
    for product in walk.products:
        terms = " + ".join(f"sum_{t.over} {scope.shown(t.own)} {scope.shown(t.walk)}" for t in product.terms)
        lines.append(_shaped(scope, f"    {product.symbol.name} = {terms}", product.symbol))
    for state in walk.states:
        lines.append(_shaped(scope, f"    {equation(scope, state)}", state.symbol))
    for partial in walk.partials:
        lines.append(_shaped(scope, f"    {added(scope, partial)}", partial.symbol))
        roles = scope.kernel.roles
        how = "in turns" if roles is not None and roles.in_turns else "in no fixed order"
        lines.append(f"      (in memory, 0 at first; blocks add to it {how})")
    return lines + [f"    {_output(scope, output)}" for output in walk.stores]


def added(scope: Scope, partial: Partial) -> str:
    """What a tile adds to a sum in memory."""
    value, operand = scope.shown(partial.value), scope.shown(partial.operand)
    return f"{partial.name} += sum_{partial.over} {value} * {operand}"


def equation(scope: Scope, state: State) -> str:
    """How a state is updated by a tile."""
    name, over = state.symbol.name, scope.kernel.stage.walk
    value = gathered(state.value)
    term = scope.shown(value)
    if state.operand is not None:
        alone = isinstance(value, Map) and value.op == "add"
        term = f"{f'({term})' if alone else term} * {scope.shown(state.operand)}"
    if state.op == "max":
        return f"{name} = max({name}, max_{over} {term})"
    scaled = name if state.rescale is None else f"{name} * {scope.shown(gathered(state.rescale))}"
    return f"{name} = {scaled} + sum_{over} {term}"


def _output(scope: Scope, output: Output) -> str:
    return f"{scope.written(output).name} = {scope.shown(output.node)}"


def _shaped(scope: Scope, text: str, symbol: Symbol) -> str:
    """``text`` with the axes of ``symbol`` within a block behind it."""
    axes = [axis for axis in symbol.axes if axis not in (*scope.kernel.grid_axes, *scope.kernel.stage.outer)]
    shape = with_axes("", axes)
    return f"{text:{_COLUMN}}  {shape}" if len(text) <= _COLUMN else text


def _listed(words: list[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
