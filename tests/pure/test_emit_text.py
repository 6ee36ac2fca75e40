"""The emitted file as a whole: the same for the same meaning, nothing in it unused, laid out, and quick."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import fagen as fg
from fagen.emit.params import Field, pack, struct_format
from fagen.emit.program import Emitted, emit
from fagen.emit.render import TemplateError, laid_out, render
from fagen.errors import UsageError
from fagen.ir.graph import Graph, Input
from fagen.lang.attention import attention
from fagen.paths import templates_dir
from fagen.plan.plan import Plan, Problem
from fagen.plan.planner import plan
from fagen.run.source import without_comments

ROOT = Path(__file__).parents[2]
TEMPLATES = sorted(templates_dir().rglob("*.j2"))

IDS = torch.tensor([[0, 0, 1, 1]])


def emitted(graph: Graph, head_dim: int = 64, **rest: object) -> Emitted:
    return emit(planned(graph, head_dim, **rest))


def planned(graph: Graph, head_dim: int = 64, **rest: object) -> Plan:
    kinds = {"float": rest.pop("storage", "fp16"), "int": "int32", "bool": "bool"}
    inputs = tuple(kinds[a.stored] for a in graph.arguments if isinstance(a, Input))
    sizes = (("d", head_dim), ("dv", head_dim))
    return plan(Problem(graph, "A100", "simt", sizes, inputs, **rest))  # type: ignore[arg-type]


GRAPHS: dict[str, Callable[[], Graph]] = {
    "plain": lambda: attention().graph,
    "causal with statistics": lambda: attention(mask=fg.causal(), return_lse=True).graph,
    "window and cap": lambda: attention(mask=fg.sliding_window(100, 3), score=fg.softcap(30.0)).graph,
    "documents": lambda: attention(mask=fg.document(IDS) & fg.causal()).graph,
    "unsorted documents": lambda: attention(mask=fg.document(IDS)).graph,
    "flags": lambda: attention(mask=fg.global_tokens(torch.tensor([True])) | fg.sliding_window(4)).graph,
    "slopes": lambda: attention(score=fg.alibi(), mask=fg.causal()).graph,
    "dropout": lambda: attention(dropout=0.1).graph,
    "sink": lambda: attention(sink=torch.zeros(2), return_lse=True).graph,
    "a scalar": lambda: attention(scale=fg.scalar(0.5)).graph,
    "block diffusion": lambda: attention(mask=fg.block_diffusion(150, 16)).graph,
}


@pytest.fixture(params=list(GRAPHS), scope="module")
def text(request: pytest.FixtureRequest) -> str:
    return emitted(GRAPHS[request.param]()).text


def test_every_line_fits_and_is_indented_by_its_braces(text: str) -> None:
    depth, starts = 0, True
    for number, line in enumerate(text.split("\n"), 1):
        assert len(line) <= 110, (number, line)
        assert line == line.rstrip(), (number, line)
        code = re.sub(r'//.*|"[^"]*"', "", line).strip()
        if code and starts and not line.startswith("#"):
            closing = len(code) - len(code.lstrip("}"))
            assert len(line) - len(line.lstrip()) == 2 * (depth - closing), (number, line)
        depth += code.count("{") - code.count("}")
        if code:
            starts = line.startswith("#") or code[-1] in ";{}"
    assert depth == 0
    assert "\n\n\n" not in text


def test_nothing_is_declared_and_not_used(text: str) -> None:
    code = without_comments(text)
    params = re.search(r"struct Params \{(.*?)\};", code, re.DOTALL)
    assert params is not None
    for name in re.findall(r"\*?(\w+)\s*[,;]", params[1]):
        assert re.search(rf"\bp\.{name}\b", code), f"parameter {name}"
    for name in re.findall(r"\bconstexpr \w+ (.*?);", code):
        for constant in re.findall(r"(\w+) =", name):
            assert len(re.findall(rf"\b{constant}\b", code)) > 1, f"constant {constant}"
    for struct, body in re.findall(r"struct (Block|Row|Column) \{(.*?)\};", code, re.DOTALL):
        for name in re.findall(r"(\w+)(?:\[\w+\])?(?: = [^,;]*)?[,;]", body):
            assert len(re.findall(rf"\.{name}\b", code)) > 1, f"{struct}.{name}"
    for name in re.findall(r"__forceinline__ \w+ (\w+)\(", code):
        assert len(re.findall(rf"\b{name}\b", code)) > 1, f"function {name}"
    for names in re.findall(r"^\s*(?:const )?(?:int|float|bool|int64) (\w+) = ", code, re.MULTILINE):
        assert len(re.findall(rf"\b{names}\b", code)) > 1, f"local {names}"


def test_what_tests_of_a_row_share_is_computed_beside_them() -> None:
    near = fg.minimum(fg.maximum(fg.q, 8), 68)
    at_end, mask = near == fg.size("kv"), fg.causal()
    asked = {"mask": (mask & ~at_end) | (~mask & at_end), "head_dim": 64, "family": "sm80", "arch": "A100"}
    body = re.search(r"void mask\(.*?\n}\n", fg.compile(**asked).source, re.DOTALL)
    assert body is not None
    names = set(re.findall(r"(?<![.\w])n\d+\b", body[0]))
    assert names
    assert all(f"const int {name} = " in body[0] for name in names)


def test_the_only_parameter_is_the_struct(text: str) -> None:
    kernels = re.findall(r"__global__ void [^(]*\([^)]*\) (\w+)\(([^)]*)\)", text)
    assert kernels
    assert all(parameters == "const __grid_constant__ Params p" for _, parameters in kernels)


def test_a_fused_kernel_is_short() -> None:
    lines = {}
    for name, graph in GRAPHS.items():
        made = emitted(graph()).text
        lines[name] = made[made.rindex("constexpr int BLOCK_Q") :].count("\n")
    assert lines["plain"] <= 170
    assert max(lines.values()) <= 220, lines


def test_fields_are_those_the_text_reads_in_its_order() -> None:
    made = emitted(GRAPHS["dropout"]())
    struct = re.search(r"struct Params \{(.*?)\};", without_comments(made.text), re.DOTALL)
    assert struct is not None
    assert re.findall(r"\*?(\w+)\s*[,;]", struct[1]) == [field.name for field in made.params]
    by_name = {field.name: field for field in made.params}
    assert by_name["Q"].source == ("data", ("argument", 0))
    assert by_name["K_kv"].source == ("stride", ("argument", 1), 2)
    assert by_name["kv_len"].source == ("length", "kv")
    assert by_name["seed"] == Field("seed", "const uint64*", ("seed",))


def test_the_structs_bytes_are_aligned_as_in_c() -> None:
    fields = [
        Field("a", "const fp16*", ("data", ("argument", 0))),
        Field("b", "int32", ("length", "q")),
        Field("c", "float", ("scalar", 1)),
        Field("d", "bool", ("scalar", 2)),
    ]
    packed = pack(fields, [1 << 40, -2, 0.5, True])
    assert len(packed) == 24
    assert packed[:8] == (1 << 40).to_bytes(8, "little")
    assert packed[8:12] == (-2).to_bytes(4, "little", signed=True)
    assert packed[16] == 1
    assert struct_format(fields)[0] == "@"


@pytest.mark.parametrize(
    ("family", "direction", "dtypes"),
    [
        ("simt", "forward", ("bf16", "fp16", "fp32")),
        ("sm80", "forward", ("bf16", "fp16")),
        ("sm90", "forward", ("bf16", "fp16")),
        ("sm80", "backward", ("bf16",)),
    ],
)
def test_the_hardware_s_tanh_is_for_16_bits_and_can_be_switched_off(
    family: str, direction: str, dtypes: Sequence[str]
) -> None:
    """A tensor in fp32 that scores are made of changes nothing: those are in fp32 in any case."""
    for dtype in dtypes:
        for exact in (False, True):
            kernel = fg.compile(
                score=[fg.softcap(30.0, exact), fg.temperature(torch.ones(4))],
                sink=torch.zeros(4),
                head_dim=64,
                dtype=dtype,
                arch="H100",
                family=family,
                direction=direction,
            )
            fast = dtype != "fp32" and not exact
            assert ("tanh_approx(" in kernel.source, "tanhf(" in kernel.source) == (fast, not fast), dtype


def test_a_program_without_features_is_as_its_tensors_are() -> None:
    @fg.program
    def mean(q: fg.Tensor["b q"], k: fg.Tensor["b kv"], v: fg.Tensor["b kv"]):
        w = fg.softmax(fg.tanh(q * k), over="kv")
        return fg.sum(w * v, over="kv")

    for storage, fast in (("bf16", True), ("fp32", False)):
        text = emitted(mean.trace().graph, storage=storage).text
        assert ("tanh_approx(" in text, "expf(" in text) == (fast, not fast), storage


# ------------------------------------------------------------------------------------- the same for the same


def retyped() -> Graph:
    """Causal attention with a cap and slopes, every name another, terms in another order."""

    @fg.program
    def unlike(
        x: fg.Tensor["b h q d"],
        y: fg.Tensor["b hk kv d"],
        z: fg.Tensor["b hk kv dv"],
        w: fg.Tensor["h"],  # noqa: UP037
    ):
        u = fg.rsqrt(fg.size("d")) * fg.dot(y, x, over="d")
        u = 20.0 * fg.tanh(u / 20.0)
        u = (fg.kv - fg.q) * w + u
        u = fg.where(fg.q + fg.size("kv") < fg.kv + fg.size("q"), -fg.inf, u)
        top = fg.max(u, over="kv")
        e = fg.exp(u - top)
        return fg.dot(z, e / fg.sum(e, over="kv"), over="kv")

    return unlike.trace().graph


def library() -> Graph:
    @fg.program
    def known(
        q: fg.Tensor["b h q d"],
        k: fg.Tensor["b hk kv d"],
        v: fg.Tensor["b hk kv dv"],
        slopes: fg.Tensor["h"],  # noqa: UP037
    ):
        s = fg.dot(q, k, over="d") * fg.rsqrt(fg.size("d"))
        s = fg.tanh(s / 20.0) * 20.0
        s = s + slopes * (fg.kv - fg.q)
        s = fg.where(fg.kv <= fg.q + (fg.size("kv") - fg.size("q")), s, -fg.inf)
        return fg.dot(fg.softmax(s, over="kv"), v, over="kv")

    return known.trace().graph


def test_other_names_and_another_order_give_the_same_code() -> None:
    first, second = emitted(library()), emitted(retyped())
    assert first.text != second.text, "the comments have the user's names"
    assert without_comments(first.text) == without_comments(second.text)
    assert [(f.name, f.ctype, f.source) for f in first.params] == [
        (f.name, f.ctype, f.source) for f in second.params
    ]


_EMIT = """
import sys
from tests.pure.test_emit_text import GRAPHS, emitted
print(hash("hash"), file=sys.stderr)
for name, graph in GRAPHS.items():
    print(emitted(graph()).text)
