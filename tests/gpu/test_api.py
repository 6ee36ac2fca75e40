"""Calls on a GPU: what `api_cases` promises for every device, and what only a GPU has.

Streams, contexts, threads, captured graphs, several devices, grids, and the cost of a call.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen as fg
from api_cases import CASES, require_attention, require_right, tensors
from fagen.calls import dispatch
from fagen.errors import LaunchError
from fagen.lang.attention import attention as traced_attention
from fagen.run.launch import gpu
from fagen.run.toolchain import find_nvcc
from fagen.torch_op import draw_seed

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", CASES)
def test_on_cuda_tensors(name: str) -> None:
    CASES[name]("cuda")


def test_devices_agree() -> None:
    given = tensors("cuda", head_dim=32, v_head_dim=32)
    parts: dict[str, Any] = {"mask": fg.causal(), "score": fg.softcap(4.0), "return_lse": True}
    on_gpu = fg.attention(*given, **parts)
    on_cpu = fg.attention(*(tensor.cpu() for tensor in given), **parts)
    for x, y in zip(on_gpu, on_cpu, strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=2e-6, atol=2e-6)


# ------------------------------------------------------------------------------------------------- streams


def _slow(*filled: Tensor) -> None:
    """Keep the current stream busy for some milliseconds, then fill tensors."""
    torch.cuda._sleep(20_000_000)
    for i, tensor in enumerate(filled):
        tensor.normal_(generator=torch.Generator("cuda").manual_seed(i))


@pytest.mark.parametrize("kind", ["side", "default", "external"])
def test_b46_a_call_has_its_place_on_the_current_stream(kind: str) -> None:
    mask = fg.causal()
    expected_given = tensors("cuda")
    _slow(*expected_given)
    expected = fg.attention(*expected_given, mask=mask)
    torch.cuda.synchronize()
    if kind == "side":
        stream = torch.cuda.Stream()
    elif kind == "default":
        stream = torch.cuda.default_stream()
    else:
        held = torch.cuda.Stream(priority=-1)
        stream = torch.cuda.ExternalStream(held.cuda_stream)
    for _ in range(20):
        given = tensors("cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            before = torch.cuda.current_stream()
            _slow(*given)
            out = fg.attention(*given, mask=mask)
            copy = out.clone()
            out.zero_()
            assert torch.cuda.current_stream() == before
        stream.synchronize()
        assert torch.equal(copy, expected)


# ------------------------------------------------------------------------------------------ captured graphs


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_calls_are_captured_and_replayed(warm: bool) -> None:
    given = tensors("cuda")
    mask = fg.sliding_window(31 if warm else 37)  # the cold one loads its module while it is captured
    if warm:
        fg.attention(*given, mask=mask, return_lse=True)
        fg.attention(*given, mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fg.attention(*given, mask=mask, return_lse=True)
        twice = fg.attention(*given, mask=mask) + out
    for seed in range(3):
        for old, new in zip(given, tensors("cuda", seed=10 + seed), strict=True):
            old.copy_(new)
        graph.replay()
        require_right((out, lse), traced_attention(mask=mask, return_lse=True), given)
        assert torch.equal(twice, out + out)


def test_a_replayed_dropout_draws_anew() -> None:
    given = tensors("cuda")
    fg.attention(*given, dropout=0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fg.attention(*given, dropout=0.5)
    results = []
    for _ in range(2):
        graph.replay()
        results.append(out.clone())
    assert not torch.equal(*results)
    torch.cuda.manual_seed(3)
    graph.replay()
    first = out.clone()
    torch.cuda.manual_seed(3)
    graph.replay()
    assert torch.equal(out, first)
    torch.cuda.manual_seed(3)
    eager = fg.attention(*given, dropout=0.5)
    torch.cuda.manual_seed(3)
    seed = int(draw_seed(given[0].device))
    require_right(eager, traced_attention(dropout=0.5), given, seed)


# ------------------------------------------------------------------------------------------------- threads


def test_b57_a_thread_whose_first_work_this_is() -> None:
    given = tensors("cuda")
    expected = fg.attention(*given, mask=fg.causal())
    results: list[Tensor] = []
    worker = threading.Thread(target=lambda: results.append(fg.attention(*given, mask=fg.causal())))
    worker.start()
    worker.join()
    assert torch.equal(results[0], expected)

    class Inside(torch.autograd.Function):  # autograd runs backward on a thread of its own
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            results.append(fg.attention(*given, mask=fg.causal()))
            results.append(
                fg.attention(*given, mask=fg.causal() & fg.sliding_window(13))
            )  # never built before
            return gradient

    x = torch.zeros(2, device="cuda", requires_grad=True)
    Inside.apply(x).sum().backward()
    assert torch.equal(results[1], expected)
    require_right(results[2], traced_attention(mask=fg.causal() & fg.sliding_window(13)), given)


def test_b57_in_a_process_that_has_done_nothing_else() -> None:
    code = """
