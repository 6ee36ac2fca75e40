"""The functions of the device headers, as the emulator has them, against torch, numpy and Python itself."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from fagen.run.emulate import SCHEDULES
from kernel_samples import compiled, params

pytestmark = pytest.mark.cxx


def run(
    kernel: str,
    x: torch.Tensor,
    result: torch.Tensor,
    y: torch.Tensor | None = None,
    *,
    count: int,
    **options: object,
) -> torch.Tensor:
    """Launch one kernel of functions.cu over ``count`` elements, in blocks of 64 threads."""
    head, _ = params(x=x, y=x if y is None else y, result=result)
    grid = ((count + 63) // 64, 1, 1)
    values = head + count.to_bytes(8, "little")
    compiled("functions").launch(kernel, grid, (64, 1, 1), 1024, values, **options)
    return result


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_same_numbers(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Hold that bits are equal, the sign of zero too; NaNs are NaNs."""
    assert torch.equal(got.isnan(), expected.isnan())
    wrong = (bits(got) != bits(expected)) & ~expected.isnan()
    assert not wrong.any(), (got[wrong][:5], expected[wrong][:5])


HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("element", HALVES)
def test_every_16_bit_number_becomes_the_same_float(element: str) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(HALVES[element])
    assert_same_numbers(run(f"{element}_to_float", x, torch.zeros(2**16), count=2**16), x.float())


@pytest.mark.parametrize("element", HALVES)
def test_floats_round_to_the_nearest_16_bit_number_and_ties_to_even(element: str) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(HALVES[element]).float()
    numbers = numbers[numbers.isfinite()].sort().values
    middles = (numbers[1:].double() + numbers[:-1].double()).div(2).float()
    edges = torch.tensor(
        [math.inf, math.nan, 65519.0, 65519.99, 65520.0, 1e38, 3.3961e38, 3.4e38, 1e-45, 0.0]
    )
    near = torch.cat([numbers, middles, edges, -edges])
    around = [torch.nextafter(near, torch.tensor(side * math.inf)) for side in (-1.0, 1.0)]
    generator = torch.Generator().manual_seed(3)
    some = torch.randint(-(2**31), 2**31, (300_000,), generator=generator).to(torch.int32).view(torch.float32)
    x = torch.cat([near, *around, some])
    result = run(f"float_to_{element}", x, torch.zeros(len(x), dtype=HALVES[element]), count=len(x))
    assert_same_numbers(result, x.to(HALVES[element]))
    assert (bits(result)[x.isnan()] == 0x7FFF).all()


