"""Expressions: what each operator means, and the sentence each mistake is answered with."""

import gc
import math
import operator
from functools import lru_cache
from importlib.util import spec_from_file_location

import numpy as np
import pytest
import torch

import fagen as fg
from fagen.errors import DtypeError, UsageError
from fagen.ir import graph as ir
from fagen.ir.reference import evaluate_nodes
from fagen.lang.expr import Capture, Expr, Tracing, beyond_fp32
from fagen.lang.untraced import keep_outside, torch_traces_expressions

LENGTHS = {"b": 2, "hk": 2, "g": 3, "q": 5, "kv": 7, "d": 4, "dv": 4}


def value(expr, sizes=LENGTHS):
    (result,) = evaluate_nodes([expr.node], {held.node: held.value for held in expr.captures}, sizes)
    return result


BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
]


@pytest.mark.parametrize("number", [3, -2, 2.5, -0.75, True])
@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
def test_operators_with_numbers_mean_what_python_means(op, number):
    for left in (fg.q - 2, (fg.q - 2) * 0.5):
        plain = [i - 2 if left.node.kind == "int" else (i - 2) * 0.5 for i in range(5)]
        assert value(op(left, number)).expand(5).tolist() == pytest.approx([op(x, number) for x in plain])
        if op not in (operator.truediv, operator.floordiv, operator.mod):
            assert value(op(number, left)).tolist() == pytest.approx([op(number, x) for x in plain])


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
def test_operators_of_two_expressions(op):
    expected = torch.tensor([[op(i - 2, j + 1) for j in range(7)] for i in range(5)])
    torch.testing.assert_close(value(op(fg.q - 2, fg.kv + 1)), expected, check_dtype=False)


def test_truth_values_combine():
    a, b = fg.q < 2, fg.kv < 3
    for mine, theirs in (
        (a & b, lambda x, y: x and y),
        (a | b, lambda x, y: x or y),
        (~a | ~b, lambda x, y: not x or not y),
        (a == b, lambda x, y: x == y),
        (a != b, lambda x, y: x != y),
        (a & True, lambda x, y: x),
    ):
        result = value(mine)
        result = result if result.dim() == 2 else result[:, None]
        expected = [[theirs(i < 2, j < 3) for j in range(7)] for i in range(5)]
        assert result.expand(5, 7).tolist() == expected


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (fg.exp, math.exp),
        (fg.exp2, lambda x: 2.0**x),
        (fg.sin, math.sin),
        (fg.cos, math.cos),
        (fg.tanh, math.tanh),
        (fg.abs, abs),
        (fg.sigmoid, lambda x: 1 / (1 + math.exp(-x))),
        (fg.relu, lambda x: max(x, 0.0)),
        (fg.gelu, lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2)))),
        (lambda x: fg.log(x + 3), lambda x: math.log(x + 3)),
        (lambda x: fg.log2(x + 3), lambda x: math.log2(x + 3)),
        (lambda x: fg.sqrt(x + 3), lambda x: math.sqrt(x + 3)),
        (lambda x: fg.rsqrt(x + 3), lambda x: 1 / math.sqrt(x + 3)),
        (lambda x: fg.minimum(x, 0.25), lambda x: min(x, 0.25)),
        (lambda x: fg.maximum(fg.q, x), None),
        (lambda x: fg.where(x < 0, x, 1), lambda x: x if x < 0 else 1.0),
        (lambda x: -x + +x - x, lambda x: -x),
    ],
)
def test_functions(mine, theirs):
    result = value(mine((fg.q - 2) * 0.5)).tolist()
    plain = [(i - 2) * 0.5 for i in range(5)]
    expected = [max(i, x) for i, x in enumerate(plain)] if theirs is None else [theirs(x) for x in plain]
    assert result == pytest.approx(expected)


def test_functions_of_numbers_are_numbers():
    assert value(fg.exp(1)).item() == pytest.approx(math.e)
    assert value(fg.maximum(2, 3.5)).item() == 3.5
    assert fg.inf == math.inf
    assert fg.pi == math.pi


