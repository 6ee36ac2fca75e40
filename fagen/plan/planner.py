"""From a problem to plans: derive, choose a schedule and tiles for each stage, refuse what can't run."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import TypeAlias

from fagen.derive.bounded import without_maxima
from fagen.derive.intervals import RangePlan, last_visitor, sought
from fagen.derive.partials import merged
from fagen.derive.parts import in_parts
from fagen.derive.streaming import derive
from fagen.derive.walk import Derivation, Note, Stage, Walk
from fagen.errors import PlanError
from fagen.ir import graph as ir
from fagen.ir.graph import KEY_AXIS, Axis, Node, Symbol
from fagen.ir.stack import room_for
from fagen.plan import warpgroups
from fagen.plan.arch import FAMILIES, PLAIN, Arch, arch_for
from fagen.plan.cost import Model, buffer_lives, near_positions
from fagen.plan.plan import Buffer, KernelPlan, Plan, Problem, Rejected, Schedule, Storage, turns_of
from fagen.plan.prepare import prepare
from fagen.plan.profile import (
    LOOPS,
    Profile,
    is_16_bit,
    is_twofold,
    output_storages,
    profile,
    range_of,
    stage_roots,
)
from fagen.plan.space import CHUNK, FRAGMENT, ON_TENSOR_CORES, Tiles, shared_tiles
from fagen.plan.tiling import (
    Ranked,
    fallbacks,
    rank,
    refusal,
    representative_lengths,
    require_sizes,
    schedule_of,
    tile_axis_of,
    unshared,
)

RUNNERS_UP = 8
"""Candidates that fit, were slower by the model, and are kept with the plan."""


def plan(problem: Problem, lengths: Mapping[Axis, int] | None = None) -> Plan:
    """The best plan of ``problem`` by the cost model.

    ``lengths`` replaces the lengths that stand for the problem's class when candidates are compared.
    `PlanError` says in one sentence what does not fit.
    """
    return plans(problem, lengths, 1)[0]


def plans(
    problem: Problem,
    lengths: Mapping[Axis, int] | None = None,
    most: int = 4,
    without: Container[str] = (),
    ranked: bool = False,
) -> tuple[Plan, ...]:
    """Up to ``most`` plans of one family, the best first: all right, each with the next candidate of every
    kernel that has another.

    The family is the first of those that the GPU runs, or that the problem asks for, in which a kernel can be
    planned; those of ``without`` are passed over. A kernel it can't run is one of the next family. Candidates
    come as `fallbacks` orders them for a compiler that may refuse some, then those of more kernels that each
    compute less; or, ``ranked``, by their time.
    """
    arch = arch_for(problem.arch)
    families = [family for family in _families(problem, arch) if family not in without]
    if not families:
        raise PlanError(f"{arch.name} has no other family for {problem.graph.name}", works="smaller sizes do")
    with room_for(problem.graph):
        apart = derive(problem.graph, problem.fusion, problem.deterministic)
        derivation, parts, others, ahead = _cheapest(apart, problem, arch, lengths or {}, families)
        found = list(_ranked_plans(derivation, parts, others, problem, families, most, ranked, ahead))
        if most > 1 and not ranked:
            found += _smaller(found[-1], derivation, apart, problem, arch, lengths or {}, families)
    return tuple(found)


_Parts: TypeAlias = list[tuple[Stage, "_Choice"]]
"""The stages of a program, and how each may run."""


def _ranked_plans(
    derivation: Derivation,
    parts: _Parts,
    others: Sequence[Rejected],
    problem: Problem,
    families: Sequence[str],
    most: int,
    ranked: bool = False,
    ahead: float = inf,
) -> Iterator[Plan]:
    """Up to ``most`` plans of the same kernels, each with the next candidate of those that have another.

    Those behind the first take less than ``ahead`` seconds more than it does.
    """
    stages, chosen = [stage for stage, _ in parts], [choice for _, choice in parts]
    buffers = _buffers(stages, chosen, problem)
    tries = [choice.ranked if ranked else fallbacks(choice.ranked, choice.model, most) for choice in chosen]
    for number in range(min(most, max(map(len, tries)))):
        kernels, rejected = [], list(others)
        tried = [each[min(number, len(each) - 1)] for each in tries]
        more = sum(own.cost.seconds - each[0].cost.seconds for own, each in zip(tried, tries, strict=True))
        if more >= ahead:
            continue
        for index, (choice, own) in enumerate(zip(chosen, tried, strict=True)):
            function: str = problem.graph.direction
            if len(stages) > 1:
                function += f"_{index}_{choice.schedule.removeprefix('forward_')}"
            kernels.append(_kernel(function, choice.stage, choice, own, problem))
            prefix = "" if len(stages) == 1 else f"{function}: "
            rejected += [
                Rejected(prefix + str(other.tiles), _slower(other, own))
                for other in choice.ranked[: RUNNERS_UP + 1]
                if other.tiles != own.tiles
            ]
            unfit = (*choice.refused, *choice.misfits)
            rejected += [Rejected(prefix + r.candidate, r.reason) for r in unfit]
        kernels, memory = _clearing(kernels, buffers)
        prepared = prepare(kernels, problem.limits)
        yield Plan(
            problem=problem,
            family=_family_of(kernels, problem, families),
            kernels=tuple(kernels),
            buffers=(*memory, *_turns(kernels), *(each.buffer for each in prepared)),
            prepared=prepared,
            outputs=output_storages(problem),
            notes=(*derivation.notes, *(note for choice in chosen for note in choice.notes)),
            rejected=tuple(rejected),
        )


def _smaller(
    last: Plan,
    tried: Derivation,
    apart: Derivation,
    problem: Problem,
    arch: Arch,
    lengths: Mapping[Axis, int],
    families: Sequence[str],
) -> Iterator[Plan]:
    """What is left for a compiler behind ``last``, a plan of ``tried``: more kernels that each compute less,
    in the end every result alone."""
    several = any(len(_by_result(_walked(stage))) > 1 for stage in apart.stages)
    whole = [False] if tried is not apart else []  # what was tried adds partial sums
    for alone in (*whole, True) if several else whole:
        try:
            parts, _ = _planned(apart, problem, arch, lengths, families, alone)
        except PlanError:
            continue
        if len(parts) > len(last.kernels) or not alone:
            found = list(_ranked_plans(apart, parts, (), problem, families, 2))
            for made in found[-1:] if alone else found:
                if made.family == last.family:
                    last = made
                    yield made


def _cheapest(
    apart: Derivation, problem: Problem, arch: Arch, lengths: Mapping[Axis, int], families: Sequence[str]
) -> tuple[Derivation, _Parts, tuple[Rejected, ...], float]:
    """The way to derive a program whose kernels take the least time together, why not the other, and how many
    seconds more it may take where blocks add in turns: kernels of their own are faster then."""
    parts, took = _planned(apart, problem, arch, lengths, families)
    long = next((axis for axis, name in problem.lengths if name == "long"), None)
    if long is not None and problem.fusion == "full":
        return *_shared_out(apart, parts, took, long, problem, arch, lengths, families), inf
    used = {choice.family for _, choice in parts if choice.schedule in LOOPS}
    backward = problem.graph.direction == "backward"
    adds = problem.fusion == "full" and backward and all(FAMILIES[family].adds for family in used)
    joined = merged(apart, problem.graph, problem.deterministic) if adds else None
    if joined is None:
        return apart, parts, (), inf
    try:
        fewer, takes = _planned(joined, problem, arch, lengths, sorted(used))
    except PlanError as error:
        return apart, parts, (Rejected("partial sums", str(error)),), inf
    if takes < took:
        slower = f"{100 * (took / takes - 1):.0f} % slower, predicted"
        refused = dict.fromkeys(each for _, choice in parts for each in choice.refused)
        others = (Rejected("each product computed by two kernels", slower), *refused)
        return joined, fewer, others, took - takes if problem.deterministic else inf
    slower = f"{100 * (takes / took - 1):.0f} % slower, predicted"
    return apart, parts, (Rejected("partial sums", slower),), inf


def _shared_out(
    whole: Derivation,
    parts: _Parts,
    took: float,
    axis: Axis,
    problem: Problem,
    arch: Arch,
    lengths: Mapping[Axis, int],
    families: Sequence[str],
) -> tuple[Derivation, _Parts, tuple[Rejected, ...]]:
    """``whole``, or the same with walks along ``axis`` made in parts by several blocks, if that takes less
    time."""
    shared = in_parts(whole, problem.graph, axis)
    if shared is None:
        return whole, parts, ()
    try:
        more, takes = _planned(shared, problem, arch, lengths, families)
    except PlanError as error:
        return whole, parts, (Rejected(f"{axis} in parts", str(error)),)
    if takes < took:
        slower = f"{took / takes:.1f} times the time, predicted: most multiprocessors have nothing to do"
        return shared, more, (Rejected(f"{axis} in one walk", slower),)
    slower = f"{100 * (takes / took - 1):.0f} % slower, predicted"
    return whole, parts, (Rejected(f"{axis} in parts", slower),)


def _planned(
    derivation: Derivation,
    problem: Problem,
    arch: Arch,
    lengths: Mapping[Axis, int],
    families: Sequence[str],
    alone: bool = False,
) -> tuple[_Parts, float]:
    """How each stage of ``derivation`` runs, and the seconds that all take together."""
    whole = [part for stage in derivation.stages for part in _independent(_walked(stage))]
    known = representative_lengths(problem, _axes(whole)) | dict(lengths)
    parts = [part for stage in whole for part in _choose_parts(stage, problem, arch, known, families, alone)]
    added = (partial for stage in whole for walk in stage.walks for partial in walk.partials)
    zeroed = sum(4 * prod(known[axis] for axis in partial.symbol.axes) for partial in added)
    seconds = sum(choice.ranked[0].cost.seconds for _, choice in parts)
    return parts, seconds + zeroed / arch.memory_bytes_per_second


def _families(problem: Problem, arch: Arch) -> tuple[str, ...]:
    """The families that may run a stage of the problem, in the order in which they are tried."""
    if problem.family is None:
        if problem.tiling != "registers":
            return (PLAIN,)
        return arch.families[::-1]
    if problem.family not in arch.families:
        where = arch.said if arch.emulated else f"{arch.name} ({arch.target})"
        raise PlanError(
            f"family {problem.family!r} does not run on {where}",
            works=f"family= takes {', '.join(sorted(arch.families))} there",
        )
    if problem.graph.direction == "backward" and FAMILIES[problem.family].roles:
        others = [name for name in arch.families if name != problem.family]
        return (problem.family, *(name for name in others if FAMILIES[name].adds))
    return (problem.family,)


def _family_of(kernels: Sequence[KernelPlan], problem: Problem, families: Sequence[str]) -> str:
    """The family that is asked for; else, or where it was given up, the first of ``families`` that is used.

    Stages without tile products are plain in all of them.
    """
    if problem.family in families:
        return str(problem.family)
    used = [kernel.family for kernel in kernels]
    return next((family for family in families if family in used), used[0])


@dataclass(frozen=True)
class _Choice:
    """How a stage may run: the tiles that fit, the fastest first, and those that don't."""

    stage: Stage
    notes: tuple[Note, ...]
    """What was done to the stage for its family."""
    family: str
    schedule: Schedule
    axis: Axis | None
    model: Model
    ranked: tuple[Ranked, ...]
    misfits: tuple[Rejected, ...]
    refused: tuple[Rejected, ...] = ()
    """Why no family before its own runs the stage."""


