"""The loop over the tiles of a walk: which are visited, and which of them need no test, as formulas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fagen.derive.intervals import OWN_FIRST, OWN_LAST, WALK_FIRST, WALK_LAST, RangePlan
from fagen.derive.tile import Search
from fagen.emit.code import AND, COLUMN, ELEMENT, PRODUCT, SUM, Code, Place, Statement, Variable
from fagen.emit.scope import Scope, block_name
from fagen.ir import graph as ir
from fagen.ir.graph import FALSE, TRUE, Axis, Const, Index, Node
from fagen.plan.prepare import mapped
from fagen.plan.space import ON_TENSOR_CORES

BEFORE = Place(phase=1)
"""What is computed once a block, before the loop."""
IN_LOOP = COLUMN._replace(phase=1)
"""What is computed once a tile."""


@dataclass(frozen=True)
class LoopText:
    """How a walk visits its tiles."""

    start: str
    """The loop's variable: the first position of a tile."""
    last: str
    """The last position of a tile that exists."""
    length: str
    block: str
    before: Sequence[Statement]
    ranges: Sequence[tuple[str, str]]
    """Begin and end of the positions to visit; none: all of them."""
    tile: Sequence[Statement]
    """Computed for each tile."""
    skip: str | None
    """A tile of which this holds has no element that counts."""
    full: str | None
    """All elements of a tile inside the length count if this holds ("": always; None: never known)."""
    places: Mapping[Node, str] = field(default_factory=dict)
    """How the text says what was searched for."""


def loop_text(
    scope: Scope, ranges: RangePlan | None, guard: Node, walk_axis: Axis, row_axis: Axis | None
) -> LoopText:
    """The loop of a walk under ``guard``, bounded by ``ranges`` where there are some."""
    start, last = f"{walk_axis}_start", f"{walk_axis}_last"
    length, block = scope.length(walk_axis), block_name(walk_axis)
    if ranges is None:
        return LoopText(start, last, length, block, (), (), (), None, "" if guard is TRUE else None)
    loop = _Loop(scope, ranges, row_axis)
    bounds = loop.bounds()
    skip, full = loop.tests()
    places: dict[Node, str] = {each.symbol: loop.leaves[each.symbol].form for each in ranges.searches}
    return LoopText(start, last, length, block, loop.before, bounds, loop.tile, skip, full, places)


