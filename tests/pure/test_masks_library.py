"""The masks of the library, and masks a user writes: which pairs they allow."""

import pytest
import torch

import fagen as fg
from fagen.errors import UsageError
from fagen.ir.graph import Input
from fagen.ir.reference import evaluate_nodes
from fagen.lang.expr import Expr
from masks import MASKS, dense, tables_of


def counted(allowed: torch.Tensor) -> tuple[int, int, int]:
    q, kv = allowed.nonzero(as_tuple=True)
    return int(allowed.sum()), int((1000 * q + kv).sum()), int((~allowed.any(1)).sum())


@pytest.mark.parametrize("name", MASKS)
def test_counts_of_the_file(name):
    case = MASKS[name]
    allowed = dense(case.build(), case.q_len, case.kv_len)
    assert counted(allowed) == (case.attended, case.checksum, case.empty_rows)


def brute(rule, q_len, kv_len):
    return torch.tensor([[bool(rule(q, kv)) for kv in range(kv_len)] for q in range(q_len)]).reshape(
        q_len, kv_len
    )


LENGTHS = [(1, 1), (7, 7), (5, 12), (12, 5), (0, 4), (4, 0)]


@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
def test_causal_is_bottom_right_unless_asked_otherwise(q_len, kv_len):
    shift = kv_len - q_len
    for mask, rule in (
        (fg.causal(), lambda q, kv: kv <= q + shift),
        (fg.causal(align="top_left"), lambda q, kv: kv <= q),
    ):
        assert torch.equal(dense(mask, q_len, kv_len), brute(rule, q_len, kv_len))


@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
@pytest.mark.parametrize("left", [None, 0, 3])
@pytest.mark.parametrize("right", [None, 0, 2])
def test_a_window_of_zero_is_zero_and_of_none_unbounded(q_len, kv_len, left, right):
    shift = kv_len - q_len

    def rule(q, kv):
        after_left = left is None or q + shift - kv <= left
        return after_left and (right is None or kv - q - shift <= right)

    assert torch.equal(dense(fg.sliding_window(left, right), q_len, kv_len), brute(rule, q_len, kv_len))
    if (left, right) == (None, 0):
        assert fg.sliding_window(None, 0).node is fg.causal().node


def test_parameters_may_be_arguments():
    for build in (fg.sliding_window, fg.prefix_lm, fg.chunked):
        held = build(fg.scalar(3))
        value = evaluate_nodes([held.node], {c.node: 3 for c in held.captures}, {"q": 9, "kv": 9})[0]
        assert torch.equal(value, dense(build(3), 9, 9))


def test_tables_for_each_sequence_of_a_batch():
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 2]])
    sizes = {"b": 2, "q": 4, "kv": 4}
    for mask, expected in (
        (fg.document(ids), ids[:, :, None] == ids[:, None, :]),
        (fg.document_lengths(torch.tensor([[2, 2, 0], [1, 2, 1]])), ids[:, :, None] == ids[:, None, :]),
        (fg.padding(torch.tensor([1, 3])), (torch.arange(4) < torch.tensor([[1], [3]]))[:, None, :]),
        (
            fg.prefix_lm(torch.tensor([1, 3])),
            (torch.arange(4) < torch.tensor([1, 3])[:, None, None])
            | (torch.arange(4) <= torch.arange(4)[:, None]),
        ),
        (fg.global_tokens(ids == 1), (ids == 1)[:, :, None] | (ids == 1)[:, None, :]),
        (fg.global_tokens((ids == 1).int()), (ids == 1)[:, :, None] | (ids == 1)[:, None, :]),
    ):
        (value,) = evaluate_nodes([mask.node], tables_of(mask), sizes)
        shown = value if value.dim() == 3 else value[:, None, :]
        assert torch.equal(shown.expand(2, 4, 4), expected.expand(2, 4, 4)), mask


def test_a_declared_table_stands_for_a_captured_one():
    ids, lengths = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 2]]), torch.tensor([1, 3])
    sizes = {"b": 2, "q": 4, "kv": 4}

    def value(mask, tables):
        (found,) = evaluate_nodes([mask.node], tables, sizes)
        return found

    for build, table, layout in (
        (fg.document, ids, ("b", "kv")),
        (fg.document, ids[1], ("kv",)),
        (fg.global_tokens, ids, ("b", "q")),
        (fg.padding, lengths, ("b",)),
        (fg.prefix_lm, lengths, ("b",)),
    ):
        declared = Input("table", 3, layout, "int", False)
        captured = build(table)
        expected = value(captured, tables_of(captured))
        assert torch.equal(value(build(Expr(declared)), {declared: table}), expected), build


