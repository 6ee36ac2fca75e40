"""Every example on a GPU: each checks its own result."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path / "out")])
    runpy.run_path(str(path), run_name="__main__")
