"""Checks on a graph, and the lengths and dtypes a call gives it."""

import pytest

import fagen as fg
from fagen.errors import DtypeError, UsageError
from fagen.ir import graph as ir
from fagen.ir.check import bind_dtypes, bind_sizes, by_name, check, direct_inputs
from fagen.ir.graph import Graph, Input, Output, Scalar
from fagen.lang.attention import attention

Q = Input("q", 0, ("b", "h", "q", "d"), "float", False)
K = Input("k", 1, ("b", "hk", "kv", "d"), "float", False)
V = Input("v", 2, ("b", "hk", "kv", "dv"), "float", False)
DOC = Input("doc", 3, ("b", "position"), "int", False)
S = ir.contract(Q, K, "d")
OUT = ir.contract(S, V, "kv")
LAYOUT = ("b", "h", "q", "dv")


def graph(node=OUT, arguments=(Q, K, V), layout=LAYOUT):
    return Graph("mine", arguments, (Output(node, "out", layout),))


def plus(node, value):
    return ir.add(node, ir.to_float(value))


def test_a_sound_graph_passes():
    check(graph())
    check(graph(plus(OUT, ir.mul(ir.size("h"), ir.index("h")))))


FLOATS = Input("table", 3, ("position",), "float", False)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (graph(S, layout=("b", "h", "q", "kv")), r"mine: no output depends on the argument v\[b,hk,kv,dv\]"),
        (graph(arguments=(Q, V, K)), "mine: the argument v is number 2 and stands at 1"),
        (graph(arguments=(Q, K)), r"mine: v\[b,hk,kv,dv\] is no argument of the program"),
        (graph(ir.mul(OUT, ir.Symbol("m", ("q",), "float"))), "mine: the symbol m stands in a program"),
        (
            graph(plus(OUT, ir.Index("r"))),
            "mine: the position along r is used, and no argument has that axis",
        ),
        (graph(plus(OUT, ir.Size("r"))), "mine: the length of r is used, and no argument has that axis"),
        (graph(layout=("b", "h", "q")), r"mine: the output out has the axes b h q dv; its layout says b h q"),
        (graph(ir.total(OUT, "hk"), layout=("b", "g", "q", "dv")), "mine: the output out has lost hk"),
        (graph(ir.Contract(S, V, "q")), r"mine: dot is over q, an axis that v\[b,hk,kv,dv\] does not have"),
        (
            graph(ir.mul(OUT, ir.Load(FLOATS, (FLOATS,))), (Q, K, V, FLOATS), (*LAYOUT, "position")),
            r"mine: the index table\[position\] of table\[position\] is no integer",
        ),
        (
            graph(ir.mul(OUT, ir.Load(FLOATS, ())), (Q, K, V, FLOATS)),
            r"mine: table\[position\] has 0 indices for 1 axes",
        ),
        (
            graph(ir.mul(ir.total(V, "kv"), ir.Random(0)), (V,), ("b", "h", "q", "kv", "dv")),
            "mine: the argument v is number 2 and stands at 0",
        ),
        (
            graph(plus(OUT, ir.Load(DOC, (ir.index("b"), ir.index("q")))), (Q, K, V, DOC), (*LAYOUT, "r")),
            "mine: the output out has the axes",
        ),
    ],
)
def test_a_graph_that_breaks_a_rule(wrong, sentence):
    with pytest.raises((UsageError, DtypeError), match=sentence):
        check(wrong)


def test_dropout_needs_pairs():
    x = Input("x", 0, ("b", "hk", "q"), "float", False)
    wrong = Graph("mine", (x,), (Output(ir.where(ir.le(ir.Const(5), ir.Random(0)), x, ir.ZERO), "out", ()),))
    with pytest.raises(UsageError, match="mine: dropout needs the axes b, h, q and kv"):
        check(wrong)


def test_an_axis_of_a_table_alone_gives_an_output_no_length():
    # Its table is only indexed, so nothing says how far the output reaches.
    table = Input("table", 0, ("r",), "float", False)
    wrong = Graph(
        "mine", (table,), (Output(ir.Load(table, (ir.sub(ir.Size("r"), ir.Index("r")),)), "out", ("r",)),)
    )
    with pytest.raises(
        UsageError, match="mine: the output out has the axis r, whose length no argument gives"
    ):
        check(wrong)


# -------------------------------------------------------------------------------------------------- lengths

Q_SHAPE, K_SHAPE, V_SHAPE = (2, 6, 10, 64), (2, 3, 20, 64), (2, 3, 20, 32)


def test_lengths_of_a_call():
    sizes = bind_sizes(graph(), (Q_SHAPE, K_SHAPE, V_SHAPE))
    assert sizes == {"b": 2, "hk": 3, "g": 2, "q": 10, "kv": 20, "d": 64, "dv": 32}


def test_a_length_of_one_broadcasts():
    sizes = bind_sizes(graph(), ((1, 6, 10, 64), (2, 1, 20, 1), (2, 1, 1, 32)))
    assert sizes == {"b": 2, "hk": 1, "g": 6, "q": 10, "kv": 20, "d": 64, "dv": 32}
    one_head = bind_sizes(graph(), ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)))
    assert set(one_head.values()) == {1}


