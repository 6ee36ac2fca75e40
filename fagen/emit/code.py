"""Pieces of CUDA with a type and a place, printed with no more parentheses than needed, named where it pays.

`Code` is an expression in the target's words. Its `Place` says along which loops of a kernel it varies and
after which step of a walk it is known; both follow from its operands. `Splitter` decides which pieces get a
name: what is used twice, and what is known in an outer place, so that loads and row values leave the inner
loops.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

# How strongly an operator of C++ binds.
TERNARY, OR, AND, EQUAL, COMPARE, SHIFT, SUM, PRODUCT, UNARY, ATOM = range(3, 13)

CType: TypeAlias = str


class Place(NamedTuple):
    """Where in a kernel a value is known.

    ``row`` and ``column`` say whether it varies along the rows and the columns of a tile; neither: once a
    block.
    ``phase`` counts the steps of a walk: a running row value of step n is known from phase n + 1 on.
    """

    row: bool = False
    column: bool = False
    phase: int = 0

    @property
    def element(self) -> bool:
        """Whether it differs from element to element of a tile."""
        return self.row and self.column

    def join(self, other: Place) -> Place:
        """Where both are known."""
        return Place(self.row or other.row, self.column or other.column, max(self.phase, other.phase))


BLOCK, ROW, COLUMN, ELEMENT = Place(), Place(row=True), Place(column=True), Place(row=True, column=True)


@dataclass(frozen=True, eq=False)
class Code:
    """``form`` with ``args`` in its ``{}``; a leaf has no args. Equal code of one `Codes` is one object."""

    form: str
    args: tuple[Code, ...]
    slots: tuple[int, ...]
    """How strongly each argument must bind, else it is put in parentheses."""
    binds: int
    ctype: CType
    place: Place
    cost: int
    """Instructions, roughly, of all of it; 0 for what is known anyway."""
    hint: str
    """What its name is made of, if it gets one."""
    named: bool = False
    """Whether it gets a name in any case."""
    serving: str | None = None
    """For which elements of a thread it is computed, if it has a name and serves those that follow, too."""

    @property
    def own_cost(self) -> int:
        """Instructions beside those of its operands."""
        return self.cost - sum(arg.cost for arg in self.args)


LOAD = 8
"""The cost of reading global memory: worth a name wherever it is used again or further in."""


class Codes:
    """Makes code, each piece once."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Code] = {}

    def leaf(self, text: str, ctype: CType, place: Place = BLOCK, binds: int = ATOM) -> Code:
        """A name or a number."""
        return self._make(text, (), (), binds, ctype, place, 0, "")

    def make(
        self,
        form: str,
        args: Sequence[Code],
        ctype: CType,
        binds: int = ATOM,
        slots: Sequence[int] | int = 0,
        cost: int = 1,
        hint: str = "",
        named: bool = False,
        serving: str | None = None,
    ) -> Code:
        """``form`` with a ``{}`` for each of ``args``; ``slots`` is what each needs, or all of them need."""
        place = BLOCK
        for arg in args:
            place = place.join(arg.place)
        needs = (slots,) * len(args) if isinstance(slots, int) else tuple(slots)
        cost += sum(arg.cost for arg in args)
        return self._make(form, tuple(args), needs, binds, ctype, place, cost, hint, named, serving)

    def call(self, name: str, args: Sequence[Code], ctype: CType, cost: int = 1, hint: str = "") -> Code:
        """A function of ``args``."""
        return self.make(f"{name}({', '.join(['{}'] * len(args))})", args, ctype, cost=cost, hint=hint)

    def infix(self, sign: str, x: Code, y: Code, ctype: CType, binds: int, cost: int = 1) -> Code:
        """``x sign y``, grouped from the left."""
        return self.make(f"{{}} {sign} {{}}", (x, y), ctype, binds, (binds, binds + 1), cost)

    def cast(self, code: Code, ctype: CType) -> Code:
        """``code`` as another integer type."""
        return code if code.ctype == ctype else self.make(f"{ctype}({{}})", (code,), ctype, cost=0)

    def choice(self, condition: Code, x: Code, y: Code) -> Code:
        """``x`` where ``condition`` holds, else ``y``; integers in the wider type of both."""
        ctype = "int64" if "int64" in (x.ctype, y.ctype) else x.ctype
        if ctype == "int64":
            x, y = self.cast(x, ctype), self.cast(y, ctype)
        return self.make("{} ? {} : {}", (condition, x, y), ctype, TERNARY, (OR, TERNARY + 1, TERNARY))

    def negation(self, x: Code) -> Code:
        """Not ``x``."""
        return self.make("!{}", (x,), "bool", UNARY, UNARY)

    def _make(
        self,
        form: str,
        args: tuple[Code, ...],
        slots: tuple[int, ...],
        binds: int,
        ctype: CType,
        place: Place,
        cost: int,
        hint: str,
        named: bool = False,
        serving: str | None = None,
    ) -> Code:
        key = (form, *map(id, args), place if not args else None, ctype, named, serving)
        code = self._made.get(key)
        if code is None:
            code = Code(form, args, slots, binds, ctype, place, cost, hint, named, serving)
            self._made[key] = code
        return code


