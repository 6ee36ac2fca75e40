"""What a stage does, counted once: operations, and what is read and written, by the axes they depend on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from fagen.derive.intervals import OWN_FIRST, OWN_LAST, RangePlan, ranges, row_places, sought
from fagen.derive.magnitudes import may_exceed_fp16
from fagen.derive.terms import conjuncts
from fagen.derive.walk import Stage, Walk
from fagen.ir import graph as ir
from fagen.ir.graph import Axis, Graph, Input, Load, Map, Node, Random, Reduce
from fagen.plan import warpgroups
from fagen.plan.layout import nearest
from fagen.plan.plan import GROUP_AXIS, STORAGE_BYTES, Problem, Schedule, Storage

Lengths: TypeAlias = Mapping[Axis, int]
LOOPS = ("forward_loop", "forward_roles", "backward_loop")
"""Schedules of stages with products of tiles."""
PLAIN_SLOTS = 11
"""On tensor cores, instructions for an element beyond which a tile's scores are held while others are
computed."""
_SLOTS: Mapping[str, tuple[int, int]] = {
    "neg": (0, 0),
    "not": (0, 0),
    "div": (8, 1),
    "quotient": (9, 1),
    "floordiv": (12, 1),
    "mod": (14, 1),
    "exp": (4, 1),
    "exp2": (2, 1),
    "log": (6, 1),
    "log2": (4, 1),
    "tanh": (12, 2),
    "tanh_fast": (0, 1),
    "erf": (20, 1),
    "sqrt": (6, 1),
    "rsqrt": (3, 1),
    "sin": (16, 1),
    "cos": (16, 1),
}
"""(issue slots, exp-unit slots) of an operation; (1, 0) where none is given."""
RANDOM_SLOTS = 24
"""Philox: ten rounds of about ten instructions serve several elements of a thread."""


def storages(problem: Problem) -> dict[int, Storage]:
    """How each tensor argument lies in memory, by its position."""
    tensors = (argument for argument in problem.graph.arguments if isinstance(argument, Input))
    return {tensor.position: storage for tensor, storage in zip(tensors, problem.inputs, strict=True)}


def output_storages(problem: Problem) -> tuple[Storage, ...]:
    """One for each of the graph's outputs: fp32 for row statistics, else that of the first tensor with
    features.

    A row statistic has neither a feature axis nor one that the program sums over or takes a maximum over.
    """
    if problem.outputs:
        return problem.outputs
    data, *_ = *_data(problem), "fp32"
    walked = {axis for axis, _ in problem.sizes} | _walked_axes(problem.graph)
    return tuple(data if walked & set(output.node.axes) else "fp32" for output in problem.graph.outputs)


def is_16_bit(problem: Problem) -> bool:
    """Whether all tensors with features are in 16 bits: what is added to scores may be in fp32."""
    stored = _data(problem)
    return bool(stored) and "fp32" not in stored


def _data(problem: Problem) -> list[Storage]:
    """How floating-point tensors with features lie in memory; of a program without features all of them."""
    stored, features = storages(problem), {axis for axis, _ in problem.sizes}
    floats = [a for a in problem.graph.arguments if isinstance(a, Input) and a.stored == "float"]
    chosen = [a for a in floats if features & set(a.axes)] or floats
    return [stored[a.position] for a in chosen]


def _walked_axes(graph: Graph) -> set[Axis]:
    nodes = ir.walk(output.node for output in graph.outputs)
    return {node.over for node in nodes if isinstance(node, Reduce | ir.Contract)}


def _written_bytes(stage: Stage, problem: Problem) -> dict[str, int]:
    """Bytes of an element of each output of ``stage``, by name; what goes to another stage is fp32."""
    if stage.name != problem.graph.name:
        return {}
    names = (output.name for output in problem.graph.outputs)
    return dict(zip(names, (STORAGE_BYTES[s] for s in output_storages(problem)), strict=True))


@dataclass(frozen=True)
class Access:
    """A tensor read or written: ``bytes`` an element, at each position of ``axes``."""

    name: str
    axes: tuple[Axis, ...]
    bytes: int
    own_operand: bool = False
    """Read into a tile of the own axis, which stays for the whole walk where it fits."""


@dataclass(frozen=True)
class Slots:
    """Instructions done at each position of ``axes``: on the ordinary units, and on the exp unit."""

    axes: tuple[Axis, ...]
    issue: int
    special: int


@dataclass(frozen=True)
class Pass:
    """One walk: what its tiles hold and what is done on them."""

    products: int
    own_tiles: tuple[int, ...]
    """Inner length of each distinct own operand of the products (those of earlier walks among them)."""
    walk_tiles: tuple[int, ...]
    """Inner length of each distinct walk operand."""
    terms: tuple[int, ...]
    """Inner length of each contraction."""
    operands: tuple[int, ...]
    """Features of each distinct operand of weighted states that has a tile of its own."""
    apart: tuple[int, ...]
    """Features of those that no product reads."""
    weighted: tuple[int, ...]
    """Features of each weighted state."""
    rescaled: tuple[int, ...]
    """Features of each weighted state that is rescaled."""
    scalars: int
    """States without features."""
    partials: tuple[int, ...]
    """Features of each sum over the own axis, of which a tile adds its part to memory."""
    passed: int
    """Distinct values of partial sums, that are made by rows and summed by columns."""
    weights: int
    """Distinct values of all weighted sums."""
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    slots: tuple[Slots, ...]
    columns: int
    """Values of each column that its elements need beside its position."""
    column_words: int
    """The 32 bits that they take: there are integers of 64."""
    elements: int
    """Values that each element reads for itself."""
    draws: int
    """Random bits that each element has."""
    levels: tuple[int, ...]
    """Products of each level, where a warpgroup makes them level by level."""
    kept: int
    """Those that are kept for later levels, where other threads make these."""
    beside: int
    """The same where the same threads do, which keep ``whole`` values as well."""
    whole: int
    """What weights of levels are selected from that later ones read."""
    handed: int
    """Weights of levels that later ones read."""
    divided: tuple[tuple[int, ...], ...]
    """Features of the sums of each level, where each may be made by other threads; else empty."""
    late: tuple[int, ...]
    """Which of the own operands later levels alone read, by number."""


@dataclass(frozen=True)
class Profile:
    """What planning must know of a stage, read from its expressions once. Lengths that are not fixed count as
    0."""

    schedule: Schedule
    grid_axes: tuple[Axis, ...]
    tile_axis: Axis | None
    walk_axis: Axis | None
    feature_axis: Axis | None
    """Of a product that is a stage of its own."""
    outer: tuple[Axis, ...]
    """At each position of which the walk is made again."""
    passes: tuple[Pass, ...]
    reads: tuple[Access, ...]
    """Once a block, after the last walk."""
    writes: tuple[Access, ...]
    slots: tuple[Slots, ...]
    scattered: bool
    """Of a product: whether neighbours along the features don't lie side by side in its operand."""
    operand: Storage | None
    """The one 16-bit type of all that products and weighted sums read; None if it is not one."""
    wide: bool
    """Whether some factor of a weighted sum may be larger than that type holds."""
    group: int
    """Query heads of a key head that share the rows of a tile."""
    by_warp: bool
    """Where warps have roles: whether all of one looks for tiles, or brings values of columns."""
    uneven: bool
    """Whether walks begin at different tiles, by the rows of a block."""
    places: int
    """Where warps have roles: how many places in sorted tables one looks for and announces."""
    parts: Axis | None
    """The axis along which blocks share the tiles of the walk."""

    @property
    def holds_rows(self) -> bool:
        """Whether the own operands are the same for a single walk, and registers may hold them."""
        if self.schedule != "forward_loop" or self.outer or len(self.passes) != 1:
            return False
        return bool(self.passes[0].own_tiles)


