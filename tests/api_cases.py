"""What calls on tensors promise, for CPU tensors (the emulator) and for a GPU alike.

`CASES` maps a name to a check of one device; each raises AssertionError where the promise is not kept.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import fagen as fg
from fagen.ir.reference import compare, eager, evaluate
from fagen.lang.attention import attention as traced_attention
from fagen.lang.trace import Traced
from fagen.torch_op import draw_seed
from sampler import lay_out

CASES: dict[str, Callable[[str], None]] = {}


def case(check: Callable[[str], None]) -> Callable[[str], None]:
    CASES[check.__name__] = check
    return check


Q, K, V, H = (fg.Tensor[axes] for axes in ("b h q d", "b hk kv d", "b hk kv dv", "h"))


@fg.program
def windowed(q: Q, k: K, v: V, slopes: H, strength: fg.Scalar, width: fg.Scalar[int]):
    """Keys in a window around the query, with a slope for each head."""
    s = fg.dot(q, k, over="d") * fg.rsqrt(fg.size("d")) + strength * slopes * (fg.kv - fg.q)
    s = fg.where((fg.q - fg.kv < width) & (fg.kv - fg.q < width), s, -fg.inf)
    return fg.dot(fg.softmax(s, over="kv"), v, over="kv"), fg.logsumexp(s, over="kv")


def tensors(
    device: str,
    *,
    batch: int = 2,
    q_heads: int = 4,
    kv_heads: int = 2,
    q_len: int = 33,
    kv_len: int = 49,
    head_dim: int = 16,
    v_head_dim: int = 24,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, q_heads, q_len, head_dim),
        (batch, kv_heads, kv_len, head_dim),
        (batch, kv_heads, kv_len, v_head_dim),
    )
    q, k, v = (torch.randn(shape, generator=make).to(device, dtype) for shape in shapes)
    return q, k, v


def arch_of(device: str) -> str:
    return "generic" if device == "cpu" else "sm_" + "".join(map(str, torch.cuda.get_device_capability()))


def require_right(
    outputs: Tensor | Sequence[Tensor], traced: Traced, given: Sequence[Any], seed: int = 0
) -> None:
    """Hold outputs to the meaning of what was called: values, shapes, dtypes and layout."""
    outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    values = (*given, *traced.captured)
    dtype = next(value.dtype for value in values if isinstance(value, Tensor))
    expected = evaluate(traced.graph, values, seed=seed)
    yardstick = eager(traced.graph, values, dtype, seed=seed)
    assert len(outputs) == len(expected)
    for number, (out, ref, rough) in enumerate(zip(outputs, expected, yardstick, strict=True)):
        assert out.shape == ref.shape
        assert out.device == values[0].device
        assert out.is_contiguous()
        compare(out, ref, rough).require(f"output {number}")


def require_attention(given: Sequence[Tensor], seed: int = 0, **parts: Any) -> Any:
    """Call `fg.attention` and hold it to its meaning."""
    outputs = fg.attention(*given, **parts)
    require_right(outputs, traced_attention(**parts), given, seed)
    return outputs


# ------------------------------------------------------------------------------------------------- results


@case
def outputs_have_the_documented_shape_and_dtype(device: str) -> None:
    given = tensors(device, dtype=torch.bfloat16)
    out, lse = require_attention(given, mask=fg.causal(), return_lse=True)
    assert (out.shape, out.dtype) == ((2, 4, 33, 24), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, 33), torch.float32)
    q, k, v = (tensor.transpose(1, 2) for tensor in given)
    out, lse = fg.attention(q, k, v, mask=fg.causal(), return_lse=True, layout="bshd")
    assert out.shape == (2, 33, 4, 24)
    assert out.is_contiguous()
    assert lse.shape == (2, 4, 33)


@case
def strides_may_be_any(device: str) -> None:
    q, k, v = tensors(device, head_dim=16, v_head_dim=16)
    mask = fg.causal()
    plain = fg.attention(q, k, v, mask=mask)
    transposed = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    last = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k, v)]
    room = [torch.full((2, t.shape[1], t.shape[2] + 3, 40), torch.nan, device=device) for t in (q, k, v)]
    for wide, t in zip(room, (q, k, v), strict=True):
        wide[:, :, 2:-1, 5:37:2] = t
    sliced = [wide[:, :, 2:-1, 5:37:2] for wide in room]
    for changed in (transposed, last, sliced):
        assert torch.equal(fg.attention(*changed, mask=mask), plain)
    packed = torch.randn(2, 33, 3, 4, 16, device=device)
    require_attention([packed[:, :, i].transpose(1, 2) for i in range(3)], mask=mask)


@case
def tensors_broadcast_along_a_length_of_one(device: str) -> None:
    q, k, v = tensors(device)
    mask = fg.causal()
    one, many = (q, k[:1], v[:, :1]), (q, k[:1].expand_as(k), v[:, :1].expand_as(v))
    assert torch.equal(fg.attention(*one, mask=mask), fg.attention(*many, mask=mask))
    assert torch.equal(
        fg.attention(q, k[:, :1], v[:, :1], mask=mask),
        fg.attention(q, k[:, :1].expand_as(k), v[:, :1].expand_as(v), mask=mask),
    )


@case
def groups_of_heads_may_have_any_size(device: str) -> None:
    for q_heads, kv_heads in ((3, 3), (6, 2), (5, 1)):
        require_attention(tensors(device, q_heads=q_heads, kv_heads=kv_heads), mask=fg.causal())


@case
def b09_empty_batch_heads_and_lengths_give_empty_or_zero_outputs(device: str) -> None:
    for empty in ({"batch": 0}, {"q_heads": 0, "kv_heads": 0}, {"q_len": 0}):
        given = tensors(device, **empty)
        out, lse = fg.attention(*given, return_lse=True)
        assert out.shape == (*given[0].shape[:3], 24)
        assert out.numel() == lse.numel() == 0
        assert (out.dtype, lse.dtype, out.device) == (torch.float32, torch.float32, given[0].device)
    out, lse = fg.attention(*tensors(device, kv_len=0), return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))
    require_attention(tensors(device))  # what was refused or skipped leaves no error behind


@case
def a_program_of_several_outputs_scalars_and_tables(device: str) -> None:
    given = tensors(device)
    slopes = torch.rand(4, generator=torch.Generator().manual_seed(1)).to(device)
    for strength, width in ((0.5, 7), (-2, 30)):
        outputs = windowed(*given, slopes, strength, width)
        require_right(outputs, windowed.trace(), (*given, slopes, float(strength), width))
    by_name = windowed(*given, width=30, slopes=slopes, strength=-2)
    assert all(torch.equal(x, y) for x, y in zip(outputs, by_name, strict=True))


K_HEADS, V_MIXED, MIX = (fg.Tensor[axes] for axes in ("b h kv d", "b e kv dv", "h e"))


@fg.program
def talking(q: Q, k: K_HEADS, v: V_MIXED, mix: MIX, strength: fg.Scalar, width: fg.Scalar[int]):
    """Heads mixed between softmax and the weighted sum: several kernels, with buffers between them."""
    s = fg.where(fg.q - fg.kv < width, strength * fg.dot(q, k, over="d"), -fg.inf)
    return fg.dot(fg.dot(fg.softmax(s, over="kv"), mix, over="h"), v, over="kv")


@case
def several_kernels_hand_on_their_buffers(device: str) -> None:
    q, k, v = tensors(device, q_heads=4, kv_heads=4)
    mix = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).to(device)
    for width in (9, -20):
        given = (q, k, v[:, :3], mix, 0.5, width)
        require_right(talking(*given), talking.trace(), given)


@case
def views_with_a_lazy_minus_are_read_with_it(device: str) -> None:
    q, k, v = tensors(device)
    pair = torch.view_as_complex(torch.stack([torch.zeros_like(q), -q], dim=-1))
    lazy = pair.conj().imag
    assert lazy.is_neg()
    assert torch.equal(fg.attention(lazy, k, v), fg.attention(q, k, v))
    assert torch.equal(fg.attention(q, k, v), fg.attention(lazy, k, v))


# ------------------------------------------------------------------------------------------------- dropout


@case
def dropout_follows_torchs_generator(device: str) -> None:
    given = tensors(device)

    def call() -> Tensor:
        return fg.attention(*given, dropout=0.3)

    torch.manual_seed(7)
    first, second = call(), call()
    torch.manual_seed(7)
    assert torch.equal(call(), first)
    assert torch.equal(call(), second)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    seed = int(draw_seed(given[0].device))
    require_right(first, traced_attention(dropout=0.3), given, seed)


@case
def dropout_of_nothing_and_of_everything(device: str) -> None:
    given = tensors(device)
    assert torch.equal(fg.attention(*given, dropout=0.0), fg.attention(*given))
    out, lse = fg.attention(*given, dropout=1.0, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, fg.attention(*given, return_lse=True)[1])


# -------------------------------------------------------------------------------------- closures, captures

_WIDTH = 5


@case
def b51_each_call_sees_its_own_closure(device: str) -> None:
    given = tensors(device)

    def make(width: int) -> fg.Program:
        @fg.program
        def narrow(q: Q, k: K, v: V, step=1):
            near = (fg.q - fg.kv < width) & (fg.q % step == 0) & (fg.kv - fg.q < _WIDTH)
            s = fg.where(near, fg.dot(q, k, over="d"), -fg.inf)
            return fg.dot(fg.softmax(s, over="kv"), v, over="kv")

        return narrow

    global _WIDTH
    narrow, wide = make(3), make(11)
    for each in (narrow, wide, narrow):
        require_right(each(*given), each.trace(), given)
    assert not torch.equal(narrow(*given), wide(*given))
    before = narrow(*given)
    _WIDTH = 2
    after = narrow(*given)
    _WIDTH = 5
    assert not torch.equal(before, after)
    assert torch.equal(narrow(*given), before)
    assert not torch.equal(narrow(*given, step=2), before)
    one, other = (lambda s: s * 2.0), (lambda s: s * 0.5)  # two functions of one line
    results = [fg.attention(*given, score=score) for score in (one, other)]
    assert not torch.equal(*results)


@case
def a_captured_tensor_is_an_argument(device: str) -> None:
    given = tensors(device)
    tables = [torch.randn(4, generator=torch.Generator().manual_seed(i)).to(device) for i in range(2)]
    held = {"table": tables[0]}

    def bent(s: Any) -> Any:
        return s * fg.capture(held["table"], "h")

    first = require_attention(given, score=bent)
    held["table"] = tables[1]
    second = require_attention(given, score=bent)
    assert not torch.equal(first, second)
    tables[1].copy_(tables[0])
    assert torch.equal(fg.attention(*given, score=bent), first)
    held["table"] = torch.zeros(4, device=device)  # a new one where the old may have lain
    del tables
    gc.collect()
    zeros = fg.attention(*given, score=bent)
    require_right(zeros, traced_attention(score=bent), given)


# -------------------------------------------------------------------------------------- gradients, autocast


def require_right_gradients(
    traced: Traced, given: Sequence[Any], found: Sequence[Tensor], incoming: Sequence[Tensor], seed: int = 0
) -> None:
    """Hold the gradients of the tensors that want one to the reference, by the rule for gradients."""
    graph = traced.graph
    values = [*given, *traced.captured]
    wanted = [i for i, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad]
    dtype = values[0].dtype

    def by_autograd(wide: bool, run: Callable[[Sequence[Any]], Sequence[Tensor]]) -> Sequence[Tensor]:
        leaves = list(values)
        for i in wanted:
            value = values[i].detach()
            leaves[i] = value.to(torch.float64 if wide else value.dtype, copy=True).requires_grad_()
        outputs = run(leaves)
        along = [g.to(o.dtype) for g, o in zip(incoming, outputs, strict=True)]
        return torch.autograd.grad(outputs, [leaves[i] for i in wanted], along)

    exact = by_autograd(True, lambda leaves: evaluate(graph, leaves, seed=seed))
    plain = by_autograd(False, lambda leaves: eager(graph, leaves, dtype, seed=seed))
    for i, mine, ref, yardstick in zip(wanted, found, exact, plain, strict=True):
        assert mine.dtype == values[i].dtype
        compare(mine, ref, yardstick, gradient=True).require(graph.arguments[i].name)


@case
def gradients_of_everything_are_right(device: str) -> None:
    q, k, v = (each.requires_grad_() for each in tensors(device))
    make = torch.Generator().manual_seed(2)
    bias = torch.randn(1, 4, 1, 49, generator=make).to(device).requires_grad_()
    sink = torch.randn(4, generator=make).to(device).requires_grad_()
    parts = {"mask": fg.causal(), "bias": bias, "sink": sink, "return_lse": True}
    out, lse = fg.attention(q, k, v, **parts)
    with torch.no_grad():
        assert not fg.attention(q, k, v).requires_grad
        expected = fg.attention(q, k, v, **parts)
    assert torch.equal(out, expected[0])
    incoming = tuple(torch.randn(each.shape, generator=make).to(device) for each in (out, lse))
    wanted = (q, k, v, bias, sink)
    found = torch.autograd.grad((out, lse), wanted, incoming)
    require_right_gradients(traced_attention(**parts), (q, k, v), found, incoming)
    again = fg.attention(q, k, v, **parts, deterministic=True)
    assert all(map(torch.equal, found, torch.autograd.grad(again, wanted, incoming)))


@case
def b15_gradients_of_tensors_that_are_not_contiguous(device: str) -> None:
    given = tensors(device)
    incoming = torch.randn(2, 4, 33, 24, device=device)
    results = []
    for how in ("contiguous", "transposed", "inner", "sliced", "packed"):
        moved = [lay_out(each, how).requires_grad_() for each in given]
        results.append(torch.autograd.grad(fg.attention(*moved, mask=fg.causal()), moved, incoming))
    assert all(all(map(torch.equal, results[0], found)) for found in results[1:])


@case
def b16_an_incoming_gradient_may_have_any_strides(device: str) -> None:
    q, k, v = (each.requires_grad_() for each in tensors(device))
    out = fg.attention(q, k, v, mask=fg.causal())
    dense = torch.randn_like(out)
    moved = dense.transpose(1, 3).contiguous().transpose(1, 3)
    sliced = dense.repeat_interleave(2, dim=-1)[..., ::2]
    first, *others = (
        torch.autograd.grad(out, (q, k, v), each, retain_graph=True) for each in (dense, moved, sliced)
    )
    assert all(all(map(torch.equal, first, other)) for other in others)
    one = torch.ones((), device=device)
    ones = torch.autograd.grad(out, (q, k, v), one.expand_as(out), retain_graph=True)
    assert all(map(torch.equal, ones, torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)))
    assert all(map(torch.equal, ones, torch.autograd.grad(out, (q, k, v), one.repeat(out.shape))))


@case
def some_gradients_are_wanted_and_some_come(device: str) -> None:
    q, k, v = tensors(device)
    v.requires_grad_()
    out, lse = fg.attention(q, k, v, return_lse=True)
    assert torch.autograd.grad(lse.sum(), v, retain_graph=True)[0].abs().max() == 0
    (only,) = torch.autograd.grad(out.sum(), v)
    q.requires_grad_()
    out, lse = fg.attention(q, k, v, return_lse=True)
    both = torch.autograd.grad(out.sum() + 0 * lse.sum(), (q, v))
    torch.testing.assert_close(both[1], only)


@case
def b38_the_gradient_through_lse_is_the_weights(device: str) -> None:
    q, k, v = (each.requires_grad_() for each in tensors(device))
    out, lse = fg.attention(q, k, v, mask=fg.causal(), return_lse=True)
    found = torch.autograd.grad(lse.mean(), (q, k))
    incoming = torch.zeros_like(out), torch.full_like(lse, 1 / lse.numel())
    traced = traced_attention(mask=fg.causal(), return_lse=True)
    zero = torch.zeros_like(v)
    require_right_gradients(traced, (q, k, v), (*found, zero), incoming)


@case
def dropout_drops_the_same_again_under_a_checkpoint(device: str) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fg.attention(q, k, v, dropout=0.25)

    given = [each.requires_grad_() for each in tensors(device)]
    torch.manual_seed(3)
    plain = torch.autograd.grad(layer(*given).sum(), given)
    torch.manual_seed(3)
    kept = torch.utils.checkpoint.checkpoint(layer, *given, use_reentrant=False)
    assert all(map(torch.equal, plain, torch.autograd.grad(kept.sum(), given)))
    torch.manual_seed(3)
    seed = int(draw_seed(given[0].device))
    ones = torch.ones_like(kept)
    require_right_gradients(traced_attention(dropout=0.25), given, plain, (ones,), seed)


@case
def dropout_drops_the_same_again_under_torch_compile(device: str) -> None:
    def twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return fg.attention(q, k, v, dropout=0.25), fg.attention(q, k, v, dropout=0.25)

    def kept(*given: Tensor) -> tuple[Tensor, Tensor]:
        return torch.utils.checkpoint.checkpoint(twice, *given, use_reentrant=False)

    def kept_outside(*given: Tensor) -> tuple[Tensor, Tensor]:
        operators = torch.compile(twice, backend="eager")
        return torch.utils.checkpoint.checkpoint(operators, *given, use_reentrant=False)

    given = [each.requires_grad_() for each in tensors(device)]
    found = []
    for run in (twice, torch.compile(kept, backend="aot_eager"), kept_outside):
        torch.manual_seed(3)
        outputs = run(*given)
        assert not torch.equal(*outputs)
        incoming = [torch.ones_like(each) for each in outputs]
        found.append((*outputs, *torch.autograd.grad(outputs, given, incoming)))
    plain, *others = found
    for each in others:
        torch.testing.assert_close(each, plain)


@case
def a_selective_checkpoint_keeps_or_runs_again_what_it_is_told(device: str) -> None:
    given = [each.requires_grad_() for each in tensors(device)]
    torch.manual_seed(3)
    expected = torch.autograd.grad(fg.attention(*given, dropout=0.25).square().sum(), given)
    for policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE):

        def told(*_: Any, policy: CheckpointPolicy = policy, **__: Any) -> CheckpointPolicy:
            return policy

        torch.manual_seed(3)
        out = torch.utils.checkpoint.checkpoint(
            partial(fg.attention, dropout=0.25),
            *given,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, told),
        )
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), given), expected)


@case
def gradients_under_autocast_have_the_dtype_of_their_tensor(device: str) -> None:
    q, k, v = (each.requires_grad_() for each in tensors(device))
    with torch.autocast(device, dtype=torch.bfloat16):
        out = fg.attention(q, k, v, mask=fg.causal())
        found = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert out.dtype == torch.bfloat16
    assert {each.dtype for each in found} == {torch.float32}
    rounded = [each.detach().bfloat16().requires_grad_() for each in (q, k, v)]
    expected = torch.autograd.grad(fg.attention(*rounded, mask=fg.causal()).float().sum(), rounded)
    assert all(torch.equal(mine, other.float()) for mine, other in zip(found, expected, strict=True))


@case
def a_gradient_is_recorded_after_calls_that_recorded_none(device: str) -> None:
    q, k, v = (each.requires_grad_() for each in tensors(device))
    with torch.no_grad():
        plain = [fg.attention(q, k, v, mask=fg.causal()) for _ in range(2)]
    with torch.inference_mode():
        plain += [fg.attention(q, k, v, mask=fg.causal()) for _ in range(2)]
    recorded = [fg.attention(q, k, v, mask=fg.causal()) for _ in range(2)]
    assert [each.requires_grad for each in (*plain, *recorded)] == [False] * 4 + [True] * 2
    with torch.no_grad():
        assert not fg.attention(q, k, v, mask=fg.causal()).requires_grad


@case
def a_kernel_compiled_ahead_has_no_gradient(device: str) -> None:
    q, k, v = tensors(device)
    kernel = fg.compile(head_dim=16, v_head_dim=24, dtype="fp32", arch=arch_of(device))
    out = kernel(q.requires_grad_(), k, v)
    with pytest.raises(fg.FagenError, match=r"attention: the gradient was asked for.*call the program"):
        out.sum().backward()


@case
def b42_autocast_computes_in_its_dtype_and_a_mix_is_refused(device: str) -> None:
    q, k, v = tensors(device)
    v = v.bfloat16()
    with pytest.raises(fg.FagenError, match="q float32, k float32, v bfloat16"):
        fg.attention(q, k, v)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = fg.attention(q, k, v, bias=torch.randn(33, 49, device=device))
        same = fg.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    require_right(same, traced_attention(), (q.bfloat16(), k.bfloat16(), v))
    with torch.autocast(device, enabled=False), pytest.raises(TypeError, match="v bfloat16"):
        fg.attention(q, k, v)


# ------------------------------------------------------------------------------------------ kernels, layers


@case
def a_kernel_compiled_ahead_runs(device: str) -> None:
    given = tensors(device)
    ids = torch.randint(0, 3, (2, 49), generator=torch.Generator().manual_seed(3)).sort(-1)[0].to(device)
    mask = fg.causal() & fg.document(ids)
    kernel = fg.compile(mask=mask, head_dim=16, v_head_dim=24, dtype="fp32", arch=arch_of(device))
    require_right(kernel(*given), traced_attention(mask=mask), given)
    other = torch.zeros_like(ids)
    require_right(kernel(*given, other), traced_attention(mask=fg.causal() & fg.document(other)), given)
    with pytest.raises(fg.FagenError, match="q holds fp16, and the kernel was compiled for fp32"):
        kernel(*(tensor.half() for tensor in given))
    with pytest.raises(fg.FagenError, match="head_dim is 8, and the kernel was compiled for 16"):
        kernel(*tensors(device, head_dim=8))
    program = fg.compile(windowed, head_dim=16, v_head_dim=24, dtype="fp32", arch=arch_of(device))
    slopes = torch.rand(4, device=device)
    out, lse = program(*given, slopes, 0.5, 9)
    require_right((out, lse), windowed.trace(), (*given, slopes, 0.5, 9))


@case
def parameters_and_subclasses_are_tensors(device: str) -> None:
    class Named(Tensor):
        pass

    q, k, v = tensors(device)
    expected = fg.attention(q, k, v)
    with torch.no_grad():
        assert torch.equal(fg.attention(torch.nn.Parameter(q), k, v), expected)
    out = fg.attention(q.as_subclass(Named), k, v)
    assert type(out) is Tensor
    assert torch.equal(out, expected)


@case
def torch_compile_sees_one_operator(device: str) -> None:
    q, k, v = tensors(device)
    slopes = torch.rand(4, device=device)
    mask = fg.causal()

    def halved(s: Any) -> Any:
        return s * 0.5

    def layer(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        out, lse = windowed(q * 2, k, v, slopes, width=9, strength=0.5)
        return out + 1, lse, kernel(q, k, v), fg.attention(q, k, v, mask=mask, bias=bias, score=halved)

    bias = torch.randn(33, 49, device=device)
    kernel = fg.compile(mask=mask, head_dim=16, v_head_dim=24, dtype="fp32", arch=arch_of(device))
    whole = torch.__version__ >= "2.13"  # older ones break the graph at a mask or score made outside
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=whole)
    for case_, lengths in enumerate(((33, 49), (20, 60))):
        q, k, v = tensors(device, q_len=lengths[0], kv_len=lengths[1], seed=case_)
        bias = torch.randn(lengths, device=device)
        for x, y in zip(compiled(q, k, v, slopes, bias), layer(q, k, v, slopes, bias), strict=True):
            assert x.dtype == y.dtype
            assert x.stride() == y.stride()
            torch.testing.assert_close(x, y)
