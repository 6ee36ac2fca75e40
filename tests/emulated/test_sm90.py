"""Kernels of warps with roles on the emulator: right under every schedule; what is broken is found."""

import itertools
import math
import re
import struct
from dataclasses import replace

import pytest
import torch

from fagen.errors import EmulatorFinding
from fagen.run.emulate import SCHEDULES, compile_text
from fagen.run.tensor_map import TensorMap
from kernel_samples import ELEMENTS, nan, sample
from sm90_samples import Attention, Design

pytestmark = pytest.mark.cxx

TOLERANCE = 2e-2
DESIGNS = {
    "64": Design(64, 64, groups=4, stages=4),
    "64 wide": Design(64, 128, groups=3, stages=2),
    "128": Design(128, 128, groups=2, stages=2, causal=False, pass_over=False),
    "128 tall": Design(128, 80, groups=3, stages=3),
    "256": Design(256, 80, groups=2, stages=2, q_stages=1, turns=False),
    "fp16": Design(64, 64, groups=1, turns=False, element="fp16"),
}


@pytest.mark.parametrize("name", DESIGNS)
def test_every_design_is_right_under_every_schedule(name: str) -> None:
    design = DESIGNS[name]
    kernels = design.compiled()
    for case in (
        Attention(design, 150, batch=2),
        Attention(design, 100, 333, q_heads=4, kv_heads=2, section=3),
        Attention(design, 130, 77),
        Attention(design, 1),
    ):
        for schedule, seed in [
            *itertools.product(SCHEDULES[:2], (0,)),
            *itertools.product(SCHEDULES[2:], range(4)),
        ]:
            case.launch(kernels, schedule=schedule, seed=seed)
            assert case.error() < TOLERANCE, (schedule, seed)


def test_fifty_schedules_give_the_same_bits() -> None:
    design = Design()
    kernels, case = design.compiled(), Attention(design, 130, 200, batch=2)
    case.launch(kernels)
    first = case.out.clone()
    for seed in range(50):
        case.launch(kernels, schedule="random", seed=seed, blocks=1 + seed % 5)
        assert torch.equal(case.out, first), seed


def test_the_address_checker_reports_nothing() -> None:
    design = Design()
    case = Attention(design, 130, 77, batch=2)
    case.launch(design.compiled("address"), schedule="random", seed=1)
    assert case.error() < TOLERANCE