def _choose_parts(
    stage: Stage,
    problem: Problem,
    arch: Arch,
    lengths: Mapping[Axis, int],
    families: Sequence[str],
    alone: bool,
) -> list[tuple[Stage, _Choice]]:
    """How a stage runs, in the first of ``families`` where it fits: as a whole, else each result alone;
    ``alone`` the other way around."""
    parts = _by_result(stage)
    refused: list[Rejected] = []
    for family in families if len(parts) > 1 else ():
        for tried in (parts, [stage]) if alone else ([stage], parts):
            found = [_chosen(part, problem, arch, lengths, family) for part in tried]
            choices = [replace(each, refused=tuple(refused)) for each in found if isinstance(each, _Choice)]
            if len(choices) == len(tried):
                return list(zip(tried, choices, strict=True))
        refused += next(each for each in found if not isinstance(each, _Choice))
    return [(stage, _choose(stage, problem, arch, lengths, families))]


def _by_result(stage: Stage) -> list[Stage]:
    """``stage`` as one for each of its results, which compute the same products again; itself where results
    share a sum."""
    if len(stage.walks) != 1 or not stage.walks[0].products:
        return [stage]
    if stage.walks[0].stores or stage.walks[0].partials:
        return [stage]
    (walk,) = stage.walks
    parts = []
    for output in stage.outputs:
        states = tuple(s for s in walk.states if ir.depends(output.node, [s.symbol]))
        used = set(ir.walk([state.value for state in states]))
        if not states or used & {state.symbol for state in walk.states}:
            return [stage]
        products = tuple(product for product in walk.products if product.symbol in used)
        parts.append(
            replace(stage, walks=(replace(walk, products=products, states=states),), outputs=(output,))
        )
    shared = sum(len(part.walks[0].states) for part in parts) > len(walk.states)
    return [stage] if shared else parts


