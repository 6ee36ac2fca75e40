"""Kernels kept in generated/ are what is emitted now."""

from collections.abc import Callable

import pytest

from fagen.emit.program import emit
from fagen.plan.planner import plan
from golden import GOLDEN, GOLDEN_SM90, KEPT


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, names in KEPT.items() for name in names]
)
def test_the_kernel_kept_is_the_one_emitted(
    family: str, name: str, generated: Callable[[str, str], None]
) -> None:
    generated(f"{family}/{name}.cu", emit(plan(GOLDEN[name].problem(family))).text)


@pytest.mark.parametrize("name", list(GOLDEN_SM90))
def test_the_kernel_kept_for_hopper_is_the_one_emitted(
    name: str, generated: Callable[[str, str], None]
) -> None:
    generated(f"sm90/{name}.cu", emit(plan(GOLDEN_SM90[name].problem("sm90", "H100"))).text)
