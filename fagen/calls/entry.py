"""Where calls come in: a program's, `attention`'s and a kernel's, in eager mode and under ``torch.compile``.

Under ``torch.compile`` a call becomes one operator. What is not a tensor (a program, a mask, a score) stays
outside torch's graph: the operator knows it by a key and traces it again whenever it runs, so it sees what
changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from fagen import torch_op
from fagen.calls.derivatives import require_plain
from fagen.calls.dispatch import call, compute, empty_outputs, features_of, gradients_of, numbers_of
from fagen.calls.keys import named
from fagen.calls.values import autocasts, cast, read
from fagen.compile import Compiled
from fagen.errors import UsageError
from fagen.ir.graph import Graph
from fagen.lang.attention import attention
from fagen.lang.program import Options, Program
from fagen.lang.trace import Traced
from fagen.lang.untraced import keep_outside, torch_traces_expressions
from fagen.torch_op import Callee, Key, Outputs, constant

_TENSOR_PARTS = ("bias", "sink")
_WHOLE_GRAPHS = torch_traces_expressions()


class Called(Protocol):
    """A program as `call_program` takes it."""

    key: str
    option: Options

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Graph, tuple[Any, ...]]:
        """The graph for a call and a value for each of its arguments."""


class Held(Protocol):
    """A kernel as `call_kernel` takes it."""

    key: str
    compiled: Compiled
    captured: tuple[Any, ...]
    option: Options


def call_program(program: Called, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | Outputs:
    """The outputs of a program."""
    if torch.compiler.is_compiling():
        return _program_operator(program, args, kwargs)
    graph, values = program.bind(args, kwargs)
    return call(graph, values, program.option)


def call_attention(
    tensors: tuple[Tensor, ...], parts: Mapping[str, Any], deterministic: bool, family: str | None
) -> Tensor | Outputs:
    """The outputs of `attention`, whose other parameters are ``parts``."""
    if torch.compiler.is_compiling():
        one = _attention_operator if _WHOLE_GRAPHS else _outside(call_attention)
        return one(tensors, parts, deterministic, family)
    traced = attention(**parts)
    return call(traced.graph, (*tensors, *traced.captured), _options(deterministic, family))


@lru_cache(maxsize=64)
def _options(deterministic: bool, family: str | None) -> Options:
    """The same object for the same options."""
    return Options(deterministic, family)


def call_kernel(kernel: Held, args: tuple[Any, ...]) -> Tensor | Outputs:
    """The outputs of a compiled kernel; what it captured stands for last arguments that are not given."""
    if torch.compiler.is_compiling():
        key = _kernel_key(kernel.key, len(args))
        if key is None:
            return _outside(call_kernel)(kernel, args)
        return _one(torch_op.through_operator(key, args))
    compiled = kernel.compiled
    given = _completed(kernel, args) if kernel.captured else args
    return call(compiled.problem.graph, given, kernel.option, compiled)


def _completed(kernel: Held, args: Sequence[Any]) -> Sequence[Any]:
    missing = len(kernel.compiled.problem.graph.arguments) - len(args)
    captured = kernel.captured
    return (*args, *captured[len(captured) - missing :]) if 0 < missing <= len(captured) else args


# ------------------------------------------------------------------------------------------- torch.compile


def _program_operator(program: Called, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | Outputs:
    names, arguments, defaults = _names(program.key)
    given = {**dict(defaults), **dict(zip(names, args, strict=False)), **kwargs}
    constants = [name for name in given if name not in arguments]
    key = _program_key(program.key, tuple(constants), *[_digits(given[name]) for name in constants])
    if key is None:
        return _outside(call_program)(program, args, kwargs)
    return _one(torch_op.through_operator(key, [given[name] for name in arguments]))


def _attention_operator(
    tensors: tuple[Tensor, ...], parts: Mapping[str, Any], deterministic: bool, family: str | None
) -> Tensor | Outputs:
    taken = [name for name in _TENSOR_PARTS if isinstance(parts[name], Tensor)]
    others = {name: None if name in taken else _digits(value) for name, value in parts.items()}
    key = _attention_key(tuple(taken), deterministic, family, **others)
    if key is None:
        return _outside(call_attention)(tensors, parts, deterministic, family)
    return _one(torch_op.through_operator(key, [*tensors, *[parts[name] for name in taken]]))


def _digits(value: Any) -> Any:
    """A float as text, which is a constant where torch would keep the number symbolic (dynamic shapes)."""
    return (value.hex(),) if isinstance(value, float) else value


def _number(value: Any) -> Any:
    """What `_digits` was given."""
    return float.fromhex(value[0]) if isinstance(value, tuple) and isinstance(value[0], str) else value


def _one(outputs: Outputs) -> Tensor | Outputs:
    return outputs[0] if len(outputs) == 1 else outputs


def _outside(function: Callable[..., Tensor | Outputs]) -> Callable[..., Tensor | Outputs]:
    """A function where torch can't hold what it is given: it breaks the graph and calls it."""
    disable: Any = torch.compiler.disable
    outside: Callable[..., Tensor | Outputs] = disable(function)
    return outside


