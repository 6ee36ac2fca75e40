"""Kernels broken by hand: the emulator finds what is wrong and says where."""

import re
from collections.abc import Sequence

import pytest
import torch

from fagen.errors import BuildError, EmulatorFinding, LaunchError
from fagen.run.emulate import SCHEDULES, EmulatedKernels, Memory, compile_text
from kernel_samples import CASES, FEW_BLOCKS, Attention, Matmul, compiled, nan, params, sample

pytestmark = pytest.mark.cxx

BARRIERS = [
    (name, barrier)
    for name in CASES
    for barrier in re.findall(r"__sync(?:threads|warp)\(\);  // .*", sample(name))
]


@pytest.mark.parametrize(("name", "barrier"), [each for each in BARRIERS if "syncthreads" in each[1]])
def test_a_removed_barrier_gives_a_wrong_result_under_some_schedule(name: str, barrier: str) -> None:
    kernels, case = compiled(name, {barrier: ""}), CASES[name]()
    wrong = []
    for schedule in SCHEDULES:
        for seed in range(5):
            case.launch(kernels, schedule=schedule, seed=seed)
            if not case.error() < 1e-3:
                wrong.append((schedule, seed))
    assert wrong


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("name", "barrier"), BARRIERS)
def test_a_removed_barrier_is_a_race_under_every_schedule(name: str, barrier: str, schedule: str) -> None:
    kernels, case = compiled(name, {barrier: ""}, checker="race"), FEW_BLOCKS[name]()
    with pytest.raises(
        EmulatorFinding, match=r"data race: line \d+: .* in shared memory by thread \d+ and line"
    ):
        case.launch(kernels, schedule=schedule)


HEADERS = "".join(
    f'#include "{name}.cuh"\n' for name in ("async", "atomic", "math", "random", "tiles", "types", "warp")
)


def kernel(body: str, checker: str = "none") -> EmulatedKernels:
    """Compile one kernel of a body, which begins on line 11 of the text."""
    text = f"{HEADERS}struct Params {{ const float* x; float* y; int* counter; int n; }};\n"
    text += 'extern "C" __global__ void run(const __grid_constant__ Params p) {\nconst int i = threadIdx.x;\n'
    text += body + "\n}\n"
    return compile_text(text, checker=checker)


class Run:
    """One launch of ``run`` on x = 0 .. 63 and y of NaN."""

    def __init__(self, body: str, checker: str = "none") -> None:
        self.kernels = kernel(body, checker)
        self.x, self.y = torch.arange(64, dtype=torch.float32), nan(64)
        self.counter = torch.zeros(4, dtype=torch.int32)

    def __call__(
        self, threads: int = 64, blocks: int = 1, shared_bytes: int = 256, **options: object
    ) -> torch.Tensor:
        values, memories = params(x=self.x, y=self.y, counter=self.counter, n=64)
        self.kernels.launch(
            "run", (blocks, 1, 1), (threads, 1, 1), shared_bytes, values, memories=memories, **options
        )
        return self.y


def finding(body: str, checker: str = "none", **options: object) -> str:
    run = Run(body, checker)
    with pytest.raises(EmulatorFinding) as caught:
        run(**options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            "p.y[i + 1] = 0.0f;",
            "line 11: write of 4 bytes 0 bytes past the end of y, which has 256, by thread (63, 0, 0)",
        ),
        (
            "p.y[i] = p.x[i - 1];",
            "line 11: read of 4 bytes 4 bytes before the start of x by thread (0, 0, 0)",
        ),
        (
            "\np.y[i] = p.x[i * 2];",
            "line 12: read of 4 bytes 0 bytes past the end of x, which has 256, by thread (32, 0, 0)",
        ),
        (
            "Vec<float, 4> v = {}; if (i == 63) store_vector(p.y + 64, v);",
            "line 11: write of 16 bytes 0 bytes past the end of y",
        ),
        ("int a[4]; a[p.n - 60 + i] = 1; p.counter[0] = a[i % 4];", "line 11: write of 4 bytes"),
    ],
)
def test_global_and_local_access_out_of_bounds(body: str, told: str) -> None:
    text = finding(body, "address")
    assert f"run: {told}" in text
    assert " | " + body.strip() in text


def test_an_allocation_ends_where_the_memory_ends_though_its_storage_goes_on() -> None:
    storage = torch.zeros(100)
    run = Run("p.y[i] = p.x[i];", "address")
    run.x = storage[3:66]
    with pytest.raises(EmulatorFinding, match="0 bytes past the end of x, which has 252"):
        run()


