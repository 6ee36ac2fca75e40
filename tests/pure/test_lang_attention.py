"""The usual program built from parts: what is asked for, how it is described, what is refused."""

import functools
import math

import pytest
import torch

import fagen as fg
from fagen.errors import DtypeError, UsageError
from fagen.ir import graph as ir
from fagen.ir.reference import evaluate
from fagen.lang.attention import attention


def test_the_plain_graph_equals_the_program_written_out():
    @fg.program
    def program(q: fg.Tensor["b h q d"], k: fg.Tensor["b hk kv d"], v: fg.Tensor["b hk kv dv"]):
        s = fg.dot(q, k, over="d") * fg.rsqrt(fg.size("d"))
        s = 30.0 * fg.tanh(s * (1 / 30.0))
        s = fg.where(fg.kv <= fg.q + (fg.size("kv") - fg.size("q")), s, -fg.inf)
        m = fg.max(s, over="kv")
        e = fg.exp(s - m)
        total = fg.sum(e, over="kv")
        return fg.dot(e / total, v, over="kv"), m + fg.log(total)

    built = attention(mask=fg.causal(), score=fg.softcap(30.0), return_lse=True).graph
    written = program.trace().graph
    assert [o.node for o in built.outputs] == [o.node for o in written.outputs]


def test_softmax_with_a_sink_equals_the_program_written_out():
    sink = fg.capture(torch.zeros(4), "h")

    @fg.program
    def program(q: fg.Tensor["b h q d"], k: fg.Tensor["b hk kv d"], v: fg.Tensor["b hk kv dv"]):
        s = fg.dot(q, k, over="d") * fg.rsqrt(fg.size("d"))
        m = fg.maximum(sink, fg.max(s, over="kv"))
        total = fg.exp(sink - m) + fg.sum(fg.exp(-m + s), over="kv")
        return fg.dot(v, fg.exp(s - m) / total, over="kv")

    assert attention(sink=sink).graph.outputs[0].node is program.trace().graph.outputs[0].node


def test_layouts():
    for layout, axes in (("bhsd", ("b", "h", "q", "dv")), ("bshd", ("b", "q", "h", "dv"))):
        graph = attention(layout=layout, return_lse=True).graph
        assert [o.layout for o in graph.outputs] == [axes, ("b", "h", "q")]
        assert [o.name for o in graph.outputs] == ["out", "lse"]


def test_the_scale_is_an_argument():
    first, second = attention(scale=0.5), attention(scale=0)
    assert first.graph is second.graph
    assert [a.name for a in first.graph.arguments] == ["q", "k", "v", "scale"]
    assert (first.captured, second.captured) == ((0.5,), (0.0,))
    q = torch.randn(1, 1, 3, 4)
    (out,) = evaluate(second.graph, (q, q, q, 0.0))
    torch.testing.assert_close(out[0, 0], q[0, 0].double().mean(0).expand(3, 4))


@pytest.mark.parametrize("shape", [(5,), (4, 5), (3, 4, 5), (1, 1, 5), (2, 1, 4, 1), (2, 3, 4, 5), ()])
def test_a_bias_of_any_shape_that_broadcasts(shape):
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    bias = torch.randn(shape)
    traced = attention(bias=bias)
    (out,) = evaluate(traced.graph, (q, k, v, bias))
    weights = (q.double() @ k.double().mT / math.sqrt(8) + bias).softmax(-1)
    torch.testing.assert_close(out, weights @ v.double(), rtol=1e-6, atol=1e-6)


def test_scores_are_applied_in_order():
    def double(s):
        return s * 2.0

    def shift(s):
        return s + fg.q

    one, two = attention(score=[double, shift]).graph, attention(score=[shift, double]).graph
    assert one.outputs[0].node is not two.outputs[0].node
    assert one.about == "attention(q, k, v, score=[double, shift])"


def test_a_partial_and_a_method_are_scores():
    class Model:
        slope = 0.5

        def score(self, s):
            return s + self.slope * fg.kv

    def sloped(s, slope):
        return s + slope * fg.kv

    model = Model()
    first = attention(score=model.score).graph
    assert first.outputs == attention(score=functools.partial(sloped, slope=0.5)).graph.outputs
    model.slope = 0.25
    assert attention(score=model.score).graph.outputs != first.outputs


def test_each_lambda_is_its_own_whatever_its_source_line():
    scores = [lambda s: fg.where(fg.q < 128, s, -fg.inf), lambda s: fg.where(fg.q < 256, s, -fg.inf)]
    one, two = (attention(score=score).graph for score in scores)
    assert one.outputs[0].node is not two.outputs[0].node


