"""A node or a graph as mathematics a person can read; the same text in every process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import singledispatch

from fagen.ir import graph as ir
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
    Random,
    Reduce,
    Scalar,
    Scatter,
    Size,
    Symbol,
    linear,
    walk,
)
from fagen.ir.stack import room_for

LENGTHS: dict[Axis, str] = {
    "b": "batch",
    "hk": "kv_heads",
    "g": "group",
    "q": "q_len",
    "kv": "kv_len",
    "d": "head_dim",
    "dv": "v_head_dim",
    "part": "parts",
}
"""The length of an axis as it is called everywhere."""

MOST_NODES = 3000
"""A larger tree is cut to its name: shared parts repeat in a formula."""

# How strongly a text binds.
_OR, _AND, _NOT, _COMPARE, _ADD, _REDUCE, _MUL, _UNARY, _ATOM = range(9)

_Text = tuple[str, int]
_Names = Mapping[Node, str]


def join_heads(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Axes as a user names them: the pair ``hk, g`` is ``h``."""
    axes = tuple(axes)
    if "hk" in axes and "g" in axes:
        return tuple("h" if axis == "hk" else axis for axis in axes if axis != "g")
    return axes


def length_name(axis: Axis) -> str:
    """How the length of an axis is called in formulas."""
    return LENGTHS.get(axis, f"{axis}_len")


def show(node: Node, names: _Names | None = None) -> str:
    """``node`` as a formula, ``names`` in the place of the nodes they stand for, dots where it is long."""
    if node.size > MOST_NODES:
        if not names:
            return f"<{type(node).__name__} of {node.size} nodes>"
        names = {**_long(node, names), **names}
    with room_for(node):
        return _text(node, names or {})[0]


def _long(root: Node, names: _Names) -> dict[Node, str]:
    """Dots for what below ``root`` is too long to be written out."""
    sizes: dict[Node, int] = {}
    for node in walk([root]):
        sizes[node] = 1 if node in names else 1 + sum(sizes[arg] for arg in node.args)
    return {node: "..." for node, size in sizes.items() if size > MOST_NODES and node is not root}


def show_definition(node: Node, name: str, names: _Names | None = None) -> str:
    """An equation such as ``s[b,h,q,kv] = sum_d q[b,h,q,d] k[b,hk,kv,d]``."""
    return f"{with_axes(name, node.axes)} = {show(node, names)}"


def with_axes(name: str, axes: Iterable[Axis]) -> str:
    """A name with the axes of what it stands for, such as ``s[b,h,q,kv]``."""
    listed = ",".join(join_heads(axes))
    return f"{name}[{listed}]" if listed else name


_KINDS = {"max": "m", "sum": "l", "exp": "e", "exp2": "e", "quotient": "p"}


def show_graph(graph: Graph) -> str:
    """A whole program: its arguments, an equation for each value used more than once, and its outputs."""
    arguments = ", ".join(
        with_axes(argument.name, argument.layout) if isinstance(argument, Input) else argument.name
        for argument in graph.arguments
    )
    lines = [f"{graph.name}({arguments})"]
    names: dict[Node, str] = {}
    taken = {argument.name for argument in graph.arguments} | {output.name for output in graph.outputs}
    for node in _shared(graph):
        name = _free_name(_letter(node), taken)
        taken.add(name)
        lines.append("  " + show_definition(node, name, names))
        names[node] = with_axes(name, node.axes)
    for output in graph.outputs:
        lines.append(f"  {with_axes(output.name, output.layout)} = {show(output.node, names)}")
    return "\n".join(lines)


def _shared(graph: Graph) -> list[Node]:
    """Values worth a name: contractions, reductions, and what is used twice and is more than a few nodes."""
    nodes = walk(output.node for output in graph.outputs)
    uses: dict[Node, int] = {}
    for node in nodes:
        for arg in node.args:
            uses[arg] = uses.get(arg, 0) + 1
    results = {output.node for output in graph.outputs}
    return [
        node
        for node in nodes
        if node not in results
        and (isinstance(node, Contract | Reduce) or (uses.get(node, 0) > 1 and node.size > 5))
        and not (isinstance(node, Map) and node.op in ("neg", "finite"))
    ]


def _letter(node: Node) -> str:
    if isinstance(node, Contract):
        return "s"
    if node.kind == "bool":
        return "mask"
    op = node.op if isinstance(node, Map | Reduce) else ""
    return _KINDS.get(op, "t" if node.kind == "float" else "i")


def _free_name(letter: str, taken: set[str]) -> str:
    return next(
        name for i in range(len(taken) + 1) if (name := letter if i == 0 else f"{letter}{i}") not in taken
    )


