"""Public reports about gradients, for CPU tensors."""

import pytest

from public_gradients import *  # noqa: F403

pytestmark = pytest.mark.cxx


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.fixture
def repeats() -> int:
    return 2
