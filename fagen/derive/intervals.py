"""From a guard to the loop over tiles: which tiles to visit, and which of them need no test.

For a tile of the *own* axis, `ranges` gives a `RangePlan` that a kernel carries out like this::

    each Search of the plan:             found0 = lower_bound(table[fixed], value)
    each Range whose `when` holds:       its tiles, begin // BLOCK up to ceil(end / BLOCK), if begin < end
    sort these, join those that touch    (no tile is visited twice)
    for each tile:
        each Summary of the plan:        walk_min0 = array[tile]
        each Let of the plan, in order:  walk_lo0 = value (those of the own tile: before the loop)
        if not may: continue             (may is True where the ranges say it all)
        full = must and walk_first + BLOCK <= length of the walked axis
        test each element unless full

Every bound is a formula over ``own_first``, ``own_last`` (the last position of the tile that exists),
sizes, scalars and tables at the tile's ends: for ``kv <= q`` the range is ``0`` to
``min(own_last + 1, kv_len)``. No rule names an axis: the tiles of q for a tile of kv come from the same call
with the axes exchanged. All axes but these two are fixed.

How: the guard becomes a few clauses, each a conjunction of conditions. A condition is solved for the walked
position where that can be isolated (sums, ``//``, ``abs``, ``min``, ``max`` and sorted tables are undone one
after another); its bound is taken at that end of the own tile which makes it widest (`Tile.bound`). What
can't be solved is evaluated on each visited tile, on the part of it that the solved conditions leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import count
from typing import Literal

from fagen.derive.extent import (
    FACTS,
    OWN_FIRST,
    OWN_LAST,
    WALK_FIRST,
    WALK_LAST,
    Extent,
    Extents,
    bits,
    found,
)
from fagen.derive.terms import conjuncts
from fagen.derive.tile import Let, Reads, Search, Summary, Tile, larger, smaller, summarised
from fagen.ir.graph import (
    FALSE,
    TRUE,
    Axis,
    Const,
    Index,
    Input,
    Load,
    Map,
    Node,
    Size,
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
    lt,
    mod,
    mul,
    neg,
    negation,
    size,
    sub,
    substitute,
    walk,
    where,
)

__all__ = [
    "OWN_FIRST",
    "OWN_LAST",
    "WALK_FIRST",
    "WALK_LAST",
    "Let",
    "Range",
    "RangePlan",
    "RowPlace",
    "Search",
    "Summary",
    "bits",
    "last_visitor",
    "ranges",
    "row_places",
    "sought",
]

MOST_RANGES = 3
"""Ranges a kernel sorts and joins; of more, the last ones are replaced by their hull."""

_MOST_CLAUSES = 8
_MOST_SPLITS = 24


@dataclass(frozen=True)
class Range:
    """Positions ``begin`` to ``end`` (not included) of the walked axis, if ``when`` holds.

    All three are formulas over the own tile. 0 <= begin, end <= the length; empty if end <= begin.
    """

    begin: Node
    end: Node
    when: Node


@dataclass(frozen=True)
class RangePlan:
    """How a tile of ``own_axis`` walks along ``walk_axis`` under ``guard``; see the head of this module.

    A tile outside all ``ranges``, or one where ``may`` is False, holds no allowed pair. Where ``must`` is
    True all pairs of a tile below the lengths are allowed. ``may``, ``must`` and ``lets`` are formulas over
    both tiles, ``ranges`` and ``searches`` over the own one. ``needs_block_map`` says that nothing can be
    skipped while some condition was beyond these formulas: then the guard is better evaluated on every pair
    of tiles beforehand, one class a pair.
    """

    guard: Node
    own_axis: Axis
    walk_axis: Axis
    ranges: tuple[Range, ...]
    may: Node
    must: Node
    lets: tuple[Let, ...]
    searches: tuple[Search, ...]
    summaries: tuple[Summary, ...]
    needs_block_map: bool

    def limits(self, tables: Mapping[Node, Extent]) -> Mapping[Node, Extent]:
        """What `bits` should know of the symbols in these formulas, where ``tables`` hold so much."""
        limits = dict(tables)
        for summary in self.summaries:
            if summary.node.kind == "int":
                limits[summary.symbol] = Extents(limits).of(summary.node)
        for let in self.lets:
            limits[let.symbol] = Extents(limits).of(let.value)
        return limits


@lru_cache(maxsize=512)
def ranges(guard: Node, own_axis: Axis, walk_axis: Axis) -> RangePlan:
    """The ranges of ``walk_axis`` for a tile of ``own_axis`` in which ``guard`` may hold, and its tests."""
    reads = Reads({own_axis: "own", walk_axis: "walk"})
    pair = {own_axis: (OWN_FIRST, OWN_LAST), walk_axis: (WALK_FIRST, WALK_LAST)}
    split = _Splitter(frozenset(pair)).split(guard)
    clauses = [_derive(clause, own_axis, walk_axis, reads) for clause in _clauses(split, frozenset(pair))]
    clauses = [clause for clause in clauses if FALSE not in (clause.span.when, clause.may)]
    length = Size(walk_axis)
    spans, joined = _merge([clause.span for clause in clauses], length)
    blind = [clause.blind for clause in clauses if clause.everywhere]
    may: Node
    if blind or (joined and all(clause.may is TRUE for clause in clauses)):
        may = TRUE if clauses else FALSE
    elif joined and len(clauses) == 1:
        may = clauses[0].may
    else:
        known = _common([clause.span for clause in clauses])
        may = disjunction(*(conjunction(_touches(c.span, known, reads), c.may) for c in clauses))
    must = Tile(pair, reads).must(split)
    clipped = tuple(_clipped(span, length) for span in spans)
    return RangePlan(
        guard,
        own_axis,
        walk_axis,
        clipped,
        may,
        must,
        *reads.used([may, must, *(node for r in clipped for node in (r.begin, r.end, r.when))]),
        needs_block_map=bool(blind) and all(blind),
    )


def last_visitor(plan: RangePlan) -> Node | None:
    """The last own position, a formula over a walked tile, of the own tiles that visit it: all from any one
    of them up to that one do. None where it is not known, or where all begin at one place and end at others.

    An own tile visits the one where its range begins, and those from there to its end. Of two, the later one
    is to begin no earlier and to end no earlier: those that have begun by some walked tile are then the first
    ones, up to the one that is asked for, and those that have not ended the last ones. That is seen by
    solving both bounds of the range for the own position.
    """
    if len(plan.ranges) != 1 or plan.may is not TRUE or plan.needs_block_map or sought(plan).searches:
        return None
    (span,) = plan.ranges
    begin, end = (
        {part for part in walk([bound]) if isinstance(part, Symbol)} for bound in (span.begin, span.end)
    )
    if span.when is not TRUE or begin - {OWN_FIRST} or end - ({OWN_LAST} if begin else set()):
        return None
    own = Index(plan.own_axis)
    begun = _solved(le(substitute(span.begin, {OWN_FIRST: own}), WALK_LAST), own)
    going = _solved(lt(WALK_FIRST, substitute(span.end, {OWN_LAST: own})), own)
    if begun is None or going is None or not all(h.upper for h in begun) or any(h.upper for h in going):
        return None
    return _tighten((Const(0), sub(Size(plan.own_axis), Const(1))), begun)[1]


def _solved(condition: Node, position: Index) -> list[_Half] | None:
    """The positions at which an integer comparison holds, if at any; None where bounds don't say it all."""
    if position.axis not in condition.axes:
        return []
    tile = Tile({position.axis: (position, position)}, Reads({position.axis: "own"}))
    halves, exact = _solve(condition, position.axis, tile, False)
    return halves if exact else None


