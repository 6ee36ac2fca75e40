"""What a state adds up: its terms, and the conditions under which there are any."""

from __future__ import annotations

from fagen.derive.walk import State
from fagen.ir import graph as ir
from fagen.ir.graph import TRUE, ZERO, Map, Node, Random, Symbol


def term_of(state: State) -> tuple[Node, Node | None]:
    """What a state sums, and for a weighted sum the positions where the term exists at all."""
    value = state.value
    if state.operand is not None and not state.features:
        return ir.mul(value, state.operand), None
    if state.features and isinstance(value, Map) and value.op == "where" and value.args[2] is ZERO:
        conditions = conjuncts(value.args[0])
        exists = [c for c in conditions if not any(isinstance(n, Symbol | Random) for n in ir.walk([c]))]
        if exists:
            rest = ir.conjunction(*(c for c in conditions if c not in exists))
            return ir.where(rest, value.args[1], ZERO), ir.conjunction(*exists)
    return value, None


def conjuncts(condition: Node) -> tuple[Node, ...]:
    """The conditions all of which must hold."""
    if condition is TRUE:
        return ()
    return condition.args if isinstance(condition, Map) and condition.op == "and" else (condition,)
