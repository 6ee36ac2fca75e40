"""A stage with products, as `schedule/forward_loop` writes it: the steps of each walk as statements.

A walk's states are brought up to date in *phases*: a state whose value uses a running state waits for the
phase after it. Within a phase a thread computes its elements of a row, adds them to what it holds of each
state, and, where another state waits for it, joins that with the other threads of the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fagen.derive.running import old
from fagen.derive.terms import term_of
from fagen.derive.unscale import gathered
from fagen.derive.walk import State, Walk
from fagen.emit.cexpr import Lowering
from fagen.emit.code import AND, COLUMN, ELEMENT, ROW, Code, Place, Split
from fagen.emit.forward.elements import Term
from fagen.emit.forward.kernel import ForwardLoop
from fagen.emit.forward.levels import PhaseBuilder, symbols_in
from fagen.emit.forward.masks import MaskBuilder
from fagen.emit.forward.outputs import OutputBuilder
from fagen.emit.forward.slack import SlackBuilder
from fagen.emit.forward.tiles import TileBuilder
from fagen.emit.loops import loop_text
from fagen.emit.scope import Scope, block_name
from fagen.emit.texts import (
    DrawText,
    LaggingText,
    PartText,
    Phase,
    ProductText,
    ScoreText,
    StateText,
    WalkText,
    rows_name,
)
from fagen.ir import graph as ir
from fagen.ir.graph import Map, Node, Random, Symbol
from fagen.plan.plan import GROUP_AXIS, Storage

MANY_REGISTERS = 176
"""Of a thread, for its rows: from so many on a step is made in parts, each with fewer values beside them."""
BESIDE = 4
"""Registers of a row for its maximum, its sum and its share of a fragment."""


def forward_loop(scope: Scope) -> ForwardLoop:
    """The steps of ``scope.kernel``."""
    assert not any(walk.partials for walk in scope.kernel.stage.walks), "its walks add nothing to memory"
    return LoopBuilder(scope).build()


class LoopBuilder(TileBuilder, MaskBuilder, PhaseBuilder, OutputBuilder, SlackBuilder):
    """The texts of a stage with products, walk by walk."""

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

    # -------------------------------------------------------------------------------------------------- walks

    def walk(self, number: int, walk: Walk) -> WalkText:
        """The texts of one pass along the walk axis."""
        scope = self.scope
        walk, scored = self.scored(walk)
        levels, states = self.levels(walk), self.sums_of(walk)
        self.magnitudes.enter(walk)
        leaves = self.thread_leaves()
        products = self.products(number, walk, leaves)
        self.know_states(walk, levels, leaves)
        terms = {state: term_of(state) for state in states}
        distinct = list(dict.fromkeys(terms[state] for state in states if state.features))
        weights = {term: f"weights{i if len(distinct) > 1 else ''}" for i, term in enumerate(distinct)}
        values = self.from_weights(terms, weights, levels, leaves)
        loop = loop_text(scope, self.kernel.ranges[number], walk.guard, self.walk_axis, self.row_axis)
        draws = self.draws(self.random_tests(values.values()), leaves, loop)
        lower = self.lowering(leaves)
        wholes = [(lower(value), self.known_at_last(value)) for value in self.wholes]
        roots: list[tuple[Code, Place]] = [(code, ELEMENT) for _, code in draws]
        roots += [(code, ELEMENT._replace(phase=level)) for code, level in wholes]
        roots += self.roots(levels, values, lower)
        guard = self.guard(walk, lower, number)
        if guard.code is not None and guard.split is None:
            roots[:0] = [(guard.code, ELEMENT._replace(phase=phase)) for phase in self.tested_at(levels)]
        score = self.score(walk, scored, lower) if scored is not None else None
        splits = self.splits(roots, max(levels.values(), default=0))
        every = list(dict.fromkeys(splits))
        self.column += [statement for split in every for statement in split.at(COLUMN)]
        texts: dict[State, StateText] = {}
        for state in states:
            held = weights[terms[state]] if state.features else ""
            split = splits[levels[state]]
            texts[state] = self.state_text(number, walk, state, values[state], held, split, lower)
        slacks = {state: self.slack(walk, state) for state in states}  # shares of all sums are known
        texts = {state: replace(text, slack=slacks[state]) for state, text in texts.items()}
        phases = tuple(
            Phase(
                row=splits[level].at(Place(row=True, phase=level)) if level else (),
                element=splits[level].at(ELEMENT._replace(phase=level)),
                states=tuple(texts[state] for state, at in levels.items() if at == level),
                guard=guard.text(splits[level]),
                wholes=tuple(splits[level].text(code) for code, at in wholes if at == level),
            )
            for level in range(max(levels.values(), default=-1) + 1)
        )
        mask = self.mask(walk, guard, loop, lower, bool(draws))
        row = [statement for split in every for statement in split.at(ROW)]
        row += mask.row
        row += [each for each in score.early if each not in row] if score else ()
        stores, more = self.stores(walk, leaves)
        row += more
        views = tuple(
            tile for (side, _, _), tile in self.tiles.items() if side in (f"walk{number}", f"operand{number}")
        )
        several = len(self.stage.walks) > 1
        held = f"weights{number}" if several else "weights"
        text = WalkText(
            number=str(number) if several else "",
            products=products,
            phases=phases,
            arrays=[array for split in every for array in split.arrays()],
            kept=[statement for split in every for statement in split.kept()],
            inside=self.inside(),
            guard=guard.text(splits[0]),
            guard_comment=scope.shown(walk.guard),
            masked=self.masked_text(guard.masked, lower, splits[0]),
            score=score,
            apart=guard.apart,
            mask=mask.element,
            bounds=mask.bounds,
            beyond=mask.beyond,
            row=row,
            draws=[DrawText(name, splits[0].text(code)) for name, code in draws],
            lagging=self.lagging(walk, levels, texts, leaves),
            stores=stores,
            tiles=tuple(tile for tile in views if not tile.chunked),
            views=views,
            weights_at=self._address("W", self.shared[held].address) if held in self.shared else "",
            overwrites=number > 0 and self.overwrites(number),
            of_mask=mask.late,
            together=mask.together,
            in_parts=self.in_parts(walk),
            places=mask.places,
            of_places=mask.of_places,
            of_columns=mask.of_columns,
            by_sets=mask.by_sets,
            told=mask.told,
            sought=bool(mask.places) and self.shares_places,
            loop=loop,
        )
        for state in walk.states:
            self.finished[state.symbol] = self.held(state)
        return text

    def products(self, number: int, walk: Walk, leaves: dict[Node, Code]) -> tuple[ProductText, ...]:
        """The products of a walk, which then stand as ``leaves``."""
        found = []
        for product in walk.products:
            factors = []
            for term in product.terms:
                own = self.own_tile(term.own, term.over)
                factors.append((own, self.walk_tile(number, walk, term.walk, term.over)))
            name, place = product.symbol.name, ELEMENT._replace(phase=self.known_at(product))
            leaves[product.symbol] = self.scope.codes.leaf(f"{name}[r][c]", "float", place)
            shown = self.scope.shown
            sums = (f"sum_{t.over} {shown(t.own)} {shown(t.walk)}" for t in product.terms)
            found.append(ProductText(name, tuple(factors), f"{name} = {' + '.join(sums)}"))
        return tuple(found)

    def know_states(self, walk: Walk, levels: Mapping[State, int], leaves: dict[Node, Code]) -> None:
        """States of rows as later phases read them: as they are, and as they were before this tile."""
        for state, level in levels.items():
            place = Place(row=True, phase=level + 1)
            name = state.symbol.name
            leaves[state.symbol] = self.scope.codes.leaf(f"row.{name}", "float", place)
            leaves[old(state.symbol)] = self.scope.codes.leaf(f"{name}_old", "float", place)
            if state.op == "max":
                self.magnitudes.add_maximum(state, walk.guard)

    @staticmethod
    def roots(
        levels: Mapping[State, int], values: Mapping[State, Term], lower: Lowering
    ) -> Iterator[tuple[Code, Place]]:
        """What updates the states, each where it is needed."""
        for state, level in levels.items():
            at = ELEMENT._replace(phase=level)
            value, condition = values[state]
            yield lower(value), at
            if condition is not None:
                yield lower(condition), at
            if state.rescale is not None:
                yield lower(state.rescale), Place(row=True, phase=level)

    def state_text(
        self, number: int, walk: Walk, state: State, term: Term, weights: str, split: Split, lower: Lowering
    ) -> StateText:
        """A state whose ``term`` each element adds; of a weighted sum ``weights`` holds it."""
        value, condition = term
        share, vector, operand, record = None, 1, None, ""
        if state.features:
            (axis,) = state.features
            operand, record = self.sum_tile(number, walk, state)
            share, vector = self.share_of(state, axis, self.shared[record].width)
        name = state.symbol.name
        rescales = [other.rescale for other in walk.states if other.rescale is not None]
        return StateText(
            name=name,
            op=state.op,
            initial="-INFINITY" if state.op == "max" else "0.0f",
            value=split.text(lower(value)),
            rescale=split.text(lower(state.rescale)) if state.rescale is not None else None,
            running=any(state.symbol in symbols_in(other.value) for other in self.sums_of(walk)),
            old=any(old(state.symbol) in symbols_in(rescale) for rescale in rescales),
            share=share,
            vector=vector,
            operand=operand,
            weights=weights,
            weight=self.weight(term_of(state)[0], record) if operand is not None else "",
            condition=split.text(lower(condition), AND) if condition is not None else None,
            lost=f"{name}_lost" if self.compensates(state) else None,
            equation=self.equation(state),
            part=self.part(state),
        )

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

    def part(self, state: State) -> PartText | None:
        """Where a state lies that is no state of a row, but a sum in memory."""
        return None

    def weight(self, value: Node, record: str) -> Storage:
        """What weights are rounded to on tensor cores: fp32 (TF32) where fp16 might not hold them."""
        storage = self.shared[record].storage
        return storage if storage != "fp16" or self.magnitudes.fit_fp16(value) else "fp32"

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

    def in_parts(self, walk: Walk) -> bool:
        """Whether registers are short, for weighted sums above all."""
        kernel = self.kernel
        features = sum(self.shares[s.features[0]][1] for s in walk.states if s.features)
        scores = kernel.block_walk // kernel.columns * len(walk.products)
        rows = kernel.block_own // kernel.rows
        return features > scores and rows * (features + scores + BESIDE) >= MANY_REGISTERS

    def may_lag(self, walk: Walk) -> bool:
        """Whether a warp passes by the multiplication of its sums in tiles in which no maximum moves."""
        return self.bits and self.in_parts(walk)

    # ---------------------------------------------------------------------------------------------- constants

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
        found += self.slack_constants()
        at = [f"{name} = {address}" for name, address in self.addresses.items()]
        if at:
            found.append(("uint32", ", ".join(at), "where tiles lie in shared memory, in bytes"))
        return found

    def rows_text(self) -> str:
        """``NAME = value`` of the rows of a block, and of the positions they are."""
        own = rows_name(self.kernel)
        rows = f"{own} = {self.kernel.block_own}"
        if self.kernel.group == 1 or self.row_axis is None:
            return rows
        return f"{rows}, {block_name(self.row_axis)} = {own} / {self.scope.length(GROUP_AXIS)}"
