"""Reports of what broke other attention libraries, each as a test named after its number: gradients.

The test files of the emulator and of a GPU import these functions and give them their ``device``.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fagen as fg
from edges import gradients, require_right, tensors, wanting
from fagen.calls.prepared import emulation

ROWS, TABLE = (fg.Tensor[axes] for axes in ("b h q d", "n"))


@fg.program
def gathered(x: ROWS, table: TABLE):
    """Rows times the numbers of a table, each in turn."""
    return x * table[fg.q % fg.size("n")]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws is the same on every device and in every run."""
    torch.manual_seed(0)


def test_b01_one_row_without_a_key_spoils_no_gradient(device: str) -> None:
    given = wanting(tensors(device, batch=2, heads=1, q_len=4, kv_len=4, head_dim=1))
    lengths = torch.tensor([4, 2], device=device)
    mask = (fg.kv >= fg.q - 1) & (fg.kv <= fg.q) & fg.padding(lengths)
    out = fg.attention(*given, mask=mask)
    for rows in (slice(0, 2), slice(0, 4)):
        loss = out[:, :, rows].sum() if rows.stop == 2 else out[:, :, :3].sum() + out[0, :, 3].sum()
        found = torch.autograd.grad(loss, given, retain_graph=True)
        assert all(bool(each.isfinite().all()) for each in found)
        assert found[0][1, 0, 3] == 0
        assert bool((found[2][1, 0, 2:] == 0).all())
    without = fg.attention(given[0][:, :, :3], *given[1:], mask=mask)[:, :, :2].sum()
    expected = torch.autograd.grad(without, given)
    found = torch.autograd.grad(out[:, :, :2].sum(), given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("factor", [1, 5, 50])
def test_b07_the_gradient_of_a_single_key(device: str, factor: int) -> None:
    given = wanting(tensors(device, torch.float16, heads=1, q_len=1, kv_len=1, head_dim=16))
    with torch.no_grad():
        for each in given:
            each.mul_(3 * factor)
    dq, dk, dv = gradients(given)
    assert torch.equal(dv, torch.ones_like(dv))
    largest_q, largest_k, largest_v = (float(each.detach().abs().max()) for each in given)
    rounding = 16 * torch.finfo(torch.float32).eps * 16 * largest_v
    assert float(dq.abs().max()) <= rounding * largest_k
    assert float(dk.abs().max()) <= rounding * largest_q


def test_b09_gradients_of_nothing(device: str) -> None:
    for batch, heads, q_len in ((0, 2, 5), (2, 0, 5), (2, 2, 0)):
        shapes = (batch, heads, q_len, 16), (batch, heads, 7, 16), (batch, heads, 7, 16)
        given = [torch.randn(shape, device=device).half().requires_grad_() for shape in shapes]
        found = gradients(given)
        assert [each.shape for each in found] == [each.shape for each in given]
        assert all(bool((each == 0).all()) for each in found)


@pytest.mark.parametrize(("s", "more"), [(8, 1), (32, 0), (64, 5)])
def test_b11_gradients_at_lengths_that_are_no_multiples(device: str, s: int, more: int) -> None:
    shapes = (1, 2, s + more, 16), (1, 2, s, 16), (1, 2, s, 16)
    given = [torch.ones(shape, device=device, requires_grad=True) for shape in shapes]
    dq, dk, dv = gradients(given)
    torch.testing.assert_close(dv, torch.full_like(dv, (s + more) / s), rtol=1e-6, atol=1e-6)
    for each in (dq, dk):
        torch.testing.assert_close(each, torch.zeros_like(each), rtol=0, atol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_b23_what_a_masked_key_holds_reaches_no_gradient(device: str, value: float) -> None:
    x = torch.arange(8.0, device=device).view(1, 1, 2, 4)
    for place in (1, 2):
        given = [x.clone() for _ in range(3)]
        given[place][0, 0, 1, 0] = value
        found = gradients(wanting(given), mask=fg.kv < 1, family="simt")
        assert bool((found[1][0, 0, 1] == 0).all())
        assert bool((found[2][0, 0, 1] == 0).all())


def test_b27_gradients_of_a_window_of_0(device: str) -> None:
    given = wanting(tensors(device, heads=1, q_len=7, kv_len=7, head_dim=8))
    dq, dk, dv = gradients(given, mask=fg.sliding_window(0, 0))
    torch.testing.assert_close(dv, torch.ones_like(dv), rtol=0, atol=2**-22)  # 2 ulp: eager's is exact
    for each in (dq, dk):
        torch.testing.assert_close(each, torch.zeros_like(each), rtol=0, atol=1e-5)


def test_b33_dropout_drops_the_same_in_both_directions(device: str) -> None:
    heads = 4096 if device == "cuda" else 1024
    given = [torch.ones(1, heads, 1, 4, device=device, requires_grad=True) for _ in "qkv"]
    out = fg.attention(*given, dropout=0.5)
    *_, dv = torch.autograd.grad(out, given, torch.ones_like(out))
    assert torch.equal(dv, out)  # each head is one coin
    assert 0.45 < float((dv == 2).float().mean()) < 0.55
    assert all(bool((each == 0).all()) for each in gradients(given, dropout=1.0))


def test_b35_gradients_have_the_same_bits_every_time(device: str, repeats: int) -> None:
    parts = {"mask": fg.causal(), "deterministic": True}
    given = wanting(tensors(device, torch.bfloat16, heads=4, q_len=96, kv_len=96, head_dim=32))
    bias = torch.randn(1, 4, 1, 96, device=device, requires_grad=True)
    first = gradients(given, [bias], bias=bias, **parts)
    for _ in range(repeats):
        assert all(map(torch.equal, first, gradients(given, [bias], bias=bias, **parts)))


@pytest.mark.parametrize("shape", [(1, 2, 1, 40), (2, 1, 33, 40), (2, 1, 33, 1), (2, 1, 1), (40,)])
def test_b39_gradients_of_learned_biases(device: str, shape: tuple[int, ...]) -> None:
    given = wanting(tensors(device, batch=2, heads=2, q_len=33, kv_len=40, head_dim=16))
    bias = torch.randn(shape).to(device).requires_grad_()
    parts = {"bias": bias, "mask": fg.causal(), "return_lse": True}
    found = gradients(given, [bias], **parts)
    assert found[3].shape == bias.shape
    require_right(given, found, **parts)


def test_b39_gradients_of_slopes_and_a_temperature(device: str) -> None:
    shape = {"batch": 2, "heads": 2, "q_len": 33, "kv_len": 40, "head_dim": 16}
    given = wanting(tensors(device, torch.bfloat16, **shape))
    slopes = (0.2 * torch.rand(2)).to(device).requires_grad_()
    scale = torch.tensor(0.7, device=device, requires_grad=True)
    score = [fg.alibi(slopes), fg.temperature(scale)]
    found = gradients(given, [slopes, scale], score=score)
    require_right(given, found, score=score)


def test_b39_the_gradient_of_a_gathered_bias(device: str) -> None:
    for family, q_heads, distances in (("simt", 2, 63), ("sm80", 1, 9), ("sm90", 2, 63)):
        shape = {"batch": 2, "heads": 2, "q_len": 33, "kv_len": 40, "head_dim": 16}
        given = wanting(tensors(device, torch.bfloat16, **shape))
        table = torch.randn(q_heads, distances).to(device).requires_grad_()
        parts = {"score": fg.relative_bias(table), "mask": fg.causal()}
        found = gradients(given, [table], family=family, **parts)
        assert found[3].shape == table.shape
        require_right(given, found, **parts)


@pytest.mark.parametrize("family", ["simt", "sm80"])
def test_b39_the_gradient_of_a_gathered_bias_has_the_same_bits_every_time(device: str, family: str) -> None:
    shape = {"batch": 2, "heads": 2, "q_len": 70, "kv_len": 70, "head_dim": 16}
    given = wanting(tensors(device, torch.bfloat16, **shape))
    table = torch.randn(2, 63, device=device, requires_grad=True)
    parts = {"score": fg.relative_bias(table), "mask": fg.causal()}
    found = []
    for seed in range(4):
        with emulation(seed=seed, multiprocessors=seed):
            found.append(gradients(given, [table], family=family, deterministic=True, **parts))
    require_right(given, found[0], **parts)
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))


