"""Derivations run tile by tile, compared with what their graphs mean."""

import math
import random
from dataclasses import replace

import pytest
import torch

import fagen as fg
from fagen.derive.streaming import derive
from fagen.ir.reference import evaluate
from fagen.lang.attention import attention
from fagen.plan import interpret as interpreter
from fagen.plan.interpret import interpret, interpret_plan
from fagen.plan.planner import plan
from masks import MASKS, dense
from plans import attention_graph, matmul_problem, problem
from streams import LENGTHS, PROGRAMS, arguments

TILES = [(16, 16), (7, 9), (64, 64), (5, 32), (32, 4)]
SEED = 11


def close(out, expected, label=""):
    assert len(out) == len(expected)
    for mine, ref in zip(out, expected, strict=True):
        torch.testing.assert_close(
            mine, ref, rtol=1e-11, atol=1e-12, equal_nan=True, msg=lambda text: f"{label}\n{text}"
        )


def check(graph, values, tiles=TILES, fusion="full"):
    derivation = derive(graph, fusion)
    expected = evaluate(graph, values, seed=SEED)
    for block_own, block_walk in tiles:
        out = interpret(derivation, graph, values, block_own=block_own, block_walk=block_walk, seed=SEED)
        close(out, expected, f"{graph.name}, {fusion}, tiles of {block_own} x {block_walk}")
    return expected


def random_tiles(label, count):
    draw = random.Random(label)
    return [(draw.randint(6, 30), draw.randint(6, 30)) for _ in range(count)]


# ----------------------------------------------------------------------------------------------- programs


@pytest.mark.parametrize("fusion", ["full", "products", "none"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, fusion):
    graph = PROGRAMS[name].trace().graph
    values = arguments(graph)
    tiles = random_tiles(name, 2) if fusion == "full" else random_tiles(name, 1)
    for result in check(graph, values, tiles, fusion):
        assert not bool(torch.isnan(result).any())


SHORT = ["softmax and logsumexp", "softmax with a sink", "weights and a constant", "weights as an output"]


@pytest.mark.parametrize("kv_len", [0, 1, 63, 64, 65])
@pytest.mark.parametrize("q_len", [0, 1, 63, 64, 65])
def test_lengths(q_len, kv_len):
    graph = PROGRAMS["softmax and logsumexp"].trace().graph
    values = arguments(graph, {**LENGTHS, "b": 1, "h": 2, "hk": 1, "q": q_len, "kv": kv_len})
    check(graph, values, [(32, 16), (64, 64), (33, 48)])


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (1, 1), (64, 3), (3, 65)])
def test_short_rows(name, q_len, kv_len):
    graph = PROGRAMS[name].trace().graph
    values = arguments(graph, {**LENGTHS, "q": q_len, "kv": kv_len})
    check(graph, values, [(16, 16), (2, 3)])


@pytest.mark.parametrize("axis", ["b", "h", "dv"])
def test_empty_axes(axis):
    graph = PROGRAMS["softmax and logsumexp"].trace().graph
    values = arguments(graph, {**LENGTHS, axis: 0, **({"hk": 0} if axis == "h" else {})})
    assert check(graph, values, [(4, 4)])[0].numel() == 0


def test_rows_without_a_key():
    """Output 0 and a logsumexp of -inf, or the sink."""
    lengths = {**LENGTHS, "q": 23, "kv": 9}
    graph = PROGRAMS["softmax and logsumexp"].trace().graph
    out, lse = check(graph, arguments(graph, lengths))
    empty = lse[0, 0] == -math.inf
    assert 0 < int(empty.sum()) < 23
    assert bool((out[:, :, empty] == 0).all())
    sink = torch.full((4,), -2.5, dtype=torch.float64)
    traced = attention(mask=fg.sliding_window(5, 1), sink=sink, return_lse=True)
    values = (*arguments(attention().graph, lengths).values(), *traced.captured)
    out, lse = check(traced.graph, values)
    assert bool((out[:, :, empty] == 0).all())
    assert bool((lse[:, :, empty] == -2.5).all())


def test_a_sink_of_minus_infinity_is_none():
    values = arguments(PROGRAMS["softmax"].trace().graph, {**LENGTHS, "q": 23, "kv": 9})
    graph = PROGRAMS["softmax with a sink"].trace().graph
    sunk = check(graph, {**values, "sink": torch.full((4,), -math.inf, dtype=torch.float64)})
    close(sunk, evaluate(PROGRAMS["softmax"].trace().graph, values))


