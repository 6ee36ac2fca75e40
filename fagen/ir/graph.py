"""The graph: what a computation is, before anything is decided about how it runs.

Nodes are frozen and interned: building the same expression twice gives the same object, so equality is
identity and a graph is a DAG without a separate pass. A node carries named axes; a result has the union of
its operands' axes minus those summed over. The query head is two axes, ``hk`` and ``g`` (``h = hk * G + g``),
so that grouped heads are ordinary broadcasting.

The constructors below the classes (`add`, `mul`, `le`, `where`, ...) are the only way to build `Map`,
`Contract` and `Reduce` nodes. They bring an expression to one form: terms of commutative operations are
sorted by structure (names do not count), integer sums are linear forms, comparisons of integers hold no
subtraction, negations sit at comparisons. Only exact identities are used; a floating-point sum is never
reassociated.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any, Literal, TypeAlias

Axis: TypeAlias = str
Kind: TypeAlias = Literal["bool", "int", "float"]

KEY_AXIS: Axis = "kv"
"""The axis of keys: a row without a key is one where every sum over this axis is empty."""

OPEN_AXES: frozenset[Axis] = frozenset({"b", "hk", "g", "q", "kv"})
"""Axes whose length each call gives; that of any other is fixed when a kernel is compiled."""

_AXIS_ORDER = {axis: i for i, axis in enumerate(["b", "hk", "g", "", "q", "kv", "d", "dv"])}


def sort_axes(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Axes in canonical order: batch, heads, those a user named, positions, head dims."""
    return tuple(sorted(set(axes), key=lambda axis: (_AXIS_ORDER.get(axis, _AXIS_ORDER[""]), axis)))


def split_heads(layout: Iterable[Axis]) -> tuple[Axis, ...]:
    """The axes of a tensor declared with ``layout``: the query head ``h`` is the pair ``hk, g``."""
    return sort_axes(part for axis in layout for part in (("hk", "g") if axis == "h" else (axis,)))


# ---------------------------------------------------------------------------------------------------- nodes

_interned: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()


class _Interning(type):
    def __call__(cls, *fields: Any) -> Any:
        key = (cls, *((f.hex() if isinstance(f, float) else (type(f), f)) for f in fields))
        node = _interned.get(key)
        if node is None:
            node = super().__call__(*fields)
            node = _interned.setdefault(key, node)
        return node


@dataclass(frozen=True, eq=False, repr=False)
class Node(metaclass=_Interning):
    """A value over named axes; the fields below are derived from those of the subclass."""

    args: tuple[Node, ...] = field(init=False)
    """Operands, in order."""
    axes: tuple[Axis, ...] = field(init=False)
    """In canonical order (`sort_axes`)."""
    kind: Kind = field(init=False)
    """Of its elements: ``float`` is computed in fp32, ``int`` in 32 bits, 64 where an interval needs it."""
    summed: frozenset[Axis] = field(init=False)
    """Axes that some value below was summed over, by a `Reduce` or a `Contract`."""
    maxima: frozenset[Axis] = field(init=False)
    """Axes that some value below is a maximum over."""
    size: int = field(init=False)
    """Nodes below, counted as a tree."""
    depth: int = field(init=False)
    """Operations nested in one another, this one included."""
    digest: bytes = field(init=False)
    """Structure without the user's names; equal across processes."""
    order: tuple[int, int, bytes] = field(init=False)
    """Place among the terms of a commutative operation."""

    def _derive(self, args: tuple[Node, ...], axes: Iterable[Axis], kind: Kind, *identity: Any) -> None:
        put = object.__setattr__
        put(self, "args", args)
        put(self, "axes", sort_axes(axes))
        put(self, "kind", kind)
        put(self, "summed", frozenset[Axis]().union(*(a.summed for a in args)))
        put(self, "maxima", frozenset[Axis]().union(*(a.maxima for a in args)))
        put(self, "size", 1 + sum(a.size for a in args))
        put(self, "depth", 1 + max((a.depth for a in args), default=0))
        digest = hashlib.blake2b(repr((type(self).__name__, *identity)).encode(), digest_size=12)
        for arg in args:
            digest.update(arg.digest)
        put(self, "digest", digest.digest())
        put(self, "order", (_RANK[type(self).__name__], -self.size, self.digest))

    def __repr__(self) -> str:
        from fagen.ir.show import show

        return show(self)