def test_b39_a_gathered_sum_loses_nothing_and_keeps_infinities(device: str) -> None:
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(64, generator=draw) * 10.0 ** torch.randint(-40, 38, (64,), generator=draw)
    values = torch.cat([x, -x, torch.tensor([1e-20, -3e-45])])[torch.randperm(130, generator=draw)]
    rows = torch.stack([values, torch.zeros(130), torch.zeros(130), torch.zeros(130)], 1).flatten()
    rows[5], rows[2], rows[3], rows[7] = torch.inf, -torch.inf, torch.inf, -torch.inf
    q = rows.reshape(1, 1, -1, 1).to(device).requires_grad_()
    table = torch.ones(4, device=device, requires_grad=True)
    out = gathered.options(deterministic=True)(q, table)
    (found,) = torch.autograd.grad(out, table, torch.ones_like(out))
    exact = math.fsum([*values.double().tolist()])
    assert found[0] == torch.tensor(exact).float().item()
    assert found[1:3].tolist() == [torch.inf, -torch.inf]
    assert math.isnan(found[3])


def test_b39_a_gathered_sum_is_rounded_once_whatever_cancels(device: str) -> None:
    ulp = 2.0**-23
    sums = {
        1.0: [2.0**100, *[-(2.0**96)] * 16, 1.0],
        1.0 + ulp: [1.0, ulp / 2, 2.0**-100],  # just above the middle of two floats
        -1.0 - ulp: [-1.0, -ulp / 2, -(2.0**-100)],
        -1.0: [-1.0, -ulp / 2, 2.0**-149],
        2.0**127: [2.0**127, 2.0**127, -(2.0**127)],
        -torch.inf: [-(2.0**127), -(2.0**127)],
        2.0**-149: [2.0**127, 2.0**-148, -(2.0**127), -(2.0**-149)],
        0.0: [1.0, 2.0**-149, -1.0, -(2.0**-149)],
    }
    rows = torch.zeros(18, len(sums))
    for i, values in enumerate(sums.values()):
        rows[: len(values), i] = torch.tensor(values)
    q = rows.reshape(1, 1, -1, 1).to(device).requires_grad_()
    table = torch.ones(len(sums), device=device, requires_grad=True)
    out = gathered.options(deterministic=True)(q, table)
    (found,) = torch.autograd.grad(out, table, torch.ones_like(out))
    assert found.tolist() == list(sums)


