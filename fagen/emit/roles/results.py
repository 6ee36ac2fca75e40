"""What is made of finished rows, and how it leaves."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fagen.emit.code import Statement
from fagen.emit.roles.texts import RolesText
from fagen.emit.texts import LevelText, StateText, StoresText, StoreText, WalkText


class Results(RolesText):
    """The weighted sums of all walks, and the results that are made of them."""

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

    def landed(self, walk: WalkText) -> str:
        """What may be touched when the sums of a tile have been made."""
        return ", ".join([*(s.name for s in walk.weighted), *(f"rounded_{name}" for name in walk.weights)])

    def outputs_of(self, level: LevelText | None) -> tuple[StoresText, ...]:
        """Results with features that are made of the sums of a level, or of all."""
        if level is None:
            return self.feature_outputs
        names = [state.name for state in level.sums]
        return tuple(o for o in self.feature_outputs if all(sums_of(store, names) for store in o.stores))

    def stores_of(self, level: LevelText | None) -> list[StoreText]:
        """All that is written of it."""
        if level is None:
            return self.all_outputs
        return [store for outputs in self.outputs_of(level) for store in outputs.stores]

    def number_of(self, level: LevelText | None) -> str:
        """What is put behind the names of its functions."""
        return "" if level is None else f"{level.number}"

    def finishes(self, level: LevelText | None) -> bool:
        """Whether anything is made of the sums of a level before they leave."""
        if level is None or self.epilogue == "elements":
            return True
        made = ((outputs.stores[0].number, self.result_of(outputs)) for outputs in self.outputs_of(level))
        return any(number != f"{sums}[r][f]" for number, sums in made)

    def result_of(self, outputs: StoresText) -> str:
        """The sums whose place a result takes."""
        (store,) = outputs.stores
        return sums_of(store, [state.name for state in self.all_weighted])[0]

    def targets_of(self, level: LevelText | None) -> str:
        """Where results with features go."""
        return "\n".join(outputs.stores[0].target for outputs in self.outputs_of(level))

    def needed(self, text: str) -> list[Statement]:
        """What is computed of a finished row for ``text``."""
        kept: list[Statement] = []
        for statement in reversed(self.finish):
            if self.says(statement.variable.name, "\n".join([text, *(each.text for each in kept)])):
                kept.insert(0, statement)
        return kept


def sums_of(store: StoreText, names: Sequence[str]) -> list[str]:
    """Those of some sums, by their ``names``, that a result is made of."""
    return [name for name in names if re.search(rf"\b{name}\b", store.number)]