def test_a_fresh_lambda_gives_the_same_graph_object():
    def call():
        return attention(mask=fg.causal(), score=lambda s: s + fg.h * (fg.kv - fg.q), scale=0.3)

    assert call().graph is call().graph


def test_it_is_described_in_the_users_words():
    ids, slopes = torch.zeros(9, dtype=torch.int32), torch.zeros(2)
    mask = fg.causal() & ~fg.document(ids) | fg.sliding_window(4, right=2)
    graph = attention(mask=mask, score=fg.alibi(slopes), dropout=0.1).graph
    assert graph.about == (
        "attention(q, k, v, score=alibi(slopes), "
        "mask=(causal() & ~document(ids)) | sliding_window(4, right=2), dropout=0.1)"
    )
    assert [a.name for a in graph.arguments] == ["q", "k", "v", "ids", "slopes"]


@pytest.mark.parametrize("mask", [True, fg.kv >= 0, fg.sliding_window(None), fg.q == fg.q])
def test_a_mask_that_allows_everything(mask):
    q = torch.randn(1, 2, 3, 4)
    torch.testing.assert_close(
        evaluate(attention(mask=mask).graph, (q, q, q)), evaluate(attention().graph, (q, q, q))
    )


@pytest.mark.parametrize("mask", [False, fg.kv < 0, fg.q != fg.q, ~fg.sliding_window(None)])
def test_a_mask_that_allows_nothing(mask):
    q = torch.randn(1, 2, 3, 4)
    out, lse = evaluate(attention(mask=mask, return_lse=True).graph, (q, q, q))
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_dropout_in_a_score_and_on_the_weights_draw_other_bits():
    graph = attention(score=lambda s: fg.dropout(s, 0.5), dropout=0.5).graph
    nodes = ir.walk(o.node for o in graph.outputs)
    assert sorted(n.ordinal for n in nodes if isinstance(n, ir.Random)) == [0, 1]


BOOL = torch.zeros(3, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (
            {"mask": lambda s: s},
            "attention: mask is the function <lambda>; a mask is a condition such as fg.kv <= fg.q; ",
        ),
        ({"mask": fg.causal}, "attention: mask is the function causal; call it first: causal()"),
        ({"mask": fg.softcap(3.0)}, "attention: mask is the function .* of the score is given as score="),
        ({"mask": fg.q - fg.kv}, "attention: mask is q - kv, which is no truth value; a mask is a condition"),
        ({"mask": BOOL}, r"attention: mask is a tensor of shape \(3, 3\); name its axes: fg.capture\(mask"),
        ({"mask": "causal"}, "attention: mask is 'causal'; a mask is a condition such as fg.kv <= fg.q"),
        ({"score": fg.causal()}, "attention: score is .*, a mask; give it as mask="),
        ({"score": fg.q * 1.0}, "attention: score is q, an expression; a score is a function of the score"),
        ({"score": 3}, "attention: score is 3; a score is a function of the score"),
        ({"score": lambda s: None}, "attention: score <lambda> returned None; it returns an expression"),
        ({"score": lambda s: s < 0}, "attention: score <lambda> returned the mask .*; give a mask as mask="),
        (
            {"score": [fg.softcap]},
            r"attention: score is the function softcap; call it first: softcap\(\)",
        ),
        ({"score": lambda s: fg.softcap(2.0)}, "score <lambda> returned a function; call it first"),
        ({"scale": "1"}, "attention: scale is '1'; it is a number"),
        ({"scale": True}, "attention: scale is True; it is a number"),
        (
            {"bias": BOOL},
            r'attention: bias holds truth values; a mask is mask=fg.capture\(tensor, "b h q kv"\)',
        ),
        ({"bias": torch.zeros(1, 1, 1, 1, 1)}, r"bias has the shape \(1, 1, 1, 1, 1\); it broadcasts to"),
        ({"bias": 3.0}, "bias is 3.0; it is a tensor, or an expression"),
        ({"sink": 3.0}, r"sink is 3.0; it is a tensor \(H,\), or an expression"),
        ({"sink": torch.zeros(2, 2)}, r"the sink tensor has shape \(2, 2\), and 'h' names 1 dimension;"),
        ({"layout": "sbhd"}, "attention: layout is 'sbhd'; it is 'bhsd' or 'bshd'"),
        ({"dropout": 2}, "attention: dropout has the rate 2; a rate is a Python number from 0 to 1"),
    ],
)
def test_a_mistake_is_answered_in_one_sentence(parts, sentence):
    with pytest.raises((UsageError, DtypeError), match=sentence):
        attention(**parts)
