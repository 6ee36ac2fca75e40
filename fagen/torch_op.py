"""How torch sees a call: a function of autograd in eager mode, an operator under ``torch.compile``.

Neither knows what is computed. A call is a `Run`: values in, tensors out. The operator is given the name of
one, because a graph of torch holds strings and tensors and nothing else.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from fagen.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
Outputs: TypeAlias = "tuple[Tensor, ...]"
Run: TypeAlias = "Callable[..., Outputs]"
"""Called with the values, and with a seed where the caller has one."""

AUTOCAST_FROM = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that autocast turns into its own."""


class Recorded(Protocol):
    """Calls with the same facts, in both directions; ``name`` is that of their program."""

    name: str

    def forward(self, given: Sequence[Any]) -> tuple[Outputs, Outputs, Tensor | None]:
        """The outputs for the values of a call, what else the other direction reads, and the seed."""

    def backward(
        self, given: Sequence[Any], outputs: Outputs, incoming: Sequence[Tensor | None], seed: Tensor | None
    ) -> list[Tensor | None]:
        """The gradient of each value for those of the outputs; None where there is none."""


class Call(torch.autograd.Function):
    """A call in eager mode, as a part of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, both: Recorded, *values: Any) -> Outputs:
        """The outputs of a call."""
        outputs, kept, seed = both.forward(values)
        ctx.both, ctx.own = both, len(outputs)
        ctx.numbers = [None if isinstance(value, Tensor) else (value,) for value in values]
        tensors = [value for value in values if isinstance(value, Tensor)]
        ctx.save_for_backward(*tensors, seed, *outputs, *kept)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradient of each value that wants one, behind `_Once` where torch records it."""
        saved = iter(ctx.saved_tensors)
        values = [next(saved) if number is None else number[0] for number in ctx.numbers]
        seed = next(saved)
        with torch.no_grad():
            found = ctx.both.backward(values, tuple(saved), gradients, seed)
        if torch.is_grad_enabled():
            apply: Any = _Once.apply
            found = apply(ctx.both.name, found, *values, *gradients)
        return None, *found


class _Once(torch.autograd.Function):
    """Gradients that have none themselves: without it these would be taken for 0."""

    @staticmethod
    def forward(
        ctx: Any, name: str, found: Sequence[Tensor | None], *of: object
    ) -> tuple[Tensor | None, ...]:
        """What was found, as a function of the values and gradients it is of."""
        ctx.name = name
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, ...]:
        """Raise a UsageError that names the program."""
        raise UsageError(
            "a gradient was differentiated, and kernels have first derivatives alone",
            call=ctx.name,
            works='family="reference" has all',
        )


# ---------------------------------------------------------------------------------------------- random bits

_SEED_RANGE = (-(2**63), 2**63 - 1)


def draw_seed(device: torch.device) -> Tensor:
    """A 64-bit seed from torch's generator of a device, on the device."""
    return torch.randint(*_SEED_RANGE, (1,), dtype=torch.int64, device=device)


# ------------------------------------------------------------------------------------------- torch.compile


