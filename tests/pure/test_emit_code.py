"""Expressions as CUDA: parentheses, types, widths, and which pieces get a name at which place."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import pytest

from fagen.derive.extent import LENGTH
from fagen.emit.cexpr import Expressions, Lowering, random_test
from fagen.emit.code import BLOCK, COLUMN, ELEMENT, ROW, Code, Codes, Place, Splitter
from fagen.emit.params import Parameters, number
from fagen.ir import graph as ir
from fagen.ir.graph import (
    Const,
    Graph,
    Index,
    Input,
    Load,
    Node,
    Output,
    Random,
    Scalar,
    Size,
    Symbol,
    add,
    conjunction,
    contract,
    disjunction,
    div,
    eq,
    floordiv,
    function,
    index,
    le,
    mod,
    mul,
    neg,
    negation,
    size,
    sub,
    to_float,
    to_int,
    where,
)
from fagen.plan.plan import Plan, Problem
from fagen.plan.planner import plan

Q = Input("q", 0, ("b", "h", "q", "d"), "float")
K = Input("k", 1, ("b", "hk", "kv", "d"), "float")
V = Input("v", 2, ("b", "hk", "kv", "dv"), "float")
IDS = Input("ids", 3, ("b", "kv"), "int")
BIAS = Input("bias", 4, ("h", "q", "kv"), "float")
FLAGS = Input("flags", 5, ("kv",), "bool")
TEMPERATURE = Scalar("temperature", 6, "float")
S = Symbol("s", ("q", "kv"), "float")
M = Symbol("m", ("q",), "float")


@pytest.fixture(scope="module")
def planned() -> Plan:
    out = contract(function("exp", contract(Q, K, "d")), V, "kv")
    graph = Graph(
        "program", (Q, K, V, IDS, BIAS, FLAGS, TEMPERATURE), (Output(out, "out", ("b", "h", "q", "dv")),)
    )
    storages = ("fp16", "fp16", "fp16", "int32", "bf16", "bool")
    return plan(Problem(graph, "A100", "simt", (("d", 64), ("dv", 64)), storages))


class Point:
    """A point inside a tile: rows q, columns kv, a score and a row's maximum known."""

    def __init__(self, planned: Plan, fast: bool = False, **options: object) -> None:
        sizes = dict(planned.problem.sizes)
        limits = planned.problem.limits
        self.expressions = Expressions(Parameters(planned), sizes, fast, limits)
        self.codes: Codes = self.expressions.codes
        leaves: dict[Node, Code] = {Index(a): self.codes.leaf(a, "int32") for a in ("b", "hk", "g")}
        leaves[Index("q")] = self.codes.leaf("q", "int32", ROW)
        leaves[Index("kv")] = self.codes.leaf("kv", "int32", COLUMN)
        leaves[S] = self.codes.leaf("s", "float", ELEMENT)
        leaves[M] = self.codes.leaf("m", "float", Place(row=True, phase=1))
        self.lower = Lowering(self.expressions, leaves, **options)  # type: ignore[arg-type]
        self.splitter = Splitter()

    def text(self, node: Node) -> str:
        """The whole expression, nothing named but what is known elsewhere."""
        return Splitter().split([]).text(self.lower(node))

    def split(self, *nodes: Node, place: Place = ELEMENT) -> Mapping[str, list[str]]:
        split = self.splitter.split([(self.lower(node), place) for node in nodes])
        places = {"block": BLOCK, "row": ROW, "column": COLUMN, "element": ELEMENT}
        found = {name: [f"{s.target} = {s.text}" for s in split.at(at)] for name, at in places.items()}
        found["roots"] = [split.text(self.lower(node)) for node in nodes]
        return found


@pytest.fixture
def point(planned: Plan) -> Point:
    return Point(planned)


