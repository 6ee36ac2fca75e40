"""The wheel installed elsewhere: with no checkout near it emits what the checkout emits, and runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from command_line import fagen

ROOT = Path(__file__).parents[2]
EMIT = ("emit", "--mask", "causal & sliding_window(9)", "--score", "alibi", "--head-dim", "40")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as from a fresh clone."""
    pytest.importorskip("hatchling", reason="needs hatchling: it builds the wheel")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("fagen", "templates"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True
        )
    (source / "fagen" / "templates").unlink(missing_ok=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", built]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = built.glob("fagen-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel]
    subprocess.run(command, check=True, capture_output=True)
    return target


def elsewhere(installed: Path, folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True
    )


def test_it_holds_the_package_and_all_templates(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (("fagen", ""), ("templates", "fagen/")):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert files
        for path in files:
            if "__pycache__" not in path.parts:
                assert inside + path.relative_to(ROOT).as_posix() in names
    assert not [name for name in names if name.startswith(("tests/", "examples/")) or "__pycache__" in name]
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("module", [True, False], ids=["python -m fagen", "fagen"])
def test_it_emits_what_the_checkout_emits(installed: Path, tmp_path: Path, module: bool):
    command = [sys.executable, "-m", "fagen"] if module else [sys.executable, installed / "bin" / "fagen"]
    done = elsewhere(installed, tmp_path, *command, *EMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == fagen(*EMIT).out


def test_it_saves_a_kernel_with_its_headers(installed: Path, tmp_path: Path):
    done = elsewhere(installed, tmp_path, sys.executable, "-m", "fagen", *EMIT, "--out", "out")
    assert done.returncode == 0, done.stderr
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".cu", ".cuh", ".h", ".json"}


@pytest.mark.cxx
def test_it_runs_a_kernel(installed: Path, tmp_path: Path):
    options = ["--device", "emulator", "--mask", "causal", "--q-len", "9", "--head-dim", "4"]
    done = elsewhere(installed, tmp_path, sys.executable, "-m", "fagen", "run", *options)
    assert done.returncode == 0, done.stderr
    assert "agrees with its meaning" in done.stdout
