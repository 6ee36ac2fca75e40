"""What a launcher knows of a plan: grids, the parameter struct, memory; small enough to stand in an index."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, TypeAlias

from fagen.emit.params import Field, TensorId, codes_of, pack
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
    codes = codes_of(fields)
    return tuple(
        struct.calcsize(f"@{''.join(codes[:i])}{'' if code.endswith('s') else '0' + code}")
        for i, code in enumerate(codes)
    )


Encoded: TypeAlias = Mapping[int, bytes]
"""A member of the struct for each address of a tensor; it makes what it does not have."""


class Packer:
    """Fills the parameter struct of one call: what its shapes decide stands, each call adds the rest.

    ``known`` gives a field's value where shapes decide it, else None, and ``encoded`` the tensor maps of a
    field by address. ``data`` says whose addresses a call gives, in this order (None: the seed's), and
    ``scalars`` the positions of the arguments whose values.
    """

    __slots__ = ("_addresses", "_maps", "_members", "_numbers", "_pack", "data", "offsets", "scalars")

    def __init__(
        self,
        fields: Sequence[Field],
        known: Callable[[Field], int | None],
        encoded: Callable[[Field], Encoded] | None = None,
    ) -> None:
        codes, offsets = codes_of(fields), offsets_of(fields)
        values = [known(field) for field in fields]
        zeros = [b"" if code.endswith("s") else 0 for code in codes]
        whole = pack(fields, [z if value is None else value for z, value in zip(zeros, values, strict=True)])
        self.data: list[TensorId | None] = []
        self.scalars: list[int] = []
        self.offsets: list[int] = []
        self._members: list[Any] = []  # what stands between those each call gives, and room for those
        self._addresses: list[int] = []  # places among the members
        self._numbers: list[int] = []
        self._maps: list[tuple[int, Encoded]] = []
        of_maps: list[tuple[TensorId, int]] = []
        done, codes_of_members = 0, "@"  # as C does: what is too large for a float is infinite
        for field, offset, code in zip(fields, offsets, codes, strict=True):
            source = field.source
            if source[0] not in ("data", "seed", "counter", "map", "scalar"):
                continue
            codes_of_members += f"{offset - done}s{code}"
            self._members += [whole[done:offset], 0]
            place = len(self._members) - 1
            done = offset + struct.calcsize(code)
            if source[0] == "scalar":
                self._numbers.append(place)
                self.scalars.append(source[1])
            elif source[0] == "map":
                assert encoded is not None
                self._maps.append((place, encoded(field)))
                of_maps.append((source[1], offset))
            else:
                self._addresses.append(place)
                self.data.append(
                    source[1] if source[0] == "data" else ("counter", 0) if source[0] == "counter" else None
                )
                self.offsets.append(offset)
        self.data += [tensor for tensor, _ in of_maps]
        self.offsets += [offset for _, offset in of_maps]
        self._members.append(whole[done:])
        self._pack = struct.Struct(f"{codes_of_members}{len(whole) - done}s").pack

    def __call__(self, addresses: Sequence[int], numbers: Sequence[float]) -> bytes:
        """The bytes of the struct."""
        members = self._members.copy()
        for place, address in zip(self._addresses, addresses):  # noqa: B905 (called for every launch)
            members[place] = address
        if self._maps:
            for (place, maps), address in zip(self._maps, addresses[len(self._addresses) :]):  # noqa: B905
                members[place] = maps[address]
        for place, number in zip(self._numbers, numbers):  # noqa: B905
            members[place] = number
        return self._pack(*members)