"""


def test_every_process_gives_the_same_text() -> None:
    """Another process, of another PYTHONHASHSEED than this one's."""
    seed = "0" if os.environ.get("PYTHONHASHSEED") == "77" else "77"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _EMIT], env=environment, capture_output=True, text=True, check=True
    )
    assert hash("hash") != int(done.stderr), "both processes have the same seed"
    assert done.stdout == "".join(emitted(graph()).text + "\n" for graph in GRAPHS.values())


def test_a_new_program_in_a_running_process_takes_little_time() -> None:
    emitted(attention(mask=fg.causal()).graph)
    times = []
    for window in range(5):
        graph = attention(mask=fg.sliding_window(100 + window), score=fg.softcap(10.0 + window)).graph
        made = planned(graph)
        start = time.process_time()
        emit(made)
        times.append(time.process_time() - start)
    assert min(times) < 0.04


# -------------------------------------------------------------------------------------------------- templates


def test_templates_hold_no_formula() -> None:
    words = re.compile(r"\b(exp|exp2|expf|tanh|softmax|causal|sigmoid|rsqrt|log|window)\b")
    assert len(TEMPLATES) > 10
    for path in TEMPLATES:
        found = words.findall(path.read_text(encoding="utf-8"))
        assert not found, f"{path.name}: {found}"