@dataclass(frozen=True, eq=False, repr=False)
class Input(Node):
    """A tensor argument, read at its own position. ``layout`` are its axes in memory (``h`` not yet split).

    ``stored`` is what memory holds: ``float`` (fp32, fp16 or bf16, known when a kernel is planned), ``int``
    or ``bool``. ``position`` is its place among the arguments, ``sorted`` a promise that it does not fall
    along its last axis. In the backward direction ``holds`` is the value of the forward direction that was
    kept, and ``is_gradient`` says that it is the gradient of a result. Names are for people: ``position``
    alone tells two inputs apart.
    """

    name: str
    position: int
    layout: tuple[Axis, ...]
    stored: Kind
    sorted: bool = False
    holds: Node | None = None
    is_gradient: bool = False

    def __post_init__(self) -> None:
        self._derive(
            (), split_heads(self.layout), self.stored, self.position, self.layout, self.stored, self.sorted
        )

    @property
    def known(self) -> tuple[str, bool]:
        """What its digest does not tell: it is no part of what a program computes."""
        return self.holds.digest.hex() if self.holds is not None else "", self.is_gradient


@dataclass(frozen=True, eq=False, repr=False)
class Scalar(Node):
    """A number given at each call, a kernel argument: changing it never recompiles."""

    name: str
    position: int
    stored: Kind

    def __post_init__(self) -> None:
        self._derive((), (), self.stored, self.position, self.stored)


@dataclass(frozen=True, eq=False, repr=False)
class Const(Node):
    """A Python number, written into the source."""

    value: float | int | bool

    def __post_init__(self) -> None:
        kinds: dict[type, Kind] = {bool: "bool", int: "int", float: "float"}
        self._derive((), (), kinds[type(self.value)], self.value)


@dataclass(frozen=True, eq=False, repr=False)
class Size(Node):
    """The length of an axis (never ``h``, see `size`)."""

    axis: Axis

    def __post_init__(self) -> None:
        self._derive((), (), "int", self.axis)


@dataclass(frozen=True, eq=False, repr=False)
class Index(Node):
    """The position along an axis, from 0 (never ``h``, see `index`)."""

    axis: Axis

    def __post_init__(self) -> None:
        self._derive((), (self.axis,), "int", self.axis)


@dataclass(frozen=True, eq=False, repr=False)
class Symbol(Node):
    """A value known under a name: a finished row value, a tile's score, the running state of a walk.

    ``name`` is derived, never the user's.
    """

    name: str
    over: tuple[Axis, ...]
    stored: Kind

    def __post_init__(self) -> None:
        self._derive((), self.over, self.stored, self.name, self.over, self.stored)


@dataclass(frozen=True, eq=False, repr=False)
class Load(Node):
    """``table[indices]``: one index for each axis of the table's layout, clamped into the table."""

    table: Input
    indices: tuple[Node, ...]

    def __post_init__(self) -> None:
        axes = (axis for index in self.indices for axis in index.axes)
        self._derive((self.table, *self.indices), axes, self.table.kind)


@dataclass(frozen=True, eq=False, repr=False)
class Scatter(Node):
    """The adjoint of `Load`: ``value`` summed, over all its axes, into one like ``table`` at ``indices``."""

    table: Input
    indices: tuple[Node, ...]
    value: Node

    def __post_init__(self) -> None:
        self._derive((self.table, *self.indices, self.value), self.table.axes, "float")


@dataclass(frozen=True, eq=False, repr=False)
class Random(Node):
    """16 random bits for each (b, h, q, kv): Philox4x32-10, counters as the language fixes them.

    ``ordinal`` counts the dropouts of a program and is added to the key's high word.
    """

    ordinal: int

    def __post_init__(self) -> None:
        self._derive((), ("b", "hk", "g", "q", "kv"), "int", self.ordinal)


