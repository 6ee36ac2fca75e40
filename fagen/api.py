"""What a user calls: programs, `attention`, `compile` and the `Kernel` it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fagen.calls.keys import key_of
from fagen.compile import Compiled, backward_of, compile_problem, feature_axes, problem_of
from fagen.derive.gradient import Gradient
from fagen.errors import DtypeError, UsageError
from fagen.export import export
from fagen.ir.graph import Graph, Input
from fagen.ir.show import LENGTHS, length_name
from fagen.lang.attention import attention as attention_graph
from fagen.lang.expr import Expr, capture, is_number
from fagen.lang.program import Options
from fagen.lang.program import Program as TracedProgram
from fagen.lang.trace import Traced
from fagen.lang.types import TensorType
from fagen.plan.arch import arch_for
from fagen.plan.plan import Plan, Storage
from fagen.run.build import Resources
from fagen.study.explain import explain

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self


class Program(TracedProgram):
    """A function over named axes that is called on torch tensors; see `program`.

    Compiled when it is first called with such dtypes, head dims and device; ``options`` returns the same
    program run otherwise.
    """

    def __init__(self, function: Callable[..., Any], options: Options | None = None) -> None:
        super().__init__(function, options)
        self.key = key_of(self, self.name)

    def options(self, *, deterministic: bool | None = None, family: str | None = None) -> Self:
        """The same program, run otherwise; what is not given stays as it is."""
        new = super().options(deterministic=deterministic, family=family)
        new.key = key_of(new, new.name)
        return new

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        """The outputs for a tensor or number for each declared argument, on the tensors' device."""
        import fagen.calls.entry  # late, as it imports torch; in this form, which is the fastest

        return fagen.calls.entry.call_program(self, args, kwargs)


