"""Walks along a product of axes: a sum over an outer axis of sums along the walk goes on from walk to walk.

The gradient of a key of several query heads is such a sum, over heads and over queries: the block that owns
the key makes its walk once for each head. What the block keeps for its rows must be the same for all of them.
"""

from __future__ import annotations

from dataclasses import replace

from fagen.derive.separate import Reduction, nearest
from fagen.derive.walk import Stage
from fagen.ir import graph as ir
from fagen.ir.graph import Axis, Contract, Node, Reduce, Symbol


def product_walk(x: Node) -> tuple[Node, tuple[Axis, ...]] | None:
    """``x`` with a sum along a walk in the place of its sum over outer axes too, and those axes.

    None where ``x`` is no function of one such sum, or where the rows of its products, which stay with a
    block, have an outer axis.
    """
    tops = nearest([x])
    if len(tops) != 1:
        return None
    top: Node = tops[0]
    outer: list[Axis] = []
    while isinstance(top, Reduce) and top.op == "sum" and isinstance(top.x, Reduction):
        outer.append(top.over)
        top = top.x
    if not outer or not isinstance(top, Contract | Reduce) or (isinstance(top, Reduce) and top.op == "max"):
        return None
    inner = nearest(top.args)
    if not inner or any(reduction.over in (top.over, *outer) for reduction in inner):
        return None
    for reduction in inner:
        if isinstance(reduction, Contract) and not _stays(reduction, top.over, outer):
            return None
    if not any(isinstance(reduction, Contract) and top.over in reduction.axes for reduction in inner):
        return None
    return ir.substitute(x, {tops[0]: top}), tuple(outer)


def _stays(product: Contract, walk: Axis, outer: list[Axis]) -> bool:
    """Whether the side of a product that does not change along the walk is the same along ``outer``."""
    sides = [arg for arg in product.args if walk not in arg.axes]
    return len(sides) != 1 or not set(sides[0].axes) & set(outer)


def along(stage: Stage, outer: tuple[Axis, ...]) -> Stage | None:
    """``stage``, which makes its walk at one position of ``outer``, made to sum over them.

    None where its results are more than one sum each, times what is the same for all positions.
    """
    if len(stage.walks) != 1:
        return None
    (walk,) = stage.walks
    if walk.stores or any(state.rescale is not None or state.op == "max" for state in walk.states):
        return None
    sums: dict[Node, Symbol] = {
        state.symbol: Symbol(
            state.symbol.name, tuple(a for a in state.symbol.axes if a not in outer), state.symbol.stored
        )
        for state in walk.states
    }
    for state in walk.states:
        if not set(outer) <= set(state.symbol.axes) or any(ir.depends(state.value, [s]) for s in sums):
            return None
    for output in stage.outputs:
        used = [symbol for symbol in sums if ir.depends(output.node, [symbol])]
        rest = ir.substitute(output.node, dict.fromkeys(used, ir.ONE))
        if len(used) != 1 or set(rest.axes) & set(outer):
            return None
    states = tuple(replace(state, symbol=sums[state.symbol]) for state in walk.states)
    return replace(
        stage,
        own=tuple(axis for axis in stage.own if axis not in outer),
        walks=(replace(walk, states=states),),
        outputs=tuple(replace(out, node=ir.substitute(out.node, sums)) for out in stage.outputs),
        outer=outer,
    )
