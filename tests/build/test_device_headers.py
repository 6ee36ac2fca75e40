"""The device headers under nvcc: samples compile for every type and GPU, without spills or warnings."""

import re
from pathlib import Path

import pytest

from fagen.run.build import build

SAMPLES = Path(__file__).parents[1] / "emulated" / "kernels"


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("name", "element", "arch"),
    [
        ("attention", "fp32", "sm_80"),
        ("attention", "fp16", "sm_90a"),
        ("attention", "bf16", "sm_75"),
        ("matmul", "fp32", "sm_90a"),
        ("matmul", "fp16", "sm_75"),
        ("matmul", "bf16", "sm_80"),
    ],
)
def test_samples_compile(name: str, element: str, arch: str) -> None:
    text = (SAMPLES / f"{name}.cu").read_text().replace("ELEMENT", element)
    built = build(text, name=f"{name}_{element}", arch=arch)
    assert not built.warnings
    for each in built.functions.values():
        assert each.spill_store_bytes == each.stack_bytes == 0, each


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_every_function_compiles(arch: str) -> None:
    text = (SAMPLES / "functions.cu").read_text()
    built = build(text, name="functions", arch=arch)
    assert set(built.functions) == set(re.findall(r"__global__ void (\w+)\(", text))
    assert not built.warnings
