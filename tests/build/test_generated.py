"""Every kernel kept in generated/ compiles, and none spills; on tensor cores, none more than a plan may."""

from pathlib import Path

import pytest

from fagen.compile import judged
from fagen.run.build import build

FOLDER = Path(__file__).parents[2] / "generated"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.cu"))
FIRST_ARCH = {"simt": "sm_75", "ladder": "sm_75", "sm90": "sm_90a"}


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
    assert judged(built) == ("", 0)
    for used in built.functions.values() if int(first[3:5]) < 80 else ():
        assert (used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) == (0, 0, 0), used
