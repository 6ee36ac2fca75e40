"""Named checks on a graph, and the lengths a call's tensors give to its axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fagen.errors import DtypeError, UsageError
from fagen.ir.graph import (
    Axis,
    Contract,
    Graph,
    Index,
    Input,
    Kind,
    Load,
    Node,
    Random,
    Scalar,
    Scatter,
    Size,
    Symbol,
    index,
    split_heads,
    walk,
)
from fagen.ir.show import join_heads, show
from fagen.ir.stack import room_for


def _nodes(graph: Graph) -> list[Node]:
    return walk(output.node for output in graph.outputs)


@lru_cache(maxsize=1024)
def direct_inputs(graph: Graph) -> tuple[Input, ...]:
    """The tensors read at their own position; one that is only indexed may have any lengths."""
    used: dict[Node, None] = {}
    for node in _nodes(graph):
        operands = node.args[1:] if isinstance(node, Load | Scatter) else node.args
        used.update(dict.fromkeys(operands))
    used.update(dict.fromkeys(output.node for output in graph.outputs))
    return tuple(argument for argument in graph.arguments if isinstance(argument, Input) and argument in used)


def declared_axes(graph: Graph) -> frozenset[Axis]:
    """Every axis some tensor argument has, ``h`` as ``hk`` and ``g``."""
    axes = {axis for argument in graph.arguments for axis in argument.axes}
    return frozenset(axes | ({"g"} if "hk" in axes else set()))


# -------------------------------------------------------------------------------------------------- checks


def arguments_are_used(graph: Graph) -> None:
    """Every argument has a part in some output."""
    below = set(_nodes(graph))
    for argument in graph.arguments:
        if argument not in below:
            raise UsageError(
                f"no output depends on the argument {show(argument)}",
                call=graph.name,
                works="use it, or leave it out of the parameters",
            )


def axes_are_declared(graph: Graph) -> None:
    """Every index and every length is of an axis some tensor has."""
    known = declared_axes(graph)
    for node in _nodes(graph):
        if isinstance(node, Index | Size) and node.axis not in known:
            what = "the position along" if isinstance(node, Index) else "the length of"
            raise UsageError(
                f"{what} {node.axis} is used, and no argument has that axis",
                call=graph.name,
                works=f"the axes are {', '.join(join_heads(sorted(known)))}",
            )


def outputs_are_laid_out(graph: Graph) -> None:
    """An output's layout holds exactly the axes of its value, and each of them has a length."""
    bound = set(split_heads(_places(graph).direct))
    bound |= {"g"} if "hk" in bound else set()
    for output in graph.outputs:
        if set(split_heads(output.layout)) != set(output.node.axes):
            raise UsageError(
                f"the output {output.name} has the axes {_list(output.node.axes)}",
                call=graph.name,
                works=f"its layout says {_list(output.layout)}",
            )
        for axis in output.node.axes:
            if axis not in bound:
                raise UsageError(
                    f"the output {output.name} has the axis {axis}, whose length no argument gives",
                    call=graph.name,
                    works=f"the axes with a length are {_list(sorted(bound))}",
                )
        if "g" in output.node.axes and "hk" not in output.node.axes:
            raise UsageError(
                f"the output {output.name} has lost hk and still depends on the query head",
                call=graph.name,
                works='reduce over="h"',
            )


def contractions_have_their_axis(graph: Graph) -> None:
    """Both operands of a contraction have the axis it sums."""
    for node in _nodes(graph):
        if isinstance(node, Contract):
            for operand in (node.x, node.y):
                if node.over not in operand.axes:
                    raise UsageError(
                        f"dot is over {node.over}, an axis that {show(operand)} does not have",
                        call=graph.name,
                    )


def indices_are_integers(graph: Graph) -> None:
    """A table has one integer index for each of its axes."""
    for node in _nodes(graph):
        if isinstance(node, Load | Scatter):
            if len(node.indices) != len(node.table.layout):
                raise UsageError(
                    f"{show(node.table)} has {len(node.indices)} indices for {len(node.table.layout)} axes",
                    call=graph.name,
                )
            for place in node.indices:
                if place.kind != "int":
                    raise DtypeError(
                        f"the index {show(place)} of {show(node.table)} is no integer", call=graph.name
                    )


