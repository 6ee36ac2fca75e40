"""Calls and kernels where no compiler runs: errors by their text, shapes, the reference, candidates."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import fagen as fg
from fagen.calls.values import aligned, read, side_by_side
from fagen.compile import Compiled, compile_problem, graph_digest, judged
from fagen.errors import BuildError, DtypeError, PlanError, UsageError
from fagen.lang.attention import attention as traced_attention
from fagen.plan import planner
from fagen.plan.arch import arch_for
from fagen.run.build import Built, Resources
from fagen.run.toolchain import Target
from fagen.study.explain import explain
from fagen.torch_op import Call

compiling = sys.modules["fagen.compile"]  # `fagen.compile` is the function

Q, K, V, H = (fg.Tensor[axes] for axes in ("b h q d", "b hk kv d", "b hk kv dv", "h"))
IDS = fg.Tensor["b kv", int]


@fg.program
def scaled(q: Q, k: K, v: V, slopes: H, strength: fg.Scalar, width: fg.Scalar[int], ids: IDS):
    s = strength * fg.dot(q, k, over="d") + slopes * (fg.kv - fg.q)
    s = fg.where((fg.q - fg.kv < width) & (ids >= 0), s, -fg.inf)
    return fg.dot(fg.softmax(s, over="kv"), v, over="kv")


def arguments(**changed: Any) -> dict[str, Any]:
    given = {
        "q": torch.zeros(2, 4, 5, 8),
        "k": torch.zeros(2, 2, 7, 8),
        "v": torch.zeros(2, 2, 7, 3),
        "slopes": torch.zeros(4),
        "strength": 1.0,
        "width": 3,
        "ids": torch.zeros(2, 7, dtype=torch.int64),
    }
    return {**given, **changed}


# -------------------------------------------------------------------------------------- errors of a call


BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "number for a tensor": (
        {"v": 3},
        TypeError,
        r'scaled: v is 3; it is declared Tensor\["b hk kv dv"\], a tensor of torch',
    ),
    "array for a tensor": ({"v": torch.zeros(2, 2, 7, 3).numpy()}, TypeError, r"scaled: v is a ndarray; "),
    "tensor for a number": (
        {"strength": torch.ones(())},
        TypeError,
        r"scaled: strength is a tensor of shape \(\); it is declared a number; "
        r'a value on the device is declared Tensor\[""\]',
    ),
    "fraction for a whole number": (
        {"width": 2.5},
        TypeError,
        r"scaled: width is 2.5; it is declared a whole number",
    ),
    "truth for a number": ({"strength": True}, TypeError, r"scaled: strength is True"),
    "text for a number": ({"strength": "1"}, TypeError, r"scaled: strength is '1'"),
    "sparse": ({"v": torch.zeros(2, 2, 7, 3).to_sparse()}, TypeError, r"scaled: v is a sparse_coo tensor"),
    "nested": (
        {"v": torch.nested.nested_tensor([torch.zeros(2, 7, 3), torch.zeros(2, 5, 3)])},
        TypeError,
        r"scaled: v is a nested tensor; dense tensors",
    ),
    "devices": (
        {"k": torch.zeros(2, 2, 7, 8, device="meta")},
        ValueError,
        r"scaled: the tensors lie on different devices: q cpu, k meta, v cpu, slopes cpu, ids cpu; "
        r"move them to one",
    ),
    "dtypes": (
        {"q": torch.zeros(2, 4, 5, 8).half(), "k": torch.zeros(2, 2, 7, 8).bfloat16()},
        TypeError,
        r"scaled: the tensors that are multiplied differ in dtype: q float16, k bfloat16, v float32; "
        r"convert them to one",
    ),
    "integers for floats": ({"v": torch.zeros(2, 2, 7, 3).int()}, TypeError, r"scaled: v holds int32; "),
    "floats for integers": ({"ids": torch.zeros(2, 7)}, TypeError, r"scaled: ids holds float32; "),
    "complex": ({"slopes": torch.zeros(4).cfloat()}, TypeError, r"scaled: slopes holds complex64; "),
    "double": (
        {name: arguments()[name].double() for name in "qkv"},
        TypeError,
        r"scaled: q holds float64, which kernels do not read; convert it to float32, float16 or bfloat16, "
        r'or take family="reference"',
    ),
    "short integers": (
        {"ids": torch.zeros(2, 7, dtype=torch.int16)},
        TypeError,
        r"scaled: ids holds int16, which kernels do not read; convert it to int32 or int64",
    ),
    "rank": (
        {"k": torch.zeros(2, 7, 8)},
        ValueError,
        r"scaled: k has the shape \(2, 7, 8\); it has the axes b hk kv d",
    ),
    "lengths": (
        {"v": torch.zeros(2, 2, 9, 3)},
        ValueError,
        r"scaled: k has kv = 7 and v has kv = 9; an axis has one length, or 1 where it broadcasts",
    ),
    "heads": ({"q": torch.zeros(2, 5, 5, 8), "slopes": torch.zeros(5)}, ValueError, r"5 query heads"),
    "unknown name": ({"w": 1}, ValueError, r"scaled: the argument w is unknown; it takes q, k, v, "),
    "family": (
        {"family": "sm9000"},
        PlanError,
        r"family 'sm9000' does not run on the emulator; family= takes simt",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_call_without_meaning_is_refused_before_anything_is_compiled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "compile_text", lambda *_, **__: pytest.fail("compiled"))
    changed, kind, text = BAD_CALLS[name]
    program = scaled.options(family=changed.get("family"))
    given = arguments(**{key: value for key, value in changed.items() if key != "family"})
    with pytest.raises(kind, match=text) as error:
        program(**given)
    assert isinstance(error.value, fg.FagenError)
    assert "\n" not in str(error.value)


def test_what_torch_jit_records_is_refused() -> None:
    attend: Any = lambda q: fg.attention(q, q, q, family="reference")  # noqa: E731
    attend(torch.zeros(1, 1, 4, 8))
    with pytest.raises(
        UsageError, match=r"attention: torch.jit.trace records .*torch.compile and torch.export"
    ):
        torch.jit.trace(attend, (torch.zeros(1, 1, 4, 8),))


def test_a_missing_argument_is_named() -> None:
    given = arguments()
    del given["width"], given["ids"]
    with pytest.raises(UsageError, match=r"scaled: width, ids was not given; it takes q, k, v"):
        scaled(**given)


def test_a_number_beyond_its_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def launch(self, *args: Any, **kwargs: Any) -> None: ...

    monkeypatch.setattr(Compiled, "emulated_recipe", property(lambda self: self.chosen.recipe))
    monkeypatch.setattr(Compiled, "emulated", lambda self, checker: Nothing())
    scaled(**arguments())
    with pytest.raises(
        UsageError, match=r"scaled: a number does not fit its parameter.*width = 2,147,483,648"
    ):
        scaled(**arguments(width=2**31))
    for number in (1e39, -3.5e38, 10**400):
        with pytest.raises(UsageError, match=r"scaled: strength is too large a number; .* 3\.4e38"):
            scaled(**arguments(strength=number))
    scaled(**arguments(strength=math.inf))
    scaled(**arguments(strength=-3.4e38))


# ------------------------------------------------------------------------------ shapes, reference, operator


def test_only_rows_with_features_side_by_side_are_read_16_bytes_at_a_time() -> None:
    """An expanded tensor, as the gradient of a sum is, has none, though its strides are all multiples."""
    graph = traced_attention().graph
    plain = torch.zeros(1, 2, 8, 16).half()
    one = torch.zeros(1, 2, 8, 1).half()
    for k, expected in (
        (plain, True),
        (plain[:, :1, :1].expand_as(plain), True),
        (one.expand_as(plain), False),
        (plain.flatten()[:1].view(1, 1, 1, 1).expand_as(plain), False),
        (plain.transpose(2, 3).contiguous().transpose(2, 3), False),
        (torch.zeros(1, 2, 8, 17).half()[..., :16], False),
        (torch.zeros(1, 2, 8, 17).half()[..., 1:], False),
    ):
        assert aligned(read(graph, (plain, k, plain))) == (() if expected else (True, False, True))
        copied = side_by_side(k)
        assert (copied is k) == expected
        assert torch.equal(copied, k)
        assert aligned(read(graph, (plain, copied, plain))) == ()
    for other in (one.float().expand(1, 2, 8, 16), one.expand(1, 2, 8, 17), one.sum()):
        assert side_by_side(other) is other, "a copy is read no better"


def test_meta_tensors_get_outputs_that_are_only_shapes() -> None:
    given = {name: v.to("meta") if isinstance(v, Tensor) else v for name, v in arguments().items()}
    given |= {name: given[name].bfloat16() for name in "qkv"}
    out = scaled(**given)
    assert (out.shape, out.dtype, out.device.type) == ((2, 4, 5, 3), torch.bfloat16, "meta")
    q, k, v = (given[name].transpose(1, 2) for name in "qkv")
    out, lse = fg.attention(q, k, v, layout="bshd", return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 5, 4, 3), (2, 4, 5), torch.float32)
    assert out.is_contiguous()


def test_fake_tensors_get_fake_outputs() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(2, 4, 5, 8, dtype=torch.float16) for _ in range(3))
        out, lse = fg.attention(q, k, v, mask=fg.causal(), return_lse=True)
    assert isinstance(out, FakeTensor)
    assert (out.shape, out.dtype, lse.dtype) == ((2, 4, 5, 8), torch.float16, torch.float32)


def test_the_reference_family_is_differentiable_in_float64() -> None:
    make = torch.Generator().manual_seed(0)
    given = [
        torch.randn(shape, generator=make, dtype=torch.float64, requires_grad=True)
        for shape in ((1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 3), (2, 3, 4))
    ]

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        mask = fg.causal() | (fg.kv == 0)
        return fg.attention(q, k, v, bias=bias, mask=mask, return_lse=True, family="reference")

    assert all(output.dtype == torch.float64 for output in call(*given))
    assert torch.autograd.gradcheck(call, given)


def test_the_reference_family_rounds_to_the_dtypes_of_a_kernel() -> None:
    given = [torch.randn(1, 2, 5, 8).bfloat16() for _ in range(3)]
    out, lse = fg.attention(*given, return_lse=True, family="reference")
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    exact, _ = fg.attention(*(x.double() for x in given), return_lse=True, family="reference")
    assert torch.equal(out, exact.bfloat16())


def test_b42_autocast_returns_gradients_in_each_inputs_own_dtype() -> None:
    q, k = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(2))
    v = torch.randn(1, 2, 5, 8).bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fg.attention(q, k, v, family="reference")
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert [x.grad.dtype for x in (q, k, v)] == [torch.float32, torch.float32, torch.bfloat16]
    compiled = torch.compile(lambda q, k, v: fg.attention(q, k, v, family="reference"), backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(q, k, v), out)
    assert compiled(q, k, k).dtype == torch.float32


def test_torch_compile_gets_an_operator_with_a_gradient() -> None:
    mask = fg.causal()
    bend = 2.0

    def score(s: Any) -> Any:
        return s * bend

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fg.attention(q, k, v, mask=mask, score=score, family="reference") + 1

    given = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    whole = torch.__version__ >= "2.13"  # older ones break the graph at a mask made outside
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=whole)
    torch.testing.assert_close(compiled(*given), layer(*given))
    bend = 0.5  # what a score reads is read again at each call
    torch.testing.assert_close(compiled(*given), layer(*given))
    given[0].requires_grad_()
    out = compiled(*given)
    assert out.requires_grad
    (found,) = torch.autograd.grad(out.square().sum(), given[0])
    (expected,) = torch.autograd.grad(layer(*given).square().sum(), given[0])
    torch.testing.assert_close(found, expected)
    dynamic = torch.compile(layer, backend="aot_eager", fullgraph=whole, dynamic=True)
    with torch.no_grad():
        for length in (3, 4, 9):
            q = torch.randn(1, 2, length, 8)
            torch.testing.assert_close(dynamic(q, *given[1:]), layer(q, *given[1:]))


def test_gradients_of_a_program_with_numbers_are_compiled() -> None:
    exact, given = scaled.options(family="reference"), arguments(strength=0.5)
    given["q"] = torch.randn(2, 4, 5, 8, requires_grad=True)
    compiled = torch.compile(lambda: exact(**given), backend="eager")
    (found,) = torch.autograd.grad(compiled().square().sum(), given["q"])
    (expected,) = torch.autograd.grad(exact(**given).square().sum(), given["q"])
    torch.testing.assert_close(found, expected)


def test_what_a_score_captures_has_its_gradient_under_torch_compile() -> None:
    table = torch.randn(2, 9, requires_grad=True)
    score, given = fg.relative_bias(table), [torch.randn(1, 2, 5, 8) for _ in range(3)]
    compiled = torch.compile(
        lambda q: fg.attention(q, *given[1:], score=score, family="reference"), backend="eager"
    )
    (expected,) = torch.autograd.grad(
        fg.attention(*given, score=score, family="reference").square().sum(), table
    )
    (found,) = torch.autograd.grad(compiled(given[0]).square().sum(), table)
    torch.testing.assert_close(found, expected)


def test_a_bias_behind_what_a_score_captures_has_its_own_gradient_under_torch_compile() -> None:
    table, bias = torch.randn(2, 9), torch.randn(5, 5, requires_grad=True)
    score, given = fg.relative_bias(table), [torch.randn(1, 2, 5, 8) for _ in range(3)]

    def layer() -> Tensor:
        return fg.attention(*given, score=score, bias=bias, family="reference")

    compiled = torch.compile(layer, backend="eager")
    found, expected = (torch.autograd.grad(call().square().sum(), bias)[0] for call in (compiled, layer))
    torch.testing.assert_close(found, expected)


def test_a_captured_tensor_that_comes_to_want_a_gradient_after_torch_compiled_the_call_is_refused() -> None:
    table, x = torch.randn(5), torch.randn(1, 2, 5, 8, requires_grad=True)

    @fg.program
    def weighted(q: fg.Tensor["b h q d"]):  # type: ignore[no-untyped-def]
        return q * fg.capture(table, "q")

    compiled = torch.compile(weighted.options(family="reference"), backend="eager")
    compiled(x).sum().backward()
    table.requires_grad_()
    with pytest.raises(UsageError, match=r"weighted: a captured tensor wants a gradient now, .*reset"):
        compiled(x)
    with torch.no_grad():
        compiled(x)


def test_what_a_kernel_captures_is_seen_by_autograd_under_torch_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, given = torch.randn(2, 9, requires_grad=True), [torch.zeros(1, 2, 0, 8) for _ in range(3)]
    kernel = fg.compile(score=fg.relative_bias(table), head_dim=8, dtype="fp32", arch="emulator")
    monkeypatch.setattr("fagen.calls.dispatch.compile_problem", lambda problem: None)  # nothing is launched
    assert kernel(*given).requires_grad
    compiled = torch.compile(kernel, backend="eager")
    assert compiled(*given).requires_grad
    torch._dynamo.reset()
    table.requires_grad_(False)
    assert not compiled(*given).requires_grad
    table.requires_grad_()
    with pytest.raises(UsageError, match="attention: a captured tensor wants a gradient now"):
        compiled(*given)


def test_autocast_casts_captured_tensors_under_torch_compile() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))

    @fg.program
    def one_cache(q: fg.Tensor["b h q d"], v: fg.Tensor["b hk kv dv"]):  # type: ignore[no-untyped-def]
        weights = fg.softmax(fg.dot(q, fg.capture(k, "b hk kv d"), over="d"), over="kv")
        return fg.dot(weights, v, over="kv")

    exact = one_cache.options(family="reference")
    q.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = exact(q, v), torch.compile(exact, backend="eager")(q, v)
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(out.float().square().sum(), q)[0] for out in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=2**-6, atol=2**-6)


def test_a_whole_graph_with_a_captured_tensor_that_wants_a_gradient_says_what_to_do() -> None:
    score, x = fg.relative_bias(torch.randn(2, 9, requires_grad=True)), torch.randn(1, 2, 5, 8)
    compiled = torch.compile(
        lambda: fg.attention(x, x, x, score=score, family="reference"), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="leave fullgraph=True out, or give the tensor as an argument"):
        compiled()


def test_masks_made_inside_are_compiled() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        near = fg.causal() & fg.sliding_window(3)
        out = fg.attention(q, k, v, mask=fg.causal(), family="reference")
        last = fg.attention(q, k, v, mask=fg.causal("top_left"), family="reference")
        return out + last + fg.attention(q, k, v, mask=near, family="reference")

    given = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    torch.testing.assert_close(torch.compile(layer, backend="eager")(*given), layer(*given))


def test_the_reference_runs_under_a_checkpoint() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fg.attention(q, k, v, mask=fg.causal(), dropout=0.3, family="reference")

    given = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]
    torch.manual_seed(3)
    expected = torch.autograd.grad(layer(*given).square().sum(), given)
    torch.manual_seed(3)
    out = torch.utils.checkpoint.checkpoint(layer, *given, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), given), expected)


def test_dropout_that_comes_after_torch_compiled_the_call_is_refused() -> None:
    rate = 0.0

    @fg.program
    def sometimes(q: fg.Tensor["b h q d"], k: fg.Tensor["b hk kv d"], v: fg.Tensor["b hk kv dv"]):  # type: ignore[no-untyped-def]
        return fg.dot(fg.dropout(fg.softmax(fg.dot(q, k, over="d"), over="kv"), rate), v, over="kv")

    given = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    compiled = torch.compile(sometimes.options(family="reference"), backend="eager")
    compiled(*given)
    rate = 0.5
    with pytest.raises(UsageError, match=r"sometimes: it has dropout now, .*give the rate as an argument"):
        compiled(*given)


class Doubled:
    """Calls that give twice a tensor; a `torch_op.Recorded`."""

    name = "doubled"

    def forward(self, given: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], None]:
        return (2 * given[0],), (), None

    def backward(
        self, given: object, outputs: object, incoming: Sequence[Tensor], seed: object
    ) -> list[Tensor | None]:
        return [2 * incoming[0], None]


def test_a_gradient_is_not_differentiated_unsaid() -> None:
    x, unread = torch.ones(3, requires_grad=True), torch.ones(3)
    (out,) = Call.apply(Doubled(), x, unread)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert gradient.tolist() == [2, 2, 2]
    message = "doubled: a gradient was differentiated, and kernels have first derivatives alone; family="
    with pytest.raises(UsageError, match=message):
        (gradient.sum() + x.sum()).backward()
    with pytest.raises(UsageError, match=message):  # torch takes it by the derivative of a gradient
        torch.autograd.functional.jvp(lambda x: Call.apply(Doubled(), x, unread), x, torch.ones(3))


def test_an_operators_gradient_is_not_differentiated_unsaid() -> None:
    @fg.program
    def squares(q: fg.Tensor["b h q d"]):  # type: ignore[no-untyped-def]
        return q * q

    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    compiled = torch.compile(squares.options(family="reference"), backend="eager")
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    with pytest.raises(UsageError, match="squares: a gradient was differentiated, and an operator"):
        gradient.sum().backward()


def test_a_transform_within_torch_compile_is_refused() -> None:
    def attend(x: Tensor) -> Tensor:
        return fg.attention(x, x, x, mask=fg.causal()).sum()

    with pytest.raises(Exception, match=r"attention: kernels cannot be transformed by torch\.func"):
        torch.compile(torch.func.grad(attend), backend="eager")(torch.zeros(2, 1, 4, 8))


# -------------------------------------------------------------------------------------- kernels ahead of time


def test_a_kernel_needs_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
import fagen as fg
kernel = fg.compile(mask=fg.causal(), head_dim=64, dtype="bf16", arch="sm_90a", bias=fg.Tensor["h q kv"])
assert "__global__" in kernel.source
assert "q_len 8,192, kv_len 8,192" in kernel.explain(batch=2, q_heads=16, q_len=8192)
kernel.save({str(tmp_path)!r})
print([name for name in ("torch", "sympy", "pycuda") if name in sys.modules])
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    names = {path.name for path in tmp_path.iterdir()}
    (source,) = (name for name in names if name.startswith("attention_"))
    assert {"main.cu", "plain.h", "plan.json", "types.cuh"} <= names
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["problem"]["inputs"] == ["bf16", "bf16", "bf16", "fp32"]
    assert plan["kernels"][0]["stage"]["walks"][0]["guard"] == "kv <= q + kv_len - q_len"
    for name in names - {"plan.json"}:
        for included in re.findall(r'#include "(.*?)"', (tmp_path / name).read_text()):
            assert included in names, f"{name} includes {included}"
    assert f'#include "{source}"' in (tmp_path / "main.cu").read_text()


BAD_KERNELS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no head dim": ({}, ValueError, r"compile: the length of the axis d is not given; give head_dim"),
    "own axis": (
        {"program": "rotary", "head_dim": 8},
        ValueError,
        r"compile: the length of the axis r is not given; give sizes=\{'r': ...\}",
    ),
    "unknown size": (
        {"head_dim": 8, "sizes": {"r": 4}},
        ValueError,
        r"sizes names r, .*those are d, dv",
    ),
    "head dim of 0": ({"head_dim": 0}, ValueError, r"compile: head_dim is 0; it is a whole number from 1 on"),
    "dtype": (
        {"head_dim": 8, "dtype": "fp8"},
        TypeError,
        r"compile: dtype is 'fp8'; it is fp32, fp16 or bf16",
    ),
    "dtype of nothing": (
        {"head_dim": 8, "dtype": {"w": "fp16"}},
        ValueError,
        r"compile: dtype names w, which is no argument; those are q, k, v",
    ),
    "dtype for some": (
        {"head_dim": 8, "dtype": {"q": "fp16"}},
        ValueError,
        r"compile: dtype names none for k; give each",
    ),
    "direction": ({"head_dim": 8, "direction": "sideways"}, ValueError, r"compile: direction is 'sideways'"),
    "arch": ({"head_dim": 8, "arch": "B17"}, PlanError, r"no GPU is known as 'B17'; arch= takes .*sm_90a"),
    "program and parts": (
        {"program": "rotary", "head_dim": 8, "mask": fg.causal()},
        ValueError,
        r"compile: both a program and mask of attention were given; write them into the program",
    ),
    "too large": (
        {"head_dim": 4096, "dtype": "fp32", "arch": "sm_86"},
        PlanError,
        r"head_dim 4096 in fp32 needs at least [\d,]+ bytes of shared memory, sm_86 has 101,376; up to \d+",
    ),
}


@fg.program
def rotary(q: Q, k: K, v: V, q_rope: fg.Tensor["b h q r"], k_rope: fg.Tensor["b kv r"]):
    s = fg.dot(q, k, over="d") + fg.dot(q_rope, k_rope, over="r")
    return fg.dot(fg.softmax(s, over="kv"), v, over="kv")


@pytest.mark.parametrize("name", BAD_KERNELS)
def test_a_kernel_without_meaning_is_refused(name: str) -> None:
    given, kind, text = BAD_KERNELS[name]
    given = {**given, "program": rotary} if "program" in given else given
    with pytest.raises(kind, match=text) as error:
        fg.compile(**given)
    assert isinstance(error.value, fg.FagenError)


def test_dtypes_of_arguments_may_be_named() -> None:
    kernel = fg.compile(
        scaled,
        head_dim=8,
        v_head_dim=3,
        dtype={"q": "bf16", "k": torch.bfloat16, "v": "bf16", "ids": "int32"},
    )
    assert kernel.plan.problem.inputs == ("bf16", "bf16", "bf16", "fp32", "int32")
    assert fg.compile(rotary, head_dim=8, sizes={"r": 4}).plan.problem.sizes == (
        ("d", 8),
        ("dv", 8),
        ("r", 4),
    )
    declared = fg.compile(head_dim=8, bias=fg.Tensor["h q kv"], sink=fg.Tensor["h"])
    assert declared.plan.problem.inputs == ("fp16", "fp16", "fp16", "fp32", "fp32")
    with pytest.raises(DtypeError, match="dtype is 'int5'"):
        fg.compile(scaled, head_dim=8, dtype={"q": "fp16", "k": "fp16", "v": "fp16", "ids": "int5"})


def test_a_name_says_what_a_kernel_is_and_no_other_has_it() -> None:
    names = {
        fg.compile(mask=mask, head_dim=dim, dtype=dtype, arch=arch).name
        for mask in (None, fg.causal(), fg.causal(align="top_left"))
        for dim in (64, 80)
        for dtype in ("fp16", "bf16")
        for arch in ("A100", "H100")
    }
    assert len(names) == 24
    assert all(re.fullmatch(r"attention_d(64|80)_dv\1_(fp|bf)16_[ah]100_[0-9a-f]{8}", name) for name in names)


def test_a_digest_knows_structure_and_not_names() -> None:
    def one(q: Q, k: K, v: V):
        return fg.dot(fg.softmax(fg.dot(q, k, over="d"), over="kv"), v, over="kv")

    def other(queries: Q, keys: K, values: V):
        weights = fg.softmax(fg.dot(keys, queries, over="d"), over="kv")
        return fg.dot(weights, values, over="kv")

    def third(q: Q, k: K, v: V):
        return fg.dot(fg.softmax(2.0 * fg.dot(q, k, over="d"), over="kv"), v, over="kv")

    first, second, different = (graph_digest(fg.program(f).trace().graph) for f in (one, other, third))
    assert first == second != different


# -------------------------------------------------------------------------------------- candidates and builds


def built(text: str, **took: int) -> Built:
    """What a compiler may say of a text."""
    plain = {"registers": 64, "stack_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0}
    numbers = {**plain, "static_shared_bytes": 0, "barriers": 1, **took}
    warnings = ("ptxas info : (C7510) wgmma is serialized",) if took.pop("warns", 0) else ()
    numbers.pop("warns", None)
    functions = {"forward": Resources("forward", **numbers)}
    return Built(text[:8], Target("sm_80"), text.encode(), functions, warnings, 0.1, True)


@pytest.mark.parametrize(
    ("took", "reason"),
    [
        ({}, ""),
        ({"spill_load_bytes": 800}, "forward spills 800 bytes of registers"),
        ({"spill_store_bytes": 72, "spill_load_bytes": 92, "stack_bytes": 48}, ""),
        ({"warns": 1}, "ptxas info : (C7510) wgmma is serialized"),
        ({"stack_bytes": 40}, "takes 40 bytes of stack a thread"),
    ],
)
def test_what_a_compiler_says_is_judged(took: dict[str, int], reason: str) -> None:
    assert judged(built("x", **took))[0] == reason


def fresh_kernel(width: int) -> Compiled:
    """A kernel this process knows nothing of."""
    kernel = fg.compile(mask=fg.sliding_window(width), head_dim=64, arch="A100", family="simt")
    return Compiled(kernel.compiled.problem)


def test_the_next_candidate_is_built_where_one_spills(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def build(text: str, *, name: str, arch: Any) -> Built:
        calls.append(text)
        return built(text, **({"spill_store_bytes": 4000} if len(calls) <= 2 else {}))

    monkeypatch.setattr(compiling, "build", build)
    kernel = fresh_kernel(5)
    assert kernel.built == {}
    first = kernel.source
    binary = kernel.binary()
    assert (binary.candidate, len(calls), len(set(calls))) == (2, 3, 3)
    assert calls[0] == first
    assert kernel.source == calls[2]
    assert binary.image == calls[2].encode()
    assert "forward spills 4000 bytes" in kernel.plan.rejected[-1].reason
    rejected = [each.candidate for each in kernel.plan.rejected if each.built]
    assert [re.match(r"candidate \d \(simt: [\d x]+ threads, \d+ blocks at once\)$", r) for r in rejected]
    assert [each[:11] for each in rejected] == ["candidate 0", "candidate 1"]
    again = fresh_kernel(5)
    monkeypatch.setattr(compiling, "built_as", lambda key: replace(built("x"), key=key))
    assert again.binary().candidate == 2
    assert again.plan.rejected == kernel.plan.rejected, "the index holds them, too"
    told = explain(again.plan, built=again.built)
    assert "Built before it, and rejected\n  candidate 0 (simt: " in told
    assert " ".join(told.split()).count("forward spills 4000 bytes of registers") == 2


def test_what_was_taken_is_told_with_the_few_bytes_that_it_spills(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "build", lambda text, **_: built(text, registers=96, spill_load_bytes=40))
    kernel = fg.compile(mask=fg.sliding_window(7), head_dim=64, arch="A100", family="simt")
    assert "built, it takes" not in kernel.explain()
    assert kernel.compiled.binary().candidate == 0
    assert "built, it takes 96 registers a thread; 40 bytes of them are spilled" in kernel.explain()


def test_of_two_gpus_that_is_told_whose_binary_was_asked_for(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "build", lambda text, name, arch: built(text, registers=10 * arch[0]))
    kernel = fg.compile(mask=fg.sliding_window(11), head_dim=64, arch="A100", family="simt")
    for capability in ((8, 0), (9, 0), (8, 0)):
        kernel.compiled.binary(capability, "a GPU")
        assert f"built, it takes {10 * capability[0]} registers a thread" in kernel.explain()


def with_families(monkeypatch: pytest.MonkeyPatch, *families: str) -> None:
    """Have an H200 try these families, the last of them first."""
    row = replace(arch_for("H200"), families=families)
    monkeypatch.setattr(planner, "arch_for", lambda name: row)


def chosen(dtype: str, family: str | None = None, direction: Any = "forward") -> Compiled:
    """A kernel on an H200 that this process knows nothing of, with what a compiler had made of it."""
    made = fg.compile(
        mask=fg.causal(), head_dim=64, dtype=dtype, arch="H200", family=family, direction=direction
    )
    kernel = Compiled(made.compiled.problem)
    kernel.binary()
    return kernel


def test_the_next_family_is_tried_where_one_has_nothing(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_families(monkeypatch, "simt", "sm80", "sm90")
    bad: set[str] = set()

    def build(text: str, *, name: str, arch: Any) -> Built:
        family = next(each for each in ("simt", "sm80", "sm90") if f"family {each}," in text)
        return built(text, spill_store_bytes=4000 * (family in bad))

    monkeypatch.setattr(compiling, "build", build)
    assert chosen("fp16").plan.family == "sm90"
    bad.add("sm90")
    kernel = chosen("bf16")
    assert kernel.plan.family == "sm80"
    told = [each for each in kernel.plan.rejected if each.built]
    assert len(told) > 3
    assert all("(sm90: " in each.candidate for each in told)
    assert "forward spills 4000 bytes of registers" in " ".join(explain(kernel.plan).split())
    bad.add("sm80")
    assert chosen("fp16").plan.family == "simt"
    with pytest.raises(BuildError, match=r"no plan of \w+ builds well for sm_90a: candidate 0 \(sm80: "):
        chosen("fp16", "sm80")
    bad.remove("sm80")
    with pytest.raises(BuildError, match=r"no plan of \w+ builds well for sm_90a: candidate 0 \(sm90: "):
        chosen("fp16", "sm90")
    kernel = chosen("fp16", "sm90", "backward")  # each of its kernels may be of another family in any case
    assert kernel.plan.family == "sm80"
    assert "(sm90: " in next(each.candidate for each in kernel.plan.rejected if each.built)
    planned = chosen("fp32").plan  # tensor cores have no candidate to build
    assert (planned.family, [each for each in planned.rejected if each.built]) == ("simt", [])
    assert any("16-bit" in each.reason for each in planned.rejected)


def test_a_stack_is_no_reason_for_another_family(cold_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_families(monkeypatch, "simt", "sm80")
    monkeypatch.setattr(compiling, "build", lambda text, **_: built(text, stack_bytes=40))
    assert chosen("fp16").plan.family == "sm80"


def test_a_stack_is_not_asked_of_the_same_tiles_again(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    def build(text: str, **_: Any) -> Built:
        texts.append(re.sub(r"THREADS, \d+", "THREADS", text))
        return built(text, stack_bytes=1000 - len(texts))

    monkeypatch.setattr(compiling, "build", build)
    kernel = fresh_kernel(12)
    kernel.binary()
    assert len(texts) == len(set(texts)) > 1


def test_a_stack_is_taken_where_nothing_is_without_one(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([90, 40, 60])
    monkeypatch.setattr(compiling, "build", lambda text, **_: built(text, stack_bytes=next(sizes, 80)))
    assert fresh_kernel(6).binary().candidate == 1


def test_a_stack_that_other_tiles_have_too_is_taken_at_once(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([90, 40, 40])
    monkeypatch.setattr(compiling, "build", lambda text, **_: built(text, stack_bytes=next(sizes)))
    assert fresh_kernel(9).binary().candidate == 1


def test_no_good_candidate_is_an_error_with_all_reasons(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "build", lambda text, **_: built(text, spill_store_bytes=4000))
    with pytest.raises(
        BuildError, match=r"no plan of attention_\w+ builds well for sm_80: candidate 0 .*; candidate 1"
    ):
        fresh_kernel(7).binary()


def test_a_warm_process_derives_nothing(cold_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "build", lambda text, **_: built(text))
    monkeypatch.setattr(compiling, "built_as", lambda key: replace(built("x"), key=key))
    cold = fresh_kernel(8).binary()
    with monkeypatch.context() as patch:
        for step in ("plans", "emit", "build"):
            patch.setattr(compiling, step, lambda *_, **__: pytest.fail("derived again"))
        warm = fresh_kernel(8).binary()
        assert (warm.key, warm.recipe, warm.candidate) == (cold.key, cold.recipe, cold.candidate)
        for change in (
            lambda other: other.setenv("NVCC_APPEND_FLAGS", "-G"),
            lambda other: other.setenv("FAGEN_NVCC", "/another/nvcc"),
            lambda other: other.setattr(compiling, "package_digest", lambda: "edited"),
            lambda other: other.setattr(compiling, "built_as", lambda key: None),  # the entry was removed
        ):
            with patch.context() as other:
                change(other)
                with pytest.raises(pytest.fail.Exception, match="derived again"):
                    fresh_kernel(8).binary()


def test_stages_are_dumped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAGEN_DUMP", str(tmp_path))
    monkeypatch.setenv("FAGEN_DEBUG", "3")
    kernel = fresh_kernel(9)
    assert not [*tmp_path.iterdir()]  # a call plans anew for its lengths: of one text there is one plan
    _ = kernel.source
    graph = (tmp_path / f"{kernel.name}.graph.txt").read_text()
    assert graph.startswith("attention(q[b,h,q,d], k[b,hk,kv,d], v[b,hk,kv,dv])")
    assert json.loads((tmp_path / f"{kernel.name}.plan.json").read_text())["family"] == "simt"
    told = capfd.readouterr().err
    assert f"[fagen] {kernel.name}: simt: forward (forward_loop" in told
    assert re.search(rf"\[fagen\] {kernel.name}: planned in [\d.]+ ms", told)
    assert "attention(q[b,h,q,d]" in told


def test_equal_problems_are_compiled_once() -> None:
    first, second = (fg.compile(mask=fg.causal(), head_dim=64, arch="A100").compiled for _ in range(2))
    assert first is second
    assert compile_problem(replace(first.problem)) is first