def test_a_selected_sigmoid_of_minus_infinity_is_zero():
    assert value(fg.sigmoid(fg.where(fg.q < 2, 0.0, -fg.inf))).tolist() == [0.5, 0.5, 0, 0, 0]


def test_sizes_and_the_query_head():
    assert value(fg.size("h")).item() == 6
    assert value(fg.h).reshape(-1).tolist() == list(range(6))
    assert value(fg.h // 3 == fg.hk).all()
    assert value(fg.size("kv") - fg.size("q")).item() == 2


def test_the_same_expression_is_the_same_node():
    assert (fg.q - fg.kv).node is (-fg.kv + fg.q).node
    assert (fg.kv <= fg.q).node is (fg.q >= fg.kv).node is (~(fg.kv > fg.q)).node
    assert (0.5 + fg.where(fg.q > 2, 1.0, 0.0)).node is not (0.25 + fg.where(fg.q > 2, 1.0, 0.0)).node
    assert (fg.q * 1.0 * 0.0).node is not (fg.q * 1.0 * -0.0).node


def test_numbers_of_numpy_are_numbers():
    assert (fg.q + np.int64(3)).node is (fg.q + 3).node
    assert (np.float32(0.5) * fg.q).node is (0.5 * fg.q).node


@pytest.mark.filterwarnings("error")
def test_a_number_of_numpy_may_have_less_range_than_fp32():
    assert not beyond_fp32(np.float16(3.0))
    assert beyond_fp32(np.float64(1e39))


# ------------------------------------------------------------------------------------------------ gathering


def test_gathering_a_captured_tensor_clamps_indices():
    table = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    held = fg.capture(table, "b r")
    result = value(held[fg.b, fg.q - 1])
    assert result.tolist() == [[1, 1, 2, 3, 3], [4, 4, 5, 6, 6]]
    assert value(held[0, 7]).item() == 3


def test_a_tensor_of_no_axes_and_an_index_of_a_table():
    nought = fg.capture(torch.tensor(2.5), "")
    starts = fg.capture(torch.tensor([0, 4]), "doc")
    ids = fg.capture(torch.tensor([0, 0, 1, 1, 1]), "position")
    assert value(nought * fg.q).tolist() == [0, 2.5, 5, 7.5, 10]
    assert value(starts[ids[fg.q]]).tolist() == [0, 0, 4, 4, 4]


def test_reading_a_tensor_at_its_own_position_is_the_tensor():
    doc = fg.capture(torch.zeros(2, 5, dtype=torch.int32), "b q")
    slopes = fg.capture(torch.zeros(6), "h")
    assert doc[fg.b, fg.q].node is doc.node
    assert slopes[fg.h].node is slopes.node


# ------------------------------------------------------------------------------------------------- captures


def test_a_capture_built_anew_is_the_same_node_once_the_old_one_is_gone():
    def mask(ids):
        doc = fg.capture(ids, "b q")
        return doc[fg.b, fg.q] == doc[fg.b, fg.kv]

    first = mask(torch.zeros(1, 3, dtype=torch.int32))
    node = first.node
    second = mask(torch.ones(1, 3, dtype=torch.int32))
    assert second.node is not node  # both live: two different tensors
    del first, second
    gc.collect()
    assert mask(torch.ones(1, 3, dtype=torch.int32)).node is node


def test_a_capture_lives_as_long_as_an_expression_with_it():
    held = fg.capture(torch.zeros(3), "q")
    combined = fg.where(fg.q < 2, held * 2.0, 0.0)
    slot = held.captures[0].slot
    del held
    gc.collect()
    other = fg.capture(torch.zeros(3), "q")
    assert other.captures[0].slot != slot
    assert [c.slot for c in combined.captures] == [slot]
    assert isinstance(combined.captures[0], Capture)


def test_captures_are_listed_in_order_of_first_use():
    one, two = (fg.capture(torch.zeros(5), "q") for _ in range(2))
    mixed = (two + one) * two
    assert mixed.captures == two.captures + one.captures


# -------------------------------------------------------------------------------------------------- mistakes

TENSOR = torch.zeros(2, 3)
X = Expr(ir.Input("x", 0, ("b", "h", "q", "kv"), "float", False))
K = Expr(ir.Input("k", 1, ("b", "hk", "kv", "d"), "float", False))
Q = Expr(ir.Input("q", 2, ("b", "h", "q", "d"), "float", False))
DOC = Expr(ir.Input("doc", 3, ("b", "q"), "int", False))


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (lambda: bool(fg.kv <= fg.q), "kv <= q has no truth value while a program is traced; use & | ~"),
        (lambda: 1 if fg.q == 3 else 2, "use & | ~ for and, or, not, fg.where for if"),
        (lambda: 0 <= fg.q - fg.kv <= 5, r"\(a <= x\) & \(x < b\) for a <= x < b"),
        (lambda: float(fg.q), "q is no number while a program is traced"),
        (lambda: fg.q & fg.kv, "& takes truth values, and q is an integer; compare it"),
        (lambda: ~fg.q, "~ takes truth values, and q is an integer"),
        (lambda: (fg.q < 3) | 1, r"\| takes truth values, and 1 is an integer"),
        (lambda: fg.q // 0, "q // 0 is a division by zero"),
        (lambda: fg.q % 0, "q % 0 is a division by zero"),
        (lambda: fg.q + TENSOR, r"a tensor of shape \(2, 3\) stands in an expression; .*fg.capture\(tensor"),
        (lambda: TENSOR * fg.q, r"a tensor of shape \(2, 3\) stands in an expression; .*fg.capture\(tensor"),
        (lambda: np.zeros(3) + fg.q, r"a tensor of shape \(3,\) stands in an expression"),
        (lambda: fg.q + fg.causal, "the function causal stands where a value is expected; call it"),
        (lambda: fg.q + "1", "'1' is no number and no expression"),
        (lambda: fg.where(fg.q, 1.0, 2.0), "where chooses by a truth value, and q is none"),
        (lambda: (fg.q + 1)[fg.kv], "q \\+ 1 is computed, and only an argument or a captured tensor"),
        (lambda: DOC[fg.q], r"doc\[b,q\] is indexed by 1 value; give one for each of its axes b q"),
        (
            lambda: DOC[fg.b, 0.5],
            r"doc\[b,q\] is indexed by 0.5, a floating-point value; an index is an integer",
        ),
        (lambda: DOC[fg.b, fg.q < 2], "is indexed by q < 2, a truth value"),
        (lambda: DOC[fg.b, 1:], "is indexed by a slice"),
        (lambda: list(fg.q), "not iterable"),
        (
            lambda: fg.dot(Q, X, over="d"),
            r"dot is over d, an axis that x\[b,h,q,kv\] does not have; its axes: b h q kv",
        ),
        (lambda: fg.dot(Q, K, over="kv"), r"dot is over kv, an axis that q\[b,h,q,d\] does not have"),
        (lambda: fg.dot(Q, K, over="e f"), "'e f' is no axis name"),
        (lambda: fg.dot(Q, Q, over="hk"), 'dot is over hk, and .* has an axis h.*; reduce over="h"'),
        (lambda: fg.dot(fg.q < 3, Q, over="q"), "dot takes numbers, and q < 3 is a truth value"),
        (lambda: fg.softmax(Q, over="kv"), "softmax is over kv, an axis that .* does not have"),
        (lambda: fg.softmax(fg.kv < 3), "softmax is of scores, and kv < 3 is a mask; use fg.where"),
        (lambda: fg.softmax(X, sink=X), "the sink .* depends on kv; a sink is one logit for a whole row"),
        (lambda: fg.sum(3, over="kv"), "sum is over kv, an axis that 3 does not have; its axes: none"),
        (lambda: fg.size("h h"), "'h h' is no axis name"),
        (lambda: fg.size("g"), "the axis g stands for the place of h in its group"),
        (lambda: fg.Tensor["b q q"], "an axis stands twice in 'b q q'"),
        (lambda: fg.Tensor["b h hk"], "has both h and hk"),
        (lambda: fg.Tensor["b, q"], "'b,' in 'b, q' is no axis name"),
        (lambda: fg.Tensor[3], "axes are written as a string, not 3"),
        (lambda: fg.Tensor["b q", str], "an argument cannot hold <class 'str'>; declare float, int, bool"),
        (lambda: fg.Scalar[bool], "an argument cannot hold <class 'bool'>; declare float, int"),
        (
            lambda: fg.capture(3.0, "b"),
            r"capture takes a tensor, not 3.0; a number is brought in by fg.scalar",
        ),
        (
            lambda: fg.capture(TENSOR, "b"),
            r"the captured tensor has shape \(2, 3\), and 'b' names 1 dimension;",
        ),
        (
            lambda: fg.capture(TENSOR.to(torch.complex64), "b q"),
            "a tensor of torch.complex64 cannot be captured",
        ),
        (
            lambda: fg.capture(TENSOR[0, 0], "", sorted=True),
            "sorted=True promises an order along the last axis",
        ),
        (
            lambda: fg.scalar(TENSOR[0, 0]),
            r"scalar takes a number, not .*; a tensor is brought in by fg.capture",
        ),
        (lambda: fg.scalar(True), "scalar takes a number, not True"),
        (lambda: fg.dropout(X, 0.5), "dropout stands outside a program"),
    ],
)
def test_a_mistake_is_answered_in_one_sentence(mistake, sentence):
    with pytest.raises((UsageError, DtypeError, TypeError), match=sentence) as caught:
        mistake()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rate", [-0.1, 1.5, "a", True, fg.q])
