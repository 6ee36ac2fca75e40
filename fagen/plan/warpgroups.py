"""Blocks of warps with roles: one thread has tiles copied by bulk copies, warpgroups multiply them.

What such a block needs in shared memory and registers, which stages it can run, and which shapes are tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product as pairs

from fagen.derive.levels import Level, by_products
from fagen.derive.terms import term_of
from fagen.derive.walk import Product, Stage
from fagen.ir import graph as ir
from fagen.ir.graph import ZERO, Axis, Input, Map, Node, Symbol
from fagen.plan.plan import STORAGE_BYTES, Problem, Roles, Storage

GROUP_ROWS = 64
"""Rows of a warpgroup, the first side of its products."""
MOST_COLUMNS = 256
"""The other side of a product."""
WORKS = 8
"""Announced to consumers and kept until they have stored results: more than buffers can be ahead."""

REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160), 4: (32, 112)}
"""Registers of a thread of the producer and of the consumers, by the number of consumers."""

SEEKING_REGISTERS = REGISTERS | {2: (40, 232)}
"""The same where a whole warp of the producer looks for tiles, or brings values of columns."""
ADDING_REGISTERS = {2: (32, 208)}
"""The same where one more warpgroup adds parts of sums to memory."""

MOST_EXPONENT: Mapping[Storage, float] = {"bf16": 40.0, "fp16": 10.0}
"""How far from 0 exponents may lie so that weights of a type and their sums in fp32 stay as precise."""

MOST_AT_LAUNCH = 128
"""Columns of sums that registers have room for at the launch of four warpgroups, whatever they have later."""
_COORDINATES = 2
"""Axes of a tensor map beside those of a tile."""
PART = 64
"""Rows and features of the part of a sum that is added to memory at once."""
PARTS = 2
"""Buffers of such parts."""
ADDER_REGISTERS = 64
"""Of a thread of those that multiply what consumers hand over."""
_OUTER_AXES = 2
"""Axes at most, the positions along which are announced with a tile."""
_FIXED_REGISTERS = 30
"""Of a consumer: positions, statistics, addresses."""
_LEVEL_REGISTERS = 44
"""The same of one whose products are made level by level: positions in buffers are kept for two tiles."""
_LEAST_REGISTERS = 28
"""What such a consumer can do with: the first 24 hold no sums, the last two nothing."""
_VALUE_REGISTERS = 24
"""More where columns have values: where these lie, and those of the rows that they meet."""
_READ_REGISTERS = 52
"""More where elements read values: several are on their way at once."""
_DRAWN_REGISTERS = 8
"""More where they have random bits, which are drawn beside the products."""


def levels(stage: Stage) -> tuple[Level, ...]:
    """How products and sums of a tile are made level by level; none where each tile's products come first.

    They are made so where nothing is running, and weighted sums are of tiles that products read as well, or
    the walk is made again at other positions: such a tile is copied once, and the first products of the next
    tile run beside the last sums of this one.
    """
    if len(stage.walks) != 1 or stage.walks[0].stores:
        return ()
    (walk,) = stage.walks
    read = {(term.walk, term.over) for product in walk.products for term in product.terms}
    weighted = [state for state in walk.states if state.operand is not None]
    shared = any((state.operand, axis) in read for state in weighted for axis in state.features)
    if not weighted or not (stage.outer or shared):
        return ()
    return by_products(walk.products, walk.states)


def kept(levels: Sequence[Level], known: Collection[Node] = ()) -> tuple[Product, ...]:
    """Products that a later level reads other than as weights, which stay rounded, or as ``known`` values:
    they wait in shared memory."""
    values: dict[Node, Node] = {}
    earlier: list[Product] = []
    found: list[Product] = []
    for level in levels:
        read = set(ir.walk([ir.substitute(state.value, values) for state in level.states]))
        found += [product for product in earlier if product.symbol in read and product not in found]
        earlier += level.products
        values |= {value: Symbol("known", value.axes, "float") for value in _made(level, known)}
    return tuple(found)


def whole(levels: Sequence[Level]) -> tuple[Node, ...]:
    """What weights of a level are selected from that a later one reads: ``x`` of ``where(test, x, 0)``, as it
    is where dropout keeps no weight. It waits in shared memory, rounded as weights are."""
    values: dict[Node, Node] = {}
    earlier: list[Node] = []
    found: list[Node] = []
    for level in levels:
        read = set(ir.walk([ir.substitute(state.value, values) for state in level.states]))
        found += [value for value in earlier if value in read and value not in found]
        for value in _made(level):
            values[value] = Symbol("known", value.axes, "float")
            if isinstance(value, Map) and value.op == "where" and value.args[2] is ZERO:
                earlier.append(value.args[1])
    return tuple(found)


def _made(level: Level, more: Collection[Node] = ()) -> list[Node]:
    """The weights of a level, and what they are selected from of the values ``more``."""
    weights = [state.value for state in level.states]
    return [*weights, *(value for value in more if any(value in weight.args for weight in weights))]


def handed(levels: Sequence[Level]) -> tuple[Node, ...]:
    """Weights of a level that a later one reads, rounded."""
    found: list[Node] = []
    for number, level in enumerate(levels):
        earlier = [state.value for before in levels[:number] for state in before.states]
        read = set(ir.walk([state.value for state in level.states]))
        found += [value for value in earlier if value in read and value not in found]
    return tuple(found)


def divisible(stage: Stage) -> bool:
    """Whether each level of a stage may be made by other threads than the rest.

    What a level needs of those before it are weights, which are handed to it, and products, which are kept
    for it; each result is made of the sums of one level.
    """
    found = levels(stage)
    if len(found) < 2 or stage.walk is None:
        return False
    if any(not state.features for level in found for state in level.states):
        return False
    if any(term_of(state)[1] is not None for level in found[:-1] for state in level.states):
        return False
    sums = [[state.symbol for state in level.states] for level in found]
    return all(sum(ir.depends(output.node, each) for each in sums) == 1 for output in stage.outputs)


def late_rows(stage: Stage) -> frozenset[tuple[Node, Axis]]:
    """Operands of a block's rows, by columns, that none but products of later levels read: they come last and
    are done with first, so that those of the next work need no second buffer."""
    found = levels(stage)
    first, later = (
        {(term.own, term.over) for level in part for product in level.products for term in product.terms}
        for part in (found[:1], found[1:])
    )
    summed = {(p.operand, axis) for walk in stage.walks for p in walk.partials for axis in p.features}
    return frozenset(later - first - summed)


def panel_columns(columns: int) -> int:
    """Columns of a panel of a tile: 64, or 32 where that fills whole panels and 64 does not.

    Short rows that begin within a sector are copied in few pieces: each reads a sector more.
    """
    if columns < 2 * 64 and in_sectors(columns):
        return 64
    return 32 if -(-columns // 32) % 2 and columns > 64 else 64


def in_sectors(columns: int) -> bool:
    """Whether rows of so many columns may begin within a sector of the cache, of 32 bytes."""
    return bool(columns % 16)


def padded(columns: int) -> int:
    """Columns of a tile in shared memory."""
    panel = panel_columns(columns)
    return -(-columns // panel) * panel


def shapes(parts: Sequence[int] = (), levels: int = 1, divided: bool = False) -> Iterator[tuple[Roles, int]]:
    """Every shape that is tried, with the columns of a tile; few columns leave registers where little else
    does.

    Products of several levels wait for each other: those of whole panels do so least. Of sums with so many
    features ``parts`` are added to memory. Levels may be ``divided`` among as many consumers, each of which
    has fewer sums.
    """
    if parts:
        part = min(panel_columns(features) for features in parts)
        for consumers, stages, own_stages, columns in pairs(
            ADDING_REGISTERS, (2, 3), (2, 1), (PART, 2 * PART)
        ):
            yield Roles(consumers, stages, own_stages, 1, stages, part), columns
        if divided and levels in ADDING_REGISTERS:
            yield Roles(levels, 2, 1, 1, handed=1, part=PART // 2, divided=True), PART
        return
    if divided and levels in ADDING_REGISTERS:
        yield Roles(levels, 2, 1, handed=1, divided=True), PART
    for consumers, stages, own_stages in pairs((2, 3, 4, 1), (2, 3, 4), (2, 1)):
        for columns in (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192):
            whole = levels < 2 or columns < PART or columns % PART == 0
            if whole and (columns >= 64 or consumers <= 2):
                yield Roles(consumers, stages, own_stages), columns


def layout(
    roles: Roles,
    columns: int,
    storage: Storage,
    own: Sequence[int],
    walks: Sequence[tuple[Sequence[int], Sequence[int]]],
    grid_axes: int,
    outer_axes: int = 0,
    level_by_level: bool = False,
    values: int = 0,
    kept: int = 0,
    whole: int = 0,
    places: int = 0,
    handed: int = 0,
    late: Collection[int] = (),
) -> list[tuple[str, Storage, int, int, int, int, int]]:
    """The fields of each `SharedTile`, and its bytes.

    ``own`` has the columns of each own operand, ``walks`` of each walk those of the operands of its products
    and of its sums; a work has a position of each of so many axes of the grid, beside its rows, and a tile
    one of each of the outer axes. A tile's buffers follow one another; tiles of different walks overlap.
    Where products are made ``level_by_level``, those after the first have a pipe of their own, and a warp
    brings ``values`` of so many words for each column; so many of their products are ``kept`` for later ones,
    and so many values that weights are selected from are ``whole``; where later levels are made by other
    consumers so many weights are ``handed`` to them. With a work so many
    ``places`` in sorted tables are announced. Own operands that are ``late`` have one buffer, and a pipe.
    """
    late = () if roles.divided else late
    placed: list[tuple[str, Storage, int, int, int, int, int]] = []

    def add(name: str, rows: int, width: int, address: int, kind: Storage = storage) -> int:
        size = STORAGE_BYTES[kind] * rows * width
        placed.append((name, kind, rows, width, width, address, size))
        return address + size

    address = 0
    for i, length in enumerate(own):
        rows = GROUP_ROWS * roles.row_groups * (1 if i in late else roles.own_stages)
        address = add(f"own{i}", rows, padded(length), address)
    base = end = address
    for number, (factors, operands) in enumerate(walks):
        at = f"{number}_" if len(walks) > 1 else ""
        address = base
        for kind, lengths in (("walk", factors), ("operand", operands)):
            for i, length in enumerate(lengths):
                address = add(f"{kind}{at}{i}", columns * roles.stages, padded(length), address)
        end = max(end, address)
    if roles.adders:
        end = add("handed", GROUP_ROWS * roles.row_groups * roles.handed, columns, end)
        end = add("parts", PART * PARTS, roles.part, end, "fp32")
    buffers = roles.handed if roles.divided else roles.consumers  # of each consumer its own
    if kept:
        end = add("kept", GROUP_ROWS * buffers * kept, columns, end, "fp32")
    if whole:
        end = add("whole", GROUP_ROWS * roles.consumers * whole, columns, end)
    if handed and roles.divided:
        end = add("given", GROUP_ROWS * buffers * handed, columns, end)
    sums = level_by_level or any(operands for _, operands in walks)
    pipes = {
        "own_pipe": roles.own_stages * roles.row_groups,
        "late_pipe": roles.row_groups if late else 0,
        "walk_pipe": roles.stages,
        "sum_pipe": roles.stages if sums else 0,
        "visit_pipe": visit_count(roles, values) if values else 0,
        "weight_pipe": roles.handed if roles.divided and (handed or kept) else 0,
        "hand_pipe": roles.handed if roles.adders else 0,
        "part_pipe": PARTS if roles.adders else 0,
    }
    for name, words in (
        ("values", values * columns * roles.stages),
        ("works", WORKS * (1 + grid_axes + places)),
        ("visits", visit_words(outer_axes) * visit_count(roles, values)),
        ("places", 4 * PARTS if roles.adders else 0),
        ("turns", PARTS if roles.in_turns else 0),
        *((name, 4 * count) for name, count in pipes.items()),
    ):
        if words:
            placed.append((name, "int32", 1, words, words, end, 4 * words))
            end += -(-4 * words // 16) * 16
    return placed


def visit_count(roles: Roles, values: int = 0) -> int:
    """Tiles that are announced at once: adders are as many tiles behind as consumers have buffers of what
    they hand over, and one more where a consumer frees a tile before it has handed it over. Where a warp
    brings ``values`` of columns, a tile is announced before its buffers are free."""
    count = roles.stages + roles.handed + roles.divided
    return 1 << count.bit_length() if values else count


def visit_words(outer_axes: int) -> int:
    """Words in which a tile is announced: where it is, and what to do on it."""
    return 2 if not outer_axes else 4


def registers(
    columns: int,
    products: int,
    weights: int,
    features: Sequence[int],
    values: int,
    read: int,
    drawn: int,
    least: bool = False,
) -> int:
    """Registers of a consumer's thread, estimated: scores, weights, sums, and ``values`` of each column.

    ``read`` counts the values that each element reads for itself, ``drawn`` its random bits. A compiler has
    those ready early where it has the registers; ``least`` is what it takes where it has not.
    """
    held = products * columns // 2 + weights * columns // 4
    if least:
        held += values * columns // 4
    elif values:
        held += values * columns // 4 + _VALUE_REGISTERS + columns // 8
    if read and not least:
        held += _READ_REGISTERS + columns // 6
    if drawn and not least:
        held += drawn * (_DRAWN_REGISTERS + columns // 8)
    return _FIXED_REGISTERS + held + sum(-(-length // 8) * 4 for length in features)


def level_registers(columns: int, levels: Sequence[int], features: Sequence[int], least: bool = False) -> int:
    """The same where products are made level by level, so many of them at each: those of a level, or of the
    next one and what is kept for it, are there at once."""
    held = max(levels) * columns // 2 + columns // 4
    fixed = _LEAST_REGISTERS if least else _LEVEL_REGISTERS
    return fixed + held + sum(-(-length // 8) * 4 for length in features)


def group_registers(roles: Roles, by_warp: bool) -> tuple[int, int]:
    """Registers of a thread of the producer and of a consumer; all of a warp take more than one of it."""
    if roles.adders:
        return ADDING_REGISTERS[roles.consumers]
    return SEEKING_REGISTERS[roles.consumers] if by_warp else REGISTERS[roles.consumers]


def misfit(stage: Stage, problem: Problem, tile_axis: Axis | None) -> str | None:
    """Why bulk copies and products of warpgroups can't run a stage; None if they can."""
    if tile_axis is None or stage.walk is None:
        return "no axis of it has tiles of rows"
    if stage.outer and (len(stage.outer) > _OUTER_AXES or not levels(stage)):
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
    return _not_added(stage, problem)


def _not_added(stage: Stage, problem: Problem) -> str | None:
    """Why parts of sums can't be added to memory by such a stage; None if they can, or there are none."""
    sizes, found = dict(problem.sizes), levels(stage)
    for walk in stage.walks:
        owned = {(term.own, term.over) for product in walk.products for term in product.terms}
        for partial in walk.partials:
            (axis,) = partial.features
            if not found or len(walk.partials) > 1:
                return "products of a tile that are not made level by level add no partial sums"
            if partial.value not in [state.value for state in found[-1].states]:
                return f"the weights of {partial.name} are not those of another sum"
            if (partial.operand, axis) not in owned or sizes[axis] % (PART // 2):
                return f"the features of {partial.name} are no multiple of {PART // 2} of a tile of rows"
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