q, kv = Index("q"), Index("kv")


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (mul(S, add(S, Const(1.0))), "s * (s + 1.0f)"),
        (sub(S, sub(S, M)), "s - (s - m)"),
        (add(neg(S), M), "m - s"),
        (neg(add(S, M)), "-(s + m)"),
        (div(S, div(S, M)), "s / (s / m)"),
        (div(S, Const(30.0)), "s * (1.0f / 30.0f)"),
        (div(S, TEMPERATURE), "s / p.scalar0"),
        (where(le(kv, q), S, Const(-math.inf)), "kv <= q ? s : -INFINITY"),
        (mul(where(le(kv, q), S, M), S), "s * (kv <= q ? s : m)"),
        (conjunction(le(kv, q), disjunction(eq(kv, Const(3)), FLAGS)), "(kv == 3 || FLAGS) && kv <= q"),
        (negation(eq(kv, q)), "q != kv"),
        (negation(FLAGS), "!FLAGS"),
        (le(sub(q, kv), Const(7)), "q <= kv + 7"),
        (to_float(le(kv, q)), "kv <= q ? 1.0f : 0.0f"),
        (mul(to_float(sub(kv, q)), S), "s * float(kv - q)"),
        (add(to_int(le(kv, q)), q), "int32(kv <= q) + q"),
        (function("rsqrt", S), "rsqrtf(s)"),
        (function("exp", sub(S, M)), "expf(s - m)"),
        (ir.minimum(kv, q), "minimum(q, kv)"),
        (ir.function("abs", sub(q, kv)), "absolute(q - kv)"),
        (mod(kv, Const(4)), "kv % 4"),
        (floordiv(sub(q, kv), Const(4)), "floor_div(q - kv, 4)"),
        (mod(sub(q, kv), Const(-4)), "floor_mod(q - kv, -4)"),
        (mul(Const(3), add(q, kv)), "3 * int64(q) + 3 * kv"),
        (sub(Const(0), q), "-q"),
        (size("h"), "p.kv_heads * p.group"),
    ],
)
def test_an_expression_reads_as_it_would_be_written(point: Point, node: Node, text: str) -> None:
    flags = point.text(FLAGS)
    assert point.text(node) == text.replace("FLAGS", flags)


def test_the_query_head_is_one_number(point: Point) -> None:
    assert point.text(add(index("h"), Const(1))) == "hk * p.group + g + 1"
    assert point.text(mul(Const(2), index("h"))) == "2 * (hk * p.group + g)"


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (sub(IDS, Load(IDS, (index("b"), q))), "int64(IDS) - OTHER"),
        (mul(kv, q), "int64(q) * kv"),
        (mod(mul(kv, q), Const(7)), "int64(q) * kv % 7"),
        (le(mul(kv, kv), q), "int64(kv) * kv <= q"),
        (add(kv, q), "q + kv"),
    ],
)
def test_what_may_pass_32_bits_is_computed_in_64(point: Point, node: Node, text: str) -> None:
    ids, other = point.text(IDS), point.text(Load(IDS, (index("b"), q)))
    assert point.text(node) == text.replace("IDS", ids).replace("OTHER", other)


def test_limits_keep_an_operation_in_32_bits(planned: Plan) -> None:
    narrow = Expressions(Parameters(planned), {}, False, {q: (0, 100), kv: (0, 100)})
    leaves = {q: narrow.codes.leaf("q", "int32", ROW), kv: narrow.codes.leaf("kv", "int32", COLUMN)}
    code = Lowering(narrow, leaves)(mul(kv, q))
    assert code.ctype == "int32"
    assert LENGTH > 100


def test_a_gather_is_clamped_by_the_table_and_an_own_position_is_not(point: Point) -> None:
    assert point.text(IDS) == "(p.table0 + b * p.table0_b)[kv * p.table0_kv]"
    gathered = point.text(Load(IDS, (index("b"), add(kv, Const(5)))))
    assert gathered == "(p.table0 + b * p.table0_b)[clamp_index(kv + 5, p.table0_kv_size) * p.table0_kv]"
    assert "clamp_index(0" not in point.text(Load(IDS, (Const(0), kv)))


def test_a_length_known_beforehand_is_a_constant_with_its_formula(point: Point, planned: Plan) -> None:
    scaled = mul(S, function("rsqrt", size("d")))
    assert point.text(scaled) == "s * SCALE"
    (constant,) = point.expressions.names.constants("SCALE")
    assert (constant.definition, constant.comment) == ("constexpr float SCALE = 0.125f;", "rsqrt(head_dim)")
    assert point.text(to_float(Size("kv"))) == "float(p.kv_len)"