@pytest.mark.parametrize("shift", [-120.0, 120.0])
@pytest.mark.parametrize(
    "name", [*SHORT, "softmax in base 2", "weights from a logsumexp", "ReLU over its sum"]
)
def test_shifted_scores(name, shift):
    graph = PROGRAMS[name].trace().graph
    for result in check(graph, arguments(graph, shift=shift), [(8, 8), (5, 1)]):
        assert not bool(torch.isnan(result).any())


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("name", ["softmax and logsumexp", "softmax with a sink", "weights above a constant"])
def test_maxima_that_change_at_every_tile(name, direction):
    """Scores that rise or fall by 300 a key: each tile's maximum is far from the one before."""
    graph = PROGRAMS[name].trace().graph
    values = arguments(graph)
    values["q"][..., 0], values["k"][..., 0] = 1.0, 600.0 * direction * torch.arange(float(LENGTHS["kv"]))
    for result in check(graph, values, [(8, 2), (4, 1)]):
        assert not bool(torch.isnan(result).any())


# --------------------------------------------------------------------------------------- masks and scores


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    draw = random.Random(name)
    q_len, kv_len = draw.randint(15, 40), draw.randint(15, 40)
    traced = attention(mask=MASKS[name].build(q_len, kv_len, seed=3), return_lse=True)
    lengths = {**LENGTHS, "b": 1, "h": 2, "hk": 1, "q": q_len, "kv": kv_len}
    values = (*arguments(attention().graph, lengths).values(), *traced.captured)
    check(traced.graph, values, random_tiles(name, 2))


def qkv(q_len=19, kv_len=23, heads=4, kv_heads=2):
    lengths = {**LENGTHS, "h": heads, "hk": kv_heads, "q": q_len, "kv": kv_len}
    graph = attention().graph
    return tuple(arguments(graph, lengths).values())


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    "parts",
    [
        {"score": fg.softcap(0.7), "mask": fg.causal()},
        {"score": fg.alibi(), "mask": fg.causal()},
        {"score": fg.relative_bias(normal(4, 11)), "mask": fg.sliding_window(7, 3)},
        {"score": [fg.temperature(normal(4).abs() + 0.5), fg.softcap(3.0)]},
        {"bias": normal(19, 23), "dropout": 0.3},
        {"bias": normal(2, 1, 1, 23), "mask": fg.chunked(9)},
        {"scale": -0.7, "mask": fg.causal(align="top_left")},
        {"scale": 0.0, "dropout": 1.0},
        {"sink": normal(4), "dropout": 0.5, "mask": fg.causal() & fg.padding(torch.tensor([17, 0]))},
    ],
    ids=", ".join,
)
def test_parts(parts):
    traced = attention(**parts, return_lse=True)
    check(traced.graph, qkv() + traced.captured, [(16, 16), (7, 11)])


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (6, 6), (8, 1)])
def test_grouped_heads(heads, kv_heads):
    traced = attention(mask=fg.causal(), sink=normal(heads), dropout=0.2)
    check(traced.graph, qkv(9, 12, heads, kv_heads) + traced.captured, [(4, 5)])


# ---------------------------------------------------------------------------------------- edges of values


def test_a_bias_of_the_lowest_number_is_no_mask():
    """A row of it is the mean of v (as eager fp32 has it), also next to a mask and in single places."""
    q, k, v = (normal(1, 1, 3, 4, seed=i) for i in range(3))
    bias = torch.full((3, 3), 1.0, dtype=torch.float64)
    bias[0] = torch.finfo(torch.float64).min
    traced = attention(bias=bias, return_lse=True)
    out, lse = check(traced.graph, (q, k, v, *traced.captured))
    torch.testing.assert_close(out[0, 0, 0], v[0, 0].mean(0))
    assert bool(torch.isfinite(lse).all())
    bias[1, 1] = torch.finfo(torch.float64).min
    for parts in ({"mask": fg.causal()}, {"score": fg.softcap(30.0)}, {"sink": normal(1)}):
        traced = attention(bias=bias, **parts)
        (out,) = check(traced.graph, (q, k, v, *traced.captured))
        assert bool(torch.isfinite(out).all())


def test_a_softcap_stands_before_the_mask():
    """With a cap of 1 and scores of 0 a masked key would otherwise have a weight of 0.27."""
    q = k = torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    v = torch.tensor([1.0, 100.0], dtype=torch.float64).reshape(1, 1, 2, 1)
    for parts in ({"mask": fg.causal()}, {"bias": torch.tensor([[0.0, -math.inf], [0.0, 0.0]]).double()}):
        traced = attention(score=fg.softcap(1.0), **parts)
        (out,) = check(traced.graph, (q, k, v, *traced.captured))
        assert out.flatten().tolist() == [1.0, 50.5]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["k", "v", "bias"])
