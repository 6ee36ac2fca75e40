"""Emitted kernels on a CPU: the same text, compiled by a C++ compiler against the headers of ``emulator/``."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from fagen.errors import BuildError, EmulatorFinding, LaunchError
from fagen.paths import templates_dir
from fagen.run.toolchain import Cxx, find_cxx

Schedule = Literal["forward", "backward", "random"]
Checker = Literal["none", "address"]

_SCHEDULES: dict[str, int] = {"forward": 0, "backward": 1, "random": 2}
_FLAGS = ("-std=c++17", "-fPIC", "-fno-math-errno", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread")
_KERNEL_FLAGS = ("-O1", "-w", "-shared")
_RUNTIME_FLAGS = ("-O2", "-shared")
_KERNEL_NAME = re.compile(
    r"\b__global__\s+void\s+(?:__launch_bounds__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)\s*)?(\w+)\s*\("
)
_REPORT_BYTES = 1 << 16


class _Launch(ctypes.Structure):
    """The request of one launch; the fields are those of ``FagenLaunch`` in emulator/runtime.cpp."""

    _fields_ = (
        ("enter", ctypes.c_void_p),
        ("params", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("schedule", ctypes.c_int),
        ("seed", ctypes.c_ulonglong),
        ("multiprocessors", ctypes.c_uint),
        ("workers", ctypes.c_uint),
        ("report", ctypes.c_char_p),
        ("report_bytes", ctypes.c_uint),
    )


def _headers_dir() -> Path:
    return templates_dir() / "emulator"


@lru_cache(maxsize=1)
def _headers_digest() -> str:
    """Hash every header a kernel may include: those of the emulator and the portable ones of the device."""
    digest = hashlib.sha256()
    for folder in (_headers_dir(), templates_dir() / "device"):
        for path in sorted(folder.iterdir()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _entry(cache_dir: Path, *parts: str) -> Path:
    return cache_dir / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _compile(compiler: Cxx, arguments: Sequence[str], what: str) -> None:
    try:
        done = subprocess.run(
            [str(compiler.path), *arguments], check=False, capture_output=True, text=True, errors="replace"
        )
    except OSError as error:
        raise BuildError(f"{compiler.path} does not run", values={"reason": error}) from error
    if done.returncode != 0:
        raise BuildError(
            f"{compiler.path.name} could not compile {what}",
            values={"exit code": done.returncode},
            details=done.stderr.strip(),
        )


def _publish(draft: Path, entry: Path) -> None:
    """Rename a finished folder into its place; where another process was faster, its folder stays."""
    try:
        os.replace(draft, entry)
    except OSError:
        if not entry.is_dir():
            raise


def _build_runtime(compiler: Cxx, cache_dir: Path) -> Path:
    """Compile the scheduler, once for all kernels, and return the path of its shared object."""
    source = _headers_dir() / "runtime.cpp"
    entry = _entry(cache_dir, "runtime", _headers_digest(), compiler.version_text, *_FLAGS, *_RUNTIME_FLAGS)
    name = f"libfagen_emulator-{entry.name}.so"
    if not (entry / name).is_file():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix="draft-") as folder:
            draft = Path(folder) / "entry"
            draft.mkdir()
            arguments = [
                *_FLAGS,
                *_RUNTIME_FLAGS,
                str(source),
                "-o",
                str(draft / name),
                f"-Wl,-soname,{name}",
            ]
            _compile(compiler, arguments, "the emulator's scheduler")
            _publish(draft, entry)
    return entry / name


_loaded: dict[Path, ctypes.CDLL] = {}
_loading = threading.Lock()


def _load(path: Path) -> ctypes.CDLL:
    """Load a shared object; it stays loaded as long as the process lives."""
    with _loading:
        if path not in _loaded:
            try:
                _loaded[path] = ctypes.CDLL(str(path))
            except OSError as error:
                raise LaunchError(f"{path} does not load", values={"reason": error}) from error
        return _loaded[path]


@dataclass(frozen=True)
class EmulatedKernels:
    """All kernels of one emitted text, compiled for the CPU of this machine."""

    text: str
    names: tuple[str, ...]
    _runtime: Path
    _library: Path

    def _loaded(self) -> ctypes.CDLL:
        """Load the kernels. They find the scheduler among what is loaded already, by its name."""
        _load(self._runtime)
        return _load(self._library)

    def params_bytes(self, name: str) -> int:
        """Return the size of a kernel's parameter struct in bytes."""
        function = getattr(self._loaded(), f"fagen_params_bytes_of_{name}")
        function.restype = ctypes.c_uint
        return int(function())

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        params: bytes,
        *,
        schedule: Schedule = "forward",
        seed: int = 0,
        multiprocessors: int = 0,
        workers: int = 1,
    ) -> None:
        """Run one kernel to its end, its threads taking turns as the schedule says.

        params           the bytes of the kernel's parameter struct; pointers in it are CPU addresses
        shared_bytes     the block's dynamic shared memory; it is fresh (all bits set, so NaN) for each block
        schedule         who goes on when several can: the lowest warp, the highest, or the dice of the seed
        multiprocessors  how many hold the live blocks; 0 lets the seed choose one to three
        workers          OS threads among which blocks are dealt; above 1 only where blocks do not communicate

        Raises EmulatorFinding with the thread and the line if the kernel breaks a rule of the machine, and
        LaunchError if the request itself is wrong. A block of a grid with a zero side runs nothing.
        """
        if name not in self.names:
            raise LaunchError(f"no kernel {name} in this text", works=f"it has {', '.join(self.names)}")
        expected = self.params_bytes(name)
        threads = block[0] * block[1] * block[2]
        if len(params) != expected:
            raise LaunchError(f"the parameters of {name} are {expected} bytes", values={"given": len(params)})
        if not 1 <= threads <= 1024:
            raise LaunchError(f"{name} launched with {threads} threads a block", works="1 to 1024 are")
        library = self._loaded()
        report = ctypes.create_string_buffer(_REPORT_BYTES)
        aligned = ctypes.create_string_buffer(params, len(params) + 128)
        request = _Launch(
            enter=ctypes.cast(getattr(library, f"fagen_enter_{name}"), ctypes.c_void_p),
            params=ctypes.cast(aligned, ctypes.c_char_p),
            grid=(ctypes.c_uint * 3)(*grid),
            block=(ctypes.c_uint * 3)(*block),
            shared_bytes=shared_bytes,
            schedule=_SCHEDULES[schedule],
            seed=seed,
            multiprocessors=multiprocessors,
            workers=workers,
            report=ctypes.cast(report, ctypes.c_char_p),
            report_bytes=_REPORT_BYTES,
        )
        if library.fagen_launch(ctypes.byref(request)) != 0:
            raise self._finding(name, report.value.decode(errors="replace"), schedule, seed)

    def _finding(self, name: str, report: str, schedule: str, seed: int) -> EmulatorFinding:
        """Make the error of a report, each line number in it followed by the line itself."""
        lines = self.text.splitlines()
        first, _, rest = report.partition("\n")
        numbers = sorted({int(number) for number in re.findall(r"\bline (\d+)", report)})
        quoted = [f"{number:5d} | {lines[number - 1]}" for number in numbers if 1 <= number <= len(lines)]
        return EmulatorFinding(
            first,
            call=name,
            values={"schedule": schedule, "seed": seed},
            details="\n".join([*([rest] if rest else []), *quoted]),
        )


