"""Gradients are programs: right in float64, by the rules that make them FlashAttention's, in every plan."""

import math
from dataclasses import replace

import pytest
import torch

import fagen as fg
from fagen.derive.diagonal import unmoved
from fagen.derive.equations import equations
from fagen.derive.gradient import gradient
from fagen.derive.streaming import derive
from fagen.errors import UsageError
from fagen.ir.graph import TRUE, Input, Scatter, add, index, le, size, sub, walk
from fagen.ir.reference import evaluate
from fagen.lang.attention import attention
from fagen.plan.interpret import interpret, interpret_plan
from fagen.plan.plan import Problem
from fagen.plan.planner import plan
from gradients import by_autograd, by_graph, floats, incoming_for
from random_programs import graph_of, written
from streams import LENGTHS, PROGRAMS, K, Q, V, arguments, scores


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def in_tiles(graph, values, seed=0, block_own=8, block_walk=5):
    return interpret(derive(graph), graph, values, block_own=block_own, block_walk=block_walk, seed=seed)


def require_right(graph, values, computes=(evaluate,), incoming=None, seed=3, label="", precise=False):
    wanted = floats(graph)
    incoming = incoming or incoming_for(graph, values)
    expected = by_autograd(graph, values, incoming, wanted, seed)
    for compute in computes:
        found = by_graph(graph, values, incoming, wanted, compute, seed, precise)
        for position, exact in expected.items():
            scale = max(float(exact.abs().max()), 1.0)
            where = f"{label}{graph.name}, {graph.arguments[position].name}"
            torch.testing.assert_close(
                found[position], exact, rtol=0, atol=1e-11 * scale, msg=lambda text, at=where: f"{at}\n{text}"
            )


@pytest.mark.parametrize("precise", [False, True], ids=["", "precise"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name, precise):
    graph = PROGRAMS[name].trace().graph
    require_right(graph, list(arguments(graph).values()), (evaluate, in_tiles), precise=precise)


@pytest.mark.parametrize("number", range(0, 200, 5))
def test_a_random_program(number):
    lines = written(number)
    graph = graph_of(lines, masked=number % 4 > 0)
    lengths = {"q": 9, "kv": 13} if number % 2 else {"q": 13, "kv": 7}  # with rows without a key
    values = list(arguments(graph, {**LENGTHS, "b": 1, "h": 2, "hk": 1, **lengths}, seed=number).values())
    computes = (evaluate, in_tiles) if number % 4 == 0 else (evaluate,)
    require_right(graph, values, computes, label=f"{lines}\n", precise=number % 3 == 0)


@pytest.mark.parametrize("number", range(2, 200, 12))
def test_a_random_program_against_finite_differences(number):
    graph = graph_of(written(number), masked=True)
    lengths = {**LENGTHS, "b": 1, "h": 2, "hk": 1, "q": 5, "kv": 6}
    values = list(arguments(graph, lengths, seed=number).values())
    incoming = incoming_for(graph, values)
    found = by_graph(graph, values, incoming, floats(graph))
    draw = torch.Generator().manual_seed(number)
    along = [torch.randn(v.shape, generator=draw, dtype=torch.float64) for v in values]

    def at(step):
        outputs = evaluate(graph, [v + step * u for v, u in zip(values, along, strict=True)])
        return sum(float((o * g).sum()) for o, g in zip(outputs, incoming, strict=True))

    def slope(step):
        return (at(step) - at(-step)) / (2 * step)

    exact = sum(float((found[i] * along[i]).sum()) for i in found)
    scale = max(1.0, *(float((found[i] * along[i]).abs().sum()) for i in found))
    assert min(abs(slope(step) - exact) for step in (1e-5, 1e-6, 3e-7)) <= 1e-6 * scale


# ------------------------------------------------------------------------------------------------- the rules


def rules(graph):
    return {note.rule for note in gradient(graph, floats(graph)).notes}


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"mask": fg.causal()},
        {"score": fg.softcap(5.0)},
        {"score": lambda s: s * fg.sin(s)},
        {"dropout": 0.2},
        {"score": lambda s: fg.dropout(s, 0.2)},
        {"return_lse": True},
        {"mask": fg.causal(), "sink": torch.zeros(4)},
    ],
)
def test_attention_has_the_backward_of_flash_attention(parts):
    graph = attention(**parts).graph
    assert rules(graph) == {"free reference", "exchange", "saved"}
    both = gradient(graph, frozenset((0, 1, 2)))
    rows, queries, keys = derive(both.backward).stages
    assert (rows.own, rows.walk) == (("b", "hk", "g", "q"), "dv")
    assert (queries.own, queries.walk) == (("b", "hk", "g", "q"), "kv")
    assert (keys.own, keys.walk, keys.outer) == (("b", "hk", "kv"), "q", ("g",))
    assert [output.name for output in (*queries.outputs, *keys.outputs)] == ["dq", "dk", "dv"]
    kept = [output.node.axes for output in both.forward.outputs[1:]]
    assert kept == [("b", "hk", "g", "q")]  # one number a row, and no pair of a query and a key


