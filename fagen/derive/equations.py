"""A backward graph as the equations of a paper, its intermediate values named by what they are."""

from __future__ import annotations

from fagen.derive.fit import weigh
from fagen.derive.separate import Reduction, reductions
from fagen.ir import graph as ir
from fagen.ir.graph import KEY_AXIS, Contract, Graph, Input, Map, Node, Scalar
from fagen.ir.names import names_of
from fagen.ir.show import show, with_axes


def equations(graph: Graph) -> list[str]:
    """The results of ``graph`` and what they are made of, operands first: what `letters` names."""
    labels, outputs = names_of(graph)
    names: dict[Node, str] = {a: a.name for a in graph.arguments if isinstance(a, Scalar)}
    names.update((a, labels[a.position]) for a in graph.arguments if isinstance(a, Input))
    found = letters(graph)
    names.update(found)
    lines = [_line(node, name, names) for node, name in found.items()]
    return lines + [
        f"{name} = {_shown(output.node, names)}" for name, output in zip(outputs, graph.outputs, strict=True)
    ]


def letters(graph: Graph) -> dict[Node, str]:
    """The intermediate values of a backward graph that have a name, in the order in which they are computed.

    ``S`` are products of a query and a key, ``P`` weights; ``dP`` and ``dS`` the gradients that go with them,
    ``D`` a row's value. A number follows where there are several.
    """
    labels, _ = names_of(graph)
    incoming = {a for a in graph.arguments if isinstance(a, Input) and labels[a.position].startswith("d")}
    found = _letters(graph, incoming)
    several = list(found.values())
    counts: dict[str, int] = {}
    for node, letter in found.items():
        counts[letter] = counts.get(letter, 0) + 1
        found[node] = letter if several.count(letter) == 1 else f"{letter}{counts[letter]}"
    return found


def _letters(graph: Graph, incoming: set[Input]) -> dict[Node, str]:
    nodes = ir.walk(output.node for output in graph.outputs)
    results = {output.node for output in graph.outputs}
    weights: set[Node] = set()
    for node in nodes:
        if isinstance(node, Contract) and any(map(reductions, node.args)):
            weighted = weigh(node, node.over)
            weights.update(x for x in (weighted.weights,) if isinstance(x, Map) and reductions(x))
    found: dict[Node, str] = {}
    for node in nodes:
        is_gradient = bool(incoming.intersection(ir.walk([node])))
        if isinstance(node, Reduction) and not any(map(reductions, node.args)) and node not in results:
            found[node] = "D" if KEY_AXIS not in node.axes else "dP" if is_gradient else "S"
        elif node in weights:
            found[node] = "dS" if is_gradient else "P"
    return found


def _line(node: Node, name: str, names: dict[Node, str]) -> str:
    others = {other: text for other, text in names.items() if other is not node}
    return f"{with_axes(name, node.axes)} = {_shown(node, others)}"


def _shown(node: Node, names: dict[Node, str]) -> str:
    """``node`` without ``finite``, which only empty rows notice."""
    known = dict(names)
    for part in ir.walk([node]):
        if isinstance(part, Map) and part.op == "finite" and part not in known:
            known[part] = known.get(part.args[0], show(part.args[0], known))
    return show(node, known)