@pytest.mark.parametrize(
    "mask", [fg.kv < 12, fg.kv % 2 == 0, fg.sliding_window(5, 1)], ids=["ends", "odd", "window"]
)
def test_what_is_masked_reaches_nothing(mask, where, bad):
    q, k, v = qkv()
    bias = normal(19, 23)
    clean = attention(mask=mask, bias=bias, return_lse=True)
    expected = evaluate(clean.graph, (q, k, v, *clean.captured))
    allowed = dense(mask, 19, 23)
    never = ~allowed.any(0)
    if where == "bias":
        bias = torch.where(allowed, bias, bad)
    else:
        {"k": k, "v": v}[where][:, :, never] = bad
    spoiled = attention(mask=mask, bias=bias, return_lse=True)
    derivation = derive(spoiled.graph)
    for tiles in TILES:
        out = interpret(
            derivation, spoiled.graph, (q, k, v, *spoiled.captured), block_own=tiles[0], block_walk=tiles[1]
        )
        close(out, expected, f"{where} = {bad}")


def test_dropout_of_rate_0_and_1():
    plain, none, all_ = (attention(dropout=rate) for rate in (0.0, 0, 1.0))
    assert plain.graph is none.graph
    (out,) = check(all_.graph, qkv())
    assert bool((out == 0).all())


# -------------------------------------------------------------------------------------------------- tiles


def visited(graph, values, block_own, block_walk):
    seen = []
    derivation = derive(graph)
    interpret(
        derivation,
        graph,
        values,
        block_own=block_own,
        block_walk=block_walk,
        watch=lambda stage, walk, tile, kind: seen.append((walk, tile, kind)),
    )
    return seen


def test_tiles_above_the_diagonal_are_not_computed():
    traced = attention(mask=fg.causal())
    seen = visited(traced.graph, qkv(64, 64), 16, 16)
    assert [(tile, kind) for _, tile, kind in seen] == [
        (tile, "partial" if tile == row else "full") for row in range(4) for tile in range(row + 1)
    ]


def test_a_walk_without_a_guard_computes_every_tile():
    graph = PROGRAMS["weights and a constant"].trace().graph
    seen = visited(graph, arguments(graph, {**LENGTHS, "q": 32, "kv": 40}), 16, 16)
    first, second = ({tile for walk, tile, _ in seen if walk == number} for number in (0, 1))
    assert (first, second) == ({0, 1, 2}, {0, 1, 2})
    counts = [sum(walk == number for walk, _, _ in seen) for number in (0, 1)]
    assert counts[0] < counts[1] == 6


def test_a_full_tile_evaluates_no_guard(monkeypatch):
    """A guard that is wrong about its full tiles gives wrong results: what the tiles say is what is done."""
    graph = attention(mask=fg.causal()).graph
    values = qkv(32, 32)
    monkeypatch.setattr(interpreter, "live_tiles", lambda *_: [[(0, "full"), (1, "full")]] * 2)
    out = interpret(derive(graph), graph, values, block_own=16, block_walk=16)
    close(out, evaluate(attention().graph, values))


# ----------------------------------------------------------------------- the interpreter notices mistakes


@pytest.mark.parametrize("name", ["l", "acc"])
def test_a_missing_rescale_is_noticed(name):
    graph = PROGRAMS["softmax"].trace().graph
    values = arguments(graph)
    derivation = derive(graph)
    (stage,) = derivation.stages
    (walk,) = stage.walks
    states = tuple(
        replace(state, rescale=None) if state.symbol.name == name else state for state in walk.states
    )
    wrong = replace(derivation, stages=(replace(stage, walks=(replace(walk, states=states),)),))
    out = interpret(wrong, graph, values, block_own=8, block_walk=4)
    assert float((out[0] - evaluate(graph, values)[0]).abs().max()) > 1e-3


# -------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(
    "parts",
    [{}, {"causal": False, "dropout": 0.25}, {"return_lse": True, "score": fg.softcap(2.0)}],
    ids=lambda parts: ", ".join(parts) or "causal",
)
@pytest.mark.parametrize("fusion", ["full", "products", "none"])
def test_plans(parts, fusion):
    graph = attention_graph(**parts)
    values = arguments(graph, {**LENGTHS, "b": 1, "h": 2, "hk": 1, "q": 70, "kv": 90, "d": 16, "dv": 16})
    made = plan(problem(graph, head_dim=16, fusion=fusion))
    close(interpret_plan(made, values, seed=SEED), evaluate(graph, values, seed=SEED))


def test_the_plan_of_a_matrix_product():
    made = plan(matmul_problem())
    a, b = normal(90, 70), normal(70, 80, seed=1)
    close(interpret_plan(made, (a, b)), (a @ b,))