@pytest.mark.parametrize(
    ("parts", "numbers"),
    [
        ({"mask": fg.causal()}, 1),
        ({"score": fg.temperature(torch.ones(()))}, 1),  # products were rounded by as much
        ({"score": fg.softcap(30.0)}, 1),
        ({"score": lambda s: s - 6e4}, 1),
        ({"score": lambda s: s * fg.gelu(s)}, 1),
        ({"score": lambda s: s - 1e9}, 2),
        ({"score": lambda s: fg.where(fg.kv <= fg.q, s, -1e9)}, 2),
        ({"score": lambda s: 3.0 * fg.maximum(s, -1e6)}, 2),
        ({"score": fg.alibi()}, 1),
        ({"score": fg.alibi(torch.ones(4))}, 2),
        ({"bias": torch.zeros(4, 1, 8)}, 2),
        ({"bias": torch.zeros(4, 1, 8), "sink": torch.zeros(4)}, 2),
        ({"score": fg.relative_bias(torch.zeros(4, 9))}, 2),
    ],
)
def test_a_row_that_may_lie_far_from_0_is_kept_as_two_numbers(parts, numbers):
    both = gradient(attention(**parts).graph, frozenset((0, 1, 2)))
    assert len(both.forward.outputs) == 1 + numbers
    assert [note.rule for note in both.notes].count("saved") == 1
    assert len(derive(both.backward).stages) == 3  # no statistic is computed again


@pytest.mark.parametrize("parts", [{}, {"return_lse": True}, {"dropout": 0.2, "sink": torch.zeros(4)}])
def test_with_tensors_of_fp32_both_directions_have_the_same_weights(parts):
    """What is kept of a row are its maximum and its sum; its term is summed from the weights themselves."""
    graph = attention(mask=fg.causal(), **parts).graph
    both = gradient(graph, frozenset((0, 1, 2)), precise=True)
    assert {note.rule for note in both.notes} == {"free reference", "saved"}
    added = both.forward.outputs[len(graph.outputs) :]
    assert [output.node.axes for output in added] == [("b", "hk", "g", "q")] * 2
    assert "log" not in {getattr(node, "op", "") for output in added for node in walk([output.node])}
    read = {argument.name for argument in both.backward.arguments}
    assert "out" not in read
    rows, queries, keys = derive(both.backward).stages
    assert (rows.own, rows.walk) == (("b", "hk", "g", "q"), "kv")
    assert [len(stage.walks) for stage in (rows, queries, keys)] == [1, 1, 1]
    assert [output.name for output in (*queries.outputs, *keys.outputs)] == ["dq", "dk", "dv"]


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("precise", [False, True])
def test_numbers_shared_by_all_pairs_are_summed_row_by_row(precise, return_lse):
    """No pair of positions is kept; no row has a term from results as they were rounded to be stored."""
    score = [fg.alibi(torch.ones(4)), fg.temperature(torch.ones(()))]
    graph = attention(mask=fg.causal(), score=score, return_lse=return_lse).graph
    both = gradient(graph, frozenset((3, 4)), precise=precise)
    assert [output.name for output in both.backward.outputs] == ["dslopes", "dtemperature"]
    assert "out" not in {argument.name for argument in both.backward.arguments}
    stages = derive(both.backward).stages
    kept = [set(output.node.axes) for stage in stages for output in stage.outputs]
    assert not any({"q", "kv"} <= axes for axes in kept)
    rows = [stage for stage in stages if any(walk.products for walk in stage.walks)]
    assert {stage.walk for stage in rows} == {"kv"}
    assert {len(stage.walks) for stage in rows} == {2 if precise else 1}
    values = arguments(graph)
    values |= {"slopes": torch.rand(4, dtype=torch.float64), "temperature": torch.tensor(0.7).double()}
    require_right(graph, list(values.values()), (evaluate, in_tiles), precise=precise)


