"""Whether what is timed is right: a call's result on some rows beside the reference and torch's operations.

Gradients are compared for an incoming gradient that is zero outside those rows: then the rows are all that
the gradients of k and v depend on, and the reference needs no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fagen.bench.contenders import Inputs, Ready
from fagen.ir.reference import Comparison, compare, eager, evaluate

_ROWS = 64
_EDGE = _ROWS // 4


def sampled_rows(q_len: int) -> list[int]:
    """The rows that are compared: all of few, else the first, the last, and others drawn between them."""
    if q_len <= _ROWS:
        return list(range(q_len))
    inner = torch.randperm(q_len - 2 * _EDGE, generator=torch.Generator().manual_seed(q_len))
    drawn = sorted((inner[: _ROWS - 2 * _EDGE] + _EDGE).tolist())
    return [*range(_EDGE), *drawn, *range(q_len - _EDGE, q_len)]


class Expected:
    """What a cell's result is on sampled rows, computed once and compared with every contender's."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._is_gradient = inputs.cell.direction == "backward"
        self._rows = torch.tensor(sampled_rows(inputs.cell.q_len), device=inputs.device)
        traced, rows = inputs.traced, {"q": self._rows}
        exactly = [tensor.detach().double().requires_grad_(self._is_gradient) for tensor in inputs.tensors]
        with torch.set_grad_enabled(self._is_gradient):
            exact = evaluate(traced.graph, (*exactly, *traced.captured), rows=rows)[0]
            self._exact = self._results(exact, exactly)
            plain = eager(traced.graph, (*inputs.tensors, *traced.captured), inputs.q.dtype, rows=rows)[0]
            self._plain = self._results(plain, inputs.tensors)

    def compare(self, ready: Ready) -> Comparison:
        """The result that is nearest to its tolerance, or furthest beyond; ``ready`` is called once."""
        found: Sequence[Tensor]
        if self._is_gradient:
            gradient = torch.zeros_like(self._inputs.gradient)
            gradient[:, :, self._rows] = self._inputs.gradient[:, :, self._rows]
            with ready.around():
                found = torch.autograd.grad(ready.call(), self._inputs.tensors, gradient)
        else:
            with ready.around():
                found = (ready.call()[:, :, self._rows],)
        several = zip(found, self._exact, self._plain, strict=True)
        return worst_of(
            [compare(got, exact, plain, gradient=self._is_gradient) for got, exact, plain in several]
        )

    def _results(self, output: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not self._is_gradient:
            return (output.detach(),)
        gradient = self._inputs.gradient[:, :, self._rows].to(output.dtype)
        return torch.autograd.grad(output, list(leaves), gradient)


def worst_of(found: Sequence[Comparison]) -> Comparison:
    """Of several comparisons the one that says most against a result."""
    return max(found, key=lambda each: (not each.ok, each.max_error / max(each.tolerance, 1e-300)))
