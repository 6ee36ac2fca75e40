"""Meaning at the edges, for CPU tensors."""

import pytest

from edges import *  # noqa: F403

pytestmark = pytest.mark.cxx


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.fixture
def repeats() -> int:
    return 3