def test_a_dropout_rate_is_a_number_from_0_to_1(rate):
    with Tracing("program"), pytest.raises(UsageError, match="program: dropout has the rate"):
        fg.dropout(X, rate)


def test_dropout_is_of_pairs():
    with (
        Tracing("p"),
        pytest.raises(UsageError, match=r"and q\[b,h,q,d\] has the axes b h q d; drop out scores"),
    ):
        fg.dropout(Q, 0.5)


def test_dropouts_are_numbered_in_order_of_use():
    with Tracing("p"):
        first, same, second = fg.dropout(X, 0.5), fg.dropout(X, 0.0), fg.dropout(X, 0.5)
    assert same is X
    numbers = [n.ordinal for e in (first, second) for n in ir.walk([e.node]) if isinstance(n, ir.Random)]
    assert numbers == [0, 2]
    with Tracing("p"):
        assert fg.dropout(X, 0.5).node is first.node


# ------------------------------------------------------------------------------------- under torch.compile


@pytest.mark.parametrize(
    ("version", "new"), [("2.9.1", False), ("2.11.0+cu130", False), ("2.13.0", True), ("3.0.0a0", True)]
)
def test_older_versions_of_torch_do_not_trace_expressions(tmp_path, monkeypatch, version, new):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text(f"__version__ = '{version}'\n")
    (tmp_path / "torch/__init__.py").touch()
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda _: spec_from_file_location("torch", tmp_path / "torch/__init__.py")
    )
    assert torch_traces_expressions() is new


def test_what_is_kept_outside_breaks_a_graph_and_is_called():
    @lru_cache
    def cached(x):
        return x.item() + 1

    class Two:
        def twice(self, x):
            return x + float(cached(x))

    keep_outside([cached, Two])
    two, graphs = Two(), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: two.twice(x * 2) * 3, backend=backend)
    assert compiled(torch.tensor(1.0)) == 15.0
    assert len(graphs) > 1
