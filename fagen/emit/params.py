"""The parameters of a program's kernels: their names, their types, and how a launch fills them.

All kernels of a program take one struct, ``Params``, by value. Its bytes are the same on a GPU and in the
emulator. Names are derived: what a computation does with a tensor names it, never what the user called it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fagen.emit.code import CType, written
from fagen.ir import graph as ir
from fagen.ir.graph import Axis, Input, Node, Output, Scalar
from fagen.ir.names import names_of
from fagen.ir.show import LENGTHS, show
from fagen.plan.plan import Buffer, Plan, Storage
from fagen.plan.prepare import Tiles

TensorId: TypeAlias = tuple[Literal["argument", "output", "buffer", "counter"], int]
"""An argument of the program by its position, an output by its place, a buffer of the plan by its place; a
number that launches count with."""

Source: TypeAlias = (
    tuple[Literal["data"], TensorId]
    | tuple[Literal["stride"], TensorId, int]
    | tuple[Literal["extent"], TensorId, int]
    | tuple[Literal["length"], Axis]
    | tuple[Literal["scalar"], int]
    | tuple[Literal["seed"]]
    | tuple[Literal["map"], TensorId, Storage, int, int, int, int, int, int]
    | tuple[Literal["counter"]]
    | tuple[Literal["section"], Axis, int, int]
)
"""Where a launch finds a parameter's value:

data    the address of a tensor's first element; one without elements still has an address, with one element
stride  elements from one position of a memory axis to the next; 0 where it broadcasts
extent  how many positions a memory axis has; 1 where it broadcasts
length  of an axis of the program
scalar  the argument at a position
seed    the address of a 64-bit seed
map     how a tensor is copied in boxes: its storage, the places of its row and its column axis, rows of a
        box, columns of a panel, panels of a box (0: all of them), heads whose rows lie side by side in it
counter the address of a number that is 0 before and after a launch, and no other launch's
section how many positions of the grid's axes share a cache, each reading so many bytes for each position
        along an axis; 0 bytes: one
"""

MAP_BYTES = 128
"""Size of a tensor map, and what it is aligned to."""


@dataclass(frozen=True)
class Field:
    """One member of ``struct Params``."""

    name: str
    ctype: str
    source: Source


_FORMATS: Mapping[str, str] = {
    "int64": "q",
    "int32": "i",
    "float": "f",
    "bool": "?",
    "TensorMap": f"{MAP_BYTES}s",
}


def pack(fields: Sequence[Field], values: Sequence[int | float | bytes]) -> bytes:
    """The struct's bytes, aligned as C does; a pointer is its address."""
    return struct.pack(struct_format(fields), *values).ljust(packed_bytes(fields), b"\0")


