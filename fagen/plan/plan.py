"""What planning hands to the emitter and to the launcher: flat frozen records with everything they may
read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, TypeAlias

from fagen.derive.extent import WORD, Extent
from fagen.derive.intervals import RangePlan
from fagen.derive.streaming import Fusion
from fagen.derive.walk import Note, Stage
from fagen.ir.graph import Axis, Graph, Input, Node

GROUP_AXIS: Axis = "g"

Storage: TypeAlias = Literal["fp32", "fp16", "bf16", "int32", "int64", "bool", "uint8", "fp64", "exact"]
"""How the elements of a tensor lie in memory; a bool is one byte, ``exact`` the struct of a header."""

STORAGE_BYTES: Mapping[Storage, int] = {
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
    "uint8": 1,
    "fp64": 8,
    "exact": 65 * 8,
}

Tiling: TypeAlias = Literal["registers", "shared", "element", "fragments", "warpgroups"]
"""How products are tiled: a micro-tile in each thread's registers, tiles in shared memory, one thread an
element; 16-bit fragments that a warp multiplies on tensor cores, or tiles that a warpgroup multiplies."""

Schedule: TypeAlias = Literal["forward_loop", "forward_roles", "backward_loop", "product", "rowwise"]
"""The template that says who does what when: `templates/schedule/NAME.j2`."""


@dataclass(frozen=True)
class Problem:
    """What a program is planned for. Everything here may be in a cache key; lengths and scalars are not."""

    graph: Graph
    arch: str
    """A row of `plan.arch`: the GPU, or ``emulator``."""
    family: str | None
    """``simt``, ``sm80``, ...; None leaves it to the planner."""
    sizes: tuple[tuple[Axis, int], ...]
    """Lengths fixed at compile time: axes summed over inside a tile, and features (head dims)."""
    inputs: tuple[Storage, ...]
    """One for each of the graph's tensor arguments, in order of position."""
    lengths: tuple[tuple[Axis, str], ...] = ()
    """The class of each other axis' length (`plan.tiling.length_classes`): picks a plan, never its
    correctness."""
    fusion: Fusion = "full"
    tiling: Tiling = "registers"
    aligned: tuple[bool, ...] = ()
    """For each tensor argument, whether its address and all its strides but the last, which is 1, are
    multiples of 16 bytes; empty: all are."""
    outputs: tuple[Storage, ...] = ()
    """How each output is stored; empty: fp32 for row statistics, else as the first tensor with features."""
    group: int = 1
    """Query heads of a key head, where a call has so few rows that those of a group may share tiles, which
    are then compiled for so many; else 1, for any number of them."""
    deterministic: bool = False
    """Whether gradients too are summed in a fixed order, so that they are the same bits in every run; results
    of the forward direction always are."""

    @property
    def limits(self) -> dict[Node, Extent]:
        """What `bits` should know of tables: that those stored in 32 bits hold no more."""
        tensors = [argument for argument in self.graph.arguments if isinstance(argument, Input)]
        return {
            tensor: WORD for tensor, storage in zip(tensors, self.inputs, strict=True) if storage == "int32"
        }

    def read_as(self, aligned: tuple[bool, ...]) -> Problem:
        """The problem for tensors of which at most these are ``aligned``; simt looks for itself."""
        if not aligned or self.family == "simt":
            return self
        known = self.aligned or (True,) * len(aligned)
        both = tuple(a and b for a, b in zip(known, aligned, strict=True))
        return self if both == known else replace(self, aligned=both)

    def is_aligned(self, tensor: Input) -> bool:
        """Whether rows of ``tensor`` can be read 16 bytes at a time; what a plan stores itself can't be
        told."""
        if not self.aligned:
            return tensor.position < len(self.graph.arguments)
        tensors = [argument for argument in self.graph.arguments if isinstance(argument, Input)]
        return any(
            aligned and argument.position == tensor.position
            for argument, aligned in zip(tensors, self.aligned, strict=True)
        )


@dataclass(frozen=True)
class Rejected:
    """A candidate that was not taken, and why, with numbers."""

    candidate: str
    reason: str
    built: bool = False
    """Whether a compiler was asked first."""


