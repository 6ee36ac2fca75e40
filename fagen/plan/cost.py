"""What a kernel costs, as formulas: operations and bytes at each level of the memory hierarchy, and how long
they take.

Two kinds of bytes are kept apart. *Asked* bytes are what all blocks (threads, where nothing is shared) load
and store beyond their multiprocessor, each re-reading counted. *Least* bytes are each tensor once. Device
memory sees something between: blocks that run at the same time share what they read through the L2 cache.

A `Profile` keeps counts by the axes they depend on; `Model` puts lengths and tile sizes in. Ranking hundreds
of candidates thus takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from fagen.derive.intervals import RangePlan
from fagen.derive.walk import Stage
from fagen.ir import graph as ir
from fagen.ir.graph import Axis, Graph, Input, Scalar
from fagen.plan import warpgroups
from fagen.plan.arch import Arch
from fagen.plan.plan import (
    GROUP_AXIS,
    STORAGE_BYTES,
    WARPGROUP,
    KernelPlan,
    Plan,
    Problem,
    Roles,
    Tiling,
)
from fagen.plan.profile import LOOPS, Access, Lengths, Pass, Profile, Slots, profile, stage_roots
from fagen.plan.space import (
    CHUNK,
    FRAGMENT,
    VECTOR,
    Tiles,
    ceil_div,
    feature_width,
    groups,
    part_shape,
    registers,
    resident_blocks,
    round_up,
    shared_bytes,
)

Bound: TypeAlias = Literal[
    "arithmetic", "instructions", "exp unit", "shared memory", "L2", "device memory", "latency"
]
MOST_TILES = 256
LAUNCH_SECONDS = 3e-6
LATENCY_CYCLES = 900
"""From asking device memory for a tile to the barrier after it."""
REDUCE_CYCLES = 60
"""A reduction over the threads of a row."""
UNHIDDEN = 0.25
"""The part of a unit's cycles in a tile that the busiest unit does not hide."""
WARPGROUP_UNHIDDEN, WARPGROUP_WAIT_CYCLES = 0.6, 100
WARPGROUP_BESIDE = 0.1
"""The part of other limits that the tightest one does not hide."""
WARPGROUP_LEVELS = {128: 0.81, 256: 1.2}
"""How many times as long products take that are made level by level, where all of their sums stay in
registers, by the most columns of a sum: nothing runs beside wide ones (measured for head dims of 64 and 128,
and of 160 and 256)."""
WARPGROUP_PART_CYCLES = 640
"""From when a tile is handed over until its product with a panel of rows is stored: adders make one after
another."""
WARPGROUP_TURN_CYCLES = 1350
"""The same where blocks add in turns, and from when the last one is stored until it is in memory and the next
block adds (measured for head dims of 64, 128 and 256)."""
WARPGROUP_UNEVEN = 1.14
"""How many times as long that takes, beside kernels of their own, where walks begin at different tiles: works
of most tiles come last (measured for causal gradients of a head dim of 128: 1.01 to 1.14)."""
WARPGROUP_IN_SECTORS = 2.7
"""How many times as long a byte takes that is copied in bulk from rows that begin within sectors."""
WARPGROUP_TILE_CYCLES = 300
"""From tile to tile: products begin and end, and what they wait for is passed on."""
WARPGROUP_SLOTS = 90
"""Instructions of a consumer's thread for a tile beside its elements."""
WORK_CYCLES = {1: 3500, 2: 2000}
"""To begin and end a work, by the number of buffers of its rows: with two the next ones are on their way."""
WARPGROUP_RESCALED = 0.1
"""The part of the tiles that rescale what was summed: a maximum may lag behind."""
WARPGROUP_PACE = 0.82
"""The time that the parts of a work take together, as a part of what they take one by one; not where products
are made level by level."""
SCHEDULERS = 4
"""Of a multiprocessor; each hides what a warp waits for if it has another."""
ADDED_SLOTS = 2
"""How many instructions take as long as adding an element of a partial sum to memory."""
ADDED_TIMES = 2
"""A byte that is added to in the L2 cache is read there and written; in a bulk reduction it takes no longer
than to be written."""
PART = 8
"""Terms of a product that are summed alone first, of more than 16, in templates/arch/simt.j2."""
COPY_SLOTS = 4
"""Instructions to bring an element into a tile: its share of a load, a store, the indices, a conversion."""
ADDRESS_SLOTS = 8
"""Instructions to read two values of which each thread finds its own."""
_EXPOSED: Mapping[Tiling, float] = {"element": 0.0, "shared": 1.25, "registers": 3.0}
"""How many times a tile of a product waits for memory: a barrier on each side, and nothing to do
meanwhile."""


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