@dataclass(frozen=True, eq=False, repr=False)
class Map(Node):
    """One scalar operation, element by element (`OPS` lists them)."""

    op: str
    operands: tuple[Node, ...]

    def __post_init__(self) -> None:
        signature = OPS[self.op]
        kind = signature.result or self.operands[-1].kind
        self._derive(self.operands, (axis for arg in self.operands for axis in arg.axes), kind, self.op)


@dataclass(frozen=True, eq=False, repr=False)
class Reduce(Node):
    """``sum`` or ``max`` of ``x`` over one axis. A maximum of nothing is -inf."""

    op: Literal["sum", "max"]
    x: Node
    over: Axis

    def __post_init__(self) -> None:
        self._derive(
            (self.x,), (axis for axis in self.x.axes if axis != self.over), "float", self.op, self.over
        )
        mark = "summed" if self.op == "sum" else "maxima"
        object.__setattr__(self, mark, getattr(self, mark) | {self.over})


@dataclass(frozen=True, eq=False, repr=False)
class Contract(Node):
    """The sum over one axis of ``x * y``, accumulated in fp32."""

    x: Node
    y: Node
    over: Axis

    def __post_init__(self) -> None:
        axes = {*self.x.axes, *self.y.axes} - {self.over}
        self._derive((self.x, self.y), axes, "float", self.over)
        object.__setattr__(self, "summed", self.summed | {self.over})


_RANK = {
    name: rank
    for rank, name in enumerate(
        [
            "Contract",
            "Symbol",
            "Reduce",
            "Map",
            "Load",
            "Scatter",
            "Input",
            "Index",
            "Random",
            "Scalar",
            "Size",
            "Const",
        ]
    )
}


@dataclass(frozen=True)
class Output:
    """A result of a program: its value, the user's name for it and its axes in memory, outermost first."""

    node: Node
    name: str
    layout: tuple[Axis, ...]


@dataclass(frozen=True)
class Graph:
    """A whole program: ``arguments`` in the order of the call, ``outputs`` in the order of the return."""

    name: str
    arguments: tuple[Input | Scalar, ...]
    outputs: tuple[Output, ...]
    about: str = ""
    """What the user asked for, in their words, for comments alone."""
    direction: Literal["forward", "backward"] = "forward"
    labels: tuple[str, ...] = ()
    """What emitted text calls the tensor arguments and the outputs; empty: see `names.names_of`."""

    @cached_property
    def random(self) -> bool:
        """Whether the program draws random bits, and so needs a seed."""
        return any(isinstance(node, Random) for node in walk(output.node for output in self.outputs))


# ----------------------------------------------------------------------------------------------- operations


@dataclass(frozen=True)
class Op:
    """``arity`` operands (None: two or more) and the kind of the result (None: that of the operands)."""

    arity: int | None
    result: Kind | None = None
    commutes: bool = False


OPS: dict[str, Op] = {
    # arithmetic; integer add is a linear form of any number of terms, all else binary
    "add": Op(None, commutes=True),
    "mul": Op(2, commutes=True),
    "neg": Op(1),
    "div": Op(2, "float"),
    "quotient": Op(2, "float"),  # x / y, and 0 where y is 0: a row without a key, see `div`
    "finite": Op(1, "float"),  # x, and 0 where x is -inf: the maximum of such a row, see `add`
    "floordiv": Op(2, "int"),
    "mod": Op(2, "int"),
    "minimum": Op(2, commutes=True),
    "maximum": Op(2, commutes=True),
    "abs": Op(1),
    # functions
    "exp": Op(1, "float"),
    "exp2": Op(1, "float"),
    "log": Op(1, "float"),
    "log2": Op(1, "float"),
    "tanh": Op(1, "float"),
    "tanh_fast": Op(1, "float"),  # the hardware's approximation where a family has it
    "erf": Op(1, "float"),
    "sqrt": Op(1, "float"),
    "rsqrt": Op(1, "float"),
    "sin": Op(1, "float"),
    "cos": Op(1, "float"),
    "floor": Op(1, "float"),
    "to_float": Op(1, "float"),
    "to_int": Op(1, "int"),  # of a bool
    # truth
    "le": Op(2, "bool"),
    "lt": Op(2, "bool"),
    "eq": Op(2, "bool", commutes=True),
    "and": Op(None, "bool", commutes=True),
    "or": Op(None, "bool", commutes=True),
    "not": Op(1, "bool"),
    "where": Op(3),
}

