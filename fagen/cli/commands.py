"""The commands themselves."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fagen.cli import show
from fagen.cli.options import MOST_SEED, Request, shared
from fagen.errors import UsageError

if TYPE_CHECKING:
    import torch

    from fagen.api import Kernel
    from fagen.plan.plan import Storage
    from fagen.study.doctor import Diagnosis
    from fagen.study.ladder import Step
    from fagen.study.trial import Trial, Watch

app = typer.Typer(
    help="Attention programs over named axes, compiled to CUDA a person can read.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ANY_GPU = "generic"

_LADDER_COLUMNS = ("kernels", "bytes moved", "extra memory", "predicted")
_DEVICES: Mapping[str | None, Literal["gpu", "emulator"] | None] = {
    None: None,
    "gpu": "gpu",
    "emulator": "emulator",
}
_STORAGES: Mapping[str, Storage] = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Save the .cu, its headers, plan and launcher.")
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="gpu|emulator", help="By default a GPU if there is one.")
]


def _print(value: Any) -> None:
    print(dumps(value, indent=2))


@app.command()
@shared
def emit(request: Request, out: Out = None, json: Json = False) -> None:
    """Write the CUDA of a program: to the screen, or into a folder with all it takes to run it."""
    kernel, _ = request.kernel(request.arch or ANY_GPU, request.has_lengths)
    files = sorted(path for path in kernel.save(out).rglob("*") if path.is_file()) if out else []
    if json:
        _print({**_about(kernel), "files": list(map(str, files)), "source": kernel.source})
    elif out:
        print("\n".join(map(str, files)))
    else:
        print(kernel.source, end="")


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
    from fagen.study.explain import explain as plan_text

    kernel, _ = request.kernel(request.arch or ANY_GPU, request.has_lengths)
    text = plan_text(kernel.plan, request.lengths().by_axis() if request.has_lengths else None)
    if json:
        _print({**_about(kernel), "plan": loads(plan_json(kernel.plan)), "text": text})
    else:
        print(text, end="")


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
        from fagen.study.explain import explain as plan_text
        from fagen.study.trial import make_values, try_kernel

        where = _device(device)
        kernel, scalars = request.kernel(request.arch or _row_of(where), specialised=True)
        lengths = request.lengths().by_axis() | dict(kernel.compiled.problem.sizes)
        values = make_values(
            kernel.compiled, kernel.captured, lengths, device=where, seed=request.seed, scalars=scalars
        )
        trial = try_kernel(kernel.compiled, values, seed=request.seed, watch=watch, progress=progress)
    if explain:
        print(plan_text(kernel.plan, lengths, trial.seconds if where.type == "cuda" else None))
    if json:
        _print(trial.to_json())
    else:
        _show_trial(trial)
    if out:
        kernel.save(out)
        print(f"  saved     {out}", file=sys.stderr if json else sys.stdout)
    raise typer.Exit(0 if trial.ok else 1)


def _device(asked: str | None) -> torch.device:
    """Where to run."""
    from fagen.study.trial import choose_device

    if asked not in _DEVICES:
        raise UsageError(f"--device is {asked!r}", works="it is gpu or emulator")
    return choose_device(_DEVICES[asked])


def _row_of(device: torch.device) -> str:
    """The row of planning that describes a device."""
    from fagen.calls.dispatch import arch_of

    return arch_of(device)


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
    """Show an attention planned in five ways, from separate kernels to one pass, and what each step saves.

    Every rung is run and compared. Exits with 1 where the error of one is above its tolerance.
    """
    from fagen.ir.show import length_name
    from fagen.study import ladder as rungs

    where = None if model_only else _device(device)
    small = where is not None and where.type == "cpu"
    if arch is None:
        arch = _row_of(where) if where is not None and not small else "A100"
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
        _print([_step_json(steps[i], trials[i] if trials else None) for i in range(len(steps))])
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
        shown.append({"rung": steps[i].rung.number, **{name: row[name] for name in _LADDER_COLUMNS}})
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


@app.command()
def doctor(json: Json = False) -> None:
    """Say what this machine has of what fagen uses, what each part is for, and how to get what is missing."""
    from fagen.study.doctor import examine

    diagnosis = examine()
    if json:
        _print(asdict(diagnosis))
    else:
        _show_diagnosis(diagnosis)
    raise typer.Exit(0 if diagnosis.runs_on else 1)


def _show_diagnosis(diagnosis: Diagnosis) -> None:
    show.table(
        [
            {
                "": "ok" if found.found else "--",
                "part": found.name,
                "here": found.found or found.trouble or "no",
            }
            | {"needed for": found.needed_for}
            for found in diagnosis.findings
        ]
    )
    for found in diagnosis.findings:
        if not found.found:
            print(f"To get {found.name}: {found.remedy}")
    print(f"Kernels run on: {', '.join(diagnosis.runs_on) or 'nothing here'}")


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all that is kept.")] = False,
    json: Json = False,
) -> None:
    """Show what the cache holds, or clear it."""
    from fagen.run.cache import cache_clear, cache_stats
    from fagen.study.explain import quantity

    held = cache_clear() if clear else cache_stats()
    if json:
        _print(
            {
                "folder": str(held.folder),
                "builds": held.entries,
                "plans": held.index_entries,
                "bytes": held.total_bytes,
                "cleared": clear,
            }
        )
    else:
        done = "removed" if clear else "holds"
        size = quantity(held.total_bytes, "B")
        print(f"{held.folder} {done} {held.entries:,} builds and {held.index_entries:,} plans, {size}")