def sought(plan: RangePlan) -> RangePlan:
    """The same plan, where ``must`` reads no sorted table at the ends of a walked tile.

    Whether ``table[kv_last] <= value`` is whether kv_last lies before a place that is searched for once.
    """
    searches = {(s.table, s.fixed, s.value, s.side): s for s in plan.searches}
    symbols = {search.symbol for search in plan.searches}

    def place(table: Input, fixed: tuple[Node, ...], value: Node, side: Literal["left", "right"]) -> Symbol:
        key = (table, fixed, value, side)
        if key not in searches:
            symbol = next(each for each in map(found, count()) if each not in symbols)
            symbols.add(symbol)
            searches[key] = Search(symbol, *key)
        return searches[key].symbol

    def without_reads(condition: Node) -> Node:
        if not _is_compare(condition) or not isinstance(condition, Map) or condition.op != "le":
            return condition
        terms, constant = linear(sub(*condition.args))
        walked = [term for term in terms if _walks(term)]
        (read, *more) = walked or [condition]
        if more or not isinstance(read, Load) or not read.table.sorted or read.table.stored != "int":
            return condition
        k = terms.pop(read)
        *fixed, i = read.indices
        if abs(k) != 1 or any(map(_walks, fixed)) or FACTS.of(i)[0] < 0:
            return condition
        value = from_linear(terms, constant)  # k * read + value <= 0
        length = size(read.table.layout[-1])
        if k > 0:
            end = place(read.table, tuple(fixed), neg(value), "right")
            return disjunction(lt(i, end), eq(end, length))
        begin = place(read.table, tuple(fixed), value, "left")
        return conjunction(le(begin, i), lt(begin, length))

    must = conjunction(*map(without_reads, conjuncts(plan.must)))
    return replace(plan, must=must, searches=tuple(searches.values()))