_FOLD: dict[str, Callable[..., float | int | bool]] = {
    "div": lambda x, y: x / y,
    "floordiv": lambda x, y: x // y,
    "mod": lambda x, y: x % y,
    "minimum": min,
    "maximum": max,
    "abs": abs,
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "log": math.log,
    "log2": math.log2,
    "tanh": math.tanh,
    "erf": math.erf,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "sin": math.sin,
    "cos": math.cos,
    "to_float": float,
    "to_int": int,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "eq": lambda x, y: x == y,
}

TRUE = Const(True)
FALSE = Const(False)
ZERO = Const(0.0)
ONE = Const(1.0)
MINUS_INF = Const(-math.inf)


def _map(op: str, *args: Node) -> Node:
    """``op`` of ``args`` as they are: constants folded where Python can, commuting terms sorted."""
    if op in _FOLD and all(isinstance(arg, Const) for arg in args):
        try:
            return Const(_FOLD[op](*(arg.value for arg in args if isinstance(arg, Const))))
        except (ArithmeticError, ValueError):
            pass  # left to the kernel, which has infinities
    if OPS[op].commutes:
        args = tuple(sorted(args, key=lambda arg: arg.order))
    return Map(op, args)


def function(op: str, x: Node) -> Node:
    """A function of one value by its name in `OPS`; an integer argument is converted."""
    if op == "rsqrt" and KEY_AXIS in x.summed:
        return div(ONE, function("sqrt", x))
    if op == "abs":
        return _map(op, x)
    return _map(op, to_float(x))


def to_float(x: Node) -> Node:
    """``x`` as a floating-point number; True is 1."""
    return x if x.kind == "float" else _map("to_float", x)


def to_int(x: Node) -> Node:
    """A bool as 0 or 1; a float is refused by the language before it comes here."""
    return _map("to_int", x) if x.kind == "bool" else x


def promote(*args: Node) -> tuple[Node, ...]:
    """``args`` brought to one kind: float if any is, else int."""
    if any(arg.kind == "float" for arg in args):
        return tuple(to_float(arg) for arg in args)
    return tuple(to_int(arg) for arg in args)


# An integer sum is a linear form: terms with integer coefficients, and a constant.
_Linear: TypeAlias = dict[Node, int]


def linear(x: Node) -> tuple[_Linear, int]:
    """The integer ``x`` as (coefficient of each term, constant)."""
    if isinstance(x, Const):
        return {}, int(x.value)
    if isinstance(x, Map) and x.op == "add":
        terms: _Linear = {}
        constant = 0
        for arg in x.args:
            inner, c = linear(arg)
            for term, k in inner.items():
                terms[term] = terms.get(term, 0) + k
            constant += c
        return terms, constant
    if isinstance(x, Map) and x.op == "mul" and isinstance(x.args[1], Const):
        return {x.args[0]: int(x.args[1].value)}, 0
    return {x: 1}, 0


def from_linear(terms: Mapping[Node, int], constant: int) -> Node:
    """The node of a linear form; terms with coefficient 0 are dropped, positive ones come first."""
    parts = [
        term if k == 1 else Map("mul", (term, Const(k)))
        for term, k in sorted(terms.items(), key=lambda item: (item[1] < 0, item[0].order))
        if k
    ]
    if constant or not parts:
        parts.append(Const(constant))
    return parts[0] if len(parts) == 1 else Map("add", tuple(parts))


def _combine(x: Node, y: Node, k: int) -> tuple[_Linear, int]:
    (terms, constant), (others, c) = linear(x), linear(y)
    for term, coefficient in others.items():
        terms[term] = terms.get(term, 0) + k * coefficient
    return {term: coefficient for term, coefficient in terms.items() if coefficient}, constant + k * c