@pytest.mark.parametrize(
    ("node", "text", "definition"),
    [
        (mul(kv, mul(size("d"), Const(2**31))), "COUNT * kv", "int64 COUNT = 137438953472ll"),
        (mul(S, mul(size("d"), Const(math.inf))), "s * SCALE", "float SCALE = INFINITY"),
        (mul(S, mul(size("d"), Const(math.nan))), "s * SCALE", "float SCALE = NAN"),
    ],
)
def test_a_constant_has_the_type_of_its_value(point: Point, node: Node, text: str, definition: str) -> None:
    assert point.text(node) == text
    (constant,) = point.expressions.names.constants("COUNT SCALE")
    assert constant.definition == f"constexpr {definition};"


def test_a_running_maximum_makes_the_power_of_two_enough_for_16_bits(planned: Plan) -> None:
    bounded = Point(planned, fast=True, nonpositive=lambda exponent: True)
    assert bounded.text(function("exp2", sub(S, M))) == "exp2_approx(s - m)"
    free = Point(planned, fast=True)
    assert free.text(function("exp", sub(S, M))) == "exp2_approx((s - m) * LOG2E)"
    assert free.text(function("exp2", sub(S, M))) == "exp2f(s - m)"
    exact = Point(planned, nonpositive=lambda exponent: True)  # weights may be too small for the hardware's
    assert exact.text(function("exp", sub(S, M))) == "expf(s - m)"
    assert exact.text(function("exp2", sub(S, M))) == "exp2f(s - m)"


def test_the_factor_of_an_exponent_is_multiplied_in_only_where_nothing_stands_beside_a_product(
    planned: Plan,
) -> None:
    """``x * LOG2E - level`` is rounded once: of a level of -1e9, 18 would be left where 0 is due."""
    point = Point(planned, fast=True, rounded=True)
    scaled = mul(S, function("rsqrt", size("d")))

    def exponential(score: Node) -> str:
        return point.text(function("exp", sub(score, ir.finite(M))))

    lowered = "maximum(finite_or_zero(m) * LOG2E, -3.4028235e+38f)"
    for score, text in ((scaled, "SCALE"), (mul(S, Const(0.69)), "0.69f")):
        assert exponential(score) == f"exp2_approx(s * ({text} * LOG2E) - {lowered})"
    for score, text in (
        (S, "s"),
        (mul(S, Const(0.7)), "s * 0.7f"),
        (mul(S, TEMPERATURE), "s * p.scalar0"),
        (add(scaled, Const(-1e9)), "s * SCALE - 1000000000.0f"),
        (add(scaled, TEMPERATURE), "s * SCALE + p.scalar0"),
        (add(scaled, to_float(kv)), "s * SCALE + float(kv)"),
        (where(le(kv, q), Const(-1e30), scaled), "(q < kv ? s * SCALE : -1e+30f)"),
    ):
        assert exponential(score) == f"exp2_approx(({text} - finite_or_zero(m)) * LOG2E)"


def test_the_fast_tangent_is_for_16_bit_programs(planned: Plan) -> None:
    node = ir.Map("tanh_fast", (S,))
    assert Point(planned, fast=True).text(node) == "tanh_approx(s)"
    assert Point(planned, fast=False).text(node) == "tanhf(s)"


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_sines_of_16_bit_programs_are_the_hardwares(planned: Plan, name: str) -> None:
    assert Point(planned, fast=True).text(function(name, S)) == f"{name}_approx(s)"
    assert Point(planned, fast=False).text(function(name, S)) == f"{name}f(s)"


def test_a_denominator_known_further_out_is_turned_over_there(point: Point) -> None:
    total = Symbol("l", ("q",), "float")
    point.lower = Lowering(
        point.expressions,
        {S: point.codes.leaf("s", "float", ELEMENT), total: point.codes.leaf("l", "float", ROW)},
    )
    split = point.split(ir.Map("quotient", (S, total)))
    assert split["row"] == ["row.x0 = quotient(1.0f, l)"]
    assert split["roots"] == ["s * row.x0"]


