"""The texts of a stage in warps with roles, and who makes its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

from fagen.derive.intervals import OWN_FIRST, OWN_LAST, RowPlace
from fagen.derive.walk import State, Walk
from fagen.emit.cexpr import Lowering
from fagen.emit.code import COLUMN, Split, Statement
from fagen.emit.forward.kernel import ForwardLoop
from fagen.emit.loops import LoopText
from fagen.emit.roles.build_added import AddedBuilder
from fagen.emit.roles.kernel import ForwardRoles
from fagen.emit.roles.lagging import LaggingBuilder
from fagen.emit.roles.levels import uses_of
from fagen.emit.roles.texts import LANES, CopyText, Epilogue
from fagen.emit.roles.visits import values_fit, words_of
from fagen.emit.scope import Scope, block_name
from fagen.emit.texts import LevelText
from fagen.ir import graph as ir
from fagen.ir.graph import Axis, Node
from fagen.plan.warpgroups import (
    GROUP_ROWS,
    PARTS,
    WORKS,
    late_rows,
    padded,
    visit_count,
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
_CACHE_BYTES = 16 << 20
"""Of what heads that are worked on at once read and add to along the walk: a part of the L2 cache."""

_Copies: TypeAlias = tuple[tuple[CopyText, ...], ...]


def forward_roles(scope: Scope) -> ForwardRoles:
    """The steps of ``scope.kernel``."""
    return _Builder(scope).roles()


class _Builder(AddedBuilder, LaggingBuilder):
    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.finds_rows = not self.levels_made and len(self.stage.walks) == 1
        self.announced: list[str] = []
        if not self.levels_made:  # tests of columns take registers that something else needs
            self.again, self.bounds_values = (COLUMN,), True

    # ------------------------------------------------------------------------------------------ in registers

    def held(self, state: State) -> str:
        return f"{state.symbol.name}[r]" if state.features else super().held(state)

    def share(self, axis: Axis, width: int) -> tuple[str, int]:
        return super().share(axis, -(-self._size(axis) // 8) * 8)

    def maskable(self, walk: Walk, maxima: Sequence[Node]) -> Sequence[Node]:
        """Products before what is made of them: tiles of which all elements count then need no other text."""
        return [*(product.symbol for product in walk.products), *maxima] if maxima else []

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

    # -------------------------------------------------------------------------------------------- the kernel

    def roles(self) -> ForwardRoles:
        """The steps of the kernel, and who makes them."""
        loop = self.build()
        own = self.own_copies(loop)
        made = self.level_texts(loop.walks[0])
        walks, sums = self.copies_of_walks(loop, made)
        outs = self.outs(loop)
        epilogue = self.epilogue(own, outs)
        return ForwardRoles(
            **_members(loop),
            parts=tuple(self.added(partial, loop, own) for partial in self.stage.walks[0].partials),
            levels=made,
            read_again=tuple(product.symbol.name for product in self.kept),
            handed=self.handed_arrays(made),
            wholes=len(self.wholes),
            own_copies=own,
            walk_copies=walks,
            sum_copies=sums,
            epilogue=epilogue,
            out=outs[0] if epilogue == "staged" else None,
            section=self.section(),
            announced=tuple(self.announced),
            ascends=self.ascends(loop),
        )

    def own_copies(self, loop: ForwardLoop) -> tuple[CopyText, ...]:
        """Tiles of rows."""
        own: list[CopyText] = []
        for (side, node, columns), tile in self.tiles.items():
            if side == "own":
                late = (node, columns) in late_rows(self.stage) and not self.divided
                own.append(replace(self.copied(node, tile, GROUP_ROWS), late=late))
        return tuple(replace(copy, held=copy.late and self.holds(loop, own)) for copy in own)

    def copies_of_walks(self, loop: ForwardLoop, made: Sequence[LevelText]) -> tuple[_Copies, _Copies]:
        """For each walk, tiles that come with the announcement of a tile, and those that may come later."""
        walks, sums = (
            tuple(
                tuple(
                    self.copied(node, tile, self.kernel.block_walk)
                    for (side, node, _), tile in self.tiles.items()
                    if side == f"{kind}{number}"
                )
                for number in range(len(loop.walks))
            )
            for kind in ("walk", "operand")
        )
        if not made:
            return walks, sums
        # tiles that the first products read come first
        first = {other.name for product in made[0].products for _, other in product.factors}
        every = (*walks[0], *sums[0])
        if self.divided:  # tiles that are free again first
            last = {copy.name: max(uses_of(made, copy.tile)) for copy in every}
            first = {name for name in last if last[name] == min(last.values())}
        come = tuple(copy for copy in every if copy.name in first)
        return (come,), (tuple(copy for copy in every if copy not in come),)

    def epilogue(self, own: Sequence[CopyText], outs: Sequence[CopyText]) -> Epilogue:
        """How results with features leave.

        One may leave through the place of the rows that it was made from.
        """
        kernel = self.kernel
        assert kernel.roles is not None
        if len(outs) == 1 and own and kernel.roles.own_stages == 2 and not self.levels_made:
            sizes = [padded(self._size(tile.column_axis)) for tile in (outs[0].tile, own[0].tile)]
            if sizes[0] <= sizes[1] and kernel.group == 1:
                return "staged"
        quads = bool(outs) and all(self._size(out.tile.column_axis) % _QUAD_COLUMNS == 0 for out in outs)
        return "quads" if quads else "elements"

    def holds(self, loop: ForwardLoop, own: Sequence[CopyText]) -> bool:
        """Whether registers have room for rows that are read late: where weights are made of pairs, and of
        nothing that is known of a row or of its block, nor drawn."""
        late = sum(-(-self._size(copy.tile.column_axis) // 16) * 4 for copy in own if copy.late)
        texts = [loop.text_of(phase, walk, not walk.apart) for walk in loop.walks for phase in walk.phases]
        alone = not any(loop.says(name, text) for name in ("row", "block") for text in texts)
        drawn = any(walk.draws for walk in loop.walks)
        return self.pairs and alone and not drawn and late <= self.kernel.spare

    def ascends(self, loop: ForwardLoop) -> bool:
        """Whether the rows of a block bound where its walk begins, and not where it ends. Blocks that add in
        turns take the last rows first all the same."""
        (walk, *others), (ranges, *_) = loop.walks, self.kernel.ranges
        assert self.kernel.roles is not None
        if self.kernel.roles.in_turns or others or not self.levels_made:
            return False
        if ranges is None or len(ranges.ranges) != 1 or walk.loop.skip:
            return False
        begin, end = (
            ir.depends(bound, [OWN_FIRST, OWN_LAST])
            for bound in (ranges.ranges[0].begin, ranges.ranges[0].end)
        )
        return begin and not end

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

    def constants(self) -> list[tuple[str, str, str]]:
        """(type, ``NAME = value``, comment) of each, those of a line in one entry."""
        kernel, roles = self.kernel, self.kernel.roles
        assert roles is not None
        walk = block_name(self.walk_axis)
        last = "two" if roles.adders else "one"
        shares = [f"{name} = {count}" for name, count, _ in self.shares.values()]
        of_thread = [f"LANES = {LANES}, ROWS = 2, COLUMNS = {walk} / LANES", *shares]
        words = words_of(self.scope.fields(COLUMN)) if self.levels_made and values_fit(self.scope) else 0
        counts = [
            (
                f"CONSUMERS = {roles.consumers}, THREADS = {kernel.threads}",
                f"warpgroups that multiply, and {last} more",
            ),
            (f"{self.rows_text()}, {walk} = {kernel.block_walk}", "rows of a block, columns of a tile"),
            (f"ROW_STAGES = {roles.own_stages}, STAGES = {roles.stages}", "buffers of each tile"),
            (f"WORKS = {WORKS}, WORDS = {self.first_place + len(self.announced)}", "works announced at once"),
            (", ".join(of_thread), "of a consumer's thread"),
        ]
        if words:
            counts.append((f"COLUMN_WORDS = {words}", "known of each column, of 32 bits"))
        if roles.adders or words:
            counts.append((f"VISITS = {visit_count(roles, words)}", "tiles announced at once"))
        if roles.adders:
            counts.append((f"PARTS = {PARTS}", "buffers of parts of sums"))
        if self.divided:
            counts.append((f"HANDED = {roles.handed}", "buffers of what is handed over"))
        at = {tile.name: tile.address for tile in kernel.shared}
        addresses = self.addresses | {_PLACES[name]: at[name] for name in _PLACES if name in at}
        places = ", ".join(f"{name} = {address}" for name, address in addresses.items())
        return [
            *(("int", *count) for count in counts),
            *self.slack_constants(),
            ("uint32", places, "bytes of shared memory"),
        ]


def _members(loop: ForwardLoop) -> dict[str, Any]:
    return {each.name: getattr(loop, each.name) for each in fields(ForwardLoop)}
