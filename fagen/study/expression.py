"""Masks and scores as text: the library's names, numbers, operators and lambdas over them, and nothing else.

The text is parsed by Python and evaluated here node by node, so no name but those of `NAMES` can be reached.
A list stands for a tensor: ``document([0, 0, 1])``. A library function given no table makes one up.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fagen import lang
from fagen.errors import FagenError, UsageError
from fagen.lang import masks, scores
from fagen.lang.expr import Expr, b, capture, is_number, kv, q
from fagen.lang.library import labelled
from fagen.study import tables
from fagen.study.tables import Lengths, Table

_HIDDEN = frozenset(("Expr", "Program", "Scalar", "Tensor", "capture", "program", "scalar"))
_CALLED = frozenset((*masks.__all__, *scores.__all__))
"""Names that mean a call without arguments where they stand bare."""

_MADE_UP: Mapping[str, Callable[[Lengths], Table]] = {
    "document": tables.documents,
    "document_lengths": tables.documents,
    "global_tokens": tables.flags,
    "padding": tables.key_lengths,
    "prefix_lm": tables.prefixes,
    "relative_bias": tables.distances,
}

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


@labelled
def document_lengths(lengths: Table) -> Expr:
    """The library's mask of that name, given the document of each position instead of lengths."""
    ids = capture(lengths, "b position", sorted=True, name="ids")
    return ids[b, q] == ids[b, kv]


NAMES: Mapping[str, Any] = {
    **{name: getattr(lang, name) for name in lang.__all__ if name not in _HIDDEN},
    "document_lengths": document_lengths,
}


def mask_of(text: str, lengths: Lengths) -> Any:
    """The mask written as ``text``; UsageError or DtypeError for a mistake in it."""
    mask = _Reader("--mask", text, lengths).read()
    if isinstance(mask, Expr) and not mask.label:
        return Expr(mask.node, mask.captures, " ".join(text.split()))
    return mask


def score_of(text: str, lengths: Lengths) -> Any:
    """The score, or list of scores, written as ``text``; UsageError or DtypeError for a mistake in it."""
    return _Reader("--score", text, lengths).read()


