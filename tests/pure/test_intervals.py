"""The tiles a mask leaves: all that hold an allowed pair, hardly another, full only where all are allowed."""

import numpy as np
import pytest
import torch

import fagen as fg
from fagen.derive.extent import LENGTH, bits
from fagen.derive.intervals import (
    OWN_FIRST,
    OWN_LAST,
    WALK_FIRST,
    WALK_LAST,
    Range,
    last_visitor,
    ranges,
    row_places,
    sought,
)
from fagen.derive.live import live_tiles
from fagen.ir.graph import (
    FALSE,
    TRUE,
    Const,
    Index,
    Input,
    Load,
    Map,
    Node,
    Scalar,
    Size,
    Symbol,
    add,
    conjunction,
    disjunction,
    eq,
    floordiv,
    le,
    load,
    lt,
    maximum,
    minimum,
    mod,
    mul,
    negation,
    sub,
    substitute,
    walk,
    where,
)
from fagen.ir.reference import evaluate_nodes
from masks import MASKS, dense, tables_of

BLOCKS = (16, 32, 64, 128)
DIRECTIONS = (("q", "kv"), ("kv", "q"))
OTHERS = {
    "dilated_sliding_window",
    "global + sliding window",
    "block_diffusion",
    "speculative tree training",
    "batched independent causal blocks",
    "vision cross-attention (rows with no key)",
    "neighbourhood 2-D, square",
    "video spatial window",
    "strided (sparse transformer)",
    "speculative tree decode",
    "neighbourhood 2-D, 12 wide 20 high, window 5 wide 3 high",
}
"""Masks of the file that may leave a tile too many; all others leave exactly the right ones."""


