"""Where the package and its templates lie on this disk."""

from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent


def templates_dir() -> Path:
    """Return the folder of templates: inside an installed package, beside it in a checkout."""
    inside = PACKAGE_DIR / "templates"
    return inside if inside.is_dir() else PACKAGE_DIR.parent / "templates"
