"""Where an expression vanishes: conditions without which it is the identity of its sum or maximum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from weakref import WeakKeyDictionary

from fagen.derive.signs import positive
from fagen.ir import graph as ir
from fagen.ir.graph import FALSE, MINUS_INF, TRUE, ZERO, Const, Map, Node, Symbol


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


_BELOW, _ABOVE, _NAN = 1, 2, 4
_ANY = _BELOW | _ABOVE | _NAN
_strays: WeakKeyDictionary[Node, int] = WeakKeyDictionary()


def strays(x: Node) -> int:
    """Which of -inf, inf and NaN the constants in ``x``, and what a walk computes as 0, may make of it.

    0: it is a number. A product is 0 where a tile has no row or no column.
    """
    found = _strays.get(x)
    if found is None:
        if isinstance(x, Const) and x.kind == "float":
            infinite = (_ABOVE if x.value > 0 else _BELOW) if math.isinf(x.value) else 0
            found = _NAN if math.isnan(x.value) else infinite
        else:
            found = _strays_of(x, [strays(arg) for arg in x.args]) if isinstance(x, Map) else 0
        _strays[x] = found
    return found


def _strays_of(x: Map, of: Sequence[int]) -> int:
    """The same for the result of an operation on operands that may be ``of`` them."""
    if x.op in ("div", "log", "log2", "rsqrt") and _may_be_0(x.args[-1]):
        return _ANY
    some = reduce(or_, of[1:] if x.op == "where" else of)
    infinite, nan = some & (_BELOW | _ABOVE), some & _NAN
    if not some or x.kind != "float":
        return 0
    if x.op in ("where", "maximum", "minimum"):
        return some
    if x.op == "add":
        return _ANY if infinite == _BELOW | _ABOVE else some
    if x.op == "neg":
        return nan | (_ABOVE if some & _BELOW else 0) | (_BELOW if some & _ABOVE else 0)
    if x.op == "abs":
        return nan | (_ABOVE if infinite else 0)
    if x.op in ("exp", "exp2", "finite"):
        return some & ~_BELOW
    if x.op in ("tanh", "tanh_fast", "erf"):
        return nan
    if x.op in ("mul", "div", "quotient"):
        x_of, y_of = of
        if (not y_of and positive(x.args[1])) or (x.op == "mul" and not x_of and positive(x.args[0])):
            return some
    return _ANY


def _may_be_0(x: Node) -> bool:
    """Whether ``x`` is 0 for some value of what a walk computes."""
    return not positive(x) and any(isinstance(node, Symbol) for node in ir.walk([x]))


def _limit(node: Node, args: tuple[Node, ...]) -> Node:
    op = node.op if isinstance(node, Map) else ""
    infinite = [
        arg for arg in args if isinstance(arg, Const) and arg.kind == "float" and math.isinf(arg.value)
    ]
    if op == "quotient" and args[1] is ZERO:
        return ZERO
    if op in ("mul", "div", "quotient") and args[0] is ZERO and not strays(args[1]):
        return ir.rebuild(node, args) if op == "div" and _may_be_0(args[1]) else ZERO
    if op == "mul" and args[1] is ZERO and not strays(args[0]):
        return ZERO
    if op in ("div", "quotient") and args[1] in infinite and not strays(args[0]):
        return ZERO
    if op == "quotient" and all(isinstance(arg, Const) for arg in args):
        return ir.div(*args)
    if op == "finite" and isinstance(args[0], Const):
        return ZERO if args[0] is MINUS_INF else args[0]
    if op in ("log", "log2") and args[0] is ZERO:
        return MINUS_INF
    others = [arg for arg in args if arg not in infinite]
    if infinite and op == "add" and not reduce(or_, map(strays, others), 0) & ~strays(infinite[0]):
        return infinite[0] if len(set(infinite)) == 1 else ir.rebuild(node, args)
    if infinite and not any(map(strays, others)):
        if op == "mul" and len(infinite) == 1 and all(map(positive, others)):
            return infinite[0]
        if op in ("div", "quotient") and args[1] in others and positive(args[1]):
            return infinite[0]
        if op in ("maximum", "minimum"):
            wins = (infinite[0] is not MINUS_INF) == (op == "maximum")
            return infinite[0] if wins else next(iter(others), infinite[0])
    return ir.rebuild(node, args)
