"""One row for each GPU: every number and capability that planning asks for.

Nothing else names an architecture: code asks a row what the part can do (``arch.copy``, ``arch.families``).
Sources: the vendor's architecture white papers and the tables of compute capabilities in the CUDA programming
guide; rates are those of the boost clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from fagen.errors import PlanError

Copy: TypeAlias = Literal["load", "cp.async", "tma"]
"""The best way to bring a tile into shared memory: through registers, asynchronously, or by a bulk tensor
copy."""


@dataclass(frozen=True)
class Arch:
    """A GPU. Bytes and rates are those of one multiprocessor unless the name says ``memory`` or ``l2``."""

    name: str
    """What people call it; also the value of ``arch=`` and of a plan's key."""
    target: str
    """What the compiler is told: ``sm_80``."""
    families: tuple[str, ...]
    """Kernel families it can run, the one that is tried first last."""
    copy: Copy
    multiprocessors: int
    clock_hz: float
    shared_block_bytes: int
    """The most a block may ask for."""
    shared_bytes: int
    shared_reserved_bytes: int
    """Taken by the system from each resident block."""
    registers: int
    threads: int
    blocks: int
    memory_bytes_per_second: float
    l2_bytes: int
    l2_bytes_per_second: float
    fp32_fma_per_cycle: int
    tensor16_fma_per_cycle: int
    """Products of 16-bit operands, accumulated in fp32."""
    mma_fma_per_cycle: int
    """The part of them that ``mma.sync``, the instruction of one warp, reaches."""
    shared_bytes_per_cycle: int = 128
    exp_per_cycle: int = 16
    """exp2, log2, rcp, rsqrt, sin, cos, tanh: one unit serves all."""
    registers_thread: int = 255
    threads_block: int = 1024
    warp: int = 32
    emulated: bool = False
    """Whether its kernels run on a CPU; ``target`` is then what they may be compiled for as well."""

    @property
    def said(self) -> str:
        """What a sentence calls it."""
        return "the emulator" if self.emulated else self.target


_AMPERE = Arch(
    name="A100",
    target="sm_80",
    families=("simt", "sm80"),
    copy="cp.async",
    multiprocessors=108,
    clock_hz=1.41e9,
    shared_block_bytes=166_912,
    shared_bytes=167_936,
    shared_reserved_bytes=1_024,
    registers=65_536,
    threads=2_048,
    blocks=32,
    memory_bytes_per_second=1.555e12,
    l2_bytes=41_943_040,
    l2_bytes_per_second=4.8e12,
    fp32_fma_per_cycle=64,
    tensor16_fma_per_cycle=1_024,
    mma_fma_per_cycle=1_024,
)
_HOPPER = replace(
    _AMPERE,
    name="H100",
    target="sm_90a",
    families=("simt", "sm80", "sm90"),
    copy="tma",
    multiprocessors=132,
    clock_hz=1.83e9,
    shared_block_bytes=232_448,
    shared_bytes=233_472,
    memory_bytes_per_second=3.35e12,
    l2_bytes=52_428_800,
    l2_bytes_per_second=6.5e12,
    fp32_fma_per_cycle=128,
    tensor16_fma_per_cycle=2_048,
)
_GENERIC = replace(
    _AMPERE,
    name="generic",
    target="sm_75",
    families=("simt",),
    copy="load",
    multiprocessors=40,
    clock_hz=1.59e9,
    shared_block_bytes=65_536,
    shared_bytes=65_536,
    shared_reserved_bytes=0,
    threads=1_024,
    blocks=16,
    memory_bytes_per_second=3.2e11,
    l2_bytes=4_194_304,
    l2_bytes_per_second=1.2e12,
    tensor16_fma_per_cycle=512,
    mma_fma_per_cycle=512,
)
_SMALL_AMPERE = replace(
    _AMPERE,
    name="RTX 3090",
    target="sm_86",
    multiprocessors=82,
    clock_hz=1.695e9,
    shared_block_bytes=101_376,
    shared_bytes=102_400,
    threads=1_536,
    blocks=16,
    memory_bytes_per_second=9.36e11,
    l2_bytes=6_291_456,
    l2_bytes_per_second=1.9e12,
    fp32_fma_per_cycle=128,
    tensor16_fma_per_cycle=256,
    mma_fma_per_cycle=256,
)
_ADA = replace(
    _SMALL_AMPERE,
    name="RTX 4090",
    target="sm_89",
    multiprocessors=128,
    clock_hz=2.52e9,
    blocks=24,
    memory_bytes_per_second=1.008e12,
    l2_bytes=75_497_472,
    l2_bytes_per_second=5.0e12,
)

