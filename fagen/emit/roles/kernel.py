"""All that the template reads of a kernel."""

from __future__ import annotations

from fagen.emit.roles.levels import Levels
from fagen.emit.roles.results import Results
from fagen.emit.roles.visits import Visits
from fagen.emit.texts import WalkText


class ForwardRoles(Visits, Levels, Results):
    """What the template reads of a kernel."""

    def update_parameters(self, walk: WalkText) -> list[str]:
        """What the functions of a walk's tile may take."""
        arrays = [f"float (&{name})[ROWS]" for name in self.rescale_fields(walk)]
        arrays += [f"Left<{state.weight}> (&rounded_{state.weights})[COLUMNS / 4]" for state in walk.weighted]
        if self.levels:
            arrays += [f"{array.ctype} (&{array.name})[ROWS][COLUMNS]" for array in walk.arrays]
        steps = ["uint32 stage", "uint32 from"]
        return [*super().update_parameters(walk), *steps, *dict.fromkeys(arrays)]

    def lagging_parameters(self, walk: WalkText) -> list[str]:
        """What the function may take that weighs a tile from maxima as they are: weights leave it rounded."""
        whole = [f"float (&{weights})[ROWS][COLUMNS]" for weights in walk.weights]
        return [each for each in self.update_parameters(walk) if each not in whole]
