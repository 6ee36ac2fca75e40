"""Derivations of programs whose recurrence is known: which rules are recorded, and what the walks hold."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

import fagen as fg
from fagen.derive.fit import unfit
from fagen.derive.streaming import derive
from fagen.ir import graph as ir
from fagen.ir.show import show
from streams import PROGRAMS, K, Q, V, masked, scores

DEFER = ("defer", "1.0 / l is constant along kv and leaves the sum acc")
RESCALE = ("rescale", "l and acc use the running m, times exp(m_old - m) when it changes")
RESCALE_L = ("rescale", "l uses the running m, times exp(m_old - m) when it changes")
FREE = (
    "free reference",
    "m may be any number: d more multiplies l and acc by exp(-d) and leaves every output",
)
FREE_L = ("free reference", "m may be any number: d more multiplies l by exp(-d) and leaves every output")
NOTHING = ("nothing to stream", "no value along kv waits for a statistic of its row")
LATER = ("several walks", "acc needs l and m of the whole row: walk 2 computes it")
SOFTMAX = [DEFER, RESCALE, FREE]
POINT = "maximum(m, sink)"
MASK = "q <= kv + q_len - kv_len + 5 and kv <= q + kv_len - q_len + 1"
WEIGHTS = f"exp(where({MASK}, s * rsqrt(head_dim), -inf) - m) / l"


def stored(name, value, why):
    return ("materialise", f"{name} = {value} is stored: {why}")


# For each program: the walks of each stage, and the notes.
RECORDS = {
    "softmax": ([1], SOFTMAX),
    "softmax and logsumexp": ([1], SOFTMAX),
    "softmax with a sink": (
        [1],
        [
            ("defer", f"1.0 / (l + exp(sink - {POINT})) is constant along kv and leaves the sum acc"),
            RESCALE,
            FREE,
        ],
    ),
    "softmax in base 2": (
        [1],
        [
            DEFER,
            (
                "rescale",
                "l and acc use the running m, times exp2(1.4426950408889634 * (m_old - m)) when it changes",
            ),
            (
                "free reference",
                "m may be any number: d more multiplies l and acc by exp(-d) and leaves every output",
            ),
        ],
    ),
    "logsumexp": ([1], [RESCALE_L, FREE_L]),
    "weights from a logsumexp": ([1], SOFTMAX),
    "ReLU over its sum": ([1], [DEFER]),
    "sigmoid": ([1], [NOTHING]),
    "decayed linear attention": ([1], [NOTHING]),
    "two statistics": ([1], [("defer", "1.0 / sqrt(l) is constant along kv and leaves the sum acc")]),
    "weights above a constant": ([2], [LATER, RESCALE_L, FREE_L]),
    "weights above a scalar": ([2], [LATER, RESCALE_L, FREE_L]),
    "weights and a constant": ([2], [LATER, RESCALE_L, FREE_L]),
    "softmax with dropout": ([1], SOFTMAX),
    "talking heads": (
        [1, 1, 1, 1],
        [
            stored("t0", f"sum_g ({WEIGHTS}) mix", "the sum over hk needs whole rows along kv of it"),
            stored(
                "t1",
                f"max_kv where({MASK}, s * rsqrt(head_dim), -inf)",
                "a row's value, in a walk along g across rows",
            ),
            stored(
                "t2",
                f"sum_kv exp(where({MASK}, s * rsqrt(head_dim), -inf) - m)",
                "a row's value, in a walk along g across rows",
            ),
            RESCALE_L,
            ("nothing to stream", "no value along g waits for a statistic of its row"),
            stored("t3", "sum_hk t0", "the sum over kv needs all of it"),
        ],
    ),
    "weights as an output": (
        [2],
        [
            DEFER,
            ("several walks", "out0 needs l and m of the whole row: walk 2 computes it"),
            RESCALE,
            FREE,
        ],
    ),
    "projection": (
        [1, 1],
        [stored("t0", f"sum_kv ({WEIGHTS}) v", "the sum over dv needs all of it"), *SOFTMAX],
    ),
    "projected values": (
        [1, 1],
        [stored("t0", "sum_dv v w", "the walk along kv weights its rows"), *SOFTMAX],
    ),
    "two score contractions": (
        [1],
        [
            DEFER,
            ("rescale", "l and acc use the running m, times exp(0.3 * (m_old - m)) when it changes"),
            (
                "free reference",
                "m may be any number: d more multiplies l and acc by exp(-0.3 d) and leaves every output",
            ),
        ],
    ),
    "row gate": (
        [1, 1],
        [
            stored("t0", "sum_d q w", "it is no product of a row and a column of the walk along kv"),
            *SOFTMAX,
        ],
    ),
    "normalised keys": (
        [1, 1],
        [stored("t0", "sum_d k k", "a row's value, in a walk along kv across rows"), *SOFTMAX],
    ),
    "bias of a key": (
        [1, 1],
        [stored("t0", "sum_d k u", "it is the same in every row of the walk along kv"), *SOFTMAX],
    ),
    "what each key receives": (
        [1, 1],
        [
            stored(
                "t0",
                f"max_kv where({MASK}, s * rsqrt(head_dim), -inf)",
                "a row's value, in a walk along q across rows",
            ),
            stored(
                "t1",
                f"sum_kv exp(where({MASK}, s * rsqrt(head_dim), -inf) - m)",
                "a row's value, in a walk along q across rows",
            ),
            RESCALE_L,
            ("nothing to stream", "no value along q waits for a statistic of its row"),
        ],
    ),
    "one query": ([1], SOFTMAX),
    "rows of different walks": ([1, 1, 1], SOFTMAX),
    "softmax of given scores": ([1], SOFTMAX),
    "matrix product": ([1], []),
}


def derived(name, fusion="full"):
    return derive(PROGRAMS[name].trace().graph, fusion)


def test_every_program_has_a_record():
    assert set(RECORDS) == set(PROGRAMS)


@pytest.mark.parametrize("name", RECORDS)
def test_rules(name):
    walks, notes = RECORDS[name]
    derivation = derived(name)
    assert [(note.rule, note.text) for note in derivation.notes] == notes
    assert [len(stage.walks) for stage in derivation.stages] == walks


def test_the_recurrence_of_softmax():
    """The update of FlashAttention (Dao et al. 2022, algorithm 1): m, l, acc and one factor."""
    (stage,) = derived("softmax and logsumexp").stages
    assert (stage.own, stage.walk) == (("b", "hk", "g", "q"), "kv")
    (walk,) = stage.walks
    assert [p.symbol.name for p in walk.products] == ["s"]
    m, l, acc = walk.states  # noqa: E741
    scaled = "s[b,h,q,kv] * rsqrt(head_dim)"
    assert (m.symbol.name, m.op, show(m.value), m.rescale) == ("m", "max", scaled, None)
    assert (l.symbol.name, l.op, show(l.value)) == ("l", "sum", f"exp({scaled} - finite(m[b,h,q]))")
    assert (acc.symbol.name, acc.value, acc.features) == ("acc", l.value, ("dv",))
    assert show(l.rescale) == "exp(m_old[b,h,q] - finite(m[b,h,q]))"
    assert acc.rescale is l.rescale
    assert [show(output.node) for output in stage.outputs] == [
        "acc[b,h,q,dv] * (1.0 / l[b,h,q])",
        "m[b,h,q] + log(l[b,h,q])",
    ]


def test_a_mask_is_the_guard_and_stands_nowhere_else():
    (stage,) = derived("softmax").stages
    (walk,) = stage.walks
    assert show(walk.guard) == MASK
    assert not any(
        node.kind == "bool" for state in walk.states for node in ir.walk([state.value]) if node.args
    )


def test_a_second_walk_is_guarded_only_if_masked_values_leave_it_alone():
    above, plus = (
        derived(name).stages[0].walks[1] for name in ("weights above a constant", "weights and a constant")
    )
    assert show(above.guard) == MASK
    assert plus.guard is ir.TRUE


def test_statistics_ignore_dropout():
    (stage,) = derived("softmax with dropout").stages
    drawn = [
        any(isinstance(node, ir.Random) for node in ir.walk([state.value])) for state in stage.walks[0].states
    ]
    assert drawn == [False, False, True]


def test_score_contractions_share_an_accumulator():
    (stage,) = derived("two score contractions").stages
    (product,) = stage.walks[0].products
    assert {term.over for term in product.terms} == {"d", "r"}


@pytest.mark.parametrize("name", RECORDS)
def test_no_pair_of_positions_is_stored_but_for_mixed_heads(name):
    for stage in derived(name).stages:
        for output in stage.outputs:
            if {"q", "kv"} <= set(output.node.axes):
                assert name == "talking heads"
                assert "t" in output.node.axes


# ------------------------------------------------------------------------------------- weights one by one


def weighing(weights):
    """The derivation of ``sum_kv weights(s, t) v``: s are masked scores, t the same without a mask."""

    @fg.program
    def program(q: Q, k: K, v: V):
        t = scores(q, k)
        return fg.dot(weights(masked(t), t), v, over="kv")

    return derive(program.trace().graph)


def total(x):
    return fg.sum(x, over="kv")


def top(x):
    return fg.max(x, over="kv")


def saturated(s):
    return fg.exp(s - top(s)), total(fg.exp(s - top(s)))


# What may be fused, and why it may be.
FUSED = {
    "a factor": lambda s, t: fg.exp(s) / total(fg.exp(s)),
    "a factor under a mask": lambda s, t: fg.where(fg.kv % 2 == 0, fg.softmax(s), 0.0),
    "a factor in both branches": lambda s, t: fg.where(fg.kv % 2 == 0, fg.softmax(s), 2 * fg.softmax(s)),
    "a factor that a row chooses": lambda s, t: fg.where(
        total(fg.exp(s)) > 3, fg.exp(s) / total(fg.exp(s)), 0.0
    ),
    "a factor of a sum": lambda s, t: fg.softmax(s) + fg.softmax(s) * t,
    "a factor that is not negative leaves relu": lambda s, t: fg.relu(t * fg.softmax(s)),
    "a root": lambda s, t: fg.sqrt(fg.softmax(s)),
    "a root of a sum": lambda s, t: fg.rsqrt(total(fg.relu(s)) + 1.0) * fg.relu(s),
    "an absolute value": lambda s, t: abs(t * fg.softmax(s)),
    "a divisor": lambda s, t: 1.0 / (total(fg.relu(s)) * (1.0 + fg.exp(-s)) + (1.0 + fg.exp(-s))),
    "a logarithm in an exponent": lambda s, t: fg.exp(s - fg.log(total(fg.exp(s)))),
    "a logarithm beside a maximum": lambda s, t: fg.exp(s - top(s) - fg.log(saturated(s)[1])),
    "a power of weights": lambda s, t: fg.exp(2.0 * fg.log(fg.softmax(s))),
    "a sharper exponent": lambda s, t: fg.exp(2.0 * s - 2.0 * top(s)) / saturated(s)[1],
    "a scalar in the exponent": lambda s, t: fg.where(
        fg.sliding_window(5, 1), fg.exp(fg.scalar(-0.5) * (t - top(s))), 0.0
    ),
    "a flatter exponent": lambda s, t: fg.exp(s - 0.5 * top(s)),
    "a maximum that is a factor": lambda s, t: fg.relu(s) / (top(fg.relu(s)) + 1.0),
    "weights over the largest": lambda s, t: fg.softmax(s) / top(fg.softmax(s)),
    "a bias of the row beside the maximum": lambda s, t: fg.exp(s + fg.q * 0.01 - top(s)),
}

# What may not, and what spoils it.
NOT_FUSED = {
    "a sum beside a factor": lambda s, t: fg.where(fg.kv <= fg.q, fg.softmax(s) + 0.1, 0.0),
    "a function of weights": lambda s, t: fg.tanh(fg.softmax(s)),
    "a statistic in a product of the exponent": lambda s, t: fg.exp(s * total(fg.sigmoid(s)) * 0.1),
    "two factors of two terms": lambda s, t: fg.exp(s) / total(fg.exp(s)) + fg.relu(s) / total(fg.relu(s)),
    "a factor of unknown sign under relu": lambda s, t: fg.relu(t * total(fg.where(fg.kv < 3, t, 0.0))),
    "a factor of unknown sign under a root": lambda s, t: fg.sqrt(
        fg.exp(s) * total(fg.where(fg.kv < 3, t, 0.0)) + 0.0 * t
    ),
    "a maximum that bounds another exponent": lambda s, t: fg.exp(
        s - top(fg.where(fg.kv < 3, t * t, -fg.inf))
    ),
    "a maximum that counts fewer elements": lambda s, t: fg.exp(
        s - top(fg.where(fg.kv % 2 == 0, s, -fg.inf))
    ),
    "a maximum twice": lambda s, t: fg.exp(s - 2.0 * top(s)),
    "a scalar in the exponent of what is masked": lambda s, t: fg.exp(fg.scalar(-0.5) * (s - top(s))),
    "a mean in the exponent": lambda s, t: fg.exp(s - total(fg.where(fg.kv >= 0, t, 0.0)) / fg.size("kv")),
    "two exponentials without a maximum": lambda s, t: (fg.exp(s) / total(fg.exp(s))) * fg.exp(0.5 * s),
    "a condition on weights": lambda s, t: fg.where(fg.softmax(s) > 0.1, fg.softmax(s), 0.0),
    "a bias of the element beside the maximum": lambda s, t: fg.exp(s + t * t - top(s)),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused(name):
    (stage,) = weighing(FUSED[name]).stages
    assert len(stage.walks) == 1
    assert {node for state in stage.walks[0].states for node in ir.walk([state.value])} & {
        state.symbol for state in stage.walks[0].states if state.op == "sum"
    } == set()


@pytest.mark.parametrize("name", NOT_FUSED)
def test_not_fused(name):
    (stage,) = weighing(NOT_FUSED[name]).stages
    assert len(stage.walks) > 1


def test_weights_from_a_logsumexp_are_those_of_softmax():
    assert derived("weights from a logsumexp").stages[0].walks == derived("softmax").stages[0].walks


def test_equal_states_are_one():
    (stage,) = weighing(FUSED["weights over the largest"]).stages
    assert [state.symbol.name for state in stage.walks[0].states] == ["m", "l", "acc"]


def test_a_maximum_that_is_a_result_is_no_free_reference():
    @fg.program
    def program(q: Q, k: K, v: V):
        s = scores(q, k)
        return fg.dot(fg.softmax(s), v, over="kv"), top(s)

    notes = derive(program.trace().graph).notes
    assert "rescale" in [note.rule for note in notes]
    assert "free reference" not in [note.rule for note in notes]


def test_a_maximum_that_is_compared_is_no_free_reference():
    @fg.program
    def program(q: Q, k: K, v: V):
        s = scores(q, k)
        return fg.dot(fg.softmax(s), v, over="kv") * fg.where(top(s) < 0, 1.0, 2.0)

    assert "free reference" not in [note.rule for note in derive(program.trace().graph).notes]


def test_a_maximum_that_scales_the_result_is_no_free_reference():
    @fg.program
    def program(q: Q, k: K, v: V):
        e, summed = saturated(scores(q, k))
        return fg.dot(e / fg.sqrt(summed), v, over="kv")

    assert "free reference" not in [note.rule for note in derive(program.trace().graph).notes]


# --------------------------------------------------------------------------------------------- with sympy


def test_a_factor_that_structure_hides_is_proved():
    def weights(s, t):
        a, b = total(fg.exp(s)), total(fg.relu(s))
        return fg.exp(s) / a / b + fg.exp(2.0 * s) / (a * b)

    derivation = weighing(weights)
    assert len(derivation.stages[0].walks) == 1
    assert [note.rule for note in derivation.notes] == ["defer"]


def test_a_statistic_that_cancels_is_proved():
    def weights(s, t):
        e, r = fg.exp(s), total(fg.exp(s))
        return fg.where(fg.kv <= fg.q, (e + r) * (e - r) + r * r, 0.0)

    assert len(weighing(weights).stages[0].walks) == 1


def test_sympy_is_imported_for_a_proof_alone():
    code = """
