"""Programs: a Python function over named axes, traced into a graph when it is needed."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeVar

from fagen.errors import DtypeError, UsageError
from fagen.ir.graph import Graph, Input, Scalar
from fagen.lang.expr import Expr, Tracing, fault, tracing
from fagen.lang.trace import Arguments, Traced, finish, results_of
from fagen.lang.types import ScalarType, TensorType, declared
from fagen.lang.watch import Watch


@dataclass(frozen=True)
class Options:
    """How a program is run: with bitwise equal gradients, by which family (None: the planner's choice)."""

    deterministic: bool = False
    family: str | None = None


@dataclass(frozen=True)
class Signature:
    """The parameters of a program: ``arguments`` of its kernels, and ``constants`` with their defaults.

    ``defaults`` are those of arguments.
    """

    names: tuple[str, ...]
    arguments: Arguments
    constants: Mapping[str, Any]
    defaults: Mapping[str, Any]


P = TypeVar("P", bound="Program")


class Program:
    """A function from tensors over named axes to tensors; see `program`."""

    def __init__(self, function: Callable[..., Any], options: Options | None = None) -> None:
        if not callable(function):
            raise DtypeError(f"program takes a function, not {function!r}")
        self.function = function
        self.name: str = _name_of(function)
        self.option = options or Options()
        self._signature: Signature | None = None
        self._traced: dict[tuple[Any, ...], tuple[Watch, tuple[int, ...], Traced]] = {}
        self._lock = threading.Lock()
        self.__doc__ = getattr(function, "__doc__", None)

    def __repr__(self) -> str:
        return f"<program {self.name}>"

    def __deepcopy__(self: P, memo: object) -> P:
        return self  # it holds nothing of the module it is copied with

    def __copy__(self: P) -> P:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as functions are, by name: with a model that holds it, or for another process.

        Raises UsageError where that name leads to nothing, or to another program.
        """
        function = self.function
        module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<lambda>")
        if module is None or "<" in name:
            raise fault(
                f"the program {self.name} has no name in its module, by which it could be pickled",
                works="define it at the top of a module",
            )
        try:
            found = _named(module, name)
        except (ImportError, AttributeError):
            found = None
        if function is not (found.function if isinstance(found, Program) else found):
            raise fault(
                f"the program {self.name} cannot be pickled, as {module}.{name} is not this program",
                works="give each program a name of its own",
            )
        return _by_name, (type(self), module, name, self.option)

    def options(self: P, *, deterministic: bool | None = None, family: str | None = None) -> P:
        """The same program, run otherwise; what is not given stays as it is."""
        new = self.__class__.__new__(self.__class__)
        new.__dict__.update(self.__dict__)
        option = self.option
        if deterministic is not None:
            option = replace(option, deterministic=deterministic)
        if family is not None:
            option = replace(option, family=family)
        new.option = option
        return new

    @property
    def signature(self) -> Signature:
        """What the function declares, as of the last trace."""
        if self._signature is None:
            self._signature = _read_signature(self.name, self.function)
        return self._signature

    def trace(self, **constants: Any) -> Traced:
        """The graph of this program, traced where it was not yet, or where something it reads has changed.

        ``constants`` are values of parameters that declare no axes. The same structure gives the same
        `Graph`.
        """
        key = tuple(constants.items())
        try:
            found = self._traced.get(key)
        except TypeError:  # a constant that is no key is traced each time
            return self._trace(constants)
        changed = found is None or found[0].changed()
        if found is not None and not changed and found[0].versions() == found[1]:
            return found[2]
        with self._lock:
            keeps = found is not None and not (changed and found[0].stable)
            watch = found[0] if found is not None and keeps else Watch(self.function)
            versions = watch.versions()
            traced = self._trace(constants)
            self._traced[key] = (watch, versions, traced)
        return traced

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Graph, tuple[Any, ...]]:
        """The graph for a call and a value for each of its arguments, the captured ones included."""
        if tracing.get():
            raise fault(
                f"the program {self.name} is called in it, and a program is called on tensors",
                works=f"call {self.name}.function, which takes expressions",
            )
        signature = self.signature
        if kwargs or signature.constants or len(args) != len(signature.names):
            given, constants = _match(self.name, signature, args, kwargs)
        else:
            given, constants = args, {}
        traced = self.trace(**constants)
        if signature.defaults and self.signature is not signature:  # they may have changed
            given, _ = _match(self.name, self.signature, args, kwargs)
        return traced.graph, given + traced.captured

    def _trace(self, constants: Mapping[str, Any]) -> Traced:
        signature = self._signature = _read_signature(self.name, self.function)
        with Tracing(self.name):
            parameters: dict[str, Any] = {**signature.constants, **constants}
            parameters.update((argument.name, Expr(argument)) for argument in signature.arguments)
            outputs = results_of(_call(self.function, signature, parameters))
            names = ("out",) if len(outputs) == 1 else tuple(f"out{i}" for i in range(len(outputs)))
            about = (self.__doc__ or "").strip().partition("\n")[0]
            return finish(self.name, signature.arguments, outputs, names, about=about)


def program(function: Callable[..., Any]) -> Program:
    """Make a program of a function whose parameters declare their axes: ``q: fg.Tensor["b h q d"]``.

    It is traced when first used, and again only where a closure cell, a default or a global it reads has
    changed. Axes of a result lie in the order of the first tensor argument, ``dv`` in the place of ``d`` and
    axes of your own before positions.
    """
    return Program(function)


def _named(module: str, name: str) -> object:
    return attrgetter(name)(import_module(module))


def _by_name(kind: type[Program], module: str, name: str, option: Options) -> Program:
    """The program of a function that stands in a module, as a decorator or itself."""
    found: Any = _named(module, name)
    if not isinstance(found, Program):
        return kind(found, option)
    return found if found.option == option else kind(found.function, option)


def _innermost(function: object) -> object:
    while isinstance(function, functools.partial | types.MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function


def _name_of(function: object) -> str:
    inner = _innermost(function)
    name = getattr(inner, "__name__", type(inner).__name__)
    return name if name.isidentifier() else "program"


def _call(function: Callable[..., Any], signature: Signature, parameters: Mapping[str, Any]) -> Any:
    shape = inspect.signature(function)
    positional = [
        parameters[name]
        for name, p in shape.parameters.items()
        if p.kind is inspect.Parameter.POSITIONAL_ONLY
    ]
    named = {
        name: parameters[name]
        for name, p in shape.parameters.items()
        if p.kind is not inspect.Parameter.POSITIONAL_ONLY
    }
    return function(*positional, **named)


def _read_signature(name: str, function: Callable[..., Any]) -> Signature:
    try:
        shape = inspect.signature(function, eval_str=True)
    except (NameError, AttributeError, SyntaxError) as error:
        raise UsageError(
            f"an annotation names something unknown ({error})",
            call=name,
            works='write axes as a string, fg.Tensor["b h q d"], with fagen imported beside the function',
        ) from None
    except ValueError:
        raise UsageError("its parameters cannot be read", call=name, works="write it with def") from None
    arguments: list[Input | Scalar] = []
    constants: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for label, parameter in shape.parameters.items():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise UsageError(
                f"the parameter *{label} declares no axes", call=name, works="name each argument"
            )
        kind = declared(parameter.annotation)
        if isinstance(kind, TensorType):
            arguments.append(Input(label, len(arguments), kind.layout, kind.stored, False))
        elif isinstance(kind, ScalarType):
            arguments.append(Scalar(label, len(arguments), kind.stored))
        elif parameter.default is inspect.Parameter.empty:
            raise UsageError(
                f"the parameter {label} declares no axes and has no default",
                call=name,
                works=f'write {label}: fg.Tensor["b h q d"], {label}: fg.Scalar, or {label}=0 for a constant',
            )
        if parameter.default is not inspect.Parameter.empty:
            (constants if kind is None else defaults)[label] = parameter.default
    return Signature(tuple(shape.parameters), tuple(arguments), constants, defaults)


def _match(
    name: str, signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The values of a call, parted into those of arguments and those of constants."""
    names = signature.names
    if len(args) > len(names):
        raise UsageError(f"{len(args)} arguments were given", call=name, works=f"it takes {', '.join(names)}")
    values = dict(zip(names, args, strict=False))
    for label, value in kwargs.items():
        if label not in names or label in values:
            what = "was given twice" if label in values else "is unknown"
            raise UsageError(f"the argument {label} {what}", call=name, works=f"it takes {', '.join(names)}")
        values[label] = value
    values = {**signature.defaults, **values}
    missing = [argument.name for argument in signature.arguments if argument.name not in values]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} was not given", call=name, works=f"it takes {', '.join(names)}"
        )
    constants = {label: values[label] for label in signature.constants if label in values}
    return tuple(values[argument.name] for argument in signature.arguments), constants
