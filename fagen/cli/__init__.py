"""The command line: emit, explain, run, ladder, bench, doctor, cache."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from fagen.errors import FagenError


def main() -> NoReturn:
    """Run the command that the process was called with, and exit.

    A user's mistake is one sentence on standard error and exit code 1, or 2 for a misused option.
    """
    from fagen.cli.commands import app

    try:
        app(prog_name="fagen")
        sys.exit(0)
    except FagenError as error:
        print(f"fagen: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(
            "fagen: running a kernel needs torch, which is not installed; pip install torch", file=sys.stderr
        )
        sys.exit(1)
    except BrokenPipeError:  # whoever read our output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
