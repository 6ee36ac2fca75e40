"""The ladder: one computation planned in several ways by the same planner, each rung moving fewer bytes than
the last.

For attention five rungs, for a matrix product alone the first three:

1. separate kernels, one thread for each element, everything between two operations in memory;
2. matrix products through shared memory: a block loads a tile once for all its threads;
3. block-tiled products: a thread computes many results from what it holds in registers;
4. scale, mask and dropout are fused into the products, statistics stay apart;
5. one pass: what resists fusion, the row statistics, is derived as running values.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fagen.derive.streaming import Fusion
from fagen.emit.program import emit
from fagen.ir import graph as ir
from fagen.ir.graph import Axis, Contract, Graph, Input, Output, Reduce, contract
from fagen.ir.show import length_name
from fagen.lang.attention import attention
from fagen.lang.masks import causal
from fagen.plan.arch import arch_for
from fagen.plan.cost import cost_of, live_parts, peak_buffer_bytes
from fagen.plan.plan import KernelPlan, Plan, Problem, Storage, Tiling
from fagen.plan.planner import plan
from fagen.study.explain import quantity, seconds


@dataclass(frozen=True)
class Rung:
    """What a rung pins, and what it is about."""

    number: int
    name: str
    """Of its file."""
    title: str
    change: str
    """What differs from the rung below."""
    fusion: Fusion
    tiling: Tiling


RUNGS = (
    Rung(
        1,
        "separate",
        "Separate kernels, one thread an element",
        "Each operation is a kernel that reads its operands from memory and writes its result there. In a "
        "product each thread computes one element and reads a whole row and a whole column for it.",
        "none",
        "element",
    ),
    Rung(
        2,
        "shared",
        "Products through shared memory",
        "A block brings a tile of each operand into shared memory once, for all its threads.",
        "none",
        "shared",
    ),
    Rung(
        3,
        "registers",
        "Block-tiled products",
        "A thread computes a small tile of results from values it holds in registers: the same arithmetic "
        "for fewer reads of shared memory, and larger tiles for fewer reads of memory.",
        "none",
        "registers",
    ),
    Rung(
        4,
        "fused",
        "Element-wise work fused into the products",
        "What works element by element is applied where a product is stored or loaded. The maximum and the "
        "sum of a row stay kernels of their own: each needs a whole row.",
        "products",
        "registers",
    ),
    Rung(
        5,
        "one_pass",
        "One pass, derived",
        "The maximum is replaced by its running value and what was accumulated is rescaled when it grows; "
        "the division waits until the end. No score leaves the chip.",
        "full",
        "registers",
    ),
)


@dataclass(frozen=True)
class Step:
    """A rung planned for a computation, with what the model says of it at given lengths."""

    rung: Rung
    plan: Plan
    lengths: tuple[tuple[Axis, int], ...]
    kernels: int
    flops: int
    moved_bytes: int
    """Loaded and stored by blocks (by threads, where they share nothing) beyond their multiprocessor."""
    memory_bytes: int
    """Of which device memory sees this much, predicted."""
    extra_bytes: int
    """Memory beside inputs and outputs."""
    seconds: float
    """Predicted."""


def attention_ladder(
    storage: Storage = "fp32",
    head_dim: int = 64,
    dropout: float = 0.1,
    is_causal: bool = True,
    arch: str = "A100",
    family: str = "simt",
) -> Problem:
    """The attention of the ladder, before a rung pins anything: q, k, v over (b, h, q, d) and so on."""
    graph = attention(mask=causal() if is_causal else None, dropout=dropout).graph
    return Problem(graph, arch_for(arch).name, family, (("d", head_dim), ("dv", head_dim)), (storage,) * 3)


def matmul_ladder(n: int, storage: Storage = "fp32", arch: str = "A100", family: str = "simt") -> Problem:
    """``c = a b``, a (i, k), b (k, j), all lengths ``n``."""
    return Problem(_matmul(), arch_for(arch).name, family, tuple(matmul_lengths(n).items()), (storage,) * 2)


@lru_cache(maxsize=1)
def _matmul() -> Graph:
    a, b = Input("a", 0, ("i", "k"), "float"), Input("b", 1, ("k", "j"), "float")
    return Graph("matmul", (a, b), (Output(contract(a, b, "k"), "c", ("i", "j")),))


def attention_lengths(
    q_len: int = 4096,
    kv_len: int | None = None,
    batch: int = 1,
    q_heads: int = 8,
    kv_heads: int | None = None,
) -> dict[Axis, int]:
    """Lengths by axis, for `climb`."""
    shared = kv_heads or q_heads
    return {
        "b": batch,
        "hk": shared,
        "g": q_heads // shared,
        "q": q_len,
        "kv": q_len if kv_len is None else kv_len,
    }


def matmul_lengths(n: int) -> dict[Axis, int]:
    """Square matrices."""
    return dict.fromkeys(("i", "j", "k"), n)


def climb(
    problem: Problem, lengths: Mapping[Axis, int], rungs: Sequence[Rung] | None = None
) -> tuple[Step, ...]:
    """The rungs of ``problem`` at ``lengths``, from the lowest; a program of one product has the first
    three."""
    if rungs is None:
        nodes = ir.walk(output.node for output in problem.graph.outputs)
        alone = sum(isinstance(node, Contract | Reduce) for node in nodes) == 1
        rungs = RUNGS[:3] if alone else RUNGS
    return tuple(_step(rung, problem, lengths) for rung in rungs)


def _step(rung: Rung, problem: Problem, lengths: Mapping[Axis, int]) -> Step:
    pinned = replace(problem, fusion=rung.fusion, tiling=rung.tiling)
    made = plan(pinned)
    arch, known = arch_for(problem.arch), dict(lengths) | dict(problem.sizes)

    def cost(kernel: KernelPlan) -> tuple[int, int, int, float]:
        found = cost_of(kernel, pinned, known, arch, live_parts(kernel, known))
        return found.flops, found.asked_bytes, found.memory_bytes, found.seconds

    flops, moved, memory, time = zip(*map(cost, made.kernels), strict=True)
    return Step(
        rung,
        made,
        tuple(known.items()),
        len(made.kernels),
        sum(flops),
        sum(moved),
        sum(memory),
        peak_buffer_bytes(made, known),
        sum(time),
    )


def saving(step: Step, before: Step | None) -> str:
    """What a rung saves against the one below, in the model's figures."""
    figures = f"{_counted(step.kernels, 'kernel')} move{'s' if step.kernels == 1 else ''}"
    figures += f" {quantity(step.moved_bytes, 'B')}"
    if step.extra_bytes:
        figures += f" and need {quantity(step.extra_bytes, 'B')} of extra memory"
    if before is None:
        return f"Nothing yet: {figures}."
    parts = []
    if before.moved_bytes > step.moved_bytes:
        parts.append(f"{before.moved_bytes / step.moved_bytes:,.1f} times fewer bytes moved")
    elif before.moved_bytes < step.moved_bytes:
        parts.append(f"{step.moved_bytes / before.moved_bytes:,.1f} times more bytes moved at this size")
    if before.kernels > step.kernels:
        parts.append(f"{_counted(before.kernels - step.kernels, 'launch')} fewer")
    if before.extra_bytes > step.extra_bytes:
        parts.append(f"{quantity(before.extra_bytes - step.extra_bytes, 'B')} less extra memory")
    return f"{', '.join(parts) or 'Nothing at this size'}: {figures}."


