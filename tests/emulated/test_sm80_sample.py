"""Tensor-core operands, asynchronous copies and a pipelined kernel made of them, on the emulator."""

import re

import pytest
import torch

from fagen.errors import EmulatorFinding
from fagen.run.emulate import SCHEDULES, compile_text
from kernel_samples import compiled, nan, params, sample
from sm80_samples import Products, TensorCoreAttention

pytestmark = pytest.mark.cxx

ELEMENTS = ["fp16", "bf16"]
HEADERS = "".join(f'#include "{name}.cuh"\n' for name in ("async", "math", "mma", "shared", "types", "add"))


# ---------------------------------------------------------- operands and products


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("width", [16, 32, 48, 64, 80, 128, 192])
def test_operands_of_every_layout_give_exact_products(element: str, width: int) -> None:
    edits = {"WIDTH = 80": f"WIDTH = {width}"} if width != 80 else {}
    kernels, case = compiled("products", edits, element=element), Products(element, width=width)
    for schedule in SCHEDULES:
        case.launch(kernels, schedule=schedule)
        case.check()


def test_a_product_rounds_its_left_operand_to_nearest_even() -> None:
    kernels, case = compiled("products", element="bf16"), Products("bf16")
    case.tensors["A"].zero_()
    case.tensors["B"].zero_()
    case.tensors["A"][:, 0] = torch.arange(32) + 224
    case.tensors["B"][0, 0], case.tensors["B"][0, 1] = 3, 1
    case.launch(kernels)
    rounded = (3 * (torch.arange(32) + 224)).bfloat16().float()
    assert torch.equal(case.tensors["C"][:, 1], rounded)
    assert not torch.equal(rounded, 3.0 * (torch.arange(32) + 224))


