"""What is written: by each element of a tile, by row, or by feature of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fagen.derive.diagonal import unmoved
from fagen.derive.walk import Walk
from fagen.emit.code import COLUMN, ELEMENT, ROW, Code, Place, Statement
from fagen.emit.forward.elements import ElementBuilder
from fagen.emit.params import Tensor
from fagen.emit.scope import axis_name
from fagen.emit.texts import StoresText, StoreText
from fagen.ir.graph import Axis, Index, Node, Output, Scatter
from fagen.plan.plan import STORAGE_BYTES
from fagen.plan.space import ON_TENSOR_CORES

MANY_FEATURES = 32
"""Of a thread: from so many on, exchanging them takes less time than storing them by pairs."""
AFTER = 1
"""The phase of expressions that are computed after the last walk."""


class OutputBuilder(ElementBuilder):
    """The texts of outputs."""

    def stores(self, walk: Walk, leaves: dict[Node, Code]) -> tuple[StoresText | None, list[Statement]]:
        """Outputs with the walk's axis, written by every element."""
        if not walk.stores:
            return None, []
        scope = self.scope
        lower = self.lowering(leaves, alone=True)
        targets = [(output, scope.written(output)) for output in walk.stores]
        codes = [scope.stored(lower, output.node, tensor) for output, tensor in targets]
        added = [self.is_diagonal(output.node) for output in walk.stores]
        asked = [pair[alike:] for pair, alike in zip(codes, added, strict=True)]
        split = scope.split([(code, ELEMENT) for pair in asked for code in pair])
        self.column += split.at(COLUMN)
        stores = tuple(
            self.scattered(split.text(value), output, tensor)
            if alike
            else self.store(split.text(target), split.text(value), output, tensor)
            for (target, value), (output, tensor), alike in zip(codes, targets, added, strict=True)
        )
        return StoresText(self.walk_axis, "", "COLUMNS", 1, split.at(ELEMENT), stores), list(split.at(ROW))

    def is_diagonal(self, x: Node) -> bool:
        """Whether tensor cores make tiles, and all elements of a diagonal of one are added to one place.

        Where heads share the rows of a tile, the next row is no further position.
        """
        if not isinstance(x, Scatter) or self.row_axis is None or self.kernel.tiling not in ON_TENSOR_CORES:
            return False
        if self.kernel.group > 1:
            return False
        return unmoved(x.indices, (self.row_axis, self.walk_axis))

    def scattered(self, value: str, output: Output, tensor: Tensor) -> StoreText:
        """The text of what is added to a table, at whatever positions."""
        scope, node = self.scope, output.node
        assert isinstance(node, Scatter)
        axes = [axis for axis in (self.row_axis, self.walk_axis) if axis is not None]
        leaves: dict[Node, Code] = {
            Index(axis): scope.codes.leaf(axis_name(axis), "int32", ELEMENT) for axis in axes
        }
        target = scope.lowering(leaves).scattered(tensor, node)
        split = scope.split([(target, ELEMENT)])
        found = self.store(split.text(target), value, output, tensor)
        return replace(found, diagonal=True, statements=split.at(ELEMENT))

    def store(self, target: str, value: str, output: Output, tensor: Tensor) -> StoreText:
        """The text of an output."""
        equation = f"{tensor.name} = {self.scope.shown(output.node)}"
        return StoreText(target, value, equation, tensor, isinstance(output.node, Scatter))

    def outputs(self) -> tuple[Sequence[Statement], StoresText | None, tuple[StoresText, ...]]:
        """What is computed and written after the last walk, by row and by feature."""
        scope, codes = self.scope, self.scope.codes
        row = Place(row=True, phase=AFTER)
        leaves = self.thread_leaves()
        if self.row_axis is not None:
            leaves |= self.row_leaves(self.row_axis, row)
        features: dict[Node, Axis] = {
            s.symbol: s.features[0] for walk in self.stage.walks for s in walk.states if s.features
        }
        for symbol, text in self.finished.items():
            axis = features.get(symbol)
            place = row if axis is None else Place(True, True, AFTER)
            leaves[symbol] = codes.leaf(text if axis is None else f"{text}[f]", "float", place)
        for axis in set(features.values()):
            leaves[Index(axis)] = codes.leaf(axis_name(axis), "int32", Place(True, True, AFTER))
        lower = scope.lowering(leaves, self.magnitudes.nonpositive)
        found: dict[Axis | None, list[tuple[Output, Tensor]]] = {}
        for output in self.stage.outputs:
            along = [axis for axis in output.node.axes if axis in self.shares]
            assert len(along) < 2, f"{output.name} has two feature axes"
            found.setdefault(along[0] if along else None, []).append((output, scope.written(output)))
        statements: list[Statement] = []
        by_row: StoresText | None = None
        by_feature: list[StoresText] = []
        for axis, group in found.items():
            place = row if axis is None else Place(True, True, AFTER)
            pairs = [(scope.store(lower, tensor), lower(output.node)) for output, tensor in group]
            split = scope.split([(code, place) for pair in pairs for code in pair])
            statements += split.at(row)
            stores = tuple(
                self.store(split.text(target), split.text(value), output, tensor)
                for (target, value), (output, tensor) in zip(pairs, group, strict=True)
            )
            if axis is None:
                by_row = StoresText(None, "", "", 1, (), stores)
            else:
                share, count, vector = self.shares[axis]
                size = dict(scope.plan.problem.sizes)[axis]
                dense = all(tensor.dense and tensor.layout[-1] == axis for _, tensor in group)
                in_pairs = vector == 2 and size % 2 == 0 and dense
                halves = all(STORAGE_BYTES[tensor.storage] == 2 for _, tensor in group)
                whole = size % 8 == 0 and count % 8 == 0 and count >= self.many_features
                in_eights = in_pairs and halves and whole and self.kernel.tiling == "fragments"
                by_feature.append(
                    StoresText(
                        axis,
                        scope.length(axis),
                        share,
                        vector,
                        split.at(place),
                        stores,
                        in_pairs,
                        in_eights,
                    )
                )
        return statements, by_row, tuple(by_feature)

    @property
    def many_features(self) -> int:
        """From how many of a thread on lanes exchange results before they store them."""
        return MANY_FEATURES
