"""Maxima that may be constants: only where every exponent stays small, and nothing else changes."""

import pytest

import fagen as fg
from fagen.derive.bounded import without_maxima
from fagen.derive.signs import Bounds, interval
from fagen.derive.streaming import derive
from fagen.derive.walk import Stage
from fagen.ir import graph as ir
from fagen.ir.graph import Const, Input, Node
from fagen.plan.plan import Problem
from fagen.plan.planner import plan
from plans import attention_graph, problem

X = Input("x", 0, ("q", "kv"), "float")
MOST = 40.0
INF = float("inf")


def of(op: str, *args: Node) -> Node:
    return ir.function(op, *args)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (X, None),
        (of("tanh", X), (-1, 1)),
        (ir.mul(Const(-3.0), of("tanh", X)), (-3, 3)),
        (ir.add(of("sin", X), Const(2.0)), (1, 3)),
        (of("abs", of("cos", X)), (0, 1)),
        (ir.maximum(of("tanh", X), Const(0.5)), (0.5, 1)),
        (ir.neg(of("exp", of("tanh", X))), (-2.7182818, -0.36787944)),
        (ir.div(Const(1.0), ir.add(Const(1.0), of("exp", X))), (0, 1)),
        (ir.div(Const(1.0), of("sin", X)), None),
        (ir.div(of("tanh", X), Const(-0.5)), (-2, 2)),
        (ir.mul(X, X), (0, INF)),
        (of("exp", X), (0, INF)),
        (of("exp2", ir.add(Const(3.0), of("tanh", X))), (4, 16)),
        (of("log", ir.add(Const(1.0), of("exp", X))), (0, INF)),
        (of("sqrt", ir.add(Const(4.0), of("abs", X))), (2, INF)),
        (of("rsqrt", ir.add(Const(4.0), of("abs", X))), (0, 0.5)),
        (of("finite", ir.add(Const(4.0), of("tanh", X))), (0, 5)),
        (ir.total(of("exp", X), "kv"), (0, INF)),
        (ir.largest(of("tanh", X), "kv"), (-INF, 1)),
        (ir.add(Const(INF), ir.neg(of("exp", X))), None),
        (ir.mul(of("tanh", X), X), None),
        (ir.where(ir.lt(X, Const(0.0)), of("tanh", X), Const(4.0)), (-1, 4)),
    ],
)
def test_intervals(node: Node, expected: tuple[float, float] | None) -> None:
    assert interval(node) == pytest.approx(expected or (-INF, INF))


def test_what_is_known_of_exponents_bounds_exponentials() -> None:
    power = of("exp", ir.sub(X, Const(2.0)))
    assert Bounds(lambda x: x is power.args[0]).of(ir.mul(power, Const(3.0))) == (0, 3)
    assert interval(ir.mul(power, Const(3.0))) == (0, INF)


def stage_of(**parts: object) -> Stage:
    (stage,) = derive(attention_graph(**parts)).stages
    return stage


@pytest.mark.parametrize(
    ("parts", "constant"),
    [
        ({"score": fg.softcap(30.0)}, True),
        ({"score": fg.softcap(30.0, exact=True)}, True),
        ({"score": fg.softcap(30.0), "return_lse": True, "dropout": 0.1}, True),
        ({"score": fg.softcap(50.0)}, False),
        ({"score": fg.softcap(fg.scalar(30.0))}, False),
        ({"score": [fg.softcap(8.0), fg.alibi()]}, False),
        ({"score": lambda s: 12.0 * fg.sin(s)}, True),
        ({"score": lambda s: 30.0 * fg.sigmoid(s)}, True),
        ({"score": lambda s: fg.exp(fg.sigmoid(s))}, True),
        ({"score": fg.exp}, False),
        ({}, False),
    ],
)
def test_a_bounded_score_has_no_maximum(parts: dict[str, object], constant: bool) -> None:
    stage = stage_of(**parts)
    changed, notes = without_maxima(stage, MOST)
    maxima = [state for walk in changed.walks for state in walk.states if state.op == "max"]
    assert (not maxima, bool(notes), changed is not stage) == (constant, constant, constant)
    if constant:
        assert all(state.rescale is None for walk in changed.walks for state in walk.states)


def test_weights_of_a_narrow_range_keep_it() -> None:
    def maxima(family: str, storage: str, cap: float) -> int:
        asked: Problem = problem(attention_graph(score=fg.softcap(cap)), storage=storage, family=family)
        return sum(s.op == "max" for walk in plan(asked).kernels[0].stage.walks for s in walk.states)

    assert [maxima("sm90", "bf16", 30.0), maxima("sm90", "fp16", 30.0), maxima("sm90", "fp16", 8.0)] == [
        0,
        1,
        0,
    ]
