"""Room on Python's stack for what works on a formula by calling itself for each operation below."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fagen.ir.graph import Graph, Node

_FRAMES = 30  # that a level takes, in the backward direction, which nests deeper
_lock = threading.Lock()
_deep: list[int] = []  # what those inside need, in all threads: the limit is the process's
_before = 0  # the limit when there were none


@contextmanager
def room_for(formula: Graph | Node) -> Iterator[None]:
    """Let Python's stack be as deep as ``formula`` needs, and as it was behind the last such block."""
    global _before
    roots = [formula] if isinstance(formula, Node) else [output.node for output in formula.outputs]
    needed = _FRAMES * max((root.depth for root in roots), default=0)
    with _lock:
        if not _deep:
            _before = sys.getrecursionlimit()
        _deep.append(needed)
        sys.setrecursionlimit(max(_before, *_deep))
    try:
        yield
    finally:
        with _lock:
            _deep.remove(needed)
            sys.setrecursionlimit(max(_before, *_deep) if _deep else _before)
