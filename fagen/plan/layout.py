"""What lies side by side in memory, as far as a layout says it."""

from __future__ import annotations

from collections.abc import Sequence

from fagen.ir.graph import Axis, Input, Load, Node, walk


def nearest(node: Node, *axes: Axis) -> Axis | None:
    """Of ``axes`` that whose neighbours lie side by side in what ``node`` reads.

    The layout that has most of them decides, where ``node`` reads several tensors.
    """
    layouts: list[Sequence[Axis]] = []
    for part in walk([node]):
        if isinstance(part, Input):
            layouts.append(part.layout)
        elif isinstance(part, Load):
            layouts.append(tuple(axis for index in part.indices for axis in index.axes))
    found = [[axis for axis in layout if axis in axes] for layout in layouts]
    most = max(found, key=len, default=[])
    return most[-1] if most else None
