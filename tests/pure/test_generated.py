"""Kernels kept in generated/ are what is emitted now."""

from collections.abc import Callable

import pytest

from fagen.emit.program import emit
from fagen.plan.planner import plan
from golden import GOLDEN


@pytest.mark.parametrize("name", list(GOLDEN))
def test_the_kernel_kept_is_the_one_emitted(name: str, generated: Callable[[str, str], None]) -> None:
    generated(f"simt/{name}.cu", emit(plan(GOLDEN[name].problem("simt"))).text)
