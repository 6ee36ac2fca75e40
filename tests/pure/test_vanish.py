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
        (ir.div(ir.mul(X, Const(math.inf)), ir.function("abs", S)), False),
    ],
)
def test_only_what_is_a_number_vanishes(x: Node, vanishes: bool) -> None:
    assert (limits(ir.substitute(x, {S: MINUS_INF})) is ZERO) == vanishes
