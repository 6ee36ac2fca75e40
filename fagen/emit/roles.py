"""A stage with products, as `schedule/forward_roles` writes it: one thread copies, warpgroups multiply.

The steps on a tile are those of `forward`. What is added: which tensor a tile is copied from and where in it,
how a maximum may lag behind, and how results leave.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from typing import Any, Literal, cast

from fagen.derive.intervals import OWN_FIRST, OWN_LAST, RowPlace
from fagen.derive.invariance import free_references
from fagen.derive.magnitudes import FP16_MAX, largest_weight
from fagen.derive.running import old
from fagen.derive.signs import falls
from fagen.derive.terms import term_of
from fagen.derive.unscale import common_factor, differences
from fagen.derive.vanish import limits
from fagen.derive.walk import Partial, State, Walk
from fagen.emit.cexpr import HEAD, Lowering
from fagen.emit.code import (
    ATOM,
    COLUMN,
    ELEMENT,
    PRODUCT,
    ROW,
    Code,
    Place,
    Split,
    Statement,
    Variable,
)
from fagen.emit.forward import LoopBuilder
from fagen.emit.loops import LoopText
from fagen.emit.params import Tensor
from fagen.emit.scope import Scope, axis_name, block_name
from fagen.emit.texts import (
    ForwardLoop,
    LaggingText,
    LevelText,
    Phase,
    ProductText,
    StateText,
    StoresText,
    StoreText,
    TileText,
    WalkText,
)
from fagen.ir import graph as ir
from fagen.ir.graph import MINUS_INF, ONE, ZERO, Axis, Input, Map, Node
from fagen.plan.plan import GROUP_AXIS, STORAGE_BYTES, Roles, turns_of
from fagen.plan.space import CHUNK
from fagen.plan.warpgroups import (
    ADDER_REGISTERS,
    GROUP_ROWS,
    MOST_AT_LAUNCH,
    PART,
    PARTS,
    WORKS,
    handed,
    kept,
    late_rows,
    levels,
    padded,
    panel_columns,
    visit_count,
    visit_words,
    whole,
)

_PLACES = {
    "works": "WORKS_AT",
    "visits": "VISITS_AT",
    "own_pipe": "ROW_PIPE_AT",
    "late_pipe": "LATE_PIPE_AT",
    "walk_pipe": "COLUMN_PIPE_AT",
    "sum_pipe": "SUM_PIPE_AT",
    "values": "VALUES_AT",
    "visit_pipe": "VISIT_PIPE_AT",
    "handed": "HANDED_AT",
    "parts": "PARTS_AT",
    "places": "PLACES_AT",
    "turns": "TURNS_AT",
    "hand_pipe": "HAND_PIPE_AT",
    "part_pipe": "PART_PIPE_AT",
    "kept": "KEPT_AT",
    "whole": "WHOLE_AT",
    "given": "WEIGHTS_AT",
    "weight_pipe": "WEIGHT_PIPE_AT",
}
_QUAD_COLUMNS = 32
"""Columns that four lanes exchange at once."""
_LANES = 4
"""Threads that share a row."""
_SLACK, _EXCEEDED = 5.5, 245.0
"""A free maximum stays as long as it is exceeded by no more, and what such powers are at most."""
_CACHE_BYTES = 16 << 20
"""Of what heads that are worked on at once read and add to along the walk: a part of the L2 cache."""


@dataclass(frozen=True)
class CopyText:
    """A tile in shared memory as bulk copies move it."""

    tile: TileText
    kind: str
    """The name of its type."""
    panels: str
    """Its type."""
    map: str
    """The parameter that says how its tensor lies."""
    others: tuple[str, ...]
    """Positions along the other axes of the tensor, the nearest first."""
    first: tuple[str, ...] = ()
    """The first head, where rows of several lie side by side."""
    late: bool = False
    """Whether it is of rows that products of later levels alone read: there is one buffer."""
    held: bool = False
    """Whether consumers have such rows in registers: products then read less shared memory."""

    @property
    def name(self) -> str:
        """What it is called."""
        return self.tile.name

    def at(self, row: str) -> str:
        """Where a copy from row ``row`` on lies in the tensor."""
        places = [*self.first, row, *self.others]
        return ", ".join([*places, *["0"] * (3 - len(places))])


@dataclass(frozen=True)
class AddedText:
    """A sum over the rows of all blocks, to which each tile adds its part."""

    weights: str
    """The array of weights that consumers hand over."""
    weight: str
    """What they are rounded to."""
    operand: CopyText
    """The tile of rows that they are multiplied by."""
    map: str
    """The parameter that says how the sum lies."""
    features: str
    panel: int
    """Features that are multiplied at once: those of a panel of the tile of rows."""
    pieces: int
    """Parts that these leave in."""
    others: tuple[str, ...]
    """Positions along the other axes of the sum, the nearest first."""
    turns: str
    """Where it is counted how many blocks have added to the tile at ``place``; empty where none waits for its
    turn."""
    equation: str

    @property
    def width(self) -> str:
        """The features that are multiplied at once, as the text has them."""
        return "SumPart::COLUMNS" if self.pieces == 1 else f"{self.panel}"

    @property
    def places(self) -> str:
        """The other positions, as elements."""
        return ", ".join([*self.others, *["0"] * (2 - len(self.others))])


@dataclass(frozen=True)
class ForwardRoles(ForwardLoop):
    """What the template reads of a kernel."""

    parts: tuple[AddedText, ...]
    """Sums over the rows of all blocks."""
    levels: tuple[LevelText, ...]
    """Of the one walk, where the products and sums of a tile are made level by level."""
    read_again: tuple[str, ...]
    """Products that later levels read."""
    handed: tuple[str, ...]
    """Arrays of weights that other consumers read."""
    wholes: int
    """What weights are selected from that later levels read, counted."""
    own_copies: tuple[CopyText, ...]
    walk_copies: tuple[tuple[CopyText, ...], ...]
    """Of each walk, those of its products."""
    sum_copies: tuple[tuple[CopyText, ...], ...]
    """Of each walk, those of its weighted sums."""
    epilogue: Literal["staged", "quads", "elements"]
    """How results with features leave: through shared memory, or from registers, in vectors or one by one."""
    out: CopyText | None
    """The tile through which they leave."""
    section: str
    announced: tuple[str, ...]
    """Places in sorted tables that are announced with a work: rows look for their own between them."""
    ascends: bool
    """Whether rows have the less to do the later they come, and the first tile is the one to begin with."""

    @property
    def roles(self) -> Roles:
        """Warps and buffers."""
        assert self.scope.kernel.roles is not None
        return self.scope.kernel.roles

    @property
    def copies(self) -> list[CopyText]:
        """All tiles, each once."""
        own = *self.early_copies, *self.late_copies
        return [*own, *(c for group in (*self.walk_copies, *self.sum_copies) for c in group)]

    @property
    def early_copies(self) -> list[CopyText]:
        """Tiles of rows that come first."""
        return [copy for copy in self.own_copies if not copy.late]

    @property
    def late_copies(self) -> list[CopyText]:
        """Those that come later, and are done with before the others."""
        return [copy for copy in self.own_copies if copy.late]

    @property
    def holds_late(self) -> bool:
        """Whether those are in registers."""
        return any(copy.held for copy in self.late_copies)

    @property
    def kinds(self) -> list[CopyText]:
        """One copy for each type of a tile."""
        found = {copy.kind: copy for copy in (*self.copies, *([self.out] if self.out else []))}
        return list(found.values())

    def copy_of(self, tile: TileText) -> CopyText:
        """How a tile is copied."""
        return next(copy for copy in self.copies if copy.tile is tile)

    def factors(self, product: ProductText) -> list[tuple[CopyText, CopyText]]:
        """The tiles that are multiplied and summed."""
        return [(self.copy_of(own), self.copy_of(other)) for own, other in product.factors]

    @property
    def chained(self) -> bool:
        """Whether the last sums of one work are made with the first products of the next."""
        (first, *others) = self.walks
        return not others and not self.levels and bool(first.weighted) and bool(first.products)

    @property
    def consumer(self) -> Literal["chained", "plainly", "levels", "alone"]:
        """How consumers work: the name of their template."""
        if self.levels:
            return "alone" if self.divided else "levels"
        return "chained" if self.chained else "plainly"

    @property
    def owes(self) -> bool:
        """Whether a tile is copied for its sums behind the next one, with whose products they are made.

        So does the last one behind the first of the next work, unless that waits for the place of its rows.
        """
        return self.chained and self.roles.own_stages > 1

    @property
    def turns(self) -> bool:
        """Whether consumers issue their products in turn."""
        return self.chained and self.roles.consumers > 1 and self.widest <= 128

    @property
    def rescales_first(self) -> bool:
        """Whether sums are rescaled before, not after, what is added to them: the more there are."""
        return self.widest > 128

    @cached_property
    def widest(self) -> int:
        """The most features of a sum."""
        sizes = dict(self.scope.plan.problem.sizes)
        axes = [axis for walk in self.scope.kernel.stage.walks for s in walk.states for axis in s.features]
        return max((sizes[axis] for axis in axes), default=0)

    @property
    def divided(self) -> bool:
        """Whether each consumer makes another level of the same rows."""
        return self.roles.divided

    @property
    def hand_stages(self) -> str:
        """How many buffers there are of what is handed over."""
        return "HANDED" if self.divided else "STAGES"

    def row_buffer(self, ring: str, group: str | int) -> str:
        """The number of a buffer of rows, of those of a consumer."""
        of_group = f" * CONSUMERS + {group}" if group else " * CONSUMERS"
        return f"{ring}.stage(){'' if self.divided else of_group}"

    def row_pipe(self, group: str) -> str:
        """The barriers of the rows of a consumer."""
        return "RowPipe(ROW_PIPE_AT)" if self.divided else f"buffer<RowPipe>(ROW_PIPE_AT, {group})"

    @property
    def each_group(self) -> str:
        """A loop over those who have rows of their own."""
        return "" if self.divided else "for (int group = 0; group < CONSUMERS; ++group) "

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

    def full_of(self, walk: WalkText, rows: str) -> str:
        """Whether every element counts of a tile and of so many rows; of sums over rows those past the last
        are no part."""
        full = self.full(walk)
        if not self.parts or self.row_axis is None:
            return full
        return f"{full} && block.{self.row_axis}_start + {rows} <= {self.length(self.row_axis)}"

    @property
    def of_consumer(self) -> str:
        """Positions that a consumer owns."""
        return f"{GROUP_ROWS} / {self.length(GROUP_AXIS)}" if self.shared else f"{GROUP_ROWS}"

    @property
    def first_row(self) -> str:
        """How far from those of its block the rows of a consumer begin."""
        return "0" if self.divided else f"{self.of_consumer} * group"

    @property
    def before_next(self) -> str:
        """From a consumer's first position to its last."""
        return f"{self.of_consumer} - 1" if self.shared else f"{GROUP_ROWS - 1}"

    def targets_of(self, level: LevelText | None) -> str:
        """Where results with features go."""
        return "\n".join(outputs.stores[0].target for outputs in self.outputs_of(level))

    def needed(self, text: str) -> list[Statement]:
        """What is computed of a finished row for ``text``."""
        kept: list[Statement] = []
        for statement in reversed(self.finish):
            if self.says(statement.variable.name, "\n".join([text, *(each.text for each in kept)])):
                kept.insert(0, statement)
        return kept

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
    def counts_visits(self) -> bool:
        """Whether more tiles are announced at once than there are buffers."""
        return bool(self.parts) or self.brings_values

    def reads_to_test(self, walk: WalkText) -> bool:
        """Whether columns are read for the test of a tile's elements alone."""
        text = "".join(self.text_of(phase, walk, first=False) for phase in walk.phases)
        return walk.apart and walk.mode == "both" and not walk.stores and not self.says("column", text)

    def dead(self, walk: WalkText) -> str:
        """Whether no element of a tile counts, by the bounds of the walk."""
        if not walk.loop.ranges:
            return ""
        start, name = walk.loop.start, self.walk_axis
        tests = [f"{start} >= {name}_end"]
        if walk.loop.ranges[0][0] != "0":
            tests.append(f"{start} + {self.walk} <= {name}_begin")
        return " || ".join(tests)

    def landed(self, walk: WalkText) -> str:
        """What may be touched when the sums of a tile have been made."""
        return ", ".join([*(s.name for s in walk.weighted), *(f"rounded_{name}" for name in walk.weights)])

    def update_parameters(self, walk: WalkText) -> list[str]:
        """What the functions of a walk's tile may take."""
        arrays = [f"float (&{name})[ROWS]" for name in self.rescale_fields(walk)]
        arrays += [f"Left<{state.weight}> (&rounded_{state.weights})[COLUMNS / 4]" for state in walk.weighted]
        if self.levels:
            arrays += [f"{array.ctype} (&{array.name})[ROWS][COLUMNS]" for array in walk.arrays]
        steps = ["uint32 stage", "uint32 from"]
        return [*super().update_parameters(walk), *steps, *dict.fromkeys(arrays)]

    def lagging_parameters(self, walk: WalkText) -> list[str]:
        """What the function may take that weighs a tile from maxima as they are: weights leave it rounded."""
        whole = [f"float (&{weights})[ROWS][COLUMNS]" for weights in walk.weights]
        return [each for each in self.update_parameters(walk) if each not in whole]

    @property
    def all_weighted(self) -> list[StateText]:
        """Weighted sums of all walks."""
        return [state for walk in self.walks for state in walk.weighted]

    @property
    def all_weights(self) -> list[str]:
        """Arrays of weights of all walks, each once."""
        return list(dict.fromkeys(weights for walk in self.walks for weights in walk.weights))

    @property
    def sums(self) -> list[str]:
        """What functions on results may take of them."""
        return [f"float (&{state.name})[ROWS][{state.share}]" for state in self.all_weighted]

    def result_of(self, outputs: StoresText) -> str:
        """The sums whose place a result takes."""
        (store,) = outputs.stores
        return _sums_of(store, [state.name for state in self.all_weighted])[0]

    @property
    def has_sums(self) -> bool:
        """Whether any tiles are copied that the first products of a tile don't read."""
        return any(self.sum_copies)

    @property
    def walk_uses(self) -> tuple[int, int]:
        """For the two pipes of a walk made level by level, the last use of a tile: the products of level i
        (2 i), or its sums (2 i + 3), which are made beside the products of the next level.

        What the first products read is announced with the tile, and kept until all of it is done.
        """
        events: list[tuple[int, CopyText]] = []
        for level in self.levels:
            made = [other for product in level.products for _, other in self.factors(product)]
            events += [(2 * level.number, copy) for copy in made]
            summed = [state.operand for state in level.sums if state.operand is not None]
            events += [(2 * level.number + 3, self.copy_of(operand)) for operand in summed]
        final = 2 * self.levels[-1].number + 3
        return final, max((event for event, copy in events if copy in self.sum_copies[0]), default=-1)

    @property
    def announces_late(self) -> bool:
        """Whether the next products are issued before what a consumer hands over is announced.

        Of a narrow tile that is worth more than beginning early with what is added.
        """
        return self.scope.kernel.block_walk <= GROUP_ROWS

    def last_use(self, level: LevelText, copies: Sequence[CopyText]) -> Literal["products", "sums"]:
        """What of a level, made by a consumer of its own, reads tiles last."""
        summed = [self.copy_of(state.operand) for state in level.sums if state.operand is not None]
        return "sums" if any(copy in copies for copy in summed) else self.first_use(level, copies)

    def first_use(self, level: LevelText, copies: Sequence[CopyText]) -> Literal["products", "sums"]:
        """What of it reads them first; where nothing does, its sums: it waits before it frees."""
        made = [other for product in level.products for _, other in self.factors(product)]
        return "products" if any(copy in copies for copy in made) else "sums"

    def outputs_of(self, level: LevelText | None) -> tuple[StoresText, ...]:
        """Results with features that are made of the sums of a level, or of all."""
        if level is None:
            return self.feature_outputs
        names = [state.name for state in level.sums]
        return tuple(o for o in self.feature_outputs if all(_sums_of(store, names) for store in o.stores))

    def stores_of(self, level: LevelText | None) -> list[StoreText]:
        """All that is written of it."""
        if level is None:
            return self.all_outputs
        return [store for outputs in self.outputs_of(level) for store in outputs.stores]

    def number_of(self, level: LevelText | None) -> str:
        """What is put behind the names of its functions."""
        return "" if level is None else f"{level.number}"

    def finishes(self, level: LevelText | None) -> bool:
        """Whether anything is made of the sums of a level before they leave."""
        if level is None or self.epilogue == "elements":
            return True
        made = ((outputs.stores[0].number, self.result_of(outputs)) for outputs in self.outputs_of(level))
        return any(number != f"{sums}[r][f]" for number, sums in made)

    @staticmethod
    def masks(walk: WalkText, level: LevelText) -> bool:
        """Whether it is a product of a level that is masked."""
        return any(walk.masked == f"{product.name}[r][c]" for product in level.products)

    @property
    def hands(self) -> bool:
        """Whether a consumer needs anything that another has made."""
        return bool(self.handed or self.read_again)

    @staticmethod
    def buffer_of(arrays: Sequence[str], name: str) -> str:
        """Which buffer an array is handed over in."""
        return _buffer(arrays.index(name), len(arrays)).replace("from", "hand_at.stage()")

    def multiply_add(self, state: StateText) -> str:
        """How terms are added to a sum: with little room at the launch few features at once."""
        if not self.divided:
            return "multiply_add"
        sizes, states = dict(self.scope.plan.problem.sizes), self.scope.kernel.stage.walks[0].states
        (features,) = (sizes[s.features[0]] for s in states if s.symbol.name == state.name)
        return f"multiply_add<{MOST_AT_LAUNCH}>" if features > MOST_AT_LAUNCH else "multiply_add"

    def place_of(self, level: LevelText, name: str) -> str:
        """The array of earlier products whose place a product or an array of weights may take."""
        products = [product.name for product in level.products]
        if name in products and not self.divided:  # those of the first level are there while others are made
            earlier, number = self.levels[0].products, products.index(name)
            place = earlier[number].name if number < len(earlier) else ""
            return "" if not place or self.read_from(place, 1) else place
        place = products[0] if products and name == level.weights[0] else ""
        return "" if not place or self.read_from(place, level.number + 1) else place

    def read_from(self, name: str, number: int) -> bool:
        """Whether levels from ``number`` on read an array."""
        phases = (level.phase for level in self.levels[number:])
        texts = (self.text_of(phase, self.walks[0], False) for phase in phases)
        return any(re.search(rf"\b{name}\[", text) for text in texts)

    @property
    def brings_values(self) -> bool:
        """Whether a warp brings what is known of each column."""
        return bool(self.levels) and _fit(self.scope)

    @property
    def masks_rows(self) -> bool:
        """Whether a mask is of rows that are not there as well: they are no part of sums over rows."""
        return bool(self.parts)

    @property
    def row_readers(self) -> int:
        """Who frees the rows of a consumer: its leader, or each warp that reads them."""
        if self.divided:
            return 4 * (self.roles.consumers + self.roles.adders)
        return 4 * (1 + self.roles.adders) if self.levels else 1

    @property
    def adder_registers(self) -> int:
        """Registers of a thread that adds parts of sums."""
        return ADDER_REGISTERS

    @property
    def value_fields(self) -> list[tuple[Variable, int]]:
        """What is known of a column, and the first of the words that each takes."""
        found = self.scope.fields(COLUMN)
        return [(field, _words(found[:number])) for number, field in enumerate(found)]

    @property
    def column_read(self) -> str:
        """What is known of a thread's column ``c`` of a tile."""
        return "known_column(stage, lane, c)" if self.brings_values else super().column_read

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
    def claimed(self) -> str:
        """The number of another work. Where blocks wait for those that claimed theirs before them, the first
        one is claimed too: whoever has an earlier one then runs."""
        if self.roles.in_turns:
            return "fetch_cyclic(p.counter, count + gridDim.x)"
        return "gridDim.x + fetch_cyclic(p.counter, count)"

    @property
    def turn(self) -> str:
        """How many works of the same head come before a block's."""
        assert self.row_axis is not None
        return f"({self.length(self.row_axis)} - 1 - block.{self.row_axis}_start) / {self.positions}"

    @property
    def is_last(self) -> str:
        """Whether a tile is the last of a work."""
        ends = [f"{axis_name(axis)} == {self.length(axis)} - 1" for axis in self.outer_axes]
        return " && ".join(["next < 0", *ends])

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

    @property
    def visit_words(self) -> int:
        """Words in which a tile is announced."""
        return visit_words(len(self.outer_axes))

    @property
    def walk_tiles(self) -> list[CopyText]:
        """Tiles of the walks."""
        return [copy for group in (*self.walk_copies, *self.sum_copies) for copy in group]

    @property
    def maps(self) -> list[str]:
        """The parameters that say how tensors are copied, each once."""
        return list(dict.fromkeys(c.map for c in (*self.copies, *([self.out] if self.out else []))))

    @property
    def heads(self) -> str:
        """How many works have the same rows."""
        return " * ".join(self.length(axis) for axis in self.grid_axes) or "1"

    def searches(self, walk: WalkText) -> bool:
        """Whether a walk may pass over tiles between those it visits."""
        return bool(walk.loop.skip) or len(walk.loop.ranges) > 1

    def seeks(self, walk: WalkText) -> bool:
        """Whether what is known of each tile decides that: a warp looks at many tiles at once."""
        return bool(walk.loop.skip) and len(walk.loop.ranges) < 2

    @property
    def by_warp(self) -> bool:
        """Whether a warp, not one thread of it, says which tiles there are."""
        sorted_ = any(ranges is not None and ranges.searches for ranges in self.scope.kernel.ranges)
        return sorted_ or any(map(self.seeks, self.walks))

    def upward(self, walk: WalkText) -> bool:
        """Whether the first tile comes first: where values fall along the walk, maxima change least then."""
        if self.searches(walk):
            return False
        states = self.scope.kernel.stage.walks[self.walks.index(walk)].states
        return self.ascends or any(s.op == "max" and falls(s.value, self.walk_axis) for s in states)

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
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producer and of a consumer."""
        registers = self.scope.kernel.registers
        assert registers is not None
        return registers


def forward_roles(scope: Scope) -> ForwardRoles:
    """The steps of ``scope.kernel``."""
    return _Builder(scope).roles()


class _Builder(LoopBuilder):
    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.room = self._room()
        self.free = (
            {reference.maximum for reference in free_references(scope.kernel.stage)}
            if self.room >= _EXCEEDED
            else set()
        )
        self.make_by_levels(levels(self.stage))
        self.divided = self.kernel.roles is not None and self.kernel.roles.divided
        self.wholes = () if self.divided else whole(self.levels_made)
        self.kept = kept(self.levels_made, self.wholes)
        self.handed = handed(self.levels_made) if self.divided else ()
        self.finds_rows = not self.levels_made and len(self.stage.walks) == 1
        self.announced: list[str] = []
        self.lags = False
        if not self.levels_made:  # tests of columns take registers that something else needs
            self.again, self.bounds_values = (COLUMN,), True

    # ------------------------------------------------------------------------------------------ in registers

    def held(self, state: State) -> str:
        return f"{state.symbol.name}[r]" if state.features else super().held(state)

    def share(self, axis: Axis, width: int) -> tuple[str, int]:
        return super().share(axis, -(-self._size(axis) // 8) * 8)

    def tile(self, side: str, record: str, node: Node, columns: Axis) -> TileText:
        """The tile of a tensor, which is copied as it lies in memory: no element of it is computed."""
        key = (side, node, columns)
        read = side.replace("operand", "walk"), node, columns
        if self.levels_made and read in self.tiles:
            return self.tiles[read]
        if key in self.tiles:
            return self.tiles[key]
        assert isinstance(node, Input)
        shared, tensor = self.shared[record], self.scope.parameters.tensor(node)
        row_axis = self.row_axis if side == "own" else self.walk_axis
        assert row_axis is not None
        made = TileText(
            name=self._tile_name(tensor.name, shared),
            rows=block_name(row_axis),
            row_axis=row_axis,
            row_name=axis_name(row_axis),
            column_axis=columns,
            length=self.scope.length(columns),
            width=self.scope.length(columns),
            address=self._address(tensor.name, shared.address),
            statements=(),
            value="",
            chunked=False,
            own=side == "own",
            by_rows=False,
            plain="",
            storage=shared.storage,
            vectors=True,
            of_sum=side.startswith("operand"),
        )
        self.tiles[key] = made
        return made

    @property
    def first_place(self) -> int:
        """Where in what is announced of a work the places lie."""
        return 1 + len(self.kernel.grid_axes)

    def place(self, place: RowPlace, loop: LoopText, lower: Lowering, split: Split) -> Statement:
        """The places of a tile are those that were announced."""
        words: dict[Node, str] = {}
        for symbol in (place.lowest, place.highest):
            if loop.places[symbol] not in self.announced:
                self.announced.append(loop.places[symbol])
            words[symbol] = f"work[{self.first_place + self.announced.index(loop.places[symbol])}]"
        return super().place(place, replace(loop, places=words), lower, split)

    def maskable(self, walk: Walk, maxima: Sequence[Node]) -> Sequence[Node]:
        """Products before what is made of them: tiles of which all elements count then need no other text."""
        return [*(product.symbol for product in walk.products), *maxima] if maxima else []

    # ---------------------------------------------------------------------------------------- level by level

    def earlier_weight(self, name: str, value: Node) -> str | None:
        """A weight is kept for later levels as it is rounded, in half the registers."""
        if not self.rounds:
            return None
        if self.divided:
            if value not in self.handed:
                return None
            return f"handed({_buffer(self.handed.index(value), len(self.handed))}, r, c)"
        return f"value_of(rounded_{name}, r, c)"

    def earlier_products(self, level: int, leaves: dict[Node, Code]) -> Mapping[Node, Node]:
        """Products that later levels read wait apart, and so does what weights are selected from."""
        known: dict[Node, Node] = {}
        for number, value in enumerate(self.wholes):
            here = self.known_at_last(value) == level
            known[value] = symbol = ir.Symbol(f"whole{number}_{level}", value.axes, "float")
            text = f"whole{number}[r][c % 4]" if here else f"whole({number}, r, c)"
            leaves[symbol] = self.scope.codes.leaf(text, "float", ELEMENT._replace(phase=level))
        for number, product in enumerate(self.kept if self.rounds else ()):
            at = self.known_at(product)
            if at < level:
                symbol = ir.Symbol(f"kept_{product.symbol.name}", product.symbol.axes, "float")
                known[product.symbol] = symbol
                place = ELEMENT._replace(phase=at + 1)
                buffer = _buffer(number, len(self.kept)) if self.divided else f"{number}"
                leaves[symbol] = self.scope.codes.leaf(f"kept({buffer}, r, c)", "float", place)
        return known

    def left_to_round(self, weights: str, value: Node, earlier: Mapping[Node, str]) -> Node:
        split = _factor_among(earlier, value) if self.rounds and self.pairs else None
        if split is None:
            return value
        factor, rest = split
        self.multiplied[weights] = f"rounded_{earlier[factor]}"
        return rest

    @property
    def pairs(self) -> bool:
        """Whether a product of a rounded weight may be made of pairs, its other factor rounded before.

        That is half the instructions, for one rounding of 16 bits more. Numbers of bf16 are as large as those
        of fp32; fp16 might not hold a factor of a product that it holds.
        """
        return not self.divided and all(tile.storage != "fp16" for tile in self.kernel.shared)

    def splits(self, roots: Sequence[tuple[Code, Place]], last: int) -> Sequence[Split]:
        """What a consumer needs it computes itself."""
        if not self.divided:
            return super().splits(roots, last)
        levels = ([root for root in roots if root[1].phase == level] for level in range(last + 1))
        return [self.scope.split(level) for level in levels]

    def sum_tile(self, number: int, walk: Walk, state: State) -> tuple[TileText, str]:
        """A tile that a product reads as well is that one."""
        if not self.levels_made:
            return super().sum_tile(number, walk, state)
        (axis,) = state.features
        place = cast(Node, state.operand), axis
        tiles = list(dict.fromkeys((term.walk, term.over) for p in walk.products for term in p.terms))
        weighted = ((s.operand, s.features[0]) for s in walk.states if s.operand is not None)
        apart = list(dict.fromkeys(each for each in weighted if each not in tiles))
        record = f"walk{tiles.index(place)}" if place in tiles else f"operand{apart.index(place)}"
        return self.tile(f"operand{number}", record, *place), record

    def _room(self) -> float:
        """How many times as large weights may be rounded as they are measured from their maximum."""
        if not any(tile.storage == "fp16" for tile in self.kernel.shared):
            return math.inf
        return FP16_MAX / (largest_weight(self.stage) or 1.0)

    def masked(self, walk: Walk) -> Node | None:
        """Of products made level by level also a product: a term that does not count is one with 0 then."""
        found = super().masked(walk)
        sums = all(state.features and term_of(state)[1] is None for state in walk.states)
        if found is not None or not self.levels_made or not sums or self.kept:
            return found
        for product in self.levels_made[0].products:
            rests = (ir.substitute(s.value, {product.symbol: MINUS_INF}) for s in walk.states)
            if all(limits(rest) is ZERO for rest in rests):
                return product.symbol
        return None

    def slack(self, state: State) -> str | None:
        """The factor of a free maximum in the exponents that are measured from it."""
        if state.op != "max" or state.symbol not in self.free:
            return None
        walk = next(walk for walk in self.stage.walks if state in walk.states)
        for other in walk.states:
            for node in ir.walk([other.rescale]) if other.rescale is not None else ():
                factor = _factor_of(node, state.symbol)
                if factor is not None:
                    code = self.scope.lowering(self.thread_leaves())(factor)
                    return "" if factor is ONE else f" * {self.scope.split([]).text(code, PRODUCT)}"
        return None

    def lagging(
        self,
        walk: Walk,
        levels: Mapping[State, int],
        texts: Mapping[State, StateText],
        leaves: Mapping[Node, Code],
    ) -> LaggingText | None:
        """As long as a maximum is a usual number, what lies above it makes the sum of its powers large.

        That takes one walk, of which the sums of a tile have landed before the next one is weighed, and one
        sum of powers alone, of which whatever else depends on the maximum is made.
        """
        maxima = [state for state in walk.states if state.op == "max"]
        others = [state for state in walk.states if state.op != "max"]
        if len(self.stage.walks) > 1 or self.levels_made or len(maxima) != 1 or not walk.products:
            return None
        columns = self.kernel.block_walk // _LANES
        if not self.masks_products(walk, self.masked(walk)) or self.room < columns * _EXCEEDED:
            return None
        (top,) = maxima
        if texts[top].slack is None or levels[top] or any(levels[state] != 1 for state in others):
            return None
        weights = {texts[state].weights for state in others if state.features and state.rescale is not None}
        if any(term_of(state)[1] is not None for state in others) or len(weights) != 1:
            return None
        for state in others:
            power = None if state.features else self.power_of(state.value, top, leaves)
            if power is None:
                continue
            exponent = ELEMENT._replace(phase=1)
            lower = self.lowering({**leaves, state.value: power})
            rests = (ir.substitute(other.value, {state.value: ONE}) for other in others)
            if any(ir.depends(rest, [top.symbol]) for rest in rests):
                continue
            split = self.scope.split([(lower(other.value), exponent) for other in others])
            factors = [(other, other.rescale) for other in others if other.rescale is not None]
            plain = self.lowering(dict(leaves))
            of_row = Place(row=True, phase=1)
            look = self.scope.split(
                [(plain(top.value), ELEMENT), *((plain(factor), of_row) for _, factor in factors)]
            )
            if any(each.kept() or each.at(place) for each in (split, look) for place in (ROW, COLUMN)):
                return None
            self.lags = True
            looked = Phase(look.at(of_row), look.at(ELEMENT), (), None)
            phase = Phase(
                split.at(of_row),
                split.at(exponent),
                tuple(replace(texts[other], value=split.text(lower(other.value))) for other in others),
                None,
            )
            made = replace(texts[top], value=look.text(plain(top.value)))
            return LaggingText(
                made,
                looked,
                {other.symbol.name: look.text(plain(factor)) for other, factor in factors},
                phase,
                state.symbol.name,
            )
        return None

    def power_of(self, value: Node, top: State, leaves: Mapping[Node, Code]) -> Code | None:
        """``exp(c x - c top)`` for a usual ``top``; None for any other value, or one not lowered so."""
        lower = self.lowering(dict(leaves))
        if not isinstance(value, Map) or value.op != "exp":
            return None
        code = lower(value)
        if not code.args or code.args[0].ctype != "Exponential":
            return None
        for x, measured, factor in differences(value.args[0]):
            if measured in (top.symbol, ir.finite(top.symbol)):
                codes = self.scope.codes
                of_row = (lower(factor), leaves[top.symbol])
                row = codes.call("exponential<LOOKS>", of_row, "Exponential", 0)
                return codes.make("{}({})", (row, lower(x)), "float", ATOM, (ATOM, 0), 2)
        return None

    def constants(self) -> list[tuple[str, str, str]]:
        kernel, roles = self.kernel, self.kernel.roles
        assert roles is not None
        assert self.row_axis is not None
        walk = block_name(self.walk_axis)
        at = {tile.name: tile.address for tile in kernel.shared}
        addresses = dict(self.addresses)
        for name, constant in _PLACES.items():
            if name in at:
                addresses[constant] = at[name]
        slack = "float", f"SLACK = {_SLACK}f", "a free maximum may be exceeded by so much"
        if self.lags:
            most = f"SLACK = {_SLACK}f, MOST = COLUMNS * {_EXCEEDED:.1f}f"
            slack = "float", most, "how far a maximum lags; exp of that in each column"
        shares = [f"{name} = {count}" for name, count, _ in self.shares.values()]
        words = _words(self.scope.fields(COLUMN)) if self.levels_made and _fit(self.scope) else 0
        return [
            (
                "int",
                f"CONSUMERS = {roles.consumers}, THREADS = {kernel.threads}",
                f"warpgroups that multiply, and {'two' if roles.adders else 'one'} more",
            ),
            (
                "int",
                f"{self.rows_text()}, {walk} = {kernel.block_walk}",
                "rows of a block, columns of a tile",
            ),
            ("int", f"ROW_STAGES = {roles.own_stages}, STAGES = {roles.stages}", "buffers of each tile"),
            (
                "int",
                f"WORKS = {WORKS}, WORDS = {self.first_place + len(self.announced)}",
                "works announced at once",
            ),
            (
                "int",
                ", ".join([f"LANES = {_LANES}, ROWS = 2, COLUMNS = {walk} / LANES", *shares]),
                "of a consumer's thread",
            ),
            *(
                [
                    (
                        "int",
                        f"COLUMN_WORDS = {words}",
                        "known of each column, of 32 bits",
                    )
                ]
                if words
                else []
            ),
            *(
                [("int", f"VISITS = {visit_count(roles, words)}", "tiles announced at once")]
                if roles.adders or words
                else []
            ),
            *([("int", f"PARTS = {PARTS}", "buffers of parts of sums")] if roles.adders else []),
            *(
                [("int", f"HANDED = {roles.handed}", "buffers of what is handed over")]
                if self.divided
                else []
            ),
            *([slack] if self.free else []),
            (
                "uint32",
                ", ".join(f"{name} = {address}" for name, address in addresses.items()),
                "bytes of shared memory",
            ),
        ]

    # -------------------------------------------------------------------------------------------- the kernel

    def roles(self) -> ForwardRoles:
        loop = self.build()
        kernel = self.kernel
        assert kernel.roles is not None
        own: list[CopyText] = []
        walks: list[tuple[CopyText, ...]] = []
        sums: list[tuple[CopyText, ...]] = []
        for key, tile in self.tiles.items():
            if key[0] == "own":
                copy = self.copied(key[1], tile, GROUP_ROWS)
                late = key[1:] in late_rows(self.stage) and not kernel.roles.divided
                own.append(replace(copy, late=late))
        own = [replace(copy, held=copy.late and self.holds(loop, own)) for copy in own]
        for number in range(len(loop.walks)):
            for side, found in ((f"walk{number}", walks), (f"operand{number}", sums)):
                tiles = [(key, tile) for key, tile in self.tiles.items() if key[0] == side]
                found.append(tuple(self.copied(key[1], tile, kernel.block_walk) for key, tile in tiles))
        made = self.level_texts(loop.walks[0])
        if made:  # tiles that the first products read come first
            first = {other.name for product in made[0].products for _, other in product.factors}
            every = (*walks[0], *sums[0])
            if self.divided:  # tiles that are free again first
                last = {copy.name: max(_uses(made, copy.tile)) for copy in every}
                first = {name for name in last if last[name] == min(last.values())}
            walks = [tuple(copy for copy in every if copy.name in first)]
            sums = [tuple(copy for copy in every if copy.name not in first)]
        outs = self.outs(loop)
        # a result may leave through the place of the rows it was made from
        staged = (
            len(outs) == 1 and kernel.roles.own_stages == 2 and bool(own) and not made and kernel.group == 1
        )
        if staged:
            sizes = [padded(self._size(tile.column_axis)) for tile in (outs[0].tile, own[0].tile)]
            staged = sizes[0] <= sizes[1]
        epilogue: Literal["staged", "quads", "elements"] = "staged" if staged else "elements"
        if outs and not staged and all(self._size(o.tile.column_axis) % _QUAD_COLUMNS == 0 for o in outs):
            epilogue = "quads"
        return ForwardRoles(
            **_members(loop),
            parts=tuple(self.added(partial, loop, own) for partial in self.stage.walks[0].partials),
            levels=made,
            read_again=tuple(product.symbol.name for product in self.kept),
            handed=self.handed_arrays(made),
            wholes=len(self.wholes),
            own_copies=tuple(own),
            walk_copies=tuple(walks),
            sum_copies=tuple(sums),
            epilogue=epilogue,
            out=outs[0] if staged else None,
            section=self.section(),
            announced=tuple(self.announced),
            ascends=self.ascends(loop),
        )

    def holds(self, loop: ForwardLoop, own: Sequence[CopyText]) -> bool:
        """Whether registers have room for rows that are read late: where weights are made of pairs, and of
        nothing that is known of a row or of its block, nor drawn."""
        late = sum(-(-self._size(copy.tile.column_axis) // 16) * 4 for copy in own if copy.late)
        texts = [loop.text_of(phase, walk, not walk.apart) for walk in loop.walks for phase in walk.phases]
        alone = not any(loop.says(name, text) for name in ("row", "block") for text in texts)
        drawn = any(walk.draws for walk in loop.walks)
        return self.pairs and alone and not drawn and late <= self.kernel.spare

    def inside(self) -> str:
        """Sums over rows are of those that are there."""
        column = super().inside()
        return f"row.inside && {column}" if self.stage.walks[0].partials else column

    def added(self, partial: Partial, loop: ForwardLoop, own: Sequence[CopyText]) -> AddedText:
        """A sum over the rows of all blocks."""
        (axis,) = partial.features
        assert self.kernel.roles is not None
        part, panel = self.kernel.roles.part, panel_columns(self._size(axis))
        tile = self.tiles["own", partial.operand, axis]
        tensor = self.scope.parameters.buffer(partial.name)
        state = next(s for s in self.levels_made[-1].states if s.value == partial.value)
        text = next(text for text in loop.walks[0].states if text.name == state.symbol.name)
        lower, shown = self.scope.lowering({}), self.scope.shown
        others = [each for each in tensor.layout if each not in (self.walk_axis, axis)]
        places = [lower.position(each).form for each in reversed(others)]
        if {"hk", "g"} <= set(others):  # they are one axis
            places[:2] = [self.scope.grid[HEAD].form]
        turns = ""
        if self.kernel.roles.in_turns:
            counted = self.scope.parameters.buffer(turns_of(partial.name))
            strides = dict(zip(counted.layout, counted.strides, strict=True))
            near = [each for each in reversed(others) if each != "hk"]
            at = [f"place[{2 + i}] * {strides[each]}" for i, each in enumerate(near)]
            if {"hk", "g"} <= set(others):  # strides of an axis of one position are 0
                group = self.scope.length(GROUP_AXIS)
                at[0] = f"place[2] / {group} * {strides['hk']} + place[2] % {group} * {strides['g']}"
            turns = " + ".join([*reversed(at), f"place[0] / {block_name(self.walk_axis)}"])
            turns = f"&{counted.pointer}[{turns}]"
        return AddedText(
            weights=text.weights,
            weight=text.weight,
            operand=next(copy for copy in own if copy.tile is tile),
            map=self.scope.parameters.map(tensor, self.walk_axis, axis, PART, PART // 2, part // (PART // 2)),
            features=self.scope.length(axis),
            panel=panel,
            pieces=panel // part,
            others=tuple(places),
            turns=turns,
            equation=f"{tensor.name} += sum_{partial.over} {shown(partial.value)} * {shown(partial.operand)}",
        )

    def handed_arrays(self, levels: Sequence[LevelText]) -> tuple[str, ...]:
        """The arrays of weights that other consumers read."""
        names = {
            state.symbol.name: state.value
            for level in self.levels_made
            for state in level.states
            if state.value in self.handed
        }
        arrays = {
            names[state.name]: state.weights
            for level in levels
            for state in level.sums
            if state.name in names
        }
        return tuple(arrays[value] for value in self.handed)

    def ascends(self, loop: ForwardLoop) -> bool:
        """Whether the rows of a block bound where its walk begins, and not where it ends."""
        (walk, *others), (ranges, *_) = loop.walks, self.kernel.ranges
        if others or not self.levels_made or ranges is None or len(ranges.ranges) != 1 or walk.loop.skip:
            return False
        begin, end = (
            ir.depends(bound, [OWN_FIRST, OWN_LAST])
            for bound in (ranges.ranges[0].begin, ranges.ranges[0].end)
        )
        return begin and not end

    def copied(self, node: Node, tile: TileText, rows: int) -> CopyText:
        """How a tile is copied."""
        assert isinstance(node, Input)
        return self.copy(self.scope.parameters.tensor(node), tile, rows)

    def copy(self, tensor: Tensor, tile: TileText, rows: int) -> CopyText:
        panel = panel_columns(self._size(tile.column_axis))
        assert tile.row_axis is not None
        others = [a for a in tensor.layout if a not in (tile.row_axis, tile.column_axis)]
        lower = self.scope.lowering({})
        heads = self.kernel.group if tile.own else 1
        first: list[str] = []
        if heads > 1:  # rows of heads beside each other
            others.remove("h")
            first, rows = [f"{lower.position('hk').form} * {self.scope.length(GROUP_AXIS)}"], rows // heads
        of = ", ".join([tensor.storage, str(GROUP_ROWS) if tile.own else tile.rows, tile.length])
        return CopyText(
            tile=tile,
            kind=f"{tile.name}Tile",
            panels=f"Panels<{of}{f', {panel}' if panel != 64 else ''}>",
            map=self.scope.parameters.map(tensor, tile.row_axis, tile.column_axis, rows, panel, heads=heads),
            first=tuple(first),
            others=tuple(lower.position(axis).form for axis in reversed(others)),
        )

    def outs(self, loop: ForwardLoop) -> tuple[CopyText, ...]:
        """The tile through which each result with features may leave; none where one can't."""
        found = [self.out(outputs) for outputs in loop.feature_outputs]
        names = [state.name for walk in loop.walks for state in walk.weighted]
        used = [name for outputs in loop.feature_outputs for name in _sums_of(outputs.stores[0], names)]
        if len(found) > 1 and len(used) != len(set(used)):
            return ()
        return tuple(copy for copy in found if copy) if all(found) else ()

    def out(self, outputs: StoresText) -> CopyText | None:
        """The tile through which a result with features may leave; None where it can't."""
        if len(outputs.stores) != 1:
            return None
        tensor, axis = outputs.stores[0].tensor, outputs.axis
        assert axis is not None
        size = self._size(axis)
        if STORAGE_BYTES[tensor.storage] != 2 or tensor.layout[-1] != axis or size % CHUNK:
            return None
        if self.row_axis not in tensor.layout or len(tensor.layout) > 4:
            return None
        tile = next(iter(self.tiles.values()))
        made = replace(
            tile,
            name=tensor.name,
            column_axis=axis,
            row_axis=self.row_axis,
            length=outputs.length,
            storage=tensor.storage,
            own=True,
        )
        return self.copy(tensor, made, GROUP_ROWS)

    def _size(self, axis: Axis) -> int:
        return dict(self.scope.plan.problem.sizes)[axis]

    def section(self) -> str:
        """How many heads are worked on at once: what a cache serves, one where all rows do the same.

        Blocks that wait for each other's turns are the fewer the more heads there are.
        """
        assert self.kernel.roles is not None
        masked = any(ranges is not None for ranges in self.kernel.ranges) or self.kernel.roles.in_turns
        bytes_ = sum(2 * self._size(key[2]) for key in self.tiles if key[0] != "own")
        partials = (partial for walk in self.stage.walks for partial in walk.partials)
        bytes_ += sum(4 * self._size(axis) for partial in partials for axis in partial.features)
        return self.scope.parameters.section(self.walk_axis, bytes_ if masked else 0, _CACHE_BYTES)