# ------------------------------------------------------------------------------------------------- formulas


def _text(node: Node, names: _Names) -> _Text:
    return (names[node], _ATOM) if node in names else _show(node, names)


def _at(node: Node, names: _Names, level: int) -> str:
    """``node`` in a place that needs it to bind as strongly as ``level``."""
    text, binds = _text(node, names)
    return text if binds >= level else f"({text})"


@singledispatch
def _show(node: Node, names: _Names) -> _Text:
    raise AssertionError(f"no text for {type(node).__name__}")


@_show.register
def _(node: Input, names: _Names) -> _Text:
    return with_axes(node.name, node.layout), _ATOM


@_show.register
def _(node: Scalar, names: _Names) -> _Text:
    return node.name, _ATOM


@_show.register
def _(node: Symbol, names: _Names) -> _Text:
    return with_axes(node.name, node.axes), _ATOM


@_show.register
def _(node: Const, names: _Names) -> _Text:
    return number(node.value), _ATOM if node.kind == "bool" or node.value >= 0 else _UNARY


def number(value: float | int | bool) -> str:
    """A constant as a formula has it: the shortest text that gives it back."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return f"{value:.1f}"
    return repr(value)


@_show.register
def _(node: Size, names: _Names) -> _Text:
    return length_name(node.axis), _ATOM


@_show.register
def _(node: Index, names: _Names) -> _Text:
    return node.axis, _ATOM


@_show.register
def _(node: Random, names: _Names) -> _Text:
    return f"random{node.ordinal or ''}[b,h,q,kv]", _ATOM


@_show.register
def _(node: Load, names: _Names) -> _Text:
    table = names.get(node.table, node.table.name).partition("[")[0]
    indices = ", ".join(_at(index, names, _OR) for index in node.indices)
    return f"{table}[{indices}]", _ATOM


@_show.register
def _(node: Scatter, names: _Names) -> _Text:
    indices = ", ".join(_at(index, names, _OR) for index in node.indices)
    return f"scatter({node.table.name}[{indices}] += {_at(node.value, names, _OR)})", _ATOM


@_show.register
def _(node: Reduce, names: _Names) -> _Text:
    return f"{node.op}_{node.over} {_at(node.x, names, _REDUCE)}", _REDUCE


@_show.register
def _(node: Contract, names: _Names) -> _Text:
    return f"sum_{node.over} {_at(node.x, names, _UNARY)} {_at(node.y, names, _UNARY)}", _REDUCE


@_show.register
def _(node: Map, names: _Names) -> _Text:
    if node.kind == "int" and node.op in ("add", "mul", "neg"):
        return _show_linear(node, names)
    special = _SPECIAL.get(node.op)
    if special:
        return special(node, names)
    if node.op in _INFIX:
        sign, level, left, right = _INFIX[node.op]
        x, y = node.args
        return f"{_at(x, names, left)} {sign} {_at(y, names, right)}", level
    arguments = ", ".join(_at(arg, names, _OR) for arg in node.args)
    return f"{_FUNCTIONS.get(node.op, node.op)}({arguments})", _ATOM


# sign, how strongly the whole binds, what its operands need
_INFIX = {
    "div": ("/", _MUL, _MUL, _UNARY),
    "quotient": ("/", _MUL, _MUL, _UNARY),
    "floordiv": ("//", _MUL, _MUL, _UNARY),
    "mod": ("%", _MUL, _MUL, _UNARY),
    "lt": ("<", _COMPARE, _ADD, _ADD),
}

_FUNCTIONS = {"tanh_fast": "tanh", "to_int": "int"}


def _show_add(node: Map, names: _Names) -> _Text:
    """A floating-point sum, what is added first and then what is taken away."""
    terms = sorted(node.args, key=lambda arg: _negative(arg, names))
    text = _at(terms[0], names, _ADD)
    for term in terms[1:]:
        if _negative(term, names):
            text += f" - {_at(ir.neg(term), names, _REDUCE)}"
        else:
            text += f" + {_at(term, names, _REDUCE)}"
    return text, _ADD


def _negative(x: Node, names: _Names) -> bool:
    if x in names:
        return False
    if isinstance(x, Map) and x.op == "neg":
        return True
    if isinstance(x, Map) and x.op == "mul":
        return any(isinstance(arg, Const) and arg.value < 0 for arg in x.args)
    return isinstance(x, Const) and x.kind == "float" and x.value < 0


def _show_mul(node: Map, names: _Names) -> _Text:
    terms = sorted(node.args, key=lambda arg: not isinstance(arg, Const))
    if isinstance(terms[0], Const) and terms[0].value < 0:
        return f"-{_at(ir.neg(node), names, _MUL)}", _UNARY
    return _product(terms, names), _MUL


def _product(factors: Sequence[Node], names: _Names) -> str:
    """Factors joined by ``*``; a later one that is a quotient or a remainder stands in parentheses."""
    first, *others = factors
    shown = [_at(first, names, _MUL)]
    for factor in others:
        is_product = isinstance(factor, Map) and factor.op == "mul"
        shown.append(_at(factor, names, _MUL if is_product else _UNARY))
    return " * ".join(shown)


def _show_neg(node: Map, names: _Names) -> _Text:
    return f"-{_at(node.args[0], names, _UNARY)}", _UNARY


def _show_to_float(node: Map, names: _Names) -> _Text:
    return _text(node.args[0], names)


def _show_junction(node: Map, names: _Names) -> _Text:
    level = _AND if node.op == "and" else _OR
    inner = _NOT if node.op == "and" else _AND
    return f" {node.op} ".join(_at(arg, names, inner) for arg in node.args), level


def _show_not(node: Map, names: _Names) -> _Text:
    inner = node.args[0]
    if isinstance(inner, Map) and inner.op == "eq" and inner not in names:
        x, y = inner.args
        return f"{_at(x, names, _ADD)} != {_at(y, names, _ADD)}", _COMPARE
    return f"not {_at(inner, names, _NOT)}", _NOT


def _show_comparison(node: Map, names: _Names) -> _Text:
    """``kv <= q + 17``: of integers, what depends on no axis stands on the right."""
    x, y = node.args
    sign = "<=" if node.op == "le" else "=="
    if x.kind == "int" and x not in names and y not in names:
        x, sign, y = _isolated(x, sign, y)
    return f"{_at(x, names, _ADD)} {sign} {_at(y, names, _ADD)}", _COMPARE


def _isolated(x: Node, sign: str, y: Node) -> tuple[Node, str, Node]:
    terms, constant = linear(ir.sub(x, y))
    if not any(term.axes and k > 0 for term, k in terms.items()):
        terms, constant = {term: -k for term, k in terms.items()}, -constant
        sign = ">=" if sign == "<=" else sign
    left = {term: k for term, k in terms.items() if term.axes and k > 0}
    right = {term: -k for term, k in terms.items() if term not in left}
    bound = -constant
    if sign == "<=" and (bound == -1 or (not right and all(isinstance(term, Index) for term in left))):
        sign, bound = "<", bound + 1
    return ir.from_linear(left, 0), sign, ir.from_linear(right, bound)


_SPECIAL = {
    "add": _show_add,
    "mul": _show_mul,
    "neg": _show_neg,
    "to_float": _show_to_float,
    "and": _show_junction,
    "or": _show_junction,
    "not": _show_not,
    "eq": _show_comparison,
    "le": _show_comparison,
}


def _show_linear(node: Node, names: _Names) -> _Text:
    """An integer sum; the pair ``hk * group + g`` is the query head."""
    if node is ir.size("h"):
        return "q_heads", _ATOM
    terms, constant = linear(node)
    head, place = ir.mul(Index("hk"), Size("g")), Index("g")
    parts: list[tuple[int, Node | str]] = []
    for term, k in terms.items():
        if term is head and terms.get(place) == k:
            parts.append((k, "h"))
        elif not (term is place and terms.get(head) == k):
            parts.append((k, term))
    if len(parts) == 1 and not constant and parts[0][0] == 1:
        single = parts[0][1]
        if isinstance(single, str):
            return single, _ATOM
        return (_product(single.args, names), _MUL) if single is node else _text(single, names)
    text = ""
    for k, part in parts:
        if text:
            text += f" {'-' if k < 0 else '+'} {_show_term(abs(k), part, names, _MUL)}"
        elif k < 0:
            text = f"-{_show_term(-k, part, names, _UNARY)}"
        else:
            text = _show_term(k, part, names, _MUL)
    if constant:
        text += f" {'+' if constant > 0 else '-'} {abs(constant)}" if text else str(constant)
    if len(parts) > 1 or constant:
        return text, _ADD
    return text, _UNARY if parts[0][0] == -1 else _MUL


def _show_term(k: int, term: Node | str, names: _Names, level: int) -> str:
    """``k * term``, or where k is 1 the term, binding as strongly as ``level``."""
    if isinstance(term, str):
        return term if k == 1 else f"{k} * {term}"
    return _at(term, names, level) if k == 1 else f"{k} * {_at(term, names, _UNARY)}"
