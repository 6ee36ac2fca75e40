"""Rule *free reference*, its last case: where exponents stay small anyway, they are measured from a constant.

A maximum that may be any number keeps exponentials in range. Where the values it is taken of are bounded, as
those of a soft cap are, the middle of their range does so too: nothing is compared, exchanged or rescaled.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fagen.derive.invariance import free_references
from fagen.derive.signs import interval
from fagen.derive.walk import Note, Stage, State
from fagen.ir import graph as ir
from fagen.ir.graph import Const, Map, Node, Symbol


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
    values = [state.value for walk in stage.walks for state in walk.states]
    running = {s.symbol for walk in found.walks for s in walk.states if s.rescale is not None}
    exponents = [
        place(node.args[0])
        for node in ir.walk(values)
        if isinstance(node, Map) and node.op in ("exp", "exp2") and ir.depends(node, [maximum])
    ]
    if running or any(max(-reach[0], reach[1]) > most for reach in map(interval, exponents)):
        return None
    return found
