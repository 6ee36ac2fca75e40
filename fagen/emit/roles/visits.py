"""Which tiles a work visits, in which order, and how it and they are announced."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fagen.derive.signs import falls
from fagen.emit.code import COLUMN, Variable
from fagen.emit.roles.texts import RolesText
from fagen.emit.scope import Scope, axis_name
from fagen.emit.texts import WalkText
from fagen.plan.warpgroups import visit_words


class Visits(RolesText):
    """The tiles of each walk as the producer finds them, and what it says of them."""

    def searches(self, walk: WalkText) -> bool:
        """Whether a walk may pass over tiles between those it visits."""
        return bool(walk.loop.skip) or len(walk.loop.ranges) > 1

    def seeks(self, walk: WalkText) -> bool:
        """Whether what is known of each tile alone decides that: a warp looks at many tiles at once."""
        return bool(walk.loop.skip) and len(walk.loop.ranges) < 2

    @property
    def by_warp(self) -> bool:
        """Whether a warp, not one thread of it, says which tiles there are."""
        sorted_ = any(ranges is not None and ranges.searches for ranges in self.scope.kernel.ranges)
        return sorted_ or any(map(self.seeks, self.walks))

    def upward(self, walk: WalkText) -> bool:
        """Whether the first tile comes first: where values fall along the walk, maxima change least then. In
        turns a work begins there, too: those of later rows, which come before it, have begun no earlier."""
        states = self.scope.kernel.stage.walks[self.walks.index(walk)].states
        first = self.ascends or self.roles.in_turns
        return first or any(s.op == "max" and falls(s.value, self.walk_axis) for s in states)

    def first_visited(self, walk: WalkText) -> str:
        """The tile that comes first in a walk that visits all of them."""
        return (
            self.loop_first(walk) if self.upward(walk) else f"maximum({self.behind(walk)} - {self.walk}, 0)"
        )

    def following(self, walk: WalkText) -> str:
        """The tile that comes after this one in a walk that visits all of them; -1 if there is none."""
        start, first = walk.loop.start, self.loop_first(walk)
        if self.upward(walk):
            return f"{start} + {self.walk} < {self.loop_end(walk)} ? {start} + {self.walk} : -1"
        if first == "0":
            return f"maximum({start} - {self.walk}, -1)"
        return f"{start} - {self.walk} >= {first} ? {start} - {self.walk} : -1"

    def behind(self, walk: WalkText) -> str:
        """A multiple of a tile's columns behind the last tile."""
        if len(walk.loop.ranges) > 1:
            return "0x7fffffff"
        return f"({self.loop_end(walk)} + {self.walk} - 1) / {self.walk} * {self.walk}"

    @property
    def is_last(self) -> str:
        """Whether a tile is the last of a work."""
        ends = [f"{axis_name(axis)} == {self.length(axis)} - 1" for axis in self.outer_axes]
        return " && ".join(["next < 0", *ends])

    # --------------------------------------------------------------------- what consumers have to do on one

    @property
    def passes_over(self) -> bool:
        """Whether a consumer may have nothing to do on a tile that another one needs."""
        several = (self.chained or bool(self.levels)) and self.roles.row_groups > 1
        return several and self.refined(self.walks[0])

    def refined(self, walk: WalkText) -> bool:
        """Whether what is known of a block's tile is asked for the rows of each consumer: a range is."""
        if self.searches(walk) or self.divided:
            return False
        texts = [
            *(s.text for s in (*walk.loop.before, *walk.loop.tile)),
            walk.loop.skip or "",
            walk.loop.full or "",
        ]
        texts += [text for pair in walk.loop.ranges for text in pair]
        cheap = not any(re.search(r"partition_point|\[", text) for text in texts)
        tested = bool(walk.loop.ranges or walk.loop.full or self.parts)
        return cheap and self.row_axis is not None and tested

    def dead(self, walk: WalkText) -> str:
        """Whether no element of a tile counts, by the bounds of the walk."""
        if not walk.loop.ranges:
            return ""
        start, name = walk.loop.start, self.walk_axis
        tests = [f"{start} >= {name}_end"]
        if walk.loop.ranges[0][0] != "0":
            tests.append(f"{start} + {self.walk} <= {name}_begin")
        return " || ".join(tests)

    def full_of(self, walk: WalkText, rows: str) -> str:
        """Whether every element counts of a tile and of so many rows; of sums over rows those past the last
        are no part."""
        full = self.full(walk)
        if not self.parts or self.row_axis is None:
            return full
        return f"{full} && block.{self.row_axis}_start + {rows} <= {self.length(self.row_axis)}"

    def reads_to_test(self, walk: WalkText) -> bool:
        """Whether columns are read for the test of a tile's elements alone."""
        text = "".join(self.text_of(phase, walk, first=False) for phase in walk.phases)
        return walk.apart and walk.mode == "both" and not walk.stores and not self.says("column", text)

    @property
    def masks_rows(self) -> bool:
        """Whether a mask is of rows that are not there as well: they are no part of sums over rows."""
        return bool(self.parts)

    # ---------------------------------------------------------------------------------------- announced works

    @property
    def heads(self) -> str:
        """How many works have the same rows."""
        return " * ".join(self.length(axis) for axis in self.grid_axes) or "1"

    @property
    def claimed(self) -> str:
        """The number of another work. Where blocks wait for those that claimed theirs before them, the first
        one is claimed too: whoever has an earlier one then runs."""
        if self.roles.in_turns:
            return "fetch_cyclic(p.counter, count + gridDim.x)"
        return "gridDim.x + fetch_cyclic(p.counter, count)"

    # ---------------------------------------------------------------------------------------- announced tiles

    def visit_of(self, ring: str) -> str:
        """Where a tile is announced."""
        return f"{self.visit_words} * " + (
            f"({ring}.count % VISITS)" if self.counts_visits else f"{ring}.stage()"
        )

    @property
    def visits(self) -> str:
        """How many words announce tiles."""
        return f"{self.visit_words} * {'VISITS' if self.counts_visits else 'STAGES'}"

    @property
    def visit_words(self) -> int:
        """Words in which a tile is announced."""
        return visit_words(len(self.outer_axes))

    @property
    def counts_visits(self) -> bool:
        """Whether more tiles are announced at once than there are buffers."""
        return bool(self.parts) or self.brings_values

    # --------------------------------------------------------------------------- positions of the outer axes

    @property
    def outer_names(self) -> str:
        """Positions of the outer axes."""
        return ", ".join(map(axis_name, self.outer_axes))

    @property
    def outer_firsts(self) -> str:
        """The first positions of the outer axes, as further arguments."""
        return ", 0" * len(self.outer_axes)

    @property
    def outer_visited(self) -> str:
        """Those that a tile was announced with, as further arguments."""
        return "".join(f", visit[{2 + i}]" for i in range(len(self.outer_axes)))

    @property
    def outer_positions(self) -> str:
        """Those that a tile is announced with, as further elements."""
        return "".join(f", {axis_name(axis)}" for axis in self.outer_axes)

    @property
    def outer_moved(self) -> str:
        """Whether a tile is announced with others than those before."""
        moved = (f"visit[{2 + i}] != block.{axis_name(a)}" for i, a in enumerate(self.outer_axes))
        return " || ".join(moved)

    @property
    def follows_outer(self) -> bool:
        """Whether consumers need to know at which positions of the outer axes a tile is."""
        if not self.outer_axes:
            return False
        (walk,) = self.walks
        texts = [statement.text for statement in walk.row]
        texts += [self.text_of(phase, walk, True) for phase in walk.phases]
        texts += [self.text_of_mask(walk), *(draw.text for draw in walk.draws)]
        texts += [] if self.brings_values else [statement.text for statement in self.column]
        return any("block." in text for text in texts)

    # ------------------------------------------------------------------------------ what is known of columns

    @property
    def brings_values(self) -> bool:
        """Whether a warp brings what is known of each column."""
        return bool(self.levels) and values_fit(self.scope)

    @property
    def value_fields(self) -> list[tuple[Variable, int]]:
        """What is known of a column, and the first of the words that each takes."""
        found = self.scope.fields(COLUMN)
        return [(field, words_of(found[:number])) for number, field in enumerate(found)]

    @property
    def column_read(self) -> str:
        """What is known of a thread's column ``c`` of a tile."""
        return "known_column(stage, lane, c)" if self.brings_values else super().column_read


def words_of(values: Sequence[Variable]) -> int:
    """The 32 bits that values of a column take."""
    return sum(2 if value.ctype == "int64" else 1 for value in values)


def values_fit(scope: Scope) -> bool:
    """Whether there are values of columns, and all have room in shared memory."""
    kernel, fields_ = scope.kernel, scope.fields(COLUMN)
    room = sum(tile.bytes for tile in kernel.shared if tile.name == "values")
    assert kernel.roles is not None
    taken = 4 * words_of(fields_) * kernel.block_walk * kernel.roles.stages
    return 0 < taken <= room and all(each.ctype in ("float", "int32", "int64") for each in fields_)
