"""What is here: doctor, cache."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fagen.cli import show
from fagen.cli.app import Json, app, print_json

if TYPE_CHECKING:
    from fagen.study.doctor import Diagnosis


@app.command()
def doctor(json: Json = False) -> None:
    """Say what this machine has of what fagen uses, what each part is for, and how to get what is missing."""
    from fagen.study.doctor import examine

    diagnosis = examine()
    if json:
        print_json(asdict(diagnosis))
    else:
        _show_diagnosis(diagnosis)
    raise typer.Exit(0 if diagnosis.runs_on else 1)


def _show_diagnosis(diagnosis: Diagnosis) -> None:
    rows = []
    for found in diagnosis.findings:
        here = found.found or found.trouble or "no"
        mark = "ok" if found.found else "--"
        rows.append({"": mark, "part": found.name, "here": here, "needed for": found.needed_for})
    show.table(rows)
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
    from fagen.run.tuned import every
    from fagen.study.explain import quantity

    tuned = every()
    held = cache_clear() if clear else cache_stats()
    if json:
        print_json(
            {
                "folder": str(held.folder),
                "builds": held.entries,
                "plans": held.index_entries,
                "tuned": [asdict(each) for each in tuned],
                "bytes": held.total_bytes,
                "cleared": clear,
            }
        )
    else:
        done = "removed" if clear else "holds"
        size = quantity(held.total_bytes, "B")
        print(f"{held.folder} {done} {held.entries:,} builds and {held.index_entries:,} plans, {size}")
        for each in tuned:
            winner = "the model's best" if each.finalist is None else f"{each.tiles}, {each.gain:.2f} times"
            print(f"  {each.name} on {each.gpu}: {winner}, of {each.measured} measured")
