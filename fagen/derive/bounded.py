"""Rule *free reference*, its last case: where exponents stay small anyway, they are measured from a constant.

A maximum that may be any number keeps exponentials in range. Where the values it is taken of are bounded, as
those of a soft cap are, the middle of their range does so too: nothing is compared, exchanged or rescaled.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeAlias

from fagen.derive.invariance import free_references
from fagen.derive.walk import Note, Stage, State
from fagen.ir import graph as ir
from fagen.ir.graph import Const, Map, Node, Symbol

Interval: TypeAlias = tuple[float, float]

_ANY: Interval = (-math.inf, math.inf)
_UNIT: Interval = (-1.0, 1.0)


def without_maxima(stage: Stage, most: float) -> tuple[Stage, tuple[Note, ...]]:
    """``stage`` without maxima that may be constants, where the exponents measured from them are then within
    ``most`` of 0; and which these are."""
    notes = []
    for reference in free_references(stage):
        maximum = reference.maximum
        found = _without(stage, maximum, most) if isinstance(maximum, Symbol) else None
        if found is not None and isinstance(maximum, Symbol):
            stage = found
            text = f"{maximum.name} is a constant: no exponent exceeds {most:g} then"
            notes.append(Note("free reference", text))
    return stage, tuple(notes)


def _without(stage: Stage, maximum: Symbol, most: float) -> Stage | None:
    taken = next(s for walk in stage.walks for s in walk.states if s.symbol is maximum)
    low, high = interval(taken.value)
    if not math.isfinite(high - low):
        return None
    middle = Const((low + high) / 2)
    known: dict[Node, Node] = {ir.finite(maximum): middle, maximum: middle}

    def place(node: Node) -> Node:
        return ir.substitute(node, known)

    def placed(state: State) -> State:
        if state.rescale is None or not ir.depends(state.rescale, [maximum]):
            return replace(state, value=place(state.value))
        return replace(state, value=place(state.value), rescale=None)

    found = replace(
        stage,
        walks=tuple(
            replace(
                walk,
                states=tuple(placed(state) for state in walk.states if state is not taken),
                stores=tuple(replace(output, node=place(output.node)) for output in walk.stores),
            )
            for walk in stage.walks
        ),
        outputs=tuple(replace(output, node=place(output.node)) for output in stage.outputs),
    )
    values = [state.value for walk in found.walks for state in walk.states]
    running = {s.symbol for walk in found.walks for s in walk.states if s.rescale is not None}
    exponents = [n.args[0] for n in ir.walk(values) if isinstance(n, Map) and n.op in ("exp", "exp2")]
    if running or any(max(-reach[0], reach[1]) > most for reach in map(interval, exponents)):
        return None
    return found


def interval(x: Node) -> Interval:
    """Two numbers between which the value of ``x`` lies for all finite inputs."""
    if isinstance(x, Const):
        return float(x.value), float(x.value)
    if x.kind == "bool":
        return 0.0, 1.0
    if not isinstance(x, Map):
        return _ANY
    if x.op in ("tanh", "tanh_fast", "erf", "sin", "cos"):
        return _UNIT
    parts = [interval(arg) for arg in x.args]
    (low, high), (least, most) = parts[0], parts[-1]
    if x.op == "where":
        return min(parts[1][0], least), max(parts[1][1], most)
    if x.op == "neg":
        return -high, -low
    if x.op == "add":
        return sum(part[0] for part in parts), sum(part[1] for part in parts)
    if x.op == "maximum":
        return max(low, least), max(high, most)
    if x.op == "minimum":
        return min(low, least), min(high, most)
    if x.op == "abs":
        return max(low, -high, 0.0), max(-low, high)
    if x.op == "exp" and high < 700:
        return math.exp(low), math.exp(high)
    if x.op in ("div", "quotient") and least > 0:
        return _product((low, high), (1 / most, 1 / least))
    if x.op == "mul" and len(parts) == 2:
        return _product((low, high), (least, most))
    return _ANY


def _product(x: Interval, y: Interval) -> Interval:
    corners = [a * b if a and b else 0.0 for a in x for b in y]
    return min(corners), max(corners)
