"""Tensor maps: how a tensor lies in global memory and in which boxes a kernel copies it, as 128 bytes of its
parameters; one form for GPUs, one for the emulator.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from fagen.errors import LaunchError, ToolchainError

MAP_BYTES = 128
"""Size and alignment of a map."""

_AXES = 5  # column in a panel, row, panel, head, batch
_ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
_NAMES = {"fp16": "FLOAT16", "bf16": "BFLOAT16", "fp32": "FLOAT32"}


@dataclass(frozen=True)
class TensorMap:
    """A tensor over five axes: column in a panel, row, panel, head, batch.

    address  of its first element, a multiple of 16
    storage  "fp16", "bf16" or "fp32"
    lengths  of the five axes; outside them a load gives zeros and a store writes nothing
    strides  bytes from one position of axes 1 to 4 to the next, multiples of 16; a column follows the other
    box      positions of each axis copied at once, up to 256; the first are a panel's row: 32, 64 or 128
             bytes, whose 16-byte chunks are permuted in shared memory
    """

    address: int
    storage: Literal["fp16", "bf16", "fp32"]
    lengths: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int]
    box: tuple[int, int, int, int, int]

    def for_emulator(self) -> bytes:
        """The map as ``emulator/tma.cuh`` reads it; the address comes first."""
        element_bytes = _ELEMENT_BYTES[self.storage]
        sizes = element_bytes * self.box[0], element_bytes
        packed = struct.pack("<Q4q5I5H2H", self.address, *self.strides, *self.lengths, *self.box, *sizes)
        return packed.ljust(MAP_BYTES, b"\0")

    def for_gpu(self) -> bytes:
        """The map as the driver encodes it (cuTensorMapEncodeTiled).

        Raises ToolchainError without cuda-bindings, LaunchError with the driver's reason.
        """
        cuda, encode = _encoder(self.box[0], self.storage)
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
def _encoder(columns: int, storage: str) -> tuple[Any, Callable[..., Any]]:
    """The driver's functions, and the encoding of maps whose panels have so many columns."""
    cuda = driver()
    swizzle = getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_ELEMENT_BYTES[storage] * columns}B")
    data_type = getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_NAMES[storage]}")
    rest = (
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )

    def encode(address: int, *shape: Any) -> Any:
        return cuda.cuTensorMapEncodeTiled(data_type, _AXES, address, *shape, *rest)

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
            works="pip install 'fagen[cuda]', or family='sm80'",
        ) from error
    return cuda
