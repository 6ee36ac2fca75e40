"""All commands of the application."""

from fagen.cli import kernels, ladder, machine
from fagen.cli.app import app

__all__ = ["app", "kernels", "ladder", "machine"]