def test_a_search_that_has_ended_reads_no_more_while_another_goes_on() -> None:
    run = Run(
        "const auto far = [&](int n) { return p.x[n] < 41.0f; };\n"
        "const auto near = [&](int n) { return p.x[n] < 0.0f; };\n"
        "const Places<3> found = partition_points(Places<3>{1, p.n, 40}, near, far, far);\n"
        "if (i < 3) p.y[i] = found[i];",
        "address",
    )
    assert run(threads=32)[:3].tolist() == [0.0, 41.0, 40.0]


def test_a_checked_launch_writes_back_what_is_written() -> None:
    run = Run("p.y[i] = p.x[i] + 1.0f; p.counter[i % 4] = i;", "address")
    y = run()
    assert torch.equal(y, torch.arange(64) + 1.0)
    assert (run.counter >= 60).all()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("Shared<float, 64> s(0); s[i + 1] = 0.0f;", "element 64 of a view of 64 elements in shared memory"),
        ("Shared<float, 64> s(0); p.y[i] = s[i - 1];", "element -1 of a view of 64 elements"),
        (
            "Shared<float, 2> s(0); Vec<float, 4> v = load_vector<4>(s, 0);",
            "element 0 of a view of 2 elements",
        ),
        (
            "Shared<float, 65> s(0);",
            "a view of 65 elements (260 bytes) from byte 0 does not fit into 256 bytes",
        ),
        (
            "Shared<float, 4> s(244);",
            "a view of 4 elements (16 bytes) from byte 244 does not fit into 256 bytes",
        ),
        ("Shared<float, 4> s(2);", "a view of 4 elements (16 bytes) from byte 2 does not fit"),
        (
            "Shared<float, 64> s(0); auto v = load_vector<4>(s, 2); p.y[i] = v[0];",
            "access of 16 bytes is misaligned by 8",
        ),
        ("auto v = load_vector<2>(p.x + 1); p.y[i] = v[0];", "a vector access of 8 bytes is misaligned by 4"),
    ],
)
def test_shared_memory_and_vectors_are_held_against_their_bounds(body: str, told: str) -> None:
    text = finding(body)
    assert text.startswith("run: line 11: thread (")
    assert told in text


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            "if (i < 40) __syncthreads();\nelse\n__syncthreads();",
            "line 13: thread (40, 0, 0) of block (0, 0, 0): waits at __syncthreads, "
            "and 40 threads of its block wait at the one of line 11",
        ),
        (
            "if (i != 5) __syncthreads();",
            "line 11: thread (5, 0, 0) of block (0, 0, 0): has left the kernel, and 5 threads of its block",
        ),
        (
            "if (i == 5) return;\n__syncthreads();",
            "has left the kernel, and 5 threads of its block wait for it at __syncthreads",
        ),
        (
            "p.y[i] = i < 7 ? __shfl_xor_sync(FULL_WARP, 1.0f, 1)\n: __shfl_xor_sync(FULL_WARP, 2.0f, 1);",
            "__shfl_xor_sync with mask ffffffff, and lane 0 is at __shfl_xor_sync of line 11 with mask ffff",
        ),
        (
            "if (i % 2) __syncwarp(); else __shfl_sync(FULL_WARP, 1, 0);",
            "__syncwarp with mask ffffffff, and lane 0 is at __shfl_sync of line 11",
        ),
        ("if (i != 3) __syncwarp();", "has left the kernel, and lane 0 waits for it at __syncwarp"),
        (
            "if (i == 3) return; __ballot_sync(FULL_WARP, true);",
            "has left the kernel, and lane 0 waits for it at",
        ),
        (
            "__syncwarp(2);",
            "thread (0, 0, 0) of block (0, 0, 0): __syncwarp with a mask that lacks its own lane",
        ),
        (
            "if (i < 16) __shfl_sync(0xffff, 1, 20);",
            "lane 0 shuffles from lane 20, which is not in the mask 0000ffff",
        ),
    ],
)
def test_threads_that_do_not_meet(body: str, told: str) -> None:
    assert told in finding(body)


def test_a_mask_beyond_the_block() -> None:
    assert "waits for lane 20, which has left the kernel or never was" in finding("__syncwarp();", threads=20)


