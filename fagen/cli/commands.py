"""All commands of the application."""

from fagen.cli import bench, kernels, ladder, machine
from fagen.cli.app import app

__all__ = ["app", "bench", "kernels", "ladder", "machine"]
