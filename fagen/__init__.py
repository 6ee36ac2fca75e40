"""fagen: attention programs over named axes, compiled to CUDA a person can read."""

__version__ = "0.1.0"
