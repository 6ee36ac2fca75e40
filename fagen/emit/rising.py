"""Numbers that rise steadily along a tile: those of a thread's first column, and a constant more.

An integer of each element is converted by itself, two instructions before it is used. Where it is a multiple
of the column's position and something of the row, that of the thread's first column is converted once a tile,
and an element takes an addition of a constant, or a multiply-add with one.
"""

from __future__ import annotations

from collections.abc import Sequence

from fagen.derive.signs import positive
from fagen.emit.cexpr import Lowering
from fagen.emit.code import ATOM, ELEMENT, PRODUCT, SUM, UNARY, Code, Codes
from fagen.ir import graph as ir
from fagen.ir.graph import Axis, Index, Map, Node, Symbol

STEP = "step"
"""How far an element lies behind the first column of its thread, as a float; a constant once loops are
unrolled."""


def first_column(axis: Axis, name: str) -> Symbol:
    """The position of a thread's first column, called ``name``."""
    return Symbol(name, (axis,), "int")


def rising(
    roots: Sequence[Node], axis: Axis, first: Symbol, lower: Lowering, codes: Codes
) -> dict[Node, Code]:
    """The code of each number in ``roots`` that rises steadily along ``axis``; ``lower`` knows ``first``."""
    found: dict[Node, Code] = {}
    rates: dict[Node, tuple[Code, int]] = {}
    step = codes.leaf(STEP, "float", ELEMENT)
    for node in ir.walk(roots):
        if not isinstance(node, Map):
            continue
        if node.op == "to_float" and node.args[0].kind == "int":
            rate = _rate(node.args[0], axis)
            if rate:
                at_first = lower(ir.to_float(ir.substitute(node.args[0], {Index(axis): first})))
                rates[node] = at_first, rate
                found[node] = codes.infix(
                    "-" if rate < 0 else "+", at_first, _times(codes, abs(rate), step), "float", SUM
                )
        elif node.op == "mul" and len(node.args) == 2:
            for factor, number in (node.args, node.args[::-1]):
                if number in rates and axis not in factor.axes:
                    at_first, rate = rates[number]
                    by, much = lower(factor), _times(codes, abs(rate), step)
                    shift = codes.infix("*", by, at_first, "float", PRODUCT)
                    sign = "-" if rate < 0 else ""
                    slots = (UNARY if rate < 0 else 0, 0, 0)
                    found[node] = codes.make(
                        f"fmaf({sign}{{}}, {{}}, {{}})", (by, much, shift), "float", ATOM, slots
                    )
    return found


def falls(x: Node, axis: Axis) -> bool:
    """Whether ``x`` falls steadily along ``axis``, apart from values that may be anything."""
    trend = _trend(x, axis)
    return trend is not None and trend < 0


def _trend(x: Node, axis: Axis) -> int | None:
    """Whether ``x`` rises (1), falls (-1) or does neither (0) along ``axis``; None where that is not seen."""
    if not ir.depends(x, [Index(axis)]):
        return 0
    if not isinstance(x, Map):
        return None
    if x.op == "to_float" and x.args[0].kind == "int":
        rate = _rate(x.args[0], axis)
        return (rate > 0) - (rate < 0) if rate else None
    if x.op == "neg":
        trend = _trend(x.args[0], axis)
        return None if trend is None else -trend
    if x.op == "mul":
        for factor, moved in (x.args, x.args[::-1]):
            trend = _trend(moved, axis)
            if trend is not None and positive(factor):
                return trend
            if trend is not None and positive(ir.neg(factor)):
                return -trend
        return None
    if x.op != "add":
        return None
    trends = {_trend(arg, axis) for arg in x.args} - {0}
    return trends.pop() if len(trends) == 1 else None


def _rate(x: Node, axis: Axis) -> int:
    """By how much an integer rises from one position of ``axis`` to the next; 0 if not steadily."""
    terms, _ = ir.linear(x)
    rate = terms.get(Index(axis), 0)
    others = (term for term in terms if term is not Index(axis))
    return 0 if any(axis in term.axes for term in others) else rate


def _times(codes: Codes, factor: int, step: Code) -> Code:
    return (
        step if factor == 1 else codes.infix("*", codes.leaf(f"{factor}.0f", "float"), step, "float", PRODUCT)
    )
