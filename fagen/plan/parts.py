"""In how many parts a walk is made: a rule for a call's lengths that a launcher carries out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any, TypeAlias

from fagen.derive.intervals import OWN_FIRST, OWN_LAST, RangePlan
from fagen.derive.walk import PART_AXIS
from fagen.ir import graph as ir
from fagen.ir.graph import TRUE, Axis, Const, Map, Node, Size
from fagen.plan.plan import KernelPlan

Formula: TypeAlias = tuple[Any, ...]
"""An integer of a call: ``("const", n)``, ``("size", axis)``, ``("first",)`` and ``("last",)`` row, or an
operation and its operands."""

_OPS: Mapping[str, Callable[..., Any]] = {
    "add": lambda *terms: sum(terms),
    "mul": lambda *factors: prod(factors),
    "neg": lambda x: -x,
    "abs": abs,
    "floordiv": lambda x, y: x // y if y else 0,
    "mod": lambda x, y: x % y if y else 0,
    "minimum": min,
    "maximum": max,
    "le": lambda x, y: x <= y,
    "lt": lambda x, y: x < y,
    "eq": lambda x, y: x == y,
    "not": lambda x: not x,
    "and": lambda *terms: all(terms),
    "or": lambda *terms: any(terms),
    "where": lambda condition, x, y: x if condition else y,
}


def parts_of(works: int, columns: int, slots: int) -> int:
    """Parts for each of ``works`` walks of so many ``columns``, where ``slots`` blocks run at a time.

    All run at once, and none has fewer columns than there are parts: to merge them is a walk, too.
    """
    return max(min(slots // max(works, 1), isqrt(columns)), 1)


@dataclass(frozen=True)
class Shares:
    """What decides the length of the axis of parts of a kernel.

    A block has ``grid`` positions of each other axis of the launch, and a tile of its walk ``block_walk`` of
    ``walk``. ``ranges`` are begin and end of what rows along ``rows`` visit; none: all, or what a table says.
    """

    grid: tuple[tuple[Axis, int], ...]
    resident: int
    walk: Axis
    block_walk: int
    rows: Axis | None
    ranges: tuple[tuple[Formula, Formula], ...]

    def parts(self, lengths: Mapping[Axis, int], multiprocessors: int) -> int:
        """In how many parts a walk is made at these lengths."""
        works = prod(-(-lengths[axis] // positions) for axis, positions in self.grid)
        tiles = self.tiles(lengths)
        parts = parts_of(works, tiles * self.block_walk, multiprocessors * self.resident)
        return max(min(parts, tiles), 1)

    def tiles(self, lengths: Mapping[Axis, int]) -> int:
        """How many tiles a walk visits, at most."""
        every = -(-lengths[self.walk] // self.block_walk)
        if not self.ranges:
            return every
        last = max(lengths[self.rows] - 1, 0) if self.rows else 0

        def number(formula: Formula) -> Any:
            kind, *operands = formula
            if kind == "const":
                return operands[0]
            if kind == "size":
                return lengths[operands[0]]
            if kind in ("first", "last"):
                return last if kind == "last" else 0
            return _OPS[kind](*map(number, operands))

        visited = 0
        for begin, end in self.ranges:
            first, behind = number(begin), number(end)
            if first < behind:
                visited += -(-behind // self.block_walk) - first // self.block_walk
        return min(visited, every)


def shares_of(kernels: Sequence[KernelPlan]) -> tuple[Shares, ...]:
    """The rule of each of ``kernels`` that makes a walk in parts."""
    return tuple(map(_shares, (kernel for kernel in kernels if kernel.stage.parts)))


def _shares(kernel: KernelPlan) -> Shares:
    assert kernel.stage.walk is not None
    grid = tuple((axis, size) for axis, size in kernel.grid.items() if axis != PART_AXIS)
    (bounds,) = kernel.ranges
    return Shares(
        grid, kernel.resident, kernel.stage.walk, kernel.block_walk, kernel.tile_axis, _ranges(bounds)
    )


def _ranges(bounds: RangePlan | None) -> tuple[tuple[Formula, Formula], ...]:
    """The ranges as formulas; none where one of them depends on more than lengths."""
    found = []
    for each in bounds.ranges if bounds is not None else ():
        end = each.end if each.when is TRUE else ir.where(each.when, each.end, Const(0))
        first, behind = _formula(each.begin), _formula(end)
        if first is None or behind is None:
            return ()
        found.append((first, behind))
    return tuple(found)


def _formula(node: Node) -> Formula | None:
    if isinstance(node, Const):
        return "const", node.value
    if isinstance(node, Size):
        return "size", node.axis
    if node is OWN_FIRST or node is OWN_LAST:
        return ("first",) if node is OWN_FIRST else ("last",)
    if not isinstance(node, Map) or node.op not in _OPS:
        return None
    operands = [_formula(arg) for arg in node.args]
    return None if None in operands else (node.op, *operands)


def with_parts(
    lengths: Mapping[Axis, int], shares: Sequence[Shares], multiprocessors: int
) -> dict[Axis, int]:
    """``lengths`` with that of the axis of parts, where kernels have one."""
    if not shares:
        return dict(lengths)
    return {**lengths, PART_AXIS: min(each.parts(lengths, multiprocessors) for each in shares)}
