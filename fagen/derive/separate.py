"""How an expression depends on row statistics: what does not change along a walk is taken out.

Each step is an identity of real numbers that holds where a factor is 0 and where a row is empty, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from fagen.derive.signs import at_least_one, nonnegative, positive
from fagen.derive.vanish import assume, limits
from fagen.ir import graph as ir
from fagen.ir.graph import MINUS_INF, ONE, ZERO, Axis, Const, Contract, Map, Node, Reduce

Reduction: TypeAlias = Reduce | Contract

_EXPONENTIALS = ("exp", "exp2")
_LOGARITHMS = {"log": "exp", "log2": "exp2"}
_BOUNDED = ("tanh", "tanh_fast", "erf", "sin", "cos")
_INVERSES = {"exp": "log", "exp2": "log2"}


_LARGE = 2.0**40
"""A sum of terms times such a number may leave fp32 where the sum, divided, times it does not."""


def nearest(roots: Iterable[Node], through: Axis | None = None) -> list[Reduction]:
    """Reductions below ``roots`` with no other on the way, unless that is over the axis ``through``."""
    found: dict[Reduction, None] = {}
    seen: set[Node] = set()
    stack = list(roots)[::-1]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Reduction) and node.over != through:
            found[node] = None
            continue
        stack.extend(node.args[::-1])
    return list(found)


def reductions(x: Node) -> list[Reduction]:
    """Every reduction in ``x``, operands first."""
    return [node for node in ir.walk([x]) if isinstance(node, Reduction)]


# --------------------------------------------------------------------------------------- factors (rules 1, 2)

Linear: TypeAlias = dict[Node, float]
"""A sum: the coefficient of each term."""


@dataclass(frozen=True)
class Exponent:
    """The factor ``base(sum of coefficient * term)``, where ``base`` is ``exp`` or ``exp2``."""

    base: str
    terms: tuple[tuple[Node, float], ...]


@dataclass(frozen=True)
class Separated:
    """``expression = deferred * kept``; ``kept`` holds the factors of ``exponents``, which are a row's.

    The exponents stay where they are because they keep values in range; they say by what a sum is multiplied
    when the maxima in them change. Of a maximum, ``deferred * outer(added + kept)``.
    """

    deferred: Node
    kept: Node
    exponents: tuple[Exponent, ...] = ()
    complete: bool = True
    """Whether nothing but those exponents still depends on the statistics."""
    added: Node = ZERO
    outer: str = ""
    """``exp``, ``exp2`` or nothing."""


class Separator:
    """Separates expressions along ``walk`` by their dependence on the row values ``statistics``.

    ``computed`` are the nodes of the program: an exponential among them has the range that its user chose,
    any other would be a risk.
    """

    def __init__(self, walk: Axis, statistics: Iterable[Node], computed: frozenset[Node]) -> None:
        self._walk = walk
        self._statistics = frozenset(statistics)
        self._computed = computed
        self._free: dict[Node, bool] = {}
        self._factors: dict[Node, Separated] = {}
        self._summands: dict[Node, tuple[Node, Node]] = {}
        self._growing: dict[Node, bool] = {}
        self.out_of_range = False
        """Whether something was kept together because its parts might be out of range."""

    def free(self, x: Node) -> bool:
        """Whether ``x`` depends on none of the statistics."""
        known = self._free.get(x)
        if known is None:
            known = self._free[x] = x not in self._statistics and all(self.free(arg) for arg in x.args)
        return known

    def factors(self, x: Node) -> Separated:
        """``x`` as a product; what does not separate is kept."""
        known = self._factors.get(x)
        if known is None:
            known = self._factors[x] = self._separate(x)
        return known

    def _separate(self, x: Node) -> Separated:
        if isinstance(x, Const) and _LARGE <= abs(x.value) < math.inf:
            return Separated(x, ONE)
        if self.free(x):
            return Separated(ONE, x)
        if self._walk not in x.axes:
            return Separated(x, ONE)
        rule = getattr(self, f"_{x.op}", None) if isinstance(x, Map) else None
        found: Separated | None = rule(x, *x.args) if rule is not None else None
        return found or Separated(ONE, x, complete=False)

    def _mul(self, x: Map, a: Node, b: Node) -> Separated:
        fa, fb = self.factors(a), self.factors(b)
        defers = fa.deferred is not ONE or fb.deferred is not ONE
        if defers and self._grows(fa.kept) and self._grows(fb.kept):
            self.out_of_range = True
            return Separated(ONE, x, complete=False)
        return Separated(
            ir.mul(fa.deferred, fb.deferred),
            ir.mul(fa.kept, fb.kept),
            _joined(fa.exponents, fb.exponents),
            fa.complete and fb.complete,
        )

    def _quotient(self, x: Map, a: Node, b: Node) -> Separated:
        # Where x is 0 for a divisor of 0, so are its two parts: a product is 0 where one of them is.
        fa, fb = self.factors(a), self.factors(b)
        return Separated(
            fa.deferred if fb.deferred is ONE else ir.rebuild(x, (fa.deferred, fb.deferred)),
            fa.kept if fb.kept is ONE else ir.rebuild(x, (fa.kept, fb.kept)),
            _joined(fa.exponents, _scaled(fb.exponents, -1.0)),
            fa.complete and fb.complete,
        )

    _div = _quotient

    def _neg(self, x: Map, a: Node) -> Separated:
        f = self.factors(a)
        return replace(f, kept=ir.neg(f.kept))

    def _abs(self, x: Map, a: Node) -> Separated:
        f = self.factors(a)
        deferred, kept = (y if nonnegative(y) else ir.function("abs", y) for y in (f.deferred, f.kept))
        return replace(f, deferred=deferred, kept=kept)

    def _where(self, x: Map, condition: Node, a: Node, b: Node) -> Separated | None:
        if self.free(condition):
            a, b = self._assumed(a, condition, True), self._assumed(b, condition, False)
            return self._shared(a, b, lambda p, q: ir.where(condition, p, q))
        if self._walk in condition.axes:
            return None
        fa, fb = self.factors(a), self.factors(b)
        if b is ZERO:
            fb = replace(fa, deferred=ZERO)
        if a is ZERO:
            fa = replace(fb, deferred=ZERO)
        if fa.kept is not fb.kept or fa.exponents != fb.exponents:
            return None
        return replace(
            fa, deferred=ir.where(condition, fa.deferred, fb.deferred), complete=fa.complete and fb.complete
        )

    @staticmethod
    def _assumed(x: Node, condition: Node, holds: bool) -> Node:
        """``x`` where ``condition`` is known; statistics are of other elements, too."""
        x = assume(x, condition, holds, keep=nearest([x]))
        return ZERO if limits(x) is ZERO else x

    def _add(self, x: Map, a: Node, b: Node) -> Separated | None:
        fa, fb = self.factors(a), self.factors(b)
        if fa.kept is fb.kept and fa.exponents == fb.exponents and fa.complete and fb.complete:
            return replace(fa, deferred=ir.add(fa.deferred, fb.deferred))
        return self._shared(a, b, ir.add)

    def _maximum(self, x: Map, a: Node, b: Node) -> Separated | None:
        return self._shared(a, b, _larger, ordered=True)

    def _minimum(self, x: Map, a: Node, b: Node) -> Separated | None:
        return self._shared(a, b, ir.minimum, ordered=True)

    def _shared(
        self, a: Node, b: Node, op: Callable[[Node, Node], Node], ordered: bool = False
    ) -> Separated | None:
        """``op`` of two values that have the same factors; 0 has any."""
        fa, fb = self.factors(a), self.factors(b)
        if b is ZERO:
            fb = replace(fa, kept=ZERO)
        if a is ZERO:
            fa = replace(fb, kept=ZERO)
        if fa.deferred is not fb.deferred or fa.exponents != fb.exponents:
            return None
        if not (fa.complete and fb.complete) or (ordered and not nonnegative(fa.deferred)):
            return None
        return replace(fa, kept=op(fa.kept, fb.kept))

    def _sqrt(self, x: Map, a: Node) -> Separated | None:
        f = self.factors(a)
        if not nonnegative(f.deferred) or not (nonnegative(f.kept) or positive(f.deferred)):
            return None
        power = 0.5 if x.op == "sqrt" else -0.5
        return Separated(
            ir.function(x.op, f.deferred), ir.function(x.op, f.kept), _scaled(f.exponents, power), f.complete
        )

    _rsqrt = _sqrt

    def _exp(self, x: Map, a: Node) -> Separated | None:
        """Maxima stay as running values, other statistics leave as a factor."""
        row, rest = self.summands(a)
        if not self.free(rest):
            return None
        terms = self._terms(row)
        running = {term: k for term, k in terms.items() if self._runs(term)}
        settled = {term: k for term, k in terms.items() if term not in running}
        kept: Node = x
        if settled:
            kept = ir.function(x.op, ir.add(rest, _node(running)))
            if not running and not self._is_computed(x.op, rest):
                self.out_of_range = True
                return None
        exponents = (Exponent(x.op, _ordered(running)),) if running else ()
        return Separated(_power(x.op, settled), kept, exponents)

    _exp2 = _exp

    def _grows(self, x: Node) -> bool:
        """Whether ``x`` grows with an exponential that no maximum holds down: two may be out of range."""
        known = self._growing.get(x)
        if known is None:
            parts = x.args
            if isinstance(x, Reduction) or (isinstance(x, Map) and x.op in _BOUNDED):
                parts = ()
            elif isinstance(x, Map) and x.op in ("div", "quotient") and at_least_one(x.args[1]):
                parts = x.args[:1]
            if isinstance(x, Map) and x.op in _EXPONENTIALS:
                known = self.free(x) and self._walk in x.axes
            else:
                known = any(map(self._grows, parts))
            self._growing[x] = known
        return known

    def _runs(self, term: Node) -> bool:
        """Whether ``term`` of an exponent is a maximum; the logarithm of a sum is none."""
        return self._has_maximum(term) and not (isinstance(term, Map) and term.op in _LOGARITHMS)

    def _has_maximum(self, x: Node) -> bool:
        return any(isinstance(r, Reduce) and r.op == "max" and r in self._statistics for r in nearest([x]))

    def _is_computed(self, base: str, x: Node) -> bool:
        """Whether the program computes the exponential of ``x``, or a higher power of it."""
        exponents = (node.args[0] for node in self._computed if isinstance(node, Map) and node.op == base)
        return any(
            node is x
            or (
                isinstance(node, Map)
                and node.op == "mul"
                and node.args[0] is x
                and at_least_one(node.args[1])
            )
            for node in exponents
        )

    # ------------------------------------------------------------------------------------------- summands

    def summands(self, x: Node) -> tuple[Node, Node]:
        """``x`` as (constant along the walk, with all statistics that separate) + (the rest)."""
        known = self._summands.get(x)
        if known is None:
            known = self._summands[x] = self._split(x)
        return known

    def _split(self, x: Node) -> tuple[Node, Node]:
        if self.free(x):
            return ZERO, x
        if self._walk not in x.axes:
            return x, ZERO
        if not isinstance(x, Map):
            return ZERO, x
        if x.op == "add":
            rows, rests = zip(*(self.summands(arg) for arg in x.args), strict=True)
            return _sum(rows), _sum(rests)
        if x.op == "neg":
            row, rest = self.summands(x.args[0])
            return ir.neg(row), ir.neg(rest)
        if x.op in ("mul", "div", "quotient"):
            return self._split_multiple(x)
        if x.op in _LOGARITHMS:
            parts = self._logarithm(x, x.args[0])
            return (ZERO, x) if parts is None else self.summands(parts)
        if x.op == "where" and self.free(x.args[0]):
            (row_a, a), (row_b, b) = self.summands(x.args[1]), self.summands(x.args[2])
            if x.args[2] is MINUS_INF:
                row_b = row_a
            if x.args[1] is MINUS_INF:
                row_a = row_b
            if row_a is row_b:
                return row_a, ir.where(x.args[0], a, b)
        if x.op in ("maximum", "minimum"):
            (row_a, a), (row_b, b) = self.summands(x.args[0]), self.summands(x.args[1])
            if row_a is row_b:
                return row_a, ir.rebuild(x, (a, b))
        return ZERO, x

    def _split_multiple(self, x: Map) -> tuple[Node, Node]:
        """A multiple, by a factor or divisor that is constant along the walk and known."""
        for a, b in (x.args, x.args[::-1]) if x.op == "mul" else (x.args[::-1],):
            if self._walk not in a.axes and self.free(a):
                row, rest = self.summands(b)
                if x.op == "mul":
                    return ir.mul(a, row), ir.mul(a, rest)
                return ir.rebuild(x, (row, a)), ir.rebuild(x, (rest, a))
        return ZERO, x

    def _logarithm(self, log: Map, x: Node) -> Node | None:
        """``log(x)`` as a sum, if ``x`` is a product; None if it is none."""
        if self._walk not in x.axes or self.free(x):
            return log if x is log.args[0] else ir.function(log.op, x)
        if not isinstance(x, Map):
            return None
        if x.op == _LOGARITHMS[log.op]:
            return x.args[0]
        if x.op in ("mul", "div", "quotient") and all(map(nonnegative, x.args)):
            parts = [self._logarithm(log, arg) for arg in x.args]
            if parts[0] is None or parts[1] is None:
                return None
            return (ir.add if x.op == "mul" else ir.sub)(parts[0], parts[1])
        if x.op == "where" and self.free(x.args[0]):
            parts = [self._logarithm(log, arg) for arg in x.args[1:]]
            if parts[0] is None or parts[1] is None:
                return None
            return ir.where(x.args[0], parts[0], parts[1])
        return None

    def _terms(self, row: Node) -> Linear:
        """The terms of a row's summand; ``finite(m + log l)`` is two of them where l cannot be 0."""
        parts = linear(row)
        maxima = [term.args[0] for term in parts if isinstance(term, Map) and term.op == "finite"]
        terms: Linear = {}
        for term, k in parts.items():
            for part in self._parts_of_finite(term, maxima):
                terms[part] = terms.get(part, 0.0) + k
        return {term: k for term, k in terms.items() if k}

    def _parts_of_finite(self, x: Node, maxima: Iterable[Node]) -> tuple[Node, ...]:
        """``finite(m + log l)`` or, next to ``finite(m)``, ``finite(log l)``: l is not 0."""
        inner = x.args[0] if isinstance(x, Map) and x.op == "finite" else None
        if isinstance(inner, Map) and inner.op in _LOGARITHMS:
            (total,) = inner.args
            if positive(total) or any(self._holds_its_maximum(total, m) for m in maxima):
                return (inner,)
        if isinstance(inner, Map) and inner.op == "add":
            for m, log in (inner.args, inner.args[::-1]):
                if isinstance(log, Map) and log.op in _LOGARITHMS and self._has_maximum(m):
                    (total,) = log.args
                    if positive(total) or self._holds_its_maximum(total, m):
                        return ir.finite(m), log
        return (x,)

    def _holds_its_maximum(self, total: Node, m: Node) -> bool:
        """Whether ``total`` sums ``exp(s - m)`` where m is the maximum of s, and so is at least 1."""
        return (
            isinstance(total, Reduce)
            and isinstance(m, Reduce)
            and total.over == m.over
            and any(ir.function(base, ir.sub(m.x, m)) is total.x for base in _EXPONENTIALS)
        )


