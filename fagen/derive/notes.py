"""Expressions in the sentences of a `Note`: names of symbols in the place of what they stand for."""

from __future__ import annotations

from collections.abc import Iterable

from fagen.derive.separate import reductions
from fagen.ir import graph as ir
from fagen.ir.graph import Input, Map, Node, Reduce, Scalar, Symbol
from fagen.ir.show import show


def plainly(x: Node) -> str:
    """``x`` for a note: no axes, no ``finite``, which only empty rows notice."""
    plain: dict[Node, Node] = {}
    for node in ir.walk([x]):
        new = ir.rebuild(node, tuple(plain[arg] for arg in node.args)) if node.args else node
        plain[node] = new.args[0] if isinstance(new, Map) and new.op == "finite" else new
    named = (node for node in ir.walk([plain[x]]) if isinstance(node, Input | Scalar | Symbol))
    return show(plain[x], {node: node.name for node in named})


def summary(x: Node) -> str:
    """``x`` with its parts named: s for products, m and l for statistics, acc for weighted sums."""
    names: dict[Node, Node] = {}
    for node in reductions(x):
        if node is not x:
            computed = any(map(reductions, node.args))
            letter = (
                {"max": "m", "sum": "l"}[node.op] if isinstance(node, Reduce) else "acc" if computed else "s"
            )
            used = sum(isinstance(name, Symbol) and name.name.startswith(letter) for name in names.values())
            names[node] = Symbol(f"{letter}{used or ''}", node.axes, "float")
    parts = tuple(ir.substitute(arg, names) for arg in x.args)
    return plainly(ir.rebuild(x, parts) if x.args else x)


def listed(names: Iterable[str]) -> str:
    """``a, b and c``."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
