"""The forward loop on the emulator: what a walk can hold, in every tiling, held to the reference.

What the language says at its edges is tested through the interface; here are programs and tiles that a user
would rarely meet.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen.ir.graph import (
    MINUS_INF,
    ONE,
    ZERO,
    Axis,
    Const,
    Graph,
    Input,
    Load,
    Node,
    Output,
    Random,
    Scalar,
    add,
    contract,
    div,
    eq,
    function,
    index,
    largest,
    le,
    maximum,
    mul,
    neg,
    size,
    sub,
    to_float,
    total,
    where,
)
from fagen.ir.reference import compare, eager, evaluate
from fagen.ir.show import join_heads
from fagen.plan import planner
from fagen.plan.plan import Plan
from fagen.run.emulate import Checker, Schedule
from tests.emitted import Run, problem_of

pytestmark = pytest.mark.cxx

LENGTHS = {"b": 2, "h": 4, "hk": 2, "q": 70, "kv": 83, "d": 24, "dv": 20, "r": 12, "e": 7}
INNER = ("d", "dv", "r", "e")

Q = Input("q", 0, ("b", "h", "q", "d"), "float")
K = Input("k", 1, ("b", "hk", "kv", "d"), "float")
V = Input("v", 2, ("b", "hk", "kv", "dv"), "float")


def softmax(s: Node, sink: Node | None = None, axis: Axis = "kv") -> tuple[Node, Node]:
    """The weights and the logarithm of their sum."""
    m = largest(s, axis) if sink is None else maximum(largest(s, axis), sink)
    e = function("exp", sub(s, m))
    denominator = total(e, axis)
    if sink is not None:
        denominator = add(denominator, function("exp", sub(sink, m)))
    return div(e, denominator), add(m, function("log", denominator))


def weigh(s: Node) -> Node:
    return contract(softmax(s)[0], V, "kv")


scores = mul(contract(Q, K, "d"), function("rsqrt", size("d")))
causal = where(le(index("kv"), index("q")), scores, MINUS_INF)
weights, lse = softmax(causal)
out = contract(weights, V, "kv")


def third(name: str, layout: str, stored: Any = "float") -> Input:
    return Input(name, 3, tuple(layout.split()), stored)


SINK, SLOPES, BIAS = third("sink", "h"), third("slopes", "h"), third("bias", "h q kv")
IDS, GATE, V2 = third("ids", "b kv", "int"), third("gate", "b h q dv"), third("v2", "b hk kv e")
Q2, K2 = third("q2", "b h q r"), Input("k2", 4, ("b", "kv", "r"), "float")
FACTOR, RELATIVE = third("factor", "d"), third("relative", "b hk q kv d")
TEMPERATURE, WIDTH = Scalar("temperature", 3, "float"), Scalar("width", 4, "int")
ROW_Q, ROW_K = Input("q", 0, ("d",), "float"), Input("k", 1, ("kv", "d"), "float")
ROW_V, EACH_K = Input("v", 2, ("kv", "dv"), "float"), Input("k", 1, ("q", "kv", "d"), "float")
ONE_Q = Input("q", 0, ("q", "d"), "float")


def two_statistics() -> Node:
    e = function("exp", causal)
    square = total(function("exp", mul(Const(2.0), causal)), "kv")
    return contract(div(e, function("sqrt", square)), V, "kv")


def decayed() -> Node:
    distance = to_float(function("abs", sub(index("q"), index("kv"))))
    return contract(mul(contract(Q, K, "d"), function("exp", mul(Const(-0.05), distance))), V, "kv")


def same_document() -> Node:
    return weigh(where(eq(Load(IDS, (index("b"), index("q"))), IDS), scores, MINUS_INF))


def base_two() -> Node:
    e = function("exp2", sub(causal, largest(causal, "kv")))
    return contract(div(e, total(e, "kv")), V, "kv")


def kept(rate: int) -> Node:
    return where(le(Const(rate), Random(0)), mul(weights, Const(1 / (1 - rate / 65536))), ZERO)


PROGRAMS: dict[str, tuple[Sequence[Node], Sequence[Input | Scalar]]] = {
    "softmax, statistics": ((out, lse), (Q, K, V)),
    "statistics alone": ((lse,), (Q, K)),
    "maximum alone": ((largest(causal, "kv"),), (Q, K)),
    "sink": (
        (contract(softmax(causal, SINK)[0], V, "kv"), softmax(causal, SINK)[1]),
        (Q, K, V, SINK),
    ),
    "relu by its sum": (
        (contract(div(maximum(causal, ZERO), total(maximum(causal, ZERO), "kv")), V, "kv"),),
        (Q, K, V),
    ),
    "sigmoid": ((contract(div(ONE, add(ONE, function("exp", neg(causal)))), V, "kv"),), (Q, K, V)),
    "two statistics": ((two_statistics(),), (Q, K, V)),
    "two walks": ((contract(maximum(sub(weights, Const(0.01)), ZERO), V, "kv"),), (Q, K, V)),
    "two walks, the second without a mask": (
        (contract(maximum(add(weights, Const(0.1)), ZERO), V, "kv"),),
        (Q, K, V),
    ),
    "dropout": ((contract(kept(20000), V, "kv"), lse), (Q, K, V)),
    "stored weights": ((weights, out), (Q, K, V)),
    "two values": ((out, contract(weights, V2, "kv")), (Q, K, V, V2)),
    "two masks": (
        (
            out,
            contract(softmax(where(le(index("kv"), Const(50)), scores, MINUS_INF))[0], V2, "kv"),
        ),
        (Q, K, V, V2),
    ),
    "two products in one score": (
        (weigh(mul(add(contract(Q, K, "d"), contract(Q2, K2, "r")), Const(0.2))),),
        (Q, K, V, Q2, K2),
    ),
    "operands computed on the way": (
        (
            contract(
                softmax(mul(contract(mul(Q, FACTOR), function("tanh", K), "d"), Const(0.3)))[0],
                mul(V, Const(2.0)),
                "kv",
            ),
        ),
        (Q, K, V, FACTOR),
    ),
    "bias": ((weigh(add(causal, BIAS)),), (Q, K, V, BIAS)),
    "slopes": (
        (weigh(add(causal, mul(SLOPES, to_float(sub(index("kv"), index("q")))))),),
        (Q, K, V, SLOPES),
    ),
    "documents": ((same_document(),), (Q, K, V, IDS)),
    "scalars": (
        (weigh(where(le(sub(index("q"), index("kv")), WIDTH), mul(scores, TEMPERATURE), MINUS_INF)),),
        (Q, K, V, TEMPERATURE, WIDTH),
    ),
    "cap": ((weigh(mul(function("tanh", div(scores, Const(3.0))), Const(3.0))),), (Q, K, V)),
    "base two": ((base_two(),), (Q, K, V)),
    "gate": ((mul(out, div(ONE, add(ONE, function("exp", neg(GATE))))),), (Q, K, V, GATE)),
    "decayed, linear": ((decayed(),), (Q, K, V)),
    "keys of each row": ((weigh(add(scores, contract(Q, RELATIVE, "d"))),), (Q, K, V, RELATIVE)),
    "one row a block": (
        (contract(softmax(contract(ONE_Q, EACH_K, "d"))[0], ROW_V, "kv"),),
        (ONE_Q, EACH_K, ROW_V),
    ),
    "one row in all": (
        (contract(softmax(contract(ROW_Q, ROW_K, "d"))[0], ROW_V, "kv"),),
        (ROW_Q, ROW_K, ROW_V),
    ),
}


def program(name: str) -> Graph:
    nodes, arguments = PROGRAMS[name]
    outputs = tuple(Output(node, f"out{i}", join_heads(node.axes)) for i, node in enumerate(nodes))
    return Graph("program", tuple(arguments), outputs)


def draw(graph: Graph, seed: int, **lengths: int) -> list[Any]:
    """Values of a program's arguments."""
    dice, known = torch.Generator().manual_seed(seed), {**LENGTHS, **lengths}
    values: list[Any] = []
    for argument in graph.arguments:
        if isinstance(argument, Scalar):
            values.append(0.3 if argument.stored == "float" else 11)
            continue
        shape = [known[axis] for axis in argument.layout]
        if argument.stored == "int":
            values.append(torch.randint(0, 4, shape, generator=dice, dtype=torch.int32))
        else:
            values.append(torch.randn(shape, generator=dice))
    return values


