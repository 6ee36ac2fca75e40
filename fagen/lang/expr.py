"""Expressions: the values a program computes with, and what its operators mean.

An `Expr` is a graph node and the tensors it brought along (`capture`, `scalar`). Captures take the lowest
free slot number while they live, so that a mask built anew at each call gives the very same nodes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import numbers
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias

from fagen.errors import DtypeError, UsageError
from fagen.ir import graph as ir
from fagen.ir.graph import Axis, Const, Input, Kind, Node, Scalar
from fagen.lang.axes import check_name, parse_layout

Value: TypeAlias = "Expr | float | int | bool"
"""What stands in an expression: another one, or a Python number."""

Captures: TypeAlias = "tuple[Capture, ...]"

CACHE_SIZE = 1 << 14
"""Results of constructors kept, so that building an expression again costs a look-up an operation."""


# ------------------------------------------------------------------------------------------------- captures

_free_slots: list[int] = []
_new_slots = itertools.count()


class Capture:
    """A value brought into an expression from outside: an argument of the kernel, never a constant.

    ``node`` stands for it with the position ``-1 - slot``, until a program is finished and knows its
    arguments.
    """

    __slots__ = ("__weakref__", "node", "slot", "value")

    def __init__(self, value: object, make: Callable[[int], Input | Scalar]) -> None:
        try:
            self.slot = heapq.heappop(_free_slots)
        except IndexError:
            self.slot = next(_new_slots)
        self.value = value
        self.node = make(-1 - self.slot)

    def __del__(
        self, _free: list[int] = _free_slots, _push: Callable[[list[int], int], None] = heapq.heappush
    ) -> None:
        if hasattr(self, "slot"):  # not where a tracer gave it up half made
            _push(_free, self.slot)


def _merge(first: Captures, second: Captures) -> Captures:
    """Captures of two operands, in order of first use."""
    if not second or first is second:
        return first
    return tuple(dict.fromkeys(first + second)) if first else second


@lru_cache(maxsize=CACHE_SIZE)
def _input(name: str, position: int, layout: tuple[Axis, ...], stored: Kind, is_sorted: bool) -> Input:
    return Input(name, position, layout, stored, is_sorted)


@lru_cache(maxsize=256)
def stored_kind(dtype: object) -> Kind | None:
    """``float``, ``int`` or ``bool`` for a dtype of torch or numpy; None for one that has no meaning here."""
    name = str(dtype)
    kinds: tuple[tuple[str, Kind], ...] = (("bool", "bool"), ("int", "int"), ("float", "float"))
    return next((kind for word, kind in kinds if word in name), None)


def is_number(value: Any, whole: bool = False) -> bool:
    """Whether ``value`` is a Python number (of numpy too), and no truth value."""
    kind = type(value)
    if kind in (int, float):
        return kind is int or not whole
    return isinstance(value, numbers.Integral if whole else numbers.Real) and kind is not bool


_BEYOND_FP32 = float(2**128 - 2**103)


def beyond_fp32(value: float | int) -> bool:
    """Whether a finite number becomes infinite where it is rounded to fp32, in which scores are computed."""
    if value.__class__ is not int:  # numpy would round the limit to the type of its number
        value = float(value)
    return _BEYOND_FP32 <= abs(value) < math.inf


LARGEST = "numbers are fp32, of which the largest finite one is 3.4e38; fg.inf is infinite"
"""What works in place of a number beyond fp32."""


def is_tensor(value: object) -> bool:
    """Whether ``value`` is a tensor of torch, or an array that looks like one."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, numbers.Number)


def table_axes(value: object) -> tuple[object, ...]:
    """The axes of a declared or captured table, the lengths of a tensor; none of anything else."""
    if isinstance(value, Expr):
        return value.node.layout if isinstance(value.node, Input) else ()
    return tuple(value.shape) if is_tensor(value) else ()  # type: ignore[attr-defined]


def shown(value: object) -> str:
    """A value as a message shows it, a tensor by its shape."""
    return f"a tensor of shape {tuple(value.shape)}" if is_tensor(value) else repr(value)  # type: ignore[attr-defined]


