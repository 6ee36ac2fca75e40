"""Derivatives that torch takes otherwise than by running backward: refused, so that none is lost unsaid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fagen.errors import UsageError

_transforms = torch._C._functorch.peek_interpreter_stack
_unpack: Any = forward_ad.unpack_dual
_is_batch = torch._C._functorch.is_legacy_batchedtensor


def in_forward_mode() -> bool:
    """Whether tensors may carry tangents: torch is within a `forward_ad.dual_level`."""
    return forward_ad._current_level >= 0


def require_plain(name: str, given: Sequence[Any]) -> None:
    """UsageError within a transform of torch.func, for a batch of tensors and for one with a tangent."""
    if _transforms() is not None:
        raise UsageError(
            "kernels cannot be transformed by torch.func, as by vmap, grad or jvp",
            call=name,
            works="call it outside of them; many calls at once are one call with a longer batch",
        )
    if any(isinstance(value, Tensor) and _is_batch(value) for value in given):
        raise UsageError(
            "gradients were asked for in batches, as by is_grads_batched or vectorize",
            call=name,
            works="ask for one after another",
        )
    if in_forward_mode() and any(isinstance(value, Tensor) and _has_tangent(value) for value in given):
        raise UsageError(
            "a tensor carries a tangent, and kernels have no derivative in forward mode",
            call=name,
            works='call backward(), or torch.autograd.functional.jvp with family="reference"',
        )


def _has_tangent(tensor: Tensor) -> bool:
    try:
        return _unpack(tensor).tangent is not None
    except RuntimeError:  # in a compiled graph torch shows none, and raises at a tensor that has one
        return True
