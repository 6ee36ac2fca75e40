"""A stage with products, as `schedule/forward_loop` writes it.

What the template reads is `kernel.ForwardLoop`, made of the records of `texts`. `walks` makes it, walk by
walk: of its `elements`, the `tiles` they are made from, the `masks` that say which count, the phases or
`levels` in which states are updated, the `slack` of maxima, and the `outputs`.
"""
