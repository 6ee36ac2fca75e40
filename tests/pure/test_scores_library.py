"""The scores of the library against the formulas of their papers."""

import math

import pytest
import torch

import fagen as fg
from fagen.errors import DtypeError, UsageError
from fagen.ir.reference import evaluate
from fagen.lang.attention import attention

H, Q_LEN, KV_LEN = 4, 6, 9
ROWS, COLUMNS = torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)[None]


def scored(score):
    """The score of each pair, (h, q, kv), before and after ``score``."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, H, n, 5, generator=generator) * 3 for n in (Q_LEN, KV_LEN))

    @fg.program
    def program(q: fg.Tensor["b h q d"], k: fg.Tensor["b hk kv d"]):
        s = fg.dot(q, k, over="d")
        return s, score(s)

    traced = program.trace()
    before, after = evaluate(traced.graph, (q, k, *traced.captured))
    return before[0], after[0]


@pytest.mark.parametrize("cap", [2.5, 30])
@pytest.mark.parametrize("exact", [False, True])
def test_softcap(cap, exact):
    before, after = scored(fg.softcap(cap, exact))
    torch.testing.assert_close(after, cap * torch.tanh(before / cap))
    assert after.abs().max() <= cap


def test_alibi_of_its_own_slopes():
    before, after = scored(fg.alibi())
    slopes = torch.tensor([2 ** (-8 * (h + 1) / H) for h in range(H)], dtype=torch.float64)
    torch.testing.assert_close(after, before + slopes[:, None, None] * (COLUMNS - ROWS))


def test_alibi_of_given_slopes():
    slopes = torch.tensor([0.5, -0.25, 0.0, 3.0])
    before, after = scored(fg.alibi(slopes))
    torch.testing.assert_close(after, before + slopes.double()[:, None, None] * (COLUMNS - ROWS))


@pytest.mark.parametrize("n", [1, 4, 20])
def test_relative_bias_reads_its_table_by_distance_and_clamps(n):
    table = torch.randn(H, 2 * n - 1)
    before, after = scored(fg.relative_bias(table))
    places = (ROWS - COLUMNS + n - 1).clamp(0, 2 * n - 2)
    torch.testing.assert_close(after, before + table.double()[:, places])


def test_relative_bias_of_another_length_is_the_same_program():
    graphs = {attention(score=fg.relative_bias(torch.zeros(H, 2 * n - 1))).graph for n in (3, 50)}
    assert len(graphs) == 1


def test_declared_tables_stand_for_captured_ones():
    slopes, table = torch.tensor([0.5, -0.25, 0.0, 3.0]), torch.randn(H, 7)

    @fg.program
    def program(q: fg.Tensor["b h q d"], k: fg.Tensor["b hk kv d"], a: fg.Tensor["h"], t: fg.Tensor["h n"]):
        return fg.relative_bias(t)(fg.alibi(a)(fg.dot(q, k, over="d")))

    q, k = torch.randn(1, H, Q_LEN, 5), torch.randn(1, H, KV_LEN, 5)
    (found,) = evaluate(program.trace().graph, (q, k, slopes, table))
    places = (ROWS - COLUMNS + 3).clamp(0, 6)
    expected = q.double() @ k.double().mT + slopes.double()[:, None, None] * (COLUMNS - ROWS)
    torch.testing.assert_close(found, expected + table.double()[:, places])


@pytest.mark.parametrize("t", [2.0, torch.tensor(2.0), torch.tensor([1.0, 2.0, 4.0, 0.5])])
def test_temperature(t):
    before, after = scored(fg.temperature(t))
    divisor = torch.as_tensor(t, dtype=torch.float64).reshape(-1, 1, 1)
    torch.testing.assert_close(after, before / divisor)


def test_parameters_may_be_arguments():
    for build in (fg.softcap, fg.temperature):
        assert attention(score=build(fg.scalar(2.0))).graph is attention(score=build(fg.scalar(9.0))).graph
        before, after = scored(build(fg.scalar(2.0)))
        torch.testing.assert_close(after, scored(build(2.0))[1])
        assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (lambda: fg.softcap(0), "softcap: cap is 0; it is a number above 0"),
        (lambda: fg.softcap(-1.0), "softcap: cap is -1.0"),
        (lambda: fg.softcap(math.nan), "softcap: cap is nan"),
        (lambda: fg.softcap("30"), "softcap: cap is '30'"),
        (lambda: fg.temperature(0.0), "temperature: t is 0.0; it is a number above 0"),
        (
            lambda: fg.temperature(torch.zeros(2, 2)),
            r"temperature: t has the shape \(2, 2\); it is \(\) or \(H,\)",
        ),
        (
            lambda: fg.relative_bias(torch.zeros(4, 6)),
            r"relative_bias: the table is \(4, 6\); .* \(H, 2n - 1\)",
        ),
        (lambda: fg.relative_bias(3), "relative_bias: the table is 3"),
        (lambda: fg.alibi(3), "slopes takes a tensor, not 3"),
    ],
)
def test_a_mistake_is_answered_in_one_sentence(mistake, sentence):
    with pytest.raises((UsageError, DtypeError), match=sentence):
        mistake()
