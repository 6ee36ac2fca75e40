"""How torch sees a call: a function of autograd in eager mode, an operator under ``torch.compile``.

Neither knows what is computed. A call is a `Run`: values in, tensors out. The operator is given the name of
one, because a graph of torch holds strings and tensors and nothing else.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Outputs: TypeAlias = "tuple[Tensor, ...]"
Run: TypeAlias = "Callable[..., Outputs]"
"""Called with the values, and with a seed where the caller has one."""


class Recorded(Protocol):
    """Calls with the same facts, in both directions."""

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
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradient of each value that wants one."""
        saved = iter(ctx.saved_tensors)
        values = [next(saved) if number is None else number[0] for number in ctx.numbers]
        seed = next(saved)
        return None, *ctx.both.backward(values, tuple(saved), gradients, seed)


# ------------------------------------------------------------------------------------------- torch.compile


@dataclass(frozen=True)
class Callee:
    """What the operator calls by name: ``run`` on real tensors, ``shapes`` on those that only have a shape.

    ``run`` gives the outputs and, behind them, the seed of random bits (of length 0 where there are none);
    ``shapes`` the size, dtype and strides of each as an empty tensor, ``gradients`` those of all
    floating-point tensors for those of the outputs and the seed. ``numbers`` has an entry for each value:
    None for a tensor, and what a number is to become again, which the operator takes as a double.
    """

    name: str
    run: Run
    shapes: Run
    gradients: Callable[[Sequence[Any], Sequence[Tensor], Tensor], Sequence[Tensor]]
    numbers: tuple[type[int] | type[float] | None, ...]

    def values(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> list[Any]:
        """Tensors and numbers in the order of the call."""
        some, others = iter(tensors), iter(numbers)
        return [next(some) if number is None else number(next(others)) for number in self.numbers]


_callees: dict[str, Callee] = {}
_numbers = itertools.count()
_lock = threading.Lock()


def register(callee: Callee) -> str:
    """Keep a callee for as long as the process lives, and return the key the operator knows it by."""
    with _lock:
        _define()
        key = f"{callee.name}:{next(_numbers)}"
        _callees[key] = callee
    return key


def through_operator(key: str, given: Sequence[Any]) -> Outputs:
    """The outputs of a callee for values in the order of the call, through the operator."""
    tensors = [value for value in given if isinstance(value, Tensor)]
    numbers = [float(value) for value in given if not isinstance(value, Tensor)]
    *outputs, _ = torch.ops.fagen.call(key, tensors, numbers)
    return tuple(outputs)


@lru_cache(maxsize=1)
def _define() -> None:
    """Define ``fagen::call(key, tensors, numbers)`` and its gradient, when first needed: it takes time.

    Two calls of it with the same inputs are not one, where this torch can be told so: each draws its seed.
    """
    can_be_told = "tags" in inspect.signature(torch.library.custom_op).parameters
    tags: Any = {"tags": [torch.Tag.nondeterministic_seeded]} if can_be_told else {}

    @torch.library.custom_op("fagen::call", mutates_args=(), **tags)
    def call(key: str, tensors: list[Tensor], numbers: list[float]) -> list[Tensor]:
        callee = _callees[key]
        with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
            return list(callee.run(callee.values(tensors, numbers)))

    @call.register_fake
    def _(key: str, tensors: list[Tensor], numbers: list[float]) -> list[Tensor]:
        callee = _callees[key]
        return list(callee.shapes(callee.values(tensors, numbers)))

    @torch.library.custom_op("fagen::call_backward", mutates_args=())
    def call_backward(
        key: str, gradients: list[Tensor], tensors: list[Tensor], numbers: list[float], seed: Tensor
    ) -> list[Tensor]:
        callee = _callees[key]
        with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
            return list(callee.gradients(callee.values(tensors, numbers), gradients, seed))

    @call_backward.register_fake
    def _(
        key: str, gradients: list[Tensor], tensors: list[Tensor], numbers: list[float], seed: Tensor
    ) -> list[Tensor]:
        return [tensor.new_empty(tensor.shape) for tensor in tensors if tensor.is_floating_point()]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.key, tensors, ctx.numbers = inputs
        ctx.tensors = len(tensors)
        ctx.save_for_backward(*tensors, *output)

    def backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
        tensors, (*outputs, seed) = ctx.saved_tensors[: ctx.tensors], ctx.saved_tensors[ctx.tensors :]
        pairs = zip(outputs, gradients[:-1], strict=True)
        along = [torch.zeros_like(o) if g is None else g for o, g in pairs]
        results = iter(call_backward(ctx.key, along, list(tensors), ctx.numbers, seed))
        wanted = [next(results) if tensor.is_floating_point() else None for tensor in tensors]
        return None, wanted, [None] * len(ctx.numbers)

    call.register_autograd(backward, setup_context=setup_context)
