"""fagen: attention programs over named axes, compiled to CUDA a person can read."""

from fagen.lang import *  # noqa: F403

__version__ = "0.1.0"