def add(x: Node, y: Node) -> Node:
    """``x + y``.

    A row maximum taken from (or added to) values along its row, or taken from a row's value such as a sink,
    counts as 0 where it is -inf, that is in a row without a key: ``exp(s - max(s))`` is then no NaN.
    """
    x, y = promote(x, y)
    if x.kind == "int":
        return from_linear(*_combine(x, y, 1))
    if isinstance(x, Const) and isinstance(y, Const):
        return Const(x.value + y.value)
    for a, b in ((x, y), (y, x)):
        if isinstance(b, Const) and b.value == 0:
            return a
    if _is_reference(y, of=x):
        y = finite(y)
    elif _is_reference(x, of=y):
        x = finite(x)
    return _map("add", x, y)


def _is_reference(m: Node, of: Node) -> bool:
    """Whether ``m`` is a row maximum ``of`` is measured from: along its row, or subtracted (from a sink)."""
    if KEY_AXIS not in m.maxima or KEY_AXIS in m.axes:
        return False
    return KEY_AXIS in of.axes or (isinstance(m, Map) and m.op == "neg")


def finite(x: Node) -> Node:
    """``x``, and 0 where it is -inf (for a negated ``x``: where it is inf)."""
    if isinstance(x, Map) and x.op == "neg":
        return neg(finite(x.args[0]))
    if isinstance(x, Map) and x.op in ("mul", "div") and isinstance(x.args[1], Const):
        return rebuild(x, (finite(x.args[0]), x.args[1]))
    return x if isinstance(x, Map) and x.op == "finite" else Map("finite", (x,))


def neg(x: Node) -> Node:
    """``-x``."""
    if x.kind != "float":
        return from_linear({term: -k for term, k in linear(to_int(x))[0].items()}, -linear(to_int(x))[1])
    if isinstance(x, Const):
        return Const(-x.value)
    if isinstance(x, Map) and x.op == "neg":
        return x.args[0]
    if isinstance(x, Map) and x.op in ("mul", "div") and any(isinstance(arg, Const) for arg in x.args):
        return Map(x.op, tuple(neg(arg) if isinstance(arg, Const) else arg for arg in x.args))
    return Map("neg", (x,))


def sub(x: Node, y: Node) -> Node:
    """``x - y``."""
    if x.kind != "float" and y.kind != "float":
        return from_linear(*_combine(to_int(x), to_int(y), -1))
    return add(to_float(x), neg(to_float(y)))


def mul(x: Node, y: Node) -> Node:
    """``x * y``; a product with a truth value selects, so that what is not selected may be anything."""
    for a, b in ((x, y), (y, x)):
        if a.kind == "bool":
            return where(a, b, Const(0)) if b.kind != "bool" else to_int(conjunction(a, b))
        if isinstance(a, Map) and a.op == "to_float" and a.args[0].kind == "bool":
            return where(a.args[0], to_float(b), ZERO)
    x, y = promote(x, y)
    for a, b in ((x, y), (y, x)):
        if isinstance(a, Const):
            if isinstance(b, Const):
                return Const(a.value * b.value)
            if a.value == 1:
                return b
            if a.kind == "int":
                terms, constant = linear(b)
                return from_linear(
                    {term: k * int(a.value) for term, k in terms.items()}, constant * int(a.value)
                )
            if a.value == -1:
                return neg(b)
        if isinstance(a, Map) and a.op == "neg":
            return neg(mul(a.args[0], b))
    return _map("mul", x, y)


def div(x: Node, y: Node) -> Node:
    """``x / y`` in floating point; by a function of sums over keys, 0 where that is 0."""
    x, y = to_float(x), to_float(y)
    if isinstance(x, Map) and x.op == "neg":
        return neg(div(x.args[0], y))
    if isinstance(y, Const) and y.value == 1:
        return x
    return _map("quotient" if KEY_AXIS in y.summed else "div", x, y)


def quotient(x: Node, y: Node) -> Node:
    """``x / y``, and 0 where ``y`` is 0."""
    return _map("quotient", x, y)


def floordiv(x: Node, y: Node) -> Node:
    """``x // y``, rounded down as Python does."""
    x, y = promote(x, y)
    if x.kind == "float":
        return _map("floor", div(x, y))
    return x if isinstance(y, Const) and y.value == 1 else _map("floordiv", x, y)


