"""The sample kernels for tensor cores, launched on torch tensors."""

import struct

import torch

from fagen.run.emulate import EmulatedKernels, Memory
from kernel_samples import ELEMENTS, nan, params

HEAD_DIM = 64


class TensorCoreAttention:
    """Causal attention on random tensors (1, heads, length, HEAD_DIM), and what it should give."""

    def __init__(self, length: int, *, element: str, heads: int = 2, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (3, 1, heads, length, HEAD_DIM)
        self.q, self.k, self.v = torch.randn(shape, generator=generator).to(ELEMENTS[element])
        self.out, self.lse = torch.empty_like(self.q), nan(1, heads, length)
        s = HEAD_DIM**-0.5 * self.q.double() @ self.k.double().transpose(2, 3)
        s = s.masked_fill(torch.ones_like(s).triu(1) > 0, -torch.inf)
        self.expected_out, self.expected_lse = s.softmax(-1) @ self.v.double(), s.logsumexp(-1)
        self.tolerance = {"fp16": 2e-3, "bf16": 2e-2}[element]

    def request(self) -> tuple[tuple[int, int, int], int, bytes, list[Memory]]:
        """Return grid, bytes of shared memory, parameters and memory of one launch."""
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        batch, heads, length, _ = self.q.shape
        tensors = {"Q": self.q, "K": self.k, "V": self.v, "O": self.out}
        values, memories = params(**tensors, lse=self.lse)
        strides = [x.stride(axis) for x in tensors.values() for axis in range(3)]
        values += struct.pack("@12q4if0q", *strides, length, length, heads, batch, HEAD_DIM**-0.5)
        return ((length + 127) // 128 * heads, 1, 1), 256 * HEAD_DIM * 2, values, memories

    def launch(self, kernels: EmulatedKernels, **options: object) -> None:
        grid, shared_bytes, values, memories = self.request()
        kernels.launch(
            "attention_forward", grid, (128, 1, 1), shared_bytes, values, memories=memories, **options
        )

    def right(self) -> bool:
        """Return whether both outputs are near what they should be."""
        out = (self.out.double() - self.expected_out).abs().max()
        return bool(out < self.tolerance) and bool((self.lse.double() - self.expected_lse).abs().max() < 1e-5)


class Products:
    """Chained products of matrices of small integers, exact in every order of summation."""

    def __init__(self, element: str, width: int = 80, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        a, b = torch.randint(-2, 3, (2, 32, width), generator=generator).to(ELEMENTS[element])
        self.tensors = {"A": a, "B": b, "S": nan(32, 32), "C": nan(32, width)}
        self.shared_bytes = 2 * 32 * (width * 2 + 16)
        self.expected_s = (a.double() @ b.double().T).float()
        self.expected_c = (self.expected_s.to(a.dtype).double() @ b.double()).float()

    def launch(self, kernels: EmulatedKernels, **options: object) -> None:
        values, memories = params(**self.tensors)
        kernels.launch(
            "products", (1, 1, 1), (32, 1, 1), self.shared_bytes, values, memories=memories, **options
        )

    def check(self) -> None:
        assert torch.equal(self.tensors["S"], self.expected_s)
        assert torch.equal(self.tensors["C"], self.expected_c)
