"""fagen: attention programs over named axes, compiled to CUDA a person can read."""

from fagen.lang import *  # noqa: F403, I001 (what follows stands in place of the language's own)
from fagen.api import Kernel, Program, attention, compile, program
from fagen.errors import FagenError
from fagen.version import VERSION as __version__  # noqa: N811
