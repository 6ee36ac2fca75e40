"""The parts of the package and what each may import: only from parts before it, and from itself."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fagen"

# One row a layer, from the bottom up; parts of one row do not see each other.
LAYERS = (
    ("errors", "paths", "version"),
    ("ir",),
    ("lang",),
    ("derive",),
    ("plan",),
    ("emit",),
    ("run",),
    ("compile", "plain"),
    ("torch_op", "export"),
    ("calls",),
    ("study",),
    ("api",),
    ("compat", "bench"),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
MODULES = sorted(PACKAGE.rglob("*.py"))

# Modules outside the package that only some files may import, at any depth of a function.
CONFINED = {"pycuda": {"run/launch.py"}}


def part_of(name: str) -> str:
    """Return the part a dotted name such as ``fagen.ir.graph`` belongs to."""
    return [*name.split("."), "__init__"][1]


def imported(text: str, package: list[str]) -> set[str]:
    """Return the dotted names a module imports, in functions too, the relative ones made absolute."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def imported_by(path: Path) -> set[str]:
    package = ["fagen", *path.relative_to(PACKAGE).parts[:-1]]
    return imported(path.read_text(encoding="utf-8"), package)


def own_part(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def test_every_module_belongs_to_a_part():
    assert {own_part(path) for path in MODULES} <= set(RANK)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_only_from_parts_below(path):
    own = own_part(path)
    for name in imported_by(path):
        if name.split(".")[0] != "fagen":
            continue
        part = part_of(name) if part_of(name) in RANK else "__init__"  # a name the package exports
        assert part == own or RANK[part] < RANK[own], f"{own} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_confined_modules_are_imported_nowhere_else(path):
    here = path.relative_to(PACKAGE).as_posix()
    for name in imported_by(path):
        allowed = CONFINED.get(name.split(".")[0])
        assert allowed is None or here in allowed, f"{here} imports {name}"


def test_the_walk_sees_nested_and_relative_imports():
    text = (
        "def f():\n    from fagen.run import build\n    import pycuda.driver\n    from ..run import graph\n"
    )
    assert imported(text, ["fagen", "ir"]) == {"fagen.run.build", "pycuda.driver", "fagen.run.graph"}
    assert imported("from . import show", ["fagen", "ir"]) == {"fagen.ir.show"}


def test_import_fagen_loads_no_torch_sympy_or_driver():
    heavy = ["torch", "sympy", "numpy", "pycuda", "jinja2", "cuda", "matplotlib"]
    code = f"import sys, fagen; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
