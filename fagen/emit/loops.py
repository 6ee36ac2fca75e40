"""The loop over the tiles of a walk: which are visited, and which of them need no test, as formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fagen.derive.intervals import OWN_FIRST, OWN_LAST, WALK_FIRST, WALK_LAST, RangePlan
from fagen.emit.code import COLUMN, Code, Place, Statement, Variable
from fagen.emit.scope import Scope, block_name
from fagen.ir.graph import FALSE, TRUE, Axis, Const, Index, Node

BEFORE = Place(phase=1)
"""What is computed once a block, before the loop."""


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


def loop_text(
    scope: Scope, ranges: RangePlan | None, guard: Node, walk_axis: Axis, row_axis: Axis | None
) -> LoopText:
    """The loop of a walk under ``guard``, bounded by ``ranges`` where there are some."""
    codes = scope.codes
    start, last = f"{walk_axis}_start", f"{walk_axis}_last"
    length, block = scope.length(walk_axis), block_name(walk_axis)
    if ranges is None:
        return LoopText(start, last, length, block, (), (), (), None, "" if guard is TRUE else None)
    first, end = ("0", "0") if row_axis is None else (f"block.{row_axis}_start", f"block.{row_axis}_last")
    if row_axis is None and Index(ranges.own_axis) in scope.grid:
        first = end = f"block.{ranges.own_axis}"
    leaves: dict[Node, Code] = {
        OWN_FIRST: codes.leaf(first, "int32", BEFORE),
        OWN_LAST: codes.leaf(end, "int32", BEFORE),
        WALK_FIRST: codes.leaf(start, "int32", COLUMN._replace(phase=1)),
        WALK_LAST: codes.leaf(last, "int32", COLUMN._replace(phase=1)),
    }
    before: list[Statement] = []
    tile: list[Statement] = []
    places = {False: (BEFORE, before), True: (COLUMN._replace(phase=1), tile)}

    def say(code: Code) -> str:
        """The text of ``code``, its statements put where it is known."""
        place, group = places[code.place.column]
        split = scope.split([(code, place)])
        before.extend(split.at(BEFORE) if group is not before else ())
        group.extend(split.at(place))
        return split.text(code)

    for let in ranges.lets:
        code = scope.lowering(leaves)(let.value)
        name = scope.splitter.names.unique(f"{walk_axis}_{let.symbol.name.rstrip('0123456789')}")
        text = say(code)
        variable = Variable(code.ctype, name)
        places[code.place.column][1].append(Statement("local", variable, name, text))
        place = places[code.place.column][0]
        leaves[let.symbol] = codes.leaf(name, code.ctype, place)
    lower = scope.lowering(leaves)
    found = []
    for each in ranges.ranges:
        begin = "0" if isinstance(each.begin, Const) and each.begin.value == 0 else say(lower(each.begin))
        stop = say(lower(each.end))
        if each.when is not TRUE:
            stop = f"{say(lower(each.when))} ? {stop} : 0"
        found.append((begin, stop))
    skip = None if ranges.may is TRUE else f"!({say(lower(ranges.may))})"
    full = None if ranges.must is FALSE else "" if ranges.must is TRUE else say(lower(ranges.must))
    return LoopText(start, last, length, block, before, found, tile, skip, full)
