"""What has no meaning or does not fit is refused in one sentence before any compiler is looked for.

In this file there is no compiler: a kernel that got as far as being compiled raises a `ToolchainError`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

import fagen as fg
from command_line import fagen, mistake
from fagen.api import Kernel
from fagen.compile import compile_problem, problem_of
from fagen.errors import DtypeError, FagenError, PlanError, ToolchainError, UsageError
from fagen.lang.attention import attention as attention_graph
from fagen.lang.expr import LARGEST
from fagen.lang.program import Options

Q = fg.Tensor["b h q d"]
K = fg.Tensor["b hk kv d"]
V = fg.Tensor["b hk kv dv"]

PROGRAMS = """
import fagen as fg

Q, K, V = fg.Tensor["b h q d"], fg.Tensor["b hk kv d"], fg.Tensor["b hk kv dv"]


@fg.program
def wrong_axis(q: Q, k: K, v: V):
    return fg.dot(fg.softmax(fg.dot(q, k, over="dv"), over="kv"), v, over="kv")


@fg.program
def without_v(q: Q, k: K, v: V):
    return fg.logsumexp(fg.dot(q, k, over="d"), over="kv")


@fg.program
def unknown_mask(q: Q, k: K, v: V):
    s = fg.where(fg.causl(), fg.dot(q, k, over="d"), -fg.inf)
    return fg.dot(fg.softmax(s, over="kv"), v, over="kv")


@fg.program
def other_axis(q: Q, k: K, v: V, pages: fg.Tensor["b kv page"]):
    s = fg.dot(q, k, over="d") + fg.sum(pages, over="page")
    return fg.dot(fg.softmax(s, over="kv"), v, over="kv")


@fg.program
def windowed(q: Q, k: K, v: V, w: fg.Scalar[int]):
    s = fg.where(fg.q - fg.kv < w, fg.dot(q, k, over="d"), -fg.inf)
    return fg.dot(fg.softmax(s, over="kv"), v, over="kv")


def undeclared(q, k, v):
    return fg.dot(q, k, over="d")


