"""How long a warm call keeps Python, and how long a new process waits for a kernel that is in the cache.

Tensors are so small that the GPU does not hold calls up.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fagen.api import Program, attention, compile, program
from fagen.lang import expr, masks, ops
from fagen.lang.types import Tensor

_CALLS, _ROUNDS, _WARM_UP = 500, 15, 50

BUDGETS_US: Mapping[str, float] = {"kernel": 20.0, "program": 30.0, "attention, fresh lambda": 45.0}
"""Microseconds of Python that a call of a kind is to cost at most."""
LOAD, LOAD_BUDGET_US = "first call, kernel in the cache", 20_000.0

_AXES: Mapping[str, str] = {"q": "b h q d", "k": "b hk kv d", "v": "b hk kv dv", "slopes": "h"}


@dataclass(frozen=True)
class Overhead:
    """The median time of a kind of call, in microseconds, and what it is to be at most."""

    call: str
    microseconds: float
    budget: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the budget is kept."""
        return self.budget is None or self.microseconds <= self.budget


def microseconds(
    call: Callable[[], object],
    synchronize: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The median time of a call on the host, over rounds of many."""
    for _ in range(_WARM_UP):
        call()
    rounds = []
    for _ in range(_ROUNDS):
        synchronize()
        start = clock()
        for _ in range(_CALLS):
            call()
        rounds.append((clock() - start) / _CALLS * 1e6)
    return statistics.median(rounds)


def _windowed() -> Program:
    """Causal attention with a slope for each head."""

    def windowed(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        s = ops.dot(q, k, over="d") * ops.rsqrt(expr.size("d")) + slopes * (expr.kv - expr.q)
        s = ops.where(expr.kv <= expr.q, s, -expr.inf)
        return ops.dot(ops.softmax(s, over="kv"), v, over="kv")

    declared: Any = Tensor
    windowed.__annotations__ = {name: declared[axes] for name, axes in _AXES.items()}
    return program(windowed)


def calls(device: str, arch: str) -> dict[str, Callable[[], object]]:
    """The calls that are timed, on a device of a row of planning, and torch's own beside them."""
    import torch

    q, k, v = (torch.randn(1, heads, 64, 64, device=device).half() for heads in (4, 2, 2))
    slopes, slope = torch.rand(4, device=device), 0.25
    mask, windowed = masks.causal(), _windowed()
    kernel = compile(mask=mask, head_dim=64, dtype="fp16", arch=arch)
    wanted = q.clone().requires_grad_()
    full = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "program": lambda: windowed(q, k, v, slopes),
        "kernel": lambda: kernel(q, k, v),
        "attention": lambda: attention(q, k, v, mask=mask),
        "attention, fresh lambda": lambda: attention(
            q, k, v, mask=masks.causal(), score=lambda s: s + slope * (expr.kv - expr.q)
        ),
        "program, gradient wanted": lambda: windowed(wanted, k, v, slopes),
        "torch's own (causal)": lambda: sdpa(q, *full, is_causal=True),
    }


_LOAD_SCRIPT = """
import time
import fagen as fg
import fagen.calls.entry
import torch
q, k, v = (torch.zeros(1, 1, 16, 64, device="cuda").half() for _ in range(3))
fg.attention(q, k, v, mask=fg.sliding_window(2))  # what a process does once: digests, driver, compiler
times = []
for width in range(3, 13):
    start = time.perf_counter()
    fg.attention(q, k, v, mask=fg.sliding_window(width))
    times.append((time.perf_counter() - start) * 1e6)
print(sorted(times)[len(times) // 2])
"""


def load_microseconds() -> float:
    """The median time of a first call whose kernel is in the cache, in a new process."""
    command = [sys.executable, "-c", _LOAD_SCRIPT]
    subprocess.run(command, check=True, capture_output=True)  # fills the cache
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(arch: str, tell: Callable[[str, int, int], None]) -> list[Overhead]:
    """All of it, on the current GPU, which is one of the row ``arch``."""
    import torch

    found = []
    timed = calls("cuda", arch)
    for call in timed.values():  # a process that has just compiled is slower for a while
        microseconds(call, torch.cuda.synchronize)
    for done, (name, call) in enumerate(timed.items()):
        tell(name, done, len(timed) + 1)
        found.append(Overhead(name, microseconds(call, torch.cuda.synchronize), BUDGETS_US.get(name)))
    tell(LOAD, len(timed), len(timed) + 1)
    return [*found, Overhead(LOAD, load_microseconds(), LOAD_BUDGET_US)]


def rows(found: list[Overhead]) -> list[dict[str, str]]:
    """The table."""
    return [
        {
            "call": each.call,
            "us of the host": f"{each.microseconds:,.1f}",
            "at most": "" if each.budget is None else f"{each.budget:,.0f}",
            "": "" if each.ok else "LATE",
        }
        for each in found
    ]