def linear(x: Node) -> Linear:
    """The terms of a floating-point sum with their coefficients; a factor that is no number stays in them."""
    if isinstance(x, Const):
        return {x: 1.0} if x.value else {}
    if isinstance(x, Map):
        if x.op == "add":
            terms: Linear = {}
            for arg in x.args:
                for term, k in linear(arg).items():
                    terms[term] = terms.get(term, 0.0) + k
            return terms
        if x.op == "neg":
            return {term: -k for term, k in linear(x.args[0]).items()}
        if x.op == "mul":
            inner = linear(x.args[0])
            if isinstance(x.args[1], Const):
                return {term: k * float(x.args[1].value) for term, k in inner.items()}
            if len(inner) == 1 and inner.get(x.args[0]) == 1.0:
                inner, factor = linear(x.args[1]), x.args[0]
            else:
                factor = x.args[1]
            return {ir.mul(factor, term): k for term, k in inner.items()}
        if x.op == "div" and isinstance(x.args[1], Const) and x.args[1].value:
            return {term: k / float(x.args[1].value) for term, k in linear(x.args[0]).items()}
    return {x: 1.0}


def _node(terms: Linear) -> Node:
    return _sum(_multiple(term, k) for term, k in terms.items())


def _multiple(x: Node, k: float) -> Node:
    return x if k == 1.0 else ir.neg(x) if k == -1.0 else ir.mul(Const(k), x)


