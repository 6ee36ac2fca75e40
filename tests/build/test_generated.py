"""Every kernel kept in generated/ compiles, and none spills."""

from pathlib import Path

import pytest

from fagen.run.build import build

FOLDER = Path(__file__).parents[2] / "generated"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.cu"))
FIRST_ARCH = {"simt": "sm_75", "ladder": "sm_75"}


def test_there_are_kernels() -> None:
    assert len(FILES) >= 15


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("name", FILES)
def test_a_kernel_compiles_without_spilling(name: str, arch: str) -> None:
    first = FIRST_ARCH.get(name.partition("/")[0], "sm_80")
    if int(arch[3:5]) < int(first[3:5]):
        pytest.skip(f"the family starts at {first}")
    built = build((FOLDER / name).read_text(encoding="utf-8"), name=Path(name).stem, arch=arch)
    for used in built.functions.values():
        assert (used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) == (0, 0, 0), used
