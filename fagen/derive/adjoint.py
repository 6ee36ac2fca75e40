"""Reverse mode on the graph: the gradient of each node is a graph, too.

Gradients are selected, never multiplied by 0: the adjoint of ``where`` is ``where``. A value that was
broadcast sums its gradient over the axes it lacks; a gathered one only where it lacks a position, as then
fewer values than pairs are left to add. Equal arguments of a maximum share its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import singledispatch
from types import MappingProxyType

from fagen.ir import graph as ir
from fagen.ir.graph import (
    KEY_AXIS,
    MINUS_INF,
    ONE,
    OPEN_AXES,
    ZERO,
    Axis,
    Const,
    Contract,
    Index,
    Input,
    Load,
    Map,
    Node,
    Reduce,
    Scatter,
)

_HALF = Const(0.5)
_POSITIONS = frozenset(("q", KEY_AXIS))


def adjoints(
    seeds: Mapping[Node, Node],
    wanted: Iterable[Input],
    constants: Iterable[Node],
    known: Mapping[Node, Node] = MappingProxyType({}),
) -> dict[Node, Node]:
    """The gradient of each of ``wanted`` that ``seeds`` depend on, by input, with the axes it has there.

    ``seeds`` holds the gradient of each result; ``constants`` are nodes that pass none on; ``known`` the
    gradients of inputs and of values read from them that need not be made from those of what uses them.
    """
    order = ir.walk(seeds)
    stopped, asked = set(constants), set[Node](wanted)
    leads: set[Node] = set()
    for node in order:
        if node not in stopped and node.kind == "float" and (node in asked or leads.intersection(node.args)):
            leads.add(node)
    found: dict[Node, Node] = {}

    def give(node: Node, gradient: Node) -> None:
        if gradient is not ZERO:
            found[node] = ir.add(found[node], gradient) if node in found else gradient

    for node, gradient in (*seeds.items(), *known.items()):
        give(node, gradient)
    for node in reversed(order):
        if node not in leads or node not in found:
            continue
        if isinstance(node, Load):
            give(node.table, Scatter(node.table, node.indices, spread(found[node], node.axes)))
            continue
        for arg, gradient, times in _parts(node, found[node]):
            if arg not in leads or arg in known:
                continue
            if isinstance(arg, Load):
                if arg.table in leads:
                    lacks = OPEN_AXES.intersection(node.axes).difference(arg.axes)
                    over = lacks if _POSITIONS & lacks else ()
                    rest = [axis for axis in node.axes if axis not in over]
                    value = spread(summed(gradient, times, over), rest)
                    give(arg.table, Scatter(arg.table, arg.indices, value))
            else:
                axes = {*node.axes, *([node.over] if isinstance(node, Contract) else [])}
                give(arg, summed(gradient, times, axes - set(arg.axes)))
    return {node: gradient for node, gradient in found.items() if node in asked}


def spread(x: Node, axes: Iterable[Axis]) -> Node:
    """``x`` at each position along ``axes``, those it lacks too."""
    for axis in ir.sort_axes(axes):
        if axis not in x.axes:
            x = ir.where(ir.le(Const(0), Index(axis)), x, ZERO)
    return x


def summed(x: Node, y: Node, over: Iterable[Axis]) -> Node:
    """The sum of ``x * y`` over some axes, inner ones first; numbers both are multiplied by leave it."""
    (x, factor), (y, other) = _numbers(x), _numbers(y)
    factor, rest = ir.mul(factor, other), list(ir.sort_axes(over))[::-1]
    shared = next((axis for axis in rest if axis in x.axes and axis in y.axes), None)
    if shared is None:
        result = ir.mul(x, y)
    else:
        result = ir.contract(x, y, shared)
        rest.remove(shared)
    for axis in rest:
        if axis in result.axes:
            result = ir.total(result, axis)
        else:
            factor = ir.mul(factor, ir.to_float(ir.size(axis)))
    return ir.mul(result, factor)


def _numbers(x: Node) -> tuple[Node, Node]:
    """``x`` as (what has axes, the numbers that is multiplied by)."""
    if not isinstance(x, Map) or not x.axes:
        return x, ONE
    if x.op == "neg":
        rest, factor = _numbers(x.args[0])
        return rest, ir.neg(factor)
    if x.op == "mul":
        (a, p), (b, q) = map(_numbers, x.args)
        if not a.axes or not b.axes:
            a, b, p = (b, ONE, ir.mul(p, a)) if not a.axes else (a, ONE, ir.mul(p, b))
        return ir.mul(a, b), ir.mul(p, q)
    if x.op == "div" and not x.args[1].axes:
        rest, factor = _numbers(x.args[0])
        return rest, ir.div(factor, x.args[1])
    if x.op == "where" and x.args[2] is ZERO:
        rest, factor = _numbers(x.args[1])
        return ir.where(x.args[0], rest, ZERO), factor
    return x, ONE


_Part = tuple[Node, Node, Node]
"""An operand, and two factors of what ``node`` adds to its gradient before it is summed."""


@singledispatch
def _parts(node: Node, gradient: Node) -> Iterator[_Part]:
    """What each operand of ``node`` is given."""
    raise AssertionError(f"{type(node).__name__} has no gradient")


@_parts.register
def _(node: Input, gradient: Node) -> Iterator[_Part]:
    return iter(())


@_parts.register
def _(node: Contract, gradient: Node) -> Iterator[_Part]:
    yield node.x, gradient, node.y
    yield node.y, gradient, node.x


@_parts.register
def _(node: Reduce, gradient: Node) -> Iterator[_Part]:
    if node.op == "sum":
        yield node.x, gradient, ONE
        return
    largest = ir.eq(node.x, node)
    ties = ir.total(ir.where(largest, ONE, ZERO), node.over)
    yield node.x, ir.where(largest, ir.div(gradient, ties), ZERO), ONE


@_parts.register
def _(node: Map, gradient: Node) -> Iterator[_Part]:
    args, op = node.args, node.op
    if op == "add":
        for arg in args:
            yield arg, gradient, ONE
    elif op == "mul":
        x, y = args
        yield x, gradient, _counted(y)
        yield y, gradient, _counted(x)
    elif op in ("div", "quotient"):
        x, y = args
        yield x, ir.rebuild(node, (gradient, y)), ONE
        yield y, ir.neg(gradient), ir.rebuild(node, (_counted(node), y))
    elif op == "where":
        condition, x, y = args
        yield x, ir.where(condition, gradient, ZERO), ONE
        yield y, ir.where(condition, ZERO, gradient), ONE
    elif op in ("maximum", "minimum"):
        for x, y in (args, args[::-1]):
            wins = ir.lt(y, x) if op == "maximum" else ir.lt(x, y)
            tied = ir.where(ir.eq(x, y), ir.mul(gradient, _HALF), ZERO)
            yield x, ir.where(wins, gradient, tied), ONE
    elif op in ("neg", "finite", "abs"):
        yield args[0], _chosen(op, args[0], gradient), ONE
    elif op not in ("floor", "to_float"):
        yield args[0], gradient, _slope(node, args[0])


def _counted(x: Node) -> Node:
    """``x``, and 0 where a mask or what a table adds makes it -inf: a gradient is 0 there, and stays 0."""
    if not isinstance(x, Map) or x.kind != "float":
        return x
    if x.op == "where":
        condition, *chosen = x.args
        return ir.where(condition, *(ZERO if arg is MINUS_INF else _counted(arg) for arg in chosen))
    if x.op == "add" and any(isinstance(arg, Input | Load) for arg in x.args):
        return ir.where(ir.lt(MINUS_INF, x), x, ZERO)
    if x.op in ("add", "mul", "div", "quotient", "neg"):
        return ir.rebuild(x, tuple(_counted(arg) for arg in x.args))
    return x


def _chosen(op: str, x: Node, gradient: Node) -> Node:
    """The gradient of an operation whose slope is 1, -1 or 0."""
    if op == "neg":
        return ir.neg(gradient)
    if op == "finite":
        return ir.where(ir.lt(MINUS_INF, x), gradient, ZERO)
    falling = ir.where(ir.lt(x, ZERO), ir.neg(gradient), ZERO)
    return ir.where(ir.lt(ZERO, x), gradient, falling)


def _slope(y: Map, x: Node) -> Node:
    """The derivative of ``y``, a function of ``x``."""
    op = y.op
    if op == "exp":
        return y
    if op == "exp2":
        return ir.mul(y, Const(math.log(2.0)))
    if op in ("log", "log2"):
        return ir.div(Const(1.0 if op == "log" else 1.0 / math.log(2.0)), x)
    if op in ("tanh", "tanh_fast"):
        return ir.sub(ONE, ir.mul(y, y))
    if op == "erf":
        return ir.mul(ir.function("exp", ir.neg(ir.mul(x, x))), Const(2.0 / math.sqrt(math.pi)))
    if op == "sqrt":
        return ir.div(_HALF, y)
    if op == "rsqrt":
        return ir.mul(ir.mul(y, ir.mul(y, y)), Const(-0.5))
    if op == "sin":
        return ir.function("cos", x)
    assert op == "cos", op
    return ir.neg(ir.function("sin", x))
