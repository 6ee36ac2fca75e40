"""The warp-specialised sample kernel, with its constants set and launched on torch tensors."""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fagen.run.emulate import Checker, EmulatedKernels, Memory, compile_text
from fagen.run.tensor_map import TensorMap
from kernel_samples import ELEMENTS, nan, sample

REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160), 4: (32, 112)}


@dataclass(frozen=True)
class Design:
    """Constants of a kernel; the defaults are those of the file."""

    head_dim: int = 64
    block_kv: int = 64
    groups: int = 2
    stages: int = 2
    q_stages: int = 2
    causal: bool = True
    turns: bool = True
    pass_over: bool = True
    element: str = "bf16"
    edits: Mapping[str, str] = field(default_factory=dict, hash=False)

    def text(self) -> str:
        text = sample("attention_sm90", self.edits, element=self.element)
        names = ["head_dim", "block_kv", "groups", "stages", "q_stages", "causal", "turns", "pass_over"]
        values = {name.upper(): getattr(self, name) for name in names}
        values["PRODUCER_REGISTERS"], values["CONSUMER_REGISTERS"] = REGISTERS[self.groups]
        for name, value in values.items():
            plain = str(value).lower() if isinstance(value, bool) else str(value)
            text, count = re.subn(rf"\b{name} = [^,;]+", f"{name} = {plain}", text, count=1)
            assert count == 1, name
        return text

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def shared_bytes(self) -> int:
        tiles = self.q_stages * self.groups * 64 + 2 * self.stages * self.block_kv
        return 2 * self.head_dim * tiles + 64 + 16 * (self.groups * self.q_stages + 2 * self.stages)

    def compiled(self, checker: Checker = "none") -> EmulatedKernels:
        return compile_text(self.text(), name="attention_sm90", checker=checker)


def tensor_map(x: torch.Tensor, rows: int, head_dim: int) -> TensorMap:
    """Make the map of (batch, heads, length, head_dim), copied in boxes of so many rows."""
    batch, heads, length, _ = x.shape
    return TensorMap(
        address=x.data_ptr(),
        storage="bf16" if x.dtype == torch.bfloat16 else "fp16",
        lengths=(64, length, head_dim // 64, heads, batch),
        strides=(x.stride(2) * 2, 128, x.stride(1) * 2, x.stride(0) * 2),
        box=(64, rows, head_dim // 64, 1, 1),
    )


class Attention:
    """Attention on random tensors, and what it should give."""

    def __init__(
        self,
        design: Design,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int = 1,
        q_heads: int = 1,
        kv_heads: int = 1,
        section: int = 1,
        gain: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.design, self.section, kv_len = design, section, kv_len or q_len
        generator = torch.Generator().manual_seed(seed)
        dtype = ELEMENTS[design.element]

        def random(heads: int, length: int) -> torch.Tensor:
            x = torch.randn(batch, length, heads, design.head_dim, generator=generator)
            return x.to(dtype).transpose(1, 2)

        self.q = random(q_heads, q_len) * gain
        self.k, self.v = random(kv_heads, kv_len), random(kv_heads, kv_len)
        self.out = nan(batch, q_len, q_heads, design.head_dim, dtype=dtype).transpose(1, 2)
        self.lse = nan(batch, q_heads, q_len)
        self.counter = torch.zeros(1, dtype=torch.int32)
        group = q_heads // kv_heads
        k, v = (x.double().repeat_interleave(group, 1) for x in (self.k, self.v))
        s = self.q.double() @ k.transpose(2, 3) / math.sqrt(design.head_dim)
        if design.causal:
            allowed = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
            s = s.masked_fill(~allowed, -torch.inf)
        self.expected_lse = s.logsumexp(-1)
        shift = torch.where(self.expected_lse == -torch.inf, 0.0, self.expected_lse)
        self.expected = (s - shift[..., None]).exp() @ v

    def works(self) -> int:
        tiles = -(-self.q.shape[2] // (64 * self.design.groups))
        return tiles * self.q.shape[0] * self.q.shape[1]

    def params(self) -> tuple[bytes, list[Memory]]:
        d, o = self.design.head_dim, self.out
        rows = {"q": 64, "k": self.design.block_kv, "v": self.design.block_kv, "out": 64}
        maps = [tensor_map(getattr(self, name), rows[name], d).for_emulator() for name in rows]
        batch, q_heads, q_len, _ = self.q.shape
        kv_heads, kv_len = self.k.shape[1:3]
        numbers = (q_len, kv_len, q_heads, q_heads // kv_heads, batch, self.section)
        rest = struct.pack(
            "<QQQqqqiiiiiif",
            *(o.data_ptr(), self.lse.data_ptr(), self.counter.data_ptr()),
            *(o.stride(0), o.stride(1), o.stride(2), *numbers, 1 / math.sqrt(d)),
        )
        packed = b"".join(maps) + rest
        places = {"q": 0, "k": 128, "v": 256, "lse": 520, "counter": 528}
        memories = [
            Memory(name, at, getattr(self, name).data_ptr(), getattr(self, name).nbytes, written=at > 500)
            for name, at in places.items()
        ]
        used = 384 if self.design.q_stages == 2 else 512
        memories += [Memory("out", at, o.data_ptr(), o.nbytes, written=at == used) for at in (384, 512)]
        return packed.ljust(-(-len(packed) // 128) * 128, b"\0"), memories

    def launch(self, kernels: EmulatedKernels, *, blocks: int = 2, **options: object) -> None:
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)
        self.counter.zero_()
        values, memories = self.params()
        grid = (min(self.works(), blocks), 1, 1)
        kernels.launch(
            "attention_forward",
            grid,
            (self.design.threads, 1, 1),
            self.design.shared_bytes,
            values,
            memories=memories,
            **options,
        )

    def error(self) -> float:
        """Return the largest difference of both outputs; NaN if anything is."""
        out = (self.out.double() - self.expected).abs().max()
        same = (self.lse == self.expected_lse) | ((self.lse - self.expected_lse).abs() < 1e-3)
        return float(out) if bool(same.all()) and self.counter.item() == 0 else math.nan
