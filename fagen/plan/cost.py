"""What a kernel costs, as formulas: operations, bytes at each level of the memory hierarchy, shared memory,
registers.

Two kinds of bytes are kept apart. *Asked* bytes are what all blocks (threads, where nothing is shared) load
and store beyond their multiprocessor, each re-reading counted. *Least* bytes are each tensor once. Device
memory sees something between: blocks that run at the same time share what they read through the L2 cache.

`profile` reads a stage once and keeps counts by the axes they depend on; `kernel_cost` puts lengths and tile
sizes in. Ranking hundreds of candidates so takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, TypeAlias

from fagen.derive.intervals import RangePlan
from fagen.derive.walk import Stage
from fagen.ir import graph as ir
from fagen.ir.graph import Axis, Graph, Input, Load, Map, Node, Random, Reduce, Scalar
from fagen.plan import warpgroups
from fagen.plan.arch import Arch
from fagen.plan.layout import nearest
from fagen.plan.plan import (
    PRODUCER_THREADS,
    STORAGE_BYTES,
    KernelPlan,
    Plan,
    Problem,
    Roles,
    Schedule,
    SharedTile,
    Storage,
    Tiling,
)

Lengths: TypeAlias = Mapping[Axis, int]
Bound: TypeAlias = Literal[
    "arithmetic", "instructions", "exp unit", "shared memory", "L2", "device memory", "latency"
]

PAD = 4
"""Elements added to a row of a tile: its vectors then start on different banks."""
VECTOR = 4
"""fp32 elements of one access."""
CHUNK = 8
"""16-bit elements of one access."""
FRAGMENT = 16
"""Rows and columns of the block of operands that a warp loads at once."""

MOST_TILES = 256

LAUNCH_SECONDS = 3e-6
LATENCY_CYCLES = 900
"""From asking device memory for a tile to the barrier after it."""
REDUCE_CYCLES = 60
"""A reduction over the threads of a row."""
UNHIDDEN = 0.25
"""The part of a unit's cycles in a tile that the busiest unit does not hide."""
LOOPS = ("forward_loop", "forward_roles")
"""Schedules of stages with products of tiles."""
WARPGROUP_UNHIDDEN, WARPGROUP_WAIT_CYCLES = 0.6, 100
WARPGROUP_BESIDE = 0.1
"""The part of other limits that the tightest one does not hide."""
WARPGROUP_TILE_CYCLES = 300
"""From tile to tile: products begin and end, and what they wait for is passed on."""
WARPGROUP_SLOTS = 90
"""Instructions of a consumer's thread for a tile beside its elements."""
WORK_CYCLES = {1: 3000, 2: 2000}
"""To begin and end a work, by the number of buffers of its rows: with two the next ones are on their way."""
WARPGROUP_RESCALED = 0.1
"""Of the tiles, those that rescale what was summed: a maximum may lag behind."""
SCHEDULERS = 4
"""Of a multiprocessor; each hides what a warp waits for if it has another."""
COPY_SLOTS = 4
"""Instructions to bring an element into a tile: its share of a load, a store, the indices, a conversion."""
LOOP_REGISTERS = 12
"""More of them in a loop with products of tiles."""
ADDRESS_SLOTS = 8
"""Instructions to read two values of which each thread finds its own."""
_EXPOSED: Mapping[Tiling, float] = {"element": 0.0, "shared": 1.25, "registers": 3.0}
"""How many times a tile of a product waits for memory: a barrier on each side, and nothing to do
meanwhile."""
BUSY_SLOTS, BUSY_REGISTERS = 30, 40
"""Beyond so many instructions for an element, and what computing it then holds."""
PLAIN_SLOTS = 11
"""On tensor cores, instructions for an element beyond which a tile's scores are held while others are
computed."""
RANDOM_REGISTERS = 40
"""The state of a random generator that serves several elements of a thread."""
FIXED_REGISTERS = 40
"""Addresses, counters and temporaries of a thread."""
SAVED_REGISTERS = 12
"""Of these, what a thread does without whose accumulators leave no more."""

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
_RANDOM_SLOTS = 24
"""Philox: ten rounds of about ten instructions serve several elements of a thread."""


