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
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fagen.errors import UsageError

Outputs: TypeAlias = "tuple[Tensor, ...]"
Run: TypeAlias = "Callable[[Sequence[Any]], Outputs]"


def no_backward(name: str) -> UsageError:
    """The error of a gradient that no kernel computes."""
    return UsageError(
        "the gradient was asked for, and this family has no backward kernels",
        call=name,
        works='family="reference" computes it in float64; torch.no_grad() says that none is wanted',
    )


class Call(torch.autograd.Function):
    """A call in eager mode: its outputs are part of autograd's graph, and its gradient is refused by name."""

    @staticmethod
    def forward(ctx: Any, run: Run, name: str, *values: Any) -> Outputs:
        """The outputs of ``run(values)``."""
        ctx.name = name
        return run(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Raise a UsageError that names the program."""
        raise no_backward(ctx.name)


# ------------------------------------------------------------------------------------------- torch.compile


@dataclass(frozen=True)
class Callee:
    """What the operator calls by name: ``run`` on real tensors, ``shapes`` on those that only have a shape.

    ``shapes`` gives the size, dtype and strides of each output as an empty tensor.
    """

    name: str
    run: Run
    shapes: Run


_callees: dict[str, Callee] = {}
_numbers = itertools.count()
_lock = threading.Lock()


def register(callee: Callee) -> str:
    """Keep a callee for as long as the process lives, and return the key the operator knows it by."""
    with _lock:
        key = f"{callee.name}:{next(_numbers)}"
        _callees[key] = callee
    return key


@lru_cache(maxsize=1)
def operator() -> Callable[[str, list[Tensor], list[float]], list[Tensor]]:
    """The operator ``fagen::call(key, tensors, scalars)``, defined when it is first needed."""

    @torch.library.custom_op("fagen::call", mutates_args=())
    def call(key: str, tensors: list[Tensor], scalars: list[float]) -> list[Tensor]:
        with torch.no_grad():
            outputs = _callees[key].run([*tensors, *scalars])
        return list(outputs)

    @call.register_fake
    def _(key: str, tensors: list[Tensor], scalars: list[float]) -> list[Tensor]:
        return list(_callees[key].shapes([*tensors, *scalars]))

    @torch.library.custom_op("fagen::call_backward", mutates_args=())
    def call_backward(key: str, gradients: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        raise no_backward(_callees[key].name)

    @call_backward.register_fake
    def _(key: str, gradients: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        return [torch.empty_like(tensor) for tensor in tensors]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.key, tensors, _ = inputs
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
        return None, call_backward(ctx.key, list(gradients), list(ctx.saved_tensors)), None

    call.register_autograd(backward, setup_context=setup_context)
    return call
