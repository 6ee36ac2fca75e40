"""A kernel tried: run on made-up tensors, timed, and compared with what its program means."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fagen.calls.dispatch import compute
from fagen.calls.prepared import emulation
from fagen.calls.values import DTYPE_OF
from fagen.compile import Compiled, compile_problem
from fagen.derive.gradient import Gradient
from fagen.errors import FagenError, LaunchError, ToolchainError, UsageError
from fagen.ir.check import bind_sizes
from fagen.ir.graph import Axis, Contract, Graph, Input, Reduce, Scalar, walk
from fagen.ir.reference import Comparison, compare, eager, evaluate
from fagen.lang.program import Options
from fagen.plan.cost import peak_buffer_bytes
from fagen.plan.plan import Storage
from fagen.run.cache import load_key
from fagen.run.emulate import Checker, Schedule
from fagen.study.explain import plan_lengths
from fagen.study.tables import Table
from fagen.torch_op import draw_seed

Device: TypeAlias = Literal["gpu", "emulator"]

Progress: TypeAlias = Callable[[str, int, int], None]
"""Told what is done, how many parts of it are, and of how many; 0 parts where that is not known."""

MOST_ROWS = 4096
"""Queries up to which every row is compared."""

_SAMPLED_ROWS = 512
_BLOCK_ELEMENTS = 1 << 23
_TIMED_SECONDS = 0.5
_MOST_LAUNCHES = 20
_FEW_DOCUMENTS = 4


@dataclass(frozen=True)
class Watch:
    """How the emulator runs a kernel: see `fagen.run.emulate.EmulatedKernels.launch`."""

    checker: Checker = "none"
    schedule: Schedule = "forward"
    seed: int = 0


@dataclass(frozen=True)
class Trial:
    """What became of a run.

    device                              the GPU's name, or ``emulator``
    kernels                             launches of a call
    max_error, eager_error, tolerance   of the output nearest to its tolerance (`fagen.ir.reference.compare`)
    reason                              why it is not ``ok``
    seconds                             of one call, its kernels compiled
    peak_bytes                          of device memory during one call, its inputs and outputs included
    source                              the .cu that ran
    rows                                queries that were compared
    watched                             what the emulator watched for, and did not see
    """

    device: str
    family: str
    kernels: int
    max_error: float
    eager_error: float
    tolerance: float
    ok: bool
    reason: str
    seconds: float
    peak_bytes: int
    source: Path
    rows: int
    watched: Checker

    def to_json(self) -> dict[str, Any]:
        """The same as JSON holds it: what is not finite is null."""
        plain = {**asdict(self), "source": str(self.source)}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in plain.items()
        }


class OutOfMemory(LaunchError):
    """The tensors of a run, or what lies between its kernels, do not fit the memory of the device."""


@contextmanager
def _memory() -> Iterator[None]:
    """Within it, torch's ways of finding no memory are one error."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, FagenError):
            raise
        text = str(error)
        if not isinstance(error, MemoryError) and "out of memory" not in text and "allocate" not in text:
            raise
        raise OutOfMemory(
            "the run does not fit the memory of the device", works="shorter lengths, or fewer heads, may"
        ) from error


