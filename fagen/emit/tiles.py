"""Tiles that hold a tensor as it is: copied in vectors, where anything else is computed element by
element."""

from __future__ import annotations

from collections.abc import Sequence

from fagen.emit.code import ATOM, Code, Split
from fagen.emit.scope import axis_name
from fagen.ir.graph import Axis, Input, Load, Node, walk

COSTLY = 60
"""Instructions of an element, roughly, beyond which few are computed at once."""
_COPIED = ("fp32", "fp16", "bf16")


def plain_read(node: Node, code: Code, split: Split, storage: str, rows: Axis | None, columns: Axis) -> str:
    """``data, row step, column step`` of a tile that holds ``node`` as it lies in memory; "" if it holds
    more.

    ``code`` is what reads an element: a pointer, then a position and a step for each axis that varies.
    """
    if not isinstance(node, Input) or storage not in _COPIED:
        return ""
    pointer, *steps = code.args
    found = {position.form: split.text(step) for position, step in zip(steps[::2], steps[1::2], strict=True)}
    names = [axis_name(axis) if axis is not None else "" for axis in (rows, columns)]
    if set(found) - set(names):
        return ""
    return ", ".join([split.text(pointer, ATOM), *(found.get(name, "0") for name in names)])


def nearest(node: Node, *axes: Axis) -> Axis | None:
    """Of ``axes`` that whose neighbours lie side by side in what ``node`` reads, as the layout of that says
    which has most of them."""
    layouts: list[Sequence[Axis]] = []
    for part in walk([node]):
        if isinstance(part, Input):
            layouts.append(part.layout)
        elif isinstance(part, Load):
            layouts.append(tuple(axis for index in part.indices for axis in index.axes))
    found = [[axis for axis in layout if axis in axes] for layout in layouts]
    most = max(found, key=len, default=[])
    return most[-1] if most else None
