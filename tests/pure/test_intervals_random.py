"""Random masks: whatever is written, no allowed pair is skipped and no forbidden one goes untested.

Each mask is built twice, as a graph and as numpy arrays over (q, kv), and both must agree about every tile.
"""

import random

import numpy as np
import pytest

from fagen.derive.extent import Extents, bits
from fagen.derive.intervals import MOST_RANGES, ranges
from fagen.ir import graph as ir
from fagen.ir.graph import Const, Index, Input, Node, Scalar, Size
from pure.test_intervals import compare, count_turns

Value = tuple[Node, np.ndarray]

BLOCKS = ((16, 16), (16, 64), (64, 16), (32, 128), (128, 32), (64, 64))
EDGES = [0, 1, 2, 5, 17, 40, 63, 64, 65, 100, 127, 150]
DIVISORS = [1, 2, 3, 5, 8, 16, 20, 33, 64, -3, -16]

OPERATIONS = ["add", "sub", "sub", "mul", "times", "floordiv", "mod", "floordiv", "mod", "by_scalar"]
OPERATIONS += ["abs", "minimum", "maximum", "where", "clamp", "read"]


class Writer:
    """Writes masks: integer and boolean expressions over positions, sizes, scalars and tables."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        lengths = [
            self.choose.choice(EDGES) if self.choose.random() < 0.3 else self.choose.randint(1, 150)
            for _ in range(2)
        ]
        self.sizes = {"q": lengths[0], "kv": lengths[1], "b": 2, "n": self.choose.randint(1, 20)}
        self.fixed = {"b": 1}
        self.q, self.kv = np.indices(lengths)
        self.environment: dict[Node, object] = {}

    def constant(self, value: int) -> Value:
        return Const(value), np.full_like(self.q, value)

    def scalar(self, value: int) -> Value:
        node = Scalar(f"s{len(self.environment)}", len(self.environment), "int")
        self.environment[node] = value
        return node, np.full_like(self.q, value)

    def table(self, stored: str, rising: bool) -> Value:
        """A read of a new table at some index."""
        layout = self.choose.choice([("q",), ("kv",), ("n",), ("b", "kv"), ("b", "q")])
        full = [self.sizes[axis] for axis in layout]
        shape = [1 if n and self.choose.random() < 0.1 else n for n in full]
        if stored == "bool":
            values = self.numbers.random(shape) < self.choose.choice([0.02, 0.3, 0.9])
        elif stored == "int":
            values = self.numbers.integers(-5, self.choose.choice([3, 20, 160]), shape)
            if self.choose.random() < 0.5:
                values = np.sort(self.numbers.integers(0, 6, shape), -1)
        else:
            values = self.numbers.integers(-8, 8, shape) / 4
            for special in (np.inf, -np.inf) if rising else (np.nan, np.inf, -np.inf):
                if values.size and self.choose.random() < 0.15:
                    values.flat[self.numbers.integers(values.size)] = special
        if rising:
            values = np.sort(values, -1)
        table = Input(f"t{len(self.environment)}", len(self.environment), layout, stored, rising)
        self.environment[table] = values
        place = self.choose.random()
        if place < 0.3:
            index, at = self.integer(1)
        else:
            index, at = (Index("q"), self.q) if place < 0.65 else (Index("kv"), self.kv)
        node = ir.load(table, (*(Index("b") for _ in layout[1:]), index))
        if 0 in full:
            return node, np.zeros(self.q.shape, values.dtype)
        row = np.broadcast_to(values, full)[(1,) * (len(layout) - 1)]
        return node, row[np.clip(at, 0, len(row) - 1)]

    def integer(self, depth: int) -> Value:
        if depth == 0 or self.choose.random() < 0.15:
            return self.leaf()
        op = self.choose.choice(OPERATIONS)
        if op == "read":
            return self.table("int", self.choose.random() < 0.5)
        x, v = self.integer(depth - 1)
        if op == "abs":
            return ir.function("abs", x), np.abs(v)
        if op == "times":
            k = self.choose.choice([-3, -2, -1, 2, 3, 7])
            return ir.mul(x, Const(k)), v * k
        if op in ("floordiv", "mod", "by_scalar"):
            k = self.choose.choice(DIVISORS)
            c = self.scalar(k)[0] if op == "by_scalar" else Const(k)
            if op == "floordiv" or (op == "by_scalar" and self.choose.random() < 0.5):
                return ir.floordiv(x, c), v // k
            return ir.mod(x, c), v % k
        if op == "clamp":
            low, high = sorted(self.choose.sample(range(-5, 60), 2))
            return ir.minimum(ir.maximum(x, Const(low)), Const(high)), np.clip(v, low, high)
        y, w = self.integer(depth - 1)
        if op == "where":
            condition, holds = self.condition(depth - 1)
            return ir.where(condition, x, y), np.where(holds, v, w)
        meaning = {
            "add": np.add,
            "sub": np.subtract,
            "mul": np.multiply,
            "minimum": np.minimum,
            "maximum": np.maximum,
        }
        return getattr(ir, op)(x, y), meaning[op](v, w)

    def leaf(self) -> Value:
        kind = self.choose.randrange(8)
        if kind < 6:
            return (Index("q"), self.q) if kind < 3 else (Index("kv"), self.kv)
        if kind == 6:
            return self.constant(self.choose.randint(-20, 60))
        if self.choose.random() < 0.5:
            return self.scalar(self.choose.randint(-30, 60))
        axis = self.choose.choice(["q", "kv"])
        return Size(axis), np.full_like(self.q, self.sizes[axis])

    def condition(self, depth: int) -> Value:
        if depth > 0 and self.choose.random() < 0.55:
            op = self.choose.choice(["and", "or", "and", "or", "not", "eq"])
            x, v = self.condition(depth - 1)
            if op == "not":
                return ir.negation(x), ~v
            y, w = self.condition(depth - 1)
            if op == "eq":
                return ir.eq(x, y), v == w
            return (ir.conjunction(x, y), v & w) if op == "and" else (ir.disjunction(x, y), v | w)
        kind = self.choose.random()
        if kind < 0.1:
            return self.table("bool", False)
        if kind < 0.2:
            return self.compare(*self.floats())
        x, y = self.integer(max(depth, 1)), self.integer(max(depth, 1))
        if kind < 0.3:
            y = self.table("int", True)
        elif kind > 0.8:
            y = self.constant(self.choose.randint(0, 40))
        return self.compare(x, y)

    def floats(self) -> tuple[Value, Value]:
        x, y = (self.table("float", self.choose.random() < 0.3) for _ in range(2))
        kind = self.choose.random()
        if kind < 0.3:
            y = Const(0.5), np.full(self.q.shape, 0.5)
        elif kind < 0.6:
            node, values = self.integer(1)
            y = ir.to_float(node), values.astype(float)
        elif kind < 0.8:
            x = ir.minimum(x[0], y[0]), np.minimum(x[1], y[1])
            y = Const(0.25), np.full(self.q.shape, 0.25)
        return x, y

    def compare(self, x: Value, y: Value) -> Value:
        op = self.choose.choice(["le", "lt", "le", "lt", "eq", "ne"])
        if op == "ne":
            return ir.negation(ir.eq(x[0], y[0])), x[1] != y[1]
        meaning = {"le": np.less_equal, "lt": np.less, "eq": np.equal}
        return getattr(ir, op)(x[0], y[0]), meaning[op](x[1], y[1])


@pytest.mark.parametrize("group", range(10))
def test_random_masks(group):
    live = extra = 0
    for seed in range(20 * group, 20 * group + 20):
        writer = Writer(seed)
        guard, allowed = writer.condition(writer.choose.randint(1, 4))
        some, more = compare(
            guard, allowed, writer.sizes, writer.environment, BLOCKS, writer.fixed, note=f"seed {seed}:"
        )
        live, extra = live + some, extra + more
        for axes in (("q", "kv"), ("kv", "q")):
            assert len(ranges(guard, *axes).ranges) <= MOST_RANGES, f"seed {seed}"
    assert extra <= live // 5, f"group {group}: {extra} tiles in vain beside {live}"


def test_turns_of_random_masks():
    known = 0
    for seed in range(250):
        writer = Writer(seed)
        guard, _ = writer.condition(writer.choose.randint(1, 2))
        blocks = BLOCKS[seed % 3 :: 3]
        known += count_turns(guard, writer.sizes, writer.environment, blocks, writer.fixed)
    assert known > 12


def test_extents_steps_and_widths_enclose_what_occurs():
    monotone = narrow = 0
    for seed in range(400):
        writer = Writer(seed)
        if 0 in writer.q.shape:
            continue
        node, values = writer.integer(3)
        limits = {Index(axis): (0, writer.sizes[axis] - 1) for axis in ("q", "kv")}
        limits |= {Size(axis): (writer.sizes[axis],) * 2 for axis in ("q", "kv")}
        limits |= {scalar: (v, v) for scalar, v in writer.environment.items() if isinstance(scalar, Scalar)}
        extents = Extents(limits)
        low, high = extents.of(node)
        assert low <= values.min(), f"seed {seed}"
        assert values.max() <= high, f"seed {seed}"
        for axis, difference in (("q", np.diff(values, axis=0)), ("kv", np.diff(values, axis=1))):
            step = extents.step(node, axis)
            if step is not None and difference.size:
                monotone += 1
                assert step[0] <= difference.min(), f"seed {seed}, {axis}"
                assert difference.max() <= step[1], f"seed {seed}, {axis}"
        if bits(node, limits) == 32:
            narrow += 1
            assert abs(values).max() < 2**31, f"seed {seed}"
    assert monotone > 200
    assert narrow > 200
