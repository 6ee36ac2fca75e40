"""200 random programs: each fuses into one walk exactly where numbers say that it may, and all are right.

A program is a few lines of Python over a namespace ``X``. With `language` they build a graph; with `Probe`
they are computed in torch for given scores, and each sum and maximum takes a value of the test's choosing:
that is how the rules are tested here, without any of the compiler's code.
"""

import math

import pytest
import torch

from fagen.derive.streaming import derive
from fagen.ir.reference import evaluate
from fagen.plan.interpret import interpret
from random_programs import SEED, graph_of, run, written
from streams import LENGTHS, arguments

COUNT = 200

# -------------------------------------------------------------------------------------- two meanings of X


class Row(torch.Tensor):
    """Numbers of which a quotient by 0 is 0."""

    def __truediv__(self, other):
        value, other = (torch.as_tensor(x).as_subclass(torch.Tensor) for x in (self, other))
        return torch.where(other == 0, 0.0, value / torch.where(other == 0, 1.0, other)).as_subclass(Row)

    def __rtruediv__(self, other):
        return torch.full_like(self, other) / self


class Probe:
    """The program on rows of unmasked scores; its n-th sum or maximum is what ``reduce(n, op, values)`` says.

    An exponential that is infinite is NaN, which no maximum and no quotient hides.
    """

    inf, where, log, sqrt = math.inf, staticmethod(torch.where), torch.log, torch.sqrt
    tanh, relu, sigmoid = torch.tanh, torch.relu, torch.sigmoid

    def __init__(self, points, bias, reduce):
        self.scores, self.bias = points.as_subclass(Row), bias.as_subclass(Row)
        self.mask = torch.ones(points.shape[-1], dtype=torch.bool)
        self.odd = torch.arange(points.shape[-1]) % 3 > 0
        self.reduce = reduce
        self.values = []

    def exp(self, x):
        value = torch.exp(x)
        return torch.where(torch.isinf(value), math.nan, value)

    def maximum(self, x, y):
        return torch.clamp(x, min=y)

    def sum(self, x):
        return self._reduced("sum", x)

    def max(self, x):
        return self._reduced("max", x)

    def _reduced(self, op, x):
        self.values.append((op, x))
        return self.reduce(len(self.values) - 1, op, x).as_subclass(Row)


def probe(lines, points, bias, reduce):
    """The operation and the values of every reduction, the sum of weights last."""
    namespace = Probe(points, bias, reduce)
    weights = run(lines, namespace)
    operations = [op for op, _ in namespace.values] + ["sum"]
    values = [x.as_subclass(torch.Tensor).expand(points.shape) for _, x in [*namespace.values, ("", weights)]]
    return operations, values


# ------------------------------------------------------------------------------------------ rules 1 and 2


def final(n, op, x):
    return x.amax(-1, keepdim=True) if op == "max" else x.sum(-1, keepdim=True)


def fixed(n, op, x):
    return torch.ones(())


def running(n, op, x):
    return torch.cummax(x.as_subclass(torch.Tensor), -1).values if op == "max" else torch.ones(())


TRIALS, POINTS = 20, 24


def separates(lines):
    """For each reduction, whether its values have a factor of statistics alone, or a maximum a summand."""
    draw = torch.Generator().manual_seed(SEED)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(shape, generator=draw, dtype=torch.float64)

    points, bias = uniform(-6, 3, TRIALS, POINTS), uniform(-6, 3, TRIALS, POINTS)
    operations, values = probe(lines, points, bias, final)
    first, second = [], []
    for op, x in zip(operations, values, strict=True):
        sign = 1.0 if bool((x >= 0).all()) else uniform(-1, 1, TRIALS, 1).sign()
        r = uniform(-3, 3, TRIALS, 1) if op == "max" else sign * uniform(-7, 7, TRIALS, 1).exp()
        other = uniform(-3, 3, TRIALS, 1) if op == "max" else sign * uniform(-7, 7, TRIALS, 1).exp()
        near = r * uniform(-1, 1, TRIALS, 1).exp()
        first.append(r)
        second.append(torch.where(torch.arange(TRIALS)[:, None] % 2 == 0, near, other))
    _, a = probe(lines, points, bias, lambda n, op, x: first[n])
    _, b = probe(lines, points, bias, lambda n, op, x: second[n])
    return [_separates(op, x, y) for op, x, y in zip(operations, a, b, strict=True)]


