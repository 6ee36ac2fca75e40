"""How far an integer expression can reach, in numbers: its range, its step along an axis, its width in bits.

Where `tile.py` bounds an expression by formulas, this module bounds it by constants that hold for every call:
lengths are at most `LENGTH`, scalars are 32-bit integers, and tables hold 64-bit ones unless limits say that
theirs are smaller. It proves what those formulas need (a term is never negative, a function never falls) and
says which integer operations must be done in 64 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias
from weakref import WeakKeyDictionary

from fagen.ir.graph import Axis, Const, Index, Input, Load, Map, Node, Random, Scalar, Size, Symbol, linear

Extent: TypeAlias = tuple[int, int]
"""The smallest and the largest value, both included."""

LENGTH = 2**29
"""No axis is longer: two positions and a constant can be added in 32 bits."""

WORD: Extent = (-(2**31), 2**31 - 1)
"""What a 32-bit integer can be."""

LONG: Extent = (-(2**63), 2**63 - 1)
"""What a 64-bit integer can be."""

OWN_FIRST, OWN_LAST, WALK_FIRST, WALK_LAST = (
    Symbol(name, (), "int") for name in ("own_first", "own_last", "walk_first", "walk_last")
)
"""First and last position of a tile along the owned and the walked axis, the last clipped to the length."""

_found: list[Symbol] = []


def found(place: int) -> Symbol:
    """The symbol of a search's result, a position from 0 to the length of a table's row."""
    while len(_found) <= place:
        _found.append(Symbol(f"found{len(_found)}", (), "int"))
    return _found[place]


_LAST: dict[Node, Node] = {OWN_FIRST: OWN_LAST, WALK_FIRST: WALK_LAST}
_FIRST: dict[Node, Node] = {last: first for first, last in _LAST.items()}


def _product(x: Extent, y: Extent) -> Extent:
    corners = [a * b for a in x for b in y]
    return min(corners), max(corners)


def _divisor(y: Extent) -> Extent:
    """Without 0, a division by which has no meaning anyway."""
    return (max(y[0], 1), max(y[1], 1)) if y[0] >= 0 else y


class Extents:
    """Extents of nodes and of their steps; ``limits`` says what is known of some nodes beyond their type."""

    def __init__(self, limits: Mapping[Node, Extent] | None = None) -> None:
        self.limits = dict(limits or {})
        self._known: WeakKeyDictionary[Node, Extent] = WeakKeyDictionary()
        self._steps: WeakKeyDictionary[Node, dict[Axis, Extent | None]] = WeakKeyDictionary()

    def of(self, node: Node) -> Extent:
        """The extent of an integer or bool ``node`` (a bool is 0 or 1)."""
        known = self._known.get(node)
        if known is None:
            known = self._known[node] = self.limits.get(node) or self._of(node)
        return known

    def _of(self, node: Node) -> Extent:
        if isinstance(node, Const):
            return int(node.value), int(node.value)
        if node.kind == "bool":
            return 0, 1
        if isinstance(node, Index) or node in (OWN_FIRST, OWN_LAST, WALK_FIRST, WALK_LAST):
            return 0, LENGTH - 1
        if isinstance(node, Size) or node in _found:
            return 0, LENGTH
        if isinstance(node, Random):
            return 0, 2**16 - 1
        if isinstance(node, Load):
            return self.of(node.table)
        if not isinstance(node, Map):
            return WORD if isinstance(node, Scalar) else LONG
        if node.op == "add":
            return self._form(*linear(node))
        if node.op == "where":
            (_, x, y) = (self.of(arg) for arg in node.args)
            return min(x[0], y[0]), max(x[1], y[1])
        x, y = self.of(node.args[0]), self.of(node.args[-1])
        if node.op == "minimum":
            return min(x[0], y[0]), min(x[1], y[1])
        if node.op == "maximum":
            return max(x[0], y[0]), max(x[1], y[1])
        if node.op == "mul":
            return _product(x, y)
        if node.op == "abs":
            return max(x[0], -x[1], 0), max(x[1], -x[0])
        if node.op == "floordiv":
            return self._quotient(x, _divisor(y))
        if node.op == "mod":
            return self._remainder(x, _divisor(y))
        assert node.op == "to_int", node.op
        return x

    def of_difference(self, x: Node, y: Node) -> Extent:
        """The extent of ``x - y``."""
        terms, constant = linear(x)
        terms = dict(terms)
        others, c = linear(y)
        for term, k in others.items():
            terms[term] = terms.get(term, 0) - k
        return self._form(terms, constant - c)

    def _form(self, terms: dict[Node, int], constant: int) -> Extent:
        """A linear form, with what ties its terms: ``first <= last`` and ``0 <= x - x // c * c < c``."""
        low, high = self._terms(terms, constant)
        for term, k in terms.items():
            if not (isinstance(term, Map) and term.op == "floordiv" and isinstance(term.args[1], Const)):
                continue
            c = int(term.args[1].value)
            if c <= 1 or k == 0 or k % c:
                continue
            m = k // c  # k * (x // c) = m * x - m * (x % c)
            inner, shift = linear(term.args[0])
            moved = {other: factor for other, factor in terms.items() if other is not term}
            for other, factor in inner.items():
                moved[other] = moved.get(other, 0) + m * factor
            x, y = self._form(moved, constant + m * shift)
            r, s = sorted((0, -m * (c - 1)))
            return max(low, x + r), min(high, y + s)
        return low, high

    def _terms(self, terms: Mapping[Node, int], constant: int) -> Extent:
        low = high = constant
        for first, last in _LAST.items():  # last = first + span
            span = terms.get(last, 0) if first in terms else 0
            low, high = low + min(0, span * (LENGTH - 1)), high + max(0, span * (LENGTH - 1))
        for term, k in terms.items():
            if term in _FIRST and _FIRST[term] in terms:
                continue
            if term in _LAST:
                k += terms.get(_LAST[term], 0)
            x, y = self.of(term)
            low, high = low + min(k * x, k * y), high + max(k * x, k * y)
        return low, high

    @staticmethod
    def _quotient(x: Extent, y: Extent) -> Extent:
        if y[0] <= 0 <= y[1]:
            reach = max(abs(x[0]), abs(x[1]))
            return -reach, reach
        corners = [a // b for a in x for b in y]
        return min(corners), max(corners)

    @staticmethod
    def _remainder(x: Extent, y: Extent) -> Extent:
        if y[0] == y[1] != 0 and x[0] // y[0] == x[1] // y[0]:
            return min(x[0] % y[0], x[1] % y[0]), max(x[0] % y[0], x[1] % y[0])
        if x[0] >= 0 and x[1] < y[0]:
            return x
        return min(0, y[0] + 1), max(0, y[1] - 1)

    def _span(self, table: Input) -> int:
        low, high = self.of(table)
        return high - low

    def step(self, node: Node, axis: Axis) -> Extent | None:
        """The extent of ``f(i + 1) - f(i)`` along ``axis``; None where nothing is known.

        Of a floating-point ``node`` only the sign means anything.
        """
        if axis not in node.axes:
            return 0, 0
        steps = self._steps.setdefault(node, {})
        if axis not in steps:
            steps[axis] = self._step(node, axis)
        return steps[axis]

    def _step(self, node: Node, axis: Axis) -> Extent | None:
        if isinstance(node, Index):
            return 1, 1
        if isinstance(node, Input):
            return (0, self._span(node)) if node.sorted and node.layout[-1] == axis else None
        if isinstance(node, Load):
            rising = self.step(node.indices[-1], axis)
            if not node.table.sorted or rising is None or any(axis in i.axes for i in node.indices[:-1]):
                return None
            span = self._span(node.table)
            return (0, span) if rising[0] >= 0 else (-span, 0) if rising[1] <= 0 else None
        if not isinstance(node, Map):
            return None
        steps = [self.step(arg, axis) for arg in node.args]
        if node.op == "where":
            return _hull(steps[1:]) if axis not in node.args[0].axes else None
        if node.op == "add" and node.kind == "int":
            known = [step for step in steps if step is not None]
            if len(known) < len(steps):
                return None
            return sum(low for low, _ in known), sum(high for _, high in known)
        if node.op in ("minimum", "maximum"):
            return _hull(steps)
        step = steps[0]
        if node.op == "mul" and node.kind == "int":
            other = steps[1]
            if step is None or other is None:
                return None
            x, y = _product(step, self.of(node.args[1])), _product(self.of(node.args[0]), other)
            return x[0] + y[0], x[1] + y[1]
        if step is None:
            return None
        if node.op == "to_float":
            return step if node.args[0].kind == "int" else None
        if node.op == "neg":
            return -step[1], -step[0]
        if node.op == "abs" and node.kind == "int":
            reach = max(-step[0], step[1])
            return step if self.of(node.args[0])[0] >= 0 else (-reach, reach)
        if node.op == "floordiv" and axis not in node.args[1].axes:
            y = _divisor(self.of(node.args[1]))
            if y[0] > 0:
                low = min(step[0] // y[0], step[0] // y[1])
                high = max(-(-step[1] // y[0]), -(-step[1] // y[1]))
                return low, high
        return None


def _hull(extents: list[Extent | None]) -> Extent | None:
    known = [extent for extent in extents if extent is not None]
    if len(known) < len(extents):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


FACTS = Extents()
"""Extents that hold for every call."""


def bits(node: Node, limits: Mapping[Node, Extent] | None = None) -> Literal[32, 64]:
    """The width in which the integer operation ``node`` is to be computed.

    ``limits`` gives closer extents of some nodes below (lengths of a class, the values of a table). An
    operand that needs 64 bits makes its operation 64 bits wide, whatever the result.
    """
    extents = Extents(limits) if limits else FACTS
    reached = [extents.of(part) for part in (node, *node.args) if part.kind == "int"]
    if isinstance(node, Map) and node.op == "add":
        parts = [extents.of(arg) for arg in node.args]
        reached.append((sum(min(low, 0) for low, _ in parts), sum(max(high, 0) for _, high in parts)))
    return 32 if all(WORD[0] <= low and high <= WORD[1] for low, high in reached) else 64
