"""Tensor maps: how a tensor lies in global memory and in which boxes a kernel copies it, as 128 bytes of its
parameters; one form for GPUs, one for the emulator.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from fagen.errors import LaunchError, ToolchainError, pip_install
from fagen.plan.plan import STORAGE_BYTES, Storage

MAP_BYTES = 128
"""Size and alignment of a map."""

NEAR = 16
"""Bytes from one position to the next along an axis that has only one."""

_AXES = 5  # column in a panel, row, panel, head, batch
_FAR = 2  # of them: head, batch
_NAMES = {"fp16": "FLOAT16", "bf16": "BFLOAT16", "fp32": "FLOAT32"}

N = TypeVar("N", int, str)
"""A number, or the formula of one in C."""


@dataclass(frozen=True)
class Geometry(Generic[N]):
    """How a tensor lies over five axes, column in a panel, row, panel, head, batch, and how it is copied.

    storage  "fp16", "bf16" or "fp32"
    lengths  of the five axes; outside them a load gives zeros and a store writes nothing
    strides  bytes from one position of axes 1 to 4 to the next, multiples of 16; a column follows the other
    box      positions of each axis copied at once, up to 256; the first are a panel's row
    """

    storage: Storage
    lengths: tuple[N, N, N, N, N]
    strides: tuple[N, N, N, N]
    box: tuple[int, int, int, int, int]

    @property
    def data_type(self) -> str:
        """The driver's name of what an element is."""
        return f"CU_TENSOR_MAP_DATA_TYPE_{_NAMES[self.storage]}"

    @property
    def swizzle(self) -> str:
        """The driver's name of how the 16-byte chunks of a panel's row are permuted in shared memory: of one
        of 32, 64 or 128 bytes."""
        return f"CU_TENSOR_MAP_SWIZZLE_{STORAGE_BYTES[self.storage] * self.box[0]}B"


def geometry(
    source: tuple[Storage, int, int, int, int, int, int],
    dimensions: Sequence[tuple[N, N]],
    columns: int,
    number: Callable[[int], N],
    product: Callable[[N, N], N],
) -> Geometry[N]:
    """How a tensor is copied whose ``dimensions`` are lengths and elements from one position to the next.

    ``source`` is what a field of tensor maps says behind the tensor: storage, the dimensions of rows and
    columns, rows of a box, columns of a panel, panels of a box (0: all), heads of a box. ``number`` makes an
    N and ``product`` that of two. Where a box has several heads, it is of one panel, and their rows lie side
    by side: the axes are column, head, none, row, batch.
    """
    storage, row, column, rows, panel, boxed, together = source
    bytes_ = STORAGE_BYTES[storage]
    panels = columns // panel if columns % panel == 0 else 1
    others: list[int] = [i for i in range(len(dimensions))[::-1] if i not in (row, column)]
    axes: list[tuple[N, N]] = [dimensions[i] for i in (row, *others)]
    if len(axes) == _FAR + 2:  # heads in two axes, of a tensor that is contiguous
        (near, step), (far, far_step) = axes[1:3]
        axes[1:3] = [(product(near, far), step or far_step)]
    strided: list[tuple[N, N]] = [(length, product(number(bytes_), step)) for length, step in axes]
    strided += [(number(1), number(NEAR))] * (_FAR + 1 - len(axes))
    (tall, row_step), (heads, head_step), (batch, batch_step) = strided
    if together > 1:
        return Geometry(
            storage,
            (number(columns), heads, number(1), tall, batch),
            (head_step, number(NEAR), row_step, batch_step),
            (panel, together, 1, rows, 1),
        )
    return Geometry(
        storage,
        (number(columns // panels), tall, number(panels), heads, batch),
        (row_step, number(bytes_ * panel), head_step, batch_step),
        (panel, rows, boxed or panels, 1, 1),
    )


@dataclass(frozen=True)
class TensorMap(Geometry[int]):
    """A tensor at an ``address``, that of its first element, a multiple of 16."""

    address: int

    def for_emulator(self) -> bytes:
        """The map as ``emulator/tma.cuh`` reads it; the address comes first."""
        element_bytes = STORAGE_BYTES[self.storage]
        sizes = element_bytes * self.box[0], element_bytes
        packed = struct.pack("<Q4q5I5H2H", self.address, *self.strides, *self.lengths, *self.box, *sizes)
        return packed.ljust(MAP_BYTES, b"\0")

    def for_gpu(self) -> bytes:
        """The map as the driver encodes it (cuTensorMapEncodeTiled).

        Raises ToolchainError without cuda-bindings, LaunchError with the driver's reason.
        """
        cuda, encode = _encoder(self.data_type, self.swizzle)
        wide, narrow = cuda.cuuint64_t, cuda.cuuint32_t
        status, found = encode(
            self.address,
            [wide(each) for each in self.lengths],
            [wide(each) for each in self.strides],
            [narrow(each) for each in self.box],
            [narrow(1)] * _AXES,
        )
        if status != cuda.CUresult.CUDA_SUCCESS:
            raise LaunchError("the driver refuses a tensor map", values={"reason": status, "map": self})
        return ctypes.string_at(found.getPtr(), MAP_BYTES)


@lru_cache(maxsize=8)
def _encoder(data_type: str, swizzle: str) -> tuple[Any, Callable[..., Any]]:
    """The driver's functions, and the encoding of maps of such elements, permuted so."""
    cuda = driver()
    kind = getattr(cuda.CUtensorMapDataType, data_type)
    rest = (
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(cuda.CUtensorMapSwizzle, swizzle),
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )

    def encode(address: int, *shape: Any) -> Any:
        return cuda.cuTensorMapEncodeTiled(kind, _AXES, address, *shape, *rest)

    return cuda, encode


@lru_cache(maxsize=1)
def driver() -> Any:
    """The driver as cuda-bindings calls it. Raises ToolchainError where it is not installed."""
    try:
        from cuda.bindings import driver as cuda
    except ImportError as error:
        raise ToolchainError(
            "cuda-bindings is needed for tensor maps and does not load",
            values={"reason": error},
            works=f"{pip_install('cuda')}, or family='sm80'",
        ) from error
    return cuda