def _separates(op, a, b):
    known = torch.isfinite(a) & torch.isfinite(b)
    a, b = torch.where(known, a, 0.0), torch.where(known, b, 0.0)  # 0 has any factor
    crossed = a[:, :, None] * b[:, None, :]
    scale = crossed.abs() + crossed.mT.abs() + 1e-300
    factor = bool(((crossed - crossed.mT).abs() <= 1e-9 * scale).all())
    if op == "sum":
        return factor
    summand = bool(((b - a) - (b - a)[:, :1]).abs().max() <= 1e-9)
    return summand or (factor and bool((a * b >= 0).all()))


RISING = torch.linspace(-200, 0, 41)
ROWS = [  # scores that bring running and fixed maxima far from final ones, and a bias
    *((row, torch.zeros(41)) for row in (RISING, RISING.flip(0), RISING + 60, RISING.flip(0) + 60)),
    *((torch.full((41,), float(score)), torch.zeros(41)) for score in (200, 60, 40, -25, -40, -60, -200)),
    (torch.tensor([0.5, 60.0, -3.0, 59.0, *[2.0] * 37]), torch.zeros(41)),
    (RISING, -RISING),
    (torch.full((41,), 60.0), torch.linspace(0, 50, 41)),
]


def in_range(lines):
    """For each reduction, whether fp32 holds what would be summed wherever it holds the program itself.

    Summed are values with running maxima, or with fixed ones: then the factor of the final ones, as it is at
    scores of 0, must be in range too. Sums are fixed.
    """
    scores, bias = (torch.stack(part) for part in zip(*ROWS, strict=True))
    _, whole = probe(lines, scores, bias, final)
    held = torch.stack([torch.isfinite(x).all(-1) for x in whole]).all(0)

    def holds(values):
        return [bool((torch.isfinite(x).all(-1) | ~held).all()) for x in values]

    by_running, by_fixed = (holds(probe(lines, scores, bias, scheme)[1]) for scheme in (running, fixed))
    factors = holds(probe(lines, 0 * scores, 0 * bias, lambda n, op, x: final(n, op, whole[n]))[1])
    return [x or (y and z) for x, y, z in zip(by_running, by_fixed, factors, strict=True)]


def may_fuse(lines):
    """Whether every reduction of the program can be part of one walk."""
    return all(separates(lines)) and all(in_range(lines))


# ---------------------------------------------------------------------------------------------- the tests


def is_fused(derivation):
    (stage,) = derivation.stages
    return len(stage.walks) == 1


@pytest.mark.parametrize("number", range(COUNT))
def test_a_random_program(number):
    lines = written(number)
    label = f"seed {SEED}, program {number}:\n{lines}"
    graph = graph_of(lines, masked=number % 4 > 0)
    derivation = derive(graph)
    assert is_fused(derivation) == may_fuse(lines), f"{label}\n{derivation.notes}"
    lengths = {"q": 9, "kv": 13} if number % 2 else {"q": 13, "kv": 7}  # with rows without a key
    values = arguments(graph, {**LENGTHS, "b": 1, "h": 2, "hk": 1, **lengths}, seed=number)
    (expected,) = evaluate(graph, values)
    for block_own, block_walk in ((16, 5), (9, 16)):
        (out,) = interpret(derivation, graph, values, block_own=block_own, block_walk=block_walk)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10, msg=lambda text: f"{label}\n{text}")


def test_enough_of_them_fuse():
    graphs = [graph_of(written(number), masked=True) for number in range(COUNT)]
    assert COUNT / 3 <= sum(is_fused(derive(graph)) for graph in graphs) <= 0.8 * COUNT
