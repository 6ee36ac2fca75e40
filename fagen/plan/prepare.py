"""What is computed before a kernel, one value a tile, so that its loop can pass over tiles and drop tests.

A summary is the minimum, the maximum, the any or the all of an expression over a tile of one axis: it costs
one evaluation a position. Where no summary bounds a guard, a map holds the class of every pair of tiles: one
evaluation a pair of positions, one byte a pair of tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from fagen.derive.extent import Extent, bits
from fagen.derive.intervals import RangePlan
from fagen.ir.graph import Axis, Node
from fagen.plan.plan import KernelPlan, Prepared, Storage

Tiles: TypeAlias = tuple[tuple[Axis, int], ...]


def prepare(kernels: Sequence[KernelPlan], limits: Mapping[Node, Extent]) -> tuple[Prepared, ...]:
    """What the loops of ``kernels`` read, each thing once, in the order in which it is first needed.

    ``limits`` says what is known of tables (`Problem.limits`).
    """
    found: dict[tuple[str, Node, Tiles], Prepared] = {}
    for kernel in kernels:
        for ranges in kernel.ranges:
            for op, node, tiles in _wanted(kernel, ranges) if ranges is not None else ():
                name = f"{op}{sum(known.op == op for known in found.values())}"
                storage = _storage(op, node, limits)
                found.setdefault((op, node, tiles), Prepared(name, op, node, tiles, storage))
    return tuple(found.values())


def _wanted(
    kernel: KernelPlan, ranges: RangePlan
) -> Iterable[tuple[Literal["min", "max", "any", "all", "map"], Node, Tiles]]:
    blocks = {ranges.walk_axis: kernel.block_walk}
    if kernel.tile_axis is not None:
        blocks[kernel.tile_axis] = kernel.positions
    for summary in ranges.summaries:
        if summary.axis in blocks:  # else a row of its own, where the value is known
            yield summary.op, summary.node, ((summary.axis, blocks[summary.axis]),)
    if mapped(kernel, ranges):
        yield "map", ranges.guard, tuple((axis, blocks[axis]) for axis in (ranges.own_axis, ranges.walk_axis))


def mapped(kernel: KernelPlan, ranges: RangePlan) -> bool:
    """Whether the loop under ``ranges`` reads the class of each pair of tiles."""
    return ranges.needs_block_map and kernel.tile_axis is not None


def _storage(op: str, node: Node, limits: Mapping[Node, Extent]) -> Storage:
    if op == "map":
        return "uint8"
    if node.kind == "int":
        return "int64" if bits(node, limits) == 64 else "int32"
    return "bool" if node.kind == "bool" else "fp32"
