"""Who is measured: fagen's families, and whatever else computes attention here.

A contender says why it cannot do a cell, or prepares a call for it. What it says no to only when it is called
is an error of that call, and its first sentence the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fagen.api import attention
from fagen.bench.cells import Cell
from fagen.bench.stopwatch import Call
from fagen.bench.variants import VARIANTS, Made
from fagen.errors import FagenError
from fagen.lang.attention import attention as attention_program
from fagen.lang.trace import Traced

NO_ROOM = "out of memory"
"""Why a contender that finds no memory is not timed."""

_MOST_SCORE_BYTES = 1 << 32
_SHOWN = 160
_DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


class Inputs:
    """The tensors of a cell: normally distributed, (batch, length, heads, dim) in memory, and its variant."""

    def __init__(self, cell: Cell, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator(device=device).manual_seed(seed)
        wanted = cell.direction == "backward"

        def drawn(length: int, heads: int, dim: int) -> Tensor:
            shape = (cell.batch, length, heads, dim)
            made = torch.randn(shape, generator=generator, device=device).to(_DTYPES[cell.dtype])
            return made.transpose(1, 2).requires_grad_(wanted)

        self.cell, self.device = cell, device
        self.q = drawn(cell.q_len, cell.q_heads, cell.head_dim)
        self.k = drawn(cell.kv_len, cell.kv_heads, cell.head_dim)
        self.v = drawn(cell.kv_len, cell.kv_heads, cell.v_head_dim)
        self.gradient = drawn(cell.q_len, cell.q_heads, cell.v_head_dim).detach()
        self.made: Made = VARIANTS[cell.variant].make(cell.batch, cell.q_heads, cell.kv_len, device)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, (batch, heads, length, dim)."""
        return self.q, self.k, self.v

    @property
    def held_bytes(self) -> int:
        """Memory of q, k and v."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def traced(self) -> Traced:
        """The cell as a program of fagen: what all contenders are to compute."""
        return attention_program(**self.made.parts)


@dataclass(frozen=True)
class Ready:
    """A prepared call for (batch, heads, q_len, v_head_dim); ``around`` is entered around calls."""

    call: Call
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


Prepare: TypeAlias = Callable[[Cell, Inputs], Ready]


@dataclass(frozen=True)
class Contender:
    """Who is measured.

    ``refusal`` is why it cannot do a cell, or "". ``is_peer`` says that fagen is compared with it,
    ``compiles`` that its first call of a cell takes a compiler's time.
    """

    name: str
    about: str
    prepare: Prepare
    refusal: Callable[[Cell], str] = field(default=lambda cell: "")
    is_peer: bool = True
    compiles: bool = False


def directed(ready: Ready, inputs: Inputs) -> Ready:
    """The call of the cell's direction: ``ready`` itself, or the gradients of q, k and v of its result."""
    if inputs.cell.direction == "forward":
        return ready
    with ready.around():
        result = ready.call()
    return Ready(
        lambda: torch.autograd.grad(result, inputs.tensors, inputs.gradient, retain_graph=True), ready.around
    )


def told(error: BaseException, warned: list[warnings.WarningMessage] | None = None) -> str:
    """Why a call failed, in one line."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return NO_ROOM
    if isinstance(error, FagenError):
        return error.sentence
    reasons = [str(each.message) for each in warned or () if issubclass(each.category, UserWarning)]
    text = next((each for each in reasons if "not used because" not in each), "") or str(error)
    line = " ".join(text.split("(Triggered")[0].split()) or type(error).__name__
    return line if len(line) <= _SHOWN else line[: _SHOWN - 3] + "..."


# -------------------------------------------------------------------------------------------------- fagen


def of_family(family: str | None) -> Contender:
    """fagen's own kernels of a family, called as a user calls them; None leaves the choice to the planner."""

    def prepare(cell: Cell, inputs: Inputs) -> Ready:
        q, k, v = inputs.tensors
        parts = dict(inputs.made.parts)
        return Ready(lambda: attention(q, k, v, family=family, **parts))

    name = "fagen" if family is None else family
    return Contender(name, "fagen.attention", prepare, is_peer=False, compiles=True)


