"""Which schedule runs a stage, on which axis and in which tiles: candidates, what fits, and their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product as pairs
from math import prod

from fagen.derive.parts import has_such_axis
from fagen.derive.walk import PART_AXIS, Stage
from fagen.errors import PlanError
from fagen.ir import graph as ir
from fagen.ir.graph import OPEN_AXES, Axis, Graph
from fagen.plan import warpgroups
from fagen.plan.arch import FAMILIES, Arch, arch_for
from fagen.plan.cost import Cost, Model
from fagen.plan.parts import parts_of
from fagen.plan.plan import GROUP_AXIS, Problem, Rejected, Schedule
from fagen.plan.profile import LOOPS, Lengths, Profile, axes_along, own_tiles, profile
from fagen.plan.space import (
    FRAGMENT,
    VECTOR,
    Tiles,
    ceil_div,
    registers,
    registers_limit,
    round_up,
    shared_bytes,
)

FINALISTS = 16
"""Candidates whose memory traffic is looked at: those whose arithmetic takes the least time."""
MORE_REGISTERS = 8
"""How many more to spare the next candidate has, at least, where a compiler found too few."""
ROOMIER_REGISTERS = 32
"""How many a thread gains, at least, where fewer blocks share a multiprocessor."""
LARGEST_HEAD_DIM = 1 << 16
"""Where the search for a size that fits ends."""
PART_LANES = 16
"""Threads that merge the parts of a value, of which each takes every sixteenth: there are few parts."""

_NAMES = {"d": "head_dim", "dv": "v_head_dim"}
_USUAL_DEPTH = 128
_USUAL_TILE = 64 * _USUAL_DEPTH
_USUAL_RESIDENT = 2
_FEW_ROWS = 32
_ROWS_A_BLOCK = 64
_LONG_WALK, _VERY_LONG_WALK = 512, 16_384
"""Positions from which on it pays to make a few walks in parts, and as many as fill the machine."""
_MERGED = 32
"""Positions of a walk that take as long as it takes to merge its parts."""
_REPRESENTATIVE = {
    "few": (8, 8),
    "long": (16_384, 2),
    "some": (512, 2),
    "short": (1024, 8),
    "many": (4096, 8),
}
"""For each class: the length of its axis, and of batch and heads."""
_BATCH = ("b", "hk")
_WALKED = {"short": 1024}
"""For a class: the length of any other axis, where it is not `_LONG`."""
_LONG = 4096


# ------------------------------------------------------------------------------------------- lengths


def length_classes(
    graph: Graph, sizes: Iterable[tuple[Axis, int]], lengths: Lengths, arch: Arch
) -> tuple[tuple[Axis, str], ...]:
    """The class of a call's lengths, as a plan's key holds it: three in all, or four.

    Of the last axis of the first output that is not in ``sizes``: ``few`` rows (a small tile wastes less;
    where they also leave most multiprocessors idle, the axis that their walk is made along may be ``long``),
    ``some`` (too few tiles of the usual size for all multiprocessors), and nothing for many, the usual case.
    Where blocks take one work after another, rows are ``short`` where a work is: its tiles then take less
    time than its start and end, the more so where a mask leaves half of them. So are works whose end is found
    by a search in a sorted table, at any length: such tables are there to end walks early.
    """
    fixed = {axis for axis, _ in sizes}
    rows = [axis for axis in graph.outputs[0].node.axes if axis not in fixed]
    if not rows:
        return ()
    if lengths[rows[-1]] <= _FEW_ROWS:
        works = prod(lengths[axis] for axis in rows[:-1] if axis != GROUP_AXIS)
        walked = (axis for axis in lengths if axis in OPEN_AXES and axis not in rows)
        longest = max(walked, key=lambda axis: lengths[axis], default=rows[-1])
        pays = graph.direction == "forward" and _pays_in_parts(works, lengths[longest], arch)
        return ((rows[-1], "few"), *([(longest, "long")] if pays else []))
    if prod(lengths[axis] for axis in rows) < 2 * _ROWS_A_BLOCK * arch.multiprocessors:
        return ((rows[-1], "some"),)
    short = _REPRESENTATIVE["short"][0] * (2 if _masked(graph) else 1)
    if arch.copy == "tma" and (lengths[rows[-1]] <= short or _sought(graph)):
        return ((rows[-1], "short"),)
    return ()


def _pays_in_parts(works: int, length: int, arch: Arch) -> bool:
    """Whether it pays to make so many walks of a length in parts.

    One block reads at about twice a multiprocessor's share of what memory gives: of few walks, the part
    ``1 - 2 works / multiprocessors`` of the time is saved, which has to pay for a second kernel. More walks
    use memory as well as their parts would, unless they are very long: the last ones then leave most
    multiprocessors idle for long.
    """
    if length >= _VERY_LONG_WALK:
        return 2 * works <= 3 * arch.multiprocessors
    saved = length * (1 - 2 * works / arch.multiprocessors)
    return length >= _LONG_WALK and saved >= _MERGED * works


def _masked(graph: Graph) -> bool:
    """Whether positions are compared."""
    nodes = ir.walk(output.node for output in graph.outputs)
    compared = (node for node in nodes if isinstance(node, ir.Map) and node.op in ("le", "lt", "eq"))
    return any(arg.kind == "int" and arg.axes for node in compared for arg in node.args)


def _sought(graph: Graph) -> bool:
    """Whether results depend on positions in a sorted table."""
    nodes = ir.walk(output.node for output in graph.outputs)
    loads = (node for node in nodes if isinstance(node, ir.Load))
    return graph.direction == "forward" and any(load.table.sorted for load in loads)


def representative_lengths(problem: Problem, axes: Iterable[Axis]) -> dict[Axis, int]:
    """Lengths that stand for all of the problem's class when candidates are compared."""
    classes = dict(problem.lengths)
    name = "long" if "long" in classes.values() else next(iter(classes.values()), "many")
    batch, walked = _REPRESENTATIVE[name][1], _WALKED.get(name, _LONG)
    known = {
        axis: batch if axis in _BATCH else problem.group if axis == GROUP_AXIS else walked for axis in axes
    }
    known |= {axis: _REPRESENTATIVE[name][0] for axis, name in classes.items()}
    if PART_AXIS in known and not has_such_axis(problem.graph):
        works = prod(known[axis] for axis in _BATCH if axis in known)
        longest = max(known[axis] for axis in known if axis in OPEN_AXES)
        slots = _USUAL_RESIDENT * arch_for(problem.arch).multiprocessors
        known[PART_AXIS] = parts_of(works, longest, slots)
    return known | dict(problem.sizes)


