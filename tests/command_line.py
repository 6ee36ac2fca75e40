"""The command line called within this process: what it printed, and its exit code."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

from fagen.cli import main


@dataclass(frozen=True)
class Done:
    code: object
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.out, self.err
        return json.loads(self.out)


def fagen(*arguments: object) -> Done:
    out, err = io.StringIO(), io.StringIO()
    argv = ["fagen", *map(str, arguments)]
    with (
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            return Done(end.code, out.getvalue(), err.getvalue())
    raise AssertionError("main returned")


def mistake(*arguments: object) -> str:
    """The one sentence on standard error that a user's mistake is answered with."""
    done = fagen(*arguments)
    assert done.code == 1, done
    assert done.out == ""
    assert done.err.startswith("fagen: ")
    assert done.err.count("\n") == 1, done.err
    return done.err.removeprefix("fagen: ").strip()