def _sum(terms: Iterable[Node]) -> Node:
    result: Node = ZERO
    for term in terms:
        result = ir.add(result, term)
    return result


def _ordered(terms: Linear) -> tuple[tuple[Node, float], ...]:
    return tuple(sorted(terms.items(), key=lambda item: item[0].order))


def _larger(x: Node, y: Node) -> Node:
    if y is ZERO and nonnegative(x):
        return x
    return y if x is ZERO and nonnegative(y) else ir.maximum(x, y)


def _joined(*parts: tuple[Exponent, ...]) -> tuple[Exponent, ...]:
    """Factors multiplied: exponents of one base add up."""
    sums: dict[str, Linear] = {}
    for exponent in (exponent for part in parts for exponent in part):
        terms = sums.setdefault(exponent.base, {})
        for term, k in exponent.terms:
            terms[term] = terms.get(term, 0.0) + k
    return tuple(
        Exponent(base, _ordered({term: k for term, k in sums[base].items() if k}))
        for base in sorted(sums)
        if any(sums[base].values())
    )


def _scaled(exponents: tuple[Exponent, ...], power: float) -> tuple[Exponent, ...]:
    return tuple(Exponent(e.base, tuple((term, k * power) for term, k in e.terms)) for e in exponents)


def _power(base: str, terms: Linear) -> Node:
    """``base(sum of terms)`` as a product; ``exp(-log l)`` is ``1 / l``."""
    result: Node = ONE
    for term, k in _ordered(terms):
        if isinstance(term, Map) and term.op == _INVERSES[base] and abs(k) in (0.5, 1.0, 2.0):
            (value,) = term.args
            value = {0.5: ir.function("sqrt", value), 1.0: value, 2.0: ir.mul(value, value)}[abs(k)]
            result = ir.mul(result, value) if k > 0 else ir.div(result, value)
        else:
            result = ir.mul(result, ir.function(base, _multiple(term, k)))
    return result


def leave_maximum(x: Node, row_axes: Iterable[Axis]) -> tuple[Node, Callable[[Node], Node]]:
    """``x`` without the summands of a row and the positive numbers that leave a maximum, and their return.

    Exact in floating point, too: rounding does not change an order.
    """
    axes = set(row_axes)
    if not isinstance(x, Map) or x.op not in ("add", "mul", "div"):
        return x, lambda m: m
    pairs = [x.args, x.args[::-1]] if x.op == "add" else [x.args]
    for inner, outer in pairs:
        of_row = x.op == "add" and set(outer.axes) <= axes and not set(inner.axes) <= axes
        if of_row or (x.op != "add" and isinstance(outer, Const) and outer.value > 0):
            rest, back = leave_maximum(inner, axes)
            return rest, lambda m, outer=outer, back=back: ir.rebuild(x, (back(m), outer))
    return x, lambda m: m
