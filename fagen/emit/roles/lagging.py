"""How a maximum may lag behind: a tile is weighed from it as it is, unless that is exceeded by too much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fagen.derive.terms import term_of
from fagen.derive.unscale import differences
from fagen.derive.walk import State, Walk
from fagen.emit.code import ATOM, COLUMN, ELEMENT, ROW, Code, Place
from fagen.emit.forward.slack import EXCEEDED, SLACK
from fagen.emit.forward.walks import LoopBuilder
from fagen.emit.roles.texts import LANES
from fagen.emit.scope import Scope
from fagen.emit.texts import LaggingText, Phase, StateText
from fagen.ir import graph as ir
from fagen.ir.graph import ONE, Map, Node


class LaggingBuilder(LoopBuilder):
    """Free maxima, and where a tile is weighed without looking at them."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.lags = False

    def may_lag(self, walk: Walk) -> bool:
        """Wherever it may be: sums wait for a multiplication in any case."""
        return True

    def lagging(
        self,
        walk: Walk,
        levels: Mapping[State, int],
        texts: Mapping[State, StateText],
        leaves: Mapping[Node, Code],
    ) -> LaggingText | None:
        """As long as a maximum is a usual number, what lies above it makes the sum of its powers large.

        That takes one walk, of which the sums of a tile have landed before the next one is weighed, and one
        sum of powers alone, of which whatever else depends on the maximum is made.
        """
        maxima = [state for state in walk.states if state.op == "max"]
        others = [state for state in walk.states if state.op != "max"]
        if len(self.stage.walks) > 1 or self.levels_made or len(maxima) != 1 or not walk.products:
            return None
        columns = self.kernel.block_walk // LANES
        if not self.masks_products(walk, self.masked(walk)) or self.room < columns * EXCEEDED:
            return None
        (top,) = maxima
        if texts[top].slack is None or levels[top] or any(levels[state] != 1 for state in others):
            return None
        weights = {texts[state].weights for state in others if state.features and state.rescale is not None}
        if any(term_of(state)[1] is not None for state in others) or len(weights) != 1:
            return None
        for state in others:
            power = None if state.features else self.power_of(state.value, top, leaves)
            if power is None:
                continue
            exponent = ELEMENT._replace(phase=1)
            lower = self.lowering({**leaves, state.value: power})
            rests = (ir.substitute(other.value, {state.value: ONE}) for other in others)
            if any(ir.depends(rest, [top.symbol]) for rest in rests):
                continue
            split = self.scope.split([(lower(other.value), exponent) for other in others])
            factors = [(other, other.rescale) for other in others if other.rescale is not None]
            plain = self.lowering(dict(leaves))
            of_row = Place(row=True, phase=1)
            look = self.scope.split(
                [(plain(top.value), ELEMENT), *((plain(factor), of_row) for _, factor in factors)]
            )
            if any(each.kept() or each.at(place) for each in (split, look) for place in (ROW, COLUMN)):
                return None
            self.lags = True
            looked = Phase(look.at(of_row), look.at(ELEMENT), (), None)
            phase = Phase(
                split.at(of_row),
                split.at(exponent),
                tuple(replace(texts[other], value=split.text(lower(other.value))) for other in others),
                None,
            )
            made = replace(texts[top], value=look.text(plain(top.value)))
            return LaggingText(
                made,
                looked,
                {other.symbol.name: look.text(plain(factor)) for other, factor in factors},
                phase,
                state.symbol.name,
            )
        return None

    def slack_constants(self) -> list[tuple[str, str, str]]:
        """The same, and what sums show that maxima are exceeded by too much."""
        if not self.lags:
            return super().slack_constants()
        most = f"SLACK = {SLACK}f, MOST = COLUMNS * {EXCEEDED:.1f}f"
        return [("float", most, "how far a maximum lags; exp of that in each column")]

    def power_of(self, value: Node, top: State, leaves: Mapping[Node, Code]) -> Code | None:
        """``exp(c x - c top)`` for a usual ``top``; None for any other value, or one not lowered so."""
        lower = self.lowering(dict(leaves))
        if not isinstance(value, Map) or value.op != "exp":
            return None
        code = lower(value)
        if not code.args or code.args[0].ctype != "Exponential":
            return None
        for x, measured, factor in differences(value.args[0]):
            if measured in (top.symbol, ir.finite(top.symbol)):
                codes = self.scope.codes
                of_row = (lower(factor), leaves[top.symbol])
                row = codes.call("exponential<LOOKS>", of_row, "Exponential", 0)
                return codes.make("{}({})", (row, lower(x)), "float", ATOM, (ATOM, 0), 2)
        return None
