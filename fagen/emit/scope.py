"""What the text of a kernel is made from: names of axes, statements by place, comments in the user's
words."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from fagen.derive.extent import Extent
from fagen.emit.cexpr import HEAD, Expressions, Lowering
from fagen.emit.code import BLOCK, UNARY, Code, Place, Split, Splitter, Statement, Variable
from fagen.emit.params import Parameters, Tensor
from fagen.ir import graph as ir
from fagen.ir.graph import Axis, Index, Input, Map, Node, Output, Scatter, Symbol
from fagen.ir.show import show
from fagen.plan.plan import KernelPlan, Plan
from fagen.plan.profile import is_16_bit


def block_name(axis: Axis) -> str:
    """The constant that says how many positions of ``axis`` a tile has."""
    return f"BLOCK_{axis.upper()}"


# fmt: off
_RESERVED = frozenset(
    (
        "asm", "auto", "bool", "break", "case", "catch", "char", "class", "const", "constexpr",
        "continue", "default", "delete", "do", "double", "else", "enum", "explicit", "extern", "false",
        "float", "for", "friend", "goto", "if", "inline", "int", "long", "mutable", "namespace", "new",
        "operator", "private", "protected", "public", "register", "return", "short", "signed", "sizeof",
        "static", "struct", "switch", "template", "this", "throw", "true", "try", "typedef", "typename",
        "union", "unsigned", "using", "virtual", "void", "volatile", "while", "and", "or", "not", "xor",
        "p", "r", "c", "f", "e", "i", "s", "v", "full", "block", "row", "rows", "row0", "lane",
        "column", "columns", "rest", "tiles", "begin", "end", "start", "four", "weight", "weights",
        "operand", "own", "walk", "inside", "first", "sums", "any", "all", "some", "whole", "holds", "seed",
        "words", "term", "terms",
    )
)
# fmt: on
_DERIVED = re.compile(r"(acc|is|[lmnstx])\d*|\w+_(start|first|last)")
"""Names of states, of stored values, of parts of expressions and of the ends of tiles."""


def axis_name(axis: Axis) -> str:
    """What a position along ``axis`` is called in the text, where some names are taken."""
    return f"{axis}_" if axis in _RESERVED or _DERIVED.fullmatch(axis) else axis


class Surroundings:
    """Expressions and names at one position of each of ``grid_axes``.

    ``flat``: all of it stands in one function, where those positions are called as their axes.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Parameters,
        grid_axes: Sequence[Axis],
        limits: Mapping[Node, Extent],
        flat: bool = False,
    ) -> None:
        self.plan = plan
        self.parameters = parameters
        self.expressions = Expressions(parameters, dict(plan.sizes), is_16_bit(plan.problem), limits)
        self.codes = self.expressions.codes
        self.splitter = Splitter(flat)
        self.block: list[Statement] = []
        """What is computed once a block."""
        self.prefix = "" if flat else "block."
        self.grid: dict[Node, Code] = {
            Index(axis): self.codes.leaf(f"{self.prefix}{axis_name(axis)}", "int32") for axis in grid_axes
        }
        if {"hk", "g"} <= set(grid_axes):
            self.grid[HEAD] = self.codes.leaf(f"{self.prefix}h", "int32")

    def lowering(
        self,
        leaves: Mapping[Node, Code],
        nonpositive: Callable[[Node], bool] = lambda exponent: False,
        **others: Any,
    ) -> Lowering:
        """Expressions at a point where ``leaves`` are known beside the positions along the grid."""
        return Lowering(self.expressions, {**self.grid, **leaves}, nonpositive, **others)

    def split(self, roots: Iterable[tuple[Code, Place]], again: Container[Place] = ()) -> Split:
        """Statements for ``roots``; those of the block are kept for its start."""
        split = self.splitter.split(roots, again)
        self.block += split.at(BLOCK)
        return split

    def fields(self, place: Place) -> list[Variable]:
        """What the struct of a place holds beside its position."""
        return self.splitter.fields[place]

    def length(self, axis: Axis) -> str:
        """The length of an axis in the text."""
        return self.expressions.length(axis).form

    def store(self, lower: Lowering, tensor: Tensor) -> Code:
        """The element of ``tensor`` to be written at the current positions."""
        if not tensor.layout:
            return self.codes.leaf(f"*{tensor.pointer}", tensor.storage, binds=UNARY)
        return lower.element(tensor, [lower.position(axis) for axis in tensor.layout])

    def stored(self, lower: Lowering, x: Node, tensor: Tensor) -> tuple[Code, Code]:
        """Where a value goes at the current positions, or what it is added to, and the value."""
        if isinstance(x, Scatter):
            return lower.scattered(tensor, x), lower(x.value)
        return self.store(lower, tensor), lower(x)

    def says_head(self, text: str) -> bool:
        """Whether ``text``, or what is computed once a block, reads the query head as one number."""
        texts = (text, *(statement.text for statement in self.block))
        return any(re.search(rf"\b{self.prefix}h\b", each) for each in texts)

    # ----------------------------------------------------------------------------------------------- comments

    def shown(self, node: Node) -> str:
        """``node`` in the user's words, tensors with a role of their own under it."""
        return show(node, self._display([node]))

    def _display(self, roots: Sequence[Node]) -> dict[Node, str]:
        names: dict[Node, str] = {}
        for node in ir.walk(roots):
            if isinstance(node, Input):
                tensor = self.parameters.tensor(node)
                table = tensor.name.startswith("table")
                names[node] = tensor.called if table else tensor.name
            elif isinstance(node, Symbol):
                names[node] = node.name
            elif isinstance(node, Map) and node.op == "finite":
                names[node] = show(node.args[0], names)
        return names


