"""What one walk can compute: products of rows and columns, and weighted sums of stored rows."""

from __future__ import annotations

from dataclasses import dataclass

from fagen.derive.separate import Reduction, nearest, reductions
from fagen.ir import graph as ir
from fagen.ir.graph import ONE, OPEN_AXES, Axis, Contract, Node, Scatter


def reach(x: Node) -> tuple[Axis, ...]:
    """The axes along which a result is computed: what is scattered has others than where it goes."""
    return x.value.axes if isinstance(x, Scatter) else x.axes


def unfit(roots: list[Node], axis: Axis) -> tuple[list[Node], str] | None:
    """Values below ``roots`` that a walk along ``axis`` can't compute, and why; None if there are none."""
    tops, inners = nearest(roots), nearest(roots, through=axis)
    results = {a for root in roots for a in reach(root)} - _features(tops, axis)
    fits = [r for r in inners if r.over not in results and _is_product(r, axis)]
    pairs = {a for r in fits for a in r.axes}
    for product in fits:
        if product.over in OPEN_AXES:
            return [product], f"the sum over {product.over} is as long as each call says"
        if not _has_pairs(product, axis) and not pairs <= set(product.axes):
            return [product], f"it is the same in every row of the walk along {axis}"
    for inner in inners:
        if inner in fits:
            continue
        operands = [arg for top in tops for arg in top.args if inner in reductions(arg)]
        if operands and all(set(inner.axes) < set(operand.axes) for operand in operands):
            similar = (r for r in inners if (r.over, r.axes) == (inner.over, inner.axes))
            return [r for r in similar if r not in fits], f"a row's value, in a walk along {axis} across rows"
        for operand in operands:
            if not any(r in fits or r.over == axis for r in reductions(operand)):
                return [operand], f"the sum over {tops[0].over} needs all of it"
        reducing = [arg for arg in inner.args if reductions(arg)]
        if reducing:
            return reducing[:1], f"the sum over {inner.over} needs whole rows along {axis} of it"
        if inner.over in results:
            return [inner], f"the sum over {inner.over} lies inside a result with an axis {inner.over}"
        return [inner], f"it is no product of a row and a column of the walk along {axis}"
    for top in tops:
        rows = _computed_features(top, axis)
        if rows is not None:
            return [rows], f"the walk along {axis} weights its rows"
    others: list[Node] = [top for top in tops if not _makes_pairs(top, axis)]
    if len(others) < len(tops) and others:
        return others, f"a row's value, beside products of pairs along {axis}"
    return None


def _is_product(x: Reduction, axis: Axis) -> bool:
    """Whether a tile of ``x`` along ``axis`` is a product of a row and a column, computed from inputs."""
    return isinstance(x, Contract) and not any(map(reductions, x.args)) and sides(x, axis) is not None


def sides(product: Contract, axis: Axis) -> tuple[Node, Node] | None:
    """The operands of a tile's product as (own side, walk side), if only one has the walk's axis."""
    for own, walk in ((product.x, product.y), (product.y, product.x)):
        if axis not in own.axes and axis in walk.axes:
            return own, walk
    return None


def _has_pairs(product: Reduction, axis: Axis) -> bool:
    """Whether the own side of a product has an axis that its walk side has not."""
    found = sides(product, axis) if isinstance(product, Contract) else None
    return found is not None and bool(set(found[0].axes) - set(found[1].axes))


def _makes_pairs(x: Reduction, axis: Axis) -> bool:
    """Whether ``x`` is a product that has a value for each pair of positions."""
    found = weigh(x, axis) if isinstance(x, Contract) and x.over == axis else None
    return found is not None and bool(OPEN_AXES.intersection(found.features))


def _computed_features(node: Reduction, axis: Axis) -> Node | None:
    """An operand of a sum along the walk whose rows of features would have to be computed in it."""
    if not isinstance(node, Contract) or node.over != axis:
        return None
    for x, y in ((node.x, node.y), (node.y, node.x)):
        apart = set(y.axes) - set(x.axes) and set(x.axes) - set(y.axes)
        if apart and reductions(x) and reductions(y) and not any(r.over == axis for r in reductions(y)):
            return y
    return None


def _features(tops: list[Reduction], axis: Axis) -> set[Axis]:
    """Axes that a weighted sum along the walk has from its rows alone: no value of a pair has them."""
    sums = [top for top in tops if isinstance(top, Contract) and top.over == axis]
    return {a for top in sums for a in weigh(top, axis).features if a not in weigh(top, axis).weights.axes}


@dataclass(frozen=True)
class Weighed:
    """A contraction along the walk as ``factor * sum of weights * rows``."""

    weights: Node
    rows: Node | None
    features: tuple[Axis, ...]
    factor: Node


def weigh(node: Contract, axis: Axis) -> Weighed:
    """Which operand of ``node``, a contraction over ``axis``, weights the rows of the other."""
    x, y = node.x, node.y
    if axis not in y.axes:
        return Weighed(x, None, (), y)
    if axis not in x.axes:
        return Weighed(y, None, (), x)
    if reductions(y) and reductions(x):
        return Weighed(ir.mul(x, y), None, (), ONE)
    if reductions(y) or (not reductions(x) and _more_features(x, y, axis)):
        x, y = y, x
    return Weighed(x, y, _beside(y, x, axis), ONE)


def _beside(x: Node, y: Node, axis: Axis) -> tuple[Axis, ...]:
    """The last axis that ``x`` has and ``y`` has not, apart from that of the walk."""
    return tuple(a for a in x.axes if a != axis and a not in y.axes)[-1:]


def _more_features(x: Node, y: Node, axis: Axis) -> bool:
    """Whether ``x`` should be the rows that ``y`` weights: neither is computed."""
    mine, other = (bool(OPEN_AXES.intersection(_beside(*pair, axis))) for pair in ((x, y), (y, x)))
    if mine != other:
        return other
    return len(set(y.axes) - set(x.axes)) > 1 or (len(x.axes), x.order) < (len(y.axes), y.order)