def mod(x: Node, y: Node) -> Node:
    """``x % y``, with the sign of ``y`` as Python has it."""
    x, y = promote(x, y)
    if x.kind == "float":
        return sub(x, mul(y, _map("floor", div(x, y))))
    return Const(0) if isinstance(y, Const) and y.value == 1 else _map("mod", x, y)


def minimum(x: Node, y: Node) -> Node:
    """The smaller of two."""
    return x if x is y else _map("minimum", *promote(x, y))


def maximum(x: Node, y: Node) -> Node:
    """The larger of two."""
    return x if x is y else _map("maximum", *promote(x, y))


def _sides(terms: _Linear, constant: int) -> tuple[Node, Node]:
    """``terms + constant`` as left - right with positive coefficients on both sides."""
    left = from_linear({term: k for term, k in terms.items() if k > 0}, max(constant, 0))
    right = from_linear({term: -k for term, k in terms.items() if k < 0}, max(-constant, 0))
    return left, right


def le(x: Node, y: Node) -> Node:
    """``x <= y``."""
    x, y = promote(x, y)
    return _map("le", x, y) if x.kind == "float" else _compare("le", *_combine(x, y, -1))


def lt(x: Node, y: Node) -> Node:
    """``x < y``; of integers, ``x + 1 <= y``."""
    x, y = promote(x, y)
    if x.kind == "float":
        return _map("lt", x, y)
    terms, constant = _combine(x, y, -1)
    return _compare("le", terms, constant + 1)


def eq(x: Node, y: Node) -> Node:
    """``x == y``."""
    if x.kind == y.kind == "bool":
        return disjunction(conjunction(x, y), conjunction(negation(x), negation(y)))
    x, y = promote(x, y)
    if x.kind == "float":
        return _map("eq", x, y)
    terms, constant = _combine(x, y, -1)
    if terms and terms[min(terms, key=lambda term: term.order)] < 0:
        terms, constant = {term: -k for term, k in terms.items()}, -constant
    return _compare("eq", terms, constant)


def _compare(op: str, terms: _Linear, constant: int) -> Node:
    if not terms:
        return Const(constant <= 0 if op == "le" else constant == 0)
    return Map(op, _sides(terms, constant))


def negation(x: Node) -> Node:
    """``not x``, moved down to comparisons."""
    if isinstance(x, Const):
        return Const(not x.value)
    if isinstance(x, Map):
        if x.op == "not":
            return x.args[0]
        if x.op == "and":
            return disjunction(*(negation(arg) for arg in x.args))
        if x.op == "or":
            return conjunction(*(negation(arg) for arg in x.args))
        if x.op == "le" and x.args[0].kind == "int":
            return lt(x.args[1], x.args[0])
    return Map("not", (x,))


def conjunction(*args: Node) -> Node:
    """``x and y and ...``; True for none."""
    return _junction("and", args, neutral=TRUE, absorbing=FALSE)


def disjunction(*args: Node) -> Node:
    """``x or y or ...``; False for none."""
    return _junction("or", args, neutral=FALSE, absorbing=TRUE)


def _junction(op: str, args: Iterable[Node], neutral: Const, absorbing: Const) -> Node:
    terms: dict[Node, None] = {}
    for arg in args:
        for term in arg.args if isinstance(arg, Map) and arg.op == op else (arg,):
            if term is not neutral:
                terms[term] = None
    if absorbing in terms or any(negation(term) in terms for term in terms if term.size <= 12):
        return absorbing
    if len(terms) <= 1:
        return next(iter(terms), neutral)
    return Map(op, tuple(sorted(terms, key=lambda term: term.order)))


def where(condition: Node, x: Node, y: Node) -> Node:
    """``x`` where ``condition`` holds, else ``y``; what is not chosen may be anything, NaN included."""
    if x.kind == y.kind == "bool":
        return disjunction(conjunction(condition, x), conjunction(negation(condition), y))
    x, y = promote(x, y)
    if condition is TRUE or x is y:
        return x
    if condition is FALSE:
        return y
    if isinstance(condition, Map) and condition.op == "not":
        return where(condition.args[0], y, x)
    if isinstance(x, Const) and not isinstance(y, Const):
        opposite = negation(condition)
        if not (isinstance(opposite, Map) and opposite.op == "not"):
            return where(opposite, y, x)
    if isinstance(x, Map) and x.op == "where" and x.args[2] is y:
        return where(conjunction(condition, x.args[0]), x.args[1], y)
    if isinstance(y, Map) and y.op == "where" and y.args[1] is x:
        return where(disjunction(condition, y.args[0]), x, y.args[2])
    return Map("where", (condition, x, y))