@dataclass(frozen=True)
class RowPlace:
    """Columns of a row begin (or end: ``upper``) where a search for the row's own value does.

    That place lies between ``lowest`` and ``highest``, those of the tile. It is the length of the axis where
    the table ends first; ``inside`` says that it does not.
    """

    upper: bool
    search: Search
    lowest: Symbol
    highest: Symbol
    inside: bool


def row_places(condition: Node, plan: RangePlan) -> tuple[RowPlace, ...]:
    """A comparison of a sorted table's elements along the walked axis with a number of each row, as places;
    none where it is something else, or where ``plan`` searches for no ends of them."""
    if not isinstance(condition, Map) or not _is_compare(condition):
        return ()
    walked, own = Index(plan.walk_axis), Index(plan.own_axis)
    terms, constant = linear(sub(*condition.args))
    reads = [term for term in terms if plan.walk_axis in term.axes]
    if len(reads) != 1 or not isinstance(reads[0], (Input, Load)) or abs(terms[reads[0]]) != 1:
        return ()
    read = reads[0]
    k = terms.pop(read)
    table = read.table if isinstance(read, Load) else read
    *fixed, i = read.indices if isinstance(read, Load) else [index(axis) for axis in read.layout]
    moving = any({plan.walk_axis, plan.own_axis} & set(each.axes) for each in fixed)
    if not table.sorted or table.stored != "int" or i is not walked or moving:
        return ()
    rest = from_linear(terms, constant)  # k * read + rest <= 0, or == 0
    value = neg(rest) if k > 0 else rest
    tile = Tile({own.axis: (OWN_FIRST, OWN_LAST)}, Reads({own.axis: "own", walked.axis: "walk"}))
    ends = tile.bound(value, False), tile.bound(value, True)
    known = {(s.table, s.fixed, s.value, s.side): s.symbol for s in plan.searches}
    found_: list[RowPlace] = []
    for side in ("left", "right") if condition.op == "eq" else ("right",) if k > 0 else ("left",):
        places = [known.get((table, tuple(fixed), end, side)) for end in ends if end is not None]
        if len(places) < 2 or places[0] is None or places[1] is None:
            return ()
        search = Search(places[0], table, tuple(fixed), value, side)
        inside = table.layout[-1] == plan.walk_axis
        found_.append(RowPlace(side == "right", search, places[0], places[1], inside))
    return tuple(found_)


