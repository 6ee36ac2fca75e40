"""Launches whose facts are known: grids, strides and lengths stand, addresses and numbers are filled in at
each call.

`OnGpu` puts them on torch's current stream, `OnEmulator` runs the same text on CPU tensors.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import prod
from operator import mul
from typing import Any

import torch
from torch import Tensor

from fagen.calls.values import DTYPE_OF, Values, require_fp32
from fagen.compile import Compiled
from fagen.emit.params import Field, TensorId, has_maps
from fagen.errors import UsageError
from fagen.ir.graph import Axis, Graph
from fagen.ir.show import length_name
from fagen.lang.expr import beyond_fp32
from fagen.plan.arch import arch_for
from fagen.plan.parts import with_parts
from fagen.plan.plan import STORAGE_BYTES
from fagen.run import launch
from fagen.run.emulate import Checker, Memory, Schedule
from fagen.run.recipe import Packer, Recipe, blocks
from fagen.run.tensor_map import NEAR, TensorMap, geometry
from fagen.torch_op import Outputs, draw_seed

_MOST_MAPS = 4096  # of a tensor, by its address, before they are forgotten


def length_of(axis: Axis, sizes: Mapping[Axis, int]) -> int:
    """The length of an axis, ``h`` as the product of its two."""
    return sizes["hk"] * sizes["g"] if axis == "h" else sizes[axis]


def output_shapes(graph: Graph, sizes: Mapping[Axis, int]) -> list[tuple[int, ...]]:
    """The shape of each output, in the order of its layout."""
    return [tuple(length_of(axis, sizes) for axis in output.layout) for output in graph.outputs]


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose last axis is the nearest."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class _Tensor:
    """How a tensor lies in memory: its place among all of the call's, and the steps along its dimensions."""

    place: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    layout: tuple[Axis, ...]

    @property
    def empty(self) -> bool:
        return 0 in self.shape


