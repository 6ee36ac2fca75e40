"""How an expression depends on row statistics, and where it vanishes.

`Separator` takes from an expression what is constant along the walk; `live` finds the conditions under which it is not
the identity of its sum or maximum. Both are structural and exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fagen.ir import graph as ir
from fagen.ir.graph import MINUS_INF, ONE, ZERO, Axis, Const, Map, Node

# --------------------------------------------------------------------------------------- factors (rules 1, 2)


@dataclass(frozen=True)
class Separated:
    """``expression = deferred * kept``; ``kept`` holds the factors ``exp(exponent)``, each constant along the walk.

    ``exponents`` pairs the name of the exponential (``exp`` or ``exp2``) with an exponent. They stay in ``kept``, where
    they keep its values in range, and say by what it is multiplied when the statistics in them change.
    """

    deferred: Node
    kept: Node
    exponents: tuple[tuple[str, Node], ...] = ()
    complete: bool = True
    """Whether nothing but those exponents still depends on the statistics."""


class Separator:
    """Separates expressions along ``walk`` by their dependence on the row values ``statistics``."""

    def __init__(self, walk: Axis, statistics: frozenset[Node]) -> None:
        self._walk = walk
        self._statistics = statistics

    def free(self, x: Node) -> bool:
        """Whether ``x`` depends on none of the statistics."""
        return not ir.depends(x, self._statistics)

    def factors(self, x: Node) -> Separated:
        """``x`` as a product; what does not separate is kept."""
        if self.free(x):
            return Separated(ONE, x)
        if self._walk not in x.axes:
            return Separated(x, ONE)
        found: Separated | None = None
        if isinstance(x, Map):
            rule = getattr(self, f"_{x.op}", None)
            found = rule(x, *x.args) if rule is not None else None
        return found or Separated(ONE, x, complete=False)

    def _mul(self, x: Map, a: Node, b: Node) -> Separated:
        fa, fb = self.factors(a), self.factors(b)
        return Separated(
            ir.mul(fa.deferred, fb.deferred),
            ir.mul(fa.kept, fb.kept),
            fa.exponents + fb.exponents,
            fa.complete and fb.complete,
        )

    def _quotient(self, x: Map, a: Node, b: Node) -> Separated:
        fa, fb = self.factors(a), self.factors(b)
        return Separated(
            ir.div(fa.deferred, fb.deferred),
            fa.kept if fb.kept is ONE else ir.rebuild(x, (fa.kept, fb.kept)),
            fa.exponents + tuple((base, ir.neg(u)) for base, u in fb.exponents),
            fa.complete and fb.complete,
        )

    _div = _quotient

    def _neg(self, x: Map, a: Node) -> Separated:
        return self._through(self.factors(a), ir.neg)

    def _where(self, x: Map, condition: Node, a: Node, b: Node) -> Separated | None:
        if not self.free(condition):
            return None
        return self._shared(a, b, lambda p, q: ir.where(condition, p, q))

    def _add(self, x: Map, a: Node, b: Node) -> Separated | None:
        return self._shared(a, b, ir.add)

    def _maximum(self, x: Map, a: Node, b: Node) -> Separated | None:
        return self._shared(a, b, ir.maximum, ordered=True)

    def _minimum(self, x: Map, a: Node, b: Node) -> Separated | None:
        return self._shared(a, b, ir.minimum, ordered=True)

    def _shared(
        self, a: Node, b: Node, op: Callable[[Node, Node], Node], ordered: bool = False
    ) -> Separated | None:
        """``op`` of two values that have the same factors; 0 has any."""
        fa, fb = self.factors(a), self.factors(b)
        if b is ZERO:
            fb = Separated(fa.deferred, ZERO, fa.exponents)
        if a is ZERO:
            fa = Separated(fb.deferred, ZERO, fb.exponents)
        if (
            fa.deferred is not fb.deferred
            or fa.exponents != fb.exponents
            or not (fa.complete and fb.complete)
        ):
            return None
        if ordered and not nonnegative(fa.deferred):
            return None
        return Separated(fa.deferred, op(fa.kept, fb.kept), fa.exponents)

    @staticmethod
    def _through(f: Separated, op: Callable[[Node], Node]) -> Separated:
        return Separated(f.deferred, op(f.kept), f.exponents, f.complete)

    def _exp(self, x: Map, a: Node) -> Separated | None:
        row, rest = self.summands(a)
        return Separated(ONE, x, ((x.op, row),)) if self.free(rest) else None

    _exp2 = _exp

    def _root(self, x: Map, a: Node) -> Separated | None:
        f = self.factors(a)
        if not nonnegative(f.deferred):
            return None
        power = Const(0.5 if x.op == "sqrt" else -0.5)
        exponents = tuple((base, ir.mul(u, power)) for base, u in f.exponents)
        return Separated(ir.function(x.op, f.deferred), ir.function(x.op, f.kept), exponents, f.complete)

    _sqrt = _rsqrt = _root

    def _abs(self, x: Map, a: Node) -> Separated:
        f = self.factors(a)
        return Separated(ir.function("abs", f.deferred), ir.function("abs", f.kept), f.exponents, f.complete)

    # ------------------------------------------------------------------------------------------- summands

    def summands(self, x: Node) -> tuple[Node, Node]:
        """``x`` as (constant along the walk, with all statistics that separate) + (the rest)."""
        if self.free(x):
            return ZERO, x
        if self._walk not in x.axes:
            return x, ZERO
        if isinstance(x, Map):
            if x.op == "add":
                rows, rests = zip(*(self.summands(arg) for arg in x.args), strict=True)
                return _sum(rows), _sum(rests)
            if x.op == "neg":
                row, rest = self.summands(x.args[0])
                return ir.neg(row), ir.neg(rest)
            if x.op == "mul":
                for a, b in (x.args, x.args[::-1]):
                    if self._walk not in a.axes and self.free(a):
                        row, rest = self.summands(b)
                        return ir.mul(a, row), ir.mul(a, rest)
            if x.op == "div" and self._walk not in x.args[1].axes and self.free(x.args[1]):
                row, rest = self.summands(x.args[0])
                return ir.div(row, x.args[1]), ir.div(rest, x.args[1])
            if x.op in ("log", "log2"):
                f = self.factors(x.args[0])
                if f.complete and not f.exponents and nonnegative(f.deferred):
                    return ir.function(x.op, f.deferred), ir.function(x.op, f.kept)
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


def _sum(terms: tuple[Node, ...]) -> Node:
    result: Node = ZERO
    for term in terms:
        result = ir.add(result, term)
    return result


def nonnegative(x: Node) -> bool:
    """Whether ``x`` is proven to be at least 0 (or NaN)."""
    if isinstance(x, Const):
        return x.value >= 0
    if isinstance(x, ir.Size | ir.Index):
        return True
    if isinstance(x, ir.Reduce):
        return nonnegative(x.x)
    if isinstance(x, ir.Contract):
        return nonnegative(x.x) and nonnegative(x.y)
    if isinstance(x, Map):
        if x.op in ("exp", "exp2", "sqrt", "rsqrt", "abs"):
            return True
        if x.op == "mul" and x.args[0] is x.args[1]:
            return True
        if x.op == "maximum":
            return any(nonnegative(arg) for arg in x.args)
        if x.op in ("add", "mul", "div", "quotient", "minimum", "finite", "to_float", "floor"):
            return all(nonnegative(arg) or arg.kind == "bool" for arg in x.args)
        if x.op == "where":
            return nonnegative(x.args[1]) and nonnegative(x.args[2])
    return False


def positive(x: Node) -> bool:
    """Whether ``x`` is proven to be above 0 (or NaN), the length of an axis being at least 1."""
    if isinstance(x, Const):
        return x.value > 0
    if isinstance(x, ir.Size):
        return True
    if isinstance(x, Map):
        if x.op in ("exp", "exp2"):
            return True
        if x.op in ("add", "mul", "div", "sqrt", "rsqrt", "to_float", "minimum"):
            return all(positive(arg) for arg in x.args)
        if x.op == "maximum":
            return any(positive(arg) for arg in x.args)
    return False


# -------------------------------------------------------------------------------------------- where it vanishes


def live(x: Node, identity: Const) -> tuple[tuple[Node, ...], Node]:
    """Conditions all of which must hold for ``x`` not to be ``identity`` (0 or -inf), and ``x`` where they hold.

    A condition is taken from the ``where`` in ``x`` and proved: with it False, ``x`` folds to the identity.
    """
    candidates: dict[Node, None] = {}
    for node in ir.walk([x]):
        if isinstance(node, Map) and node.op == "where":
            for condition in (node.args[0], ir.negation(node.args[0])):
                parts = (
                    condition.args if isinstance(condition, Map) and condition.op == "and" else (condition,)
                )
                candidates.update(dict.fromkeys(parts))
    guard = tuple(c for c in candidates if limits(_assume(x, c, False)) is identity)
    for condition in guard:
        x = _assume(x, condition, True)
    return guard, x


def _assume(x: Node, condition: Node, holds: bool) -> Node:
    return ir.substitute(x, {condition: Const(holds), ir.negation(condition): Const(not holds)})


def limits(x: Node) -> Node:
    """``x`` simplified by the arithmetic of infinities and zeros, other values taken to be finite."""
    done: dict[Node, Node] = {}
    for node in ir.walk([x]):
        args = tuple(done[arg] for arg in node.args)
        done[node] = _limit(node, args) if args else node
    return done[x]


def _limit(node: Node, args: tuple[Node, ...]) -> Node:
    infinities = [
        arg for arg in args if isinstance(arg, Const) and arg.kind == "float" and math.isinf(arg.value)
    ]
    op = node.op if isinstance(node, Map) else ""
    if op == "add" and infinities:
        return infinities[0] if len(set(infinities)) == 1 else node
    if op == "mul":
        if ZERO in args:
            return ZERO
        if infinities and all(arg in infinities or positive(arg) for arg in args):
            return infinities[0]
    if op in ("div", "quotient"):
        if args[0] is ZERO or args[1] in infinities:
            return ZERO
        if infinities and positive(args[1]):
            return args[0]
    if op in ("log", "log2") and args[0] is ZERO:
        return MINUS_INF
    if op == "finite" and infinities:
        return ZERO
    if op in ("maximum", "minimum") and infinities:
        wins = (infinities[0] is not MINUS_INF) == (op == "maximum")
        return infinities[0] if wins else next((arg for arg in args if arg not in infinities), infinities[0])
    return ir.rebuild(node, args)
