"""CUDA text to an image a GPU loads: nvcc with an argument list, what ptxas says of it, and the cache."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fagen.errors import BuildError, ToolchainError
from fagen.paths import templates_dir
from fagen.run.cache import Entry, Parts, cached, index_get, index_put, load, load_key
from fagen.run.debug import REPORT, SASS, SOURCE, TIMES, debug, debug_level, dump, overridden
from fagen.run.source import included, without_comments
from fagen.run.toolchain import Nvcc, Target, choose_target, find_cxx, find_nvcc

_FLAGS = ("-O3", "-std=c++17", "--resource-usage")
_SOURCE = "kernel.cu"
_IMAGE = "kernel.image"
_REPORT = "report.txt"


@dataclass(frozen=True)
class Resources:
    """What one function takes, as ptxas reports it.

    registers   32-bit registers a thread
    *_bytes     bytes a thread for stack and spills, bytes a block for static shared memory
    barriers    named barriers
    """

    name: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int
    barriers: int

    @property
    def spilled_bytes(self) -> int:
        """Bytes of registers that the text stores in memory and loads again."""
        return self.spill_store_bytes + self.spill_load_bytes


@dataclass(frozen=True)
class Built:
    """A compiled source.

    key        its cache key: sha256 of text, headers, flags, compiler version and architecture
    target     what it was compiled for
    image      a cubin, or PTX text if ``target.is_ptx``
    functions  what each function takes, by name; empty for PTX
    warnings   what nvcc and ptxas warn of, each a line
    seconds    how long the compiler took, when it ran
    fresh      whether it ran in this call
    """

    key: str
    target: Target
    image: bytes
    functions: Mapping[str, Resources]
    warnings: tuple[str, ...]
    seconds: float
    fresh: bool


def build(
    text: str,
    *,
    name: str,
    arch: str | tuple[int, int],
    include_dir: Path | None = None,
    lineinfo: bool = False,
) -> Built:
    """Compile CUDA text, or take it from the cache; only text that was never compiled needs nvcc.

    name         the kernel's name, for FAGEN_OVERRIDE, FAGEN_DUMP and messages; no part of the key
    arch         such as ``sm_90a``, or a device's compute capability such as (9, 0)
    include_dir  where its headers lie; default: the device headers of the templates
    lineinfo     keep source lines for profilers

    Raises ToolchainError for a missing compiler or one that does not know the device, BuildError with the
    compiler's log for text it rejects.
    """
    include_dir = include_dir or templates_dir() / "device"
    text = overridden(name, text)
    dump(name, ".cu", text)
    debug(SOURCE, f"{name}.cu\n{text}")
    nvcc = _nvcc_or_reason()
    target = choose_target(arch, nvcc if isinstance(nvcc, Nvcc) else None)
    content: Parts = {
        "kind": "nvcc",
        "text": text if lineinfo else without_comments(text),
        "headers": included(text, include_dir),
        "flags": [*_FLAGS, *(["-lineinfo"] if lineinfo else []), *_flags_of_environment()],
        "target": target.name,
    }
    if isinstance(nvcc, ToolchainError):
        entry = _built_earlier(content, missing=nvcc)
    else:
        parts = {**content, "compiler": nvcc.version_text}
        entry = cached(
            parts, lambda folder: _compile(folder, nvcc, target, text, name, include_dir, lineinfo)
        )
        if entry.fresh or index_get(content) != nvcc.version_text:
            index_put(content, nvcc.version_text)
    built = _built(entry)
    _show(name, built, entry, nvcc)
    return built


def built_as(key: str) -> Built | None:
    """Return what was built under a key, or None where it is gone; no compiler is looked for."""
    entry = load_key(key)
    return _built(entry) if entry else None


def _nvcc_or_reason() -> Nvcc | ToolchainError:
    try:
        return find_nvcc()
    except ToolchainError as error:
        return error


def _built_earlier(content: Parts, missing: ToolchainError) -> Entry:
    """Return what the last compiler this text met made of it; without one, say that a compiler is missing."""
    version_text = index_get(content)
    entry = load({**content, "compiler": version_text}) if version_text else None
    if entry is None:
        raise missing
    return entry


def _flags_of_environment() -> list[str]:
    """Return the flags nvcc takes from the environment by itself: they change what it makes."""
    variables = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
    return [f"{name}={value}" for name in variables if (value := os.environ.get(name))]


def _host_flags() -> list[str]:
    """Return how to point nvcc at a host compiler where it would not find the right one by itself."""
    if os.environ.get("NVCC_CCBIN"):
        return []
    if os.environ.get("FAGEN_CXX") or not shutil.which("gcc"):
        return ["-ccbin", str(find_cxx().path)]
    return []


def _compile(
    folder: Path, nvcc: Nvcc, target: Target, text: str, name: str, include_dir: Path, lineinfo: bool
) -> dict[str, Any]:
    """Run nvcc in ``folder``, leave image and report there, and return what the report says."""
    (folder / _SOURCE).write_text(text, encoding="utf-8")
    kind = "-ptx" if target.is_ptx else "-cubin"
    command = [str(nvcc.path), kind, f"-arch={target.name}", *_FLAGS, *(["-lineinfo"] if lineinfo else [])]
    command += [*_host_flags(), "-I", str(include_dir.absolute()), "-o", _IMAGE, _SOURCE]
    start = time.perf_counter()
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, errors="replace")
    seconds = time.perf_counter() - start
    report = (done.stdout + done.stderr).strip()
    if done.returncode != 0 or not (folder / _IMAGE).is_file():
        raise BuildError(
            f"{nvcc} rejects {name} for {target.name}: {_first_error(report)}",
            works="FAGEN_DUMP=dir keeps the text it was given",
            details=report,
        )
    (folder / _REPORT).write_text(report, encoding="utf-8")
    return {
        "target": target.name,
        "functions": [asdict(each) for each in parse_resources(report)],
        "warnings": list(parse_warnings(report)),
        "seconds": seconds,
    }


def _first_error(report: str) -> str:
    lines = report.splitlines()
    return next((line.strip() for line in lines if "error" in line or "fatal" in line), "it gave no reason")


def _built(entry: Entry) -> Built:
    notes = entry.notes
    return Built(
        key=entry.key,
        target=Target(notes["target"]),
        image=entry.files[_IMAGE],
        functions={each["name"]: Resources(**each) for each in notes["functions"]},
        warnings=tuple(notes["warnings"]),
        seconds=notes["seconds"],
        fresh=entry.fresh,
    )


def parse_resources(report: str) -> tuple[Resources, ...]:
    """Return what each function takes, from the lines ``ptxas -v`` prints about it.

    A device function that was not inlined is among them, with 0 registers: it uses its caller's.
    """
    return tuple(
        Resources(
            name=block.split(None, 1)[0],
            registers=_number(r"Used (\d+) registers", block),
            stack_bytes=_number(r"(\d+) bytes stack frame", block),
            spill_store_bytes=_number(r"(\d+) bytes spill stores", block),
            spill_load_bytes=_number(r"(\d+) bytes spill loads", block),
            static_shared_bytes=_number(r"(\d+) bytes smem", block),
            barriers=_number(r"used (\d+) barriers", block),
        )
        for block in report.split("Function properties for ")[1:]
    )


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def parse_warnings(report: str) -> tuple[str, ...]:
    """Return the lines that warn, each once; ptxas marks some, such as C7510, as mere information."""
    warn = re.compile(r"\bwarning\s*(#|:)|\(C7\d{3}\)")
    return tuple(dict.fromkeys(line.strip() for line in report.splitlines() if warn.search(line)))


def _show(name: str, built: Built, entry: Entry, nvcc: Nvcc | ToolchainError) -> None:
    """Serve FAGEN_DUMP and the levels of FAGEN_DEBUG that a build has something to say to."""
    report = entry.files[_REPORT].decode()
    dump(name, ".ptx" if built.target.is_ptx else ".cubin", built.image)
    dump(name, ".ptxas.txt", report)
    how = f"compiled in {built.seconds:.2f} s" if built.fresh else "taken from the cache"
    debug(TIMES, f"{name}: {how} for {built.target.name} ({built.key[:12]})")
    debug(REPORT, f"{name}: {report}")
    if debug_level() >= SASS and isinstance(nvcc, Nvcc) and not built.target.is_ptx:
        debug(SASS, f"{name}\n{_disassembled(entry.folder / _IMAGE, nvcc)}")


def _disassembled(cubin: Path, nvcc: Nvcc) -> str:
    beside = nvcc.path.resolve().with_name("cuobjdump")
    tool = str(beside) if beside.is_file() else shutil.which("cuobjdump")
    if not tool:
        return "no SASS: cuobjdump is not beside nvcc and not in PATH"
    done = subprocess.run([tool, "-sass", str(cubin)], check=False, capture_output=True, text=True)
    return done.stdout or done.stderr
