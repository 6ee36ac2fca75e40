"""The device headers on a GPU and on the emulator: the same text gives the same bits."""

from collections.abc import Callable, Mapping
from functools import lru_cache

import pytest
import torch

from fagen.run.build import build
from fagen.run.launch import gpu
from kernel_samples import ELEMENTS, Attention, Matmul, compiled, params, sample

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc, pytest.mark.cxx]


SHARED_BYTES = {"functions": 1024, "attention": 4 * 64 * 68 * 4, "matmul": 16 * 96 * 4}


@lru_cache
def _functions(name: str, element: str) -> Mapping[str, object]:
    text = sample(name, element=element)
    built = build(text, name=name, arch=torch.cuda.get_device_capability())
    return gpu(0).functions(built.key, built.image, dict.fromkeys(built.functions, SHARED_BYTES[name]))


def _launch(
    name: str,
    kernel: str,
    grid: tuple[int, int, int],
    threads: int,
    values: bytes,
    element: str = "fp32",
) -> None:
    function = _functions(name, element)[kernel]
    gpu(0).launch([(function, grid, (threads,), SHARED_BYTES[name])], values, 0)
    torch.cuda.synchronize()


def _random(*shape: int, low: int = -(2**31), high: int = 2**31, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(torch.int32)


def _floats(count: int) -> torch.Tensor:
    """Random bits as floats, and the edges of the 16-bit formats."""
    edges = torch.tensor([0.0, 65519.0, 65520.0, 3.39e38, 2.98e-8, 8.94e-8, 1e-45, torch.inf, torch.nan])
    return torch.cat([edges, -edges, _random(count - 18).view(torch.float32)])


def _int64(seed: int) -> torch.Tensor:
    wide = _random(4000, seed=seed).long() * 2**31 + _random(4000, low=0, seed=seed + 1).long()
    return torch.cat([wide, _random(4000, low=-9, high=10, seed=seed + 2).long()])


COUNT = 8000
INPUTS: dict[str, tuple[Callable[[], tuple[torch.Tensor, torch.Tensor]], int]] = {
    "fp16_to_float": (lambda: (_random(COUNT).to(torch.int16), torch.zeros(COUNT)), 1),
    "bf16_to_float": (lambda: (_random(COUNT).to(torch.int16), torch.zeros(COUNT)), 1),
    "float_to_fp16": (lambda: (_floats(COUNT), torch.zeros(COUNT)), 1),
    "float_to_bf16": (lambda: (_floats(COUNT), torch.zeros(COUNT)), 1),
    "numbers_int32": (lambda: (_random(COUNT), _random(COUNT, low=-99, high=99, seed=1)), 4),
    "numbers_int64": (lambda: (_int64(1), _int64(5)), 8),
    "philox_words": (lambda: (_random(COUNT, 6), torch.zeros(COUNT, 6)), 4),
    "dropout_element": (lambda: (_random(COUNT, 8, low=0), torch.zeros(COUNT, 8)), 1),
}


@pytest.mark.parametrize("kernel", INPUTS)
def test_exact_functions_give_the_same_bits(kernel: str) -> None:
    make, words = INPUTS[kernel]
    results = []
    for device in ("cpu", "cuda"):
        x, y = (each.to(device) for each in make())
        result = torch.full((COUNT, words), -1, dtype=torch.int32, device=device)
        values = params(x=x, y=y, result=result)[0] + COUNT.to_bytes(8, "little")
        grid = ((COUNT + 63) // 64, 1, 1)
        if device == "cpu":
            compiled("functions").launch(kernel, grid, (64, 1, 1), 0, values)
        else:
            _launch("functions", kernel, grid, 64, values)
        results.append(result.cpu())
    if kernel.endswith("_to_float"):  # a NaN is a NaN, whatever bits it carries
        results = [torch.where(each.view(torch.float32).isnan(), -1, each) for each in results]
    assert (results[0] != -1).any()
    assert torch.equal(*results)


def _both(
    kernel: str, x: torch.Tensor, shape: tuple[int, ...], blocks: int, threads: int
) -> list[torch.Tensor]:
    results = []
    for device in ("cpu", "cuda"):
        on, result = x.to(device), torch.zeros(shape, device=device)
        values = params(x=on, y=on, result=result)[0] + (blocks * threads).to_bytes(8, "little")
        if device == "cpu":
            compiled("functions").launch(kernel, (blocks, 1, 1), (threads, 1, 1), 1024, values)
        else:
            _launch("functions", kernel, (blocks, 1, 1), threads, values)
        results.append(result.cpu())
    return results


def test_lanes_exchange_the_same_values() -> None:
    x = torch.randn(32, generator=torch.Generator().manual_seed(3))
    here, there = _both("exchanges", x, (32, 10), 1, 32)
    assert torch.equal(here.view(torch.int32), there.view(torch.int32))


def test_copies_in_flight_arrive() -> None:
    x = torch.randn(50 * 32 * 16, generator=torch.Generator().manual_seed(3))
    assert torch.equal(*_both("pipelined_sum", x, (50 * 32,), 50, 32))


def test_turns_pass_in_order() -> None:
    x = torch.arange(12, dtype=torch.int32)
    here, there = _both("turns", x, (2,), 12, 32)
    assert here.view(torch.int32)[0] == 12
    assert torch.equal(here, there)


def test_atomics_count_and_sum() -> None:
    _, there = _both("atomics", torch.full((5056,), 0.5), (5060,), 79, 64)
    assert there[0] == there[5058:].view(torch.float64) == 2528.0
    assert there.view(torch.int32)[1] == 5056
    assert (there.view(torch.int32)[2:5058] == 1).all()


def test_curves_agree_to_the_stated_errors() -> None:
    x = torch.cat(
        [torch.rand(4000, generator=torch.Generator().manual_seed(1)) * 20 - 10, torch.tensor([0.0])]
    )
    here, there = _both("curves", torch.cat([x, torch.linspace(-1e6, 1e6, 31)]), (4032, 16), 63, 64)
    bounds = [1e-6] * 13 + [2**-10.5, 2**-16, 2**-16]
    for one, other, bound in zip(here.unbind(1), there.unbind(1), bounds, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        fine = one.isfinite()
        assert ((one - other).abs()[fine] <= bound * one.abs()[fine].clamp_min(0.1)).all()


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Numbers that follow each other as the floats do, one for both zeros."""
    bits = x.view(torch.int32).long()
    return torch.where(bits < 0, -(2**31) - bits, bits)


def test_a_quotient_is_near_that_in_float64() -> None:
    edges = torch.tensor([0, -0.0, 1e-45, 1e-39, 2**-126, 1, -3, 2.0**126, 3.4e38, torch.inf, torch.nan])
    pairs = torch.cartesian_prod(edges, edges)
    x, y = (torch.cat([pairs[:, i], _random(7879, seed=i).view(torch.float32)]) for i in (0, 1))
    on_gpu = [each.cuda() for each in (x, y, torch.zeros(8000))]
    values = params(**dict(zip(("x", "y", "result"), on_gpu, strict=True)))[0] + (8000).to_bytes(8, "little")
    _launch("functions", "quotients", (125, 1, 1), 64, values)
    found, exact = on_gpu[2].cpu(), (x.double() / y.double()).float()
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found.isinf(), exact.isinf())
    wrong = (_ordered(found) - _ordered(exact)).abs() > 1 + (
        torch.minimum(x.abs(), y.abs()) < 2.0**-126
    ).int()
    wrong &= ~exact.isnan()
    assert not wrong.any(), (x[wrong][:5], y[wrong][:5], found[wrong][:5], exact[wrong][:5])


@pytest.mark.parametrize("element", ELEMENTS)
def test_samples_are_right_on_a_gpu(element: str) -> None:
    case = Attention(300, element=element)
    expected_out, expected_lse = case.expected_out, case.expected_lse
    on = {name: getattr(case, name).cuda() for name in ("q", "k", "v", "out", "lse")}
    values, _ = params(**on, q_len=300, kv_len=300, scale=0.125)
    _launch("attention", "attention_forward", (5, 2, 1), 128, values, element)
    tolerance = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 2e-2}[element]
    assert (on["out"].cpu().double() - expected_out).abs().max() < tolerance
    assert (on["lse"].cpu().double() - expected_lse).abs().max() < 2e-6
    product = Matmul(90, 130, 75, element=element)
    a, b, c = product.a.cuda(), product.b.cuda(), product.c.cuda()
    values, _ = params(a=a, b=b, c=c, m=90, n=130, k=75)
    _launch("matmul", "matmul", (3, 3, 1), 128, values, element)
    assert (c.cpu().double() - product.expected).abs().max() < 2e-5
