"""What is proven to be 0 where a value is -inf."""

import math

import pytest

from fagen.derive.vanish import limits
from fagen.ir import graph as ir
from fagen.ir.graph import MINUS_INF, ZERO, Const, Node, Symbol

S, X = (Symbol(name, ("q", "kv"), "float") for name in "sx")
FLAG = ir.le(ir.index("q"), ir.index("kv"))
exp = ir.function("exp", S)


@pytest.mark.parametrize(
    ("x", "is_minus_inf"),
    [
        (ir.add(S, X), True),
        (ir.add(S, ir.where(FLAG, X, MINUS_INF)), True),
        (ir.mul(S, Const(2.0)), True),
        (ir.div(S, ir.function("exp", X)), True),
        (ir.maximum(S, ir.mul(S, Const(0.5))), True),
        (ir.div(S, ir.add(ir.function("abs", S), Const(1.0))), False),
        (ir.mod(S, Const(3.0)), False),
        (ir.maximum(S, X), False),
    ],
)
def test_what_is_masked_is_minus_infinity_alone(x: Node, is_minus_inf: bool) -> None:
    assert (limits(ir.substitute(x, {S: MINUS_INF})) is MINUS_INF) == is_minus_inf


@pytest.mark.parametrize(
    ("x", "vanishes"),
    [
        (ir.mul(exp, X), True),
        (ir.mul(ir.function("exp", ir.where(FLAG, S, MINUS_INF)), exp), True),
        (ir.mul(exp, ir.function("exp", ir.where(FLAG, X, MINUS_INF))), True),
        (ir.div(X, ir.add(ir.function("abs", S), Const(1.0))), True),
        (ir.mul(S, exp), False),  # 0 times -inf, as all below
        (ir.mul(ir.function("exp", ir.mul(S, exp)), exp), False),
        (ir.mul(exp, ir.where(FLAG, ir.mul(S, exp), X)), False),
        (ir.mul(exp, ir.where(FLAG, S, X)), False),
        (ir.mul(exp, ir.function("exp", ir.add(ir.div(S, ir.function("abs", S)), X))), False),
        (ir.div(exp, X), False),  # X is 0 where a tile has no column
        (ir.mul(exp, ir.div(Const(1.0), X)), False),
        (ir.div(ir.mul(X, Const(math.inf)), ir.function("abs", S)), False),
    ],
)
def test_only_what_is_a_number_vanishes(x: Node, vanishes: bool) -> None:
    assert (limits(ir.substitute(x, {S: MINUS_INF})) is ZERO) == vanishes