def capture(tensor: Any, axes: str, sorted: bool = False, *, name: str = "captured") -> Expr:
    """A tensor from outside as part of an expression, passed to the kernel at each call.

    ``axes`` names its dimensions in order, such as ``"b q"``. An index symbol of one of them is implied; any
    other position is reached by indexing: ``doc[fg.b, fg.kv]``. ``sorted`` promises that values do not fall
    along the last axis, which lets equal values be found by binary search. ``name`` is for comments.
    """
    layout = parse_layout(axes)
    if not is_tensor(tensor):
        raise fault(
            f"{name if name != 'captured' else 'capture'} takes a tensor, not {tensor!r}",
            works="a number is brought in by fg.scalar(x)",
            kind=DtypeError,
        )
    if len(tensor.shape) != len(layout):
        names = f"{len(layout)} dimension{'' if len(layout) == 1 else 's'}"
        raise fault(
            f"the {name} tensor has shape {tuple(tensor.shape)}, and {axes!r} names {names}",
            works="name each of its dimensions",
        )
    stored = stored_kind(tensor.dtype)
    if stored is None:
        raise fault(
            f"a tensor of {tensor.dtype} cannot be captured",
            works="capture floating-point, integer or bool values",
            kind=DtypeError,
        )
    if sorted and not layout:
        raise fault("sorted=True promises an order along the last axis, and there is none")
    held = Capture(tensor, lambda position: _input(name, position, layout, stored, bool(sorted)))
    return Expr(held.node, (held,))


@lru_cache(maxsize=CACHE_SIZE)
def _scalar(name: str, position: int, stored: Kind) -> Scalar:
    return Scalar(name, position, stored)


def scalar(x: float | int, *, name: str = "scalar") -> Expr:
    """A number as an argument of the kernel: another value needs no other kernel."""
    if not is_number(x):
        hint = 'a tensor is brought in by fg.capture(tensor, "")' if is_tensor(x) else ""
        raise fault(f"scalar takes a number, not {x!r}", works=hint, kind=DtypeError)
    stored: Kind = "int" if is_number(x, whole=True) else "float"
    value = int(x) if stored == "int" else float(x)
    held = Capture(value, lambda position: _scalar(name, position, stored))
    return Expr(held.node, (held,))


# ------------------------------------------------------------------------------------------ errors, constants