keep_outside(
    [_outside],
    "a tensor that a mask or score captures wants a gradient, or torch is older than 2.13: "
    "leave fullgraph=True out, or give the tensor as an argument of a program",
)


def _autocast_dtypes() -> dict[str, torch.dtype]:
    dtypes = {device_type: torch_op.autocast_dtype(device_type) for device_type in ("cpu", "cuda")}
    return {device_type: dtype for device_type, dtype in dtypes.items() if dtype is not None}


@dataclass(frozen=True)
class _Captures:
    """What of torch's state the captured tensors of a call meet, as it was when torch compiled the call.

    The operator, which is not given them, runs without it. torch compiles anew where this state changes, but
    not where such a tensor does.
    """

    name: str
    recorded: bool = field(default_factory=torch.is_grad_enabled)
    autocast: Mapping[str, torch.dtype] = field(default_factory=_autocast_dtypes)

    def want_gradient(self, captured: Sequence[Any]) -> bool:
        """Whether autograd records one of them: the operator has no gradient for it."""
        return self.recorded and any(isinstance(value, Tensor) and value.requires_grad for value in captured)

    def require_no_gradient(self, captured: Sequence[Any]) -> None:
        """UsageError where one has come to want a gradient."""
        if self.want_gradient(captured):
            raise UsageError(
                "a captured tensor wants a gradient now, and none did when torch compiled the call",
                call=self.name,
                works="call torch._dynamo.reset(), or requires_grad_() before the first call",
            )

    def cast(self, graph: Graph, given: Sequence[Any]) -> Sequence[Any]:
        """The values of a call as autocast has them; the operator was given its own that way."""
        return cast(given, self._casts(graph, given)) if self.autocast else given

    def shapes(self, graph: Graph, given: Sequence[Any]) -> Outputs:
        """The outputs for them as `empty_outputs` has them.

        torch casts no real tensor where others only have a shape.
        """
        casts = self._casts(graph, given)
        made = (
            torch.empty(value.shape, dtype=casts[i], device=value.device) if i in casts else value
            for i, value in enumerate(given)
        )
        return empty_outputs(graph, tuple(made))

    def _casts(self, graph: Graph, given: Sequence[Any]) -> Mapping[int, torch.dtype]:
        if not self.autocast:
            return {}
        values = read(graph, given)
        return autocasts(values, self.autocast.get(values.device.type))


@constant
def _names(key: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, Any], ...]]:
    """The parameters of a program, those that are arguments of its kernels, and the defaults of these."""
    signature = named(key).signature
    arguments = tuple(argument.name for argument in signature.arguments)
    return signature.names, arguments, tuple(signature.defaults.items())


@constant
def _program_key(key: str, names: tuple[str, ...], *constants: Any) -> Key | None:
    program: Program = named(key)
    require_plain(program.name, ())

    def trace(_: Sequence[Any]) -> Traced:
        return program.trace(**dict(zip(names, map(_number, constants), strict=True)))

    return _registered(program.name, trace, program.option, numbers_of(program.signature.arguments))


