"""Kernels that run before the others and write one value a tile: summaries of tables, classes of pairs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fagen.emit.code import AND, BLOCK, ELEMENT, OR, Code, Place, Statement
from fagen.emit.params import Parameters
from fagen.emit.scope import Surroundings, block_name
from fagen.ir.graph import Axis, Index, Node
from fagen.plan.plan import Plan, Prepared

WARPS = 4
"""A warp computes one value; a block has so many."""

_ONCE = Place(phase=1)

_INITIAL = {
    ("min", "float"): "INFINITY",
    ("max", "float"): "-INFINITY",
    ("min", "int32"): "0x7fffffff",
    ("max", "int32"): "-0x7fffffff - 1",
    ("min", "int64"): "0x7fffffffffffffffll",
    ("max", "int64"): "-0x7fffffffffffffffll - 1",
    ("any", "bool"): "false",
    ("all", "bool"): "true",
}
_JOINED = {"any": OR, "all": AND}
"""How strongly a value must bind where it is joined to those before it."""


@dataclass(frozen=True)
class ResultText:
    """One value of a tile: ``name`` starts at ``initial``, meets each element's ``value`` and is written."""

    op: str
    name: str
    ctype: str
    initial: str
    value: str
    target: str
    equation: str


@dataclass(frozen=True)
class TiledAxis:
    """An axis of the tile in the text."""

    axis: Axis
    length: str

    @property
    def block(self) -> str:
        """Positions of a tile."""
        return block_name(self.axis)

    @property
    def tile(self) -> str:
        """The number of the tile at hand."""
        return f"{self.axis}_tile"

    @property
    def blocks(self) -> str:
        """How many blocks of the launch lie along the axis."""
        return f"{self.axis}_blocks"


@dataclass(frozen=True)
class Preparation:
    """A kernel that prepares values over the same tiles."""

    function: str
    around: Surroundings
    grid_axes: tuple[Axis, ...]
    tiles: tuple[tuple[Axis, int], ...]
    block: Sequence[Statement]
    statements: Sequence[Statement]
    results: tuple[ResultText, ...]

    @property
    def grid(self) -> tuple[tuple[Axis, int], ...]:
        """Positions of each axis that a block has: of the last axis, a tile for each of its warps."""
        *others, (axis, tile) = self.tiles
        return (*((each, 1) for each in self.grid_axes), *others, (axis, tile * WARPS))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * WARPS

    @property
    def warps(self) -> int:
        """Tiles of a block."""
        return WARPS

    @property
    def walk(self) -> TiledAxis:
        """The tile's last axis."""
        axis = self.tiles[-1][0]
        return TiledAxis(axis, self.length(axis))

    @property
    def own(self) -> TiledAxis | None:
        """The tile's first axis, if it has two."""
        axis = self.tiles[0][0]
        return TiledAxis(axis, self.length(axis)) if len(self.tiles) > 1 else None

    @property
    def constants(self) -> str:
        """Sizes of the tile."""
        return ", ".join(f"{block_name(axis)} = {size}" for axis, size in self.tiles)

    def length(self, axis: Axis) -> str:
        """The length of an axis in the text."""
        return self.around.length(axis)

    @property
    def has_head(self) -> bool:
        """Whether the query head is said as one number."""
        texts = [statement.text for statement in (*self.block, *self.statements)]
        texts += [text for result in self.results for text in (result.value, result.target)]
        return any(re.search(r"\bh\b", text) for text in texts)


def preparations(plan: Plan, parameters: Parameters) -> list[Preparation]:
    """The kernels of ``plan.prepared``, those over the same tiles in one."""
    groups: dict[tuple[object, ...], list[Prepared]] = {}
    for each in plan.prepared:
        groups.setdefault((each.tiles, each.axes, each.op == "map"), []).append(each)
    return [
        _preparation(f"prepare{number}", group, plan, parameters)
        for number, group in enumerate(groups.values())
    ]


def _preparation(function: str, group: Sequence[Prepared], plan: Plan, parameters: Parameters) -> Preparation:
    tiles, axes = group[0].tiles, group[0].axes
    tiled = [axis for axis, _ in tiles]
    grid_axes = tuple(axis for axis in axes if axis not in tiled)
    around = Surroundings(plan, parameters, grid_axes, plan.problem.limits, flat=True)
    leaves: dict[Node, Code] = {Index(axis): around.codes.leaf(axis, "int32", ELEMENT) for axis in tiled}
    lower = around.lowering(leaves)
    values, targets = [], []
    for each in group:
        tensor = parameters.prepared(each.op, each.node, tiles)
        assert tensor is not None
        values.append(lower(each.node))
        numbers = {axis: around.codes.leaf(f"{axis}_tile", "int32", _ONCE) for axis in tiled}
        positions = [numbers[axis] if axis in numbers else around.grid[Index(axis)] for axis in tensor.layout]
        targets.append(lower.element(tensor, positions))
    split = around.split([*((value, ELEMENT) for value in values), *((target, _ONCE) for target in targets)])
    results = []
    for each, value, target in zip(group, values, targets, strict=True):
        over = ", ".join(tiled)
        equation = f"{each.name} = {each.op} over {over} of {around.shown(each.node)}"
        if each.op == "map":
            equation = (
                f"{each.name} = 2 where all of a tile has {around.shown(each.node)}, 0 where none, else 1"
            )
        results.append(
            ResultText(
                each.op,
                each.name,
                value.ctype if value.ctype != "int32" else "int",
                _INITIAL.get((each.op, value.ctype), ""),
                split.text(value, _JOINED.get(each.op, 0)),
                split.text(target),
                equation,
            )
        )
    return Preparation(
        function,
        around,
        grid_axes,
        tiles,
        [*split.at(BLOCK), *split.at(_ONCE)],
        split.at(ELEMENT),
        tuple(results),
    )
