"""The masks of the library, and masks a user writes: which pairs they allow."""

import pytest
import torch
from masks import MASKS, dense

import fagen as fg


def counted(allowed: torch.Tensor) -> tuple[int, int, int]:
    q, kv = allowed.nonzero(as_tuple=True)
    return int(allowed.sum()), int((1000 * q + kv).sum()), int((~allowed.any(1)).sum())


@pytest.mark.parametrize("name", MASKS)
def test_counts_of_the_file(name):
    case = MASKS[name]
    allowed = dense(case.build(), case.q_len, case.kv_len)
    assert counted(allowed) == (case.attended, case.checksum, case.empty_rows)