# Each part is a parameter of its own: torch guards an object it is given directly by its identity.
@constant
def _attention_key(
    taken: tuple[str, ...], deterministic: bool, family: str | None, **others: Any
) -> Key | None:
    require_plain("attention", ())

    def trace(parts: Sequence[Any]) -> Traced:
        numbers = {name: _number(value) for name, value in others.items()}
        return attention(**{**numbers, **dict(zip(taken, parts, strict=False))})

    return _registered("attention", trace, Options(deterministic, family), (None,) * 3, len(taken))


@constant
def _kernel_key(key: str, count: int) -> Key | None:
    kernel: Held = named(key)
    compiled = kernel.compiled
    graph = compiled.problem.graph
    require_plain(graph.name, ())
    captures = _Captures(graph.name)
    if captures.want_gradient(_completed(kernel, (None,) * count)[count:]):
        return None

    def run(given: Sequence[Any], seed: Tensor | None) -> Outputs:
        every = _completed(kernel, given)
        captures.require_no_gradient(every[count:])
        return compute(graph, every, kernel.option, compiled, seed)

    def shapes(given: Sequence[Any]) -> Outputs:
        return empty_outputs(graph, _completed(kernel, given))

    def gradients(given: Sequence[Any], incoming: Sequence[Tensor], seed: Tensor | None) -> Sequence[Tensor]:
        raise UsageError(
            "the gradient was asked for, and a kernel compiled ahead of time has one direction",
            call=graph.name,
            works="call the program or fagen.attention; torch.no_grad() says that no gradient is wanted",
        )

    numbers = numbers_of(graph.arguments[:count])
    features = features_of(graph)[:count]
    return torch_op.register(Callee(graph.name, run, shapes, gradients, numbers, graph.random, features))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _registered(
    name: str, trace: Callable[[Sequence[Any]], Traced], options: Options, numbers: Any, parts: int = 0
) -> Key | None:
    """The key of a callee that is traced anew each time; None where a captured tensor wants a gradient, which
    the operator is not given.

    Behind its own arguments, of which ``numbers`` tells, it is given as many tensors as it has ``parts``,
    which tracing captures. Whether it is random shows without them, and stays as it is: torch's graph draws a
    seed or does not.
    """
    own, first, captures = len(numbers), trace(()), _Captures(name)
    random = first.graph.random
    if captures.want_gradient(first.captured):
        return None

    def with_captured(given: Sequence[Any]) -> tuple[Graph, tuple[Any, ...]]:
        graph, captured = trace(given[own:])
        if graph.random and not random:
            raise UsageError(
                "it has dropout now, and had none when torch compiled the call",
                call=name,
                works="give the rate as an argument, or call torch._dynamo.reset()",
            )
        return graph, (*given[:own], *captured)

    def run(given: Sequence[Any], seed: Tensor | None) -> Outputs:
        graph, every = with_captured(given)
        of_operator = {id(part) for part in given[own:]}
        captures.require_no_gradient([value for value in every[own:] if id(value) not in of_operator])
        return compute(graph, captures.cast(graph, every), options, seed=seed)

    def shapes(given: Sequence[Any]) -> Outputs:
        graph, every = with_captured(given)
        return captures.shapes(graph, every)

    def gradients(given: Sequence[Any], incoming: Sequence[Tensor], seed: Tensor | None) -> Sequence[Tensor]:
        graph, every = with_captured(given)
        found = iter(gradients_of(graph, captures.cast(graph, every), options, incoming, seed))
        every_one = [(value, next(found)) for value in every if _is_float(value)]
        own_ones = sum(map(_is_float, given[:own]))
        results = [each for _, each in every_one[:own_ones]]
        for part in filter(_is_float, given[own:]):  # captured in the order of use, or not at all
            of_part = (each for value, each in every_one[own_ones:] if value is part)
            results.append(sum(of_part, torch.zeros_like(part)))
        return results

    features = (*features_of(first.graph)[:own], *[False] * parts)
    return torch_op.register(
        Callee(name, run, shapes, gradients, (*numbers, *[None] * parts), random, features)
    )