def packed_bytes(fields: Sequence[Field]) -> int:
    """The struct's size."""
    size = struct.calcsize(struct_format(fields))
    return -(-size // MAP_BYTES) * MAP_BYTES if has_maps(fields) else size


def has_maps(fields: Iterable[Field]) -> bool:
    """Whether the struct begins with tensor maps."""
    return any(field.source[0] == "map" for field in fields)


def struct_format(fields: Sequence[Field]) -> str:
    """The struct for the module `struct`: after "@", which says "as C aligns", a code for each member."""
    codes = codes_of(fields)
    return "@" + "".join(codes) + f"0{'q' if any(code in 'Pq' for code in codes) else 'i'}"


def codes_of(fields: Sequence[Field]) -> list[str]:
    """A code of the module `struct` for each member; maps, which it does not align, come first."""
    return ["P" if field.ctype.endswith("*") else _FORMATS[field.ctype] for field in fields]


@dataclass(frozen=True)
class Tensor:
    """How a tensor reads in the emitted text."""

    id: TensorId
    name: str
    storage: Storage
    layout: tuple[Axis, ...]
    written: bool
    called: str
    """The user's name, for comments."""
    tiles: tuple[int, ...] = ()
    """How many positions of each axis an element stands for; empty: one."""
    whole: bool = False
    """Whether an element has a number for each of them: a piece, as templates/device/add.cuh has it."""
    steps: tuple[int, ...] = ()
    """The last of its strides, as far as they are known when the text is emitted."""

    @property
    def pointer(self) -> str:
        """The parameter that holds its address."""
        return f"p.{self.name}"

    @property
    def strides(self) -> tuple[str, ...]:
        """The parameters that hold its strides, or numbers that are known."""
        named = self.layout[: len(self.layout) - len(self.steps)]
        return (*(f"p.{self.name}_{axis}" for axis in named), *map(str, self.steps))

    @property
    def dense(self) -> bool:
        """Whether neighbours along its last axis lie side by side: outputs are allocated so."""
        return self.id[0] == "output"

    @property
    def extents(self) -> tuple[str, ...]:
        """The parameters that hold how many positions each axis of its memory has."""
        return tuple(f"p.{self.name}_{axis}_size" for axis in self.layout)

    @property
    def ctype(self) -> str:
        """The type of a pointer to its elements."""
        return f"{'' if self.written else 'const '}{self.storage}*"

    @property
    def shape(self) -> str:
        """Its axes, as a comment has them."""
        tiles = self.tiles or (1,) * len(self.layout)
        axes = zip(self.layout, tiles, strict=True)
        sides = [axis if tile == 1 else f"{axis} / {tile}" for axis, tile in axes]
        return f"[{', '.join([*sides, str(math.prod(tiles))] if self.whole else sides)}]"


@dataclass(frozen=True)
class Constant:
    """A number known when the text is emitted."""

    name: str
    value: float | int | bool
    comment: str

    @property
    def definition(self) -> str:
        """How it is declared."""
        return f"constexpr {written(type_of(self.value))} {self.name} = {number(self.value)};"


_LOG2E = Constant("LOG2E", math.log2(math.e), "exp(x) = 2^(x LOG2E)")


def number(value: float | int | bool) -> str:
    """A number as CUDA has it: the shortest text that gives back its fp32 value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value}ll" if type_of(value) == "int64" else f"{value}"
    if math.isnan(value):
        return "NAN"
    single = to_fp32(value)
    if math.isinf(single):
        return "INFINITY" if single > 0 else "-INFINITY"
    short = (float(f"{single:.{digits}g}") for digits in range(1, 10))
    return f"{next(x for x in short if to_fp32(x) == single)!r}f"


def type_of(value: float | int | bool) -> CType:
    """The type of such a number."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, float):
        return "float"
    return "int32" if -(2**31) < value < 2**31 else "int64"


def to_fp32(value: float) -> float:
    """The nearest fp32 number; what is too large is infinite."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


class Parameters:
    """The names of everything a program's kernels are given; `fields` keeps what a text uses."""

    def __init__(self, plan: Plan) -> None:
        graph = plan.problem.graph
        self._sizes = dict(plan.sizes)
        self._arguments = len(graph.arguments)
        self._scalars: list[Scalar] = [a for a in graph.arguments if isinstance(a, Scalar)]
        self._constants: dict[Node, Constant] = {}
        self.tensors: dict[TensorId, Tensor] = {}
        inputs = [a for a in graph.arguments if isinstance(a, Input)]
        names, output_names = names_of(graph)
        for argument, storage in zip(inputs, plan.problem.inputs, strict=True):
            at: TensorId = ("argument", argument.position)
            name = names[argument.position]
            self.tensors[at] = Tensor(at, name, storage, argument.layout, False, argument.name)
        for i, buffer in enumerate(plan.buffers):
            at = ("buffer", i)
            steps = _known_steps(buffer, self._sizes) if buffer.whole else ()
            self.tensors[at] = Tensor(
                at, buffer.name, buffer.storage, buffer.axes, True, "", buffer.tiles, buffer.whole, steps
            )
        for i, (output, name, storage) in enumerate(
            zip(graph.outputs, output_names, plan.outputs, strict=True)
        ):
            at = ("output", i)
            self.tensors[at] = Tensor(at, name, storage, output.layout, True, output.name)
        self._buffers = {buffer.name: i for i, buffer in enumerate(plan.buffers)}
        self._program = graph
        self._prepared = plan.prepared
        self._maps: dict[str, Field] = {}
        self._sections: dict[str, Field] = {}

    def tensor(self, node: Input) -> Tensor:
        """The tensor an input node reads: an argument, or a buffer written by an earlier kernel."""
        if node.position < self._arguments:
            return self.tensors["argument", node.position]
        return self.tensors["buffer", node.position - self._arguments]

    def prepared(self, op: str, node: Node, tiles: Tiles) -> Tensor | None:
        """Where what is prepared of ``node`` over such tiles lies."""
        for each in self._prepared:
            if (each.op, each.node, each.tiles) == (op, node, tiles):
                return self.tensors["buffer", self._buffers[each.name]]
        return None

    def buffer(self, name: str) -> Tensor:
        """Memory between kernels, by its name."""
        return self.tensors["buffer", self._buffers[name]]

    def written(self, stage: str, output: Output) -> Tensor:
        """The tensor an output of a stage goes to."""
        if stage != self._program.name and output.name in self._buffers:
            return self.tensors["buffer", self._buffers[output.name]]
        place = next(
            i
            for i, each in enumerate(self._program.outputs)
            if each.name == output.name and each.layout == output.layout
        )
        return self.tensors["output", place]

    def constant_length(self, axis: Axis) -> str:
        """The name of a length fixed at compile time."""
        return LENGTHS.get(axis, f"{axis}_len").upper()

    def length(self, axis: Axis) -> str:
        """The parameter that holds the length of an axis."""
        return f"p.{LENGTHS.get(axis, f'{axis}_len')}"

    def scalar(self, node: Scalar) -> str:
        """The parameter that holds a number given at each call."""
        return f"p.scalar{self._scalars.index(node)}"

    def seed(self) -> str:
        """The parameter that holds the address of the seed."""
        return "p.seed"

    def map(
        self,
        tensor: Tensor,
        rows: Axis,
        columns: Axis,
        box_rows: int,
        panel: int,
        panels: int = 0,
        heads: int = 1,
    ) -> str:
        """The parameter that says how a tensor is copied in boxes of so many panels; 0: of all of them."""
        places = tensor.layout.index(rows), tensor.layout.index(columns)
        number = 0
        while True:
            name = f"{tensor.name}_map{number or ''}"
            box = box_rows, panel, panels, heads
            field = Field(name, "TensorMap", ("map", tensor.id, tensor.storage, *places, *box))
            if self._maps.setdefault(name, field) == field:
                return f"p.{name}"
            number += 1

    def section(self, axis: Axis, bytes_: int, most_bytes: int) -> str:
        """The parameter that says how many positions of the grid's axes share a cache."""
        number = 0
        while True:
            name = f"section{number or ''}"
            field = Field(name, "int32", ("section", axis, bytes_, most_bytes))
            if self._sections.setdefault(name, field) == field:
                return f"p.{name}"
            number += 1

    def constant(self, node: Node, value: float | int | bool) -> str:
        """The name of a number computed from fixed lengths."""
        if node not in self._constants:
            letter = "SCALE" if node.kind == "float" else "COUNT"
            same = sum(c.name.startswith(letter) for c in self._constants.values())
            self._constants[node] = Constant(f"{letter}{same or ''}", value, show(node))
        return self._constants[node].name

    def constants(self, text: str) -> list[Constant]:
        """The constants that ``text`` uses."""
        words = set(re.findall(r"\b[A-Z][A-Z0-9_]*\b", text))
        return [c for c in (*self._constants.values(), _LOG2E) if c.name in words]

    def lengths(self, text: str) -> list[str]:
        """``NAME = value`` of the fixed lengths that ``text`` uses."""
        words = set(re.findall(r"\b[A-Z][A-Z0-9_]*\b", text))
        named = [(self.constant_length(axis), size) for axis, size in self._sizes.items()]
        return [f"{name} = {size}" for name, size in named if name in words]

    def fields(self, text: str) -> tuple[Field, ...]:
        """The parameters that ``text`` uses, widest first, so that no padding lies between them."""
        used = set(re.findall(r"\bp\.(\w+)", text))
        return tuple(field for field in self._all() if field.name in used)

    def members(self, fields: Sequence[Field]) -> list[str]:
        """The lines of ``struct Params``: a tensor and its strides, with its shape, then the rest by type."""
        lines: list[str] = []
        for field in fields:
            if field.source[0] == "map":
                tensor = self.tensors[field.source[1]]
                called = f"  {tensor.called}" if tensor.called else ""
                *_, rows, _, _, heads = field.source
                box = f"in boxes of {rows} rows" + (f" of {heads} heads" if heads > 1 else "")
                lines.append(f"TensorMap {field.name};  // {tensor.shape}{called}, {box}")
        for tensor in self.tensors.values():
            mine = [
                field
                for field in fields
                if field.source[0] in ("data", "stride") and field.source[1] == tensor.id
            ]
            pointer = [field for field in mine if field.source[0] == "data"]
            strides = [field.name for field in mine if field.source[0] == "stride"]
            if pointer:
                called = f"  {tensor.called}" if tensor.called else ""
                lines.append(f"{pointer[0].ctype} {pointer[0].name};  // {tensor.shape}{called}")
            if strides:
                lines.append(f"int64 {', '.join(strides)};")
        rest = [field for field in fields if field.source[0] not in ("map", "data", "stride")]
        for ctype in dict.fromkeys(field.ctype for field in rest):
            names = [field.name for field in rest if field.ctype == ctype]
            lines.append(f"{'int' if ctype == 'int32' else ctype} {', '.join(names)};")
        return lines

    def _all(self) -> Iterable[Field]:
        yield from self._maps.values()
        for at, tensor in self.tensors.items():
            yield Field(tensor.name, tensor.ctype, ("data", at))
            for i, axis in enumerate(tensor.layout):
                yield Field(f"{tensor.name}_{axis}", "int64", ("stride", at, i))
        yield Field("seed", "const uint64*", ("seed",))
        yield Field("counter", "int32*", ("counter",))
        for at, tensor in self.tensors.items():
            for i, axis in enumerate(tensor.layout):
                yield Field(f"{tensor.name}_{axis}_size", "int32", ("extent", at, i))
        for axis in self._axes():
            yield Field(self.length(axis)[2:], "int32", ("length", axis))
        yield from self._sections.values()
        for stored, ctype in (
            ("int", "int32"),
            ("float", "float"),
            ("bool", "bool"),
        ):  # as the text groups them
            for i, scalar in enumerate(self._scalars):
                if scalar.stored == stored:
                    yield Field(f"scalar{i}", ctype, ("scalar", scalar.position))

    def _axes(self) -> list[Axis]:
        axes = {axis for tensor in self.tensors.values() for axis in ir.split_heads(tensor.layout)}
        return [axis for axis in ir.sort_axes(axes) if axis not in self._sizes]


def _known_steps(buffer: Buffer, sizes: Mapping[Axis, int]) -> tuple[int, ...]:
    """The last strides of a buffer of pieces, in numbers, up to an axis whose length is not known."""
    step, found = math.prod(buffer.tiles), list[int]()
    for axis, tile in zip(reversed(buffer.axes), reversed(buffer.tiles), strict=True):
        found.insert(0, step)
        if axis not in sizes:
            break
        step *= -(-sizes[axis] // tile)
    return tuple(found)