BROKEN = {
    "barriers not published": {"    publish_barriers();\n": ""},
    "barriers used before they are made": {"  __syncthreads();  // the barriers are there\n": ""},
    "Q not waited for": {"    queries.wait(q_at);\n": ""},
    "first K not waited for": {"    pass_over_keys();\n    k_pipe.wait(k_at);\n": "    pass_over_keys();\n"},
    "K not waited for": {"    k_pipe.wait(k_at);\n    take_turn();\n": "    take_turn();\n"},
    "V not waited for": {"    v_pipe.wait(v_at);\n    wgmma_fence();\n": "    wgmma_fence();\n"},
    "K passed over without a wait": {
        "      k_pipe.wait(k_at);\n      group_sync(own, 128);": "      group_sync(own, 128);"
    },
    "K passed over by one warp": {
        "      k_pipe.wait(k_at);\n      group_sync(own, 128);": "      k_pipe.wait(k_at);"
    },
    "V passed over by one warp": {
        "      v_pipe.wait(v_at);\n      group_sync(own, 128);": "      v_pipe.wait(v_at);"
    },
    "turns not taken where tiles are passed over": {"    pass_turns();\n    step(": "    step("},
    "no fence before S": {"    wgmma_fence();\n    multiply(s": "    multiply(s"},
    "no fence before O": {"    wgmma_fence();\n    multiply_add": "    multiply_add"},
    "S in no group": {
        "transposed(k_tile(k_at.stage())));\n    wgmma_commit();": "transposed(k_tile(k_at.stage())));"
    },
    "S not waited for": {"    wgmma_wait<1>(s);\n": ""},
    "O not waited for": {"    wgmma_wait<0>(o, weights);\n    free_value();": "    free_value();"},
    "V freed before it is read": {
        "    wgmma_wait<0>(o, weights);\n    free_value();": "    free_value();\n    wgmma_wait<0>(o);"
    },
    "weights written as they are read": {
        "    wgmma_wait<0>(o, weights);\n    free_value();": (
            "    round_weights(s);\n    wgmma_wait<0>(o);\n    free_value();"
        )
    },
    "last product not waited for": {"  wgmma_wait<0>(o, weights);\n  store();": "  store();"},
    "store not waited for": {"      store_wait_read<0>();\n": ""},
    "last store not waited for": {"  store_wait<0>();\n": ""},
    "store in no group": {"        store_commit();\n": ""},
    "no fence before the store": {"      fence_async();\n": ""},
    "O stored before all have written": {
        "      group_sync(own, 128);  // all of O is in shared memory\n": ""
    },
    "K not freed": {"      k_pipe.free(k_at);\n": ""},
    "V freed by all threads": {"if (leader) v_pipe.free(v_at);": "v_pipe.free(v_at);"},
    "Q not freed": {"      arrive(queries.freed(storing));\n": ""},
    "the same K again": {"    k_at.next();\n": ""},
    "K freed by one reader": {"Pipe<STAGES>(K_PIPE_AT).init(GROUPS);": "Pipe<STAGES>(K_PIPE_AT).init(1);"},
    "K not announced": {"k_pipe.fill(at, KTile::BYTES)": "k_pipe.filled(at.stage())"},
    "K filled before it is free": {"      k_pipe.wait_free(at);\n": ""},
    "V filled before it is free": {"      v_pipe.wait_free(at);\n": ""},
    "Q filled before it is free": {"      q_pipe(group).wait_free(q_at);\n": ""},
    "half of K announced": {"k_pipe.fill(at, KTile::BYTES)": "k_pipe.fill(at, KTile::BYTES / 2)"},
    "too much of K announced": {"k_pipe.fill(at, KTile::BYTES)": "k_pipe.fill(at, 2 * KTile::BYTES)"},
    "a turn of another size": {"group_sync(own_turn, 256)": "group_sync(own_turn, 128)"},
    "turns not passed": {"if (TURNS) group_arrive(next_turn, 256);": ""},
    "two first turns": {"  if (group == GROUPS - 1) pass_turn();\n": "  pass_turn();\n"},
    "registers not given back": {"    shrink_registers<PRODUCER_REGISTERS>();\n": ""},
    "more registers than there are": {"<CONSUMER_REGISTERS>()": "<CONSUMER_REGISTERS + 8>()"},
    "all lanes produce": {"threadIdx.x % 128 < 32 && elect_one()": "threadIdx.x % 128 < 32"},
    "work written over": {"q_at.count % 4 * 4, Vec<int32, 4>{work.q_first": "0, Vec<int32, 4>{work.q_first"},
    "the last work not announced": {"    q_pipe(group).fill(q_at, 0);\n": ""},
}


TOLD = {
    "no fence before the store": r"wrote in line \d+ without fence_async\(\) since",
    "no fence before S": r"without wgmma_fence\(\)",
    "K not freed": "deadlock",
    "all lanes produce": r"arrives at the barrier at byte \d+, at which all 1 of this phase have arrived",
    "two first turns": r"arrives twice at barrier \d before all 256 threads have come",
    "V filled before it is free": r"arrives at the barrier at byte \d+, at which all 1 of this phase",
    "Q not waited for": r"a product reads what the copy of line \d+ has not brought yet",
}
"""What is said of some of them, under some schedule."""


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found_within_fifty_seeds(name: str) -> None:
    design = Design()
    kernels = replace(design, edits=BROKEN[name]).compiled()
    cases = [Attention(design, 300, batch=2, section=2), Attention(design, 130, 333, batch=3)]
    told = "nothing"
    for seed, case in itertools.product(range(50), cases):
        try:
            case.launch(kernels, schedule="random", seed=seed)
        except EmulatorFinding as finding:
            told = str(finding)
        else:
            told = "nothing" if case.error() < TOLERANCE else "a wrong result"
        if told != "nothing" and re.search(TOLD.get(name, ""), told):
            return
    pytest.fail(f"50 seeds do not show what is broken; the last says {told}")


