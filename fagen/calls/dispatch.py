"""The short way of a call: facts that decide everything but addresses and numbers, and a run prepared for
them.

The first call with given facts (dtypes, devices, shapes, strides, whether gradients are wanted) checks its
values, finds or compiles a kernel and leaves a prepared run behind; a later one finds it by its facts. The
last few runs are found without reading them, see `recent`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fagen import torch_op
from fagen.calls.derivatives import in_forward_mode, require_plain
from fagen.calls.prepared import OnEmulator, OnGpu, length_of, output_shapes
from fagen.calls.recent import MOST_RECENT, Recent
from fagen.calls.values import (
    DTYPE_OF,
    STORAGE_OF,
    Values,
    aligned,
    autocasts,
    cast,
    check_dtypes,
    read,
    require_fp32,
    side_by_side,
    storages,
)
from fagen.compile import Compiled, compile_problem, feature_axes, problem_of
from fagen.derive.gradient import Broadcast, Gradient, gradient
from fagen.errors import DtypeError, PlanError, UsageError
from fagen.ir.graph import Axis, Graph, Input, Scalar
from fagen.ir.show import length_name
from fagen.lang.program import Options
from fagen.plan.arch import arch_for
from fagen.plan.plan import GROUP_AXIS, Problem, Storage
from fagen.plan.profile import output_storages
from fagen.torch_op import Callee, Key, Outputs, Run, autocast_dtype, draw_seed

REFERENCE = "reference"
"""The family that is no kernel: float64, on any device, differentiable."""

MOST_ENTRIES = 4096

_PLAIN = (Tensor, torch.nn.Parameter)
_modes = torch._C._len_torch_dispatch_stack
_records = torch.is_grad_enabled


class _Entry:
    """A prepared run, and the object its key knows by identity: no other takes that identity meanwhile."""

    __slots__ = ("held", "run")

    def __init__(self, run: Run, held: object) -> None:
        self.run = run
        self.held = held


_entries: dict[tuple[Any, ...], _Entry] = {}
_recent: dict[tuple[Any, ...], tuple[Recent, ...]] = {}


def call(
    graph: Graph, given: Sequence[Any], options: Options, kernel: Compiled | None = None
) -> Tensor | Outputs:
    """The outputs of a graph for a value for each of its arguments: one tensor, or a tuple of several.

    ``kernel`` is what runs, whatever the tensors' device would choose. Raises UsageError or DtypeError where
    the values have no meaning for the graph, and the errors of planning, building and launching.
    """
    outputs = compute(graph, given, options, kernel)
    return outputs[0] if len(outputs) == 1 else outputs


def compute(
    graph: Graph,
    given: Sequence[Any],
    options: Options,
    kernel: Compiled | None = None,
    seed: Tensor | None = None,
) -> Outputs:
    """What `call` returns, always as a tuple; ``seed`` is that of its random bits, by default a new one."""
    held = kernel or graph
    asked = id(held), options.family, options.deterministic, _records()
    modes = _modes()
    run = None if modes or in_forward_mode() else _recalled(asked, given)
    if run is not None:
        return run(given) if seed is None else run(given, seed)
    require_plain(graph.name, given)
    if seed is None and modes:  # a mode of torch sees one operator
        return torch_op.through_operator(_operator_key(graph, options, kernel), given)
    facts: list[Any] = [*asked]
    try:
        for value in given:
            if value.__class__ in _PLAIN:
                facts += (value.dtype, value.device, value.shape, value.stride(), value.data_ptr() % 16)
                facts += (value.requires_grad, value.is_neg())
            elif isinstance(value, Tensor):
                return _call_subclass(graph, given, options, kernel)
            else:
                facts.append(value.__class__)
    except RuntimeError:  # of a tensor without strides, which `read` names
        read(graph, given)
        raise
    casts = torch._C._is_any_autocast_enabled()
    if casts:
        facts += [autocast_dtype(value.device.type) for value in given if isinstance(value, Tensor)][:1]
    key = tuple(facts)
    entry = _entries.get(key)
    if entry is None:
        run = _prepare(graph, given, options, kernel)
        if len(_entries) >= MOST_ENTRIES:
            _entries.clear()
            _recent.clear()
        entry = _entries[key] = _Entry(run, held)
    if not casts and not modes:  # of which a look at tensors does not tell all
        _remember(asked, Recent(entry.run, held, given), given)
    return entry.run(given) if seed is None else entry.run(given, seed)


def _recalled(asked: tuple[Any, ...], given: Sequence[Any]) -> Run | None:
    """The run of a call like this, if it was one of the last."""
    for recent in _recent.get(asked, ()):
        if recent.takes(given):
            return recent.run
    return None


def _remember(asked: tuple[Any, ...], recent: Recent, given: Sequence[Any]) -> None:
    """Keep a run for calls like this, if it takes them."""
    if recent.takes(given):
        _recent[asked] = (recent, *_recent.get(asked, ()))[:MOST_RECENT]


def _call_subclass(graph: Graph, given: Sequence[Any], options: Options, kernel: Compiled | None) -> Outputs:
    """A call on subclasses of Tensor: one that sees operations, such as a fake tensor, gets an operator."""
    tensors = [value for value in given if isinstance(value, Tensor)]
    if any(type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ for tensor in tensors):
        key = _operator_key(graph, options, kernel)
        return torch_op.through_operator(key, given)
    plain = [value.as_subclass(Tensor) if isinstance(value, Tensor) else value for value in given]
    return compute(graph, plain, options, kernel)


@lru_cache(maxsize=1024)
def _operator_key(graph: Graph, options: Options, kernel: Compiled | None) -> Key:
    def run(given: Sequence[Any], seed: Tensor | None) -> Outputs:
        return compute(graph, given, options, kernel, seed)

    def shapes(given: Sequence[Any]) -> Outputs:
        return empty_outputs(graph, given)

    def gradients(given: Sequence[Any], incoming: Sequence[Tensor], seed: Tensor | None) -> Sequence[Tensor]:
        return gradients_of(graph, given, options, incoming, seed)

    numbers = numbers_of(graph.arguments)
    features = features_of(graph)
    return torch_op.register(Callee(graph.name, run, shapes, gradients, numbers, graph.random, features))


def features_of(graph: Graph) -> tuple[bool, ...]:
    """Of each argument whether it is a tensor with a head dim."""
    features = feature_axes(graph)
    return tuple(isinstance(a, Input) and bool(features & set(a.layout)) for a in graph.arguments)


def numbers_of(arguments: Sequence[Input | Scalar]) -> tuple[type[int] | type[float] | None, ...]:
    """What each argument is as a number; None for a tensor."""
    return tuple(
        None if isinstance(argument, Input) else int if argument.stored == "int" else float
        for argument in arguments
    )


# ------------------------------------------------------------------------------------------- the first call


def _prepare(graph: Graph, given: Sequence[Any], options: Options, kernel: Compiled | None) -> Run:
    """The run of all calls with the same facts.

    Where torch.jit.trace records, none are the same: lengths are tensors there.
    """
    if torch._C._get_tracing_state() is not None:
        raise UsageError(
            "torch.jit.trace records operations of torch, and kernels are none",
            call=graph.name,
            works="torch.compile and torch.export take them",
        )
    values = read(graph, given)
    casts = autocasts(values, autocast_dtype(values.device.type))
    if casts or any(tensor.is_neg() for _, tensor in values.inputs):
        return _after_casts(graph, options, kernel, casts)
    check_dtypes(values)
    sizes = values.sizes()
    if options.family == REFERENCE:
        return _reference(values)
    if values.device.type == "meta":
        return partial(empty_outputs, graph)
    if values.device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"the tensors are on {values.device}, where no kernel family runs",
            call=graph.name,
            works='move them to cuda or cpu, or take family="reference"',
        )
    if kernel is None:
        problem = problem_for(values, options, sizes)
    else:
        _check_kernel(kernel, values, sizes)
        problem = kernel.problem
    if torch.is_grad_enabled() and any(tensor.requires_grad for _, tensor in values.inputs):
        if kernel is None:
            wanted = frozenset(a.position for a, tensor in values.inputs if tensor.requires_grad)
            return _recorded(_BothDirections(values, options, wanted))
        return _recorded(_NoGradient(run_of(values, problem), graph.name))
    return run_of(values, problem)


def run_of(values: Values, problem: Problem) -> Run:
    """The run of a problem on values like these."""
    kernel, sizes = compile_problem(problem.read_as(aligned(values))), values.sizes()
    if all(0 in shape for shape in output_shapes(values.graph, sizes)):
        return partial(empty_outputs, values.graph)
    return (OnGpu if values.device.type == "cuda" else OnEmulator)(values, kernel, sizes)


# ----------------------------------------------------------------------------------------------- gradients


def _recorded(both: torch_op.Recorded) -> Run:
    """The run of calls whose gradient may be asked for."""
    apply: Any = torch_op.Call.apply

    def record(given: Sequence[Any]) -> Outputs:
        outputs: Outputs = apply(both, *given)
        return outputs

    return record


class _Backward:
    """The backward direction of calls with the same facts; ``every`` is the gradient of all outputs."""

    def __init__(self, values: Values, options: Options, wanted: frozenset[int]) -> None:
        self.graph = values.graph
        self.name = values.graph.name
        self.options = options
        self.wanted = wanted
        self.broadcast = _broadcast(values)
        floats = {tensor.dtype for _, tensor in values.inputs if tensor.is_floating_point()}
        self.precise = floats == {torch.float32}
        self.every = gradient(self.graph, self.wanted, None, self.broadcast, self.precise)
        self._require_plain_tables(values)

    def _require_plain_tables(self, values: Values) -> None:
        """UsageError for a table that is longer along an axis than the axis is."""
        sizes = values.sizes()
        for argument, tensor in values.inputs:
            if argument.position not in self.every.wanted:
                continue
            for axis, extent in zip(argument.layout, tensor.shape, strict=True):
                if extent not in (1, length_of(axis, sizes)):
                    raise UsageError(
                        f"{argument.name} has {axis} = {extent:,}, and {axis} is {length_of(axis, sizes):,}",
                        call=self.graph.name,
                        works="its gradient needs an axis with a name of its own",
                    )

    def backward(
        self, given: Sequence[Any], outputs: Outputs, incoming: Sequence[Tensor | None], seed: Tensor | None
    ) -> list[Tensor | None]:
        """The gradient of each argument; None where none is wanted."""
        require_plain(self.name, (*given, *incoming))
        both = gradient(
            self.graph,
            self.wanted,
            frozenset(i for i, each in enumerate(incoming) if each is not None),
            self.broadcast,
            self.precise,
        )
        places = {output.node: i for i, output in enumerate(self.every.forward.outputs)}
        if not all(output.node in places for output in both.forward.outputs):
            both = self.every  # a result that only some gradients need was not kept
        found: list[Any] = []
        for kind, place in both.sources:
            if kind == "argument":
                value = given[place]
                found.append(value.detach() if isinstance(value, Tensor) else value)
            elif kind == "output":
                found.append(outputs[places[both.forward.outputs[place].node]])
            else:
                value = incoming[place]
                found.append(
                    torch.zeros_like(outputs[place]) if value is None else side_by_side(value.resolve_neg())
                )
        results = dict(
            zip(both.wanted, _compute_backward(both, found, self.options, given, seed), strict=True)
        )
        return [
            None
            if i not in self.wanted
            else torch.zeros_like(value)
            if i not in results
            else results[i].view(value.shape)
            for i, value in enumerate(given)
        ]


class _BothDirections(_Backward):
    """Calls with the same facts, forward and backward; a `torch_op.Recorded`."""

    def __init__(self, values: Values, options: Options, wanted: frozenset[int]) -> None:
        super().__init__(values, options, wanted)
        forward = replace(values, graph=self.every.forward)
        self.run = run_of(forward, problem_for(forward, options, forward.sizes()))
        self.device = values.device
        self.own = len(self.graph.outputs)

    def forward(self, given: Sequence[Any]) -> tuple[Outputs, Outputs, Tensor | None]:
        """The outputs, what else the other direction reads, and the seed."""
        seed = draw_seed(self.device) if self.graph.random else None
        outputs = self.run(given, seed)
        return outputs[: self.own], outputs[self.own :], seed


def gradients_of(
    graph: Graph, given: Sequence[Any], options: Options, incoming: Sequence[Tensor], seed: Tensor | None
) -> Sequence[Tensor]:
    """The gradients of all floating-point tensors, of a call that autograd did not see.

    The forward direction runs again for what it keeps, with the ``seed`` that the call had.
    """
    values = read(graph, given)
    floats = [argument.position for argument, tensor in values.inputs if tensor.is_floating_point()]
    if options.family == REFERENCE:
        return _reference_gradients(values, floats, incoming, seed)
    both = _Backward(values, options, frozenset(floats))
    outputs = compute(both.every.forward, given, options, seed=seed)
    found = both.backward(given, outputs, incoming, seed)
    return [each.clone() for each in found if each is not None]


def _reference_gradients(
    values: Values, floats: Sequence[int], incoming: Sequence[Tensor], seed: Tensor | None
) -> Sequence[Tensor]:
    """The same in float64."""
    from fagen.ir.reference import evaluate

    number = 0 if seed is None else int(seed)
    both = gradient(values.graph, frozenset(floats), None, _broadcast(values))
    outputs = evaluate(both.forward, values.given, seed=number)
    sources = {"argument": values.given, "output": outputs, "gradient": incoming}
    results = evaluate(both.backward, [sources[kind][place] for kind, place in both.sources], seed=number)
    found = dict(zip(both.wanted, results, strict=True))
    tensors = {argument.position: tensor for argument, tensor in values.inputs}
    return [
        found[i].reshape(tensors[i].shape).to(tensors[i].dtype)
        if i in found
        else torch.zeros_like(tensors[i])
        for i in floats
    ]


class _NoGradient:
    """Calls of a kernel compiled ahead of time, which has one direction; a `torch_op.Recorded`."""

    def __init__(self, run: Run, name: str) -> None:
        self.run = run
        self.name = name

    def forward(self, given: Sequence[Any]) -> tuple[Outputs, Outputs, Tensor | None]:
        """The outputs alone."""
        return self.run(given), (), None

    def backward(
        self, given: Sequence[Any], outputs: Outputs, incoming: Sequence[Tensor | None], seed: Tensor | None
    ) -> list[Tensor | None]:
        """Raise a UsageError that names the program."""
        raise UsageError(
            "the gradient was asked for, and a kernel compiled ahead of time has one direction",
            call=self.name,
            works="call the program or fagen.attention; torch.no_grad() says that no gradient is wanted",
        )


def _broadcast(values: Values) -> Broadcast:
    """Where a tensor has length 1 along an axis that has more."""
    sizes = values.sizes()
    return tuple(
        (argument.position, axis)
        for argument, tensor in values.inputs
        for axis, extent in zip(argument.layout, tensor.shape, strict=True)
        if extent == 1 != length_of(axis, sizes)
    )


def _compute_backward(
    both: Gradient, found: Sequence[Any], options: Options, given: Sequence[Any], seed: Tensor | None
) -> Outputs:
    """The outputs of ``both.backward`` for its arguments ``found``, each in the dtype of what it is of."""
    graph = both.backward
    if not graph.outputs:
        return ()
    stored: tuple[Storage, ...] = tuple([STORAGE_OF[given[i].dtype] for i in both.wanted])
    asked = id(both), options.family, options.deterministic, stored
    run = _recalled(asked, found)
    if run is not None:
        return run(found) if seed is None else run(found, seed)
    facts: list[Any] = [*asked]
    for value in found:
        if isinstance(value, Tensor):
            facts += (value.dtype, value.device, value.shape, value.stride(), value.data_ptr() % 16)
        else:
            facts.append(value.__class__)
    key = tuple(facts)
    entry = _entries.get(key)
    if entry is None:
        values = read(graph, found)
        problem = replace(problem_for(values, options, values.sizes()), outputs=stored)
        entry = _entries[key] = _Entry(run_of(values, problem), both)
    _remember(asked, Recent(entry.run, both, found), found)
    return entry.run(found) if seed is None else entry.run(found, seed)


def _after_casts(
    graph: Graph, options: Options, kernel: Compiled | None, casts: Mapping[int, torch.dtype]
) -> Run:
    """A run on the values as autocast has them, lazy negation carried out."""

    def run(given: Sequence[Any], seed: Tensor | None = None) -> Outputs:
        return compute(graph, cast(given, casts), options, kernel, seed)

    return run


def _reference(values: Values) -> Run:
    """The meaning of the program in float64, rounded to its dtypes; float64 in gives float64 out."""
    from fagen.ir.reference import evaluate

    graph = values.graph
    dtypes = output_dtypes(values)

    def run(given: Sequence[Any], seed: Tensor | None = None) -> Outputs:
        if torch.float64 not in dtypes:
            require_fp32(graph, given)
        device = next(value.device for value in given if isinstance(value, Tensor))
        number = int(draw_seed(device) if seed is None else seed) if graph.random else 0
        outputs = evaluate(graph, given, seed=number)
        return tuple(output.to(dtype) for output, dtype in zip(outputs, dtypes, strict=True))

    return run


def output_dtypes(values: Values) -> list[torch.dtype]:
    """The dtype of each output: fp32 for row statistics, else that of the first tensor with features."""
    floats = [tensor.dtype for _, tensor in values.inputs if tensor.dtype.is_floating_point]
    if torch.float64 in floats:
        return [torch.float64] * len(values.graph.outputs)
    problem = problem_of(values.graph, arch_of(values.device), None, storages(values), values.sizes())
    return [DTYPE_OF[storage] for storage in output_storages(problem)]


def empty_outputs(graph: Graph, given: Sequence[Any], seed: Tensor | None = None) -> Outputs:
    """Outputs of the right shape, dtype and strides, nothing computed: of tensors that are only shapes."""
    values = read(graph, given)
    check_dtypes(values)
    shapes = output_shapes(graph, values.sizes())
    return tuple(
        torch.empty(shape, dtype=dtype, device=values.device)
        for shape, dtype in zip(shapes, output_dtypes(values), strict=True)
    )


# ------------------------------------------------------------------------------------ kernels for the values


def problem_for(values: Values, options: Options, sizes: Mapping[Axis, int]) -> Problem:
    """What is planned for a call."""
    arch, deterministic = arch_of(values.device), options.deterministic
    return problem_of(
        values.graph, arch, options.family, storages(values), sizes, deterministic=deterministic
    )


@lru_cache(maxsize=64)
def arch_of(device: torch.device) -> str:
    """The row of planning that describes a device."""
    if device.type != "cuda":
        return "emulator"
    try:
        return arch_for(torch.cuda.get_device_name(device)).name
    except PlanError:
        return arch_for(torch.cuda.get_device_capability(device)).name


def _check_kernel(kernel: Compiled, values: Values, sizes: Mapping[Axis, int]) -> None:
    """Refuse tensors of other dtypes, head dims or GPUs than a kernel was compiled for."""
    problem = kernel.problem
    given: tuple[Storage, ...] = storages(values)
    for (argument, _), stored, compiled in zip(values.inputs, given, problem.inputs, strict=True):
        if stored != compiled:
            raise DtypeError(
                f"{argument.name} holds {stored}, and the kernel was compiled for {compiled}",
                call=kernel.name,
                works="convert it, or compile a kernel for it",
            )
    group = [(GROUP_AXIS, problem.group)] if problem.group > 1 else []
    for axis, length in (*problem.sizes, *group):
        if sizes[axis] != length:
            raise UsageError(
                f"{length_name(axis)} is {sizes[axis]}, and the kernel was compiled for {length}",
                call=kernel.name,
                works="compile a kernel for it",
            )
    if values.device.type == "cuda":
        _check_gpu(kernel, values.device)


def _check_gpu(kernel: Compiled, device: torch.device) -> None:
    """A cubin runs on later minor versions of its major one; with a letter in its name only on its own."""
    target = arch_for(kernel.problem.arch).target
    major, minor = torch.cuda.get_device_capability(device)
    number = int(target.removeprefix("sm_").rstrip("af"))
    fits = divmod(number, 10)[0] == major and number % 10 <= minor
    if target.endswith(("a", "f")):
        fits = number == 10 * major + minor
    if not fits:
        raise UsageError(
            f"the kernel was compiled for {target}, and {device} is sm_{major}{minor}",
            call=kernel.name,
            works=f'compile it with arch="sm_{major}{minor}"',
        )
