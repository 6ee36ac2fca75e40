"""The library as a compiler for this GPU takes it: every mask and score builds well at the first try."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import fagen as fg
from fagen.calls.dispatch import arch_of
from fagen.compile import judged
from fagen.lang import masks, scores
from fagen.run.build import build

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

LENGTHS = torch.tensor([3, 4], dtype=torch.int32)
MASKS: Mapping[str, fg.Expr] = {
    "causal": fg.causal(),
    "sliding_window": fg.sliding_window(1024, 0),
    "prefix_lm": fg.prefix_lm(2048),
    "document": fg.document(torch.tensor([[0, 0, 1, 1]])),
    "document_lengths": fg.document_lengths(torch.tensor([3, 5])),
    "chunked": fg.chunked(512),
    "dilated": fg.dilated(512, 4),
    "global_tokens": fg.global_tokens(torch.zeros(9, dtype=torch.bool)),
    "neighbourhood_2d": fg.neighbourhood_2d(64, 64, 9, 9),
    "block_diffusion": fg.block_diffusion(2048, 32),
    "padding": fg.padding(LENGTHS),
}
SCORES: Mapping[str, Any] = {
    "softcap": fg.softcap(30.0),
    "alibi": fg.alibi(),
    "relative_bias": fg.relative_bias(torch.zeros(2, 99)),
    "temperature": fg.temperature(2.0),
}
TABLES: Mapping[str, Mapping[str, Any]] = {
    "prefixes": {"mask": fg.prefix_lm(LENGTHS)},
    "slopes": {"mask": fg.causal(), "score": fg.alibi(torch.ones(2))},
    "temperatures": {"mask": fg.causal(), "score": fg.temperature(torch.ones(2))},
}
"""What takes a number, with one for each head or batch entry."""


def test_there_is_every_part_of_the_library() -> None:
    assert set(MASKS) == set(masks.__all__)
    assert set(SCORES) == set(scores.__all__)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", [*MASKS, *SCORES, *TABLES])
def test_the_first_candidate_builds_well(name: str, head_dim: int) -> None:
    asked = {"head_dim": head_dim, "dtype": "bf16", "arch": arch_of(torch.device("cuda", 0))}
    parts = TABLES.get(name, {"mask": MASKS.get(name, MASKS["causal"]), "score": SCORES.get(name)})
    text = fg.compile(**parts, **asked).compiled.candidate(0).emitted.text
    assert judged(build(text, name=name, arch=torch.cuda.get_device_capability())) == ("", 0)
