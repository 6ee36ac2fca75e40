"""What tensors are called in emitted text: by what a program does with them, never by what its user says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fagen.ir.graph import OPEN_AXES, Axis, Contract, Graph, Input, Load, Node, Output, Reduce, walk


def names_of(graph: Graph) -> tuple[Mapping[int, str], tuple[str, ...]]:
    """The name of each tensor argument by its position, and that of each output."""
    if graph.labels:
        labels = iter(graph.labels)
        found = {a.position: next(labels) for a in graph.arguments if isinstance(a, Input)}
        return found, tuple(labels)
    return _inputs(graph), tuple(_outputs(graph))


def _outputs(graph: Graph) -> list[str]:
    """``O`` for what has features, ``tile`` for what has an axis that is walked, ``stat`` for rows."""
    walked = _walked(graph.outputs)
    features = {axis for a in graph.arguments for axis in a.axes} - OPEN_AXES
    kinds = []
    for output in graph.outputs:
        axes = set(output.node.axes)
        kinds.append("O" if axes & features else "tile" if axes & walked else "stat")
    return _numbered(kinds)


def _walked(outputs: Iterable[Output]) -> set[Axis]:
    """Axes that rows are summed over: by a `Reduce`, or by a `Contract` of another contraction's result."""
    found = set()
    for node in walk(output.node for output in outputs):
        if isinstance(node, Reduce) or (isinstance(node, Contract) and any(map(_contracts, node.args))):
            found.add(node.over)
    return found


def _contracts(x: Node) -> bool:
    return any(isinstance(node, Contract) for node in walk([x]))


def _inputs(graph: Graph) -> dict[int, str]:
    """The name of each tensor argument by its position, from what the graph does with it.

    ``Q`` and ``K`` are contracted along an inner axis to scores, K having the axis that is walked; ``V`` is
    summed with weights along it; ``A`` and ``B`` are contracted alone; all else is ``table``. Numbered where
    several have one role.
    """
    walked = _walked(graph.outputs)
    found: dict[int, str] = {}
    for node in reversed(walk(output.node for output in graph.outputs)):
        if not isinstance(node, Contract):
            continue
        for x, other in ((node.x, node.y), (node.y, node.x)):
            if _contracts(x):
                continue
            if _contracts(other):
                role = "V"
            elif walked & (set(x.axes) ^ set(other.axes)):
                role = "K" if walked & set(x.axes) else "Q"
            else:
                role = "AB"
            for position in _operands(x):
                found.setdefault(position, role)
    flat = [position for position, role in sorted(found.items()) if role == "AB"]
    for position in flat:
        found[position] = "A" if position == flat[0] else "B"
    inputs = [a.position for a in graph.arguments if isinstance(a, Input)]
    names = _numbered([found.get(position, "table") for position in inputs], always=("table",))
    return dict(zip(inputs, names, strict=True))


def _operands(x: Node) -> list[int]:
    """The floating-point tensors that ``x`` reads at their own position."""
    found: list[int] = []
    stack = [x]
    while stack:
        node = stack.pop()
        if isinstance(node, Input) and node.kind == "float":
            found.append(node.position)
        if not isinstance(node, Load):
            stack.extend(node.args)
    return sorted(found)


def _numbered(names: Sequence[str], always: Sequence[str] = ()) -> list[str]:
    """``names`` with a number where one occurs twice."""
    counts: dict[str, int] = {}
    result = []
    for name in names:
        number = counts.get(name, 0)
        counts[name] = number + 1
        result.append(f"{name}{number}" if names.count(name) > 1 or name in always else name)
    return result
