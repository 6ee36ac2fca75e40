"""Every example, run as a user would: each checks its own result."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.cxx

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path / "out")])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_the_code_of_the_front_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    exec(code, {"q": q, "k": k, "v": v, "slopes": torch.randn(2)})
    assert (tmp_path / "out" / "main.cu").is_file()


def test_there_are_examples():
    assert {"ahead_of_time", "one_call", "own_mask", "own_program"} <= {path.stem for path in EXAMPLES}