def _walks(node: Node) -> bool:
    """Whether a formula depends on the walked tile, or may."""
    return any(isinstance(part, Symbol) and part not in (OWN_FIRST, OWN_LAST) for part in walk([node]))


# -------------------------------------------------------------------------------------------------- spans


@dataclass(frozen=True)
class _Span:
    """A `Range` before it is clipped; None is unbounded."""

    begin: Node | None = None
    end: Node | None = None
    when: Node = TRUE


def _clipped(span: _Span, length: Node) -> Range:
    begin = Const(0) if span.begin is None else larger(span.begin, Const(0))
    return Range(begin, length if span.end is None else smaller(span.end, length), span.when)


def _common(spans: list[_Span]) -> _Span:
    """What every span says: it holds on every visited tile."""
    first, *others = spans
    return _Span(
        first.begin if all(span.begin is first.begin for span in others) else None,
        first.end if all(span.end is first.end for span in others) else None,
        first.when if all(span.when is first.when for span in others) else TRUE,
    )


def _touches(span: _Span, known: _Span, reads: Reads) -> Node:
    """Whether a visited tile has a position in ``span``, where it is known to have one in ``known``."""
    parts = [TRUE if span.when is known.when else span.when]
    if span.end is not known.end and span.end is not None:
        parts.append(lt(WALK_FIRST, reads.let("end", span.end)))
    if span.begin is not known.begin and span.begin is not None:
        parts.append(le(reads.let("begin", span.begin), WALK_LAST))
    return conjunction(*parts)


def _merge(spans: list[_Span], length: Node) -> tuple[tuple[_Span, ...], bool]:
    """At most `MOST_RANGES` spans over ``spans``, and whether they hold nothing else."""
    merged: list[_Span] = []
    for span in spans:
        for i, other in enumerate(merged):
            if (union := _union(other, span, length)) is not None:
                merged[i] = union
                break
        else:
            merged.append(span)
    if _Span() in merged:
        return (_Span(),), len(merged) == 1
    if len(merged) <= MOST_RANGES:
        return tuple(merged), True
    return (
        *merged[: MOST_RANGES - 1],
        reduce(lambda x, y: _hull(x, y, length), merged[MOST_RANGES - 1 :]),
    ), False


def _union(x: _Span, y: _Span, length: Node) -> _Span | None:
    """One span with exactly the positions of both, where that is seen at once."""
    if x.begin is y.begin and x.end is y.end:
        return replace(x, when=disjunction(x.when, y.when))
    if y.when is TRUE:
        x, y = y, x
    if x.when is not y.when and x.when is not TRUE:
        return None
    also = TRUE if x.when is y.when else y.when
    if x.begin is y.begin:
        return replace(x, end=_chosen(also, _reaching(larger, x.end, y.end), x.end, length))
    if x.end is y.end:
        return replace(x, begin=_chosen(also, _reaching(smaller, x.begin, y.begin), x.begin, Const(0)))
    return None


def _reaching(join: Callable[[Node, Node], Node], x: Node | None, y: Node | None) -> Node | None:
    return None if x is None or y is None else join(x, y)


def _chosen(condition: Node, x: Node | None, y: Node | None, unbounded: Node) -> Node | None:
    if x is y or condition is TRUE:
        return x
    return where(condition, unbounded if x is None else x, unbounded if y is None else y)


def _hull(x: _Span, y: _Span, length: Node) -> _Span:
    """One span with the positions of both and those between."""
    begins = [where(s.when, Const(0) if s.begin is None else s.begin, length) for s in (x, y)]
    ends = [where(s.when, length if s.end is None else s.end, Const(0)) for s in (x, y)]
    return _Span(smaller(*begins), larger(*ends), disjunction(x.when, y.when))


