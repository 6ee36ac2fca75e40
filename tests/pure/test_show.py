"""Formulas: they read as mathematics, and mean what the node means."""

import math
import random

import pytest
import torch

import fagen as fg
from fagen.ir import graph as ir
from fagen.ir.reference import evaluate_nodes
from fagen.ir.show import show, show_definition, show_graph
from fagen.lang.attention import attention

Q = ir.Input("Q", 0, ("b", "h", "q", "d"), "float", False)
K = ir.Input("K", 1, ("b", "hk", "kv", "d"), "float", False)
DOC = ir.Input("doc", 2, ("b", "position"), "int", False)


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (fg.causal(), "kv <= q + kv_len - q_len"),
        (fg.causal(align="top_left"), "kv <= q"),
        (fg.kv < fg.q, "kv < q"),
        (fg.kv < 70, "kv < 70"),
        (fg.kv > fg.q + 17, "q <= kv - 18"),
        (fg.kv >= 70, "kv >= 70"),
        (fg.q == fg.kv, "q == kv"),
        (fg.q != fg.kv, "q != kv"),
        (abs(fg.q - fg.kv) <= 16, "abs(q - kv) <= 16"),
        (~((fg.q < 3) & (fg.kv < 5)), "kv >= 5 or q >= 3"),
        (((fg.q < 3) | (fg.kv < 5)) & (fg.q != 1), "(q < 3 or kv < 5) and q != 1"),
        (fg.q // 64 == fg.kv // 64, "kv // 64 == q // 64"),
        ((fg.q - fg.kv) % 3 == 0, "(q - kv) % 3 == 0"),
        (3 * (fg.h + 1) - fg.q, "3 * h - q + 3"),
        (fg.h * 1.5, "1.5 * h"),
        (fg.size("h") * fg.size("window"), "q_heads * window_len"),
        (fg.where(fg.kv <= fg.q, fg.q * 0.5, -fg.inf), "where(kv <= q, 0.5 * q, -inf)"),
        (1.0 - fg.exp(-(fg.q * 2.0)), "1.0 - exp(-2.0 * q)"),
        (2.0 / (fg.q + 1.0) / 3.0, "2.0 / (q + 1.0) / 3.0"),
        (fg.q * 1e-8, "1e-08 * q"),
        (fg.tanh(fg.q), "tanh(q)"),
    ],
)
def test_expressions(expr, text):
    assert show(expr.node) == text


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (ir.contract(Q, K, "d"), "sum_d Q[b,h,q,d] K[b,hk,kv,d]"),
        (ir.mul(ir.contract(Q, K, "d"), ir.Const(0.5)), "0.5 * (sum_d Q[b,h,q,d] K[b,hk,kv,d])"),
        (ir.total(ir.add(Q, Q), "d"), "sum_d (Q[b,h,q,d] + Q[b,h,q,d])"),
        (ir.sub(Q, ir.largest(Q, "d")), "Q[b,h,q,d] - max_d Q[b,h,q,d]"),
        (ir.load(DOC, (ir.index("b"), ir.add(ir.index("kv"), ir.Const(1)))), "doc[b, kv + 1]"),
        (ir.Scalar("scale", 0, "float"), "scale"),
        (ir.Symbol("m", ("b", "q"), "float"), "m[b,q]"),
        (ir.Random(1), "random1[b,h,q,kv]"),
        (
            ir.Scatter(DOC, (ir.index("b"), ir.index("q")), ir.to_float(ir.index("q"))),
            "scatter(doc[b, q] += q)",
        ),
    ],
)
def test_nodes(node, text):
    assert show(node) == repr(node) == text


def test_names_stand_for_nodes():
    s = ir.contract(Q, K, "d")
    m = ir.largest(s, "kv")
    e = ir.function("exp", ir.sub(s, m))
    names = {s: "S[q,kv]", m: "m[q]", ir.finite(m): "m[q]"}
    assert show(e, names) == "exp(S[q,kv] - m[q])"
    assert show_definition(s, "S", {Q: "Q[q,d]", K: "K[kv,d]"}) == "S[b,h,q,kv] = sum_d Q[q,d] K[kv,d]"


