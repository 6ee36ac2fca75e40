"""A stage that is one product of stored values, as `schedule/product` writes it.

Two operands as tiles (or, with one thread an element, as expressions), the sum of their products, and what
becomes of each sum before it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fagen.derive.terms import term_of
from fagen.emit.code import ELEMENT, OR, PRODUCT, UNARY, Code, Split, Statement, Variable
from fagen.emit.flat import COLUMN, RESULT, ROW, Flat
from fagen.emit.scope import Scope, axis_name, block_name
from fagen.emit.texts import StoreText
from fagen.emit.tiles import LONG, plain_read, reads
from fagen.ir import graph as ir
from fagen.ir.graph import TRUE, ZERO, Axis, Index, Input, Map, Node
from fagen.plan.layout import nearest
from fagen.plan.profile import stage_roots


@dataclass(frozen=True)
class OperandText:
    """A tile in shared memory and the expression of its elements; terms of the sum lie along ``column_axis``.

    With tiles ``shared`` the second operand has its terms along the rows.
    """

    name: str
    rows: str
    row_axis: Axis | None
    row_name: str
    first: str
    """Position of the first row."""
    column_axis: Axis
    length: str
    """Of ``column_axis``."""
    width: str
    first_column: str
    address: str
    by_rows: bool
    """Whether neighbours along the rows lie side by side in memory."""
    statements: Sequence[Statement]
    value: str
    plain: str
    """What a copy reads, where the tile holds a tensor as it is (`plain_read`)."""
    reads: tuple[tuple[str, str], ...]
    """Names and text of what is read before anything is computed, so that no read waits for a computation."""


@dataclass(frozen=True)
class Product(Flat):
    """What the template reads of a kernel."""

    operands: tuple[OperandText, ...]
    terms: Sequence[Statement]
    """Of one thread an element: what each term of its sum needs."""
    value: str
    operand: str
    condition: str | None
    """Where a term exists (None: everywhere); a tile holds a mark where it does not."""
    before: Sequence[Statement]
    """Once a row of results, before its columns."""
    result: Sequence[Statement]
    stores: tuple[StoreText, ...]
    equation: str
    name: str
    """Of the sum."""
    constants: Sequence[tuple[str, str, str]]

    @property
    def tiling(self) -> str:
        """How the product is tiled."""
        return self.scope.kernel.tiling

    @property
    def functions(self) -> bool:
        """Whether it has functions of its own."""
        return self.tiling == "registers"

    @property
    def walk(self) -> str:
        """Terms in a tile."""
        return block_name(self.walk_axis)

    @property
    def text(self) -> str:
        """All expressions of the kernel."""
        statements = [*self.terms, *self.before, *self.result]
        statements += [statement for tile in self.operands for statement in tile.statements]
        texts = [
            self.value,
            self.operand,
            self.condition or "",
            *(statement.text for statement in statements),
        ]
        texts += [text for store in self.stores for text in (store.target, store.value)]
        texts += [read for tile in self.operands for _, read in tile.reads]
        return "\n".join([*texts, *(tile.value for tile in self.operands)])

    def length_of(self, tile: OperandText) -> str:
        """How many rows a tile could have."""
        return self.length(tile.row_axis) if tile.row_axis is not None else "1"

    def first_of(self, tile: OperandText) -> str:
        """The position of a tile's first row."""
        return tile.first


def product(scope: Scope) -> Product:
    """The steps of ``scope.kernel``."""
    return _Builder(scope).build()