def test_loads_move_to_where_they_are_known(point: Point) -> None:
    same = eq(IDS, Load(IDS, (index("b"), q)))
    split = point.split(where(same, add(S, BIAS), Const(0.0)))
    assert split["block"] == [
        "block.table0 = p.table0 + b * p.table0_b",
        "block.table1 = p.table1 + (hk * p.group + g) * p.table1_h",
    ]
    assert split["column"] == ["column.table0 = block.table0[kv * p.table0_kv]"]
    assert split["row"] == [
        "row.table0 = block.table0[clamp_index(q, p.table0_kv_size) * p.table0_kv]",
        "row.table1 = block.table1 + q * p.table1_q",
    ]
    (root,) = split["roots"]
    left, right, value = re.fullmatch(r"(\S+) == (\S+) \? (.*) : 0.0f", root).groups()  # type: ignore[union-attr]
    assert {left, right} == {"row.table0", "column.table0"}
    assert value == "s + to_float(row.table1[kv * p.table1_kv])"


def test_what_is_used_twice_is_named_once(point: Point) -> None:
    x = function("tanh", mul(S, Const(2.0)))
    split = point.split(add(x, mul(x, x)))
    assert split["element"] == ["x0 = tanhf(s * 2.0f)"]
    assert split["roots"] == ["x0 * x0 + x0"]


def test_a_value_for_a_later_step_is_kept_and_others_wait(planned: Plan) -> None:
    point = Point(planned)
    score, late = mul(S, Const(2.0)), function("tanh", S)
    first, second = ELEMENT, ELEMENT._replace(phase=1)
    weight = mul(function("exp", sub(score, M)), late)
    split = point.splitter.split([(point.lower(score), first), (point.lower(weight), second)])
    assert [(s.kind, s.target, s.text) for s in split.at(first)] == [("array", "x0[c]", "s * 2.0f")]
    assert [variable.name for variable in split.arrays()] == ["x0"]
    assert split.text(point.lower(weight)) == "expf(x0[c] - m) * tanhf(s)"


def test_names_of_an_outer_place_are_known_to_later_splits(point: Point) -> None:
    first = point.split(add(S, BIAS))
    second = point.split(mul(S, BIAS))
    assert first["block"]
    assert not second["block"]
    assert "row.table1" in second["roots"][0]


def test_a_call_of_the_random_generator_serves_neighbours(planned: Plan) -> None:
    point = Point(planned, served="c % 2 == 0")
    split = point.splitter.split([(point.lower(le(Const(100), Random(0))), ELEMENT)])
    (words,) = split.kept()
    assert words.declared == "if (c % 2 == 0) "
    assert words.text == "dropout_words(block.seed, 0, b, block.n0, q, kv)"


def test_bits_of_all_elements_of_a_thread_are_drawn_at_once(planned: Plan) -> None:
    point = Point(planned)
    test = random_test(le(Const(100), Random(1)))
    assert test is not None
    q, kv = (point.codes.leaf(axis, "int32", ELEMENT) for axis in ("q", "kv"))
    drawn = [point.lower.draw("drawn", test, q, kv, across) for across in (False, True)]
    split = point.splitter.split([(code, ELEMENT) for code in drawn])
    assert [split.text(code) for code in drawn] == [
        f"drawn.draw{across}<100>(block.seed, 1, b, block.n0, q, kv)" for across in ("", "_across")
    ]
    assert [statement.target for statement in split.at(BLOCK)] == ["block.seed", "block.n0"]
    assert random_test(le(Const(65_536), Random(0))) is None, "none passes"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1f"),
        (1 / 3, "0.33333334f"),
        (1e-45, "1e-45f"),
        (3.0, "3.0f"),
        (30.0, "30.0f"),
        (1e10, "10000000000.0f"),
        (1e39, "INFINITY"),
        (-math.inf, "-INFINITY"),
        (math.nan, "NAN"),
        (-0.0, "-0.0f"),
        (True, "true"),
        (2**31 - 1, "2147483647"),
        (2**31, "2147483648ll"),
        (-(2**31), "-2147483648ll"),
    ],
)
def test_numbers(value: float | int | bool, text: str) -> None:
    assert number(value) == text