def test_a_whole_program():
    text = show_graph(attention(mask=fg.causal(), return_lse=True, scale=0.5).graph)
    assert text.splitlines() == [
        "attention(q[b,h,q,d], k[b,hk,kv,d], v[b,hk,kv,dv], scale)",
        "  s[b,h,q,kv] = sum_d q[b,h,q,d] k[b,hk,kv,d]",
        "  t[b,h,q,kv] = where(kv <= q + kv_len - q_len, s[b,h,q,kv] * scale, -inf)",
        "  m[b,h,q] = max_kv t[b,h,q,kv]",
        "  e[b,h,q,kv] = exp(t[b,h,q,kv] - finite(m[b,h,q]))",
        "  l[b,h,q] = sum_kv e[b,h,q,kv]",
        "  out[b,h,q,dv] = sum_kv (e[b,h,q,kv] / l[b,h,q]) v[b,hk,kv,dv]",
        "  lse[b,h,q] = m[b,h,q] + log(l[b,h,q])",
    ]


def test_a_formula_that_repeats_without_end_is_cut():
    x = fg.q * 0.5
    for _ in range(40):
        x = fg.sin(x) * fg.cos(x)
    assert len(repr(x.node)) < 100


PYTHON = {
    "where": lambda c, x, y: x if c else y,
    "minimum": min,
    "maximum": max,
    "exp": math.exp,
    "sin": math.sin,
    "tanh": math.tanh,
    "floor": math.floor,
    "abs": abs,
    "int": int,
}


def drawn(rng, depth, kind):
    """A random expression of integers, truth values or floating-point values."""
    if kind == "int":
        if depth == 0:
            return rng.choice([fg.q, fg.kv, fg.size("q"), fg.q - 3, fg.kv * 2])
        x, y = drawn(rng, depth - 1, "int"), drawn(rng, rng.randrange(depth), "int")
        n = rng.randint(2, 5)
        return rng.choice(
            [
                x + y,
                x - y,
                -x,
                x * n,
                x * y,
                x // n,
                x % n,
                x // -n,
                abs(x),
                fg.minimum(x, y),
                fg.maximum(x, n),
                fg.where(drawn(rng, depth - 1, "bool"), x, y),
            ]
        )
    if kind == "bool":
        x, y = (drawn(rng, max(depth - 1, 0), "int") for _ in range(2))
        if depth == 0:
            return rng.choice([x < y, x <= 3, x == y])
        a, b = drawn(rng, depth - 1, "bool"), drawn(rng, depth - 1, "bool")
        return rng.choice([a & b, a | b, ~a, ~(a | b), x < y, x == y, x != y, x >= y + 2])
    if depth == 0:
        return rng.choice([fg.q * 0.5, fg.kv - 1.25, fg.q / 3])
    x, y = drawn(rng, depth - 1, "float"), drawn(rng, rng.randrange(depth), "float")
    return rng.choice(
        [
            x + y,
            x - y,
            x - (y - x),
            -x,
            x * y,
            x * -0.5,
            x / 4,
            x / (abs(y) + 1),
            (x + y) * (x - y),
            fg.sin(x),
            x - fg.sin(y) * 2.0,
            fg.where(drawn(rng, depth - 1, "bool"), x, y),
            x * drawn(rng, depth - 1, "int"),
        ]
    )


@pytest.mark.parametrize("kind", ["int", "bool", "float"])
@pytest.mark.parametrize("seed", range(60))
def test_a_formula_read_by_python_has_the_value_of_the_node(kind, seed):
    rng = random.Random(f"{kind} {seed}")
    node = drawn(rng, 3, kind).node
    (value,) = evaluate_nodes([node], {}, {"q": 6, "kv": 4})
    for axis, place in (("q", 0), ("kv", 1)):
        if axis not in node.axes:
            value = value.unsqueeze(place)
    value = value.expand(6, 4)
    text = show(node).replace("-inf", "(-inf)")
    for q in range(6):
        for kv in range(4):
            found = eval(text, {"q": q, "kv": kv, "q_len": 6, "inf": math.inf, **PYTHON})
            expected = torch.tensor(found, dtype=torch.float64)
            torch.testing.assert_close(value[q, kv].double(), expected, rtol=1e-9, atol=1e-9, msg=text)