def _choose(
    stage: Stage, problem: Problem, arch: Arch, lengths: Mapping[Axis, int], families: Sequence[str]
) -> _Choice:
    """The first of ``families`` with tiles that fit; a stage without tile products is plain in all."""
    refused: list[Rejected] = []
    for family in families:
        found = _chosen(stage, problem, arch, lengths, family)
        if isinstance(found, _Choice):
            return replace(found, refused=tuple(refused))
        refused += found
    last = refused[-1] if refused else Rejected("", "")
    if last.candidate == families[-1] and any(walk.partials for walk in stage.walks):
        raise PlanError(last.reason)
    if last.candidate == problem.family and FAMILIES[last.candidate].roles:
        raise PlanError(f"family {last.candidate!r} can't run it: {last.reason}", works="another family does")
    schedule = schedule_of(stage)
    axis = tile_axis_of(stage, schedule)
    raise refusal(stage, schedule, axis, problem, arch, PLAIN if PLAIN in families else families[-1])


def _chosen(
    stage: Stage, problem: Problem, arch: Arch, lengths: Mapping[Axis, int], family: str
) -> _Choice | tuple[Rejected, ...]:
    """How a stage runs in a family; why it doesn't, where no tiles fit."""
    schedule = schedule_of(stage)
    require_sizes(stage, schedule, problem)
    axis = tile_axis_of(stage, schedule)
    if schedule not in LOOPS:
        family = PLAIN
    roles = FAMILIES[family].roles
    how = "forward_roles" if roles else _loop_of(stage, schedule, family)
    counts = profile(stage, schedule if roles else how, axis, problem)
    reason = warpgroups.misfit(stage, problem, axis) if roles else None
    if roles and stage.parts:
        reason = f"its blocks take one work after another, and no part of a walk along {stage.walk}"
    if reason is None and any(walk.partials for walk in stage.walks):
        reason = _not_added(stage, family, how, axis, counts, problem)
    if reason is not None:
        return (Rejected(family, reason),)
    changed, notes = stage, tuple[Note, ...]()
    if roles and counts.operand is not None:
        changed, notes = without_maxima(stage, warpgroups.MOST_EXPONENT[counts.operand])
        counts = profile(changed, schedule, axis, problem)
    if roles and counts.wide:
        return (Rejected(family, "weights are rounded to fp16, and may be larger than it holds"),)
    ranked, misfits = rank(counts, problem, arch, lengths, family)
    if not ranked:
        return tuple(replace(each, candidate=f"{family}: {each.candidate}") for each in misfits)
    model = Model(counts, lengths, arch)
    alone = _Choice(changed, notes, family, how, axis, model, ranked, misfits)
    return alone if problem.group == 1 else _shared(alone, problem, arch, lengths)