ROWS = fg.capture(torch.ones(2, 4, 19), "b h q", name="rows")
GATHERED = fg.capture(torch.ones(5), "n", name="table")[fg.q % 5]


@pytest.mark.parametrize(
    ("parts", "once", "said"),
    [
        ({"score": lambda s: s + ROWS, "dropout": 0.1}, (), "1 more of rows leaves out: its gradient is 0"),
        (
            {
                "score": [fg.softcap(5.0), lambda s: 2.0 * (s - ROWS)],
                "dropout": 0.1,
                "mask": fg.kv < fg.q - 2,
            },
            (),
            "1 more of rows leaves out: its gradient is 0",
        ),
        (
            {"score": lambda s: s - 2.0 * ROWS, "return_lse": True, "mask": fg.kv < fg.q - 2},
            (),
            "1 more of rows is -2 more of lse and leaves out: its gradient is the sum of -2 dlse",
        ),
        (
            {"score": lambda s: s + GATHERED, "return_lse": True, "mask": fg.kv < fg.q - 2},
            (),
            "1 more of table[q % 5] is 1 more of lse and leaves out: its gradient is the sum of dlse",
        ),
        (
            {"bias": torch.ones(2, 1, 19, 1), "return_lse": True},
            ("h", "kv"),
            "1 more of bias is 1 more of lse and leaves out: its gradient is the sum of dlse",
        ),
        ({"bias": torch.ones(2, 1, 19, 1)}, ("h", "kv"), "1 more of bias leaves out: its gradient is 0"),
    ],
    ids=["added", "in a mask", "taken twice", "gathered", "bias", "bias alone"],
)
def test_a_number_of_a_row_has_the_gradient_of_what_it_moves(parts, once, said):
    """No weight of a row changes with it, and its gradient is no sum of weights that cancel."""
    graph = attention(**parts).graph
    both = gradient(graph, frozenset((3,)), broadcast=tuple((3, axis) for axis in once))
    assert said in [note.text for note in both.notes if note.rule == "level"]
    read = {argument.name for argument in both.backward.arguments}
    assert read <= {"lse", "dlse", "rows", "table", "bias"}
    assert len(both.backward.outputs) == ("lse" in read)
    shapes = {"rows": (2, 4, 19), "table": (5,), "bias": (2, 1, 19, 1)}
    given = {a.name: shapes[a.name] for a in graph.arguments if a.name in shapes}
    require_right(graph, values_of(graph, {**LENGTHS, "i0": 5}, **given), (evaluate, in_tiles))


@pytest.mark.parametrize(
    "parts",
    [
        {"score": lambda s: s + ROWS, "sink": torch.ones(4)},
        {"score": [lambda s: s + ROWS, fg.softcap(5.0)]},
        {"score": lambda s: s * ROWS},
        {"score": lambda s: fg.dropout(s + ROWS, 0.1)},
        {"score": lambda s: fg.where(fg.kv < 4, s + ROWS, s)},
        {"score": lambda s: fg.where(fg.kv < 4, ROWS, s)},
        {"bias": torch.ones(2, 4, 19, 23)},
    ],
    ids=["sink", "capped", "factor", "dropped", "some keys", "instead", "pairs"],
)
def test_a_number_that_changes_the_weights_of_a_row_has_a_gradient_of_their_own(parts):
    graph = attention(return_lse=True, **parts).graph
    assert "level" not in rules(graph)
    shapes = {"rows": (2, 4, 19), "bias": (2, 4, 19, 23)}
    given = {a.name: shapes[a.name] for a in graph.arguments if a.name in shapes}
    require_right(graph, values_of(graph, **given))


