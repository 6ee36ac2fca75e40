"""The tiles that are copied: from which tensor, and where in it."""

from __future__ import annotations

from dataclasses import replace

from fagen.emit.forward.kernel import ForwardLoop
from fagen.emit.forward.walks import LoopBuilder
from fagen.emit.params import Tensor
from fagen.emit.roles.results import sums_of
from fagen.emit.roles.texts import CopyText
from fagen.emit.scope import axis_name, block_name
from fagen.emit.texts import StoresText, TileText
from fagen.ir.graph import Axis, Input, Node
from fagen.plan.plan import GROUP_AXIS, STORAGE_BYTES
from fagen.plan.space import CHUNK
from fagen.plan.warpgroups import GROUP_ROWS, panel_columns


class CopyBuilder(LoopBuilder):
    """The texts of tiles, which lie in shared memory as they lie in their tensors."""

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

    def copied(self, node: Node, tile: TileText, rows: int) -> CopyText:
        """How a tile is copied."""
        assert isinstance(node, Input)
        return self.copy(self.scope.parameters.tensor(node), tile, rows)

    def copy(self, tensor: Tensor, tile: TileText, rows: int) -> CopyText:
        """How a tile is copied to or from ``tensor``, so many ``rows`` at once."""
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
        used = [name for outputs in loop.feature_outputs for name in sums_of(outputs.stores[0], names)]
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