class _Builder:
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.kernel = kernel = scope.kernel
        (walk,) = kernel.stage.walks
        (state,) = walk.states
        assert kernel.stage.walk is not None
        assert state.operand is not None
        self.walk_axis: Axis = kernel.stage.walk
        self.row_axis = kernel.tile_axis
        (self.column_axis,) = state.features
        self.state = state
        self.value, exists = term_of(state)
        self.operand = state.operand
        self.exists = ir.conjunction(walk.guard, exists if exists is not None else TRUE)
        self.zeros = self.reads_selected()
        """Whether a value of 0 says that the term does not exist: an earlier kernel stored it where a mask
        does not hold."""
        if self.zeros:
            self.value, self.exists = ir.where(self.exists, self.value, ZERO), TRUE
        self.condition = self.zeros or self.exists is not TRUE
        self.addresses: dict[str, int] = {}

    def build(self) -> Product:
        shown = self.scope.shown
        over = f"sum_{self.walk_axis} {shown(self.value)} * {shown(self.operand)}"
        if self.exists is not TRUE:
            over += f" where {shown(self.exists)}"
        name = self.state.symbol.name
        operands: tuple[OperandText, ...] = ()
        terms, value, operand, condition = self.terms()
        if self.kernel.tiling != "element":
            terms, operands = (), self.tiles()
        before, result, stores = self.results()
        return Product(
            self.scope,
            operands,
            terms,
            value,
            operand,
            condition,
            before,
            result,
            stores,
            f"{name} = {over}",
            name,
            self.constants(),
        )

    def reads_selected(self) -> bool:
        """Whether the value depends on a buffer in which a mask left its mark."""
        selected: set[str] = set()
        for kernel in self.scope.plan.kernels:
            stage = kernel.stage
            nodes = ir.walk([*stage_roots(stage), *(walk.guard for walk in stage.walks)])
            masks = any(isinstance(node, Map) and node.op == "where" for node in nodes)
            masks = masks or any(walk.guard is not TRUE for walk in stage.walks)
            if masks or any(isinstance(node, Input) and node.name in selected for node in nodes):
                selected.add(stage.name)
        arguments = len(self.scope.plan.problem.graph.arguments)
        reads = (node for node in ir.walk([self.value]) if isinstance(node, Input))
        return any(node.position >= arguments and node.name in selected for node in reads)

    def positions(self, walk: bool) -> dict[Node, Code]:
        """Positions in the result, and along the sum."""
        leaf = self.scope.codes.leaf
        leaves: dict[Node, Code] = {
            Index(self.column_axis): leaf(axis_name(self.column_axis), "int32", COLUMN)
        }
        if self.row_axis is not None:
            leaves[Index(self.row_axis)] = leaf(axis_name(self.row_axis), "int32", ROW)
        if walk:  # what a thread's only element has is known before the sum; its terms lie along "columns"
            leaves = {node: leaf(code.form, "int32", ROW) for node, code in leaves.items()}
            leaves[Index(self.walk_axis)] = leaf(axis_name(self.walk_axis), "int32", COLUMN)
        return leaves

    # --------------------------------------------------------------------------------------------- the sum

    def terms(self) -> tuple[Sequence[Statement], str, str, str | None]:
        """A term of one thread's sum: statements, value, operand, condition."""
        if self.kernel.tiling != "element":
            return (), "", "", "" if self.condition else None
        lower = self.scope.lowering(self.positions(walk=True))
        codes = [lower(self.value), lower(self.operand)]
        if self.exists is not TRUE:
            codes.append(lower(self.exists))
        split = self.scope.split([(code, RESULT) for code in codes])
        value, operand = split.text(codes[0], PRODUCT), split.text(codes[1], UNARY)
        condition = [split.text(code) for code in codes[2:]]
        statements = [*split.at(ROW), *split.at(COLUMN), *split.at(RESULT)]
        if self.zeros:
            weight = Variable("float", "weight")
            statements.append(Statement("local", weight, weight.name, split.text(codes[0])))
            value, condition = weight.name, [f"{weight.name} != 0.0f"]
        return statements, value, operand, condition[0] if condition else None

    def tiles(self) -> tuple[OperandText, ...]:
        """Both operands as tiles: their terms along the columns, but for the second with tiles ``shared``."""
        along_rows = self.kernel.tiling == "shared"
        own = self.tile("own", self.row_axis, self.walk_axis)
        other = (self.walk_axis, self.column_axis) if along_rows else (self.column_axis, self.walk_axis)
        return own, self.tile("operand", *other)

    def tile(self, record: str, rows: Axis | None, columns: Axis) -> OperandText:
        scope = self.scope
        leaves: dict[Node, Code] = {Index(columns): scope.codes.leaf(axis_name(columns), "int32", ELEMENT)}
        if rows is not None:
            leaves[Index(rows)] = scope.codes.leaf(axis_name(rows), "int32", ELEMENT)
        lower = scope.lowering(leaves)
        node = self.value if record == "own" else self.operand
        codes = [lower(node)]
        if record == "own" and self.exists is not TRUE:
            codes.append(lower(self.exists))
        parts = [] if isinstance(node, Input) else reads(node)
        split = scope.split([(code, ELEMENT) for code in (*map(lower, parts), *codes)])
        early = [code for part in parts if isinstance(part, Input) and (code := lower(part)).ctype == "float"]
        if codes[0].cost < LONG + sum(code.cost for code in early):
            early = []
        read = {split.text(code): split.definition(code) for code in early}
        value = self.marked(split, codes)
        if self.zeros and record == "own":
            value = f"unless_zero({value})"
        inputs = {part for part in ir.walk([node]) if isinstance(part, Input) and part.kind == "float"}
        tensors = [scope.parameters.tensor(part) for part in inputs]
        name = tensors[0].name if len(tensors) == 1 else record
        plain = ""
        if len(tensors) == 1 and not (record == "own" and self.condition):
            plain = plain_read(node, codes[0], split, tensors[0].storage, rows, columns)
        if f"{name.upper()}_AT" in self.addresses:
            name = record
        address = f"{name.upper()}_AT"
        self.addresses[address] = next(t.address for t in self.kernel.shared if t.name == record)
        used = {*node.axes, *(self.exists.axes if record == "own" else ())}
        return OperandText(
            name=f"{name}_tile",
            rows=block_name(rows) if rows is not None else "1",
            row_axis=rows,
            row_name=axis_name(rows) if rows is not None and rows in used else "",
            first=self.start(rows) if rows is not None else "0",
            column_axis=columns,
            length=scope.length(columns),
            width=block_name(columns),
            first_column=self.start(columns),
            address=address,
            by_rows=rows is not None and nearest(node, rows, columns) == rows,
            statements=[s for s in split.at(ELEMENT) if s.variable.name not in read],
            value=value,
            plain=plain,
            reads=tuple(read.items()),
        )

    def marked(self, split: Split, codes: Sequence[Code]) -> str:
        value = split.text(codes[0])
        return f"{split.text(codes[1], OR)} ? {value} : skipped()" if len(codes) > 1 else value

    def start(self, axis: Axis) -> str:
        """The first position of a tile along ``axis``."""
        return f"{axis}_start"

    # --------------------------------------------------------------------------------------------- results

    def results(self) -> tuple[Sequence[Statement], Sequence[Statement], tuple[StoreText, ...]]:
        """What is computed for each result and written: statements of a row, of a result, and the stores."""
        scope, name = self.scope, self.state.symbol.name
        leaves = self.positions(walk=False)
        sum_ = name if self.kernel.tiling != "registers" else f"{name}[r][c]"
        leaves[self.state.symbol] = scope.codes.leaf(sum_, "float", RESULT)
        lower = scope.lowering(leaves)
        outputs = [(output, scope.written(output)) for output in self.kernel.stage.outputs]
        pairs = [(scope.store(lower, tensor), lower(output.node)) for output, tensor in outputs]
        split = scope.split([(code, RESULT) for pair in pairs for code in pair])
        stores = tuple(
            StoreText(
                split.text(target),
                split.text(value),
                f"{tensor.name} = {scope.shown(output.node)}",
                tensor,
            )
            for (target, value), (output, tensor) in zip(pairs, outputs, strict=True)
        )
        return split.at(ROW), [*split.at(COLUMN), *split.at(RESULT)], stores

    def constants(self) -> list[tuple[str, str, str]]:
        """(type, names and values, comment) of the kernel's constants, in order."""
        kernel = self.kernel
        columns, walk = block_name(self.column_axis), block_name(self.walk_axis)
        rows = block_name(self.row_axis) if self.row_axis is not None else "1"
        blocks = [f"{rows} = {kernel.block_own}"] if self.row_axis is not None else []
        found = [("int", ", ".join([*blocks, f"{columns} = {kernel.block_feature}"]), "of a block's results")]
        if kernel.tiling != "element":
            found.append(
                ("int", f"{walk} = {kernel.block_walk}", "terms of a sum in shared memory at a time")
            )
        threads = f"THREADS = {kernel.threads}, " if kernel.tiling != "element" else ""
        found.append(("int", f"{threads}LANES = {kernel.columns}", "threads that share a row"))
        if kernel.tiling == "registers":
            shares = f"ROWS = {rows} * LANES / THREADS, COLUMNS = {columns} / LANES"
            found.append(("int", shares, "of a block's results, each thread's share"))
        if self.addresses:
            at = ", ".join(f"{name} = {address}" for name, address in self.addresses.items())
            found.append(("uint32", at, "where tiles lie in shared memory, in bytes"))
        return found