def blockwise(allowed: np.ndarray, block_own: int, block_walk: int) -> tuple[np.ndarray, np.ndarray]:
    """Whether each pair of tiles has an allowed pair, and has no other; a tile past the walked length has."""
    own, walked = allowed.shape
    tiles = -(-own // block_own), -(-walked // block_walk)
    padded = np.zeros((tiles[0] * block_own, tiles[1] * block_walk), bool)
    padded[:own, :walked] = allowed
    padded = padded.reshape(tiles[0], block_own, tiles[1], block_walk)
    beyond = np.arange(tiles[0] * block_own).reshape(tiles[0], block_own, 1, 1) >= own
    return padded.any((1, 3)), (padded | beyond).all((1, 3))


def compare(
    guard: Node,
    allowed: np.ndarray,
    sizes: dict[str, int],
    environment: dict[Node, object],
    blocks: tuple[tuple[int, int], ...],
    fixed: dict[str, int] | None = None,
    note: str = "",
) -> tuple[int, int]:
    """Check both directions; return the tiles that hold an allowed pair, and those computed in vain."""
    live = extra = 0
    for own, walked in DIRECTIONS:
        for block_own, block_walk in blocks:
            expected, full = blockwise(allowed if own == "q" else allowed.T, block_own, block_walk)
            found = live_tiles(guard, own, walked, sizes, block_own, block_walk, environment, fixed)
            case = f"{note} {own} -> {walked}, blocks {block_own} x {block_walk}, {sizes}"
            assert len(found) == len(expected), case
            for row, tiles in enumerate(found):
                places = [tile for tile, _ in tiles]
                assert places == sorted(set(places)), f"{case}: tiles {places} of tile {row}"
                skipped = set(np.flatnonzero(expected[row])) - set(places)
                assert not skipped, f"{case}: tile {row} skips {skipped}"
                wrong = [tile for tile, kind in tiles if kind == "full" and not full[row, tile]]
                assert not wrong, f"{case}: tile {row} calls {wrong} full"
                live += int(expected[row].sum())
                extra += len(places) - int(expected[row].sum())
    return live, extra


ALL_BLOCKS = tuple((own, walked) for own in BLOCKS for walked in BLOCKS)


@pytest.mark.parametrize("name", MASKS)
def test_tiles_of_the_file(name):
    case = MASKS[name]
    mask = case.build()
    allowed = dense(mask, case.q_len, case.kv_len).numpy()
    sizes = {"q": case.q_len, "kv": case.kv_len}
    live, extra = compare(mask.node, allowed, sizes, tables_of(mask), ALL_BLOCKS)
    assert extra <= (live // 10 if name in OTHERS else 0)


LENGTHS = ((0, 0), (0, 65), (65, 0), (1, 1), (1, 300), (2, 63), (63, 2), (64, 64), (65, 127), (127, 65))


@pytest.mark.parametrize("name", MASKS)
def test_tiles_at_other_lengths(name):
    case = MASKS[name]
    live = extra = 0
    for seed, (q_len, kv_len) in enumerate(LENGTHS):
        mask = case.build(q_len, kv_len, seed)
        allowed = dense(mask, q_len, kv_len).numpy()
        sizes = {"q": q_len, "kv": kv_len}
        some, more = compare(
            mask.node, allowed, sizes, tables_of(mask), ((16, 16), (64, 32), (16, 128)), note=f"seed {seed}"
        )
        live, extra = live + some, extra + more
    assert extra <= (live // 10 if name in OTHERS else 0)


def count_turns(
    guard: Node,
    sizes: dict[str, int],
    environment: dict[Node, object],
    blocks: tuple[tuple[int, int], ...],
    fixed: dict[str, int] | None = None,
) -> bool:
    """Check for tiles of kv how many later ones visit a tile of q with them; False where it is not known."""
    plan = ranges(guard, "kv", "q")
    last = last_visitor(plan)
    if last is None or 0 in (sizes["q"], sizes["kv"]):
        return False
    tables = {node: torch.as_tensor(value) for node, value in environment.items()}
    positions = {axis: torch.tensor([place]) for axis, place in (fixed or {}).items()}

    def along(axis: str, count: int, formulas: list[Node], known: dict[Node, Node]) -> list[np.ndarray]:
        moved = [substitute(formula, known) for formula in formulas]
        values = evaluate_nodes(moved, tables, {**sizes, axis: count}, positions)
        return [value.reshape(-1).expand(count).numpy() for value in values]

    for own, walked in blocks:
        tiles = -(-sizes["kv"] // own), -(-sizes["q"] // walked)
        first, start = mul(Index("own"), Const(own)), mul(Index("walked"), Const(walked))
        ends = {OWN_FIRST: first, OWN_LAST: sub(minimum(add(first, Const(own)), kv_len), Const(1))}
        span = plan.ranges[0]
        begin, end = along("own", tiles[0], [span.begin, span.end], ends)
        begin = begin // walked
        end = np.maximum(-(-end // walked), begin + 1)  # it visits one tile at least
        ends = {WALK_FIRST: start, WALK_LAST: add(start, Const(walked - 1))}
        (found,) = along("walked", tiles[1], [last], ends)
        for tile in range(tiles[1]):
            visits = (begin <= tile) & (tile < end)
            for number in np.flatnonzero(visits):
                before = (found[tile] - number * own) // own
                assert before == visits[number + 1 :].sum(), (guard, sizes, own, walked, tile, number)
    return True


def test_turns_of_tiles_are_counted_as_they_are_visited():
    known = dict.fromkeys(MASKS, False)
    for name, case in MASKS.items():
        for seed, lengths in enumerate(((200, 200), (90, 300), (300, 90))):
            mask, sizes = case.build(*lengths, seed), dict(zip(("q", "kv"), lengths, strict=True))
            known[name] |= count_turns(mask.node, sizes, tables_of(mask), ((32, 16), (16, 64), (128, 128)))
    counted = {name for name, is_known in known.items() if is_known}
    assert counted >= {name for name in MASKS if "causal, " in name or "window" in name} - OTHERS
    assert not {"document causal", "prefix_lm", "video spatial window"} & counted
    # all begin at one place and end at others
    assert last_visitor(ranges(fg.sliding_window(9).node, "kv", "q")) is None
    assert last_visitor(ranges(le(Const(5), Index("q")), "kv", "q")) is sub(kv_len, Const(1))


def test_the_common_masks_need_no_test_of_a_visited_tile():
    for name in MASKS.keys() - OTHERS - {"document full", "document prefix-lm"}:
        plan = ranges(MASKS[name].build().node, "q", "kv")
        assert plan.may is TRUE, name
        assert not plan.needs_block_map, name


def test_full_tiles_are_found():
    def full(mask: fg.Expr, own: str, walked: str) -> int:
        found = live_tiles(mask.node, own, walked, {"q": 1024, "kv": 1024}, 64, 64)
        return sum(kind == "full" for row in found for _, kind in row)

    for own, walked in DIRECTIONS:
        assert full(fg.causal(), own, walked) == 16 * 15 // 2
        assert full(fg.causal() & fg.sliding_window(255), own, walked) == 15 + 14 + 13
        assert full(fg.chunked(256), own, walked) == 4 * 16
        assert full(abs(fg.q - fg.kv) // 64 >= 3, own, walked) == 12 * 13


# ------------------------------------------------------------------------------------------- the formulas

q, kv = Index("q"), Index("kv")
q_len, kv_len = Size("q"), Size("kv")


def test_formulas_of_causal():
    forward, backward = ranges(le(kv, q), "q", "kv"), ranges(le(kv, q), "kv", "q")
    assert forward.ranges == (Range(Const(0), minimum(add(OWN_LAST, Const(1)), kv_len), TRUE),)
    assert forward.must is le(WALK_LAST, OWN_FIRST)
    assert backward.ranges == (Range(OWN_FIRST, q_len, TRUE),)
    assert backward.must is le(OWN_LAST, WALK_FIRST)


def test_formulas_name_no_axis():
    plan = ranges(le(Index("row"), Index("column")), "column", "row")
    assert plan.ranges == (Range(Const(0), minimum(add(OWN_LAST, Const(1)), Size("row")), TRUE),)


def test_formulas_of_a_window_of_a_scalar():
    left = Scalar("left", 0, "int")
    mask = conjunction(le(kv, q), le(sub(q, kv), left))
    (found,) = ranges(mask, "q", "kv").ranges
    assert found.begin is maximum(sub(OWN_FIRST, left), Const(0))
    assert found.end is minimum(add(OWN_LAST, Const(1)), kv_len)


def test_formulas_of_chunks():
    chunk = Const(64)
    mask = conjunction(
        le(mul(chunk, floordiv(q, chunk)), kv),
        lt(floordiv(kv, chunk), add(floordiv(q, chunk), Const(1))),
        le(kv, q),
    )
    (found,) = ranges(mask, "q", "kv").ranges
    assert found.begin is mul(floordiv(OWN_FIRST, chunk), chunk)
    assert found.end is minimum(add(OWN_LAST, Const(1)), kv_len)  # the end of the chunk is never less
    assert ranges(mask, "kv", "q").ranges[0].begin is OWN_FIRST


def test_a_union_is_one_range_where_its_parts_share_a_side():
    prefix = disjunction(lt(kv, Const(70)), le(kv, q))
    (forward,) = ranges(prefix, "q", "kv").ranges
    assert forward.end is minimum(maximum(add(OWN_LAST, Const(1)), Const(70)), kv_len)
    (backward,) = ranges(prefix, "kv", "q").ranges
    assert backward.begin is where(le(OWN_FIRST, Const(69)), Const(0), OWN_FIRST)


def test_a_condition_on_own_rows_is_a_condition_of_the_range():
    (found,) = ranges(conjunction(lt(q, Const(20)), le(kv, q)), "q", "kv").ranges
    assert found.when is le(OWN_FIRST, Const(19))
    assert found.end is minimum(add(minimum(OWN_LAST, Const(19)), Const(1)), kv_len)


def test_a_sorted_table_is_searched():
    table = Input("doc", 0, ("b", "position"), "int", True)
    mine, theirs = load(table, (Index("b"), q)), load(table, (Index("b"), kv))
    plan = ranges(conjunction(le(mine, theirs), le(theirs, mine)), "q", "kv")
    assert {(s.side, s.fixed, s.value) for s in plan.searches} == {
        ("left", (Index("b"),), load(table, (Index("b"), OWN_FIRST))),
        ("right", (Index("b"),), load(table, (Index("b"), OWN_LAST))),
    }
    assert not plan.summaries
    assert plan.may is TRUE


@pytest.mark.parametrize("name", MASKS)
def test_places_that_were_searched_say_what_the_table_does(name, monkeypatch):
    lengths = (200, 200), (65, 127), (127, 65), (1, 63), (0, 64)
    built = [
        (MASKS[name].build(q_len, kv_len, seed), {"q": q_len, "kv": kv_len})
        for seed, (q_len, kv_len) in enumerate(lengths)
    ]

    def tiles():
        return [
            live_tiles(mask.node, *axes, sizes, 32, 16, tables_of(mask), None)
            for mask, sizes in built
            for axes in DIRECTIONS
        ]

    read = tiles()
    monkeypatch.setattr("fagen.derive.live.ranges", lambda *about: sought(ranges(*about)))
    assert tiles() == read


def test_a_full_tile_of_a_document_is_told_by_places_alone():
    table = Input("doc", 0, ("b", "position"), "int", True)
    mine, theirs = load(table, (Index("b"), q)), load(table, (Index("b"), kv))
    plan = sought(ranges(conjunction(le(mine, theirs), le(theirs, mine), le(kv, q)), "q", "kv"))
    assert not any(isinstance(node, Load) for node in walk([plan.must]))
    assert len(plan.searches) == 4


def test_the_columns_of_a_row_are_searched_for_between_those_of_its_tile():
    table = Input("doc", 0, ("b", "position"), "int", True)
    mine, theirs = load(table, (Index("b"), q)), load(table, (Index("b"), kv))
    same, before = eq(mine, theirs), le(theirs, add(mine, Const(-2)))
    plan = sought(ranges(conjunction(same, le(kv, q)), "q", "kv"))
    symbols = {(s.side, s.value): s.symbol for s in plan.searches}
    first, last = (load(table, (Index("b"), end)) for end in (OWN_FIRST, OWN_LAST))
    for place in row_places(same, plan):
        assert place.search.value is mine
        assert (place.lowest, place.highest) == tuple(symbols[place.search.side, x] for x in (first, last))
    assert [place.upper for place in row_places(same, plan)] == [False, True]
    assert row_places(le(kv, q), plan) == ()
    assert row_places(before, plan) == ()  # nobody searches for the ends of that
    plan = sought(ranges(before, "q", "kv"))
    assert [place.upper for place in row_places(before, plan)] == [True]
    unsorted = Input("doc", 0, ("b", "position"), "int")
    condition = eq(load(unsorted, (Index("b"), q)), load(unsorted, (Index("b"), kv)))
    assert row_places(condition, sought(ranges(condition, "q", "kv"))) == ()


def test_an_unsorted_table_is_summarised_and_no_more_than_needed():
    table = Input("doc", 0, ("position",), "int")
    mine, theirs = load(table, (q,)), load(table, (kv,))
    plan = ranges(conjunction(le(mine, theirs), le(theirs, mine)), "q", "kv")
    assert {(s.op, s.node, s.axis) for s in plan.summaries} == {
        (op, node, axis) for op in ("min", "max") for node, axis in ((mine, "q"), (theirs, "kv"))
    }
    flags = Input("flags", 0, ("kv",), "bool")
    plan = ranges(conjunction(flags, le(kv, q)), "q", "kv")
    assert [(s.op, s.node, s.axis) for s in plan.summaries] == [("any", flags, "kv"), ("all", flags, "kv")]


def test_a_table_over_both_axes_needs_a_block_map_only_where_nothing_else_skips():
    table = Input("seen", 0, ("q", "kv"), "bool")
    assert ranges(table, "q", "kv").needs_block_map
    assert ranges(disjunction(table, lt(kv, Const(5))), "kv", "q").needs_block_map
    assert not ranges(conjunction(table, le(kv, q)), "q", "kv").needs_block_map
    assert not ranges(disjunction(table, le(q, kv), lt(kv, q)), "q", "kv").needs_block_map
    assert not ranges(TRUE, "q", "kv").needs_block_map


def test_constants():
    everything = Range(Const(0), kv_len, TRUE)
    plan = ranges(TRUE, "q", "kv")
    assert (plan.ranges, plan.may, plan.must) == ((everything,), TRUE, TRUE)
    plan = ranges(FALSE, "q", "kv")
    assert (plan.ranges, plan.may, plan.must) == ((), FALSE, FALSE)


def test_at_most_three_ranges():
    parts = [conjunction(le(add(q, Const(k)), kv), le(kv, add(q, Const(k + 3)))) for k in range(0, 500, 100)]
    mask = disjunction(*parts)
    plan = ranges(mask, "q", "kv")
    assert len(plan.ranges) == 3
    assert plan.may is not TRUE  # the hull has gaps
    rows, columns = np.arange(300)[:, None], np.arange(600)[None, :]
    allowed = np.any([(rows + k <= columns) & (columns <= rows + k + 3) for k in range(0, 500, 100)], axis=0)
    live, extra = compare(mask, allowed, {"q": 300, "kv": 600}, {}, ((16, 16), (64, 32)))
    assert extra == 0 < live


def test_lets_stand_after_what_they_use():
    for name, case in MASKS.items():
        for own, walked in DIRECTIONS:
            plan = ranges(case.build().node, own, walked)
            known: set[Node] = {OWN_FIRST, OWN_LAST, *(s.symbol for s in plan.searches)}
            own_alone = {*known, *(s.symbol for s in plan.summaries if s.axis == own)}
            known |= {WALK_FIRST, WALK_LAST, *(s.symbol for s in plan.summaries)}
            for let in plan.lets:
                used = {node for node in walk([let.value]) if isinstance(node, Symbol)}
                assert used <= known, name
                assert (let.tile == "own") == (used <= own_alone), name
                known.add(let.symbol)
                if let.tile == "own":
                    own_alone.add(let.symbol)
            formulas = [plan.may, plan.must]
            assert {node for node in walk(formulas) if isinstance(node, Symbol)} <= known, name
            bounds = [node for r in plan.ranges for node in (r.begin, r.end, r.when)]
            assert {node for node in walk(bounds) if isinstance(node, Symbol)} <= own_alone, name


def test_formulas_stay_short():
    for name, case in MASKS.items():
        for own, walked in DIRECTIONS:
            plan = ranges(case.build().node, own, walked)
            bounds = [node for r in plan.ranges for node in (r.begin, r.end, r.when)]
            nodes = walk([*bounds, plan.may, plan.must, *(let.value for let in plan.lets)])
            operations = sum(isinstance(node, Map) for node in nodes)
            assert operations <= (80 if name in OTHERS else 25), f"{name}: {operations}"


# ---------------------------------------------------------------------------------- what is easily missed


def test_nan_in_a_table_is_never_skipped_and_never_full():
    x, y = Input("x", 0, ("q",), "float"), Input("y", 1, ("kv",), "float")
    values = {x: np.array([np.nan, 1.0, 2.0, 3.0] * 16), y: np.array([np.inf, 0.5, np.nan, -np.inf] * 16)}
    rows, columns = values[x][:, None], values[y][None, :]
    for guard, allowed in (
        (le(x, y), rows <= columns),
        (conjunction(le(x, y), le(kv, q)), (rows <= columns) & np.tri(64, dtype=bool)),
        (negation(le(x, y)), ~(rows <= columns)),
        (negation(lt(x, y)), ~(rows < columns)),
        (le(minimum(x, y), Const(0.25)), np.minimum(rows, columns) <= 0.25),
    ):
        compare(guard, allowed, {"q": 64, "kv": 64}, values, ((16, 16), (64, 16)))


@pytest.mark.parametrize("divisor", [64, 1, -1, -7])
def test_a_scalar_divisor_of_any_sign(divisor):
    c = Scalar("c", 0, "int")
    rows, columns = np.arange(150)[:, None], np.arange(130)[None, :]
    sizes = {"q": 150, "kv": 130}
    for guard, allowed in (
        (le(floordiv(kv, c), floordiv(q, c)), columns // divisor <= rows // divisor),
        (le(mod(kv, c), mod(q, c)), columns % divisor <= rows % divisor),
        (le(mul(kv, c), q), columns * divisor <= rows),
        (le(q, mul(kv, c)), rows <= columns * divisor),
    ):
        compare(guard, allowed, sizes, {c: divisor}, ((16, 16), (32, 64)))


def test_reads_past_a_table_are_clamped():
    table = Input("edges", 0, ("edge",), "int", True)
    values = np.array([5, 10, 10, 40])
    rows, columns = np.arange(100)[:, None], np.arange(90)[None, :]
    for shift in (-30, 0, 30):
        for c in (1, 7):
            inner = floordiv(add(kv, Const(shift)), Const(c))
            read = values[np.clip((columns + shift) // c, 0, 3)]
            for guard, allowed in (
                (le(load(table, (inner,)), q), read <= rows),
                (lt(q, load(table, (inner,))), rows < read),
            ):
                compare(guard, allowed, {"q": 100, "kv": 90}, {table: values}, ((16, 16), (64, 16)))


@pytest.mark.parametrize("limit", [10, 100])
def test_a_way_out_of_an_impossible_condition(limit):
    s = Scalar("s", 0, "int")
    rows, columns = np.arange(90)[:, None], np.arange(90)[None, :]
    guard = le(minimum(maximum(kv, Const(60)), s), q)
    allowed = np.minimum(np.maximum(columns, 60), limit) <= rows
    compare(guard, allowed, {"q": 90, "kv": 90}, {s: limit}, ((16, 16), (64, 16)))


@pytest.mark.parametrize("apart", [-6, 6, 7])
def test_one_diagonal(apart):
    rows, columns = np.arange(90)[:, None], np.arange(90)[None, :]
    guard = conjunction(eq(sub(q, kv), Const(apart)), eq(mod(sub(q, kv), Const(3)), Const(0)))
    allowed = (rows - columns == apart) & (apart % 3 == 0)
    _, extra = compare(guard, allowed, {"q": 90, "kv": 90}, {}, ((16, 16), (64, 16)))
    assert extra == 0


def test_a_broadcast_table():
    doc = Input("doc", 0, ("b", "kv"), "int", True)
    guard = conjunction(le(load(doc, (Index("b"), kv)), Const(3)), le(kv, q))
    for value in (3, 4):
        allowed = np.tri(40, dtype=bool) & (value <= 3)
        environment = {doc: np.array([[value]])}
        compare(guard, allowed, {"q": 40, "kv": 40, "b": 2}, environment, ((16, 16),), {"b": 1})


def test_other_axes_are_fixed():
    lengths = torch.tensor([5, 0, 200], dtype=torch.int32)
    mask = fg.padding(lengths)
    columns = np.arange(90)[None, :]
    for row, length in enumerate(lengths.tolist()):
        allowed = np.broadcast_to(columns < length, (50, 90))
        _, extra = compare(
            mask.node, allowed, {"q": 50, "kv": 90, "b": 3}, tables_of(mask), ((16, 16), (16, 64)), {"b": row}
        )
        assert extra == 0


# ------------------------------------------------------------------------------------------------- widths


def test_widths():
    assert bits(sub(q, kv)) == 32
    assert bits(add(add(q, kv_len), Const(1))) == 32
    assert bits(mul(q, kv)) == 64
    assert bits(mul(q, kv), {q: (0, 30_000), kv: (0, 30_000)}) == 32
    assert bits(floordiv(mul(q, kv), Const(LENGTH))) == 64  # small, but of a large number
    scalar = Scalar("left", 0, "int")
    assert bits(sub(q, scalar)) == 64
    assert bits(sub(q, scalar), {scalar: (0, 4096)}) == 32
