"""What the commands share: their options, and the kernel that these ask for."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Option

from fagen.cli.programs import file_of, load_program, users_code
from fagen.errors import UsageError

if TYPE_CHECKING:
    from fagen.api import Kernel, Program
    from fagen.study.tables import Lengths

_WHAT, _WHICH, _HOW_LONG = "What to compute", "Which kernel", "Lengths and values"

MOST_SEED = 2**32 - 1

DEFAULT_LENGTHS: Mapping[str, int] = {"batch": 1, "q_heads": 2, "q_len": 512}
"""Lengths that are not given: small enough for a CPU to run."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options that `emit`, `explain` and `run` share."""

    program: Annotated[
        str | None,
        Option(metavar="FILE.py:NAME", help="A program in a file.", rich_help_panel=_WHAT),
    ] = None
    mask: Annotated[
        str | None,
        Option(help="Such as 'causal & sliding_window(1024)', or 'kv <= q'.", rich_help_panel=_WHAT),
    ] = None
    score: Annotated[
        str | None,
        Option(help="Such as 'softcap(30)', 'alibi', or a list of them.", rich_help_panel=_WHAT),
    ] = None
    dropout: Annotated[
        float, Option(min=0, max=1, help="Rate at which weights are dropped.", rich_help_panel=_WHAT)
    ] = 0.0
    head_dim: Annotated[int, Option(help="Of q and k.", rich_help_panel=_WHICH)] = 64
    v_head_dim: Annotated[
        int | None, Option(help="Of v; by default as --head-dim.", rich_help_panel=_WHICH)
    ] = None
    dtype: Annotated[str, Option(metavar="fp32|fp16|bf16", rich_help_panel=_WHICH)] = "fp16"
    arch: Annotated[
        str | None,
        Option(
            help="A GPU such as H100, or sm_90a; by default the one it runs on, or any.",
            rich_help_panel=_WHICH,
        ),
    ] = None
    family: Annotated[
        str | None, Option(help="Such as simt; by default the planner chooses.", rich_help_panel=_WHICH)
    ] = None
    direction: Annotated[str, Option(metavar="forward|backward|both", rich_help_panel=_WHICH)] = "forward"
    batch: Annotated[int | None, Option(min=0, rich_help_panel=_HOW_LONG)] = None
    q_heads: Annotated[int | None, Option(min=0, rich_help_panel=_HOW_LONG)] = None
    kv_heads: Annotated[
        int | None, Option(min=0, help="By default as --q-heads.", rich_help_panel=_HOW_LONG)
    ] = None
    q_len: Annotated[int | None, Option(min=0, rich_help_panel=_HOW_LONG)] = None
    kv_len: Annotated[int | None, Option(min=0, help="By default as --q-len.", rich_help_panel=_HOW_LONG)] = (
        None
    )
    let: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=NUMBER",
            help="The length of an axis of your own, or the value of a Scalar; may be repeated.",
            rich_help_panel=_HOW_LONG,
        ),
    ] = None
    seed: Annotated[
        int,
        Option(
            min=0,
            max=MOST_SEED,
            help="Of tensors that are made up, and of dropout.",
            rich_help_panel=_HOW_LONG,
        ),
    ] = 0

    @property
    def has_lengths(self) -> bool:
        """Whether any length was given: the kernel is then planned for such lengths."""
        given = (self.batch, self.q_heads, self.kv_heads, self.q_len, self.kv_len)
        return any(length is not None for length in given)

    def lengths(self) -> Lengths:
        """Lengths as given, others as in `DEFAULT_LENGTHS`."""
        from fagen.study.tables import Lengths

        batch, q_heads, q_len = (
            default if (given := getattr(self, name)) is None else given
            for name, default in DEFAULT_LENGTHS.items()
        )
        kv_heads = q_heads if self.kv_heads is None else self.kv_heads
        if q_heads % kv_heads if kv_heads else q_heads:
            raise UsageError(
                f"--q-heads is {q_heads} and --kv-heads is {kv_heads}",
                works="the first has to be a multiple of the second",
            )
        return Lengths(batch, q_heads, kv_heads, q_len, q_len if self.kv_len is None else self.kv_len)

    def kernel(self, arch: str, specialised: bool) -> tuple[Kernel, dict[str, float]]:
        """The kernel asked for and the values of its Scalars; ``specialised``: planned for the lengths."""
        from fagen.api import Kernel
        from fagen.api import compile as compiled_for
        from fagen.compile import compile_problem, problem_of

        program, parts = self._program_or_parts()
        sizes, scalars = _parted(_numbers(self.let or ()), program)
        with users_code(file_of(self.program)):
            kernel = compiled_for(
                program,
                head_dim=self.head_dim,
                v_head_dim=self.v_head_dim,
                dtype=self.dtype,
                arch=arch,
                direction=self.direction,
                family=self.family,
                sizes=sizes,
                **parts,
            )
        if specialised:
            found = kernel.compiled.problem
            lengths = self.lengths().by_axis() | dict(found.sizes)
            problem = problem_of(found.graph, found.arch, found.family, found.inputs, lengths)
            problem = replace(problem, outputs=found.outputs, deterministic=found.deterministic)
            kernel = Kernel(compile_problem(problem), kernel.captured, kernel.option, kernel.gradient)
        return kernel, scalars

    def kernels(self, arch: str, specialised: bool) -> list[tuple[Kernel, dict[str, float]]]:
        """`kernel` for each direction asked for."""
        directions = ("forward", "backward") if self.direction == "both" else (self.direction,)
        return [replace(self, direction=each).kernel(arch, specialised) for each in directions]

    def _program_or_parts(self) -> tuple[Program | None, dict[str, Any]]:
        """The program of ``--program``, or what `fagen.compile` is told of attention."""
        if self.program is not None:
            if self.mask is not None or self.score is not None or self.dropout:
                raise UsageError(
                    "--program stands beside --mask, --score or --dropout",
                    works="write them into the program",
                )
            return load_program(self.program), {}
        from fagen.study.expression import mask_of, score_of

        lengths = self.lengths()
        return None, {
            "mask": None if self.mask is None else mask_of(self.mask, lengths),
            "score": None if self.score is None else score_of(self.score, lengths),
            "dropout": self.dropout,
        }