class _Loop:
    """The formulas of a range plan as statements, those of the block in ``before``, those of a tile in
    ``tile``."""

    def __init__(self, scope: Scope, ranges: RangePlan, row_axis: Axis | None) -> None:
        self.scope = scope
        self.ranges = ranges
        self.row_axis = row_axis
        self.by_warp = scope.kernel.tiling in ON_TENSOR_CORES  # all threads of a warp look for tiles
        self.before: list[Statement] = []
        self.tile: list[Statement] = []
        leaf = scope.codes.leaf
        walk = ranges.walk_axis
        if row_axis is not None:
            first, last = f"block.{row_axis}_start", f"block.{row_axis}_last"
        else:
            first = last = f"block.{ranges.own_axis}" if Index(ranges.own_axis) in scope.grid else "0"
        self.leaves: dict[Node, Code] = {
            OWN_FIRST: leaf(first, "int32", BEFORE),
            OWN_LAST: leaf(last, "int32", BEFORE),
            WALK_FIRST: leaf(f"{walk}_start", "int32", IN_LOOP),
            WALK_LAST: leaf(f"{walk}_last", "int32", IN_LOOP),
        }
        for summary in ranges.summaries:
            self.name(summary.symbol, self.prepared(summary.op, summary.node, (summary.axis,)))
        for searches in self.searches():
            self.find(searches)
        for let in ranges.lets:
            self.name(let.symbol, self.code(let.value))

    def code(self, node: Node) -> Code:
        return self.scope.lowering(self.leaves)(node)

    def say(self, code: Code, binds: int = 0) -> str:
        """The text of ``code``, its statements put where it is known."""
        place = IN_LOOP if code.place.column else BEFORE
        split = self.scope.split([(code, place)])
        self.before += split.at(BEFORE)
        self.tile += split.at(IN_LOOP)
        return split.text(code, binds)

    def name(self, symbol: Node, code: Code) -> None:
        """A statement that gives ``code`` the name of ``symbol``."""
        assert isinstance(symbol, ir.Symbol)
        text = self.say(code)
        name = self.scope.splitter.names.unique(symbol.name)
        place, group = (IN_LOOP, self.tile) if code.place.column else (BEFORE, self.before)
        group.append(Statement("local", Variable(code.ctype, name), name, text))
        self.leaves[symbol] = self.scope.codes.leaf(name, code.ctype, place)

    # ------------------------------------------------------------------------------------------- what is read

    def prepared(self, op: str, node: Node, axes: Sequence[Axis]) -> Code:
        """What an earlier kernel computed of a tile; of a single row it is the value itself."""
        kernel = self.scope.kernel
        blocks = {kernel.stage.walk: kernel.block_walk, kernel.tile_axis: kernel.positions}
        tiles = tuple((axis, blocks[axis]) for axis in axes if axis in blocks)
        tensor = self.scope.parameters.prepared(op, node, tiles)
        if tensor is None:
            return self.code(node)
        positions = [self.place(axis, axes) for axis in tensor.layout]
        ctype = _READ_AS.get(tensor.storage, tensor.storage)
        return self.scope.lowering(self.leaves).element(tensor, positions, ctype=ctype)

    def tiles(self) -> Mapping[Node, Code]:
        """The number of the tile along each axis of the pair."""
        codes = self.scope.codes
        found: dict[Node, Code] = {}
        for axis, first in ((self.ranges.own_axis, OWN_FIRST), (self.ranges.walk_axis, WALK_FIRST)):
            size = codes.leaf(block_name(axis), "int32")
            found[Index(axis)] = codes.infix("/", self.leaves[first], size, "int32", PRODUCT)
        return found

    def place(self, axis: Axis, axes: Sequence[Axis]) -> Code:
        return self.tiles()[Index(axis)] if axis in axes else self.scope.grid[Index(axis)]

    def searches(self) -> Iterator[Sequence[Search]]:
        """Those that are made together: where all threads of a warp can, all that need none of the others."""
        together: list[Search] = []
        for search in self.ranges.searches:
            before = {other.symbol for other in together}
            if not self.by_warp or before & set(ir.walk([*search.fixed, search.value])):
                yield together
                together = []
            together.append(search)
        yield together

    def find(self, searches: Sequence[Search]) -> None:
        """How many elements of sorted rows lie below values."""
        codes = [self.code(search.value) for search in searches]
        said = self.scope.split([(code, ELEMENT) for code in codes])
        self.before += said.at(BEFORE)
        values = {search: said.text(code, SUM) for search, code in zip(searches, codes, strict=True)}
        if self.by_warp:
            self.find_together(values)
            return
        for search, value in values.items():
            text = f"partition_point({self.length(search)}, {self.test(search, value)})"
            self.name(search.symbol, self.scope.codes.leaf(text, "int32", BEFORE))

    def find_together(self, values: Mapping[Search, str]) -> None:
        """The same by all threads of a warp.

        What is asked again of a row, for another value, is only looked for where that is another: the first
        and the last row of a block most often ask for the same.
        """
        first: dict[tuple[object, ...], Search] = {}
        for search in values:
            first.setdefault((search.table, search.fixed, search.side), search)
        again = {
            search: first[search.table, search.fixed, search.side]
            for search in values
            if search not in first.values()
        }
        if first:
            self.ask({search: values[search] for search in first.values()})
        if again:
            found = ", ".join(self.leaves[other.symbol].form for other in again.values())
            pairs = (sorted((values[search], values[other])) for search, other in again.items())
            same = " && ".join(dict.fromkeys(" == ".join(pair) for pair in pairs))
            unless = f"{same} ? Places<{len(again)}>{{{found}}} : "
            self.ask({search: values[search] for search in again}, unless)

    def ask(self, values: Mapping[Search, str], unless: str = "") -> None:
        """A statement that finds the places of ``values``; ``unless`` says where they are known."""
        places = f"Places<{len(values)}>"
        lengths = f"{places}{{{', '.join(map(self.length, values))}}}"
        tests = [self.test(search, value) for search, value in values.items()]
        text = f"{unless}partition_points({', '.join([lengths, *tests])})"
        name = self.scope.splitter.names.unique("found")
        self.before.append(Statement("local", Variable(places, name), name, text))
        for number, search in enumerate(values):
            self.leaves[search.symbol] = self.scope.codes.leaf(f"{name}[{number}]", "int32", BEFORE)

    def length(self, search: Search) -> str:
        """The length of the row that is searched."""
        return self.scope.length(search.table.layout[-1])

    def test(self, search: Search, value: str) -> str:
        """Whether element i of the row comes before the place of ``value``."""
        sign = "<" if search.side == "left" else "<="
        return f"[&](int i) {{ return {self.element(search)} {sign} {value}; }}"

    def element(self, search: Search) -> str:
        """Element i of a sorted row."""
        lower = self.scope.lowering(self.leaves)
        i = self.scope.codes.leaf("i", "int32", ELEMENT)
        code = lower.read(search.table, [*(lower(fixed) for fixed in search.fixed), i])
        split = self.scope.split([(code, ELEMENT)])
        self.before += split.at(BEFORE)
        return split.text(code)

    # ---------------------------------------------------------------------------------------- what is decided

    def bounds(self) -> list[tuple[str, str]]:
        """Begin and end of each range, the end 0 where the range is empty."""
        found = []
        whole = [Const(0), ir.size(self.ranges.walk_axis), TRUE]
        if [[each.begin, each.end, each.when] for each in self.ranges.ranges] == [whole]:
            return []
        for each in self.ranges.ranges:
            begin = self.say(self.code(each.begin))
            end = self.code(each.end)
            if each.when is not TRUE:
                zero = self.scope.codes.leaf("0", end.ctype)
                end = self.scope.codes.choice(self.code(each.when), end, zero)
            found.append((begin, self.say(end)))
        return found

    def tests(self) -> tuple[str | None, str | None]:
        """When a tile is skipped, and when all of it counts."""
        ranges = self.ranges
        if mapped(self.scope.kernel, ranges):
            kind = self.prepared("map", ranges.guard, (ranges.own_axis, ranges.walk_axis))
            symbol = ir.Symbol("kind", (), "int")
            self.name(symbol, kind)
            return f"{self.leaves[symbol].form} == 0", f"{self.leaves[symbol].form} == 2"
        skip = None if ranges.may is TRUE else self.say(self.scope.codes.negation(self.code(ranges.may)))
        must = ranges.must
        return skip, None if must is FALSE else "" if must is TRUE else self.say(self.code(must), AND)


_READ_AS = {"fp32": "float", "uint8": "int32"}
"""The type of a prepared value, where it is not that of its storage."""
