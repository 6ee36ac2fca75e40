"""What a launcher knows of a plan: grids, the parameter struct, memory; small enough to stand in an index."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from operator import getitem, itemgetter
from typing import Any, TypeAlias

from fagen.emit.params import Field, TensorId, codes_of, pack
from fagen.emit.program import Emitted, Function
from fagen.ir.graph import Axis
from fagen.plan.parts import Shares, shares_of
from fagen.plan.plan import Buffer, Plan, Storage


@dataclass(frozen=True)
class Recipe:
    """The launches of a plan, in order, with one parameter struct for all of them."""

    functions: tuple[Function, ...]
    fields: tuple[Field, ...]
    buffers: tuple[Buffer, ...]
    outputs: tuple[Storage, ...]
    shares: tuple[Shares, ...] = ()
    """What decides in how many parts walks are made."""

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
            tuple(Shares(**{key: _tuples(each[key]) for key in each}) for each in value["shares"]),
        )


def recipe_of(plan: Plan, emitted: Emitted) -> Recipe:
    """What a launcher has to know of a plan and its text."""
    return Recipe(emitted.functions, emitted.params, plan.buffers, plan.outputs, shares_of(plan.kernels))


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

    __slots__ = ("_constants", "_maps", "_order", "_pack", "data", "offsets", "scalars")

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
        maps = [field for field in fields if field.source[0] == "map"]
        pointers = [field for field in fields if field.source[0] in ("data", "seed", "counter")]
        numbers = [field for field in fields if field.source[0] == "scalar"]
        addressed = [*maps, *pointers]
        self.data = [_tensor(field) for field in addressed]
        self.offsets = [offsets[fields.index(field)] for field in addressed]
        self.scalars = [field.source[1] for field in fields if field.source[0] == "scalar"]
        self._maps: list[Encoded] = [encoded(field) for field in maps] if encoded else []
        given = [*[None] * len(maps), *pointers, *maps, *numbers]  # addresses, then what `__call__` adds
        constants: list[bytes] = []  # what stands between those
        order: list[int] = []
        done, members = 0, "@"  # as C does: what is too large for a float is infinite
        for field, offset, code in zip(fields, offsets, codes, strict=True):
            if field not in given:
                continue
            if done < offset:
                order.append(len(given) + len(constants))
                constants.append(whole[done:offset])
                members += f"{offset - done}s"
            order.append(given.index(field))
            members += code
            done = offset + struct.calcsize(code)
        order.append(len(given) + len(constants))
        constants.append(whole[done:])
        self._constants = tuple(constants)
        self._order = itemgetter(*order, order[-1])  # of one thing it would give no tuple
        self._pack = struct.Struct(f"{members}{len(whole) - done}s0s").pack

    def __call__(self, addresses: Sequence[int], numbers: Sequence[float]) -> bytes:
        """The bytes of the struct."""
        maps = map(getitem, self._maps, addresses)
        return self._pack(*self._order((*addresses, *maps, *numbers, *self._constants)))


def _tensor(field: Field) -> TensorId | None:
    """Whose address a field gives, or is made of; None: the seed's."""
    if field.source[0] == "data" or field.source[0] == "map":
        return field.source[1]
    return ("counter", 0) if field.source[0] == "counter" else None
