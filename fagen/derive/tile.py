"""What an expression can be on a tile, as formulas: bounds of numbers, whether a condition may and must hold.

A tile is a box of positions: for each of its axes the first and the last position, themselves formulas. All
other axes are fixed. An expression is then bounded by formulas that are evaluated once per tile:

- where it never falls (or never rises) along each axis, by its values at two corners: ``q - kv`` reaches from
  ``q_first - kv_last`` to ``q_last - kv_first``;
- else operation by operation (a modulo within one period, the larger of two, ...);
- where it reads a table along one axis, by a `Summary` of it over the tile;
- else not at all.

A condition *may* hold at some element and *must* hold at all; unknown is True and False. Floating-point
arithmetic is never bounded, since it rounds: only order is (comparisons, min, max, abs, where, conversions).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from fagen.derive.extent import FACTS, WALK_FIRST, WALK_LAST, found
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

    ``node`` has no other axis of the tile pair. ``min`` and ``max`` are NaN where an element is. An array of
    them, one a tile, costs one evaluation of ``node`` a position.
    """

    symbol: Symbol
    op: Literal["min", "max", "any", "all"]
    node: Node
    axis: Axis


@dataclass(frozen=True)
class Search:
    """``symbol`` = how many elements of the sorted row ``table[fixed]`` are below (right: not above) value.

    The row has as many elements as its axis, even where the tensor is broadcast along it.
    """

    symbol: Symbol
    table: Input
    fixed: tuple[Node, ...]
    value: Node
    side: Literal["left", "right"]


@dataclass(frozen=True)
class Let:
    """A name for a value used more than once: where a clause begins and ends, what it leaves of a tile.

    ``tile`` is ``walk`` if the value depends on the walked tile, else ``own``: computed before the loop.
    """

    symbol: Symbol
    value: Node
    tile: Literal["own", "walk"]


# ----------------------------------------------------------------------- formulas, folded where provable


def not_above(x: Node, y: Node) -> Node:
    """``x <= y`` of integers; True or False where that holds for every call."""
    low, high = FACTS.of_difference(x, y)
    return TRUE if high <= 0 else FALSE if low > 0 else le(x, y)


def larger(x: Node, y: Node) -> Node:
    """``max(x, y)``, of integers without what is never the larger."""
    if x.kind == "float":
        return maximum(x, y)
    low, high = FACTS.of_difference(x, y)
    if _absorbs("minimum", x, y):
        return x
    if _absorbs("minimum", y, x):
        return y
    return x if low >= 0 else y if high <= 0 else maximum(x, y)


def smaller(x: Node, y: Node) -> Node:
    """``min(x, y)``, of integers without what is never the smaller."""
    if x.kind == "float":
        return minimum(x, y)
    low, high = FACTS.of_difference(x, y)
    if _absorbs("maximum", x, y):
        return x
    if _absorbs("maximum", y, x):
        return y
    return y if low >= 0 else x if high <= 0 else minimum(x, y)


def _absorbs(op: str, x: Node, y: Node) -> bool:
    """Whether y is ``op`` of x and something: ``min(x, max(x, z))`` is x."""
    return isinstance(y, Map) and y.op == op and x in y.args


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


# ------------------------------------------------------------------------------------- what formulas read


