"""A saved kernel's launcher, as nvcc sees it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import fagen as fg
from fagen.compile import compile_problem, problem_of
from fagen.export import export
from fagen.lang.attention import attention
from fagen.run.toolchain import find_nvcc

pytestmark = [pytest.mark.nvcc, pytest.mark.cxx]

Q, K, V = (fg.Tensor[axes] for axes in ("b h q d", "b h kv d", "b e kv dv"))


@fg.program
def talking(q: Q, k: K, v: V, mix: fg.Tensor["h e"], strength: fg.Scalar, width: fg.Scalar[int]):
    """Several kernels with buffers between them, numbers, and an axis of its own."""
    s = fg.where(fg.q - fg.kv < width, strength * fg.dot(q, k, over="d"), -fg.inf)
    return fg.dot(fg.dot(fg.softmax(s, over="kv"), mix, over="h"), v, over="kv")


ids = torch.zeros(2, 64, dtype=torch.int32)
KERNELS: dict[str, dict[str, Any]] = {
    "everything": {
        "mask": fg.causal() & fg.document(ids),
        "score": [fg.softcap(3.0), lambda s: s + 0.1 * fg.capture(ids, "b n")[fg.b, fg.kv]],
        "bias": fg.Tensor["h q kv"],
        "dropout": 0.2,
        "return_lse": True,
        "head_dim": 40,
        "v_head_dim": 72,
        "dtype": "bf16",
        "arch": "sm_80",
    },
    "warps with roles": {
        "mask": fg.causal(),
        "return_lse": True,
        "head_dim": 80,
        "v_head_dim": 24,
        "dtype": "fp16",
        "arch": "sm_90a",
        "family": "sm90",
    },
    "gradients by warps with roles": {
        "mask": fg.causal(),
        "head_dim": 64,
        "dtype": "bf16",
        "arch": "sm_90a",
        "direction": "backward",
        "family": "sm90",
    },
    "several": {"program": talking, "head_dim": 32, "sizes": {"e": 4}, "dtype": "fp32", "arch": "sm_80"},
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_launcher_compiles_by_the_command_it_names(name: str, tmp_path: Path) -> None:
    kernel = fg.compile(**KERNELS[name])
    assert kernel.save(tmp_path) == tmp_path
    require_launcher(tmp_path)


def test_a_launcher_makes_walks_in_as_many_parts_as_one_says_and_takes_lengths_alone(tmp_path: Path) -> None:
    sizes = {"b": 1, "hk": 2, "g": 2, "q": 1, "kv": 9000, "d": 64, "dv": 64}
    problem = problem_of(attention(mask=fg.causal()).graph, "A100", None, ("bf16",) * 3, sizes)
    export(compile_problem(problem), tmp_path)
    assert "long long parts = 3;" in (tmp_path / "main.cu").read_text()
    require_launcher(tmp_path)
    for word in ("q_lens=3", "head_dim=8", "q_len"):
        done = subprocess.run(["./check", word], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (1, f"{word} is no length=value\n")


def require_launcher(tmp_path: Path) -> None:
    """It compiles without a word, by the command that stands in it."""
    text = (tmp_path / "main.cu").read_text()
    (command,) = re.findall(r"^//   nvcc (.*) && \./check", text, re.MULTILINE)
    done = subprocess.run(
        [str(find_nvcc().path), *command.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not re.search("warning|error", done.stdout + done.stderr), done.stderr
    assert (tmp_path / "check").is_file()
