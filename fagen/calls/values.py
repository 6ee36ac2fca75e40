"""What a call's values mean for a graph: kinds, devices, dtypes, lengths, or why they mean nothing."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fagen.compile import feature_axes
from fagen.errors import DtypeError, UsageError
from fagen.ir.check import bind_dtypes, bind_sizes
from fagen.ir.graph import Axis, Graph, Input, Kind, Scalar
from fagen.lang.expr import LARGEST, beyond_fp32
from fagen.plan.plan import Storage
from fagen.torch_op import AUTOCAST_FROM

STORAGE_OF: Mapping[torch.dtype, Storage] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}
DTYPE_OF: Mapping[Storage, torch.dtype] = {storage: dtype for dtype, storage in STORAGE_OF.items()}

READ_BYTES = 16
"""What kernels read of a row at a time where addresses and strides are multiples of it."""


@dataclass(frozen=True)
class Values:
    """The values of a call beside what its graph declares, and the one device of their tensors."""

    graph: Graph
    given: tuple[object, ...]
    device: torch.device

    @property
    def inputs(self) -> tuple[tuple[Input, Tensor], ...]:
        """The tensor arguments, each with its tensor."""
        pairs = zip(self.graph.arguments, self.given, strict=True)
        return tuple((a, value) for a, value in pairs if isinstance(a, Input) and isinstance(value, Tensor))

    def sizes(self) -> dict[Axis, int]:
        """The length of each axis."""
        return bind_sizes(
            self.graph,
            [tuple(value.shape) if isinstance(value, Tensor) else None for value in self.given],
        )


def read(graph: Graph, given: Sequence[object]) -> Values:
    """The values of a call; UsageError or DtypeError for a number in a tensor's place, or for two devices."""
    if len(given) != len(graph.arguments):
        names = ", ".join(argument.name for argument in graph.arguments)
        were = "1 value was" if len(given) == 1 else f"{len(given)} values were"
        raise UsageError(f"{were} given", call=graph.name, works=f"it takes {names}")
    for argument, value in zip(graph.arguments, given, strict=True):
        _require(graph, argument, value)
    return Values(graph, tuple(given), _device(graph, given))


def _require(graph: Graph, argument: Input | Scalar, value: object) -> None:
    """Refuse a value of another kind than its argument."""
    if isinstance(argument, Input):
        if not isinstance(value, Tensor):
            axes = " ".join(argument.layout)
            raise DtypeError(
                f"{argument.name} is {_shown(value)}",
                call=graph.name,
                works=f'it is declared Tensor["{axes}"], a tensor of torch',
            )
        if value.layout is not torch.strided or value.is_nested:
            kind = "nested" if value.is_nested else _word(value.layout)
            raise DtypeError(
                f"{argument.name} is a {kind} tensor",
                call=graph.name,
                works="dense tensors of any strides are taken",
            )
    elif isinstance(value, bool) or not isinstance(
        value, numbers.Integral if argument.stored == "int" else numbers.Real
    ):
        number = "whole number" if argument.stored == "int" else "number"
        raise DtypeError(
            f"{argument.name} is {_shown(value)}",
            call=graph.name,
            works=f'it is declared a {number}; a value on the device is declared Tensor[""]',
        )


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _word(of_torch: object) -> str:
    """A dtype or layout without its module."""
    return str(of_torch).removeprefix("torch.")


def _device(graph: Graph, given: Sequence[object]) -> torch.device:
    tensors = [value for value in given if isinstance(value, Tensor)]
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        listed = ", ".join(
            f"{argument.name} {value.device}"
            for argument, value in zip(graph.arguments, given, strict=True)
            if isinstance(value, Tensor)
        )
        raise UsageError(
            f"the tensors lie on different devices: {listed}", call=graph.name, works="move them to one"
        )
    if not devices:
        raise UsageError("no tensor was given", call=graph.name, works="a program works on tensors")
    return devices.pop()


def autocasts(values: Values, dtype: torch.dtype | None) -> dict[int, torch.dtype]:
    """What autocast to a dtype turns into it, by position; nothing where it is off.

    As for a matrix product: floating-point tensors with a head dim. What is added to scores stays as it is.
    """
    if dtype is None:
        return {}
    features = feature_axes(values.graph)
    return {
        argument.position: dtype
        for argument, tensor in values.inputs
        if features & set(argument.layout) and tensor.dtype != dtype and tensor.dtype in AUTOCAST_FROM
    }


def cast(given: Sequence[Any], casts: Mapping[int, torch.dtype]) -> list[Any]:
    """Values in the dtypes of `autocasts`, lazy negation carried out."""
    return [
        value.resolve_neg().to(casts.get(i, value.dtype)) if isinstance(value, Tensor) else value
        for i, value in enumerate(given)
    ]


def check_dtypes(values: Values) -> None:
    """DtypeError for a tensor of another kind than declared, or a product of two dtypes, all named."""
    given = [value.dtype if isinstance(value, Tensor) else None for value in values.given]
    bind_dtypes(
        values.graph,
        [None if dtype is None else _kind(dtype) for dtype in given],
        [None if dtype is None else _word(dtype) for dtype in given],
    )


def require_fp32(graph: Graph, given: Sequence[Any]) -> None:
    """UsageError for a finite number that kernels would read as an infinite one."""
    for argument, value in zip(graph.arguments, given, strict=True):
        if isinstance(argument, Scalar) and beyond_fp32(value):
            raise UsageError(f"{argument.name} is too large a number", call=graph.name, works=LARGEST)


@lru_cache(maxsize=64)
def _kind(dtype: torch.dtype) -> Kind | None:
    if dtype.is_floating_point:
        return "float"
    if dtype == torch.bool:
        return "bool"
    return None if dtype.is_complex else "int"


def storages(values: Values) -> tuple[Storage, ...]:
    """How each tensor lies in memory; DtypeError for a dtype that kernels do not read."""
    found = []
    for argument, tensor in values.inputs:
        storage = STORAGE_OF.get(tensor.dtype)
        if storage is None:
            floating = tensor.dtype.is_floating_point
            raise DtypeError(
                f"{argument.name} holds {_word(tensor.dtype)}, which kernels do not read",
                call=values.graph.name,
                works='convert it to float32, float16 or bfloat16, or take family="reference" (float64)'
                if floating
                else "convert it to int32 or int64",
            )
        found.append(storage)
    return tuple(found)


def aligned(values: Values) -> tuple[bool, ...]:
    """For each tensor, whether its rows may be read 16 bytes at a time (`Problem.aligned`); empty if all may.

    It matters for 16-bit tensors alone.
    """
    found = tuple(tensor.itemsize != 2 or _is_aligned(tensor) for _, tensor in values.inputs)
    return () if all(found) else found


def side_by_side(tensor: Tensor) -> Tensor:
    """A gradient as it came, or a copy of it that may be read 16 bytes at a time where it may not.

    Of an expanded one, as that of a sum is, each row is else read number by number, by every block anew.
    """
    apart = tensor.itemsize == 2 and tensor.dim() > 0 and not _is_aligned(tensor)
    if not apart or tensor.shape[-1] * tensor.itemsize % READ_BYTES:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _is_aligned(tensor: Tensor) -> bool:
    if tensor.dim() == 0 or tensor.data_ptr() % READ_BYTES:
        return False
    *steps, last = (
        stride if extent != 1 else None for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return last in (1, None) and all(
        step is None or step * tensor.itemsize % READ_BYTES == 0 for step in steps
    )