@dataclass
class Reads:
    """What the formulas of one derivation stand on, each thing named once, in order of use."""

    roles: Mapping[Axis, Literal["own", "walk"]]
    """What each axis of the tile pair is."""
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
            self._searches[key] = Search(found(len(self._searches)), table, fixed, value, side)
        return self._searches[key].symbol

    def let(self, stem: str, value: Node) -> Node:
        """A name for ``value``, or the value where it is no longer than a name."""
        if value.size == 1:
            return value
        known = self._lets.get((stem, value))
        if known is None:
            place = sum(known_stem == stem for known_stem, _ in self._lets)
            symbol = Symbol(f"{stem}{place}", (), value.kind)
            known = self._lets[stem, value] = Let(symbol, value, "walk" if self._walks(value) else "own")
        return known.symbol

    def _walks(self, value: Node) -> bool:
        """Whether ``value`` depends on the walked tile."""
        walked = {WALK_FIRST, WALK_LAST}
        walked |= {let.symbol for let in self._lets.values() if let.tile == "walk"}
        walked |= {s.symbol for s in self._summaries.values() if self.roles[s.axis] == "walk"}
        return any(part in walked for part in walk([value]))

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
            self._forms[key] = smaller(self._forms[key], bound) if key in self._forms else bound
        self._bounds: dict[tuple[Node, bool], Node | None] = {}
        self._held: dict[tuple[Node, bool], Node] = {}

    def varying(self, node: Node) -> list[Axis]:
        """The axes of the tile along which ``node`` varies."""
        return [axis for axis in node.axes if axis in self._axes]

    # ---------------------------------------------------------------------------------------- numbers

    def bound(self, node: Node, upper: bool) -> Node | None:
        """What a number is at most (``upper``) or at least on this tile; None is unbounded."""
        if (node, upper) not in self._bounds:
            self._bounds[node, upper] = self._bound(node, upper)
        return self._bounds[node, upper]

    def _ends(self, node: Node) -> tuple[Node, Node] | None:
        """Both bounds, or None."""
        lo, hi = self.bound(node, False), self.bound(node, True)
        return None if lo is None or hi is None else (lo, hi)

    def _bound(self, node: Node, upper: bool) -> Node | None:
        varying = self.varying(node)
        if not varying:
            return node if stored(node) else None
        bound = self._corner(node, varying, upper)
        if bound is None:
            if len(varying) == 1 and _is_term(node) and exact(node) and tables(node, self._axes):
                return self.reads.summary("max" if upper else "min", node, varying[0])
            bound = self._by_operation(node, upper)
        return self._narrowed(node, bound, upper) if self._forms and node.kind == "int" else bound

    def _corner(self, node: Node, varying: list[Axis], upper: bool) -> Node | None:
        """The value at the extreme corner, where ``node`` is monotone along each axis."""
        corner: dict[Axis, Node] = {}
        for axis in varying:
            step = FACTS.step(node, axis)
            if step is None or step[0] < 0 < step[1]:
                return None
            corner[axis] = self.positions[axis][upper == (step[0] >= 0)]
        return at(node, corner)

    def _narrowed(self, node: Node, bound: Node | None, upper: bool) -> Node | None:
        """``bound`` within what is known of this form."""
        terms, constant = linear(node)
        sign = 1 if upper else -1
        known = self._forms.get(frozenset((term, sign * k) for term, k in terms.items()))
        if known is None:
            return bound
        if upper:
            return _either(smaller, add(known, Const(constant)), bound)
        return _either(larger, sub(Const(constant), known), bound)

    def _by_operation(self, node: Node, upper: bool) -> Node | None:
        if isinstance(node, Load):
            return self._sorted_load(node, upper)
        if not isinstance(node, Map):
            return None
        if node.op == "add" and node.kind == "int":
            return self._sum(node, upper)
        if node.op == "to_int":
            return to_int(self.may(node.args[0]) if upper else self.must(node.args[0]))
        if node.op == "where":
            return self._choice(node, upper)
        if node.kind == "float" and node.op not in _ORDER:
            return None
        x, y = node.args[0], node.args[-1]
        if node.op in ("minimum", "maximum"):
            choose, join = (smaller, _either) if node.op == "minimum" else (larger, _both)
            if not upper:
                join = _both if join is _either else _either
            return join(choose, self.bound(x, upper), self.bound(y, upper))
        if node.op in ("neg", "to_float"):
            inner = self.bound(x, upper == (node.op == "to_float"))
            return inner and (neg if node.op == "neg" else to_float)(inner)
        if node.op == "mul" and isinstance(y, Const):
            inner = self.bound(x, upper == (y.value > 0))
            return inner and mul(inner, y)
        ends = self._ends(x)
        if node.op == "abs":
            return ends and _absolute(*ends, upper)
        choose = larger if upper else smaller
        if node.op == "mul":
            others = self._ends(y)
            if ends is None or others is None:
                return None
            first, *rest = dict.fromkeys(mul(a, b) for a in ends for b in others)
            for corner in rest:
                first = choose(first, corner)
            return first
        if self.varying(y) or not stored(y):
            return None
        if node.op == "mod":
            return _remainder(ends, y, upper)
        assert node.op == "floordiv", node.op
        if FACTS.of(y)[0] >= 0:
            inner = self.bound(x, upper)
            return inner and floordiv(inner, y)
        return ends and choose(floordiv(ends[0], y), floordiv(ends[1], y))

    def _sum(self, node: Node, upper: bool) -> Node | None:
        """Terms along one axis together, since only their sum may be monotone; others one by one."""
        terms, constant = linear(node)
        groups: dict[object, dict[Node, int]] = {}
        for term, k in terms.items():
            varying = self.varying(term)
            groups.setdefault(varying[0] if len(varying) == 1 else term if varying else None, {})[term] = k
        if len(groups) == 1:
            groups = {term: {term: k} for term, k in terms.items()}
        total: Node | None = Const(constant)
        for group in groups.values():
            total = _both(add, total, self.bound(from_linear(group, 0), upper))
        return total

    def _choice(self, node: Map, upper: bool) -> Node | None:
        condition, x, y = node.args
        first, second = self.bound(x, upper), self.bound(y, upper)
        if first is None or second is None:
            return None
        may, must = self.may(condition), self.must(condition)
        either = (larger if upper else smaller)(first, second)
        return (
            where(must, first, where(may, either, second)) if may is not must else where(may, first, second)
        )

    def _sorted_load(self, node: Load, upper: bool) -> Node | None:
        """A sorted row at a bound of its index."""
        *fixed, last = node.indices
        if not node.table.sorted or any(self.varying(i) or not stored(i) for i in fixed):
            return None
        i = self.bound(last, upper)
        return i and load(node.table, (*fixed, i))

    # ------------------------------------------------------------------------------------- conditions

    def may(self, condition: Node) -> Node:
        """Whether ``condition`` may hold at some element of this tile; True where that is not known."""
        return self._hold(condition, everywhere=False)

    def must(self, condition: Node) -> Node:
        """Whether ``condition`` holds at every element of this tile; False where that is not known."""
        return self._hold(condition, everywhere=True)

    def _hold(self, node: Node, everywhere: bool) -> Node:
        if (node, everywhere) not in self._held:
            self._held[node, everywhere] = self._holds(node, everywhere)
        return self._held[node, everywhere]

    def _holds(self, node: Node, everywhere: bool) -> Node:
        unknown = Const(not everywhere)
        varying = self.varying(node)
        if not varying:
            return node if stored(node) else unknown
        if summarised(node, self._axes):
            return self.reads.summary("all" if everywhere else "any", node, varying[0])
        if not isinstance(node, Map):
            return unknown
        if node.op == "not":
            return negation(self._hold(node.args[0], not everywhere))
        if node.op in ("and", "or"):
            join = conjunction if node.op == "and" else disjunction
            return join(*(self._hold(arg, everywhere) for arg in node.args))
        if node.args[0].kind == "float":
            return self._ordered(node, everywhere)
        difference = sub(*node.args)
        if node.op == "eq" and not everywhere:
            residue = self._residue(difference)
            if residue is not None:
                return residue
        zero = Const(0)
        bound = self.bound(difference, everywhere)
        below = unknown if bound is None else not_above(bound, zero)
        if node.op == "le":
            return below
        bound = self.bound(difference, not everywhere)
        return conjunction(below, unknown if bound is None else not_above(zero, bound))

    def _residue(self, difference: Node) -> Node | None:
        """Whether ``x % c == r`` may hold: some number between the bounds of x leaves the remainder r."""
        for term, k in linear(difference)[0].items():
            if not (isinstance(term, Map) and term.op == "mod" and abs(k) == 1):
                continue
            x, c = term.args
            rest = sub(difference, from_linear({term: k}, 0))
            r = neg(rest) if k == 1 else rest
            if not self.varying(x) or self.varying(c) or self.varying(r) or FACTS.of(c)[0] < 0:
                continue
            ends = self._ends(x)
            if ends is None:
                continue
            last = add(mul(floordiv(sub(ends[1], r), c), c), r)
            return conjunction(
                not_above(Const(0), r), not_above(add(r, Const(1)), c), not_above(ends[0], last)
            )
        return None

    def _ordered(self, node: Map, everywhere: bool) -> Node:
        """A comparison of floating-point numbers: a NaN is never skipped and never makes a tile full."""
        x, y = (self._ends(arg) for arg in node.args)
        if x is None or y is None:
            return Const(not everywhere)
        if node.op == "eq":
            if everywhere:
                return conjunction(eq(x[0], y[1]), eq(x[1], y[0]))
            return negation(disjunction(lt(y[1], x[0]), lt(x[1], y[0])))
        if everywhere:
            return (le if node.op == "le" else lt)(x[1], y[0])
        return negation((lt if node.op == "le" else le)(y[1], x[0]))


