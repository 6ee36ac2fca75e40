"""Programs beyond one softmax in warps with roles, held to the reference; what they cannot run is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

import fagen as fg
from api_cases import require_right_gradients
from fagen.calls.prepared import emulation
from fagen.errors import PlanError
from fagen.ir.reference import compare, eager, evaluate
from fagen.lang.attention import attention
from fagen.torch_op import draw_seed
from schedules import require_same_bits

Queries, Keys, Values = fg.Tensor["b h q d"], fg.Tensor["b hk kv d"], fg.Tensor["b hk kv dv"]


def scores(q: object, k: object) -> object:
    s = fg.dot(q, k, over="d") * fg.rsqrt(fg.size("d"))
    return fg.where(fg.kv <= fg.q, s, -fg.inf)


@fg.program
def above_a_threshold(q: Queries, k: Keys, v: Values):
    weights = fg.softmax(scores(q, k), over="kv")
    return fg.dot(fg.relu(weights - 0.01), v, over="kv"), fg.logsumexp(scores(q, k), over="kv")


@fg.program
def never_zero(q: Queries, k: Keys, v: Values):
    """A masked pair has a weight, too: the second walk passes over nothing."""
    return fg.dot(fg.relu(fg.softmax(scores(q, k), over="kv") + 0.1), v, over="kv")


@fg.program
def statistics(q: Queries, k: Keys):
    s = scores(q, k)
    return fg.max(s, over="kv"), fg.logsumexp(s, over="kv")


@fg.program
def weights_and_sums(q: Queries, k: Keys, v: Values):
    p = fg.softmax(scores(q, k), over="kv")
    return p, fg.dot(p, v, over="kv")


@fg.program
def two_values(q: Queries, k: Keys, v: Values, w: fg.Tensor["b hk kv e"]):
    p = fg.softmax(scores(q, k), over="kv")
    return fg.dot(p, v, over="kv"), fg.dot(p, w, over="kv")


@fg.program
def two_products(q: Queries, k: Keys, v: Values, r: fg.Tensor["b h q r"], t: fg.Tensor["b kv r"]):
    s = fg.dot(q, k, over="d") + fg.dot(r, t, over="r")
    return fg.dot(fg.softmax(0.1 * s, over="kv"), v, over="kv")


@fg.program
def decayed(q: Queries, k: Keys, v: Values):
    return fg.dot(fg.dot(q, k, over="d") * fg.exp(-0.05 * fg.abs(fg.q - fg.kv)), v, over="kv")


@fg.program
def falling(q: Queries, k: Keys, v: Values):
    """Scores fall along the keys: the first tile comes first, of those that a window leaves."""
    s = fg.dot(q, k, over="d") + 0.5 * (fg.q - 2 * fg.kv)
    near = (fg.kv <= fg.q) & (fg.kv + 70 > fg.q)
    return fg.dot(fg.softmax(fg.where(near, s, -fg.inf), over="kv"), v, over="kv")


@fg.program
def capped(q: Queries, k: Keys, v: Values):
    """No exponent exceeds 8: no maximum is taken off, and weights reach exp(8), which fp16 holds."""
    s = 8.0 * fg.tanh(fg.dot(q, k, over="d") / 8.0)
    return fg.dot(fg.softmax(s, over="kv"), v, over="kv")


@fg.program
def computed_keys(q: Queries, k: Keys, v: Values):
    return fg.dot(fg.softmax(fg.dot(q, fg.tanh(k), over="d"), over="kv"), v, over="kv")


LENGTHS = {"b": 2, "h": 4, "hk": 2, "q": 150, "kv": 170, "d": 32, "dv": 24, "r": 16, "e": 8}
FEW_OF_MANY_TILES = {**LENGTHS, "b": 1, "h": 2, "hk": 1, "q": 70, "kv": 450}


def tensors(
    program: fg.Program, dtype: torch.dtype = torch.bfloat16, lengths: Mapping[str, int] = LENGTHS
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [[lengths[axis] for axis in argument.layout] for argument in program.trace().graph.arguments]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


of_each_kind = pytest.mark.parametrize(
    ("program", "dtype"),
    [
        *((each, torch.bfloat16) for each in (above_a_threshold, never_zero, statistics, weights_and_sums)),
        *((each, torch.bfloat16) for each in (two_values, two_products, decayed, falling)),
        (capped, torch.float16),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)


@pytest.mark.cxx
@of_each_kind
def test_programs_give_the_same_bits_under_fifty_schedules(program: fg.Program, dtype: torch.dtype) -> None:
    given = tensors(program, dtype, FEW_OF_MANY_TILES)
    run = program.options(family="sm90")

    def outputs() -> Sequence[torch.Tensor]:
        found = run(*given)
        return found if isinstance(found, tuple) else (found,)

    require_same_bits(outputs)


@pytest.mark.cxx
@of_each_kind
def test_programs_are_right(program: fg.Program, dtype: torch.dtype) -> None:
    given = tensors(program, dtype)
    with emulation(schedule="random", seed=5):
        found = program.options(family="sm90")(*given)
    graph = program.trace().graph
    exact, near = evaluate(graph, given), eager(graph, given, dtype)
    outputs = found if isinstance(found, tuple) else (found,)
    for out, ref, quick in zip(outputs, exact, near, strict=True):
        compare(out, ref, quick).require(program.name)


@pytest.mark.cxx
def test_tiles_far_apart_are_found() -> None:
    """A warp looks at 32 of them at once."""
    generator = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(1, 1, n, 16, generator=generator).bfloat16() for n in (70, 16000, 16000))
    ids = torch.ones(1, 16000, dtype=torch.int32)
    ids[0, 70:15900] = torch.arange(15830) % 7 + 2
    ids[0, 40:70] = 0
    with emulation(schedule="random", seed=2):
        out = fg.attention(q, k, v, mask=fg.document(ids), family="sm90")
    same = ids[0, :70, None] == ids[0]
    weights = (q.double() @ k.double().mT / 4).masked_fill(~same, -torch.inf).softmax(-1)
    assert (out.double() - weights @ v.double()).abs().max() < 0.02


@pytest.mark.cxx
@pytest.mark.parametrize("before", [0, 70])
def test_rows_find_their_places_in_sorted_tables(before: int) -> None:
    """Documents of one key and of hundreds, in two sequences; causal, with keys before the first query."""
    generator = torch.Generator().manual_seed(9)
    n = 330
    q = torch.randn(2, 2, n - before, 16, generator=generator).bfloat16()
    k, v = (torch.randn(2, 1, n, 16, generator=generator).bfloat16() for _ in range(2))
    lengths = torch.tensor([[1, 1, 200, 3, 64, 61], [90, 38, 2, 100, 99, 1]])
    ids = torch.stack([torch.arange(6).repeat_interleave(row) * 2 - 3 for row in lengths]).int()
    table = fg.capture(ids, "b s", sorted=True)
    same = table[fg.b, fg.q + before] == table[fg.b, fg.kv]
    with emulation(schedule="random", seed=3):
        out = fg.attention(q, k, v, mask=fg.causal() & same, family="sm90")
    allowed = (ids[:, before:, None] == ids[:, None]) & torch.ones(n, n).tril().bool()[before:]
    scores = q.double() @ k.double().mT / 4
    weights = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
    assert (out.double() - weights @ v.double()).abs().max() < 0.02


@pytest.mark.cxx
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_maxima_may_be_exceeded(dtype: torch.dtype) -> None:
    """By little, by so much that sums overflow, in a few rows of a warp, after rows without keys.

    A row of equal scores near 1.5e8 weighs them all the same: their product with log2(e) is too coarse.
    """
    generator = torch.Generator().manual_seed(11)
    q, k, v = (torch.randn(1, 1, n, 16, generator=generator).to(dtype) for n in (200, 900, 900))
    tile = torch.arange(900) // 100
    q[..., 0] = torch.tensor([1.0, -1.0, 0.0, 0.25]).repeat(50)
    k[..., 0] = torch.tensor([1600.0, 160.0, 150.0, 130.0, 80.0, 64.0, 40.0, 40.0, 0.0])[tile].to(dtype)
    q[..., 1], k[..., 1] = 0.0, 12352.0
    q[..., 3, :], q[..., 3, 1] = 0.0, 49152.0
    allowed = (torch.arange(200)[:, None] % 7 != 0) | (tile < 3)
    with emulation(schedule="random", seed=4):
        table = fg.capture(allowed[None, None], "b h q kv")
        mask = table[fg.b, fg.h, fg.q, fg.kv]
        out, lse = fg.attention(q, k, v, mask=mask, family="sm90", return_lse=True)
        plain = fg.attention(q, k, v, family="sm90")
    scores = q.double() @ k.double().mT / 4
    for found, exact in ((out, scores.masked_fill(~allowed, -torch.inf)), (plain, scores)):
        eager = exact.softmax(-1).to(dtype) @ v
        compare(found, exact.softmax(-1) @ v.double(), eager).require("rising maxima")
    error = lse / scores.masked_fill(~allowed, -torch.inf).logsumexp(-1) - 1
    assert error.abs().max() < 1e-5


HEAT = torch.tensor([1.5, -0.7, 0.3, -2.0])
PREFIX = torch.tensor([37, 70], dtype=torch.int32)


@pytest.mark.cxx
@pytest.mark.parametrize("name", ["heat", "prefix"])
def test_few_registers_keep_no_tests_of_columns(name: str) -> None:
    """Quotients by a table rise where products fall: they are masked, and not the products."""
    generator = torch.Generator().manual_seed(13)
    q, k, v = (
        torch.randn(2, h, n, 64, generator=generator).bfloat16() for h, n in ((4, 200), (2, 330), (2, 330))
    )
    parts = {"mask": fg.prefix_lm(PREFIX)}
    if name == "heat":
        parts = {"mask": fg.causal(), "score": fg.temperature(HEAT)}
    kernel = fg.compile(**parts, head_dim=64, dtype="bf16", arch="H100", return_lse=True)
    assert ("at >= end) x0[c] = -INFINITY" in kernel.source) == (name == "heat")
    assert "struct Column" not in kernel.source
    with emulation(schedule="random", seed=7):
        out, lse = kernel(q, k, v)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 8
    rows, columns = torch.arange(200)[:, None], torch.arange(330)
    allowed = (columns <= rows) | (columns < PREFIX[:, None, None, None])
    if name == "heat":
        scores, allowed = scores / HEAT.double()[:, None, None], columns <= rows + 130
    scores = scores.masked_fill(~allowed, -torch.inf)
    values = v.repeat_interleave(2, 1)
    compare(out, scores.softmax(-1) @ values.double(), scores.softmax(-1).bfloat16() @ values).require(name)
    assert (lse - scores.logsumexp(-1)).abs().max() < 1e-4


@pytest.mark.cxx
def test_places_of_works_are_used_again_in_order() -> None:
    """A block has more works than are announced at once: none is written while another may still be read."""
    generator = torch.Generator().manual_seed(14)
    q, k, v = (torch.randn(1, 40, n, 16, generator=generator).bfloat16() for n in (40, 70, 70))
    with emulation(checker="race", schedule="random", seed=8):
        out = fg.attention(q, k, v, family="sm90")
    weights = (q.double() @ k.double().mT / 4).softmax(-1)
    compare(out, weights @ v.double(), weights.bfloat16() @ v).require("many works")


@pytest.mark.cxx
def test_random_bits_serve_several_columns() -> None:
    generator = torch.Generator().manual_seed(12)
    given = [torch.randn(1, 1, n, 16, generator=generator).half() for n in (70, 200, 200)]
    traced = attention(mask=fg.causal(), dropout=0.4)
    torch.manual_seed(4)
    seed = int(draw_seed(torch.device("cpu")))
    torch.manual_seed(4)
    with emulation(schedule="random", seed=6):
        out = fg.attention(*given, mask=fg.causal(), dropout=0.4, family="sm90")
    (exact,) = evaluate(traced.graph, given, seed=seed)
    (near,) = eager(traced.graph, given, torch.float16, seed=seed)
    compare(out, exact, near).require("dropout")


@pytest.mark.cxx
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.bfloat16), (192, torch.float16)])
def test_gradients_of_dropout_are_fused(head_dim: int, dtype: torch.dtype) -> None:
    """Random bits serve pairs of rows of keys, also where each consumer makes its own of the same rows."""
    parts = {"mask": fg.causal(), "dropout": 0.4}
    asked = {"head_dim": head_dim, "dtype": dtype, "arch": "emulator", "family": "sm90"}
    kernels = fg.compile(direction="backward", **asked, **parts).plan.kernels
    assert [kernel.roles.divided for kernel in kernels if kernel.roles is not None] == [head_dim == 192]
    draw = torch.Generator().manual_seed(13)
    shapes = ((2, 70), (1, 150), (1, 150))  # heads that share keys have bits of their own
    given = [torch.randn(1, *shape, head_dim, generator=draw).to(dtype) for shape in shapes]
    torch.manual_seed(4)
    seed = int(draw_seed(torch.device("cpu")))
    torch.manual_seed(4)
    wanted = [each.requires_grad_() for each in given]
    with emulation(schedule="random", seed=6):
        out = fg.attention(*wanted, **parts, family="sm90")
        incoming = (torch.randn(out.shape, generator=draw).to(dtype),)
        found = torch.autograd.grad(out, wanted, incoming)
    require_right_gradients(attention(**parts), given, found, incoming, seed)


def test_operands_that_are_not_in_memory_are_refused() -> None:
    with pytest.raises(PlanError, match="not in memory as it is multiplied"):
        computed_keys.options(family="sm90")(*tensors(computed_keys))


def test_weights_that_fp16_may_not_hold_are_refused() -> None:
    with pytest.raises(PlanError, match="may be larger than it holds"):
        decayed.options(family="sm90")(*tensors(decayed, torch.float16))
