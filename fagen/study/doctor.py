"""What this machine has of what fagen uses, what each part is for, and how to get what is missing."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fagen.errors import FagenError, ToolchainError, pip_install
from fagen.run import launch
from fagen.run.cache import cache_dir
from fagen.run.toolchain import find_cxx, find_nvcc


@dataclass(frozen=True)
class Finding:
    """One part: its ``name``, what was ``found`` of it ("" where it is missing), what it is ``needed_for``.

    ``remedy`` is the command that brings it, or what else to do; ``trouble`` is why it does not work.
    """

    name: str
    found: str
    needed_for: str
    remedy: str
    trouble: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and where kernels run: a GPU by its name, and ``emulator``."""

    findings: tuple[Finding, ...]
    runs_on: tuple[str, ...]


def examine() -> Diagnosis:
    """Look for every part; nothing is compiled or run."""
    gpu = _gpu()
    findings = (
        Finding("Python", platform.python_version(), "everything", "Python 3.10 or later"),
        _package("torch", "tensors, and the reference every result is compared with", "pip install torch"),
        _found("C++ compiler", _cxx, "running kernels without a GPU; nvcc uses it too", "apt install g++"),
        _found("nvcc", lambda: str(find_nvcc()), "compiling kernels for a GPU", pip_install("nvcc")),
        Finding("driver", _driver(gpu), "running kernels on a GPU", "install the vendor's driver of the GPU"),
        gpu,
        _pycuda(gpu),
        _cache(),
    )
    missing = {finding.name for finding in findings if not finding.found}
    runs_on = []
    if not missing & {"torch", "C++ compiler", "nvcc", "driver", "GPU", "pycuda"}:
        runs_on.append(gpu.found)
    if not missing & {"torch", "C++ compiler"}:
        runs_on.append("emulator")
    return Diagnosis(findings, tuple(runs_on))


def _cxx() -> str:
    compiler = find_cxx()
    return f"{compiler.path.name} {compiler.version_text.partition(chr(10))[0]} ({compiler.path})"


def _found(name: str, look: Callable[[], str], needed_for: str, remedy: str) -> Finding:
    try:
        return Finding(name, look(), needed_for, remedy)
    except ToolchainError as error:
        return Finding(name, "", needed_for, remedy, error.what)


def _package(name: str, needed_for: str, remedy: str) -> Finding:
    """A package by what is installed of it; it is not imported, and may still fail to load."""
    try:
        return Finding(name, importlib.metadata.version(name), needed_for, remedy)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "", needed_for, remedy)


def _driver(gpu: Finding) -> str:
    """The version of the GPU driver, as its own tool reports it; torch may have met one without that tool."""
    answer = _asked(("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"))
    return answer.partition("\n")[0] or ("of unknown version" if gpu.found else "")


def _pycuda(gpu: Finding) -> Finding:
    """pycuda; where there is a GPU, loaded on it."""
    finding = _package("pycuda", "loading and launching kernels on a GPU", pip_install("cuda"))
    if not (finding.found and gpu.found):
        return finding
    import torch

    try:
        launch.gpu(torch.cuda.current_device())
    except FagenError as error:
        return replace(finding, found="", trouble=error.sentence)
    return finding


def _asked(command: Sequence[str]) -> str:
    """What a program answers; nothing where it is not there or fails."""
    if not shutil.which(command[0]):
        return ""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _gpu() -> Finding:
    """The GPU that torch would use."""
    remedy = "a GPU from sm_75 on, its driver, and a torch built with CUDA"
    missing = Finding("GPU", "", "running kernels at speed", remedy)
    try:
        import torch
    except ImportError as error:
        return replace(missing, trouble=str(error))
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return replace(missing, trouble=f"torch {torch.__version__} is built without CUDA")
        return replace(missing, trouble="torch sees no CUDA device")
    index = torch.cuda.current_device()
    major, minor = torch.cuda.get_device_capability(index)
    gib = torch.cuda.get_device_properties(index).total_memory / 2**30
    return replace(missing, found=f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}, {gib:.0f} GiB")


def _cache() -> Finding:
    """The folder of the cache, if it can be written."""
    needed_for, remedy = "keeping what was compiled", "set FAGEN_CACHE_DIR to a folder that can be written"
    try:
        folder = cache_dir()
        _writable(folder)
    except (FagenError, OSError) as error:
        return Finding("cache", "", needed_for, remedy, str(error))
    return Finding("cache", str(folder), needed_for, remedy)


def _writable(folder: Path) -> None:
    """Raise OSError where no file can be made in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".doctor"
    probe.touch()
    probe.unlink()