@dataclass(frozen=True)
class SharedTile:
    """A piece of a block's shared memory: ``rows`` x ``width`` elements from byte ``address``.

    Tiles of different walks, and of the steps of a walk that a barrier separates, may overlap. ``pitch`` is
    from a row to the next; what it has beyond the width keeps threads of a warp on different banks.
    `plan.cost.shared_tiles` lays them out and says what each holds.
    """

    name: str
    storage: Storage
    rows: int
    width: int
    pitch: int
    address: int

    @property
    def bytes(self) -> int:
        """Size of the tile."""
        return self.rows * self.pitch * STORAGE_BYTES[self.storage]


WARPGROUP = 128
"""Threads of a warpgroup, also of the one of which a single thread has tiles copied."""


@dataclass(frozen=True)
class Roles:
    """The warps of a block with roles: a warpgroup that has tiles copied, and those that multiply."""

    consumers: int
    """Warpgroups that multiply."""
    stages: int
    """Buffers, used in turn, of each tile of the walk."""
    own_stages: int
    """Buffers of each tile of rows."""
    adders: int = 0
    """Warpgroups that multiply what consumers hand over, and have the resulting parts of sums added to
    memory."""
    handed: int = 0
    """Buffers, used in turn, of what is handed over."""
    part: int = 0
    """Features of a part of a sum that is added to memory at once."""
    divided: bool = False
    """Whether consumers have the same 64 rows, and each makes what one level of their tiles needs; else each
    has 64 rows of its own."""
    in_turns: bool = False
    """Whether blocks add to a tile of a sum one after another, in the order of their works: it is then the
    same bits in every run."""

    @property
    def row_groups(self) -> int:
        """How many times 64 rows a block has."""
        return 1 if self.divided else self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARPGROUP * (self.consumers + 1 + self.adders)


@dataclass(frozen=True)
class KernelPlan:
    """One kernel: a stage, the schedule that runs it, and its tiles.

    A block owns ``block_own`` positions of ``tile_axis`` (None: a single row) at one position of each of
    ``grid_axes``, and walks ``block_walk`` positions of the walk axis at a time (of a stage that only maps
    elements: of its last own axis, which is then neither a grid axis nor the tile axis). ``rows`` x
    ``columns`` threads share a tile:

    ``forward_loop``  each owns ``block_own / rows`` rows and ``block_walk / columns`` columns of a tile of
                      scores;
                      ``block_inner`` positions of a contraction over an inner axis (head dim) are in shared
                      memory at a time
    ``forward_roles`` the same, of the threads of its consumers; a warpgroup more has the tiles copied
    ``backward_loop`` as ``forward_loop``; tiles of the walk serve products and sums, and what several warps
                      make of a row, or of a column, passes through shared memory
    ``product``       each owns ``block_own / rows`` rows and ``block_feature / columns`` features of the
                      result
    ``rowwise``       ``columns`` threads share each of ``rows`` rows, ``block_walk / columns`` elements of it
                      at a time
    """

    function: str
    stage: Stage
    family: str
    """Whose macros write it, `templates/arch/FAMILY.j2`: of a plan of sm80, stages without products are
    simt."""
    schedule: Schedule
    tiling: Tiling
    grid_axes: tuple[Axis, ...]
    tile_axis: Axis | None
    block_own: int
    block_walk: int
    block_inner: int
    block_feature: int
    rows: int
    columns: int
    resident: int
    """Blocks that a multiprocessor is to hold at once, which limits their registers."""
    shared: tuple[SharedTile, ...]
    ranges: tuple[RangePlan | None, ...]
    """For each walk, what bounds its loop; None where it visits every tile."""
    roles: Roles | None = None
    registers: tuple[int, int] | None = None
    """Of a thread of the producer and of a consumer, where warps have roles."""
    held: int = 0
    """Of how many columns warps keep the fragments of their rows in registers for the whole walk."""
    spare: int = 0
    """Registers that a thread is estimated to have beyond those that it needs; negative: a compiler may
    still manage with what there is."""
    near: int = 0
    """Positions of the walk whose operands the L2 cache is to hold, where blocks read them faster than device
    memory gives them: blocks that read the same follow each other. 0 where that does not matter."""
    clears: tuple[str, ...] = ()
    """Buffers that later kernels add to, of which it sets its own rows to 0."""
    group: int = 1
    """Query heads of a key head that share the rows of a tile: row r is position ``r / group`` of
    ``tile_axis`` at position ``r % group`` of the group axis, which is then no axis of the grid."""

    @property
    def positions(self) -> int:
        """Positions of ``tile_axis`` that a block owns."""
        return self.block_own // self.group

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.roles.threads if self.roles else self.rows * self.columns

    @property
    def feature_axis(self) -> Axis | None:
        """The axis of ``block_feature``: of a product that is a stage of its own, its other result axis."""
        if self.schedule != "product":
            return None
        return self.stage.walks[0].states[0].features[0]

    @property
    def grid(self) -> Mapping[Axis, int]:
        """How many positions of each axis a block has; the launch has a block for each tile of all of
        them."""
        blocks = dict.fromkeys(self.grid_axes, 1)
        if self.tile_axis is not None:
            blocks[self.tile_axis] = self.positions
        if self.feature_axis is not None:
            blocks[self.feature_axis] = self.block_feature
        return blocks

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return max((tile.address + tile.bytes for tile in self.shared), default=0)


