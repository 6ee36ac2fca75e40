"""Rule *free reference*, again: a walk measures its states from its own maximum, and from nothing larger.

Softmax with a sink measures exponents from the larger of the two. Where the sink is far above all scores the
weights would then be too small for the hardware's power of two, which rounds such to 0. What a maximum is
compared with does not change along the walk: it may join when the walk is over.
"""

from __future__ import annotations

from dataclasses import replace

from fagen.derive.invariance import Reference, free_references
from fagen.derive.running import old
from fagen.derive.walk import Stage
from fagen.ir import graph as ir
from fagen.ir.graph import Const, Map, Node, Symbol


def from_own_maxima(stage: Stage) -> Stage:
    """``stage`` with every free maximum alone in the exponents of its states."""
    for reference in free_references(stage):
        if isinstance(reference.maximum, Symbol) and _is_compared(reference) and len(stage.walks) == 1:
            (walk,) = stage.walks
            if not walk.stores:
                stage = _measured_from(stage, reference.maximum, reference)
    return stage


def _is_compared(reference: Reference) -> bool:
    """Whether the point is the larger of the maximum and of what does not change along the walk."""
    point, maximum = reference.point, reference.maximum
    if not isinstance(point, Map) or point.op != "maximum" or maximum not in point.args:
        return False
    others = [node for arg in point.args if arg is not maximum for node in ir.walk([arg])]
    return not any(isinstance(node, Symbol) for node in others) and all(p <= 0 for _, p in reference.powers)


def _measured_from(stage: Stage, maximum: Symbol, reference: Reference) -> Stage:
    (walk,) = stage.walks
    before: dict[Node, Node] = {maximum: old(maximum)}
    point = reference.point
    there: dict[Node, Node] = {
        ir.finite(point): ir.finite(maximum),
        point: maximum,
        ir.substitute(point, before): old(maximum),
    }
    states = tuple(
        replace(
            state,
            value=ir.substitute(state.value, there),
            rescale=None if state.rescale is None else ir.substitute(state.rescale, there),
        )
        for state in walk.states
    )
    joined: dict[Node, Node] = {}
    for symbol, power in reference.powers:
        if power:
            # in two steps: each is large enough for the hardware where the product is not
            distance = ir.sub(maximum, ir.finite(point))
            half = ir.function("exp", ir.mul(Const(-0.5 * power), distance))
            joined[symbol] = ir.mul(ir.mul(symbol, half), half)
    outputs = tuple(replace(output, node=ir.substitute(output.node, joined)) for output in stage.outputs)
    return replace(stage, walks=(replace(walk, states=states),), outputs=outputs)
