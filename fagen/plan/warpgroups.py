"""Blocks of warps with roles: one thread has tiles copied by bulk copies, warpgroups multiply them.

What such a block needs in shared memory and registers, which stages it can run, and which shapes are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product as pairs

from fagen.derive.walk import Stage
from fagen.ir.graph import Axis, Input, Node
from fagen.plan.plan import Problem, Roles, Storage

GROUP_ROWS = 64
"""Rows of a warpgroup, the first side of its products."""
MOST_COLUMNS = 256
"""The other side of a product."""
WORKS = 8
"""Announced to consumers and kept until they have stored results: more than buffers can be ahead."""
DEPTH = 16
"""Positions that one step of a product sums over."""

REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160), 4: (32, 112)}
"""Registers of a thread of the producer and of the consumers, by the number of consumers."""

SEEKING_REGISTERS = REGISTERS | {2: (40, 232)}
"""The same where all of the producer's warp looks for tiles."""

MOST_EXPONENT: Mapping[Storage, float] = {"bf16": 40.0, "fp16": 10.0}
"""How far from 0 exponents may lie so that weights of a type and their sums in fp32 stay as precise."""

_COORDINATES = 2
"""Axes of a tensor map beside those of a tile."""
_FIXED_REGISTERS = 30
"""Of a consumer: positions, statistics, addresses."""
_VALUE_REGISTERS = 24
"""More where columns have values: where these lie, and those of the rows that they meet."""
_READ_REGISTERS = 52
"""More where elements read values: several are on their way at once."""


def panel_columns(columns: int) -> int:
    """Columns of a panel of a tile: 64, or 32 where that fills whole panels and 64 does not."""
    return 32 if -(-columns // 32) % 2 and columns > 64 else 64


def padded(columns: int) -> int:
    """Columns of a tile in shared memory."""
    panel = panel_columns(columns)
    return -(-columns // panel) * panel


def shapes() -> Iterator[tuple[Roles, int]]:
    """Every shape that is tried, with the columns of a tile; few columns leave registers where little else
    does."""
    for consumers, stages, own_stages in pairs((2, 3, 4, 1), (2, 3, 4), (2, 1)):
        for columns in (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192):
            if columns >= 64 or consumers <= 2:
                yield Roles(consumers, stages, own_stages), columns


def layout(
    roles: Roles,
    columns: int,
    storage: Storage,
    own: Sequence[int],
    walks: Sequence[tuple[Sequence[int], Sequence[int]]],
    grid_axes: int,
) -> list[tuple[str, Storage, int, int, int, int, int]]:
    """The fields of each `SharedTile`, and its bytes.

    ``own`` has the columns of each own operand, ``walks`` of each walk those of the operands of its products
    and of its sums; a work has a position of each of so many axes of the grid, beside its rows. A tile's
    buffers follow one another; tiles of different walks overlap.
    """
    placed: list[tuple[str, Storage, int, int, int, int, int]] = []

    def add(name: str, rows: int, width: int, address: int) -> int:
        size = 2 * rows * width
        placed.append((name, storage, rows, width, width, address, size))
        return address + size

    address = 0
    for i, length in enumerate(own):
        rows = GROUP_ROWS * roles.consumers * roles.own_stages
        address = add(f"own{i}", rows, padded(length), address)
    base = end = address
    for number, (factors, operands) in enumerate(walks):
        at = f"{number}_" if len(walks) > 1 else ""
        address = base
        for kind, lengths in (("walk", factors), ("operand", operands)):
            for i, length in enumerate(lengths):
                address = add(f"{kind}{at}{i}", columns * roles.stages, padded(length), address)
        end = max(end, address)
    sums = any(operands for _, operands in walks)
    pipes = roles.own_stages * roles.consumers, roles.stages, roles.stages if sums else 0
    for name, words in (
        ("works", WORKS * (1 + grid_axes)),
        ("visits", 2 * roles.stages),
        *(
            (name, 4 * count)
            for name, count in zip(("own_pipe", "walk_pipe", "sum_pipe"), pipes, strict=True)
        ),
    ):
        if words:
            placed.append((name, "int32", 1, words, words, end, 4 * words))
            end += -(-4 * words // 16) * 16
    return placed


def registers(
    columns: int,
    products: int,
    weights: int,
    features: Sequence[int],
    values: int,
    read: int,
    least: bool = False,
) -> int:
    """Registers of a consumer's thread, estimated: scores, weights, sums, and ``values`` of each column.

    ``read`` counts the values that each element reads for itself. A compiler has those ready early where it
    has the registers; ``least`` is what it takes where it has not.
    """
    held = products * columns // 2 + weights * columns // 4
    if least:
        held += values * columns // 4
    elif values:
        held += values * columns // 4 + _VALUE_REGISTERS + columns // 8
    if read and not least:
        held += _READ_REGISTERS + columns // 8
    return _FIXED_REGISTERS + held + sum(-(-length // 8) * 4 for length in features)


def consumer_registers(roles: Roles) -> int:
    """Registers that a consumer's thread may have."""
    return REGISTERS[roles.consumers][1]


def misfit(stage: Stage, problem: Problem, tile_axis: Axis | None) -> str | None:
    """Why bulk copies and products of warpgroups can't run a stage; None if they can."""
    if tile_axis is None or stage.walk is None:
        return "no axis of it has tiles of rows"
    if stage.outer:
        return f"its walk is made again at each position of {', '.join(map(repr, stage.outer))}"
    for walk in stage.walks:
        for term in (term for product in walk.products for term in product.terms):
            for node, rows in ((term.own, tile_axis), (term.walk, stage.walk)):
                reason = _not_copied(node, rows, term.over, problem)
                if reason:
                    return reason
        for state in walk.states:
            if state.operand is None or not state.features:
                continue
            (axis,) = state.features
            reason = _not_copied(state.operand, stage.walk, axis, problem)
            if reason:
                return reason
            size = dict(problem.sizes)[axis]
            if size > MOST_COLUMNS:
                return f"a product has at most {MOST_COLUMNS} columns, axis {axis!r} has {size}"
    return None


def _not_copied(node: Node, rows: Axis, columns: Axis, problem: Problem) -> str | None:
    """Why bulk copies can't bring tiles of ``node``; None if they can."""
    if not isinstance(node, Input) or node.position >= len(problem.graph.arguments):
        return "an operand of a product is not in memory as it is multiplied"
    if node.layout[-1] != columns or rows not in node.layout or len(node.layout) > 2 + _COORDINATES:
        return (
            f"tiles of {node.name} have no rows of {columns!r} along {rows!r} among {_COORDINATES} more axes"
        )
    if not problem.is_aligned(node):
        return f"the address or a stride of {node.name} is no multiple of 16 bytes"
    return None
