"""The texts of a tile whose products and sums are made level by level."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import cast

from fagen.derive.terms import term_of
from fagen.derive.vanish import limits
from fagen.derive.walk import State, Walk
from fagen.emit.code import ELEMENT, Code, Place, Split
from fagen.emit.roles.build_copies import CopyBuilder
from fagen.emit.roles.levels import buffer_number
from fagen.emit.scope import Scope
from fagen.emit.texts import LevelText, TileText
from fagen.ir import graph as ir
from fagen.ir.graph import MINUS_INF, ZERO, Map, Node
from fagen.plan.warpgroups import handed, kept, levels, whole


class LevelBuilder(CopyBuilder):
    """What a level has of earlier ones: weights as they are rounded, and products that wait apart."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.make_by_levels(levels(self.stage))
        self.divided = self.kernel.roles is not None and self.kernel.roles.divided
        self.wholes = () if self.divided else whole(self.levels_made)
        self.kept = kept(self.levels_made, self.wholes)
        self.handed = handed(self.levels_made) if self.divided else ()

    def earlier_weight(self, name: str, value: Node) -> str | None:
        """A weight is kept for later levels as it is rounded, in half the registers."""
        if not self.rounds:
            return None
        if self.divided:
            if value not in self.handed:
                return None
            return f"handed({buffer_number(self.handed.index(value), len(self.handed))}, r, c)"
        return f"value_of(rounded_{name}, r, c)"

    def earlier_products(self, level: int, leaves: dict[Node, Code]) -> Mapping[Node, Node]:
        """Products that later levels read wait apart, and so does what weights are selected from."""
        known: dict[Node, Node] = {}
        for number, value in enumerate(self.wholes):
            here = self.known_at_last(value) == level
            known[value] = symbol = ir.Symbol(f"whole{number}_{level}", value.axes, "float")
            text = f"whole{number}[r][c % 4]" if here else f"whole({number}, r, c)"
            leaves[symbol] = self.scope.codes.leaf(text, "float", ELEMENT._replace(phase=level))
        for number, product in enumerate(self.kept if self.rounds else ()):
            at = self.known_at(product)
            if at < level:
                symbol = ir.Symbol(f"kept_{product.symbol.name}", product.symbol.axes, "float")
                known[product.symbol] = symbol
                place = ELEMENT._replace(phase=at + 1)
                buffer = buffer_number(number, len(self.kept)) if self.divided else f"{number}"
                leaves[symbol] = self.scope.codes.leaf(f"kept({buffer}, r, c)", "float", place)
        return known

    def left_to_round(self, weights: str, value: Node, earlier: Mapping[Node, str]) -> Node:
        """Of a product with an earlier weight, which is rounded already, the other factors."""
        split = _factor_among(earlier, value) if self.rounds and self.pairs else None
        if split is None:
            return value
        factor, rest = split
        self.multiplied[weights] = f"rounded_{earlier[factor]}"
        return rest

    @property
    def pairs(self) -> bool:
        """Whether a product of a rounded weight may be made of pairs, its other factor rounded before.

        That is half the instructions, for one rounding of 16 bits more. Numbers of bf16 are as large as those
        of fp32; fp16 might not hold a factor of a product that it holds.
        """
        return not self.divided and all(tile.storage != "fp16" for tile in self.kernel.shared)

    def splits(self, roots: Sequence[tuple[Code, Place]], last: int) -> Sequence[Split]:
        """What a consumer needs it computes itself."""
        if not self.divided:
            return super().splits(roots, last)
        of_levels = ([root for root in roots if root[1].phase == level] for level in range(last + 1))
        return [self.scope.split(of_level) for of_level in of_levels]

    def handed_arrays(self, levels: Sequence[LevelText]) -> tuple[str, ...]:
        """The arrays of weights that other consumers read."""
        names = {
            state.symbol.name: state.value
            for level in self.levels_made
            for state in level.states
            if state.value in self.handed
        }
        arrays = {
            names[state.name]: state.weights
            for level in levels
            for state in level.sums
            if state.name in names
        }
        return tuple(arrays[value] for value in self.handed)

    # -------------------------------------------------------------------------------------------- its sums

    def sum_tile(self, number: int, walk: Walk, state: State) -> tuple[TileText, str]:
        """A tile that a product reads as well is that one."""
        if not self.levels_made:
            return super().sum_tile(number, walk, state)
        (axis,) = state.features
        place = cast(Node, state.operand), axis
        tiles = list(dict.fromkeys((term.walk, term.over) for p in walk.products for term in p.terms))
        weighted = ((s.operand, s.features[0]) for s in walk.states if s.operand is not None)
        apart = list(dict.fromkeys(each for each in weighted if each not in tiles))
        record = f"walk{tiles.index(place)}" if place in tiles else f"operand{apart.index(place)}"
        return self.tile(f"operand{number}", record, *place), record

    def masked(self, walk: Walk) -> Node | None:
        """Of products made level by level also a product: a term that does not count is one with 0 then."""
        found = super().masked(walk)
        sums = all(state.features and term_of(state)[1] is None for state in walk.states)
        if found is not None or not self.levels_made or not sums or self.kept:
            return found
        for product in self.levels_made[0].products:
            rests = (ir.substitute(s.value, {product.symbol: MINUS_INF}) for s in walk.states)
            if all(limits(rest) is ZERO for rest in rests):
                return product.symbol
        return None


def _factor_among(symbols: Collection[Node], value: Node) -> tuple[ir.Symbol, Node] | None:
    """One of ``symbols`` that a product has as a factor, and what it is multiplied by."""
    if not isinstance(value, Map) or value.op != "mul":
        return None
    for number, factor in enumerate(value.args):
        others = value.args[:number] + value.args[number + 1 :]
        if isinstance(factor, ir.Symbol) and factor in symbols:
            return factor, reduce(ir.mul, others)
        deeper = _factor_among(symbols, factor)
        if deeper is not None:
            return deeper[0], reduce(ir.mul, (deeper[1], *others))
    return None
