"""Products and sums of a tile that are made level by level, by all consumers or by each another level."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from fagen.emit.roles.copies import Copies
from fagen.emit.roles.texts import CopyText
from fagen.emit.texts import LevelText, StateText, TileText, WalkText
from fagen.plan.warpgroups import GROUP_ROWS, MOST_AT_LAUNCH


class Levels(Copies):
    """Of each level when its tiles are read, and where its arrays are."""

    @property
    def walk_uses(self) -> tuple[int, int]:
        """For the two pipes of a walk made level by level, the last use of a tile: the products of level i
        (2 i), or its sums (2 i + 3), which are made beside the products of the next level.

        What the first products read is announced with the tile, and kept until all of it is done.
        """
        final = 2 * self.levels[-1].number + 3
        uses = (use for copy in self.sum_copies[0] for use in uses_of(self.levels, copy.tile))
        return final, max(uses, default=-1)

    @property
    def announces_late(self) -> bool:
        """Whether the next products are issued before what a consumer hands over is announced.

        Of a narrow tile that is worth more than beginning early with what is added.
        """
        return self.scope.kernel.block_walk <= GROUP_ROWS

    def place_of(self, level: LevelText, name: str) -> str:
        """The array of earlier products whose place a product or an array of weights may take."""
        products = [product.name for product in level.products]
        if name in products and not self.divided:  # those of the first level are there while others are made
            earlier, number = self.levels[0].products, products.index(name)
            place = earlier[number].name if number < len(earlier) else ""
            return "" if not place or self.read_from(place, 1) else place
        place = products[0] if products and name == level.weights[0] else ""
        return "" if not place or self.read_from(place, level.number + 1) else place

    def read_from(self, name: str, number: int) -> bool:
        """Whether levels from ``number`` on read an array."""
        phases = (level.phase for level in self.levels[number:])
        texts = (self.text_of(phase, self.walks[0], False) for phase in phases)
        return any(re.search(rf"\b{name}\[", text) for text in texts)

    # -------------------------------------------------------------------- a level by a consumer of its own

    @property
    def hands(self) -> bool:
        """Whether a consumer needs anything that another has made."""
        return bool(self.handed or self.read_again)

    @staticmethod
    def buffer_of(arrays: Sequence[str], name: str) -> str:
        """Which buffer an array is handed over in."""
        return buffer_number(arrays.index(name), len(arrays)).replace("from", "hand_at.stage()")

    def first_use(self, level: LevelText, copies: Sequence[CopyText]) -> Literal["products", "sums"]:
        """What of it reads them first; where nothing does, its sums: it waits before it frees."""
        made = [other for product in level.products for _, other in self.factors(product)]
        return "products" if any(copy in copies for copy in made) else "sums"

    def last_use(self, level: LevelText, copies: Sequence[CopyText]) -> Literal["products", "sums"]:
        """What of a level, made by a consumer of its own, reads tiles last."""
        summed = [self.copy_of(state.operand) for state in level.sums if state.operand is not None]
        return "sums" if any(copy in copies for copy in summed) else self.first_use(level, copies)

    @staticmethod
    def masks(walk: WalkText, level: LevelText) -> bool:
        """Whether it is a product of a level that is masked."""
        return any(walk.masked == f"{product.name}[r][c]" for product in level.products)

    def multiply_add(self, state: StateText) -> str:
        """How terms are added to a sum: with little room at the launch few features at once."""
        if not self.divided:
            return "multiply_add"
        sizes, states = dict(self.scope.plan.problem.sizes), self.scope.kernel.stage.walks[0].states
        (features,) = (sizes[s.features[0]] for s in states if s.symbol.name == state.name)
        return f"multiply_add<{MOST_AT_LAUNCH}>" if features > MOST_AT_LAUNCH else "multiply_add"


def uses_of(levels: Sequence[LevelText], tile: TileText) -> list[int]:
    """When a tile is read, as `ForwardRoles.walk_uses` has it."""
    found = [
        2 * level.number
        for level in levels
        for product in level.products
        if any(other is tile for _, other in product.factors)
    ]
    summed = (level.number for level in levels for state in level.sums if state.operand is tile)
    return [*found, *(2 * number + 3 for number in summed)]


def buffer_number(number: int, count: int) -> str:
    """The buffer of one of so many arrays that are handed over together."""
    return f"{count} * from + {number}" if count > 1 else "from"