ROWS: tuple[Arch, ...] = (
    _GENERIC,
    _AMPERE,
    _SMALL_AMPERE,
    _ADA,
    _HOPPER,
    replace(_HOPPER, name="H200", memory_bytes_per_second=4.8e12),
    replace(
        _GENERIC,
        name="emulator",
        families=("sm90", "sm80", "simt"),
        shared_block_bytes=232_448,
        shared_bytes=233_472,
        emulated=True,
    ),
)
"""All rows; of those with one target the first stands for it."""


@dataclass(frozen=True)
class Family:
    """What kernels of a family can do.

    tensor_cores  multiply on tensor cores: 16-bit operands, all of one type
    adds          add partial sums to memory, of all blocks in no fixed order; with roles also in turns
    roles         give warps roles: some copy, others multiply
    plain         multiply number by number: operands of any type, and stages that are no loop over tiles
    """

    tensor_cores: bool = False
    adds: bool = False
    roles: bool = False
    plain: bool = False


FAMILIES: Mapping[str, Family] = {
    "simt": Family(plain=True),
    "sm80": Family(tensor_cores=True, adds=True),
    "sm90": Family(tensor_cores=True, adds=True, roles=True),
}
"""All kernel families there are."""
PLAIN = next(name for name, family in FAMILIES.items() if family.plain)
"""The family of what no other runs."""

_OLDEST, _TENSOR_CORES = 75, 80
_ALIASES = {"a10": "RTX 3090"}


def arch_for(name: str | tuple[int, int]) -> Arch:
    """The row of a GPU.

    ``name`` is a row's name (``A100``; also within a device's full name, ``NVIDIA A100-SXM4-40GB``), a target
    (``sm_90a``, ``sm_90``) or a compute capability (``(8, 0)``, ``8.0``). A newer or a less common compute
    capability gets limits that every part from sm_75, or from sm_80 on has. `PlanError` lists what is known.
    """
    if isinstance(name, tuple):
        return _of_capability(name[0] * 10 + name[1], str(name))
    if not isinstance(name, str):
        raise _unknown(name)
    word = name.strip().lower()
    for row in ROWS:
        if word in (row.name.lower(), row.name.lower().replace(" ", "")):
            return row
    capability = word.removeprefix("sm_").removesuffix("a").replace(".", "")
    if capability.isdecimal():
        return _of_capability(int(capability), name)
    words = word.replace("-", " ").split()
    for row in sorted(ROWS, key=lambda row: -len(row.name)):
        if f" {row.name.lower()} " in f" {' '.join(words)} ":
            return row
    for alias, row_name in _ALIASES.items():
        if alias in words:
            return arch_for(row_name)
    raise _unknown(name)


def _of_capability(capability: int, asked: str) -> Arch:
    for row in ROWS:
        if int(row.target.removeprefix("sm_").removesuffix("a")) == capability:
            return row
    if capability < _OLDEST:
        raise _unknown(asked)
    like = _SMALL_AMPERE if capability >= _TENSOR_CORES else _GENERIC
    return replace(like, name=f"sm_{capability}", target=f"sm_{capability}")


def _unknown(asked: object) -> PlanError:
    known = ", ".join(dict.fromkeys(name for row in ROWS for name in (row.name, row.target)))
    return PlanError(
        f"no GPU is known as {asked!r}", works=f"arch= takes {known} or any sm_ from sm_{_OLDEST} on"
    )