def _scattered(stage: Stage) -> bool:
    state = stage.walks[0].states[0]
    assert state.operand is not None
    assert stage.walk is not None
    return nearest(state.operand, stage.walk, *state.features) == stage.walk


def _operand(stage: Stage, stored: Mapping[int, Storage]) -> Storage | None:
    roots = [node for walk in stage.walks for p in walk.products for t in p.terms for node in (t.own, t.walk)]
    roots += [s.operand for walk in stage.walks for s in walk.states if s.operand is not None and s.features]
    floats = (node for node in ir.walk(roots) if isinstance(node, Input) and node.stored == "float")
    kinds = {stored.get(node.position, "fp32") for node in floats}
    return kinds.pop() if kinds in ({"fp16"}, {"bf16"}) else None


def _accesses(
    roots: Iterable[Node], stored: Mapping[int, Storage], own_operand: bool = False
) -> list[Access]:
    """The tensors below ``roots``, each once for every set of axes it is read over."""
    found: dict[Access, None] = {}
    seen: set[Node] = set()
    stack = list(roots)[::-1]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        table = node.table if isinstance(node, Load) else node
        if isinstance(table, Input):
            item = STORAGE_BYTES[stored.get(table.position, "fp32")]
            found[Access(table.name, node.axes, item, own_operand)] = None
        stack.extend(node.indices[::-1] if isinstance(node, Load) else node.args[::-1])
    return list(found)