@pytest.mark.parametrize("transposed", [False, True])
def test_b43_gradients_under_torch_compile(device: str, transposed: bool) -> None:
    mask = fg.causal()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fg.attention(q, k, v, mask=mask) * 2

    given = list(tensors(device, heads=2, q_len=33, kv_len=40, head_dim=16))
    if transposed:
        given[0] = given[0].transpose(1, 2).contiguous().transpose(1, 2)
    given[0].requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(*given).mean(), given[:1])
    (expected,) = torch.autograd.grad(layer(*given).mean(), given[:1])
    assert torch.equal(found, expected)


def test_b39_the_gradient_of_a_gathered_bias_with_dropout(device: str) -> None:
    given = wanting(tensors(device, batch=2, heads=2, q_len=33, kv_len=40, head_dim=16))
    table = torch.randn(2, 63, device=device, requires_grad=True)
    torch.manual_seed(5)
    found = gradients(given, [table], score=fg.relative_bias(table), dropout=0.3)
    torch.manual_seed(5)
    dense = torch.zeros(2, 33, 40, device=device)
    place = (torch.arange(33)[:, None] - torch.arange(40) + 31).clamp(0, 62)
    bias = table.detach()[:, place.to(device)] + dense
    bias = bias[None].requires_grad_()
    *_, through = gradients(given, [bias], bias=bias, dropout=0.3)
    summed = torch.zeros_like(table).index_add_(1, place.flatten().to(device), through[0].flatten(1))
    torch.testing.assert_close(found[3], summed, rtol=1e-4, atol=1e-5)