def positions_are_in_order(graph: Graph) -> None:
    """Arguments are numbered as they stand, and are the only inputs."""
    for place, argument in enumerate(graph.arguments):
        if argument.position != place:
            raise UsageError(
                f"the argument {argument.name} is number {argument.position} and stands at {place}",
                call=graph.name,
            )
    known = set(graph.arguments)
    for node in _nodes(graph):
        if isinstance(node, Input | Scalar) and node not in known:
            raise UsageError(f"{show(node)} is no argument of the program", call=graph.name)
        if isinstance(node, Symbol):
            raise UsageError(f"the symbol {node.name} stands in a program", call=graph.name)


def dropouts_are_numbered(graph: Graph) -> None:
    """Random bits are drawn for pairs of a query and a key, and the program has both."""
    known = declared_axes(graph)
    for node in _nodes(graph):
        if isinstance(node, Random) and not set(node.axes) <= known:
            raise UsageError(
                "dropout needs the axes b, h, q and kv",
                call=graph.name,
                works=f"the axes are {_list(sorted(known))}",
            )


MOST_DEPTH = 500
"""Operations nested in one another; what works on a formula calls itself for each of them."""


def formulas_are_shallow(graph: Graph) -> None:
    """No output nests more than `MOST_DEPTH` operations."""
    for output in graph.outputs:
        if output.node.depth > MOST_DEPTH:
            raise UsageError(
                f"the output {output.name} nests {output.node.depth:,} operations in one another",
                call=graph.name,
                works=f"{MOST_DEPTH:,} are worked on; a table may hold what takes more steps",
            )


CHECKS: tuple[Callable[[Graph], None], ...] = (
    positions_are_in_order,
    axes_are_declared,
    contractions_have_their_axis,
    indices_are_integers,
    dropouts_are_numbered,
    outputs_are_laid_out,
    arguments_are_used,
)


def check(graph: Graph) -> None:
    """Run every check; the first that fails raises a `UsageError` or `DtypeError` naming the program."""
    formulas_are_shallow(graph)
    with room_for(graph):
        for one in CHECKS:
            one(graph)


def _list(axes: Sequence[Axis]) -> str:
    return " ".join(join_heads(axes)) or "(none)"


# ------------------------------------------------------------------------------------------------ lengths


@dataclass(frozen=True)
class _Places:
    """Where an axis stands: (argument's place, dimension) for each tensor that has it, as declared.

    ``direct`` are those read at their own position along it, ``indexed`` those reached otherwise.
    """

    direct: dict[Axis, tuple[tuple[int, int], ...]]
    indexed: dict[Axis, tuple[tuple[int, int], ...]]
    used: frozenset[Axis]


@lru_cache(maxsize=1024)
def _places(graph: Graph) -> _Places:
    direct: dict[Axis, list[tuple[int, int]]] = {}
    indexed: dict[Axis, list[tuple[int, int]]] = {}
    read = {(argument, axis) for argument in direct_inputs(graph) for axis in argument.layout}
    for node in _nodes(graph):
        if isinstance(node, Load):
            pairs = zip(node.table.layout, node.indices, strict=True)
            read |= {(node.table, axis) for axis, place in pairs if place is index(axis)}
    for place, argument in enumerate(graph.arguments):
        if isinstance(argument, Input):
            for dimension, axis in enumerate(argument.layout):
                into = direct if (argument, axis) in read else indexed
                into.setdefault(axis, []).append((place, dimension))
    used = {node.axis for node in _nodes(graph) if isinstance(node, Index | Size)}
    return _Places(
        {axis: tuple(places) for axis, places in direct.items()},
        {axis: tuple(places) for axis, places in indexed.items()},
        frozenset(used),
    )


def bind_sizes(graph: Graph, shapes: Sequence[Sequence[int] | None]) -> dict[Axis, int]:
    """The length of each axis, ``h`` as ``hk`` times ``g``, from the shapes of a call's arguments.

    ``shapes`` has an entry for each argument of the graph (None for a scalar). A dimension of length 1
    broadcasts; one that is only reached by another index has any length, and gives its axis one where nothing
    else does. Raises `UsageError` naming the tensors, the axis and the numbers where they disagree.
    """
    if len(shapes) != len(graph.arguments):
        raise UsageError(
            f"{len(shapes)} values were given for {len(graph.arguments)} arguments",
            call=graph.name,
            works=f"it takes {', '.join(argument.name for argument in graph.arguments)}",
        )
    for argument, shape in zip(graph.arguments, shapes, strict=True):
        if isinstance(argument, Input) and (shape is None or len(shape) != len(argument.layout)):
            raise UsageError(
                f"{argument.name} has the shape {None if shape is None else tuple(shape)}",
                call=graph.name,
                works=f"it has the axes {' '.join(argument.layout) or '(none)'}",
            )
    places = _places(graph)
    lengths = {axis: _length(graph, axis, where, shapes) for axis, where in places.direct.items()}
    for axis, where in places.indexed.items():
        if axis not in lengths:
            if axis in places.used or (axis in ("h", "hk") and places.used & {"hk", "g"}):
                lengths[axis] = _length(graph, axis, where, shapes)
            else:
                lengths[axis] = max(_extent(shapes, place) for place in where)
    return _split(graph, lengths, shapes)


