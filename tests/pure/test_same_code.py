"""Nothing is matched: the library, retyped with other names and terms in another order, gives the same.

Two programs are the same if their graphs are, names aside, and their derivations.
"""

import pytest
import torch

import fagen as fg
from fagen.derive.gradient import gradient
from fagen.derive.streaming import derive
from fagen.lang.attention import attention
from fagen.run.source import without_comments
from gradients import floats
from streams import K, Q, V

# ------------------------------------------------------------------------------------------------- signatures


def graph_signature(graph):
    """A graph without names."""
    arguments = tuple(argument.digest for argument in graph.arguments)
    return arguments, tuple((output.layout, output.node.digest) for output in graph.outputs)


def derivation_signature(derivation):
    """Everything of a derivation but the names of programs, arguments and outputs."""
    return tuple(
        (
            stage.own,
            stage.walk,
            tuple(walk_signature(walk) for walk in stage.walks),
            tuple((output.layout, output.node.digest) for output in stage.outputs),
        )
        for stage in derivation.stages
    )


def walk_signature(walk):
    return (
        walk.guard.digest,
        tuple(
            (p.symbol.digest, tuple((term.own.digest, term.walk.digest, term.over) for term in p.terms))
            for p in walk.products
        ),
        tuple(
            (
                state.symbol.digest,
                state.op,
                state.value.digest,
                state.operand and state.operand.digest,
                state.features,
                state.rescale and state.rescale.digest,
            )
            for state in walk.states
        ),
        tuple((output.layout, output.node.digest) for output in walk.stores),
    )


def gradient_signature(graph):
    """The backward direction without names: the same graph has the same derivation."""
    both = gradient(graph, floats(graph))
    return both.sources, graph_signature(both.backward), graph_signature(both.forward)


def same(one, other):
    assert graph_signature(one) == graph_signature(other)
    assert gradient_signature(one) == gradient_signature(other)
    for fusion in ("full", "products", "none"):
        assert derivation_signature(derive(one, fusion)) == derivation_signature(derive(other, fusion))


def differ(one, other):
    assert graph_signature(one) != graph_signature(other)
    assert gradient_signature(one) != gradient_signature(other)
    assert derivation_signature(derive(one)) != derivation_signature(derive(other))


# -------------------------------------------------------------------------------------------------- retyped


def retyped(mask=None, score=lambda u: u, sink=None, rate=0.0, lse=False):
    """`attention` written out by somebody else."""

    def _(a: Q, c: K, w: V):
        u = score(fg.rsqrt(fg.size("d")) * fg.dot(c, a, over="d"))
        if mask is not None:
            u = fg.where(~mask, -fg.inf, u)
        top = fg.max(u, over="kv")
        if sink is not None:
            top = fg.maximum(sink, top)
        e = fg.exp(-top + u)
        below = fg.sum(e, over="kv")
        if sink is not None:
            below = fg.exp(sink - top) + below
        out = fg.dot(w, fg.dropout(e / below, rate), over="kv")
        return (out, fg.log(below) + top) if lse else out

    return fg.program(_).trace().graph


def integers(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def numbers(*shape):
    return torch.ones(shape)


IDS, FLAGS, LENGTHS = integers(3, 50), torch.zeros(50, dtype=torch.bool), integers(3)
SLOPES, TABLE, SINK, HEADS = numbers(4), numbers(4, 21), numbers(4), numbers(4)
SIZE_Q, SIZE_KV = fg.size("q"), fg.size("kv")


def document():
    number = fg.capture(IDS, "b position")
    return number[fg.b, fg.kv] == number[fg.b, fg.q]


def documents():
    """As `document_lengths` of two documents of 3 and 5 tokens: a sorted table of numbers."""
    number = fg.capture(torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2], dtype=torch.int32), "position", sorted=True)
    return number[fg.kv] == number[fg.q]


def global_tokens():
    seen = fg.capture(FLAGS, "position")
    return seen[fg.kv] | seen[fg.q]


