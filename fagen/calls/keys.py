"""Strings that stand for objects of a user in a graph of torch, which holds no others."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

_numbers = itertools.count()
_named: WeakValueDictionary[str, Any] = WeakValueDictionary()


def key_of(thing: Any, name: str) -> str:
    """A new string for an object, which it does not keep alive."""
    key = f"{name}:{next(_numbers)}"
    _named[key] = thing
    return key


def named(key: str) -> Any:
    """The object a string stands for, as long as it lives."""
    return _named[key]
