"""Which gathers have one place for all elements of a diagonal, as those by a distance of positions do.

A diagonal goes one position further along two axes at once: in a tile it is one where each row is a position.
"""

from __future__ import annotations

from collections.abc import Sequence

from fagen.ir import graph as ir
from fagen.ir.graph import Axis, Const, Index, Map, Node


def unmoved(indices: Sequence[Node], axes: Sequence[Axis]) -> bool:
    """Whether ``indices`` are the same one position further along all of ``axes``, wherever that is."""
    further: dict[Node, Node] = {Index(axis): ir.add(Index(axis), Const(1)) for axis in axes}
    read = any(
        not isinstance(node, Map | Index) and not set(node.axes).isdisjoint(axes) for node in ir.walk(indices)
    )
    return not read and all(ir.substitute(index, further) is index for index in indices)