def _words(values: Sequence[Variable]) -> int:
    """The 32 bits that values of a column take."""
    return sum(2 if value.ctype == "int64" else 1 for value in values)


def _fit(scope: Scope) -> bool:
    """Whether there are values of columns, and all have room in shared memory."""
    kernel, fields_ = scope.kernel, scope.fields(COLUMN)
    room = sum(tile.bytes for tile in kernel.shared if tile.name == "values")
    assert kernel.roles is not None
    taken = 4 * _words(fields_) * kernel.block_walk * kernel.roles.stages
    return 0 < taken <= room and all(each.ctype in ("float", "int32", "int64") for each in fields_)


def _buffer(number: int, count: int) -> str:
    """The buffer of one of so many arrays that are handed over together."""
    return f"{count} * from + {number}" if count > 1 else "from"


def _uses(levels: Sequence[LevelText], tile: TileText) -> list[int]:
    """When a tile is read, as `ForwardRoles.walk_uses` has it."""
    found = [
        2 * level.number
        for level in levels
        for product in level.products
        if any(other is tile for _, other in product.factors)
    ]
    summed = (level.number for level in levels for state in level.sums if state.operand is tile)
    return [*found, *(2 * number + 3 for number in summed)]


def _sums_of(store: StoreText, names: Sequence[str]) -> list[str]:
    return [name for name in names if re.search(rf"\b{name}\b", store.number)]