@pytest.mark.parametrize("parts", [{"sink": torch.ones(4)}, {"dropout": 0.1}])
def test_a_number_of_each_row_has_no_term_from_results_as_they_were_rounded(parts):
    """Weights beside a sink do not sum to 1, and capped scores do not grow by what is added to them."""
    graph = attention(score=[lambda s: s + ROWS, fg.softcap(5.0)], return_lse=True, **parts).graph
    both = gradient(graph, frozenset((3,)))
    assert [output.name for output in both.backward.outputs] == ["drows"]
    assert "out" not in {argument.name for argument in both.backward.arguments}
    values = values_of(graph, rows=(2, 4, 19))
    require_right(graph, values, (evaluate, in_tiles))


def test_what_is_added_to_a_result_moves_it_where_there_is_no_key_as_well():
    @fg.program
    def shifted(q: Q, k: K, v: V, rows: fg.Tensor["b h q"]):
        s = fg.where(fg.kv < fg.q - 2, scores(q, k), -fg.inf)
        return fg.dot(fg.softmax(s), v, over="kv"), fg.logsumexp(s) + rows

    graph = shifted.trace().graph
    require_right(graph, values_of(graph, rows=(2, 4, 19)), (evaluate, in_tiles))


def test_a_product_has_one_constant():
    """Two that cancel, as 1 / (1 - rate) of the weights and of what they are divided by, would round."""
    both = gradient(attention(dropout=0.3).graph, frozenset((0, 1, 2)))
    scored = "where(random[b,h,q,kv] >= 19661, dP, 0.0)"
    term = f"dS[b,h,q,kv] = (1.4285776566757493 * {scored} - D) * exp(S * rsqrt(head_dim) - stat)"
    assert {"D[b,h,q] = sum_dv dO O", term} <= set(equations(both.backward))


def test_a_score_divided_by_0_has_a_gradient_all_the_same():
    both = gradient(attention(score=lambda s: 2.0 * (s / 0.0)).graph, frozenset((0, 1, 2)))
    assert any("/ 0.0" in line for line in equations(both.backward))


def test_renamed_and_reordered_terms_give_the_same_backward():
    def library(q: Q, k: K, v: V):
        s = fg.where(fg.kv <= fg.q, scores(q, k), -fg.inf)
        return fg.dot(fg.softmax(s), v, over="kv")

    def retyped(a: Q, b: K, c: V):
        x = fg.where(fg.q >= fg.kv, fg.rsqrt(fg.size("d")) * fg.dot(b, a, over="d"), -fg.inf)
        e = fg.exp(x - fg.max(x, over="kv"))
        return fg.dot(c, e / fg.sum(e, over="kv"), over="kv")

    first, second = (gradient(fg.program(p).trace().graph, frozenset((0, 1, 2))) for p in (library, retyped))
    assert [o.node.digest for o in first.backward.outputs] == [o.node.digest for o in second.backward.outputs]
    assert first.backward.labels == second.backward.labels


def test_a_nonlinearity_after_softmax_has_a_row_term_of_its_own():
    assert rules(PROGRAMS["weights above a constant"].trace().graph) == {"free reference", "saved"}


def test_weights_of_the_result_alone_need_no_row_term():
    both = gradient(PROGRAMS["softmax"].trace().graph, frozenset((2,)))
    assert [kind for kind, _ in both.sources].count("output") == 1
    assert len(derive(both.backward).stages) == 1


def test_the_equations_are_those_of_the_paper():
    both = gradient(attention(mask=fg.kv <= fg.q).graph, frozenset((0, 1, 2)))
    assert equations(both.backward) == [
        "S[b,h,q,kv] = sum_d Q K",
        "P[b,h,q,kv] = exp(where(kv <= q, S * rsqrt(head_dim), -inf) - stat)",
        "dP[b,h,q,kv] = sum_dv dO V",
        "D[b,h,q] = sum_dv dO O",
        "dS[b,h,q,kv] = where(kv <= q, P * (dP - D), 0.0)",
        "dQ = (sum_kv dS K) * rsqrt(head_dim)",
        "dK = (sum_g sum_q dS Q) * rsqrt(head_dim)",
        "dV = sum_g sum_q P dO",
    ]


