"""What the documents show is what the repository holds: figures of the model, emitted code, commands, names.

Parts between ``<!-- NAME -->`` and ``<!-- end -->`` are written by ``--update-generated``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import typer

from fagen.cli.commands import app
from fagen.emit.program import emit
from fagen.ir.graph import Axis
from fagen.lang import masks, scores
from fagen.plan.arch import ROWS
from fagen.plan.plan import Problem
from fagen.plan.planner import plan
from fagen.study.ladder import attention_ladder, attention_lengths, climb, matmul_ladder, matmul_lengths, rows
from golden import GOLDEN

ROOT = Path(__file__).parents[2]
FOLDERS = ("fagen", "templates", "tests", "examples", "generated", "docs", r"\.ci")
COLUMNS = ("rung", "kernels", "bytes moved", "extra memory")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table(problem: Problem, lengths: Mapping[Axis, int]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    lines += [tuple(row[name] for name in COLUMNS) for row in rows(climb(problem, lengths))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def emitted() -> str:
    """Of the causal kernel in generated/: its pseudocode, and the step that keeps the running values."""
    text = emit(plan(GOLDEN["causal"].problem("simt"))).text
    head = re.search(r"^// for each (?s:.*?)(?=^\n)", text, re.MULTILINE)
    step = re.search(r"^// m = max(?s:.*?)^}\n", text, re.MULTILINE)
    assert head
    assert step
    return f"```cuda\n{head[0]}...\n{step[0]}```"


PARTS = {
    "README.md": {"from generated/simt/causal.cu": emitted},
    "docs/story.md": {
        "product": lambda: table(matmul_ladder(4096), matmul_lengths(4096)),
        "attention": lambda: table(attention_ladder(), attention_lengths(65_536, q_heads=1)),
    },
}


@pytest.mark.parametrize("name", PARTS)
def test_what_is_taken_from_elsewhere_is_as_it_is_there(name: str, request: pytest.FixtureRequest):
    text = text_of(name)
    new = text
    for mark, part in PARTS[name].items():
        pattern = re.compile(rf"(<!-- {re.escape(mark)} -->\n).*?(<!-- end -->)", re.DOTALL)
        new, count = pattern.subn(lambda found, part=part: f"{found[1]}{part()}\n{found[2]}", new)
        assert count == 1, mark
    if request.config.getoption("--update-generated"):
        (ROOT / name).write_text(new, encoding="utf-8")
    else:
        assert new == text, "--update-generated renews it"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_every_path_that_is_named_exists(name: str):
    text = text_of(name)
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]*)`", text)
    named += re.findall(r"\]\((?!http)([^)#]+)\)", text)
    assert named
    for path in named:
        assert list(ROOT.glob(path.rstrip("/"))), path


def test_every_command_that_is_shown_exists():
    commands = typer.main.get_command(app).commands
    shown = re.findall(r"^    fagen (\w+)(.*)$", text_of("README.md"), re.MULTILINE)
    assert {name for name, _ in shown} == set(commands)
    for name, rest in shown:
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"--[\w-]+", rest)) <= known, name


@pytest.mark.parametrize("name", ["README.md", "docs/story.md"])
def test_every_family_is_named(name: str):
    named = set(re.findall(r"`(simt|sm\d+)`", text_of(name)))
    assert named == {family for row in ROWS for family in row.families}


def test_every_mask_and_score_of_the_library_is_named():
    text = text_of("README.md")
    for name in (*masks.__all__, *scores.__all__):
        assert re.search(rf"[` ]{name}[` ]", text), name