def _extent(shapes: Sequence[Sequence[int] | None], place: tuple[int, int]) -> int:
    shape = shapes[place[0]]
    return 1 if shape is None else shape[place[1]]


def _length(
    graph: Graph, axis: Axis, places: tuple[tuple[int, int], ...], shapes: Sequence[Sequence[int] | None]
) -> int:
    length, first = 1, places[0]
    for place in places:
        extent = _extent(shapes, place)
        if extent == 1 or extent == length:
            continue
        if length != 1:
            raise UsageError(
                f"{graph.arguments[first[0]].name} has {axis} = {length:,} and "
                f"{graph.arguments[place[0]].name} has {axis} = {extent:,}",
                call=graph.name,
                works="an axis has one length, or 1 where it broadcasts",
            )
        length, first = extent, place
    return length


def _split(graph: Graph, lengths: dict[Axis, int], shapes: Sequence[Sequence[int] | None]) -> dict[Axis, int]:
    """``h`` as the pair ``hk, g``."""
    q_heads, kv_heads = lengths.pop("h", None), lengths.get("hk")
    if q_heads is None:
        return {**lengths, "g": 1} if kv_heads is not None else lengths
    if kv_heads is None:
        return {**lengths, "hk": q_heads, "g": 1}
    if kv_heads == 0 or q_heads % kv_heads:
        if q_heads == 0:
            return {**lengths, "g": 0 if kv_heads else 1}
        with_h, with_hk = (
            next(a.name for a in graph.arguments if isinstance(a, Input) and axis in a.layout)
            for axis in ("h", "hk")
        )
        raise UsageError(
            f"{with_h} has {q_heads} query heads and {with_hk} has {kv_heads} key heads",
            call=graph.name,
            works="the first has to be a multiple of the second",
        )
    return {**lengths, "g": q_heads // kv_heads}


# -------------------------------------------------------------------------------------------------- dtypes


def bind_dtypes(graph: Graph, stored: Sequence[Kind | None], dtypes: Sequence[object]) -> None:
    """Refuse tensors that hold another kind than declared, and contractions of two different dtypes.

    ``stored`` is the kind of each argument's value and ``dtypes`` its dtype (None for a scalar).
    """
    names = dict(zip(graph.arguments, dtypes, strict=True))
    for argument, kind, dtype in zip(graph.arguments, stored, dtypes, strict=True):
        if isinstance(argument, Input) and kind != argument.stored:
            raise DtypeError(
                f"{argument.name} holds {dtype}",
                call=graph.name,
                works=f"it is declared to hold {argument.stored} values",
            )
    multiplied = _multiplied(graph)
    if len({str(names[argument]) for argument in multiplied}) > 1:
        listed = ", ".join(f"{argument.name} {names[argument]}" for argument in multiplied)
        raise DtypeError(
            f"the tensors that are multiplied differ in dtype: {listed}",
            call=graph.name,
            works="convert them to one",
        )


@lru_cache(maxsize=1024)
def _multiplied(graph: Graph) -> tuple[Input, ...]:
    """Floating-point tensors that are themselves operands of a contraction."""
    operands = {arg for node in _nodes(graph) if isinstance(node, Contract) for arg in node.args}
    return tuple(a for a in graph.arguments if isinstance(a, Input) and a in operands and a.stored == "float")


def by_name(graph: Graph, values: Mapping[str, object]) -> tuple[object, ...]:
    """The values of arguments given by name, in the order of the graph."""
    unknown = set(values) - {argument.name for argument in graph.arguments}
    missing = [argument.name for argument in graph.arguments if argument.name not in values]
    if unknown or missing:
        what = (
            f"{', '.join(sorted(unknown))} is unknown" if unknown else f"{', '.join(missing)} was not given"
        )
        raise UsageError(
            what, call=graph.name, works=f"it takes {', '.join(a.name for a in graph.arguments)}"
        )
    return tuple(values[argument.name] for argument in graph.arguments)