# -------------------------------------------------------------------------------------------- normal form


class _Splitter:
    """Brings a guard to conditions that can be solved: ``abs(x) <= r`` is ``x <= r and -x <= r``."""

    def __init__(self, axes: frozenset[Axis]) -> None:
        self._axes = axes
        self._left = _MOST_SPLITS

    def split(self, node: Node) -> Node:
        """An equal condition."""
        if not isinstance(node, Map) or not self._axes & set(node.axes) or summarised(node, self._axes):
            return node
        if node.op == "and":
            return conjunction(*(self.split(arg) for arg in node.args))
        if node.op == "or":
            return disjunction(*(self.split(arg) for arg in node.args))
        if node.op in ("le", "eq") and node.args[0].kind == "int":
            return self._compare(node)
        return node

    def _compare(self, node: Map) -> Node:
        difference = sub(*node.args)
        terms, constant = linear(difference)
        compare = le if node.op == "le" else eq
        for term, k in terms.items():
            if self._left == 0 or not isinstance(term, Map) or not self._axes & set(term.axes):
                continue
            if node.op == "eq" and term.op == "mod" and len(terms) == 1 and constant == 0:
                x, c = term.args
                if isinstance(x, Map) and x.op == "abs":  # multiples have no sign
                    return eq(mod(x.args[0], c), Const(0))
            cases = self._cases(term, k, node.op)
            if cases is None:
                continue
            self._left -= 1
            rest = sub(difference, from_linear({term: k}, 0))
            parts = [
                conjunction(
                    self.split(condition),
                    self.split(compare(add(rest, mul(Const(k), value)), Const(0))),
                )
                for condition, value in cases[1]
            ]
            return conjunction(*parts) if cases[0] == "and" else disjunction(*parts)
        return node

    def _cases(self, term: Map, k: int, op: str) -> tuple[str, list[tuple[Node, Node]]] | None:
        """``k * term <= r`` as all or any of the same with simpler terms, each under a condition."""
        if term.op == "where":
            condition, x, y = term.args
            return "or", [(condition, x), (negation(condition), y)]
        if term.op == "to_int":
            condition = term.args[0]
            return "or", [(condition, Const(1)), (negation(condition), Const(0))]
        if op == "eq":
            return None
        if term.op == "abs":
            x = term.args[0]
            return "and" if k > 0 else "or", [(TRUE, x), (TRUE, neg(x))]
        if term.op in ("minimum", "maximum") and self._axes <= set(term.axes):
            return "and" if (k > 0) == (term.op == "maximum") else "or", [(TRUE, x) for x in term.args]
        return None


def _clauses(node: Node, axes: frozenset[Axis]) -> list[tuple[Node, ...]]:
    """``node`` as alternatives, each a conjunction; what would make too many stays as it is."""
    if node is TRUE or node is FALSE:
        return [()] if node is TRUE else []
    if not isinstance(node, Map) or node.op not in ("and", "or") or summarised(node, axes):
        return [(node,)]
    parts = [(arg, _clauses(arg, axes)) for arg in node.args]
    if node.op == "or":
        alternatives = [clause for _, clauses in parts for clause in clauses]
        return alternatives if len(alternatives) <= _MOST_CLAUSES else [(node,)]
    result: list[tuple[Node, ...]] = [()]
    for arg, clauses in sorted(parts, key=lambda part: len(part[1])):
        if len(result) * len(clauses) > _MOST_CLAUSES:
            clauses = [(arg,)]
        result = [(*clause, *more) for clause in result for more in clauses]
    return [tuple(dict.fromkeys(clause)) for clause in result]


# ------------------------------------------------------------------------------------------------ solving