import threading, torch, fagen as fg
from concurrent.futures import ThreadPoolExecutor
torch.manual_seed(0)
q = torch.randn(1, 2, 40, 16)
def call(i):
    x = q.cuda()
    return fg.attention(x, x, x, mask=fg.causal()).cpu()
with ThreadPoolExecutor(4) as pool:
    results = list(pool.map(call, range(4)))
assert all(torch.equal(results[0], each) for each in results)
print("right", torch.cuda.current_device())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "right 0\n"), done.stderr
    assert "PyCUDA" not in done.stderr, done.stderr  # nothing was left on a stack, nothing torn down late


def test_b60_many_threads_and_streams_from_cold(cold_cache: Path) -> None:
    configs = [
        {"mask": fg.sliding_window(41 + width), "dtype": dtype, "head_dim": dim}
        for width in (0, 1)
        for dtype in (torch.float32, torch.bfloat16)
        for dim in (16, 32)
    ]
    start = threading.Barrier(16)

    def one(config: dict[str, Any], seed: int) -> Tensor:
        given = tensors("cuda", dtype=config["dtype"], head_dim=config["head_dim"], seed=seed)
        return fg.attention(*given, mask=config["mask"])

    def work(number: int) -> list[tuple[int, Tensor]]:
        stream = torch.cuda.Stream()
        start.wait()
        results = []
        with torch.cuda.stream(stream):
            if number == 3:
                with pytest.raises(TypeError, match="q is None"):
                    fg.attention(None, None, None)
            for turn in range(200):
                which = (number + turn * 5) % len(configs)
                results.append((which, one(configs[which], which)))
        stream.synchronize()
        return results

    with ThreadPoolExecutor(16) as pool:
        everything = [result for results in pool.map(work, range(16)) for result in results]
    serial = [one(config, number) for number, config in enumerate(configs)]
    assert len(everything) == 3200
    assert all(torch.equal(out, serial[which]) for which, out in everything)


# ------------------------------------------------------------------------------------------------- devices


@pytest.fixture
def second_gpu() -> str:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU: torch sees one")
    return "cuda:1"


def test_b47_tensors_on_a_device_that_is_not_current(second_gpu: str) -> None:
    expected = require_attention(tensors("cuda:0"), mask=fg.causal())
    for device in (second_gpu, "cuda:0", second_gpu):
        out = require_attention(tensors(device), mask=fg.causal())
        assert out.device == torch.device(device)
        assert torch.equal(out.cpu(), expected.cpu())
        assert torch.cuda.current_device() == 0
        with torch.cuda.stream(torch.cuda.Stream(second_gpu)):
            require_attention(tensors(device), mask=fg.causal())
        assert torch.cuda.current_device() == 0


def test_b47_tensors_on_two_devices(second_gpu: str) -> None:
    q, k, v = tensors("cuda:0")
    with pytest.raises(ValueError, match="different devices: q cuda:0, k cuda:1, v cuda:0; move them to one"):
        fg.attention(q, k.to(second_gpu), v)


def test_tensors_on_a_gpu_and_on_the_cpu() -> None:
    q, k, v = tensors("cuda")
    with pytest.raises(ValueError, match="different devices: q cuda:0, k cpu, v cuda:0"):
        fg.attention(q, k.cpu(), v)


# ------------------------------------------------------------------------------------------ grids, launches