def nearby():
    row = fg.minimum(4, fg.maximum(1, fg.q // 8))
    column = fg.minimum(5, fg.maximum(2, fg.q % 8))
    return (abs(-(fg.kv % 8) + column) <= 2) & ~(abs(-(fg.kv // 8) + row) > 1)


def diffusion():
    n, size = 24, 4
    clean_a, clean_b = fg.q >= n, fg.kv >= n
    a, b = fg.q % n // size, fg.kv % n // size
    return (
        (clean_a & clean_b & (b <= a))
        | (~clean_a & clean_b & (b < a))
        | ((((n > fg.kv) & (n > fg.q)) | ((fg.kv >= n) & (fg.q >= n))) & (b == a))
    )


MASKS = {
    "causal": (fg.causal(), lambda: fg.size("kv") + fg.q - fg.size("q") >= fg.kv),
    "causal, top left": (fg.causal(align="top_left"), lambda: ~(fg.kv > fg.q)),
    "sliding_window": (
        fg.sliding_window(9, 2),
        lambda: ~(SIZE_Q - SIZE_KV + fg.kv > fg.q + 2) & (fg.q + SIZE_KV <= fg.kv + SIZE_Q + 9),
    ),
    "sliding_window, to the left": (fg.sliding_window(9), lambda: fg.q + SIZE_KV - 9 <= fg.kv + SIZE_Q),
    "prefix_lm": (fg.prefix_lm(7), lambda: ~((fg.q < fg.kv) & (fg.kv >= 7))),
    "prefix_lm of a table": (
        fg.prefix_lm(LENGTHS),
        lambda: (fg.q >= fg.kv) | (fg.capture(LENGTHS, "b") > fg.kv),
    ),
    "document": (fg.document(IDS), document),
    "document_lengths": (fg.document_lengths(torch.tensor([3, 5])), documents),
    "chunked": (fg.chunked(8), lambda: fg.kv // 8 == fg.q // 8),
    "dilated": (
        fg.dilated(12, 3),
        lambda: (abs(-fg.kv + fg.q) % 3 == 0) & ~(abs(fg.q - fg.kv) > 12),
    ),
    "global_tokens": (fg.global_tokens(FLAGS), global_tokens),
    "neighbourhood_2d": (fg.neighbourhood_2d(8, 6, 5, 3), nearby),
    "block_diffusion": (fg.block_diffusion(24, 4), diffusion),
    "padding": (fg.padding(LENGTHS), lambda: ~(fg.capture(LENGTHS, "b") <= fg.kv)),
    "causal & sliding_window": (
        fg.causal() & fg.sliding_window(9),
        lambda: (SIZE_KV + fg.q <= SIZE_Q + 9 + fg.kv) & ~(SIZE_Q + fg.kv > SIZE_KV + fg.q),
    ),
    "~causal | chunked": (
        ~fg.causal(align="top_left") | fg.chunked(4),
        lambda: ~((fg.q >= fg.kv) & ((fg.kv // 4) != (fg.q // 4))),
    ),
}

SCORES = {
    "softcap": (fg.softcap(30.0), lambda u: fg.tanh((1.0 / 30.0) * u) * 30.0),
    "exact softcap": (fg.softcap(5.0, exact=True), lambda u: fg.tanh(0.2 * u, exact=True) * 5.0),
    "alibi": (
        fg.alibi(),
        lambda u: (-fg.q + fg.kv) * fg.exp2((-8.0 / fg.size("h")) * (1 + fg.h)) + u,
    ),
    "alibi of given slopes": (fg.alibi(SLOPES), lambda u: (fg.kv - fg.q) * fg.capture(SLOPES, "h") + u),
    "relative_bias": (
        fg.relative_bias(TABLE),
        lambda u: fg.capture(TABLE, "h distance")[fg.h, fg.scalar(10) - fg.kv + fg.q] + u,
    ),
    "temperature": (fg.temperature(2.0), lambda u: 0.5 * u),
    "temperature of heads": (fg.temperature(HEADS), lambda u: (1.0 / fg.capture(HEADS, "h")) * u),
}


def test_every_mask_and_score_of_the_library_is_retyped():
    from fagen.lang import masks, scores

    masked = {label.split(",")[0].split(" ")[0] for label in MASKS}
    scored = {label.replace("exact ", "").split(" ")[0] for label in SCORES}
    assert set(masks.__all__) <= masked
    assert set(scores.__all__) == scored


def test_softmax():
    same(attention().graph, retyped())
    same(attention(return_lse=True).graph, retyped(lse=True))
    same(attention(dropout=0.2).graph, retyped(rate=0.2))
    same(attention(sink=SINK).graph, retyped(sink=fg.capture(SINK, "h", name="drain")))
    differ(attention().graph, attention(dropout=0.2).graph)
    differ(attention().graph, attention(sink=SINK).graph)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    mask, write = MASKS[name]
    same(attention(mask=mask, return_lse=True).graph, retyped(mask=write(), lse=True))
    differ(attention(mask=mask).graph, attention().graph)


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    score, write = SCORES[name]
    same(attention(mask=fg.causal(), score=score).graph, retyped(fg.causal(), write))
    differ(attention(score=score).graph, attention().graph)


@pytest.mark.parametrize("name", ["softcap", "alibi", "relative_bias"])
def test_the_text_of_both_directions_is_the_same(name):
    score, write = SCORES[name]
    asked = {"head_dim": 64, "dtype": "bf16", "arch": "H100"}
    for direction in ("forward", "backward"):
        one = fg.compile(mask=fg.causal(), score=score, direction=direction, **asked)
        other = fg.compile(mask=MASKS["causal"][1](), score=write, direction=direction, **asked)
        assert without_comments(one.source) == without_comments(other.source)


def test_one_number_changes_the_program():
    differ(attention(mask=fg.sliding_window(9)).graph, attention(mask=fg.sliding_window(8)).graph)
    differ(attention(score=fg.softcap(30.0)).graph, attention(score=fg.softcap(31.0)).graph)


def test_a_softmax_of_another_form_has_the_same_walk():
    """``exp(s - logsumexp(s))`` is another graph; what is left to do along a row is not."""

    @fg.program
    def other(q: Q, k: K, v: V):
        s = fg.where(fg.causal(), fg.dot(q, k, over="d") * fg.rsqrt(fg.size("d")), -fg.inf)
        return fg.dot(fg.exp(s - fg.logsumexp(s)), v, over="kv")

    one, two = attention(mask=fg.causal()).graph, other.trace().graph
    assert graph_signature(one) != graph_signature(two)
    assert derivation_signature(derive(one)) == derivation_signature(derive(two))


def test_what_the_axes_of_a_table_are_called_is_for_people():
    def scored(axes):
        table = fg.capture(torch.zeros(3, 7), axes, name="table")
        return attention(score=lambda s: s + table[fg.h % 3, fg.minimum(abs(fg.q - fg.kv), 6)]).graph

    assert scored("kinds distances") is scored("x a")
    shared = fg.capture(torch.zeros(3, 7), "h n", name="table")
    assert attention(score=lambda s: s + shared[fg.h, fg.q]).graph.arguments[-1].layout == ("h", "i0")