# ------------------------------------------------------------------------------------ schedule and axis


def schedule_of(stage: Stage) -> Schedule:
    """The schedule that runs a stage.

    ``product``: the walk makes one weighted sum of stored values. ``rowwise``: elements are mapped, or rows
    of stored values reduced. ``forward_loop``: everything else, that is tile products and states over them.
    """
    states = [state for walk in stage.walks for state in walk.states]
    weighted = [state for state in states if state.features]
    if any(walk.products for walk in stage.walks):
        return "forward_loop"
    if not weighted:
        return "rowwise"
    alone = len(stage.walks) == 1 and len(states) == 1 and not stage.walks[0].stores
    return "product" if alone and states[0].rescale is None else "forward_loop"


def tile_axis_of(stage: Stage, schedule: Schedule) -> Axis | None:
    """The own axis of which a block takes several positions: the last that nothing read along the walk has.

    The group axis is taken only if there is no other.
    """
    if schedule == "rowwise":
        return stage.own[-1] if stage.own else None
    walked = axes_along(stage)
    free = [axis for axis in stage.own if axis not in walked and axis != stage.parts]
    return next((axis for axis in reversed(free) if axis != GROUP_AXIS), free[-1] if free else None)


def unshared(stage: Stage, tile_axis: Axis | None, family: str, problem: Problem) -> str | None:
    """Why the query heads of a key head can't be rows of the same tiles; None if they can.

    Nothing that is read along the walk may differ between them, nor which of its elements count.
    """
    walked = axes_along(stage)
    if tile_axis in (None, GROUP_AXIS) or GROUP_AXIS in walked:
        return "they read other columns"
    if any(GROUP_AXIS in walk.guard.axes for walk in stage.walks):
        return "other elements count for each"
    if stage.outer or any(walk.partials for walk in stage.walks):
        return "rows are summed over"
    if FAMILIES[family].roles:
        if warpgroups.GROUP_ROWS % problem.group:
            return f"{warpgroups.GROUP_ROWS} rows are no multiple of {problem.group} heads"
        if any(
            "h" not in node.layout
            for walk in stage.walks
            for node, _ in own_tiles(walk)
            if isinstance(node, ir.Input)
        ):
            return "they read the same rows"
    return None