@dataclass(frozen=True)
class _Half:
    """``position <= bound`` (upper) or ``>= bound``; nothing where ``free``, no position where ``dead``."""

    upper: bool
    bound: Node
    free: Node = FALSE
    dead: Node = FALSE


def _is_compare(node: Node) -> bool:
    return isinstance(node, Map) and node.op in ("le", "eq") and node.args[0].kind == "int"


def _solve(condition: Node, axis: Axis, tile: Tile, search: bool) -> tuple[list[_Half], bool]:
    """Where along ``axis`` an integer comparison may hold on ``tile``, and whether that says it all."""
    if not _is_compare(condition):
        return [], False
    difference = sub(*condition.args)
    sides = (
        [difference, neg(difference)] if isinstance(condition, Map) and condition.op == "eq" else [difference]
    )
    solved = [_at_most(side, axis, tile, search) for side in sides]
    return [half for halves in solved for half in halves or ()], None not in solved


def _at_most(form: Node, axis: Axis, tile: Tile, search: bool) -> list[_Half] | None:
    """``form <= 0`` solved for the position along ``axis``; None if it can't be isolated."""
    terms, constant = linear(form)
    targets = [term for term in terms if axis in term.axes]
    if len(targets) != 1:
        return None
    k = terms.pop(targets[0])
    rest = neg(from_linear(terms, constant))  # k * target <= rest
    bound = rest if abs(k) == 1 else floordiv(rest, Const(abs(k)))
    return _undo(targets[0], bound if k > 0 else neg(bound), k > 0, axis, tile, search)


def _undo(x: Node, bound: Node, upper: bool, axis: Axis, tile: Tile, search: bool) -> list[_Half] | None:
    """``x <= bound`` (upper) or ``x >= bound``, where x is no sum: its outermost operation is undone."""

    def compare(x: Node, bound: Node) -> list[_Half] | None:
        return _at_most(sub(x, bound) if upper else sub(bound, x), axis, tile, search)

    if isinstance(x, Index):
        widest = tile.bound(bound, upper)
        return None if widest is None else [_Half(upper, widest)]
    if isinstance(x, (Input, Load)):
        return _undo_read(x, bound, upper, axis, tile) if search else None
    if not isinstance(x, Map):
        return None
    if x.op == "abs" and upper:
        above = _at_most(sub(x.args[0], bound), axis, tile, search)
        below = _at_most(neg(add(x.args[0], bound)), axis, tile, search)
        return None if above is None or below is None else above + below
    if x.op in ("floordiv", "mul", "minimum", "maximum"):
        y, z = x.args
        if axis not in y.axes and x.op != "floordiv":
            y, z = z, y
        if axis in z.axes:
            return None
        if x.op in ("minimum", "maximum"):
            halves = compare(y, bound)
            other = tile.may(le(z, bound) if upper else le(bound, z))
            if (x.op == "minimum") == upper:  # either will do
                return halves and [_unless(half, free=other) for half in halves]
            return halves and [_unless(half, dead=negation(other)) for half in halves]
        if tile.varying(z):
            return None
        if x.op == "mul":
            widest = floordiv(bound, z) if upper else neg(floordiv(neg(bound), z))
        else:
            widest = add(mul(z, bound), sub(z, Const(1))) if upper else mul(z, bound)
        halves = compare(y, widest)
        positive = TRUE if FACTS.of(z)[0] >= 0 else lt(Const(0), z)
        return halves and [_unless(half, free=negation(positive)) for half in halves]
    return None


def _unless(half: _Half, free: Node = FALSE, dead: Node = FALSE) -> _Half:
    """``half`` where neither holds."""
    return replace(
        half,
        free=disjunction(half.free, free),
        dead=disjunction(conjunction(half.dead, negation(free)), dead),
    )


