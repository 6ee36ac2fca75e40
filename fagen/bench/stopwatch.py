"""How long a call takes on the device: the interface that measurements use, and the one on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

Call: TypeAlias = Callable[[], Any]

_FLUSHED = 4
"""Bytes that are written between two timings, in sizes of the L2 cache."""
_LEAD = 3
"""Times it is written before the first timing, too, so that the host is ahead of the device by then."""
_LEAST_FLUSHED_BYTES = 64 << 20


class Stopwatch(Protocol):
    """Takes times; a test has one that only pretends."""

    def pause(self, seconds: float) -> None:
        """Leave the device idle."""

    def times(self, call: Call, count: int) -> list[float]:
        """Seconds of each of so many calls, one after another."""

    def replayed(self, call: Call) -> Call:
        """A call that launches again what ``call`` launches, without its time on the host."""

    def added_bytes(self, call: Call) -> int:
        """The most device memory that one call holds beyond what is held already."""


class GpuStopwatch:
    """Times by CUDA events on the current stream, a buffer larger than the L2 cache written before each.

    Calls are queued without waiting for one another, the first behind some such writes: the host's own time
    shows only where a call keeps it longer than the device takes for a write and the call before.
    """

    def __init__(self) -> None:
        import torch

        self._torch = torch
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        size = max(_FLUSHED * properties.L2_cache_size, _LEAST_FLUSHED_BYTES)
        self._buffer = torch.empty(size, dtype=torch.uint8, device="cuda")

    def pause(self, seconds: float) -> None:
        """Wait until the device is idle, and some time more."""
        self._torch.cuda.synchronize()
        time.sleep(seconds)

    def times(self, call: Call, count: int) -> list[float]:
        """Seconds of each of so many calls."""
        event: Any = self._torch.cuda.Event
        marks = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(count)]
        for _ in range(_LEAD):
            self._buffer.zero_()
        for begin, end in marks:
            self._buffer.zero_()
            begin.record()
            call()
            end.record()
        self._torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in marks]

    def replayed(self, call: Call) -> Call:
        """The call's launches captured in a CUDA graph; raises what a call that cannot be captured raises."""
        cuda = self._torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            call()
        cuda.current_stream().wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            call()
        replay: Call = graph.replay
        return replay

    def added_bytes(self, call: Call) -> int:
        """The peak of torch's allocator during a call."""
        cuda = self._torch.cuda
        cuda.synchronize()
        held = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        call()
        cuda.synchronize()
        return int(cuda.max_memory_allocated() - held)
