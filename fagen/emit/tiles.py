"""Tiles that hold a tensor as it is: copied in vectors, where anything else is computed element by
element."""

from __future__ import annotations

from fagen.emit.code import ATOM, Code, Split
from fagen.emit.scope import axis_name
from fagen.ir.graph import Axis, Input, Load, Node

LONG = 8
"""Instructions of a computation, roughly, from which on nothing read from memory should wait for it."""
_COPIED = ("fp32", "fp16", "bf16")


def plain_read(node: Node, code: Code, split: Split, storage: str, rows: Axis | None, columns: Axis) -> str:
    """``data, row step, column step`` of a tile that holds ``node`` as it lies in memory; "" if it holds
    more.

    ``code`` is what reads an element: a pointer, then a position and a step for each axis that varies.
    """
    if not isinstance(node, Input) or storage not in _COPIED:
        return ""
    pointer, *steps = code.args
    if len(steps) % 2:
        return ""  # it lies in pieces
    found = {position.form: split.text(step) for position, step in zip(steps[::2], steps[1::2], strict=True)}
    names = [axis_name(axis) if axis is not None else "" for axis in (rows, columns)]
    if set(found) - set(names):
        return ""
    return ", ".join([split.text(pointer, ATOM), *(found.get(name, "0") for name in names)])


def reads(root: Node) -> list[Node]:
    """What ``root`` reads from memory: named on their own, reads don't wait for a condition, nor for each
    other."""
    found: dict[Node, None] = {}
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, Input | Load):
            found[node] = None
        stack.extend(node.indices if isinstance(node, Load) else node.args)
    return list(found)