def size(axis: Axis) -> Node:
    """The length of an axis."""
    return mul(Size("hk"), Size("g")) if axis == "h" else Size(axis)


def index(axis: Axis) -> Node:
    """The position along an axis, from 0; ``h`` is ``hk * G + g``."""
    return add(mul(Index("hk"), Size("g")), Index("g")) if axis == "h" else Index(axis)


def load(table: Input, indices: tuple[Node, ...]) -> Node:
    """``table[indices]``; reading a tensor at its own position is the tensor itself."""
    if all(i is index(axis) for i, axis in zip(indices, table.layout, strict=True)):
        return table
    return Load(table, indices)


def contract(x: Node, y: Node, over: Axis) -> Node:
    """The sum over ``over`` of ``x * y``."""
    x, y = sorted((to_float(x), to_float(y)), key=lambda arg: arg.order)
    return Contract(x, y, over)


def total(x: Node, over: Axis) -> Node:
    """The sum of ``x`` over ``over``."""
    return Reduce("sum", to_float(x), over)


def largest(x: Node, over: Axis) -> Node:
    """The maximum of ``x`` over ``over``."""
    return Reduce("max", to_float(x), over)


# ------------------------------------------------------------------------------------------------ traversal


def walk(roots: Iterable[Node]) -> list[Node]:
    """Every node below ``roots``, operands before what uses them, in an order of structure alone."""
    seen: dict[Node, None] = {}
    stack = list(roots)[::-1]
    while stack:
        node = stack[-1]
        if node not in seen:
            if waiting := [arg for arg in node.args if arg not in seen]:
                stack += waiting[::-1]
                continue
            seen[node] = None
        stack.pop()
    return list(seen)


_REBUILD: dict[str, Callable[..., Node]] = {
    "add": lambda *args: reduce(add, args),
    "mul": mul,
    "neg": neg,
    "div": div,
    "quotient": quotient,
    "finite": finite,
    "floordiv": floordiv,
    "mod": mod,
    "minimum": minimum,
    "maximum": maximum,
    "to_float": to_float,
    "to_int": to_int,
    "le": le,
    "lt": lt,
    "eq": eq,
    "and": conjunction,
    "or": disjunction,
    "not": negation,
    "where": where,
}


def rebuild(node: Node, args: tuple[Node, ...]) -> Node:
    """``node`` with other operands, brought to the constructors' form again."""
    if args == node.args:
        return node
    if isinstance(node, Map):
        make = _REBUILD.get(node.op)
        return make(*args) if make else _map(node.op, *args)
    if isinstance(node, Reduce):
        return Reduce(node.op, args[0], node.over)
    if isinstance(node, Contract):
        return contract(args[0], args[1], node.over)
    if isinstance(node, Load):
        assert isinstance(args[0], Input)
        return load(args[0], args[1:])
    if isinstance(node, Scatter):
        assert isinstance(args[0], Input)
        return Scatter(args[0], args[1:-1], args[-1])
    raise AssertionError(f"{type(node).__name__} has no operands")


def substitute(root: Node, replacements: Mapping[Node, Node]) -> Node:
    """``root`` with each node in ``replacements`` replaced, from the outside in."""
    done: dict[Node, Node] = dict(replacements)
    stack = [root]
    while stack:
        node = stack[-1]
        if node in done:
            stack.pop()
            continue
        missing = [arg for arg in node.args if arg not in done]
        if missing:
            stack.extend(missing)
            continue
        done[node] = rebuild(node, tuple(done[arg] for arg in node.args))
        stack.pop()
    return done[root]


def depends(root: Node, on: Iterable[Node]) -> bool:
    """Whether one of ``on`` stands in ``root``."""
    targets = set(on)
    return any(node in targets for node in walk([root]))
