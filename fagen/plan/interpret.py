"""Runs walks tile by tile in float64, as kernels will: the test of a derivation before any CUDA exists.

What a kernel leaves out is left out here: a tile outside the ranges of a guard is not computed, a full
tile's guard is not evaluated, a state starts at its identity and is multiplied by what its record says.
Products hold NaN at positions past a length, and memory holds NaN until it is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fagen.derive.live import TileClass, live_tiles
from fagen.derive.running import old
from fagen.derive.walk import PART_AXIS, Derivation, Partial, Product, Stage, State, Walk
from fagen.ir import graph as ir
from fagen.ir.check import bind_sizes, by_name
from fagen.ir.graph import TRUE, ZERO, Axis, Graph, Input, Node, Output, Scatter, Symbol
from fagen.ir.reference import Values, evaluate_nodes
from fagen.plan.plan import Plan

Watch: TypeAlias = Callable[[str, int, int, TileClass], None]
"""Told of each tile that is computed: the stage, the number of the walk, of the tile in it, and its class."""


@dataclass(frozen=True)
class Cut:
    """How a stage is cut: ``block_own`` positions of ``tile_axis`` a block, ``block_walk`` positions a
    step.

    ``tile_axis`` is None where a block owns a single row.
    """

    stage: Stage
    tile_axis: Axis | None
    block_own: int
    block_walk: int


def interpret(
    derivation: Derivation,
    graph: Graph,
    inputs: Values,
    *,
    block_own: int = 16,
    block_walk: int = 16,
    parts: int = 1,
    seed: int = 0,
    watch: Watch | None = None,
) -> tuple[Tensor, ...]:
    """The outputs of ``graph`` by its ``derivation``, each with the axes of its layout, in float64.

    ``inputs`` are the values of the arguments, by name or in order. The last own axis of a stage is cut in
    tiles of ``block_own``, its walk axis in tiles of ``block_walk``; of a walk in parts there are ``parts``.
    """
    cuts = [Cut(stage, _last_own(stage), block_own, block_walk) for stage in derivation.stages]
    return _run(cuts, graph, inputs, parts, seed, watch)


def interpret_plan(
    plan: Plan, inputs: Values, *, parts: int = 1, seed: int = 0, watch: Watch | None = None
) -> tuple[Tensor, ...]:
    """The outputs of a plan's program, its kernels run in turn with their own tiles; see `interpret`."""
    cuts = [
        Cut(kernel.stage, kernel.tile_axis, kernel.positions, max(kernel.block_walk, 1))
        for kernel in plan.kernels
    ]
    return _run(cuts, plan.problem.graph, inputs, parts, seed, watch)


def _last_own(stage: Stage) -> Axis | None:
    """The axis of a stage's rows."""
    return next((axis for axis in reversed(stage.own) if axis != stage.parts), None)


def _run(
    cuts: Iterable[Cut], graph: Graph, inputs: Values, parts: int, seed: int, watch: Watch | None
) -> tuple[Tensor, ...]:
    values = by_name(graph, inputs) if isinstance(inputs, Mapping) else tuple(inputs)
    given: dict[Node, Any] = dict(zip(graph.arguments, values, strict=True))
    sizes = bind_sizes(graph, [tuple(value.shape) if isinstance(value, Tensor) else None for value in values])
    sizes = {PART_AXIS: parts, **sizes}
    memory: dict[str, Tensor] = {}
    for cut in cuts:
        known = dict(given)
        for node in ir.walk(_roots(cut.stage)):
            if isinstance(node, Input) and node.position >= len(graph.arguments):
                known[node] = _joined(memory[node.name], node.layout)
        memory |= _StageRun(cut, sizes, known, seed, watch).run()
    return tuple(_joined(memory[output.name], output.layout) for output in graph.outputs)


def _roots(stage: Stage) -> Iterator[Node]:
    yield from (output.node for output in stage.outputs)
    for walk in stage.walks:
        yield walk.guard
        yield from (output.node for output in walk.stores)
        yield from (side for p in walk.products for term in p.terms for side in (term.own, term.walk))
        for state in walk.states:
            yield from (node for node in (state.value, state.operand, state.rescale) if node is not None)
        yield from (node for partial in walk.partials for node in (partial.value, partial.operand))


