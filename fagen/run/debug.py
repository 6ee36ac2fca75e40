"""Three ways to look inside a build: FAGEN_DEBUG prints, FAGEN_DUMP keeps, FAGEN_OVERRIDE replaces."""

import os
import re
import sys
from pathlib import Path

from fagen.errors import UsageError

PLAN, TIMES, GRAPH, SOURCE, REPORT, SASS = range(1, 7)


def debug_level() -> int:
    """Return FAGEN_DEBUG: 0 prints nothing, 1 to 6 add plan line, times, graph, CUDA, ptxas report, SASS."""
    level = os.environ.get("FAGEN_DEBUG", "").strip() or "0"
    if not level.isdecimal():
        raise UsageError(f"FAGEN_DEBUG is {level!r}, which is no level", works="0 to 6 are")
    return int(level)


def debug(level: int, text: str) -> None:
    """Print ``text`` to the standard error stream if FAGEN_DEBUG is at least ``level``."""
    if debug_level() >= level:
        print(f"[fagen] {text}", file=sys.stderr)


def file_name(name: str) -> str:
    """Return a kernel's name as a file's: what is no letter, digit, ``_``, ``.`` or ``-`` becomes ``_``."""
    return re.sub(r"[^\w.-]", "_", name)


def dump(name: str, suffix: str, content: str | bytes) -> None:
    """Write one stage of a build to ``name`` + ``suffix`` in the folder FAGEN_DUMP, if it is set."""
    if folder := os.environ.get("FAGEN_DUMP"):
        path = Path(folder) / (file_name(name) + suffix)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise UsageError(
                f"FAGEN_DUMP names {folder}, which cannot be written ({error.strerror})",
                works="name a folder that can, or unset it",
            ) from error


def overridden(name: str, text: str) -> str:
    """Return the text to compile for a kernel: ``FAGEN_OVERRIDE/name.cu`` if it exists, else ``text``."""
    folder = os.environ.get("FAGEN_OVERRIDE")
    if not folder:
        return text
    if not Path(folder).is_dir():
        raise UsageError(
            f"FAGEN_OVERRIDE names {folder}, which is no folder", works=f"name a folder with {name}.cu"
        )
    path = Path(folder) / (file_name(name) + ".cu")
    if not path.is_file():
        return text
    debug(PLAN, f"{name}: compiled from {path} instead of the emitted text")
    return path.read_text(encoding="utf-8")
