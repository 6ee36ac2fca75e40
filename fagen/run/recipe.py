"""What a launcher knows of a plan: grids, the parameter struct, memory; small enough to stand in an index."""

from __future__ import annotations

import struct
import sys
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
        buffers = [
            {**each, "axes": tuple(each["axes"]), "tiles": tuple(each["tiles"])} for each in value["buffers"]
        ]
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

    __slots__ = ("_addresses", "_numbers", "_pieces", "data", "offsets", "scalars")

    def __init__(self, fields: Sequence[Field], known: Callable[[Field], int | None]) -> None:
        values = [known(field) for field in fields]
        letters, offsets = struct_format(fields), offsets_of(fields)
        whole = struct.pack(letters, *(0 if value is None else value for value in values))
        self.data: list[TensorId | None] = []
        self.scalars: list[int] = []
        self.offsets: list[int] = []
        self._addresses: list[int] = []
        self._numbers: list[tuple[int, Callable[[float], bytes]]] = []
        self._pieces: list[bytes] = []  # what stands between the members each call gives, and room for those
        done = 0
        for field, offset, letter in zip(fields, offsets, letters[1:], strict=False):
            source = field.source
            if source[0] not in ("data", "seed", "scalar"):
                continue
            self._pieces += [whole[done:offset], b""]
            place = len(self._pieces) - 1
            done = offset + struct.calcsize(letter)
            if source[0] == "scalar":
                self._numbers.append((place, struct.Struct(letter).pack))
                self.scalars.append(source[1])
                continue
            self._addresses.append(place)
            self.data.append(source[1] if source[0] == "data" else None)
            self.offsets.append(offset)
        self._pieces.append(whole[done:])

    def __call__(self, addresses: Sequence[int], numbers: Sequence[float]) -> bytes:
        """The bytes of the struct."""
        pieces = self._pieces.copy()
        for place, address in zip(self._addresses, addresses):  # noqa: B905 (called for every launch)
            pieces[place] = address.to_bytes(8, sys.byteorder)
        for (place, pack), number in zip(self._numbers, numbers):  # noqa: B905
            pieces[place] = pack(number)
        return b"".join(pieces)