import sys
sys.path[:0] = [".", "tests", "tests/pure"]
import test_streaming as t
for name in t.PROGRAMS: t.derived(name)
for name, weights in t.NOT_FUSED.items():
    if name != "a factor of unknown sign under a root": t.weighing(weights)  # numbers do not refute this one
assert not {"sympy", "torch"} & set(sys.modules)
t.test_a_factor_that_structure_hides_is_proved()
assert "sympy" in sys.modules
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_time_of_a_derivation(name):
    graph = PROGRAMS[name].trace().graph
    times = []
    for _ in range(5):
        start = time.process_time()
        derive(graph)
        times.append(time.process_time() - start)
    assert min(times) < 0.02


def test_shared_parts_are_looked_at_once():
    """As a tree this expression has more than 10 ** 14 nodes."""

    @fg.program
    def program(q: Q, k: K, v: V):
        t = x = scores(q, k)
        for _ in range(16):
            x = x * x * 0.5 + fg.exp(x * 0.1)
        p = fg.softmax(masked(x))
        for _ in range(16):
            p = abs(p * 0.5 + p * fg.exp(-abs(t)))
        return fg.dot(p, v, over="kv")

    graph = program.trace().graph
    assert graph.outputs[0].node.size > 10**14
    start = time.process_time()
    derive(graph)
    assert time.process_time() - start < 0.5


