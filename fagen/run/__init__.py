"""From emitted text to a result: compilers, cache, launch on a GPU, emulation on a CPU."""