@dataclass(frozen=True)
class Tiling:
    """A block's rows, a tile's columns, columns of an operand at a time, threads."""

    own: int
    walk: int
    inner: int
    rows: int
    columns: int


def planned(graph: Graph, values: Sequence[Any], tiling: Tiling | None = None) -> Plan:
    """The plan of a call, with other tiles than the planner's where ``tiling`` gives them."""
    if tiling is None:
        return planner.plan(problem_of(graph, values, INNER))
    best = planner.rank

    def rank(profile: Any, *rest: Any) -> Any:
        ranked, misfits = best(profile, *rest)
        if profile.schedule != "forward_loop":
            return ranked, misfits
        tiles = replace(
            ranked[0].tiles,
            block_own=tiling.own,
            block_walk=tiling.walk,
            block_inner=tiling.inner,
            rows=tiling.rows,
            columns=tiling.columns,
        )
        return (replace(ranked[0], tiles=tiles),), misfits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "rank", rank)
        return planner.plan(problem_of(graph, values, INNER))


def require(
    run: Run, graph: Graph, values: Sequence[Any], label: str, seed: int = 5, **how: Any
) -> list[Tensor]:
    results = run(values, seed=seed, **how)
    exact = evaluate(graph, values, seed=seed)
    quick = eager(graph, values, torch.float32, seed=seed)
    for result, ref, near, output in zip(results, exact, quick, graph.outputs, strict=True):
        compare(result, ref, near).require(f"{label}, {output.name}")
    return results


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_program_is_right(name: str) -> None:
    graph = program(name)
    values = draw(graph, 1)
    plan = planned(graph, values)
    assert "forward_loop" in [kernel.schedule for kernel in plan.kernels]
    require(Run(plan), graph, values, name)


