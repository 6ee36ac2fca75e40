"""Masks and scores written as text: what they mean, and what is answered to mistakes in them."""

from __future__ import annotations

import pytest
import torch

import fagen as fg
from fagen.errors import FagenError
from fagen.lang.attention import attention
from fagen.study.expression import NAMES, mask_of, score_of
from fagen.study.tables import Lengths, Table

LENGTHS = Lengths(batch=2, q_heads=4, kv_heads=2, q_len=100, kv_len=120)


def graph(mask=None, score=None):
    return attention(mask=mask, score=score).graph


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", fg.causal()),
        ("causal()", fg.causal()),
        ("fg.causal", fg.causal()),
        ("causal(align='top_left')", fg.causal(align="top_left")),
        ("causal & sliding_window(1024)", fg.causal() & fg.sliding_window(1024)),
        ("~causal | chunked(64)", ~fg.causal() | fg.chunked(64)),
        ("sliding_window(4, right=None)", fg.sliding_window(4)),
        ("kv <= q", fg.kv <= fg.q),
        ("(kv <= q) & (q - kv < 2 * 5 + 1)", (fg.kv <= fg.q) & (fg.q - fg.kv < 11)),
        ("q // 3 == kv // 3", fg.q // 3 == fg.kv // 3),
        ("abs(q - kv) % 7 != 0", abs(fg.q - fg.kv) % 7 != 0),
        ("where(h < 2, kv, -kv) <= size('kv') - 5", fg.where(fg.h < 2, fg.kv, -fg.kv) <= fg.size("kv") - 5),
        ("prefix_lm(7)", fg.prefix_lm(7)),
        ("True", True),
    ],
)
def test_a_mask_means_what_python_says(text, mask):
    assert graph(mask_of(text, LENGTHS)).outputs == graph(mask).outputs


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("softcap(30)", fg.softcap(30)),
        ("alibi", fg.alibi()),
        ("[softcap(30.0), alibi]", [fg.softcap(30.0), fg.alibi()]),
        ("lambda s: s + h * (kv - q)", lambda s: s + fg.h * (fg.kv - fg.q)),
        ("lambda s: 3 * sigmoid(s) - 1", lambda s: 3 * fg.sigmoid(s) - 1),
        ("lambda causal: causal * 2", lambda s: s * 2),
        ("temperature(0.5)", fg.temperature(0.5)),
    ],
)
def test_a_score_means_what_python_says(text, score):
    assert graph(score=score_of(text, LENGTHS)).outputs == graph(score=score).outputs


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("causal & sliding_window(8)", "mask=causal() & sliding_window(8)"),
        ("kv  <=\tq", "mask=kv <= q"),
        ("document_lengths([3, 4])", "mask=document_lengths(lengths)"),
    ],
)
def test_a_mask_is_called_as_it_was_written(text, label):
    assert label in graph(mask_of(text, LENGTHS)).about


def test_a_lambda_is_called_as_it_was_written():
    text = "lambda s: s + h * (kv - q)"
    assert f"score={text}" in graph(score=score_of(text, LENGTHS)).about


def captured(mask=None, score=None):
    (value,) = (each for each in attention(mask=mask, score=score).captured if isinstance(each, Table))
    made = value.tensor(torch.Generator().manual_seed(0))
    assert tuple(made.shape) == value.shape
    assert str(made.dtype) == f"torch.{value.dtype}"
    return made


def test_a_list_is_a_tensor():
    assert captured(mask_of("document([0, 0, 1])", LENGTHS)).tolist() == [0, 0, 1]
    assert captured(mask_of("padding([5, 120])", LENGTHS)).tolist() == [5, 120]
    assert captured(mask_of("global_tokens([True, False])", LENGTHS)).tolist() == [True, False]
    assert captured(score=score_of("temperature([1, 2.5])", LENGTHS)).tolist() == [1.0, 2.5]
    table = captured(mask_of("document([[0, 1], [2, 2]])", LENGTHS))
    assert table.tolist() == [[0, 1], [2, 2]]
    assert captured(mask_of(f"document([0, {2**40}])", LENGTHS)).tolist() == [0, 2**40]


def test_document_lengths_are_those_of_the_library():
    text, lengths = "document_lengths([[3, 2], [1, 1]])", torch.tensor([[3, 2], [1, 1]])
    (ids,) = attention(mask=fg.document_lengths(lengths)).captured
    made = captured(mask_of(text, LENGTHS))
    at = torch.arange(8)

    def rows(table):
        return table[:, at.clamp(max=table.shape[1] - 1)]

    assert rows(made).tolist() == rows(ids).tolist()
    assert graph(mask_of(text, LENGTHS)).outputs == graph(fg.document_lengths(lengths)).outputs