def _shared(alone: _Choice, problem: Problem, arch: Arch, lengths: Mapping[Axis, int]) -> _Choice:
    """``alone``, or the same with the query heads of each key head as rows of the same tiles.

    What lies along the walk is then read once for all of them, and a tile has fewer rows that are nobody's.
    """
    if alone.schedule not in LOOPS:
        return alone
    stage, group = alone.stage, problem.group
    reason = unshared(stage, alone.axis, alone.family, problem)
    rows = f"rows of {group} heads"
    if reason is not None:
        return replace(alone, misfits=(Rejected(rows, reason), *alone.misfits))
    counts = profile(stage, alone.model.profile.schedule, alone.axis, problem, group)
    ranked, misfits = rank(counts, problem, arch, lengths, alone.family)
    if not ranked:
        return replace(alone, misfits=(*misfits, *alone.misfits))
    took, takes = alone.ranked[0].cost.seconds, ranked[0].cost.seconds
    if takes > took:
        slower = f"{100 * (takes / took - 1):.0f} % slower, predicted"
        return replace(alone, misfits=(Rejected(rows, slower), *alone.misfits))
    text = (
        f"the {group} query heads of a key head are rows of the same tiles: they read the same columns; with "
        f"tiles of one head it takes {took / takes:.1f} times as long, predicted"
    )
    model = Model(counts, lengths, arch)
    notes = (*alone.notes, Note("group", text))
    return replace(alone, notes=notes, model=model, ranked=ranked, misfits=misfits)


