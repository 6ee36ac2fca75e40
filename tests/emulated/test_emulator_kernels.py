"""Kernels in the style of emitted ones on the emulator: right under every schedule, and quick."""

import os
import threading
from pathlib import Path

import pytest
import torch

from fagen.run import emulate
from fagen.run.emulate import SCHEDULES
from kernel_samples import CASES, FEW_BLOCKS, Attention, Matmul, compiled

pytestmark = pytest.mark.cxx

TOLERANCE = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 2e-2}


@pytest.mark.parametrize("element", TOLERANCE)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_attention_is_right_under_every_schedule(element: str, length: int) -> None:
    kernels, case = compiled("attention", element=element), Attention(length, element=element)
    for schedule in SCHEDULES:
        for seed in range(4):
            case.launch(kernels, schedule=schedule, seed=seed)
            assert case.error() < TOLERANCE[element], (schedule, seed)


@pytest.mark.parametrize("element", TOLERANCE)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (32, 64, 16), (33, 65, 17), (7, 200, 0), (90, 130, 75)])
def test_matmul_is_right_under_every_schedule(element: str, m: int, n: int, k: int) -> None:
    kernels, case = compiled("matmul", element=element), Matmul(m, n, k, element=element)
    for schedule in SCHEDULES:
        for seed in range(4):
            case.launch(kernels, schedule=schedule, seed=seed)
            assert case.error() < 2e-5, (schedule, seed)


def test_bits_do_not_depend_on_schedule_workers_or_multiprocessors() -> None:
    kernels, case = compiled("attention"), Attention(200)
    case.launch(kernels)
    first = case.out.clone()
    for options in (
        {"schedule": "backward"},
        {"schedule": "random", "seed": 5},
        {"workers": 2},
        {"workers": 7, "schedule": "random"},
        {"multiprocessors": 1},
        {"multiprocessors": 50},
    ):
        case.launch(kernels, **options)
        assert torch.equal(case.out, first), options


@pytest.mark.parametrize("checker", ["address", "race"])
@pytest.mark.parametrize("name", CASES)
def test_a_checker_reports_nothing_on_a_right_kernel(name: str, checker: str) -> None:
    kernels, case = compiled(name, checker=checker), FEW_BLOCKS[name]()
    for schedule in SCHEDULES:
        case.launch(kernels, schedule=schedule, seed=1)
        assert case.error() < 2e-5, schedule


def test_launches_from_many_python_threads_do_not_disturb_each_other() -> None:
    kernels = compiled("attention")
    cases = [Attention(100 + i, seed=i) for i in range(6)]
    errors: list[float] = []

    def work(case: Attention, seed: int) -> None:
        for repeat in range(5):
            case.launch(kernels, schedule="random", seed=seed + repeat)
            errors.append(case.error())

    threads = [threading.Thread(target=work, args=(case, i)) for i, case in enumerate(cases)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 30
    assert max(errors) < TOLERANCE["fp32"]


def _held() -> tuple[int, int, int]:
    """Return this process's mappings, threads and resident kB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    return maps, int(status["Threads"]), int(status["VmRSS"].split()[0])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to count with")
def test_launches_leave_nothing_behind() -> None:
    kernels, broken = (
        compiled("matmul"),
        compiled("matmul", {"__syncthreads();  // all": "if (threadIdx.x) __syncthreads();  //"}),
    )
    case = Matmul(64, 64, 32)

    def run() -> None:
        case.launch(kernels, workers=2)
        with pytest.raises(Exception, match="__syncthreads"):
            case.launch(broken)

    for _ in range(5):
        run()
    before = _held()
    for _ in range(60):
        run()
    after = _held()
    assert after[0] <= before[0] + 4
    assert after[1] <= before[1]
    assert after[2] <= before[2] + 4096


def test_portable_fibers_run_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate, "_FLAGS", ("-DFAGEN_UCONTEXT", *emulate._FLAGS))
    kernels, case = compiled("attention"), Attention(100)
    case.launch(kernels, schedule="random")
    assert case.error() < TOLERANCE["fp32"]


def test_fused_attention_of_512_takes_seconds(cold_cache: Path) -> None:
    case = Attention(512)
    start = sum(os.times()[:4])  # of this process and of the compiler, whoever else computes
    case.launch(compiled("attention"))
    assert sum(os.times()[:4]) - start < 20
    assert case.error() < TOLERANCE["fp32"]