def _slots(roots: Iterable[Node]) -> tuple[Slots, ...]:
    counts: dict[tuple[Axis, ...], tuple[int, int]] = {}
    for node in ir.walk(roots):
        if isinstance(node, Map):
            issue, special = _SLOTS.get(node.op, (max(len(node.args) - 1, 1), 0))
        elif isinstance(node, Random):
            issue, special = RANDOM_SLOTS, 0
        else:
            continue
        before = counts.get(node.axes, (0, 0))
        counts[node.axes] = before[0] + issue, before[1] + special
    return tuple(Slots(axes, *both) for axes, both in counts.items() if any(both))


def _columns(roots: Iterable[Node], own: Axis | None, walked: Axis | None) -> list[Node]:
    """Numbers of a column, not linear in its position, that stand in expressions of elements."""
    found = {
        arg
        for node in ir.walk(roots)
        if own in node.axes
        for arg in node.args
        if walked in arg.axes and own not in arg.axes and not (isinstance(arg, Map) and arg.kind == "bool")
    }
    return [
        arg
        for arg in found
        if arg.kind != "int" or any(not isinstance(term, ir.Index | ir.Size) for term in ir.linear(arg)[0])
    ]


@lru_cache(maxsize=256)
def profile(
    stage: Stage, schedule: Schedule, tile_axis: Axis | None, problem: Problem, group: int = 1
) -> Profile:
    """The counts of ``stage``, run by ``schedule`` with tiles of ``tile_axis``; of so many heads each."""
    stored, written = storages(problem), _written_bytes(stage, problem)
    own_operands: dict[tuple[Node, Axis], None] = {}
    passes: list[Pass] = []
    for walk in stage.walks:
        own_operands.update(dict.fromkeys(own_tiles(walk)))  # they stay for the walks that follow
        passes.append(_pass(walk, stage, schedule, tile_axis, problem, list(own_operands), written))
    features = [axis for walk in stage.walks for state in walk.states for axis in state.features]
    ends = [output.node for output in stage.outputs]
    return Profile(
        schedule=schedule,
        grid_axes=tuple(
            axis for axis in stage.own if axis != tile_axis and (group == 1 or axis != GROUP_AXIS)
        ),
        tile_axis=tile_axis,
        walk_axis=stage.walk,
        feature_axis=features[0] if schedule == "product" else None,
        outer=stage.outer,
        passes=tuple(passes),
        reads=tuple(_accesses(ends, stored)),
        writes=tuple(_writes(stage.outputs, written)),
        slots=_slots(ends),
        scattered=schedule == "product" and _scattered(stage),
        operand=(operand := _operand(stage, stored)),
        wide=operand == "fp16" and may_exceed_fp16(stage),
        group=group,
        by_warp=any(step.levels and step.columns for step in passes)
        or (schedule in LOOPS and any(_seeks(walk, stage, tile_axis) for walk in stage.walks)),
        uneven=any(_begins(walk, stage, tile_axis) for walk in stage.walks),
        places=len(bounded.searches) if (bounded := _places(stage, tile_axis)) else 0,
        parts=stage.parts,
    )


