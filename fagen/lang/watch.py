"""What a traced function read outside its arguments, and whether any of it has changed since.

Tracing again gives the same graph for the same structure, so watching too much costs time alone. What cannot
be watched (a C object with state of its own, code that looks names up by string) is reported as always
changed.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Mapping
from functools import partial
from typing import Any

from fagen.ir.graph import Node
from fagen.lang.expr import Capture, Expr, is_tensor
from fagen.lang.types import ScalarType, TensorType

_MISSING: Any = object()
_ATOMS = (int, float, bool, str, bytes, complex, type(None), type(Ellipsis), range, slice)
_OURS = (Expr, Node, Capture, TensorType, ScalarType)
_BY_STRING = frozenset(
    ("globals", "locals", "vars", "eval", "exec", "getattr", "__import__", "import_module")
)
_HOOKS = ("__getattr__", "__getattribute__")
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")
_MOST = 2000


def _same(now: object, then: object) -> bool:
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, tuple) and isinstance(then, tuple):  # the shape of a tensor is a new one each time
        return len(now) == len(then) and all(map(_same, now, then))
    return isinstance(now, _ATOMS) and now == then


def _trusted(module: object) -> bool:
    """Whether a module of that name is taken as it is: ours, Python's own, and array libraries."""
    root = str(module).partition(".")[0]
    return root in ("fagen", "torch", "numpy") or root in sys.stdlib_module_names


def _stays(thing: object) -> bool:
    """Whether it is a module whose contents are taken as they are."""
    return isinstance(thing, types.ModuleType) and _trusted(thing.__name__)


