"""The tiles that a guard leaves to a kernel, for given lengths and tables.

What a kernel does with a `RangePlan` this does in numpy, from the same formulas: `plan/interpret.py` walks
these tiles, the cost model counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fagen.derive.intervals import OWN_FIRST, OWN_LAST, WALK_FIRST, WALK_LAST, RangePlan, ranges
from fagen.ir.graph import (
    Axis,
    Const,
    Index,
    Input,
    Load,
    Map,
    Node,
    Size,
    index,
)

Array: TypeAlias = NDArray[Any]
TileClass: TypeAlias = Literal["full", "partial"]

_OPS: dict[str, Callable[..., Any]] = {
    "mul": np.multiply,
    "neg": np.negative,
    "div": np.divide,
    "floordiv": np.floor_divide,
    "mod": np.mod,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "abs": np.abs,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "tanh": np.tanh,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "floor": np.floor,
    "to_float": lambda x: np.asarray(x, np.float64),
    "to_int": lambda x: np.asarray(x, np.int64),
    "le": np.less_equal,
    "lt": np.less,
    "eq": np.equal,
    "not": np.logical_not,
    "where": np.where,
}


def _array(table: Input, value: Any) -> Array:
    """A table's values, of numpy or torch, as the widest of their kind."""
    if hasattr(value, "detach"):  # numpy has no bf16
        widen = {"float": "double", "int": "long", "bool": "bool"}[table.stored]
        value = getattr(value.detach().cpu(), widen)().numpy()
    return np.asarray(value, {"float": np.float64, "int": np.int64, "bool": np.bool_}[table.stored])


class _Values:
    """Values of nodes, where positions, symbols, sizes, scalars and tables have those given."""

    def __init__(self, environment: Mapping[Node, Any], sizes: Mapping[Axis, int]) -> None:
        self._tables = {node: _array(node, v) for node, v in environment.items() if isinstance(node, Input)}
        self._known = {node: v for node, v in environment.items() if not isinstance(node, Input)}
        self._sizes = dict(sizes)
        for table, data in self._tables.items():
            for axis, length in zip(table.layout, data.shape, strict=True):
                self._sizes.setdefault(axis, length)

    def __call__(self, node: Node) -> Any:
        if node not in self._known:
            with np.errstate(all="ignore"):
                self._known[node] = self._compute(node)
        return self._known[node]

    def also(self, known: Mapping[Node, Any]) -> _Values:
        """The same with more nodes known."""
        other = _Values({}, self._sizes)
        other._tables = self._tables
        other._known = {node: value for node, value in self._known.items() if not node.args} | dict(known)
        return other

    def row(self, table: Input, fixed: tuple[Node, ...]) -> Array:
        """A table's row at fixed leading indices, broadcast to the length of its axis."""
        data = self._data(table)
        where = tuple(np.clip(self(i), 0, n - 1) for i, n in zip(fixed, data.shape[:-1], strict=True))
        row: Array = data[where]
        return row

    def _data(self, table: Input) -> Array:
        """A table with its full lengths."""
        data = self._tables[table]
        lengths = [
            self._length(axis) if n == 1 else n for axis, n in zip(table.layout, data.shape, strict=True)
        ]
        return np.broadcast_to(data, lengths)

    def _length(self, axis: Axis) -> int:
        if axis == "h" and "hk" in self._sizes:
            return self._sizes["hk"] * self._sizes["g"]
        return self._sizes[axis]

    def _compute(self, node: Node) -> Any:
        if isinstance(node, Const):
            return node.value
        if isinstance(node, Size):
            return self._sizes[node.axis]
        if isinstance(node, Input):
            return self._read(node, tuple(index(axis) for axis in node.layout))
        if isinstance(node, Load):
            return self._read(node.table, node.indices)
        assert isinstance(node, Map), node
        args = [self(arg) for arg in node.args]
        if node.op in ("and", "or", "add"):
            join = {"and": np.logical_and, "or": np.logical_or, "add": np.add}[node.op]
            result = args[0]
            for arg in args[1:]:
                result = join(result, arg)
            return result
        return _OPS[node.op](*args)

    def _read(self, table: Input, indices: tuple[Node, ...]) -> Any:
        data = self._data(table)
        if data.size == 0:
            return np.zeros((), data.dtype)
        return data[tuple(np.clip(self(i), 0, n - 1) for i, n in zip(indices, data.shape, strict=True))]