def _loop_of(stage: Stage, schedule: Schedule, family: str) -> Schedule:
    """The schedule by which a family without roles runs a stage."""
    twofold = FAMILIES[family].adds and schedule in LOOPS and is_twofold(stage)
    return "backward_loop" if twofold else schedule


def _not_added(
    stage: Stage, family: str, schedule: Schedule, axis: Axis | None, counts: Profile, problem: Problem
) -> str | None:
    """Why a family can't run a stage with partial sums; None if it can."""
    sums = [partial for walk in stage.walks for partial in walk.partials]
    if not FAMILIES[family].adds or any(partial.over != axis for partial in sums):
        return "does not add such partial sums to memory"
    if schedule == "forward_loop":
        return "adds partial sums to memory where all other sums of the walk have features"
    if counts.wide:
        return "weights that pass through memory in fp16 may be larger than it holds"
    if not problem.deterministic:
        return None
    if not FAMILIES[family].roles:
        return "adds to memory in no fixed order"
    bounds = [found for walk in stage.walks if (found := range_of(walk, stage, axis)) is not None]
    if any(last_visitor(each) is None for each in bounds):
        return "blocks visit different tiles: which of them come before another is not known"
    return None


def _kernel(function: str, stage: Stage, choice: _Choice, own: Ranked, problem: Problem) -> KernelPlan:
    schedule, axis, tiles = choice.schedule, choice.axis, own.tiles
    counts = profile(stage, schedule, axis, problem, choice.model.profile.group)
    return KernelPlan(
        function=function,
        stage=stage,
        family=choice.family,
        schedule=schedule,
        tiling=tiles.tiling,
        grid_axes=counts.grid_axes,
        tile_axis=axis,
        block_own=tiles.block_own,
        block_walk=tiles.block_walk,
        block_inner=tiles.block_inner,
        block_feature=tiles.block_feature,
        rows=tiles.rows,
        columns=tiles.columns,
        resident=own.blocks,
        shared=shared_tiles(counts, tiles),
        ranges=tuple(_range(walk, stage, axis, tiles) if schedule in LOOPS else None for walk in stage.walks),
        roles=tiles.roles,
        registers=warpgroups.group_registers(tiles.roles, counts.by_warp) if tiles.roles else None,
        group=counts.group,
        held=tiles.held,
        spare=own.spare,
        near=0
        if schedule != "forward_loop" or stage.parts
        else near_positions(counts, tiles, arch_for(problem.arch)),
    )


def _range(walk: Walk, stage: Stage, tile_axis: Axis | None, tiles: Tiles) -> RangePlan | None:
    """What bounds the loop of a walk: warps that search together find several places as fast as they read
    one value."""
    found = range_of(walk, stage, tile_axis)
    return sought(found) if found is not None and tiles.tiling in ON_TENSOR_CORES else found


def _slower(other: Ranked, best: Ranked) -> str:
    slower = other.cost.seconds / best.cost.seconds - 1
    if slower < 0:
        return "predicted to be faster, with no more registers to spare than what was refused before it"
    return f"{100 * slower:.0f} % slower, predicted ({other.cost.bound})"


def _axes(stages: Iterable[Stage]) -> list[Axis]:
    """Every axis of ``stages``, in a fixed order."""
    nodes = ir.walk(root for stage in stages for root in stage_roots(stage))
    return list(dict.fromkeys(axis for node in nodes for axis in node.axes))


def _buffers(stages: Sequence[Stage], choices: Sequence[_Choice], problem: Problem) -> tuple[Buffer, ...]:
    """Memory between kernels: what one stage stores and later ones read, in the order it is written.

    What warps add from their registers lies as they have it. What is added at places of a table, in no fixed
    order, is summed exactly where the same bits are asked for, and in fp64 for tensors of fp32: one after the
    other, hundreds of numbers would round by more than in parts.
    """
    summed: Storage = "exact" if problem.deterministic else "fp32" if is_16_bit(problem) else "fp64"
    found: list[Buffer] = []
    partials = {each.name for stage in stages for walk in stage.walks for each in walk.partials}
    read_until: dict[int, int] = {}
    for node, (written, last) in buffer_lives(stages, problem.graph).items():
        if _adds_to(stages[written], node.name):
            sides = _piece(stages[written], node.name) if choices[written].schedule == "backward_loop" else {}
            tiles = tuple(sides.get(axis, 1) for axis in node.layout) if sides else ()
            storage: Storage = summed if node.name not in partials else "fp32"
            found.append(Buffer(node.name, node.layout, storage, None, tiles, zeroed=True, whole=bool(sides)))
            continue
        free = (i for i, until in read_until.items() if until < written and found[i].axes == node.axes)
        reuses = next(free, None)
        read_until[len(found) if reuses is None else reuses] = last
        found.append(Buffer(node.name, node.axes, "fp32", reuses))
    return tuple(found)