class Tracing:
    """Within it, errors name the program and its dropouts are counted."""

    __slots__ = ("_outer", "dropouts", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.dropouts = 0

    def __enter__(self) -> Tracing:
        self._outer = tracing.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        tracing.reset(self._outer)


tracing: ContextVar[Tracing | None] = ContextVar("tracing", default=None)
"""The program being traced."""


def fault(
    what: str, *, works: str = "", kind: type[UsageError] | type[DtypeError] = UsageError
) -> UsageError | DtypeError:
    """The error of a user's mistake, naming the program it stands in."""
    program = tracing.get()
    return kind(what, call=program.name if program else "", works=works)


@lru_cache(maxsize=4096, typed=True)
def _const(value: float | int | bool) -> Const:
    if beyond_fp32(value):
        raise fault(f"{value:g} is too large a number", works=LARGEST)
    return Const(value)


def _integer(x: int | bool) -> Const:
    if not -(2**63) <= x < 2**63:
        if beyond_fp32(x):  # too long to be read, or to be written
            power = f"{'-' if x < 0 else ''}10**{math.log10(abs(x)):.4f}".rstrip("0").rstrip(".")
            raise fault(f"{power} is no integer of 64 bits", works=LARGEST)
        raise fault(f"{x!r} is no integer of 64 bits", works=f"as a floating-point number it is {float(x):g}")
    return _const(x)


def constant(x: Any) -> Const:
    """A Python number as a constant of the source."""
    kind = x.__class__
    if kind is int or kind is bool:
        return _integer(x)
    if kind is not float:
        if is_number(x, whole=True):
            return _integer(int(x))
        if not is_number(x):
            _refuse(x)
        x = float(x)
    if x == 0 or x != x:  # 0.0 and -0.0 are equal to a cache, a NaN is equal to nothing
        return Const(x)
    return _const(x)


def _refuse(x: Any) -> NoReturn:
    if is_tensor(x):
        raise fault(
            f"a tensor of shape {tuple(x.shape)} stands in an expression",
            works='name its axes: fg.capture(tensor, "b q")',
            kind=DtypeError,
        )
    if callable(x):
        name = getattr(x, "__name__", repr(x))
        raise fault(f"the function {name} stands where a value is expected", works="call it", kind=DtypeError)
    raise fault(f"{x!r} is no number and no expression", kind=DtypeError)


def node_of(x: Value) -> Node:
    """The node of an expression or a number."""
    return x.node if isinstance(x, Expr) else constant(x)


def captures_of(*values: Value | None) -> Captures:
    """The captures of several values, in order of first use; None has none."""
    found: Captures = ()
    for value in values:
        if isinstance(value, Expr):
            found = _merge(found, value.captures)
    return found


# ---------------------------------------------------------------------------------------------- expressions


def describe(node: Node) -> str:
    """A node as a message shows it, cut where it is long."""
    text = repr(node)
    return text if len(text) <= 60 else text[:57] + "..."


class Expr:
    """A value over named axes; operators build larger ones and nothing is computed.

    ``label`` is how the user wrote it, for comments: ``causal() & sliding_window(1024)``.
    """

    __slots__ = ("captures", "label", "node")
    __array_ufunc__ = None  # an array of numpy leaves the operator to us
    __iter__ = None

    def __init__(self, node: Node, captures: Captures = (), label: str | None = None) -> None:
        self.node = node
        self.captures = captures
        self.label = label

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse operations of torch; those of a tensor's operators leave the operator to us then."""
        import fagen.lang

        name = getattr(function, "__name__", "operation")
        has = name in fagen.lang.__all__
        works = f"fg.{name} takes it" if has else "fagen has operations of its own: fg.exp, fg.where, fg.sum"
        if name == "__getitem__":
            works = 'name the axes of the tensor: fg.capture(tensor, "b position")[fg.b, fg.q]'
        raise fault(f"torch's {name} is called on an expression", works=works, kind=DtypeError)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes it depends on, ``h`` as ``hk`` and ``g``."""
        return self.node.axes

    def __repr__(self) -> str:
        return self.label or repr(self.node)

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> NoReturn:
        raise fault(
            f"{describe(self.node)} has no truth value while a program is traced",
            works="use & | ~ for and, or, not, fg.where for if, and (a <= x) & (x < b) for a <= x < b",
        )

    def __float__(self) -> NoReturn:
        raise fault(f"{describe(self.node)} is no number while a program is traced")

    def __int__(self) -> NoReturn:
        raise fault(f"{describe(self.node)} is no number while a program is traced")

    def __add__(self, other: Value) -> Expr:
        return _binary(_add, self, other)

    def __radd__(self, other: Value) -> Expr:
        return _binary(_add, other, self)

    def __sub__(self, other: Value) -> Expr:
        return _binary(_sub, self, other)

    def __rsub__(self, other: Value) -> Expr:
        return _binary(_sub, other, self)

    def __mul__(self, other: Value) -> Expr:
        return _binary(_mul, self, other)

    def __rmul__(self, other: Value) -> Expr:
        return _binary(_mul, other, self)

    def __truediv__(self, other: Value) -> Expr:
        return _binary(_div, self, other)

    def __rtruediv__(self, other: Value) -> Expr:
        return _binary(_div, other, self)

    def __floordiv__(self, other: Value) -> Expr:
        return _binary(_floordiv, self, other)

    def __rfloordiv__(self, other: Value) -> Expr:
        return _binary(_floordiv, other, self)

    def __mod__(self, other: Value) -> Expr:
        return _binary(_mod, self, other)

    def __rmod__(self, other: Value) -> Expr:
        return _binary(_mod, other, self)

    def __and__(self, other: Value) -> Expr:
        return _binary(_and, self, other, " & ")

    def __rand__(self, other: Value) -> Expr:
        return _binary(_and, other, self)

    def __or__(self, other: Value) -> Expr:
        return _binary(_or, self, other, " | ")

    def __ror__(self, other: Value) -> Expr:
        return _binary(_or, other, self)

    def __invert__(self) -> Expr:
        label = self.label and f"~{_term(self.label, '~')}"
        return Expr(_not(self.node), self.captures, label)

    def __matmul__(self, other: object) -> NoReturn:
        raise fault(f"{describe(self.node)} stands before @", works='write fg.dot(q, k, over="d")')

    def __pow__(self, other: object) -> NoReturn:
        raise fault(f"{describe(self.node)} stands before **", works="write x * x, or fg.exp(y * fg.log(x))")

    def __xor__(self, other: object) -> NoReturn:
        raise fault(f"{describe(self.node)} stands before ^", works="write (a & ~b) | (~a & b)")

    def __neg__(self) -> Expr:
        return Expr(_neg(self.node), self.captures)

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return Expr(_abs(self.node), self.captures)

    def __eq__(self, other: Value) -> Expr:  # type: ignore[override]
        return _binary(_eq, self, other)

    def __ne__(self, other: Value) -> Expr:  # type: ignore[override]
        return _binary(_ne, self, other)

    def __lt__(self, other: Value) -> Expr:
        return _binary(_lt, self, other)

    def __le__(self, other: Value) -> Expr:
        return _binary(_le, self, other)

    def __gt__(self, other: Value) -> Expr:
        return _binary(_lt, other, self)

    def __ge__(self, other: Value) -> Expr:
        return _binary(_le, other, self)

    def __getitem__(self, indices: Any) -> Expr:
        table = self.node
        if not isinstance(table, Input):
            raise fault(
                f"{describe(table)} is computed, and only an argument or a captured tensor can be indexed",
                works="compute what depends on the index, or pass it as a tensor",
            )
        given = indices if isinstance(indices, tuple) else (indices,)
        nodes = tuple(_index_node(table, x) for x in given)
        if len(nodes) != len(table.layout):
            raise fault(
                f"{describe(table)} is indexed by {len(nodes)} value{'' if len(nodes) == 1 else 's'}",
                works=f"give one for each of its axes {' '.join(table.layout)}",
            )
        return Expr(_load(table, nodes), captures_of(self, *given))


def _index_node(table: Input, x: object) -> Node:
    if isinstance(x, slice) or x is None or x is Ellipsis:
        raise fault(
            f"{describe(table)} is indexed by a slice", works="give one integer expression for each axis"
        )
    node = node_of(x)  # type: ignore[arg-type]
    if node.kind != "int":
        kind = "a truth value" if node.kind == "bool" else "a floating-point value"
        raise fault(
            f"{describe(table)} is indexed by {describe(node)}, {kind}",
            works="an index is an integer, as fg.q, q // 2 or a tensor declared int",
            kind=DtypeError,
        )
    return node


def _binary(op: Callable[[Node, Node], Node], x: Value, y: Value, sign: str = "") -> Expr:
    if not isinstance(x, Expr):
        assert isinstance(y, Expr)
        return Expr(op(constant(x), y.node), y.captures)
    if not isinstance(y, Expr):
        return Expr(op(x.node, constant(y)), x.captures)
    label = None
    if sign and x.label and y.label:
        label = f"{_term(x.label, sign)}{sign}{_term(y.label, sign)}"
    return Expr(op(x.node, y.node), _merge(x.captures, y.captures), label)


_LOOSER = {" & ": (" | ",), " | ": (" & ",), "~": (" & ", " | ")}


def _term(label: str, sign: str) -> str:
    """A label as an operand of ``sign``, in parentheses where another connective stands in it."""
    return f"({label})" if any(other in label for other in _LOOSER[sign]) else label


# -------------------------------------------------------------------------------------------- constructors


def _numbers(build: Callable[[Node, Node], Node]) -> Callable[[Node, Node], Node]:
    return lru_cache(maxsize=CACHE_SIZE)(build)


def _by_number(build: Callable[[Node, Node], Node], sign: str) -> Callable[[Node, Node], Node]:
    """Division with a remainder: by the constant 0 it is refused, as Python does."""

    def checked(x: Node, y: Node) -> Node:
        if isinstance(y, Const) and y.value == 0:
            raise fault(f"{describe(x)} {sign} 0 is a division by zero")
        return build(x, y)

    return lru_cache(maxsize=CACHE_SIZE)(checked)


def _truths(build: Callable[..., Node], sign: str) -> Callable[..., Node]:
    """A connective, which takes truth values alone."""

    def checked(*args: Node) -> Node:
        for arg in args:
            if arg.kind != "bool":
                raise fault(
                    f"{sign} takes truth values, and {describe(arg)} is {_article(arg.kind)}",
                    works="compare it, as in x != 0; put comparisons in parentheses: (a < b) & (c < d)",
                    kind=DtypeError,
                )
        return build(*args)

    return lru_cache(maxsize=CACHE_SIZE)(checked)


def _article(kind: Kind) -> str:
    return {"int": "an integer", "float": "a floating-point value", "bool": "a truth value"}[kind]


def _absolute(x: Node) -> Node:
    return ir.function("abs", ir.to_int(x))


_add = _numbers(ir.add)
_sub = _numbers(ir.sub)
_mul = _numbers(ir.mul)
_div = _numbers(ir.div)
_floordiv = _by_number(ir.floordiv, "//")
_mod = _by_number(ir.mod, "%")
_eq = _numbers(ir.eq)
_ne = _numbers(lambda x, y: ir.negation(ir.eq(x, y)))
_lt = _numbers(ir.lt)
_le = _numbers(ir.le)
_and = _truths(ir.conjunction, "&")
_or = _truths(ir.disjunction, "|")
_not = _truths(ir.negation, "~")
_neg = lru_cache(maxsize=CACHE_SIZE)(ir.neg)
_abs = lru_cache(maxsize=CACHE_SIZE)(_absolute)
_load = lru_cache(maxsize=CACHE_SIZE)(ir.load)


# ----------------------------------------------------------------------------------------- index and length

b = Expr(ir.index("b"), label="b")
h = Expr(ir.index("h"), label="h")
hk = Expr(ir.index("hk"), label="hk")
q = Expr(ir.index("q"), label="q")
kv = Expr(ir.index("kv"), label="kv")

inf = math.inf
pi = math.pi


@lru_cache(maxsize=256)
def size(axis: str) -> Expr:
    """The length of an axis, an integer known at each call."""
    return Expr(ir.size(check_name(axis)))