@dataclass(frozen=True)
class Prepared:
    """One value for each tile, computed before the kernels whose loops read it: see `plan.prepare`.

    ``min max any all`` of ``node`` over a tile of one axis, or the ``map`` of a guard over a pair of tiles: 0
    if it holds nowhere, 2 if everywhere, else 1. ``tiles`` are the axes of the tile and how many positions of
    each it has; along the other axes of ``node`` there is a value for each position. It lies in the buffer
    ``name``.
    """

    name: str
    op: Literal["min", "max", "any", "all", "map"]
    node: Node
    tiles: tuple[tuple[Axis, int], ...]
    storage: Storage

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Axes of its buffer: those of the tile come last."""
        tiled = [axis for axis, _ in self.tiles]
        return (*(axis for axis in self.node.axes if axis not in tiled), *tiled)

    @property
    def buffer(self) -> Buffer:
        """Where it is kept."""
        blocks = dict(self.tiles)
        return Buffer(
            self.name, self.axes, self.storage, None, tuple(blocks.get(axis, 1) for axis in self.axes)
        )


@dataclass(frozen=True)
class Buffer:
    """Memory between two kernels: ``t0`` or ``D``, contiguous, of ``axes`` (of a tensor's gradient: as the
    tensor has them).

    An element stands for ``tiles`` positions of each axis (empty: for one); of a buffer that is ``whole`` it
    is a piece, with a number for each of them. ``reuses`` is the place of an earlier buffer of the same size
    that no kernel reads any more when this one is written: both may be the same memory.
    """

    name: str
    axes: tuple[Axis, ...]
    storage: Storage
    reuses: int | None = None
    tiles: tuple[int, ...] = ()
    zeroed: bool = False
    """Whether it is 0 before the first kernel, which add to it."""
    whole: bool = False

    def shape(self, lengths: Mapping[Axis, int]) -> tuple[int, ...]:
        """How many elements it has along each axis, and at last the numbers of one that is ``whole``."""
        tiles = self.tiles or (1,) * len(self.axes)
        known = {**lengths, "h": lengths.get("hk", 1) * lengths.get("g", 1)}
        pieces = tuple(-(-known[axis] // tile) for axis, tile in zip(self.axes, tiles, strict=True))
        return (*pieces, prod(tiles)) if self.whole else pieces


def turns_of(name: str) -> str:
    """The buffer that says how many blocks have added to each tile of another, in turns."""
    return f"{name}_turns"


@dataclass(frozen=True)
class Plan:
    """All kernels of one direction of a program, in launch order."""

    problem: Problem
    family: str
    kernels: tuple[KernelPlan, ...]
    buffers: tuple[Buffer, ...]
    prepared: tuple[Prepared, ...]
    """Computed before the first kernel; each has its buffer among ``buffers``."""
    outputs: tuple[Storage, ...]
    """One for each of the graph's outputs: fp32 for row statistics, else that of the first tensor with
    features."""
    notes: tuple[Note, ...]
    rejected: tuple[Rejected, ...]

    @property
    def sizes(self) -> tuple[tuple[Axis, int], ...]:
        """Lengths that its text is made for: those of the problem, and of the group where tiles share it."""
        groups = {kernel.group for kernel in self.kernels} - {1}
        return (*self.problem.sizes, *((GROUP_AXIS, group) for group in groups))
