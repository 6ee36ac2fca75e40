"""How a program declares its arguments: ``Tensor["b h q d"]``, ``Tensor["b q", int]``, ``Scalar``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fagen.errors import DtypeError
from fagen.ir.graph import Axis, Kind
from fagen.lang.axes import parse_layout

_KINDS: dict[object, Kind] = {float: "float", int: "int", bool: "bool"}


def _kind(of: object, allowed: tuple[Kind, ...]) -> Kind:
    kind = _KINDS.get(of)
    if kind not in allowed:
        raise DtypeError(f"an argument cannot hold {of!r}", works=f"declare {', '.join(allowed)}")
    return kind


@dataclass(frozen=True)
class TensorType:
    """A declared tensor: its axes in memory and what it holds."""

    layout: tuple[Axis, ...]
    stored: Kind = "float"


@dataclass(frozen=True)
class ScalarType:
    """A declared number, given at each call."""

    stored: Kind = "float"


class Tensor:
    """A tensor argument over named axes; a dimension of length 1 broadcasts."""

    def __class_getitem__(cls, declared: str | tuple[str, type]) -> Any:
        axes, of = declared if isinstance(declared, tuple) else (declared, float)
        return TensorType(parse_layout(axes), _kind(of, ("float", "int", "bool")))


class Scalar:
    """A number as an argument: a new value needs no new kernel. ``Scalar[int]`` is a whole one."""

    def __class_getitem__(cls, of: type) -> Any:
        return ScalarType(_kind(of, ("float", "int")))


def declared(annotation: object) -> TensorType | ScalarType | None:
    """What an annotation declares; None for one that is not ours."""
    if annotation is Scalar:
        return ScalarType()
    return annotation if isinstance(annotation, TensorType | ScalarType) else None
