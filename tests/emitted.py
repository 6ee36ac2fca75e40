"""Emitted kernels on the emulator: a plan as text, compiled by g++, run on tensors, held to the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fagen.derive.walk import PART_AXIS
from fagen.emit.params import TensorId, pack
from fagen.emit.program import Emitted, emit
from fagen.ir.check import bind_sizes
from fagen.ir.graph import Axis, Graph, Input
from fagen.ir.reference import compare, eager, evaluate
from fagen.plan.plan import STORAGE_BYTES, Plan, Problem, Storage
from fagen.plan.planner import plan
from fagen.run.emulate import Checker, EmulatedKernels, Memory, Schedule, compile_text

DTYPES: Mapping[Storage, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
    "uint8": torch.uint8,
}
STORAGES = {dtype: storage for storage, dtype in DTYPES.items()}


def problem_of(
    graph: Graph, values: Sequence[Any], sizes: Sequence[Axis] = ("d", "dv"), **rest: Any
) -> Problem:
    """The problem of a call: the lengths of ``sizes`` are fixed."""
    lengths = lengths_of(graph, values)
    tensors = [v for a, v in zip(graph.arguments, values, strict=True) if isinstance(a, Input)]
    fixed = tuple((axis, lengths[axis]) for axis in sizes if axis in lengths)
    storages = tuple(STORAGES[tensor.dtype] for tensor in tensors)
    return Problem(graph, rest.pop("arch", "A100"), "simt", fixed, storages, **rest)


def lengths_of(graph: Graph, values: Sequence[Any]) -> dict[Axis, int]:
    shapes = [
        tuple(v.shape) if isinstance(a, Input) else None for a, v in zip(graph.arguments, values, strict=True)
    ]
    return bind_sizes(graph, shapes)


class Run:
    """One text, compiled; called with values it gives the program's outputs."""

    def __init__(self, plan: Plan, checker: Checker = "none") -> None:
        self.plan = plan
        self.emitted: Emitted = emit(plan)
        self.checker: Checker = checker
        self.compile(self.emitted.text)

    def compile(self, text: str) -> None:
        """Take ``text`` in place of the emitted one."""
        self.kernels: EmulatedKernels = compile_text(text, checker=self.checker)

    def __call__(
        self,
        values: Sequence[Any],
        *,
        seed: int = 0,
        schedule: Schedule = "forward",
        dice: int = 0,
        parts: int = 1,
    ) -> list[Tensor]:
        graph = self.plan.problem.graph
        lengths = {**lengths_of(graph, values), PART_AXIS: parts}
        tensors: dict[TensorId, Tensor] = {}
        for argument, value in zip(graph.arguments, values, strict=True):
            if isinstance(argument, Input):
                tensors["argument", argument.position] = value
        for i, buffer in enumerate(self.plan.buffers):
            fresh = torch.full(
                (STORAGE_BYTES[buffer.storage] * prod(buffer.shape(lengths)),), 255, dtype=torch.uint8
            )
            tensors["buffer", i] = fresh.view(DTYPES[buffer.storage]).view(buffer.shape(lengths))
        for i, (output, storage) in enumerate(zip(graph.outputs, self.plan.outputs, strict=True)):
            shape = [lengths["hk"] * lengths["g"] if a == "h" else lengths[a] for a in output.layout]
            tensors["output", i] = torch.full(shape, float("nan"), dtype=DTYPES[storage])
        seeds = torch.tensor([seed], dtype=torch.int64)
        spare = torch.zeros(16)
        packed: list[int | float] = []
        for field in self.emitted.params:
            source = field.source
            if source[0] == "data":
                tensor = tensors[source[1]]
                packed.append(tensor.data_ptr() if tensor.numel() else spare.data_ptr())
            elif source[0] == "stride":
                tensor, dim = tensors[source[1]], source[2]
                packed.append(tensor.stride(dim) if tensor.shape[dim] != 1 else 0)
            elif source[0] == "extent":
                packed.append(tensors[source[1]].shape[source[2]])
            elif source[0] == "length":
                packed.append(lengths[source[1]])
            elif source[0] == "scalar":
                packed.append(values[source[1]])
            else:
                packed.append(seeds.data_ptr())
        params = pack(self.emitted.params, packed)
        memories = self._memories(tensors, seeds, spare)
        for function in self.emitted.functions:
            blocks = 1
            for axis, tile in function.grid:
                blocks *= -(-lengths[axis] // tile)
            if blocks:
                self.kernels.launch(
                    function.name,
                    (blocks, 1, 1),
                    (function.threads, 1, 1),
                    function.shared_bytes,
                    params,
                    memories=memories if self.kernels.checker != "none" else (),
                    schedule=schedule,
                    seed=dice,
                )
        return [tensors["output", i] for i in range(len(graph.outputs))]

    def _memories(self, tensors: Mapping[TensorId, Tensor], seeds: Tensor, spare: Tensor) -> list[Memory]:
        found, offset = [], 0
        for field in self.emitted.params:
            if field.source[0] == "data":
                tensor = tensors[field.source[1]]
                if not tensor.numel():
                    tensor = spare
                reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
                size = reach * tensor.element_size()
                found.append(
                    Memory(field.name, offset, tensor.data_ptr(), size, field.source[1][0] != "argument")
                )
            elif field.source[0] == "seed":
                found.append(Memory(field.name, offset, seeds.data_ptr(), 8))
            offset += 8
        return found


def check(
    graph: Graph,
    values: Sequence[Any],
    *,
    checker: Checker = "none",
    seed: int = 0,
    schedule: Schedule = "forward",
    dice: int = 0,
    change: Any = None,
    label: str = "",
    sizes: Sequence[Axis] = ("d", "dv"),
    **rest: Any,
) -> Run:
    """Emit, run and compare every output; ``change`` may replace the plan."""
    made = plan(problem_of(graph, values, sizes, **rest))
    run = Run(change(made) if change else made, checker)
    results = run(values, seed=seed, schedule=schedule, dice=dice)
    exact = evaluate(graph, values, seed=seed)
    floats = [v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    quick = eager(graph, values, floats[0] if floats else torch.float32, seed=seed)
    for out, ref, near, output in zip(results, exact, quick, graph.outputs, strict=True):
        compare(out, ref, near).require(f"{label or graph.name}.{output.name}")
    return run