# -------------------------------------------------------------------------------------- values at the edges


def values_of(graph, lengths=LENGTHS, **shapes):
    values = arguments(graph, lengths)
    draw = torch.Generator().manual_seed(9)
    for name, shape in shapes.items():
        values[name] = torch.randn(shape, generator=draw, dtype=torch.float64)
    return list(values.values())


def test_rows_without_a_key_have_gradients_of_0_and_masked_values_reach_nothing():
    graph = attention(mask=fg.kv < fg.q - 2, return_lse=True).graph
    values = list(arguments(graph).values())
    for value in values[1:]:
        value[:, :, -1] = math.nan  # a key that no query sees
    incoming = [torch.randn(o.shape, dtype=torch.float64) for o in evaluate(graph, values)]
    incoming[1][:, :, :3] = 5.0
    for compute in (evaluate, in_tiles):
        found = by_graph(graph, values, incoming, floats(graph), compute)
        assert all(bool(torch.isfinite(each).all()) for each in found.values())
        assert bool((found[0][:, :, :3] == 0).all())
        assert bool((found[1][:, :, -1] == 0).all())
        assert bool((found[2][:, :, -1] == 0).all())


@pytest.mark.parametrize(
    "shape", ["b h q kv", "1 h q kv", "1 1 q kv", "b 1 1 kv", "1 h 1 1", "b h q 1", "1 1 1 1"]
)
def test_a_bias_of_any_shape(shape):
    graph = attention(
        bias=fg.capture(torch.zeros(1, 1, 1, 1), "b h q kv", name="bias"), mask=fg.causal()
    ).graph
    extents = [1 if axis == "1" else LENGTHS[axis] for axis in shape.split()]
    require_right(graph, values_of(graph, bias=extents), (evaluate, in_tiles))


@pytest.mark.parametrize("score", [lambda s: s * fg.sin(s), lambda s: fg.dropout(s, 0.3) + fg.abs(s)])
def test_a_score_of_ones_own(score):
    graph = attention(score=score, mask=fg.causal()).graph
    require_right(graph, list(arguments(graph).values()), (evaluate, in_tiles))


def test_a_table_read_by_the_sum_of_positions():
    table = fg.capture(torch.zeros(50), "n", name="table")
    graph = attention(score=lambda s: s + table[fg.q + fg.kv], mask=fg.causal()).graph
    require_right(graph, list(arguments(graph, {**LENGTHS, "i0": 50}).values()), (evaluate, in_tiles))


def test_keys_and_values_that_broadcast():
    graph = attention(mask=fg.causal()).graph
    values = values_of(graph, k=(1, 1, 23, 4), v=(2, 1, 23, 3))
    require_right(graph, values, (evaluate, in_tiles))


def test_slopes_a_temperature_of_all_and_a_gathered_table():
    slopes, table = torch.zeros(4), torch.zeros(4, 21)
    temperature = fg.capture(torch.zeros(()), "", name="t")
    score = [fg.alibi(slopes), fg.relative_bias(table), lambda s: s * temperature]
    graph = attention(score=score, mask=fg.causal()).graph
    require_right(graph, list(arguments(graph, {**LENGTHS, "i0": 21}).values()), (evaluate, in_tiles))


def test_ties_of_a_maximum_share_its_gradient():
    def largest(k: K):
        return fg.max(k, over="kv") * 3.0

    graph = fg.program(largest).trace().graph
    values = [torch.tensor([1.0, 2.0, 2.0, 0.0], dtype=torch.float64).view(1, 1, 4, 1)]
    found = by_graph(graph, values, [torch.ones(1, 1, 1, dtype=torch.float64)], floats(graph))
    assert found[0].flatten().tolist() == [0.0, 1.5, 1.5, 0.0]


