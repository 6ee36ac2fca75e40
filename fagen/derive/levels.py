"""What of a tile is made in which order: the products that a value needs, then what is summed of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fagen.derive.walk import Product, State
from fagen.ir import graph as ir
from fagen.ir.graph import Symbol


@dataclass(frozen=True)
class Level:
    """Products of a tile, and the states that wait for no others."""

    products: tuple[Product, ...]
    states: tuple[State, ...]


def by_products(products: Sequence[Product], states: Sequence[State]) -> tuple[Level, ...]:
    """Each state at the level of the last product that it needs; empty where they can't be told apart.

    They can where no state waits for another, as running ones do, and every state needs some product.
    """
    symbols = {state.symbol for state in states}
    if any(s.op == "max" or s.rescale is not None or uses(s, symbols) for s in states):
        return ()
    needed = {state: [p for p in products if uses(state, {p.symbol})] for state in states}
    known: list[Product] = []
    found: list[Level] = []
    for state in sorted(states, key=lambda state: len(needed[state])):
        more = tuple(product for product in needed[state] if product not in known)
        known += more
        if more or not found:
            found.append(Level(more, (state,)))
        else:
            found[-1] = Level(found[-1].products, (*found[-1].states, state))
    return tuple(found) if found and found[0].products else ()


def uses(state: State, symbols: set[Symbol]) -> bool:
    """Whether the value of ``state`` is made of one of ``symbols``."""
    return any(node in symbols for node in ir.walk([state.value]))