def test_a_deadlock_names_where_everyone_waits() -> None:
    text = finding("if (i < 48) __syncthreads();\nelse __syncwarp();")
    assert text.splitlines() == [
        "run: deadlock: no thread can go on (schedule = forward, seed = 0)",
        "  block (0, 0, 0) threads 0 to 47 wait at __syncthreads, line 11",
        "  block (0, 0, 0) threads 48 to 63 wait at __syncwarp, line 12",
        "   11 | if (i < 48) __syncthreads();",
        "   12 | else __syncwarp();",
    ]


def test_a_spin_on_what_never_comes_is_a_deadlock() -> None:
    text = finding("if (i == 9) wait_for_turn(p.counter, 1);\n__syncthreads();")
    assert "deadlock" in text
    assert "thread 9 spins in wait_for_turn, line 11" in text
    assert "threads 0 to 8 wait at __syncthreads, line 12" in text


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_turns_pass_from_block_to_block(schedule: str) -> None:
    order = (
        "if (i == 0) { wait_for_turn(p.counter, %s); p.counter[1] = p.counter[1] * 3 + blockIdx.x;"
        " pass_turn(p.counter); }"
    )
    for seed in range(6):
        run = Run(order % "blockIdx.x")
        run(blocks=9, schedule=schedule, seed=seed)
        expected = 0
        for number in range(9):
            expected = expected * 3 + number
        assert run.counter[:2].tolist() == [9, expected], seed
        backwards = Run(order % "8 - int(blockIdx.x)")
        with pytest.raises(EmulatorFinding, match="deadlock"):
            backwards(blocks=9, schedule=schedule, seed=seed, multiprocessors=2)
        backwards(blocks=9, schedule=schedule, seed=seed, multiprocessors=9)


def test_blocks_are_live_together_as_many_as_the_multiprocessors_hold() -> None:
    run = Run("if (i == 0) { pass_turn(p.counter); wait_for_turn(p.counter, gridDim.x); }")
    run(blocks=6, multiprocessors=3)
    with pytest.raises(EmulatorFinding, match="deadlock"):
        Run("if (i == 0) { pass_turn(p.counter); wait_for_turn(p.counter, gridDim.x); }")(
            blocks=7, multiprocessors=3
        )


def test_blocks_of_two_workers_wait_for_each_other() -> None:
    """A worker whose blocks all spin is in no deadlock while those of another may go on."""
    late = "for (int n = 0; n < 20000; ++n) p.y[i] += 1.0f; "
    turns = "if (i == 0) { wait_for_turn(p.counter, %s); pass_turn(p.counter); }"
    for seed in range(4):
        run = Run(f"if (blockIdx.x == 1) {{ {late}}} {turns % 'blockIdx.x ^ 1'}")
        run(blocks=2, workers=2, schedule="random", seed=seed, multiprocessors=2)
        assert run.counter[0] == 2, seed
        with pytest.raises(EmulatorFinding, match="deadlock"):
            Run(turns % "blockIdx.x + 1")(blocks=2, workers=2, seed=seed, multiprocessors=2)


@pytest.mark.parametrize("checker", ["none", "address"])
def test_fresh_shared_memory_is_nan_for_every_block(checker: str) -> None:
    run = Run("Shared<float, 64> s(0); if (i < 32) p.y[i] += s[i]; __syncthreads(); s[i] = 1.0f;", checker)
    run.y.fill_(0.0)
    y = run(blocks=5)
    assert y[:32].isnan().all()
    assert (y[32:] == 0).all()
    half = Run(
        "Shared<fp16, 128> h(0); Shared<bf16, 128> b(0); p.y[i] = to_float(h[i]); p.y[i] += to_float(b[i]);"
    )
    assert half().isnan().all()


def test_a_local_variable_never_set_is_no_zero() -> None:
    run = Run("float sum[4]; for (int j = 0; j < p.n; ++j) sum[j % 4] += p.x[j]; p.y[i] = sum[i % 4];")
    if not _fills(run.kernels):
        pytest.skip("needs a compiler that fills local variables: g++ 12 or clang 16")
    assert (run().abs() > 1e30).all()


def _fills(kernels: EmulatedKernels) -> bool:
    from fagen.run import emulate
    from fagen.run.toolchain import find_cxx

    return bool(emulate._runtime(find_cxx(), kernels.checker).flags)