def _numbers(given: list[str] | tuple[()]) -> dict[str, float]:
    """What ``--let`` gave, by name."""
    found = {}
    for text in given:
        name, _, number = text.partition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            raise UsageError(f"--let: {text!r} gives no number", works="write --let r=64") from None
    return found


def _parted(numbers: Mapping[str, float], program: Program | None) -> tuple[dict[str, int], dict[str, float]]:
    """Numbers by name as lengths of axes and as values of Scalars."""
    from fagen.ir.graph import Scalar

    arguments = program.signature.arguments if program else ()
    names = {argument.name for argument in arguments if isinstance(argument, Scalar)}
    sizes, scalars = {}, {}
    for name, number in numbers.items():
        if name in names:
            scalars[name] = number
        elif number.is_integer():
            sizes[name] = int(number)
        else:
            raise UsageError(f"--let: {name} is {number:g}", works="the length of an axis is a whole number")
    return sizes, scalars


def shared(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `Request`, which it takes as its first argument, before its own."""

    def wrapped(**given: Any) -> None:
        request = Request(**{field.name: given.pop(field.name) for field in dataclasses.fields(Request)})
        command(request, **given)

    hints = {**get_type_hints(Request, include_extras=True), **get_type_hints(command, include_extras=True)}
    _, *own = inspect.signature(command).parameters.values()
    every = (*inspect.signature(Request).parameters.values(), *own)
    parameters = [each.replace(annotation=hints[each.name], kind=each.KEYWORD_ONLY) for each in every]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    return wrapped
