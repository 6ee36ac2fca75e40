"""What tests need of a machine: a mark names it, its absence skips; FAGEN_REQUIRE makes that a failure."""

import collections
import difflib
import gc
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fagen.errors import ToolchainError
from fagen.run import toolchain

# Tensors here are small, and tests run side by side: threads of torch would spin while others compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest.register_assert_rewrite("api_cases", "edges", "public_cases", "sampler")

_OWN_VARIABLES = ("FAGEN_DEBUG", "FAGEN_DUMP", "FAGEN_OVERRIDE")


def _missing_compiler(find: Callable[[], object]) -> str:
    try:
        find()
    except ToolchainError as error:
        return error.what
    return ""


def _missing_gpu() -> str:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        import pycuda.driver  # noqa: F401
    except ImportError as error:
        return f"pycuda does not load: {error}"
    return ""


_NEEDS: dict[str, Callable[[], str]] = {
    "gpu": _missing_gpu,
    "nvcc": lambda: _missing_compiler(toolchain.find_nvcc),
    "cxx": lambda: _missing_compiler(toolchain.find_cxx),
}
_answers: dict[str, str] = {}


def _missing(need: str) -> str:
    if need not in _answers:
        _answers[need] = _NEEDS[need]()
    return _answers[need]


def _required() -> set[str]:
    named = {name.strip() for name in os.environ.get("FAGEN_REQUIRE", "").split(",")} - {""}
    if unknown := named - set(_NEEDS):
        raise pytest.UsageError(f"FAGEN_REQUIRE names {', '.join(unknown)}; {', '.join(_NEEDS)} are known")
    return named


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-generated", action="store_true", help="write generated/ anew in place of comparing with it"
    )


def pytest_configure(config: pytest.Config) -> None:
    _required()


def pytest_collection_finish() -> None:
    """Leave what collection made out of later collections of garbage."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for need in _NEEDS:
        if item.get_closest_marker(need) and (reason := _missing(need)):
            if need in _required():
                pytest.fail(f"FAGEN_REQUIRE={need}: {reason}", pytrace=False)
            pytest.skip(f"needs {need}: {reason}")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End a process whose GPU can run nothing more: a failed access would fail whatever comes after it.

    Of several workers the others go on, and one takes the place of this; xdist names the test it was in.
    """
    if item.get_closest_marker("gpu") is None or _missing("gpu"):
        return
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"{item.nodeid} left a GPU that runs nothing: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count at the end what was skipped, by what was missing."""
    counts: collections.Counter[str] = collections.Counter()
    for report in terminalreporter.stats.get("skipped", []):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        match = re.match(r"Skipped: needs (\w+): (.*)", text)
        counts[f"{match[1]} ({match[2]})" if match else text] += 1
    for reason, count in sorted(counts.items()):
        terminalreporter.write_line(f"skipped {count} for want of {reason}")


@pytest.fixture
def generated(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the committed file of a name under generated/, or writes it: ``generated(name,
    text)``."""
    folder = Path(__file__).parent.parent / "generated"

    def compare(name: str, text: str) -> None:
        path = folder / name
        if request.config.getoption("--update-generated"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"generated/{name} is not there: --update-generated writes it"
        difference = difflib.unified_diff(
            path.read_text(encoding="utf-8").splitlines(),
            text.splitlines(),
            "committed",
            "emitted",
            lineterm="",
        )
        assert not (shown := "\n".join(difference)), (
            f"generated/{name} differs, --update-generated renews it\n{shown}"
        )

    return compare


@pytest.fixture(autouse=True)
def _no_variables_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _OWN_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own, as FAGEN_CACHE_DIR."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(folder))
    return folder
