"""The last runs of a program, found by one look of torch's own at the tensors of a call.

To read from Python all that a run depends on takes longer than the rest of a call. What torch's compiler
guards its code with compares most of it at once: class, dtype, device, shape, strides, lazy negation, whether
a gradient is wanted, and what torch has switched on around a call: transforms, tracers, autocast. It does not
see whether gradients are recorded at all, nor some of the modes that see operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fagen.calls.values import READ_BYTES
from fagen.torch_op import Run

MOST_RECENT = 4
"""Runs that are kept of a program: lengths that take turns."""

_guards: Any = torch._C._dynamo.guards


class Recent:
    """A run, and what the values of a call are like that it is for.

    ``held`` is an object that its key knows by identity: no other takes that identity meanwhile.
    """

    __slots__ = ("_kinds", "_numbers", "_same", "_tensors", "held", "run")

    def __init__(self, run: Run, held: object, given: Sequence[Any]) -> None:
        self.run = run
        self.held = held
        self._tensors = [i for i, value in enumerate(given) if isinstance(value, Tensor)]
        self._numbers = [i for i, value in enumerate(given) if not isinstance(value, Tensor)]
        self._kinds = [given[i].__class__ for i in self._numbers]
        every = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
        self._same: Callable[..., bool] = _guards.TensorGuards(
            *[given[i] for i in self._tensors], **every
        ).check

    def takes(self, given: Sequence[Any]) -> bool:
        """Whether a call of as many values may be left to the run: never one with a tensor in two places,
        or with one off `READ_BYTES`."""
        if self._numbers:
            if [given[i].__class__ for i in self._numbers] != self._kinds:
                return False
            given = [given[i] for i in self._tensors]
        return self._same(*given) and not [each for each in given if each.data_ptr() % READ_BYTES]