class Scope(Surroundings):
    """The surroundings of one kernel of a plan."""

    def __init__(self, plan: Plan, kernel: KernelPlan, parameters: Parameters, flat: bool = False) -> None:
        limits = plan.problem.limits
        for ranges in kernel.ranges:
            limits.update(ranges.limits(limits) if ranges is not None else {})
        super().__init__(plan, parameters, (*kernel.grid_axes, *kernel.stage.outer), limits, flat)
        self.kernel = kernel

    def written(self, output: Output) -> Tensor:
        """The tensor that an output of the stage goes to."""
        return self.parameters.written(self.kernel.stage.name, output)


# ------------------------------------------------------------------------------------------------- functions


class Routines:
    """Functions of the emitted text: each takes what its body uses, and a call passes the same."""

    def __init__(self) -> None:
        self._parameters: dict[str, list[tuple[str, str]]] = {}

    def define(self, name: str, body: str, parameters: Sequence[str]) -> str:
        """The parameters of ``name``: those of ``parameters`` (``type name``) whose name ``body`` says."""
        kept = []
        for declared in parameters:
            own = re.findall(r"\w+", re.sub(r"\[[^\]]*\]", "", declared))[-1]
            if re.search(rf"\b{own}\b", body):
                kept.append((declared, own))
        self._parameters[name] = kept
        return ", ".join(declared for declared, _ in kept)

    def call(self, name: str, template: str = "", **values: str) -> str:
        """A call; an argument is called as its parameter, unless ``values`` say otherwise."""
        arguments = ", ".join(values.get(own, own) for _, own in self._parameters[name])
        return f"{name}{f'<{template}>' if template else ''}({arguments})"


def said(members: Sequence[Variable], prefix: str, text: str) -> list[Variable]:
    """The fields of ``members`` that ``text`` reads or assigns behind ``prefix``."""
    said = set(re.findall(rf"\b{prefix}(?:s\[r\])?\.(\w+)", text))
    return [member for member in members if re.split(r"\W", member.name)[0] in said]
