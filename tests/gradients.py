"""Gradients of a program two ways: by the graph that `derive.gradient` makes, and by autograd."""

import torch

from fagen.derive.gradient import gradient
from fagen.ir.graph import Input
from fagen.ir.reference import evaluate


def floats(graph):
    """The positions of its floating-point tensors."""
    return frozenset(i for i, a in enumerate(graph.arguments) if isinstance(a, Input) and a.stored == "float")


def broadcasts(graph, values):
    """(position, axis) of each dimension of length 1 whose axis is longer."""
    longest = {}
    for argument, value in zip(graph.arguments, values, strict=True):
        if isinstance(argument, Input):
            for axis, extent in zip(argument.layout, value.shape, strict=True):
                longest[axis] = max(longest.get(axis, 0), extent)
    return tuple(
        (i, axis)
        for i, (argument, value) in enumerate(zip(graph.arguments, values, strict=True))
        if isinstance(argument, Input)
        for axis, extent in zip(argument.layout, value.shape, strict=True)
        if extent == 1 < longest[axis]
    )


def by_autograd(graph, values, incoming, wanted, seed=0):
    """The gradients of the arguments ``wanted``, by position, through the reference."""
    leaves = [v.detach().clone().requires_grad_() if i in wanted else v for i, v in enumerate(values)]
    outputs = evaluate(graph, leaves, seed=seed)
    pairs = [(o, g) for o, g in zip(outputs, incoming, strict=True) if g is not None and o.requires_grad]
    asked = [leaves[i] for i in sorted(wanted)]
    found = torch.autograd.grad([o for o, _ in pairs], asked, [g for _, g in pairs], allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(asked, found, strict=True)]
    return dict(zip(sorted(wanted), zeros, strict=True))


def incoming_for(graph, values, seed=0):
    """Random gradients of every output, and the outputs."""
    outputs = evaluate(graph, values)
    draw = torch.Generator().manual_seed(seed + 1)
    return [torch.randn(o.shape, generator=draw, dtype=torch.float64) for o in outputs]


def by_graph(graph, values, incoming, wanted, compute=evaluate, seed=0, precise=False):
    """The same by the gradient's own graph; ``compute`` runs a graph on values."""
    given = frozenset(i for i, g in enumerate(incoming) if g is not None)
    both = gradient(graph, wanted, given, broadcasts(graph, values), precise)
    outputs = evaluate(both.forward, values, seed=seed)
    kinds = {"argument": values, "output": outputs, "gradient": incoming}
    results = compute(both.backward, [kinds[kind][place] for kind, place in both.sources], seed=seed)
    found = {i: torch.zeros_like(values[i]) for i in wanted}
    for i, result in zip(both.wanted, results, strict=True):
        found[i] = result.reshape(values[i].shape)
    return found
