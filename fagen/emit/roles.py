"""A stage with products, as `schedule/forward_roles` writes it: one thread copies, warpgroups multiply.

The steps on a tile are those of `forward`. What is added: which tensor a tile is copied from and where in it,
how a maximum may lag behind, and how results leave.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from fagen.derive.invariance import free_references
from fagen.derive.running import old
from fagen.derive.signs import falls
from fagen.derive.unscale import common_factor
from fagen.derive.walk import State, Walk
from fagen.emit.code import PRODUCT
from fagen.emit.forward import LoopBuilder
from fagen.emit.params import Tensor
from fagen.emit.scope import Scope, axis_name, block_name
from fagen.emit.texts import ForwardLoop, ProductText, StateText, TileText, WalkText
from fagen.ir import graph as ir
from fagen.ir.graph import ONE, Axis, Input, Map, Node
from fagen.plan.plan import STORAGE_BYTES, Roles
from fagen.plan.space import CHUNK
from fagen.plan.warpgroups import GROUP_ROWS, REGISTERS, SEEKING_REGISTERS, WORKS, padded, panel_columns

_PLACES = {
    "works": "WORKS_AT",
    "visits": "VISITS_AT",
    "own_pipe": "ROW_PIPE_AT",
    "walk_pipe": "COLUMN_PIPE_AT",
    "sum_pipe": "SUM_PIPE_AT",
}
_QUAD_COLUMNS = 32
"""Columns that four lanes exchange at once."""
_CACHE_BYTES = 16 << 20
"""Of what is read along the walk by the heads that are worked on at once: a part of the L2 cache."""


@dataclass(frozen=True)
class CopyText:
    """A tile in shared memory as bulk copies move it."""

    tile: TileText
    kind: str
    """The name of its type."""
    panels: str
    """Its type."""
    map: str
    """The parameter that says how its tensor lies."""
    others: tuple[str, ...]
    """Positions along the other axes of the tensor, the nearest first."""

    @property
    def name(self) -> str:
        """What it is called."""
        return self.tile.name

    def at(self, row: str) -> str:
        """Where a copy from row ``row`` on lies in the tensor."""
        return ", ".join([row, *self.others, *["0"] * (2 - len(self.others))])


@dataclass(frozen=True)
class ForwardRoles(ForwardLoop):
    """What the template reads of a kernel."""

    own_copies: tuple[CopyText, ...]
    walk_copies: tuple[tuple[CopyText, ...], ...]
    """Of each walk, those of its products."""
    sum_copies: tuple[tuple[CopyText, ...], ...]
    """Of each walk, those of its weighted sums."""
    epilogue: Literal["staged", "quads", "elements"]
    """How results with features leave: through shared memory, or from registers, in vectors or one by one."""
    out: CopyText | None
    """The tile through which they leave."""
    section: str

    @property
    def roles(self) -> Roles:
        """Warps and buffers."""
        assert self.scope.kernel.roles is not None
        return self.scope.kernel.roles

    @property
    def copies(self) -> list[CopyText]:
        """All tiles, each once."""
        return [*self.own_copies, *(c for group in (*self.walk_copies, *self.sum_copies) for c in group)]

    @property
    def kinds(self) -> list[CopyText]:
        """One copy for each type of a tile."""
        found = {copy.kind: copy for copy in (*self.copies, *([self.out] if self.out else []))}
        return list(found.values())

    def copy_of(self, tile: TileText) -> CopyText:
        """How a tile is copied."""
        return next(copy for copy in self.copies if copy.tile is tile)

    def factors(self, product: ProductText) -> list[tuple[CopyText, CopyText]]:
        """The tiles that are multiplied and summed."""
        return [(self.copy_of(own), self.copy_of(other)) for own, other in product.factors]

    @property
    def chained(self) -> bool:
        """Whether the last sums of one work are made with the first products of the next."""
        return len(self.walks) == 1 and bool(self.walks[0].weighted) and bool(self.walks[0].products)

    @property
    def turns(self) -> bool:
        """Whether consumers issue their products in turn."""
        return self.chained and self.roles.consumers > 1 and self.widest <= 128

    @property
    def rescales_first(self) -> bool:
        """Whether sums are rescaled before, not after, what is added to them: the more there are."""
        return self.widest > 128

    @cached_property
    def widest(self) -> int:
        """The most features of a sum."""
        sizes = dict(self.scope.plan.problem.sizes)
        axes = [axis for walk in self.scope.kernel.stage.walks for s in walk.states for axis in s.features]
        return max((sizes[axis] for axis in axes), default=0)

    @property
    def passes_over(self) -> bool:
        """Whether a consumer may have nothing to do on a tile that another one needs."""
        return self.chained and self.roles.consumers > 1 and self.refined(self.walks[0])

    def refined(self, walk: WalkText) -> bool:
        """Whether what is known of a block's tile is asked for the rows of each consumer: a range is."""
        if self.searches(walk):
            return False
        texts = [
            *(s.text for s in (*walk.loop.before, *walk.loop.tile)),
            walk.loop.skip or "",
            walk.loop.full or "",
        ]
        texts += [text for pair in walk.loop.ranges for text in pair]
        cheap = not any(re.search(r"partition_point|\[", text) for text in texts)
        return cheap and self.row_axis is not None and bool(walk.loop.ranges or walk.loop.full)

    def reads_to_test(self, walk: WalkText) -> bool:
        """Whether columns are read for the test of a tile's elements alone."""
        text = "".join(self.text_of(phase, walk, first=False) for phase in walk.phases)
        return walk.apart and walk.mode == "both" and not walk.stores and not self.says("column", text)

    def dead(self, walk: WalkText) -> str:
        """Whether no element of a tile counts, by the bounds of the walk."""
        if not walk.loop.ranges:
            return ""
        start, name = walk.loop.start, self.walk_axis
        tests = [f"{start} >= {name}_end"]
        if walk.loop.ranges[0][0] != "0":
            tests.append(f"{start} + {self.walk} <= {name}_begin")
        return " || ".join(tests)

    def rescale_of(self, walk: WalkText, state: StateText) -> str:
        """The array that holds what a weighted sum is multiplied by."""
        return f"{next(other for other in walk.weighted if other.rescale == state.rescale).name}_rescale"

    def rescale_fields(self, walk: WalkText) -> list[str]:
        """All such arrays of a walk."""
        return list(dict.fromkeys(self.rescale_of(walk, state) for state in self.rescaled(walk)))

    def rescale_test(self, walk: WalkText) -> str:
        """Whether one of them says anything."""
        return " || ".join(f"{name}[{r}] != 1.0f" for name in self.rescale_fields(walk) for r in (0, 1))

    def rescaled(self, walk: WalkText) -> list[StateText]:
        """Weighted sums that are multiplied when a maximum changes."""
        return [state for state in walk.weighted if state.rescale]

    def landed(self, walk: WalkText) -> str:
        """What may be touched when the sums of a tile have been made."""
        return ", ".join([*(s.name for s in walk.weighted), *(f"rounded_{name}" for name in walk.weights)])

    def update_parameters(self, walk: WalkText) -> list[str]:
        """What the functions of a walk's tile may take."""
        arrays = [f"float (&{name})[ROWS]" for name in self.rescale_fields(walk)]
        return [*super().update_parameters(walk), "int row0", *arrays]

    @property
    def all_weighted(self) -> list[StateText]:
        """Weighted sums of all walks."""
        return [state for walk in self.walks for state in walk.weighted]

    @property
    def all_weights(self) -> list[str]:
        """Arrays of weights of all walks, each once."""
        return list(dict.fromkeys(weights for walk in self.walks for weights in walk.weights))

    @property
    def sums(self) -> list[str]:
        """What functions on results may take of them."""
        return [f"float (&{state.name})[ROWS][{state.share}]" for state in self.all_weighted]

    @property
    def result(self) -> str:
        """The sums whose place a result takes."""
        return self.all_weighted[0].name

    @property
    def out_tensor(self) -> Tensor:
        """Where the result with features goes."""
        return self.feature_outputs[0].stores[0].tensor

    @property
    def has_sums(self) -> bool:
        """Whether any walk has weighted sums."""
        return any(self.sum_copies)

    @property
    def walk_tiles(self) -> list[CopyText]:
        """Tiles of the walks."""
        return [copy for group in (*self.walk_copies, *self.sum_copies) for copy in group]

    @property
    def maps(self) -> list[str]:
        """The parameters that say how tensors are copied, each once."""
        return list(dict.fromkeys(c.map for c in (*self.copies, *([self.out] if self.out else []))))

    @property
    def heads(self) -> str:
        """How many works have the same rows."""
        return " * ".join(self.length(axis) for axis in self.grid_axes) or "1"

    def searches(self, walk: WalkText) -> bool:
        """Whether a walk may pass over tiles between those it visits."""
        return bool(walk.loop.skip) or len(walk.loop.ranges) > 1

    def seeks(self, walk: WalkText) -> bool:
        """Whether what is known of each tile decides that: a warp looks at many tiles at once."""
        return bool(walk.loop.skip) and len(walk.loop.ranges) < 2

    @property
    def by_warp(self) -> bool:
        """Whether a warp, not one thread of it, says which tiles there are."""
        return any(map(self.seeks, self.walks))

    def upward(self, walk: WalkText) -> bool:
        """Whether the first tile comes first: where values fall along the walk, maxima change least then."""
        if self.searches(walk):
            return False
        states = self.scope.kernel.stage.walks[self.walks.index(walk)].states
        return any(state.op == "max" and falls(state.value, self.walk_axis) for state in states)

    def first_visited(self, walk: WalkText) -> str:
        """The tile that comes first in a walk that visits all of them."""
        return (
            self.loop_first(walk) if self.upward(walk) else f"maximum({self.behind(walk)} - {self.walk}, 0)"
        )

    def following(self, walk: WalkText) -> str:
        """The tile that comes after this one in a walk that visits all of them; -1 if there is none."""
        start, first = walk.loop.start, self.loop_first(walk)
        if self.upward(walk):
            return f"{start} + {self.walk} < {self.loop_end(walk)} ? {start} + {self.walk} : -1"
        if first == "0":
            return f"maximum({start} - {self.walk}, -1)"
        return f"{start} - {self.walk} >= {first} ? {start} - {self.walk} : -1"

    def behind(self, walk: WalkText) -> str:
        """A multiple of a tile's columns behind the last tile."""
        if len(walk.loop.ranges) > 1:
            return "0x7fffffff"
        return f"({self.loop_end(walk)} + {self.walk} - 1) / {self.walk} * {self.walk}"

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producer and of a consumer."""
        return (SEEKING_REGISTERS if self.by_warp else REGISTERS)[self.roles.consumers]


def forward_roles(scope: Scope) -> ForwardRoles:
    """The steps of ``scope.kernel``."""
    return _Builder(scope).roles()


class _Builder(LoopBuilder):
    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.free = {reference.maximum for reference in free_references(scope.kernel.stage)}

    # ------------------------------------------------------------------------------------------ in registers

    def held(self, state: State) -> str:
        return f"{state.symbol.name}[r]" if state.features else super().held(state)

    def share(self, axis: Axis, width: int) -> tuple[str, int]:
        return super().share(axis, -(-self._size(axis) // 8) * 8)

    def tile(self, side: str, record: str, node: Node, columns: Axis) -> TileText:
        """The tile of a tensor, which is copied as it lies in memory: no element of it is computed."""
        key = (side, node, columns)
        if key in self.tiles:
            return self.tiles[key]
        assert isinstance(node, Input)
        shared, tensor = self.shared[record], self.scope.parameters.tensor(node)
        row_axis = self.row_axis if side == "own" else self.walk_axis
        assert row_axis is not None
        made = TileText(
            name=self._tile_name(tensor.name, shared),
            rows=block_name(row_axis),
            row_axis=row_axis,
            row_name=axis_name(row_axis),
            column_axis=columns,
            length=self.scope.length(columns),
            width=self.scope.length(columns),
            address=self._address(tensor.name, shared.address),
            statements=(),
            value="",
            chunked=False,
            own=side == "own",
            by_rows=False,
            plain="",
            storage=shared.storage,
            vectors=True,
            of_sum=side.startswith("operand"),
        )
        self.tiles[key] = made
        return made

    def maskable(self, walk: Walk, maxima: Sequence[Node]) -> Sequence[Node]:
        """Products before what is made of them: tiles of which all elements count then need no other text."""
        return [*(product.symbol for product in walk.products), *maxima] if maxima else []

    def slack(self, state: State) -> str | None:
        """The factor of a free maximum in the exponents that are measured from it."""
        if state.op != "max" or state.symbol not in self.free:
            return None
        walk = next(walk for walk in self.stage.walks if state in walk.states)
        for other in walk.states:
            for node in ir.walk([other.rescale]) if other.rescale is not None else ():
                factor = _factor_of(node, state.symbol)
                if factor is not None:
                    code = self.scope.lowering(self.thread_leaves())(factor)
                    return "" if factor is ONE else f" * {self.scope.split([]).text(code, PRODUCT)}"
        return None

    def constants(self) -> list[tuple[str, str, str]]:
        kernel, roles = self.kernel, self.kernel.roles
        assert roles is not None
        assert self.row_axis is not None
        own, walk = block_name(self.row_axis), block_name(self.walk_axis)
        at = {tile.name: tile.address for tile in kernel.shared}
        addresses = dict(self.addresses)
        for name, constant in _PLACES.items():
            if name in at:
                addresses[constant] = at[name]
        shares = [f"{name} = {count}" for name, count, _ in self.shares.values()]
        return [
            (
                "int",
                f"CONSUMERS = {roles.consumers}, THREADS = {kernel.threads}",
                "warpgroups that multiply, and one more",
            ),
            (
                "int",
                f"{own} = {kernel.block_own}, {walk} = {kernel.block_walk}",
                "rows of a block, columns of a tile",
            ),
            ("int", f"ROW_STAGES = {roles.own_stages}, STAGES = {roles.stages}", "buffers of each tile"),
            ("int", f"WORKS = {WORKS}, WORDS = {1 + len(kernel.grid_axes)}", "works announced at once"),
            (
                "int",
                ", ".join([f"LANES = 4, ROWS = 2, COLUMNS = {walk} / LANES", *shares]),
                "of a consumer's thread",
            ),
            *([("float", "SLACK = 5.5f", "a free maximum may be exceeded by so much")] if self.free else []),
            (
                "uint32",
                ", ".join(f"{name} = {address}" for name, address in addresses.items()),
                "bytes of shared memory",
            ),
        ]

    # -------------------------------------------------------------------------------------------- the kernel

    def roles(self) -> ForwardRoles:
        loop = self.build()
        kernel = self.kernel
        assert kernel.roles is not None
        own: list[CopyText] = []
        walks: list[tuple[CopyText, ...]] = []
        sums: list[tuple[CopyText, ...]] = []
        for key, tile in self.tiles.items():
            if key[0] == "own":
                own.append(self.copied(key[1], tile, GROUP_ROWS))
        for number in range(len(loop.walks)):
            for side, found in ((f"walk{number}", walks), (f"operand{number}", sums)):
                tiles = [(key, tile) for key, tile in self.tiles.items() if key[0] == side]
                found.append(tuple(self.copied(key[1], tile, kernel.block_walk) for key, tile in tiles))
        out = self.out(loop)
        staged = out is not None and kernel.roles.own_stages == 2 and bool(own)
        if out is not None and own:  # it leaves through the place of the rows it was made from
            sizes = [padded(self._size(tile.column_axis)) for tile in (out.tile, own[0].tile)]
            staged = staged and sizes[0] <= sizes[1]
        epilogue: Literal["staged", "quads", "elements"] = "staged" if staged else "elements"
        if out is not None and not staged and self._size(out.tile.column_axis) % _QUAD_COLUMNS == 0:
            epilogue = "quads"
        return ForwardRoles(
            **_members(loop),
            own_copies=tuple(own),
            walk_copies=tuple(walks),
            sum_copies=tuple(sums),
            epilogue=epilogue,
            out=out if staged else None,
            section=self.section(),
        )

    def copied(self, node: Node, tile: TileText, rows: int) -> CopyText:
        """How a tile is copied."""
        assert isinstance(node, Input)
        return self.copy(self.scope.parameters.tensor(node), tile, rows)

    def copy(self, tensor: Tensor, tile: TileText, rows: int) -> CopyText:
        panel = panel_columns(self._size(tile.column_axis))
        assert tile.row_axis is not None
        others = [a for a in tensor.layout if a not in (tile.row_axis, tile.column_axis)]
        lower = self.scope.lowering({})
        of = ", ".join([tensor.storage, str(GROUP_ROWS) if tile.own else tile.rows, tile.length])
        return CopyText(
            tile=tile,
            kind=f"{tile.name}Tile",
            panels=f"Panels<{of}{f', {panel}' if panel != 64 else ''}>",
            map=self.scope.parameters.map(tensor, tile.row_axis, tile.column_axis, rows, panel),
            others=tuple(lower.position(axis).form for axis in reversed(others)),
        )

    def out(self, loop: ForwardLoop) -> CopyText | None:
        """The tile through which the one result with features may leave; None where it can't."""
        if len(loop.feature_outputs) != 1 or len(loop.feature_outputs[0].stores) != 1:
            return None
        outputs = loop.feature_outputs[0]
        tensor, axis = outputs.stores[0].tensor, outputs.axis
        assert axis is not None
        size = self._size(axis)
        if STORAGE_BYTES[tensor.storage] != 2 or tensor.layout[-1] != axis or size % CHUNK:
            return None
        if self.row_axis not in tensor.layout or len(tensor.layout) > 4:
            return None
        tile = next(iter(self.tiles.values()))
        made = replace(
            tile,
            name=tensor.name,
            column_axis=axis,
            row_axis=self.row_axis,
            length=outputs.length,
            storage=tensor.storage,
            own=True,
        )
        return self.copy(tensor, made, GROUP_ROWS)

    def _size(self, axis: Axis) -> int:
        return dict(self.scope.plan.problem.sizes)[axis]

    def section(self) -> str:
        """How many heads are worked on at once: what a cache serves, one where all rows do the same."""
        masked = any(ranges is not None for ranges in self.kernel.ranges)
        bytes_ = sum(2 * self._size(key[2]) for key in self.tiles if key[0] != "own")
        return self.scope.parameters.section(self.walk_axis, bytes_ if masked else 0, _CACHE_BYTES)


def _members(loop: ForwardLoop) -> dict[str, Any]:
    return {each.name: getattr(loop, each.name) for each in fields(ForwardLoop)}


def _factor_of(node: Node, maximum: ir.Symbol) -> Node | None:
    """What the change of a maximum is multiplied by in the exponential ``node``; None where it is another."""
    if not isinstance(node, Map) or node.op != "exp" or not isinstance(node.args[0], Map):
        return None
    exponent = node.args[0]
    if exponent.op != "add" or len(exponent.args) != 2:
        return None
    for was, now in (exponent.args, exponent.args[::-1]):
        if isinstance(now, Map) and now.op == "neg":
            value, top, factor = common_factor(was, now.args[0])
            if value is old(maximum) and top in (maximum, ir.finite(maximum)):
                return factor
    return None
