"""A sample of each family's kernels under compute-sanitizer: no access beyond an array, none that races."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from edges import need
from sanitized import CALLS, call

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

SCRIPT = Path(__file__).parents[1] / "sanitized.py"
REPORTED = 9
"""What the tool ends with where it has something to report."""
SECONDS = 600


class ReportedError(AssertionError):
    """The tool has found something."""


UNORDERED = {
    "sm80": "copies wait for a barrier at which a warp's first lane arrives for all behind __syncwarp, which "
    "is no order of the others' reads to the tool; each was part of a product by then",
    "sm90": "values of columns are freed by a warp's first lane behind wgmma.wait_group.aligned, which is no "
    "order among lanes to the tool; each is part of a product that was waited for by then",
}
"""Of families, why the tool reports races of their gradients, in which the emulator's checker finds none."""


def sanitizer() -> str | None:
    places = [shutil.which("compute-sanitizer"), *glob.glob("/usr/local/cuda*/bin/compute-sanitizer")]
    return next((place for place in places if place), None)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)


def _cases() -> list[object]:
    marks = {
        (family, "backward", "racecheck"): pytest.mark.xfail(strict=True, raises=ReportedError, reason=reason)
        for family, reason in UNORDERED.items()
    }
    return [
        pytest.param(*case, marks=marks.get(case, ()))
        for case in product(("simt", "sm80", "sm90"), ("forward", "backward"), ("memcheck", "racecheck"))
    ]


@pytest.mark.parametrize(("family", "direction", "checker"), _cases())
def test_the_sanitizer_reports_nothing(family: str, direction: str, checker: str) -> None:
    need("cuda", family)
    tool = sanitizer()
    if tool is None:
        pytest.skip("needs compute-sanitizer, which comes with the CUDA toolkit")
    with ThreadPoolExecutor(len(CALLS)) as pool:  # none is built under the tool: all are in the cache then
        list(pool.map(lambda name: call(family, direction == "backward", **CALLS[name]), CALLS))
    options = ["--report-api-errors", "no"] if checker == "memcheck" else []
    checked = (sys.executable, str(SCRIPT), family, direction, *CALLS)
    done = run(tool, "--tool", checker, *options, "--error-exitcode", f"{REPORTED}", *checked)
    told = f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert done.stdout.count("done ") == len(CALLS), told
    assert done.returncode in (0, REPORTED), told
    named = set(re.findall(r"access at (\w+)\+", done.stdout))
    assert all(name.startswith("backward") for name in named), told
    if done.returncode:
        raise ReportedError(told)
