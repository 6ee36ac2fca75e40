"""Whether a call is found to be like an earlier one: never where the run would be another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fagen.calls.recent import Recent


class Subclass(torch.Tensor):
    """A tensor of a class of its own."""


def given() -> list[Any]:
    return [torch.zeros(2, 3, 8, dtype=torch.float16), torch.zeros(2, 8, dtype=torch.float16), 0.5, 3]


def off_by_one(x: torch.Tensor) -> torch.Tensor:
    """The same values 2 bytes behind a multiple of 16."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dtype": lambda x: x.bfloat16(),
    "device": lambda x: x.to("meta"),
    "length": lambda x: torch.zeros(2, 4, 8, dtype=x.dtype),
    "rank": lambda x: x[None],
    "strides": lambda x: torch.zeros(2, 8, 3, dtype=x.dtype).transpose(1, 2),
    "address": off_by_one,
    "gradient": lambda x: x.requires_grad_(),
    "negation": torch._neg_view,
    "class": lambda x: x.as_subclass(Subclass),
    "sparse": lambda x: x.to_sparse(),
    "number": lambda x: 1.0,
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_a_run_depends_on_is_seen_at_each_tensor(other: str) -> None:
    recent = Recent(lambda values: (), None, given())
    assert recent.takes(given())
    values = given()
    values[0] = OTHERS[other](values[0])
    assert not recent.takes(values)
    assert recent.takes(given())


@pytest.mark.parametrize("number", [1, True, 2**40, torch.tensor(0.5), None])
def test_a_number_is_of_the_same_kind(number: object) -> None:
    recent = Recent(lambda values: (), None, given())
    values = given()
    values[2] = 7.25
    assert recent.takes(values)
    values[2] = number
    assert not recent.takes(values)


def test_what_torch_has_switched_on_is_seen() -> None:
    tensors = [torch.zeros(4, 8), torch.zeros(8)]
    recent = Recent(lambda values: (), None, tensors)
    with torch.autocast("cpu"):
        assert not recent.takes(tensors)
    found = []
    torch.vmap(lambda x: found.append(recent.takes([x, tensors[1]])) or x)(torch.zeros(2, 4, 8))
    torch.vmap(lambda x: found.append(recent.takes(tensors)) or x)(torch.zeros(2, 4, 8))
    torch.func.grad(lambda x: found.append(recent.takes([x, tensors[1]])) or x.sum())(tensors[0])
    assert found == [False, False, False]


def test_one_tensor_in_two_places_is_left_to_the_long_way() -> None:
    x = torch.zeros(4, 8)
    assert not Recent(lambda values: (), None, [x, x]).takes([x, x])