def _pass(
    walk: Walk,
    stage: Stage,
    schedule: Schedule,
    tile_axis: Axis | None,
    problem: Problem,
    own_operands: Sequence[tuple[Node, Axis]],
    written: Mapping[str, int],
) -> Pass:
    """The counts of a walk of ``stage``, for which a block holds ``own_operands``."""
    sizes, stored = dict(problem.sizes), storages(problem)

    def lengths(axes: Iterable[Axis]) -> tuple[int, ...]:
        return tuple(sizes.get(axis, 0) for axis in axes)

    terms = [term for product in walk.products for term in product.terms]
    walk_operands = dict.fromkeys((term.walk, term.over) for term in terms)
    weighted = [(s.operand, s.features) for s in walk.states if s.operand is not None and s.features]
    operands = dict.fromkeys(weighted)
    if schedule == "backward_loop":
        walk_operands, operands = dict.fromkeys(walk_tiles(walk)), {}
    values_of = {partial.value for partial in walk.partials}
    loaded = [node for node, _ in own_operands], [node for node, _ in walk_operands]
    weighed = [walk.guard, *(state.value for state in walk.states), *values_of]
    values = [*weighed, *(out.node for out in walk.stores)]
    values += [s.operand for s in walk.states if s.operand is not None]
    columns = _columns([_tested(walk, stage, tile_axis), *weighed[1:]], tile_axis, stage.walk)
    levels = warpgroups.levels(stage)
    whole, kept = warpgroups.whole(levels), warpgroups.kept(levels)
    late = warpgroups.late_rows(stage)
    return Pass(
        products=len(walk.products),
        own_tiles=lengths(over for _, over in own_operands),
        walk_tiles=lengths(over for _, over in walk_operands),
        terms=lengths(term.over for term in terms),
        operands=lengths(axis for _, (axis,) in operands),
        apart=lengths(axis for node, (axis,) in operands if (node, axis) not in walk_operands),
        weighted=lengths(axis for _, (axis,) in weighted),
        rescaled=lengths(axis for s in walk.states if s.rescale is not None for axis in s.features),
        scalars=len(walk.states) - len(weighted),
        partials=lengths(axis for partial in walk.partials for axis in partial.features),
        passed=len(values_of),
        weights=len(values_of | {state.value for state in walk.states if state.features}),
        reads=(
            *_accesses(loaded[0], stored, own_operand=True),
            *_accesses([*loaded[1], *values], stored),
        ),
        writes=(
            *_writes(walk.stores, written),
            *(Access(partial.name, partial.symbol.axes, 4) for partial in walk.partials),
        ),
        slots=_slots([*loaded[0], *loaded[1], *values]),
        columns=len(columns),
        column_words=sum(2 if column.kind == "int" else 1 for column in columns),
        elements=sum(
            isinstance(node, Input | Load) and {tile_axis, stage.walk} <= set(node.axes)
            for node in ir.walk(weighed)
        ),
        draws=sum(isinstance(node, Random) for node in ir.walk(weighed)),
        levels=tuple(len(level.products) for level in levels),
        kept=len(kept),
        beside=len(warpgroups.kept(levels, whole)),
        whole=len(whole),
        handed=len(warpgroups.handed(levels)),
        divided=tuple(
            lengths(axis for state in level.states for axis in state.features)
            for level in (levels if warpgroups.divisible(stage) else ())
        ),
        late=tuple(i for i, tile in enumerate(own_operands) if tile in late),
    )


def _writes(outputs: Iterable[ir.Output], written: Mapping[str, int]) -> Iterator[Access]:
    """What is written of ``outputs``, in fp32 where ``written`` does not say it."""
    return (Access(out.name, out.node.axes, written.get(out.name, 4)) for out in outputs)


