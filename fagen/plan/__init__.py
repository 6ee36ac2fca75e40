"""How a derivation becomes kernels: tiles, memory, cost."""