number = 3
"""


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cold_cache: Path) -> None:
    for name in ("FAGEN_CXX", "CXX", "FAGEN_NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr("fagen.run.toolchain._wheel_nvccs", lambda: iter(()))


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    path = tmp_path / "programs.py"
    path.write_text(PROGRAMS)
    return path


def tensor(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


X = tensor(2, 4, 8, 16)
UNSEEN = tensor(2, 4, 8, 37)  # no other test of this process has built a kernel for it


def with_a_tangent(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(X, torch.ones_like(X)))


@fg.program
def softmax(q: Q, k: K, v: V):
    return fg.dot(fg.softmax(fg.dot(q, k, over="d"), over="kv"), v, over="kv")


@fg.program
def wrong_axis(q: Q, k: K, v: V):
    return fg.dot(fg.softmax(fg.dot(q, k, over="dv"), over="kv"), v, over="kv")


@fg.program
def without_v(q: Q, k: K, v: V):
    return fg.logsumexp(fg.dot(q, k, over="d"), over="kv")


@fg.program
def with_documents(q: Q, k: K, v: V, doc: fg.Tensor["b q", int]):
    s = fg.where(doc > 0, fg.dot(q, k, over="d"), -fg.inf)
    return fg.dot(fg.softmax(s, over="kv"), v, over="kv")


@fg.program
def inner(q: Q):
    return 2.0 * q


@fg.program
def outer(q: Q):
    return inner(q)


@fg.program
def endless(q: Q):
    return endless(q)


def declared_by_text(q):
    return q


declared_by_text.__annotations__["q"] = "b h q d"


CALLS = {
    "wrong axis": (
        lambda: wrong_axis(X, X, X),
        UsageError,
        "wrong_axis: dot is over dv, an axis that q[b,h,q,d] does not have; its axes: b h q d",
    ),
    "wrong axis, ahead of time": (
        lambda: fg.compile(wrong_axis, head_dim=64),
        UsageError,
        "wrong_axis: dot is over dv, an axis that q[b,h,q,d] does not have; its axes: b h q d",
    ),
    "an axis nobody knows": (
        lambda: fg.attention(X, X, X, mask=fg.capture(X, "b h q page") > 0),
        UsageError,
        "attention: the scores depend on page; scores, masks and biases are over b, h, q and kv; a table is "
        "indexed: table[fg.q]",
    ),
    "a mask over features": (
        lambda: fg.attention(X, X, X, mask=fg.capture(tensor(16), "d") > 0),
        UsageError,
        "attention: the scores depend on d; scores, masks and biases are over b, h, q and kv; a table is "
        "indexed: table[fg.q]",
    ),
    "a score of the key alone": (
        lambda: fg.attention(X, X, X, score=lambda s: 1.0 * fg.kv),
        UsageError,
        "attention: the scores do not depend on b h q; a score is made of the one it is given: 0.0 * s + ...",
    ),
    "a score of the row": (
        lambda: fg.attention(X, X, X, score=lambda s: fg.max(s, over="kv")),
        UsageError,
        "attention: the scores do not depend on kv; a score is made of the one it is given: 0.0 * s + ...",
    ),
    "axes in capitals": (
        lambda: fg.Tensor["B H S D"],
        UsageError,
        "'B' in 'B H S D' is no axis name; use b, h, hk, q, kv, d, dv or a word of your own in small letters",
    ),
    "letters that no compiler reads": (
        lambda: fg.Tensor["λ q"],
        UsageError,
        "'λ' in 'λ q' is no axis name; use b, h, hk, q, kv, d, dv or a word of your own in small letters",
    ),
    "a score of positions": (
        lambda: fg.attention(X, X, X, score=lambda s, b, h, q, kv: s),
        DtypeError,
        "attention: score <lambda> takes (s, b, h, q, kv); a score is a function of the score alone; "
        "positions in it are fg.b, fg.h, fg.q, fg.kv",
    ),
    "a score that is not called": (
        lambda: fg.attention(X, X, X, score=fg.alibi),
        DtypeError,
        "attention: score is the function alibi; call it first: alibi()",
    ),
    "a score that is a tensor": (
        lambda: fg.attention(X, X, X, score=lambda s: tensor(8, 8)),
        DtypeError,
        "attention: score <lambda> returned a tensor of shape (8, 8); it returns an expression",
    ),
    "a scale on the device": (
        lambda: fg.attention(X, X, X, scale=tensor()),
        DtypeError,
        "attention: scale is a tensor of shape (); it is a number; one on the device is "
        'fg.capture(scale, "")',
    ),
    "a scale beyond fp64": (
        lambda: fg.attention(X, X, X, scale=10**400),
        UsageError,
        "attention: scale is too large a number; " + LARGEST,
    ),
    "a layout that is a list": (
        lambda: fg.attention(X, X, X, layout=["bhsd"]),
        UsageError,
        "attention: layout is ['bhsd']; it is 'bhsd' or 'bshd'",
    ),
    "a power": (
        lambda: fg.q**2,
        UsageError,
        "q stands before **; write x * x, or fg.exp(y * fg.log(x))",
    ),
    "either of two masks": (
        lambda: fg.causal() ^ fg.chunked(4),
        UsageError,
        "kv <= q + kv_len - q_len stands before ^; write (a & ~b) | (~a & b)",
    ),
    "an integer that no kernel holds": (
        lambda: fg.kv < 10**30,
        UsageError,
        f"{10**30} is no integer of 64 bits; as a floating-point number it is 1e+30",
    ),
    "an axis that is no string": (
        lambda: fg.sum(fg.q + fg.kv, over=fg.kv),
        UsageError,
        "kv is no axis name; an axis is named by a string, 'kv'",
    ),
    "lengths below nothing": (
        lambda: fg.compile(mask=fg.causal(), head_dim=64).explain(batch=-1),
        UsageError,
        "explain: batch is -1; it is a whole number from 0 on",
    ),
    "a product of matrices": (
        lambda: fg.q @ fg.kv,
        UsageError,
        'q stands before @; write fg.dot(q, k, over="d")',
    ),
    "axes without fg.Tensor": (
        lambda: fg.program(declared_by_text)(X),
        UsageError,
        "declared_by_text: an annotation names something unknown (invalid syntax (<string>, line 1)); write "
        'axes as a string, fg.Tensor["b h q d"], with fagen imported beside the function',
    ),
    "a class without parameters": (
        lambda: fg.program(dict)(X),
        UsageError,
        "dict: its parameters cannot be read; write it with def",
    ),
    "vmap": (
        lambda: torch.vmap(lambda x: fg.attention(x[None], x[None], x[None]))(X),
        UsageError,
        "attention: kernels cannot be transformed by torch.func, as by vmap, grad or jvp; call it outside of "
        "them; many calls at once are one call with a longer batch",
    ),
    "functionalize": (
        lambda: torch.func.functionalize(lambda x: fg.attention(x, x, x))(X),
        UsageError,
        "attention: kernels cannot be transformed by torch.func, as by vmap, grad or jvp; call it outside of "
        "them; many calls at once are one call with a longer batch",
    ),
    "an operation of torch on a score": (
        lambda: fg.attention(X, X, X, score=torch.tanh),
        DtypeError,
        "attention: torch's tanh is called on an expression; fg.tanh takes it",
    ),
    "an operation of torch that there is not": (
        lambda: fg.attention(X, X, X, score=lambda s: torch.cumsum(s, 0)),
        DtypeError,
        "attention: torch's cumsum is called on an expression; fagen has operations of its own: fg.exp, ",
    ),
    "an operation of torch named as a part of this package": (
        lambda: fg.attention(X, X, X, score=torch.trace),
        DtypeError,
        "attention: torch's trace is called on an expression; fagen has operations of its own: fg.exp, ",
    ),
    "a tensor indexed by an axis": (
        lambda: fg.attention(X, X, X, score=lambda s: s + X[fg.q]),
        DtypeError,
        "attention: torch's __getitem__ is called on an expression; name the axes of the tensor: "
        'fg.capture(tensor, "b position")[fg.b, fg.q]',
    ),
    "a tensor times a score": (
        lambda: fg.attention(X, X, X, score=lambda s: X * s),
        DtypeError,
        "attention: a tensor of shape (2, 4, 8, 16) stands in an expression; name its axes: "
        'fg.capture(tensor, "b q")',
    ),
    "a number for a GPU": (
        lambda: fg.compile(head_dim=64, arch=90),
        PlanError,
        "no GPU is known as 90; arch= takes generic, ",
    ),
    "a tangent": (
        lambda: with_a_tangent(lambda x: fg.attention(x, X, X)),
        UsageError,
        "attention: a tensor carries a tangent, and kernels have no derivative in forward mode; call "
        'backward(), or torch.autograd.functional.jvp with family="reference"',
    ),
    "a tangent under torch.compile": (
        lambda: with_a_tangent(torch.compile(lambda x: fg.attention(x, X, X), backend="eager")),
        UsageError,
        "attention: a tensor carries a tangent, and kernels have no derivative in forward mode; call "
        'backward(), or torch.autograd.functional.jvp with family="reference"',
    ),
    "a constant beyond fp32": (
        lambda: fg.attention(X, X, X, score=lambda s: fg.where(fg.kv <= fg.q, s, -1e39)),
        UsageError,
        "attention: -1e+39 is too large a number; " + LARGEST,
    ),
    "an integer beyond everything": (
        lambda: fg.attention(X, X, X, score=lambda s: s + 10**39),
        UsageError,
        "attention: 10**39 is no integer of 64 bits; " + LARGEST,
    ),
    "an integer of more digits than Python writes": (
        lambda: fg.attention(X, X, X, score=lambda s: s + -(10**5000)),
        UsageError,
        "attention: -10**5000 is no integer of 64 bits; " + LARGEST,
    ),
    "a number beyond fp32 for the reference": (
        lambda: fg.attention(X, X, X, score=lambda s: s + fg.scalar(1e39, name="shift"), family="reference"),
        UsageError,
        "attention: shift is too large a number; " + LARGEST,
    ),
    "a program in another": (
        lambda: outer(X),
        UsageError,
        "outer: the program inner is called in it, and a program is called on tensors; call inner.function, "
        "which takes expressions",
    ),
    "a program in itself": (
        lambda: endless(X),
        UsageError,
        "endless: the program endless is called in it, and a program is called on tensors; call "
        "endless.function, which takes expressions",
    ),
    "no mask's name": (
        lambda: fg.attention(X, X, X, mask="causl"),
        DtypeError,
        "attention: mask is 'causl'; a mask is a condition such as fg.kv <= fg.q",
    ),
    "a mask that is not called": (
        lambda: fg.attention(X, X, X, mask=fg.causal),
        DtypeError,
        "attention: mask is the function causal; call it first: causal()",
    ),
    "mixed dtypes": (
        lambda: fg.attention(X, X, X.half()),
        DtypeError,
        "attention: the tensors that are multiplied differ in dtype: q float32, k float32, v float16; "
        "convert them to one",
    ),
    "mixed dtypes in a program": (
        lambda: softmax(X.bfloat16(), X, X),
        DtypeError,
        "softmax: the tensors that are multiplied differ in dtype: q bfloat16, k float32, v float32; "
        "convert them to one",
    ),
    "mixed devices": (
        lambda: fg.attention(X, X.to("meta"), X),
        UsageError,
        "attention: the tensors lie on different devices: q cpu, k meta, v cpu; move them to one",
    ),
    "a captured tensor elsewhere": (
        lambda: fg.attention(X, X, X, bias=tensor(8, 8, device="meta")),
        UsageError,
        "attention: the tensors lie on different devices: q cpu, k cpu, v cpu, bias meta; move them to one",
    ),
    "a dtype of another kind": (
        lambda: with_documents(X, X, X, tensor(2, 8)),
        DtypeError,
        "with_documents: doc holds float32; it is declared to hold int values",
    ),
    "a dtype kernels do not read": (
        lambda: fg.attention(X.double(), X.double(), X.double()),
        DtypeError,
        "attention: q holds float64, which kernels do not read; convert it to float32, float16 or bfloat16, "
        'or take family="reference" (float64)',
    ),
    "a head dim that does not fit": (
        lambda: fg.compile(mask=fg.causal(), head_dim=40_000, dtype="fp32", arch="sm_86"),
        PlanError,
        "head_dim 40000 in fp32 needs at least ",
    ),
    "a head dim of a call that does not fit": (
        lambda: fg.attention(*[tensor(1, 1, 2, 40_000)] * 3),
        PlanError,
        "head_dim 40000 in fp32 needs at least ",
    ),
    "a family that is not there": (
        lambda: fg.attention(X, X, X, family="sm99"),
        PlanError,
        "family 'sm99' does not run on the emulator; family= takes simt",
    ),
    "v unused": (
        lambda: without_v(X, X, X),
        UsageError,
        "without_v: no output depends on the argument v[b,hk,kv,dv]; use it, or leave it out",
    ),
    "v unused, ahead of time": (
        lambda: fg.compile(without_v, head_dim=64),
        UsageError,
        "without_v: no output depends on the argument v[b,hk,kv,dv]; use it, or leave it out",
    ),
    "head dims that differ": (
        lambda: fg.attention(X, X[..., :8], X),
        UsageError,
        "attention: q has d = 16 and k has d = 8; an axis has one length, or 1 where it broadcasts",
    ),
    "heads that do not group": (
        lambda: fg.attention(X, X[:, :3], X[:, :3]),
        UsageError,
        "attention: q has 4 query heads and k has 3 key heads; the first has to be a multiple of the second",
    ),
    "a missing dimension": (
        lambda: fg.attention(X[0], X, X),
        UsageError,
        "attention: q has the shape (4, 8, 16); it has the axes b h q d",
    ),
    "no tensor": (
        lambda: fg.attention([1.0], X, X),
        DtypeError,
        'attention: q is [1.0]; it is declared Tensor["b h q d"], a tensor of torch',
    ),
    "no head dim": (
        lambda: fg.compile(mask=fg.causal()),
        UsageError,
        "compile: the length of the axis d is not given; give head_dim",
    ),
    "an unknown GPU": (
        lambda: fg.compile(mask=fg.causal(), head_dim=64, arch="sm_70"),
        PlanError,
        "no GPU is known as 'sm_70'; arch= takes ",
    ),
    "a direction there is none of": (
        lambda: fg.compile(mask=fg.causal(), head_dim=64, direction="sideways"),
        UsageError,
        "compile: direction is 'sideways'; ",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_without_meaning_is_refused(case):
    call, kind, sentence = CALLS[case]
    with pytest.raises(FagenError) as caught:
        call().source  # noqa: B018 (a kernel ahead of time is planned when it is asked for something)
    assert str(caught.value).startswith(sentence), str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_a_head_dim_that_does_not_fit_is_told_what_would():
    with pytest.raises(PlanError) as caught:
        fg.compile(head_dim=40_000, dtype="fp32", arch="sm_86").source  # noqa: B018
    fits = int(str(caught.value).rpartition("up to ")[2].split()[0].replace(",", ""))
    assert fg.compile(head_dim=fits, dtype="fp32", arch="sm_86").source


def test_without_a_compiler_a_call_says_how_to_get_one():
    with pytest.raises(ToolchainError) as caught:
        fg.attention(UNSEEN, UNSEEN, UNSEEN)
    said = str(caught.value)
    assert said.startswith("a C++ compiler is needed, by nvcc and by the emulator, and was not found")
    assert "(Debian: apt install g++)" in said


def test_without_nvcc_resources_say_how_to_get_it():
    kernel = fg.compile(head_dim=64)
    assert kernel.source
    with pytest.raises(ToolchainError) as caught:
        kernel.resources  # noqa: B018
    assert str(caught.value).startswith("nvcc is needed to compile a kernel and was not found")
    assert "pip install '.[nvcc]'" in str(caught.value)


# ------------------------------------------------------------------------------------ by the command line


COMMANDS = {
    "unknown mask": (["--mask", "causl"], "--mask: causl is no name of the library; did you mean causal?"),
    "negative window": (
        ["--mask", "sliding_window(-1)"],
        "sliding_window: left is -1; it is 0 or more",
    ),
    "wrong axis in a mask": (
        ["--mask", "size('page') < q"],
        "attention: the length of page is used, and no argument has that axis; the axes are b, d, ",
    ),
    "score as a mask": (
        ["--mask", "softcap(3)"],
        "attention: mask is the function <lambda>; a mask is a condition such as fg.kv <= fg.q; a function "
        "of the score is given as score=",
    ),
    "head dim": (
        ["--head-dim", 40_000, "--dtype", "fp32", "--arch", "sm_86"],
        "head_dim 40000 in fp32 needs at least ",
    ),
    "head dim 0": (["--head-dim", 0], "compile: head_dim is 0; it is a whole number from 1 on"),
    "dtype": (["--dtype", "fp8"], "compile: dtype is 'fp8'; it is fp32, fp16 or bf16"),
    "arch": (["--arch", "sm_70"], "no GPU is known as 'sm_70'; arch= takes "),
    "family": (
        ["--family", "sm99", "--arch", "A100"],
        "family 'sm99' does not run on A100 (sm_80); family= takes simt",
    ),
    "direction": (["--direction", "sideways"], "compile: direction is 'sideways'; "),
    "heads": (
        ["--q-heads", 6, "--kv-heads", 4],
        "--q-heads is 6 and --kv-heads is 4; the first has to be a multiple of the second",
    ),
    "no program's name": (["--program", "mine"], "--program: 'mine' names no program; write FILE.py:NAME"),
    "no file": (["--program", "none.py:f"], "--program: there is no file none.py; write FILE.py:NAME"),
    "let": (["--let", "r"], "--let: 'r' gives no number; write --let r=64"),
    "let an axis have half a position": (
        ["--let", "r=2.5"],
        "--let: r is 2.5; the length of an axis is a whole number",
    ),
    "let an axis have no end": (["--let", "r=inf"], "--let: r is inf; the length of an axis is a whole"),
    "let an axis that is not there": (
        ["--let", "r=64"],
        "compile: sizes names r, which is no axis of fixed length; those are d, dv",
    ),
}


@pytest.mark.parametrize("command", ["emit", "explain", "run"])
@pytest.mark.parametrize("case", COMMANDS)
def test_a_mistaken_option_is_answered_in_one_sentence(command, case):
    options, sentence = COMMANDS[case]
    said = mistake(command, *options, *(["--device", "emulator"] if command == "run" else []))
    assert said.startswith(sentence), said


OF_PROGRAMS = {
    "wrong_axis": "wrong_axis: dot is over dv, an axis that q[b,h,q,d] does not have; its axes: b h q d",
    "without_v": "without_v: no output depends on the argument v[b,hk,kv,dv]; use it, or leave it out of",
    "unknown_mask": "{path}, line 19: AttributeError: module 'fagen' has no attribute 'causl'",
    "other_axis": "compile: the length of the axis page is not given; give sizes={{'page': ...}}, or --let ",
    "undeclared": "undeclared: the parameter q declares no axes and has no default; write q: ",
    "number": "--program: number of {path} is 3; it is a function, marked with @fg.program",
    "none": "--program: {path} has no none; its programs are wrong_axis, without_v, unknown_mask, other_axis",
}


@pytest.mark.parametrize("command", ["emit", "run"])
@pytest.mark.parametrize("name", OF_PROGRAMS)
def test_a_mistaken_program_is_answered_in_one_sentence(programs: Path, command: str, name: str):
    said = mistake(command, "--program", f"{programs}:{name}")
    assert said.startswith(OF_PROGRAMS[name].format(path=programs)), said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def f(:\n", "line 1: SyntaxError: "),
        ("\n\nimport nothing_of_this_name\n", "line 3: ModuleNotFoundError: No module named 'nothing_of"),
        ("x = 1\ny = x / 0\n", "line 2: ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_python_refuses_is_told_by_its_line(tmp_path: Path, text: str, sentence: str):
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert mistake("emit", "--program", f"{path}:f").startswith(f"{path}, {sentence}")


def test_a_program_stands_alone(programs: Path):
    said = mistake("emit", "--program", f"{programs}:without_v", "--mask", "causal")
    assert said == ("--program stands beside --mask, --score or --dropout; write them into the program")


RUNS = {
    "device": (["--device", "tpu"], "--device is 'tpu'; it is gpu or emulator"),
    "schedule": (
        ["--schedule", "sideways"],
        "--schedule is 'sideways'; it is forward, backward or the seed of a random one",
    ),
    "race on a GPU": (["--race", "--device", "gpu"], "--race is of the emulator; leave --device gpu out"),
    "both checkers": (
        ["--race", "--sanitize"],
        "--race and --sanitize watch different runs; give one of them at a time",
    ),
    "no compiler": (
        ["--device", "emulator"],
        "a C++ compiler is needed, by nvcc and by the emulator, and was",
    ),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_mistaken_run_is_answered_in_one_sentence(case):
    options, sentence = RUNS[case]
    assert mistake("run", "--q-len", 8, *options).startswith(sentence)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    said = mistake("run", "--device", "gpu")
    assert said.startswith("--device gpu: torch sees no CUDA device; --device emulator runs the same kernel")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [("2.5", "w is 2.5; it is declared a whole number"), ("nan", "w is nan; it is declared a whole number")],
)
def test_a_whole_number_is_no_fraction(programs: Path, value: str, sentence: str):
    options = ["--program", f"{programs}:windowed", "--let", f"w={value}", "--device", "emulator"]
    assert mistake("run", *options) == sentence


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    said = mistake("emit", "--out", out)
    assert said == f"--out: {out} cannot be written (Not a directory); name a folder that can"


@pytest.mark.parametrize("below", ["", "out"])
def test_a_folder_that_a_kernel_cannot_be_saved_to(tmp_path: Path, below: str):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / below
    with pytest.raises(UsageError) as caught:
        fg.compile(head_dim=16).save(folder)
    reason = "Not a directory" if below else "File exists"
    assert str(caught.value) == f"save: {folder} cannot be written ({reason}); name a folder that can"


def test_a_kernel_for_groups_of_heads_is_for_no_others():
    lengths = {"b": 1, "hk": 2, "g": 4, "q": 1, "kv": 500, "d": 16, "dv": 16}
    graph = attention_graph(mask=fg.causal()).graph
    problem = problem_of(graph, "emulator", None, ("fp32",) * 3, lengths)
    kernel = Kernel(compile_problem(problem), (), Options())
    given = tensor(1, 4, 1, 16), tensor(1, 2, 500, 16), tensor(1, 2, 500, 16)
    with pytest.raises(UsageError, match=r"group is 2, and the kernel was compiled for 4; compile a kernel"):
        kernel(*given)


def test_a_dump_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FAGEN_DUMP", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"FAGEN_DUMP names .*file, which cannot be written \(.*; name a"):
        fg.attention(UNSEEN, UNSEEN, UNSEEN)


def test_more_than_memory_holds_is_told():
    options = ["--device", "emulator", "--q-len", 2**31 - 1, "--q-heads", 4096, "--batch", 64]
    said = mistake("run", *options)
    assert said == "the run does not fit the memory of the device; shorter lengths, or fewer heads, may"


def test_a_ladder_of_no_dtype():
    assert mistake("ladder", "--dtype", "fp8") == "--dtype is 'fp8'; it is fp32, fp16, bf16"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["emit", "--no-such-option"], "no-such-option"),
        (["emit", "--head-dim", "many"], "head-dim"),
        (["emit", "--dropout", "2"], "dropout"),
        (["emit", "--batch", "-1"], "batch"),
        (["run", "--seed", "-1"], "seed"),
        (["run", "--seed", str(2**64)], "seed"),
        (["ladder", "--matmul", "0"], "matmul"),
        (["mend"], "mend"),
    ],
)
def test_a_misused_option_exits_with_2(arguments: list[str], said: str):
    done = fagen(*arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert "Traceback" not in done.err


TRUE = shutil.which("true")


@pytest.mark.skipif(not TRUE, reason="needs a program called true")
def test_a_compiler_that_makes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAGEN_CXX", str(TRUE))
    x = tensor(1, 1, 3, 8)
    with pytest.raises(FagenError, match=r"^true made nothing of .*; point FAGEN_CXX at a C\+\+ compiler$"):
        fg.attention(x, x, x)