def test_lengths_of_zero():
    sizes = bind_sizes(graph(), ((0, 6, 10, 64), (1, 3, 0, 64), (0, 3, 0, 32)))
    assert (sizes["b"], sizes["kv"]) == (0, 0)
    none = bind_sizes(graph(), ((2, 0, 10, 64), (2, 3, 20, 64), (2, 3, 20, 32)))
    assert none["hk"] * none["g"] == 0
    neither = bind_sizes(graph(), ((2, 0, 10, 64), (2, 0, 20, 64), (2, 0, 20, 32)))
    assert neither["hk"] * neither["g"] == 0


def test_a_head_axis_that_broadcasts_among_query_heads():
    sinks = attention(sink=type("T", (), {"shape": (6,), "dtype": "float32"})()).graph
    assert bind_sizes(sinks, (Q_SHAPE, K_SHAPE, V_SHAPE, (6,)))["g"] == 2
    assert bind_sizes(sinks, (Q_SHAPE, K_SHAPE, V_SHAPE, (1,)))["g"] == 2


def test_query_heads_without_key_heads():
    @fg.program
    def program(q: fg.Tensor["b h q d"], k: fg.Tensor["b h kv d"]):
        return fg.logsumexp(fg.dot(q, k, over="d"))

    sizes = bind_sizes(program.trace().graph, ((2, 6, 10, 64), (2, 6, 20, 64)))
    assert (sizes["hk"], sizes["g"]) == (6, 1)


def test_a_table_that_is_only_indexed_has_any_length():
    def indexed(*more):
        index = (ir.index("b"), ir.index("kv"))
        node = ir.contract(plus(S, ir.Load(DOC, index)), V, "kv")
        return graph(ir.add(node, *more) if more else node, (Q, K, V, DOC))

    assert direct_inputs(indexed()) == (Q, K, V)
    for batch in (1, 2):
        sizes = bind_sizes(indexed(), (Q_SHAPE, K_SHAPE, V_SHAPE, (batch, 500)))
        assert (sizes["b"], sizes["position"]) == (2, 500)
    with pytest.raises(UsageError, match="mine: q has b = 2 and doc has b = 7"):  # read at its own b
        bind_sizes(indexed(), (Q_SHAPE, K_SHAPE, V_SHAPE, (7, 500)))


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ((Q_SHAPE, (2, 3, 20, 32), V_SHAPE), "mine: q has d = 64 and k has d = 32; an axis has one length"),
        ((Q_SHAPE, K_SHAPE, (2, 3, 21, 32)), "mine: k has kv = 20 and v has kv = 21"),
        ((Q_SHAPE, K_SHAPE, (3, 3, 20, 32)), "mine: q has b = 2 and v has b = 3"),
        (
            ((2, 7, 10, 64), K_SHAPE, V_SHAPE),
            "mine: q has 7 query heads and k has 3 key heads; the first has to be a multiple of the second",
        ),
        (((2, 2, 10, 64), K_SHAPE, V_SHAPE), "mine: q has 2 query heads and k has 3 key heads"),
        ((Q_SHAPE, (2, 0, 20, 64), (2, 0, 20, 32)), "mine: q has 6 query heads and k has 0 key heads"),
        (((2, 10, 64), K_SHAPE, V_SHAPE), r"mine: q has the shape \(2, 10, 64\); it has the axes b h q d"),
        ((None, K_SHAPE, V_SHAPE), "mine: q has the shape None; it has the axes b h q d"),
        ((Q_SHAPE, K_SHAPE), "mine: 2 values were given for 3 arguments; it takes q, k, v"),
        (((2, 6, 10, 64000), (2, 3, 20, 65000), V_SHAPE), "q has d = 64,000 and k has d = 65,000"),
    ],
)
def test_lengths_that_disagree(shapes, sentence):
    with pytest.raises(UsageError, match=sentence):
        bind_sizes(graph(), shapes)


# --------------------------------------------------------------------------------------------------- dtypes


def test_dtypes_that_have_no_meaning():
    bind_dtypes(graph(), ("float",) * 3, ("bf16",) * 3)
    with pytest.raises(
        DtypeError, match=r"mine: .* differ in dtype: q fp32, k fp32, v bf16; convert them to one"
    ):
        bind_dtypes(graph(), ("float",) * 3, ("fp32", "fp32", "bf16"))
    with pytest.raises(DtypeError, match="mine: k holds int64; it is declared to hold float values"):
        bind_dtypes(graph(), ("float", "int", "float"), ("fp32", "int64", "fp32"))


def test_a_bias_may_have_another_dtype():
    bias = Input("bias", 3, ("h",), "float", False)
    biased = graph(ir.contract(ir.add(S, bias), V, "kv"), (Q, K, V, bias))
    bind_dtypes(biased, ("float",) * 4, ("bf16", "bf16", "bf16", "fp32"))


def test_values_by_name():
    scaled = graph(ir.mul(OUT, Scalar("scale", 3, "float")), (Q, K, V, Scalar("scale", 3, "float")))
    assert by_name(scaled, {"scale": 2, "q": "Q", "v": "V", "k": "K"}) == ("Q", "K", "V", 2)
    with pytest.raises(UsageError, match="mine: v, scale was not given; it takes q, k, v, scale"):
        by_name(scaled, {"q": 1, "k": 2})
    with pytest.raises(UsageError, match="mine: x is unknown"):
        by_name(scaled, {"x": 1})