def live_tiles(
    guard: Node,
    own_axis: Axis,
    walk_axis: Axis,
    sizes: Mapping[Axis, int],
    block_own: int,
    block_walk: int,
    environment: Mapping[Node, Any] | None = None,
    fixed: Mapping[Axis, int] | None = None,
) -> list[list[tuple[int, TileClass]]]:
    """For each tile of ``own_axis`` the tiles of ``walk_axis`` that a kernel computes, in order.

    ``sizes`` holds the length of every axis in the guard, ``environment`` an array for each `Input` in its
    layout (a length of 1 broadcasts) and a number for each `Scalar`, ``fixed`` the position along all other
    axes. A ``full`` tile needs no test of its elements.
    """
    plan = ranges(guard, own_axis, walk_axis)
    own, walked = sizes.get(own_axis, 1), sizes[walk_axis]
    own_tiles, walk_tiles = -(-own // block_own), -(-walked // block_walk)
    if own_tiles == 0 or walk_tiles == 0:
        return [[] for _ in range(own_tiles)]
    values = _Values(environment or {}, sizes)
    values = values.also({Index(axis): position for axis, position in (fixed or {}).items()})
    if plan.needs_block_map:
        may, must = _block_map(plan, values, own, walked, block_own, block_walk)
    else:
        may, must = _classes(plan, values, own, walked, block_own, block_walk)
    inside = (np.arange(walk_tiles) + 1) * block_walk <= walked
    full = must & inside
    return [
        [(int(tile), "full" if full[row, tile] else "partial") for tile in np.flatnonzero(may[row])]
        for row in range(own_tiles)
    ]


def _classes(
    plan: RangePlan, values: _Values, own: int, walked: int, block_own: int, block_walk: int
) -> tuple[Array, Array]:
    """``may`` (False outside the ranges) and ``must`` of each pair of tiles."""
    own_first = np.arange(0, own, block_own)[:, None]
    walk_first = np.arange(0, walked, block_walk)[None, :]
    shape = own_first.shape[0], walk_first.shape[1]
    known: dict[Node, Any] = {
        OWN_FIRST: own_first,
        OWN_LAST: np.minimum(own_first + block_own, own) - 1,
        WALK_FIRST: walk_first,
        WALK_LAST: np.minimum(walk_first + block_walk, walked) - 1,
    }
    joins: dict[str, np.ufunc] = {
        "min": np.minimum,
        "max": np.maximum,
        "any": np.logical_or,
        "all": np.logical_and,
    }
    for summary in plan.summaries:
        length, firsts = (own, own_first) if summary.axis == plan.own_axis else (walked, walk_first)
        elements = values.also({Index(summary.axis): np.arange(length)})(summary.node)
        elements = np.broadcast_to(elements, (length,))
        known[summary.symbol] = joins[summary.op].reduceat(elements, firsts.ravel()).reshape(firsts.shape)
    for search in plan.searches:
        at = values.also(known)
        known[search.symbol] = np.searchsorted(
            at.row(search.table, search.fixed), at(search.value), search.side
        )
    for let in plan.lets:
        known[let.symbol] = values.also(known)(let.value)
    at = values.also(known)
    visited = np.zeros(shape, bool)
    for part in plan.ranges:
        begin, end = at(part.begin), at(part.end)
        first, last = begin // block_walk, -(-end // block_walk)
        tile = np.arange(shape[1])
        visited |= at(part.when) & (begin < end) & (first <= tile) & (tile < last)
    return visited & at(plan.may), np.broadcast_to(at(plan.must), shape)


def _block_map(
    plan: RangePlan, values: _Values, own: int, walked: int, block_own: int, block_walk: int
) -> tuple[Array, Array]:
    """The guard itself, tile by tile: whether it holds somewhere, and everywhere."""
    may, must = [], []
    columns = np.arange(0, walked, block_walk)
    for first in range(0, own, block_own):
        rows = np.arange(first, min(first + block_own, own))
        known: dict[Node, Any] = {
            Index(plan.own_axis): rows[:, None],
            Index(plan.walk_axis): np.arange(walked)[None, :],
        }
        allowed = np.broadcast_to(values.also(known)(plan.guard), (len(rows), walked))
        may.append(np.logical_or.reduceat(allowed.any(0), columns))
        must.append(np.logical_and.reduceat(allowed.all(0), columns))
    return np.stack(may), np.stack(must)