def _steps(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Elements from one position of each dimension to the next, 0 along a length of 1: it broadcasts.

    All are 0 where there is no element: whatever is read stands for none.
    """
    if 0 in shape:
        return (0,) * len(shape)
    return tuple(stride if extent != 1 else 0 for extent, stride in zip(shape, strides, strict=True))


_EMPTY = 8, 1, 1, 1, 1  # lengths of the map of a tensor without an element: zeros stand for it
_FEW_BYTES, _FEW = 1 << 18, 4


def section(bytes_: int, most: int) -> int:
    """How many heads share a cache, of each of which so many bytes are read; few where these are few."""
    if not bytes_:
        return 1
    return _FEW if bytes_ <= _FEW_BYTES else max(most // bytes_, 1)


class _Memory:
    """All memory of a call in one order: values, outputs, buffers, then a few words that are no tensor's."""

    def __init__(self, values: Values, recipe: Recipe, sizes: Mapping[Axis, int]) -> None:
        graph = values.graph
        self._sizes = sizes
        self._tensors: dict[TensorId, _Tensor] = {}
        for argument, tensor in values.inputs:
            steps = _steps(tensor.shape, tensor.stride())
            found = _Tensor(argument.position, tuple(tensor.shape), steps, argument.layout)
            self._tensors["argument", argument.position] = found
        place = len(graph.arguments)
        for i, (shape, output) in enumerate(zip(output_shapes(graph, sizes), graph.outputs, strict=True)):
            steps = _steps(shape, contiguous(shape))
            self._tensors["output", i] = _Tensor(place + i, shape, steps, output.layout)
        place += len(graph.outputs)
        for i, buffer in enumerate(recipe.buffers):
            shape = buffer.shape(sizes)
            steps = _steps(shape, contiguous(shape))
            self._tensors["buffer", i] = _Tensor(place + i, shape, steps, buffer.axes)
        self.words = place + len(recipe.buffers)

    def place(self, tensor: TensorId | None) -> int:
        """Where the memory of an address stands: the seed, the counter and the zeros that stand for an empty
        tensor come after all tensors."""
        if tensor is None:
            return self.words
        if tensor[0] == "counter":
            return self.words + 1
        if self._tensors[tensor].empty:
            return self.words + 2
        return self._tensors[tensor].place

    def known(self, field: Field) -> int | None:
        """A field that shapes decide; None for one that each call gives."""
        if field.source[0] == "length":
            return length_of(field.source[1], self._sizes)
        if field.source[0] == "stride":
            return self._tensors[field.source[1]].steps[field.source[2]]
        if field.source[0] == "extent":
            return self._tensors[field.source[1]].shape[field.source[2]]
        if field.source[0] == "section":
            _, axis, bytes_, most = field.source
            return section(length_of(axis, self._sizes) * bytes_, most)
        return None

    def map(self, field: Field) -> Callable[[int], TensorMap]:
        """How the tensor of a field at an address is copied."""
        assert field.source[0] == "map"
        found = self._tensors[field.source[1]]
        lengths = [length_of(axis, self._sizes) for axis in found.layout]
        dimensions = list(zip(lengths, found.steps, strict=True))
        made = geometry(field.source[2:], dimensions, found.shape[field.source[4]], int, mul)
        counts = _EMPTY if found.empty else made.lengths
        row, panel, head, batch = (
            NEAR if count == 1 else stride for count, stride in zip(counts[1:], made.strides, strict=True)
        )
        strides = row, panel, head, batch
        return lambda address: TensorMap(made.storage, counts, strides, made.box, address)


class Prepared:
    """Calls of one kernel with known facts. Subclasses say where memory lies and who runs the launches.

    ``most_blocks`` is how many of a kernel's blocks that take one work after another are launched,
    ``multiprocessors`` how many there are to share works among.
    """

    def __init__(
        self,
        values: Values,
        recipe: Recipe,
        sizes: Mapping[Axis, int],
        most_blocks: int,
        multiprocessors: int,
    ) -> None:
        sizes = with_parts(sizes, recipe.shares, multiprocessors)
        graph, memory = values.graph, _Memory(values, recipe, sizes)
        self.graph = graph
        self.name = graph.name
        self.device = values.device
        self.outputs = [
            (shape, DTYPE_OF[storage])
            for shape, storage in zip(output_shapes(graph, sizes), recipe.outputs, strict=True)
        ]
        self._first_buffer = len(graph.arguments) + len(graph.outputs)
        self.buffers = [
            (prod(buffer.shape(sizes)) * STORAGE_BYTES[buffer.storage], buffer.reuses, buffer.zeroed)
            for buffer in recipe.buffers
        ]
        try:
            self.packer = Packer(
                recipe.fields, memory.known, lambda field: _Maps(memory.map(field), self.encoded)
            )
        except struct.error:
            lengths = {length_name(axis): length for axis, length in sizes.items()}
            raise UsageError(
                "a length has more than 31 bits", call=self.name, values=lengths, works="call it on parts"
            ) from None
        self.places = [memory.place(tensor) for tensor in self.packer.data]
        self.random = None in self.packer.data
        self.counts = memory.words + 1 in self.places
        self.spare = memory.words + 2 in self.places
        self.words = max(self.places, default=0) >= memory.words
        self._names = [argument.name for argument in graph.arguments]
        self.launches = [
            (
                function.name,
                (min(count, most_blocks) if function.persistent else count,),
                (function.threads,),
                function.shared_bytes,
            )
            for function in recipe.functions
            if (count := blocks(function, sizes))
        ]
        for count in (blocks(function, sizes) for function in recipe.functions):
            if count > launch.GRID_LIMIT:
                raise UsageError(
                    f"the call takes {count:,} blocks, and a launch has at most {launch.GRID_LIMIT:,}",
                    call=self.name,
                    works="call it on parts of the batch",
                )

    def encoded(self, map_: TensorMap) -> bytes:
        """A tensor map as who runs the launches reads it."""
        raise NotImplementedError

    def allocate(self, memory: list[Any], make: Callable[[int], Tensor]) -> None:
        """Add the buffers to ``memory``, those that follow one another in the same place as one."""
        for size, reuses, zeroed in self.buffers:
            memory.append(make(size) if reuses is None else memory[self._first_buffer + reuses])
            if zeroed:
                memory[-1].zero_()

    def pack(self, memory: Sequence[Any], given: Sequence[Any]) -> bytes:
        """The parameter struct, for ``memory`` in the order of `_Memory` and the call's own values."""
        addresses = [memory[place].data_ptr() for place in self.places]
        numbers = [given[position] for position in self.packer.scalars]
        if any(map(beyond_fp32, numbers)):
            require_fp32(self.graph, given)
        try:
            return self.packer(addresses, numbers)
        except struct.error as error:
            values = {self._names[position]: given[position] for position in self.packer.scalars}
            raise UsageError(
                f"a number does not fit its parameter: {error}",
                call=self.name,
                values=values,
                works="whole numbers have 32 bits",
            ) from None


class _Maps(dict[int, bytes]):
    """The bytes of a map by the address of its tensor, made once for each."""

    def __init__(self, map_: Callable[[int], TensorMap], encoded: Callable[[TensorMap], bytes]) -> None:
        self._map, self._encoded = map_, encoded

    def __missing__(self, address: int) -> bytes:
        if len(self) >= _MOST_MAPS:
            self.clear()
        found = self[address] = self._encoded(self._map(address))
        return found


class OnGpu(Prepared):
    """Calls on a GPU, on torch's current stream of it."""

    def __init__(self, values: Values, kernel: Compiled, sizes: Mapping[Axis, int]) -> None:
        index = values.device.index
        binary = kernel.binary(torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index))
        multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
        super().__init__(values, binary.recipe, sizes, multiprocessors, multiprocessors)
        self._gpu = launch.gpu(index)
        self._made = [(shape, contiguous(shape), dtype) for shape, dtype in self.outputs]
        shared = {each.name: each.shared_bytes for each in binary.recipe.functions}
        functions = self._gpu.functions(binary.key, binary.image, shared)
        self.launches = [(functions[function], *rest) for function, *rest in self.launches]
        self._zeros = torch.zeros(2, dtype=torch.int64, device=values.device) if self.spare else None
        self._lead = b""
        if has_maps(binary.recipe.fields):
            self._lead = bytes(self._gpu.parameter_offset(binary.key, binary.image, list(functions)))

    def encoded(self, map_: TensorMap) -> bytes:
        """A tensor map as the GPU reads it."""
        return self._gpu.encoded(map_)

    def __call__(self, given: Sequence[Any], seed: Tensor | None = None) -> Outputs:
        """The outputs, queued on the current stream."""
        gpu = self._gpu
        empty = gpu.allocator()
        outputs = tuple([empty(*each) for each in self._made])
        if not self.launches:
            return outputs
        memory = [*given, *outputs]
        stream = gpu.current_stream()
        if self.buffers:
            self.allocate(memory, lambda size: empty((size,), (1,), torch.uint8))
        if self.words:
            memory.append(draw_seed(self.device) if self.random and seed is None else seed)
            memory.append(gpu.counter(stream) if self.counts else None)
            memory.append(self._zeros)
        gpu.launch(self.launches, self._lead + self.pack(memory, given), stream)
        return outputs


