"""The ladder: one computation planned in several ways, each run and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fagen.cli import show
from fagen.cli.app import Device, Json, app, device_of, print_json, row_of
from fagen.cli.options import MOST_SEED
from fagen.errors import UsageError

if TYPE_CHECKING:
    import torch

    from fagen.plan.plan import Storage
    from fagen.study.ladder import Step
    from fagen.study.trial import Trial

_COLUMNS = ("kernels", "bytes moved", "extra memory", "predicted")
_STORAGES: Mapping[str, Storage] = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}


@app.command()
def ladder(
    matmul: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of one product of N x N matrices instead.")
    ] = None,
    model_only: Annotated[bool, typer.Option("--model-only", help="Print the model; run nothing.")] = False,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    dropout: Annotated[float, typer.Option(min=0, max=1)] = 0.1,
    dtype: Annotated[str, typer.Option(metavar="fp32|fp16|bf16")] = "fp32",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    q_heads: Annotated[int | None, typer.Option(min=1, help="By default 8, on the emulator 1.")] = None,
    q_len: Annotated[int | None, typer.Option(min=1, help="By default 4,096, on the emulator 64.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=MOST_SEED, help="Of tensors that are made up, and of dropout.")
    ] = 0,
    arch: Annotated[
        str | None, typer.Option(help="The GPU of the model; by default the one here, or A100.")
    ] = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Show an attention planned in five ways, from separate kernels to one pass, and what each saves.

    Of a product there are three. Every rung is run and compared; exits with 1 where the error of one is above
    its tolerance.
    """
    from fagen.ir.show import length_name
    from fagen.study import ladder as rungs

    where = None if model_only else device_of(device)
    small = where is not None and where.type == "cpu"
    if arch is None:
        arch = row_of(where) if where is not None and not small else "A100"
    if matmul is None:
        problem = rungs.attention_ladder(_storage(dtype), head_dim, dropout, arch=arch)
        lengths = rungs.attention_lengths(
            q_len or (64 if small else 4096), batch=batch, q_heads=q_heads or (1 if small else 8)
        )
    else:
        problem, lengths = (
            rungs.matmul_ladder(matmul, _storage(dtype), arch=arch),
            rungs.matmul_lengths(matmul),
        )
    steps = rungs.climb(problem, lengths)
    trials = [] if where is None else _tried(steps, where, seed)
    if json:
        print_json([_step_json(steps[i], trials[i] if trials else None) for i in range(len(steps))])
    else:
        shown = ", ".join(f"{length_name(axis)} {length:,}" for axis, length in steps[0].lengths)
        devices = dict.fromkeys(trial.device for trial in trials if trial)
        place = f"measured on {', '.join(devices)}" if devices else "nothing is run"
        print(f"{shown} in {dtype}; predicted for {arch}, {place}")
        _show_steps(steps, trials)
    raise typer.Exit(0 if all(trial.ok for trial in trials if trial) else 1)


def _storage(dtype: str) -> Storage:
    """A dtype of products."""
    if dtype not in _STORAGES:
        raise UsageError(f"--dtype is {dtype!r}", works=f"it is {', '.join(_STORAGES)}")
    return _STORAGES[dtype]


def _tried(steps: Sequence[Step], where: torch.device, seed: int) -> list[Trial | None]:
    """Every rung run on the same values; None for one whose memory the device does not have."""
    from fagen.compile import compile_problem
    from fagen.study.trial import OutOfMemory, make_values, try_kernel

    trials: list[Trial | None] = []
    with show.progress() as progress:
        for step in steps:
            kernel = compile_problem(step.plan.problem)
            values = make_values(kernel, (), dict(step.lengths), device=where, seed=seed)

            def tell(what: str, done: int, parts: int, number: int = step.rung.number) -> None:
                progress(f"{number}/{len(steps)} {what}", done, parts)

            try:
                trials.append(try_kernel(kernel, values, seed=seed, progress=tell))
            except OutOfMemory:
                trials.append(None)
    return trials


def _step_json(step: Step, trial: Trial | None) -> dict[str, Any]:
    return {
        "rung": step.rung.number,
        "title": step.rung.title,
        "kernels": step.kernels,
        "flops": step.flops,
        "moved_bytes": step.moved_bytes,
        "memory_bytes": step.memory_bytes,
        "extra_bytes": step.extra_bytes,
        "predicted_seconds": step.seconds,
        "run": None if trial is None else trial.to_json(),
    }


def _show_steps(steps: Sequence[Step], trials: Sequence[Trial | None]) -> None:
    from fagen.study.ladder import rows, saving

    shown = []
    for i, row in enumerate(rows(steps)):
        shown.append({"rung": steps[i].rung.number, **{name: row[name] for name in _COLUMNS}})
        if trials:
            shown[i] |= _measured(trials[i])
    show.table(shown)
    for i, step in enumerate(steps):
        saved = saving(step, steps[i - 1] if i else None)
        show.text(f"{step.rung.number}. {step.rung.title}. {step.rung.change} {saved}")


def _measured(trial: Trial | None) -> dict[str, str]:
    """The columns of what was run."""
    from fagen.study.explain import seconds

    if trial is None:
        return {"measured": "no room", "error": ""}
    wrong = "" if trial.ok else " WRONG"
    return {"measured": seconds(trial.seconds), "error": f"{trial.max_error:.2g}{wrong}"}