def pairs(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    x, y = zip(*itertools.product(values, repeat=2), strict=True)
    return np.array(x), np.array(y)


@pytest.mark.parametrize("width", [32, 64])
def test_integer_division_and_modulo_are_those_of_python(width: int) -> None:
    top = 2 ** (width - 1)
    small = [*range(-9, 10), 1000, -1000, 12345, -54321]
    values = [*small, top - 1, top - 2, -top, -top + 1, top // 2, -top // 2 - 1, 2**20 + 7, -(2**20)]
    x, y = pairs(values)
    dtype = {32: torch.int32, 64: torch.int64}[width]
    result = run(
        f"numbers_int{width}",
        torch.tensor(x, dtype=dtype),
        torch.zeros(len(x), 4, dtype=dtype),
        torch.tensor(y, dtype=dtype),
        count=len(x),
    )
    for a, b, got in zip(x.tolist(), y.tolist(), result.tolist(), strict=True):
        quotient = (a // b if b else 0) + (-2 * top if (a, b) == (-top, -1) else 0)  # it wraps
        assert got == [quotient, a % b if b else 0, max(a, b), min(a, b)], (a, b)


def test_float_division_modulo_maximum_and_minimum_are_those_of_torch() -> None:
    values = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 7.25, -7.25, 0.1, -0.3, 1e9, -3e-9]
    values += [math.inf, -math.inf, math.nan]
    x, y = (torch.tensor(each, dtype=torch.float32) for each in pairs(values))
    result = run("numbers_float", x, torch.zeros(len(x), 4), y, count=len(x))
    expected = [x // y, x % y, torch.maximum(x, y), torch.minimum(x, y)]
    for got, want in zip(result.unbind(1), expected, strict=True):
        same = (got == want) | (got.isnan() & want.isnan())
        assert same.all(), (x[~same], y[~same], got[~same], want[~same])


def test_a_quotient_is_the_nearest_to_that_in_float64() -> None:
    values = [0.0, 1e-45, 2.0**-127, 2.0**-126, 3e-39, 1e-20, 1 / 3, 1.0, 3.0, 7.0, 2.0**126, 3.4028235e38]
    x, y = (torch.tensor(each, dtype=torch.float32) for each in pairs([*values, math.inf, math.nan]))
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(-(2**31), 2**31, (2, 100_000), generator=generator).to(torch.int32)
    some = words.view(torch.float32)
    x, y = torch.cat([x, x, -x, -x, some[0]]), torch.cat([y, -y, y, -y, some[1]])
    result = run("quotients", x, torch.zeros(len(x)), y, count=len(x))
    assert_same_numbers(result, (x.double() / y.double()).float())


def test_curves_are_those_of_float64_to_a_few_units_of_the_last_place() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.cat([torch.rand(4000, generator=generator) * 20 - 10, torch.tensor([0.0, 1e-20, -1e-20, 80.0])])
    result = run("curves", x, torch.zeros(len(x), 16), count=len(x)).double()
    wide = x.double()
    names = ["exp", "exp2", "log", "log2", "tanh", "erf", "sqrt", "rsqrt", "sin", "cos", "abs", "floor"]
    names += ["exp2", "tanh", "sin", "cos"]  # the fast ones, exact here
    for got, name in zip(result.unbind(1), names, strict=True):
        expected = getattr(torch, name)(wide)
        fine = expected.isfinite() & (expected.abs() < 3e38)
        assert torch.equal(got.isnan(), expected.isnan()), name
        error = (got - expected).abs()[fine] / expected.abs()[fine].clamp_min(1e-7)
        assert error.max() < 1e-6, name


def philox(key: Sequence[int], counter: Sequence[int]) -> list[int]:
    """Compute Philox4x32-10 with Python's integers, from the definition in the paper."""
    (k0, k1), (c0, c1, c2, c3), mask = key, counter, 2**32 - 1
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & mask, (first >> 32) ^ c3 ^ k1, first & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return [c0, c1, c2, c3]


def bits_of(seed: int, ordinal: int, b: int, h: int, q: int, kv: int) -> int:
    """The 16 bits of an element, from the words of the language's page."""
    key = [seed % 2**32, (seed // 2**32 + ordinal) % 2**32]
    words = philox(key, [b, h, (q // 16) * 8 + q % 8, (kv // 16) * 4 + (kv % 8) // 2])
    number = 4 * ((q % 16) // 8) + 2 * ((kv % 16) // 8) + kv % 2
    return words[number // 2] >> (16 if number % 2 else 0) & 0xFFFF


# The vectors the authors of Philox publish with Random123 (philox4x32, 10 rounds).
KNOWN = [
    ([0, 0], [0, 0, 0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 2, [2**32 - 1] * 4, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0xA4093822, 0x299F31D0],
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def test_philox_gives_the_published_words_and_those_of_the_definition() -> None:
    for key, counter, expected in KNOWN:
        assert philox(key, counter) == expected
    generator = np.random.default_rng(5)
    calls = generator.integers(0, 2**32, (200, 6), dtype=np.uint32)
    calls = np.concatenate(
        [np.array([[*key, *counter] for key, counter, _ in KNOWN], dtype=np.uint32), calls]
    )
    x = torch.from_numpy(calls.view(np.int32))
    result = run("philox_words", x, torch.zeros(len(x), 4, dtype=torch.int32), count=len(x))
    got = result.numpy().view(np.uint32).tolist()
    assert got == [philox(call[:2], call[2:]) for call in calls.tolist()]


def test_dropout_takes_each_element_from_the_word_the_language_says() -> None:
    generator = np.random.default_rng(6)
    places = [(q, kv) for q in range(33) for kv in range(35)]
    places += [tuple(each) for each in generator.integers(0, 2**17, (300, 2)).tolist()]
    calls, expected = [], []
    for q, kv in places:
        seed = int(generator.integers(0, 2**64, dtype=np.uint64))
        ordinal, b, h = (int(each) for each in generator.integers(0, 70_000, 3))
        calls.append((seed, ordinal, b, h, q, kv, 0))
        expected.append(bits_of(seed, ordinal, b, h, q, kv))
    layout = np.dtype([("seed", np.uint64), *((name, np.int32) for name in "obhqkp")])
    x = torch.from_numpy(np.array(calls, dtype=layout).view(np.int32))
    result = run("dropout_element", x, torch.zeros(len(calls), dtype=torch.int32), count=len(calls))
    assert result.tolist() == expected


def test_a_thread_of_tensor_cores_knows_which_of_its_elements_pass() -> None:
    seed, ordinal, b, h, q0, kv0 = 0x1234567890ABCDEF, 3, 2, 5, 48, 160
    layout = np.dtype([("seed", np.uint64), *((name, np.int32) for name in "obhqkp")])
    x = torch.from_numpy(np.array([(seed, ordinal, b, h, q0, kv0, 0)] * 32, dtype=layout).view(np.int32))
    drawn = run("random_tests", x, torch.zeros(32, 8, dtype=torch.int32), count=32).tolist()
    for lane, r, c in itertools.product(range(32), range(4), range(24)):
        row, column = lane // 4 + 8 * r, lane % 4 * 2 + c // 2 * 8 + c % 2
        along, across = (drawn[lane][at] >> c & 1 for at in (r, 4 + r))
        assert along == (bits_of(seed, ordinal, b, h, q0 + row, kv0 + column) >= 20_000)
        assert across == (bits_of(seed, ordinal, b, h, q0 + column, kv0 + row) >= 50_000)


def test_one_call_serves_eight_elements_that_no_other_call_serves() -> None:
    keys = {}
    for q, kv in itertools.product(range(48), range(48)):
        number = 4 * ((q % 16) // 8) + 2 * ((kv % 16) // 8) + kv % 2
        keys.setdefault(((q // 16) * 8 + q % 8, (kv // 16) * 4 + (kv % 8) // 2), []).append(number)
    assert all(sorted(numbers) == list(range(8)) for numbers in keys.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lanes_exchange_as_on_a_gpu(schedule: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(32, generator=generator)
    head, _ = params(x=x, y=x, result=(result := torch.zeros(32, 10, dtype=torch.int32)))
    values = head + (32).to_bytes(8, "little")
    compiled("functions").launch("exchanges", (1, 1, 1), (32, 1, 1), 0, values, schedule=schedule, seed=4)
    lanes = np.arange(32)
    v = x.numpy()
    got = result[:, :8].contiguous().view(torch.float32).numpy().T
    expected = [
        np.full(32, v[3]),
        v[lanes ^ 5],
        v[np.where(lanes + 2 < 32, lanes + 2, lanes)],
        # A source beyond the lane's group of 8 gives the lane's own value; below it, that lane's.
        v[np.where((lanes ^ 9) > (lanes | 7), lanes, lanes ^ 9)],
        v[np.where(lanes % 8 + 3 < 8, lanes + 3, lanes)],
        None,
        np.full(32, v.max()),
        v.reshape(8, 4).min(1).repeat(4),
    ]
    for one, want in zip(got, expected, strict=True):
        if want is not None:
            assert np.array_equal(one, want)
    np.testing.assert_allclose(got[5], v.reshape(4, 8).sum(1).repeat(8), rtol=1e-5, atol=1e-6)
    votes = sum(1 << int(lane) for lane in lanes if v[lane] > 0)
    assert {each & 2**32 - 1 for each in result[:, 8].tolist()} == {votes}
    assert result[:, 9].tolist() == [votes & 0xFFFF] * 16 + [0] * 16


@pytest.mark.parametrize("workers", [1, 4])
def test_atomics_count_and_sum_across_os_threads(workers: int) -> None:
    x = torch.full((5000,), 0.5)
    result = torch.zeros(5004, dtype=torch.int32)
    run("atomics", x, result, count=5000, schedule="random", workers=workers)
    assert result[:1].view(torch.float32).item() == result[5002:].view(torch.float64).item() == 2500.0
    assert result[1] == 5000
    assert (result[2:5002] == 1).all()
