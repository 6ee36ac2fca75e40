"""Kernels for products and rows of stored values on the emulator."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from emitted import check
from fagen.ir import graph as ir
from fagen.ir.graph import MINUS_INF, ONE, ZERO, Axis, Const, Graph, Input, Node, Output, index
from fagen.plan.plan import Tiling
from plans import attention_graph, matmul_graph

pytestmark = pytest.mark.cxx

TILINGS: tuple[Tiling, ...] = ("element", "shared", "registers")
Q = Input("q", 0, ("b", "h", "q", "d"), "float")
K = Input("k", 1, ("b", "hk", "kv", "d"), "float")
V = Input("v", 2, ("b", "hk", "kv", "dv"), "float")
X = Input("x", 0, ("b", "h", "q", "kv"), "float")
CAUSAL = ir.le(index("kv"), index("q"))


def program(name: str, *outputs: Node, arguments: tuple[Input, ...] = (X,)) -> Graph:
    return Graph(name, arguments, tuple(Output(o, f"o{i}", o.axes) for i, o in enumerate(outputs)))


def softmax(s: Node, over: Axis = "kv") -> tuple[Node, Node]:
    """(weights, log of the sum)"""
    top = ir.largest(s, over)
    e = ir.function("exp", ir.sub(s, top))
    total = ir.total(e, over)
    return ir.div(e, total), ir.add(top, ir.function("log", total))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_matrix_product(tiling: Tiling, dtype: torch.dtype) -> None:
    seed = 11
    draw = random.Random(seed)
    for rows, terms, columns in [(1, 1, 1), (33, 17, 65), [draw.randint(1, 150) for _ in range(3)]]:
        values = [normal(rows, terms, dtype=dtype), normal(terms, columns, seed=1, dtype=dtype)]
        label = f"{rows} x {terms} x {columns}, seed {seed}"
        check(matmul_graph(), values, sizes=("i", "j", "k"), tiling=tiling, label=label)


@pytest.mark.parametrize("tiling", TILINGS)
def test_matrix_product_of_any_strides(tiling: Tiling) -> None:
    """Transposed, sliced, expanded and misaligned operands; lengths left open."""
    square = normal(80, 80)
    operands = {
        "transposed": (square.T, square),
        "both transposed": (square.T, square.T),
        "sliced": (square[::2, 3:50], square[3:50, 1:70:3]),
        "misaligned": (square[:, 1:69], square[1:69]),
        "expanded": (square[:1].expand(40, 80), square[:, :1].expand(80, 24)),
        "one row": (square[:1, :64], square[:64]),
    }
    for label, values in operands.items():
        check(matmul_graph(), list(values), sizes=(), tiling=tiling, label=label)


@pytest.mark.parametrize("tiling", TILINGS)
def test_product_of_sums(tiling: Tiling) -> None:
    a, b = matmul_graph().arguments
    graph = Graph(
        "sums", (a, b), (Output(ir.contract(ir.add(a, ONE), ir.sub(b, ONE), "k"), "c", ("i", "j")),)
    )
    check(graph, [normal(20, 19), normal(19, 21, seed=1)], sizes=(), tiling=tiling)


@pytest.mark.parametrize("tiling", TILINGS)
def test_no_terms_sum_to_nothing(tiling: Tiling) -> None:
    check(matmul_graph(), [torch.empty(5, 0), torch.empty(0, 7)], sizes=(), tiling=tiling)


@pytest.mark.parametrize("tiling", TILINGS)
def test_past_the_end_an_infinity_meets_nothing(tiling: Tiling) -> None:
    """The last term is infinite: nothing beyond it is multiplied by 0 and added."""
    a, b = normal(20, 19), normal(19, 21)
    b[18, 4] = torch.inf
    check(matmul_graph(), [a, b], sizes=("i", "j", "k"), tiling=tiling)


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("fusion", ["none", "products"])
def test_attention_through_memory(fusion: str, tiling: Tiling) -> None:
    graph = attention_graph(True, 0.25, return_lse=True)
    values = [normal(2, 4, 37, 40), normal(2, 2, 70, 40, seed=1), normal(2, 2, 70, 24, seed=2)]
    for dtype, dice in ((torch.float32, 3), (torch.bfloat16, 4)):
        run = check(graph, [v.to(dtype) for v in values], fusion=fusion, tiling=tiling, seed=9, dice=dice)
        assert len(run.plan.kernels) > 3


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("weights", ["sigmoid", "softmax"])
def test_a_masked_value_reaches_nothing(weights: str, tiling: Tiling) -> None:
    s = ir.contract(Q, K, "d")
    if weights == "sigmoid":
        p = ir.where(CAUSAL, ir.div(ONE, ir.add(ONE, ir.function("exp", ir.neg(s)))), ZERO)
    else:
        p = softmax(ir.where(CAUSAL, s, MINUS_INF))[0]
    v = normal(1, 2, 33, 24)
    v[:, :, 20:] = torch.nan
    v[0, 0, 25, 3] = torch.inf
    values = [normal(1, 2, 19, 16), normal(1, 2, 33, 16, seed=1), v]
    graph = program(weights, ir.contract(p, V, "kv"), arguments=(Q, K, V))
    check(graph, values, fusion="products", tiling=tiling)


def test_checkers_find_nothing() -> None:
    values = [normal(21, 35), normal(35, 19, seed=1)]
    for tiling in TILINGS:
        check(matmul_graph(), values, sizes=(), tiling=tiling, checker="address")
        check(matmul_graph(), values, sizes=(), tiling=tiling, checker="race")
    values = [normal(1, 1, 21, 8), normal(1, 1, 35, 8, seed=1), normal(1, 1, 35, 12, seed=2)]
    check(attention_graph(True, 0.1), values, fusion="products", checker="address")


# ------------------------------------------------------------------------------------------------- programs


def extra(name: str, *axes: Axis) -> Input:
    return Input(name, 3, axes, "float")


def attention_values(q_heads: int = 2, head_dim: int = 16) -> list[Tensor]:
    return [
        normal(1, q_heads, 19, head_dim),
        normal(1, q_heads, 33, head_dim, seed=1),
        normal(1, q_heads, 33, 24, seed=2),
    ]


def talking_heads(before: bool) -> tuple[Graph, list[Tensor], tuple[Axis, ...]]:
    mix = extra("w", "hk", "h2")
    s = ir.where(CAUSAL, ir.contract(Q, K, "d"), ZERO if before else MINUS_INF)
    p = softmax(ir.contract(s, mix, "hk"))[0] if before else ir.contract(softmax(s)[0], mix, "hk")
    values = [
        normal(2, 4, 19, 16),
        normal(2, 4, 33, 16, seed=1),
        normal(2, 4, 33, 24, seed=2),
        normal(4, 5, seed=3),
    ]
    graph = program("talking", ir.contract(p, V, "kv"), arguments=(Q, K, V, mix))
    return graph, values, ("d", "dv", "h2")


@pytest.mark.parametrize("before", [True, False])
def test_talking_heads(before: bool) -> None:
    graph, values, sizes = talking_heads(before)
    run = check(graph, values, sizes=sizes)
    assert "product" in [kernel.schedule for kernel in run.plan.kernels]


def test_a_projection_of_the_result() -> None:
    weights = extra("wo", "dv", "e")
    out = ir.contract(softmax(ir.contract(Q, K, "d"))[0], V, "kv")
    values = [
        normal(2, 2, 19, 16),
        normal(2, 2, 33, 16, seed=1),
        normal(2, 2, 33, 24, seed=2),
        normal(24, 50, seed=3),
    ]
    graph = program("projected", ir.contract(out, weights, "dv"), arguments=(Q, K, V, weights))
    run = check(graph, values, sizes=("d", "dv", "e"))
    assert [kernel.schedule for kernel in run.plan.kernels] == ["forward_loop", "product"]


def test_a_gate_of_the_query() -> None:
    gate = extra("wg", "d")
    out = ir.contract(softmax(ir.contract(Q, K, "d"))[0], V, "kv")
    gated = ir.mul(out, ir.function("tanh", ir.contract(Q, gate, "d")))
    values = [
        normal(2, 2, 19, 16),
        normal(2, 2, 33, 16, seed=1),
        normal(2, 2, 33, 24, seed=2),
        normal(16, seed=3),
    ]
    run = check(program("gated", gated, arguments=(Q, K, V, gate)), values)
    assert [kernel.schedule for kernel in run.plan.kernels] == ["rowwise", "forward_loop"]


# ----------------------------------------------------------------------------------------------------- rows

MASKED = ir.where(CAUSAL, X, MINUS_INF)
ROWS: dict[str, tuple[Node, ...]] = {
    "softmax": (softmax(MASKED)[0],),
    "logsumexp": (softmax(MASKED)[1],),
    "both": softmax(MASKED),
    "softmax of all": softmax(X),
    "softmax along queries": softmax(ir.where(ir.le(index("q"), index("kv")), X, MINUS_INF), "q"),
    "two walks": (ir.total(ir.maximum(ir.sub(softmax(MASKED)[0], Const(0.02)), ZERO), "kv"),),
    "maximum and sum of squares": (ir.largest(X, "kv"), ir.total(ir.mul(X, X), "kv")),
    "map": (ir.mul(X, ir.function("tanh", X)),),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 200])
def test_rows(name: str, length: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        run = check(program("rows", *ROWS[name]), [normal(2, 3, 9, length, dtype=dtype)], label=name)
        assert {kernel.schedule for kernel in run.plan.kernels} == {"rowwise"}


@pytest.mark.parametrize("name", ROWS)
def test_rows_under_checkers_and_schedules(name: str) -> None:
    x = normal(1, 2, 9, 70)
    check(program("rows", *ROWS[name]), [x], checker="address")
    for dice in range(2):
        check(program("rows", *ROWS[name]), [x], schedule="random", dice=dice)


def test_rows_of_any_strides_and_without_elements() -> None:
    x = normal(9, 70, 3, 2).permute(3, 2, 0, 1)
    for name, outputs in ROWS.items():
        graph = program("rows", *outputs)
        check(graph, [x], label=name)
        check(graph, [x[:, :, :, ::3]], label=name)
        check(graph, [x[:1].expand(4, 3, 9, 70)], label=name)
        check(graph, [x[:, :, :, :0]], label=name)
        check(graph, [x[:, :, :0]], label=name)


def test_a_row_without_other_axes() -> None:
    x = Input("x", 0, ("kv",), "float")
    outputs = (softmax(x)[0], ir.total(x, "kv"), ir.mul(x, x))
    for length in (0, 1, 100):
        eighths = (8 * normal(2 * length)[::2]).round() / 8  # of which a sum is exact
        check(program("row", *outputs, arguments=(x,)), [eighths])


def test_axes_of_any_name() -> None:
    """Names that stand for something else in the emitted text."""
    names: list[Axis] = ["p", "r", "lane", "rest", "acc", "i", "row", "for", "i_start"]
    for own, walk, feature in [names[:3], names[3:6], names[6:]]:
        a, b = Input("a", 0, (own, walk), "float"), Input("b", 1, (walk, feature), "float")
        values: list[Any] = [normal(9, 20), normal(20, 13, seed=1)]
        for tiling in TILINGS:
            graph = program("named", ir.contract(a, b, walk), arguments=(a, b))
            check(graph, values, sizes=(own, walk, feature), tiling=tiling)
        check(program("named", ir.total(a, walk), ir.mul(a, a), arguments=(a,)), values[:1], sizes=())