def test_no_six_equal_lines_stand_in_two_templates() -> None:
    seen: dict[tuple[str, ...], Path] = {}
    for path in TEMPLATES:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        for i in range(len(lines) - 5):
            six = tuple(lines[i : i + 6])
            assert seen.setdefault(six, path) == path, f"{path.name} and {seen[six].name}: {six}"


def test_an_error_in_a_template_names_the_macro(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fagen.emit import render as module

    (tmp_path / "outer.j2").write_text('%% import "inner.j2" as inner with context\n${ inner.step(1) }\n')
    (tmp_path / "inner.j2").write_text("%% macro step(x)\nint y = ${ missing };\n%% endmacro\n")
    monkeypatch.setattr(module, "templates_dir", lambda: tmp_path)
    module._environment.cache_clear()
    try:
        with pytest.raises(TemplateError, match=r"'missing' is undefined.*inner.j2:2 \(macro step\)"):
            render("outer.j2")
    finally:
        module._environment.cache_clear()


def test_a_number_divides_scores_in_both_directions() -> None:
    """What is made of sizes and numbers alone is one constant, and no product of others."""
    for direction in ("forward", "backward"):
        kernel = fg.compile(head_dim=16, dtype="fp16", direction=direction, score=fg.temperature(1.7))
        assert "rsqrt(head_dim)" in kernel.source


def test_layout() -> None:
    raw = "void f() {\nif (x) {\n~\n\ny = 1;  // one\nlonger = 2;  // two\n~\n}\n~\n~\n}\n"
    assert laid_out(raw) == (
        "void f() {\n  if (x) {\n    y = 1;       // one\n    longer = 2;  // two\n  }\n}\n"
    )
    several = laid_out(f"enum {{\n{', '.join(f'NAME_{i} = {i:06}' for i in range(8))};\n}}\n").split("\n")
    assert several[1].endswith(",")
    assert all(len(line) <= 110 for line in several)
    words = " ".join("word" for _ in range(21))
    prose = laid_out(f"namespace a {{\n// {words} end\n// {words}\n// new\n}}\n").split("\n")
    assert prose[1:4] == [f"  // {words}", f"  // end {words[:-5]}", "  // word new"]
    equations = laid_out(f"namespace a {{\n// x = {words} end\n// y += {words}\n// {words}.\n}}\n").split(
        "\n"
    )
    starts = [line.lstrip()[:5] for line in equations[1:-2]]
    assert starts == ["// x ", "//   ", "// y ", "//   ", "// wo"]
    long = f"const bool wide = {' && '.join(f'(first{i} || second{i})' for i in range(9))};"
    lines = laid_out(long).split("\n")
    assert len(lines) == 4
    loop, step = "for (int i = 0; i < COUNT; ++i)", f"sum = add({', '.join(f'term{i}' for i in range(12))});"
    assert laid_out(f"{loop} {step}") == f"{loop}\n    {step}\n"
    copied, each = "fill<THREADS, HEAD_DIM>(tile, 0, minimum(BLOCK, p.length),", "[&](int i, int d) {"
    made = f"return Vec<float, 2>{{{', '.join(f'value{i}' for i in range(8))}}}; }});"
    assert laid_out(f"{copied} {each} {made}") == f"{copied}\n    {each}\n    {made}\n"
    assert all(len(line) <= 110 and not re.search(r"\(\w+ \|\|$", line) for line in lines)


# ----------------------------------------------------------------------------------------- deep formulas


def _nested(rounds: int, direction: str = "forward") -> fg.Kernel:
    def score(s: fg.Expr) -> fg.Expr:
        for i in range(rounds):
            s = fg.where(s > i, fg.tanh(s) + i, s * 0.5) if i < 12 else fg.tanh(s) + i
        return s

    return fg.compile(score=score, head_dim=16, dtype="fp32", direction=direction)


@pytest.mark.parametrize(("rounds", "direction"), [(140, "forward"), (30, "backward")])
def test_deep_formulas_are_emitted_and_long_ones_cut_in_comments(rounds: int, direction: str) -> None:
    limit = sys.getrecursionlimit()
    with ThreadPoolExecutor(1) as pool:  # whose stack is smaller
        text = pool.submit(lambda: _nested(rounds, direction).source).result()
    assert sys.getrecursionlimit() == limit
    assert text.count("tanhf(") >= rounds
    assert len(text) < 60_000


def test_a_formula_that_is_too_deep_is_refused() -> None:
    with pytest.raises(UsageError, match=r"attention: the output out nests 6\d\d operations in one another"):
        _nested(300)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_what_is_drawn_is_of_rows_that_follow_each_other(dropout: float) -> None:
    """Where a warp has two sets of rows far apart, each may be left out: bits are drawn for all at once."""
    kernel = fg.compile(
        head_dim=96,
        dtype="bf16",
        arch="RTX 4090",
        family="sm80",
        mask=fg.sliding_window(700, 0),
        dropout=dropout,
    )
    text = kernel.compiled.candidate(0).emitted.text
    assert ("by_sets" in text, "drawn.draw<" in text) == (not dropout, bool(dropout))
