"""The application that commands join, and the options several of them have."""

from __future__ import annotations

from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fagen.errors import UsageError

if TYPE_CHECKING:
    import torch

app = typer.Typer(
    help="Attention programs over named axes, compiled to CUDA a person can read.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Save the .cu, its headers, plan and launcher.")
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="gpu|emulator", help="By default a GPU if there is one.")
]

_DEVICES: Mapping[str | None, Literal["gpu", "emulator"] | None] = {
    None: None,
    "gpu": "gpu",
    "emulator": "emulator",
}


def print_json(value: Any) -> None:
    """Print one JSON value."""
    print(dumps(value, indent=2))


def device_of(asked: str | None) -> torch.device:
    """Where ``--device`` says to run."""
    from fagen.study.trial import choose_device

    if asked not in _DEVICES:
        raise UsageError(f"--device is {asked!r}", works="it is gpu or emulator")
    return choose_device(_DEVICES[asked])


def row_of(device: torch.device) -> str:
    """The row of planning that describes a device."""
    from fagen.calls.dispatch import arch_of

    return arch_of(device)
