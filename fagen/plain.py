"""A program as plain C++: a loop for each product, reduction and output, in double, nothing fused or tiled.

What a saved kernel is checked against where there is no Python. Tensors are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fagen.emit.render import laid_out, render
from fagen.ir.graph import (
    Axis,
    Const,
    Contract,
    Graph,
    Index,
    Input,
    Load,
    Map,
    Node,
    Output,
    Random,
    Reduce,
    Scalar,
    Size,
    sort_axes,
    walk,
)
from fagen.ir.show import length_name, show, show_definition, with_axes

TYPES: Mapping[str, str] = {"float": "double", "int": "long long", "bool": "bool"}
"""The C++ type of each kind of value."""


def _infix(sign: str) -> Callable[..., str]:
    return lambda *args: f" {sign} ".join(args)


def _call(name: str) -> Callable[..., str]:
    return lambda *args: f"{name}({', '.join(args)})"


_MEANING: Mapping[str, Callable[..., str]] = {
    "add": _infix("+"),
    "mul": _infix("*"),
    "neg": lambda x: f"-{x}",
    "div": _infix("/"),
    "quotient": lambda x, y: f"{y} == 0 ? 0 : {x} / {y}",
    "finite": lambda x: f"{x} == -INFINITY ? 0 : {x}",
    "floordiv": _call("floor_div"),
    "mod": lambda x, y: f"{x} - floor_div({x}, {y}) * {y}",
    "minimum": lambda x, y: f"{x} < {y} ? {x} : {y}",
    "maximum": lambda x, y: f"{x} > {y} ? {x} : {y}",
    "abs": lambda x: f"{x} < 0 ? -{x} : {x}",
    "tanh_fast": _call("tanh"),
    "rsqrt": lambda x: f"1 / sqrt({x})",
    "to_float": lambda x: x,
    "to_int": lambda x: x,
    "lt": _infix("<"),
    "le": _infix("<="),
    "eq": _infix("=="),
    "and": _infix("&&"),
    "or": _infix("||"),
    "not": lambda x: f"!{x}",
    "where": lambda condition, x, y: f"{condition} ? {x} : {y}",
}
"""Each operation of names; any other is a function of <math.h> under its own name."""


@dataclass(frozen=True)
class Loop:
    """A nest of loops over ``axes`` and, inside them, ``statements`` that end in a value of ``name``.

    ``op`` is None for an output, else how values along ``over`` are joined; ``comment`` is the equation.
    """

    name: str
    axes: tuple[Axis, ...]
    over: Axis | None
    op: str | None
    statements: tuple[str, ...]
    value: str
    place: str
    count: str
    comment: str


def _position(axes: Sequence[Axis]) -> str:
    """The place of an element in a contiguous array over ``axes``, heads split."""
    place = ""
    for axis in axes:
        place = f"{_grouped(place)} * {length_name(axis)} + i_{axis}" if place else f"i_{axis}"
    return place or "0"


def _grouped(text: str) -> str:
    return f"({text})" if " " in text else text


def _count(axes: Sequence[Axis]) -> str:
    return " * ".join(map(length_name, axes)) or "1"


class _Program:
    """The loops of a graph, and the names of what they fill."""

    def __init__(self, graph: Graph) -> None:
        self._arrays: dict[Node, str] = {}
        self._shown: dict[Node, str] = {}
        self.loops: list[Loop] = []
        for node in walk(output.node for output in graph.outputs):
            if isinstance(node, Contract | Reduce):
                self._add(node)
        for i, output in enumerate(graph.outputs):
            self._output(i, output)

    def _add(self, node: Contract | Reduce) -> None:
        name = f"t{len(self._arrays)}"
        body = _Body(self._arrays)
        if isinstance(node, Contract):
            value, op = f"{body.name(node.x)} * {body.name(node.y)}", "sum"
        else:
            value, op = body.name(node.x), node.op
        equation = show_definition(node, name, self._shown)
        self.loops.append(
            Loop(
                name,
                node.axes,
                node.over,
                op,
                tuple(body.statements),
                value,
                _position(node.axes),
                _count(node.axes),
                equation,
            )
        )
        self._arrays[node] = name
        self._shown[node] = with_axes(name, node.axes)

    def _output(self, number: int, output: Output) -> None:
        body = _Body(self._arrays)
        value = body.name(output.node)
        axes = tuple(part for axis in output.layout for part in (("hk", "g") if axis == "h" else (axis,)))
        self.loops.append(
            Loop(
                f"out{number}",
                axes,
                None,
                None,
                tuple(body.statements),
                value,
                _position(axes),
                _count(axes),
                f"{with_axes(output.name, output.layout)} = {show(output.node, self._shown)}",
            )
        )


class _Body:
    """The statements of one nest: every operation once, in order."""

    def __init__(self, arrays: Mapping[Node, str]) -> None:
        self._arrays = arrays
        self._names: dict[Node, str] = {}
        self.statements: list[str] = []

    def name(self, root: Node) -> str:
        """What stands for a value in the innermost loop."""
        stack = [root]
        while stack:
            node = stack[-1]
            missing = [arg for arg in node.args if arg not in self._names and node not in self._arrays]
            if missing and not isinstance(node, Load):
                stack.extend(missing)
                continue
            if isinstance(node, Load) and (unknown := [i for i in node.indices if i not in self._names]):
                stack.extend(unknown)
                continue
            stack.pop()
            if node not in self._names:
                self._names[node] = self._text(node)
        return self._names[root]

    def _text(self, node: Node) -> str:
        if node in self._arrays:
            return f"{self._arrays[node]}[{_position(node.axes)}]"
        if isinstance(node, Const):
            return _number(node.value)
        if isinstance(node, Size):
            return length_name(node.axis)
        if isinstance(node, Index):
            return f"i_{node.axis}"
        if isinstance(node, Scalar):
            return f"in{node.position}"
        if isinstance(node, Input):
            axes = tuple(part for axis in node.layout for part in (("hk", "g") if axis == "h" else (axis,)))
            return f"in{node.position}[{_position(axes)}]"
        if isinstance(node, Load):
            return self._kept(node, f"in{node.table.position}[{self._gathered(node)}]")
        if isinstance(node, Random):
            return self._kept(node, f"random_bits(seed, {node.ordinal}, i_b, i_hk * group + i_g, i_q, i_kv)")
        assert isinstance(node, Map)
        args = [self._names[arg] for arg in node.args]
        write = _MEANING.get(node.op) or _call(node.op)
        return self._kept(node, write(*args))

    def _gathered(self, node: Load) -> str:
        place = ""
        for axis, index in zip(node.table.layout, node.indices, strict=True):
            extent = "kv_heads * group" if axis == "h" else length_name(axis)
            step = f"clamped({self._names[index]}, {extent})"
            place = f"{_grouped(place)} * {_grouped(extent)} + {step}" if place else step
        return place or "0"

    def _kept(self, node: Node, text: str) -> str:
        name = f"x{len(self.statements)}"
        self.statements.append(f"const {TYPES[node.kind]} {name} = {text};")
        return name


def _number(value: float | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value}LL" if value >= 0 else f"({value}LL)"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    if math.isnan(value):
        return "NAN"
    return repr(value) if value >= 0 else f"({value!r})"


def loops(graph: Graph) -> tuple[Loop, ...]:
    """The loops of a program in order; those of its outputs come last."""
    return tuple(_Program(graph).loops)


def axes_of(graph: Graph) -> tuple[Axis, ...]:
    """Every axis some argument has, heads split: the order of the lengths that `plain_text` takes."""
    axes = {axis for argument in graph.arguments for axis in argument.axes}
    return sort_axes(axes | ({"g"} if "hk" in axes else set()))


def plain_text(graph: Graph) -> str:
    """The header ``plain.h``: ``plain::compute(lengths, in0, ..., seed, out0, ...)``."""
    parameters = [
        f"const {TYPES[argument.stored]}* in{argument.position}"
        if isinstance(argument, Input)
        else f"{TYPES[argument.stored]} in{argument.position}"
        for argument in graph.arguments
    ]
    parameters += ["unsigned long long seed"] * graph.random
    parameters += [f"double* out{i}" for i in range(len(graph.outputs))]
    text = render(
        "launcher/plain.h.j2",
        graph=graph,
        lengths=[length_name(axis) for axis in axes_of(graph)],
        length=length_name,
        parameters=parameters,
        nests=loops(graph),
    )
    return laid_out(text)
