"""Expressions of a graph as CUDA: each operation in the words of the device headers, with the meaning of the
graph.

Floating-point values are fp32. Integers are 32 bits wide, or 64 where what they reach needs it
(`derive.extent`). A tensor is read through a pointer and 64-bit strides, its base and its row moved out of
the inner loops by `code.Splitter`. Indices of a gather are clamped into the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fagen.derive.extent import LENGTH, Extent, Extents, bits
from fagen.derive.signs import interval
from fagen.derive.unscale import differences
from fagen.emit.code import (
    AND,
    ATOM,
    BLOCK,
    COMPARE,
    EQUAL,
    LOAD,
    OR,
    PRODUCT,
    ROW,
    SUM,
    TERNARY,
    UNARY,
    Code,
    Codes,
    CType,
    Place,
)
from fagen.emit.params import Parameters, Tensor, number, type_of
from fagen.ir import graph as ir
from fagen.ir.graph import (
    Axis,
    Const,
    Index,
    Input,
    Load,
    Map,
    Node,
    Random,
    Scalar,
    Scatter,
    Size,
    Symbol,
    from_linear,
    linear,
)

HEAD = Symbol("h", ("hk", "g"), "int")
"""The query head ``hk * group + g`` as one value."""

_HEAD_TERMS = ir.mul(Index("hk"), Size("g")), Index("g")
_HEADS = (ir.index("h"), ir.size("h"))

_FUNCTIONS: Mapping[str, tuple[str, int]] = {
    "exp": ("expf", 8),
    "exp2": ("exp2f", 4),
    "log": ("logf", 8),
    "log2": ("log2f", 8),
    "tanh": ("tanhf", 16),
    "erf": ("erff", 16),
    "sqrt": ("sqrtf", 6),
    "rsqrt": ("rsqrtf", 4),
    "floor": ("floorf", 1),
    "finite": ("finite_or_zero", 2),
}
"""The function of a header for each of the graph's, and what it costs."""

FIRST_COLUMN = Symbol("first_column", (), "int")
"""The position of a thread's first column of a tile."""

RANDOM_BITS = 16
"""Of an element."""

_LOG2E = "LOG2E"
_LOWEST = -(2.0 - 2.0**-23) * 2.0**127
"""The lowest number of fp32."""
_SMALL = 64.0
"""An exponent whose rounding in fp32 changes an exponential less than that to 16 bits."""


@dataclass(frozen=True)
class FromRow:
    """A position along an axis of a table: where a row starts, and how far from there it is, up or down."""

    start: Code
    steps: Code
    """At least 0."""
    falls: bool


@dataclass(frozen=True)
class RandomTest:
    """Whether random bits are at least a constant: all that dropout asks of them."""

    random: Random
    least: int


def random_test(node: Node) -> RandomTest | None:
    """What ``node`` asks of random bits alone; None for any other node, and where all pass it or none."""
    if not isinstance(node, Map) or node.op != "le":
        return None
    least, random = node.args
    if not isinstance(least, Const) or not isinstance(random, Random):
        return None
    value = int(least.value)
    return RandomTest(random, value) if 0 < value < 1 << RANDOM_BITS else None


class Expressions:
    """What all expressions of one kernel share: names of parameters, pieces of code, widths of integers.

    ``sizes`` are the lengths fixed at compile time. ``fast`` says that approximations the user allowed are
    taken; without, weights may be too small, or their exponents too large, for the hardware's powers.
    """

    def __init__(
        self,
        names: Parameters,
        sizes: Mapping[Axis, int],
        fast: bool,
        limits: Mapping[Node, Extent] | None = None,
    ) -> None:
        self.names = names
        self.sizes = dict(sizes)
        self.fast = fast
        self.codes = Codes()
        self.limits: dict[Node, Extent] = dict.fromkeys((HEAD, FIRST_COLUMN), (0, LENGTH - 1)) | dict(
            limits or {}
        )
        self.extents = Extents(self.limits)

    def length(self, axis: Axis) -> Code:
        """The length of an axis: a constant where it is fixed, else a parameter."""
        if axis in self.sizes:
            return self.codes.leaf(self.names.constant_length(axis), "int32")
        return self.codes.leaf(self.names.length(axis), "int32")

    def known(self, node: Node) -> float | int | bool | None:
        """The value of ``node`` if the lengths fixed at compile time are all it depends on."""
        if node.axes or not node.args:
            return None
        sizes: dict[Node, Node] = {
            part: Const(self.sizes[part.axis])
            for part in ir.walk([node])
            if isinstance(part, Size) and part.axis in self.sizes
        }
        if not sizes:
            return None
        value = ir.substitute(node, sizes)
        return value.value if isinstance(value, Const) else None


