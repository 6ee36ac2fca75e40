"""Two stages that compute the same products as one: what one sums for its rows, the other can pass on.

A block that owns a tile of one axis and walks along another has, at each step, the products of a pair of
tiles. Another stage may own what this one walks along, and walk along what it owns: its products are the
same, transposed. Where its results are plain sums along its walk, each block of the first stage has a part of
them, the part of the rows it owns, and adds it to memory. The products are then computed once; what is paid
is that memory, to which every block adds, and that the order of the additions is not fixed, or that blocks
wait for their turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fagen.derive.notes import listed
from fagen.derive.walk import Derivation, Note, Partial, Product, Stage, Walk
from fagen.ir import graph as ir
from fagen.ir.graph import Graph, Input, Node, Symbol
from fagen.ir.names import names_of


def merged(derivation: Derivation, graph: Graph, deterministic: bool = False) -> Derivation | None:
    """``derivation`` of ``graph`` with two of its stages made one; None where no two can be.

    Of two ways the one is taken that adds up fewer sums in memory. ``deterministic`` says that they are
    added in turns.
    """
    stages = derivation.stages
    found = [
        (len(giver.walks[0].states), giver, host, whole)
        for giver, host in _pairs(stages, graph)
        if (whole := _merge(giver, host, values_between(stages, graph), graph)) is not None
    ]
    if not found:
        return None
    _, giver, host, (both, rest) = min(found, key=lambda each: each[0])
    place = max(stages.index(giver), stages.index(host))
    kept: list[Stage] = []
    for number, stage in enumerate(stages):
        if number == place:
            kept += [both, rest]
        elif stage not in (giver, host):
            kept.append(stage)
    return replace(
        derivation, stages=tuple(kept), notes=(*derivation.notes, _note(giver, both, deterministic))
    )


def _pairs(stages: Sequence[Stage], graph: Graph) -> Iterator[tuple[Stage, Stage]]:
    """Two stages for results of the program: what they store no other stage reads."""
    last = [stage for stage in stages if stage.name == graph.name and len(stage.walks) == 1]
    return ((giver, host) for giver in last for host in last if giver is not host)


def values_between(stages: Sequence[Stage], graph: Graph) -> int:
    """How many values lie between ``stages``."""
    between = (stage for stage in stages if stage.name != graph.name)
    return sum(len(stage.outputs) + sum(len(walk.stores) for walk in stage.walks) for stage in between)


def _merge(giver: Stage, host: Stage, buffers: int, graph: Graph) -> tuple[Stage, Stage] | None:
    """``host`` with the sums of ``giver`` as partial sums, and what is made of them after it; or None."""
    (of_giver,), (of_host,) = giver.walks, host.walks
    over = giver.walk
    if over is None or over not in host.own or host.walk not in giver.own:
        return None
    if {*giver.own, over, *giver.outer} != {*host.own, host.walk, *host.outer}:
        return None
    if of_giver.guard is not of_host.guard or not (_is_plain(of_giver) and _is_plain(of_host)):
        return None
    names = _names(of_giver.products, of_host.products)
    if not names:
        return None
    partials: list[Partial] = []
    read: dict[Node, Node] = {}
    for state in of_giver.states:
        if state.operand is None or not state.features:
            return None
        number = buffers + len(partials)
        symbol = Symbol(f"part{len(partials)}", state.symbol.axes, "float")
        value = ir.substitute(state.value, names)
        name = _sum_of(state.symbol, giver, graph) or f"t{number}"
        partials.append(Partial(name, symbol, over, value, state.operand, state.features))
        at = len(graph.arguments) + number
        read[state.symbol] = Input(name, at, symbol.axes, "float")
    outputs = tuple(replace(out, node=ir.substitute(out.node, read)) for out in giver.outputs)
    own = ir.sort_axes(axis for output in outputs for axis in output.node.axes)
    both = replace(host, walks=(replace(of_host, partials=tuple(partials)),))
    return both, Stage(giver.name, own, None, (), outputs)


def _sum_of(symbol: Symbol, giver: Stage, graph: Graph) -> str:
    """What a sum is called that one result is made of, and of sums nothing else; empty for any other."""
    labels = dict(zip((output.name for output in graph.outputs), names_of(graph)[1], strict=True))
    symbols = [state.symbol for state in giver.walks[0].states]
    made = [output for output in giver.outputs if ir.depends(output.node, [symbol])]
    alone = len(made) == 1 and not ir.depends(made[0].node, [s for s in symbols if s is not symbol])
    return f"{labels[made[0].name]}_sum" if alone else ""


def _is_plain(walk: Walk) -> bool:
    """Whether all a walk makes are sums of values that no state of it stands in."""
    symbols = [state.symbol for state in walk.states]
    plain = all(state.op == "sum" and state.rescale is None for state in walk.states)
    alone = not any(ir.depends(state.value, symbols) for state in walk.states)
    return plain and alone and bool(symbols) and not walk.stores and not walk.partials


def _names(giver: Sequence[Product], host: Sequence[Product]) -> dict[Node, Node]:
    """The products of one stage as another calls them, which owns what the first walks along; empty where
    one of them is not there."""
    there = {frozenset((t.walk, t.own, t.over) for t in product.terms): product.symbol for product in host}
    sides = [frozenset((t.own, t.walk, t.over) for t in product.terms) for product in giver]
    if not all(side in there for side in sides):
        return {}
    return {product.symbol: there[side] for product, side in zip(giver, sides, strict=True)}


def _note(giver: Stage, both: Stage, deterministic: bool) -> Note:
    (walk,) = both.walks
    sums = listed([partial.name for partial in walk.partials])
    products = listed(sorted(product.symbol.name for product in walk.products))
    how = "in turns" if deterministic else "in no fixed order"
    text = (
        f"{products} are those of a walk along {giver.walk} too: a block that owns rows of {giver.walk} adds "
        f"its part of {sums} to memory, {how}, and no other computes them again"
    )
    return Note("partials", text)
