"""What the template reads of a kernel in warps with roles: its records, and which kind its consumers are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from fagen.emit.forward.kernel import ForwardLoop
from fagen.emit.texts import LevelText, TileText
from fagen.plan.plan import Roles
from fagen.plan.warpgroups import ADDER_REGISTERS

Epilogue: TypeAlias = Literal["staged", "quads", "elements"]
"""How results with features leave: through shared memory, or from registers, in vectors or one by one."""
LANES = 4
"""Threads that share a row."""


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
    first: tuple[str, ...] = ()
    """The first head, where rows of several lie side by side."""
    late: bool = False
    """Whether it is of rows that products of later levels alone read: there is one buffer."""
    held: bool = False
    """Whether consumers have such rows in registers: products then read less shared memory."""

    @property
    def name(self) -> str:
        """What it is called."""
        return self.tile.name

    def at(self, row: str) -> str:
        """Where a copy from row ``row`` on lies in the tensor."""
        places = [*self.first, row, *self.others]
        return ", ".join([*places, *["0"] * (3 - len(places))])


@dataclass(frozen=True)
class AddedText:
    """A sum over the rows of all blocks, to which each tile adds its part."""

    weights: str
    """The array of weights that consumers hand over."""
    weight: str
    """What they are rounded to."""
    operand: CopyText
    """The tile of rows that they are multiplied by."""
    map: str
    """The parameter that says how the sum lies."""
    features: str
    panel: int
    """Features that are multiplied at once: those of a panel of the tile of rows."""
    pieces: int
    """Parts that these leave in."""
    others: tuple[str, ...]
    """Positions along the other axes of the sum, the nearest first."""
    turns: str
    """Where it is counted how many blocks have added to the tile at ``place``; empty where none waits for its
    turn."""
    turn: str
    """How many works of the same head add to the tile of a ``visit`` before that of a ``block``."""
    equation: str

    @property
    def width(self) -> str:
        """The features that are multiplied at once, as the text has them."""
        return "SumPart::COLUMNS" if self.pieces == 1 else f"{self.panel}"

    @property
    def places(self) -> str:
        """The other positions, as elements."""
        return ", ".join([*self.others, *["0"] * (2 - len(self.others))])


@dataclass(frozen=True)
class RolesText(ForwardLoop):
    """The parts of a kernel."""

    parts: tuple[AddedText, ...]
    """Sums over the rows of all blocks."""
    levels: tuple[LevelText, ...]
    """Of the one walk, where the products and sums of a tile are made level by level."""
    read_again: tuple[str, ...]
    """Products that later levels read."""
    handed: tuple[str, ...]
    """Arrays of weights that other consumers read."""
    wholes: int
    """What weights are selected from that later levels read, counted."""
    own_copies: tuple[CopyText, ...]
    walk_copies: tuple[tuple[CopyText, ...], ...]
    """Of each walk, those of its products."""
    sum_copies: tuple[tuple[CopyText, ...], ...]
    """Of each walk, those of its weighted sums."""
    epilogue: Epilogue
    out: CopyText | None
    """The tile through which they leave."""
    section: str
    announced: tuple[str, ...]
    """Places in sorted tables that are announced with a work: rows look for their own between them."""
    ascends: bool
    """Whether rows have the less to do the later they come, and the first tile is the one to begin with."""

    @property
    def roles(self) -> Roles:
        """Warps and buffers."""
        assert self.scope.kernel.roles is not None
        return self.scope.kernel.roles

    @property
    def divided(self) -> bool:
        """Whether each consumer makes another level of the same rows."""
        return self.roles.divided

    @property
    def chained(self) -> bool:
        """Whether the last sums of one work are made with the first products of the next."""
        (first, *others) = self.walks
        return not others and not self.levels and bool(first.weighted) and bool(first.products)

    @property
    def consumer(self) -> Literal["chained", "plainly", "levels", "alone"]:
        """How consumers work: the name of their template."""
        if self.levels:
            return "alone" if self.divided else "levels"
        return "chained" if self.chained else "plainly"

    @property
    def owes(self) -> bool:
        """Whether a tile is copied for its sums behind the next one, with whose products they are made.

        So does the last one behind the first of the next work, unless that waits for the place of its rows.
        """
        return self.chained and self.roles.own_stages > 1

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
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producer and of a consumer."""
        registers = self.scope.kernel.registers
        assert registers is not None
        return registers

    @property
    def adder_registers(self) -> int:
        """Registers of a thread that adds parts of sums."""
        return ADDER_REGISTERS