@pytest.mark.parametrize(
    ("batch", "q_heads", "q_len", "kv_len", "head_dim", "dtype"),
    [
        (65_536, 8, 4, 4, 64, torch.float16),
        (1, 65_536, 10, 10, 16, torch.float32),
        (7, 10_000, 3, 5, 16, torch.float32),
    ],
    ids=["batch", "heads", "both"],
)
def test_b21_more_than_65535_of_anything(
    batch: int, q_heads: int, q_len: int, kv_len: int, head_dim: int, dtype: torch.dtype
) -> None:
    make = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(batch, q_heads, length, head_dim, generator=make, device="cuda").to(dtype)
        for length in (q_len, kv_len, kv_len)
    )
    out = fg.attention(q, k, v, mask=fg.causal())
    for b in {0, batch // 2, batch - 1}:
        heads = slice(None) if batch > 1 else [0, 1, q_heads // 2, q_heads - 1]
        given = tuple(x[b : b + 1, heads][:, -64:] for x in (q, k, v))
        expected = fg.attention(*given, mask=fg.causal(), family="reference")
        step = max(4 * torch.finfo(dtype).eps, 4e-6)
        torch.testing.assert_close(out[b : b + 1, heads][:, -64:], expected, rtol=step, atol=step)


def test_an_invalid_launch_is_an_error_and_not_a_result() -> None:
    given = tensors("cuda")
    fg.attention(*given)
    run = next(
        entry.run for entry in reversed(dispatch._entries.values()) if isinstance(entry.run, dispatch.OnGpu)
    )
    function, grid, _, shared_bytes = run.launches[0]
    params = run.pack([*given, *given, *given], given)
    with pytest.raises(LaunchError, match="cuda:0 refused a launch"):
        gpu(0).launch([(function, grid, (2048,), shared_bytes)], params, 0)
    with pytest.raises(LaunchError, match="cuda:0 refused a launch"):
        gpu(0).launch([(function, grid, (32,), 1 << 20)], params, 0)
    require_attention(given)
    with pytest.raises(LaunchError, match="cuda:0 does not load nothing"):
        gpu(0).functions("no image", b"nothing of a cubin", {"nothing": 0})
    require_attention(given)


def _arch() -> str:
    return f"sm_{''.join(map(str, torch.cuda.get_device_capability()))}"


def test_memory_of_a_call_is_its_outputs() -> None:
    q, k, v = (torch.randn(1, 2, 4096, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    fg.attention(q, k, v, mask=fg.causal())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = fg.attention(q, k, v, mask=fg.causal())
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + 4096


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_saved_kernel_is_right_by_its_own_check(dtype: str, tmp_path: Path) -> None:
    ids = torch.arange(64, dtype=torch.int64) // 9
    kernel = fg.compile(
        mask=fg.causal(),
        score=[fg.softcap(3.0), lambda s: s + 0.1 * fg.capture(ids, "n")[fg.kv]],
        dropout=0.2,
        return_lse=True,
        bias=fg.Tensor["h q kv"],
        head_dim=40,
        v_head_dim=72,
        dtype=dtype,
        arch=_arch(),
    )
    _require_right(kernel, tmp_path, [], ["q_len=1", "kv_len=1"], ["q_len=65", "kv_len=0", "batch=1"])


def test_a_saved_kernel_of_gradients_is_right_by_its_own_check(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"mask": fg.causal(), "head_dim": 64, "dtype": "bf16", "arch": _arch()}
    kernel = fg.compile(direction="backward", **asked)
    _require_right(kernel, tmp_path, [], ["q_len=65", "kv_len=33", "batch=1"])


def _require_right(kernel: fg.Kernel, tmp_path: Path, *runs: list[str]) -> None:
    """Save a kernel, build its program and run it at lengths."""
    kernel.save(tmp_path)
    text = (tmp_path / "main.cu").read_text(encoding="utf-8")
    (command,) = re.findall(r"^//   nvcc (.*) && \./check", text, re.MULTILINE)
    subprocess.run([find_nvcc().path, *command.split()], cwd=tmp_path, check=True, capture_output=True)
    for lengths in runs:
        done = subprocess.run(["./check", *lengths], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.endswith("right\n")
