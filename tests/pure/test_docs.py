"""What the documents show is what the repository holds: figures of the model, commands, names, code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from fagen.cli.commands import app
from fagen.lang import masks, scores
from fagen.study.ladder import attention_ladder, attention_lengths, climb, matmul_ladder, matmul_lengths, rows

ROOT = Path(__file__).parents[2]
FOLDERS = ("fagen", "templates", "tests", "examples", "generated", "docs", r"\.ci", "bench")
FOLDERS = ("fagen", "templates", "tests", "examples", "generated", "docs", r"\.ci", "bench")
COLUMNS = ("rung", "kernels", "bytes moved", "extra memory", "predicted")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("problem", "lengths"),
    [
        (matmul_ladder(), matmul_lengths(4096)),
        (attention_ladder(), attention_lengths(65_536, q_heads=1)),
    ],
    ids=["product", "attention"],
)
def test_the_tables_of_the_story_are_the_model_s(problem, lengths):
    steps = rows(climb(problem, lengths))
    table = [f"| {' | '.join(row[name] for name in COLUMNS)} |" for row in steps]
    head = [f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
    assert "\n".join(head + table) in text_of("docs/story.md")


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


def test_every_mask_and_score_of_the_library_is_named():
    text = text_of("README.md")
    for name in (*masks.__all__, *scores.__all__):
        assert re.search(rf"[` ]{name}[` ]", text), name
