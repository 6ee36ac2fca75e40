from __future__ import annotations

import pytest

from fagen.errors import PlanError
from fagen.plan.arch import ROWS, arch_for


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("A100", "A100"),
        ("a100", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A10", "RTX 3090"),
        ("sm_80", "A100"),
        ("sm_86", "RTX 3090"),
        ("sm_90a", "H100"),
        ("sm_90", "H100"),
        ((9, 0), "H100"),
        ("8.9", "RTX 4090"),
        ("sm_75", "generic"),
        ("emulator", "emulator"),
    ],
)
def test_rows_are_found(asked: str | tuple[int, int], name: str) -> None:
    assert arch_for(asked).name == name


@pytest.mark.parametrize(("asked", "target"), [("sm_120", "sm_120"), ((8, 7), "sm_87"), ("10.0", "sm_100")])
def test_other_parts_get_the_limits_every_part_has(asked: str | tuple[int, int], target: str) -> None:
    row = arch_for(asked)
    assert row.target == row.name == target
    like = [other for other in ROWS if "sm80" in other.families]
    assert row.shared_block_bytes == min(other.shared_block_bytes for other in like) == 101_376
    assert arch_for(row.name) == row


@pytest.mark.parametrize("asked", ["sm_60", "B17", "", (7, 0), "A100x", "sm_"])
def test_what_is_unknown_is_refused_with_what_is_known(asked: str | tuple[int, int]) -> None:
    with pytest.raises(PlanError) as error:
        arch_for(asked)
    text = str(error.value)
    assert repr(str(asked)) in text
    for known in ("A100", "H200", "sm_90a", "emulator"):
        assert known in text


def test_every_row_is_found_by_its_own_name() -> None:
    for row in ROWS:
        assert arch_for(row.name) is row


def test_published_limits() -> None:
    """The tables of compute capabilities, and the data sheets' peak rates within a few per cent."""
    limits = {row.name: row.shared_block_bytes for row in ROWS}
    assert limits["A100"] == 163 * 1024
    assert limits["RTX 3090"] == limits["RTX 4090"] == 99 * 1024 == 101_376
    assert limits["H100"] == limits["H200"] == 227 * 1024
    fp32, tensor = (
        {"A100": 19.5e12, "RTX 3090": 35.6e12, "RTX 4090": 82.6e12, "H100": 66.9e12},
        {
            "A100": 312e12,
            "RTX 3090": 71e12,
            "RTX 4090": 165e12,
            "H100": 989e12,
        },
    )
    for row in ROWS:
        if row.name in fp32:
            rate = 2 * row.multiprocessors * row.clock_hz
            assert rate * row.fp32_fma_per_cycle == pytest.approx(fp32[row.name], rel=0.1)
            assert rate * row.tensor16_fma_per_cycle == pytest.approx(tensor[row.name], rel=0.1)