def constant(function: F) -> F:
    """Have torch call a function while it traces; what `torch.compiler.assume_constant_result` does.

    That one imports the compiler, which a process that never compiles need not wait for.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class Callee:
    """What the operator calls by name: ``run`` on real tensors, ``shapes`` on those that only have a shape.

    ``run`` gives the outputs for the values and a seed, ``shapes`` the size, dtype and strides of each as an
    empty tensor, ``gradients`` those of all floating-point tensors for those of the outputs and the seed.
    ``numbers`` has an entry for each value: None for a tensor, and what a number is to become again, which
    the operator takes as a double. ``random`` says that there is a seed, ``features`` of each value whether
    autocast turns it into another dtype, which is done before the operator.
    """

    name: str
    run: Callable[[Sequence[Any], Tensor | None], Outputs]
    shapes: Run
    gradients: Callable[[Sequence[Any], Sequence[Tensor], Tensor | None], Sequence[Tensor]]
    numbers: tuple[type[int] | type[float] | None, ...]
    random: bool
    features: tuple[bool, ...]

    def values(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> list[Any]:
        """Tensors and numbers in the order of the call."""
        some, others = iter(tensors), iter(numbers)
        return [next(some) if number is None else number(next(others)) for number in self.numbers]


Key: TypeAlias = "tuple[str, bool, tuple[bool, ...]]"
"""What the operator knows a callee by, whether it has a seed, and what autocast turns into another dtype."""

_callees: dict[str, Callee] = {}
_numbers = itertools.count()
_lock = threading.Lock()


def register(callee: Callee) -> Key:
    """Keep a callee for as long as the process lives, and return its key."""
    with _lock:
        _define()
        name = f"{callee.name}:{next(_numbers)}"
        _callees[name] = callee
    return name, callee.random, callee.features


def through_operator(key: Key, given: Sequence[Any]) -> Outputs:
    """The outputs of a callee for values in the order of the call, through the operator.

    Its seed is drawn before it, so that torch treats it as it does its own random numbers: a checkpoint that
    runs the operator again gives it the same.
    """
    name, random, features = key
    pairs = zip(given, features, strict=True)
    given = [autocast(value) if has_features else value for value, has_features in pairs]
    tensors = [value for value in given if isinstance(value, Tensor)]
    numbers = [float(value) for value in given if not isinstance(value, Tensor)]
    seed = torch.ops.fagen.seed(tensors[0], _count()) if random else None
    return tuple(torch.ops.fagen.call(name, tensors, numbers, seed))


def autocast(tensor: Tensor) -> Tensor:
    """A tensor in the dtype that autocast has for it."""
    dtype = autocast_dtype(tensor.device.type)
    return tensor if dtype is None or tensor.dtype not in AUTOCAST_FROM else tensor.to(dtype)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast computes in on a type of device; None where it is off."""
    if not _has_autocast(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


@constant
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


@constant
def _count() -> int:
    """A number that no other seed has: two nodes of a graph with the same arguments may become one."""
    return next(_numbers)


@lru_cache(maxsize=1)
def _define() -> None:
    """Define the operators when first needed: it takes time.

    ``fagen::seed(like, number)`` draws a seed on the device of a tensor; ``fagen::call(key, tensors, numbers,
    seed)`` calls a callee and has a gradient, ``fagen::call_backward``.
    """
    random = torch.Tag.nondeterministic_seeded  # which custom_op does not take in every torch
    torch.library.define("fagen::seed", "(Tensor like, int number) -> Tensor", tags=random)

    @torch.library.impl("fagen::seed", "CompositeExplicitAutograd")
    def seed(like: Tensor, number: int) -> Tensor:
        return draw_seed(like.device)

    @torch.library.custom_op("fagen::call", mutates_args=())
    def call(key: str, tensors: list[Tensor], numbers: list[float], seed: Tensor | None) -> list[Tensor]:
        callee = _callees[key]
        with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
            return list(callee.run(callee.values(tensors, numbers), seed))

    @call.register_fake
    def _(key: str, tensors: list[Tensor], numbers: list[float], seed: Tensor | None) -> list[Tensor]:
        callee = _callees[key]
        return list(callee.shapes(callee.values(tensors, numbers)))

    @torch.library.custom_op("fagen::call_backward", mutates_args=())
    def call_backward(
        key: str, gradients: list[Tensor], tensors: list[Tensor], numbers: list[float], seed: Tensor | None
    ) -> list[Tensor]:
        callee = _callees[key]
        with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
            return list(callee.gradients(callee.values(tensors, numbers), gradients, seed))

    @call_backward.register_fake
    def _(
        key: str, gradients: list[Tensor], tensors: list[Tensor], numbers: list[float], seed: Tensor | None
    ) -> list[Tensor]:
        return [tensor.new_empty(tensor.shape) for tensor in tensors if tensor.is_floating_point()]

    def keep_name(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = _callees[inputs[0]].name

    def refuse(ctx: Any, *_: object) -> tuple[Any, ...]:
        raise UsageError(
            "a gradient was differentiated, and an operator of torch has its first derivative alone",
            call=ctx.name,
            works='family="reference" has all outside of torch.compile and of torch\'s modes',
        )

    call_backward.register_autograd(refuse, setup_context=keep_name)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.key, tensors, ctx.numbers, seed = inputs
        ctx.tensors = len(tensors)
        ctx.save_for_backward(*tensors, seed, *output)

    def backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # a checkpoint lets them be read once
        tensors, seed, outputs = saved[: ctx.tensors], saved[ctx.tensors], saved[ctx.tensors + 1 :]
        pairs = zip(outputs, gradients, strict=True)
        along = [torch.zeros_like(o) if g is None else g for o, g in pairs]
        results = iter(call_backward(ctx.key, along, list(tensors), ctx.numbers, seed))
        wanted = [next(results) if tensor.is_floating_point() else None for tensor in tensors]
        of_numbers: Any = None if ctx.numbers else []  # to torch an empty list is one of tensors
        return None, wanted, of_numbers, None

    call.register_autograd(backward, setup_context=setup_context)
