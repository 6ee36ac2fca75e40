"""Labels for what the library builds: a comment says ``sliding_window(1024)``, the code its formula."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from fagen.lang.expr import Expr, is_tensor

F = TypeVar("F", bound=Callable[..., Any])


def labelled(build: F) -> F:
    """Make a mask or score know how it was called."""
    name = build.__name__
    parameters = tuple(inspect.signature(build).parameters)
    bare = f"{name}()"

    @functools.wraps(build)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = build(*args, **kwargs)
        label = bare
        if args or kwargs:
            shown = [_show(value, parameters[i]) for i, value in enumerate(args)]
            shown += [f"{key}={_show(value, key)}" for key, value in kwargs.items()]
            label = f"{name}({', '.join(shown)})"
        if isinstance(result, Expr):
            return Expr(result.node, result.captures, label)
        result.label = label
        return result

    wrapped.builds = True  # type: ignore[attr-defined]
    return wrapped  # type: ignore[return-value]


def _show(value: object, parameter: str) -> str:
    if is_tensor(value) or (isinstance(value, Expr) and value.captures):
        return parameter
    return repr(value)
