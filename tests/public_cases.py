"""Reports of what broke other attention libraries, each as a test named after its number: the forward parts.

The test files of the emulator and of a GPU import these functions and give them their ``device``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen as fg
from edges import DTYPES, K, Q, V, attend, by_dtype, require, tensors
from fagen.ir.reference import compare
from fagen.lang.attention import attention as traced_attention
from fagen.torch_op import draw_seed


def near(out: Tensor, expected: Tensor, error: float = 1e-6) -> None:
    torch.testing.assert_close(out.double(), expected.double().expand_as(out), rtol=error, atol=error)


# ------------------------------------------------------------------------------- masks, empty rows, extremes


def test_b01_one_row_without_a_key(device: str) -> None:
    given = tensors(device, batch=2, heads=1, q_len=4, kv_len=4, head_dim=1)
    lengths = torch.tensor([4, 2], device=device)
    mask = (fg.kv >= fg.q - 1) & (fg.kv <= fg.q) & fg.padding(lengths)
    out, lse = attend(given, mask=mask, return_lse=True)
    assert out[1, 0, 3] == 0
    assert lse[1, 0, 3] == -math.inf
    others = torch.ones(2, 1, 4, dtype=torch.bool, device=device)
    others[1, 0, 3] = False
    assert lse[others].isfinite().all()
    deleted = (given[0][:, :, :3], *given[1:])
    for alone, together in zip(attend(deleted, mask=mask, return_lse=True), (out, lse), strict=True):
        assert torch.equal(alone, together[:, :, :3])


@by_dtype
@pytest.mark.parametrize("softcap", [False, True])
def test_b04_a_bias_of_the_lowest_finite_number(device: str, dtype: torch.dtype, softcap: bool) -> None:
    given = tensors(device, dtype, heads=1, q_len=3, kv_len=4, head_dim=4)
    for lowest in (torch.finfo(each).min for each in DTYPES):
        if abs(lowest) > torch.finfo(dtype).max:
            continue
        for kept in (0, 1):  # a full row, and one with another key
            bias = torch.ones(3, 4, dtype=dtype, device=device)
            bias[0, kept:] = lowest
            score = fg.softcap(2.0) if softcap else None
            out, lse = fg.attention(*given, bias=bias, score=score, return_lse=True)
            assert out.isfinite().all()
            assert lse.isfinite().all()
            if kept:
                near(out[0, 0, 0], given[2][0, 0, 0])
            elif lowest < -1e30:
                near(out[0, 0, 0], given[2][0, 0].double().mean(0), 4 * torch.finfo(dtype).eps)
            plain = fg.attention(*given, score=score)
            near(out[0, 0, 1:], plain[0, 0, 1:], 4 * torch.finfo(dtype).eps)


def test_b05_what_causal_means_for_other_lengths(device: str) -> None:
    for q_len, kv_len, last, first in (
        (2, 5, [1.5, 2.0], [0.0, 0.5]),
        (5, 2, [0, 0, 0, 0, 0.5], [0] + 4 * [0.5]),
    ):
        q, k = (torch.zeros(1, 1, length, 1, device=device) for length in (q_len, kv_len))
        v = torch.arange(kv_len, dtype=torch.float32, device=device).view(1, 1, -1, 1)
        near(fg.attention(q, k, v, mask=fg.causal()).flatten(), torch.tensor(last, device=device))
        top = fg.attention(q, k, v, mask=fg.causal(align="top_left"))
        near(top.flatten(), torch.tensor(first, device=device))


def test_b23_nan_in_a_masked_key(device: str) -> None:
    pairs = fg.capture(torch.tensor([[True, False], [True, False]], device=device), "q kv")
    for spoilt in (1, 2):
        for value in (math.nan, math.inf):
            given = [torch.arange(8.0, device=device).view(1, 1, 2, 4) for _ in range(3)]
            given[spoilt][0, 0, 1, 0] = value
            for mask in (pairs, fg.kv < 1):
                out = fg.attention(*given, mask=mask, family="simt")
                near(out, torch.arange(4.0, device=device))


def test_b25_softcap_comes_before_the_mask(device: str) -> None:
    q, k = torch.zeros(2, 1, 1, 2, 1, device=device)
    v = torch.eye(2, device=device).view(1, 1, 2, 2)
    additive = torch.tensor([[0.0, -math.inf], [0.0, 0.0]], device=device)
    for score in (fg.softcap(1.0), fg.tanh, [fg.tanh, lambda s: fg.where(fg.kv <= fg.q, s, -fg.inf)]):
        for parts in ({"mask": fg.causal()}, {"bias": additive}):
            out = fg.attention(q, k, v, score=score, **parts)
            near(out[0, 0], torch.tensor([[1.0, 0.0], [0.5, 0.5]], device=device))


def test_b27_a_window_of_0_is_0(device: str) -> None:
    q, k, v = tensors(device, q_len=7, kv_len=7)
    out, lse = attend((q, k, v), mask=fg.sliding_window(0, 0), return_lse=True)
    near(out, v)
    near(lse, (q.double() * k.double()).sum(-1) / 4)
    causal = fg.attention(q, k, v, mask=fg.causal())
    near(fg.attention(q, k, v, mask=fg.sliding_window(None, 0)), causal)
    near(fg.attention(q, k, v, mask=fg.causal() & fg.sliding_window(None, 0)), causal)
    near(
        fg.attention(q, k, v, mask=fg.sliding_window(0, None)),
        fg.attention(q, k, v, mask=fg.kv >= fg.q),
    )


def test_b29_a_list_of_blocks_is_not_dropped(device: str) -> None:
    side = 256 if device == "cuda" else 64
    given = tensors(device, torch.bfloat16, q_len=4 * side, kv_len=4 * side, head_dim=128)
    blocks = torch.zeros(4, 4, dtype=torch.bool)
    for row, columns in enumerate(([0, 2], [1, 3], [0, 3], [2, 3])):
        blocks[row, columns] = True
    blocks = blocks.to(device)
    table = fg.capture(blocks, "row column")[fg.q // side, fg.kv // side]
    always = (fg.kv >= 0) & (fg.q < fg.size("q"))
    pairs = blocks.repeat_interleave(side, 0).repeat_interleave(side, 1)
    for mask in (table & always, table, fg.capture(pairs, "q kv")):
        attend(given, mask=mask)  # each a kernel of its own, which may sum in another order
    ones = torch.ones(1, 2, 4 * side, 128, device=device, dtype=torch.bfloat16)
    _, lse = fg.attention(ones, ones, ones, mask=table, scale=0.0, return_lse=True)
    near(lse, torch.tensor(math.log(2.0 * side), device=device))


# --------------------------------------------------------------------------------------- lengths, head dims


@pytest.mark.parametrize("factor", [3, 5, 50])
def test_b07_a_single_key_of_large_numbers(device: str, factor: int) -> None:
    generator = torch.Generator().manual_seed(352)
    q, k, v = (factor * torch.randn(3, 1, 1, 1, 16, generator=generator)).half().to(device)
    out, lse = attend((q, k, v), return_lse=True)
    assert torch.equal(out, v)
    near(lse, (q.double() * k.double()).sum(-1) / 4)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_b09_nothing_to_do(device: str, layout: str) -> None:
    def make(b: int, s: int, h: int) -> Tensor:
        shape = (b, s, h, 64) if layout == "bshd" else (b, h, s, 64)
        return torch.ones(shape, dtype=torch.float16, device=device)

    for b, q_len, kv_len, h in ((0, 3952, 16, 10), (2, 39, 16, 0), (2, 0, 16, 10), (0, 0, 0, 0)):
        q, k = make(b, q_len, h), make(b, kv_len, h)
        out, lse = fg.attention(q, k, k, layout=layout, return_lse=True)
        assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)
        assert (lse.shape, lse.dtype) == ((b, h, q_len), torch.float32)
    attend(tensors(device))


@pytest.mark.parametrize("s", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("more", [0, 1, 5, 64])
def test_b11_lengths_that_are_no_multiples(device: str, s: int, more: int) -> None:
    for count in (s, s + more):  # memory that is handed out again is full of NaN
        del_me = [torch.full((1, 2, count, 16), math.nan, device=device) for _ in range(4)]
        del del_me
    q = torch.ones(1, 2, s + more, 16, device=device)
    k = torch.ones(1, 2, s, 16, device=device)
    out, lse = fg.attention(q, k, k.clone(), return_lse=True)
    near(out, torch.ones((), device=device))
    near(lse, torch.tensor(4 + math.log(s), device=device))


@pytest.mark.parametrize("head_dim", [1, 8, 40, 63, 72, 80, 96, 112, 160, 192, 256])
def test_b13_head_dims_that_are_no_powers_of_two(device: str, head_dim: int) -> None:
    given = tensors(device, torch.float16, batch=2, heads=2, q_len=129, kv_len=129, head_dim=head_dim)
    room = [torch.full((*each.shape[:3], head_dim + 8), math.nan, device=device).half() for each in given]
    cut = [wide[..., :head_dim] for wide in room]
    for place, each in zip(cut, given, strict=True):
        place.copy_(each)
    out = attend(cut, mask=fg.causal())
    assert out.shape[-1] == head_dim


@pytest.mark.parametrize("group", [3, 5, 6, 7, 16])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 4096), (130, 200)])
def test_b31_groups_that_are_no_powers_of_two(device: str, group: int, q_len: int, kv_len: int) -> None:
    given = tensors(device, heads=(2 * group, 2), q_len=q_len, kv_len=kv_len)
    out = attend(given)

    def by_head(dtype: torch.dtype) -> Tensor:
        q, k, v = (each.to(dtype) for each in given)
        heads = [(q[:, head], k[:, head // group], v[:, head // group]) for head in range(2 * group)]
        return torch.stack([(qh @ kh.mT / 4).softmax(-1) @ vh for qh, kh, vh in heads], 1)

    compare(out, by_head(torch.float64), by_head(torch.float32)).require()


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "dtype"),
    [(192, 128, torch.bfloat16), (256, 256, torch.float32), (512, 512, torch.bfloat16)],
    ids=["192-128-bf16", "256-fp32", "512-bf16"],
)
def test_b12_tiles_that_fit_a_smaller_gpu(
    device: str, head_dim: int, v_head_dim: int, dtype: torch.dtype
) -> None:
    if device == "cpu":
        limits = {"sm_75": 65_536, "sm_86": 101_376, "sm_90a": 232_448}
    else:
        limits = {"sm_{}{}".format(*torch.cuda.get_device_capability()): 232_448}
    given = tensors(device, dtype, q_len=70, kv_len=100, head_dim=head_dim, v_head_dim=v_head_dim)
    for arch, limit in limits.items():
        kernel = fg.compile(
            head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, arch=arch, mask=fg.causal()
        )
        assert all(each.shared_bytes <= limit for each in kernel.plan.kernels)
        require(kernel(*given), traced_attention(mask=fg.causal()), given)


# --------------------------------------------------------------------------------------------- strides, bias


def test_b15_tensors_that_are_not_contiguous(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 37, 4, 32, generator=generator).to(device)
    packed = torch.randn(2, 37, 3, 4, 32, generator=generator).to(device)
    bias = torch.randn(2, 1, 37, 37, generator=generator).to(device).transpose(2, 3)
    for given in ([x.transpose(1, 2)] * 3, [packed[:, :, i].transpose(1, 2) for i in range(3)]):
        out = attend(given, bias=bias)
        copies = [each.contiguous() for each in given]
        assert torch.equal(fg.attention(*copies, bias=bias.contiguous()), out)


@pytest.mark.parametrize("kv_len", [43, *range(1, 33)])
def test_b19_a_bias_of_any_row_length(device: str, kv_len: int) -> None:
    lengths = range(1, 33) if kv_len == 43 else (1, 9)
    for q_len in lengths:
        given = tensors(device, torch.float16, heads=16, q_len=q_len, kv_len=kv_len, head_dim=8, seed=q_len)
        bias = torch.randn(1, 16, q_len, kv_len, generator=torch.Generator().manual_seed(q_len))
        attend(given, bias=bias.half().to(device))


def test_b39_learned_biases_of_any_shape(device: str) -> None:
    length = 65
    q, k, v = tensors(device, batch=2, heads=3, q_len=length, kv_len=length)
    generator = torch.Generator().manual_seed(1)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    rows, keys = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)
    factor, table = make(), make(2 * length)
    by_table = fg.capture(table, "n")
    raw = (q @ k.mT) * 0.25
    cases: list[tuple[dict[str, Any], Tensor]] = [
        ({"score": lambda s: s * fg.capture(factor, "")}, raw * factor),
        ({"score": lambda s: s + by_table[fg.q - fg.kv + length]}, raw + table[rows - keys + length]),
        ({"score": lambda s: s + by_table[fg.q + fg.kv]}, raw + table[rows + keys]),
    ]
    for shape in ((1, 3, 1, length), (2, 1, length, 1)):
        bias = make(*shape)
        cases.append(({"bias": bias}, raw + bias))
    by_head, by_key = make(3), make(length)
    cases.append(({"bias": fg.capture(by_head, "h")}, raw + by_head[:, None, None]))
    cases.append(({"bias": by_key}, raw + by_key))
    for parts, s in cases:
        out = attend((q, k, v), **parts)
        near(out, s.double().softmax(-1) @ v.double(), 1e-5)


# ---------------------------------------------------------------------------------------------- LSE, dropout


def test_b37_parts_merge_by_their_logarithms(device: str) -> None:
    q, k, v = tensors(device, q_len=9, kv_len=1600)
    whole, whole_lse = attend((q, k, v), return_lse=True)
    outs, lses = zip(
        *(
            fg.attention(q, k[:, :, i : i + 200], v[:, :, i : i + 200], return_lse=True)
            for i in range(0, 1600, 200)
        ),
        strict=True,
    )
    lse = torch.stack(lses).double().logsumexp(0)
    near(lse, whole_lse)
    weights = (torch.stack(lses).double() - lse).exp()
    near((torch.stack(outs).double() * weights[..., None]).sum(0), whole)


def test_b33_dropout_scales_what_stays(device: str) -> None:
    ones = torch.ones(1, 4096, 1, 1, device=device)
    torch.manual_seed(5)
    out, lse = fg.attention(ones, ones, ones, dropout=0.5, return_lse=True)
    assert ((out == 0) | (out == 2)).all()
    assert abs((out == 2).sum().item() - 2048) < 5 * 32
    near(lse, ones.flatten(2))
    given = tensors(device, q_len=64, kv_len=64)
    torch.manual_seed(6)
    seed = int(draw_seed(given[0].device))
    torch.manual_seed(6)
    parts = {"mask": fg.causal(), "dropout": 0.5, "return_lse": True}
    out, lse = fg.attention(*given, **parts)
    require((out, lse), traced_attention(**parts), given, seed)
    assert (out[:, :, 0].abs() == 2 * given[2][:, :, 0].abs()).logical_or(out[:, :, 0] == 0).all()
    torch.manual_seed(7)
    other, same = fg.attention(*given, **parts)
    assert not torch.equal(other, out)
    assert torch.equal(same, lse)


def test_b45_layers_draw_different_masks(device: str) -> None:
    given = tensors(device)

    def layers() -> list[Tensor]:
        torch.manual_seed(11)
        return [fg.attention(*given, dropout=0.3) for _ in range(2)]

    first, second = layers()
    assert not torch.equal(first, second)
    assert all(torch.equal(x, y) for x, y in zip(layers(), (first, second), strict=True))

    @fg.program
    def twice(q: Q, k: K, v: V):
        p = fg.softmax(fg.dot(q, k, over="d"), over="kv")
        return fg.dot(fg.dropout(p, 0.3), v, over="kv"), fg.dot(fg.dropout(p, 0.3), v, over="kv")

    torch.manual_seed(11)
    seed = int(draw_seed(given[0].device))
    torch.manual_seed(11)
    found = twice(*given)
    require(found, twice.trace(), given, seed)
    assert not torch.equal(*found)


def test_b35_the_same_bits_every_time(device: str, repeats: int) -> None:
    q_len, most = (2048, 8) if device == "cuda" else (150, 4)
    for heads in ((most, most), (most, most // 4)):
        given = tensors(device, torch.bfloat16, batch=2, heads=heads, q_len=q_len, kv_len=q_len, head_dim=128)
        first = fg.attention(*given, mask=fg.causal(), return_lse=True)
        for _ in range(min(repeats, 30)):
            again = fg.attention(*given, mask=fg.causal(), return_lse=True)
            assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))


# ------------------------------------------------------------------------------- callers: closures, compilers


def test_b51_partials_and_methods_keep_their_own_values(device: str) -> None:
    given = tensors(device)

    def bent(s: Any, by: float, *, far: float = 0.0) -> Any:
        return s * by - far * abs(fg.q - fg.kv)

    class Bend:
        def __init__(self, by: float) -> None:
            self.by = by

        def of(self, s: Any) -> Any:
            return bent(s, self.by)

        def __call__(self, s: Any) -> Any:
            return bent(s, -self.by)

    results = []
    bend = Bend(0.25)
    for score in (
        functools.partial(bent, by=0.5),
        functools.partial(bent, by=2.0),
        functools.partial(bent, by=2.0, far=0.1),
        bend.of,
        bend,
    ):
        results.append(attend(given, score=score))
    bend.by = 4.0
    results += [attend(given, score=bend.of), attend(given, score=bend)]
    assert all(not torch.equal(x, y) for i, x in enumerate(results) for y in results[:i])


@pytest.mark.parametrize("transposed", [False, True])
def test_b43_compiled_by_torch(device: str, transposed: bool) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = fg.attention(q, k, v, layout="bshd", mask=fg.causal(), return_lse=True)
        return out * 2, lse

    torch._dynamo.reset()
    heads = 8 if device == "cuda" else 2
    compiled = torch.compile(layer, backend="aot_eager", dynamic=True)
    for length in (128, 196, 256, 257):
        q, k, v = (
            each.transpose(1, 2).contiguous()
            for each in tensors(device, torch.bfloat16, heads=heads, q_len=length, kv_len=length, head_dim=64)
        )
        if transposed:
            q = q.transpose(1, 2).contiguous().transpose(1, 2)
        for x, y in zip(compiled(q, k, v), layer(q, k, v), strict=True):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
            assert torch.equal(x, y)
