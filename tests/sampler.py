"""A seeded sample of attention calls that covers every pair of choices, and the check of one of them.

`sample` gives the cases of a family, the same in every process and on every device; `Case.draw` makes the
tensors and parts of one; `check` runs it through `fg.attention` and holds it to the reference.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen as fg
from fagen.calls.dispatch import problem_for
from fagen.calls.values import aligned, read
from fagen.compile import Compiled, compile_problem
from fagen.errors import PlanError
from fagen.ir.reference import compare, eager, evaluate, evaluate_nodes
from fagen.lang.attention import attention as traced_attention
from fagen.lang.expr import Expr
from fagen.lang.program import Options
from fagen.lang.trace import Traced
from fagen.torch_op import draw_seed
from masks import MASKS, tables_of

SEED = 20
LEAST = 300
LENGTHS = (0, 1, 2, 63, 64, 65, 127, 300)
LARGER = (257, 512, 1000, 2049)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NO_MASK = "none"
SEVERAL = 63
"""Keys of a row of which no weight is nearly 1."""
FEW = 4
"""Numbers of which the largest error is not left to luck."""
SCHEDULES = ("forward", "backward", "random")
"""Orders in which the emulator lets threads go on."""

# ------------------------------------------------------------------------------------- parts written by users


def _own_mask(q_len: int, kv_len: int, seed: int) -> Expr:
    """Every third key of the past and a table of pairs, but not the query's own position."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(7, 5, generator=generator, device="cpu") < 0.4
    pairs = fg.capture(table.to(torch.get_default_device()), "row column", name="pairs")
    past = (fg.kv < fg.q) & ((fg.q - fg.kv) % 3 == 1)
    return (past | pairs[fg.q % 7, fg.kv // 9]) & ~(fg.kv == fg.q)


def _own_score(random_tensor: Callable[..., Tensor]) -> Callable[[Expr], Expr]:
    """A wave along the distance with a strength for each head, and a bend of the score itself."""
    strength = fg.capture(random_tensor("H"), "h", name="strength")
    return lambda s: s + strength * fg.cos(0.1 * (fg.q - fg.kv)) + 0.25 * fg.relu(s - 1.0) * (fg.h % 2)


MASK_LEVELS = (NO_MASK, *MASKS, "own")
SCORES: Mapping[str, Callable[[Callable[..., Tensor]], Any]] = {
    "none": lambda _: None,
    "softcap": lambda _: fg.softcap(5.0),
    "exact softcap": lambda _: fg.softcap(5.0, exact=True),
    "alibi": lambda _: fg.alibi(),
    "alibi of slopes": lambda make: fg.alibi(0.2 * make("H").abs()),
    "relative bias": lambda make: fg.relative_bias(make("H", 2 * 50 - 1)),
    "temperature": lambda _: fg.temperature(1.7),
    "temperature of all": lambda make: fg.temperature(0.5 + make().abs()),
    "temperature of heads": lambda make: fg.temperature(0.5 + make("H").abs()),
    "own": _own_score,
    "softcap, then alibi": lambda _: [fg.softcap(8.0), fg.alibi()],
}
BIASES: Mapping[str, tuple[str, ...] | None] = {
    "none": None,
    "b h q kv": ("B", "H", "Sq", "Skv"),
    "q kv": ("Sq", "Skv"),
    "1 h 1 kv": ("1", "H", "1", "Skv"),
    "b 1 q 1": ("B", "1", "Sq", "1"),
    "b 1 1 kv": ("B", "1", "1", "Skv"),
}
STRIDES = ("contiguous", "transposed", "inner", "sliced", "packed", "expanded")
SCALES = {"default": None, "0": 0.0, "negative": -0.2}

FACTORS: Mapping[str, Sequence[Any]] = {
    "mask": MASK_LEVELS,
    "score": tuple(SCORES),
    "head_dim": (1, 16, 40, 64, 72, 80, 96, 128, 192, 256),
    "v_head_dim": ("same", "different"),
    "q_len": LENGTHS,
    "kv_len": LENGTHS,
    "bias": tuple(BIASES),
    "strides": STRIDES,
    "group": (1, 3, 8),
    "dtype": tuple(DTYPES),
    "scale": tuple(SCALES),
    "shift": (0, 120, -120),
    "return_lse": (False, True),
    "sink": (False, True),
    "dropout": (0.0, 0.3),
    "layout": ("bhsd", "bshd"),
    "strange": (False, True),
}
"""The choices of a case. ``strange`` puts NaN and inf where the mask keeps them from every output."""

_OTHER_HEAD_DIM = {1: 8, 16: 24, 40: 64, 64: 32, 72: 128, 80: 72, 96: 16, 128: 96, 192: 128, 256: 64}


# -------------------------------------------------------------------------------------------------- one case


@dataclass(frozen=True)
class Call:
    """A case's tensors and parts, and what they mean."""

    tensors: tuple[Tensor, Tensor, Tensor]
    parts: dict[str, Any]
    traced: Traced

    @property
    def values(self) -> tuple[Any, ...]:
        """A value for each argument of the graph."""
        return (*self.tensors, *self.traced.captured)


@dataclass(frozen=True)
class Case:
    """One call of `fg.attention`, by its choices and a seed for everything else."""

    number: int
    mask: str
    score: str
    head_dim: int
    v_head_dim: str
    q_len: int
    kv_len: int
    bias: str
    strides: str
    group: int
    dtype: str
    scale: str
    shift: int
    return_lse: bool
    sink: bool
    dropout: float
    layout: str
    strange: bool

    @property
    def seed(self) -> int:
        return 1000 * SEED + self.number

    @property
    def deterministic(self) -> bool:
        """Whether its gradients are sums in a fixed order."""
        return self.number % 2 == 1

    def __str__(self) -> str:
        """A name that says what is special about the case, and its number."""
        dims = f"d{self.head_dim}" + ("" if self.v_head_dim == "same" else f"v{self._v_head_dim}")
        said = [
            f"{self.number:03d}",
            self.mask,
            self.score if self.score != "none" else "",
            f"{self.q_len}x{self.kv_len}",
            dims,
            f"g{self.group}",
            self.dtype,
            self.layout,
            self.strides,
            f"bias {self.bias}" if self.bias != "none" else "",
            f"scale {self.scale}" if self.scale != "default" else "",
            f"shift{self.shift:+}" if self.shift else "",
            *(name for name in ("return_lse", "sink", "dropout", "strange") if getattr(self, name)),
        ]
        return "-".join(re.sub(r"\W+", "_", part).strip("_") for part in said if part)

    @property
    def _v_head_dim(self) -> int:
        return self.head_dim if self.v_head_dim == "same" else _OTHER_HEAD_DIM[self.head_dim]

    def draw(self, device: torch.device | str, family: str) -> Call:
        """The call: the same values on every device."""
        rng, generator = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        batch, kv_heads = rng.choice((1, 2)), 1 if self.group == 8 else rng.choice((1, 2))
        q_heads = kv_heads * self.group
        lengths = {"1": 1, "B": batch, "H": q_heads, "Sq": self.q_len, "Skv": self.kv_len}
        dtype = DTYPES[self.dtype]

        def make(*shape: str | int, dtype: torch.dtype = torch.float32) -> Tensor:
            sizes = [lengths[extent] if isinstance(extent, str) else extent for extent in shape]
            return torch.randn(sizes, generator=generator).to(dtype).to(device)

        scale = SCALES[self.scale]
        q, k, v = self._products(make, batch, q_heads, kv_heads)
        if self.shift:
            _shift(q, k, self.shift, self.head_dim**-0.5 if scale is None else scale)
        axes = BIASES[self.bias]
        bias = None if axes is None else make(*axes, dtype=rng.choice((dtype, torch.float32)))
        with torch.device(device):
            mask = self._mask()
            if self.strange:
                kept = [rng.randint(self.kv_len // 2, self.kv_len) for _ in range(batch)]
                padding = fg.padding(torch.tensor(kept, dtype=torch.int32))
                mask = padding if mask is None else mask & padding
        if self.strange:
            assert mask is not None
            value = rng.choice((torch.nan, torch.inf, -torch.inf))
            _spoil(mask, q, k, v if family == "simt" else None, bias, value, self.strides == "expanded")
        sink = make("H") + self.shift * rng.choice((0, 1)) if self.sink else None
        order = (0, 1, 2, 3) if self.layout == "bhsd" else (0, 2, 1, 3)
        laid = [lay_out(tensor.permute(order), self.strides) for tensor in (q, k, v)]
        parts = {
            "mask": mask,
            "score": SCORES[self.score](make),
            "scale": scale,
            "bias": bias,
            "sink": sink,
            "dropout": self.dropout,
            "return_lse": self.return_lse,
            "layout": self.layout,
        }
        return Call((laid[0], laid[1], laid[2]), parts, traced_attention(**parts))

    def _products(
        self, make: Callable[..., Tensor], batch: int, q_heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as (b, h, q, d), (b, hk, kv, d), (b, hk, kv, dv)."""
        dtype = DTYPES[self.dtype]
        q = make(batch, q_heads, "Sq", self.head_dim, dtype=dtype)
        k = make(batch, kv_heads, "Skv", self.head_dim, dtype=dtype)
        v = make(batch, kv_heads, "Skv", self._v_head_dim, dtype=dtype)
        if self.strides == "expanded":
            q, k, v = (tensor[:1].expand_as(tensor).clone() for tensor in (q, k, v))
        return q, k, v

    def _mask(self) -> Expr | None:
        if self.mask == NO_MASK:
            return None
        if self.mask == "own":
            return _own_mask(self.q_len, self.kv_len, self.seed)
        return MASKS[self.mask].build(self.q_len, self.kv_len, self.seed)


def _shift(q: Tensor, k: Tensor, by: float, scale: float) -> None:
    """Move every score by about ``by``: one product of the sum is nearly the same for all pairs."""
    if not scale:
        return
    large = 8.0
    if q.shape[-1] == 1:
        q.mul_(0.1).add_(large)
        k.mul_(0.1).add_(by / scale / large)
    else:
        q[..., 0] = large
        k[..., 0] = by / scale / large


def _spoil(
    mask: Expr, q: Tensor, k: Tensor, v: Tensor | None, bias: Tensor | None, value: float, expanded: bool
) -> None:
    """Put ``value`` wherever only masked pairs read it; in ``expanded`` tensors, those of no batch entry."""
    batch, q_heads, q_len, _ = q.shape
    kv_len = k.shape[2]
    sizes = {"b": batch, "hk": 1, "g": 1, "q": q_len, "kv": kv_len}
    (allowed,) = evaluate_nodes([mask.node], tables_of(mask), sizes, device=q.device)
    place = [mask.node.axes.index(axis) if axis in mask.node.axes else None for axis in ("b", "q", "kv")]
    for d in range(3):
        if place[d] is None:
            allowed = allowed.unsqueeze(-1)
            place[d] = allowed.dim() - 1
    allowed = allowed.permute([d for d in place if d is not None]).expand(batch, q_len, kv_len)
    read = allowed.any(0, keepdim=True) if expanded else allowed
    q.masked_fill_(~read.any(2)[:, None, :, None], value)
    for tensor in (k, v):
        if tensor is not None:
            tensor.masked_fill_(~read.any(1)[:, None, :, None], value)
    if bias is not None:
        used = allowed[:, None].expand(batch, q_heads, q_len, kv_len)
        shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
        for d, extent in enumerate(shape):
            if extent == 1:
                used = used.any(d, keepdim=True)
        bias.masked_fill_(~used.reshape(bias.shape), value)


def lay_out(tensor: Tensor, how: str) -> Tensor:
    """The same values with other strides, NaN in whatever lies between them.

    transposed  heads and positions, dimensions 1 and 2, exchanged in memory
    inner       the head dim is the slowest
    sliced      every second position and feature of a larger tensor, from an odd one on
    packed      one of several tensors that alternate in memory, features beside one another
    expanded    one batch entry for all of them
    """
    if how == "contiguous":
        return tensor.contiguous()
    if how == "transposed":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "inner":
        return tensor.transpose(1, 3).contiguous().transpose(1, 3)
    if how == "expanded":
        return tensor[:1].contiguous().expand_as(tensor)
    b, x, y, d = tensor.shape
    if how == "sliced":
        whole = tensor.new_full((b, x, 2 * y + 1, 2 * d + 1), torch.nan)
        place = whole[:, :, 1::2, 1::2]
    else:
        whole = tensor.new_full((b, x, 3, y, d + 8), torch.nan)
        place = whole[:, :, 1, :, 8:]
    place.copy_(tensor)
    return place


# ------------------------------------------------------------------------------------------------ the sample


def _factors(family: str) -> dict[str, Sequence[Any]]:
    """The choices there are for a family: tensor cores take 16-bit operands."""
    return dict(FACTORS) if family == "simt" else {**FACTORS, "dtype": ("fp16", "bf16")}


@lru_cache
def sample(family: str) -> tuple[Case, ...]:
    """The cases of a family: each pair of levels of two factors is in one of them."""
    factors = _factors(family)
    rows = covering(list(factors.values()), LEAST, random.Random(f"{SEED} {family}"))
    return tuple(Case(number, **dict(zip(factors, row, strict=True))) for number, row in enumerate(rows))


def of_the_file(mask: str, family: str) -> Case:
    """A mask at the lengths of its file, with nothing else; tables are drawn anew for these, too."""
    file = MASKS[mask]
    plain = {name: levels[0] for name, levels in _factors(family).items()}
    plain |= {"mask": mask, "head_dim": 64, "q_len": file.q_len, "kv_len": file.kv_len, "return_lse": True}
    return Case(list(MASKS).index(mask), **plain)


def longer(cases: Sequence[Case], every: int) -> tuple[Case, ...]:
    """Some of the cases, at lengths that only a GPU is quick enough for."""
    rng = random.Random(SEED)
    return tuple(
        replace(case, q_len=rng.choice(LARGER), kv_len=rng.choice(LARGER)) for case in cases[::every]
    )


def covering(factors: Sequence[Sequence[Any]], least: int, rng: random.Random) -> list[tuple[Any, ...]]:
    """Rows with a level of each factor, so that any two levels of two factors meet in one of them.

    Greedy: each row starts from a pair that has not met, then takes for one factor after the other, in random
    order, the level that meets most levels of the row for the first time, the least used one among equals.
    """
    starts = [sum(len(levels) for levels in factors[:i]) for i in range(len(factors))]
    factor_of = [i for i, levels in enumerate(factors) for _ in levels]
    count = len(factor_of)
    apart = [[1 if factor_of[x] != factor_of[y] else 0 for y in range(count)] for x in range(count)]
    waiting = [(x, y) for x in range(count) for y in range(x) if apart[x][y]]
    rng.shuffle(waiting)
    used = [0] * count
    rows: list[tuple[Any, ...]] = []
    while True:
        while waiting and not apart[waiting[-1][0]][waiting[-1][1]]:
            waiting.pop()
        if not waiting and len(rows) >= least:
            return rows
        row: dict[int, int] = {}
        for level in waiting[-1] if waiting else ():
            row[factor_of[level]] = level
        others = [i for i in range(len(factors)) if i not in row]
        rng.shuffle(others)
        for i in others:
            levels = range(starts[i], starts[i] + len(factors[i]))
            row[i] = max(
                levels, key=lambda x: (sum(apart[x][y] for y in row.values()), -used[x], rng.random())
            )
        for x in row.values():
            used[x] += 1
            for y in row.values():
                apart[x][y] = 0
        rows.append(tuple(factors[i][row[i] - starts[i]] for i in range(len(factors))))


# ----------------------------------------------------------------------------------------------- the check


def compiled_for(call: Call, family: str) -> Compiled:
    """What `fg.attention` runs for a call."""
    values = read(call.traced.graph, call.values)
    return compile_problem(
        problem_for(values, Options(family=family), values.sizes()).read_as(aligned(values))
    )


def bulk_copied(tensors: Iterable[Tensor]) -> bool:
    """Whether 16-bit tensors have features side by side, and addresses and strides of whole 16 bytes."""
    for tensor in tensors:
        *others, (step, features) = zip(tensor.stride(), tensor.shape, strict=True)
        together = step == 1 or features == 1
        if not together or any(step % 8 for step, extent in others if extent != 1) or tensor.data_ptr() % 16:
            return False
    return True


def check(case: Case, device: torch.device | str, family: str) -> None:
    """Run a case and hold its plan to the family, its outputs to the reference."""
    call = case.draw(device, family)
    seed = _seeded(case, device)
    outputs = _run(case, call, family, lambda: fg.attention(*call.tensors, **call.parts, family=family))
    if outputs is None:
        return
    assert compiled_for(call, family).plan.family == family, repr(case)
    _require(case, call, outputs, seed)


def check_plan_of(case: Case, gpu: str, family: str) -> None:
    """The same on the emulator for the kernel that a GPU would get, compiled ahead of time."""
    call = case.draw("cpu", family)
    seed = _seeded(case, "cpu")
    q, _, v = call.tensors
    kernel = fg.compile(
        head_dim=q.shape[-1], v_head_dim=v.shape[-1], dtype=case.dtype, arch=gpu, family=family, **call.parts
    )
    assert kernel.plan.family == family, repr(case)
    outputs = _run(case, call, family, lambda: kernel(*call.tensors))
    if outputs is not None:
        _require(case, call, outputs, seed)


def _run(case: Case, call: Call, family: str, run: Callable[[], Any]) -> Any:
    """What a call gives; None where it has to be refused and is: bulk copies can't reach its tensors."""
    if family != "sm90" or bulk_copied(call.tensors):
        return run()
    if case.q_len:
        with pytest.raises(PlanError, match="no multiple of 16 bytes"):
            run()
    return None


def _seeded(case: Case, device: torch.device | str) -> int:
    """The seed that the next dropout on a device draws."""
    torch.manual_seed(case.seed)
    seed = int(draw_seed(torch.device(device)))
    torch.manual_seed(case.seed)
    return seed


def _require(case: Case, call: Call, outputs: Tensor | tuple[Tensor, ...], seed: int) -> None:
    """Hold outputs to the reference by the rule of tolerance."""
    about, dtype = f"seed {case.seed}, {case!r}", DTYPES[case.dtype]
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    assert [each.dtype for each in results] == [dtype, torch.float32][: 1 + case.return_lse], about
    exact = evaluate(call.traced.graph, call.values, seed=seed)
    near = eager(call.traced.graph, call.values, dtype, seed=seed)
    for name, out, ref, quick in zip(("out", "lse"), results, exact, near, strict=False):
        compare(out, ref, quick).require(f"{name} of {about}")


def check_gradients(case: Case, device: torch.device | str, family: str) -> None:
    """Run a case forward and backward, and hold the gradient of every floating-point tensor to autograd's.

    The gradient of a sink of one head is one number, and its error a draw, as that of torch's operations is:
    where a tensor has few, there are gradients for several incoming ones.
    """
    call = case.draw(device, family)
    about, dtype = f"seed {case.seed}, {case!r}", DTYPES[case.dtype]
    values = list(call.values)
    wanted = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()]
    for i in wanted:
        values[i].requires_grad_()
    asked = {**call.parts, "family": family, "deterministic": case.deterministic}
    seed = _seeded(case, device)
    outputs = _run(case, call, family, lambda: fg.attention(*call.tensors, **asked))
    if outputs is None:
        return
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    draw = torch.Generator().manual_seed(case.seed)
    runs = []
    for _ in range(-(-FEW // min(FEW, *(values[i].numel() for i in wanted)))):
        incoming = [torch.randn(each.shape, generator=draw).to(each) for each in results]
        found = torch.autograd.grad(results, [values[i] for i in wanted], incoming, retain_graph=True)
        others = [
            _by_autograd(call, values, wanted, incoming, kind, seed)
            for kind in (torch.float64, dtype, torch.float32)
        ]
        runs.append((found, *others))
    for place, i in enumerate(wanted):
        mine, ref, quick, other = (
            torch.stack([each[place] for each in same]) for same in zip(*runs, strict=True)
        )
        name = call.traced.graph.arguments[i].name
        assert mine.dtype == values[i].dtype, f"{name} of {about}"
        rough = torch.where(torch.isfinite(quick), quick.double(), other.double())
        compare(mine, ref, rough, gradient=True).require(f"gradient of {name} of {about}")


def _by_autograd(
    call: Call,
    values: Sequence[Any],
    wanted: Sequence[int],
    incoming: Sequence[Tensor],
    dtype: torch.dtype,
    seed: int,
) -> Sequence[Tensor]:
    """Gradients through the reference, or through torch's own operations in another dtype."""
    leaves = list(values)
    for i in wanted:
        wide = torch.float64 if dtype == torch.float64 else values[i].dtype
        leaves[i] = values[i].detach().to(wide, copy=True).requires_grad_()
    run = evaluate if dtype == torch.float64 else eager
    outputs = run(call.traced.graph, leaves, seed=seed, dtype=dtype)
    along = [g.to(o.dtype) for g, o in zip(incoming, outputs, strict=True)]
    asked = [leaves[i] for i in wanted]
    found = torch.autograd.grad(outputs, asked, along, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(asked, found, strict=True)]


def differentiable(cases: Iterable[Case], family: str) -> list[Case]:
    """Those of which gradients can be compared, with no NaN near a product on tensor cores.

    Where all rows see a key or two the gradient of a score is a difference that vanishes, ``dP - D``: what is
    left is what D was rounded by, with O, and no error of torch's operations to measure it by. So lengths are
    those of several keys. So is what is left of the gradient of q where a shift makes all keys of one feature
    nearly the same: in fp32 that is a unit or two of rounding, times what keys have in common, which the
    reference is rid of, as it differentiates the maximum: the gradients of a row's scores are then 0 in all.
    """
    return [
        case
        for case in cases
        if not (case.strange and family != "simt")
        and min(case.q_len, case.kv_len) >= SEVERAL
        and not (case.dtype == "fp32" and case.shift and case.head_dim == 1)
    ]


def with_few_queries(cases: Sequence[Case], every: int) -> list[Case]:
    """Some of the cases with so few queries that heads of a group share the rows of a tile, and a table that
    is gathered for all of them; each row sees several keys, or none.

    Not those where a shift makes all keys of one feature nearly the same: the gradient of q is then what
    rounding leaves of a difference, in fp16 too, and the largest of few such errors a draw.
    """
    rng = random.Random(SEED)
    cases = [case for case in cases if not (case.shift and case.head_dim == 1)]
    return [
        replace(
            case,
            mask=("causal", NO_MASK)[i % 2],
            score="relative bias",
            q_len=rng.randint(1, 32),
            kv_len=rng.randint(SEVERAL + 32, LENGTHS[-1]),
            group=rng.choice((2, 3, 8)),
            strange=False,
        )
        for i, case in enumerate(cases[::every])
    ]


def build_all(cases: Iterable[Case], family: str, workers: int, backward: bool = False) -> None:
    """Build the kernels of cases for the GPU at once; what fails here fails again in the case's own test."""

    def build(case: Case) -> None:
        try:
            if backward:
                check_gradients(case, "cuda", family)
                return
            compiled = compiled_for(case.draw("cuda", family), family)
            compiled.binary(torch.cuda.get_device_capability())
        except (Exception, AssertionError):
            return

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(build, cases))


assert tuple(field.name for field in fields(Case))[1:] == tuple(FACTORS), "a case holds each factor in order"
