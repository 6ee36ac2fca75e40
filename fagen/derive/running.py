"""Rule *rescale*: where a running maximum may stand for the final one, and what a state is multiplied by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fagen.derive.separate import Exponent, Linear, linear
from fagen.derive.signs import positive, slope
from fagen.derive.walk import State
from fagen.ir import graph as ir
from fagen.ir.graph import MINUS_INF, ONE, ZERO, Const, Map, Node, Symbol


@dataclass(frozen=True)
class Placed:
    """A state in the walk number ``level``; an element counts where all ``conditions`` hold."""

    level: int
    state: State
    conditions: tuple[Node, ...]


def old(symbol: Symbol) -> Symbol:
    """A running state before the tile at hand."""
    return Symbol(f"{symbol.name}_old", symbol.over, symbol.stored)


def are_bounded(value: Node, conditions: Iterable[Node], running: Iterable[Placed]) -> bool:
    """Whether each of the ``running`` states in ``value`` is a maximum that bounds the exponent it stands in.

    A value with running maxima is then no larger than some final one, and while a maximum is still -inf the
    values of elements that count (where all ``conditions`` hold) are 0.
    """
    states = {placed.state.symbol: placed for placed in running}
    for node in ir.walk([value]):
        if isinstance(node, Map) and node.op in ("exp", "exp2"):
            for symbol in ir.walk([node.args[0]]):
                placed = states.get(symbol) if isinstance(symbol, Symbol) else None
                if placed is None:
                    continue
                counts_too = set(placed.conditions) <= set(conditions)
                if placed.state.op != "max" or not counts_too or not _bounds(placed.state, node.args[0]):
                    return False
    return True


def _bounds(maximum: State, exponent: Node) -> bool:
    """Whether ``exponent`` is ``a x - b m + c``: x what m is the maximum of, c a row's value, 0 < a, b <= a.

    It is then at most (a - b) m + c, which does not fall while m rises. The whole may have a row's factor, of
    any sign if 0 <= b: where that is negative the exponent itself does not fall.
    """
    m, x = maximum.symbol, maximum.value
    signed = False
    while isinstance(exponent, Map) and exponent.op in ("mul", "div"):
        rest, factor = exponent.args
        if exponent.op == "mul" and ir.depends(factor, [m]):
            rest, factor = factor, rest
        if ir.depends(factor, [m]) or not set(factor.axes) <= set(m.axes):
            break
        signed, exponent = signed or not positive(factor), rest
    element = Symbol("element", x.axes, "float")
    exponent = ir.substitute(exponent, {x: element})
    a, b = slope(exponent, element), slope(exponent, m)
    if a is None or b is None or a[0] != a[1] or a[0] <= 0:
        return False
    if not set(ir.substitute(exponent, {element: ZERO}).axes) <= set(m.axes):
        return False
    return -a[0] <= b[0] and (not signed or b[1] <= 0)


def ratio(exponents: Iterable[Exponent], row: Mapping[Node, Node], running: Iterable[Placed]) -> Node:
    """What the factors of ``exponents`` are multiplied by when the ``running`` maxima in them change.

    ``row`` holds each statistic as an expression of states. Before the first element a maximum is -inf and
    what was accumulated is 0: the ratio is then made 0.
    """
    before: dict[Node, Node] = {placed.state.symbol: old(placed.state.symbol) for placed in running}
    result: Node = ONE
    for exponent in exponents:
        terms: Linear = {}
        for term, k in exponent.terms:
            for part, j in linear(ir.substitute(term, row)).items():
                terms[part] = terms.get(part, 0.0) + k * j
        change: Node = ZERO
        waits: dict[Node, None] = {}
        for new, k in terms.items():
            was = ir.substitute(new, before)
            if k < 0 and isinstance(was, Map) and was.op == "finite":
                was = was.args[0]  # exp(k * -inf) is 0 itself
            else:
                waits.update((before[node], None) for node in ir.walk([new]) if node in before)
            step = ir.sub(was, new) if k < 0 else ir.sub(new, was)
            change = ir.add(change, step if abs(k) == 1.0 else ir.mul(Const(abs(k)), step))
        factor = ir.function(exponent.base, change)
        known = ir.conjunction(*(ir.lt(MINUS_INF, symbol) for symbol in waits))
        result = ir.mul(result, ir.where(known, factor, ZERO))
    return result
