"""The same call under many schedules of the emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fagen.calls.prepared import emulation

FIFTY = 50


def require_same_bits(run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """What a call gives, the same bits under fifty schedules; none of them may show a finding."""
    first: Sequence[Tensor] = ()
    for seed in range(FIFTY):
        schedule = ("forward", "backward")[seed] if seed < 2 else "random"
        with emulation(schedule=schedule, seed=seed, workers=1):
            found = run()
        first = first or found
        assert all(map(torch.equal, first, found)), f"{schedule}, seed {seed}"
    return first
