"""A stage with products in warps with roles, as `schedule/forward_roles` writes it.

What the template reads is `kernel.ForwardRoles`, whose parts are in `texts`, `copies`, `visits`, `levels` and
`results`. `build` makes it: the steps on a tile are those of `forward`; what is added is which tensor a tile
is copied from (`build_copies`), what a level has of earlier ones (`build_levels`), what tiles add to memory
(`build_added`), how a maximum may lag behind (`lagging`), and how results leave.
"""
