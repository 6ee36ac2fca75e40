"""Tiles in shared memory, and a thread's share of the sums that are made from them."""

from __future__ import annotations

from fagen.derive.walk import State, Walk
from fagen.emit.code import ELEMENT, PRODUCT, SUM, Code
from fagen.emit.forward.elements import ElementBuilder
from fagen.emit.scope import axis_name, block_name
from fagen.emit.texts import TileText, rows_name
from fagen.emit.tiles import plain_read, reads
from fagen.ir import graph as ir
from fagen.ir.graph import Axis, Index, Input, Node
from fagen.plan.layout import nearest
from fagen.plan.plan import GROUP_AXIS, SharedTile
from fagen.plan.space import ON_TENSOR_CORES, VECTOR

FEW_SUMS = 32
"""Of a thread, which may have as many registers more."""


class TileBuilder(ElementBuilder):
    """The texts of tiles: each is one, however many products and sums read it."""

    def own_tile(self, node: Node, over: Axis) -> TileText:
        """The tile of rows that a product reads."""
        products = (product for walk in self.stage.walks for product in walk.products)
        every = dict.fromkeys((term.own, term.over) for product in products for term in product.terms)
        return self.tile("own", f"own{list(every).index((node, over))}", node, over)

    def walk_tile(self, number: int, walk: Walk, node: Node, over: Axis) -> TileText:
        """The tile of columns that a product reads."""
        every = dict.fromkeys((term.walk, term.over) for product in walk.products for term in product.terms)
        record = f"walk{self.infix(number)}{list(every).index((node, over))}"
        return self.tile(f"walk{number}", record, node, over)

    def sum_tile(self, number: int, walk: Walk, state: State) -> tuple[TileText, str]:
        """The tile of columns that a weighted sum reads, and its record."""
        assert state.operand is not None
        every = dict.fromkeys((s.operand, s.features) for s in walk.states if s.operand and s.features)
        record = f"operand{self.infix(number)}{list(every).index((state.operand, state.features))}"
        return self.tile(f"operand{number}", record, state.operand, state.features[0]), record

    def infix(self, number: int) -> str:
        """The number of a walk within names, where there are several."""
        return f"{number}_" if len(self.stage.walks) > 1 else ""

    def tile(self, side: str, record: str, node: Node, columns: Axis) -> TileText:
        """The tile of ``node`` in the shared memory ``record``."""
        key = (side, node, columns)
        if key in self.tiles:
            return self.tiles[key]
        scope, shared = self.scope, self.shared[record]
        row_axis = self.row_axis if side == "own" else self.walk_axis
        leaves: dict[Node, Code] = {Index(columns): scope.codes.leaf(axis_name(columns), "int32", ELEMENT)}
        shared_rows = side == "own" and self.kernel.group > 1
        if row_axis is not None and shared_rows:
            group = scope.length(GROUP_AXIS)
            position = f"block.{row_axis}_start + i / {group}"
            leaves[Index(row_axis)] = scope.codes.leaf(position, "int32", ELEMENT, SUM)
            leaves[Index(GROUP_AXIS)] = scope.codes.leaf(f"i % {group}", "int32", ELEMENT, PRODUCT)
        elif row_axis is not None:
            leaves[Index(row_axis)] = scope.codes.leaf(axis_name(row_axis), "int32", ELEMENT)
        lower = scope.lowering(leaves)
        code = lower(node)
        first = [] if isinstance(node, Input) else [lower(part) for part in reads(node)]
        split = scope.split([(each, ELEMENT) for each in (*first, code)])
        inputs = [part for part in ir.walk([node]) if isinstance(part, Input) and part.kind == "float"]
        tensors = [scope.parameters.tensor(part) for part in inputs]
        name = tensors[0].name if len(tensors) == 1 else record
        storage = tensors[0].storage if len(tensors) == 1 else ""
        rows = rows_name(self.kernel) if side == "own" else block_name(self.walk_axis)
        width = shared.width
        length = scope.length(columns)
        size = dict(scope.plan.problem.sizes)[columns]
        chunked = side != "operand" and width < size
        made = TileText(
            name=self._tile_name(name, shared),
            rows=rows,
            row_axis=row_axis,
            row_name=_row_name(node, row_axis, shared_rows),
            column_axis=columns,
            length=length,
            width=self._width(columns, width, size, length),
            address=self._address(name, shared.address),
            statements=split.at(ELEMENT),
            value=split.text(code),
            chunked=chunked,
            own=side == "own",
            by_rows=row_axis is not None and nearest(node, row_axis, columns) == row_axis,
            plain=plain_read(node, code, split, storage, row_axis, columns),
            storage=shared.storage,
            vectors=storage == shared.storage and not shared_rows and self.aligned(node, row_axis, columns),
            of_sum=side.startswith("operand"),
        )
        self.tiles[key] = made
        return made

    def aligned(self, node: Node, rows: Axis | None, columns: Axis) -> bool:
        """Whether ``node`` is a tensor whose rows along ``columns`` are known to be aligned."""
        if not isinstance(node, Input) or node.layout[-1] != columns or rows not in node.layout:
            return False
        return self.scope.plan.problem.is_aligned(node)

    def overwrites(self, number: int) -> bool:
        """Whether tiles of the products of a walk lie where those of the sums of the one before lay."""
        before = [tile for name, tile in self.shared.items() if name.startswith(f"operand{number - 1}_")]
        now = [tile for name, tile in self.shared.items() if name.startswith(f"walk{number}_")]
        return any(
            a.address < b.address + b.bytes and b.address < a.address + a.bytes for a in before for b in now
        )

    # -------------------------------------------------------------------------------------- names and places

    def _tile_name(self, name: str, shared: SharedTile) -> str:
        taken = {tile.name for tile in self.tiles.values()}
        return name if name not in taken else f"{name}_{shared.name}"

    def _address(self, name: str, address: int) -> str:
        constant = f"{name.upper()}_AT"
        number = 1
        while self.addresses.get(constant, address) != address:
            number += 1
            constant = f"{name.upper()}{number}_AT"
        self.addresses[constant] = address
        return constant

    def _width(self, axis: Axis, width: int, size: int, length: str) -> str:
        """The width of a tile along ``axis`` in the text: its length, where that is it."""
        if width == size:
            return length
        name = block_name(axis) if width < size else f"WIDTH_{axis.upper()}"
        if self.widths.get(name, width) != width:
            name += "_OF_SUM"
        self.widths[name] = width
        return name

    # ----------------------------------------------------------------------------------- a share of features

    def share(self, axis: Axis, width: int) -> tuple[str, int]:
        """The name of a thread's share of features along ``axis``, and how many of them lie side by side."""
        count = width // self.kernel.columns
        vector = VECTOR if count % VECTOR == 0 else 1
        if self.kernel.tiling in ON_TENSOR_CORES:
            vector = 2
        name = f"FEATURES_{axis.upper()}" if self.several_features else "FEATURES"
        self.shares[axis] = name, count, vector
        return name, vector

    def share_of(self, state: State, axis: Axis, width: int) -> tuple[str, int]:
        """The name of a thread's share of a sum's features, and how many of them lie side by side."""
        return self.share(axis, width)

    def compensates(self, state: State) -> bool:
        """Whether a thread keeps what rounding takes away from its sums: in fp32, where they are few.

        Those of a few rows are; torch sums these in parts, and is as exact.
        """
        if not state.features or self.kernel.tiling != "registers" or self.scope.expressions.fast:
            return False
        (axis,) = state.features
        return self.kernel.block_own // self.kernel.rows * self.shares[axis][1] <= FEW_SUMS


def _row_name(node: Node, row_axis: Axis | None, shared: bool) -> str:
    """What the row of an element of a tile is called; empty where all are the same."""
    if shared:
        return "i" if {row_axis, GROUP_AXIS} & set(node.axes) else ""
    return axis_name(row_axis) if row_axis is not None and row_axis in node.axes else ""