def _split(layout: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes of memory laid out so, ``h`` as ``hk, g``."""
    return tuple(part for axis in layout for part in (("hk", "g") if axis == "h" else (axis,)))


def _joined(memory: Tensor, layout: tuple[Axis, ...]) -> Tensor:
    return memory.flatten(layout.index("h"), layout.index("h") + 1) if "h" in layout else memory


class _Updates:
    """What a step of ``walk`` computes, as nodes: products, and for each state the change a tile makes."""

    def __init__(self, walk: Walk, axis: Axis, outer: tuple[Axis, ...]) -> None:
        self.axis = axis
        self.outer = outer
        self.live = Symbol("live", ir.sort_axes((*walk.guard.axes, axis)), "bool")
        self.products = [(_sum(computed),) for computed in walk.products]
        self.states = [self._changes(state) for state in walk.states]
        self.partials = [self._part(partial) for partial in walk.partials]

    def _part(self, partial: Partial) -> tuple[Node, Symbol]:
        """What a tile adds to a partial sum, and where its elements count: they may lie past either end."""
        live = Symbol("live_part", ir.sort_axes({*self.live.axes, partial.over}), "bool")
        part = ir.contract(ir.where(live, partial.value, ZERO), partial.operand, partial.over)
        for axis in part.axes:
            part = part if axis in partial.symbol.axes else ir.total(part, axis)
        return part, live

    def _changes(self, state: State) -> tuple[Node, ...]:
        if state.op == "max":
            return (ir.largest(ir.where(self.live, state.value, ir.MINUS_INF), self.axis),)
        value = ir.where(self.live, state.value, ZERO)
        tile = (
            ir.total(value, self.axis)
            if state.operand is None
            else ir.contract(value, state.operand, self.axis)
        )
        for axis in self.outer:
            tile = ir.total(tile, axis)
        return (tile,) if state.rescale is None else (tile, state.rescale)


def _sum(computed: Product) -> Node:
    result: Node = ZERO
    for term in computed.terms:
        result = ir.add(result, ir.contract(term.own, term.walk, term.over))
    return result


class _StageRun:
    """One stage on given inputs."""

    def __init__(
        self,
        cut: Cut,
        sizes: Mapping[Axis, int],
        given: Mapping[Node, Any],
        seed: int,
        watch: Watch | None,
    ) -> None:
        self.stage = cut.stage
        self.cut = cut
        self.tile_axis = cut.tile_axis or _last_own(cut.stage) or ""
        self.block_own = cut.block_own if cut.tile_axis else 1
        self.sizes = {**sizes, "": 1}
        self.given = given
        self.seed = seed
        self.watch = watch
        stage = self.stage
        self.updates = [_Updates(walk, stage.walk or "", stage.outer) for walk in stage.walks]
        self.memory = {
            output.name: torch.full(
                [sizes[axis] for axis in _split(output.layout)],
                0.0 if isinstance(output.node, Scatter) else math.nan,
                dtype=torch.float64,
            )
            for output in (*self.stage.outputs, *(out for walk in self.stage.walks for out in walk.stores))
        }
        for partial in (partial for walk in stage.walks for partial in walk.partials):
            shape = [sizes[axis] for axis in partial.symbol.axes]
            self.memory[partial.name] = torch.zeros(shape, dtype=torch.float64)

    def run(self) -> dict[str, Tensor]:
        """Every block, one after the other."""
        guards = {axis for walk in self.stage.walks for axis in walk.guard.axes}
        guards -= {self.tile_axis, self.stage.walk, *self.stage.outer}
        fixed_axes = ir.sort_axes({*guards, *([self.stage.parts] if self.stage.parts else [])})
        for place in product(*(range(self.sizes[axis]) for axis in fixed_axes)):
            fixed = dict(zip(fixed_axes, place, strict=True))
            visits = [self._visits(walk, fixed) for walk in self.stage.walks]
            for tile, first in enumerate(range(0, self.sizes[self.tile_axis], self.block_own)):
                at = {axis: torch.tensor([position]) for axis, position in fixed.items()}
                at[self.tile_axis] = torch.arange(first, first + self.block_own)
                _Block(self, at).run([tiles[tile] for tiles in visits])
        return self.memory

    def _visits(self, walk: Walk, fixed: Mapping[Axis, int]) -> list[list[tuple[int, TileClass]]]:
        """For each own tile the tiles of ``walk`` to compute: those of the part at hand."""
        every, parts = self._live(walk, fixed), self.stage.parts
        if parts is None:
            return every
        return [tiles[fixed[parts] :: self.sizes[parts]] for tiles in every]

    def _live(self, walk: Walk, fixed: Mapping[Axis, int]) -> list[list[tuple[int, TileClass]]]:
        """For each own tile those in which an element may count."""
        axis, block = self.stage.walk, self.cut.block_walk
        assert axis is not None
        own_tiles = -(-self.sizes[self.tile_axis] // self.block_own)
        if walk.guard is TRUE or set(walk.guard.axes) & set(self.stage.outer):
            length = self.sizes[axis] if walk.guard is TRUE else 0
            every: list[tuple[int, TileClass]] = [
                (i, "full" if (i + 1) * block <= length else "partial")
                for i in range(-(-self.sizes[axis] // block))
            ]
            return [every] * own_tiles
        return live_tiles(
            walk.guard,
            self.tile_axis,
            axis,
            self.sizes,
            self.block_own,
            block,
            {n: v.numpy() if isinstance(v, Tensor) else v for n, v in self.given.items()},
            fixed,
        )


class _Block:
    """One block: the tile ``at`` some positions of the own axes, and what is known there."""

    def __init__(self, run: _StageRun, at: Mapping[Axis, Tensor]) -> None:
        self.run_of = run
        self.sizes = run.sizes
        self.at = dict(at)
        self.known: dict[Node, Any] = dict(run.given)

    def run(self, visits: list[list[tuple[int, TileClass]]]) -> None:
        """Every walk, then the outputs."""
        stage = self.run_of.stage
        for number, (walk, tiles) in enumerate(zip(stage.walks, visits, strict=True)):
            for state in walk.states:
                identity = -math.inf if state.op == "max" else 0.0
                self.known[state.symbol] = torch.full(
                    self._shape(state.symbol), identity, dtype=torch.float64
                )
            for tile, kind in tiles:
                if self.run_of.watch:
                    self.run_of.watch(stage.name, number, tile, kind)
                self._step(walk, self.run_of.updates[number], tile, kind)
        self.at.pop(stage.walk or "", None)
        self._write(stage.outputs)

    def _step(self, walk: Walk, updates: _Updates, tile: int, kind: TileClass) -> None:
        """One tile of a walk."""
        axis, block = updates.axis, self.run_of.cut.block_walk
        self.at[axis] = torch.arange(tile * block, (tile + 1) * block)
        for computed, product_of in zip(walk.products, updates.products, strict=True):
            self.known[computed.symbol] = self._inside(self._values(product_of)[0], computed.symbol.axes)
        inside = self._aligned(self.at[axis] < self.sizes[axis], (axis,), updates.live.axes)
        if kind == "partial" and walk.guard is not TRUE:
            inside = inside & self._value(walk.guard, updates.live.axes)
        self.known[updates.live] = inside
        for state in walk.states:
            self.known[old(state.symbol)] = self.known[state.symbol]
        for state, changes in zip(walk.states, updates.states, strict=True):
            self.known[state.symbol] = self._updated(state, changes)
        for partial, (part, live) in zip(walk.partials, updates.partials, strict=True):
            self._add_part(partial, part, live, inside, updates.live.axes)
        self._write(walk.stores)

    def _add_part(
        self, partial: Partial, part: Node, live: Symbol, inside: Tensor, axes: tuple[Axis, ...]
    ) -> None:
        """What lies inside the lengths, added to memory."""
        ends = self._aligned(self.at[partial.over] < self.sizes[partial.over], (partial.over,), live.axes)
        self.known[live] = self._aligned(inside, axes, live.axes) & ends
        value = self._aligned(self._values([part])[0], part.axes, partial.symbol.axes)
        value = value.expand(self._shape(partial.symbol))
        places = [self.at.get(axis, torch.arange(self.sizes[axis])) for axis in partial.symbol.axes]
        for d, (axis, positions) in enumerate(zip(partial.symbol.axes, places, strict=True)):
            keep = positions < self.sizes[axis]
            value, places[d] = value.index_select(d, keep.nonzero()[:, 0]), positions[keep]
        self.run_of.memory[partial.name][torch.meshgrid(*places, indexing="ij")] += value

    def _inside(self, value: Tensor, axes: tuple[Axis, ...]) -> Tensor:
        """A product of the tile, NaN past the lengths."""
        for axis in axes:
            if axis in self.at and int(self.at[axis][-1]) >= self.sizes[axis]:
                inside = self._aligned(self.at[axis] < self.sizes[axis], (axis,), axes)
                value = torch.where(inside, value, math.nan)
        return value

    def _updated(self, state: State, changes: tuple[Node, ...]) -> Tensor:
        """``state`` with the live elements of this tile; ``changes``: their sum or maximum, and a factor."""
        before: Tensor = self.known[state.symbol]
        tile, *scale = (
            self._aligned(value, node.axes, state.symbol.axes)
            for value, node in zip(self._values(changes), changes, strict=True)
        )
        if state.op == "max":
            return torch.maximum(before, tile)
        return (before * scale[0] if scale else before) + tile

    def _write(self, outputs: Iterable[Output]) -> None:
        """What lies inside the lengths, to memory."""
        for output in outputs:
            if isinstance(output.node, Scatter):
                self._add(output, output.node)
                continue
            axes = _split(output.layout)
            value = self._value(output.node, output.node.axes).expand(self._shape(output.node))
            inside = []
            for d, axis in enumerate(output.node.axes):
                places = self.at.get(axis, torch.arange(self.sizes[axis]))
                keep = places < self.sizes[axis]
                value = value.index_select(d, keep.nonzero()[:, 0])
                inside.append(places[keep])
            value = value.permute([output.node.axes.index(axis) for axis in axes])
            order = [inside[output.node.axes.index(axis)] for axis in axes]
            where = torch.meshgrid(*order, indexing="ij") if order else ()
            self.run_of.memory[output.name][tuple(where)] = value

    def _add(self, output: Output, node: Scatter) -> None:
        """What lies inside the lengths, added to where its indices say."""
        counts = Symbol("counts", node.value.axes, "bool")
        inside = torch.ones(self._shape(counts), dtype=torch.bool)
        for axis in counts.axes:
            if axis in self.at:
                inside = inside & self._aligned(self.at[axis] < self.sizes[axis], (axis,), counts.axes)
        self.known[counts] = inside
        added = Scatter(node.table, node.indices, ir.where(counts, node.value, ZERO))
        axes = _split(output.layout)
        value = self._values([added])[0].expand([self.sizes[axis] for axis in added.axes])
        self.run_of.memory[output.name] += value.permute([added.axes.index(axis) for axis in axes])

    def _shape(self, node: Node) -> list[int]:
        return [len(self.at[axis]) if axis in self.at else self.sizes[axis] for axis in node.axes]

    def _values(self, nodes: Iterable[Node]) -> list[Tensor]:
        return evaluate_nodes(nodes, self.known, self.sizes, self.at, seed=self.run_of.seed)

    def _value(self, node: Node, axes: tuple[Axis, ...]) -> Tensor:
        return self._aligned(self._values([node])[0], node.axes, axes)

    @staticmethod
    def _aligned(value: Tensor, axes: tuple[Axis, ...], to: tuple[Axis, ...]) -> Tensor:
        """``value`` with a dimension for each axis of ``to``."""
        return value[tuple(slice(None) if axis in axes else None for axis in to)]