def test_lengths_of_documents_are_a_sorted_table_and_what_follows_is_apart():
    mask = fg.document_lengths(torch.tensor([2, 0, 1]))
    (table,) = tables_of(mask)
    assert table.sorted
    expected = [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1]]
    assert dense(mask, 5, 5).int().tolist() == expected
    assert dense(fg.document_lengths(torch.zeros(0, dtype=torch.int64)), 2, 3).all()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 3), (1, 1), (63, 130)])
def test_tables_are_redrawn_for_other_lengths(name, q_len, kv_len):
    case = MASKS[name]
    one, two = (dense(case.build(q_len, kv_len, seed=4), q_len, kv_len) for _ in range(2))
    assert torch.equal(one, two)
    assert one.shape == (q_len, kv_len)


def test_labels_read_as_the_call():
    assert repr(fg.causal() & ~fg.sliding_window(17, right=5)) == "causal() & ~sliding_window(17, right=5)"
    assert repr((fg.causal() | fg.chunked(4)) & fg.padding(torch.tensor([3]))) == (
        "(causal() | chunked(4)) & padding(lengths)"
    )
    assert repr(fg.sliding_window(fg.scalar(3))) == "sliding_window(left)"


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (lambda: fg.causal("bottom"), "causal: align is 'bottom'; it is 'bottom_right' or 'top_left'"),
        (lambda: fg.sliding_window(-1), "sliding_window: left is -1; it is 0 or more"),
        (lambda: fg.sliding_window(3, -2), "sliding_window: right is -2; it is 0 or more"),
        (lambda: fg.sliding_window(2.5), "sliding_window: left is 2.5; it is a whole number"),
        (lambda: fg.sliding_window(True), "sliding_window: left is True; it is a whole number"),
        (lambda: fg.sliding_window(fg.scalar(1.5)), "sliding_window: left is .*; it is a whole number"),
        (lambda: fg.chunked(0), "chunked: size is 0; it is 1 or more"),
        (lambda: fg.dilated(3, 0), "dilated: step is 0; it is 1 or more"),
        (lambda: fg.prefix_lm("4"), "prefix_lm: prefix is '4'; it is a whole number"),
        (lambda: fg.document([0, 1]), r"document: ids is \[0, 1\]; it is a tensor \(S,\) or \(B, S\)"),
        (lambda: fg.document(fg.q), r"document: ids is q; it is a tensor \(S,\) or \(B, S\)"),
        (
            lambda: fg.global_tokens(torch.zeros(2, 3, 4)),
            r"global_tokens: flags is a tensor of shape \(2, 3, 4\); it is a tensor \(S,\) or \(B, S\)",
        ),
        (
            lambda: fg.document_lengths([3, 4]),
            r"document_lengths: lengths is \[3, 4\]; it is an integer tensor",
        ),
        (lambda: fg.padding(3), r"padding: lengths is 3; it is an integer tensor \(B,\)"),
        (
            lambda: fg.padding(torch.ones(2)),
            r"padding: lengths is a tensor of torch.float32; it is an integer",
        ),
        (lambda: fg.padding(fg.q * 0.5), "padding: lengths is .*; it is an integer tensor"),
        (
            lambda: fg.prefix_lm(torch.ones(2) > 0),
            "prefix is a tensor of torch.bool; it is an integer tensor",
        ),
        (
            lambda: fg.document_lengths(torch.ones(2)),
            "lengths is a tensor of torch.float32; it is an integer",
        ),
        (lambda: fg.neighbourhood_2d(8, 8, 4, 3), "neighbourhood_2d: window_w is 4; it is odd and at most 8"),
        (lambda: fg.neighbourhood_2d(8, 3, 3, 5), "neighbourhood_2d: window_h is 5; it is odd and at most 3"),
        (lambda: fg.block_diffusion(8, 0), "block_diffusion: block is 0; it is 1 or more"),
    ],
)
def test_a_mistake_is_answered_in_one_sentence(mistake, sentence):
    with pytest.raises(UsageError, match=sentence):
        mistake()