def _undo_read(x: Input | Load, bound: Node, upper: bool, axis: Axis, tile: Tile) -> list[_Half] | None:
    """``table[..., i] <= bound`` of a sorted table: i ends where a search for the bound does.

    A read outside the table is clamped into it: past an end, every i has the value of that end.
    """
    table, indices = (x.table, x.indices) if isinstance(x, Load) else (x, tuple(index(a) for a in x.layout))
    *fixed, i = indices
    if not table.sorted or table.stored != "int" or any(tile.varying(j) or axis in j.axes for j in fixed):
        return None
    value = tile.bound(bound, upper)
    if value is None or axis not in i.axes:
        return None
    found = tile.reads.search(table, tuple(fixed), value, "right" if upper else "left")
    inside = isinstance(i, Index) and table.layout[-1] == i.axis
    beyond = FALSE if inside else eq(found, size(table.layout[-1]))
    before = FALSE if FACTS.of(i)[0] >= 0 else eq(found, Const(0))
    limit = sub(found, Const(1)) if upper else found
    halves = _at_most(sub(i, limit) if upper else sub(limit, i), axis, tile, True)
    free, dead = (beyond, before) if upper else (before, beyond)
    return halves and [_unless(half, free, dead) for half in halves]


def _tighten(ends: tuple[Node, Node], halves: Iterable[_Half]) -> tuple[Node, Node]:
    """The part of first..last that ``halves`` leave."""
    first, last = ends
    for half in halves:
        if half.upper:
            last = smaller(last, where(half.free, last, half.bound))
        else:
            first = larger(first, where(half.free, first, half.bound))
    return first, last


# ------------------------------------------------------------------------------------------------ clauses


@dataclass(frozen=True)
class _Clause:
    """One alternative: its span, what is to be tested on a tile in it, whether a condition was beyond us."""

    span: _Span
    may: Node
    blind: bool

    @property
    def everywhere(self) -> bool:
        """Whether it can't skip anything."""
        return self.span == _Span() and self.may is TRUE


def _derive(conditions: tuple[Node, ...], own_axis: Axis, walk_axis: Axis, reads: Reads) -> _Clause:
    """Solve a conjunction for the walked axis."""
    alone = [c for c in conditions if walk_axis not in c.axes]
    single = [c for c in conditions if walk_axis in c.axes and own_axis not in c.axes]
    mixed = [c for c in conditions if walk_axis in c.axes and own_axis in c.axes]

    # What concerns the own tile alone: whether it takes part, and with which rows.
    own: tuple[Node, Node] = (OWN_FIRST, OWN_LAST)
    walked: tuple[Node, Node] = (Const(0), sub(Size(walk_axis), Const(1)))
    tile = Tile({own_axis: own, walk_axis: walked}, reads)
    when = conjunction(*(tile.may(condition) for condition in alone))
    own = _tighten(own, (half for c in alone for half in _solve(c, own_axis, tile, False)[0]))

    tile = Tile({own_axis: own, walk_axis: walked}, reads)
    halves = [half for c in single for half in _solve(c, walk_axis, tile, False)[0]]
    mixed = _unwrap(mixed, {own_axis: own, walk_axis: _tighten(walked, halves)})
    begin: Node | None = None
    end: Node | None = None
    rest: list[Node] = []
    for condition in single + mixed:
        halves, exact = _solve(condition, walk_axis, tile, True)
        for half in halves:
            if half.upper:
                bound = _chosen(half.free, None, add(half.bound, Const(1)), Size(walk_axis))
                end = bound if end is None or bound is None else smaller(end, bound)
            else:
                bound = _chosen(half.free, None, half.bound, Const(0))
                begin = bound if begin is None or bound is None else larger(begin, bound)
            when = conjunction(when, negation(half.dead))
        if not exact:
            rest.append(condition)
    span = _Span(begin, end, when)
    if not rest:
        return _Clause(span, TRUE, False)
    tests = _tests(rest, alone + single + mixed, span, own, own_axis, walk_axis, reads)
    return _Clause(span, conjunction(*tests), TRUE in tests)


