"""What of a source a compiler sees: its text without comments, and the headers it includes."""

import re
from collections.abc import Mapping
from pathlib import Path

_TOKEN = re.compile(
    r"""
      (?P<comment> [ \t]* (?: //(?:\\\r?\n|[^\n])* | /\*.*?(?:\*/|\Z) ) [ \t]* )
    | (?P<raw> \b(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)" )
    | (?P<kept> "(?:\\.|[^"\\\n])*" | (?<![0-9A-Za-z_])(?:u8|[uUL])?'(?:\\.|[^'\\\n])+'
        | \b\d(?:'?[0-9A-Za-z_.])* )
    """,
    re.VERBOSE | re.DOTALL,
)
_INCLUDE = re.compile(r'^[ \t]*\#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)


def without_comments(text: str) -> str:
    """Return C++ or CUDA text without comments, blank lines and spaces at the ends of lines.

    Marks inside strings, character literals and digit separators are no comments, and stay as they are.
    """
    if "/" in text:
        text = _TOKEN.sub(lambda token: " " if token["comment"] else token[0], text)
    lines = (line.rstrip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


def included(text: str, folder: Path) -> Mapping[str, str]:
    """Return the headers a text includes, transitively: their content by their name relative to ``folder``.

    A name is looked up beside the header that includes it, then in ``folder``; one found in neither is the
    compiler's own and its version stands for it.
    """
    found: dict[str, str] = {}
    pending = [(folder, name) for name in _INCLUDE.findall(text)]
    root = folder.resolve()
    while pending:
        beside, name = pending.pop()
        path = next((path for base in (beside, folder) if (path := base / name).is_file()), None)
        if path is None:
            continue
        path = path.resolve()
        known_as = path.relative_to(root).as_posix() if path.is_relative_to(root) else name
        if known_as not in found:
            found[known_as] = path.read_text(encoding="utf-8")
            pending += [(path.parent, each) for each in _INCLUDE.findall(found[known_as])]
    return dict(sorted(found.items()))
