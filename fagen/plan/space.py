"""What a tiling takes of a multiprocessor: shared memory, registers of a thread, and how many blocks fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fagen.plan import warpgroups
from fagen.plan.arch import Arch
from fagen.plan.plan import STORAGE_BYTES, Roles, SharedTile, Storage, Tiling
from fagen.plan.profile import LOOPS, PLAIN_SLOTS, RANDOM_SLOTS, Pass, Profile

PAD = 4
"""Elements added to a row of a tile: its vectors then start on different banks."""
ON_TENSOR_CORES: tuple[Tiling, ...] = ("fragments", "warpgroups")
"""Tilings whose sums of products are the factors of the next products where they are."""
VECTOR = 4
"""fp32 elements of one access."""
CHUNK = 8
"""16-bit elements of one access."""
BARRIER_WORDS = 2
"""Of 32 bits, of a barrier in shared memory."""
FRAGMENT = 16
"""Rows and columns of the block of operands that a warp loads at once."""
LOOP_REGISTERS = 12
"""Registers that a loop with products of tiles takes beside its values."""
BUSY_SLOTS, BUSY_REGISTERS = 30, 40
"""Instructions for an element beyond which computing it holds registers of its own, and how many."""
RANDOM_REGISTERS = 40
"""The state of a random generator that serves several elements of a thread."""
FIXED_REGISTERS = 40
"""Addresses, counters and temporaries of a thread."""
SAVED_REGISTERS = 12
"""How many of these a thread does without where its accumulators leave no more."""


def round_up(x: int, multiple: int) -> int:
    """The least multiple not below ``x``."""
    return -(-x // multiple) * multiple


def ceil_div(x: int, y: int) -> int:
    """``x / y``, rounded up."""
    return -(-x // y)


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
    held: int = 0
    """Of how many columns warps keep the fragments of their rows in registers for the whole walk."""

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.roles.threads if self.roles else self.rows * self.columns

    def __str__(self) -> str:
        sides = [self.block_own, self.block_walk, self.block_inner, self.block_feature]
        size = " x ".join(str(side) for side in sides if side)
        if self.roles:
            buffers = f"{self.roles.own_stages} + {self.roles.stages} buffers"
            adds = f", parts of {self.roles.part} added" if self.roles.adders else ""
            adds += " in turns" if self.roles.in_turns else ""
            share = " of the same rows" if self.roles.divided else ""
            return f"{size}, {self.roles.consumers} consumers{share}, {buffers}{adds}"
        held = f", {self.held} columns of rows in registers" if self.held else ""
        return f"{size}, {self.rows} x {self.columns} threads{held}"


def shared_tiles(profile: Profile, tiles: Tiles) -> tuple[SharedTile, ...]:
    """What a block keeps in shared memory: fp32, with tiles ``fragments`` the operands' own type.

    ``forward_loop``
        ``own0, own1, ...``  [block_own][block_inner]: own operands of products; they stay for the whole walk
        ``walk0, ...``       [block_walk][block_inner]: walk operands of this walk's products
        ``operand0, ...``    [block_walk][features]: operands of weighted states
        ``weights``          [block_own][block_walk]: a state's value, from the threads that made it to those
                             that use it; with tiles ``fragments`` they are the same threads
    ``backward_loop``
        ``own0, ...``        as above, operands of partial sums too
        ``walk0, ...``       [2 block_walk][features]: two buffers of what is read along the walk
        ``weights0, ...``    [block_own][block_walk]: values that other warps sum than have made them
        ``columns``          [2 values][block_walk]: what elements need of their column
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
    if profile.schedule == "backward_loop":
        _twofold(place, profile.passes[0], tiles)
        return place.placed
    if tiles.roles is not None and profile.operand is not None:
        last = profile.passes[-1]
        walks = [(step.walk_tiles, step.apart if step.levels else step.operands) for step in profile.passes]
        return warpgroups.layout(
            tiles.roles,
            tiles.block_walk,
            profile.operand,
            own_tiles,
            walks,
            len(profile.grid_axes),
            len(profile.outer),
            len(last.levels) > 1 or bool(last.apart),
            last.column_words if last.levels else 0,
            last.kept if tiles.roles.divided else last.beside,
            0 if tiles.roles.divided else last.whole,
            profile.places,
            last.handed,
            last.late,
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


def _twofold(place: _Placed, step: Pass, tiles: Tiles) -> None:
    place.add(
        (f"own{i}", tiles.block_own, _inner_width(inner, tiles)) for i, inner in enumerate(step.own_tiles)
    )
    both = 2 * tiles.block_walk
    parts = [(f"walk{i}", both, _inner_width(inner, tiles)) for i, inner in enumerate(step.walk_tiles)]
    passed = step.weights if groups(tiles) > 1 else step.passed
    parts += [(f"weights{i}", tiles.block_own, tiles.block_walk) for i in range(passed)]
    place.add(parts, place.end)
    if step.columns:
        place.add([("columns", 2 * step.columns, tiles.block_walk)], place.end, "fp32")
    place.add([("barriers", 1, round_up((2 + passed) * BARRIER_WORDS, VECTOR))], place.end, "fp32")


def groups(tiles: Tiles) -> int:
    """Warps that share the rows of a tile of fragments, each with a part of its columns."""
    return tiles.columns // 4


def part_shape(rows: int, features: int, warps: int) -> tuple[int, int]:
    """(rows, features) that a warp has of a product of ``rows`` and ``features``, so that warps share it
    evenly and load little.

    Each is a multiple of a fragment; where no even share is, the last warps have none.
    """
    shapes = [
        (rows // down, features // across)
        for down in range(1, warps + 1)
        for across in range(1, warps // down + 1)
        if rows % (down * FRAGMENT) == 0 and features % (across * FRAGMENT) == 0
    ]
    return min(shapes, key=lambda shape: (shape[0] * shape[1], sum(shape), shape))


class _Placed:
    """Tiles laid out one after another."""

    def __init__(self, tiles: Tiles, operand: Storage | None) -> None:
        self.fragments = tiles.tiling == "fragments"
        self.storage: Storage = operand if self.fragments and operand is not None else "fp32"
        self.placed: list[tuple[str, Storage, int, int, int, int, int]] = []
        self.end = 0

    def add(
        self, parts: Iterable[tuple[str, int, int]], address: int = 0, storage: Storage | None = None
    ) -> None:
        """Place (name, rows, width) from ``address`` on; numbers of ``storage`` lie one after another."""
        element = STORAGE_BYTES[storage or self.storage]
        for name, rows, width in parts:
            pitch = width if storage else fragment_pitch(width) if self.fragments else width + PAD
            size = rows * pitch * element
            self.placed.append((name, storage or self.storage, rows, width, pitch, address, size))
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


def registers(profile: Profile, tiles: Tiles, least: bool = False) -> int:
    """Registers of a thread, estimated: accumulators, the fragments they are made of, row values and a fixed
    share.

    ``least`` is without what a warpgroup's values take where they lie ready early, and could lie ready late.
    """
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
        if tiles.roles.divided:
            (step,) = profile.passes
            return max(
                warpgroups.level_registers(tiles.block_walk, (count,), sums, least=True)
                for count, sums in zip(step.levels, step.divided, strict=True)
            )
        return max(
            warpgroups.level_registers(
                tiles.block_walk, step.levels, step.weighted, least or bool(step.partials)
            )
            if step.levels
            else warpgroups.registers(
                tiles.block_walk,
                max(step.products, 1),
                min(len(step.weighted), 1),
                step.weighted,
                step.columns,
                step.elements,
                step.draws,
                least,
            )
            for step in profile.passes
        )
    for step in profile.passes:
        accumulators = own * sum(feature_width(f, tiles) // tiles.columns for f in step.weighted)
        scores = own * walk * max(step.products, 1)
        if tiles.tiling == "fragments":
            held = accumulators + scores + 2 * own + CHUNK - SAVED_REGISTERS + _drawn_registers(step)
            held += own * sum(min(round_up(inner, FRAGMENT), tiles.held) for inner in step.own_tiles) // 8
            parts = [tiles.block_walk * feature_width(f, tiles) // tiles.threads for f in step.partials]
            held += max(max(parts, default=0) - scores, 0)
            if _element_issue(step, profile) > PLAIN_SLOTS:
                held += scores // 2
        else:
            shares = sum(feature_width(f, tiles) // tiles.columns for f in step.weighted)
            held = LOOP_REGISTERS + accumulators + VECTOR + max(scores + VECTOR * own, VECTOR * shares)
            held += _busy_registers(step)
        most = max(most, held + own * (step.scalars + 2))
    return FIXED_REGISTERS + most


def _drawn_registers(step: Pass) -> int:
    return RANDOM_REGISTERS if any(slots.issue >= RANDOM_SLOTS for slots in step.slots) else 0


def _element_issue(step: Pass, profile: Profile) -> int:
    """Instructions for an element of a tile."""
    both = {profile.tile_axis, profile.walk_axis}
    return sum(slots.issue for slots in step.slots if both <= set(slots.axes))


def _busy_registers(step: Pass) -> int:
    return BUSY_REGISTERS if sum(slots.issue for slots in step.slots) > BUSY_SLOTS else 0


def registers_limit(arch: Arch, threads: int) -> int:
    """The most registers a thread may have with so many threads in a block."""
    return min(arch.registers_thread, arch.registers // round_up(threads, arch.warp) // 8 * 8)


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
