"""Rule *free reference*: which maxima may be any number, because no output changes when they are shifted.

Softmax measures exponents from a maximum only to keep them in range. If another number in its place
multiplies each state by a power of the same factor, and these powers leave every output, then the maximum
may be a running value, one that lags behind or a constant, and is itself a constant to the gradient.

The proof is an analysis of dimensions: a shift by d turns a value x into exp(p * d) * x + a * d, and (p, a)
follows from those of its operands. An output must have (0, 0).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fagen.derive.notes import listed
from fagen.derive.signs import nonnegative
from fagen.derive.walk import Stage, State
from fagen.ir import graph as ir
from fagen.ir.graph import MINUS_INF, ZERO, Axis, Const, Contract, Map, Node, Reduce, Symbol


@dataclass(frozen=True)
class Degree:
    """What a shift by d makes of a value: ``exp(power * d) * x + shift * d``; one of the two is 0."""

    power: float = 0.0
    shift: float = 0.0


INVARIANT = Degree()


@dataclass(frozen=True)
class Reference:
    """``maximum`` may be any number; ``proof`` says why in a sentence.

    It enters as ``point``, in whose place ``shifted`` stood in the proof. A point that is d larger multiplies
    each of the ``powers`` by ``exp(power * d)``.
    """

    maximum: Node
    point: Node
    shifted: Symbol
    proof: str
    powers: tuple[tuple[Symbol, float], ...] = ()


class _NotHomogeneous(Exception):
    """A shift makes something else of a value."""


def free_references(stage: Stage) -> tuple[Reference, ...]:
    """The maxima of ``stage`` that no output depends on, among those that states are measured from."""
    states = [state for walk in stage.walks for state in walk.states]
    found = (_proved(stage, states, state.symbol) for state in states if state.op == "max")
    return tuple(reference for reference in found if reference is not None)


def _proved(stage: Stage, states: list[State], maximum: Symbol) -> Reference | None:
    others = [state for state in states if state.symbol is not maximum]
    outputs = [*stage.outputs, *(output for walk in stage.walks for output in walk.stores)]
    roots = [*(state.value for state in others), *(output.node for output in outputs)]
    roots = _with_others_fixed(roots, maximum)
    point = _reference_point(roots, maximum)
    if point is None:
        return None
    shifted = Symbol("shifted", point.axes, "float")
    roots = [ir.substitute(root, {point: shifted}) for root in roots]
    if any(ir.depends(root, [maximum]) for root in roots):
        return None
    degrees = _Degrees({shifted: Degree(shift=1.0)})
    try:
        for state, value in zip(others, roots, strict=False):
            degrees.known[state.symbol] = degrees.of(value) or INVARIANT
        if any(degrees.of(root) not in (INVARIANT, None) for root in roots[len(others) :]):
            return None
    except _NotHomogeneous:
        return None
    powers = tuple((state.symbol, (degrees.of(state.symbol) or INVARIANT).power) for state in others)
    said = _sentence(maximum, point, {symbol.name: power for symbol, power in powers})
    return Reference(maximum, point, shifted, said, powers)


def _with_others_fixed(roots: list[Node], maximum: Symbol) -> list[Node]:
    """``roots`` with a number for each other point that has ``maximum`` in it and alone may be any number."""
    for number, point in enumerate(_reference_points(roots, maximum)):
        if point is not maximum:
            level = Symbol(f"level{number}", point.axes, "float")
            moved = [ir.substitute(root, {point: level}) for root in roots]
            if any(ir.depends(root, [maximum]) for root in moved) and unchanged_by(level, moved):
                roots = moved
    return roots


def free_maxima(outputs: Iterable[Node]) -> tuple[Reference, ...]:
    """The maxima of a whole program that no output depends on: constants to its gradient."""
    roots = list(outputs)
    found = []
    for number, node in enumerate(ir.walk(roots)):
        if not (isinstance(node, Reduce) and node.op == "max"):
            continue
        for point in _reference_points(roots, node):
            shifted = Symbol(f"shifted{number}", point.axes, "float")
            moved = [ir.substitute(root, {point: shifted, ir.finite(point): shifted}) for root in roots]
            if not any(ir.depends(root, [node]) for root in moved) and unchanged_by(shifted, moved):
                name = Symbol("m", node.axes, "float")
                sentence = _sentence(name, ir.substitute(point, {node: name}), _powers(shifted, moved))
                found.append(Reference(node, point, shifted, sentence))
                break
    return tuple(found)


def unchanged_by(shifted: Symbol, values: Iterable[Node]) -> bool:
    """Whether no value changes when ``shifted`` does."""
    degrees = _Degrees({shifted: Degree(shift=1.0)})
    try:
        return all(degrees.of(value) in (INVARIANT, None) for value in values)
    except _NotHomogeneous:
        return False


def moved_by(level: Node, along: frozenset[Axis], values: Iterable[Node]) -> list[float] | None:
    """By how much each of ``values`` grows when ``level``, which changes ``along`` these axes, is 1 more.

    None where one changes in another way, or sums along such an axis: no one shift is that of all it sums.
    """
    roots = list(values)
    sums = [x for x in ir.walk(roots) if isinstance(x, Reduce | Contract) and x.over in along]
    if any(ir.depends(x, [level]) for x in sums):
        return None
    degrees = _Degrees({level: Degree(shift=1.0)})
    try:
        found = [degrees.of(value) or INVARIANT for value in roots]
    except _NotHomogeneous:
        return None
    return None if any(degree.power for degree in found) else [degree.shift for degree in found]


def shift_power(reference: Reference, total: Node) -> float | None:
    """The p of a ``total`` that ``reference`` multiplies by ``exp(p * d)`` when it moves; None for others."""
    moved = ir.substitute(
        total, {reference.point: reference.shifted, ir.finite(reference.point): reference.shifted}
    )
    try:
        degree = _Degrees({reference.shifted: Degree(shift=1.0)}).of(moved)
    except _NotHomogeneous:
        return None
    return degree.power if degree is not None and degree.power and nonnegative(total) else None


def _powers(shifted: Symbol, roots: Iterable[Node]) -> dict[str, float]:
    """The sums below ``roots`` that ``shifted`` changes, each with its power."""
    degrees, found = _Degrees({shifted: Degree(shift=1.0)}), dict[str, float]()
    for node in ir.walk(roots):
        if isinstance(node, Reduce) and node.op == "sum" and ir.depends(node, [shifted]):
            found[f"l{len(found) or ''}"] = (degrees.of(node) or INVARIANT).power
    return found


def _reference_point(roots: list[Node], maximum: Node) -> Node | None:
    """The one expression through which ``maximum`` enters exponents: itself, or its larger with a sink."""
    points = _reference_points(roots, maximum)
    return points[0] if len(points) == 1 else None


def _reference_points(roots: list[Node], maximum: Node) -> list[Node]:
    """The expressions through which ``maximum`` enters exponents, smaller ones first."""
    points = {
        node.args[0]: None
        for node in ir.walk(roots)
        if isinstance(node, Map) and node.op == "finite" and ir.depends(node, [maximum])
    }
    return list(points)


def _sentence(maximum: Symbol, point: Node, powers: Mapping[str, float]) -> str:
    names: dict[float, list[str]] = {}
    for name, power in powers.items():
        if power:
            names.setdefault(power, []).append(name)
    changes = " and ".join(f"{listed(some)} by exp({_multiple(power)})" for power, some in names.items())
    where = "" if point is maximum else ", with what it is compared to,"
    return f"{maximum.name}{where} may be any number: d more multiplies {changes} and leaves every output"


def _multiple(power: float) -> str:
    sign = "-" if power < 0 else ""
    return f"{sign}d" if abs(power) == 1 else f"{sign}{abs(power):g} d"


class _Degrees:
    """The degree of each node, from those ``known``; None where any will do, as of -inf."""

    def __init__(self, known: dict[Node, Degree | None]) -> None:
        self.known = known

    def of(self, x: Node) -> Degree | None:
        """The degree of ``x``."""
        if x not in self.known:
            self.known[x] = self._of(x)
        return self.known[x]

    def _of(self, x: Node) -> Degree | None:
        if x is MINUS_INF:
            return None
        parts = [self.of(arg) for arg in x.args]
        if isinstance(x, Map) and x.op in ("add", "maximum", "minimum", "lt", "le", "eq", "where"):
            return self._joined(x, parts)
        if all(part in (INVARIANT, None) for part in parts):
            return INVARIANT
        first = parts[0] or INVARIANT
        if isinstance(x, Reduce) and (x.op == "max" or not first.shift):
            return first
        if isinstance(x, Contract) and not first.shift and not (parts[1] or INVARIANT).shift:
            return Degree(power=first.power + (parts[1] or INVARIANT).power)
        if not isinstance(x, Map):
            raise _NotHomogeneous
        if x.op in ("mul", "div", "quotient"):
            return self._multiplied(x, first, parts[1] or INVARIANT)
        if x.op in ("neg", "finite"):
            return Degree(first.power, -first.shift if x.op == "neg" else first.shift)
        unit = math.log(2.0) if x.op in ("exp2", "log2") else 1.0
        if x.op in ("exp", "exp2") and not first.power:
            return Degree(power=first.shift * unit)
        if x.op in ("log", "log2") and not first.shift:
            return Degree(shift=first.power / unit)
        if x.op in ("sqrt", "rsqrt", "abs") and not first.shift:
            return Degree(power=first.power * {"sqrt": 0.5, "rsqrt": -0.5, "abs": 1.0}[x.op])
        raise _NotHomogeneous

    @staticmethod
    def _multiplied(x: Map, a: Degree, b: Degree) -> Degree:
        if a.shift and isinstance(x.args[1], Const):
            k = float(x.args[1].value)
            return Degree(shift=a.shift * k if x.op == "mul" else a.shift / k)
        if a.shift or b.shift:
            raise _NotHomogeneous
        return Degree(power=a.power + b.power if x.op == "mul" else a.power - b.power)

    @staticmethod
    def _joined(x: Map, parts: list[Degree | None]) -> Degree | None:
        """Values that are compared or added must change alike; sums of shifts add up, and 0 has any power."""
        operands = list(zip(x.args, parts, strict=True))
        if x.op == "where":
            if parts[0] not in (None, INVARIANT):
                raise _NotHomogeneous
            operands = operands[1:]
        known = [part for arg, part in operands if part is not None and arg is not ZERO]
        if x.op == "add" and not any(part.power for part in known):
            return Degree(shift=sum(part.shift for part in known))
        shifted = any(part.shift for part in known)
        if shifted and any(arg is ZERO for arg, _ in operands):
            raise _NotHomogeneous
        if any(not _equal(part, known[0]) for part in known):
            raise _NotHomogeneous
        if x.kind == "bool":
            return INVARIANT
        return known[0] if known else INVARIANT


def _equal(a: Degree, b: Degree) -> bool:
    return math.isclose(a.power, b.power, abs_tol=1e-12) and math.isclose(a.shift, b.shift, abs_tol=1e-12)
