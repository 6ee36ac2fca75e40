"""From expressions to a `Graph`: arguments numbered, outputs laid out, equal programs made one object."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from fagen.errors import DtypeError
from fagen.ir.check import check
from fagen.ir.graph import (
    Axis,
    Graph,
    Input,
    Node,
    Output,
    Scalar,
    Size,
    sort_axes,
    split_heads,
    substitute,
    walk,
)
from fagen.lang.axes import STANDARD
from fagen.lang.expr import Expr, captures_of, describe, fault

Arguments: TypeAlias = "tuple[Input | Scalar, ...]"


class Traced(NamedTuple):
    """A program as a graph, and the ``captured`` values that follow the call's own arguments in it."""

    graph: Graph
    captured: tuple[Any, ...]


def output_layout(axes: tuple[Axis, ...], first: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes of a result in memory: in the order of ``first``, ``dv`` for ``d``, the others canonical."""
    present = set(axes)
    if {"hk", "g"} <= present:
        present = present - {"hk", "g"} | {"h"}
    order = [axis for axis in first if axis in present or (axis == "d" and "dv" in present)]
    order = ["dv" if axis == "d" and "d" not in present else axis for axis in order]
    for axis in sort_axes(present - set(order)):
        place = next((i for i, other in enumerate(order) if _before(axis, other)), len(order))
        order.insert(place, axis)
    return tuple(order)


def _before(axis: Axis, other: Axis) -> bool:
    first, second = split_heads((axis,))[0], split_heads((other,))[0]
    return sort_axes((first, second))[0] == first


_graphs: WeakValueDictionary[Graph, Graph] = WeakValueDictionary()


def finish(
    name: str,
    arguments: Arguments,
    outputs: tuple[Expr, ...],
    names: tuple[str, ...],
    layouts: tuple[tuple[Axis, ...], ...] | None = None,
    about: str = "",
) -> Traced:
    """A traced program as a graph; the same structure gives the same `Graph` object.

    ``layouts`` of the outputs follow the first tensor argument where they are not given.
    """
    captures = captures_of(*outputs)
    nodes = tuple(output.node for output in outputs)
    held = tuple([each.node for each in captures])
    graph, used = numbered(name, arguments, nodes, names, layouts, about, held)
    return Traced(graph, tuple(captures[i].value for i in used))


@lru_cache(maxsize=4096)
def numbered(
    name: str,
    arguments: Arguments,
    nodes: tuple[Node, ...],
    names: tuple[str, ...],
    layouts: tuple[tuple[Axis, ...], ...] | None,
    about: str,
    held: tuple[Input | Scalar, ...],
) -> tuple[Graph, tuple[int, ...]]:
    """The graph with what captures hold as its last arguments, and which of them those are.

    An axis that a captured table alone has, and is indexed along, goes by a number, in messages and text too:
    tables that differ in its name alone are one program.
    """
    below = set(walk(nodes))
    others = {axis for node in below if not isinstance(node, Input) for axis in node.axes}
    others |= {node.axis for node in below if isinstance(node, Size)} | {*STANDARD}
    others |= {axis for node in (*arguments, *nodes) for axis in node.axes}
    own = (axis for i in itertools.count() if (axis := f"i{i}") not in others)
    used = tuple(i for i, node in enumerate(held) if node in below)
    numbered: dict[Node, Node] = {}
    every = list(arguments)
    taken = {argument.name for argument in arguments}
    for i in used:
        node = held[i]
        label = unused(node.name, taken)
        taken.add(label)
        made = replace_argument(node, label, len(every))
        if isinstance(made, Input):
            layout = tuple(axis if axis in others else next(own) for axis in made.layout)
            made = Input(made.name, made.position, layout, made.stored, made.sorted)
        numbered[node] = made
        every.append(made)
    first = next((argument.layout for argument in arguments if isinstance(argument, Input)), ())
    laid_out = layouts or tuple(output_layout(node.axes, first) for node in nodes)
    outputs = tuple(
        Output(substitute(node, numbered), label, layout)
        for node, label, layout in zip(nodes, names, laid_out, strict=True)
    )
    graph = Graph(name, tuple(every), outputs, about)
    check(graph)
    return _graphs.setdefault(graph, graph), used


def unused(name: str, taken: set[str]) -> str:
    """``name``, with a number where it is taken."""
    return next(
        label for i in range(1, len(taken) + 2) if (label := name if i == 1 else f"{name}_{i}") not in taken
    )


def replace_argument(node: Input | Scalar, name: str, position: int) -> Input | Scalar:
    """The same argument under another name and place."""
    if isinstance(node, Scalar):
        return Scalar(name, position, node.stored)
    return Input(name, position, node.layout, node.stored, node.sorted)


def results_of(returned: object) -> tuple[Expr, ...]:
    """What a program returned, as expressions."""
    values = returned if isinstance(returned, tuple | list) else (returned,)
    if not values or returned is None:
        raise fault("it returns nothing", works="return an expression, or several")
    for value in values:
        if not isinstance(value, Expr):
            raise fault(f"it returns {value!r}, which is no expression", kind=DtypeError)
        if value.node.kind != "float":
            raise fault(
                f"it returns {describe(value.node)}, which holds no floating-point values",
                works="return fg.where(x, 1.0, 0.0), or 1.0 * x",
                kind=DtypeError,
            )
    return tuple(values)