class Watch:
    """The closure cells, defaults, globals and attributes a function reads, those of its helpers included."""

    def __init__(self, function: object) -> None:
        self.stable = True
        self._cells: list[tuple[types.CellType, object]] = []
        self._entries: list[tuple[Mapping[Any, Any], object, object]] = []
        self._attributes: list[tuple[object, str, object]] = []
        self._contents: list[tuple[Any, tuple[object, ...]]] = []
        self._tensors: list[Any] = []
        self._seen: dict[int, object] = {}
        self._owners: list[
            object
        ] = []  # modules, classes, instances: only attributes some code names are read
        self._names: dict[str, None] = {}
        self._read: set[tuple[int, str]] = set()
        self._visit(function)
        while self.stable and (missing := self._unread()):
            for owner, name in missing:
                self._attribute(owner, name)

    def changed(self) -> bool:
        """Whether something the function reads is another value than when this was built."""
        if not self.stable:
            return True
        try:
            for cell, then in self._cells:
                if cell.cell_contents is not then and not _same(cell.cell_contents, then):
                    return True
        except ValueError:  # a cell was emptied
            return True
        for entries, key, then in self._entries:
            now = entries.get(key, _MISSING)
            if now is not then and not _same(now, then):
                return True
        for owner, name, then in self._attributes:
            now = getattr(owner, name, _MISSING)
            if now is not then and not _same(now, then):
                return True
        for container, items in self._contents:
            if len(container) != len(items) or not all(map(_same, container, items)):
                return True
        return False

    def _unread(self) -> list[tuple[object, str]]:
        pairs = [(owner, name) for owner in self._owners for name in self._names]
        return [pair for pair in pairs if (id(pair[0]), pair[1]) not in self._read]

    def _visit(self, value: object) -> None:
        if value is _MISSING or type(value) in _ATOMS:
            return
        if isinstance(value, _OURS) or id(value) in self._seen or not self.stable:
            return
        self._seen[id(value)] = value
        if len(self._seen) + len(self._entries) > _MOST:
            self.stable = False
        elif isinstance(value, types.FunctionType):
            if not _trusted(value.__module__):
                self._function(value)
        elif isinstance(value, types.MethodType):
            self._visit(value.__func__)
            self._visit(value.__self__)
        elif isinstance(value, partial):
            for part in (value.func, value.args, value.keywords):
                self._visit(part)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            if not isinstance(value.__self__, types.ModuleType | type):
                self._visit(value.__self__)
        elif isinstance(value, list | tuple | set | frozenset):
            self._contents.append((value, tuple(value)))
            for item in value:
                self._visit(item)
        elif isinstance(value, dict):
            self._contents.append((value, tuple(value)))
            for key, item in value.items():
                self._entries.append((value, key, item))
                self._visit(item)
        elif isinstance(value, types.ModuleType | type):
            if not _trusted(value.__name__ if isinstance(value, types.ModuleType) else value.__module__):
                self._owners.append(value)
        elif isinstance(value, property):
            self._visit(value.fget)
        elif isinstance(value, staticmethod | classmethod):
            self._visit(value.__func__)
        elif is_tensor(value):
            self._tensor(value)
        elif isinstance(value, types.WrapperDescriptorType | types.MethodDescriptorType):
            pass
        elif _plain(type(value)):
            self._owners.append(value)
            self._visit(type(value))
        else:
            self.stable = False

    def versions(self) -> tuple[int, ...]:
        """How often each tensor was written to in place: values that the function read may be others then."""
        return tuple([tensor._version for tensor in self._tensors])

    def _tensor(self, tensor: Any) -> None:
        self._attributes.append((tensor, "shape", tensor.shape))
        try:
            tensor._version  # noqa: B018
            self._tensors.append(tensor)
        except (AttributeError, RuntimeError):  # an array of numpy, or an inference tensor: it does not say
            self.stable = False

    def _function(self, function: types.FunctionType) -> None:
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._attributes.append((function, name, getattr(function, name)))
        self._visit(function.__defaults__)
        self._visit(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                self.stable = False
                return
            self._cells.append((cell, content))
            self._visit(content)
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
            of: object = None  # the module that the last instruction named, which led here alone
            for instruction in dis.get_instructions(code):
                name, value = instruction.opname, instruction.argval
                if instruction.is_jump_target:
                    of = None
                if name in _GLOBALS:
                    of = function.__globals__.get(value)
                elif name in _ATTRIBUTES and _stays(of) and value not in _BY_STRING:
                    of = getattr(of, value, None)
                    continue
                else:
                    of = None
                self._instruction(name, value, function.__globals__)

    def _instruction(self, name: str, value: object, module: dict[str, Any]) -> None:
        """Note what one instruction reads by name: a global, an attribute of something, a module."""
        if name in _GLOBALS:
            if value in _BY_STRING:
                self.stable = False
            self._entry(module, str(value))
        elif name in _ATTRIBUTES:
            if value in _BY_STRING:
                self.stable = False
            self._names[str(value)] = None
        elif name == "IMPORT_NAME" and not _trusted(value):
            self._entry(sys.modules, str(value))
            self.stable &= value in sys.modules

    def _attribute(self, owner: object, name: str) -> None:
        """Watch an attribute wherever it is looked up: in the object, and in the classes above it."""
        self._read.add((id(owner), name))
        classes = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
        if not isinstance(owner, type):
            self._entry(getattr(owner, "__dict__", {}), name)
        for cls in classes:
            hooked = any(isinstance(vars(cls).get(hook), types.FunctionType) for hook in _HOOKS)
            if not _trusted(cls.__module__):
                self.stable &= not hooked
                self._class_attribute(owner, cls, name)
            elif hooked:  # as in a module of torch, whose parameters are no entries of its __dict__
                self._value(owner, name)

    def _class_attribute(self, owner: object, cls: type, name: str) -> None:
        if not isinstance(vars(cls).get(name), types.MemberDescriptorType):
            self._entry(vars(cls), name)
        elif not isinstance(owner, type):
            self._value(owner, name)

    def _value(self, owner: object, name: str) -> None:
        value = getattr(owner, name, _MISSING)
        self._attributes.append((owner, name, value))
        self._visit(value)

    def _entry(self, entries: Mapping[str, Any], name: str) -> None:
        """Watch one name of a namespace, present or not."""
        if (id(entries), name) not in self._read:
            value = entries.get(name, _MISSING)
            self._read.add((id(entries), name))
            self._entries.append((entries, name, value))
            self._visit(value)


def _plain(cls: type) -> bool:
    """Whether instances of a class keep all they are in ``__dict__`` or slots, as Python's own classes do."""
    first = next(base for base in reversed(cls.__mro__) if base is not object)
    return "__dict__" in vars(first) or "__slots__" in vars(first)