@dataclass
class _Work:
    """What the threads of a block do for a tile, beside what is made of its elements one by one."""

    fma: float = 0.0
    issue: float = 0.0
    """All other instructions."""
    vectors: float = 0.0
    """What each thread reads of shared memory."""
    shared: float = 0.0
    """Cycles of shared memory."""
    waits: float = float(LATENCY_CYCLES)
    """Cycles that nothing hides within a block."""


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
        if profile.parts:
            self.walked = ceil_div(self.walked, lengths[profile.parts])
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
        rows = {profile.tile_axis, *([GROUP_AXIS] if profile.group > 1 else [])}
        loops = {*profile.grid_axes, *rows, profile.walk_axis, profile.feature_axis}
        inner = axes - loops - {*profile.outer}
        length = prod(self.lengths[axis] for axis in inner)
        flags = not rows.isdisjoint(axes), profile.feature_axis in axes, bool(inner)
        return slots.issue, slots.special, *flags, length

    # ------------------------------------------------------------------------------------------------ time

    def blocks(self, tiles: Tiles) -> int:
        """Blocks of the launch."""
        wide = ceil_div(self.features, tiles.block_feature) if self.profile.feature_axis else 1
        return self.groups * self._tall(tiles) * wide

    def _tall(self, tiles: Tiles) -> int:
        """Tiles of all rows at one position of the grid's axes."""
        return ceil_div(self.own, tiles.block_own // self.profile.group)

    def tile(self, number: int, tiles: Tiles, resident: int) -> TileCost:
        """The cost of a tile of walk ``number``."""
        if tiles.tiling == "fragments" and self.profile.passes:
            return self._fragments(number, tiles, resident)
        if tiles.roles is not None and self.profile.passes:
            return self._warpgroups(number, tiles, tiles.roles)
        return self._threads(number, tiles, resident)

    def _threads(self, number: int, tiles: Tiles, resident: int) -> TileCost:
        """The cost of a tile of which each thread makes its own elements on the ordinary units."""
        profile, arch = self.profile, self.arch
        if profile.schedule in LOOPS and profile.passes:
            work = self._in_loop(profile.passes[number], tiles)
        elif profile.schedule == "product":
            work = self._in_product(tiles)
        else:
            scalars = profile.passes[number].scalars if profile.passes else 0
            work = _Work(issue=scalars * tiles.rows * tiles.block_walk)
        pointwise, special = self._pointwise(number, tiles)
        issue = work.issue + pointwise
        issue += work.fma + work.vectors * tiles.threads
        busy = (
            work.fma / arch.fp32_fma_per_cycle,
            issue / (SCHEDULERS * arch.warp),
            special / arch.exp_per_cycle,
            work.shared,
        )
        warps = ceil_div(tiles.threads, arch.warp)
        unhidden = UNHIDDEN * max(1.0, 2 * SCHEDULERS / (warps * resident))
        together = max(busy) + unhidden * (sum(busy) - max(busy))
        return TileCost(*busy, together + work.waits / resident)

    def _in_loop(self, step: Pass, tiles: Tiles) -> _Work:
        """What threads do for the products and sums of a tile: rows and columns are read as vectors."""
        own, walk = ceil_div(tiles.block_own, tiles.rows), ceil_div(tiles.block_walk, tiles.columns)
        warps, area = ceil_div(tiles.threads, self.arch.warp), tiles.block_own * tiles.block_walk
        work = _Work()
        for inner in step.terms:
            depth = round_up(inner, VECTOR)
            work.fma += area * depth * (1 + 1 / PART)
            work.vectors += depth / VECTOR * (own + walk)
            work.shared += warps * depth / VECTOR * _wavefronts(tiles, own, walk)
        for features in step.weighted:
            width = feature_width(features, tiles)
            share = width / tiles.columns
            work.fma += area * width * (1 + 1 / tiles.block_walk)
            work.vectors += tiles.block_walk * (own / VECTOR + max(share / VECTOR, 1.0)) + own * walk
            work.shared += warps * tiles.block_walk / VECTOR * _wavefronts(tiles, own, max(share, VECTOR))
            work.shared += warps * own * walk
        for features in step.rescaled:
            work.issue += tiles.block_own * feature_width(features, tiles)
        copied = tiles.block_walk * (sum(step.walk_tiles) + sum(step.operands))
        if step.own_tiles and tiles.block_inner < max(step.own_tiles):
            copied += tiles.block_own * sum(step.own_tiles)
            work.waits += 2 * LATENCY_CYCLES * ceil_div(max(step.own_tiles), tiles.block_inner)
        work.issue += COPY_SLOTS * copied
        shuffles = 2 * min(tiles.columns, self.arch.warp).bit_length() + 6
        work.issue += step.scalars * (area + tiles.threads * own * shuffles)
        work.waits += REDUCE_CYCLES * step.scalars
        return work

    def _in_product(self, tiles: Tiles) -> _Work:
        """What threads do for a tile of one product of stored values."""
        share = ceil_div(tiles.block_feature, tiles.columns)
        warps = ceil_div(tiles.threads, self.arch.warp)
        work = _Work(fma=tiles.block_own * tiles.block_walk * tiles.block_feature)
        if tiles.tiling == "registers":
            work.fma *= 1 + 1 / PART
            own = ceil_div(tiles.block_own, tiles.rows)
            parts = max(own / VECTOR, 1.0), max(share / VECTOR, 1.0)
            work.vectors = tiles.block_walk * sum(parts)
            work.shared = warps * tiles.block_walk * _wavefronts(tiles, *parts)
        else:  # one result a thread: its row's value for all lanes, its column's beside its neighbours'
            alone = tiles.tiling == "element"
            lines = self.arch.warp if alone and self.profile.scattered else 1
            work.vectors = tiles.block_walk * (ADDRESS_SLOTS if alone else 2)
            work.shared = warps * tiles.block_walk * (lines + (1 if alone else 1 / VECTOR))
        work.waits *= _EXPOSED[tiles.tiling]
        if tiles.tiling != "element":
            work.issue += COPY_SLOTS * tiles.block_walk * (tiles.block_own + tiles.block_feature)
        return work

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
        warps, shared = ceil_div(tiles.threads, arch.warp), groups(tiles)
        own, walk = tiles.block_own * shared / warps / FRAGMENT, tiles.block_walk / FRAGMENT
        inner = [round_up(length, FRAGMENT) / FRAGMENT for length in step.terms]
        features = [feature_width(length, tiles) / FRAGMENT for length in step.weighted]
        rows = own * sum(max(length - tiles.held / FRAGMENT, 0.0) for length in inner)
        loads = warps * (rows + (sum(inner) + sum(features)) * walk / shared)
        if shared > 1:  # weights are operands in memory, and each warp has a share of its own of the sums
            shapes = (part_shape(tiles.block_own, feature_width(f, tiles), warps) for f in step.weighted)
            loads = warps * sum(inner) * (own + walk / shared)
            loads += sum(warps * walk * sum(shape) / FRAGMENT for shape in shapes)
        blocks = warps * own * walk * (sum(inner) + sum(features)) / shared
        added = 0.0
        for length in step.partials:
            width = feature_width(length, tiles)
            of_warp = part_shape(tiles.block_walk, width, warps)
            loads += warps * tiles.block_own * sum(of_warp) / FRAGMENT**2
            blocks += tiles.block_own * tiles.block_walk * width / FRAGMENT**3
            added += tiles.block_walk * width
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
        issue += area * (len(step.weighted) + step.passed) / 2 + ADDED_SLOTS * added
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
        issue += WARPGROUP_SLOTS * WARPGROUP * roles.consumers
        read = sum(2 * depth * (tiles.block_own + roles.row_groups * tiles.block_walk) for depth in inner)
        read += sum(2 * roles.row_groups * tiles.block_walk * width for width in features)
        if roles.divided:
            read += 2 * area * (2 * step.handed + 4 * step.kept)
        # what is handed over is written and read again for each part, as are the parts
        for width in step.partials:
            read += 2 * area * (1 + ceil_div(width, warpgroups.PART))
            read += 2 * tiles.block_walk * width * (tiles.block_own // warpgroups.PART + 4)
        busy = (
            area * (sum(inner) + sum(features) + sum(step.partials)) / arch.tensor16_fma_per_cycle,
            issue / (SCHEDULERS * arch.warp),
            special / arch.exp_per_cycle,
            read / arch.shared_bytes_per_cycle,
        )
        unhidden = WARPGROUP_UNHIDDEN / roles.consumers
        cycles = max(busy) + unhidden * (sum(busy[:3]) - max(busy)) + WARPGROUP_TILE_CYCLES
        cycles += WARPGROUP_WAIT_CYCLES / (roles.stages - 1)
        if len(step.levels) > 1 and not roles.adders:
            cycles *= next(times for most, times in WARPGROUP_LEVELS.items() if max(features) <= most)
        panels = sum(ceil_div(width, warpgroups.panel_columns(width)) for width in step.partials)
        parts = panels * tiles.block_walk // warpgroups.PART
        added: float = WARPGROUP_PART_CYCLES * parts
        if roles.in_turns:
            added = WARPGROUP_TURN_CYCLES * (parts + 1) * (WARPGROUP_UNEVEN if self.profile.uneven else 1)
        return TileCost(*busy, max(self._pace() * cycles, added))

    def _pace(self) -> float:
        """Of what the parts of a work take, the share that warps with roles do not hide."""
        return 1.0 if any(step.levels for step in self.profile.passes) else WARPGROUP_PACE

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

    def planned_blocks(self, tiles: Tiles) -> int:
        """Blocks that a multiprocessor is planned to hold: the compiler may use the registers that leaves to
        each."""
        bytes_, count = self.needs(tiles)
        more = count * 11 // 10  # an estimate may be a little low
        return max(resident_blocks(self.arch, tiles.threads, more, bytes_), 1)

    def busy_seconds(self, tiles: Tiles) -> float:
        """Time of the multiprocessors, whatever memory does."""
        return self._busy_seconds(tiles, self._tiles(tiles, self.resident(tiles)))

    def _tiles(self, tiles: Tiles, resident: int) -> tuple[TileCost, ...]:
        return tuple(self.tile(number, tiles, resident) for number in range(len(self.live)))

    def _busy_seconds(self, tiles: Tiles, costs: tuple[TileCost, ...]) -> float:
        steps = ceil_div(self.walked, tiles.block_walk)
        cycles = sum(steps * part * cost.cycles for part, cost in zip(self.live, costs, strict=True))
        if tiles.roles is not None:
            cycles += self._pace() * WORK_CYCLES[tiles.roles.own_stages]
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
            again[profile.tile_axis] = self.own if alone else self._tall(tiles)
        if profile.feature_axis:
            share = 1 if alone else tiles.block_feature
            again[profile.feature_axis] = ceil_div(self.features, share)
        return again

    def _times(self, axes: Iterable[Axis], again: Mapping[Axis, int]) -> int:
        """How often a value with ``axes`` is met again; along a walk in parts, in one of them."""
        known: set[Axis | None] = {*axes}
        if self.profile.walk_axis in known:
            known.add(self.profile.parts)
        return prod(times for axis, times in again.items() if axis not in known)

    def reads(self, tiles: Tiles) -> dict[Access, int]:
        """Bytes that are asked for, of each tensor."""
        profile, again = self.profile, self._again(tiles)

        def visits(access: Access) -> int:
            return self.positions(access.axes) * access.bytes * self._times(access.axes, again)

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

    def added(self, tiles: Tiles) -> int:
        """Bytes that are added to in memory, beyond what is written once."""
        rows = self.groups * self._tall(tiles) * self.walked
        sums = ((step.partials, part) for step, part in zip(self.profile.passes, self.live, strict=False))
        return int(sum(4 * rows * sum(features) * part for features, part in sums))

    def _operations(self, tiles: Tiles) -> tuple[int, int]:
        """Operations of products, and of the exp unit."""
        profile, again = self.profile, self._again(tiles)
        flops = exp_ops = 0

        def special(slots: Slots) -> int:
            return slots.special * self.positions(slots.axes) * self._times(slots.axes, again)

        for step, part in zip(profile.passes, self.live, strict=False):
            inner = sum((*step.terms, *step.weighted, *step.partials))
            if profile.schedule == "product":
                inner = self.features
            flops += int(2 * self.groups * profile.group * self.own * self.walked * inner * part)
            exp_ops += int(sum(map(special, step.slots)) * part)
        return flops, exp_ops + sum(map(special, profile.slots))

    def cost(self, tiles: Tiles, most_blocks: int | None = None) -> Cost:
        """All figures for ``tiles``, of which a multiprocessor holds at most ``most_blocks`` blocks."""
        profile, arch, resident = self.profile, self.arch, self.resident(tiles, most_blocks)
        costs = self._tiles(tiles, resident)
        flops, exp_ops = self._operations(tiles)
        reads, added = self.reads(tiles), self.added(tiles)
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

        beyond: float = sum(reads.values()) + write_bytes + (1 if tiles.roles else ADDED_TIMES) * added
        rows = [length for step in profile.passes for length in (*step.walk_tiles, *step.operands)]
        if tiles.roles is not None and any(map(warpgroups.in_sectors, rows)):
            beyond *= WARPGROUP_IN_SECTORS
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


def near_positions(counts: Profile, tiles: Tiles, arch: Arch) -> int:
    """Positions of the walk whose operands take half of the L2 cache; 0 where device memory gives them as
    fast as blocks of so many rows can use them.

    Each byte of a 16-bit operand serves a multiplication and an addition for half of a block's rows.
    """
    if tiles.tiling != "fragments" or counts.operand is None:
        return 0
    flops_per_second = 2 * arch.mma_fma_per_cycle * arch.multiprocessors * arch.clock_hz
    if tiles.block_own >= flops_per_second / arch.memory_bytes_per_second:
        return 0
    lengths = max(sum((*step.walk_tiles, *step.operands)) for step in counts.passes)
    return arch.l2_bytes // 2 // (lengths * STORAGE_BYTES[counts.operand]) if lengths else 0


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
        kernel.held,
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
        for axis, block in ((bounds.own_axis, kernel.positions), (bounds.walk_axis, kernel.block_walk))
    )
    fixed = dict.fromkeys((*kernel.grid_axes, *kernel.stage.outer), 0)
    rows = live_tiles(bounds.guard, bounds.own_axis, bounds.walk_axis, sizes, own, walked, fixed=fixed)
    every = len(rows) * ceil_div(sizes[bounds.walk_axis], walked)
    return sum(map(len, rows)) / every if every else 1.0


def cost_of(
    kernel: KernelPlan, problem: Problem, lengths: Lengths, arch: Arch, live: tuple[float, ...] | None = None
) -> Cost:
    """`Model.cost` of a kernel of a plan."""
    counts = profile(kernel.stage, kernel.schedule, kernel.tile_axis, problem, kernel.group)
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
        for partial in (partial for walk in stage.walks for partial in walk.partials):
            written.setdefault(partial.name, number)
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