class Lowering:
    """Turns nodes into code, given how the leaves read at one point of a kernel.

    ``leaves`` are positions along axes (`Index`), `HEAD` where the head is one value, and symbols.
    ``nonpositive`` says of the exponent of an exponential whether it is proven to be at most 0. ``rounded``
    values are stored in bf16, whatever an exponent is. A thread's elements for which ``served`` holds call
    the random generator for those that follow, too. Where a position along an axis is a thread's
    `FIRST_COLUMN` and a number that is known when the kernel is compiled, ``step`` is that axis and number.
    """

    def __init__(
        self,
        expressions: Expressions,
        leaves: Mapping[Node, Code],
        nonpositive: Callable[[Node], bool] = lambda exponent: False,
        addresses: Mapping[Axis, Code] | None = None,
        served: str | None = None,
        step: tuple[Axis, Code] | None = None,
        rounded: bool = False,
    ) -> None:
        self._shared = expressions
        self._codes = expressions.codes
        self._done: dict[Node, Code] = dict(leaves)
        self._nonpositive = nonpositive
        self._addresses = addresses or {}
        self._served = served
        self._step = step
        self._parted: dict[Code, tuple[Code, Code]] = {}
        """What a row adds to a number, and what a column does."""
        self._rounded = rounded

    def __call__(self, root: Node) -> Code:
        """The code of ``root``."""
        stack = [root]
        while stack:
            node = stack[-1]
            if node in self._done:
                stack.pop()
                continue
            missing = [arg for arg in self._operands(node) if arg not in self._done]
            if missing:
                stack.extend(reversed(missing))
                continue
            self._done[node] = self._lower(node)
            stack.pop()
        return self._done[root]

    def _operands(self, node: Node) -> tuple[Node, ...]:
        """What must be lowered before ``node``."""
        if isinstance(node, Load):
            return tuple(i for i in node.indices if i not in _HEADS)
        if node in _HEADS or self._shared.known(node) is not None:
            return ()
        return node.args

    def _lower(self, node: Node) -> Code:
        if isinstance(node, Const):
            return self._codes.leaf(*literal(node.value))
        if node is ir.index("h"):
            return self._head()
        if node is ir.size("h"):
            return self._codes.infix(
                "*", self._shared.length("hk"), self._shared.length("g"), "int32", PRODUCT
            )
        if isinstance(node, Map):
            value = self._shared.known(node)
            if value is not None:
                name = self._shared.names.constant(node, value)
                return self._codes.leaf(name, type_of(value))
            return self._map(node)
        if isinstance(node, Size):
            return self._shared.length(node.axis)
        if isinstance(node, Scalar):
            return self._codes.leaf(self._shared.names.scalar(node), _ctype(node))
        if isinstance(node, Input):
            return self.read(node, [self.position(axis) for axis in node.layout])
        if isinstance(node, Load):
            return self.read(node.table, [self._clamped(node, i) for i in range(len(node.indices))])
        if isinstance(node, Random):
            return self._random(node)
        raise AssertionError(f"{node!r} has no value at this point")

    # ------------------------------------------------------------------------------------------------ tensors

    def position(self, axis: Axis) -> Code:
        """The position along an axis of a tensor's memory, where ``h`` is one axis."""
        if axis in self._addresses:
            return self._addresses[axis]
        if axis != "h":
            return self._done[Index(axis)]
        if self._addresses.keys().isdisjoint(("hk", "g")):
            return self._head()
        return self._head_of(self.position("hk"), self.position("g"))

    def _head(self) -> Code:
        if HEAD not in self._done:
            self._done[HEAD] = self._head_of(self._done[Index("hk")], self._done[Index("g")])
        return self._done[HEAD]

    def _head_of(self, hk: Code, g: Code) -> Code:
        group = self._shared.length("g")
        return self._codes.make("{} * {} + {}", (hk, group, g), "int32", SUM, (PRODUCT, UNARY, PRODUCT), 2)

    def scattered(self, tensor: Tensor, node: Scatter) -> Code:
        """The element of ``tensor`` that ``node`` adds to at the current positions."""
        return self.element(tensor, [self._clamped(node, i) for i in range(len(node.indices))])

    def _clamped(self, node: Load | Scatter, i: int) -> Code | FromRow:
        """Index number ``i`` of a gather, brought into the table."""
        index, axis = node.indices[i], node.table.layout[i]
        if index is ir.index(axis):
            return self.position(axis)
        if isinstance(index, Const) and index.value == 0:
            return self(index)
        extent = self._shared.names.tensor(node.table).extents[i]
        size = self._codes.leaf(extent, "int32")
        return self._from_row(index, size) or self._codes.call("clamp_index", (self(index), size), "int32", 3)

    def _from_row(self, index: Node, size: Code) -> FromRow | None:
        """The same of a sum that needs 64 bits and has one position along columns, else known to a row.

        That position is brought between the first and the last that are there and at which the sum is in the
        table. A row knows these two, too, and 32 bits are left to an element.
        """
        if self(index).ctype != "int64":
            return None
        terms, constant = linear(index)
        along = [term for term in terms if self(term).place.column]
        position = along[0] if len(along) == 1 else None
        if not isinstance(position, Index) or abs(terms[position]) != 1:
            return None
        falls, column = terms.pop(position) < 0, self(position)
        if column.place.row:
            return None
        codes, length = self._codes, self._shared.length(position.axis)
        rest = codes.cast(self(from_linear(terms, constant)), "int64")
        if falls:
            first = codes.make("{} - ({} - 1)", (rest, size), "int64", SUM, (SUM, SUM), 2)
            last = rest
        else:
            first = codes.make("-{}", (rest,), "int64", UNARY, UNARY)
            last = codes.make("{} - 1 - {}", (size, rest), "int64", SUM, (SUM, PRODUCT), 2)
        low, high = (
            codes.call("clamp_index", (end, length), "int32", 3, hint=f"{position.axis}_{name}")
            for end, name in ((first, "low"), (last, "high"))
        )
        sign, opposite = ("-", "+") if falls else ("+", "-")
        start = codes.call("clamp_index", (codes.infix(sign, rest, low, "int64", SUM), size), "int32", 3)
        start = codes.infix(opposite, codes.cast(start, "int64"), low, "int64", SUM)
        return FromRow(start, codes.call("between", (column, low, high), "int32", 2), falls)

    def read(self, table: Input, positions: Sequence[Code | FromRow]) -> Code:
        """The value of a table at ``positions``."""
        tensor = self._shared.names.tensor(table)
        form, ctype = _AS_VALUE[tensor.storage]
        return self.element(tensor, positions, form, ctype)

    def element(
        self, tensor: Tensor, positions: Iterable[Code | FromRow], form: str = "{}", ctype: CType = ""
    ) -> Code:
        """The element of a tensor at ``positions``, one for each axis of its memory, as ``form`` has it.

        The parts of its address that are known once a block and once a row become pointers, which leave inner
        loops.
        """
        every: list[tuple[Code, Code]] = []
        further: list[tuple[Code, Code]] = []
        for position, name in zip(positions, tensor.strides, strict=True):
            stride = self._codes.leaf(name, "int64")
            if isinstance(position, FromRow):
                way = self._codes.make("-{}", (stride,), "int64", UNARY, UNARY) if position.falls else stride
                further.append((position.steps, way))
                position = position.start
            every.append((position, stride))
        piece = self._piece(tensor, every)
        steps = [
            step
            for i, step in enumerate(every)
            if step[0].form != "0" and not (piece and tensor.tiles[i] > 1)
        ]
        steps += further
        whole = piece.place if piece else BLOCK
        for position, _ in steps:
            whole = whole.join(position.place)
        pointer, steps = self._pointer(tensor, steps, whole)
        if len(further) == 1 and steps == further:
            text = form.format("element_at({}, {}, {})")
            return self._codes.make(
                text, (pointer, *further[0]), ctype or tensor.storage, ATOM, 0, LOAD, hint=tensor.name
            )
        subscript = " + ".join(["{} * {}"] * len(steps) + ["{}"] * (piece is not None)) or "0"
        args = [code for step in steps for code in step]
        if tensor.dense and args and args[-1].form == tensor.strides[-1]:
            subscript, args = subscript.removesuffix(" * {}"), args[:-1]
        slots = [PRODUCT if i % 2 == 0 else UNARY for i in range(len(args))]
        if piece is not None:
            args, slots = [*args, piece], [*slots, SUM]
        return self._codes.make(
            form.format(f"{{}}[{subscript}]"),
            (pointer, *args),
            ctype or tensor.storage,
            ATOM,
            (ATOM, *slots),
            LOAD,
            hint=tensor.name,
        )

    def _pointer(
        self, tensor: Tensor, steps: list[tuple[Code, Code]], whole: Place
    ) -> tuple[Code, list[tuple[Code, Code]]]:
        """Where a tensor's elements begin that are near those in ``whole``, and the steps left from there."""
        pointer = self._codes.leaf(tensor.pointer, tensor.ctype)
        for place in (BLOCK, ROW):
            outer = [step for step in steps if step[0].place == place]
            if place != whole and outer:
                steps = [step for step in steps if step not in outer]
                pointer = self._codes.make(
                    "{}" + " + {} * {}" * len(outer),
                    (pointer, *(code for step in outer for code in step)),
                    tensor.ctype,
                    SUM,
                    (SUM, *(PRODUCT, UNARY) * len(outer)),
                    2 * len(outer),
                    hint=tensor.name,
                )
        return pointer, steps

    def _piece(self, tensor: Tensor, steps: Sequence[tuple[Code, Code]]) -> Code | None:
        """Where an element of a tensor that lies in pieces is, along the axes of a piece."""
        if not tensor.whole:
            return None
        sides = [(tile, i) for i, tile in enumerate(tensor.tiles) if tile > 1]
        sides.sort(reverse=True)  # rows are more
        return self._codes.call("piece_at", [code for _, i in sides for code in steps[i]], "int64", 8)

    # -------------------------------------------------------------------------------------------- random bits

    def _random(self, node: Random) -> Code:
        seed = self._seed()
        b, q, kv = (self._done[Index(axis)] for axis in ("b", "q", "kv"))
        ordinal = self._codes.leaf(str(node.ordinal), "int32")
        words = self._codes.make(
            "dropout_words({}, {}, {}, {}, {}, {})",
            (seed, ordinal, b, self._head(), q, kv),
            "RandomWords",
            cost=60,
            hint="words",
            named=True,
            serving=self._served,
        )
        return self._codes.make("int32(dropout_bits({}, {}, {}))", (words, q, kv), "int32", cost=4)

    def _seed(self) -> Code:
        pointer = self._codes.leaf(self._shared.names.seed(), "uint64")
        return self._codes.make("*{}", (pointer,), "uint64", UNARY, cost=LOAD, hint="seed")

    def draw(self, tests: str, test: RandomTest, q: Code, kv: Code, across: bool) -> Code:
        """What says of a thread's elements whether their bits pass a test, from its first position on."""
        seed = self._seed()
        ordinal = self._codes.leaf(str(test.random.ordinal), "int32")
        function = f"{tests}.draw{'_across' if across else ''}<{test.least}>"
        args = (seed, ordinal, self._done[Index("b")], self._head(), q, kv)
        return self._codes.make(f"{function}({', '.join(['{}'] * 6)})", args, "bool")

    # --------------------------------------------------------------------------------------------- operations

    def _map(self, node: Map) -> Code:
        special = getattr(self, f"_{node.op}", None)
        if special is not None:
            result: Code = special(node, *node.args)
            return result
        name, cost = _FUNCTIONS[node.op]
        return self._codes.call(name, [self._done[arg] for arg in node.args], "float", cost)

    def _wide(self, node: Map) -> bool:
        return node.kind == "int" and bits(node, self._shared.limits) == 64

    def _integers(self, node: Map) -> tuple[list[Code], CType]:
        """The operands of an integer operation, in the width it needs."""
        args = [self._done[arg] for arg in node.args]
        wide = self._wide(node) or any(arg.ctype == "int64" for arg in args)
        ctype: CType = "int64" if wide else "int32"
        return [self._codes.cast(arg, ctype) for arg in args], ctype

    def _add(self, node: Map, *args: Node) -> Code:
        if node.kind == "int":
            return self._linear(node)
        x, y = args
        (a, minus_a), (b, minus_b) = self._signed(x), self._signed(y)
        if minus_a and not minus_b:
            return self._codes.infix("-", b, a, "float", SUM)
        if minus_a:
            a = self._codes.make("-{}", (a,), "float", UNARY, UNARY)
        return self._codes.infix("-" if minus_b else "+", a, b, "float", SUM)

    def _signed(self, x: Node) -> tuple[Code, bool]:
        """A term of a sum without its minus sign, and whether it has one."""
        if isinstance(x, Map) and x.op == "neg":
            return self._done[x.args[0]], True
        if isinstance(x, Const) and x.value < 0 and math.isfinite(x.value):
            return self._codes.leaf(*literal(-x.value)), True
        return self._done[x], False

    def _linear(self, node: Map) -> Code:
        """An integer sum: its terms with their coefficients, the head as one term."""
        terms, constant = linear(node)
        head, place = _HEAD_TERMS
        if head in terms and terms.get(place) == terms[head]:
            k = terms.pop(head)
            terms.pop(place)
            if not terms and not constant and k == 1:
                return self._head()
            self._head()
            terms = {HEAD: k, **terms}
        whole = from_linear(terms, constant)
        codes = [(self(term), k) for term, k in terms.items()]
        codes.sort(key=lambda item: item[1] < 0)
        wide = any(code.ctype == "int64" for code, _ in codes) or (
            isinstance(whole, Map) and self._wide(whole)
        )
        if wide:
            codes[0] = self._codes.cast(codes[0][0], "int64"), codes[0][1]
        form, slots = "", []
        for i, (_, k) in enumerate(codes):
            sign = ("-" if k < 0 else "") if i == 0 else (" - " if k < 0 else " + ")
            form += sign + ("{}" if abs(k) == 1 else f"{abs(k)} * {{}}")
            slots.append(UNARY if abs(k) > 1 or (i == 0 and k < 0) else SUM if i == 0 else PRODUCT)
        if constant:
            form += f" {'+' if constant > 0 else '-'} {literal(abs(constant))[0]}"
        parts = len(codes) + bool(constant)
        binds = SUM if parts > 1 else PRODUCT if abs(codes[0][1]) > 1 else UNARY
        cost = parts - 1 + sum(abs(k) > 1 for _, k in codes)
        return self._codes.make(
            form, [code for code, _ in codes], "int64" if wide else "int32", binds, slots, cost
        )

    def _mul(self, node: Map, x: Node, y: Node) -> Code:
        if node.kind == "int":
            if isinstance(y, Const):
                return self._linear(node)
            (a, _), ctype = self._integers(node)
            return self._codes.infix("*", a, self._done[y], ctype, PRODUCT)
        factors = [self._done[factor] for factor in self._factors(node)]
        parted = [factor for factor in factors if factor in self._parted]
        if (
            self._shared.fast
            and len(parted) == 1
            and not any(f.place.column for f in factors if f not in parted)
        ):
            row, column = (
                self._product([part if factor is parted[0] else factor for factor in factors])
                for part in self._parted[parted[0]]
            )
            return self._codes.infix("+", row, column, "float", SUM)
        return self._product(factors)

    def _factors(self, x: Node) -> list[Node]:
        """What is multiplied to ``x``: of products in it, too, where rounding may differ."""
        if not isinstance(x, Map) or x.op != "mul" or any(arg not in self._done for arg in x.args):
            return [x]  # what is known as a whole has no parts here
        return [part for arg in x.args for part in (self._factors(arg) if self._shared.fast else [arg])]

    def _product(self, factors: Sequence[Code]) -> Code:
        """Factors multiplied from left to right, those that are known all over a block together."""
        known = [factor for factor in factors if factor.place == BLOCK]
        others = [factor for factor in factors if factor.place != BLOCK]
        if len(known) < 2 or not others:
            known, others = [], [*factors]
        parts = others + ([self._chain(known)] if known else [])
        return self._chain(parts)

    def _chain(self, factors: Sequence[Code]) -> Code:
        first, *rest = factors
        for factor in rest:
            first = self._codes.infix("*", first, factor, "float", PRODUCT)
        return first

    def _neg(self, node: Map, x: Node) -> Code:
        return self._codes.make("-{}", (self._done[x],), self._done[x].ctype, UNARY, UNARY)

    def _div(self, node: Map, x: Node, y: Node) -> Code:
        a, b = self._done[x], self._done[y]
        if isinstance(y, Const) and not isinstance(x, Const) and _has_reciprocal(float(y.value)):
            return self._codes.make("{} * (1.0f / {})", (a, b), "float", PRODUCT, (PRODUCT, UNARY))
        if self._shared.fast:
            return self._codes.call("divide", (a, b), "float", 8)
        return self._codes.infix("/", a, b, "float", PRODUCT, 8)

    def _quotient(self, node: Map, x: Node, y: Node) -> Code:
        """0 where ``y`` is 0. A denominator known further out is turned over there, once."""
        a, b = self._done[x], self._done[y]
        one = self._codes.leaf("1.0f", "float")
        if isinstance(x, Const) or b.place.join(a.place) == b.place:
            return self._codes.call("quotient", (a, b), "float", 9)
        inverse = self._codes.call("quotient", (one, b), "float", 9)
        return self._codes.infix("*", a, inverse, "float", PRODUCT)

    def _floordiv(self, node: Map, x: Node, y: Node) -> Code:
        return self._divide(node, "/", "floor_div")

    def _mod(self, node: Map, x: Node, y: Node) -> Code:
        return self._divide(node, "%", "floor_mod")

    def _divide(self, node: Map, sign: str, function: str) -> Code:
        """C's operator where it agrees with Python's: nothing is negative, and the divisor is not 0."""
        (a, b), ctype = self._integers(node)
        low, divisor = self._shared.extents.of(node.args[0])[0], self._shared.extents.of(node.args[1])[0]
        if low >= 0 and divisor > 0:
            return self._codes.infix(sign, a, self._done[node.args[1]], ctype, PRODUCT, 4)
        return self._codes.call(function, (a, b), ctype, 12)

    def _extreme(self, node: Map) -> Code:
        if node.kind == "int":
            args, ctype = self._integers(node)
        else:
            args, ctype = [self._done[arg] for arg in node.args], "float"
        return self._codes.call(node.op, args, ctype)

    def _minimum(self, node: Map, x: Node, y: Node) -> Code:
        return self._extreme(node)

    _maximum = _minimum

    def _abs(self, node: Map, x: Node) -> Code:
        if node.kind == "float":
            return self._codes.call("fabsf", (self._done[x],), "float")
        (a,), ctype = self._integers(node)
        return self._codes.call("absolute", (a,), ctype)

    def _exp(self, node: Map, x: Node) -> Code:
        """In 16-bit programs the hardware's power of two is exact enough: what rounding takes from an
        exponent below 89 changes it by 2^-17 at most.

        The factor log2(e) comes after the subtraction: a score near the largest float stays finite.
        """
        if not self._shared.fast:
            return self._codes.call("expf", (self._done[x],), "float", 8)
        if max(map(abs, interval(x))) <= _SMALL:
            factors = [self._done[factor] for factor in self._factors(x)]
            exponent = self._product([*factors, self._codes.leaf(_LOG2E, "float")])
            return self._codes.call("exp2_approx", (exponent,), "float", 2)
        in_twos = self._in_twos(x) if self._rounded else None
        if in_twos is not None:
            return self._codes.call("exp2_approx", (in_twos,), "float", 2)
        fused = self._exponential(x) if self._nonpositive(x) else None
        if fused is not None:
            return fused
        exponent = self._codes.infix("*", self._done[x], self._codes.leaf(_LOG2E, "float"), "float", PRODUCT)
        return self._codes.call("exp2_approx", (exponent,), "float", 2)

    def _in_twos(self, x: Node) -> Code | None:
        """``(c s - b) log2(e)`` as one multiply-add, for a symbol ``s`` and a number ``c`` of up to ln 2.

        ``c s log2(e)`` is then in range wherever ``s`` is. ``b log2(e)`` is kept from -inf, next to which an
        ``s`` of -inf would be NaN. None for any other ``x``: with a far larger bias beside ``c s``, what
        rounding ``b log2(e)`` took would be all that is left of the exponent.
        """
        for scaled, level, common in differences(x):
            if common is not ir.ONE or not isinstance(scaled, Map) or scaled.op != "mul":
                continue
            for value, factor in (scaled.args, scaled.args[::-1]):
                number = factor.value if isinstance(factor, Const) else self._shared.known(factor)
                small = number is not None and abs(number) <= math.log(2)
                if small and isinstance(value, Symbol) and not self(level).place.element:
                    log2e = self._codes.leaf(_LOG2E, "float")
                    minuend = self._product([self(value), self(factor), log2e])
                    lowest = self._codes.leaf(*literal(_LOWEST))
                    subtrahend = self._product([self(level), log2e])
                    subtrahend = self._codes.call("maximum", (subtrahend, lowest), "float")
                    return self._codes.infix("-", minuend, subtrahend, "float", SUM)
        return None

    def _exponential(self, x: Node) -> Code | None:
        """``exp(c a - c b)`` as one multiply-add and a power, where ``b`` is a row's and ``c`` a number."""
        for value, top, factor in differences(x):
            place = self(top).place
            if place.row and not place.column:
                row = self._codes.call("Exponential", (self(factor), self(top)), "Exponential", 6, "power")
                return self._codes.make("{}({})", (row, self(value)), "float", ATOM, (ATOM, 0), 2)
        return None

    def _exp2(self, node: Map, x: Node) -> Code:
        approximate = self._shared.fast and self._nonpositive(x)
        name, cost = ("exp2_approx", 2) if approximate else ("exp2f", 4)
        return self._codes.call(name, (self._done[x],), "float", cost)

    def _tanh_fast(self, node: Map, x: Node) -> Code:
        name, cost = ("tanh_approx", 2) if self._shared.fast else ("tanhf", 16)
        return self._codes.call(name, (self._done[x],), "float", cost)

    def _sin(self, node: Map, x: Node) -> Code:
        """In 16-bit programs the hardware's, whole turns apart: what is exact for any angle is long."""
        name, cost = (f"{node.op}_approx", 6) if self._shared.fast else (f"{node.op}f", 16)
        return self._codes.call(name, (self._done[x],), "float", cost)

    _cos = _sin

    def _to_float(self, node: Map, x: Node) -> Code:
        if x.kind == "bool":
            return self._codes.make("{} ? 1.0f : 0.0f", (self._done[x],), "float", TERNARY, OR)
        apart = self._apart(x)
        if apart is not None:
            return apart
        return self._codes.make("float({})", (self._done[x],), "float")

    def _apart(self, x: Node) -> Code | None:
        """``float(x)``, where x is some number of columns and what a row adds: that is converted once a row.

        Exact where each part is below 2 ** 24; beyond, the sum is rounded once more.
        """
        if self._step is None or not self._done[x].place.row:
            return None
        axis, step = self._step
        terms, constant = linear(x)
        column = Index(axis)
        k = terms.get(column, 0)
        if k == 0 or any(ir.depends(term, [column]) for term in terms if term is not column):
            return None
        rest = {FIRST_COLUMN if term is column else term: times for term, times in terms.items()}
        steps = step if k == 1 else self._codes.make(f"{k} * {{}}", (step,), "int32", PRODUCT, UNARY)
        parts = self(from_linear(rest, constant)), steps
        first, more = (self._codes.make("float({})", (part,), "float") for part in parts)
        whole = self._codes.infix("+", first, more, "float", SUM)
        self._parted[whole] = first, more
        return whole

    def _to_int(self, node: Map, x: Node) -> Code:
        return self._codes.make("int32({})", (self._done[x],), "int32")

    def _le(self, node: Map, x: Node, y: Node) -> Code:
        return self._compare("<=", x, y)

    def _lt(self, node: Map, x: Node, y: Node) -> Code:
        return self._compare("<", x, y)

    def _eq(self, node: Map, x: Node, y: Node) -> Code:
        return self._compare("==", x, y)

    def _compare(self, sign: str, x: Node, y: Node) -> Code:
        binds = EQUAL if sign in ("==", "!=") else COMPARE
        a, b = self._done[x], self._done[y]
        if sign == "<=" and x.kind == "int":
            terms, constant = linear(x)
            if constant == 1 and terms:
                sign, a = "<", self(from_linear(terms, 0))
        return self._codes.make(f"{{}} {sign} {{}}", (a, b), "bool", binds, SUM)

    def _and(self, node: Map, *args: Node) -> Code:
        codes = [self._done[arg] for arg in args]
        return self._codes.make(" && ".join(["{}"] * len(codes)), codes, "bool", AND, AND + 1, len(codes) - 1)

    def _or(self, node: Map, *args: Node) -> Code:
        codes = [self._done[arg] for arg in args]
        return self._codes.make(" || ".join(["{}"] * len(codes)), codes, "bool", OR, AND + 1, len(codes) - 1)

    def _not(self, node: Map, x: Node) -> Code:
        if isinstance(x, Map) and x.op == "eq":
            return self._compare("!=", *x.args)
        return self._codes.negation(self._done[x])

    def _where(self, node: Map, condition: Node, x: Node, y: Node) -> Code:
        return self._codes.choice(self._done[condition], self._done[x], self._done[y])


_AS_VALUE: Mapping[str, tuple[str, CType]] = {
    "fp32": ("{}", "float"),
    "fp16": ("to_float({})", "float"),
    "bf16": ("to_float({})", "float"),
    "int32": ("{}", "int32"),
    "int64": ("{}", "int64"),
    "bool": ("{}", "bool"),
    "fp64": ("to_float({})", "float"),
    "exact": ("to_float({})", "float"),
}
"""How a value in memory is turned into what is computed with, and its type then."""

_CTYPES: Mapping[str, CType] = {"float": "float", "int": "int32", "bool": "bool"}


def _ctype(node: Node) -> CType:
    return _CTYPES[node.kind]


def _has_reciprocal(y: float) -> bool:
    return y != 0 and math.isfinite(y) and 2.0**-126 <= abs(1 / y) <= 2.0**126


def literal(value: float | int | bool) -> tuple[str, CType, Place, int]:
    """A number: its text, its type, its place and how strongly it binds."""
    text = number(value)
    return text, type_of(value), BLOCK, UNARY if text.startswith("-") else ATOM
