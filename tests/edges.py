"""Meaning at the edges: a test for each thing the language fixes there, for CPU tensors and a GPU alike.

The test files of both import these functions and give them their ``device``.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen as fg
from fagen.errors import PlanError
from fagen.ir.reference import compare, eager, evaluate
from fagen.lang.attention import attention as traced_attention
from fagen.lang.trace import Traced
from fagen.plan.arch import arch_for
from fagen.torch_op import draw_seed
from masks import dense

Q, K, V, H = (fg.Tensor[axes] for axes in ("b h q d", "b hk kv d", "b hk kv dv", "h"))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])


def need(device: str, family: str) -> None:
    """Skip where the GPU does not run ``family``; the emulator runs all."""
    if device == "cpu":
        return
    row = arch_for(torch.cuda.get_device_capability())
    if family not in row.families:
        pytest.skip(f"needs a GPU that runs {family}: {row.name} does not")


def tensors(
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    batch: int = 1,
    heads: int | tuple[int, int] = 2,
    q_len: int = 70,
    kv_len: int = 70,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    q_heads, kv_heads = heads if isinstance(heads, tuple) else (heads, heads)
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    return (
        make(batch, q_heads, q_len, head_dim),
        make(batch, kv_heads, kv_len, head_dim),
        make(batch, kv_heads, kv_len, v_head_dim or head_dim),
    )


def require(outputs: Tensor | Sequence[Tensor], traced: Traced, given: Sequence[Any], seed: int = 0) -> None:
    """Hold outputs to the meaning of what was called."""
    outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    values = (*given, *traced.captured)
    exact = evaluate(traced.graph, values, seed=seed)
    near = eager(traced.graph, values, given[0].dtype, seed=seed)
    assert len(outputs) == len(exact)
    for out, ref, quick, output in zip(outputs, exact, near, traced.graph.outputs, strict=True):
        compare(out, ref, quick).require(output.name)


def attend(given: Sequence[Tensor], **parts: Any) -> Any:
    """What `fg.attention` gives, held to its meaning."""
    outputs = fg.attention(*given, **parts)
    require(outputs, traced_attention(**parts), given)
    return outputs


def wanting(values: Sequence[Tensor]) -> list[Tensor]:
    return [value.requires_grad_() for value in values]


def gradients(given: Sequence[Tensor], others: Sequence[Tensor] = (), **parts: Any) -> tuple[Tensor, ...]:
    """Gradients of ``given`` and ``others`` for the sum of all outputs, finite."""
    outputs = fg.attention(*given, **parts)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    ones = [torch.ones_like(each) for each in outputs]
    found = torch.autograd.grad(outputs, [*given, *others], ones)
    assert all(bool(each.isfinite().all()) for each in found)
    return found


def require_right(
    given: Sequence[Tensor],
    found: Sequence[Tensor],
    incoming: Sequence[Tensor] | None = None,
    seed: int = 0,
    **parts: Any,
) -> None:
    """Hold gradients of tensors and captures to autograd's.

    ``incoming`` are the gradients of all outputs, ones where it is None; ``seed`` is what dropout drew.
    """
    traced = traced_attention(**parts)
    values = [*given, *traced.captured]
    wanted = [i for i, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad]

    def by_autograd(run: Any, wide: bool, **options: Any) -> Sequence[Tensor]:
        leaves = list(values)
        for i in wanted:
            dtype = torch.float64 if wide else values[i].dtype
            leaves[i] = values[i].detach().to(dtype, copy=True).requires_grad_()
        outputs = run(traced.graph, leaves, seed=seed, **options)
        grads = [torch.ones_like(x) for x in outputs] if incoming is None else incoming
        grads = [grad.to(x.dtype) for grad, x in zip(grads, outputs, strict=True)]
        return torch.autograd.grad(outputs, [leaves[i] for i in wanted], grads)

    exact, near = by_autograd(evaluate, True), by_autograd(eager, False, dtype=given[0].dtype)
    for i, mine, ref, quick in zip(wanted, found, exact, near, strict=True):
        assert mine.dtype == values[i].dtype
        compare(mine, ref, quick, gradient=True).require(traced.graph.arguments[i].name)


# ------------------------------------------------------------------------------- numbers, sums over positions


def _with_a_number(q: Q, k: K, v: V, x: fg.Tensor[""]) -> Any:  # type: ignore[valid-type]
    return fg.dot(fg.sigmoid(fg.dot(q, k, over="d") * x), v, over="kv"), fg.exp(x)


def _linear(q: Q, k: K, v: V) -> Any:  # type: ignore[valid-type]
    return fg.dot(q, fg.dot(k, v, over="kv"), over="d")


def _of_all_pairs(q: Q, k: K, v: V) -> Any:  # type: ignore[valid-type]
    s = fg.dot(q, k, over="d")
    weights = fg.exp(s - fg.max(fg.max(s, over="kv"), over="q"))
    return fg.dot(weights, v, over="kv") / fg.sum(fg.sum(weights, over="kv"), over="q")


@pytest.mark.parametrize("function", [_with_a_number, _linear, _of_all_pairs])
def test_a_number_is_a_result_and_sums_over_positions_stand_in_one(device: str, function: Any) -> None:
    given = tensors(device, q_len=40, kv_len=50)
    if function is _with_a_number:
        given += (torch.tensor(0.5, device=device),)  # type: ignore[assignment]
    program = fg.program(function)
    require(program(*given), program.trace(), given)


def test_weights_times_a_large_number_are_summed_before_it(device: str) -> None:
    def far(q: Q, k: K, v: V) -> Any:  # type: ignore[valid-type]
        return fg.dot(1e37 * fg.softmax(fg.dot(q, k, over="d"), over="kv"), v, over="kv")

    q, k, v = tensors(device, q_len=5, kv_len=90)  # 90e37 is more than fp32 holds
    given = (0 * q, k, v * 0 + 1)
    program = fg.program(far)
    require(program(*given), program.trace(), given)


# ---------------------------------------------------------------------------------------- 64-bit integers

FAR = 2**40 + 3  # the lower 32 bits of a multiple of 2**32 added to it are the same


@pytest.mark.parametrize("is_sorted", [True, False])
def test_whole_numbers_of_tables_have_64_bits(device: str, is_sorted: bool) -> None:
    given = tensors(device, q_len=40, kv_len=40)
    ids = FAR + 2**32 * (torch.arange(40)[None] // 13)
    table = fg.capture((ids if is_sorted else ids.flip(1)).to(device), "b kv", is_sorted)
    mask = table[fg.b, fg.q] == table[fg.b, fg.kv]
    if not is_sorted:
        steps = fg.capture(torch.arange(40).to(device) * 2**31, "kv")
        apart = steps[fg.kv] - steps[fg.q]
        mask = (mask | (apart <= 3 * 2**31) & (apart > -9 * 2**31)) & (steps <= 5 * 2**32 + 2)
    attend(given, mask=mask)


@pytest.mark.parametrize("falls", [True, False], ids=["falls", "rises"])
def test_a_place_in_a_table_is_the_nearest_wherever_a_distance_lies(device: str, falls: bool) -> None:
    given = tensors(device, q_len=20, kv_len=37)
    distance = fg.q - fg.kv if falls else fg.kv - fg.q
    for size in (1, 6, 200):
        table = torch.randn(size, 2, device=device).T  # neighbours of a head lie apart
        for by in (-(2**31), -40, -3, 0, 25, 2**31 - 1):
            bias, moved = fg.capture(table, "h distance"), fg.scalar(by)
            attend(given, score=lambda s, bias=bias, moved=moved: s + bias[fg.h, distance + moved])


# ------------------------------------------------------------------- 1. fp32 inside, -inf and only -inf masks


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=["fp16", "bf16"])
def test_scores_beyond_the_input_dtype_are_kept(device: str, dtype: torch.dtype) -> None:
    q, k, v = tensors(device, dtype, head_dim=64, q_len=20, kv_len=40)
    q, k = q * 60, k * 60  # products of up to 1e5: more than fp16 holds, and bf16 has 256 for 255.5
    out, lse = attend((q, k, v), return_lse=True, scale=1.0)
    assert lse.abs().max() > 65_504
    exact = (q.double() @ k.double().mT).logsumexp(-1)
    torch.testing.assert_close(lse.double(), exact, rtol=1e-6, atol=0.0)
    assert out.isfinite().all()


def test_statistics_of_16_bit_inputs_have_the_precision_of_fp32(device: str) -> None:
    q, k, v = tensors(device, torch.bfloat16, q_len=65, kv_len=127, head_dim=40)
    _, lse = attend((q, k, v), return_lse=True, mask=fg.causal())
    s = (q.double() @ k.double().mT) * 40**-0.5
    s = s.masked_fill(~dense(fg.causal(), 65, 127).to(device), -math.inf)
    torch.testing.assert_close(lse.double(), s.logsumexp(-1), rtol=0, atol=3e-6)


@by_dtype
def test_a_row_of_the_lowest_number_is_not_masked(device: str, dtype: torch.dtype) -> None:
    given = tensors(device, dtype, q_len=3, kv_len=70, heads=1)
    lowest = torch.finfo(dtype).min
    bias = torch.zeros(1, 1, 3, 70, dtype=dtype, device=device)
    bias[..., 0, :] = lowest
    bias[..., 1, 5:] = lowest
    out, lse = fg.attention(*given, bias=bias, return_lse=True)
    near, _ = eager(traced_attention(bias=bias, return_lse=True).graph, (*given, bias), torch.float32)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    torch.testing.assert_close(out, near.to(dtype), rtol=2e-2, atol=2e-2)
    if dtype != torch.float16:  # -65,504 leaves the differences of scores as they are
        torch.testing.assert_close(out[0, 0, 0].float(), given[2][0, 0].float().mean(0), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("through", ["bias", "where"])
@pytest.mark.parametrize("family", ["simt", "sm80", "sm90"])
def test_gradients_of_rows_of_very_low_numbers(device: str, family: str, through: str) -> None:
    """Each has one key, with all the weight: so low a logarithm has no room for that of a number of keys."""
    need(device, family)
    dtype = torch.float32 if family == "simt" else torch.bfloat16
    given = wanting(tensors(device, dtype, q_len=24, kv_len=24, heads=1, head_dim=64))
    lowest = torch.finfo(torch.float32).min
    rows = torch.tensor([0.0, -1e6, -1e9, -1e30, lowest, 0.0], device=device).repeat(4)
    low = fg.capture(rows, "q")[fg.q]
    parts: dict[str, Any] = {"mask": (low == 0) | (fg.kv == fg.q)}
    if through == "bias":
        parts["bias"] = rows[:, None]
    else:
        parts["score"] = lambda s: fg.where(low < 0, low, s)
    require_right(given, gradients(given, family=family, **parts), **parts)


@pytest.mark.parametrize("family", ["simt", "sm80", "sm90"])
def test_gradients_of_rows_of_many_very_low_numbers(device: str, family: str) -> None:
    """A number so low has no room for the logarithm of how many keys there are, which share the weight."""
    need(device, family)
    given = wanting(tensors(device, torch.bfloat16, q_len=24, kv_len=40, heads=1, head_dim=64))
    rows = torch.tensor([-1e6, -1e9, -1e30, 0.0], device=device).repeat(6)
    parts: dict[str, Any] = {"bias": rows[:, None]}
    require_right(given, gradients(given, family=family, **parts), **parts)


@pytest.mark.parametrize("family", ["simt", "sm80"])
def test_weights_far_below_a_sink_add_up(device: str, family: str) -> None:
    """Each of them is smaller than the smallest normal number."""
    q, k, v = tensors(device, torch.bfloat16, q_len=3, kv_len=70, head_dim=16)
    sink = torch.full((q.shape[1],), 92.0, device=device)
    out = fg.attention(q, k, torch.ones_like(v), scale=0.0, sink=sink, family=family)
    step = 2.0**-133  # of bf16's subnormal numbers
    assert float((out.double() - 70 * math.exp(-92.0)).abs().max()) <= step


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_a_table_read_at_one_place(device: str, deterministic: bool) -> None:
    given = wanting(tensors(device, torch.bfloat16, q_len=20, kv_len=37))
    table = torch.tensor([0.5, 3.0, -0.1], device=device).requires_grad_()
    held = fg.capture(table, "place")
    parts = {"score": lambda s: s * held[0] + held[fg.size("q") // 10] * (fg.kv - fg.q)}
    found = gradients(given, [table], deterministic=deterministic, **parts)
    require_right(given, found, **parts)
    assert found[-1][1] == 0


@pytest.mark.parametrize(("family", "additive"), [("sm80", True), ("sm90", False)])
def test_gradients_of_what_masked_scores_are_multiplied_by(device: str, family: str, additive: bool) -> None:
    """-inf times a gradient that is 0."""
    need(device, family)
    given = wanting(tensors(device, torch.bfloat16, head_dim=64))
    heat = torch.tensor(1.5, device=device).requires_grad_()
    dividing = fg.temperature(heat)
    if additive:
        held = fg.capture(torch.full((70, 70), -math.inf, device=device).triu(1), "q kv")
        score = [lambda s: s + held, dividing]
    else:
        score = [lambda s: fg.where(fg.kv <= fg.q, s, -fg.inf), dividing]
    require_right(given, gradients(given, [heat], family=family, score=score), score=score)


_OF_S: dict[str, Any] = {
    "s exp(s)": lambda s: s * fg.exp(0.1 * s),  # masked it is -inf times 0
    "a sign": lambda s: fg.where(fg.abs(s) < 1.0, s, s / fg.abs(s)),  # behind the last key it is 0 / 0
}


@pytest.mark.parametrize("name", _OF_S)
def test_gradients_of_scores_that_are_no_numbers_where_no_key_counts(device: str, name: str) -> None:
    need(device, "sm90")
    given = wanting(tensors(device, torch.bfloat16, head_dim=64))
    parts: dict[str, Any] = {"mask": fg.causal(), "score": _OF_S[name]}
    require_right(given, gradients(given, family="sm90", **parts), **parts)


@pytest.mark.parametrize("kept", [-3e38, -1e30, -65504.0])
def test_a_masked_key_loses_to_any_finite_score(device: str, kept: float) -> None:
    given = tensors(device, q_len=5)
    mask = fg.kv % 7 == 3
    out, lse = fg.attention(*given, mask=mask, bias=torch.full((70,), kept, device=device), return_lse=True)
    torch.testing.assert_close(lse, torch.full_like(lse, kept), rtol=1e-3, atol=0)
    if kept < -1e9:  # the scores are absorbed
        expected = given[2][:, :, 3::7].double().mean(2, keepdim=True).expand(-1, -1, 5, -1)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_softcap_leaves_a_masked_key_no_weight(device: str) -> None:
    given = tensors(device, kv_len=65)
    masked, rest = fg.kv >= 60, fg.kv < 60
    parts = {"score": fg.softcap(1.0), "return_lse": True}
    out, lse = attend(given, mask=rest, **parts)
    q, k, v = given
    short_out, short_lse = fg.attention(q, k[:, :, :60], v[:, :, :60], **parts)
    torch.testing.assert_close(out, short_out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, short_lse, rtol=1e-5, atol=1e-6)
    bias = torch.zeros(65, device=device).masked_fill(torch.arange(65, device=device) >= 60, -math.inf)
    biased_out, _ = attend(given, bias=bias, **parts)
    torch.testing.assert_close(biased_out, out, rtol=1e-5, atol=1e-6)
    scored_out, _ = attend(
        given, score=[fg.softcap(1.0), lambda s: fg.where(masked, -fg.inf, s)], return_lse=True
    )
    torch.testing.assert_close(scored_out, out, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------ 2. rows without a key


@by_dtype
@pytest.mark.parametrize("kv_len", [0, 1, 70])
def test_a_row_without_a_key(device: str, dtype: torch.dtype, kv_len: int) -> None:
    given = tensors(device, dtype, kv_len=kv_len)
    mask = (fg.q % 3 == 0) & (fg.kv >= 0)
    empty = torch.arange(70, device=device) % 3 != 0 if kv_len else torch.ones(70, dtype=torch.bool)
    out, lse = attend(given, mask=mask, return_lse=True)
    assert (out[:, :, empty] == 0).all()
    assert (lse[:, :, empty] == -math.inf).all()
    assert lse[:, :, ~empty].isfinite().all()
    assert lse.dtype == torch.float32
    sink = torch.tensor([0.5, -3.0], device=device)
    out, lse = attend(given, mask=mask, sink=sink, return_lse=True)
    assert (out[:, :, empty] == 0).all()
    # log(exp(sink)): powers of 16-bit programs are off by up to 2^-22 of themselves
    allowed = 0.0 if dtype == torch.float32 else 1e-6
    expected = sink[None, :, None].expand_as(lse)
    torch.testing.assert_close(lse[:, :, empty], expected[:, :, empty], rtol=0.0, atol=allowed)


def test_a_mask_that_allows_nothing(device: str) -> None:
    given = tensors(device)
    for mask in (False, fg.kv < 0, fg.kv >= fg.size("kv"), fg.sliding_window(0, 0) & (fg.kv > fg.q)):
        out, lse = fg.attention(*given, mask=mask, return_lse=True)
        assert (out == 0).all()
        assert (lse == -math.inf).all()


def test_keys_of_minus_infinity_are_no_keys(device: str) -> None:
    given = tensors(device, q_len=5)
    bias = torch.full((5, 70), -math.inf, device=device)
    bias[1] = 0.0
    bias[3, 69] = 0.0
    out, lse = attend(given, bias=bias, return_lse=True)
    assert (lse[:, :, [0, 2, 4]] == -math.inf).all()
    assert (out[:, :, [0, 2, 4]] == 0).all()
    torch.testing.assert_close(out[:, :, 3], given[2][:, :, 69])


def test_the_logarithm_is_natural_and_its_sink_is_asked_for(device: str) -> None:
    @fg.program
    def with_sink(q: Q, k: K, v: V, sink: H):
        s = fg.where(fg.q > 2, fg.dot(q, k, over="d"), -fg.inf)
        return fg.dot(fg.softmax(s, over="kv", sink=sink), v, over="kv"), fg.logsumexp(s, over="kv")

    given = (*tensors(device, q_len=9), torch.tensor([2.0, -1.0], device=device))
    out, lse = with_sink(*given)
    require((out, lse), with_sink.trace(), given)
    assert (lse[:, :, :3] == -math.inf).all()
    q, k, _, sink = given
    alone = (q.double() @ k.double().mT).logsumexp(-1)[:, :, 3:]
    torch.testing.assert_close(lse[:, :, 3:].double(), alone, rtol=1e-6, atol=1e-6)
    _, both = attend(given[:3], sink=sink, scale=1.0, return_lse=True)
    expected = torch.logaddexp(alone, sink.double()[None, :, None])
    torch.testing.assert_close(both[:, :, 3:].double(), expected, rtol=1e-6, atol=1e-6)


@fg.program
def sum_normalised(q: Q, k: K, v: V):
    s = fg.relu(fg.dot(q, k, over="d"))
    s = fg.where((fg.kv <= fg.q) & (fg.q % 4 != 0), s, 0.0)
    return fg.dot(s / fg.sum(s, over="kv"), v, over="kv")


@fg.program
def two_statistics(q: Q, k: K, v: V):
    s = fg.where((fg.kv <= fg.q) & (fg.q % 4 != 0), fg.dot(q, k, over="d") * 0.25, -fg.inf)
    return fg.dot(fg.exp(s) / fg.sqrt(fg.sum(fg.exp(2 * s), over="kv")), v, over="kv")


@fg.program
def above_average(q: Q, k: K, v: V):
    s = fg.where((fg.kv <= fg.q) & (fg.q % 4 != 0), fg.dot(q, k, over="d") * 0.25, -fg.inf)
    return fg.dot(fg.relu(fg.softmax(s, over="kv") - 0.05), v, over="kv")


@pytest.mark.parametrize("program", [sum_normalised, two_statistics, above_average], ids=lambda p: p.name)
@pytest.mark.parametrize("kv_len", [0, 70])
def test_a_quotient_by_a_sum_of_nothing_is_0(device: str, program: fg.Program, kv_len: int) -> None:
    given = tensors(device, kv_len=kv_len)
    out = program(*given)
    require(out, program.trace(), given)
    assert (out[:, :, ::4] == 0).all()


# ----------------------------------------------------------------------------------- 3. NaN at masked pairs


@by_dtype
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kv_len", [40, 127])
def test_what_is_masked_reaches_nothing(device: str, dtype: torch.dtype, value: float, kv_len: int) -> None:
    q, k, v = tensors(device, dtype, kv_len=kv_len)
    dead = torch.arange(kv_len, device=device) % 5 == 2
    rows = torch.arange(70, device=device) % 9 == 4
    mask = (fg.kv % 5 != 2) & (fg.q % 9 != 4)
    bias = torch.zeros(70, kv_len, device=device, dtype=dtype)
    expected = fg.attention(q, k, v, mask=mask, bias=bias, return_lse=True)
    k[:, :, dead] = value
    q[:, :, rows] = value
    bias[:, dead] = value
    bias[rows] = value
    found = attend((q, k, v), mask=mask, bias=bias, return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    expected = fg.attention(q, k, v, mask=mask, bias=bias, return_lse=True, family="simt")
    v[:, :, dead] = value
    found = fg.attention(q, k, v, mask=mask, bias=bias, return_lse=True, family="simt")
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_nan_at_an_allowed_pair_is_seen_in_its_rows_alone(device: str) -> None:
    q, k, v = tensors(device)
    plain = fg.attention(q, k, v, mask=fg.causal())
    k[:, :, 50] = math.nan
    out = attend((q, k, v), mask=fg.causal())
    assert out[:, :, 50:].isnan().all()
    assert torch.equal(out[:, :, :50], plain[:, :, :50])


def test_what_lies_behind_a_tensor_is_not_read(device: str) -> None:
    given = tensors(device, q_len=13, kv_len=27, head_dim=9)
    plain = fg.attention(*given)
    cut = []
    for tensor in given:
        b, h, s, d = tensor.shape
        room = torch.full((b, h, s + 70, d + 7), math.nan, device=device)
        room[:, :, 40 : 40 + s, 3 : 3 + d] = tensor
        cut.append(room[:, :, 40 : 40 + s, 3 : 3 + d])
    assert torch.equal(fg.attention(*cut), plain)


# ------------------------------------------------------------------------------------ 4. alignment, windows


@pytest.mark.parametrize(("q_len", "kv_len"), [(2, 5), (5, 2), (63, 300), (300, 63), (64, 65)])
def test_causal_ends_at_the_last_key(device: str, q_len: int, kv_len: int) -> None:
    given = tensors(device, q_len=q_len, kv_len=kv_len)
    rows, keys = torch.arange(q_len, device=device)[:, None], torch.arange(kv_len, device=device)
    last, first = keys <= rows + (kv_len - q_len), keys <= rows
    for mask, allowed in ((fg.causal(), last), (fg.causal(align="top_left"), first)):
        by_hand = fg.attention(*given, mask=fg.capture(allowed, "q kv"), return_lse=True)
        for out, other in zip(attend(given, mask=mask, return_lse=True), by_hand, strict=True):
            torch.testing.assert_close(out, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("q_len", "kv_len"), [(70, 70), (20, 150), (150, 20)])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (0, None), (None, 0), (17, 5), (None, None), (3, 200)])
def test_a_window_is_what_its_numbers_say(
    device: str, q_len: int, kv_len: int, left: int | None, right: int | None
) -> None:
    given = tensors(device, q_len=q_len, kv_len=kv_len)
    distance = torch.arange(q_len)[:, None] + (kv_len - q_len) - torch.arange(kv_len)
    allowed = torch.ones(q_len, kv_len, dtype=torch.bool)
    if left is not None:
        allowed &= distance <= left
    if right is not None:
        allowed &= distance >= -right
    mask = fg.sliding_window(left, right)
    by_hand = fg.attention(*given, mask=fg.capture(allowed.to(device), "q kv"), return_lse=True)
    for out, other in zip(attend(given, mask=mask, return_lse=True), by_hand, strict=True):
        torch.testing.assert_close(out, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [(-1, 0), (0, -1), (-3, None), (None, -2)])
def test_a_negative_window_is_refused(device: str, window: tuple[int | None, int | None]) -> None:
    with pytest.raises(ValueError, match=r"sliding_window: (left|right) is -\d; it is 0 or more"):
        fg.attention(*tensors(device), mask=fg.sliding_window(*window))


@pytest.mark.parametrize(("q_len", "kv_len"), [(20, 90), (90, 20)])
def test_other_masks_and_alibi_take_q_as_it_is(device: str, q_len: int, kv_len: int) -> None:
    given = tensors(device, q_len=q_len, kv_len=kv_len)
    rows, keys = torch.arange(q_len, device=device)[:, None], torch.arange(kv_len, device=device)
    for mask, allowed in (
        (fg.prefix_lm(9), (keys < 9) | (keys <= rows)),
        (fg.chunked(8), keys // 8 == rows // 8),
        (fg.dilated(15, 3), ((rows - keys).abs() <= 15) & ((rows - keys) % 3 == 0)),
    ):
        out = fg.attention(*given, mask=mask)
        other = fg.attention(*given, mask=fg.capture(allowed, "q kv"))
        torch.testing.assert_close(out, other, rtol=1e-5, atol=1e-6)
    slopes = torch.tensor([0.5, 0.1], device=device)
    bias = slopes[:, None, None] * (keys - rows)
    torch.testing.assert_close(
        fg.attention(*given, score=fg.alibi(slopes)), fg.attention(*given, bias=bias), rtol=1e-5, atol=1e-6
    )


# ------------------------------------------------------------------------------------------- 5. sizes


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"),
    [(1, 1), (2, 3), (3, 256), (5, 5), (63, 63), (65, 7), (100, 1), (129, 31), (255, 255), (256, 256)],
)
def test_any_head_dim(device: str, head_dim: int, v_head_dim: int) -> None:
    for dtype in (torch.float32, torch.float16):
        given = tensors(device, dtype, q_len=33, kv_len=65, head_dim=head_dim, v_head_dim=v_head_dim)
        out = attend(given, mask=fg.causal())
        assert out.shape == (1, 2, 33, v_head_dim)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(320, 64), (64, 512), (512, 512)])
def test_a_larger_head_dim_where_it_fits(device: str, head_dim: int, v_head_dim: int) -> None:
    attend(
        tensors(device, torch.float16, q_len=33, kv_len=65, head_dim=head_dim, v_head_dim=v_head_dim),
        mask=fg.causal(),
    )


def test_the_scale_is_that_of_the_true_head_dim(device: str) -> None:
    given = tensors(device, head_dim=63)
    expected = fg.attention(*given, scale=1 / math.sqrt(63))
    torch.testing.assert_close(fg.attention(*given), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_any_scale(device: str, scale: float) -> None:
    given = tensors(device)
    out = attend(given, scale=scale, mask=fg.causal())
    if not scale:
        counts = torch.arange(1, 71, device=device)[:, None]
        torch.testing.assert_close(out, given[2].cumsum(2) / counts, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [(5, 1), (7, 7), (12, 2), (21, 3), (16, 1)])
def test_any_group_size(device: str, heads: tuple[int, int]) -> None:
    q, k, v = tensors(device, heads=heads, q_len=20, kv_len=33)
    out = attend((q, k, v), mask=fg.causal())
    group = heads[0] // heads[1]
    repeated = fg.attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), mask=fg.causal())
    torch.testing.assert_close(out, repeated, rtol=1e-5, atol=1e-6)


def test_heads_that_do_not_divide_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"7.*2"):
        fg.attention(*tensors(device, heads=(7, 2)))


@pytest.mark.parametrize("empty", [{"batch": 0}, {"heads": 0}, {"q_len": 0}, {"q_len": 0, "kv_len": 0}])
def test_nothing_in_gives_nothing_out(device: str, empty: dict[str, int]) -> None:
    given = tensors(device, torch.float16, **empty, v_head_dim=24)
    out, lse = fg.attention(*given, mask=fg.causal(), return_lse=True)
    assert out.shape == (*given[0].shape[:3], 24)
    assert lse.shape == given[0].shape[:3]
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    assert out.device == given[0].device


def test_more_than_65535_heads_and_batch_entries(device: str) -> None:
    q, k, v = tensors(device, batch=70, heads=1_000, q_len=1, kv_len=3, head_dim=2)
    lengths = torch.full((70,), 3, device=device)
    if device == "cpu":
        lengths[2:-5] = 0  # the emulator takes a quarter of the time for blocks that have only zeros to write
    expected = ((q @ k.mT) * 2**-0.5).softmax(-1) @ v * (lengths > 0)[:, None, None, None]
    found = fg.attention(q, k, v, mask=fg.padding(lengths))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Room:
    """Numbers far apart in memory that no one else touches: on the CPU in a file with holes, and no disk."""

    def __init__(self, device: str) -> None:
        self.device = device

    def spread(self, tensor: Tensor, strides: Sequence[int]) -> Tensor:
        """``tensor`` with other strides, in memory of its own."""
        reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True))
        if self.device == "cpu":
            file = os.memfd_create("room")
            os.ftruncate(file, reach * tensor.element_size())
            memory = torch.frombuffer(mmap.mmap(file, 0), dtype=tensor.dtype)
            os.close(file)
        else:
            memory = torch.empty(reach, dtype=tensor.dtype, device=self.device)
        far = memory.as_strided(tensor.shape, strides)
        far.copy_(tensor)
        return far


@pytest.mark.parametrize("which", [0, 1, 2])
def test_offsets_have_64_bits(device: str, which: int) -> None:
    given = list(tensors(device, torch.float16, q_len=70, kv_len=70))
    expected = fg.attention(*given, mask=fg.causal())
    b, h, s, d = given[which].stride()
    room = Room(device)
    given[which] = room.spread(given[which], (b, h, 2**31 // 60, d))
    torch.testing.assert_close(fg.attention(*given, mask=fg.causal()), expected)
    given[which] = room.spread(given[which].contiguous(), (b, 2**31 + 2**20, s, d))
    torch.testing.assert_close(fg.attention(*given, mask=fg.causal()), expected)


def test_offsets_of_masks_and_biases_have_64_bits(device: str) -> None:
    given, room = tensors(device), Room(device)
    pairs = torch.rand(70, 70, generator=torch.Generator().manual_seed(2)).to(device) < 0.5
    bias = torch.randn(2, 70, 70, generator=torch.Generator().manual_seed(3)).half().to(device)
    expected = attend(given, mask=fg.capture(pairs, "q kv"), bias=bias)
    far_pairs, far_bias = room.spread(pairs, (2**31 // 50, 3)), room.spread(bias, (2**31 + 2**20, 70, 1))
    found = fg.attention(*given, mask=fg.capture(far_pairs, "q kv"), bias=far_bias)
    torch.testing.assert_close(found, expected)
    table = fg.capture(far_pairs, "row column")
    found = fg.attention(*given, mask=table[fg.q, fg.kv], bias=bias)
    torch.testing.assert_close(found, expected)


# ------------------------------------------------------------------------------------- 6. strides, dtypes


@by_dtype
def test_any_strides(device: str, dtype: torch.dtype) -> None:
    q, k, v = tensors(device, dtype, batch=2, heads=4, q_len=37, kv_len=37, head_dim=32)
    mask = torch.rand(2, 1, 37, 37, generator=torch.Generator().manual_seed(1)).to(device)
    parts = {"mask": fg.causal(), "bias": mask, "return_lse": True}
    expected = attend((q, k, v), **parts)
    packed = torch.stack([each.transpose(1, 2) for each in (q, k, v)], dim=2)  # b s 3 h d
    padded = torch.full((3, 2, 4, 2 * 37, 2 * 32), math.nan, device=device, dtype=dtype)
    padded[..., ::2, ::2] = torch.stack([q, k, v])
    parts["bias"] = mask.transpose(2, 3).contiguous().transpose(2, 3)
    for strided in (
        [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, k, v)],
        [each.transpose(0, 3).contiguous().transpose(0, 3) for each in (q, k, v)],
        [packed[:, :, i].transpose(1, 2) for i in range(3)],
        [padded[i, ..., ::2, ::2] for i in range(3)],
    ):
        found = attend(strided, **parts)
        if dtype == torch.float32:  # others may be copied, and multiplied, in another way
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_expanded_inputs(device: str) -> None:
    q, k, v = tensors(device, batch=3, heads=4)
    wide = [each[:1, :1].expand(3, 4, -1, -1) for each in (k, v)]
    once = fg.attention(q, *[each.contiguous() for each in wide], mask=fg.causal())
    assert torch.equal(attend((q, *wide), mask=fg.causal()), once)
    keys_alike = k[:, :, :1].expand(-1, -1, 70, -1)
    assert torch.equal(fg.attention(q, keys_alike, v), fg.attention(q, keys_alike.contiguous(), v))


@pytest.mark.parametrize("mixed", ["q", "k", "v"])
def test_a_mix_of_dtypes_names_the_three(device: str, mixed: str) -> None:
    given = dict(zip("qkv", tensors(device), strict=True))
    given[mixed] = given[mixed].half()
    named = ", ".join(f"{name} float{16 if name == mixed else 32}" for name in "qkv")
    with pytest.raises(TypeError, match=named):
        fg.attention(**given)


def test_a_mix_of_devices_names_the_three(device: str) -> None:
    q, k, v = tensors(device)
    with pytest.raises(ValueError, match=rf"q {q.device}, k meta, v {q.device}"):
        fg.attention(q, k.to("meta"), v)


# ------------------------------------------------------------------------------------------- 7. dropout


@by_dtype
def test_statistics_ignore_dropout(device: str, dtype: torch.dtype) -> None:
    given = tensors(device, dtype)
    parts = {"mask": fg.causal(), "return_lse": True}
    plain, lse = fg.attention(*given, **parts)
    torch.manual_seed(4)
    seed = int(draw_seed(given[0].device))
    torch.manual_seed(4)
    dropped = fg.attention(*given, **parts, dropout=0.4)
    require(dropped, traced_attention(**parts, dropout=0.4), given, seed)
    torch.manual_seed(5)
    others = fg.attention(*given, **parts, dropout=0.4)
    assert not torch.equal(others[0], dropped[0])
    assert torch.equal(others[1], dropped[1]), "the same kernel sums the same, whatever it drops"
    found = fg.attention(*given, **parts, dropout=0.0)
    assert torch.equal(found[0], plain)
    assert torch.equal(found[1], lse)
    nothing = fg.attention(*given, **parts, dropout=1.0)
    assert (nothing[0] == 0).all()
    require(nothing, traced_attention(**parts, dropout=1.0), given)


@pytest.mark.parametrize(("family", "head_dim"), [("sm80", 128), ("sm90", 16)])
def test_a_rate_near_one_leaves_fp16_room(device: str, family: str, head_dim: int) -> None:
    """In one half scores are higher by less than a maximum may lag behind; what is left is scaled by 1000."""
    need(device, family)
    for high in (slice(None, 200), slice(200, None)):
        q, k, v = tensors(device, torch.float16, kv_len=400, head_dim=head_dim)
        q[:], k[:] = 0.0, 0.0
        q[..., 0], k[..., high, 0] = head_dim**0.5, 5.3
        torch.manual_seed(4)
        seed = int(draw_seed(q.device))
        torch.manual_seed(4)
        out = fg.attention(q, k, v, dropout=0.999, family=family)
        require(out, traced_attention(dropout=0.999), (q, k, v), seed)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_powers_of_weights_leave_fp16_room(device: str, family: str) -> None:
    """Weights that a maximum lags behind by fit fp16; their fourth powers would not."""
    need(device, family)

    @fg.program
    def powers(q: Q, k: K, v: V):  # type: ignore[no-untyped-def]
        s = fg.dot(q, k, over="d") * fg.rsqrt(fg.size("d"))
        less = s - fg.max(s, over="kv")
        w, fourth = fg.exp(less), fg.exp(4.0 * less)
        return tuple(fg.dot(x, v, over="kv") / fg.sum(x, over="kv") for x in (w, fourth))

    for high in (slice(None, 200), slice(200, None)):
        q, k, v = tensors(device, torch.float16, kv_len=400, head_dim=64)
        q[..., 0], k[..., 0], k[..., high, 0] = 8.0, 0.0, 5.3
        require(powers.options(family=family)(q, k, v), powers.trace(), (q, k, v))


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_a_rate_that_is_no_probability_is_refused(device: str, rate: float) -> None:
    with pytest.raises(ValueError, match=r"rate|dropout"):
        fg.attention(*tensors(device), dropout=rate)


# ------------------------------------------------------------------------------------------------ tolerance


def test_long_rows_are_as_exact_as_eager(device: str) -> None:
    """torch sums a few long rows in parts."""
    for kv_len in (16_384,) if device == "cpu" else (4096, 16_384, 65_536):
        attend(tensors(device, q_len=4, kv_len=kv_len, head_dim=64), return_lse=True)


def test_weights_below_the_least_normal_number_count(device: str) -> None:
    q, k, v = tensors(device, q_len=9, kv_len=70)
    attend((q, k, v), sink=torch.full((q.shape[1],), 92.0, device=device), return_lse=True)


def test_scores_with_one_large_term_are_as_exact_as_eager(device: str) -> None:
    """All others are added to it, each time rounded at its size."""
    q, k, v = tensors(device, q_len=2, kv_len=70, head_dim=192)
    q[..., 0], k[..., 0] = 8.0, 15.0 * 192**0.5
    attend((q, k, v), return_lse=True)


# --------------------------------------------------------------------------------- 9. bits;  11. refusals


def test_the_same_call_gives_the_same_bits(device: str, repeats: int) -> None:
    ids = torch.arange(127, device=device, dtype=torch.int32) // 30
    for dtype in DTYPES:
        given = tensors(device, dtype, heads=(6, 2), q_len=127, kv_len=127, head_dim=64)
        parts = {
            "mask": fg.causal() & fg.document(ids),
            "bias": given[0][:, :, :, :1].float(),
            "sink": torch.zeros(6, device=device),
            "return_lse": True,
        }
        first = fg.attention(*given, **parts)
        for _ in range(repeats):
            found = fg.attention(*given, **parts)
            assert all(torch.equal(x, y) for x, y in zip(found, first, strict=True))


def test_what_can_not_fit_is_refused_before_anything_is_built(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(*_: object, **__: object) -> None:
        raise AssertionError("something was built")

    compiling = sys.modules["fagen.compile"]
    monkeypatch.setattr(compiling, "build", built)
    monkeypatch.setattr(compiling, "compile_text", built)
    given = tensors(device, q_len=4, kv_len=4, head_dim=20_000)
    with pytest.raises(PlanError, match=r"head_dim 20,?000 in fp32 needs at least .*; up to \d+ fits"):
        fg.attention(*given)
    with pytest.raises(PlanError, match=r"family"):
        fg.attention(*tensors(device), family="abacus")


# ------------------------------------------------------------------------------------- 8. few queries a head


def _own_document(q: Q, k: K, v: V, ids: fg.Tensor["b kv", int]) -> Any:  # type: ignore[valid-type]
    """The last query stands at the last key."""
    own = ids[fg.b, fg.q + fg.size("kv") - fg.size("q")] == ids[fg.b, fg.kv]
    weights = fg.softmax(fg.where(own, fg.dot(q, k, over="d"), -fg.inf), over="kv")
    return fg.dot(weights, v, over="kv")


few_by_family = pytest.mark.parametrize("family", ["simt", "sm80", "sm90"])


def few(
    device: str, family: str, group: int, q_len: int, head_dim: int = 32
) -> tuple[Tensor, Tensor, Tensor]:
    """One kernel serves all lengths of a group."""
    need(device, family)
    dtype = torch.float32 if family == "simt" else torch.float16
    shape = {"batch": 2, "heads": (2 * group, 2), "q_len": q_len, "kv_len": 150, "head_dim": head_dim}
    return tensors(device, dtype, **shape)


@few_by_family
def test_heads_of_a_group_share_tiles_and_keep_their_own_scores(device: str, family: str) -> None:
    """Slopes, sinks and random numbers are those of the head; the window ends at the last key."""
    sink = torch.linspace(-2, 2, 8, device=device)
    parts = {"score": fg.alibi(), "mask": fg.sliding_window(90, 0), "sink": sink, "dropout": 0.3}
    for q_len in (1, 3, 5, 18):
        given = few(device, family, 4, q_len)
        torch.manual_seed(q_len)
        seed = int(draw_seed(given[0].device))
        torch.manual_seed(q_len)
        outputs = fg.attention(*given, **parts, return_lse=True, family=family)
        require(outputs, traced_attention(**parts, return_lse=True), given, seed)


@few_by_family
def test_heads_of_a_group_share_tiles_under_a_mask_of_documents(device: str, family: str) -> None:
    ids = (torch.arange(150, device=device) // 40).to(torch.int32).expand(2, 150)
    own_document = fg.program(_own_document).options(family=family)
    for q_len in (2, 5):
        given = (*few(device, family, 8, q_len), ids)
        require(own_document(*given), own_document.trace(), given)


@few_by_family
@pytest.mark.parametrize("group", [3, 8])
def test_any_group_may_be_one_of_few_queries(device: str, family: str, group: int) -> None:
    """Of three heads some rows of a tile are nobody's; positions may lie before heads in memory."""
    causal = traced_attention(mask=fg.causal())
    for q_len in (1, 4):
        given = few(device, family, group, q_len)
        require(fg.attention(*given, mask=fg.causal(), family=family), causal, given)
        turned = [each.transpose(1, 2) for each in given]
        outputs = fg.attention(*turned, mask=fg.causal(), layout="bshd", family=family)
        require(outputs.transpose(1, 2), causal, given)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_gradients_of_heads_that_share_tiles_drop_what_their_own_dropped(device: str, family: str) -> None:
    given = wanting(few(device, family, 4, 3, head_dim=80))
    torch.manual_seed(1)
    seed = int(draw_seed(given[0].device))
    torch.manual_seed(1)
    found = gradients(given, dropout=0.3, family=family)
    require_right(given, found, seed=seed, dropout=0.3)