# -------------------------------------------------------------------------------------------------- torch


def _sdpa(name: str, backend: str, most_score_bytes: int | None = None) -> Contender:
    def refusal(cell: Cell) -> str:
        variant = VARIANTS[cell.variant]
        if not (variant.is_plain or variant.is_causal):
            return "has no scores and no masks but causal and N x N tensors"
        score_bytes = 4 * cell.batch * cell.q_heads * cell.q_len * cell.kv_len
        if most_score_bytes is not None and score_bytes > most_score_bytes:
            return "would store all scores, and is timed where they are few"
        return ""

    def prepare(cell: Cell, inputs: Inputs) -> Ready:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = inputs.tensors
        is_causal = VARIANTS[cell.variant].is_causal
        options: dict[str, Any] = {"enable_gqa": True} if cell.q_heads != cell.kv_heads else {}
        function = torch.nn.functional.scaled_dot_product_attention
        chosen = getattr(SDPBackend, backend)
        return Ready(lambda: function(q, k, v, is_causal=is_causal, **options), lambda: sdpa_kernel(chosen))

    return Contender(name, f"torch's scaled_dot_product_attention, {backend}", prepare, refusal)


def _flex(cell: Cell, inputs: Inputs) -> Ready:
    # Before the compiler is imported: otherwise it starts a process for each core, here and in each worker.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # every cell is compiled for its own lengths, however many came before
    functorch: Any = torch._functorch.config
    functorch.donated_buffer = False  # or one forward pass serves one backward pass only, and many are timed
    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    q, k, v = inputs.tensors
    made, options = inputs.made, {"enable_gqa": cell.q_heads != cell.kv_heads}
    blocks = None
    if made.flex_mask is not None:
        batch = cell.batch if made.per_batch else None
        blocks = create_block_mask(made.flex_mask, batch, None, cell.q_len, cell.kv_len, str(inputs.device))
    return Ready(lambda: compiled(q, k, v, score_mod=made.flex_score, block_mask=blocks, **options))


# --------------------------------------------------------------------------------------------- flash-attn


def _flash_attn(name: str, module: str, package: str, options: tuple[str, ...]) -> Contender:
    """A flash-attn of some version: ``options`` are those beyond ``causal`` that its function takes."""

    def refusal(cell: Cell) -> str:
        if not _importable(module):
            return f"{package} is not installed"
        flash = VARIANTS[cell.variant].flash
        if flash is None or set(flash) - set(options):
            return "has no such mask or score"
        return "takes 16-bit dtypes" if cell.dtype == "fp32" else ""

    def prepare(cell: Cell, inputs: Inputs) -> Ready:
        function = importlib.import_module(module).flash_attn_func
        q, k, v = (tensor.transpose(1, 2) for tensor in inputs.tensors)
        variant = VARIANTS[cell.variant]
        given = {"causal": not variant.is_plain, **(variant.flash or {})}

        def call() -> Tensor:
            found = function(q, k, v, **given)
            output: Tensor = found[0] if isinstance(found, tuple) else found
            return output.transpose(1, 2)

        return Ready(call)

    return Contender(name, package, prepare, refusal)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


PEERS: tuple[Contender, ...] = (
    _sdpa("flash", "FLASH_ATTENTION"),
    _sdpa("cudnn", "CUDNN_ATTENTION"),
    _sdpa("efficient", "EFFICIENT_ATTENTION"),
    _sdpa("math", "MATH", _MOST_SCORE_BYTES),
    Contender("flex", "torch's FlexAttention, compiled", _flex, compiles=True),
    _flash_attn("fa2", "flash_attn", "flash-attn", ("window_size", "softcap")),
    _flash_attn("fa3", "flash_attn_interface", "flash-attn 3", ("window_size", "softcap")),
    _flash_attn("fa4", "flash_attn.cute", "flash-attn 4", ("window_size", "softcap")),
)
"""Whoever else computes attention, installed here or not."""

SEPARATE = _sdpa("torch, separate", "MATH")
"""torch's own separate kernels, whatever memory they take."""
