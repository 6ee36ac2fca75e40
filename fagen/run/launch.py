"""Kernels on a GPU: pycuda loads and launches them in torch's own context, on torch's current stream.

The only module that imports pycuda. Where torch's context is not the calling thread's current one, it is
made so for the time of one load or launch and taken back, also after an error, so that any thread may call:
one of autograd's, one of a pool. What is loaded stays loaded: a function may stand in a CUDA graph, or in a
launch that still runs.

pycuda cannot launch on a stream it has not made. Torch's default stream is its own default; any other of
torch's gets a stream of pycuda's beside it, which waits for it before a launch and for which it waits after,
so the launch has its place in torch's order, also in a CUDA graph that is being captured.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, TypeAlias

from fagen.errors import LaunchError, ToolchainError, pip_install
from fagen.run.tensor_map import TensorMap, driver

Launch: TypeAlias = "tuple[Any, tuple[int, ...], tuple[int, ...], int]"
"""A loaded function, its grid, its block, bytes of dynamic shared memory."""

GRID_LIMIT = 2**31 - 1
"""Blocks a launch may have along x, where all of them lie."""

_SHARED_BYTES = 48 * 1024  # a kernel that takes more has to say so before its first launch
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no order with the default stream but the one asked for


class Gpu:
    """One GPU, under torch's number for it: what is loaded on it, and how to launch that."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._cuda = _driver()
        try:
            self._context = _immortal(self._cuda.Device(index).retain_primary_context())
        except self._cuda.Error as error:
            raise LaunchError(f"cuda:{index} cannot be used", values={"reason": error}) from error
        self._handle: int = self._context.handle
        self._stream = _stream_of_torch()
        self._elsewhere = partial(_empty, f"cuda:{index}")
        self._lock = threading.RLock()
        self._loaded: dict[str, Mapping[str, Any]] = {}
        self._sides: dict[int, _Side] = {}
        self._counters: dict[int, Any] = {}
        self._offsets: dict[str, int] = {}

    def functions(self, key: str, image: bytes, shared_bytes: Mapping[str, int]) -> Mapping[str, Any]:
        """The functions of a compiled image by name, loaded once for each ``key``.

        image         a cubin, or PTX text
        shared_bytes  the dynamic shared memory each of them is launched with

        Raises LaunchError with the driver's reason.
        """
        found = self._loaded.get(key)
        if found is None:
            with self._lock:
                found = self._loaded.get(key)
                if found is None:
                    found = self._loaded[key] = self._load(image, shared_bytes)
        return found

    def current_stream(self) -> int:
        """The handle of torch's current stream on this GPU; 0 is its default."""
        return self._stream(self.index)

    def allocator(self) -> Callable[..., Any]:
        """What makes a tensor of a shape, strides and a dtype on this GPU, all of its elements undefined."""
        here, empty = _allocator_of_torch()
        return empty if here() == self.index else self._elsewhere

    def counter(self, stream: int) -> Any:
        """A number on the device, 0 between launches, that those of one stream count with.

        A launch that is captured, never on the default stream, has a number of its own: it may be replayed
        beside others.
        """
        if stream and _is_capturing():
            return self._new_counter()
        found = self._counters.get(stream)
        if found is None:
            with self._lock:
                found = self._counters.get(stream)
                if found is None:
                    found = self._counters[stream] = self._new_counter()
        return found

    def _new_counter(self) -> Any:
        import torch

        return torch.zeros(1, dtype=torch.int32, device=f"cuda:{self.index}")

    def parameter_offset(self, key: str, image: bytes, names: Sequence[str]) -> int:
        """Bytes before the parameter of functions of an image, where they are given it.

        A parameter aligned to more than 16 bytes does not begin at 0, and pycuda does not say where.
        """
        found = self._offsets.get(key)
        if found is None:
            with self._lock, self._current(), _capture_relaxed():
                found = self._offsets[key] = _parameter_offset(image, names)
        return found

    def encoded(self, map_: TensorMap) -> bytes:
        """A tensor map as this GPU reads it; the driver encodes none on a thread without a context."""
        with self._current():
            return map_.for_gpu()

    def launch(self, launches: Sequence[Launch], params: bytes, stream: int) -> None:
        """Put launches on torch's stream of the handle ``stream`` (0: its default), in order.

        ``params`` are the bytes of the parameter that all of them take. Current device and stream of the
        caller stay as they are. Raises LaunchError where the driver refuses.
        """
        side = self._side(stream) if stream else None
        if side:
            side.fork()
        foreign = _current_context() != self._handle
        if foreign:
            self._context.push()
        try:
            handle = side.stream if side else None
            for function, grid, block, shared_bytes in launches:
                function._launch_kernel(grid, block, params, shared_bytes, handle)
        except self._cuda.Error as error:
            raise LaunchError(
                f"cuda:{self.index} refused a launch",
                values={"grid": grid, "block": block, "shared bytes": shared_bytes, "reason": error},
            ) from error
        finally:
            if foreign:
                self._cuda.Context.pop()
            if side:
                side.join()

    def _load(self, image: bytes, shared_bytes: Mapping[str, int]) -> Mapping[str, Any]:
        attribute = self._cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self._current(), _capture_relaxed():
            try:
                module = _immortal(self._cuda.module_from_buffer(image + b"\0"))  # PTX ends with a NUL
                found = {name: module.get_function(name) for name in shared_bytes}
                for name, needed in shared_bytes.items():
                    if needed > _SHARED_BYTES:
                        found[name].set_attribute(attribute, needed)
            except self._cuda.Error as error:
                names = ", ".join(shared_bytes)
                raise LaunchError(
                    f"cuda:{self.index} does not load {names}", values={"reason": error}
                ) from error
        return found

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._context.push()
        try:
            yield
        finally:
            self._cuda.Context.pop()

    def _side(self, stream: int) -> _Side:
        found = self._sides.get(stream)
        if found is None:
            with self._lock:
                found = self._sides.get(stream)
                if found is None:
                    with self._current(), _capture_relaxed():
                        own = _immortal(self._cuda.Stream(_NON_BLOCKING))
                    found = self._sides[stream] = _Side(own, stream, self.index)
        return found


