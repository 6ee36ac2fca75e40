"""What is done with one kernel: emit, explain, run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fagen.cli import show
from fagen.cli.app import Device, Json, Out, app, device_of, print_json, row_of
from fagen.cli.options import Request, shared
from fagen.errors import UsageError

if TYPE_CHECKING:
    from fagen.api import Kernel
    from fagen.ir.graph import Axis
    from fagen.study.trial import Trial, Watch

ANY_GPU = "generic"

_UNSEEN = {"race": "no data race was seen", "address": "no access out of bounds was seen"}


@app.command()
@shared
def emit(request: Request, out: Out = None, json: Json = False) -> None:
    """Write the CUDA of a program: to the screen, or into a folder with all it takes to run it."""
    kernels = [kernel for kernel, _ in request.kernels(request.arch or ANY_GPU, request.has_lengths)]
    results = []
    for kernel in kernels:
        folder = out / _direction(kernel) if out and len(kernels) > 1 else out
        files = _saved(kernel, folder) if folder else []
        results.append((kernel, {**_about(kernel), "files": list(map(str, files)), "source": kernel.source}))
    if json:
        _print_json(results)
    elif out:
        print("\n".join(file for _, each in results for file in each["files"]))
    else:
        print("\n".join(kernel.source for kernel in kernels), end="")


def _direction(kernel: Kernel) -> str:
    return kernel.compiled.problem.graph.direction


def _print_json(results: list[tuple[Kernel, dict[str, Any]]]) -> None:
    """One object; of both directions, one for each under its name."""
    if len(results) == 1:
        print_json(results[0][1])
    else:
        print_json({_direction(kernel): each for kernel, each in results})


def _saved(kernel: Kernel, folder: Path) -> list[Path]:
    """Write a kernel into a folder; what is there then."""
    from fagen.export import export

    try:
        export(kernel.compiled, folder)
    except OSError as error:
        raise UsageError(
            f"--out: {folder} cannot be written ({error.strerror})", works="name a folder that can"
        ) from None
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _about(kernel: Kernel) -> dict[str, Any]:
    plan = kernel.plan
    return {
        "name": kernel.name,
        "family": plan.family,
        "arch": plan.problem.arch,
        "kernels": [each.function for each in plan.kernels],
    }


@app.command()
@shared
def explain(request: Request, json: Json = False) -> None:
    """Print the plan of a program, what it costs, and why it was chosen."""
    from fagen.compile import plan_json

    lengths = request.lengths().by_axis() if request.has_lengths else None
    results = []
    for kernel, _ in request.kernels(request.arch or ANY_GPU, request.has_lengths):
        text = _plan_text(kernel, lengths)
        results.append((kernel, {**_about(kernel), "plan": loads(plan_json(kernel.plan)), "text": text}))
    if json:
        _print_json(results)
    else:
        print("\n".join(each["text"] for _, each in results), end="")


def _plan_text(kernel: Kernel, lengths: Mapping[Axis, int] | None, measured: float | None = None) -> str:
    from fagen.study.explain import explain as plan_text

    notes = kernel.gradient.notes if kernel.gradient else ()
    return plan_text(kernel.plan, lengths, measured, kernel.compiled.tuned().values(), notes)


@app.command()
@shared
def run(
    request: Request,
    device: Device = None,
    race: Annotated[bool, typer.Option("--race", help="Emulator: watch for data races.")] = False,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="Emulator: watch for accesses out of bounds.")
    ] = False,
    schedule: Annotated[
        str | None,
        typer.Option(metavar="forward|backward|SEED", help="Emulator: which warp goes on where several can."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the plan too, and on a GPU how its prediction held.")
    ] = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Compile a kernel, run it on tensors made up, and compare what it gives with what the program means.

    Beyond 4,096 queries a sample of them is compared. Exits with 1 where the error is above its tolerance.
    """
    if explain and json:
        raise UsageError("--explain is for people", works="leave --json out, or call fagen explain --json")
    watch = _watch(race, sanitize, schedule, device)
    if race or sanitize or schedule is not None:
        device = "emulator"
    with show.progress() as progress:
        progress("start", 0, 0)
        from fagen.study.trial import make_values, try_kernel

        where = device_of(device)
        arch = request.arch or row_of(where)
        kernels = [kernel for kernel, _ in request.kernels(arch, specialised=True)]
        program, scalars = replace(request, direction="forward").kernel(arch, specialised=True)
        lengths = request.lengths().by_axis() | dict(program.compiled.problem.sizes)
        values = make_values(
            program.compiled, program.captured, lengths, device=where, seed=request.seed, scalars=scalars
        )
        trials = [
            try_kernel(
                kernel.compiled,
                values,
                both=kernel.gradient,
                program=program.compiled,
                seed=request.seed,
                watch=watch,
                progress=progress,
            )
            for kernel in kernels
        ]
    for kernel, trial in zip(kernels, trials, strict=True):
        if explain:
            print(_plan_text(kernel, lengths, trial.seconds if where.type == "cuda" else None))
        if not json:
            _show_trial(trial)
        if out:
            folder = out / _direction(kernel) if len(kernels) > 1 else out
            _saved(kernel, folder)
            print(f"  saved     {folder}", file=sys.stderr if json else sys.stdout)
    if json:
        _print_json([(kernel, trial.to_json()) for kernel, trial in zip(kernels, trials, strict=True)])
    raise typer.Exit(0 if all(trial.ok for trial in trials) else 1)


def _watch(race: bool, sanitize: bool, schedule: str | None, device: str | None) -> Watch:
    """How the emulator is to run."""
    from fagen.study.trial import Watch

    asked = [name for name, given in (("--race", race), ("--sanitize", sanitize)) if given]
    asked += ["--schedule"] if schedule is not None else []
    if asked and device == "gpu":
        raise UsageError(f"{asked[0]} is of the emulator", works="leave --device gpu out")
    if race and sanitize:
        raise UsageError("--race and --sanitize watch different runs", works="give one of them at a time")
    watch = Watch("race" if race else "address" if sanitize else "none")
    if schedule is None or schedule == "forward":
        return watch
    if schedule == "backward":
        return replace(watch, schedule="backward")
    if schedule.isdecimal():
        return replace(watch, schedule="random", seed=int(schedule))
    raise UsageError(
        f"--schedule is {schedule!r}", works="it is forward, backward or the seed of a random one"
    )


def _show_trial(trial: Trial) -> None:
    from fagen.study.explain import quantity, seconds

    verdict = "agrees with its meaning" if trial.ok else f"IS WRONG: {trial.reason}"
    kernels = "1 kernel" if trial.kernels == 1 else f"{trial.kernels} kernels"
    print(f"{kernels} of family {trial.family} on {trial.device}: {verdict}")
    print(f"  error     {trial.max_error:.3g}, where {trial.tolerance:.3g} is allowed ({trial.rows:,} rows)")
    print(f"  eager     {trial.eager_error:.3g}, what torch's own operations err by")
    print(f"  time      {seconds(trial.seconds)}")
    print(f"  memory    {quantity(trial.peak_bytes, 'B')}, inputs and outputs included")
    print(f"  source    {trial.source}")
    if trial.watched != "none":
        print(f"  watched   {_UNSEEN[trial.watched]}")