def range_of(walk: Walk, stage: Stage, tile_axis: Axis | None) -> RangePlan | None:
    """What bounds the loop of a walk. Where a block owns one row, that row's position is its tile."""
    if walk.guard is ir.TRUE or stage.walk is None:
        return None
    rows = next((axis for axis in reversed(stage.own) if axis != stage.parts), "")
    return ranges(walk.guard, tile_axis or rows, stage.walk)


def _begins(walk: Walk, stage: Stage, tile_axis: Axis | None) -> bool:
    """Whether the rows of a block bound where a walk begins."""
    found = range_of(walk, stage, tile_axis)
    spans = found.ranges if found is not None else ()
    return any(ir.depends(span.begin, [OWN_FIRST, OWN_LAST]) for span in spans)


def _seeks(walk: Walk, stage: Stage, tile_axis: Axis | None) -> bool:
    """Whether what is known of each tile, not where several ranges lie, decides which are visited, or places
    in sorted tables do."""
    found = range_of(walk, stage, tile_axis)
    if found is None:
        return False
    if sought(found).searches:
        return True
    return len(found.ranges) < 2 and (found.may is not ir.TRUE or found.needs_block_map)


def _places(stage: Stage, tile_axis: Axis | None) -> RangePlan | None:
    """What bounds the walk of a stage, if rows may look for their own places in sorted tables: it is the one
    walk, whose products come first."""
    if len(stage.walks) > 1 or not stage.walks or warpgroups.levels(stage):
        return None
    found = range_of(stage.walks[0], stage, tile_axis)
    return sought(found) if found is not None else None


def _tested(walk: Walk, stage: Stage, tile_axis: Axis | None) -> Node:
    """What is asked of each element, beside where it lies among the places of its row."""
    found = _places(stage, tile_axis)
    if found is None:
        return walk.guard
    return ir.conjunction(*(c for c in conjuncts(walk.guard) if not row_places(c, found)))


def own_tiles(walk: Walk) -> list[tuple[Node, Axis]]:
    """What a walk reads of the rows a block owns: operands of products and of partial sums, by columns."""
    found = [(term.own, term.over) for product in walk.products for term in product.terms]
    found += [(partial.operand, axis) for partial in walk.partials for axis in partial.features]
    return list(dict.fromkeys(found))


def axes_along(stage: Stage) -> set[Axis]:
    """The axes of what a stage reads in tiles along its walk."""
    read = [term.walk for walk in stage.walks for product in walk.products for term in product.terms]
    read += [state.operand for walk in stage.walks for state in walk.states if state.operand is not None]
    return {axis for node in read for axis in node.axes}


def walk_tiles(walk: Walk) -> list[tuple[Node, Axis]]:
    """What products and weighted sums of a walk read along it, each once, by columns."""
    found = [(term.walk, term.over) for product in walk.products for term in product.terms]
    found += [(s.operand, axis) for s in walk.states if s.operand is not None for axis in s.features]
    return list(dict.fromkeys(found))


def is_twofold(stage: Stage) -> bool:
    """Whether tiles along a stage's walk serve products and sums, or those of its rows do.

    Its one walk then makes plain sums alone, each of which has features.
    """
    if len(stage.walks) != 1 or stage.walks[0].stores:
        return False
    (walk,) = stage.walks
    if any(state.op == "max" or state.rescale is not None or not state.features for state in walk.states):
        return False
    several = len(walk.products) + len(walk.states) + len(walk.partials)
    tiles = sum(len(product.terms) for product in walk.products) + len(walk.states)
    return bool(walk.partials) or (several > 1 and len(walk_tiles(walk)) < tiles)


def stage_roots(stage: Stage) -> list[Node]:
    """Every expression of a stage."""
    roots = [output.node for output in stage.outputs]
    for walk in stage.walks:
        roots.append(walk.guard)
        roots += [
            node for product in walk.products for term in product.terms for node in (term.own, term.walk)
        ]
        for state in walk.states:
            roots += [node for node in (state.value, state.operand, state.rescale) if node is not None]
        roots += [node for partial in walk.partials for node in (partial.value, partial.operand)]
        roots += [output.node for output in walk.stores]
    return roots