class _Side:
    """A stream of pycuda's beside one of torch's.

    Its two events are recorded again at each call. Two threads on one torch stream may share them: the later
    record stands behind all the earlier one waited for.
    """

    def __init__(self, own: Any, handle: int, device: int) -> None:
        import torch

        self.stream = own
        stream: Any = torch.cuda.ExternalStream
        event: Any = torch.cuda.Event
        self._torch, self._own = stream(handle, device=device), stream(own.handle, device=device)
        self._forked, self._joined = event(), event()
        self.fork()  # an event is made when it is first recorded, which threads must not do together
        self.join()

    def fork(self) -> None:
        """Let what follows on the own stream wait for what torch has queued so far."""
        self._forked.record(self._torch)
        self._own.wait_event(self._forked)

    def join(self) -> None:
        """Let what torch queues from now on wait for the own stream."""
        self._joined.record(self._own)
        self._torch.wait_event(self._joined)


_gpus: dict[int, Gpu] = {}
_gpus_lock = threading.Lock()


def gpu(index: int) -> Gpu:
    """The GPU torch calls ``cuda:index``.

    Raises ToolchainError without pycuda, LaunchError where the device cannot be used.
    """
    found = _gpus.get(index)
    if found is None:
        with _gpus_lock:
            found = _gpus.get(index)
            if found is None:
                found = _gpus[index] = Gpu(index)
    return found


@lru_cache(maxsize=1)
def _driver() -> Any:
    try:
        import pycuda.driver as cuda
    except ImportError as error:
        raise ToolchainError(
            "pycuda is needed to run a kernel on a GPU and does not load",
            values={"reason": error},
            works=f"{pip_install('cuda')}, or give CPU tensors, which run on the emulator",
        ) from error
    cuda.init()
    return cuda


def _stream_of_torch() -> Callable[[int], int]:
    """What gives the handle of torch's current stream on a device."""
    import torch

    direct = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # what torch's own compiler calls
    return direct or (lambda index: int(torch.cuda.current_stream(index).cuda_stream))


def _is_capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=1)
def _allocator_of_torch() -> tuple[Callable[[], int], Callable[..., Any]]:
    """What gives torch's current device, and what makes a tensor on it without torch's dispatch of operators:
    what code that torch's own compiler wrote calls."""
    import torch

    own: Any = torch._C
    return own._cuda_getDevice, own._dynamo.guards._empty_strided_cuda


def _empty(device: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
    import torch

    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _parameter_offset(image: bytes, names: Sequence[str]) -> int:
    """Where the one parameter of all functions ``names`` begins."""
    cuda = driver()

    def given(result: Any) -> Any:
        status, *values = result
        if status != cuda.CUresult.CUDA_SUCCESS:
            raise LaunchError("the driver does not say where a parameter begins", values={"reason": status})
        return values

    (module,) = given(cuda.cuModuleLoadData(image))
    try:
        functions = [given(cuda.cuModuleGetFunction(module, name.encode()))[0] for name in names]
        offsets = {int(given(cuda.cuFuncGetParamInfo(function, 0))[0]) for function in functions}
    finally:
        cuda.cuModuleUnload(module)
    (offset,) = offsets
    return offset


def _immortal(thing: Any) -> Any:
    """Keep an object of the driver from ever being destroyed: at exit its context may be gone before it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


@contextmanager
def _capture_relaxed() -> Iterator[None]:
    """Allow this thread to load and to create while a stream is captured, here or in another thread."""
    exchange = _exchange_capture_mode()
    mode = ctypes.c_int(_RELAXED)
    if exchange:
        exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if exchange:
            exchange(ctypes.byref(mode))


@lru_cache(maxsize=1)
def _exchange_capture_mode() -> Any:
    return _symbol("cuThreadExchangeStreamCaptureMode")


def _current_context() -> int | None:
    """The handle of the calling thread's context; None where it has none, or the driver does not say."""
    found = ctypes.c_void_p()
    ask = _ask_context()
    if ask:
        ask(ctypes.byref(found))
    return found.value


@lru_cache(maxsize=1)
def _ask_context() -> Any:
    return _symbol("cuCtxGetCurrent")


def _symbol(name: str) -> Any:
    """A function of the driver that pycuda does not have; None where there is none."""
    try:
        return getattr(ctypes.PyDLL("libcuda.so.1"), name)  # all of them return at once: no lock is given up
    except (OSError, AttributeError):
        return None
