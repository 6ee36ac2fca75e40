"""Emitted kernels on a CPU: the same text, compiled as C++ against the headers of ``emulator/``."""

import ctypes
import errno
import os
import re
import struct
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from fagen.errors import BuildError, EmulatorFinding, LaunchError
from fagen.paths import templates_dir
from fagen.run.cache import cache_dir, cache_key, cached, unwritable
from fagen.run.debug import SOURCE, debug, dump, overridden
from fagen.run.source import included, without_comments
from fagen.run.toolchain import Cxx, find_cxx

Schedule = Literal["forward", "backward", "random"]
Checker = Literal["none", "address", "race"]

SCHEDULES: tuple[Schedule, ...] = ("forward", "backward", "random")

_FLAGS = ("-std=c++17", "-fPIC", "-pthread")
_RUNTIME_FLAGS = ("-O1", "-g1")
# A kernel is compiled for a few launches: -O1 takes a third longer than -Og, for a fifth more speed. Sums of
# products are rounded twice, on every machine; memory is shared between types, as on a GPU.
_KERNEL_FLAGS = ("-Og", "-w", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing")
# Nothing unwinds a kernel but a sanitizer. None needs the C++ library, nor what starts and ends a library: a
# linker would read them for longer than it links.
_UNWATCHED_FLAGS = ("-fno-exceptions", "-fno-asynchronous-unwind-tables", "-nostdlib")
_LIBRARIES = ("-lm", "-lgcc")
# Where a compiler knows them: what was never set is no zero; no time goes into following variables, nor into
# a plugin for programs that are optimized as a whole.
_OPTIONAL_FLAGS = ("-ftrivial-auto-var-init=pattern", "-fno-var-tracking", "-fno-use-linker-plugin")
_RUNTIME = "runtime"
_LINES = "-g1"  # what a sanitizer finds lines by; the scheduler's own findings have them from the text
_SANITIZERS = {"none": "", "address": "address", "race": "thread"}
_KERNEL_NAME = re.compile(
    r"\b__global__\s+void\s+(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\s*\("
)
# Kind, size, address, by whom, and the stack up to an empty line.
_ACCESS = re.compile(
    r"^ *(?:Previous )?(?:atomic )?(read|write) of size (\d+) at 0x(\w+)"
    r"(?: by ([^\n]*):$| thread)?(.*?)(?=\n *\n|\Z)",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)
_REPORT_BYTES = 1 << 16
_FOUND = 66  # what a sanitizer exits with
_LINE = 256  # memory keeps its place within so many bytes when it is copied


@dataclass(frozen=True)
class Memory:
    """One piece of memory a kernel is given: for a checker, which copies each to an allocation of its size.

    name          as messages should call it
    param_offset  where in the parameters its address stands, in bytes
    address       its first byte, as the CPU sees it
    size_bytes    up to and including the last byte the kernel may touch
    written       whether the kernel writes it, so that it is copied back
    """

    name: str
    param_offset: int
    address: int
    size_bytes: int
    written: bool = False


class _Launch(ctypes.Structure):
    """The request of one launch; the fields are those of ``FagenLaunch`` in emulator/launch.h."""

    _fields_ = (
        ("enter", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("schedule", ctypes.c_int),
        ("seed", ctypes.c_ulonglong),
        ("multiprocessors", ctypes.c_uint),
        ("workers", ctypes.c_uint),
        ("report", ctypes.c_void_p),
        ("report_bytes", ctypes.c_uint),
    )


@dataclass(frozen=True)
class EmulatedKernels:
    """All kernels of one emitted text, compiled for the CPU of this machine.

    name     what the text is called in messages
    text     what was compiled
    names    its ``__global__`` functions, in order
    checker  what watches their memory accesses
    """

    name: str
    text: str
    names: tuple[str, ...]
    checker: Checker
    _runtime: Path
    _library: Path

    @property
    def path(self) -> Path:
        """The file of the text that was compiled."""
        return self._library.with_name("kernel.cu")

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        params: bytes,
        *,
        memories: Sequence[Memory] = (),
        schedule: Schedule = "forward",
        seed: int = 0,
        multiprocessors: int = 0,
        workers: int = 1,
        timeout_s: float = 600.0,
    ) -> None:
        """Run one kernel to its end, its threads taking turns as the schedule says.

        params           the bytes of the kernel's parameter struct; pointers in it are CPU addresses
        shared_bytes     the block's dynamic shared memory; fresh (all bits set, so NaN) for each block
        memories         all the memory behind those pointers; only a checker needs them
        schedule         who goes on where several can: the lowest warp, the highest, or the dice of the seed
        multiprocessors  how many hold the live blocks; 0 lets the seed choose one to three
        workers          OS threads among which blocks are dealt
        timeout_s        when a launch with a checker, which is a process of its own, is given up

        Raises EmulatorFinding with the thread and the line if the kernel breaks a rule of the machine, and
        LaunchError if the request itself is wrong. A grid with a zero side runs nothing.
        """
        if name not in self.names:
            raise LaunchError(f"{self.name} has no kernel {name}", works=f"it has {', '.join(self.names)}")
        if not 1 <= block[0] * block[1] * block[2] <= 1024:
            raise LaunchError(f"{name} launched with blocks of {block} threads", works="1 to 1,024 are")
        if workers < 1 or multiprocessors < 0:
            raise LaunchError(
                f"{name} launched on too little",
                values={"workers": workers, "multiprocessors": multiprocessors},
            )
        request = _Launch(
            grid=grid,
            block=block,
            shared_bytes=shared_bytes,
            schedule=SCHEDULES.index(schedule),
            seed=seed,
            multiprocessors=multiprocessors,
            workers=min(workers, max(prod(grid), 1)),  # each has a block
        )
        if self.checker == "none":
            report = self._run(name, request, params)
        else:
            report = self._run_checked(name, request, params, memories, timeout_s)
        if report:
            raise self._finding(name, report, schedule, seed)

    def _run(self, name: str, request: _Launch, params: bytes) -> str:
        """Run a launch in this process and return what the scheduler found."""
        _load(self._runtime)
        library = _load(self._library)  # it finds the scheduler among what is loaded, by its name
        expected = getattr(library, f"fagen_params_bytes_of_{name}")()
        if len(params) != expected:
            raise LaunchError(f"the parameters of {name} are {expected} bytes", values={"given": len(params)})
        report = ctypes.create_string_buffer(_REPORT_BYTES)
        room = ctypes.create_string_buffer(len(params) + 128)
        aligned = -ctypes.addressof(room) % 128 + ctypes.addressof(room)
        ctypes.memmove(aligned, params, len(params))
        request.enter = ctypes.cast(getattr(library, f"fagen_enter_{name}"), ctypes.c_void_p)
        request.params = aligned
        request.report = ctypes.addressof(report)
        request.report_bytes = _REPORT_BYTES
        failed = library.fagen_launch(ctypes.byref(request))
        return report.value.decode(errors="replace") if failed else ""

    def _run_checked(
        self, name: str, request: _Launch, params: bytes, memories: Sequence[Memory], timeout_s: float
    ) -> str:
        """Run a launch in a process of its own and return what the scheduler or the sanitizer found."""
        own = [each for each, same in zip(memories, _same(memories), strict=True) if not same]
        with tempfile.TemporaryDirectory(prefix="fagen-") as scratch:
            asked, result, told = (Path(scratch) / part for part in ("in", "out", "report"))
            asked.write_bytes(_request(request, params, memories))
            command: list[str | Path] = [self._runtime, self._library, name, asked, result, told]
            try:
                done = subprocess.run(
                    command,
                    check=False,
                    env=_sanitizer_environment(),
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=timeout_s,
                )
            except subprocess.TimeoutExpired as error:
                raise LaunchError(f"{name} has not ended after {timeout_s:g} s") from error
            report = told.read_text(errors="replace") if told.exists() else ""
            places, found = _split_report(report, memories)
            if done.returncode == _FOUND or done.returncode < 0:
                return _sanitizer_report(done.stderr, places)
            if done.returncode not in (0, 1):
                raise LaunchError(
                    f"{name} could not be run",
                    values={"exit code": done.returncode},
                    details=done.stderr.strip(),
                )
            if not found:
                _copy_back(result.read_bytes(), own)
            return found

    def _finding(self, name: str, report: str, schedule: str, seed: int) -> EmulatorFinding:
        """Make the error of a report, with the lines of the text it speaks of."""
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


def _sanitizer_environment() -> dict[str, str]:
    common = f"exitcode={_FOUND}:symbolize=1"
    return {
        **os.environ,
        "ASAN_OPTIONS": f"{common}:detect_leaks=0:detect_stack_use_after_return=0",
        "TSAN_OPTIONS": f"{common}:halt_on_error=1:report_thread_leaks=0",
    }


def _request(request: _Launch, params: bytes, memories: Sequence[Memory]) -> bytes:
    """A launch and all its memory as the process reads them, what is the same once."""
    head = [
        *request.grid,
        *request.block,
        request.shared_bytes,
        request.schedule,
        request.multiprocessors,
    ]
    parts = [struct.pack("<12IQ", *head, len(params), len(memories), 0, request.seed)]
    numbered = list(zip(memories, _same(memories), strict=True))
    parts += [
        struct.pack("<Q4I", each.size_bytes, each.param_offset, each.address % _LINE, each.written, number)
        for each, number in numbered
    ]
    copied = (each for each, number in numbered if not number)
    return b"".join([*parts, params, *(ctypes.string_at(each.address, each.size_bytes) for each in copied)])


def _copy_back(result: bytes, memories: Sequence[Memory]) -> None:
    """What a process has written, one memory after another."""
    position = 0
    for each in memories:
        if each.written:
            ctypes.memmove(each.address, result[position : position + each.size_bytes], each.size_bytes)
            position += each.size_bytes


def _same(memories: Sequence[Memory]) -> list[int]:
    """For each memory that kernels write, 1 + the number of an earlier one that is the same; else 0."""
    first: dict[tuple[int, int], int] = {}
    found = []
    for number, each in enumerate(memories):
        place = each.address, each.size_bytes
        found.append(first.get(place, -1) + 1 if each.written else 0)
        if each.written:
            first.setdefault(place, number)
    return found


def _split_report(report: str, memories: Sequence[Memory]) -> tuple[list[tuple[int, Memory]], str]:
    """Part a runner's report into where it put each memory and what the scheduler found."""
    lines = report.split("\n", len(memories))
    places = [(int(line.split()[0], 16), each) for line, each in zip(lines, memories, strict=False)]
    return places, lines[-1]


def _sanitizer_report(log: str, places: Sequence[tuple[int, Memory]]) -> str:
    """Say in a line what a sanitizer reports at length, which follows."""
    accesses = _ACCESS.findall(log)
    rest = re.split(r"^Shadow bytes|^ *Location is|^SUMMARY", log.strip(), maxsplit=1, flags=re.MULTILINE)[0]
    if not accesses:
        return f"the kernel crashed\n{rest}"
    race = "data race" in log
    told = []
    for kind, size, address, by, stack in accesses[:2]:
        number = re.search(r"\bT\d+", by)
        who = re.search(rf"\b{number[0]} '(thread \d+)(?:, copy of (line \d+))?'", log) if number else None
        copy = who[2] if who else None
        line = re.search(r"kernel\.cu:(\d+)", stack)
        place = _place(int(address, 16), places) or ("in shared memory" if race else f"at 0x{address}")
        where = copy or (f"line {line[1]}" if line else "an unknown line")
        told.append(
            f"{where}: {kind.lower()} of {size} bytes {place}"
            + (f" by {'a copy of ' if copy else ''}{who[1]}" if who else "")
        )
    if race:
        return f"data race: {' and '.join(told)}, and nothing orders them\n{rest}"
    thread = re.search(r"^fagen: (.*)$", log, re.MULTILINE)
    return f"{told[0]}{f' by {thread[1]}' if thread else ''}\n{rest}"


def _place(address: int, places: Sequence[tuple[int, Memory]]) -> str:
    """Say where an address lies in or near the memory of a kernel, or nothing."""
    for begin, each in places:
        if begin <= address < begin + each.size_bytes:
            return f"in {each.name}"
    for begin, each in places:
        end = begin + each.size_bytes
        if end <= address < end + _LINE:
            return f"{address - end} bytes past the end of {each.name}, which has {each.size_bytes},"
        if begin - _LINE <= address < begin:
            return f"{begin - address} bytes before the start of {each.name}"
    return ""


def compile_text(text: str, *, name: str = "kernel", checker: Checker = "none") -> EmulatedKernels:
    """Compile an emitted text for the CPU, or take it from the cache.

    name     the text's name, for FAGEN_OVERRIDE, FAGEN_DUMP and messages
    checker  "address" finds accesses out of bounds, "race" pairs of accesses nothing orders

    Raises ToolchainError without a compiler, BuildError with its log if it refuses the text.
    """
    text = overridden(name, text)
    dump(name, ".cu", text)
    debug(SOURCE, f"{name}.cu\n{text}")
    compiler = find_cxx()
    names = tuple(_KERNEL_NAME.findall(without_comments(text)))
    if not names:
        raise BuildError(f"{name} has no __global__ function")
    runtime = _runtime(compiler, checker)
    sanitizer = _SANITIZERS[checker]
    own_flags = (f"-fsanitize={sanitizer}", _LINES) if sanitizer else _UNWATCHED_FLAGS
    flags = [*_FLAGS, *_KERNEL_FLAGS, *runtime.flags, *own_flags]
    linked = [] if sanitizer else [str(runtime.path), *_LIBRARIES]
    parts = {
        "kind": "emulated kernels",
        "text": text,  # with its comments: findings count its lines
        "headers": included('#include "core.h"\n' + text, _headers()),
        "flags": flags,
        "compiler": compiler.version_text,
        "runtime": runtime.key,
    }

    def produce(folder: Path) -> dict[str, Any]:
        (folder / "kernel.cu").write_text(text, encoding="utf-8")
        (folder / "entry.cpp").write_text(_entry_points(names), encoding="utf-8")
        arguments = [*flags, f"-I{_headers()}", "entry.cpp", "-o", "kernel.so", *linked]
        _compile(compiler, folder, arguments, name)
        return {}

    library = cached(parts, produce).folder / "kernel.so"
    return EmulatedKernels(name, text, names, checker, runtime.path, library)


def _headers() -> Path:
    return (templates_dir() / "emulator").absolute()


def _entry_points(names: Sequence[str]) -> str:
    """Write the file around an emitted text: for each kernel, a call by the address of its parameters."""
    lines = ['#include "core.h"', '#include "kernel.cu"', 'extern "C" {']
    for name in names:
        lines.append(f"void fagen_enter_{name}(const void* params) {{ fagen_enter({name}, params); }}")
        lines.append(f"unsigned fagen_params_bytes_of_{name}() {{ return fagen_params_bytes({name}); }}")
    return "\n".join([*lines, "}", ""])


def _compile(compiler: Cxx, folder: Path, arguments: Sequence[str], what: str = "the scheduler") -> None:
    done = subprocess.run(
        [str(compiler.path), *arguments],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        log = done.stderr.strip()
        if os.strerror(errno.ENOSPC) in log:
            raise unwritable(os.strerror(errno.ENOSPC))
        error = next((line.strip() for line in log.splitlines() if "error" in line), "it gave no reason")
        raise BuildError(
            f"{compiler.path.name} rejects {what} for the emulator: {error}",
            works="FAGEN_DUMP=dir keeps the text it was given",
            details=log,
        )
    if "-o" in arguments and not (folder / arguments[arguments.index("-o") + 1]).exists():
        raise BuildError(
            f"{compiler.path.name} made nothing of {what} for the emulator",
            works="point FAGEN_CXX at a C++ compiler",
        )


@dataclass(frozen=True)
class _Runtime:
    """The scheduler, compiled: a shared object or, for a checker, a program; and what its compiler can do."""

    path: Path
    key: str
    flags: tuple[str, ...]


_runtimes: dict[tuple[Cxx, Checker, Path], _Runtime] = {}


def _runtime(compiler: Cxx, checker: Checker) -> _Runtime:
    """Compile the scheduler, once for all kernels.

    It is no part of what a sanitizer instruments: it tells the sanitizer itself what the fibers do.
    """
    known = (compiler, checker, cache_dir())
    found = _runtimes.get(known)
    if found is None or not found.path.is_file():  # the cache may have been cleared
        found = _runtimes[known] = _built_runtime(compiler, checker)
    return found


def _built_runtime(compiler: Cxx, checker: Checker) -> _Runtime:
    sources = ["runtime.cpp", "units.cpp", *([] if checker == "none" else ["runner.cpp"])]
    content = {each: (_headers() / each).read_text(encoding="utf-8") for each in sources}
    sanitizer = _SANITIZERS[checker]
    flags = [*_FLAGS, *_RUNTIME_FLAGS, *([f"-DFAGEN_{sanitizer.upper()}_SANITIZER"] if sanitizer else [])]
    parts = {
        "kind": "emulator",
        "sources": {each: without_comments(text) for each, text in content.items()},
        "headers": included("".join(content.values()), _headers()),
        "flags": flags,
        "optional": list(_OPTIONAL_FLAGS),
        "compiler": compiler.version_text,
    }

    def produce(folder: Path) -> dict[str, Any]:
        # As one file: most of the time goes into the C++ library, and into its functions each file has.
        (folder / "all.cpp").write_text("".join(f'#include "{each}"\n' for each in sources), encoding="utf-8")
        whole = [*flags, f"-I{_headers()}", "all.cpp"]
        if not sanitizer:
            # A kernel finds the scheduler it was linked with by this name, wherever a cache may lie.
            soname = f"libfagen-emulator-{cache_key(parts)[:16]}.so"
            _compile(compiler, folder, [*whole, "-shared", "-o", _RUNTIME, f"-Wl,-soname,{soname}"])
        else:
            _compile(compiler, folder, [*whole, "-c", "-o", "all.o"])
            link = [f"-fsanitize={sanitizer}", "-pthread", "-rdynamic", "all.o", "-o", _RUNTIME, "-ldl"]
            _compile(compiler, folder, link)
        (folder / "empty.cpp").write_text("", encoding="utf-8")
        known = []
        for flag in _OPTIONAL_FLAGS:
            with suppress(BuildError):
                _compile(compiler, folder, ["-Werror", flag, "-fsyntax-only", "empty.cpp"])
                known.append(flag)
        return {"flags": known}

    entry = cached(parts, produce)
    return _Runtime(entry.folder / _RUNTIME, entry.key, tuple(entry.notes["flags"]))


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
