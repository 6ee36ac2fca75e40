"""In which phases states are updated, or a tile is made level by level; what a phase has of earlier ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fagen.derive.levels import Level
from fagen.derive.running import old
from fagen.derive.vanish import limits
from fagen.derive.walk import Product, State, Walk
from fagen.emit.code import ELEMENT, Code
from fagen.emit.forward.elements import ElementBuilder, Term
from fagen.emit.texts import LevelText, WalkText
from fagen.ir import graph as ir
from fagen.ir.graph import ZERO, Node, Symbol


class PhaseBuilder(ElementBuilder):
    """The phase of each state, and what weights of earlier phases stand for in it."""

    def levels(self, walk: Walk) -> dict[State, int]:
        """The phase of each state, in the order in which they are updated."""
        if self.levels_made:
            return {state: i for i, level in enumerate(self.levels_made) for state in level.states}
        return levels_of(self.sums_of(walk))

    @staticmethod
    def sums_of(walk: Walk) -> tuple[State, ...]:
        """What the update of a tile makes."""
        return walk.states

    def tested_at(self, levels: Mapping[State, int]) -> Iterable[int]:
        """The phases in which elements are tested."""
        return sorted(set(levels.values()) - self.vanishing) if self.levels_made else (0,)

    # ---------------------------------------------------------------------------------------- level by level

    def make_by_levels(self, made: tuple[Level, ...]) -> None:
        """Have products and sums of a tile made level by level, if there are any."""
        self.levels_made = made
        if made:
            self.scope.splitter.places.element = "[r][c]"
            self.scope.splitter.places.by_columns = True
            self.rounds = all(state.features for level in made for state in level.states)
            self.coarse = self.rounds and "bf16" in {tile.storage for tile in self.kernel.shared}

    def level_texts(self, walk: WalkText) -> tuple[LevelText, ...]:
        """What is made of a tile level by level."""
        products = {product.name: product for product in walk.products}
        return tuple(
            LevelText(
                i,
                tuple(products[p.symbol.name] for p in level.products),
                walk.phases[i],
                i not in self.vanishing,
                self.multiplied,
            )
            for i, level in enumerate(self.levels_made)
        )

    def known_at(self, product: Product) -> int:
        """The phase from which on a product is known."""
        found = (i for i, level in enumerate(self.levels_made) if product in level.products)
        return next(found, 0)

    def known_at_last(self, value: Node) -> int:
        """The phase from which on a value of products is known."""
        return max(self.known_at(p) for p in self.stage.walks[0].products if ir.depends(value, [p.symbol]))

    def from_weights(
        self,
        terms: Mapping[State, Term],
        weights: Mapping[Term, str],
        levels: Mapping[State, int],
        leaves: dict[Node, Code],
    ) -> Mapping[State, Term]:
        """The value of each state and the condition of its term, in which ``weights`` of earlier levels stand
        as ``leaves``: where these are 0 as an element does not count, that may be all a level needs."""
        if not self.levels_made:
            return terms
        found = dict(terms)
        tested = set[int]()
        for state, level in levels.items():
            zeros: dict[Node, Node] = {}
            named: dict[Node, str] = {}
            known: dict[Node, Node] = {}
            for other, at in levels.items():
                value, condition = terms[other]
                text = None
                if at < level and other.features and condition is None:
                    text = self.earlier_weight(weights[terms[other]], value)
                if text is not None:
                    name = f"earlier_{weights[terms[other]]}"
                    known[value] = symbol = Symbol(name, value.axes, "float")
                    zeros[symbol], named[symbol] = ZERO, weights[terms[other]]
                    leaves[symbol] = self.scope.codes.leaf(text, "float", ELEMENT._replace(phase=at + 1))
            known |= self.earlier_products(level, leaves)
            earlier = (whole for whole in self.wholes if self.known_at_last(whole) < level)
            zeros |= {known[whole]: ZERO for whole in earlier}
            value, condition = terms[state]
            found[state] = ir.substitute(value, known), condition
            if limits(ir.substitute(found[state][0], zeros)) is not ZERO:
                tested.add(level)
            if state.features:
                found[state] = self.left_to_round(weights[terms[state]], found[state][0], named), condition
        self.vanishing = set(levels.values()) - tested
        return found

    def earlier_weight(self, name: str, value: Node) -> str | None:
        """How a later level says the weight of an element in array ``name``; None: it computes it again."""
        return f"{name}[r][c]"

    def earlier_products(self, level: int, leaves: dict[Node, Code]) -> Mapping[Node, Node]:
        """What ``level`` has in place of products of earlier ones and of `wholes`, which may stand as
        ``leaves``."""
        return {}

    def left_to_round(self, weights: str, value: Node, earlier: Mapping[Node, str]) -> Node:
        """What of the ``value`` of ``weights`` is made before they are rounded: all, or what one of the
        ``earlier`` ones is multiplied by."""
        return value


def levels_of(states: Sequence[State]) -> dict[State, int]:
    """The phase of each state, in the order in which they are updated."""
    levels: dict[State, int] = {}
    for state in states:
        waits = symbols_in(state.value) | (symbols_in(state.rescale) if state.rescale is not None else set())
        below = [level for other, level in levels.items() if waits & {other.symbol, old(other.symbol)}]
        levels[state] = 1 + max(below, default=-1)
    return dict(sorted(levels.items(), key=lambda item: item[1]))


def symbols_in(x: Node) -> set[Node]:
    """The symbols that an expression is made of."""
    return {node for node in ir.walk([x]) if isinstance(node, Symbol)}
