"""A kernel as files that need no Python: .cu, headers, plan, and a program that runs and checks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from fagen.compile import Compiled, plan_json
from fagen.derive.walk import PART_AXIS
from fagen.emit.params import Field, TensorId, has_maps
from fagen.emit.render import laid_out, render
from fagen.errors import UsageError
from fagen.ir.graph import Axis, Graph, Input, Scalar, Scatter, walk
from fagen.ir.show import length_name
from fagen.paths import templates_dir
from fagen.plain import TYPES, axes_of, plain_text
from fagen.plan.arch import arch_for
from fagen.plan.plan import Plan, Storage
from fagen.plan.profile import storages
from fagen.run.debug import file_name
from fagen.run.source import included
from fagen.run.tensor_map import geometry

_LENGTHS = {"b": 2, "hk": 2, "g": 2, "q": 200, "kv": 333, PART_AXIS: 3}
"""What the program runs at unless it is told otherwise: no multiples of a tile."""
_LENGTH = 64


@dataclass(frozen=True)
class Array:
    """A tensor of the program: its name in ``plain.h``, its axes in memory, and what it holds."""

    name: str
    id: TensorId
    called: str
    axes: tuple[Axis, ...]
    storage: Storage
    of: str
    sorted: bool = False
    tiles: tuple[int, ...] = ()
    zeroed: bool = False
    whole: bool = False

    @property
    def count(self) -> str:
        """The number of its elements."""
        return " * ".join(self._extents) or "1"

    @property
    def stride(self) -> list[str]:
        """Elements from one position of each axis to the next."""
        return [" * ".join(self._extents[i + 1 :]) or "1" for i in range(len(self.axes))]

    @property
    def _extents(self) -> list[str]:
        tiles = self.tiles or (1,) * len(self.axes)
        pairs = zip(map(extent, self.axes), tiles, strict=True)
        sides = [length if tile == 1 else f"(({length} + {tile - 1}) / {tile})" for length, tile in pairs]
        return [*sides, str(prod(tiles))] if self.whole else sides


def extent(axis: Axis) -> str:
    """The length of an axis as a formula, that of ``h`` as the product of its two."""
    return "kv_heads * group" if axis == "h" else length_name(axis)


def export(compiled: Compiled, folder: Path) -> Path:
    """Write a kernel into ``folder``: NAME.cu, headers, plan.json, plain.h and main.cu; return the folder."""
    plan, source = compiled.plan, compiled.source
    if any(isinstance(node, Scatter) for node in walk(out.node for out in plan.problem.graph.outputs)):
        raise UsageError(
            "a kernel that adds to memory at computed positions has no checker of its own",
            call=compiled.name,
            works="kernel.source is its text",
        )
    folder.mkdir(parents=True, exist_ok=True)
    file = file_name(compiled.name) + ".cu"
    files = {
        file: source,
        "plan.json": plan_json(plan),
        "plain.h": plain_text(plan.problem.graph),
        "main.cu": main_text(compiled, file),
        **included(source, templates_dir() / "device"),
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def main_text(compiled: Compiled, file: str) -> str:
    """The program that launches what ``file`` holds on random data and compares it with ``plain.h``."""
    plan, recipe = compiled.plan, compiled.chosen.recipe
    graph = plan.problem.graph
    fixed = dict(plan.sizes)
    arrays = _arrays(graph, plan)
    by_id = {array.id: array for array in arrays}
    text = render(
        "launcher/main.cu.j2",
        name=compiled.name,
        file=file,
        target=arch_for(plan.problem.arch).target,
        lengths=[
            (length_name(axis), fixed.get(axis, _LENGTHS.get(axis, _LENGTH)), axis in fixed)
            for axis in (*axes_of(graph), *([PART_AXIS] if recipe.shares else []))
        ],
        inputs=[array for array in arrays if array.id[0] == "argument"],
        outputs=[array for array in arrays if array.id[0] == "output"],
        buffers=[array for array in arrays if array.id[0] == "buffer"],
        scalars=[argument for argument in graph.arguments if isinstance(argument, Scalar)],
        calls=[
            *(f"in{a.position}" + (".as.data()" if isinstance(a, Input) else "") for a in graph.arguments),
            *["seed"] * graph.random,
            *(f"out{i}.as.data()" for i in range(len(graph.outputs))),
        ],
        extent=extent,
        random=graph.random,
        members=[(field.name, _value(field, by_id, fixed)) for field in recipe.fields],
        maps=has_maps(recipe.fields),
        counts=any(field.source[0] == "counter" for field in recipe.fields),
        functions=[
            (
                function,
                " * ".join(f"blocks({extent(axis)}, {tile})" for axis, tile in function.grid) or "1",
            )
            for function in recipe.functions
        ],
        storages=sorted({array.storage for array in arrays}),
    )
    return laid_out(text)


def _arrays(graph: Graph, plan: Plan) -> list[Array]:
    stored = storages(plan.problem)
    found = [
        Array(
            f"in{each.position}",
            ("argument", each.position),
            each.name,
            each.layout,
            stored[each.position],
            TYPES[each.stored],
            each.sorted,
        )
        for each in graph.arguments
        if isinstance(each, Input)
    ]
    found += [
        Array(f"out{i}", ("output", i), output.name, output.layout, plan.outputs[i], "double")
        for i, output in enumerate(graph.outputs)
    ]
    found += [
        Array(
            f"buffer{i}",
            ("buffer", i),
            buffer.name,
            buffer.axes,
            buffer.storage,
            "double",
            tiles=buffer.tiles,
            zeroed=buffer.zeroed,
            whole=buffer.whole,
        )
        for i, buffer in enumerate(plan.buffers)
    ]
    return found


def _value(field: Field, arrays: dict[TensorId, Array], fixed: Mapping[Axis, int]) -> str:
    """What a member of the parameter struct is set to."""
    source = field.source
    if source[0] == "data":
        return f"{arrays[source[1]].name}.device"
    if source[0] == "stride":
        return arrays[source[1]].stride[source[2]]
    if source[0] == "extent":
        return extent(arrays[source[1]].axes[source[2]])
    if source[0] == "length":
        return extent(source[1])
    if source[0] == "map":
        return _map(arrays[source[1]], source[2:], fixed)
    if source[0] == "counter":
        return "counter"
    if source[0] == "section":
        return "1"  # one head at a time: right for every length
    return f"in{source[1]}" if source[0] == "scalar" else "seed_address"


def _map(
    array: Array, source: tuple[Storage, int, int, int, int, int, int], fixed: Mapping[Axis, int]
) -> str:
    """A tensor map, as `main.cu` makes it."""
    dimensions = list(zip(map(extent, array.axes), array.stride, strict=True))
    made = geometry(source, dimensions, fixed[array.axes[source[2]]], str, "{} * {}".format)
    shape = [_unsigned(made.lengths), _unsigned(made.strides), map(str, made.box)]
    parts = ("{" + ", ".join(part) + "}" for part in shape)
    return f"tensor_map({array.name}.device, {made.data_type}, {made.swizzle}, {', '.join(parts)})"


def _unsigned(formulas: Sequence[str]) -> list[str]:
    return [f"static_cast<cuuint64_t>({formula})" for formula in formulas]