def test_blocks_that_race_through_global_memory() -> None:
    text = finding("if (i == 0) p.y[0] = float(blockIdx.x);", "race", blocks=2)
    assert (
        "data race: line 11: write of 4 bytes in y by thread 0 and line 11: write of 4 bytes in y by thread 0"
        in text
    )
    Run("if (i == 0) atomic_add(p.y, 1.0f);", "race")(blocks=2)
    in_turn = "if (i == 0) { wait_for_turn(p.counter, blockIdx.x); p.y[0] = 1.0f; pass_turn(p.counter); }"
    Run(in_turn, "race")(blocks=3)


def test_a_shuffle_orders_no_memory() -> None:
    body = "Shared<float, 64> s(0); s[i] = 1.0f; %s; p.y[i] = s[i ^ 1];"
    assert "data race" in finding(body % "__shfl_sync(FULL_WARP, 1, 0)", "race")
    Run(body % "__syncwarp()", "race")()
    assert "data race" in finding(
        "Shared<float, 64> s(0); s[i] = 1.0f; __syncwarp(); p.y[i] = s[i ^ 32];", "race"
    )


def test_a_crash_is_told_by_a_checker() -> None:
    assert "the kernel crashed" in finding("*reinterpret_cast<int*>(8ull * p.n) = 1;", "address")


PIPELINE = {"copy_async_wait<1>();": ""}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_in_flight_land_at_some_moment_before_the_wait(schedule: str) -> None:
    x = torch.arange(2 * 32 * 16, dtype=torch.float32)
    expected = x.reshape(64, 16).sum(1)

    def wrong_under(kernels: EmulatedKernels) -> Sequence[int]:
        seeds = []
        for seed in range(12):
            result = nan(64)
            values, _ = params(x=x, y=x, result=result, count=64)
            values = values[:24] + (64).to_bytes(8, "little")
            kernels.launch("pipelined_sum", (2, 1, 1), (32, 1, 1), 1024, values, schedule=schedule, seed=seed)
            if not torch.equal(result, expected):
                seeds.append(seed)
        return seeds

    assert wrong_under(compiled("functions")) == []
    without_wait = wrong_under(compiled("functions", PIPELINE))
    assert 0 < len(without_wait) < 12  # some seeds let every copy land at once


def test_requests_that_are_wrong() -> None:
    kernels, case = compiled("matmul"), Matmul(4, 4, 4)
    values, _ = params(a=case.a, b=case.b, c=case.c, m=4, n=4, k=4)
    with pytest.raises(LaunchError, match="matmul has no kernel product; it has matmul"):
        kernels.launch("product", (1, 1, 1), (128, 1, 1), 0, values)
    with pytest.raises(LaunchError, match=r"the parameters of matmul are 40 bytes \(given = 36\)"):
        kernels.launch("matmul", (1, 1, 1), (128, 1, 1), 0, values[:36])
    with pytest.raises(LaunchError, match=r"blocks of \(33, 32, 1\) threads; 1 to 1,024 are"):
        kernels.launch("matmul", (1, 1, 1), (33, 32, 1), 0, values)
    kernels.launch("matmul", (0, 5, 1), (128, 1, 1), 0, values)
    assert case.c.isnan().all()


def test_a_text_the_compiler_rejects() -> None:
    with pytest.raises(BuildError, match=r"rejects kernel for the emulator: .*kernel.cu:11.*nonsense"):
        kernel("nonsense = 1;")
    with pytest.raises(BuildError, match="kernel has no __global__ function"):
        compile_text("// __global__ void run(\n")


def test_the_text_of_an_override_runs(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "attention.cu").write_text(
        sample("attention", {"= 64, BLOCK_KV": "= 64,  BLOCK_KV", "s[r][c] * p.scale": "s[r][c] * 2"})
    )
    monkeypatch.setenv("FAGEN_OVERRIDE", str(tmp_path))
    case = Attention(70)
    case.launch(compiled("attention"))
    assert case.error() > 0.1


def test_memory_is_described_by_what_a_launch_needs() -> None:
    memory = Memory("q", 8, 4096, 16)
    assert (memory.name, memory.written) == ("q", False)


def test_memory_that_kernels_are_given_twice_is_one_under_a_checker() -> None:
    """A tensor map and a pointer, say: what is written through one is read through the other."""
    kernels = kernel("const_cast<float*>(p.x)[i] = i; p.y[i] += 1.0f;", "address")
    both, counter = nan(64), torch.zeros(4, dtype=torch.int32)
    values, memories = params(x=both, y=both, counter=counter, n=64)
    kernels.launch("run", (1, 1, 1), (64, 1, 1), 256, values, memories=memories)
    assert both.tolist() == [i + 1 for i in range(64)]
