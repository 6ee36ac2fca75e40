"""Programs of a user's own file, and what goes wrong in them told in one sentence."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fagen.errors import DtypeError, FagenError, UsageError

if TYPE_CHECKING:
    from fagen.api import Program

_MODULE = "fagen_program"


def load_program(text: str) -> Program:
    """The program that ``FILE.py:NAME`` names; a function that declares its axes becomes one."""
    from fagen.api import Program

    path, name = _split(text)
    module = _imported(path)
    if not hasattr(module, name):
        programs = [key for key, value in vars(module).items() if isinstance(value, Program)]
        raise UsageError(
            f"{path} has no {name}",
            call="--program",
            works=f"its programs are {', '.join(programs)}" if programs else "mark one with @fg.program",
        )
    found = getattr(module, name)
    if isinstance(found, Program):
        return found
    if not callable(found):
        raise DtypeError(
            f"{name} of {path} is {found!r}",
            call="--program",
            works="it is a function, marked with @fg.program",
        )
    return Program(found)


def file_of(text: str | None) -> Path | None:
    """The file in ``FILE.py:NAME``."""
    return Path(text.rpartition(":")[0]) if text else None


def _split(text: str) -> tuple[Path, str]:
    file, _, name = text.rpartition(":")
    if not file or not name.isidentifier():
        raise UsageError(f"{text!r} names no program", call="--program", works="write FILE.py:NAME")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"there is no file {path}", call="--program", works="write FILE.py:NAME")
    return path, name


def _imported(path: Path) -> Any:
    """A file as a module; it finds modules beside it, as when Python runs it."""
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no file of Python", call="--program", works="write FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    sys.path.insert(0, str(path.parent.absolute()))
    with users_code(path):
        spec.loader.exec_module(module)
    return module


@contextmanager
def users_code(path: Path | None) -> Iterator[None]:
    """Within it, an error that passes through a line of ``path`` is told as a mistake in that line."""
    try:
        yield
    except FagenError:
        raise
    except Exception as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if path and Path(frame.filename).absolute() == path.absolute()
        ]
        if isinstance(error, SyntaxError):
            lines.append(error.lineno)
        if not lines:
            raise
        what = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
        raise UsageError(f"{path}, line {lines[-1]}: {type(error).__name__}: {what}") from error
