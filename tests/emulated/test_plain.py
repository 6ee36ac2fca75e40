"""A saved program's plain loops: compiled by g++ and held to the reference, operation by operation."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen as fg
from fagen.ir.check import bind_sizes
from fagen.ir.graph import Graph, Input
from fagen.ir.reference import evaluate
from fagen.lang.attention import attention as traced_attention
from fagen.plain import TYPES, axes_of, plain_text
from fagen.run.toolchain import find_cxx

pytestmark = pytest.mark.cxx

WIDE = {"float": torch.float64, "int": torch.int64, "bool": torch.bool}
NUMBER = {"float": ctypes.c_double, "int": ctypes.c_longlong}


def run(graph: Graph, values: Sequence[Any], folder: Path, seed: int = 0) -> list[Tensor]:
    """The outputs of ``plain::compute``, compiled with every warning an error."""
    sizes = bind_sizes(graph, [tuple(v.shape) if isinstance(v, Tensor) else None for v in values])
    names, declared, given, kept = [], [], [], []
    for argument, value in zip(graph.arguments, values, strict=True):
        kind = TYPES[argument.stored]
        names.append(f"a{argument.position}")
        if isinstance(argument, Input):
            shape = [sizes["hk"] * sizes["g"] if axis == "h" else sizes[axis] for axis in argument.layout]
            kept.append(value.to(WIDE[argument.stored]).expand(shape).contiguous())
            declared.append(f"const {kind}* {names[-1]}")
            given.append(ctypes.c_void_p(kept[-1].data_ptr()))
        else:
            declared.append(f"{kind} {names[-1]}")
            given.append(NUMBER[argument.stored](value))
    if graph.random:
        names.append("seed")
        declared.append("unsigned long long seed")
        given.append(ctypes.c_ulonglong(seed))
    outputs = []
    for i, output in enumerate(graph.outputs):
        shape = [sizes["hk"] * sizes["g"] if axis == "h" else sizes[axis] for axis in output.layout]
        outputs.append(torch.full(shape, torch.nan, dtype=torch.float64))
        names.append(f"out{i}")
        declared.append(f"double* {names[-1]}")
        given.append(ctypes.c_void_p(outputs[-1].data_ptr()))
    (folder / "plain.h").write_text(plain_text(graph))
    call = f"void go(const long long* l, {', '.join(declared)}) {{ plain::compute(l, {', '.join(names)}); }}"
    (folder / "go.cpp").write_text(f'#include "plain.h"\nextern "C" {call}\n')
    command = [str(find_cxx().path), "-std=c++17", "-O1", "-Wall", "-Wno-unused-variable", "-Werror"]
    subprocess.run([*command, "-shared", "-fPIC", "go.cpp", "-o", "go.so"], cwd=folder, check=True)
    lengths = (ctypes.c_longlong * len(sizes))(*(sizes[axis] for axis in axes_of(graph)))
    ctypes.CDLL(str(folder / "go.so")).go(lengths, *given)
    return outputs


def require_equal(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for out, ref in zip(outputs, expected, strict=True):
        assert out.shape == ref.shape
        torch.testing.assert_close(out, ref, rtol=1e-12, atol=1e-12)


def test_attention_with_everything(tmp_path: Path) -> None:
    make = torch.Generator().manual_seed(0)
    q, k, v, bias = (
        torch.randn(s, generator=make) for s in ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3), (4, 5, 1))
    )
    ids = torch.randint(0, 3, (2, 7), generator=make).sort(-1)[0]
    traced = traced_attention(
        mask=fg.causal() & fg.document(ids) | fg.sliding_window(2, 1),
        score=[fg.softcap(3.0), fg.alibi(), lambda s: fg.tanh(s // 0.3) + fg.maximum(s, 0) % 0.7],
        bias=bias,
        sink=torch.randn(4, generator=make),
        scale=0.3,
        dropout=0.3,
        return_lse=True,
    )
    values, seed = (q, k, v, *traced.captured), 2**63 + 12345
    require_equal(run(traced.graph, values, tmp_path, seed), evaluate(traced.graph, values, seed=seed))


Q, K, V = (fg.Tensor[axes] for axes in ("b h q d", "b hk kv d", "b hk kv dv"))
FLAGS = fg.Tensor["kv", bool]


@fg.program
def zoo(q: Q, k: K, v: V, n: fg.Scalar[int], flags: FLAGS, t: fg.Tensor[""]):
    """Every operation once."""
    s = fg.dot(q, k, over="d")
    x = fg.abs(s) + 0.1
    y = fg.exp(-x) + fg.exp2(-x) + fg.log(x) * fg.log2(x) + fg.sqrt(x) * fg.rsqrt(x) + fg.sin(s) * fg.cos(s)
    y = y + fg.gelu(s) - fg.relu(s) * fg.sigmoid(s) / (1.5 + t) + fg.tanh(s, exact=True) + fg.minimum(s, -0.5)
    place = ((fg.q - fg.kv) // 3 + (fg.kv - 2 * fg.q) % 4) * n + fg.maximum(fg.h, 2) - fg.abs(fg.q - fg.kv)
    keep = (flags | ~(fg.kv <= fg.q)) & (fg.kv != 3) & (s < 2.0) | (place == n)
    weight = fg.where(keep, y + place, 0.0)
    return fg.dot(weight / fg.sum(fg.abs(weight), over="kv"), v, over="kv"), fg.max(weight, over="kv")


def test_every_operation(tmp_path: Path) -> None:
    make = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(s, generator=make) for s in ((1, 4, 6, 3), (1, 2, 7, 3), (1, 2, 7, 2)))
    flags, t = torch.rand(7, generator=make) < 0.5, torch.tensor(0.25)
    values = (q, k, v, -3, flags, t)
    graph = zoo.trace().graph
    require_equal(run(graph, values, tmp_path), evaluate(graph, values))


def test_rows_without_a_key_and_no_keys_at_all(tmp_path: Path) -> None:
    traced = traced_attention(mask=fg.kv < fg.q - 1, return_lse=True)
    q, k, v = torch.randn(1, 1, 4, 2), torch.randn(1, 1, 3, 2), torch.randn(1, 1, 3, 2)
    for keys in (3, 0):
        values = (q, k[:, :, :keys], v[:, :, :keys])
        (tmp_path / str(keys)).mkdir()
        require_equal(run(traced.graph, values, tmp_path / str(keys)), evaluate(traced.graph, values))
