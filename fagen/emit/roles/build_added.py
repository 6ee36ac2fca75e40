"""Sums over the rows of all blocks, to which each tile adds its part."""

from __future__ import annotations

from collections.abc import Sequence

from fagen.derive.intervals import WALK_FIRST, WALK_LAST, last_visitor
from fagen.derive.walk import Partial
from fagen.emit.cexpr import HEAD
from fagen.emit.code import BLOCK, SUM, Code
from fagen.emit.forward.kernel import ForwardLoop
from fagen.emit.roles.build_levels import LevelBuilder
from fagen.emit.roles.texts import AddedText, CopyText
from fagen.emit.scope import block_name
from fagen.ir import graph as ir
from fagen.ir.graph import Axis, Node
from fagen.plan.plan import GROUP_AXIS, turns_of
from fagen.plan.warpgroups import PART, panel_columns


class AddedBuilder(LevelBuilder):
    """What is multiplied for them and where it is added; the last level makes their weights."""

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
        return AddedText(
            weights=text.weights,
            weight=text.weight,
            operand=next(copy for copy in own if copy.tile is tile),
            map=self.scope.parameters.map(tensor, self.walk_axis, axis, PART, PART // 2, part // (PART // 2)),
            features=self.scope.length(axis),
            panel=panel,
            pieces=panel // part,
            others=tuple(places),
            turns=self.turns(partial, others) if self.kernel.roles.in_turns else "",
            turn=self.turn(loop) if self.kernel.roles.in_turns else "",
            equation=f"{tensor.name} += sum_{partial.over} {shown(partial.value)} * {shown(partial.operand)}",
        )

    def turns(self, partial: Partial, others: Sequence[Axis]) -> str:
        """Where blocks that added to the tile at ``place`` are counted; ``others``: axes of the sum besides
        its rows and features."""
        counted = self.scope.parameters.buffer(turns_of(partial.name))
        strides = dict(zip(counted.layout, counted.strides, strict=True))
        near = [each for each in reversed(others) if each != "hk"]
        at = [f"place[{2 + i}] * {strides[each]}" for i, each in enumerate(near)]
        if {"hk", "g"} <= set(others):  # strides of an axis of one position are 0
            group = self.scope.length(GROUP_AXIS)
            at[0] = f"place[2] / {group} * {strides['hk']} + place[2] % {group} * {strides['g']}"
        place = " + ".join([*reversed(at), f"place[0] / {block_name(self.walk_axis)}"])
        return f"&{counted.pointer}[{place}]"

    def turn(self, loop: ForwardLoop) -> str:
        """How many works come before a block's on a tile: those of later rows, which are issued earlier."""
        (ranges,), codes = self.kernel.ranges, self.scope.codes
        assert loop.row_axis is not None
        last = ir.sub(ir.size(loop.row_axis), ir.Const(1)) if ranges is None else last_visitor(ranges)
        assert last is not None
        walked: dict[Node, Code] = {
            WALK_FIRST: codes.leaf("visit[0]", "int32"),
            WALK_LAST: codes.leaf(f"{loop.walk_axis}_last", "int32"),
        }
        first = codes.leaf(f"block.{loop.row_axis}_start", "int32")
        code = codes.infix("-", self.scope.lowering(walked)(last), first, "int32", SUM)
        return f"({self.scope.split([(code, BLOCK)]).text(code)}) / {loop.positions}"