def test_only_some_gradients_come_and_only_some_are_wanted():
    graph = attention(return_lse=True, mask=fg.causal()).graph
    values = list(arguments(graph).values())
    incoming = incoming_for(graph, values)
    for given in ([incoming[0], None], [None, incoming[1]]):
        require_right(graph, values, (evaluate, in_tiles), given)
        for wanted in ({0}, {1}, {2}, {0, 2}):
            expected = by_autograd(graph, values, given, wanted)
            found = by_graph(graph, values, given, frozenset(wanted))
            for position in wanted:
                torch.testing.assert_close(found[position], expected[position])


@pytest.mark.parametrize("family", ["simt", "sm80", "sm90"])
def test_a_score_of_ones_own_needs_no_template(family):
    """Its derivative stands in the equations, in what `explain` prints and above the kernels."""
    asked = {"head_dim": 64, "dtype": "bf16", "arch": "H100", "family": family, "direction": "backward"}
    kernel = fg.compile(score=lambda s: s * fg.sin(s), **asked)
    comments = " ".join(line[2:] for line in kernel.source.splitlines() if line.startswith("//"))
    for text in (kernel.explain(), comments):
        assert (
            "dS[b,h,q,kv] = S * P * (dP - D) * cos(S * rsqrt(head_dim)) * rsqrt(head_dim) + "
            "P * (dP - D) * sin(S * rsqrt(head_dim))"
        ) in " ".join(text.split())
    assert kernel.plan.family == family


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_backward_plan_tile_by_tile(name):
    """As an H200 has it for 16-bit tensors."""
    graph = PROGRAMS[name].trace().graph
    both = gradient(graph, floats(graph))
    tensors = [a for a in both.backward.arguments if isinstance(a, Input)]
    stored = tuple("int32" if a.stored == "int" else "bf16" for a in tensors)
    sizes = tuple((axis, LENGTHS[axis]) for axis in ("d", "dv", "e", "r", "t"))
    planned = plan(Problem(both.backward, "H200", None, sizes, stored))
    run = lambda graph, values, seed: interpret_plan(planned, values, seed=seed)  # noqa: E731
    require_right(graph, list(arguments(graph).values()), (run,))


@pytest.mark.parametrize("family", ["simt", "sm80", "sm90"])
def test_plans_tile_by_tile(family):
    graph = attention(mask=fg.sliding_window(9, 2), dropout=0.25, return_lse=True).graph
    both = gradient(graph, frozenset((0, 1, 2)))
    storages = tuple("fp32" if a.layout == ("b", "h", "q") else "bf16" for a in both.backward.arguments)
    planned = plan(
        Problem(both.backward, "H200", family, (("d", 4), ("dv", 3)), storages, outputs=("bf16",) * 3)
    )
    if family != "simt":
        assert {kernel.family for kernel in planned.kernels} <= {"simt", "sm80", "sm90"}
        multiplying = [kernel for kernel in planned.kernels if kernel.stage.walks[0].products]
        assert multiplying[-1].family == family
    values = list(arguments(graph).values())
    run = lambda graph, values, seed: interpret_plan(planned, values, seed=seed)  # noqa: E731
    require_right(graph, values, (run,))


def test_a_gathered_table_is_added_to_in_no_fixed_order(tmp_path):
    table = torch.zeros(4, 21, requires_grad=True)
    kernel = fg.compile(score=fg.relative_bias(table), head_dim=16, direction="backward")
    assert "t0 adds up the gradient of bias by atomic additions, in no fixed order" in kernel.explain()
    assert "atomic_add(" in kernel.source
    with pytest.raises(UsageError, match=r"has no checker of its own"):
        kernel.save(tmp_path)


def test_a_gathered_table_is_summed_exactly_where_the_same_bits_are_asked_for():
    kernel = fg.compile(score=fg.relative_bias(torch.zeros(4, 21)), head_dim=16, direction="backward")
    planned = plan(replace(kernel.compiled.problem, deterministic=True))
    assert [buffer.storage for buffer in planned.buffers if buffer.zeroed] == ["exact"]
    notes = " ".join(note.text for note in planned.notes)
    assert "by atomic additions, in no fixed order, of whole numbers: the sum is exact" in notes