def program(function: Callable[..., Any]) -> Program:
    """Make a program of a function whose parameters declare their axes: ``q: fg.Tensor["b h q d"]``.

    It is traced when first used, and again only where a closure cell, a default or a global it reads has
    changed. Axes of a result lie in the order of the first tensor argument, ``dv`` in the place of ``d`` and
    axes of your own before positions.
    """
    return Program(function)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any = None,
    score: Any = None,
    scale: float | Expr | None = None,
    bias: Any = None,
    sink: Any = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    layout: str = "bhsd",
    deterministic: bool = False,
    family: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Softmax attention from parts, in this order: scale, scores, bias, mask, softmax, dropout, weighted sum.

    q (b, h, q, d), k (b, hk, kv, d), v (b, hk, kv, dv); with ``layout="bshd"`` positions before heads.
    fp32, fp16 or bf16, any strides. The output is laid out as q, with dv in the place of d. ``return_lse``
    adds (b, h, q) in fp32, the natural logarithm of each row's denominator.

    mask     a condition such as ``fg.causal()`` or ``fg.kv <= fg.q``: where it is false a score is -inf
    score    a function of the score, or a list of them
    scale    a number, 1/sqrt(d) by default; a kernel argument
    bias     a tensor that broadcasts to (b, h, q, kv), added to the scores
    sink     (h,), a logit in each row's denominator
    dropout  the probability of dropping a weight

    With ``deterministic`` gradients are the same bits in every run; that of a gathered table is then summed
    exactly, in 520 bytes for each element of the table. Several blocks may add their parts of one, such as
    that of q, to memory: without it in no fixed order, which is faster and may differ in the last bits, with
    it in turns; where it is not known whose turn comes next, a kernel of its own makes it.

    Raises UsageError or DtypeError for what has no meaning, PlanError for what does not fit.
    """
    import fagen.calls.entry

    return fagen.calls.entry.call_attention(
        (q, k, v),
        {
            "mask": mask,
            "score": score,
            "scale": scale,
            "bias": bias,
            "sink": sink,
            "dropout": dropout,
            "return_lse": return_lse,
            "layout": layout,
        },
        deterministic,
        family,
    )


_STORAGES: Mapping[str, Storage] = {
    "fp32": "fp32",
    "float32": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "int32": "int32",
    "int64": "int64",
    "bool": "bool",
}


class Kernel:
    """A kernel compiled ahead of time, for one dtype, head dim and GPU.

    Planned and emitted when something of it is asked for; its binary is built, or found in the cache, when it
    is called or its ``resources`` are asked for.
    """

    def __init__(
        self,
        compiled: Compiled,
        captured: tuple[Any, ...],
        option: Options,
        gradient: Gradient | None = None,
    ) -> None:
        self.compiled = compiled
        self.captured = captured
        self.option = option
        self.gradient = gradient
        """Of a backward kernel: where its arguments come from, and of what its outputs are gradients."""
        self.key = key_of(self, compiled.problem.graph.name)

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"

    @property
    def name(self) -> str:
        """What it computes and for what: also the name of its file in FAGEN_DUMP and FAGEN_OVERRIDE."""
        return self.compiled.name

    @property
    def source(self) -> str:
        """The text of the .cu: all kernels of this direction."""
        return self.compiled.source

    @property
    def plan(self) -> Plan:
        """What was decided: stages, schedules, tiles, memory, and the candidates that were not taken."""
        return self.compiled.plan

    @property
    def resources(self) -> Mapping[str, Resources]:
        """Registers, stack and spills of each function, as ptxas reports them; needs nvcc."""
        return self.compiled.binary().resources

    def explain(self, **lengths: int) -> str:
        """The plan, its cost at lengths such as ``batch=2, q_heads=16, q_len=8192``, and why it was taken.

        ``kv_heads`` and ``kv_len`` are those of the queries where they are not given.
        """
        sizes = _by_axis(self.plan.problem.graph, lengths)
        notes = self.gradient.notes if self.gradient else ()
        tuned, built = self.compiled.tuned().values(), self.compiled.built
        return explain(self.plan, sizes, tuned=tuned, notes=notes, built=built)

    def save(self, folder: str | Path) -> Path:
        """Write the .cu, its headers, the plan and a launcher with a checker; return the folder.

        Raises UsageError where it cannot be written.
        """
        try:
            return export(self.compiled, Path(folder))
        except OSError as error:
            raise UsageError(
                f"{folder} cannot be written ({error.strerror})", call="save", works="name a folder that can"
            ) from error

    def __call__(self, *tensors: Any) -> Tensor | tuple[Tensor, ...]:
        """The outputs for tensors of its dtype and head dims; for CPU tensors the emulator runs it.

        A backward kernel takes the arguments that ``plan.problem.graph`` lists: those of the program that it
        reads, gradients of the outputs, and what the forward direction keeps.
        """
        import fagen.calls.entry

        return fagen.calls.entry.call_kernel(self, tensors)


def compile(
    program: Callable[..., Any] | None = None,
    *,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    dtype: Any = "fp16",
    arch: str = "generic",
    direction: str = "forward",
    family: str | None = None,
    sizes: Mapping[str, int] | None = None,
    mask: Any = None,
    score: Any = None,
    scale: float | Expr | None = None,
    bias: Any = None,
    sink: Any = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    layout: str = "bhsd",
) -> Kernel:
    """A kernel for a program, or for the parts of `attention`, without tensors, torch or a GPU.

    head_dim    the length of d;  v_head_dim  of dv, by default the same;  sizes  of axes of your own
    dtype       fp32, fp16 or bf16 for tensors with a head dim, others are fp32 (integers int64); or a mapping
                from an argument's name to its dtype, ``{"q": "bf16", "k": "bf16", "v": "bf16", "doc":
                "int32"}``
    arch        a GPU such as "H100", or a target such as "sm_90a"
    direction   "forward", or "backward": the gradients of all its floating-point tensors
    family      by default that of the program's ``options``, whose ``deterministic`` holds as well
    bias, sink  a tensor, or its axes alone: ``fg.Tensor["b h q kv"]``

    Raises UsageError for what has no meaning, PlanError for what does not fit the GPU.
    """
    given = {"mask": mask, "score": score, "scale": scale, "bias": bias, "sink": sink}
    if direction not in ("forward", "backward"):
        raise UsageError(f"direction is {direction!r}", call="compile", works='it is "forward" or "backward"')
    option = Options()
    if program is None:
        bias, sink = _declared("bias", bias), _declared("sink", sink)
        traced = attention_graph(
            mask=mask,
            score=score,
            scale=scale,
            bias=bias,
            sink=sink,
            dropout=dropout,
            return_lse=return_lse,
            layout=layout,
        )
    else:
        named = [name for name, value in given.items() if value is not None]
        if named or dropout or return_lse:
            raise UsageError(
                f"both a program and {', '.join(named) or 'parts'} of attention were given",
                call="compile",
                works="write them into the program",
            )
        known = program if isinstance(program, TracedProgram) else Program(program)
        traced, option = known.trace(), known.option
    if family is not None:
        option = replace(option, family=family)
    row = arch_for(arch).name
    lengths = _lengths(traced.graph, head_dim, v_head_dim, sizes or {})
    problem = problem_of(
        traced.graph,
        row,
        option.family,
        _inputs(traced, dtype),
        lengths,
        deterministic=option.deterministic,
        open_lengths=True,
    )
    both = None
    if direction == "backward":
        problem, both = backward_of(problem)
    compiled = compile_problem(problem)
    compiled.require_plan()
    return Kernel(compiled, () if both else traced.captured, option, both)


def _by_axis(graph: Graph, lengths: Mapping[str, int]) -> dict[str, int]:
    """Lengths by axis, given as ``batch``, ``q_heads``, ``q_len``, ...; heads as ``hk`` and ``g``."""
    names = {name: axis for axis, name in LENGTHS.items()} | {"q_heads": "h"}
    axes = dict.fromkeys(axis for argument in graph.arguments for axis in argument.axes)
    names |= {length_name(axis): axis for axis in axes if axis not in LENGTHS}
    if unknown := set(lengths) - set(names):
        raise UsageError(
            f"{', '.join(sorted(unknown))} is no length", call="explain", works=f"it takes {', '.join(names)}"
        )
    for name, length in lengths.items():
        if not is_number(length, whole=True) or length < 0:
            raise UsageError(f"{name} is {length!r}", call="explain", works="it is a whole number from 0 on")
    found = {names[name]: int(length) for name, length in lengths.items()}
    if "q" in found:
        found.setdefault("kv", found["q"])
    if "h" in found:
        q_heads = found.pop("h")
        kv_heads = found.setdefault("hk", q_heads)
        if q_heads % max(kv_heads, 1):
            raise UsageError(f"{q_heads} query heads are no multiple of {kv_heads} key heads", call="explain")
        found["g"] = q_heads // max(kv_heads, 1)
    return found


class _Declared:
    """What stands for a tensor of which only axes and kind are known."""

    def __init__(self, of: TensorType) -> None:
        self.shape = (1,) * len(of.layout)
        self.dtype = {"float": "float32", "int": "int64", "bool": "bool"}[of.stored]


def _declared(name: str, value: Any) -> Any:
    """A bias or sink declared by its axes as an expression."""
    if isinstance(value, TensorType):
        return capture(_Declared(value), " ".join(value.layout), name=name)
    return value


def _lengths(
    graph: Graph, head_dim: int | None, v_head_dim: int | None, sizes: Mapping[str, int]
) -> dict[str, int]:
    """The lengths fixed at compile time, each given and each of use."""
    given = {"d": head_dim, "dv": head_dim if v_head_dim is None else v_head_dim, **sizes}
    found = {}
    for axis in sorted(feature_axes(graph)):
        length = given.get(axis)
        by_name = f"sizes={{{axis!r}: ...}}, or --let {axis}=... on the command line"
        name = length_name(axis) if axis in ("d", "dv") else by_name
        if length is None:
            raise UsageError(
                f"the length of the axis {axis} is not given", call="compile", works=f"give {name}"
            )
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise UsageError(
                f"{length_name(axis)} is {length!r}", call="compile", works="it is a whole number from 1 on"
            )
        found[axis] = length
    unknown = [axis for axis in sizes if axis not in found]
    if unknown:
        raise UsageError(
            f"sizes names {', '.join(unknown)}, which is no axis of fixed length",
            call="compile",
            works=f"those are {', '.join(found)}",
        )
    return found


def _inputs(traced: Traced, dtype: Any) -> tuple[Storage, ...]:
    """How each tensor argument lies in memory."""
    graph = traced.graph
    features, by_name = feature_axes(graph), dtype if isinstance(dtype, Mapping) else {}
    values = (None,) * (len(graph.arguments) - len(traced.captured)) + traced.captured
    if unknown := set(by_name) - {argument.name for argument in graph.arguments}:
        raise UsageError(
            f"dtype names {', '.join(sorted(unknown))}, which is no argument",
            call="compile",
            works=f"those are {', '.join(argument.name for argument in graph.arguments)}",
        )
    found = []
    for argument, value in zip(graph.arguments, values, strict=True):
        if not isinstance(argument, Input):
            continue
        if argument.name in by_name:
            storage = _storage(by_name[argument.name])
        elif value is not None:
            storage = _storage(value.dtype)
        elif argument.stored != "float":
            storage = "bool" if argument.stored == "bool" else "int64"
        elif features & set(argument.layout):
            if by_name:
                raise UsageError(f"dtype names none for {argument.name}", call="compile", works="give each")
            storage = _storage(dtype)
        else:
            storage = "fp32"
        found.append(storage)
    return tuple(found)


def _storage(dtype: Any) -> Storage:
    name = str(dtype).removeprefix("torch.")
    if name not in _STORAGES:
        raise DtypeError(
            f"dtype is {dtype!r}",
            call="compile",
            works="it is fp32, fp16 or bf16; of a table also int32, int64, bool",
        )
    return _STORAGES[name]