def compile_text(text: str, cache_dir: Path, *, checker: Checker = "none") -> EmulatedKernels:
    """Compile an emitted text for the CPU, or take it from the cache, where its content is the key.

    Raises ToolchainError without a compiler, BuildError with its log if it refuses the text.
    """
    compiler = find_cxx()
    names = tuple(_KERNEL_NAME.findall(text))
    if not names:
        raise BuildError("the text has no __global__ function")
    runtime = _build_runtime(compiler, cache_dir)
    entry = _entry(cache_dir, text, _headers_digest(), compiler.version_text, *_FLAGS, *_KERNEL_FLAGS)
    library = entry / "kernel.so"
    if not library.is_file():
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix="draft-") as folder:
            draft = Path(folder) / "entry"
            draft.mkdir()
            (draft / "kernel.cu").write_text(text)
            (draft / "entry.cpp").write_text(_entry_points(names))
            arguments = [
                *_FLAGS,
                *_KERNEL_FLAGS,
                f"-I{_headers_dir()}",
                str(draft / "entry.cpp"),
                "-o",
                str(draft / "kernel.so"),
                str(runtime),
            ]
            _compile(compiler, arguments, "the kernel for the emulator")
            _publish(draft, entry)
    return EmulatedKernels(text, names, runtime, library)


def _entry_points(names: Sequence[str]) -> str:
    """Write the file around an emitted text: for each kernel a call by the address of its parameters."""
    lines = ['#include "core.h"', '#include "kernel.cu"', 'extern "C" {']
    for name in names:
        lines.append(f"void fagen_enter_{name}(const void* params) {{ fagen_enter({name}, params); }}")
        lines.append(f"unsigned fagen_params_bytes_of_{name}() {{ return fagen_params_bytes({name}); }}")
    return "\n".join([*lines, "}", ""])