class _Reader:
    """One text, read for one option."""

    def __init__(self, option: str, text: str, lengths: Lengths) -> None:
        self.option = option
        self.text = text
        self.lengths = lengths

    def read(self) -> Any:
        """What the text stands for: a number, an expression, a function, or a list of them."""
        with self._one_sentence():
            try:
                tree = ast.parse(self.text.strip(), mode="eval")
            except SyntaxError as error:
                raise self._fault(f"{_short(self.text)!r} is no expression ({_short(error.msg)})") from None
            return self._value(tree.body, {})

    @contextmanager
    def _one_sentence(self) -> Iterator[None]:
        """Tell what Python finds wrong with a value, or with too long a text, as a mistake in the text."""
        try:
            yield
        except FagenError:
            raise
        except (RecursionError, MemoryError):
            raise self._fault("the expression is nested too deeply") from None
        except (ArithmeticError, TypeError, ValueError) as error:
            raise self._fault(f"{_short(self.text)!r}: {_short(str(error))}") from None

    def _fault(self, what: str, works: str = "") -> UsageError:
        return UsageError(what, call=self.option, works=works)

    # ------------------------------------------------------------------------------------------- by node

    def _value(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        """What a part of the text stands for; ``names`` are the parameters of the lambdas around it."""
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.Name() | ast.Attribute():
                return self._bare(self._name(node, names), self._looked_up(node, names))
            case ast.Call():
                return self._call(node, names)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._operator(_BINARY[type(op)], names, left, right)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                return self._operator(_UNARY[type(op)], names, operand)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
                return self._operator(_COMPARED[type(op)], names, left, right)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self._value(part, names) for part in parts]
            case ast.Lambda():
                return self._lambda(node, names)
        raise self._refused(node)

    def _refused(self, node: ast.expr) -> UsageError:
        part = _short(ast.unparse(node))
        match node:
            case ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                works = "use & | ~ for and, or, not, with comparisons in parentheses"
            case ast.Compare():
                works = "compare two values at a time: (a <= x) & (x < b)"
            case ast.IfExp():
                works = "use where(condition, x, y)"
            case _:
                works = "names of the library, numbers, operators and lambdas may"
        return self._fault(f"{part} cannot stand in an expression", works)

    def _name(self, node: ast.expr, names: Mapping[str, Any]) -> str:
        match node:
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="fg" | "fagen"), attr=name):
                if name in names or name in NAMES:
                    return name
                near = difflib.get_close_matches(name, [*names, *NAMES], n=1)
                library = f"the library has {', '.join(sorted(_CALLED))}; positions are b, h, hk, q, kv"
                works = f"did you mean {near[0]}?" if near else library
                raise self._fault(f"{name} is no name of the library", works)
        raise self._refused(node)

    def _looked_up(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        name = self._name(node, names)
        return names[name] if name in names else NAMES[name]

    def _bare(self, name: str, value: Any) -> Any:
        """A name that is not called: one of the library's masks and scores is, without arguments."""
        if value is NAMES.get(name) and name in _CALLED:
            return self._called(name, value, [], {})
        return value

    def _call(self, node: ast.Call, names: Mapping[str, Any]) -> Any:
        name, function = self._name(node.func, names), self._looked_up(node.func, names)
        if isinstance(function, Expr) or not callable(function):
            raise self._fault(f"{name} is no function, and is called")
        if any(keyword.arg is None for keyword in node.keywords):
            raise self._fault(f"{ast.unparse(node)} has an argument **", "name each argument")
        args = [self._value(part, names) for part in node.args]
        given = {keyword.arg: self._value(keyword.value, names) for keyword in node.keywords if keyword.arg}
        return self._called(name, function, args, given)

    def _called(self, name: str, function: Any, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        as_table = tables.documents_of if name == "document_lengths" else tables.of_values
        positional = [as_table(value) if isinstance(value, list) else value for value in args]
        keywords = {
            key: as_table(value) if isinstance(value, list) else value for key, value in given.items()
        }
        if name in _MADE_UP and not args and not given:
            positional = [_MADE_UP[name](self.lengths)]
        shape = inspect.signature(function)
        try:
            shape.bind(*positional, **keywords)
        except TypeError as error:
            raise self._fault(f"{name}: {error}", f"it takes {_shown(shape)}") from None
        return function(*positional, **keywords)

    def _operator(self, op: Callable[..., Any], names: Mapping[str, Any], *parts: ast.expr) -> Any:
        values = [self._value(part, names) for part in parts]
        for part, value in zip(parts, values, strict=True):
            if not isinstance(value, Expr | bool) and not is_number(value):
                raise self._fault(f"{ast.unparse(part)} is no value an operator takes")
        return op(*values)

    def _lambda(self, node: ast.Lambda, names: Mapping[str, Any]) -> Callable[..., Any]:
        """A function of the text's own, such as ``lambda s: s + h * (kv - q)``; its label is the text."""
        shape = node.args
        parameters = [each.arg for each in (*shape.posonlyargs, *shape.args)]
        if shape.vararg or shape.kwarg or shape.kwonlyargs or shape.defaults:
            raise self._fault(f"{ast.unparse(node)} takes more than plain parameters")

        def function(*values: Any) -> Any:
            with self._one_sentence():
                if len(values) != len(parameters):
                    given = f"{len(values)} value{'' if len(values) == 1 else 's'}"
                    raise self._fault(
                        f"{ast.unparse(node)} was given {given}",
                        "a score is a function of the score alone, in which b, h, q and kv are positions",
                    )
                return self._value(node.body, {**names, **dict(zip(parameters, values, strict=True))})

        function.label = ast.unparse(node)  # type: ignore[attr-defined]
        return function


def _shown(shape: inspect.Signature) -> str:
    """Parameters as a caller writes them: ``left, right=None``."""
    bare = [each.replace(annotation=each.empty) for each in shape.parameters.values()]
    return ", ".join(map(str, bare)) or "nothing"


def _short(text: str) -> str:
    """A text as a message shows it, cut where it is long."""
    return text if len(text) <= 60 else text[:57] + "..."
