"""Tensors that a mask or score takes and nobody has given: described at once, made when a kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fagen.errors import UsageError
from fagen.ir.graph import Axis

if TYPE_CHECKING:
    from torch import Generator, Tensor

_DOCUMENTS = 4
_GLOBAL_EVERY = 64
_MOST_DISTANCES = 511
_INT32_LIMIT = 2**31


class Table:
    """A tensor to be made later; planning and emitting need its shape and dtype alone."""

    def __init__(self, shape: Sequence[int], dtype: str, make: Callable[[Generator], Tensor]) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self._make = make

    def tensor(self, generator: Generator) -> Tensor:
        """The tensor, on the CPU; what is random in it is drawn from ``generator``."""
        return self._make(generator)


def of_values(values: Sequence[Any]) -> Table:
    """A table of numbers or truth values in (nested) lists: bool, int32 or int64, fp32."""
    shape, flat = _flattened(values)
    if all(isinstance(value, bool) for value in flat):
        dtype = "bool"
    elif all(isinstance(value, int) for value in flat):
        dtype = "int32" if all(-_INT32_LIMIT <= value < _INT32_LIMIT for value in flat) else "int64"
    else:
        dtype = "float32"

    def make(_: Generator) -> Tensor:
        import torch

        return torch.tensor(flat, dtype=getattr(torch, dtype)).reshape(shape)

    return Table(shape, dtype, make)


def _flattened(values: Sequence[Any]) -> tuple[tuple[int, ...], list[Any]]:
    if not any(isinstance(value, list) for value in values):
        return (len(values),), list(values)
    rows = [_flattened(value) if isinstance(value, list) else None for value in values]
    shapes = {None if row is None else row[0] for row in rows}
    if len(shapes) > 1:
        raise UsageError(f"the rows of the table {values!r} differ in shape")
    flat = [value for row in rows if row is not None for value in row[1]]
    return (len(values), *next(shape for shape in shapes if shape is not None)), flat


def documents_of(lengths: Sequence[Any]) -> Table:
    """The document of each position, for documents of ``lengths``, a list or one for each sequence.

    One position stands behind the last document: whatever follows is read there.
    """
    sequences = lengths if any(isinstance(each, list) for each in lengths) else [lengths]
    width = max(sum(each) for each in sequences) + 1
    rows = [[i for i, length in enumerate(each) for _ in range(length)] for each in sequences]
    padded = [row + [len(each)] * (width - len(row)) for row, each in zip(rows, sequences, strict=True)]
    return of_values(padded)


@dataclass(frozen=True)
class Lengths:
    """What tensors made up are as long as."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int

    @property
    def positions(self) -> int:
        """Positions a table over both queries and keys has."""
        return max(self.q_len, self.kv_len)

    def by_axis(self) -> dict[Axis, int]:
        """The length of each axis, heads as ``hk`` and ``g``."""
        group = self.q_heads // self.kv_heads if self.kv_heads else int(self.q_heads == 0)
        return {"b": self.batch, "hk": self.kv_heads, "g": group, "q": self.q_len, "kv": self.kv_len}


def documents(lengths: Lengths) -> Table:
    """The document of each position, (B, S): about four a sequence, one after the other."""

    def make(generator: Generator) -> Tensor:
        import torch

        dice = torch.rand(lengths.batch, lengths.positions, generator=generator)
        return (dice * lengths.positions < _DOCUMENTS).cumsum(-1).to(torch.int32)

    return Table((lengths.batch, lengths.positions), "int32", make)


def flags(lengths: Lengths) -> Table:
    """Which positions are global, (S,): the first, and one in 64."""

    def make(generator: Generator) -> Tensor:
        import torch

        found = torch.rand(lengths.positions, generator=generator) * _GLOBAL_EVERY < 1
        found[:1] = True
        return found

    return Table((lengths.positions,), "bool", make)


def key_lengths(lengths: Lengths) -> Table:
    """The keys of each sequence, (B,): between half of them and all."""
    return _whole_numbers(lengths, lengths.kv_len // 2, lengths.kv_len)


def prefixes(lengths: Lengths) -> Table:
    """The prefix of each sequence, (B,): up to half of the keys."""
    return _whole_numbers(lengths, 0, lengths.kv_len // 2)


def _whole_numbers(lengths: Lengths, least: int, most: int) -> Table:
    def make(generator: Generator) -> Tensor:
        import torch

        return torch.randint(least, most + 1, (lengths.batch,), generator=generator, dtype=torch.int32)

    return Table((lengths.batch,), "int32", make)


def distances(lengths: Lengths) -> Table:
    """A bias for each head and distance, (H, 2n - 1), normally distributed; n is at most 256."""
    shape = (lengths.q_heads, min(2 * max(lengths.positions, 1) - 1, _MOST_DISTANCES))

    def make(generator: Generator) -> Tensor:
        import torch

        return torch.randn(shape, generator=generator)

    return Table(shape, "float32", make)
