"""Recipes: the parameter struct's bytes, the blocks of a launch, and the way through an index."""

import ctypes
import json
import math
import operator
import random
import re
import struct

import pytest

import fagen as fg
from fagen.compile import Compiled
from fagen.emit.params import Field, pack
from fagen.emit.program import Function
from fagen.run.recipe import Packer, Recipe, blocks, offsets_of
from fagen.run.tensor_map import geometry

CTYPES = {"int64": ctypes.c_int64, "int32": ctypes.c_int32, "float": ctypes.c_float, "bool": ctypes.c_bool}


def compiled(**parts: object) -> Compiled:
    return fg.compile(head_dim=16, dtype="bf16", arch="A100", **parts).compiled


def fields_and_values(seed: int) -> tuple[tuple[Field, ...], list[int | float | None]]:
    """Members of every kind in any order, and the value of each that shapes decide."""
    dice = random.Random(seed)
    fields: list[Field] = []
    known: list[int | float | None] = []
    for i in range(dice.randrange(1, 14)):
        kind = dice.choice(("data", "seed", "stride", "length", "float", "int32", "bool"))
        if kind in ("data", "seed"):
            fields.append(
                Field(f"f{i}", "const bf16*", ("data", ("argument", i)) if kind == "data" else ("seed",))
            )
            known.append(None)
        elif kind in ("stride", "length"):
            fields.append(Field(f"f{i}", {"stride": "int64", "length": "int32"}[kind], ("length", "q")))
            known.append(dice.randrange(-(2**31), 2**31))
        else:
            fields.append(Field(f"f{i}", kind, ("scalar", i)))
            known.append(None)
    return tuple(fields), known


@pytest.mark.parametrize("seed", range(60))
def test_the_struct_has_the_bytes_a_compiler_gives_it(seed: int) -> None:
    fields, known = fields_and_values(seed)
    dice = random.Random(-seed)
    packer = Packer(fields, lambda field: known[fields.index(field)])
    addresses = [dice.randrange(2**63) for _ in packer.data]
    numbers = [{"float": -1.5, "int32": -7, "bool": True}[fields[i].ctype] for i in packer.scalars]
    given, scalars = iter(addresses), iter(numbers)
    values = [
        value if value is not None else next(scalars if field.source[0] == "scalar" else given)
        for field, value in zip(fields, known, strict=True)
    ]
    assert packer(addresses, numbers) == pack(fields, values)
    members = [
        (field.name, ctypes.c_void_p if field.ctype.endswith("*") else CTYPES[field.ctype])
        for field in fields
    ]
    layout = type("Layout", (ctypes.Structure,), {"_fields_": members})
    assert offsets_of(fields) == tuple(getattr(layout, field.name).offset for field in fields)
    assert len(packer(addresses, numbers)) == ctypes.sizeof(layout)
    written = layout.from_buffer_copy(packer(addresses, numbers))
    assert [getattr(written, field.name) for field in fields] == values
    assert packer.offsets == [
        getattr(layout, f.name).offset for f in fields if f.source[0] in ("data", "seed")
    ]


def test_a_number_that_does_not_fit_is_refused() -> None:
    packer = Packer((Field("scalar0", "int32", ("scalar", 3)),), lambda field: None)
    with pytest.raises(struct.error):
        packer([], [2**31])


@pytest.mark.parametrize("number", [3.4e38, 3.5e38, -1e39, math.inf])
def test_a_number_too_large_for_a_float_is_infinite_as_in_c(number: float) -> None:
    fields = (
        Field("scale", "float", ("scalar", 0)),
        Field("q", "const bf16*", ("data", ("argument", 1))),
        Field("shift", "float", ("scalar", 2)),
    )
    packer = Packer(fields, lambda field: None)
    expected = ctypes.c_float(number).value
    assert struct.unpack("=f4xQf4x", packer([2**48], [number, 0.5])) == (expected, 2**48, 0.5)
    assert math.isinf(expected) == (abs(number) > 3.41e38)


def test_blocks_round_up_and_none_are_left_of_an_empty_axis() -> None:
    function = Function("forward", 128, 0, (("b", 1), ("hk", 1), ("q", 64)))
    assert blocks(function, {"b": 3, "hk": 2, "q": 129}) == 18
    assert blocks(function, {"b": 3, "hk": 2, "q": 128}) == 12
    assert blocks(function, {"b": 3, "hk": 2, "q": 0}) == 0


@pytest.mark.parametrize(
    "parts",
    [{}, {"mask": fg.dilated(20, 3), "dropout": 0.1, "return_lse": True, "bias": fg.Tensor["h q kv"]}],
    ids=["plain", "all"],
)
def test_a_recipe_survives_the_way_through_text(parts: dict[str, object]) -> None:
    recipe = compiled(**parts).chosen.recipe
    again = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
    assert again == recipe
    assert hash(again) == hash(recipe)


def test_a_saved_kernel_permutes_panels_by_their_bytes(tmp_path) -> None:
    """One of fp32 has half the columns."""
    asked = {"mask": fg.causal(), "head_dim": 64, "dtype": "bf16", "arch": "H200", "family": "sm90"}
    fg.compile(direction="backward", **asked).save(tmp_path)
    text = (tmp_path / "main.cu").read_text(encoding="utf-8")
    assert text.count("CU_TENSOR_MAP_SWIZZLE_") == text.count(" = tensor_map(")
    pattern = r"DATA_TYPE_(\w+),\s*CU_TENSOR_MAP_SWIZZLE_(\w+),[^;]*\{(\d+), [\d, ]+\}\);"
    maps = set(re.findall(pattern, text))
    assert maps == {("BFLOAT16", "128B", "64"), ("FLOAT32", "128B", "32")}


@pytest.mark.parametrize(
    ("shape", "row", "column", "heads"),
    [
        ((200, 80), 0, 1, 1),
        ((2, 3, 200, 80), 2, 3, 1),
        ((2, 4, 3, 200, 80), 3, 4, 1),
        ((2, 8, 200, 80), 2, 3, 4),
    ],
)
def test_a_tensor_map_in_numbers_is_that_in_formulas(shape, row, column, heads) -> None:
    steps = [1]
    for extent in shape[:0:-1]:
        steps.insert(0, steps[0] * extent)
    source = "bf16", row, column, 128 // heads, 16, 0, heads
    found = geometry(source, list(zip(shape, steps, strict=True)), 80, int, operator.mul)
    words = [
        (f"n{i}", " * ".join([f"n{j}" for j in range(i + 1, len(shape))]) or "1") for i in range(len(shape))
    ]
    told = geometry(source, words, 80, str, "{} * {}".format)
    values = {f"n{i}": extent for i, extent in enumerate(shape)}
    assert found.lengths == tuple(eval(each, values.copy()) for each in told.lengths)
    assert found.strides == tuple(eval(each, values.copy()) for each in told.strides)
    if heads == 1:
        assert found.box == told.box == (16, 128, 5, 1, 1)
        assert found.lengths[:3] == (16, 200, 5)
    else:
        assert found.box == told.box == (16, heads, 1, 128 // heads, 1)
        assert found.lengths == (80, 8, 1, 200, 2)
    assert found.swizzle == told.swizzle == "CU_TENSOR_MAP_SWIZZLE_32B"
