"""The launcher against a driver that only takes notes: contexts, streams, loads and errors, in any thread.

The driver's stand-in keeps the rules of pycuda that matter here: a stack of contexts for each thread, which
must be empty when the thread ends, and calls that fail without a current context.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fagen.errors import LaunchError, ToolchainError
from fagen.run import launch


class Refused(Exception):
    """What the stand-in raises as ``pycuda.driver.Error``."""


class Driver(types.ModuleType):
    """Stands in the place of ``pycuda.driver``; ``log`` is what it was asked for."""

    Error = Refused

    def __init__(self) -> None:
        super().__init__("pycuda.driver")
        self.log: list[Any] = []
        self.refuses = ""
        self._threads = threading.local()
        driver = self

        class Context:
            def __init__(self, device: int) -> None:
                self.device = device
                self.handle = 900 + device

            def push(self) -> None:
                driver.stack.append(self)

            @staticmethod
            def pop() -> None:
                driver.stack.pop()

        class Device:
            def __init__(self, index: int) -> None:
                self.index = index

            def retain_primary_context(self) -> Context:
                driver.log.append(("retain", self.index))
                return Context(self.index)

        class Stream:
            def __init__(self, flags: int = 0) -> None:
                driver.require_context()
                driver.log.append(("stream", flags))
                self.handle = 7000 + len(driver.log)

        class Function:
            def __init__(self, name: str) -> None:
                self.name = name

            def set_attribute(self, attribute: str, value: int) -> None:
                driver.require_context()
                driver.log.append(("attribute", self.name, attribute, value))

            def _launch_kernel(
                self, grid: Any, block: Any, params: bytes, shared_bytes: int, stream: Stream | None
            ) -> None:
                driver.require_context()
                if driver.refuses == "launch":
                    raise Refused("invalid argument")
                driver.log.append(("launch", self.name, grid, params, stream and stream.handle))

        class Module:
            def get_function(self, name: str) -> Function:
                driver.require_context()
                return Function(name)

        def module_from_buffer(image: bytes) -> Module:
            driver.require_context()
            if driver.refuses == "load":
                raise Refused("no binary for GPU")
            driver.log.append(("load", image))
            return Module()

        self.Context, self.Device, self.Stream = Context, Device, Stream
        self.module_from_buffer = module_from_buffer
        self.function_attribute = types.SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")

    def init(self) -> None:
        self.log.append("init")

    @property
    def stack(self) -> list[Any]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        return self._threads.stack

    def require_context(self) -> None:
        if not self.stack:
            raise Refused("invalid device context")

    def launches(self) -> list[Any]:
        return [entry for entry in self.log if entry[0] == "launch"]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    package = types.ModuleType("pycuda")
    package.driver = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", found)
    monkeypatch.setattr(launch, "_gpus", {})
    monkeypatch.setattr(launch, "_current_context", lambda: found.stack[-1].handle if found.stack else None)
    launch._driver.cache_clear()

    class Event:
        def record(self, stream: Any) -> None:
            self.recorded_on = stream.handle
            found.log.append(("record", stream.handle))

    class ExternalStream:
        def __init__(self, handle: int, device: int) -> None:
            self.handle = handle

        def wait_event(self, event: Event) -> None:
            found.log.append(("wait", self.handle, event.recorded_on))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "ExternalStream", ExternalStream)
    yield found
    launch._driver.cache_clear()
    assert not found.stack


def functions(gpu: launch.Gpu, key: str = "k") -> Any:
    return gpu.functions(key, b"image", {"small": 1000, "large": 60_000})


def entry(function: Any) -> launch.Launch:
    return function, (70_000,), (128,), 1000


def test_a_module_is_loaded_once_and_told_of_large_shared_memory(driver: Driver) -> None:
    gpu = launch.gpu(1)
    assert launch.gpu(1) is gpu
    assert functions(gpu) is functions(gpu)
    functions(gpu, "other")
    assert driver.log == [
        "init",
        ("retain", 1),
        ("load", b"image\0"),
        ("attribute", "large", "shared", 60_000),
        ("load", b"image\0"),
        ("attribute", "large", "shared", 60_000),
    ]


def test_launches_keep_their_order_on_the_default_stream(driver: Driver) -> None:
    gpu = launch.gpu(0)
    loaded = functions(gpu)
    gpu.launch([entry(loaded["small"]), entry(loaded["large"])], b"a", 0)
    grid = (70_000,)
    assert driver.launches() == [("launch", "small", grid, b"a", None), ("launch", "large", grid, b"a", None)]


def test_a_context_is_made_current_only_where_another_is(driver: Driver) -> None:
    gpu, other = launch.gpu(0), launch.gpu(1)
    loaded = functions(gpu)
    pushed: list[int] = []
    push = type(gpu._context).push
    type(gpu._context).push = lambda self: (pushed.append(self.device), push(self))  # type: ignore[method-assign]
    gpu.launch([entry(loaded["small"])], b"", 0)
    assert pushed == [0]
    driver.stack.append(gpu._context)
    gpu.launch([entry(loaded["small"])], b"", 0)
    assert pushed == [0]
    driver.stack.append(other._context)
    gpu.launch([entry(loaded["small"])], b"", 0)
    assert pushed == [0, 0]
    assert [each.device for each in driver.stack] == [0, 1]
    driver.stack.clear()


def test_another_stream_waits_before_and_is_waited_for_after(driver: Driver) -> None:
    gpu = launch.gpu(0)
    loaded = functions(gpu)
    gpu.launch([entry(loaded["small"])], b"", 55)
    driver.log.clear()
    for stream in (55, 66, 55):
        gpu.launch([entry(loaded["small"]), entry(loaded["small"])], b"", stream)
    created = [each for each in driver.log if each[0] == "stream"]
    assert created == [("stream", 1)]  # non-blocking, and one for each stream of torch
    events = [each for each in driver.log if each[0] in ("record", "wait", "launch")]
    first = events[:6]
    own = first[2][-1]
    assert [each[0] for each in first] == ["record", "wait", "launch", "launch", "record", "wait"]
    assert first[0] == ("record", 55)
    assert first[1] == ("wait", own, 55)
    assert first[4] == ("record", own)
    assert first[5] == ("wait", 55, own)
    assert own not in (55, 66, None)
    assert events[-6:] == first
    assert events[6:-6][-4][-1] != own


@pytest.mark.parametrize("stream", [0, 55])
def test_a_refused_launch_is_an_error_and_leaves_no_context(driver: Driver, stream: int) -> None:
    gpu = launch.gpu(0)
    loaded = functions(gpu)
    driver.refuses = "launch"
    with pytest.raises(LaunchError, match=r"cuda:0 refused a launch \(grid = \(70000,\).*invalid argument"):
        gpu.launch([entry(loaded["small"])], b"", stream)
    assert not driver.stack
    if stream:  # torch's stream is not left waiting for nothing, nor a capture forked
        assert driver.log[-1][:2] == ("wait", 55)
    driver.refuses = ""
    gpu.launch([entry(loaded["small"])], b"", stream)
    assert len(driver.launches()) == 1


def test_a_refused_load_is_an_error_and_is_tried_again(driver: Driver) -> None:
    gpu = launch.gpu(2)
    driver.refuses = "load"
    with pytest.raises(
        LaunchError, match=r"cuda:2 does not load small, large \(reason = no binary for GPU\)"
    ):
        functions(gpu)
    assert not driver.stack
    driver.refuses = ""
    assert set(functions(gpu)) == {"small", "large"}


def test_b57_threads_without_a_context_load_and_launch(driver: Driver) -> None:
    start = threading.Barrier(8)

    def work(number: int) -> int:
        start.wait()
        gpu = launch.gpu(0)
        for turn in range(20):
            gpu.launch(
                [entry(functions(gpu, f"k{number % 2}")["small"])], bytes([turn]), number % 3 and 50 + number
            )
        return len(driver.stack)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [0] * 8
    assert sum(1 for each in driver.log if each[0] == "load") == 2
    assert sum(1 for each in driver.log if each[0] == "retain") == 1
    assert len(driver.launches()) == 160


def test_b57_a_tensor_map_is_encoded_in_the_context_of_its_gpu(driver: Driver) -> None:
    """On autograd's thread, say, whose first work it is."""

    class Map:
        def for_gpu(self) -> bytes:
            return bytes([driver.stack[-1].device])

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (launch.gpu(1).encoded(Map()), len(driver.stack))).result() == (b"\1", 0)


def test_what_is_kept_by_the_driver_is_never_destroyed() -> None:
    class Thing:
        pass

    thing = Thing()
    before = sys.getrefcount(thing)
    launch._immortal(thing)
    assert sys.getrefcount(thing) == before + 1


def test_a_missing_pycuda_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    monkeypatch.setattr(launch, "_gpus", {})
    launch._driver.cache_clear()
    with pytest.raises(
        ToolchainError, match=r"pycuda is needed to run a kernel on a GPU.*pip install '.\[cuda\]'"
    ):
        launch.gpu(0)
    launch._driver.cache_clear()
