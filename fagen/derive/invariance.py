"""Rule *free reference*: which maxima may be any number, because no output changes when they are shifted.

Softmax measures exponents from a maximum only to keep them in range. If another number in its place
multiplies each state by a power of the same factor, and these powers leave every output, then the maximum
may be a running value, one that lags behind or a constant, and is itself a constant to the gradient.

The proof is an analysis of dimensions: a shift by d turns a value x into exp(p * d) * x + a * d, and (p, a)
follows from those of its operands. An output must have (0, 0).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fagen.derive.notes import listed
from fagen.derive.walk import Stage, State
from fagen.ir import graph as ir
from fagen.ir.graph import MINUS_INF, ZERO, Const, Map, Node, Symbol


@dataclass(frozen=True)
class Degree:
    """What a shift by d makes of a value: ``exp(power * d) * x + shift * d``; one of the two is 0."""

    power: float = 0.0
    shift: float = 0.0


INVARIANT = Degree()


@dataclass(frozen=True)
class Reference:
    """``maximum`` may be any number; ``proof`` says why in a sentence."""

    maximum: Symbol
    proof: str


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
    point = _reference_point(roots, maximum)
    if point is None:
        return None
    shifted = Symbol("shifted", point.axes, "float")
    roots = [ir.substitute(root, {point: shifted}) for root in roots]
    if any(ir.depends(root, [maximum]) for root in roots):
        return None
    degrees: dict[Node, Degree] = {shifted: Degree(shift=1.0)}
    try:
        for state, value in zip(others, roots, strict=False):
            degrees[state.symbol] = _known(_degree(value, degrees))
        if any(_known(_degree(root, degrees)) != INVARIANT for root in roots[len(others) :]):
            return None
    except _NotHomogeneous:
        return None
    return Reference(maximum, _sentence(maximum, point, others, degrees))


def _reference_point(roots: list[Node], maximum: Symbol) -> Node | None:
    """The one expression through which ``maximum`` enters exponents: itself, or its larger with a sink."""
    points = {
        node.args[0]: None
        for node in ir.walk(roots)
        if isinstance(node, Map) and node.op == "finite" and ir.depends(node, [maximum])
    }
    return next(iter(points)) if len(points) == 1 else None


def _sentence(maximum: Symbol, point: Node, states: list[State], degrees: Mapping[Node, Degree]) -> str:
    powers: dict[float, list[str]] = {}
    for state in states:
        if degrees[state.symbol].power:
            powers.setdefault(degrees[state.symbol].power, []).append(state.symbol.name)
    changes = " and ".join(f"{listed(names)} by exp({_multiple(power)})" for power, names in powers.items())
    where = "" if point is maximum else ", with what it is compared to,"
    return f"{maximum.name}{where} may be any number: d more multiplies {changes} and leaves every output"


def _multiple(power: float) -> str:
    sign = "-" if power < 0 else ""
    return f"{sign}d" if abs(power) == 1 else f"{sign}{abs(power):g} d"


def _known(degree: Degree | None) -> Degree:
    return INVARIANT if degree is None else degree


def _degree(x: Node, degrees: Mapping[Node, Degree]) -> Degree | None:
    """The degree of ``x``; None if it has any, as 0 and -inf do."""
    if x in degrees:
        return degrees[x]
    if x is ZERO or x is MINUS_INF:
        return None
    if not any(node in degrees for node in ir.walk([x])):
        return INVARIANT
    if not isinstance(x, Map):
        raise _NotHomogeneous
    parts = [_degree(arg, degrees) for arg in x.args]
    if x.op in ("mul", "div", "quotient"):
        return _multiplied(x, _known(parts[0]), _known(parts[1]))
    if x.op in ("add", "maximum", "minimum", "lt", "le", "eq", "where"):
        return _joined(x, parts)
    only = _known(parts[0])
    if x.op in ("neg", "finite"):
        return Degree(only.power, -only.shift if x.op == "neg" else only.shift)
    unit = math.log(2.0) if x.op in ("exp2", "log2") else 1.0
    if x.op in ("exp", "exp2") and not only.power:
        return Degree(power=only.shift * unit)
    if x.op in ("log", "log2") and not only.shift:
        return Degree(shift=only.power / unit)
    if x.op in ("sqrt", "rsqrt", "abs") and not only.shift:
        return Degree(power=only.power * {"sqrt": 0.5, "rsqrt": -0.5, "abs": 1.0}[x.op])
    if any(part not in (None, INVARIANT) for part in parts):
        raise _NotHomogeneous
    return INVARIANT


def _multiplied(x: Map, a: Degree, b: Degree) -> Degree:
    if a.shift and isinstance(x.args[1], Const):
        k = float(x.args[1].value)
        return Degree(shift=a.shift * k if x.op == "mul" else a.shift / k)
    if a.shift or b.shift:
        raise _NotHomogeneous
    return Degree(power=a.power + b.power if x.op == "mul" else a.power - b.power)


def _joined(x: Map, parts: list[Degree | None]) -> Degree | None:
    """Values that are compared or added must change alike; sums of shifts add up."""
    if x.op == "where":
        if parts[0] not in (None, INVARIANT):
            raise _NotHomogeneous
        parts = parts[1:]
    known = [part for part in parts if part is not None]
    if not known:
        return None
    if x.op == "add" and not any(part.power for part in known):
        return Degree(shift=sum(part.shift for part in known))
    first = known[0]
    if any(not _equal(part, first) for part in known):
        raise _NotHomogeneous
    return INVARIANT if x.kind == "bool" else first


def _equal(a: Degree, b: Degree) -> bool:
    return math.isclose(a.power, b.power, abs_tol=1e-12) and math.isclose(a.shift, b.shift, abs_tol=1e-12)