# ------------------------------------------------------------------------------------------------- fusion


@pytest.mark.parametrize(
    "name", ["softmax", "softmax with dropout", "projection", "weights above a constant"]
)
def test_less_fusion_gives_more_stages(name):
    counts = [len(derived(name, fusion).stages) for fusion in ("full", "products", "none")]
    assert counts[0] < counts[1] < counts[2]


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_fusion_a_stage_has_one_operation_on_tiles(name):
    for stage in derived(name, "none").stages:
        states = [state for walk in stage.walks for state in walk.states]
        assert len(states) <= 1
        assert not any(walk.products for walk in stage.walks)
        for state in states:
            assert not [node for node in ir.walk([state.value]) if isinstance(node, ir.Symbol)]


@pytest.mark.parametrize("fusion", ["full", "products", "none"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_stage_reads_what_earlier_ones_wrote(name, fusion):
    graph = PROGRAMS[name].trace().graph
    written = set()
    for stage in derive(graph, fusion).stages:
        nodes = [output.node for output in stage.outputs]
        for walk in stage.walks:
            nodes += [walk.guard, *(state.value for state in walk.states)]
            nodes += [state.operand for state in walk.states if state.operand is not None]
            nodes += [side for p in walk.products for term in p.terms for side in (term.own, term.walk)]
            nodes += [output.node for output in walk.stores]
        read = {
            n.name for n in ir.walk(nodes) if isinstance(n, ir.Input) and n.position >= len(graph.arguments)
        }
        assert read <= written
        written |= {output.name for output in stage.outputs}
        written |= {output.name for walk in stage.walks for output in walk.stores}
    assert {output.name for output in graph.outputs} <= written


def test_what_a_walk_cannot_hold_is_named():
    graph = PROGRAMS["projection"].trace().graph
    values, why = unfit([graph.outputs[0].node], "dv")
    assert why == "the sum over dv needs all of it"
    assert isinstance(values[0], ir.Contract)
    assert values[0].over == "kv"