def _tests(
    rest: list[Node],
    conditions: list[Node],
    span: _Span,
    own: tuple[Node, Node],
    own_axis: Axis,
    walk_axis: Axis,
    reads: Reads,
) -> list[Node]:
    """Whether ``rest`` may hold on a visited tile, on the part of it where the other conditions may."""
    pair = Tile({own_axis: own, walk_axis: (WALK_FIRST, WALK_LAST)}, reads)
    forms = [form for condition in conditions if condition not in rest for form in _forms(condition, pair)]
    axes = set[Axis]().union(*(_free_axes(condition, forms) for condition in rest))
    walked: tuple[Node, Node] = (WALK_FIRST, WALK_LAST)
    if walk_axis in axes or own_axis in axes:
        first, last = walked
        if span.begin is not None:
            first = larger(WALK_FIRST, reads.let("begin", span.begin))
        if span.end is not None:
            last = smaller(WALK_LAST, sub(reads.let("end", span.end), Const(1)))
        walked = reads.let("walk_lo", first), reads.let("walk_hi", last)
    if own_axis in axes:
        tile = Tile({own_axis: own, walk_axis: walked}, reads)
        first, last = _tighten(
            own, (half for c in conditions for half in _solve(c, own_axis, tile, False)[0])
        )
        own = reads.let("own_lo", first), reads.let("own_hi", last)
    tile = Tile({own_axis: own, walk_axis: walked}, reads, forms)
    return [tile.may(condition) for condition in rest]


def _forms(condition: Node, tile: Tile) -> list[tuple[Node, Node]]:
    """An integer comparison as bounds of a form in positions: ``q - kv <= w`` bounds ``q - kv``."""
    if not isinstance(condition, Map) or not _is_compare(condition):
        return []
    terms, constant = linear(sub(*condition.args))
    form = from_linear({term: k for term, k in terms.items() if tile.varying(term)}, 0)
    if len(tile.varying(form)) < 2:  # the positions say it
        return []
    bound = neg(from_linear({term: k for term, k in terms.items() if not tile.varying(term)}, constant))
    return [(form, bound), (neg(form), neg(bound))] if condition.op == "eq" else [(form, bound)]


def _free_axes(condition: Node, forms: list[tuple[Node, Node]]) -> set[Axis]:
    """The axes whose positions ``condition`` uses other than through forms that are bounded anyway."""
    known = {frozenset(linear(form)[0].items()) for form, _ in forms}
    known |= {frozenset(linear(neg(form))[0].items()) for form, _ in forms}
    axes: set[Axis] = set()
    stack = [condition]
    while stack:
        node = stack.pop()
        if node.kind == "int" and len(node.axes) > 1 and frozenset(linear(node)[0].items()) in known:
            continue
        if isinstance(node, (Index, Input)):
            axes |= set(node.axes)
        stack.extend(node.indices if isinstance(node, Load) else node.args)
    return axes


def _unwrap(conditions: list[Node], positions: Mapping[Axis, tuple[Node, Node]]) -> list[Node]:
    """``x % c`` is ``x - k * c``, and ``x // c`` is ``k``, where x is known to lie in period k."""
    limits: dict[Node, Extent] = {}
    for axis, (first, last) in positions.items():
        low, high = FACTS.of(first)[0], FACTS.of(last)[1]
        if low <= high:
            limits[Index(axis)] = low, high
    extents = Extents(limits)
    known: dict[Node, Node] = {}
    for node in walk(conditions):
        if isinstance(node, Map) and node.op in ("mod", "floordiv") and isinstance(node.args[1], Const):
            x, c = node.args[0], int(node.args[1].value)
            low, high = extents.of(x)
            if c and low // c == high // c:
                k = low // c
                known[node] = Const(k) if node.op == "floordiv" else sub(x, Const(k * c))
    moved = [substitute(condition, known) for condition in conditions] if known else conditions
    return [condition for condition in moved if condition is not TRUE]
