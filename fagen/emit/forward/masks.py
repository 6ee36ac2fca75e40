"""Which elements count: between which columns of a row they lie, and how products say that they do not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from fagen.derive.intervals import RowPlace, row_places
from fagen.derive.terms import conjuncts, term_of
from fagen.derive.vanish import limits
from fagen.derive.walk import Walk
from fagen.emit.cexpr import Lowering
from fagen.emit.code import AND, COLUMN, ELEMENT, ROW, SUM, Code, Split, Statement, Variable
from fagen.emit.forward.elements import ElementBuilder
from fagen.emit.loops import LoopText
from fagen.emit.scope import axis_name
from fagen.ir import graph as ir
from fagen.ir.graph import MINUS_INF, TRUE, ZERO, Index, Input, Load, Map, Node, Symbol
from fagen.plan.space import ON_TENSOR_CORES

MANY_ELEMENTS = 64
"""Of a thread in a tile: from so many on, two copies of a step take more time than a test in one."""


@dataclass(frozen=True)
class Guard:
    """The condition under which an element counts, taken apart."""

    code: Code | None
    """All of it; None: there is none."""
    begins: list[Code]
    """Columns of a row from which elements count,"""
    ends: list[Code]
    """up to which they do,"""
    rest: list[Code]
    """and what else it says."""
    sought: list[RowPlace]
    """Which of these columns are searched for."""
    masked: Node | None
    """What is -inf at an element that does not count."""
    apart: bool
    """Whether products are, before a tile is weighed."""
    split: Split | None
    """The statements of a mask of its own, by those columns; None: each phase tests the condition."""

    def text(self, split: Split) -> str | None:
        """The condition, as a phase says it."""
        return (self.split or split).text(self.code, AND) if self.code is not None else None


@dataclass(frozen=True)
class Mask:
    """How a walk says which elements count, as `WalkText` has it."""

    element: Sequence[Statement]
    bounds: tuple[str, str]
    beyond: str
    row: Sequence[Statement]
    late: Sequence[Statement]
    places: Sequence[Statement]
    of_places: Sequence[Statement]
    of_columns: Sequence[Statement]
    together: bool
    by_sets: bool
    told: bool


class MaskBuilder(ElementBuilder):
    """Masks that are tests of bounds known before the walk, and values that stand as -inf."""

    def guard(self, walk: Walk, lower: Lowering, number: int) -> Guard:
        """The condition of a walk. Its bounds are known before its tiles where products are masked."""
        code = lower(walk.guard) if walk.guard is not TRUE else None
        masked = self.masked(walk)
        apart = self.masks_products(walk, masked)
        begins, ends, rest, sought = self.bounds(walk, lower, number)
        by_bounds = apart or (self.bounds_values and masked is not None and not begins and not rest)
        split = None
        if code is not None and by_bounds:
            tests = [*begins, *ends, *rest, *(lower(place.search.value) for place in sought)]
            at = ELEMENT if apart else ROW  # an end is not kept for elements whose values are
            split = self.scope.split([(test, at) for test in tests], self.again)
            self.column += split.at(COLUMN)
        return Guard(code, begins, ends, rest, sought, masked, apart, split)

    def mask(self, walk: Walk, guard: Guard, loop: LoopText, lower: Lowering, draws: bool) -> Mask:
        """What rows know for their masks before the walk, and what is computed wherever a tile needs it."""
        split = guard.split
        together = self.bits and guard.apart and self.one_loop(bool(guard.begins))
        together = together and not self.reads_columns(split)
        if split is None:
            return Mask((), ("", ""), "", (), (), (), (), (), together, by_sets=False, told=False)
        places = [self.place(each, loop, lower, split) for each in guard.sought]
        late = self.known_late(split, places) if guard.apart else []
        of_places = self.for_places(split, places) if self.shares_places else []
        known = [each for each in split.at(ROW) if each not in late]
        bounds = _extreme("maximum", guard.begins, split), _extreme("minimum", guard.ends, split)
        between = (
            bool(guard.begins) and len(guard.ends) > 1 and not guard.rest and not draws
        )  # of rows 8 apart
        by_sets = between and together and loop.full is not None and self.by_sets(walk, split, places)
        of_columns = [*split.at(ROW), *places] if by_sets else []
        told = by_sets and bool(places)
        if told:
            late, of_places, places, known = [], [], [], []
        beyond = " && ".join(split.text(code, AND + 1) for code in guard.rest)
        others = [each for each in known if each not in of_places]
        said = "\n".join([*bounds, beyond, *(s.text for s in (*others, *late, *split.at(ELEMENT)))])
        row = [each for each in known if each in others or each.target in said]
        element = split.at(ELEMENT)
        return Mask(
            element, bounds, beyond, row, late, places, of_places, of_columns, together, by_sets, told
        )

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

    # ------------------------------------------------------------------------ places that are searched for

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

    # ------------------------------------------------------------------------------- what is known, and when

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

    # ------------------------------------------------------------------------ elements that stand as -inf

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

    def masks_products(self, walk: Walk, masked: Node | None) -> bool:
        """Whether products of elements that do not count are -inf before a tile is weighed."""
        return self.masks_apart and masked in [product.symbol for product in walk.products]

    def is_neutral(self, walk: Walk, value: Node) -> bool:
        """Whether nothing is added to any state where ``value`` is -inf."""
        rests = [ir.substitute(state.value, {value: MINUS_INF}) for state in walk.states]
        neutral = [MINUS_INF if state.op == "max" else ZERO for state in walk.states]
        alone = not any(self.is_read(node) for rest in rests for node in ir.walk([rest]))
        return alone and [limits(rest) for rest in rests] == neutral

    def is_read(self, node: Node) -> bool:
        """Whether ``node`` is a number of each element, or of each column, that may be anything."""
        return (
            isinstance(node, Input | Load | Symbol) and node.kind == "float" and self.walk_axis in node.axes
        )

    @staticmethod
    def masked_text(value: Node | None, lower: Lowering, split: Split) -> str | None:
        """How the text says a value of each element that it can assign; None where there is no such."""
        text = split.text(lower(value)) if value is not None else ""
        return text if text.endswith("[c]") else None


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


def _extreme(op: str, codes: Sequence[Code], split: Split) -> str:
    """The largest or smallest of ``codes``."""
    return reduce(lambda x, y: f"{op}({x}, {y})", map(split.text, codes)) if codes else ""
