"""Names of axes, and the layouts tensors are declared with."""

from __future__ import annotations

import re
from functools import lru_cache

from fagen.errors import UsageError
from fagen.ir.graph import Axis

STANDARD = ("b", "h", "hk", "q", "kv", "d", "dv")

_NAME = re.compile(r"[a-z][a-z0-9_]*")  # the emitted text writes lengths in capitals


@lru_cache(maxsize=1024)
def parse_layout(text: str) -> tuple[Axis, ...]:
    """The axes of a layout such as ``"b h q d"``; ``""`` has none."""
    if not isinstance(text, str):
        raise UsageError(
            f"axes are written as a string, not {text!r}", works='write Tensor["b h q d"], or Tensor[""]'
        )
    axes = tuple(text.split())
    for axis in axes:
        check_name(axis, text)
    if len(set(axes)) != len(axes):
        raise UsageError(f"an axis stands twice in {text!r}", works="give each axis a name of its own")
    if "h" in axes and "hk" in axes:
        raise UsageError(
            f"{text!r} has both h and hk, and hk is h // (H / Hk)",
            works="keep one of them, or give the second an axis name of your own",
        )
    return axes


def check_name(axis: object, where: str = "") -> Axis:
    """``axis`` if it can name one."""
    inside = f" in {where!r}" if where and where != axis else ""
    if not isinstance(axis, str) or not _NAME.fullmatch(axis):
        named = str(axis) if not isinstance(axis, str) and _NAME.fullmatch(str(axis)) else ""
        names = f"use {', '.join(STANDARD)} or a word of your own in small letters"
        raise UsageError(
            f"{axis!r}{inside} is no axis name",
            works=f"an axis is named by a string, {named!r}" if named else names,
        )
    if axis == "g":
        raise UsageError(
            f"the axis g{inside} stands for the place of h in its group of heads",
            works="declare h, or take another name",
        )
    return axis