def _members(loop: ForwardLoop) -> dict[str, Any]:
    return {each.name: getattr(loop, each.name) for each in fields(ForwardLoop)}


def _factor_among(symbols: Collection[Node], value: Node) -> tuple[ir.Symbol, Node] | None:
    """One of ``symbols`` that a product has as a factor, and what it is multiplied by."""
    if not isinstance(value, Map) or value.op != "mul":
        return None
    for number, factor in enumerate(value.args):
        others = value.args[:number] + value.args[number + 1 :]
        if isinstance(factor, ir.Symbol) and factor in symbols:
            return factor, reduce(ir.mul, others)
        deeper = _factor_among(symbols, factor)
        if deeper is not None:
            return deeper[0], reduce(ir.mul, (deeper[1], *others))
    return None


def _factor_of(node: Node, maximum: ir.Symbol) -> Node | None:
    """What the change of a maximum is multiplied by in the exponential ``node``; None where it is another."""
    if not isinstance(node, Map) or node.op != "exp" or not isinstance(node.args[0], Map):
        return None
    exponent = node.args[0]
    if exponent.op != "add" or len(exponent.args) != 2:
        return None
    for was, now in (exponent.args, exponent.args[::-1]):
        if isinstance(now, Map) and now.op == "neg":
            value, top, factor = common_factor(was, now.args[0])
            if value is old(maximum) and top in (maximum, ir.finite(maximum)):
                return factor
    return None
