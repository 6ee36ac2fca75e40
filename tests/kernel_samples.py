"""The sample kernels of tests/emulated/kernels, launched on torch tensors."""

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from fagen.run.emulate import Checker, EmulatedKernels, Memory, compile_text

KERNELS = Path(__file__).parent / "emulated" / "kernels"
ELEMENTS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FORMATS = {int: "i", float: "f"}


def sample(name: str, edits: Mapping[str, str] | None = None, *, element: str = "fp32") -> str:
    """Return a sample's text with edits; each must meet exactly one place."""
    text = (KERNELS / f"{name}.cu").read_text().replace("ELEMENT", element)
    for old, new in (edits or {}).items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def compiled(
    name: str, edits: Mapping[str, str] | None = None, *, element: str = "fp32", checker: Checker = "none"
) -> EmulatedKernels:
    return compile_text(sample(name, edits, element=element), name=name, checker=checker)


class Params(bytes):
    """The bytes of a parameter struct, and the tensors whose addresses are among them."""

    tensors: Sequence[torch.Tensor]


def params(**values: torch.Tensor | int | float) -> tuple[Params, list[Memory]]:
    """Lay values out as a C struct would, every tensor as a pointer to memory the kernel may write.

    A tensor lives as long as the bytes: it may be made in the call.
    """
    layout, plain, memories = "@", [], []
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            layout += "P"
            offset = struct.calcsize(layout) - struct.calcsize("P")
            memories.append(Memory(name, offset, value.data_ptr(), value.nbytes, written=True))
            plain.append(value.data_ptr())
        else:
            layout += FORMATS[type(value)]
            plain.append(value)
    packed = Params(struct.pack(layout + "0P", *plain))
    packed.tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
    return packed, memories


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


class Attention:
    """Causal attention on random tensors (heads, length, 64), and what it should give."""

    def __init__(self, length: int, *, element: str = "fp32", heads: int = 2, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (3, heads, length, 64)
        self.q, self.k, self.v = torch.randn(shape, generator=generator).to(ELEMENTS[element])
        self.out, self.lse = nan(heads, length, 64, dtype=ELEMENTS[element]), nan(heads, length)
        s = 0.125 * self.q.double() @ self.k.double().transpose(1, 2)
        s = s.masked_fill(torch.ones_like(s).triu(1) > 0, -torch.inf)
        self.expected_out, self.expected_lse = s.softmax(-1) @ self.v.double(), s.logsumexp(-1)

    def launch(self, kernels: EmulatedKernels, **options: object) -> None:
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        heads, length, _ = self.q.shape
        tensors = {"q": self.q, "k": self.k, "v": self.v, "out": self.out, "lse": self.lse}
        values, memories = params(**tensors, q_len=length, kv_len=length, scale=0.125)
        grid, shared_bytes = ((length + 63) // 64, heads, 1), 4 * 64 * 68 * 4
        kernels.launch(
            "attention_forward", grid, (128, 1, 1), shared_bytes, values, memories=memories, **options
        )

    def error(self) -> float:
        """Return the largest difference of both outputs; NaN if anything is."""
        out, lse = self.out.double() - self.expected_out, self.lse.double() - self.expected_lse
        return float(torch.cat([out.flatten(), lse.flatten()]).abs().max())


class Matmul:
    """A product of random matrices, and what it should give."""

    def __init__(self, m: int, n: int, k: int, *, element: str = "fp32", seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.a = torch.randn(m, k, generator=generator).to(ELEMENTS[element])
        self.b = torch.randn(k, n, generator=generator).to(ELEMENTS[element])
        self.c = nan(m, n)
        self.expected = self.a.double() @ self.b.double()

    def launch(self, kernels: EmulatedKernels, **options: object) -> None:
        self.c.fill_(float("nan"))
        (m, n), k = self.c.shape, self.a.shape[1]
        values, memories = params(a=self.a, b=self.b, c=self.c, m=m, n=n, k=k)
        grid, shared_bytes = ((n + 63) // 64, (m + 31) // 32, 1), 16 * (32 + 64) * 4
        kernels.launch("matmul", grid, (128, 1, 1), shared_bytes, values, memories=memories, **options)

    def error(self) -> float:
        return float((self.c.double() - self.expected).abs().max())


CASES: dict[str, Callable[[], Attention | Matmul]] = {
    "attention": lambda: Attention(150),
    "matmul": lambda: Matmul(50, 70, 40),
}
FEW_BLOCKS: dict[str, Callable[[], Attention | Matmul]] = {
    "attention": lambda: Attention(100, heads=1),
    "matmul": lambda: Matmul(50, 40, 40),
}
"""Two each: every thread costs the sanitizer as long as a small launch takes."""
