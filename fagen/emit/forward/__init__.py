"""A stage with products, as `schedule/forward_loop` writes it."""
