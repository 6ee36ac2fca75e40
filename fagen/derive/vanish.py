"""Where an expression vanishes: conditions without which it is the identity of its sum or maximum."""

from __future__ import annotations

import math
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from fagen.derive.signs import positive
from fagen.ir import graph as ir
from fagen.ir.graph import FALSE, MINUS_INF, TRUE, ZERO, Const, Map, Node


def live(x: Node, identity: Const) -> tuple[tuple[Node, ...], Node]:
    """Conditions all of which must hold for ``x`` not to be ``identity`` (0 or -inf), and ``x`` where they
    hold.

    A condition is taken from a ``where`` in ``x`` and proved: with it False, ``x`` folds to the identity.
    """
    candidates: dict[Node, None] = {}
    for node in ir.walk([x]):
        if isinstance(node, Map) and node.op == "where":
            for condition in (node.args[0], ir.negation(node.args[0])):
                candidates.update(dict.fromkeys(_conjuncts(condition)))
    guard = tuple(c for c in candidates if limits(assume(x, c, False)) is identity)
    for condition in guard:
        x = assume(x, condition, True)
    return guard, x


def _conjuncts(condition: Node) -> tuple[Node, ...]:
    return condition.args if isinstance(condition, Map) and condition.op == "and" else (condition,)


def assume(x: Node, condition: Node, holds: bool, keep: Iterable[Node] = ()) -> Node:
    """``x`` where ``condition`` is known to be ``holds``; ``keep`` are of other elements too, and stay."""
    known: dict[Node, Node] = {node: node for node in keep}
    known[condition] = TRUE if holds else FALSE
    known[ir.negation(condition)] = FALSE if holds else TRUE
    return ir.substitute(x, known)


def limits(x: Node) -> Node:
    """``x`` simplified by the arithmetic of infinities and zeros, other values taken to be finite."""
    done: dict[Node, Node] = {}
    for node in ir.walk([x]):
        args = tuple(done[arg] for arg in node.args)
        result = _limit(node, args) if args else node
        done[node] = (
            ZERO if isinstance(result, Const) and result.kind == "float" and result.value == 0 else result
        )
    return done[x]


_FINITE, _INFINITE, _NAN = range(3)
_BOUNDED = frozenset(("exp", "exp2", "tanh", "tanh_fast", "erf", "finite"))
"""What is finite where its operand is -inf, as that of a weight may be."""
_worst: WeakKeyDictionary[Node, int] = WeakKeyDictionary()


def _worst_of(x: Node) -> int:
    """The worst that the constants in ``x`` may make of it: infinite, or no number."""
    found = _worst.get(x)
    if found is None:
        if isinstance(x, Const):
            found = _NAN if x.value != x.value else _INFINITE if math.isinf(x.value) else _FINITE
        elif isinstance(x, Map) and x.kind == "float":
            operands = x.args[1:] if x.op == "where" else x.args
            found = max(map(_worst_of, operands))
            if x.op in _BOUNDED and found == _INFINITE:
                found = _FINITE
        else:
            found = _FINITE
        _worst[x] = found
    return found


def _limit(node: Node, args: tuple[Node, ...]) -> Node:
    op = node.op if isinstance(node, Map) else ""
    infinite = [
        arg for arg in args if isinstance(arg, Const) and arg.kind == "float" and math.isinf(arg.value)
    ]
    if op == "quotient" and args[1] is ZERO:
        return ZERO
    if op in ("mul", "div", "quotient") and args[0] is ZERO and _worst_of(args[1]) == _FINITE:
        return ZERO
    if op == "mul" and args[1] is ZERO and _worst_of(args[0]) == _FINITE:
        return ZERO
    if op in ("div", "quotient") and args[1] in infinite and _worst_of(args[0]) == _FINITE:
        return ZERO
    if op == "quotient" and all(isinstance(arg, Const) for arg in args):
        return ir.div(*args)
    if op == "finite" and isinstance(args[0], Const):
        return ZERO if args[0] is MINUS_INF else args[0]
    if op in ("log", "log2") and args[0] is ZERO:
        return MINUS_INF
    others = [arg for arg in args if arg not in infinite]
    if infinite and all(_worst_of(arg) == _FINITE for arg in others):
        if op == "add" and len(set(infinite)) == 1:
            return infinite[0]
        if op == "mul" and len(infinite) == 1 and all(map(positive, others)):
            return infinite[0]
        if op in ("div", "quotient") and args[1] in others and positive(args[1]):
            return infinite[0]
        if op in ("maximum", "minimum"):
            wins = (infinite[0] is not MINUS_INF) == (op == "maximum")
            return infinite[0] if wins else next(iter(others), infinite[0])
    return ir.rebuild(node, args)
