"""What kernels that stand in one function have in common: where a block is, as local numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fagen.emit.code import Place
from fagen.emit.scope import Scope, axis_name, block_name
from fagen.ir.graph import Axis

ROW, COLUMN, RESULT = Place(True, False, 1), Place(False, True, 1), Place(True, True, 1)
"""Where a value of a result is known: its row, its column, both."""


class TiledAxis(NamedTuple):
    """An axis of which a block has several positions."""

    axis: Axis
    name: str
    """Of a position along it."""
    length: str
    block: str
    only: bool
    """Whether nothing is left of the grid's number after it."""


@dataclass(frozen=True)
class Flat:
    """A kernel of which all text is one function."""

    scope: Scope

    @property
    def walk_axis(self) -> Axis:
        """The axis that is walked along."""
        assert self.scope.kernel.stage.walk is not None
        return self.scope.kernel.stage.walk

    @property
    def row_axis(self) -> Axis | None:
        """The axis of a block's rows."""
        return self.scope.kernel.tile_axis

    @property
    def column_axis(self) -> Axis | None:
        """The axis of a block's columns, if its results have some."""
        return self.scope.kernel.feature_axis

    @property
    def tiled(self) -> list[TiledAxis]:
        """Axes a block has several positions of, that which varies fastest from block to block first."""
        axes = [axis for axis in (self.column_axis, self.row_axis) if axis is not None]
        last = axes[-1:] if not self.grid_axes else []
        return [
            TiledAxis(axis, axis_name(axis), self.length(axis), block_name(axis), [axis] == last)
            for axis in axes
        ]

    @property
    def grid_axes(self) -> tuple[Axis, ...]:
        """Axes of which a block has one position."""
        return self.scope.kernel.grid_axes

    def length(self, axis: Axis) -> str:
        """The length of an axis in the text."""
        return self.scope.length(axis)