@dataclass(frozen=True)
class Variable:
    """A name in the emitted text: a field of what a block, a row or a column knows, or an array over
    columns."""

    ctype: CType
    name: str

    @property
    def declared(self) -> str:
        """``type name``."""
        return f"{written(self.ctype)} {self.name}"


def declarations(variables: Iterable[Variable]) -> list[str]:
    """``type name, name, ...`` for each type, in the order in which types first occur."""
    groups: dict[CType, list[str]] = {}
    for variable in variables:
        groups.setdefault(variable.ctype, []).append(variable.name)
    lines = []
    for ctype, names in groups.items():
        star = "*" if ctype.endswith("*") else ""
        listed = ", ".join(f"{star}{name}" for name in names)
        lines.append(f"{written(ctype).removesuffix('*')} {listed}")
    return lines


def written(ctype: CType) -> str:
    """A type as the text has it."""
    return "int" if ctype == "int32" else ctype


@dataclass(frozen=True)
class Statement:
    """``target = text;`` A *local* declares what it assigns; a *field* and an *array* are declared before."""

    kind: Literal["local", "field", "array"]
    variable: Variable
    target: str
    text: str
    serving: str | None = None
    """Of which elements it is assigned for the first, where it serves several."""

    @property
    def declared(self) -> str:
        """What stands before the target: its declaration, or the columns for which it is assigned."""
        if self.serving is not None:
            return f"if ({self.serving}) "
        if self.kind != "local":
            return ""
        const = "" if self.variable.ctype.endswith("*") else "const "
        return f"{const}{written(self.variable.ctype)} "


@dataclass
class Places:
    """What stands in front of a name that is known in an outer place."""

    block: str = "block."
    row: str = "row."
    column: str = "column."
    element: str = "[c]"
    by_columns: bool = False
    """Whether elements of a column come one after another: what serves several of a row is kept of each."""

    def field(self, place: Place, name: str) -> str:
        """How a value of ``place`` is written further in."""
        if place.element:
            return f"{name}{self.element}"
        return f"{self.row if place.row else self.column if place.column else self.block}{name}"


@dataclass
class Names:
    """Names not yet taken: ``x0, x1, ...`` for numbers, ``n0`` for integers, ``is0`` for truth values."""

    taken: set[str] = field(default_factory=set)
    letters: Mapping[CType, str] = field(
        default_factory=lambda: {"float": "x", "bool": "is", "int32": "n", "int64": "n"}
    )

    def fresh(self, code: Code, local: bool) -> str:
        """A name for ``code``; a local one that comes from a tensor says that it is not the tensor itself."""
        if not code.hint:
            return self.numbered(self.letters.get(code.ctype, "t"))
        ending = "_at" if code.ctype.endswith("*") else "_value" if code.ctype in self.letters else ""
        if not local:
            ending = ""
        return self.unique(f"{code.hint}{ending}")

    def unique(self, name: str) -> str:
        """``name``, with a number if it is taken."""
        if name not in self.taken:
            self.taken.add(name)
            return name
        return self.numbered(f"{name}_")

    def numbered(self, letter: str) -> str:
        """``letter`` with the first number that is free."""
        number = 0
        while f"{letter}{number}" in self.taken:
            number += 1
        self.taken.add(f"{letter}{number}")
        return f"{letter}{number}"


class Split:
    """The statements of one set of expressions, by place, and how those read in terms of their names."""

    def __init__(
        self,
        statements: Mapping[Place, Sequence[Statement]],
        names: Mapping[Code, str],
        known: Mapping[Code, str],
    ) -> None:
        self._statements = statements
        self._names = names
        self._known = known

    def at(self, place: Place) -> Sequence[Statement]:
        """Statements of ``place``, in order."""
        return self._statements.get(place, ())

    def arrays(self) -> list[Variable]:
        """Values kept for each column between two steps of a walk."""
        return [s.variable for group in self._statements.values() for s in group if s.kind == "array"]

    def kept(self) -> list[Statement]:
        """Values that serve several elements."""
        return [s for group in self._statements.values() for s in group if s.serving is not None]

    def text(self, code: Code, binds: int = 0) -> str:
        """``code``, put in parentheses where it does not bind as strongly as ``binds``."""
        name = self._names.get(code) or self._known.get(code)
        if name is not None:
            return name
        text = self.definition(code)
        return text if code.binds >= binds else f"({text})"

    def definition(self, code: Code) -> str:
        """``code`` in terms of its operands, though it has a name."""
        args = [self.text(arg, slot) for arg, slot in zip(code.args, code.slots, strict=True)]
        return code.form.format(*args) if code.args else code.form


