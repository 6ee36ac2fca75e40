"""What commands print for people: tables, and a line of progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fagen.study.trial import Progress


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows under the names of their columns."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in rows[0] if rows else ():
        shown.add_column(name, overflow="fold")
    for row in rows:
        shown.add_row(*(Text(str(value)) for value in row.values()))
    Console().print(shown)


def text(paragraph: str) -> None:
    """Print a paragraph, its lines broken where the terminal ends and all but the first indented."""
    from rich.console import Console

    console = Console()
    print(fill(paragraph, width=min(console.width, 110), subsequent_indent="   "))


@contextmanager
def progress() -> Iterator[Progress]:
    """What long work tells of itself, as a bar on a terminal's standard error; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<10}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("start", total=None)

        def tell(what: str, done: int, parts: int) -> None:
            bar.update(task, description=what, completed=done, total=parts or None)

        yield tell
