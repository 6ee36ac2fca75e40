"""A stage with products, as `schedule/forward_loop` writes it: the steps of each walk as statements.

A walk's states are brought up to date in *phases*: a state whose value uses a running state waits for the
phase after it. Within a phase a thread computes its elements of a row, adds them to what it holds of each
state, and, where another state waits for it, joins that with the other threads of the row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TypeAlias

from fagen.derive.diagonal import unmoved
from fagen.derive.intervals import RowPlace, row_places
from fagen.derive.levels import Level
from fagen.derive.magnitudes import Magnitudes
from fagen.derive.running import old
from fagen.derive.terms import conjuncts, term_of
from fagen.derive.unscale import gathered, unscaled
from fagen.derive.vanish import limits
from fagen.derive.walk import Product, State, Walk
from fagen.emit.cexpr import FIRST_COLUMN, Lowering, RandomTest, random_test
from fagen.emit.code import (
    AND,
    COLUMN,
    ELEMENT,
    PRODUCT,
    ROW,
    SUM,
    Code,
    Place,
    Split,
    Statement,
    Variable,
)
from fagen.emit.loops import LoopText, loop_text
from fagen.emit.params import Tensor
from fagen.emit.scope import Scope, axis_name, block_name
from fagen.emit.texts import (
    DrawText,
    ForwardLoop,
    LaggingText,
    LevelText,
    PartText,
    Phase,
    ProductText,
    ScoreText,
    StateText,
    StoresText,
    StoreText,
    TileText,
    WalkText,
    rows_name,
)
from fagen.emit.tiles import plain_read, reads
from fagen.ir import graph as ir
from fagen.ir.graph import (
    KEY_AXIS,
    MINUS_INF,
    TRUE,
    ZERO,
    Axis,
    Index,
    Input,
    Load,
    Map,
    Node,
    Output,
    Random,
    Scatter,
    Symbol,
)
from fagen.plan.layout import nearest
from fagen.plan.plan import GROUP_AXIS, STORAGE_BYTES, SharedTile, Storage
from fagen.plan.space import ON_TENSOR_CORES, VECTOR

MANY_REGISTERS = 192
"""Of a thread, for its rows: from so many on a step is made in parts, each with fewer values beside them."""
BESIDE = 4
"""Registers of a row for its maximum, its sum and its share of a fragment."""
MANY_ELEMENTS = 64
"""Of a thread in a tile: from so many on, two copies of a step take more time than a test in one."""
FEW_SUMS = 32
"""Of a thread, which may have as many registers more."""
MANY_FEATURES = 32
"""Of a thread: from so many on, exchanging them takes less time than storing them by pairs."""
AFTER = 1
"""The phase of expressions that are computed after the last walk."""


Term: TypeAlias = tuple[Node, Node | None]
"""What a state adds up, and the condition under which it does."""


def forward_loop(scope: Scope) -> ForwardLoop:
    """The steps of ``scope.kernel``."""
    assert not any(walk.partials for walk in scope.kernel.stage.walks), "its walks add nothing to memory"
    return LoopBuilder(scope).build()


class LoopBuilder:
    """The texts of a stage with products, walk by walk."""

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

    def build(self) -> ForwardLoop:
        """All texts of the stage."""
        walks = []
        for number, walk in enumerate(self.stage.walks):
            walks.append(self.walk(number, walk))
        finish, row_outputs, feature_outputs = self.outputs()
        own = tuple(tile for (side, _, _), tile in self.tiles.items() if side == "own")
        return ForwardLoop(
            self.scope,
            tuple(walks),
            self.column,
            own,
            row_outputs,
            feature_outputs,
            finish,
            self.constants(),
            len(walks) > 1,
        )

    # ------------------------------------------------------------------------------------------------- leaves

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

    # -------------------------------------------------------------------------------------------------- tiles

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

    def share(self, axis: Axis, width: int) -> tuple[str, int]:
        """The name of a thread's share of features along ``axis``, and how many of them lie side by side."""
        count = width // self.kernel.columns
        vector = VECTOR if count % VECTOR == 0 else 1
        if self.kernel.tiling in ON_TENSOR_CORES:
            vector = 2
        name = f"FEATURES_{axis.upper()}" if self.several_features else "FEATURES"
        self.shares[axis] = name, count, vector
        return name, vector

    def compensates(self, state: State) -> bool:
        """Whether a thread keeps what rounding takes away from its sums: in fp32, where they are few.

        Those of a few rows are; torch sums these in parts, and is as exact.
        """
        if not state.features or self.kernel.tiling != "registers" or self.scope.expressions.fast:
            return False
        (axis,) = state.features
        return self.kernel.block_own // self.kernel.rows * self.shares[axis][1] <= FEW_SUMS

    # -------------------------------------------------------------------------------------------------- walks

    def walk(self, number: int, walk: Walk) -> WalkText:
        """The texts of one pass along the walk axis."""
        several = len(self.stage.walks) > 1
        scope, codes = self.scope, self.scope.codes
        walk, scored = self.scored(walk)
        levels, states = self.levels(walk), self.sums_of(walk)
        self.magnitudes.enter(walk)
        leaves = self.thread_leaves()
        products = []
        for product in walk.products:
            factors = []
            for term in product.terms:
                own = self.own_tile(term.own, term.over)
                factors.append((own, self.walk_tile(number, walk, term.walk, term.over)))
            place = ELEMENT._replace(phase=self.known_at(product))
            leaves[product.symbol] = codes.leaf(f"{product.symbol.name}[r][c]", "float", place)
            sums = (f"sum_{t.over} {scope.shown(t.own)} {scope.shown(t.walk)}" for t in product.terms)
            products.append(
                ProductText(
                    product.symbol.name, tuple(factors), f"{product.symbol.name} = {' + '.join(sums)}"
                )
            )
        for state, level in levels.items():
            place = Place(row=True, phase=level + 1)
            leaves[state.symbol] = codes.leaf(f"row.{state.symbol.name}", "float", place)
            leaves[old(state.symbol)] = codes.leaf(f"{state.symbol.name}_old", "float", place)
            if state.op == "max":
                self.magnitudes.add_maximum(state, walk.guard)
        terms = {state: term_of(state) for state in states}
        distinct = list(dict.fromkeys(terms[state] for state in states if state.features))
        weights = {term: f"weights{i if len(distinct) > 1 else ''}" for i, term in enumerate(distinct)}
        values = self.from_weights(terms, weights, levels, leaves)
        loop = loop_text(scope, self.kernel.ranges[number], walk.guard, self.walk_axis, self.row_axis)
        draws = self.draws(self.random_tests(values.values()), leaves, loop)
        lower = self.lowering(leaves)
        roots: list[tuple[Code, Place]] = [(code, ELEMENT) for _, code in draws]
        wholes = [(lower(value), self.known_at_last(value)) for value in self.wholes]
        roots += [(code, ELEMENT._replace(phase=level)) for code, level in wholes]
        for state, level in levels.items():
            at = ELEMENT._replace(phase=level)
            value, condition = values[state]
            roots.append((lower(value), at))
            if condition is not None:
                roots.append((lower(condition), at))
            if state.rescale is not None:
                roots.append((lower(state.rescale), Place(row=True, phase=level)))
        guard_code = lower(walk.guard) if walk.guard is not TRUE else None
        masked = self.masked(walk)
        apart = self.masks_products(walk, masked)
        guard_split, (begins, ends, rest, sought) = None, self.bounds(walk, lower, number)
        by_bounds = apart or (self.bounds_values and masked is not None and not begins and not rest)
        if guard_code is not None and not by_bounds:
            roots[:0] = [(guard_code, ELEMENT._replace(phase=phase)) for phase in self.tested_at(levels)]
        if guard_code is not None and by_bounds:
            tests = [*begins, *ends, *rest, *(lower(place.search.value) for place in sought)]
            at = ELEMENT if apart else ROW  # an end is not kept for elements whose values are
            guard_split = scope.split([(code, at) for code in tests], self.again)
            self.column += guard_split.at(COLUMN)
        score = self.score(walk, scored, lower) if scored is not None else None
        splits = self.splits(roots, max(levels.values(), default=0))
        every = list(dict.fromkeys(splits))
        self.column += [statement for split in every for statement in split.at(COLUMN)]
        texts: dict[State, StateText] = {}
        for state in states:
            value, condition = values[state]
            split = splits[levels[state]]
            share, vector, operand, held, record = None, 1, None, "", ""
            if state.features:
                (axis,) = state.features
                operand, record = self.sum_tile(number, walk, state)
                share, vector = self.share_of(state, axis, self.shared[record].width)
                held = weights[terms[state]]
            name = state.symbol.name
            texts[state] = StateText(
                name=name,
                op=state.op,
                initial="-INFINITY" if state.op == "max" else "0.0f",
                value=split.text(lower(value)),
                rescale=split.text(lower(state.rescale)) if state.rescale is not None else None,
                running=any(state.symbol in _symbols(other.value) for other in states),
                old=any(
                    old(state.symbol) in _symbols(other.rescale)
                    for other in walk.states
                    if other.rescale is not None
                ),
                share=share,
                vector=vector,
                operand=operand,
                weights=held,
                weight=self.weight(terms[state][0], record) if operand is not None else "",
                condition=split.text(lower(condition), AND) if condition is not None else None,
                slack=self.slack(state),
                lost=f"{name}_lost" if self.compensates(state) else None,
                equation=self.equation(state),
                part=self.part(state),
            )

        def guard_text(split: Split) -> str | None:
            return (guard_split or split).text(guard_code, AND) if guard_code is not None else None

        phases = tuple(
            Phase(
                row=splits[level].at(Place(row=True, phase=level)) if level else (),
                element=splits[level].at(ELEMENT._replace(phase=level)),
                states=tuple(texts[state] for state, at in levels.items() if at == level),
                guard=guard_text(splits[level]),
                wholes=tuple(splits[level].text(code) for code, at in wholes if at == level),
            )
            for level in range(max(levels.values(), default=-1) + 1)
        )
        held = f"weights{number}" if several else "weights"
        row = [statement for split in every for statement in split.at(ROW)]
        places = [self.place(each, loop, lower, guard_split) for each in sought] if guard_split else []
        of_mask = self.known_late(guard_split, places) if guard_split and apart else []
        of_places = self.for_places(guard_split, places) if guard_split and self.shares_places else []
        known = [each for each in guard_split.at(ROW) if each not in of_mask] if guard_split else []
        bounds = _extreme("maximum", begins, guard_split), _extreme("minimum", ends, guard_split)
        together = self.bits and apart and self.one_loop(bool(begins)) and not self.reads_columns(guard_split)
        between = bool(begins) and len(ends) > 1 and not rest and not draws  # these are of rows 8 apart
        by_sets = between and together and loop.full is not None and self.by_sets(walk, guard_split, places)
        of_columns = [*guard_split.at(ROW), *places] if guard_split and by_sets else []
        told = by_sets and bool(places)
        if told:
            of_mask, of_places, places, known = [], [], [], []
        beyond = " && ".join(guard_split.text(code, AND + 1) for code in rest) if guard_split else ""
        others = [each for each in known if each not in of_places]
        of_elements = guard_split.at(ELEMENT) if guard_split else ()
        said = "\n".join([*bounds, beyond, *(each.text for each in (*others, *of_mask, *of_elements))])
        row += [each for each in known if each in others or each.target in said]
        row += [each for each in score.early if each not in row] if score else ()
        stores, more = self.stores(walk, leaves)
        row += more
        views = tuple(
            tile for (side, _, _), tile in self.tiles.items() if side in (f"walk{number}", f"operand{number}")
        )
        text = WalkText(
            number=str(number) if several else "",
            products=tuple(products),
            phases=phases,
            arrays=[array for split in every for array in split.arrays()],
            kept=[statement for split in every for statement in split.kept()],
            inside=self.inside(),
            guard=guard_text(splits[0]),
            guard_comment=scope.shown(walk.guard),
            masked=self.masked_text(masked, lower, splits[0]),
            score=score,
            apart=apart,
            mask=guard_split.at(ELEMENT) if guard_split else (),
            bounds=bounds,
            beyond=beyond,
            row=row,
            draws=[DrawText(name, splits[0].text(code)) for name, code in draws],
            lagging=self.lagging(walk, levels, texts, leaves),
            stores=stores,
            tiles=tuple(tile for tile in views if not tile.chunked),
            views=views,
            weights_at=self._address("W", self.shared[held].address) if held in self.shared else "",
            overwrites=number > 0 and self.overwrites(number),
            of_mask=of_mask,
            together=together,
            in_parts=self.in_parts(walk),
            places=places,
            of_places=of_places,
            of_columns=of_columns,
            by_sets=by_sets,
            told=told,
            sought=bool(places) and self.shares_places,
            loop=loop,
        )
        for state in walk.states:
            self.finished[state.symbol] = self.held(state)
        return text

    def scored(self, walk: Walk) -> tuple[Walk, Node | None]:
        """``walk`` with its product standing for the value whose maximum it takes, and that value; None where
        that is the product itself, or more than the value is made of it.

        The value takes the place of the product before a tile is masked and weighed: these are then as short
        as where nothing is made of products, and the value is kept nowhere else.
        """
        maxima = [state for state in walk.states if state.op == "max"]
        if not self.bits or len(self.stage.walks) > 1 or len(walk.products) != 1 or len(maxima) != 1:
            return walk, None
        product, value = walk.products[0].symbol, maxima[0].value
        if any(isinstance(node, Random) for node in ir.walk([value])):
            return walk, None  # a call serves several columns
        mark = Symbol("score", value.axes, "float")
        rests = [ir.substitute(state.value, {value: mark}) for state in walk.states]
        if walk.stores or value is product or any(ir.depends(rest, [product]) for rest in rests):
            return walk, None
        states = (replace(s, value=ir.substitute(s.value, {value: product})) for s in walk.states)
        return replace(walk, states=tuple(states)), value

    def score(self, walk: Walk, value: Node, lower: Lowering) -> ScoreText:
        """What makes ``value`` of a product, in its place."""
        code, name = lower(value), walk.products[0].symbol.name
        split = self.scope.split([(code, ELEMENT)])
        self.column += split.at(COLUMN)
        late = self.known_late(split, ())
        early = [statement for statement in split.at(ROW) if statement not in late]
        equation = f"{name} = {self.scope.shown(value)}"
        return ScoreText(name, split.text(code), equation, split.at(ELEMENT), late, early)

    def splits(self, roots: Sequence[tuple[Code, Place]], last: int) -> Sequence[Split]:
        """The statements for what each phase up to the ``last`` needs."""
        return [self.scope.split(roots)] * (last + 1)

    def lagging(
        self,
        walk: Walk,
        levels: Mapping[State, int],
        texts: Mapping[State, StateText],
        leaves: Mapping[Node, Code],
    ) -> LaggingText | None:
        """How a tile is weighed from maxima as they are; None where they are looked at in every tile."""
        return None

    def masks_products(self, walk: Walk, masked: Node | None) -> bool:
        """Whether products of elements that do not count are -inf before a tile is weighed."""
        return self.masks_apart and masked in [product.symbol for product in walk.products]

    @staticmethod
    def sums_of(walk: Walk) -> tuple[State, ...]:
        """What the update of a tile makes."""
        return walk.states

    def part(self, state: State) -> PartText | None:
        """Where a state lies that is no state of a row, but a sum in memory."""
        return None

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

    def share_of(self, state: State, axis: Axis, width: int) -> tuple[str, int]:
        """The name of a thread's share of a sum's features, and how many of them lie side by side."""
        return self.share(axis, width)

    def make_by_levels(self, made: tuple[Level, ...]) -> None:
        """Have products and sums of a tile made level by level, if there are any."""
        self.levels_made = made
        if made:
            self.scope.splitter.places.element = "[r][c]"
            self.rounds = all(state.features for level in made for state in level.states)
            self.coarse = self.rounds and "bf16" in {tile.storage for tile in self.kernel.shared}

    def levels(self, walk: Walk) -> dict[State, int]:
        """The phase of each state, in the order in which they are updated."""
        if self.levels_made:
            return {state: i for i, level in enumerate(self.levels_made) for state in level.states}
        return levels_of(self.sums_of(walk))

    def level_texts(self, walk: WalkText) -> tuple[LevelText, ...]:
        """What is made of a tile level by level."""
        products = {product.name: product for product in walk.products}
        return tuple(
            LevelText(
                i,
                tuple(products[p.symbol.name] for p in level.products),
                walk.phases[i],
                i not in self.vanishing,
                self.multiplied,
            )
            for i, level in enumerate(self.levels_made)
        )

    def inside(self) -> str:
        """Whether an element is there."""
        return f"{axis_name(self.walk_axis)} < {self.scope.length(self.walk_axis)}"

    def known_at(self, product: Product) -> int:
        """The phase from which on a product is known."""
        found = (i for i, level in enumerate(self.levels_made) if product in level.products)
        return next(found, 0)

    def known_at_last(self, value: Node) -> int:
        """The phase from which on a value of products is known."""
        return max(self.known_at(p) for p in self.stage.walks[0].products if ir.depends(value, [p.symbol]))

    def tested_at(self, levels: Mapping[State, int]) -> Iterable[int]:
        """The phases in which elements are tested."""
        return sorted(set(levels.values()) - self.vanishing) if self.levels_made else (0,)

    def earlier_weight(self, name: str, value: Node) -> str | None:
        """How a later level says the weight of an element in array ``name``; None: it computes it again."""
        return f"{name}[r][c]"

    def earlier_products(self, level: int, leaves: dict[Node, Code]) -> Mapping[Node, Node]:
        """What ``level`` has in place of products of earlier ones and of `wholes`, which may stand as
        ``leaves``."""
        return {}

    def left_to_round(self, weights: str, value: Node, earlier: Mapping[Node, str]) -> Node:
        """What of the ``value`` of ``weights`` is made before they are rounded: all, or what one of the
        ``earlier`` ones is multiplied by."""
        return value

    def from_weights(
        self,
        terms: Mapping[State, Term],
        weights: Mapping[Term, str],
        levels: Mapping[State, int],
        leaves: dict[Node, Code],
    ) -> Mapping[State, Term]:
        """The value of each state and the condition of its term, in which ``weights`` of earlier levels stand
        as ``leaves``: where these are 0 as an element does not count, that may be all a level needs."""
        if not self.levels_made:
            return terms
        found = dict(terms)
        tested = set[int]()
        for state, level in levels.items():
            zeros: dict[Node, Node] = {}
            named: dict[Node, str] = {}
            known: dict[Node, Node] = {}
            for other, at in levels.items():
                value, condition = terms[other]
                text = None
                if at < level and other.features and condition is None:
                    text = self.earlier_weight(weights[terms[other]], value)
                if text is not None:
                    name = f"earlier_{weights[terms[other]]}"
                    known[value] = symbol = Symbol(name, value.axes, "float")
                    zeros[symbol], named[symbol] = ZERO, weights[terms[other]]
                    leaves[symbol] = self.scope.codes.leaf(text, "float", ELEMENT._replace(phase=at + 1))
            known |= self.earlier_products(level, leaves)
            earlier = (whole for whole in self.wholes if self.known_at_last(whole) < level)
            zeros |= {known[whole]: ZERO for whole in earlier}
            value, condition = terms[state]
            found[state] = ir.substitute(value, known), condition
            if limits(ir.substitute(found[state][0], zeros)) is not ZERO:
                tested.add(level)
            if state.features:
                found[state] = self.left_to_round(weights[terms[state]], found[state][0], named), condition
        self.vanishing = set(levels.values()) - tested
        return found

    def held(self, state: State) -> str:
        """What a thread calls a state of one of its rows."""
        return f"row.{state.symbol.name}"

    def bounds(
        self, walk: Walk, lower: Lowering, number: int
    ) -> tuple[list[Code], list[Code], list[Code], list[RowPlace]]:
        """Columns of a row from and up to which elements count, and what else the guard says; which of these
        columns are searched for."""
        column, codes = Index(self.walk_axis), self.scope.codes
        begins: list[Code] = []
        ends = [self.scope.expressions.length(self.walk_axis)]
        rest: list[Code] = []
        sought: list[RowPlace] = []
        ranges = self.kernel.ranges[number]
        for condition in conjuncts(walk.guard):
            places = row_places(condition, ranges) if ranges and self.finds_rows and self.row_axis else ()
            for place in places:
                name = self.place_name(place)
                (ends if place.upper else begins).append(codes.leaf(f"row.{name}", "int32", ROW))
            sought += places
            bound = _solved(condition, column)
            code = lower(bound[1]) if bound is not None else None
            if places:
                continue
            if bound is None or code is None or code.ctype != "int32" or code.place.column:
                rest.append(lower(condition))
            else:
                (begins if bound[0] else ends).append(code)
        return begins, [codes.cast(end, "int32") for end in ends], rest, sought

    def in_parts(self, walk: Walk) -> bool:
        """Whether registers are short, for weighted sums above all."""
        kernel = self.kernel
        features = sum(self.shares[s.features[0]][1] for s in walk.states if s.features)
        scores = kernel.block_walk // kernel.columns * len(walk.products)
        rows = kernel.block_own // kernel.rows
        return features > scores and rows * (features + scores + BESIDE) >= MANY_REGISTERS

    @property
    def many_features(self) -> int:
        """From how many of a thread on lanes exchange results before they store them."""
        return MANY_FEATURES

    def one_loop(self, begins: bool) -> bool:
        """Whether full and partial tiles have one loop, which asks what a tile is; ``begins``: rows need not
        begin at the first column."""
        kernel = self.kernel
        elements = kernel.block_own // kernel.rows * (kernel.block_walk // kernel.columns)
        return begins or elements >= MANY_ELEMENTS

    def by_sets(self, walk: Walk, split: Split | None, places: Sequence[Statement]) -> bool:
        """Whether a warp has two sets of sixteen rows, of which tiles leave one out often enough.

        Columns that count in a row lie between two places that it knows before the walk. Where rows follow
        each other in them, it takes tiles that are narrower than a block has rows.
        """
        kernel = self.kernel
        two = kernel.block_own // kernel.rows == 4 == kernel.columns and not kernel.held
        alone = len(self.stage.walks) == 1 and not self.stage.outer and not walk.stores and not self.column
        known = split is not None and not split.at(ELEMENT)
        often = bool(places) or kernel.block_walk < kernel.block_own
        return self.shares_places and self.row_axis is not None and two and alone and known and often

    def known_late(self, split: Split, places: Sequence[Statement]) -> list[Statement]:
        """Values of a row that its mask alone reads, and computes from positions whenever a tile needs it."""
        if not self.bits or self.row_axis is None or self.stage.outer:
            return []
        late: list[Statement] = []
        for statement in reversed(split.at(ROW)):
            needed = statement.kind == "field" or any(statement.target in each.text for each in late)
            if needed and "[" not in statement.text:
                late.insert(0, statement)
        others = [each for each in (*split.at(ROW), *places) if each not in late]
        ends = [each for each in others if each.kind == "local"]  # which no other function knows
        pairs = [*itertools.product(late, others), *itertools.product(ends, late)]
        return [] if any(early.target in later.text for early, later in pairs) else late

    def for_places(self, split: Split, places: Sequence[Statement]) -> list[Statement]:
        """Values of a row that the search for its places reads."""
        found: list[Statement] = []
        for statement in reversed(split.at(ROW)):
            if any(statement.target in later.text for later in (*places, *found)):
                found.insert(0, statement)
        return found

    @staticmethod
    def reads_columns(split: Split | None) -> bool:
        """Whether a mask needs what is read of columns."""
        return split is not None and bool(split.at(COLUMN))

    def place_name(self, place: RowPlace) -> str:
        """What a row calls a place that is searched for."""
        names = self.places.setdefault(self.walk_axis, {})
        if place not in names:
            kind = f"{axis_name(self.walk_axis)}_{'end' if place.upper else 'begin'}"
            again = sum(each.startswith(kind) for each in names.values())
            names[place] = f"{kind}{again or ''}"
            self.scope.fields(ROW).append(Variable("int32", names[place]))
        return names[place]

    def place(self, place: RowPlace, loop: LoopText, lower: Lowering, split: Split) -> Statement:
        """What searches for a place of a row, between those of its tile."""
        search, codes = place.search, self.scope.codes
        element = lower.read(
            search.table, [*(lower(fixed) for fixed in search.fixed), codes.leaf("i", "int32", ELEMENT)]
        )
        text = self.scope.split([(element, ELEMENT)]).text(element)
        sign = "<=" if place.upper else "<"
        test = f"[&](int i) {{ return {text} {sign} {split.text(lower(search.value), SUM)}; }}"
        ends = f"{loop.places[place.lowest]}, {loop.places[place.highest]}"
        length = self.scope.length(search.table.layout[-1]), loop.length
        beyond = "" if place.inside else f", {length[0]}, {length[1]}"
        name = self.place_name(place)
        return Statement(
            "field", Variable("int32", name), f"row.{name}", f"place_between({ends}, {test}{beyond})"
        )

    def slack(self, state: State) -> str | None:
        """By how much a maximum may be exceeded before it is replaced; None where it may not."""
        return None

    def masked(self, walk: Walk) -> Node | None:
        """A value of each element that may stand as -inf for an element that does not count.

        Proved for every state: with -inf in its place, nothing else being infinite, nothing is added to it.
        On tensor cores a term that does not count is a product with 0 in any case.
        """
        if (
            self.kernel.tiling not in ON_TENSOR_CORES
            or walk.stores
            or any(term_of(s)[1] for s in walk.states)
        ):
            return None
        values = [state.value for state in walk.states if state.op == "max"]
        return next((value for value in self.maskable(walk, values) if self.is_neutral(walk, value)), None)

    def maskable(self, walk: Walk, maxima: Sequence[Node]) -> Sequence[Node]:
        """Values that may stand as -inf, the best first: those of ``maxima``."""
        return maxima

    def is_neutral(self, walk: Walk, value: Node) -> bool:
        """Whether nothing is added to any state where ``value`` is -inf."""
        rests = [ir.substitute(state.value, {value: MINUS_INF}) for state in walk.states]
        neutral = [MINUS_INF if state.op == "max" else ZERO for state in walk.states]
        alone = not any(self.is_read(node) for rest in rests for node in ir.walk([rest]))
        return alone and [limits(rest) for rest in rests] == neutral

    @staticmethod
    def masked_text(value: Node | None, lower: Lowering, split: Split) -> str | None:
        """How the text says a value of each element that it can assign; None where there is no such."""
        text = split.text(lower(value)) if value is not None else ""
        return text if text.endswith("[c]") else None

    def overwrites(self, number: int) -> bool:
        """Whether tiles of the products of a walk lie where those of the sums of the one before lay."""
        before = [tile for name, tile in self.shared.items() if name.startswith(f"operand{number - 1}_")]
        now = [tile for name, tile in self.shared.items() if name.startswith(f"walk{number}_")]
        return any(
            a.address < b.address + b.bytes and b.address < a.address + a.bytes for a in before for b in now
        )

    def weight(self, value: Node, record: str) -> Storage:
        """What weights are rounded to on tensor cores: fp32 (TF32) where fp16 might not hold them."""
        storage = self.shared[record].storage
        return storage if storage != "fp16" or self.magnitudes.fit_fp16(value) else "fp32"

    def is_read(self, node: Node) -> bool:
        """Whether ``node`` is a number of each element, or of each column, that may be anything."""
        return (
            isinstance(node, Input | Load | Symbol) and node.kind == "float" and self.walk_axis in node.axes
        )

    def equation(self, state: State) -> str:
        """How a state is updated by a tile."""
        shown, name, over = self.scope.shown, state.symbol.name, self.walk_axis
        value = gathered(state.value)
        term = shown(value)
        if state.operand is not None:
            alone = isinstance(value, Map) and value.op == "add"
            term = f"{f'({term})' if alone else term} * {shown(state.operand)}"
        if state.op == "max":
            return f"{name} = max({name}, max_{over} {term})"
        scaled = name if state.rescale is None else f"{name} * {shown(gathered(state.rescale))}"
        return f"{name} = {scaled} + sum_{over} {term}"

    # ------------------------------------------------------------------------------------------------ outputs

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

    # ---------------------------------------------------------------------------------------------- constants

    def rows_text(self) -> str:
        """``NAME = value`` of the rows of a block, and of the positions they are."""
        own = rows_name(self.kernel)
        rows = f"{own} = {self.kernel.block_own}"
        if self.kernel.group == 1 or self.row_axis is None:
            return rows
        return f"{rows}, {block_name(self.row_axis)} = {own} / {self.scope.length(GROUP_AXIS)}"

    def constants(self) -> list[tuple[str, str, str]]:
        """(type, ``NAME = value``, comment) of each, those of a line in one entry."""
        kernel = self.kernel
        own = rows_name(kernel)
        walk = block_name(self.walk_axis)
        blocks = [self.rows_text()] if own != "1" else []
        found = [
            (
                "int",
                ", ".join([*blocks, f"{walk} = {kernel.block_walk}"]),
                "rows of a block, columns of a tile",
            ),
            ("int", f"THREADS = {kernel.threads}, LANES = {kernel.columns}", "LANES of them share a row"),
            (
                "int",
                f"ROWS = {own} * LANES / THREADS, COLUMNS = {walk} / LANES",
                "of a tile, each thread's share",
            ),
        ]
        shares = [f"{name} = {count}" for name, count, _ in self.shares.values()]
        if shares:
            found.append(("int", ", ".join(shares), "of a weighted sum, each thread's share"))
        widths = [f"{name} = {width}" for name, width in self.widths.items()]
        if widths:
            found.append(("int", ", ".join(widths), "columns of a tile in shared memory"))
        if kernel.columns > 4 and kernel.tiling == "fragments":
            found.insert(2, ("int", "GROUPS = LANES / 4", "warps that share rows"))
        at = [f"{name} = {address}" for name, address in self.addresses.items()]
        if at:
            found.append(("uint32", ", ".join(at), "where tiles lie in shared memory, in bytes"))
        return found