class Splitter:
    """Names for the expressions of one kernel. A name given to an outer place is known to every later
    split."""

    def __init__(self, flat: bool = False) -> None:
        """``flat``: all text stands in one function, so that every name is a local one.

        Names of ``lasting`` places then stand where all later text sees them.
        """
        self.flat = flat
        self.lasting: tuple[Place, ...] = (BLOCK,)
        self.places = Places()
        self.names = Names()
        self.fields: dict[Place, list[Variable]] = {BLOCK: [], ROW: [], COLUMN: []}
        """Fields of the block, of its rows and of its columns, in the order in which they are assigned."""
        self._field_names = {place: Names() for place in self.fields}
        self._known: dict[Code, str] = {}

    def split(self, roots: Iterable[tuple[Code, Place]], again: Container[Place] = ()) -> Split:
        """Statements for what ``roots`` need; each stands in the text at the place given with it.

        What one instruction makes of names is made ``again`` wherever it is used, not kept at such places.
        """
        uses: dict[Code, list[Place]] = {}
        home: dict[Code, Place] = {}
        roots = list(roots)
        order = _order([code for code, _ in roots], self._known)
        for code, place in roots:
            uses.setdefault(code, []).append(place)
        for code in reversed(order):
            home[code] = self._home(code, uses[code])
            for arg in code.args:
                uses.setdefault(arg, []).append(home[code])
        local: dict[Code, str] = {}
        statements: dict[Place, list[Statement]] = {}
        split = Split(statements, local, self._known)
        beyond: dict[Code, int] = {}
        for code in order:
            place = home[code]
            beyond[code] = code.own_cost + sum(beyond.get(arg, 0) for arg in code.args)
            if not _worth(code, place, uses[code]) or (place in again and beyond[code] == 1):
                continue
            beyond[code] = 0
            further = any(use != place for use in uses[code])
            kind: Literal["local", "field", "array"] = "local"
            if further and place.element and not self.flat:
                kind = "array"
            elif further and place.phase == 0 and not self.flat:
                kind = "field"
            names = self._field_names[Place(place.row, place.column)] if kind == "field" else self.names
            name = names.fresh(code, kind != "field")
            variable, target = Variable(code.ctype, name), name
            if code.serving is not None and self.places.by_columns:
                variable, target = Variable(code.ctype, f"{name}[ROWS]"), f"{name}[r]"
            if kind != "local":
                target = self.places.field(place, name)
            if kind == "field":
                self.fields[Place(place.row, place.column)].append(variable)
            text = split.definition(code)
            statements.setdefault(place, []).append(Statement(kind, variable, target, text, code.serving))
            local[code] = target
            if kind == "field" or (self.flat and place in self.lasting):
                self._known[code] = target
        return split

    @staticmethod
    def _home(code: Code, uses: Sequence[Place]) -> Place:
        """Its own place; what differs from element to element is computed as late as its uses allow."""
        place = code.place
        if place.element and uses:
            latest = min((use.phase for use in uses), default=place.phase)
            return place._replace(phase=max(place.phase, latest))
        return place


def _order(roots: Iterable[Code], known: Mapping[Code, str]) -> list[Code]:
    """All code below ``roots`` that is not known by a name, operands first."""
    seen: dict[Code, None] = {}
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        code, done = stack.pop()
        if code in seen or code in known:
            continue
        if done:
            seen[code] = None
            continue
        stack.append((code, True))
        stack.extend((arg, False) for arg in reversed(code.args))
    return list(seen)


def _worth(code: Code, home: Place, uses: Sequence[Place]) -> bool:
    """Whether ``code`` gets a name: it is computed further out, kept for a later step, or used again."""
    if code.cost == 0:
        return False
    if code.named:
        return True
    outside = any(use != home for use in uses)
    if home.element:
        return len(uses) > 1 and (code.cost > 1 or outside or code.ctype == "float")
    if outside:
        return code.cost > 1
    return len(uses) > 1 and code.cost > 1