def _counted(count: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"


def rows(steps: Sequence[Step]) -> list[dict[str, str]]:
    """The model's table, a row a rung: rung, kernels, bytes moved, device memory, extra memory, predicted
    time."""
    return [
        {
            "rung": f"{step.rung.number}. {step.rung.title}",
            "kernels": str(step.kernels),
            "bytes moved": quantity(step.moved_bytes, "B"),
            "device memory": quantity(step.memory_bytes, "B"),
            "extra memory": quantity(step.extra_bytes, "B"),
            "predicted": seconds(step.seconds),
        }
        for step in steps
    ]


# ------------------------------------------------------------------------------------------------------ files


def sources(steps: Sequence[Step]) -> dict[str, str]:
    """The CUDA of each rung by the name of its file; its head says what changed and what that saves."""
    before: Step | None = None
    found = {}
    for step in steps:
        found[f"{step.rung.number}_{step.rung.name}.cu"] = (
            _head(step, before, len(steps)) + emit(step.plan).text
        )
        before = step
    return found


def _head(step: Step, before: Step | None, count: int) -> str:
    lengths = ", ".join(f"{length_name(axis)} {length:,}" for axis, length in step.lengths)
    paragraphs = [
        f"Rung {step.rung.number} of {count}. {step.rung.title}.",
        f"Changed: {step.rung.change}" if before else step.rung.change,
        f"Saves: {saving(step, before)}" if before else saving(step, before),
        f"By the model of {step.plan.problem.arch}, at {lengths}.",
    ]
    lines = [line for text in paragraphs for line in textwrap.wrap(text, 107)]
    return "\n".join(f"// {line}" for line in lines) + "\n//\n"
