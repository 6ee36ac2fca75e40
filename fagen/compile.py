"""The road from a problem to something that runs: plan, emit, build, until one candidate builds well.

A problem is planned and emitted when someone asks for it: a process that finds its kernel by the index
derives nothing. What a compiler says of a candidate decides: one that spills registers is rejected with the
reason and the next is built, of the next family where one has no more. The winner is remembered, with what
was rejected before it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from fagen.derive.gradient import Gradient, gradient
from fagen.emit.program import Emitted, emit
from fagen.errors import BuildError, PlanError, UsageError
from fagen.ir.check import direct_inputs
from fagen.ir.graph import OPEN_AXES, Axis, Graph, Input, Node
from fagen.ir.show import show, show_graph
from fagen.plan.arch import arch_for
from fagen.plan.cost import tiles_of
from fagen.plan.plan import GROUP_AXIS, Plan, Problem, Rejected, Storage
from fagen.plan.planner import plans
from fagen.plan.profile import output_storages
from fagen.plan.space import Tiles
from fagen.plan.tiling import length_classes
from fagen.run.build import Built, Resources, build, built_as
from fagen.run.cache import index_get, index_put, package_digest
from fagen.run.debug import GRAPH, PLAN, TIMES, debug, debug_level, dump
from fagen.run.emulate import Checker, EmulatedKernels, compile_text
from fagen.run.recipe import Recipe, recipe_of
from fagen.run.tuned import Tuned, forget, recall, remember

MOST_CANDIDATES = 8
"""Plans of a family that are tried, the best first, before it is given up."""

FEW_SPILLED_BYTES = 512
"""Stored and loaded by the whole text of a function: a few registers kept in memory across a loop on tensor
cores, which takes less time than the smaller tiles that need none. On an H200, programs with 12, 34, 36 and
112 such bytes are 19, 1, 6 and 3 % faster than with the next tiles without, one with 272 is 2 % slower."""

_SHORT = 8


@dataclass(frozen=True)
class Candidate:
    """A plan and its text."""

    plan: Plan
    emitted: Emitted

    @cached_property
    def recipe(self) -> Recipe:
        """What a launcher has to know of it."""
        return recipe_of(self.plan, self.emitted)


@dataclass(frozen=True)
class Binary:
    """What runs on a GPU: an image, and how to launch what is in it.

    ``key`` names the content of the image, ``candidate`` counts the plans from the best.
    """

    key: str
    image: bytes
    recipe: Recipe
    resources: Mapping[str, Resources]
    candidate: int


@dataclass(frozen=True)
class _Taken:
    """A binary, and why it was taken: what measured best, or a candidate and those rejected before it."""

    binary: Binary
    best: Compiled | None
    chosen: int
    rejected: list[Rejected]


class Compiled:
    """A problem and what became of it, each step taken when it is first asked for.

    ``finalist`` is the rank of the only plan that is taken, among all by the model.
    """

    def __init__(self, problem: Problem, finalist: int | None = None) -> None:
        self.problem = problem
        self.finalist = finalist
        self._measured_best: Compiled | None = None
        self._lock = threading.RLock()
        self._candidates: dict[int, Candidate] = {}
        self._plans: list[Plan] = []
        self._families: list[range] = []
        self._chosen = 0
        self._rejected: list[Rejected] = []
        self._binaries: dict[tuple[str | tuple[int, int], str], _Taken] = {}
        self._last: _Taken | None = None
        self._emulated: dict[tuple[Checker, str], EmulatedKernels] = {}
        self._emulated_recipe: Recipe | None = None

    @cached_property
    def name(self) -> str:
        """A name that says what it computes, of which type and for which GPU; a digest makes it unique."""
        problem = self.problem
        sizes = "_".join(f"{axis}{length}" for axis, length in problem.sizes)
        dtype = next((storage for storage in problem.inputs if storage in ("fp32", "fp16", "bf16")), "")
        arch = problem.arch.lower().replace(" ", "")
        digest = _digest(self._asked())[:_SHORT]
        direction = "" if problem.graph.direction == "forward" else problem.graph.direction
        return "_".join(part for part in (problem.graph.name, direction, sizes, dtype, arch, digest) if part)

    @property
    def chosen(self) -> Candidate:
        """The candidate of the binary that was last asked for, or the best where none was."""
        if self._measured_best is not None:
            return self._measured_best.chosen
        return self.candidate(self._chosen)

    @property
    def plan(self) -> Plan:
        """The plan of `chosen`, with what compilers rejected among its rejected."""
        if self._measured_best is not None:
            return self._measured_best.plan
        plan = self.chosen.plan
        return replace(plan, rejected=(*plan.rejected, *self._rejected)) if self._rejected else plan

    @property
    def source(self) -> str:
        """The text of `chosen`."""
        return self.chosen.emitted.text

    def candidate(self, number: int) -> Candidate:
        """A candidate by its rank, planned and emitted if need be; IndexError behind the last."""
        with self._lock:
            while number >= len(self._plans):
                if not self._family(len(self._families)):
                    raise IndexError(f"{self.name} has {len(self._plans)} candidates")
            found = self._candidates.get(number)
            if found is None:
                plan = self._plans[number]
                found = self._candidates[number] = Candidate(plan, emit(plan))
                if os.environ.get("FAGEN_DUMP"):
                    dump(self.name, ".graph.txt", show_graph(plan.problem.graph) + "\n")
                    dump(self.name, ".plan.json", plan_json(plan))
            return found

    def require_plan(self) -> None:
        """Raise PlanError where no plan fits."""
        self._family(0)

    def _family(self, order: int) -> range:
        """The candidates of a family, by the order in which families are tried; none behind the last.

        Raises PlanError where not even the first has one.
        """
        with self._lock:
            while len(self._families) <= order:
                given_up = {self._plans[numbers[0]].family for numbers in self._families}
                found = self._planned(given_up)
                if not found or found[0].family in given_up:
                    return range(0)
                first = len(self._plans)
                self._plans += found
                self._families.append(range(first, len(self._plans)))
            return self._families[order]

    def _planned(self, given_up: Set[str]) -> tuple[Plan, ...]:
        """Plans of the first family that has any, beside those that were given up."""
        graph, start = self.problem.graph, time.perf_counter()
        if debug_level() >= GRAPH:
            debug(GRAPH, f"{self.name}\n{show_graph(graph)}")
        try:
            if self.finalist is None:
                found = plans(self.problem, most=MOST_CANDIDATES, without=given_up)
            elif given_up:
                found = ()
            else:
                found = plans(self.problem, most=self.finalist + 1, ranked=True)[self.finalist :]
        except PlanError:
            if given_up:
                return ()
            raise
        if not found:
            return found
        best = found[0]
        kernels = ", ".join(f"{k.function} ({k.schedule}, {k.threads} threads)" for k in best.kernels)
        debug(PLAN, f"{self.name}: {best.family}: {kernels}")
        debug(TIMES, f"{self.name}: planned in {1e3 * (time.perf_counter() - start):.1f} ms")
        return found

    # ------------------------------------------------------------------------------------------- for a CPU

    @property
    def emulated_recipe(self) -> Recipe:
        """How to launch what `emulated` gives."""
        if self._emulated_recipe is None:
            self.emulated()
        assert self._emulated_recipe is not None
        return self._emulated_recipe

    def emulated(self, checker: Checker = "none") -> EmulatedKernels:
        """The kernels for this machine's CPU, compiled by a C++ compiler.

        Raises ToolchainError without one, BuildError for text it refuses.
        """
        key = checker, os.environ.get("FAGEN_OVERRIDE", "")
        found = self._emulated.get(key)
        if found is None:
            with self._lock:
                found = self._emulated.get(key)
                if found is None:
                    found = self._emulated[key] = self._build_emulated(checker)
        return found

    def _build_emulated(self, checker: Checker) -> EmulatedKernels:
        text, recipe = self._text()
        self._emulated_recipe = recipe
        return compile_text(text, name=self.name, checker=checker)

    def _text(self) -> tuple[str, Recipe]:
        """The text and how to launch it, from the index where it was emitted before."""
        parts = {"kind": "text", **self._parts()}
        known = None if self._candidates or _looked_at() else index_get(parts)
        if known is not None:
            return known["text"], Recipe.from_json(known["recipe"])
        best = self.candidate(0)
        index_put(parts, {"text": best.emitted.text, "recipe": best.recipe.to_json()})
        return best.emitted.text, best.recipe

    # ------------------------------------------------------------------------------------------- for a GPU

    def binary(self, arch: str | tuple[int, int] | None = None, gpu: str = "") -> Binary:
        """What runs on a GPU: the best candidate that builds well, or the one that measured best there.

        ``arch`` is a device's compute capability; None is what the problem's row of GPUs is compiled for.
        ``gpu`` is the device's name, under which measurements are kept.
        Raises PlanError where nothing fits, ToolchainError without nvcc, BuildError where no candidate
        builds well.
        """
        arch = arch or arch_for(self.problem.arch).target
        asked = arch, gpu
        with self._lock:
            if asked in self._binaries:
                last = self._binaries[asked]
                self._measured_best, self._chosen, self._rejected = last.best, last.chosen, last.rejected
            else:
                binary = self._taken(arch, gpu)
                last = _Taken(binary, self._measured_best, self._chosen, self._rejected)
                self._binaries[asked] = last
            self._last = last
        return last.binary

    @property
    def built(self) -> Mapping[str, Resources]:
        """What the functions of the binary that was last asked for take, by name; none where none was."""
        return self._last.binary.resources if self._last else {}

    def tuned(self) -> Mapping[str, Tuned]:
        """What measurements say of this problem, by the name of the GPU."""
        return recall(self._parts())

    def tune(self, tuned: Tuned) -> None:
        """Keep what measurements say: later calls on that GPU take it."""
        with self._lock:
            remember(self._parts(), tuned)
            self._binaries.clear()
            self._last = None

    def untune(self, gpu: str) -> None:
        """Keep nothing of what was measured on a GPU."""
        with self._lock:
            forget(self._parts(), gpu)
            self._binaries.clear()
            self._last = None

    def _taken(self, arch: str | tuple[int, int], gpu: str) -> Binary:
        """The binary of what measured best on a GPU, or of what the model finds best."""
        found = self.tuned().get(gpu) if gpu and self.finalist is None else None
        if found is None or found.finalist is None:
            self._measured_best = None
            return self._build(arch)
        best = Compiled(self.problem, found.finalist)
        binary = best.binary(arch)
        self._measured_best = best
        return binary

    def _build(self, arch: str | tuple[int, int]) -> Binary:
        parts = {"kind": "binary", "target": str(arch), "compiler": _variables(), **self._parts()}
        entry = None if _looked_at() else index_get(parts)
        if entry and (found := _remembered(entry)):
            self._chosen = found.candidate
            self._rejected = [Rejected(who, why, built=True) for who, why in entry["rejected"]]
            return found
        number, built = self._best(arch)
        self._chosen = number
        recipe = self.candidate(number).recipe
        if not _looked_at():
            index_put(
                parts,
                {
                    "key": built.key,
                    "candidate": number,
                    "recipe": recipe.to_json(),
                    "compiler": _compiler_file(),
                    "rejected": [[each.candidate, each.reason] for each in self._rejected],
                },
            )
        return Binary(built.key, built.image, recipe, built.functions, number)

    def _best(self, arch: str | tuple[int, int]) -> tuple[int, Built]:
        """The first candidate that builds well, and what it built."""
        self._rejected = []
        for order in itertools.count():
            numbers = self._family(order)
            if not numbers:
                break
            found = self._best_of(numbers, arch)
            if found is not None:
                return found
        reasons = "; ".join(f"{each.candidate}: {each.reason}" for each in self._rejected)
        raise BuildError(
            f"no plan of {self.name} builds well for {arch}: {reasons}",
            works="a smaller head dim, a 16-bit dtype or another family may",
        )

    def _best_of(self, numbers: range, arch: str | tuple[int, int]) -> tuple[int, Built] | None:
        """Of the candidates of a family the first that builds well, else the one with the smallest stack.

        None where all spill.
        """
        stacks: list[tuple[int, int, Built]] = []
        tried: list[list[Tiles]] = []
        for number in numbers:
            tiles = [tiles_of(kernel) for kernel in self._plans[number].kernels]
            if tiles in tried:
                continue  # more registers are no help against a stack
            built = build(self.candidate(number).emitted.text, name=self.name, arch=arch)
            reason, stack_bytes = judged(built)
            if not reason:
                return number, built
            if stack_bytes:
                again = stack_bytes == min((each[0] for each in stacks), default=0)
                stacks.append((stack_bytes, number, built))
                tried.append(tiles)
                if again:
                    break  # it is that of a function called, and other tiles call it too
            debug(PLAN, f"{self.name}: {self._named(number)} is rejected: {reason}")
            self._rejected.append(Rejected(self._named(number), reason, built=True))
        if not stacks:
            return None
        _, number, built = min(stacks, key=lambda each: each[:2])
        self._rejected = [each for each in self._rejected if each.candidate != self._named(number)]
        return number, built

    def _named(self, number: int) -> str:
        """A candidate by number, family and tiles."""
        plan = self._plans[number]
        kernels = (f"{tiles_of(kernel)}, {kernel.resident} blocks at once" for kernel in plan.kernels)
        return f"candidate {number} ({plan.family}: {'; '.join(kernels)})"

    def _asked(self) -> dict[str, Any]:
        """The problem as JSON can hold it."""
        problem = self.problem
        plain = {f.name: getattr(problem, f.name) for f in fields(problem) if f.name != "graph"}
        return {"graph": graph_digest(problem.graph), **plain}

    def _parts(self) -> dict[str, Any]:
        """The problem, and the code that answers it."""
        own = {} if self.finalist is None else {"finalist": self.finalist}
        return {**self._asked(), **own, "package": package_digest()}


def judged(built: Built) -> tuple[str, int]:
    """Why a build is no good, and the bytes of its stack if that is all; ("", 0) for a good one.

    More than a few spilled registers, a dropped ``setmaxnreg`` or a serialised ``wgmma`` (C75xx) rule it out.
    A stack without spills is what a slow path of a function such as ``sinf`` takes, and may be all there is.
    """
    stack_bytes, reasons = 0, []
    for function in built.functions.values():
        spilled = function.spilled_bytes
        if spilled > FEW_SPILLED_BYTES:
            reasons.append(f"{function.name} spills {spilled} bytes of registers")
        stack_bytes = max(stack_bytes, 0 if spilled else function.stack_bytes)
    reasons += [line for line in built.warnings if "(C75" in line]
    if reasons:
        return ", ".join(reasons), 0
    return (f"takes {stack_bytes} bytes of stack a thread", stack_bytes) if stack_bytes else ("", 0)


def _looked_at() -> bool:
    """Whether someone wants to see or change what a build does: then it is not passed over."""
    return debug_level() >= PLAN or any(os.environ.get(name) for name in ("FAGEN_DUMP", "FAGEN_OVERRIDE"))


def _variables() -> dict[str, str]:
    """What in the environment chooses a compiler or its flags."""
    names = ("FAGEN_NVCC", "CUDA_HOME", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")
    return {name: value for name in names if (value := os.environ.get(name))}


def _compiler_file() -> list[Any] | None:
    """The compiler that built, by path and stat: another in its place is asked again."""
    from fagen.errors import ToolchainError
    from fagen.run.toolchain import find_nvcc

    try:
        path = find_nvcc().path
    except ToolchainError:
        return None
    return [str(path), *_stat(path)]


def _stat(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _remembered(value: Mapping[str, Any]) -> Binary | None:
    """The binary an index entry stands for; None where it is gone, or its compiler was replaced."""
    if value["compiler"]:
        path, *stat = value["compiler"]
        if os.path.exists(path) and _stat(Path(path)) != stat:
            return None
    built = built_as(value["key"])
    if built is None:
        return None
    recipe = Recipe.from_json(value["recipe"])
    return Binary(built.key, built.image, recipe, built.functions, value["candidate"])


# --------------------------------------------------------------------------------------------- all problems


@lru_cache(maxsize=1024)
def feature_axes(graph: Graph) -> frozenset[Axis]:
    """Axes whose length is fixed when a kernel is compiled: head dims, and others tensors are read along.

    A table that is only indexed may have any lengths.
    """
    named = {axis for argument in direct_inputs(graph) for axis in argument.axes}
    return frozenset(named - OPEN_AXES)


def problem_of(
    graph: Graph,
    arch: str,
    family: str | None,
    inputs: tuple[Storage, ...],
    sizes: Mapping[Axis, int],
    *,
    deterministic: bool = False,
    open_lengths: bool = False,
) -> Problem:
    """What is planned for lengths ``sizes``; with ``open_lengths`` for any, those of features apart."""
    features = feature_axes(graph)
    fixed = tuple(sorted((axis, length) for axis, length in sizes.items() if axis in features))
    classes = () if open_lengths else length_classes(graph, fixed, sizes, arch_for(arch))
    few = GROUP_AXIS not in features and "few" in dict(classes).values()
    group = sizes.get(GROUP_AXIS, 1) if few else 1
    return Problem(graph, arch, family, fixed, inputs, classes, group=group, deterministic=deterministic)


def backward_of(problem: Problem) -> tuple[Problem, Gradient]:
    """The gradients of all floating-point tensors of a problem's program, and where their inputs come from.

    Raises UsageError for a program without one.
    """
    graph = problem.graph
    tensors = [argument for argument in graph.arguments if isinstance(argument, Input)]
    stored = dict(zip((tensor.position for tensor in tensors), problem.inputs, strict=True))
    floats = frozenset(t.position for t in tensors if t.stored == "float")
    both = gradient(graph, floats, precise={stored[position] for position in floats} == {"fp32"})
    if not both.wanted:
        raise UsageError(
            "no output depends on a floating-point tensor",
            call=graph.name,
            works="direction='forward' is all",
        )
    kept = output_storages(replace(problem, graph=both.forward, outputs=()))
    inputs = tuple(
        stored[place] if kind == "argument" else kept[place]
        for argument, (kind, place) in zip(both.backward.arguments, both.sources, strict=True)
        if isinstance(argument, Input)
    )
    features = feature_axes(both.backward)
    return (
        Problem(
            both.backward,
            problem.arch,
            problem.family,
            tuple((axis, size) for axis, size in problem.sizes if axis in features),
            inputs,
            outputs=tuple(stored[position] for position in both.wanted),
            deterministic=problem.deterministic,
        ),
        both,
    )


_compiled: dict[Problem, Compiled] = {}
_compiled_lock = threading.Lock()


def compile_problem(problem: Problem) -> Compiled:
    """What became of a problem in this process; nothing is planned or built yet."""
    found = _compiled.get(problem)
    if found is None:
        with _compiled_lock:
            found = _compiled.setdefault(problem, Compiled(problem))
    return found


@lru_cache(maxsize=1024)
def graph_digest(graph: Graph) -> str:
    """What a graph computes, without the user's names: equal across processes."""
    return _digest(
        {
            "arguments": [argument.digest.hex() for argument in graph.arguments],
            "outputs": [[output.node.digest.hex(), *output.layout] for output in graph.outputs],
            "known": [argument.known for argument in graph.arguments if isinstance(argument, Input)],
            "text": [graph.direction, *graph.labels],
        }
    )


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def plan_json(plan: Plan) -> str:
    """A plan as JSON, expressions as formulas."""
    return json.dumps(_plain(plan), indent=2) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Node):
        return show(value)
    if isinstance(value, Graph):
        return {"name": value.name, "formulas": show_graph(value).splitlines()}
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return value
