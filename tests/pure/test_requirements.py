"""A test whose need is missing skips by name; FAGEN_REQUIRE makes that a failure."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_marked(folder: Path, require: str) -> subprocess.CompletedProcess[str]:
    """Run one passing test marked ``cxx`` where no compiler can be found."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "test_it.py").write_text("import pytest\n@pytest.mark.cxx\ndef test_it(): pass\n")
    environment = {
        "PATH": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "FAGEN_REQUIRE": require,
    }
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", str(folder / "test_it.py")]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("require", "code", "line"),
    [
        ("", 0, "skipped 1 for want of cxx (a C++ compiler is needed"),
        ("nvcc", 0, "skipped 1 for want of cxx (a C++ compiler is needed"),
        ("nvcc, cxx", 1, "FAGEN_REQUIRE=cxx: a C++ compiler is needed"),
        ("everything", 4, "FAGEN_REQUIRE names everything; gpu, nvcc, cxx are known"),
    ],
)
def test_missing_compiler(tmp_path, require, code, line):
    done = run_marked(tmp_path, require)
    assert done.returncode == code, done.stdout + done.stderr
    assert line in done.stdout + done.stderr