@pytest.mark.parametrize("text", ["document", "document_lengths", "prefix_lm", "padding", "global_tokens()"])
def test_a_table_nobody_gives_is_made_up(text):
    made = captured(mask_of(text, LENGTHS))
    assert (made == captured(mask_of(text, LENGTHS))).all()
    if text.startswith("document"):
        assert made.shape == (2, 120)
        assert (made.diff() >= 0).all()
        assert len(made.unique()) > 1
    elif text == "global_tokens()":
        assert made.shape == (120,)
        assert made[0]
        assert not made.all()
    else:
        assert made.shape == (2,)
        assert ((made >= 0) & (made <= 120)).all()


def test_a_table_of_biases_has_a_place_for_every_distance():
    table = captured(score=score_of("relative_bias", LENGTHS))
    assert table.shape == (4, 2 * 120 - 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("caussal", "--mask: caussal is no name of the library; did you mean causal?"),
        ("zzz", "--mask: zzz is no name of the library; the library has alibi, block_diffusion, causal, "),
        (
            "sliding_window",
            "--mask: sliding_window: missing a required argument: 'left'; it takes left, right=None",
        ),
        ("causal(3, 4)", "--mask: causal: too many positional arguments; it takes align='bottom_right'"),
        ("sliding_window(-1)", "sliding_window: left is -1; it is 0 or more"),
        (
            "q and kv",
            "--mask: q and kv cannot stand in an expression; use & | ~ for and, or, not, with comparisons in "
            "parentheses",
        ),
        ("not causal", "--mask: not causal cannot stand in an expression; use & | ~ for and, or, not"),
        (
            "kv <= q <= 3",
            "--mask: kv <= q <= 3 cannot stand in an expression; compare two values at a time: "
            "(a <= x) & (x < b)",
        ),
        (
            "q if kv else q",
            "--mask: q if kv else q cannot stand in an expression; use where(condition, x, y)",
        ),
        ("kv <=", "--mask: 'kv <=' is no expression (invalid syntax)"),
        ("", "--mask: '' is no expression (invalid syntax)"),
        ("1 / 0 < q", "--mask: '1 / 0 < q': division by zero"),
        ("q // 0 < kv", "q // 0 is a division by zero"),
        ("exp < 3", "--mask: exp is no value an operator takes"),
        ("'a' * 1000000000 < q", "--mask: 'a' is no value an operator takes"),
        ("3(q)", "--mask: 3 cannot stand in an expression"),
        ("q(3)", "--mask: q is no function, and is called"),
        ("document(3)", "document: ids is 3; it is a tensor (S,) or (B, S)"),
        ("document([[1, 2], [3]])", "the rows of the table [[1, 2], [3]] differ in shape"),
        ("document(**q)", "--mask: document(**q) has an argument **; name each argument"),
        pytest.param("(" * 500 + "q" + ")" * 500, "--mask: '((((((((((", id="parentheses"),
        pytest.param("9" * 5000 + " < q", "--mask: '9999999999", id="digits"),
    ],
)
def test_a_mistake_is_answered_in_one_sentence(text, sentence):
    with pytest.raises(FagenError) as caught:
        mask_of(text, LENGTHS)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "q.__class__",
        "causal.__globals__",
        "(lambda: 1)()",
        "[x for x in (1,)]",
        "f'{q}'",
        "exp(*[q])",
        "open('x')",
        "capture",
        "program",
        "q[0]",
        "10 ** 10",
        "1 << 100",
        "{1: 2}",
        "(q := 3)",
    ],
)
def test_nothing_else_is_evaluated(text):
    with pytest.raises(FagenError, match=r"cannot stand in an expression|is no name of the library"):
        mask_of(text, LENGTHS)
    assert text not in NAMES


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("causal", "attention: score is kv <= q .*, a mask; give it as mask="),
        ("lambda: 3", "--score: lambda ?: 3 was given 1 value; a score is a function of the score alone"),
        ("lambda s, *rest: s", r"--score: lambda s, \*rest: s takes more than plain parameters"),
        ("lambda s: s.x", r"--score: s\.x cannot stand in an expression"),
        ("lambda s: foo(s)", "--score: foo is no name of the library"),
        ("lambda s: s + 'a'", "--score: 'a' is no value an operator takes"),
        ("softcap(0)", "softcap: cap is 0; it is a number above 0"),
    ],
)
def test_a_mistake_in_a_score_is_answered_in_one_sentence(text, sentence):
    with pytest.raises(FagenError, match=f"^{sentence}"):
        graph(score=score_of(text, LENGTHS))
