"""What derivation hands to planning: a computation as walks over tiles.

A `Stage` becomes one kernel. A block owns a tile of the ``own`` axes and walks along the ``walk`` axis,
once for each of the stage's `Walk` records. On every tile it computes the ``products`` (contractions over
an inner axis, such as the scores), then brings each `State` up to date. After the last walk the stage's
outputs are row expressions of the states.

Everything is an expression over the graph's nodes; what a walk computes itself stands in them as a
`Symbol`:

- ``s0, s1, ...``   products, over the own and the walk axes
- ``m0, l0, acc0``  states: a maximum, a sum, a sum with features of its own (a weighted sum of rows)
- ``part0, ...``    sums over an own axis, to which each block adds what it has of them
- ``NAME_old``      in `State.rescale`: a running state's value before this tile

No record names q or kv: a product of two matrices, a reduction of rows and attention have the same form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fagen.ir.graph import Axis, Node, Output, Symbol

Rule: TypeAlias = Literal[
    "defer",
    "rescale",
    "several walks",
    "free reference",
    "level",
    "saved",
    "exchange",
    "partials",
    "nothing to stream",
    "materialise",
    "group",
    "parts",
]

PART_AXIS: Axis = "part"
"""The axis along which blocks share the tiles of a walk, that no program has: see `derive.parts`."""


@dataclass(frozen=True)
class Note:
    """Why the derivation took a step: the rule and what it found, in terms of the user's expressions."""

    rule: Rule
    text: str


@dataclass(frozen=True)
class Term:
    """One contraction of a `Product`: ``own`` over own axes and ``over``, ``walk`` over walk axes and
    ``over``.

    Both are expressions of inputs alone, evaluated as tiles are loaded; both may have batch axes.
    """

    own: Node
    walk: Node
    over: Axis


@dataclass(frozen=True)
class Product:
    """The sum of its terms, one accumulator for each (own, walk) pair, fp32."""

    symbol: Symbol
    terms: tuple[Term, ...]


@dataclass(frozen=True)
class State:
    """What a walk accumulates: ``symbol = op over walk of value`` (times ``operand`` where there is one).

    ``value`` is an expression over own and walk axes; an element counts only where the walk's guard holds.
    ``operand`` has the walk axis and ``features`` (and batch axes): the state is then ``sum value *
    operand``, with the features. Where ``value`` uses a state of the same walk, that state is *running*:
    ``rescale`` is what the accumulated value is multiplied by when the running states go from ``NAME_old``
    to ``NAME``.
    """

    symbol: Symbol
    op: Literal["sum", "max"]
    value: Node
    operand: Node | None = None
    features: tuple[Axis, ...] = ()
    rescale: Node | None = None


@dataclass(frozen=True)
class Partial:
    """What each block adds to memory: its part of ``symbol = sum over OVER of value * operand``.

    ``over`` is an own axis, of which a block has a tile: what one step of its walk adds is complete for no
    row. ``value`` is an expression over own and walk axes, as a state's is; an element counts only where the
    walk's guard holds. ``operand`` has ``over`` and ``features`` (and batch axes). The sum lies in the buffer
    ``name``, fp32, with the axes of ``symbol`` as its layout; it is 0 before the stage, which adds to it in
    no fixed order or, where the same bits are asked for, in turns.
    """

    name: str
    symbol: Symbol
    over: Axis
    value: Node
    operand: Node
    features: tuple[Axis, ...]


@dataclass(frozen=True)
class Walk:
    """One pass along the walk axis.

    ``guard`` holds at elements that count (True: all do): where it does not, no state changes, so a tile
    without such an element is skipped. It depends on positions, tables and scalars alone. ``states`` stand
    in the order in which they are updated. ``stores`` are outputs with the walk axis, written tile by tile
    for every element; their values use ``where`` for the guard. A store of a `Scatter` adds each element to
    where its indices say, in no fixed order (where the same bits are asked for, to a sum that is exact); a
    walk with any other skips nothing. A walk with ``partials`` has neither stores nor running states.
    """

    guard: Node
    products: tuple[Product, ...]
    states: tuple[State, ...]
    stores: tuple[Output, ...] = ()
    partials: tuple[Partial, ...] = ()


@dataclass(frozen=True)
class Stage:
    """One kernel's work. ``outputs`` are expressions over own axes and features, of states and inputs.

    ``walk`` is None for a stage that only maps elements; it then has no walks. The walk is made at each
    position of the ``outer`` axes, one after another, and sums go on from one to the next. Where an own axis
    is the one of ``parts``, blocks take turns with the tiles that the walk visits.
    """

    name: str
    own: tuple[Axis, ...]
    walk: Axis | None
    walks: tuple[Walk, ...]
    outputs: tuple[Output, ...]
    outer: tuple[Axis, ...] = ()
    parts: Axis | None = None


@dataclass(frozen=True)
class Derivation:
    """The stages of a program in order, and why.

    Between them, values are inputs (fp32) ``t0, t1, ...``; of gradients as equations call them.
    """

    stages: tuple[Stage, ...]
    notes: tuple[Note, ...]