def test_a_deadlock_names_the_line_of_every_thread() -> None:
    design = Design()
    kernels = replace(design, edits=BROKEN["K not freed"]).compiled()
    with pytest.raises(EmulatorFinding, match="deadlock") as caught:
        Attention(design, 300).launch(kernels)
    told = str(caught.value)
    for line in re.findall(r"line (\d+)", told):
        assert f"{line} | " in told
    threads = re.findall(r"block \(0, 0, 0\) threads? (\d+)(?: to (\d+))?", told)
    assert sum(int(last or first) - int(first) + 1 for first, last in threads) == design.threads


# -------------------------------------------------------------------------------------------- products


def two_dimensional(x: torch.Tensor, panel: int) -> TensorMap:
    rows, columns = x.shape
    whole = columns % panel == 0
    return TensorMap(
        address=x.data_ptr(),
        storage="bf16" if x.dtype == torch.bfloat16 else "fp16",
        lengths=(panel if whole else columns, rows, columns // panel if whole else 1, 1, 1),
        strides=(columns * 2, panel * 2, 16, 16),
        box=(panel, rows, columns // panel if whole else 1, 1, 1),
    )


@pytest.mark.parametrize("element", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("n", "k", "panel", "left", "right"),
    [
        (64, 64, 64, "plain", "transposed"),  # S = Q K^T
        (128, 80, 64, "plain", "transposed"),  # a panel part of zeros
        (80, 96, 32, "plain", "transposed"),
        (176, 48, 16, "plain", "transposed"),
        (64, 32, 64, "registers", "plain"),  # O = P V
        (80, 64, 64, "registers", "plain"),  # one panel and a quarter
        (96, 48, 32, "registers", "plain"),
        (48, 64, 16, "registers", "plain"),
        (256, 16, 64, "registers", "plain"),
        (8, 16, 16, "registers", "plain"),
        (64, 64, 64, "registers", "transposed"),
        (64, 32, 64, "transposed", "plain"),
        (96, 64, 32, "transposed", "transposed"),
        (128, 64, 64, "plain", "plain"),
    ],
)
def test_products_of_every_form(n: int, k: int, panel: int, left: str, right: str, element: str) -> None:
    constants = {"N": n, "K": k, "PANEL": panel, "LEFT_TRANSPOSED": left == "transposed"}
    constants |= {"RIGHT_TRANSPOSED": right == "transposed", "IN_REGISTERS": left == "registers"}
    text = sample("products_sm90", element=element)
    for name, value in constants.items():
        text, count = re.subn(rf"\b{name} = \w+", f"{name} = {str(value).lower()}", text, count=1)
        assert count == 1
    kernels = compile_text(text, name="products_sm90")
    generator = torch.Generator().manual_seed(n + k)
    a, b = (torch.randn(s, generator=generator).to(ELEMENTS[element]) for s in ((64, k), (k, n)))
    stored_a = a.T.contiguous() if left == "transposed" else a
    stored_b = b.T.contiguous() if right == "transposed" else b
    maps = [two_dimensional(x, panel).for_emulator() for x in (stored_a, stored_b)]
    expected = 2 * a.double() @ b.double()
    for seed in range(6):
        c = nan(64, n)
        values = b"".join(maps) + struct.pack("<QQ", a.data_ptr(), c.data_ptr())
        shared_bytes = (
            2 * 1024
            + 8
            + sum(
                -(-columns // panel) * panel * rows * 2 for rows, columns in (stored_a.shape, stored_b.shape)
            )
        )
        kernels.launch(
            "product",
            (1, 1, 1),
            (128, 1, 1),
            shared_bytes,
            values.ljust(384, b"\0"),
            schedule="random",
            seed=seed,
        )
        assert float((c.double() - expected).abs().max()) < 1e-4 * math.sqrt(k), seed