def test_a_left_operand_beyond_fp16_is_multiplied_in_tf32() -> None:
    kernels = compiled("products", {"Weight = Element": "Weight = fp32"}, element="fp16")
    case = Products("fp16")
    case.launch(kernels)
    case.check()
    case.tensors["A"].fill_(512)
    case.tensors["B"].zero_()
    case.tensors["B"][:, 3] = 2.0 ** torch.arange(32) % 4096 / 4
    case.tensors["B"][5] = torch.arange(80)
    case.tensors["B"][5, 0] = 1  # a sum of twelve bits
    case.launch(kernels)
    a, b = case.tensors["A"].double(), case.tensors["B"].double()
    s = a @ b.T
    assert s.max() > 65504
    assert torch.equal(case.tensors["S"], s.float())
    rounded = ((s.float().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).double()
    assert not torch.equal(rounded, s)
    torch.testing.assert_close(case.tensors["C"].double(), rounded @ b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("load", ["load_left", "load_left_transposed", "load_right", "load_right_transposed"])
def test_eight_rows_of_a_load_meet_all_banks_once(load: str, swizzled: bool) -> None:
    """A lane's chunk stands for a bank group: of each eight lanes all eight are asked for."""
    widths = (64, 128, 256) if swizzled else (16, 32, 48, 72 + 8, 96, 112, 160, 192, 208)
    order = (
        "chunk_by_columns" if load in ("load_left_transposed", "load_right_transposed") else "chunk_by_rows"
    )
    places = [(width, column) for width in widths for column in range(0, width, 16)]
    body = "".join(
        f"p.y[{32 * number} + i] = TileLayout<{width}>::block_bytes("
        f"TileLayout<{width}>::lane_bytes({order}(i)), 16, {column}) / 16 % 8;\n"
        for number, (width, column) in enumerate(places)
    )
    groups = run(body, y=nan(32 * len(places))).reshape(-1, 4, 8).sort(dim=2).values
    for place, found in zip(places, groups, strict=True):
        assert torch.equal(found, torch.arange(8.0).expand(4, 8)), place


def test_the_chunk_a_lane_loads_is_the_one_its_elements_were_stored_to() -> None:
    places = [(width, column) for width in (16, 64, 80, 128, 192, 256) for column in range(0, width, 16)]
    body = "const LaneChunk lane = chunk_by_rows(i);\n" + "".join(
        f"p.y[{32 * number} + i] = float(TileLayout<{width}>::block_bytes("
        f"TileLayout<{width}>::lane_bytes(lane), 32, {column}))"
        f" - 2 * TileLayout<{width}>::at(32 + lane.row, {column} + 8 * lane.chunk);\n"
        for number, (width, column) in enumerate(places)
    )
    apart = run(body, y=nan(32 * len(places))).reshape(-1, 32)
    assert not apart.any(), [place for place, found in zip(places, apart, strict=True) if found.any()]


@pytest.mark.parametrize("holds", [True, False])
def test_a_transposed_left_operand_is_multiplied_and_added_to_memory(holds: bool) -> None:
    body = (
        "OperandTile<fp16, 16, 16> t(0), one(768);\n"
        "for (int c = 0; c < 16; c += 2) {\n"
        "if (i < 16) store_pair(t, i, c, p.x[i * 16 + c], p.x[i * 16 + c + 1]);\n"
        "if (i < 16) store_pair(one, i, c, float(i == c), float(i == c + 1));\n"
        "}\n__syncwarp();\nfloat upper[4] = {}, lower[4] = {};\n"
        "multiply_add(upper, lower, 0, load_left_transposed(t, 0, 0), load_right(one, 0, 0));\n"
        "float* to = p.y + 256;\n"
        "add_piece(true, to + piece_at(0, 0, 0, 128), upper, lower, 0);\n"
        f"add_piece({str(holds).lower()}, to + piece_at(0, 0, 8, 128), upper, lower, 2);\n__syncwarp();\n"
        "for (int r = 0; r < 16; ++r) {\n"
        "if (i < 16) p.y[r * 16 + i] = to[piece_at(r, 0, i, 128)];\n__syncwarp();\n"
        "if (i % 4 == 0 && i < 16) {\n"
        "const auto four = load_pairs<4>(&to[piece_at(r, 0, i, 128)]);\n"
        "for (int k = 0; k < 4; ++k) if (four[k] != p.y[r * 16 + i + k]) p.y[r * 16 + i] = NAN;\n"
        "}\n__syncwarp();\n}"
    )
    x, y = torch.arange(256, dtype=torch.float32), torch.ones(512)
    run(body, shared_bytes=1536, x=x, y=y)
    expected = x.reshape(16, 16).T + 1
    expected[:, 8:] = expected[:, 8:] if holds else 1
    assert torch.equal(y[:256].reshape(16, 16), expected)


@pytest.mark.parametrize(("rows", "columns"), [(2, 4), (2, 16), (4, 10)])
def test_elements_of_a_diagonal_are_added_up_and_none_is_lost(rows: int, columns: int) -> None:
    """Most of a table of 3 is added to its ends."""
    text = '#include "edges.cuh"\n#include "scatter.cuh"\n#include "types.cuh"\n'
    text += f"""struct Params {{ const float* x; float* y; }};
    extern "C" __global__ void run(const __grid_constant__ Params p) {{
      const int row0 = threadIdx.x / 4, column0 = threadIdx.x % 4 * 2;
      float terms[{rows}][{columns}];
      for (int r = 0; r < {rows}; ++r)
        for (int c = 0; c < {columns}; ++c)
          terms[r][c] = p.x[(row0 + 8 * r) * {4 * columns} + column0 + c / 2 * 8 + c % 2];
      for (int size = 200; size > 0; size -= size == 3 ? 2 : size == 1 ? 1 : 197) {{
        scatter_diagonals(terms, [&](int down, int right) {{
          return &p.y[200 - size + clamp_index(row0 + down - column0 - right + size / 2, size)];
        }});
      }}
    }}"""
    x = torch.randint(-9, 9, (8 * rows, 4 * columns), generator=torch.Generator().manual_seed(3)).float()
    y = torch.zeros(200)
    values, _ = params(x=x, y=y)
    compile_text(text).launch("run", (1, 1, 1), (32, 1, 1), 0, values)
    distance = torch.arange(8 * rows)[:, None] - torch.arange(4 * columns)
    expected = torch.zeros(200)
    for size in (200, 3, 1):
        places = (distance + size // 2).clamp(0, size - 1) + 200 - size
        expected.index_add_(0, places.flatten(), x.flatten())
    assert torch.equal(y, expected)


# ---------------------------------------------------------- findings, one warp


def run(
    body: str,
    checker: str = "none",
    shared_bytes: int = 1024,
    threads: int = 32,
    x: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    """Run a body, which begins on line 11, on x = 0 .. 63 and return y."""
    text = f"{HEADERS}struct Params {{ const float* x; float* y; }};\n"
    text += 'extern "C" __global__ void run(const __grid_constant__ Params p) {\n'
    text += f"const int i = threadIdx.x;\n\n{body}\n}}\n"
    x = torch.arange(64, dtype=torch.float32) if x is None else x
    y = nan(threads) if y is None else y
    values, memories = params(x=x, y=y)
    compile_text(text, checker=checker).launch(
        "run", (1, 1, 1), (threads, 1, 1), shared_bytes, values, memories=memories, **options
    )
    return y


TILE = "OperandTile<fp16, 16, 16> t(0);\n"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            f"{TILE}load_left(t, 0, 16);",
            "line 12: .*load_left of the block at row 0, column 16 of a tile of 16 x 16",
        ),
        (f"{TILE}load_right(t, 8, 0);", "load_right of the block at row 8, column 0 of a tile of 16 x 16"),
        (f"{TILE}from_row<16>(t, 8);", "line 12: .*16 rows from row 8 of a tile of 16"),
        (f"{TILE}t(i, 0) = fp16{{0}};", "line 12: .*row 16, column 0 of a tile of 16 x 16"),
        ("OperandTile<fp16, 16, 16> t(8);", "a tile of tensor-core operands begins at byte 8"),
        ("OperandTile<bf16, 32, 16> t(0);", "a view of 768 elements .* does not fit into 1024 bytes"),
        (
            f"{TILE}if (i < 31) load_left(t, 0, 0);",
            "has left the kernel, and lane 0 waits for it at load_left",
        ),
        (
            f"{TILE}i % 2 ? load_right(t, 0, 0)\n: load_right_transposed(t, 0, 0);",
            "load_right .*lane 0 is at load_right_transposed of line 13",
        ),
        (
            "float c[2][4] = {}; Left<fp16> a = {}; Right<fp16> b = {};\nmultiply_add(c[0], c[1], 1, a, b);",
            "line 12: .*multiply_add to elements 1 to 4 of 4",
        ),
        (
            "Shared<float, 64> s(0); copy_async<4>(s, 4 * i % 64, p.x, 5);",
            "a copy of 4 elements, of which 5 are read",
        ),
        (
            "Shared<float, 64> s(0); copy_async<4>(s, 0, p.x + 1);",
            "a vector access of 16 bytes is misaligned by 4",
        ),
    ],
)
def test_findings_of_one_warp(body: str, told: str) -> None:
    with pytest.raises(EmulatorFinding, match=told):
        run(body)


@pytest.mark.parametrize("load", ["load_left", "load_right", "load_right_transposed"])
def test_a_load_of_operands_orders_no_memory(load: str) -> None:
    """A lane reads the row whose address it gives, which another lane has written."""
    body = f"{TILE}t(15 - i % 16, i / 16 * 8) = fp16{{0}};\nBETWEEN\n"
    body += f"auto a = {load}(t, 0, 0); p.y[i] = a.word[0];"
    with pytest.raises(EmulatorFinding, match=r"data race: line 1[24]: .* and line 1[24]: "):
        run(body.replace("BETWEEN", ""), "race")
    run(body.replace("BETWEEN", "__syncwarp();"), "race")


def test_a_product_orders_no_memory() -> None:
    body = (
        "Shared<float, 64> s(0); float c[2][4] = {}; Left<fp16> a = {}; Right<fp16> b = {};\n"
        "s[i] = 1.0f; multiply_add(c[0], c[1], 0, a, b); p.y[i] = s[31 - i];"
    )
    with pytest.raises(EmulatorFinding, match="data race"):
        run(body, "race")


# ---------------------------------------------------------- asynchronous copies

COPY = "Shared<float, 128> s(0); const float* from = p.x + i / 4 * 4;\ncopy_async<4>(s, 4 * i, from, %s);\n"
LANDED = "copy_async_commit(); copy_async_wait<0>();\np.y[i] = s[4 * i + %d];"


def test_a_copy_fills_with_zeros_and_does_not_read_what_it_leaves_out() -> None:
    landed = "".join(f"p.y[4 * i + {j}] = s[4 * i + {j}];\n" for j in range(4))
    for count in range(5):
        body = COPY % count + "copy_async_commit(); copy_async_wait<0>();\n" + landed
        y = run(body, checker="address", y=nan(128)).reshape(32, 4)
        expected = (torch.arange(32.0) // 4 * 4)[:, None] + torch.arange(4.0)
        assert torch.equal(y, expected * (torch.arange(4) < count)), count
    past = "Shared<float, 128> s(0); copy_async<4>(s, 4 * i, p.x + 64, %d);\n" + LANDED % 0
    assert not run(past % 0, checker="address").any()
    with pytest.raises(EmulatorFinding, match=r"read of .* 0 bytes past the end of x"):
        run(past % 1, checker="address", schedule="random", seed=3)


def test_until_the_wait_a_destination_is_poisoned_or_there() -> None:
    body = COPY % 4 + "copy_async_commit(); __syncwarp();\np.y[i] = s[4 * i];"
    right = torch.arange(32.0) // 4 * 4
    seen = set()
    for seed in range(24):
        y = run(body, schedule="random", seed=seed)
        assert (y.isnan() | (y == right)).all()
        seen.add("all" if torch.equal(y, right) else "none" if y.isnan().all() else "some")
    assert seen == {"all", "none", "some"}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "body",
    [
        "%s copy_async_commit();\n__syncthreads();\np.y[i] = s[4 * (i ^ 32)];",  # no wait
        "%s copy_async_commit();\ncopy_async_wait<0>();\np.y[i] = s[4 * (i ^ 32)];",  # no barrier
        "%s copy_async_commit();\ncopy_async_wait<1>();\np.y[i] = s[4 * i];",  # the group may be in flight
        "%s copy_async_wait<0>();\np.y[i] = s[4 * i];",  # the group is still open
        "copy_async_commit();\np.y[i] = s[4 * (i ^ 32)];\n%s copy_async_commit();\ncopy_async_wait<0>();",
    ],
)
def test_a_copy_that_nothing_awaits_is_a_race(body: str, schedule: str) -> None:
    copy = "copy_async<4>(s, 4 * i, p.x);"
    body = "Shared<float, 256> s(0); s[4 * i] = 0.0f;\n__syncthreads();\n" + body % copy
    for seed in range(2):
        with pytest.raises(EmulatorFinding, match=r"data race: .*by a copy of thread \d+"):
            run(body, "race", threads=64, schedule=schedule, seed=seed)


def test_two_groups_in_flight_are_no_race() -> None:
    body = (
        "Shared<float, 256> s(0);\n"
        "for (int j = 0; j < 2; ++j) {\n"
        "copy_async<4>(s, 128 * j + 4 * i, p.x + 4 * j);\ncopy_async_commit();\n}\n"
        "float sum = 0.0f;\n"
        "for (int j = 0; j < 8; ++j) {\n"
        "copy_async_wait<1>(); __syncthreads();\nsum += s[j % 2 * 128 + 4 * (31 - i)]; __syncthreads();\n"
        "if (j < 6) copy_async<4>(s, j % 2 * 128 + 4 * i, p.x + 4 * (j + 2));\ncopy_async_commit();\n}\n"
        "p.y[i] = sum;"
    )
    for seed in range(4):
        y = run(body, "race", schedule="random", seed=seed)
        assert (y == sum(range(0, 32, 4))).all()


# ---------------------------------------------------------- a whole kernel


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 150, 257])
def test_attention_is_right_under_every_schedule(element: str, length: int) -> None:
    kernels = compiled("attention_sm80", element=element)
    case = TensorCoreAttention(length, element=element)
    for schedule in SCHEDULES:
        for seed in range(4):
            case.launch(kernels, schedule=schedule, seed=seed)
            assert case.right(), (schedule, seed)