@pytest.mark.parametrize("name", ["softmax, statistics", "two walks", "two products in one score"])
@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(64, 32, 8, 16, 8),
        Tiling(32, 16, 16, 8, 4),
        Tiling(16, 64, 4, 4, 16),
        Tiling(8, 32, 12, 2, 32),
        Tiling(64, 8, 24, 32, 2),
    ],
    ids=str,
)
def test_every_tiling_is_right(name: str, tiling: Tiling) -> None:
    graph = program(name)
    values = draw(graph, 2)
    require(Run(planned(graph, values, tiling)), graph, values, f"{name} in {tiling}")


SHAPES = [(1, 1), (1, 300), (300, 1), (63, 65), (64, 64), (2, 7), (129, 40), (5, 0), (0, 5)]


@pytest.mark.parametrize(
    "name", ["softmax, statistics", "two walks, the second without a mask", "stored weights"]
)
def test_one_kernel_serves_every_length(name: str) -> None:
    graph = program(name)
    run = Run(planned(graph, draw(graph, 3), Tiling(64, 32, 24, 16, 8)))
    for q_len, kv_len in SHAPES:
        require(run, graph, draw(graph, 3, q=q_len, kv=kv_len), f"{name}, {q_len} x {kv_len}")


@pytest.mark.parametrize(("d", "dv"), [(1, 1), (63, 5), (40, 72), (72, 33)])
def test_head_dims_that_fill_no_vector(d: int, dv: int) -> None:
    graph = program("softmax, statistics")
    values = draw(graph, 4, d=d, dv=dv)
    require(Run(planned(graph, values)), graph, values, f"{d}, {dv}")


