"""The ladder's model: five rungs of one attention, three of a matrix product, at any length."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fagen.plan.plan import Storage
from fagen.study.explain import quantity
from fagen.study.ladder import (
    RUNGS,
    attention_ladder,
    attention_lengths,
    climb,
    matmul_ladder,
    matmul_lengths,
    rows,
    saving,
    sources,
)


@pytest.mark.parametrize("storage", ["fp32", "fp16"])
@pytest.mark.parametrize("arch", ["A100", "H200", "emulator"])
@pytest.mark.parametrize("n", [1000, 4096, 65_536])
def test_every_rung_moves_less(storage: Storage, arch: str, n: int) -> None:
    steps = climb(attention_ladder(storage, arch=arch), attention_lengths(n))
    assert [step.rung.number for step in steps] == [1, 2, 3, 4, 5]
    moved = [step.moved_bytes for step in steps]
    assert moved == sorted(moved, reverse=True)
    assert len(set(moved)) == 5
    predicted = [step.seconds for step in steps]
    assert predicted == sorted(predicted, reverse=True)
    assert [step.kernels for step in steps] == [11, 11, 11, 4, 1]
    scores = 8 * 4 * n * n
    assert steps[0].extra_bytes >= 2 * scores
    assert scores <= steps[3].extra_bytes < 1.1 * scores
    assert steps[4].extra_bytes == 0
    assert steps[4].memory_bytes < scores or n == 1000


@pytest.mark.parametrize("n", [1, 100, 1024, 4096, 10_001])
def test_rungs_of_a_matrix_product(n: int) -> None:
    steps = climb(matmul_ladder(n), matmul_lengths(n))
    assert [step.rung for step in steps] == list(RUNGS[:3])
    assert steps[0].moved_bytes == 4 * (2 * n**3 + n**2)
    assert all(step.flops == 2 * n**3 for step in steps)
    assert all(step.moved_bytes >= 12 * n * n for step in steps)
    if n >= 1000:
        moved = [step.moved_bytes for step in steps]
        assert moved == sorted(moved, reverse=True)


def test_known_figures_stand_in_the_table() -> None:
    element, shared, registers = climb(matmul_ladder(4096), matmul_lengths(4096))
    assert rows([element])[0]["bytes moved"] == "549.8 GB"
    assert element.moved_bytes - 4 * 4096**2 == 549_755_813_888
    assert "16.0 times fewer bytes moved" in saving(shared, element)
    assert "times fewer bytes moved" in saving(registers, shared)
    assert saving(element, None).startswith("Nothing yet: 1 kernel moves 549.8 GB")


def test_what_costs_more_is_told() -> None:
    steps = climb(matmul_ladder(64, "fp32"), matmul_lengths(64))
    assert saving(steps[2], steps[1]).startswith("1.9 times more bytes moved at this size: ")
    assert saving(steps[1], steps[1]).startswith("Nothing at this size: ")


def test_what_the_last_rung_saves() -> None:
    steps = climb(attention_ladder(), attention_lengths(4096))
    text = saving(steps[4], steps[3])
    assert "3 launches fewer" in text
    assert "less extra memory" in text
    assert text.endswith(f"1 kernel moves {quantity(steps[4].moved_bytes, 'B')}.")


def test_a_product_of_16_bit_matrices_is_of_16_bits() -> None:
    assert all(
        step.plan.outputs == ("fp16",) for step in climb(matmul_ladder(64, "fp16"), matmul_lengths(64))
    )


def test_files_say_what_changed_and_what_it_saves(generated: Callable[[str, str], None]) -> None:
    files = sources(climb(attention_ladder(), attention_lengths()))
    assert list(files) == ["1_separate.cu", "2_shared.cu", "3_registers.cu", "4_fused.cu", "5_one_pass.cu"]
    for number, (name, text) in enumerate(files.items(), 1):
        head = text.partition("#include")[0]
        assert head.startswith(f"// Rung {number} of 5. ")
        assert ("// Changed: " in head) == ("// Saves: " in head) == (number > 1)
        assert max(map(len, text.splitlines())) <= 110, name
        generated(f"ladder/{name}", text)
