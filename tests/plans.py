"""Programs and problems that tests plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fagen.ir.graph import Axis, Graph, Input, Output, contract
from fagen.lang.attention import attention
from fagen.lang.expr import kv, q
from fagen.plan.plan import Problem, Storage


def attention_graph(causal: bool = True, dropout: float = 0.0, **parts: Any) -> Graph:
    return attention(mask=kv <= q if causal else None, dropout=dropout, **parts).graph


def matmul_graph() -> Graph:
    a, b = Input("a", 0, ("i", "k"), "float"), Input("b", 1, ("k", "j"), "float")
    return Graph("matmul", (a, b), (Output(contract(a, b, "k"), "c", ("i", "j")),))


def problem(
    graph: Graph,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    storage: Storage = "fp32",
    arch: str = "H200",
    **rest: Any,
) -> Problem:
    sizes = (("d", head_dim), ("dv", v_head_dim or head_dim))
    inputs = tuple(storage for argument in graph.arguments if isinstance(argument, Input))
    return Problem(graph, arch, rest.pop("family", None), sizes, inputs, **rest)


def matmul_problem(arch: str = "A100", **rest: Any) -> Problem:
    return Problem(matmul_graph(), arch, None, (), ("fp32", "fp32"), **rest)


def lengths(n: int, head_dim: int = 64, **others: int) -> Mapping[Axis, int]:
    return {"b": 1, "hk": 1, "g": 1, "q": n, "kv": n, "d": head_dim, "dv": head_dim, **others}