def _row_name(node: Node, row_axis: Axis | None, shared: bool) -> str:
    """What the row of an element of a tile is called; empty where all are the same."""
    if shared:
        return "i" if {row_axis, GROUP_AXIS} & set(node.axes) else ""
    return axis_name(row_axis) if row_axis is not None and row_axis in node.axes else ""


def _solved(condition: Node, column: Node) -> tuple[bool, Node] | None:
    """A bound of ``column`` that is all a condition says: (whether columns begin there, where that is)."""
    if not isinstance(condition, Map) or condition.op not in ("le", "lt") or condition.args[0].kind != "int":
        return None
    terms, constant = ir.linear(
        ir.sub(condition.args[1], condition.args[0])
    )  # it holds where this is not negative
    terms = dict(terms)
    step = terms.pop(column, 0)
    constant -= condition.op == "lt"
    if abs(step) != 1 or any(ir.depends(term, [column]) for term in terms):
        return None
    if step > 0:
        return True, ir.from_linear({term: -k for term, k in terms.items()}, -constant)
    return False, ir.from_linear(terms, constant + 1)


def levels_of(states: Sequence[State]) -> dict[State, int]:
    """The phase of each state, in the order in which they are updated."""
    levels: dict[State, int] = {}
    for state in states:
        waits = _symbols(state.value) | (_symbols(state.rescale) if state.rescale is not None else set())
        below = [level for other, level in levels.items() if waits & {other.symbol, old(other.symbol)}]
        levels[state] = 1 + max(below, default=-1)
    return dict(sorted(levels.items(), key=lambda item: item[1]))


def _extreme(op: str, codes: Sequence[Code], split: Split | None) -> str:
    """The largest or smallest of ``codes``."""
    texts = [split.text(code) for code in codes] if split is not None else []
    return reduce(lambda x, y: f"{op}({x}, {y})", texts) if texts else ""


def _symbols(x: Node) -> set[Node]:
    return {node for node in ir.walk([x]) if isinstance(node, Symbol)}