def _clearing(
    kernels: Sequence[KernelPlan], buffers: Sequence[Buffer]
) -> tuple[list[KernelPlan], tuple[Buffer, ...]]:
    """The same, but what a kernel adds to is made 0 by an earlier one that has a thread for each row of it:
    beside what that reads it takes less time than alone."""
    found, memory = list(kernels), list(buffers)
    for place, buffer in enumerate(buffers):
        if not buffer.zeroed or buffer.storage != "fp32" or buffer.whole:
            continue
        *rows, _ = buffer.axes
        adds = next(i for i, kernel in enumerate(found) if _adds_to(kernel.stage, buffer.name))
        for number, kernel in enumerate(found[:adds]):
            if kernel.schedule == "rowwise" and rows == [*kernel.grid_axes, kernel.tile_axis]:
                found[number] = replace(kernel, clears=(*kernel.clears, buffer.name))
                memory[place] = replace(buffer, zeroed=False)
                break
    return found, tuple(memory)


def _turns(kernels: Sequence[KernelPlan]) -> Iterator[Buffer]:
    """How many blocks have added to each tile of a sum that they add to in turns."""
    for kernel in kernels:
        if kernel.roles is None or not kernel.roles.in_turns:
            continue
        for partial in (partial for walk in kernel.stage.walks for partial in walk.partials):
            axes = tuple(axis for axis in partial.symbol.axes if axis not in partial.features)
            tiles = tuple(kernel.block_walk if axis == kernel.stage.walk else 1 for axis in axes)
            yield Buffer(turns_of(partial.name), axes, "int32", None, tiles, zeroed=True)


def _piece(stage: Stage, name: str) -> Mapping[Axis, int]:
    """Of a partial sum of ``stage``, what the lanes of a warp have of one product."""
    added = (partial for walk in stage.walks for partial in walk.partials if partial.name == name)
    return {
        side: size
        for partial in added
        if stage.walk is not None
        for side, size in ((stage.walk, FRAGMENT), (partial.features[0], CHUNK))
    }


def _adds_to(stage: Stage, name: str) -> bool:
    """Whether ``stage`` adds to what lies in a buffer."""
    stores = [*stage.outputs, *(store for walk in stage.walks for store in walk.stores)]
    partials = (partial.name for walk in stage.walks for partial in walk.partials)
    return name in partials or any(
        store.name == name and isinstance(store.node, ir.Scatter) for store in stores
    )


def _walked(stage: Stage) -> Stage:
    """``stage``; where it only maps elements, as a walk along its last axis that stores them.

    A single number is a row's result that no walk comes before.
    """
    if stage.walk is not None:
        return stage
    if not stage.own:
        return replace(stage, walk=KEY_AXIS)
    *own, walk = stage.own
    return replace(
        stage, own=tuple(own), walk=walk, walks=(Walk(ir.TRUE, (), (), stage.outputs),), outputs=()
    )


def _independent(stage: Stage) -> list[Stage]:
    """``stage`` as one stage for each output, if its weighted sums of stored values have nothing to share."""
    if len(stage.walks) != 1 or stage.walks[0].products or stage.walks[0].stores or len(stage.outputs) < 2:
        return [stage]
    (walk,) = stage.walks
    symbols = {state.symbol for state in walk.states}
    if any(symbols & set(ir.walk([state.value])) for state in walk.states):
        return [stage]
    used = [symbols & set[Node](ir.walk([output.node])) for output in stage.outputs]
    if len(symbols) < 2 or any(len(these) != 1 for these in used):
        return [stage]
    parts = []
    for symbol in dict.fromkeys(state.symbol for state in walk.states):
        states = tuple(state for state in walk.states if state.symbol is symbol)
        outputs = tuple(out for out, these in zip(stage.outputs, used, strict=True) if symbol in these)
        parts.append(
            replace(
                stage,
                own=_own(stage, symbol, states[0].features),
                walks=(replace(walk, states=states),),
                outputs=outputs,
            )
        )
    return parts


def _own(stage: Stage, symbol: Symbol, features: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return tuple(axis for axis in stage.own if axis in symbol.axes and axis not in features)
