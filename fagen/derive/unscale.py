"""A positive number that every element is multiplied by leaves a maximum: ``max(c x) = c max x``.

Exact in floating point, too, since rounding keeps order. What is subtracted from ``c x`` is then ``c`` times
what is exactly the largest ``x``, and ``exp(c x - c m)`` one multiply-add and a power.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fagen.derive.running import old
from fagen.derive.signs import positive
from fagen.derive.walk import Stage, State, Walk
from fagen.ir import graph as ir
from fagen.ir.graph import Const, Map, Node


def unscaled(stage: Stage) -> Stage:
    """``stage`` with its maxima taken over unscaled values, and the numbers put back where they are used."""
    names: dict[Node, Node] = {}
    walks = []
    for walk in stage.walks:
        states = []
        for state in walk.states:
            factor, rest = _factor(state)
            if factor is not None:
                for symbol in (state.symbol, old(state.symbol)):
                    names[symbol] = ir.mul(symbol, factor)
                    names[ir.finite(symbol)] = ir.mul(ir.finite(symbol), factor)
            states.append(_renamed(replace(state, value=rest), names))
        stores = tuple(replace(out, node=ir.substitute(out.node, names)) for out in walk.stores)
        partials = tuple(replace(each, value=ir.substitute(each.value, names)) for each in walk.partials)
        walks.append(Walk(walk.guard, walk.products, tuple(states), stores, partials))
    outputs = tuple(replace(out, node=ir.substitute(out.node, names)) for out in stage.outputs)
    return replace(stage, walks=tuple(walks), outputs=outputs) if names else stage


def _factor(state: State) -> tuple[Node | None, Node]:
    """What leaves the maximum of a state, and what stays."""
    value = state.value
    if state.op == "max" and isinstance(value, Map) and value.op == "mul":
        for rest, factor in (value.args, value.args[::-1]):
            if not factor.axes and positive(factor):
                return factor, rest
    return None, value


def _renamed(state: State, names: dict[Node, Node]) -> State:
    rescale = ir.substitute(state.rescale, names) if state.rescale is not None else None
    return replace(state, value=ir.substitute(state.value, names), rescale=rescale)


def common_factor(x: Node, y: Node) -> tuple[Node, Node, Node]:
    """``x`` and ``y`` without a number both are multiplied by, and that number; 1 where there is none."""
    if isinstance(x, Map) and isinstance(y, Map) and x.op == y.op == "mul":
        for a, c in (x.args, x.args[::-1]):
            for b, d in (y.args, y.args[::-1]):
                if c is d and not c.axes:
                    return a, b, c
    return x, y, ir.ONE


def differences(x: Node) -> Iterator[tuple[Node, Node, Node]]:
    """Each (a, b, c) by which ``x`` is ``c a - c b``, where ``c`` is a number; 1 where there is none."""
    if not isinstance(x, Map) or len(x.args) != 2:
        return
    for one, other in (x.args, x.args[::-1]):
        if x.op == "mul" and not other.axes:
            for a, b, c in differences(one):
                yield a, b, ir.mul(c, other)
        elif x.op == "add" and _negative(other):
            yield common_factor(one, ir.neg(other))


def gathered(x: Node) -> Node:
    """``x`` with ``c a - c b`` as ``c (a - b)``, as it is read best."""
    done: dict[Node, Node] = {}
    for node in ir.walk([x]):
        made = ir.rebuild(node, tuple(done[arg] for arg in node.args)) if node.args else node
        if isinstance(made, Map) and made.op == "add":
            found = (each for each in differences(made) if each[2] is not ir.ONE)
            made = next((ir.mul(ir.sub(a, b), c) for a, b, c in found), made)
        done[node] = made
    return done[x]


def _negative(x: Node) -> bool:
    """Whether ``x`` is written with a minus."""
    if not isinstance(x, Map) or x.op not in ("neg", "mul", "div"):
        return False
    return x.op == "neg" or any(isinstance(arg, Const) and arg.value < 0 for arg in x.args)