# ------------------------------------------------------------------------------------------ candidates


@dataclass(frozen=True)
class Ranked:
    """A candidate that fits, with its cost at representative lengths.

    A multiprocessor is to hold ``blocks`` of its blocks at once, which leaves ``spare`` registers to a thread
    beyond those it is estimated to need.
    """

    tiles: Tiles
    cost: Cost
    blocks: int
    spare: int

    def __str__(self) -> str:
        return f"{self.tiles}, {self.blocks} blocks at once"


def candidates(counts: Profile, problem: Problem, family: str = "simt") -> Iterator[Tiles]:
    """Every tiling that is tried, whether it fits or not."""
    if FAMILIES[family].roles:
        whole = max((size for step in counts.passes for size in step.terms), default=0)
        (step, *_) = counts.passes
        divided = bool(step.divided and (step.partials or problem.deterministic))
        shapes = warpgroups.shapes(step.partials, len(step.levels), divided)
        for roles, columns in shapes:
            if roles.adders and problem.deterministic:
                roles = replace(roles, in_turns=True)
            rows = warpgroups.GROUP_ROWS * roles.row_groups
            yield Tiles("warpgroups", rows, columns, whole, 0, rows // 2, 4, roles)
    elif counts.schedule == "backward_loop":
        yield from _twofold(counts)
    elif FAMILIES[family].tensor_cores:
        yield from _fragments(counts)
    elif counts.schedule == "rowwise":
        yield from _rows(counts, problem, arch_for(problem.arch).warp)
    elif counts.schedule == "product":
        yield from _products(counts, problem)
    else:
        yield from _loops(counts)


def _rows(counts: Profile, problem: Problem, warp: int) -> Iterator[Tiles]:
    """A warp for each row; of short rows several in one, so that each of its threads reads 16 bytes.

    Parts of a walk are few, and what they found lies side by side for several rows.
    """
    if counts.walk_axis == PART_AXIS and not has_such_axis(problem.graph):
        for rows in (16, 8):
            yield Tiles("registers", rows, PART_LANES, 0, 0, rows, PART_LANES)
        return
    size = dict(problem.sizes).get(counts.walk_axis) if counts.walk_axis else None
    if counts.tile_axis is None or size is None or problem.family == "simt":
        for rows, share in pairs((8, 4) if counts.tile_axis else (1,), (4, 8)):
            yield Tiles("registers", rows, warp * share, 0, 0, rows, warp)
        return
    along = [a for step in counts.passes for a in (*step.reads, *step.writes) if counts.walk_axis in a.axes]
    share = 16 // max((access.bytes for access in along), default=4)
    lanes = min(1 << (ceil_div(size, share) - 1).bit_length(), warp)  # idle ones are of no weight
    for threads in (256, 128):
        yield Tiles("registers", threads // lanes, lanes * share, 0, 0, threads // lanes, lanes)


def _products(counts: Profile, problem: Problem) -> Iterator[Tiles]:
    single = counts.tile_axis is None
    if problem.tiling == "element":
        rows = 1 if single else 8
        yield Tiles("element", rows, 1, 0, 32, rows, 32)
    elif problem.tiling == "shared":
        for side, walk in ((16, 16), (16, 32), (16, 64), (32, 32)):
            yield Tiles("shared", 1 if single else side, walk, 0, side, 1 if single else side, side)
    else:
        for rows, columns in pairs((1,) if single else (4, 8, 16), (8, 16, 32)):
            if 64 <= rows * columns <= 256 or single:
                for own, feature, walk in pairs((1,) if single else (1, 2, 4, 8), (1, 2, 4, 8), (8, 16, 32)):
                    yield Tiles("registers", rows * own, walk, 0, columns * feature, rows, columns)


def _loops(counts: Profile) -> Iterator[Tiles]:
    whole = round_up(max((size for step in counts.passes for size in step.terms), default=0), VECTOR)
    inners = [whole, *(part for part in (64, 32) if part < whole)]
    single = counts.tile_axis is None
    for rows, columns in pairs((1,), (32,)) if single else pairs((2, 4, 8, 16, 32), (8, 16, 32)):
        if rows * columns in (64, 128, 256) or single:
            for own, walk in pairs((1,) if single else (1, 2, 4, 8), (1, 2, 4, 8)):
                block_own, block_walk = rows * own, columns * walk
                if block_walk <= 128 and block_own <= 128 and (block_own >= 8 or single):
                    for inner in inners:
                        yield Tiles("registers", block_own, block_walk, inner, 0, rows, columns)


def _fragments(counts: Profile) -> Iterator[Tiles]:
    """A warp has 16 rows, or 32, so that a fragment of the walk's operands serves two products.

    A tile of the walk has more than 64 columns only where that makes it no larger than 64 columns of a usual
    head dim. At larger head dims eight warps may keep 16 rows each in registers: all share what is copied.
    Beside a wider tile there is room for so many columns as usual rows have.
    """
    whole = round_up(max((size for step in counts.passes for size in step.terms), default=0), FRAGMENT)
    for warps, shares, walk in pairs((1, 2, 4, 8), (1, 2), (32, 64, 128)):
        if warps * shares <= 8 and (walk <= 64 or walk * whole <= _USUAL_TILE):
            yield Tiles("fragments", FRAGMENT * shares * warps, walk, whole, 0, 8 * warps, 4)
    if counts.holds_rows and whole > _USUAL_DEPTH:
        for walk in (64, 96):
            yield Tiles("fragments", 8 * FRAGMENT, walk, whole, 0, 64, 4, held=whole)
        if len(counts.passes[0].own_tiles) == 1:
            yield Tiles("fragments", 8 * FRAGMENT, 128, whole, 0, 64, 4, held=_USUAL_DEPTH)


def _twofold(counts: Profile) -> Iterator[Tiles]:
    """As `_fragments`; two warps may share the rows of a tile, and halve its columns and the features.

    Their weights then pass through memory, in the operands' type.
    """
    (step,) = counts.passes
    whole = round_up(max(step.terms), FRAGMENT)
    halves = not counts.wide and len(set(step.weighted)) == 1 and step.weighted[0] % (2 * FRAGMENT) == 0
    for warps, shares, walk, groups in pairs((1, 2, 4, 8), (1, 2), (32, 64, 128), (1, 2) if halves else (1,)):
        if warps * shares <= 16 and groups <= warps and walk <= 32 * warps:
            rows = warps // groups
            yield Tiles("fragments", FRAGMENT * shares * rows, walk, whole, 0, 8 * rows, 4 * groups)


def misfit(model: Model, tiles: Tiles, least: bool = False) -> str | None:
    """Why a candidate can't run on the model's GPU, with numbers; None if it can.

    ``least`` leaves it to a compiler whether fewer registers do than are estimated.
    """
    counts, arch = model.profile, model.arch
    if tiles.tiling in ("fragments", "warpgroups") and counts.operand is None:
        return "multiplies no operands of one 16-bit type"
    if tiles.block_own < counts.group:
        return f"has {tiles.block_own} rows, a group has {counts.group} heads"
    needed, estimate = model.needs(tiles)
    if least:
        estimate = registers(counts, tiles, least)
    if needed > arch.shared_block_bytes:
        return f"needs {needed:,} bytes of shared memory, {arch.said} has {arch.shared_block_bytes:,}"
    limit = registers_allowed(tiles, arch, counts)
    if estimate > limit:
        return f"needs about {estimate} registers in each of {tiles.threads} threads, {arch.said} has {limit}"
    return None


def registers_allowed(tiles: Tiles, arch: Arch, counts: Profile) -> int:
    """Registers that a thread may have, one of a consumer where warps have roles."""
    if tiles.roles is not None:
        return warpgroups.group_registers(tiles.roles, counts.by_warp)[1]
    return registers_limit(arch, tiles.threads)


def rank(
    counts: Profile, problem: Problem, arch: Arch, lengths: Lengths, family: str = "simt"
) -> tuple[tuple[Ranked, ...], tuple[Rejected, ...]]:
    """The `FINALISTS` that fit and those that need fewer registers or leave more, the fastest first, and all
    that don't fit, each with its reason.

    Where none fits by the estimate, there are those that a compiler may make fit; of gradients, which more
    kernels may compute, only in a family that was asked for.
    """
    model = Model(counts, lengths, arch)
    reasons = {tiles: misfit(model, tiles) for tiles in candidates(counts, problem, family)}
    may_fit = problem.family is not None or problem.graph.direction == "forward"
    if None not in reasons.values() and may_fit:
        reasons = {tiles: misfit(model, tiles, least=True) for tiles in reasons}
    fits = [tiles for tiles, reason in reasons.items() if reason is None]
    rejected = [Rejected(str(tiles), reason) for tiles, reason in reasons.items() if reason is not None]
    fits.sort(key=model.busy_seconds)
    found: list[Ranked] = []
    most, least = -1, arch.registers_thread + 1
    for number, tiles in enumerate(fits):
        blocks = model.planned_blocks(tiles)
        spare, estimate = spare_registers(model, tiles, blocks), model.needs(tiles)[1]
        if number < FINALISTS or spare > most or estimate < least:
            found.append(Ranked(tiles, model.cost(tiles), blocks, spare))
        most, least = max(most, spare), min(least, estimate)
    found.sort(key=_order)
    return tuple(found), tuple(rejected)


def _order(ranked: Ranked) -> tuple[float, int, int, str, int]:
    cost = ranked.cost
    return cost.seconds, cost.shared_bytes, cost.registers, str(ranked.tiles), -ranked.blocks


def spare_registers(model: Model, tiles: Tiles, blocks: int) -> int:
    """Registers that a thread may have beyond those it is estimated to need."""
    estimate = model.needs(tiles)[1]
    if tiles.roles is not None:
        return warpgroups.group_registers(tiles.roles, model.profile.by_warp)[1] - estimate
    return registers_limit(model.arch, tiles.threads * blocks) - estimate


def fallbacks(ranked: Sequence[Ranked], model: Model, most: int) -> tuple[Ranked, ...]:
    """Up to ``most`` candidates in the order in which they are built, until a compiler finds enough registers
    for one.

    After the fastest comes the fastest that has more to spare, and so on: what is as tight as the one before
    would only be refused as well. There is more where a tile is smaller, or where fewer blocks share a
    multiprocessor. The last one has the most of all.
    """
    if most == 1:
        return (ranked[0],)
    every = sorted([*ranked, *(each for tight in ranked for each in _roomier(tight, model))], key=_order)
    found = [ranked[0]]
    for each in every:
        if each.spare >= found[-1].spare + MORE_REGISTERS:
            found.append(each)
    last = max(every, key=lambda each: each.spare)
    if last.spare > found[-1].spare:
        found.append(last)
    if len(found) <= most:
        return tuple(found)
    return tuple(found[round(i * (len(found) - 1) / (most - 1))] for i in range(most))


def _roomier(tight: Ranked, model: Model) -> Iterator[Ranked]:
    """The same tiles with fewer blocks on a multiprocessor, so that a thread may have more registers."""
    if tight.tiles.roles is not None:
        return  # what its threads may have is fixed
    spare = tight.spare
    for blocks in range(tight.blocks - 1, 0, -1):
        more = spare_registers(model, tight.tiles, blocks)
        if more >= spare + ROOMIER_REGISTERS or (blocks == 1 and more > spare):
            spare = more
            yield replace(tight, cost=model.cost(tight.tiles, blocks), blocks=blocks, spare=spare)


# ----------------------------------------------------------------------------------------- impossible


def require_sizes(stage: Stage, schedule: Schedule, problem: Problem) -> None:
    """`PlanError` for a length that a schedule needs when it is compiled and the problem leaves open."""
    if schedule not in LOOPS:
        return
    fixed = {axis for axis, _ in problem.sizes}
    inner = [term.over for walk in stage.walks for p in walk.products for term in p.terms]
    features = [axis for walk in stage.walks for state in walk.states for axis in state.features]
    for axis in (*inner, *features):
        if axis not in fixed:
            raise PlanError(
                f"the length of axis {axis!r} must be known when the kernel is compiled",
                works=f"give it as sizes={{{axis!r}: ...}}",
            )


def refusal(
    stage: Stage, schedule: Schedule, tile_axis: Axis | None, problem: Problem, arch: Arch, family: str
) -> PlanError:
    """The error of a stage that no candidate fits: what it needs at least, what there is, what would fit."""

    def least(sizes: tuple[tuple[Axis, int], ...]) -> tuple[int, int]:
        """(shared memory, registers) by which the nearest candidate misses, smallest excess first."""
        counts = profile(stage, schedule, tile_axis, replace(problem, sizes=sizes))
        return min(
            (
                max(0, shared_bytes(counts, tiles) - arch.shared_block_bytes),
                max(
                    0,
                    registers(counts, tiles, least=True)
                    - min(registers_allowed(tiles, arch, counts), arch.registers_thread),
                ),
            )
            for tiles in candidates(counts, problem, family)
        )

    if FAMILIES[family].tensor_cores and profile(stage, schedule, tile_axis, problem).operand is None:
        return PlanError(
            f"family {family!r} multiplies 16-bit operands, all of one type",
            values={"inputs": ", ".join(problem.inputs)},
            works="fp16 or bf16 tensors do, or another family",
        )
    sizes = dict(problem.sizes)
    axes = [axis for walk in stage.walks for s in walk.states for axis in s.features]
    axes += [term.over for walk in stage.walks for p in walk.products for term in p.terms]
    largest = max(axes, key=lambda axis: sizes[axis])
    together = [axis for axis in dict.fromkeys(axes) if sizes[axis] == sizes[largest]]
    name = _NAMES["d"] if "d" in together else _NAMES.get(largest, f"axis {largest!r}")
    low, high = 0, min(sizes[largest], LARGEST_HEAD_DIM)
    while high - low > 1:
        middle = (low + high) // 2
        trial = tuple((axis, middle if axis in together else size) for axis, size in problem.sizes)
        low, high = (middle, high) if least(trial) == (0, 0) else (low, middle)
    shared, missing = least(problem.sizes)
    storage = problem.inputs[0] if problem.inputs else "fp32"
    if shared:
        needs = (
            f"{arch.shared_block_bytes + shared:,} bytes of shared memory, {arch.said} has "
            f"{arch.shared_block_bytes:,}"
        )
    else:
        needs = (
            f"{arch.registers_thread + missing} registers a thread, {arch.said} has {arch.registers_thread}"
        )
    return PlanError(
        f"{name} {sizes[largest]} in {storage} needs at least {needs}",
        works=f"up to {low} fits" if low else "no size of it fits",
    )
