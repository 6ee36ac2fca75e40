"""Expressions of a thread's element: what positions are called, and what serves several elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from fagen.derive.intervals import RowPlace
from fagen.derive.levels import Level
from fagen.derive.magnitudes import Magnitudes
from fagen.derive.unscale import unscaled
from fagen.derive.walk import State
from fagen.emit.cexpr import FIRST_COLUMN, Lowering, RandomTest, random_test
from fagen.emit.code import COLUMN, ELEMENT, ROW, SUM, Code, Place, Statement
from fagen.emit.loops import LoopText
from fagen.emit.scope import Scope, axis_name
from fagen.emit.texts import TileText
from fagen.ir import graph as ir
from fagen.ir.graph import KEY_AXIS, Axis, Index, Node
from fagen.plan.plan import GROUP_AXIS
from fagen.plan.space import ON_TENSOR_CORES

Term: TypeAlias = tuple[Node, Node | None]
"""What a state adds up, and the condition under which it does."""


class ElementBuilder:
    """What is known of a stage before its texts are made, and how its expressions are lowered."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.kernel = scope.kernel
        self.masks_apart = scope.kernel.tiling in ON_TENSOR_CORES
        """Whether elements are masked before their tile is weighed, where that can be."""
        self.rounds = False
        """Whether all that is made of elements are weights, which are rounded to 16 bits."""
        self.coarse = False
        """Whether these are those of bf16."""
        self.again: tuple[Place, ...] = ()
        """Where a mask keeps nothing that one instruction makes."""
        self.bounds_values = False
        """Whether values of elements, which are no products, are masked from where those of their row end."""
        self.bits = scope.kernel.tiling == "fragments"
        """Whether the columns of a thread that count are told as the bits of a number."""
        self.finds_rows = self.bits
        """Whether rows look for their own places in sorted tables, between those of their tile."""
        self.shares_places = self.bits and scope.kernel.schedule == "forward_loop"
        """Whether each lane of those that share rows looks for the places of one row."""
        self.stage = unscaled(scope.kernel.stage)
        assert self.stage.walk is not None
        self.walk_axis: Axis = self.stage.walk
        self.row_axis = self.kernel.tile_axis
        self.finished: dict[Node, str] = {}
        """States of earlier walks, as the text says them."""
        self.magnitudes = Magnitudes()
        """The value of each maximum, and the guard under which it was taken."""
        self.shared = {tile.name: tile for tile in self.kernel.shared}
        self.tiles: dict[tuple[str, Node, Axis], TileText] = {}
        self.levels_made: tuple[Level, ...] = ()
        """How products and sums of a tile are made level by level; empty where all products come first."""
        self.vanishing: set[int] = set()
        """Levels that need no test of elements."""
        self.multiplied: dict[str, str] = {}
        """Weights that lack a factor, and which rounded weights of an earlier level that is."""
        self.names: set[str] = set()
        self.addresses: dict[str, int] = {}
        self.widths: dict[str, int] = {}
        self.column: list[Statement] = []
        self.places: dict[Axis, dict[RowPlace, str]] = {}
        """What rows call the places that are searched for."""
        self.shares: dict[Axis, tuple[str, int, int]] = {}
        """Name, value and vector of a thread's share of each feature axis."""
        features = dict.fromkeys(a for walk in self.stage.walks for s in walk.states for a in s.features)
        self.several_features = len(features) > 1
        self.wholes: tuple[Node, ...] = ()
        """What weights are selected from that later phases read: it is kept, rounded as weights are."""

    def thread_leaves(self) -> dict[Node, Code]:
        """Positions of a thread's element of a tile."""
        leaves: dict[Node, Code] = {
            Index(self.walk_axis): self.scope.codes.leaf(axis_name(self.walk_axis), "int32", COLUMN)
        }
        if self.row_axis is not None:
            leaves |= self.row_leaves(self.row_axis, ROW)
        for symbol, text in self.finished.items():
            leaves[symbol] = self.scope.codes.leaf(text, "float", ROW)
        return leaves

    def row_leaves(self, axis: Axis, place: Place) -> dict[Node, Code]:
        """Positions of a thread's row along ``axis``, and of its head where a tile has several."""
        axes = (axis, *([GROUP_AXIS] if self.kernel.group > 1 else []))
        return {Index(each): self.scope.codes.leaf(f"row.{axis_name(each)}", "int32", place) for each in axes}

    def lowering(self, leaves: dict[Node, Code], alone: bool = False) -> Lowering:
        """Expressions of a thread's element, where a column may lie past the end: it is read at the last one.

        ``alone``: no other element of the thread is near.
        """
        axis, codes = self.walk_axis, self.scope.codes
        inside = codes.make(
            "minimum({}, {} - 1)", (leaves[Index(axis)], self.scope.expressions.length(axis)), "int32"
        )
        step = None
        if self.kernel.tiling in ON_TENSOR_CORES and not alone:
            name = axis_name(axis)
            leaves = leaves | {FIRST_COLUMN: codes.leaf(f"{name}_first", "int32", ELEMENT)}
            step = axis, codes.leaf(f"{name}_step", "int32", ELEMENT)
        return self.scope.lowering(
            leaves,
            self.magnitudes.nonpositive,
            addresses={axis: inside},
            served=None if alone else self.served(),
            step=step,
            rounded=self.coarse,
        )

    def served(self) -> str | None:
        """One call of the random generator serves columns kv, kv + 1, kv + 8 and kv + 9 of a block of 16:
        those of them that a thread has one after another."""
        if self.walk_axis != KEY_AXIS or self.kernel.block_walk % 16:
            return None
        many = 4 if self.kernel.tiling in ON_TENSOR_CORES else 2 if self.kernel.columns == 8 else 1
        return f"c % {many} == 0" if many > 1 else None

    def inside(self) -> str:
        """Whether an element is there."""
        return f"{axis_name(self.walk_axis)} < {self.scope.length(self.walk_axis)}"

    def held(self, state: State) -> str:
        """What a thread calls a state of one of its rows."""
        return f"row.{state.symbol.name}"

    def random_tests(self, terms: Iterable[Term]) -> dict[Node, RandomTest]:
        """What is asked of random bits alone, where a thread of tensor cores has all elements of their calls:
        rows q, q + 8 and columns kv, kv + 1, kv + 8, kv + 9, or with another lane these the other way round.
        """
        kernel, axes = self.kernel, {self.row_axis, self.walk_axis}
        if kernel.tiling not in ON_TENSOR_CORES or kernel.block_walk % 16 or kernel.group > 1:
            return {}
        nodes = ir.walk([part for term in terms for part in term if part is not None])
        tests = {node: random_test(node) for node in nodes}
        return {node: test for node, test in tests.items() if test is not None} if axes == {"q", "kv"} else {}

    def draws(
        self, tests: Mapping[Node, RandomTest], leaves: dict[Node, Code], loop: LoopText
    ) -> list[tuple[str, Code]]:
        """How the ``tests`` are made of a tile, each with its name; ``leaves`` say what they found of an
        element."""
        codes, found = self.scope.codes, []
        across = self.row_axis == KEY_AXIS
        row = codes.leaf(f"block.{self.row_axis}_start + row0", "int32", ELEMENT, SUM)
        column = codes.leaf(f"{loop.start} + lane * 2", "int32", ELEMENT, SUM)
        q, kv = (column, row) if across else (row, column)
        lower = self.scope.lowering(leaves)
        for number, (node, test) in enumerate(tests.items()):
            name = f"drawn{number if len(tests) > 1 else ''}"
            found.append((name, lower.draw(name, test, q, kv, across)))
            leaves[node] = codes.leaf(f"{name}(r, c)", "bool", ELEMENT)
        return found
