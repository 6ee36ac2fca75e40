"""Calls on CPU tensors: what `api_cases` promises for every device, and what the emulator adds."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fagen as fg
from api_cases import CASES, require_right, tensors
from fagen.calls.prepared import emulation
from fagen.errors import EmulatorFinding
from fagen.lang.attention import attention as traced_attention
from fagen.run import emulate
from fagen.run.toolchain import Cxx

pytestmark = pytest.mark.cxx


@pytest.mark.parametrize("name", CASES)
def test_on_cpu_tensors(name: str) -> None:
    CASES[name]("cpu")


def test_a_mode_of_torch_sees_one_operator() -> None:
    given = tensors("cpu")
    plain = fg.attention(*given, mask=fg.causal())
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watching():
        out = fg.attention(*given, mask=fg.causal())
    assert torch.equal(out, plain)
    assert seen == ["fagen.call.default"]
    graph = make_fx(lambda q: fg.attention(q, *given[1:], mask=fg.causal()))(given[0])
    assert torch.equal(graph(given[0]), plain)


def test_a_default_device_is_not_that_of_the_tensors() -> None:
    given = tensors("cpu")
    plain = fg.attention(*given, mask=fg.causal())
    with torch.device("meta"):
        out = fg.attention(*given, mask=fg.causal())
    assert torch.equal(out, plain)


def test_an_edited_text_computes_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors("cpu")
    mask = fg.causal()
    kernel = fg.compile(mask=mask, head_dim=16, v_head_dim=24, dtype="fp32", arch="emulator")
    right = kernel(*given)
    text, count = re.subn(r"SCALE = 0\.25f", "SCALE = 0.5f", kernel.source)
    assert count == 1
    (tmp_path / f"{kernel.name}.cu").write_text(text)
    monkeypatch.setenv("FAGEN_OVERRIDE", str(tmp_path))
    wrong = kernel(*given)
    assert not torch.allclose(wrong, right, atol=1e-3)
    require_right(wrong, traced_attention(mask=mask, scale=0.5), given)


def test_schedules_and_checkers_reach_the_emulator() -> None:
    given = tensors("cpu", q_len=17, kv_len=40)
    parts = {"mask": fg.causal(), "bias": torch.randn(4, 17, 40), "dropout": 0.25, "return_lse": True}
    torch.manual_seed(1)
    expected = fg.attention(*given, **parts)
    for settings in (
        {"schedule": "backward"},
        {"schedule": "random", "seed": 3, "workers": 1},
        {"checker": "address", "workers": 1},
    ):
        torch.manual_seed(1)
        with emulation(**settings):
            found = fg.attention(*given, **parts)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), settings


def test_the_address_checker_knows_the_edges_of_a_sliced_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = torch.randn(2, 2, 60, 24)
    q, k, _ = tensors("cpu")
    given = (q, k, room[:, :, 3:52])
    kernel = fg.compile(head_dim=16, v_head_dim=24, dtype="fp32", arch="emulator")
    with emulation(checker="address", workers=1):
        require_right(kernel(*given), traced_attention(), given)
    text, count = re.subn(r"(V, kv_start, )p\.kv_len\b", r"\1p.kv_len + 9", kernel.source)
    assert count == 1
    (tmp_path / f"{kernel.name}.cu").write_text(text)
    monkeypatch.setenv("FAGEN_OVERRIDE", str(tmp_path))
    with emulation(checker="address", workers=1), pytest.raises(EmulatorFinding, match=r"line \d+: read of"):
        kernel(*given)


def test_what_no_thread_writes_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate.EmulatedKernels, "launch", lambda *args, **kwargs: None)
    assert fg.attention(*tensors("cpu")).isnan().all()


def test_b60_many_threads_call_cold_kernels_at_once(
    cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    real, lock = emulate._compile, threading.Lock()

    def counted(compiler: Cxx, folder: Path, arguments: list[str], *what: str) -> None:
        with lock:
            compiled.extend(what)
        real(compiler, folder, arguments, *what)

    monkeypatch.setattr(emulate, "_compile", counted)
    configs = [
        {"mask": fg.sliding_window(11 + width), "dtype": dtype}
        for width in (1, 2)
        for dtype in (torch.float32, torch.float16)
    ]
    start = threading.Barrier(8)

    def work(number: int) -> tuple[int, torch.Tensor]:
        config = configs[number % len(configs)]
        given = tensors("cpu", dtype=config["dtype"])
        start.wait()
        if number == 5:
            with pytest.raises(TypeError, match="q is 3"):
                fg.attention(3, *given[1:])
        return number % len(configs), fg.attention(*given, mask=config["mask"])

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    assert len(compiled) == len(set(compiled)) == len(configs)
    for number, out in results:
        config = configs[number]
        given = tensors("cpu", dtype=config["dtype"])
        assert torch.equal(out, fg.attention(*given, mask=config["mask"]))
        require_right(out, traced_attention(mask=config["mask"]), given)
