"""How long a warm call keeps Python, and how long a new process waits for a kernel that is in the cache.

Tensors are so small that the GPU does not hold calls up.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
import sys
import time
from concurrent.futures import ThreadPoolExecutor
import fagen as fg
import fagen.calls.entry
import torch
q, k, v = (torch.zeros(1, 1, 16, 64, device="cuda").half() for _ in range(3))
def seconds(width):
    start = time.perf_counter()
    fg.attention(q, k, v, mask=fg.sliding_window(width))
    return time.perf_counter() - start
widths = range(2, 8)
if sys.argv[1:] == ["fill"]:
    with ThreadPoolExecutor() as pool:
        list(pool.map(seconds, widths))
else:  # the first is slower: what a process does once, digests, driver, compiler
    _, *taken = map(seconds, widths)
    print(sorted(taken)[len(taken) // 2] * 1e6)
"""


@contextmanager
def _loading(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A new process that calls kernels for the first time: ``fill`` puts them into the cache."""
    command = [sys.executable, "-c", _LOAD_SCRIPT, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _ended(process: subprocess.Popen[str]) -> str:
    """What it has printed, when it has ended."""
    out, err = process.communicate()
    if process.returncode:
        raise RuntimeError(err)
    return out


def measure(arch: str, tell: Callable[[str, int, int], None]) -> Iterator[Overhead]:
    """All of it, one after another, on the current GPU, which is one of the row ``arch``.

    What is timed is compiled before, all at once: one after another these kernels take a minute.
    """
    import torch

    timed = calls("cuda", arch)
    parts = len(timed) + 1
    tell("compile", 0, 0)
    with _loading("fill") as filling:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda call: call(), timed.values()))
        _ended(filling)
    for call in timed.values():  # a process that has just compiled is slower for a while
        microseconds(call, torch.cuda.synchronize)
    for done, (name, call) in enumerate(timed.items()):
        tell(name, done, parts)
        yield Overhead(name, microseconds(call, torch.cuda.synchronize), BUDGETS_US.get(name))
    tell(LOAD, parts - 1, parts)
    with _loading() as loading:
        taken = float(_ended(loading))
    yield Overhead(LOAD, taken, LOAD_BUDGET_US)


def line(found: Overhead) -> str:
    """A row of the table."""
    budget = "" if found.budget is None else f"  at most {found.budget:,.0f}"
    return f"{found.call:<32}{found.microseconds:>10,.1f}{budget}{'' if found.ok else '  LATE'}"