@dataclass(frozen=True)
class Emulation:
    """How the emulator runs what CPU tensors ask for; see `EmulatedKernels.launch`."""

    checker: Checker = "none"
    schedule: Schedule = "forward"
    seed: int = 0
    multiprocessors: int = 0
    workers: int = min(os.cpu_count() or 1, 8)


_EMULATED_BLOCKS = 3  # that take one work after another: some take several
_USUAL = Emulation()
_emulation: ContextVar[Emulation] = ContextVar("emulation", default=_USUAL)


@contextmanager
def emulation(**settings: Any) -> Iterator[None]:
    """Within it, CPU tensors run under other `Emulation` settings: ``emulation(schedule="backward")``."""
    token = _emulation.set(replace(_emulation.get(), **settings))
    try:
        yield
    finally:
        _emulation.reset(token)


class OnEmulator(Prepared):
    """Calls on CPU tensors: every output and buffer starts as NaN, so what no thread writes is seen."""

    def __init__(self, values: Values, kernel: Compiled, sizes: Mapping[Axis, int]) -> None:
        recipe = kernel.emulated_recipe
        multiprocessors = arch_for(kernel.problem.arch).multiprocessors
        super().__init__(values, recipe, sizes, _EMULATED_BLOCKS, multiprocessors)
        self._kernel = kernel

    def encoded(self, map_: TensorMap) -> bytes:
        """A tensor map as the emulator reads it."""
        return map_.for_emulator()

    def __call__(self, given: Sequence[Any], seed: Tensor | None = None) -> Outputs:
        """The outputs, when all threads have ended; memory is the host's, whatever torch's default is."""
        outputs = tuple(
            torch.full(shape, torch.nan, dtype=dtype, device="cpu") for shape, dtype in self.outputs
        )
        if not self.launches:
            return outputs
        memory = [*given, *outputs]
        self.allocate(memory, lambda size: torch.full((size,), 255, dtype=torch.uint8, device="cpu"))
        memory.append(draw_seed(self.device) if self.random and seed is None else seed)
        memory.append(torch.zeros(1, dtype=torch.int32, device="cpu"))
        memory.append(torch.zeros(2, dtype=torch.int64, device="cpu"))
        params = self.pack(memory, given)
        settings = _emulation.get()
        kernels = self._kernel.emulated(settings.checker)
        placed = zip(self.packer.offsets, self.places, strict=True)
        memories = [self._extent(offset, place, memory[place]) for offset, place in placed]
        for function, grid, block, shared_bytes in self.launches:
            kernels.launch(
                function,
                (*grid, 1, 1),
                (*block, 1, 1),
                shared_bytes,
                params,
                memories=memories if settings.checker != "none" else (),
                schedule=settings.schedule,
                seed=settings.seed,
                multiprocessors=settings.multiprocessors,
                workers=settings.workers,
            )
        return outputs

    def _extent(self, offset: int, place: int, tensor: Tensor) -> Memory:
        """A tensor from its first element to the last that its strides reach."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((extent - 1) * stride for extent, stride in steps)
        is_given = place < len(self._names)
        name = self._names[place] if is_given else f"memory {place}"
        size = (last + 1) * tensor.element_size() if tensor.numel() else 0
        return Memory(name, offset, tensor.data_ptr(), size, written=not is_given)
