"""Gradients on a GPU: public reports, and the sample with all kernels built in parallel at the start."""

import os
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fagen as fg
from edges import need, require_right
from fagen.compile import backward_of
from fagen.plan.planner import plan
from plans import attention_graph, problem
from public_gradients import *  # noqa: F403
from sampler import Case, build_all, check_gradients, differentiable, sample, with_few_queries

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

FAMILIES = ("simt", "sm80", "sm90")
SAMPLES = {family: differentiable(sample(family), family) for family in FAMILIES}
CASES = [(f, case) for f, cases in SAMPLES.items() for case in (*cases, *with_few_queries(cases, 4))]


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture
def repeats() -> int:
    return 1000


@pytest.fixture(scope="module", autouse=True)
def _built(request: pytest.FixtureRequest) -> None:
    """Build what the selected tests of the sample run."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # others build at the same time, each what it runs
    wanted: dict[str, list[Case]] = defaultdict(list)
    for item in request.session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and "case" in parameters:
            wanted[parameters["family"]].append(parameters["case"])
    for family, cases in wanted.items():
        build_all(cases, family, workers=os.cpu_count() or 1, backward=True)


@pytest.mark.parametrize(
    ("family", "case"), [pytest.param(family, case, id=f"{family}-{case}") for family, case in CASES]
)
def test_the_gradients_of_the_sample_are_right(family: str, case: Case) -> None:
    need("cuda", family)
    check_gradients(case, "cuda", family)


@pytest.fixture(params=["simt", "sm80", "sm90"])
def family(request: pytest.FixtureRequest) -> str:
    need("cuda", request.param)
    return str(request.param)


@pytest.mark.parametrize("everything", [False, True], ids=["alone", "everything"])
def test_b35_bits_are_equal_while_the_gpu_is_busy(family: str, everything: bool) -> None:
    """Gradients of q, k and v, and of whatever else has one: slopes, a temperature, a gathered table, biases
    and a sink."""
    wanted = [torch.randn(2, 8, 1024, 128, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    q, k, v = wanted
    parts: dict[str, Any] = {"mask": fg.causal(), "family": family, "deterministic": True}
    if everything:
        slopes, temperature, table, bias, sink = (
            torch.rand(shape, device="cuda").add_(0.1).requires_grad_()
            for shape in ((8,), (), (8, 63), (1, 8, 1, 1024), (8,))
        )
        wanted += [slopes, temperature, table, bias, sink]
        score = [fg.alibi(slopes), fg.temperature(temperature), fg.relative_bias(table)]
        parts |= {"score": score, "bias": bias, "sink": sink, "dropout": 0.1}
    out = fg.attention(q, k, v, **parts)
    incoming = torch.randn_like(out)
    first = torch.autograd.grad(out, wanted, incoming, retain_graph=True)
    other, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for number in range(30):
        with torch.cuda.stream(other):
            for _ in range(1 + number % 5):
                x = x @ x.T / 2048
        again = torch.autograd.grad(out, wanted, incoming, retain_graph=True)
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "causal"])
def test_bits_of_what_blocks_add_in_turns_are_equal(masked: bool, kv_heads: int) -> None:
    need("cuda", "sm90")
    asked, _ = backward_of(problem(attention_graph(masked), storage="bf16"))
    roles = [kernel.roles for kernel in plan(replace(asked, deterministic=True)).kernels]
    assert any(each is not None and each.in_turns for each in roles)
    q, k, v = learned(2, 8, 4096, 64), learned(2, kv_heads, 4096, 64), learned(2, kv_heads, 4096, 64, seed=2)
    out = fg.attention(q, k, v, mask=fg.causal() if masked else None, deterministic=True)
    incoming = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), incoming, retain_graph=True)
    for _ in range(30):
        again = torch.autograd.grad(out, (q, k, v), incoming, retain_graph=True)
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("length", [33, 128])
def test_b35_bits_of_a_thousand_short_backwards_are_equal(family: str, length: int) -> None:
    q, k, v = (torch.randn(1, 2, length, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    out = fg.attention(q, k, v, mask=fg.causal(), family=family, deterministic=True)
    incoming = torch.randn_like(out)
    first = torch.autograd.grad(out, (k, v), incoming, retain_graph=True)
    differ = torch.zeros((), device="cuda")
    for _ in range(1000):
        again = torch.autograd.grad(out, (k, v), incoming, retain_graph=True)
        for one, other in zip(first, again, strict=True):
            differ += (one != other).sum()
    assert int(differ) == 0


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bits_of_a_million_short_works_are_equal(head_dim: int) -> None:
    """Some race shows in one work of a million: a block has fifteen of them here, of a tile or two."""
    need("cuda", "sm90")
    q, k, v = (
        torch.randn(60, 32, 128, head_dim, device="cuda").bfloat16().requires_grad_() for _ in range(3)
    )
    out = fg.attention(q, k, v, family="sm90")
    incoming = torch.randn_like(out)
    first = torch.autograd.grad(out, (k, v), incoming, retain_graph=True)
    differ = torch.zeros((), device="cuda")
    for _ in range(600):
        again = torch.autograd.grad(out, (k, v), incoming, retain_graph=True)
        for one, other in zip(first, again, strict=True):
            differ += (one != other).sum()
    assert int(differ) == 0


def test_b57_backward_is_the_first_work_of_its_thread() -> None:
    q, k, v = (torch.randn(1, 2, 70, 16, device="cuda", requires_grad=True) for _ in range(3))
    expected = torch.autograd.grad(fg.attention(q, k, v).sum(), (q, k, v))
    found: list[tuple[torch.Tensor, ...]] = []

    def work() -> None:
        found.append(torch.autograd.grad(fg.attention(q, k, v).sum(), (q, k, v)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 4
    assert all(all(map(torch.equal, expected, each)) for each in found)


def learned(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_()


def require_right_gradients(given: list[torch.Tensor], **parts: Any) -> None:
    """Of a random incoming gradient."""
    out = fg.attention(*given, **parts)
    incoming = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    found = torch.autograd.grad(out, given, incoming)
    assert [each.shape for each in found] == [each.shape for each in given]
    require_right(given, found, [incoming], **parts)


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "dtype"),
    [(192, 128, torch.bfloat16), (256, 256, torch.float32), (512, 512, torch.bfloat16)],
)
def test_b12_gradients_of_a_large_head_dim(head_dim: int, v_head_dim: int, dtype: torch.dtype) -> None:
    dims = (head_dim, head_dim, v_head_dim)
    given = [learned(1, 2, 512, d, dtype=dtype, seed=i) for i, d in enumerate(dims)]
    require_right_gradients(given, mask=fg.causal())


@pytest.mark.parametrize("head_dim", [1, 8, 40, 63, 72, 80, 96, 112, 160, 192, 256])
def test_b13_gradients_of_head_dims_that_are_no_powers_of_two(head_dim: int) -> None:
    given = [learned(2, 2, 129, head_dim, dtype=torch.float16, seed=i) for i in range(3)]
    require_right_gradients(given, mask=fg.causal())


@pytest.mark.parametrize("head_dim", [16, 128])
def test_b16_incoming_gradients_of_16_bits_may_have_any_strides(family: str, head_dim: int) -> None:
    given = [learned(2, 4, 70, head_dim, seed=i) for i in range(3)]
    out = fg.attention(*given, mask=fg.causal(), family=family)
    dense = learned(2, 4, 70, head_dim, seed=3).detach()
    one = torch.ones((), device="cuda", dtype=torch.bfloat16)
    for incoming in (
        dense.transpose(1, 3).contiguous().transpose(1, 3),
        dense.repeat_interleave(2, dim=-1)[..., ::2],
        dense[:, :, :, :1].expand_as(dense),
        one.expand_as(dense),
    ):
        found = torch.autograd.grad(out, given, incoming, retain_graph=True)
        require_right(given, found, [incoming], mask=fg.causal())


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_a_gradient_that_is_expanded_costs_no_better_kernel(family: str) -> None:
    """That of a sum has the same bits as one that lies in memory as a whole: the same kernels read both."""
    need("cuda", family)
    given = [learned(2, 4, 70, 64, seed=i) for i in range(3)]
    out = fg.attention(*given, mask=fg.causal(), family=family, deterministic=True)
    found = torch.autograd.grad(out.sum(), given, retain_graph=True)
    expected = torch.autograd.grad(out, given, torch.ones_like(out))
    assert all(map(torch.equal, found, expected))


def test_b20_gradients_under_a_mask_of_more_than_2_to_the_31_pairs() -> None:
    length = 49_999
    given = [learned(1, 8, length, 64, seed=i) for i in range(3)]
    everything = torch.ones(length, length, dtype=torch.bool, device="cuda")
    incoming = torch.randn(1, 8, length, 64, device="cuda").bfloat16()
    plain = torch.autograd.grad(fg.attention(*given), given, incoming)
    masked = torch.autograd.grad(fg.attention(*given, mask=fg.capture(everything, "q kv")), given, incoming)
    for one, other in zip(plain, masked, strict=True):  # 2 ulp each
        assert float((one - other).abs().max()) <= 4 * 2**-8 * float(one.abs().max())


@pytest.mark.parametrize(
    ("batch", "heads", "length", "dtype"),
    [
        (65_536, 8, 4, torch.float16),
        (1, 65_536, 10, torch.float32),
        (7, 10_000, 4, torch.float32),
    ],
    ids=["batch", "heads", "both"],
)
def test_b21_gradients_of_more_than_65535_of_anything(
    batch: int, heads: int, length: int, dtype: torch.dtype
) -> None:
    given = [learned(batch, heads, length, 16, dtype=dtype, seed=i) for i in range(3)]
    incoming = learned(batch, heads, length, 16, dtype=dtype, seed=3).detach()
    found = torch.autograd.grad(fg.attention(*given, mask=fg.causal()), given, incoming)
    for part in (slice(0, 1), slice(batch // 2, batch // 2 + 1), slice(batch - 1, batch)):
        some = [each.detach()[part, -64:].clone().requires_grad_() for each in given]
        require_right(some, [each[part, -64:] for each in found], [incoming[part, -64:]], mask=fg.causal())


@pytest.mark.parametrize("lengths", [None, [100, 700, 1, 223, 1024]])
def test_b35_bits_of_heads_that_share_keys_and_of_documents(family: str, lengths: list[int] | None) -> None:
    mask = fg.causal()
    if lengths is not None:
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
        mask = mask & fg.document(ids.expand(2, -1).int())
    q, k, v = learned(2, 8, 2048, 128), learned(2, 2, 2048, 128, seed=1), learned(2, 2, 2048, 128, seed=2)
    out = fg.attention(q, k, v, mask=mask, family=family, deterministic=True)
    incoming = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), incoming, retain_graph=True)
    for _ in range(30):
        again = torch.autograd.grad(out, (q, k, v), incoming, retain_graph=True)
        assert all(map(torch.equal, first, again))


def test_b39_the_gradient_of_a_table_read_by_the_sum_of_positions() -> None:
    given = [learned(1, 2, 256, 64, dtype=torch.float32, seed=i) for i in range(3)]
    table = learned(512, dtype=torch.float32, seed=3)

    def score(s: fg.Expr) -> fg.Expr:
        return s + fg.capture(table, "n")[fg.q + fg.kv]

    out = fg.attention(*given, score=score)
    found = torch.autograd.grad(out.sum(), [*given, table])
    assert found[3].shape == table.shape
    require_right(given, found, score=score)


def test_b45_a_replay_draws_anew_and_drops_the_same_in_both_directions() -> None:
    given = [learned(1, 64, 1, 16, dtype=torch.float32, seed=i) for i in range(3)]
    with torch.no_grad():
        for each in given:
            each.fill_(1.0)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        out = fg.attention(*given, dropout=0.3)
        return out, torch.autograd.grad(out.sum(), given)[2]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = both()
    seen = []
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, dv)  # each head is one coin
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("kind", ["side", "default"])
def test_b46_gradients_have_their_place_on_the_current_stream(kind: str) -> None:
    def filled(busy: bool) -> tuple[torch.Tensor, ...]:
        """Gradients of tensors that the current stream fills late."""
        given = [torch.zeros(1, 2, 70, 32, device="cuda").requires_grad_() for _ in range(3)]
        incoming = torch.zeros(1, 2, 70, 32, device="cuda")
        if busy:
            torch.cuda._sleep(20_000_000)
        with torch.no_grad():
            for i, each in enumerate((*given, incoming)):
                each.normal_(generator=torch.Generator("cuda").manual_seed(i))
        out = fg.attention(*given, mask=fg.causal(), deterministic=True)
        return torch.autograd.grad(out, given, incoming)

    expected = filled(False)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if kind == "side" else torch.cuda.default_stream()
    for _ in range(20):
        with torch.cuda.stream(stream):
            found = [each.clone() for each in filled(True)]
        stream.synchronize()
        assert all(map(torch.equal, found, expected))


def test_b60_many_threads_go_both_ways_from_cold(cold_cache: Path) -> None:
    configs = [
        {"mask": fg.sliding_window(43 + width), "dtype": dtype, "head_dim": dim}
        for width in (0, 1)
        for dtype in (torch.float32, torch.bfloat16)
        for dim in (16, 32)
    ]
    start = threading.Barrier(16)

    def one(which: int) -> tuple[torch.Tensor, ...]:
        made = configs[which]
        given = [learned(1, 2, 70, made["head_dim"], dtype=made["dtype"], seed=i) for i in range(3)]
        out = fg.attention(*given, mask=made["mask"], deterministic=True)
        return out.detach(), *torch.autograd.grad(out.sum(), given)

    def work(number: int) -> list[tuple[int, tuple[torch.Tensor, ...]]]:
        stream = torch.cuda.Stream()
        start.wait()
        with torch.cuda.stream(stream):
            found = [(which, one(which)) for turn in range(20) for which in [(number + turn * 5) % 8]]
        stream.synchronize()
        return found

    with ThreadPoolExecutor(16) as pool:
        everything = [each for found in pool.map(work, range(16)) for each in found]
    serial = [one(which) for which in range(8)]
    assert len(everything) == 320
    assert all(all(map(torch.equal, found, serial[which])) for which, found in everything)
