"""The compilers on this machine: nvcc for a GPU, g++ or clang++ for the emulator."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fagen.errors import ToolchainError, UsageError, pip_install

_NVCC_REMEDY = (
    "set FAGEN_NVCC to the nvcc program or CUDA_HOME to a toolkit, put nvcc into PATH, "
    f"or install the compiler wheels: {pip_install('nvcc')}"
)
_CXX_REMEDY = (
    "set FAGEN_CXX or CXX to a C++17 compiler, or put g++ or clang++ into PATH (Debian: apt install g++)"
)
_FIRST_WITH_LETTERS = (12, 0)  # the release that brought sm_90a


@dataclass(frozen=True)
class Target:
    """What nvcc is asked for: ``sm_90a`` gives a cubin, ``compute_90`` PTX the driver compiles at load."""

    name: str

    @property
    def is_ptx(self) -> bool:
        """Whether the image is PTX text, to be finished by the driver of a device newer than this nvcc."""
        return self.name.startswith("compute_")


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler: its path, where the search found it, and what it says of its version."""

    path: Path
    found_by: str
    version_text: str

    @cached_property
    def version(self) -> tuple[int, int]:
        """Return the release, such as (13, 0)."""
        match = re.search(r"release (\d+)\.(\d+)", self.version_text)
        return (int(match[1]), int(match[2])) if match else (0, 0)

    @cached_property
    def archs(self) -> tuple[int, ...]:
        """Return the architectures it compiles for, in order, such as (75, 80, 86, 90)."""
        listed = _answer(self.path, "--list-gpu-arch")
        return tuple(sorted({int(number) for number in re.findall(r"\bcompute_(\d+)\b", listed)}))

    def __str__(self) -> str:
        return f"nvcc {self.version[0]}.{self.version[1]} ({self.path})"


@dataclass(frozen=True)
class Cxx:
    """A C++ compiler for the emulator: its path, where the search found it, its version without any path."""

    path: Path
    found_by: str
    version_text: str


_answers: dict[tuple[str | int, ...], str] = {}