def scattered(**parts):
    """The stage that adds up a table's gradient, and all that a backward program keeps in memory."""
    kernel = fg.compile(head_dim=16, dtype="fp16", arch="H100", direction="backward", **parts)
    planned = kernel.compiled.plan
    stages = [kernel.stage for kernel in planned.kernels]
    added = [s for s in stages if any(isinstance(o.node, Scatter) for each in s.walks for o in each.stores)]
    return added[0], planned.buffers


def test_tiles_of_which_nothing_is_added_to_a_table_are_passed_over():
    stage, _ = scattered(score=fg.relative_bias(torch.zeros(4, 21)), mask=fg.causal())
    assert stage.walks[0].guard is le(index("kv"), add(index("q"), sub(size("kv"), size("q"))))
    stage, _ = scattered(score=fg.relative_bias(torch.zeros(4, 21)))
    assert stage.walks[0].guard is TRUE


@pytest.mark.parametrize("position", [fg.q, fg.kv])
def test_what_was_gathered_by_one_position_is_summed_over_the_other_first(position):
    table = fg.capture(torch.zeros(4, 21), "h near", name="table")
    score = lambda s: s * table[fg.h, position // 4]  # noqa: E731
    stage, buffers = scattered(score=score)
    assert not stage.walks[0].products
    assert not any({"q", "kv"} <= set(buffer.axes) for buffer in buffers)
    graph = attention(score=score, mask=fg.causal()).graph
    require_right(graph, list(arguments(graph, {**LENGTHS, "i0": 21}).values()), (evaluate, in_tiles))


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (fg.q - fg.kv, True),
        (fg.abs(fg.kv - fg.q) // 3, True),
        (fg.h, True),
        (fg.q, False),
        (fg.q + fg.kv, False),
        (fg.q // 4 - fg.kv // 4, False),
        (fg.capture(torch.zeros(9, dtype=torch.int32), "kv", name="places") - fg.kv + fg.q, False),
    ],
)
def test_what_is_the_same_along_a_diagonal(place, expected):
    assert unmoved((place.node,), ("q", "kv")) == expected


MEASURED = {
    "alone": lambda w, v, m: fg.dot(w(1.0), v, over="kv"),
    "beside a number": lambda w, v, m: fg.dot(w(1.0), v, over="kv") / (1 + fg.sum(w(1.0), over="kv")),
    "by another sum": lambda w, v, m: fg.dot(w(1.0), v, over="kv") / fg.sum(w(2.0), over="kv"),
    "and itself": lambda w, v, m: (fg.dot(w(1.0), v, over="kv") / fg.sum(w(1.0), over="kv"), m),
    "by half": lambda w, v, m: fg.dot(w(1.0), v, over="kv") * fg.exp(-0.5 * m),
}
"""What is made of weights that are measured from a maximum, and depends on it."""


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", MEASURED)
def test_a_maximum_that_results_depend_on_is_differentiated(name, ties):
    """It is a constant only where nothing changes when it is shifted; equal keys share its gradient."""

    @fg.program
    def measured(q: Q, k: K, v: V):
        s = fg.where(fg.kv <= fg.q + 2, scores(q, k), -fg.inf)
        m = fg.max(s, over="kv")
        return MEASURED[name](lambda power: fg.exp(power * (s - m)), v, m)

    graph = measured.trace().graph
    values = list(arguments(graph).values())
    if ties:
        values[1][:, :, 1:] = values[1][:, :, :1]
    require_right(graph, values)


def test_the_text_says_its_direction_and_equations():
    kernel = fg.compile(mask=fg.causal(), head_dim=64, direction="backward")
    assert kernel.source.startswith("// attention: backward, family ")
    assert "// dQ = (sum_kv dS K) * rsqrt(head_dim)\n" in kernel.source
    text = kernel.explain(batch=1, q_heads=2, q_len=512)
    assert "  dS[b,h,q,kv] = where(kv <= q + kv_len - q_len, P * (dP - D), 0.0)\n" in text
    assert "  exchange: sum_kv s (exp(" in text
    why = "= (sum_dv dout out) * (1.0 / l): sum_dv dout v is summed along kv by the weights that sum v to out"
    assert why in " ".join(text.split())
    assert [k.function for k in kernel.plan.kernels] == [
        "backward_0_rowwise",
        "backward_1_loop",
        "backward_2_loop",
    ]
