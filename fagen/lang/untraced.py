"""Building expressions inside a function that ``torch.compile`` traces.

From 2.13 on torch traces it like any Python. Older ones stumble over it: there each operation breaks the
graph and is done outside.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_TRACES = (2, 13)


def torch_traces_expressions() -> bool:
    """Whether the torch that is installed is new enough; torch is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"__version__ = '(\d+)\.(\d+)", text)
    return found is None or (int(found[1]), int(found[2])) >= _TRACES


def keep_outside(things: Iterable[Any], reason: str | None = None) -> None:
    """Have torch call functions, and methods of classes, where it would trace them.

    It looks for the attributes that its own ``disable`` sets, and gives the ``reason`` where it must not.
    """
    for thing in things:
        if inspect.isclass(thing):
            keep_outside(vars(thing).values(), reason)
        for function in (thing, inspect.unwrap(thing)) if callable(thing) else ():
            if inspect.isfunction(function):
                function._torchdynamo_disable = True  # type: ignore[attr-defined]
                function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