def test_bits_do_not_depend_on_schedule_or_moments() -> None:
    kernels, case = compiled("attention_sm80", element="bf16"), TensorCoreAttention(200, element="bf16")
    case.launch(kernels)
    first = case.out.clone()
    for seed in range(12):
        case.launch(kernels, schedule="random", seed=seed)
        assert torch.equal(case.out, first), seed


@pytest.mark.parametrize("checker", ["address", "race"])
def test_a_checker_reports_nothing_on_a_right_kernel(checker: str) -> None:
    kernels = compiled("attention_sm80", element="fp16", checker=checker)
    case = TensorCoreAttention(200, element="fp16", heads=1)
    for schedule in SCHEDULES:
        case.launch(kernels, schedule=schedule, seed=SCHEDULES.index(schedule))
        assert case.right(), schedule


STEPS = re.findall(
    r"copy_async_wait<0>\(\); +// .*|__syncthreads\(\); +// .*", sample("attention_sm80", element="fp16")
)


def test_there_are_waits_and_barriers_to_remove() -> None:
    assert len(STEPS) == len(set(STEPS)) == 4


@pytest.mark.parametrize("step", STEPS)
def test_a_removed_wait_or_barrier_gives_a_wrong_result_under_some_seed(step: str) -> None:
    kernels = compiled("attention_sm80", {step: ""}, element="fp16")
    case = TensorCoreAttention(200, element="fp16")
    wrong = 0
    for schedule in SCHEDULES:
        for seed in range(8):
            case.launch(kernels, schedule=schedule, seed=seed)
            wrong += not case.right()
    assert wrong


@pytest.mark.parametrize("step", STEPS)
def test_a_removed_wait_or_barrier_is_a_race_under_every_seed(step: str) -> None:
    kernels = compiled("attention_sm80", {step: ""}, element="fp16", checker="race")
    case = TensorCoreAttention(200, element="fp16", heads=1)
    for schedule, seed in [("forward", 0), ("backward", 1), ("random", 2), ("random", 3)]:
        with pytest.raises(EmulatorFinding, match=r"data race: .*by a copy of thread \d+"):
            case.launch(kernels, schedule=schedule, seed=seed)
