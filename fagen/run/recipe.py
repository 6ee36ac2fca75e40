"""What a launcher knows of a plan: grids, the parameter struct, memory; small enough to stand in an index."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from fagen.emit.params import Field, TensorId, struct_format
from fagen.emit.program import Emitted, Function
from fagen.ir.graph import Axis
from fagen.plan.plan import Buffer, Plan, Storage


@dataclass(frozen=True)
class Recipe:
    """The launches of a plan, in order, with one parameter struct for all of them."""

    functions: tuple[Function, ...]
    fields: tuple[Field, ...]
    buffers: tuple[Buffer, ...]
    outputs: tuple[Storage, ...]

    def to_json(self) -> dict[str, Any]:
        """The same as JSON can hold it."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Recipe:
        """What `to_json` gave, before or after a way through text."""
        functions = [{**each, "grid": _tuples(each["grid"])} for each in value["functions"]]
        fields = [{**each, "source": _tuples(each["source"])} for each in value["fields"]]
        buffers = [{**each, "axes": tuple(each["axes"])} for each in value["buffers"]]
        return Recipe(
            tuple(Function(**each) for each in functions),
            tuple(Field(**each) for each in fields),
            tuple(Buffer(**each) for each in buffers),
            tuple(value["outputs"]),
        )


def recipe_of(plan: Plan, emitted: Emitted) -> Recipe:
    """What a launcher has to know of a plan and its text."""
    return Recipe(emitted.functions, emitted.params, plan.buffers, plan.outputs)


def blocks(function: Function, lengths: Mapping[Axis, int]) -> int:
    """Blocks of a launch; 0 where an axis is empty."""
    return prod(-(-lengths[axis] // positions) for axis, positions in function.grid)


def _tuples(value: Any) -> Any:
    """Lists as tuples, at every depth."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def offsets_of(fields: Sequence[Field]) -> tuple[int, ...]:
    """Where each member of the struct starts, in bytes."""
    letters = struct_format(fields)
    return tuple(struct.calcsize(f"{letters[: i + 1]}0{letters[i + 1]}") for i in range(len(fields)))


class Packer:
    """Fills the parameter struct of one call: what its shapes decide stands, each call adds the rest.

    ``known`` gives a field's value where shapes decide it, else None. ``data`` says whose addresses a call
    gives, in this order (None: the seed's), and ``scalars`` the positions of the arguments whose values.
    """

    __slots__ = ("_fixed", "_pack", "_scalars", "addresses", "data", "scalars")

    def __init__(self, fields: Sequence[Field], known: Callable[[Field], int | None]) -> None:
        self._pack = struct.Struct(struct_format(fields)).pack
        self._fixed: list[Any] = [known(field) for field in fields]
        self.addresses: list[int] = []
        self._scalars: list[int] = []
        self.data: list[TensorId | None] = []
        self.scalars: list[int] = []
        for i, field in enumerate(fields):
            if field.source[0] == "data":
                self.addresses.append(i)
                self.data.append(field.source[1])
            elif field.source[0] == "seed":
                self.addresses.append(i)
                self.data.append(None)
            elif field.source[0] == "scalar":
                self._scalars.append(i)
                self.scalars.append(field.source[1])

    def __call__(self, addresses: Sequence[int], numbers: Sequence[float]) -> bytes:
        """The bytes of the struct."""
        members = self._fixed.copy()
        for i, address in zip(self.addresses, addresses):  # noqa: B905 (called for every launch)
            members[i] = address
        for i, number in zip(self._scalars, numbers):  # noqa: B905
            members[i] = number
        return self._pack(*members)