def choose_device(asked: Device | None) -> torch.device:
    """The device to run on: a GPU if there is one. Raises ToolchainError for a GPU that is not there."""
    if asked == "emulator" or (asked is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ToolchainError(
            "torch sees no CUDA device",
            call="--device gpu",
            works="--device emulator runs the same kernel on this CPU; fagen doctor says what is missing",
        )
    return torch.device("cuda", torch.cuda.current_device())


@_memory()
def make_values(
    kernel: Compiled,
    captured: Sequence[Any],
    lengths: Mapping[Axis, int],
    *,
    device: torch.device,
    seed: int = 0,
    scalars: Mapping[str, float] | None = None,
) -> list[Any]:
    """A value for each argument of a kernel, drawn on the CPU: the same ones on every device.

    Tensors of floating-point numbers are normally distributed, of integers rise along their last axis like
    the documents of a sequence, of truth values are even; a Scalar is 1, or what ``scalars`` says.
    ``captured`` are the values of the last arguments, `Table` among them made.
    """
    graph, generator = kernel.problem.graph, torch.Generator().manual_seed(seed)
    own = graph.arguments[: len(graph.arguments) - len(captured)]
    unknown = set(scalars or {}) - {each.name for each in own if isinstance(each, Scalar)}
    if unknown:
        raise UsageError(f"{', '.join(sorted(unknown))} is no Scalar argument", call=graph.name)
    tensors = [argument for argument in graph.arguments if isinstance(argument, Input)]
    storages = dict(zip(tensors, kernel.problem.inputs, strict=True))
    values: list[Any] = []
    for argument in own:
        if isinstance(argument, Scalar):
            values.append(_number(argument, (scalars or {}).get(argument.name, 1.0)))
        else:
            shape = [_length(axis, lengths) for axis in argument.layout]
            values.append(_drawn(argument, shape, DTYPE_OF[storages[argument]], generator))
    values += [each.tensor(generator) if isinstance(each, Table) else each for each in captured]
    return [each.to(device) if isinstance(each, Tensor) else each for each in values]


def _number(argument: Scalar, given: float) -> float | int:
    """The value of a Scalar."""
    if argument.stored != "int":
        return float(given)
    if not float(given).is_integer():
        raise UsageError(f"{argument.name} is {given:g}", works="it is declared a whole number")
    return int(given)


def _length(axis: Axis, lengths: Mapping[Axis, int]) -> int:
    """The length of an axis; one that only a table has is as long as queries and keys."""
    if axis == "h":
        return lengths["hk"] * lengths["g"]
    return lengths[axis] if axis in lengths else max(lengths.get("q", 1), lengths.get("kv", 1))


def _drawn(argument: Input, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if argument.stored == "float":
        return torch.randn(shape, generator=generator).to(dtype)
    dice = torch.rand(shape, generator=generator)
    if argument.stored == "bool":
        return dice < 0.5
    steps = dice * (shape[-1] if shape else 1) < _FEW_DOCUMENTS
    return (steps.cumsum(-1) if shape else steps).to(dtype)


# ------------------------------------------------------------------------------------------------------ run


@_memory()
def try_kernel(
    kernel: Compiled,
    values: Sequence[Any],
    *,
    both: Gradient | None = None,
    program: Compiled | None = None,
    seed: int = 0,
    watch: Watch | None = None,
    progress: Progress = lambda what, done, parts: None,
) -> Trial:
    """Compile a kernel for the device of ``values``, run it on them, time it and compare every output.

    ``seed`` is what torch's generators start from: it decides what dropout drops. Beyond `MOST_ROWS` queries
    a sample of them is compared. A backward kernel has ``both``, and ``values`` are of its ``program``: what
    it reads of the forward direction comes from the kernel of that direction, as in training, and gradients
    of the outputs are made up. Raises what compiling and launching raise.
    """
    graph, watch = kernel.problem.graph, watch or Watch()
    device = next(value.device for value in values if isinstance(value, Tensor))
    on_gpu = device.type == "cuda"
    task: _Forward | _Backward = _Forward(graph, values)
    if both is not None and program is not None:
        own = program.problem.graph
        _require_few_rows(own, values)
        torch.manual_seed(seed)
        with torch.no_grad():
            outputs = compute(both.forward, values, Options(), _forward_of(both, program))
        task = _Backward(own, both, values, kernel.problem.inputs, outputs, seed)
        values = task.values
    sizes = bind_sizes(graph, [tuple(v.shape) if isinstance(v, Tensor) else None for v in values])
    progress("compile", 0, 0)
    source, launches = _compiled(kernel, device, watch)

    def call() -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        with torch.no_grad(), emulation(checker=watch.checker, schedule=watch.schedule, seed=watch.seed):
            return compute(graph, values, Options(), kernel)

    progress("run", 0, 0)
    given_bytes = _bytes([value for value in values if isinstance(value, Tensor)])
    if on_gpu:
        outputs, seconds, added_bytes = _timed_on_gpu(call, device)
    else:
        start = time.perf_counter()
        outputs = call()
        seconds = time.perf_counter() - start
        added_bytes = _bytes(outputs) + peak_buffer_bytes(kernel.plan, plan_lengths(kernel.plan, sizes))
    worst, rows = _compared(task, graph, outputs, sizes, _seed_of(graph, device, seed), progress)
    return Trial(
        device=torch.cuda.get_device_name(device) if on_gpu else "emulator",
        family=kernel.plan.family,
        kernels=launches,
        max_error=worst.max_error,
        eager_error=worst.eager_error,
        tolerance=worst.tolerance,
        ok=worst.ok,
        reason=worst.reason,
        seconds=seconds,
        peak_bytes=given_bytes + added_bytes,
        source=source,
        rows=rows,
        watched=watch.checker,
    )


def _forward_of(both: Gradient, program: Compiled) -> Compiled:
    """What autograd runs of a program: the kernel that also gives what the backward direction reads."""
    return compile_problem(replace(program.problem, graph=both.forward))


def _compiled(kernel: Compiled, device: torch.device, watch: Watch) -> tuple[Path, int]:
    """Build what runs on a device; where its text lies, and the launches of a call."""
    if device.type == "cpu":
        return kernel.emulated(watch.checker).path, len(kernel.emulated_recipe.functions)
    binary = kernel.binary(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    entry = load_key(binary.key)
    assert entry is not None
    return entry.folder / "kernel.cu", len(binary.recipe.functions)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _timed_on_gpu(
    call: Callable[[], tuple[Tensor, ...]], device: torch.device
) -> tuple[tuple[Tensor, ...], float, int]:
    """The outputs of a call, the median time of some more, and the most memory that one adds."""
    outputs = call()
    torch.cuda.synchronize(device)
    del outputs
    held_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    outputs = call()
    torch.cuda.synchronize(device)
    added_bytes = torch.cuda.max_memory_allocated(device) - held_bytes
    times: list[float] = []
    while len(times) < _MOST_LAUNCHES and sum(times) < _TIMED_SECONDS:
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end) / 1e3)
    return outputs, sorted(times)[len(times) // 2], added_bytes


# -------------------------------------------------------------------------------------------------- compare


def _seed_of(graph: Graph, device: torch.device, seed: int) -> int:
    """What dropout is seeded with by a call after ``torch.manual_seed(seed)``."""
    torch.manual_seed(seed)
    return int(draw_seed(device)) if graph.random else 0


def _require_few_rows(program: Graph, values: Sequence[Any]) -> None:
    """Gradients are compared as a whole: refuse lengths for which the reference would not fit memory."""
    sizes = bind_sizes(program, [tuple(v.shape) if isinstance(v, Tensor) else None for v in values])
    longest = max(sizes.get("q", 1), sizes.get("kv", 1))
    if longest > MOST_ROWS:
        raise UsageError(
            f"gradients of {longest:,} rows are too many to compare",
            call=program.name,
            works=f"up to {MOST_ROWS:,} are; fagen emit and explain take any length",
        )


class _Forward:
    """What a program's own kernel is to give."""

    def __init__(self, graph: Graph, values: Sequence[Any]) -> None:
        self.graph, self.values = graph, values

    def expected(
        self, dtype: torch.dtype, seed: int, rows: Mapping[Axis, Tensor] | None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Each output as it should be, and as torch's own operations give it."""
        with torch.no_grad():
            exact = evaluate(self.graph, self.values, seed=seed, rows=rows)
            return exact, eager(self.graph, self.values, dtype, seed=seed, rows=rows)


class _Backward:
    """What a backward kernel is given, and what it is to give: by autograd, through the program itself."""

    def __init__(
        self,
        program: Graph,
        both: Gradient,
        values: Sequence[Any],
        stored: Sequence[Storage],
        outputs: Sequence[Tensor],
        seed: int,
    ) -> None:
        self.program, self.both, self.given = program, both, values
        draw = torch.Generator().manual_seed(seed + 1)  # `make_values` draws from the other
        storages = iter(stored)
        self.values: list[Any] = []
        self.incoming: list[Tensor] = [torch.zeros_like(o) for o in outputs[: len(program.outputs)]]
        for argument, (kind, place) in zip(both.backward.arguments, both.sources, strict=True):
            dtype = DTYPE_OF[next(storages)] if isinstance(argument, Input) else None
            if kind == "argument":
                self.values.append(values[place])
            elif kind == "output":
                self.values.append(outputs[place])
            else:
                gradient = torch.randn(outputs[place].shape, generator=draw).to(dtype)
                self.values.append(gradient.to(outputs[place].device))
                self.incoming[place] = self.values[-1]

    def expected(
        self, dtype: torch.dtype, seed: int, rows: Mapping[Axis, Tensor] | None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Each gradient as it should be, and as torch's own operations give it."""
        exact = self._gradients(torch.float64, lambda leaves: evaluate(self.program, leaves, seed=seed))
        return exact, self._gradients(None, lambda leaves: eager(self.program, leaves, dtype, seed=seed))

    def _gradients(
        self, dtype: torch.dtype | None, run: Callable[[Sequence[Any]], Sequence[Tensor]]
    ) -> list[Tensor]:
        """By autograd, from copies of the arguments in ``dtype``, by default their own."""
        leaves = list(self.given)
        for position in self.both.wanted:
            value = self.given[position].detach()
            leaves[position] = value.to(dtype or value.dtype, copy=True).requires_grad_()
        outputs = run(leaves)
        pairs = [(o, g.to(o.dtype)) for o, g in zip(outputs, self.incoming, strict=True) if o.requires_grad]
        asked = [leaves[position] for position in self.both.wanted]
        found = torch.autograd.grad([o for o, _ in pairs], asked, [g for _, g in pairs], allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(asked, found, strict=True)]


def _compared(
    task: _Forward | _Backward,
    graph: Graph,
    outputs: Sequence[Tensor],
    sizes: Mapping[Axis, int],
    dropped_by: int,
    progress: Progress,
) -> tuple[Comparison, int]:
    """The comparison of the output that is nearest to its tolerance or furthest beyond; rows compared."""
    floating = [v.dtype for v in task.values if isinstance(v, Tensor) and v.is_floating_point()]
    dtype = min(floating, key=lambda each: torch.finfo(each).bits)
    blocks = list(_blocks(graph, sizes))
    refs: list[list[Tensor]] = [[] for _ in outputs]
    eagers: list[list[Tensor]] = [[] for _ in outputs]
    taken: list[list[Tensor]] = [[] for _ in outputs]
    device = outputs[0].device
    for done, rows in enumerate(blocks):
        progress("compare", done, len(blocks))
        chosen = None if rows is None else {"q": rows.to(device)}
        exact, plain = task.expected(dtype, dropped_by, chosen)
        for i, output in enumerate(graph.outputs):
            if "q" in output.layout or not refs[i]:
                refs[i].append(exact[i])
                eagers[i].append(plain[i])
                taken[i].append(_rows_of(outputs[i], output.layout, chosen))
    progress("compare", len(blocks), len(blocks))
    found = []
    for i, output in enumerate(graph.outputs):
        at = output.layout.index("q") if "q" in output.layout else 0
        gradient = graph.direction == "backward"
        parts = (
            torch.cat(parts[i], at) if parts[i][0].dim() else parts[i][0] for parts in (taken, refs, eagers)
        )
        found.append(compare(*parts, gradient=gradient))
    worst = max(found, key=lambda each: (not each.ok, each.max_error / each.tolerance))
    compared = sum(sizes.get("q", 1) if rows is None else len(rows) for rows in blocks)
    return worst, compared


def _rows_of(output: Tensor, layout: tuple[Axis, ...], rows: Mapping[Axis, Tensor] | None) -> Tensor:
    if rows is None or "q" not in layout:
        return output
    return output.index_select(layout.index("q"), rows["q"])


def _blocks(graph: Graph, sizes: Mapping[Axis, int]) -> Iterator[Tensor | None]:
    """Rows to compare, in blocks whose scores fit memory; None for all at once, where q is summed over."""
    summed = {
        node.over for node in walk(o.node for o in graph.outputs) if isinstance(node, Contract | Reduce)
    }
    if "q" not in sizes or "q" in summed or not sizes["q"]:
        yield None
        return
    rows = _sample(sizes["q"])
    pairs = math.prod(length for axis, length in sizes.items() if axis in ("b", "hk", "g", "kv"))
    size = max(_BLOCK_ELEMENTS // max(pairs, 1), 1)
    yield from (rows[start : start + size] for start in range(0, len(rows), size))


def _sample(q_len: int) -> Tensor:
    """All rows, or of many the first, the last, and others drawn between them."""
    if q_len <= MOST_ROWS:
        return torch.arange(q_len)
    edge = _SAMPLED_ROWS // 4
    drawn = torch.randperm(q_len - 2 * edge, generator=torch.Generator().manual_seed(q_len))
    inner = drawn[: _SAMPLED_ROWS - 2 * edge].sort().values + edge
    return torch.cat([torch.arange(edge), inner, torch.arange(q_len - edge, q_len)])
