"""What an expression can be on a tile: intervals of numbers, and (may, must) of truth values, as formulas.

A tile is a box of positions: for each of its axes the first and the last position, themselves formulas. All other axes
are fixed. An expression is then bounded by two formulas, evaluated once per tile instead of once per element:

- where it never falls (or never rises) along each axis, by its values at two corners: ``q - kv`` reaches from
  ``q_first - kv_last`` to ``q_last - kv_first``;
- else operation by operation (a modulo within one period, the larger of two, ...);
- where it reads a table along one axis, by a `Summary` of it over the tile;
- else not at all.

A condition is ``may`` hold somewhere and ``must`` hold everywhere; unknown is (True, False). Floating-point arithmetic is
never bounded, since it rounds: only order (comparisons, min, max, abs, where, conversions from int) is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from fagen.derive.extent import FACTS
from fagen.ir.graph import (
    FALSE,
    TRUE,
    Axis,
    Const,
    Contract,
    Index,
    Input,
    Load,
    Map,
    Node,
    Random,
    Reduce,
    Scatter,
    Symbol,
    add,
    conjunction,
    disjunction,
    eq,
    floordiv,
    from_linear,
    index,
    le,
    linear,
    load,
    lt,
    maximum,
    minimum,
    mod,
    mul,
    neg,
    negation,
    rebuild,
    sub,
    to_float,
    to_int,
    walk,
    where,
)


@dataclass(frozen=True)
class Summary:
    """``symbol = op of node`` over the positions of a tile of ``axis``, those below its length.

    ``node`` has no other axis of the tile pair. ``min`` and ``max`` of a table with a NaN in the tile are NaN; without a
    position they are never used. An array of them, one a tile, costs one evaluation of ``node`` a position.
    """

    symbol: Symbol
    op: Literal["min", "max", "any", "all"]
    node: Node
    axis: Axis


@dataclass(frozen=True)
class Search:
    """``symbol`` = how many elements of the sorted row ``table[fixed]`` are below ``value``, or (right) not above it.

    The row has as many elements as its axis, even where the tensor is broadcast along it.
    """

    symbol: Symbol
    table: Input
    fixed: tuple[Node, ...]
    value: Node
    side: Literal["left", "right"]


@dataclass(frozen=True)
class Let:
    """A name for a value that several formulas use: ``begin end`` of a clause, or the part of a tile it leaves."""

    symbol: Symbol
    value: Node


class Interval(NamedTuple):
    """Two formulas; None is unbounded."""

    lo: Node | None
    hi: Node | None


class Truth(NamedTuple):
    """Whether a condition may hold at some element, and must hold at all."""

    may: Node
    must: Node


UNBOUNDED = Interval(None, None)
UNKNOWN = Truth(TRUE, FALSE)

# ----------------------------------------------------------------------------- formulas, folded where provable


def not_above(x: Node, y: Node) -> Node:
    """``x <= y`` of integers; True or False where that holds for every call."""
    low, high = FACTS.of_difference(x, y)
    return TRUE if high <= 0 else FALSE if low > 0 else le(x, y)


def larger(x: Node, y: Node) -> Node:
    """``max(x, y)``, of integers without what is never the larger."""
    if x.kind == "float" or y.kind == "float":
        return maximum(x, y)
    low, high = FACTS.of_difference(x, y)
    return x if low >= 0 else y if high <= 0 else maximum(x, y)


def smaller(x: Node, y: Node) -> Node:
    """``min(x, y)``, of integers without what is never the smaller."""
    if x.kind == "float" or y.kind == "float":
        return minimum(x, y)
    low, high = FACTS.of_difference(x, y)
    return y if low >= 0 else x if high <= 0 else minimum(x, y)


def at(node: Node, positions: Mapping[Axis, Node]) -> Node:
    """``node`` at given positions along some of its axes."""
    done: dict[Node, Node] = {}

    def move(node: Node) -> Node:
        if not any(axis in positions for axis in node.axes):
            return node
        if node not in done:
            if isinstance(node, Index):
                done[node] = positions[node.axis]
            elif isinstance(node, Input):
                done[node] = load(node, tuple(move(index(axis)) for axis in node.layout))
            elif isinstance(node, Load):
                done[node] = load(node.table, tuple(move(i) for i in node.indices))
            else:
                done[node] = rebuild(node, tuple(move(arg) for arg in node.args))
        return done[node]

    return move(node)


# Operations on floating-point numbers that choose one and round nothing.
_ORDER = ("neg", "abs", "minimum", "maximum", "where", "to_float")


@lru_cache(maxsize=4096)
def stored(node: Node) -> bool:
    """Whether ``node`` is made of positions, sizes, scalars and tables alone."""
    return not any(
        isinstance(part, (Contract, Reduce, Scatter, Random)) or (isinstance(part, Symbol) and part.over)
        for part in walk([node])
    )


@lru_cache(maxsize=4096)
def exact(node: Node) -> bool:
    """Whether ``node`` is stored and rounds nothing: computed twice, it is the same number."""
    return stored(node) and all(
        part.op in _ORDER for part in walk([node]) if isinstance(part, Map) and part.kind == "float"
    )


@lru_cache(maxsize=4096)
def tables(node: Node, axes: frozenset[Axis]) -> tuple[Input, ...]:
    """The tables that ``node`` reads at positions along ``axes``."""
    found: dict[Input, None] = {}
    seen: set[Node] = set()
    stack = [node]
    while stack:
        part = stack.pop()
        if part in seen or not axes & set(part.axes):
            continue
        seen.add(part)
        if isinstance(part, Input):
            found[part] = None
        elif isinstance(part, Load):
            found[part.table] = None
            stack.extend(part.indices)
        else:
            stack.extend(part.args)
    return tuple(found)


# -------------------------------------------------------------------------------------------- tiles and what is read


@dataclass
class Reads:
    """What the formulas of one derivation stand on, each thing named once, in order of use."""

    roles: Mapping[Axis, str]
    """The name of each axis of the tile pair: ``own`` or ``walk``."""
    _summaries: dict[tuple[str, Node], Summary] = field(default_factory=dict)
    _searches: dict[tuple[Input, tuple[Node, ...], Node, str], Search] = field(default_factory=dict)
    _lets: dict[tuple[str, Node], Let] = field(default_factory=dict)

    def summary(self, op: Literal["min", "max", "any", "all"], node: Node, axis: Axis) -> Symbol:
        """The symbol of ``op`` of ``node`` over a tile of ``axis``."""
        known = self._summaries.get((op, node))
        if known is None:
            place = sum(summary.op == op for summary in self._summaries.values())
            symbol = Symbol(f"{self.roles[axis]}_{op}{place}", (), node.kind)
            known = self._summaries[op, node] = Summary(symbol, op, node, axis)
        return known.symbol

    def search(
        self, table: Input, fixed: tuple[Node, ...], value: Node, side: Literal["left", "right"]
    ) -> Symbol:
        """The symbol of the place of ``value`` in a sorted row."""
        key = (table, fixed, value, side)
        if key not in self._searches:
            symbol = Symbol(f"found{len(self._searches)}", (), "int")
            self._searches[key] = Search(symbol, table, fixed, value, side)
        return self._searches[key].symbol

    def let(self, stem: str, value: Node) -> Node:
        """A name for ``value``, or the value where it is no longer than a name."""
        if value.size == 1:
            return value
        known = self._lets.get((stem, value))
        if known is None:
            place = sum(known_stem == stem for known_stem, _ in self._lets)
            known = self._lets[stem, value] = Let(Symbol(f"{stem}{place}", (), value.kind), value)
        return known.symbol

    def used(
        self, formulas: Iterable[Node]
    ) -> tuple[tuple[Let, ...], tuple[Search, ...], tuple[Summary, ...]]:
        """Those that ``formulas`` need, each after what it needs itself."""
        used = set(walk(formulas))
        lets: list[Let] = []
        for let in reversed(self._lets.values()):
            if let.symbol in used:
                lets.insert(0, let)
                used |= set(walk([let.value]))
        searches = tuple(search for search in self._searches.values() if search.symbol in used)
        used |= set(walk(search.value for search in searches))
        return (
            tuple(lets),
            searches,
            tuple(summary for summary in self._summaries.values() if summary.symbol in used),
        )


class Tile:
    """A box of positions, with what is known of integer forms on it (``forms``: each at most a bound)."""

    def __init__(
        self,
        positions: Mapping[Axis, tuple[Node, Node]],
        reads: Reads,
        forms: Iterable[tuple[Node, Node]] = (),
    ) -> None:
        self.positions = dict(positions)
        self.reads = reads
        self._axes = frozenset(positions)
        self._forms: dict[frozenset[tuple[Node, int]], Node] = {}
        for form, bound in forms:
            key = frozenset(linear(form)[0].items())
            known = self._forms.get(key)
            self._forms[key] = bound if known is None else smaller(known, bound)
        self._intervals: dict[Node, Interval] = {}
        self._truths: dict[Node, Truth] = {}

    def varying(self, node: Node) -> list[Axis]:
        """The axes of the tile along which ``node`` varies."""
        return [axis for axis in node.axes if axis in self._axes]

    # ------------------------------------------------------------------------------------------------ numbers

    def interval(self, node: Node) -> Interval:
        """Bounds of a number on this tile."""
        known = self._intervals.get(node)
        if known is None:
            known = self._intervals[node] = self._interval(node)
        return known

    def _interval(self, node: Node) -> Interval:
        varying = self.varying(node)
        if not varying:
            return Interval(node, node) if stored(node) else UNBOUNDED
        bounds = self._corners(node, varying)
        if bounds is None:
            if len(varying) == 1 and exact(node) and tables(node, self._axes):
                lo = self.reads.summary("min", node, varying[0])
                return Interval(lo, self.reads.summary("max", node, varying[0]))
            bounds = self._by_operation(node)
        return self._narrowed(node, bounds) if self._forms and node.kind == "int" else bounds

    def _corners(self, node: Node, varying: list[Axis]) -> Interval | None:
        """The values at the two extreme corners, where ``node`` is monotone along each axis."""
        low: dict[Axis, Node] = {}
        high: dict[Axis, Node] = {}
        for axis in varying:
            step = FACTS.step(node, axis)
            if step is None or step[0] < 0 < step[1]:
                return None
            ends = self.positions[axis]
            low[axis], high[axis] = ends if step[0] >= 0 else ends[::-1]
        return Interval(at(node, low), at(node, high))

    def _narrowed(self, node: Node, bounds: Interval) -> Interval:
        """``bounds`` within what is known of this form."""
        terms, constant = linear(node)
        above = self._forms.get(frozenset(terms.items()))
        below = self._forms.get(frozenset((term, -k) for term, k in terms.items()))
        lo, hi = bounds
        if above is not None:
            above = add(above, Const(constant))
            hi = above if hi is None else smaller(hi, above)
        if below is not None:
            below = sub(Const(constant), below)
            lo = below if lo is None else larger(lo, below)
        return Interval(lo, hi)

    def _by_operation(self, node: Node) -> Interval:
        if isinstance(node, Load):
            return self._sorted_load(node)
        if not isinstance(node, Map):
            return UNBOUNDED
        if node.op == "add" and node.kind == "int":
            return self._sum(node)
        if node.op == "to_int":
            truth = self.truth(node.args[0])
            return Interval(to_int(truth.must), to_int(truth.may))
        if node.op == "where":
            return self._choice(node)
        if node.kind == "float" and node.op not in _ORDER:
            return UNBOUNDED
        x, y = self.interval(node.args[0]), self.interval(node.args[-1])
        if node.op == "minimum":
            return Interval(_both(smaller, x.lo, y.lo), _either(smaller, x.hi, y.hi))
        if node.op == "maximum":
            return Interval(_either(larger, x.lo, y.lo), _both(larger, x.hi, y.hi))
        if node.op == "abs":
            return _absolute(x)
        if node.op == "neg":
            return Interval(x.hi and neg(x.hi), x.lo and neg(x.lo))
        if node.op == "to_float":
            return Interval(x.lo and to_float(x.lo), x.hi and to_float(x.hi))
        if node.op == "mul":
            return _product(x, y)
        divisor = node.args[1]
        if not self.varying(divisor) and stored(divisor):
            if node.op == "floordiv":
                return _quotient(x, divisor)
            if node.op == "mod":
                return _remainder(x, divisor)
        return UNBOUNDED

    def _sum(self, node: Node) -> Interval:
        """Terms along the same single axis together (they may be monotone only as a sum), others one by one."""
        terms, constant = linear(node)
        groups: dict[object, dict[Node, int]] = {}
        for term, k in terms.items():
            varying = self.varying(term)
            groups.setdefault(varying[0] if len(varying) == 1 else term if varying else None, {})[term] = k
        lo: Node | None = Const(constant)
        hi: Node | None = Const(constant)
        for group in groups.values():
            if len(groups) == 1 or len(group) == 1:
                parts = [_scaled(self.interval(term), k) for term, k in group.items()]
            else:
                parts = [self.interval(from_linear(group, 0))]
            for part in parts:
                lo, hi = _both(add, lo, part.lo), _both(add, hi, part.hi)
        return Interval(lo, hi)

    def _choice(self, node: Map) -> Interval:
        condition, x, y = node.args
        truth, first, second = self.truth(condition), self.interval(x), self.interval(y)

        def choose(join: object, a: Node | None, b: Node | None) -> Node | None:
            if truth.may is truth.must and a is not None and b is not None:
                return where(truth.may, a, b)
            assert callable(join)
            both = _both(join, a, b)
            if a is None or b is None or both is None:
                return None
            return where(truth.must, a, where(truth.may, both, b))

        return Interval(choose(smaller, first.lo, second.lo), choose(larger, first.hi, second.hi))

    def _sorted_load(self, node: Load) -> Interval:
        """A sorted row between two bounds of its index."""
        *fixed, last = node.indices
        if not node.table.sorted or any(self.varying(i) for i in fixed) or not all(stored(i) for i in fixed):
            return UNBOUNDED
        i = self.interval(last)
        return Interval(
            i.lo and load(node.table, (*fixed, i.lo)),
            i.hi and load(node.table, (*fixed, i.hi)),
        )

    # ---------------------------------------------------------------------------------------------- conditions

    def truth(self, node: Node) -> Truth:
        """Whether a condition may hold at some element of this tile, and must hold at all."""
        known = self._truths.get(node)
        if known is None:
            known = self._truths[node] = self._truth(node)
        return known

    def _truth(self, node: Node) -> Truth:
        varying = self.varying(node)
        if not varying:
            return Truth(node, node) if stored(node) else UNKNOWN
        if summarised(node, self._axes):
            any_ = self.reads.summary("any", node, varying[0])
            return Truth(any_, self.reads.summary("all", node, varying[0]))
        if not isinstance(node, Map):
            return UNKNOWN
        if node.op == "not":
            inner = self.truth(node.args[0])
            return Truth(negation(inner.must), negation(inner.may))
        if node.op in ("and", "or"):
            join = conjunction if node.op == "and" else disjunction
            parts = [self.truth(arg) for arg in node.args]
            return Truth(join(*(part.may for part in parts)), join(*(part.must for part in parts)))
        if node.args[0].kind == "float":
            return self._order(node)
        difference = sub(*node.args)
        if node.op == "eq":
            return self._equal(difference)
        lo, hi = self.interval(difference)
        zero = Const(0)
        return Truth(
            TRUE if lo is None else not_above(lo, zero), FALSE if hi is None else not_above(hi, zero)
        )

    def _equal(self, difference: Node) -> Truth:
        """``difference == 0``."""
        lo, hi = self.interval(difference)
        zero = Const(0)
        must = FALSE
        if lo is not None and hi is not None:
            must = conjunction(not_above(zero, lo), not_above(hi, zero))
        may = self._residue(difference)
        if may is None:
            may = TRUE if lo is None else not_above(lo, zero)
            may = may if hi is None else conjunction(may, not_above(zero, hi))
        return Truth(may, must)

    def _residue(self, difference: Node) -> Node | None:
        """Whether ``x % c == r`` may hold: some number between the bounds of x leaves the remainder r."""
        terms, _ = linear(difference)
        for term, k in terms.items():
            if not (isinstance(term, Map) and term.op == "mod" and abs(k) == 1):
                continue
            x, c = term.args
            rest = sub(difference, from_linear({term: k}, 0))
            r = neg(rest) if k == 1 else rest
            if not self.varying(x) or self.varying(c) or self.varying(r) or FACTS.of(c)[0] < 0:
                continue
            lo, hi = self.interval(x)
            if lo is None or hi is None:
                continue
            last = add(mul(floordiv(sub(hi, r), c), c), r)
            return conjunction(not_above(Const(0), r), not_above(add(r, Const(1)), c), not_above(lo, last))
        return None

    def _order(self, node: Map) -> Truth:
        """A comparison of floating-point numbers: NaN is never skipped and never full."""
        x, y = (self.interval(arg) for arg in node.args)
        if x.lo is None or x.hi is None or y.lo is None or y.hi is None:
            return UNKNOWN
        if node.op == "le":
            return Truth(negation(lt(y.hi, x.lo)), le(x.hi, y.lo))
        if node.op == "lt":
            return Truth(negation(le(y.hi, x.lo)), lt(x.hi, y.lo))
        apart = disjunction(lt(y.hi, x.lo), lt(x.hi, y.lo))
        return Truth(negation(apart), conjunction(eq(x.lo, y.hi), eq(x.hi, y.lo)))


def summarised(node: Node, axes: frozenset[Axis]) -> bool:
    """Whether a condition is better summarised as a whole: it reads unsorted tables along one axis of ``axes``."""
    return (
        sum(axis in axes for axis in node.axes) == 1
        and exact(node)
        and any(not table.sorted or table.stored == "bool" for table in tables(node, axes))
    )


# ---------------------------------------------------------------------------------------- arithmetic of intervals


def _both(join: object, x: Node | None, y: Node | None) -> Node | None:
    assert callable(join)
    return None if x is None or y is None else join(x, y)


def _either(join: object, x: Node | None, y: Node | None) -> Node | None:
    assert callable(join)
    return x if y is None else y if x is None else join(x, y)


def _scaled(x: Interval, k: int) -> Interval:
    lo, hi = (None if bound is None else mul(bound, Const(k)) for bound in x)
    return Interval(lo, hi) if k > 0 else Interval(hi, lo)


def _absolute(x: Interval) -> Interval:
    if x.lo is None or x.hi is None:
        return UNBOUNDED
    if x.lo.kind == "float":
        low, high = maximum(x.lo, neg(x.hi)), maximum(x.hi, neg(x.lo))
        return Interval(maximum(low, Const(0.0)), high)
    return Interval(larger(larger(x.lo, neg(x.hi)), Const(0)), larger(x.hi, neg(x.lo)))


def _product(x: Interval, y: Interval) -> Interval:
    if x.lo is None or x.hi is None or y.lo is None or y.hi is None:
        return UNBOUNDED
    corners = dict.fromkeys(mul(a, b) for a in x for b in y if a is not None and b is not None)
    low, *rest = corners
    high = low
    for corner in rest:
        low, high = smaller(low, corner), larger(high, corner)
    return Interval(low, high)


def _quotient(x: Interval, y: Node) -> Interval:
    if x.lo is None or x.hi is None:
        return UNBOUNDED
    low, high = floordiv(x.lo, y), floordiv(x.hi, y)
    if FACTS.of(y)[0] >= 0:
        return Interval(low, high)
    return Interval(smaller(low, high), larger(low, high))


def _remainder(x: Interval, y: Node) -> Interval:
    """Between the remainders of the bounds if they lie in one period, else anything."""
    low, high = minimum(Const(0), add(y, Const(1))), maximum(Const(0), sub(y, Const(1)))
    if FACTS.of(y)[0] >= 0:
        low, high = Const(0), sub(y, Const(1))
    if x.lo is None or x.hi is None:
        return Interval(low, high)
    first, last = floordiv(x.lo, y), floordiv(x.hi, y)
    bounds = FACTS.of(first), FACTS.of(last)
    together = TRUE if bounds[0][0] == bounds[1][1] else eq(first, last)
    return Interval(where(together, remainder(x.lo, y), low), where(together, remainder(x.hi, y), high))


def remainder(x: Node, y: Node) -> Node:
    """``x % y``, without the division where x is known to lie in one period of a constant y."""
    if isinstance(y, Const):
        low, high = FACTS.of(floordiv(x, y))
        if low == high:
            return sub(x, Const(low * int(y.value)))
    return mod(x, y)