def _ask(path: Path, question: str) -> str:
    """Run a compiler for what it says of itself; a program that does not run is a ToolchainError."""
    try:
        done = subprocess.run(
            [str(path), question], check=False, capture_output=True, text=True, errors="replace", timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(
            f"{path} does not run",
            values={"asked for": question, "reason": error},
            works="point FAGEN_NVCC or FAGEN_CXX at a compiler that works",
        ) from error
    if done.returncode != 0:
        raise ToolchainError(
            f"{path} {question} failed",
            values={"exit code": done.returncode},
            works="point FAGEN_NVCC or FAGEN_CXX at a compiler that works",
            details=(done.stdout + done.stderr).strip(),
        )
    return done.stdout


def _answer(path: Path, question: str) -> str:
    """Return what a compiler says of itself, remembered by path and stat.

    ctime is among them, so a file put in place with an old mtime is asked again.
    """
    stat = path.stat()
    key = (question, str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    if key not in _answers:
        _answers[key] = _ask(path, question)
    return _answers[key]


def _version_text(path: Path) -> str:
    """Return what a compiler says of its version, without the name it was called by and without paths."""
    lines = (line.strip() for line in _answer(path, "--version").splitlines() if "InstalledDir" not in line)
    lines = (line.removeprefix(path.name).strip() for line in lines)
    return "\n".join(line for line in lines if line)


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _wheel_nvccs() -> Iterator[Path]:
    """Yield where the compiler wheels may have put nvcc: ``nvidia/cu13/bin`` or ``nvidia/cuda_nvcc/bin``."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob("*/bin/nvcc"), reverse=True)


def find_nvcc() -> Nvcc:
    """Find nvcc by FAGEN_NVCC, CUDA_HOME, PATH and the compiler wheels, in this order.

    The first place that names one wins; a FAGEN_NVCC that names none is an error, not a reason to look on.
    Nothing about a failed search is remembered, so mending PATH is enough.

    Raises ToolchainError, naming each place looked at.
    """
    looked: list[str] = []
    if named := os.environ.get("FAGEN_NVCC"):
        path = Path(shutil.which(named) or named)
        if not _is_program(path):
            raise ToolchainError(
                f"FAGEN_NVCC names {named}, which is no program that can be run",
                works="unset it to search CUDA_HOME, PATH and the compiler wheels, or correct it",
            )
        return Nvcc(path, "FAGEN_NVCC", _version_text(path))
    looked.append("FAGEN_NVCC (not set)")
    if home := os.environ.get("CUDA_HOME"):
        path = Path(home) / "bin" / "nvcc"
        if _is_program(path):
            return Nvcc(path, "CUDA_HOME", _version_text(path))
        looked.append(f"CUDA_HOME (no {path})")
    else:
        looked.append("CUDA_HOME (not set)")
    if found := shutil.which("nvcc"):
        return Nvcc(Path(found), "PATH", _version_text(Path(found)))
    looked.append(f"PATH ({os.environ.get('PATH', '')})")
    for path in _wheel_nvccs():
        if _is_program(path):
            return Nvcc(path, "wheels", _version_text(path))
    looked.append("the wheel nvidia-cuda-nvcc (not installed)")
    raise ToolchainError(
        "nvcc is needed to compile a kernel and was not found",
        values={"looked at": ", ".join(looked)},
        works=_NVCC_REMEDY,
    )


def find_cxx() -> Cxx:
    """Find a C++ compiler by FAGEN_CXX, CXX and then g++, clang++, c++ in PATH.

    Raises ToolchainError, naming each place looked at; a failed search is not remembered.
    """
    looked: list[str] = []
    for variable in ("FAGEN_CXX", "CXX"):
        named = os.environ.get(variable, "").strip()
        path = Path(shutil.which(named) or named) if named else None
        if path and _is_program(path):
            return Cxx(path, variable, _version_text(path))
        if path and variable == "FAGEN_CXX":
            raise ToolchainError(
                f"FAGEN_CXX names {named}, which is no program that can be run",
                works="unset it to search CXX and PATH, or correct it",
            )
        looked.append(f"{variable} ({f'no program {named}' if named else 'not set'})")
    for name in ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return Cxx(Path(found), "PATH", _version_text(Path(found)))
    looked.append(f"PATH ({os.environ.get('PATH', '')})")
    raise ToolchainError(
        "a C++ compiler is needed, by nvcc and by the emulator, and was not found",
        values={"looked at": ", ".join(looked)},
        works=_CXX_REMEDY,
    )


def choose_target(arch: str | tuple[int, int], nvcc: Nvcc | None) -> Target:
    """Choose what to compile for a device: its own cubin, or PTX where it is newer than the compiler.

    arch  a name such as ``sm_86``, or a device's compute capability such as (8, 6)
    nvcc  the compiler; None (none is installed) names the cubin a cache may hold

    A device of capability 9.0 gets ``sm_90a``, which alone has ``wgmma`` and ``setmaxnreg``. A name with a
    letter is compiled as it stands or not at all. Raises ToolchainError where compiler and device have no
    architecture in common.
    """
    number, letter = _parsed(arch)
    if nvcc is None or (number in nvcc.archs and not (letter and nvcc.version < _FIRST_WITH_LETTERS)):
        return Target(f"sm_{number}{letter}")
    known = [each for each in nvcc.archs if each <= number]
    if known and (isinstance(arch, tuple) or not letter):
        return Target(f"sm_{number}" if known[-1] == number else f"compute_{known[-1]}")
    older = bool(nvcc.archs) and number < nvcc.archs[0]
    known_names = ", ".join(f"sm_{each}" for each in nvcc.archs)
    raise ToolchainError(
        f"{nvcc} does not compile for sm_{number}{letter}, only for {known_names}",
        works=f"an {'older' if older else 'newer'} CUDA toolkit does, named by FAGEN_NVCC or CUDA_HOME"
        + ("" if older else f", or {pip_install('nvcc', upgrade=True)}"),
    )


def _parsed(arch: str | tuple[int, int]) -> tuple[int, str]:
    """Return an architecture's number and letter: (90, "a") for ``sm_90a`` and for capability (9, 0)."""
    if isinstance(arch, tuple):
        number = arch[0] * 10 + arch[1]
        return number, "a" if number == 90 else ""
    match = re.fullmatch(r"sm_(\d{2,3})([af]?)", arch)
    if not match:
        raise UsageError(f"{arch} is no CUDA architecture", works="sm_75, sm_80, sm_86, sm_89, sm_90a are")
    return int(match[1]), match[2]
