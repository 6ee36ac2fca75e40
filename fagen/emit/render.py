"""Templates to text: jinja2 with marks that CUDA does not use, and a layout that follows the braces.

``${ }`` is a value, a line after ``%%`` a statement, a line after ``%#`` a comment of the template. A
template need not care for indentation: `laid_out` indents by braces, breaks long lines where an operator
binds least, and squeezes blank lines. An error in a template says in which macro it happened.
"""

from __future__ import annotations

import re
import textwrap
import traceback
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fagen.errors import FagenError
from fagen.paths import templates_dir

if TYPE_CHECKING:
    import jinja2

WIDTH = 110
"""Columns of emitted text."""


class TemplateError(FagenError, RuntimeError):
    """A template asks for what it was not given, or does not parse."""


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir()),
        undefined=jinja2.StrictUndefined,
        variable_start_string="${",
        variable_end_string="}",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
        line_statement_prefix="%%",
        line_comment_prefix="%#",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        auto_reload=False,
    )


def render(template: str, **values: Any) -> str:
    """The text of ``templates/TEMPLATE`` with ``values``, still to be `laid_out`."""
    import jinja2

    try:
        return _environment().get_template(template).render(**values)
    except jinja2.TemplateError as error:
        raise TemplateError(f"{template}: {error}", values={"in": _trace(error)}) from error


def _trace(error: BaseException) -> str:
    """The macros an error passed through, from the outside in."""
    root = templates_dir()
    steps = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(root) and frame.lineno is not None:
            above = path.read_text(encoding="utf-8").splitlines()[: frame.lineno]
            macros = [match[1] for line in above if (match := re.match(r"\s*%%\s*macro\s+(\w+)", line))]
            inside = f" (macro {macros[-1]})" if macros else ""
            steps.append(f"{path.relative_to(root)}:{frame.lineno}{inside}")
    return ", ".join(steps)


# ---------------------------------------------------------------------------------------------------- layout

_COMMENT = re.compile(r"//.*")
_PROSE = re.compile(r"// (?!.* [+]?= )\S")
"""A line of a comment that goes on in the next one, which an equation does not."""
_STRING = re.compile(r'"[^"]*"')


def laid_out(text: str) -> str:
    """``text`` indented by its braces, in lines of at most `WIDTH` columns."""
    lines: list[str] = []
    depth = 0
    rest = text.split("\n")[::-1]
    while rest:
        line = rest.pop().strip()
        code = _COMMENT.sub("", _STRING.sub("", line))
        closing = len(code) - len(code.lstrip("}"))
        level = depth - closing
        depth += code.count("{") - code.count("}")
        if not line:
            continue
        if line == "~":
            if lines and lines[-1] and not lines[-1].endswith("{"):
                lines.append("")
            continue
        if lines and not lines[-1] and line.startswith("}"):
            lines.pop()
        room = WIDTH - 2 * level
        if level and len(line) > room and _PROSE.match(line) and rest and _PROSE.match(rest[-1]):
            end = line.rindex(" ", 0, room + 1)
            line, rest[-1] = line[:end], f"//{line[end:]} {rest[-1][3:]}"
        lines += _folded(line, 0 if line.startswith("#") else 2 * level)
    while lines and not lines[-1]:
        lines.pop()
    return "\n".join(_aligned(lines)) + "\n"


_TRAILING = re.compile(r"(?P<code>.*\S)  (?P<comment>// .*)")


def _aligned(lines: list[str]) -> list[str]:
    """``lines`` with the comments at the ends of neighbours in one column, where there is room."""
    result = list(lines)
    start = 0
    for end in range(len(lines) + 1):
        if end < len(lines) and _TRAILING.fullmatch(lines[end]):
            continue
        matches = [match for line in lines[start:end] if (match := _TRAILING.fullmatch(line))]
        column = max((len(match["code"]) for match in matches), default=0) + 2
        if all(column + len(match["comment"]) <= WIDTH for match in matches):
            result[start:end] = [f"{match['code']:{column}}{match['comment']}" for match in matches]
        start = end + 1
    return result


def _folded(line: str, indent: int) -> list[str]:
    """A line, in several where it is too long."""
    room = WIDTH - indent
    pad = " " * indent
    if len(line) <= room:
        return [pad + line]
    if line.startswith("//"):
        lead = re.match(r"//\s*", line)
        assert lead is not None
        body = textwrap.wrap(
            line[lead.end() :],
            room - lead.end() - 4,
            break_long_words=False,
            break_on_hyphens=False,
        )
        hang = "" if line.endswith(".") else "    "  # a sentence goes on below itself, a formula to the right
        return [pad + lead[0] + (hang if i else "") + part for i, part in enumerate(body)]
    comment = re.search(r"\s*// .*$", line)
    if comment is not None:
        return [*_folded(comment[0].strip(), indent), *_folded(line[: comment.start()], indent)]
    head, rest = _break(line, room)
    folded = [pad + head]
    while len(rest) > room - 4:
        head, rest = _break(rest, room - 4)
        folded.append(pad + "    " + head)
    return [*folded, pad + "    " + rest]


_BREAKS = (
    (" = ", 3),
    ("{ ", 2),
    (" ? ", 1),
    (" : ", 1),
    (" || ", 4),
    (" && ", 4),
    (" & ", 3),
    (", ", 2),
    (" + ", 3),
    (" - ", 3),
    (" * ", 3),
)

_SEVERAL = re.compile(r", \w+ = ")
"""In a line that defines several names: no value stands in another line than its name."""


_LOOP = re.compile(r"((?:UNROLL )?for \([^()]*\)) ([^{].*)")
"""A loop over one statement, which may stand in a line of its own."""


def _break(line: str, room: int) -> tuple[str, str]:
    """A line in two, the first at most ``room`` columns, broken late where few parentheses are open."""
    loop = _LOOP.fullmatch(line)
    if loop and len(loop[1]) <= room:
        return loop[1], loop[2]
    best: tuple[float, int] | None = None
    several = _SEVERAL.search(line)
    depth = angles = 0
    for i, character in enumerate(line[:room]):
        if character == "<" and re.match(r"\w<\S", line[i - 1 : i + 2]):  # of a template: others have spaces
            angles += 1
        elif character == ">" and angles:
            angles -= 1
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        for rank, (mark, width) in enumerate(_BREAKS):
            if line.startswith(mark, i) and i + width <= room and i > 4:
                key = depth + angles + rank / len(_BREAKS) - i / (2 * room)
                if mark == " = " and (several or len(line) - i >= room):
                    continue
                if best is None or key <= best[0]:
                    best = key, i + width
    if best is None:
        return line, ""
    return line[: best[1]].rstrip(), line[best[1] :].lstrip()