def round_up(x: int, multiple: int) -> int:
    """The least multiple not below ``x``."""
    return -(-x // multiple) * multiple


def ceil_div(x: int, y: int) -> int:
    """``x / y``, rounded up."""
    return -(-x // y)


# --------------------------------------------------------------------------------------------------- storage


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
    stored, features = storages(problem), {axis for axis, _ in problem.sizes}
    floats = [a for a in problem.graph.arguments if isinstance(a, Input) and a.stored == "float"]
    first = next((a for a in floats if features & set(a.axes)), floats[0] if floats else None)
    data: Storage = stored[first.position] if first is not None else "fp32"
    walked = features | _walked_axes(problem.graph)
    return tuple(data if walked & set(output.node.axes) else "fp32" for output in problem.graph.outputs)


def is_16_bit(problem: Problem) -> bool:
    """Whether no tensor with features is in fp32; what is added to scores may be."""
    stored, features = storages(problem), {axis for axis, _ in problem.sizes}
    tensors = (a for a in problem.graph.arguments if isinstance(a, Input) and a.stored == "float")
    return all(stored[a.position] != "fp32" for a in tensors if features & set(a.axes))


def _walked_axes(graph: Graph) -> set[Axis]:
    nodes = ir.walk(output.node for output in graph.outputs)
    return {node.over for node in nodes if isinstance(node, Reduce | ir.Contract)}


def _written_bytes(stage: Stage, problem: Problem) -> dict[str, int]:
    """Bytes of an element of each output of ``stage``, by name; what goes to another stage is fp32."""
    if stage.name != problem.graph.name:
        return {}
    names = (output.name for output in problem.graph.outputs)
    return dict(zip(names, (STORAGE_BYTES[s] for s in output_storages(problem)), strict=True))


# --------------------------------------------------------------------------------------------------- profile


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
    """Features of each distinct operand of weighted states."""
    weighted: tuple[int, ...]
    """Features of each weighted state."""
    rescaled: tuple[int, ...]
    """Features of each weighted state that is rescaled."""
    scalars: int
    """States without features."""
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    slots: tuple[Slots, ...]
    columns: int
    """Values of each column that its elements need beside its position."""
    elements: int
    """Values that each element reads for itself, random bits among them."""


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
            issue, special = _RANDOM_SLOTS, 0
        else:
            continue
        before = counts.get(node.axes, (0, 0))
        counts[node.axes] = before[0] + issue, before[1] + special
    return tuple(Slots(axes, *both) for axes, both in counts.items() if any(both))


def _columns(roots: Iterable[Node], own: Axis | None, walked: Axis | None) -> int:
    """How many numbers of a column, not linear in its position, stand in expressions of elements."""
    found = {
        arg
        for node in ir.walk(roots)
        if own in node.axes
        for arg in node.args
        if walked in arg.axes and own not in arg.axes and not (isinstance(arg, Map) and arg.kind == "bool")
    }
    return sum(
        arg.kind != "int" or any(not isinstance(term, ir.Index | ir.Size) for term in ir.linear(arg)[0])
        for arg in found
    )


@lru_cache(maxsize=256)
def profile(stage: Stage, schedule: Schedule, tile_axis: Axis | None, problem: Problem) -> Profile:
    """The counts of ``stage``, run by ``schedule`` with tiles of ``tile_axis``."""
    sizes, stored, written = dict(problem.sizes), storages(problem), _written_bytes(stage, problem)

    def writes(outputs: Iterable[ir.Output]) -> tuple[Access, ...]:
        return tuple(Access(out.name, out.node.axes, written.get(out.name, 4)) for out in outputs)

    own_operands: dict[tuple[Node, Axis], None] = {}
    passes: list[Pass] = []
    for walk in stage.walks:
        terms = [term for product in walk.products for term in product.terms]
        own_operands.update(dict.fromkeys((term.own, term.over) for term in terms))
        walk_operands = dict.fromkeys((term.walk, term.over) for term in terms)
        weighted = [(s.operand, s.features) for s in walk.states if s.operand is not None and s.features]
        operands = dict.fromkeys(weighted)
        loaded = [node for node, _ in own_operands], [node for node, _ in walk_operands]
        weighed = [walk.guard, *(state.value for state in walk.states)]
        values = [*weighed, *(out.node for out in walk.stores)]
        values += [s.operand for s in walk.states if s.operand is not None]
        passes.append(
            Pass(
                products=len(walk.products),
                own_tiles=tuple(sizes.get(over, 0) for _, over in own_operands),
                walk_tiles=tuple(sizes.get(over, 0) for _, over in walk_operands),
                terms=tuple(sizes.get(term.over, 0) for term in terms),
                operands=tuple(sizes.get(axis, 0) for _, (axis,) in operands),
                weighted=tuple(sizes.get(axis, 0) for _, (axis,) in weighted),
                rescaled=tuple(
                    sizes.get(axis, 0) for s in walk.states if s.rescale is not None for axis in s.features
                ),
                scalars=len(walk.states) - len(weighted),
                reads=(
                    *_accesses(loaded[0], stored, own_operand=True),
                    *_accesses([*loaded[1], *values], stored),
                ),
                writes=writes(walk.stores),
                slots=_slots([*loaded[0], *loaded[1], *values]),
                columns=_columns(weighed, tile_axis, stage.walk),
                elements=sum(
                    isinstance(node, Input | Load | Random) and {tile_axis, stage.walk} <= set(node.axes)
                    for node in ir.walk(weighed)
                ),
            )
        )
    features = [axis for walk in stage.walks for state in walk.states for axis in state.features]
    ends = [output.node for output in stage.outputs]
    return Profile(
        schedule=schedule,
        grid_axes=tuple(axis for axis in stage.own if axis != tile_axis),
        tile_axis=tile_axis,
        walk_axis=stage.walk,
        feature_axis=features[0] if schedule == "product" else None,
        outer=stage.outer,
        passes=tuple(passes),
        reads=tuple(_accesses(ends, stored)),
        writes=writes(stage.outputs),
        slots=_slots(ends),
        scattered=schedule == "product" and _scattered(stage),
        operand=_operand(stage, stored),
    )


# ----------------------------------------------------------------------------------------- what a block needs


@dataclass(frozen=True)
class Tiles:
    """A candidate: the tile sizes of a `KernelPlan`."""

    tiling: Tiling
    block_own: int
    block_walk: int
    block_inner: int
    block_feature: int
    rows: int
    columns: int
    roles: Roles | None = None

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.rows * self.columns + (PRODUCER_THREADS if self.roles else 0)

    def __str__(self) -> str:
        sides = [self.block_own, self.block_walk, self.block_inner, self.block_feature]
        size = " x ".join(str(side) for side in sides if side)
        if self.roles:
            buffers = f"{self.roles.own_stages} + {self.roles.stages} buffers"
            return f"{size}, {self.roles.consumers} consumers, {buffers}"
        return f"{size}, {self.rows} x {self.columns} threads"


def shared_tiles(profile: Profile, tiles: Tiles) -> tuple[SharedTile, ...]:
    """What a block keeps in shared memory: fp32, with tiles ``fragments`` the operands' own type.

    ``forward_loop``
        ``own0, own1, ...``  [block_own][block_inner]: own operands of products; they stay for the whole walk
        ``walk0, ...``       [block_walk][block_inner]: walk operands of this walk's products
        ``operand0, ...``    [block_walk][features]: operands of weighted states
        ``weights``          [block_own][block_walk]: a state's value, from the threads that made it to those
                             that use it; with tiles ``fragments`` they are the same threads
    ``product``
        ``own``              [block_own][block_walk]: the value
        ``operand``          [block_feature][block_walk], with tiles ``shared`` [block_walk][block_feature]

    Tiles of different walks overlap, but for the own operands. Equal operands share a tile.
    """
    return tuple(SharedTile(*placed[:-1]) for placed in _layout(profile, tiles))


def _layout(profile: Profile, tiles: Tiles) -> list[tuple[str, Storage, int, int, int, int, int]]:
    """The fields of each tile, and its bytes."""
    place = _Placed(tiles, profile.operand)
    if profile.schedule == "product" and tiles.tiling != "element":
        operand = tiles.block_feature, tiles.block_walk
        place.add([("own", tiles.block_own, tiles.block_walk)])
        place.add([("operand", *(operand[::-1] if tiles.tiling == "shared" else operand))], place.end)
    if profile.schedule not in LOOPS:
        return place.placed
    own_tiles = profile.passes[-1].own_tiles
    if tiles.roles is not None and profile.operand is not None:
        walks = [(step.walk_tiles, step.operands) for step in profile.passes]
        return warpgroups.layout(
            tiles.roles, tiles.block_walk, profile.operand, own_tiles, walks, len(profile.grid_axes)
        )
    place.add((f"own{i}", tiles.block_own, _inner_width(inner, tiles)) for i, inner in enumerate(own_tiles))
    base = place.end
    for number, step in enumerate(profile.passes):
        at = f"{number}_" if len(profile.passes) > 1 else ""
        parts = [
            (f"walk{at}{i}", tiles.block_walk, _inner_width(inner, tiles))
            for i, inner in enumerate(step.walk_tiles)
        ]
        parts += [
            (f"operand{at}{i}", tiles.block_walk, feature_width(features, tiles))
            for i, features in enumerate(step.operands)
        ]
        if step.weighted and tiles.tiling != "fragments":
            parts.append((f"weights{at[:-1]}", tiles.block_own, tiles.block_walk))
        place.add(parts, base)
    return place.placed


class _Placed:
    """Tiles laid out one after another."""

    def __init__(self, tiles: Tiles, operand: Storage | None) -> None:
        self.fragments = tiles.tiling == "fragments"
        self.storage: Storage = operand if self.fragments and operand is not None else "fp32"
        self.placed: list[tuple[str, Storage, int, int, int, int, int]] = []
        self.end = 0

    def add(self, parts: Iterable[tuple[str, int, int]], address: int = 0) -> None:
        """Place (name, rows, width) from ``address`` on."""
        element = STORAGE_BYTES[self.storage]
        for name, rows, width in parts:
            pitch = fragment_pitch(width) if self.fragments else width + PAD
            size = rows * pitch * element
            self.placed.append((name, self.storage, rows, width, pitch, address, size))
            address += round_up(size, 16)
        self.end = address


def fragment_pitch(width: int) -> int:
    """Elements from a row to the next where tensor cores read it, as templates/device/layout.cuh has it."""
    chunks = width // CHUNK
    whole_lines = chunks >= 8 and chunks & (chunks - 1) == 0
    return width if whole_lines else CHUNK * (chunks | 1)


def _inner_width(inner: int, tiles: Tiles) -> int:
    if tiles.tiling == "fragments":
        return round_up(inner, FRAGMENT)
    return min(tiles.block_inner, round_up(inner, VECTOR))


def feature_width(features: int, tiles: Tiles) -> int:
    """Features a block computes: each of the ``columns`` threads of a row has equally many, in whole vectors
    if any fit."""
    if tiles.tiling == "fragments":
        return round_up(features, FRAGMENT)
    if tiles.tiling == "warpgroups":
        return round_up(features, CHUNK)
    share = ceil_div(features, tiles.columns)
    return tiles.columns * (round_up(share, VECTOR) if share >= VECTOR else share)


def shared_bytes(profile: Profile, tiles: Tiles) -> int:
    """Shared memory of a block."""
    return max((address + size for *_, address, size in _layout(profile, tiles)), default=0)


def registers(profile: Profile, tiles: Tiles) -> int:
    """Registers of a thread, estimated: accumulators, the fragments they are made of, row values and a fixed
    share."""
    own, walk = ceil_div(tiles.block_own, tiles.rows), ceil_div(tiles.block_walk, tiles.columns)
    if profile.schedule == "product":
        features = ceil_div(tiles.block_feature, tiles.columns)
        if tiles.tiling != "registers":
            return FIXED_REGISTERS + (2 * LOOP_REGISTERS if tiles.tiling == "shared" else 0)
        held = own * features + VECTOR * (own + 1)
        return FIXED_REGISTERS + 2 * LOOP_REGISTERS + held + _busy_registers(profile.passes[0])
    if profile.schedule == "rowwise":
        return FIXED_REGISTERS
    most = 0
    if tiles.roles is not None:
        return max(
            warpgroups.registers(
                tiles.block_walk,
                max(step.products, 1),
                min(len(step.weighted), 1),
                step.weighted,
                step.columns,
                step.elements,
            )
            for step in profile.passes
        )
    for step in profile.passes:
        accumulators = own * sum(feature_width(f, tiles) // tiles.columns for f in step.weighted)
        scores = own * walk * max(step.products, 1)
        if tiles.tiling == "fragments":
            held = accumulators + scores + 2 * own + CHUNK - SAVED_REGISTERS + _drawn_registers(step)
            if _element_issue(step, profile) > PLAIN_SLOTS:
                held += scores // 2
        else:
            shares = sum(feature_width(f, tiles) // tiles.columns for f in step.weighted)
            held = LOOP_REGISTERS + accumulators + VECTOR + max(scores + VECTOR * own, VECTOR * shares)
            held += _busy_registers(step)
        most = max(most, held + own * (step.scalars + 2))
    return FIXED_REGISTERS + most


def _drawn_registers(step: Pass) -> int:
    return RANDOM_REGISTERS if any(slots.issue >= _RANDOM_SLOTS for slots in step.slots) else 0


def _element_issue(step: Pass, profile: Profile) -> int:
    """Instructions for an element of a tile."""
    both = {profile.tile_axis, profile.walk_axis}
    return sum(slots.issue for slots in step.slots if both <= set(slots.axes))


def _busy_registers(step: Pass) -> int:
    return BUSY_REGISTERS if sum(slots.issue for slots in step.slots) > BUSY_SLOTS else 0


def registers_limit(arch: Arch, threads: int) -> int:
    """The most registers a thread may have with so many threads in a block."""
    return min(arch.registers_thread, arch.registers // round_up(threads, arch.warp) // 8 * 8)


def planned_blocks(profile: Profile, tiles: Tiles, arch: Arch) -> int:
    """Blocks that a multiprocessor is planned to hold: the compiler may use the registers that leaves to
    each."""
    count = registers(profile, tiles) * 11 // 10  # an estimate may be a little low
    return max(resident_blocks(arch, tiles.threads, count, shared_bytes(profile, tiles)), 1)


def resident_blocks(arch: Arch, threads: int, registers_: int, shared_bytes_: int) -> int:
    """Blocks that a multiprocessor holds at once; 0 if not one fits."""
    threads = round_up(threads, arch.warp)
    if threads > arch.threads_block or shared_bytes_ > arch.shared_block_bytes:
        return 0
    return min(
        arch.blocks,
        arch.threads // threads,
        arch.registers // (threads * round_up(registers_, 8)),
        arch.shared_bytes // max(shared_bytes_ + arch.shared_reserved_bytes, 1),
    )


# ---------------------------------------------------------------------------------------------- what it costs


@dataclass(frozen=True)
class TileCost:
    """Cycles of a multiprocessor for one tile of a walk."""

    fma_cycles: float
    """Of the products alone."""
    issue_cycles: float
    """Of all instructions: products, pointwise work, copies, reductions."""
    exp_cycles: float
    shared_cycles: float
    cycles: float
    """With the latency that resident blocks can't hide from each other."""


@dataclass(frozen=True)
class Cost:
    """A kernel at given lengths."""

    flops: int
    """A multiplication and an addition are two; pointwise work is not counted."""
    exp_ops: int
    """Operations of the exp unit."""
    asked_read_bytes: int
    least_read_bytes: int
    write_bytes: int
    memory_bytes: int
    """Predicted traffic of device memory, reads and writes."""
    shared_traffic_bytes: int
    """Read from shared memory by all blocks."""
    blocks: int
    shared_bytes: int
    """Of a block."""
    registers: int
    """Of a thread."""
    resident_blocks: int
    tiles: tuple[TileCost, ...]
    """For each walk."""
    walk_tiles: tuple[float, ...]
    """Tiles a block visits in each walk, on average."""
    seconds: float
    bound: Bound
    """What the time is spent on."""

    @property
    def asked_bytes(self) -> int:
        """Loads and stores beyond the multiprocessor."""
        return self.asked_read_bytes + self.write_bytes


class Model:
    """The cost of one stage's kernels at given lengths on one GPU, for any tiles.

    ``lengths`` has every axis of the stage; ``live`` the part of its tiles that each walk visits (None: all).
    """

    def __init__(
        self, profile: Profile, lengths: Lengths, arch: Arch, live: tuple[float, ...] | None = None
    ) -> None:
        self.profile, self.lengths, self.arch = profile, lengths, arch
        self.live = live or (1.0,) * max(len(profile.passes), 1)
        self.own = lengths[profile.tile_axis] if profile.tile_axis else 1
        self.walked = prod(lengths[axis] for axis in (profile.walk_axis, *profile.outer) if axis)
        self.features = lengths[profile.feature_axis] if profile.feature_axis else 1
        self.groups = prod(lengths[axis] for axis in profile.grid_axes)
        self._needs: dict[Tiles, tuple[int, int]] = {}
        steps = [step.slots for step in profile.passes] or [profile.slots]
        self._slots = [tuple(filter(None, map(self._on_tile, slots))) for slots in steps]

    def _on_tile(self, slots: Slots) -> tuple[int, int, bool, bool, bool, int] | None:
        """Instructions of a tile: (issue, special, has own axis, has feature axis, made while loading, inner
        length).

        What is constant along the walk is not counted.
        """
        axes, profile = set(slots.axes), self.profile
        if profile.walk_axis not in axes:
            return None
        loops = {*profile.grid_axes, profile.tile_axis, profile.walk_axis, profile.feature_axis}
        inner = axes - loops - {*profile.outer}
        length = prod(self.lengths[axis] for axis in inner)
        flags = profile.tile_axis in axes, profile.feature_axis in axes, bool(inner)
        return slots.issue, slots.special, *flags, length

    # ------------------------------------------------------------------------------------------------ time

    def blocks(self, tiles: Tiles) -> int:
        """Blocks of the launch."""
        wide = ceil_div(self.features, tiles.block_feature) if self.profile.feature_axis else 1
        return self.groups * ceil_div(self.own, tiles.block_own) * wide

    def tile(self, number: int, tiles: Tiles, resident: int) -> TileCost:
        """The cost of a tile of walk ``number``."""
        profile, arch = self.profile, self.arch
        step = profile.passes[number] if profile.passes else None
        own, walk = ceil_div(tiles.block_own, tiles.rows), ceil_div(tiles.block_walk, tiles.columns)
        warps = ceil_div(tiles.threads, arch.warp)
        fma = issue = vectors = shared = 0.0
        waits = float(LATENCY_CYCLES)
        if tiles.tiling == "fragments" and step is not None:
            return self._fragments(number, tiles, resident)
        if tiles.roles is not None and step is not None:
            return self._warpgroups(number, tiles, tiles.roles)
        if profile.schedule in LOOPS and step is not None:
            area = tiles.block_own * tiles.block_walk
            for inner in step.terms:
                depth = round_up(inner, VECTOR)
                fma += area * depth * (1 + 1 / _part(depth))
                vectors += depth / VECTOR * (own + walk)
                shared += warps * depth / VECTOR * _wavefronts(tiles, own, walk)
            for features in step.weighted:
                width = feature_width(features, tiles)
                share = width / tiles.columns
                fma += area * width * (1 + 1 / tiles.block_walk)
                vectors += tiles.block_walk * (own / VECTOR + max(share / VECTOR, 1.0)) + own * walk
                shared += warps * tiles.block_walk / VECTOR * _wavefronts(tiles, own, max(share, VECTOR))
                shared += warps * own * walk
            for features in step.rescaled:
                issue += tiles.block_own * feature_width(features, tiles)
            copied = tiles.block_walk * (sum(step.walk_tiles) + sum(step.operands))
            if step.own_tiles and tiles.block_inner < max(step.own_tiles):
                copied += tiles.block_own * sum(step.own_tiles)
                waits += 2 * LATENCY_CYCLES * ceil_div(max(step.own_tiles), tiles.block_inner)
            issue += COPY_SLOTS * copied
            shuffles = 2 * min(tiles.columns, arch.warp).bit_length() + 6
            issue += step.scalars * (area + tiles.threads * own * shuffles)
            waits += REDUCE_CYCLES * step.scalars
        elif profile.schedule == "product":
            share = ceil_div(tiles.block_feature, tiles.columns)
            fma = tiles.block_own * tiles.block_walk * tiles.block_feature
            if tiles.tiling == "registers":
                fma *= 1 + 1 / _part(tiles.block_walk)
                parts = max(own / VECTOR, 1.0), max(share / VECTOR, 1.0)
                vectors = tiles.block_walk * sum(parts)
                shared = warps * tiles.block_walk * _wavefronts(tiles, *parts)
            else:  # one result a thread: its row's value for all lanes, its column's beside its neighbours'
                lines = arch.warp if tiles.tiling == "element" and profile.scattered else 1
                vectors = tiles.block_walk * (ADDRESS_SLOTS if tiles.tiling == "element" else 2)
                shared = warps * tiles.block_walk * (lines + (1 if tiles.tiling == "element" else 1 / VECTOR))
            waits *= _EXPOSED[tiles.tiling]
            if tiles.tiling != "element":
                issue += COPY_SLOTS * tiles.block_walk * (tiles.block_own + tiles.block_feature)
        elif step is not None:
            issue += step.scalars * tiles.rows * tiles.block_walk
        pointwise, special = self._pointwise(number, tiles)
        issue += pointwise
        issue += fma + vectors * tiles.threads
        busy = (
            fma / arch.fp32_fma_per_cycle,
            issue / (SCHEDULERS * arch.warp),
            special / arch.exp_per_cycle,
            shared,
        )
        unhidden = UNHIDDEN * max(1.0, 2 * SCHEDULERS / (warps * resident))
        together = max(busy) + unhidden * (sum(busy) - max(busy))
        return TileCost(*busy, together + waits / resident)

    def _pointwise(self, number: int, tiles: Tiles) -> tuple[float, float]:
        """Instructions of all threads for a tile's elements: on the ordinary units, and on the exp unit."""
        issue = special = 0.0
        for per_issue, per_special, has_own, has_feature, loading, length in self._slots[number]:
            times = tiles.block_walk * length * (tiles.block_feature if has_feature else 1)
            times *= tiles.block_own if has_own else 1 if loading else tiles.rows
            issue += per_issue * times
            special += per_special * times
        return issue, special

    def _fragments(self, number: int, tiles: Tiles, resident: int) -> TileCost:
        """The cost of a tile whose products are done on tensor cores.

        A warp loads a fragment of the walk's operands once for all of its rows, and its own for all columns.
        Copies run beside the tile, half of it ahead.
        """
        arch, step = self.arch, self.profile.passes[number]
        warps = ceil_div(tiles.threads, arch.warp)
        own, walk = tiles.block_own / warps / FRAGMENT, tiles.block_walk / FRAGMENT
        inner = [round_up(length, FRAGMENT) / FRAGMENT for length in step.terms]
        features = [feature_width(length, tiles) / FRAGMENT for length in step.weighted]
        loads = warps * (sum(inner) * (own + walk) + walk * sum(features))
        blocks = warps * own * walk * (sum(inner) + sum(features))
        area = tiles.block_own * tiles.block_walk
        pointwise, special = self._pointwise(number, tiles)
        rescaled = (
            tiles.block_own
            * FRAGMENT
            * sum(feature_width(length, tiles) / FRAGMENT for length in step.rescaled)
        )
        copies = tiles.block_walk * (sum(step.walk_tiles) + sum(step.operands)) / CHUNK
        scalars = step.scalars * (area + tiles.block_own * tiles.columns * 2 * FRAGMENT)
        issue = (2 * blocks + loads) * arch.warp + pointwise + rescaled + scalars + COPY_SLOTS * copies
        issue += area * len(step.weighted) / 2
        busy = (
            blocks * FRAGMENT**3 / arch.mma_fma_per_cycle,
            issue / (SCHEDULERS * arch.warp),
            special / arch.exp_per_cycle,
            loads * FRAGMENT**2 * 2 / arch.shared_bytes_per_cycle,
        )
        unhidden = UNHIDDEN * max(1.0, 2 * SCHEDULERS / (warps * resident))
        together = max(busy) + unhidden * (sum(busy) - max(busy))
        waits = max(LATENCY_CYCLES - together / 2, 0.0) + REDUCE_CYCLES * (step.scalars + 2)
        return TileCost(*busy, max(together, (together + waits) / resident))

    def _warpgroups(self, number: int, tiles: Tiles, roles: Roles) -> TileCost:
        """The cost of a tile whose products warpgroups issue, copies and products running beside the threads.

        Pointwise work of one tile runs beside the products of another: what is busiest takes the time, and
        part of the rest, the less the more warpgroups take turns.
        """
        arch, step = self.arch, self.profile.passes[number]
        area = tiles.block_own * tiles.block_walk
        inner = [round_up(length, FRAGMENT) for length in step.terms]
        features = [feature_width(length, tiles) for length in step.weighted]
        pointwise, special = self._pointwise(number, tiles)
        rescaled = WARPGROUP_RESCALED * tiles.block_own * sum(feature_width(f, tiles) for f in step.rescaled)
        issue = pointwise + rescaled + step.scalars * area + area * len(step.weighted) / 2
        issue += WARPGROUP_SLOTS * tiles.rows * tiles.columns
        read = sum(2 * depth * (tiles.block_own + roles.consumers * tiles.block_walk) for depth in inner)
        read += sum(2 * roles.consumers * tiles.block_walk * width for width in features)
        busy = (
            area * (sum(inner) + sum(features)) / arch.tensor16_fma_per_cycle,
            issue / (SCHEDULERS * arch.warp),
            special / arch.exp_per_cycle,
            read / arch.shared_bytes_per_cycle,
        )
        unhidden = WARPGROUP_UNHIDDEN / roles.consumers
        return TileCost(
            *busy,
            max(busy)
            + unhidden * (sum(busy[:3]) - max(busy))
            + WARPGROUP_TILE_CYCLES
            + WARPGROUP_WAIT_CYCLES / (roles.stages - 1),
        )

    def needs(self, tiles: Tiles) -> tuple[int, int]:
        """Shared memory of a block, and registers of a thread."""
        found = self._needs.get(tiles)
        if found is None:
            found = shared_bytes(self.profile, tiles), registers(self.profile, tiles)
            self._needs[tiles] = found
        return found

    def resident(self, tiles: Tiles, most: int | None = None) -> int:
        """Blocks that a multiprocessor holds at once, or ``most`` of them."""
        bytes_, count = self.needs(tiles)
        found = max(resident_blocks(self.arch, tiles.threads, count, bytes_), 1)
        return found if most is None else min(found, most)

    def busy_seconds(self, tiles: Tiles) -> float:
        """Time of the multiprocessors, whatever memory does."""
        return self._busy_seconds(tiles, self._tiles(tiles, self.resident(tiles)))

    def _tiles(self, tiles: Tiles, resident: int) -> tuple[TileCost, ...]:
        return tuple(self.tile(number, tiles, resident) for number in range(len(self.live)))

    def _busy_seconds(self, tiles: Tiles, costs: tuple[TileCost, ...]) -> float:
        steps = ceil_div(self.walked, tiles.block_walk)
        cycles = sum(steps * part * cost.cycles for part, cost in zip(self.live, costs, strict=True))
        if tiles.roles is not None:
            cycles += WORK_CYCLES[tiles.roles.own_stages]
        return ceil_div(self.blocks(tiles), self.arch.multiprocessors) * cycles / self.arch.clock_hz

    # ------------------------------------------------------------------------------------------------ bytes

    def positions(self, axes: Iterable[Axis]) -> int:
        """Elements of a value."""
        return prod(self.lengths[axis] for axis in axes)

    def _again(self, tiles: Tiles) -> dict[Axis, int]:
        """For each loop axis, how often a value without it is read again: by each block, or each thread,
        along it."""
        profile = self.profile
        alone = tiles.tiling == "element" or profile.schedule == "rowwise"
        again = {axis: self.lengths[axis] for axis in profile.grid_axes}
        if profile.tile_axis:
            again[profile.tile_axis] = self.own if alone else ceil_div(self.own, tiles.block_own)
        if profile.feature_axis:
            share = 1 if alone else tiles.block_feature
            again[profile.feature_axis] = ceil_div(self.features, share)
        return again

    def reads(self, tiles: Tiles) -> dict[Access, int]:
        """Bytes that are asked for, of each tensor."""
        profile, again = self.profile, self._again(tiles)

        def visits(access: Access) -> int:
            others = (times for axis, times in again.items() if axis not in access.axes)
            return self.positions(access.axes) * access.bytes * prod(others)

        found: dict[Access, int] = {}
        for step, part in zip(profile.passes, self.live, strict=False):
            for access in step.reads:
                factor = part if profile.walk_axis in access.axes else 1.0
                if access.own_operand and tiles.block_inner < max(step.own_tiles):
                    factor = ceil_div(self.walked, tiles.block_walk) * part
                found[access] = found.get(access, 0) + int(visits(access) * factor)
        for access in profile.reads:
            found[access] = found.get(access, 0) + visits(access)
        return found

    def cost(self, tiles: Tiles, most_blocks: int | None = None) -> Cost:
        """All figures for ``tiles``, of which a multiprocessor holds at most ``most_blocks`` blocks."""
        profile, arch, resident = self.profile, self.arch, self.resident(tiles, most_blocks)
        costs, again = self._tiles(tiles, resident), self._again(tiles)
        flops = exp_ops = 0

        def special(slots: Slots) -> int:
            others = prod(times for axis, times in again.items() if axis not in slots.axes)
            return slots.special * self.positions(slots.axes) * others

        for step, part in zip(profile.passes, self.live, strict=False):
            inner = self.features if profile.schedule == "product" else sum(step.terms) + sum(step.weighted)
            flops += int(2 * self.groups * self.own * self.walked * inner * part)
            exp_ops += int(sum(map(special, step.slots)) * part)
        exp_ops += sum(map(special, profile.slots))

        reads = self.reads(tiles)
        writes = [*profile.writes, *(access for step in profile.passes for access in step.writes)]
        write_bytes = sum(self.positions(access.axes) * access.bytes for access in writes)
        memory_bytes, least = write_bytes, dict[str, int]()
        for access, asked in reads.items():
            once = self.positions(access.axes) * access.bytes
            least[access.name] = max(least.get(access.name, 0), once)
            waves = 1
            if once > arch.l2_bytes // 2:
                waves = ceil_div(asked, once * arch.multiprocessors * resident)
            memory_bytes += min(asked, once * waves)

        beyond = sum(reads.values()) + write_bytes
        if tiles.tiling == "element" or profile.schedule == "rowwise":
            beyond = memory_bytes
        times: dict[Bound, float] = {
            "arithmetic": self._busy_seconds(tiles, costs),
            "L2": beyond / arch.l2_bytes_per_second,
            "device memory": memory_bytes / arch.memory_bytes_per_second,
        }
        bound = max(times, key=lambda name: times[name])
        slowest = times[bound]
        if tiles.roles is not None:
            slowest += WARPGROUP_BESIDE * (sum(times.values()) - slowest)
        steps = ceil_div(self.walked, tiles.block_walk)
        shared_cycles = sum(part * cost.shared_cycles for part, cost in zip(self.live, costs, strict=True))
        return Cost(
            flops=flops,
            exp_ops=exp_ops,
            asked_read_bytes=sum(reads.values()),
            least_read_bytes=sum(least.values()),
            write_bytes=write_bytes,
            memory_bytes=memory_bytes,
            shared_traffic_bytes=int(
                self.blocks(tiles) * steps * shared_cycles * arch.shared_bytes_per_cycle
            ),
            blocks=self.blocks(tiles),
            shared_bytes=self.needs(tiles)[0],
            registers=self.needs(tiles)[1],
            resident_blocks=resident,
            tiles=costs,
            walk_tiles=tuple(steps * part for part in self.live),
            seconds=LAUNCH_SECONDS + slowest,
            bound=_within_tile(costs[-1]) if bound == "arithmetic" else bound,
        )


def _part(depth: int) -> int:
    """Terms of a product that are summed alone first."""
    return 16 if depth > 64 else 8 if depth > 16 else 4


def _wavefronts(tiles: Tiles, own: float, walk: float) -> float:
    """Cycles of shared memory for a warp to read ``own`` vectors of its rows and ``walk`` vectors of its
    columns.

    A cycle serves 128 bytes, eight vectors; threads that want the same vector share it.
    """
    columns = min(tiles.columns, 32)
    return own * max(1.0, 32 / columns / 8) + walk * max(1.0, columns / 8)


def _within_tile(tile: TileCost) -> Bound:
    """What the cycles of a tile are spent on."""
    busy: dict[Bound, float] = {
        "arithmetic": tile.fma_cycles,
        "instructions": tile.issue_cycles,
        "exp unit": tile.exp_cycles,
        "shared memory": tile.shared_cycles,
    }
    longest = max(busy, key=lambda name: busy[name])
    return longest if tile.cycles <= busy[longest] + UNHIDDEN * sum(busy.values()) else "latency"


# ------------------------------------------------------------------------------------------------ whole plans


def tiles_of(kernel: KernelPlan) -> Tiles:
    """The tile sizes of a kernel."""
    return Tiles(
        kernel.tiling,
        kernel.block_own,
        kernel.block_walk,
        kernel.block_inner,
        kernel.block_feature,
        kernel.rows,
        kernel.columns,
        kernel.roles,
    )


def live_parts(kernel: KernelPlan, lengths: Lengths) -> tuple[float, ...]:
    """The part of its tiles that each walk of a kernel visits; 1 where that depends on tables or scalars.

    Beyond `MOST_TILES` tiles along an axis the count is made with larger ones.
    """
    return tuple(_live_part(bounds, kernel, lengths) for bounds in kernel.ranges or (None,))


def _live_part(bounds: RangePlan | None, kernel: KernelPlan, lengths: Lengths) -> float:
    if bounds is None or any(isinstance(node, Input | Scalar) for node in ir.walk([bounds.guard])):
        return 1.0
    from fagen.derive.live import live_tiles  # numpy: only where tiles are counted

    sizes = {bounds.own_axis: 1, **lengths}
    own, walked = (
        round_up(max(block, ceil_div(sizes[axis], MOST_TILES)), block)
        for axis, block in ((bounds.own_axis, kernel.block_own), (bounds.walk_axis, kernel.block_walk))
    )
    fixed = dict.fromkeys((*kernel.grid_axes, *kernel.stage.outer), 0)
    rows = live_tiles(bounds.guard, bounds.own_axis, bounds.walk_axis, sizes, own, walked, fixed=fixed)
    every = len(rows) * ceil_div(sizes[bounds.walk_axis], walked)
    return sum(map(len, rows)) / every if every else 1.0


def cost_of(
    kernel: KernelPlan, problem: Problem, lengths: Lengths, arch: Arch, live: tuple[float, ...] | None = None
) -> Cost:
    """`Model.cost` of a kernel of a plan."""
    counts = profile(kernel.stage, kernel.schedule, kernel.tile_axis, problem)
    return Model(counts, lengths, arch, live).cost(tiles_of(kernel), kernel.resident)


def buffer_lives(stages: Sequence[Stage], graph: Graph) -> dict[Input, tuple[int, int]]:
    """What stages of ``graph`` leave to later ones, in the order it is written.

    For each the number of the stage that writes it and of the last one that reads it.
    """
    lives: dict[Input, tuple[int, int]] = {}
    written: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for output in (*stage.outputs, *(store for walk in stage.walks for store in walk.stores)):
            written.setdefault(output.name, number)
    for number, stage in enumerate(stages):
        for node in ir.walk(stage_roots(stage)):
            if isinstance(node, Input) and node.position >= len(graph.arguments):
                lives[node] = written[node.name], number
    return dict(sorted(lives.items(), key=lambda item: item[0].position))


def peak_buffer_bytes(plan: Plan, lengths: Lengths) -> int:
    """The memory that buffers take, those that reuse another's counted once."""
    return sum(
        prod(buffer.shape(lengths)) * STORAGE_BYTES[buffer.storage]
        for buffer in plan.buffers
        if buffer.reuses is None
    )


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
        roots += [output.node for output in walk.stores]
    return roots
