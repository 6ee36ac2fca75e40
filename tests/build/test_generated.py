"""Every kernel kept in generated/ compiles, and none spills; on tensor cores, none more than a plan may."""

from pathlib import Path

import pytest

from fagen.compile import judged
from fagen.run.build import build

FOLDER = Path(__file__).parents[2] / "generated"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.cu"))
OLDEST = ("simt/causal.cu", "simt/documents.cu", "simt/dropout.cu")
"""Files compiled for the oldest GPU, too: what they include is, as a whole, in `test_device_headers.py`."""
PLAIN = ("simt", "ladder")
"""Families of which a thread's registers hold everything."""
BUILDS = [
    (name, arch) for name in FILES for arch in ("sm_80", "sm_90a") if (name[:4], arch) != ("sm90", "sm_80")
]
BUILDS += [(name, "sm_75") for name in OLDEST]


def test_there_are_kernels() -> None:
    assert len(FILES) >= 15


@pytest.mark.nvcc
@pytest.mark.parametrize(("name", "arch"), BUILDS)
def test_a_kernel_compiles_without_spilling(name: str, arch: str) -> None:
    built = build((FOLDER / name).read_text(encoding="utf-8"), name=Path(name).stem, arch=arch)
    assert judged(built) == ("", 0)
    for used in built.functions.values() if name.partition("/")[0] in PLAIN else ():
        assert (used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) == (0, 0, 0), used