@pytest.mark.parametrize("schedule", ["forward", "backward", "random"])
@pytest.mark.parametrize("name", ["dropout", "two walks", "documents"])
def test_the_order_of_warps_changes_no_bit(name: str, schedule: Schedule) -> None:
    graph = program(name)
    values = draw(graph, 6)
    run = Run(planned(graph, values))
    dice = random.Random(f"{name} {schedule}").randrange(1000)
    first = require(run, graph, values, name)
    again = require(run, graph, values, f"{name}, {schedule} {dice}", schedule=schedule, dice=dice)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("checker", ["address", "race"])
@pytest.mark.parametrize("name", ["softmax, statistics", "two walks", "stored weights", "documents"])
def test_no_access_is_out_of_bounds_and_none_races(name: str, checker: Checker) -> None:
    graph = program(name)
    values = draw(graph, 7, b=1, h=2, hk=1, q=37, kv=41)
    run = Run(planned(graph, values, Tiling(32, 16, 8, 8, 8)), checker)
    require(run, graph, values, f"{name} under {checker}")


def test_strides_of_any_kind() -> None:
    graph = program("bias")
    q, k, v, bias = draw(graph, 8)
    plain = Run(planned(graph, [q, k, v, bias]))
    expected = plain([q, k, v, bias])
    wide = torch.zeros(*q.shape[:-1], 2 * q.shape[-1])
    wide[..., ::2] = q
    turned = k.transpose(-1, -2).contiguous().transpose(-1, -2)
    moved = torch.zeros(v.numel() + 3)[3:].view(v.shape).copy_(v)
    strided = [wide[..., ::2], turned, moved, bias.permute(2, 0, 1).contiguous().permute(1, 2, 0)]
    again = Run(planned(graph, strided), "address")(strided)
    assert all(torch.equal(x, y) for x, y in zip(expected, again, strict=True))
    one = [q, k[:, :1].expand(k.shape), v[:1].expand(v.shape), bias[:, :1]]
    require(plain, graph, one, "expanded")


def test_a_masked_value_reaches_nothing_and_an_allowed_one_its_rows() -> None:
    graph = program("softmax, statistics")
    q, k, v = draw(graph, 9)
    v[:, :, 40] = math.nan
    k[:, :, 60] = math.inf
    run = Run(planned(graph, [q, k, v]))
    result, statistics = run([q, k, v])
    clean = evaluate(graph, [q, torch.where(k.isinf(), 0.0, k), torch.where(v.isnan(), 0.0, v)])
    assert bool(result[:, :, :40].isfinite().all())
    assert bool(result[:, :, 40:60].isnan().all())
    assert bool(statistics[:, :, :60].isfinite().all())
    torch.testing.assert_close(result[:, :, :40].double(), clean[0][:, :, :40], atol=1e-5, rtol=1e-5)


def test_a_text_with_another_number_is_another_kernel() -> None:
    graph = program("slopes")
    values = draw(graph, 10)
    run = Run(planned(graph, values))
    good = require(run, graph, values, "slopes")
    text = re.sub(r"SCALE = [\d.]+f", "SCALE = 0.5f", run.emitted.text)
    assert text != run.emitted.text
    run.compile(text)
    assert not torch.allclose(run(values)[0], good[0], atol=1e-2)


def test_axes_may_be_called_as_anything() -> None:
    axes = {"rows": ("b", "int", "p"), "columns": ("b", "c", "p"), "values": ("b", "c", "f")}
    x, y, z = (Input(name, i, layout, "float") for i, (name, layout) in enumerate(axes.items()))
    s = where(le(index("c"), index("int")), contract(x, y, "p"), MINUS_INF)
    node = contract(softmax(s, axis="c")[0], z, "c")
    graph = Graph("for", (x, y, z), (Output(node, "return", node.axes),))
    values = [torch.randn(2, 33, 9), torch.randn(2, 41, 9), torch.randn(2, 41, 5)]
    run = Run(planner.plan(problem_of(graph, values, ("p", "f"))))
    require(run, graph, values, "reserved words")