def _is_term(node: Node) -> bool:
    """Whether ``node`` is no sum with a constant and no multiple: what is summarised of a sum is its term."""
    if node.kind != "int":
        return True
    terms, constant = linear(node)
    return constant == 0 and (len(terms) > 1 or terms.get(node) == 1)


def summarised(node: Node, axes: frozenset[Axis]) -> bool:
    """Whether a condition is summarised as a whole: it reads unsorted tables along one axis of ``axes``."""
    return (
        sum(axis in axes for axis in node.axes) == 1
        and exact(node)
        and any(not table.sorted or table.stored == "bool" for table in tables(node, axes))
    )


# --------------------------------------------------------------------------------- arithmetic of bounds


def _both(join: Callable[[Node, Node], Node], x: Node | None, y: Node | None) -> Node | None:
    return None if x is None or y is None else join(x, y)


def _either(join: Callable[[Node, Node], Node], x: Node | None, y: Node | None) -> Node | None:
    return x if y is None else y if x is None else join(x, y)


def _absolute(lo: Node, hi: Node, upper: bool) -> Node:
    if upper:
        return larger(hi, neg(lo))
    return larger(larger(lo, neg(hi)), Const(0.0 if lo.kind == "float" else 0))


def _remainder(ends: tuple[Node, Node] | None, y: Node, upper: bool) -> Node:
    """The remainder of that end if both lie in one period, else anything."""
    positive = FACTS.of(y)[0] >= 0
    if upper:
        widest = sub(y, Const(1)) if positive else larger(Const(0), sub(y, Const(1)))
    else:
        widest = Const(0) if positive else smaller(Const(0), add(y, Const(1)))
    if ends is None:
        return widest
    first, last = (floordiv(end, y) for end in ends)
    (low, _), (_, high) = FACTS.of(first), FACTS.of(last)
    return where(TRUE if low == high else eq(first, last), remainder(ends[upper], y), widest)


def remainder(x: Node, y: Node) -> Node:
    """``x % y``, without the division where x is known to lie in one period of a constant y."""
    if isinstance(y, Const):
        low, high = FACTS.of(floordiv(x, y))
        if low == high:
            return sub(x, Const(low * int(y.value)))
    return mod(x, y)
