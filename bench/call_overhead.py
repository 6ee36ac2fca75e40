"""How long a warm call keeps Python, and how long a process waits for a kernel that is in the cache.

    python3 bench/call_overhead.py

Prints microseconds of the calling thread for each call, the median of several rounds: what the GPU does
meanwhile is not counted, and tensors are so small that it does not hold the calls up. Without a GPU the same
code runs on CPU tensors with a driver that does nothing, which shows the share of this package and torch.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import fagen as fg
from fagen.calls import dispatch
from fagen.calls.prepared import OnGpu, Prepared

CALLS, ROUNDS = 500, 15
BUDGETS = {"program": 30.0, "kernel": 30.0, "attention, fresh lambda": 45.0}


Q, K, V, H = (fg.Tensor[axes] for axes in ("b h q d", "b hk kv d", "b hk kv dv", "h"))


@fg.program
def windowed(q: Q, k: K, v: V, slopes: H):
    """Causal attention with a slope for each head."""
    s = fg.dot(q, k, over="d") * fg.rsqrt(fg.size("d")) + slopes * (fg.kv - fg.q)
    s = fg.where(fg.kv <= fg.q, s, -fg.inf)
    return fg.dot(fg.softmax(s, over="kv"), v, over="kv")


class _NoGpu:
    """Stands where a GPU would: knows every function, launches none."""

    def current_stream(self) -> int:
        return 0

    def launch(self, launches: list[Any], stream: int) -> None:
        pass


class _Undriven(OnGpu):
    """Calls on CPU tensors by the code of a GPU's, up to the driver."""

    def __init__(self, values: Any, kernel: Any, sizes: Mapping[str, int]) -> None:
        Prepared.__init__(self, values, kernel.chosen.recipe, sizes)
        self._gpu = _NoGpu()
        self._words = torch.zeros(2, dtype=torch.int64)


def microseconds(call: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """The median time of a call, over rounds of many."""
    for _ in range(50):
        call()
    rounds = []
    for _ in range(ROUNDS):
        synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(rounds)


def cases(device: str) -> dict[str, Callable[[], object]]:
    """The calls that are timed, and torch's own beside them."""
    make = torch.Generator(device=device).manual_seed(0)
    q, k, v = (torch.randn(1, heads, 64, 64, generator=make, device=device).half() for heads in (4, 2, 2))
    slopes = torch.rand(4, device=device)
    mask = fg.causal()
    arch = "".join(map(str, torch.cuda.get_device_capability())) if device == "cuda" else "75"
    kernel = fg.compile(mask=mask, head_dim=64, dtype="fp16", arch=f"sm_{arch}")
    wanted = q.clone().requires_grad_()
    full = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    return {
        "program": lambda: windowed(q, k, v, slopes),
        "kernel": lambda: kernel(q, k, v),
        "attention, mask": lambda: fg.attention(q, k, v, mask=mask),
        "attention, fresh lambda": lambda: fg.attention(
            q, k, v, mask=fg.causal(), score=lambda s: s + slope * (fg.kv - fg.q)
        ),
        "program, gradient wanted": lambda: windowed(wanted, k, v, slopes),
        "torch's own (causal)": lambda: torch.nn.functional.scaled_dot_product_attention(
            q, *full, is_causal=True
        ),
    }


slope = 0.25

_LOAD = """
import time
import fagen as fg
import fagen.calls.entry
import torch
q, k, v = (torch.zeros(1, 1, 16, 64, device={device!r}).half() for _ in range(3))
fg.attention(q, k, v, mask=fg.sliding_window(2))  # what a process does once: digests, driver, compiler
times = []
for width in range(3, 13):
    start = time.perf_counter()
    fg.attention(q, k, v, mask=fg.sliding_window(width))
    times.append((time.perf_counter() - start) * 1e3)
print(sorted(times)[len(times) // 2])
"""


def load_milliseconds(device: str) -> float:
    """The median time of a first call whose kernel is in the cache, in a new process."""
    command = [sys.executable, "-c", _LOAD.format(device=device)]
    subprocess.run(command, check=True, capture_output=True)  # fills the cache
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> int:
    """Print a table; 1 where a budget is exceeded on a GPU."""
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    if not on_gpu:
        dispatch.OnEmulator = _Undriven  # type: ignore[misc, assignment]
    name = torch.cuda.get_device_name() if on_gpu else "no GPU: a driver that does nothing"
    print(f"microseconds of Python a warm call ({name}, torch {torch.__version__})")
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    late = []
    for case, call in cases(device).items():
        taken = microseconds(call, synchronize)
        budget = BUDGETS.get(case)
        print(f"  {case:26s} {taken:7.1f}" + (f"   budget {budget:.0f}" if budget else ""))
        if budget and taken > budget:
            late.append(case)
    taken = load_milliseconds(device)
    print(f"milliseconds from a first call to its launch, kernel in the cache\n  {taken:.1f}   budget 20")
    if taken > 20:
        late.append("load")
    if on_gpu and late:
        print(f"over budget: {', '.join(late)}")
    return int(on_gpu and bool(late))


if __name__ == "__main__":
    raise SystemExit(main())
