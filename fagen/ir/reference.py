"""What each node means, in float64 and differentiable by autograd: the oracle of every test.

A value is a torch tensor with one dimension for each axis of its node, in the order of ``node.axes``; a
dimension of length 1 broadcasts. Nothing here knows of tiles, walks or kernels.

Selection: what a mask takes out is chosen away and never multiplied by 0. A gradient of exactly 0 stays 0
through any derivative, and in a contraction a term is 0 where a factor that was selected is 0, whatever the
other factor holds. So a NaN in a masked q, k, v or bias reaches neither results nor gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fagen.errors import UsageError
from fagen.ir.check import bind_sizes, by_name
from fagen.ir.graph import (
    KEY_AXIS,
    Axis,
    Const,
    Contract,
    Graph,
    Index,
    Input,
    Load,
    Map,
    Node,
    Random,
    Reduce,
    Scalar,
    Scatter,
    Size,
    Symbol,
    sort_axes,
    split_heads,
    walk,
)

Values: TypeAlias = "Mapping[str, Any] | Sequence[Any]"
"""The arguments of a graph by name, or in its order: tensors, and numbers for scalars."""


# ---------------------------------------------------------------------------------------- scalar operations


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    empty = y == 0
    return torch.where(empty, 0.0, x / torch.where(empty, 1.0, y))


def _finite(x: Tensor) -> Tensor:
    return torch.where(x == -math.inf, 0.0, x)


def _many(op: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda *args: reduce(op, args)


def _floordiv(x: Tensor, y: Tensor) -> Tensor:
    """Integers, rounded down; by 0 it is 0, as in the kernels."""
    return torch.where(y == 0, 0, torch.div(x, torch.where(y == 0, 1, y), rounding_mode="floor"))


def _mod(x: Tensor, y: Tensor) -> Tensor:
    """The remainder of integers, with the sign of ``y``; by 0 it is 0, as in the kernels."""
    return torch.where(y == 0, 0, torch.remainder(x, torch.where(y == 0, 1, y)))


_MEANING: dict[str, Callable[..., Tensor]] = {
    "add": _many(torch.add),
    "mul": torch.mul,
    "neg": torch.neg,
    "div": torch.div,
    "quotient": _quotient,
    "finite": _finite,
    "floordiv": _floordiv,
    "mod": _mod,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "abs": torch.abs,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "tanh": torch.tanh,
    "tanh_fast": torch.tanh,
    "erf": torch.erf,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "floor": torch.floor,
    "to_float": lambda x: x.to(torch.float64),
    "to_int": lambda x: x.to(torch.int64),
    "le": torch.le,
    "lt": torch.lt,
    "eq": torch.eq,
    "and": _many(torch.logical_and),
    "or": _many(torch.logical_or),
    "not": torch.logical_not,
    "where": torch.where,
}


def apply(op: str, *tensors: Tensor) -> Tensor:
    """One scalar operation of `graph.OPS`, element by element; shapes broadcast as torch has them.

    Gradients are those of the operation, and 0 where the incoming one or the derivative is 0.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Selecting.call(op, *tensors)
    return _MEANING[op](*tensors)


class _Selecting(torch.autograd.Function):
    """An operation whose gradient is selected: 0 times anything is 0."""

    @classmethod
    def call(cls, op: str, *tensors: Tensor) -> Tensor:
        result: Tensor = cls.apply(op, *tensors)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def forward(ctx: Any, op: str, *tensors: Tensor) -> Tensor:
        ctx.op = op
        ctx.save_for_backward(*tensors)
        return _MEANING[op](*(tensor.detach() for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        wanted, tensors, again = ctx.needs_input_grad[1:], ctx.saved_tensors, torch.is_grad_enabled()
        with torch.enable_grad():
            operands = [
                tensor.expand(gradient.shape)
                if again and want
                else tensor.detach().expand(gradient.shape).requires_grad_(want)
                for tensor, want in zip(tensors, wanted, strict=True)
            ]
            result = _MEANING[ctx.op](*operands)
            asked = [operand for operand, want in zip(operands, wanted, strict=True) if want]
            ones = torch.ones_like(result)
            derivatives = iter(torch.autograd.grad(result, asked, ones, create_graph=again))
        gradients: list[Tensor | None] = [None]
        for tensor, want in zip(tensors, wanted, strict=True):
            if not want:
                gradients.append(None)
                continue
            derivative = next(derivatives)
            product = _selected_derivative(gradient, derivative)
            gradients.append(product.sum_to_size(tensor.shape).to(tensor.dtype))
        return tuple(gradients)


def _selected_derivative(gradient: Tensor, derivative: Tensor) -> Tensor:
    """Their product, in which 0 times anything is 0; itself differentiable, also where one of them is 0."""
    nothing = ((gradient == 0) | (derivative == 0)) & ~(gradient * derivative).isfinite()
    return torch.where(nothing, 0.0, gradient) * torch.where(nothing, 0.0, derivative)


# --------------------------------------------------------------------------------------------- contractions


class _Contraction(torch.autograd.Function):
    """A contraction in which a 0 of a ``selecting`` factor takes its term out; so does a gradient of 0."""

    @classmethod
    def call(cls, x: Tensor, y: Tensor, dim: int, selecting: tuple[bool, bool]) -> Tensor:
        result: Tensor = cls.apply(x, y, dim, selecting)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, dim: int, selecting: tuple[bool, bool]) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.dim, ctx.selecting = dim, selecting
        return _product(x, y, (dim,), selecting)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        gradient = gradient.unsqueeze(ctx.dim)
        gradients: list[Tensor | None] = [None, None, None, None]
        for i, (mine, other) in enumerate(((x, y), (y, x))):
            if ctx.needs_input_grad[i]:
                summed = tuple(
                    d for d in range(x.dim()) if mine.shape[d] == 1 != max(other.shape[d], gradient.shape[d])
                )
                product = _product(gradient, other, summed, (True, ctx.selecting[1 - i]))
                for d in summed:
                    product = product.unsqueeze(d)
                gradients[i] = product.expand(mine.shape).to(mine.dtype)
        return tuple(gradients)


def _product(x: Tensor, y: Tensor, dims: tuple[int, ...], selecting: tuple[bool, bool]) -> Tensor:
    """The sum over ``dims`` of ``x * y``, both with the same number of dimensions, broadcast in each."""
    for d in dims:
        length = x.shape[d] if y.shape[d] == 1 else y.shape[d]
        x, y = (t.expand(*t.shape[:d], length, *t.shape[d + 1 :]) for t in (x, y))
    letters = "abcdefghijklmnopqrstuvwxyz"[: x.dim()]
    kept = "".join(letter for d, letter in enumerate(letters) if d not in dims)
    if not ((selecting[0] and _strange(y)) or (selecting[1] and _strange(x))):
        return _einsum(f"{letters},{letters}->{kept}", x, y)
    if not dims:
        return _selected_product(x, y, selecting)
    first, *others = dims
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for i in range(x.shape[first]):  # term by term: all of them at once need not fit in memory
        total = total + _selected_product(x.narrow(first, i, 1), y.narrow(first, i, 1), selecting)
    return total.squeeze(first).sum([d - (d > first) for d in others]) if others else total.squeeze(first)


def _selected_product(x: Tensor, y: Tensor, selecting: tuple[bool, bool]) -> Tensor:
    gone = (x == 0) & selecting[0] | (y == 0) & selecting[1]
    return torch.where(gone, 0.0, x * y)


def _strange(x: Tensor) -> bool:
    return not bool(torch.isfinite(x).all())


def _einsum(formula: str, x: Tensor, y: Tensor) -> Tensor:
    """In fp32 for 16-bit values, rounded once at the end, as matrix products of torch do."""
    if x.dtype in (torch.float16, torch.bfloat16):
        return torch.einsum(formula, x.float(), y.float()).to(x.dtype)
    return torch.einsum(formula, x, y)


# --------------------------------------------------------------------------------------------------- random

_LOW = 0xFFFFFFFF


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Philox4x32-10 (Salmon et al. 2011): four words for a counter of four, 32-bit values in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (p1 >> 32 & _LOW) ^ c1 ^ k0,
            p1 & _LOW,
            (p0 >> 32 & _LOW) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return [c0, c1, c2, c3]


def random_bits(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, seed: int, ordinal: int = 0) -> Tensor:
    """The 16 bits of each pair, (b, h, q, kv) for vectors of positions.

    One counter serves rows (q, q+8) and columns (kv, kv+1, kv+8, kv+9) of a 16 x 16 block.
    """
    rows, row_of = torch.unique((q // 16) * 8 + q % 8, return_inverse=True)
    columns, column_of = torch.unique((kv // 16) * 4 + (kv % 8) // 2, return_inverse=True)
    shape = (len(b), len(h), len(rows), len(columns))
    counter = [
        positions.view([-1 if d == place else 1 for d in range(4)]).expand(shape)
        for place, positions in enumerate((b, h, rows, columns))
    ]
    key = (seed & _LOW, ((seed >> 32 & _LOW) + ordinal) & _LOW)
    words = torch.stack(philox(counter, key), dim=-1)
    row, column = row_of[:, None], column_of[None, :]
    number = 4 * ((q % 16) // 8)[:, None] + 2 * ((kv % 16) // 8)[None, :] + (kv % 2)[None, :]
    word = words[:, :, row, column, number // 2]
    return word >> 16 * (number % 2) & 0xFFFF


# ----------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class _Settings:
    """What holds for one evaluation: lengths, positions looked at, bits and precision."""

    sizes: Mapping[Axis, int]
    positions: Mapping[Axis, Tensor]
    seed: int
    dtype: torch.dtype
    device: torch.device

    def positions_of(self, axis: Axis) -> Tensor:
        found = self.positions.get(axis)
        if found is None:
            return torch.arange(self._size(axis), device=self.device)
        return found

    def length(self, axis: Axis) -> int:
        found = self.positions.get(axis)
        return self._size(axis) if found is None else len(found)

    def _size(self, axis: Axis) -> int:
        if axis not in self.sizes:
            raise UsageError(f"the length of {axis} is unknown", works="give it in sizes")
        return self.sizes[axis]


def evaluate_nodes(
    nodes: Iterable[Node],
    environment: Mapping[Node, Any],
    sizes: Mapping[Axis, int],
    positions: Mapping[Axis, Tensor] | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> list[Tensor]:
    """The values of ``nodes``, each with a dimension for each of its axes (length 1 where it is constant).

    ``environment`` holds a tensor as it lies in memory for each `Input` (dimensions as in ``layout``), a
    number or 0-d tensor for each `Scalar`, and for any other node, such as a `Symbol`, a tensor with that
    node's axes, which stands in the place of computing it. ``positions`` restricts an axis to some positions:
    a tile, or sampled rows.
    """
    tables, given = (
        {n: v for n, v in environment.items() if isinstance(n, Input) is is_input}
        for is_input in (True, False)
    )
    device = device or next((t.device for t in environment.values() if isinstance(t, Tensor)), "cpu")
    places = {axis: place.to(device) for axis, place in (positions or {}).items()}
    settings = _Settings(sizes, places, seed, dtype, torch.device(device))
    roots = list(nodes)
    order = walk(roots)
    uses: dict[Node, int] = dict.fromkeys(roots, 1)
    for node in order:
        for arg in _operands(node):
            uses[arg] = uses.get(arg, 0) + 1
    evaluation = _Evaluation(settings, tables)
    values: dict[Node, Tensor] = {}
    needed = _needed(roots, given)
    for node in order:
        if node not in needed:
            continue
        if node in given:
            values[node] = _given(node, given[node], settings)
        else:
            values[node] = evaluation.node(node, [values[arg] for arg in _operands(node)])
            for arg in _operands(node):
                uses[arg] -= 1
                if not uses[arg]:
                    values.pop(arg, None)
    return [values[root] for root in roots]


def _needed(roots: list[Node], given: Mapping[Node, Any]) -> set[Node]:
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if node not in given:
                stack.extend(_operands(node))
    return seen


def _operands(node: Node) -> tuple[Node, ...]:
    """What is computed before ``node``: a table that is indexed is read, not computed."""
    return node.args[1:] if isinstance(node, Load | Scatter) else node.args


def _given(node: Node, value: Any, settings: _Settings) -> Tensor:
    exact = None if isinstance(value, Tensor) else torch.float64 if isinstance(value, float) else torch.int64
    tensor = torch.as_tensor(value, dtype=exact, device=settings.device)
    if tensor.dim() != len(node.axes):
        raise UsageError(f"{node!r} was given a shape {tuple(tensor.shape)}, it has the axes {node.axes}")
    if node.kind == "float":
        # A number given at each call is no value of the input dtype: it keeps 32 bits.
        wide = (
            torch.float32 if isinstance(node, Scalar) and settings.dtype != torch.float64 else settings.dtype
        )
        return tensor.to(wide)
    return tensor.to(torch.int64 if node.kind == "int" else torch.bool)


class _Evaluation:
    """The meaning of each kind of node, given the values of its operands."""

    def __init__(self, settings: _Settings, tables: Mapping[Node, Any]) -> None:
        self.settings = settings
        self.tables = tables
        self._selects: dict[Node, bool] = {}

    def node(self, node: Node, operands: list[Tensor]) -> Tensor:
        """The value of ``node``."""
        s = self.settings
        if isinstance(node, Const):
            return torch.tensor(node.value, dtype=self._constant_dtype(node), device=s.device)
        if isinstance(node, Size):
            return torch.tensor(s._size(node.axis), device=s.device)
        if isinstance(node, Index):
            return s.positions_of(node.axis).to(torch.int64)
        if isinstance(node, Input):
            return self._input(node)
        if isinstance(node, Random):
            return self._random(node)
        if isinstance(node, Scalar | Symbol):
            raise UsageError(f"{node.name} was given no value")
        if isinstance(node, Load):
            return self._load(node, operands)
        if isinstance(node, Scatter):
            return self._scatter(node, operands)
        if isinstance(node, Reduce):
            return self._reduce(node, operands[0])
        if isinstance(node, Contract):
            return self._contract(node, operands)
        assert isinstance(node, Map)
        return self._map(node, operands)

    def _constant_dtype(self, node: Const) -> torch.dtype:
        if node.kind == "float":
            return torch.float64 if self.settings.dtype == torch.float64 else torch.float32
        return torch.int64 if node.kind == "int" else torch.bool

    def _table(self, node: Node) -> Tensor:
        if node not in self.tables:
            raise UsageError(f"{node!r} was given no tensor")
        tensor = torch.as_tensor(self.tables[node], device=self.settings.device)
        if node.kind == "float":
            return tensor.to(self.settings.dtype)
        return tensor.to(torch.int64 if node.kind == "int" else torch.bool)

    def _input(self, node: Input) -> Tensor:
        """A tensor at its own position: heads split, axes in canonical order, asked positions selected."""
        tensor = _split(self._table(node), node.layout, self.settings.sizes)
        for d, axis in enumerate(node.axes):
            where = self.settings.positions.get(axis)
            if where is not None and tensor.shape[d] != 1:
                tensor = tensor.index_select(d, where.clamp(0, max(tensor.shape[d] - 1, 0)))
        return tensor

    def _aligned(
        self, tensors: Sequence[Tensor], nodes: Sequence[Node], axes: tuple[Axis, ...]
    ) -> list[Tensor]:
        """Tensors with a dimension for each of ``axes``, of length 1 where they do not have it."""
        return [
            tensor[tuple(slice(None) if axis in node.axes else None for axis in axes)]
            for tensor, node in zip(tensors, nodes, strict=True)
        ]

    def _map(self, node: Map, operands: list[Tensor]) -> Tensor:
        aligned = self._aligned(operands, node.args, node.axes)
        dtype = self.settings.dtype
        if dtype == torch.float64:
            return apply(node.op, *aligned)
        if node.op == "to_float":  # a position is exact until it meets a value of the input dtype
            return aligned[0].to(torch.float32)
        # As torch's pointwise kernels: computed in fp32, rounded to the dtype if an operand has it.
        rounds = any(tensor.dtype == dtype for tensor in aligned)
        wide = [t.float() if t.is_floating_point() else t for t in aligned]
        result = apply(node.op, *wide)
        return result.to(dtype) if rounds and result.is_floating_point() else result

    def _expanded(self, x: Tensor, x_node: Node, over: Axis) -> Tensor:
        """``x`` with its full length along ``over``."""
        d = x_node.axes.index(over)
        return x.expand(*x.shape[:d], self.settings.length(over), *x.shape[d + 1 :])

    def _reduce(self, node: Reduce, x: Tensor) -> Tensor:
        if node.over not in node.x.axes:
            if node.op == "max" and self.settings.length(node.over):
                return x
            if node.op == "sum":
                return x * self.settings.length(node.over)
            return torch.full_like(x, -math.inf)
        d = node.x.axes.index(node.over)
        x = self._expanded(x, node.x, node.over)
        if node.op == "sum":
            return x.sum(d)
        if not x.shape[d]:
            return x.new_full([*x.shape[:d], *x.shape[d + 1 :]], -math.inf) + x.sum(d)
        return x.amax(d)

    def _contract(self, node: Contract, operands: list[Tensor]) -> Tensor:
        axes = sort_axes((*node.axes, node.over))
        x, y = self._aligned(
            [self._expanded(t, arg, node.over) for t, arg in zip(operands, node.args, strict=True)],
            node.args,
            axes,
        )
        dtype = self.settings.dtype
        selecting = (self._selecting(node.x), self._selecting(node.y))
        return _Contraction.call(x.to(dtype), y.to(dtype), axes.index(node.over), selecting)

    def _selecting(self, node: Node) -> bool:
        """Whether a 0 of ``node`` may mean "taken out"."""
        if node not in self._selects:
            self._selects[node] = any(isinstance(n, Map) and n.op == "where" for n in walk([node]))
        return self._selects[node]

    def _load(self, node: Load, indices: list[Tensor]) -> Tensor:
        table = self._table(node.table)
        aligned = self._aligned(indices, node.indices, node.axes)
        if 0 in table.shape:
            return table.sum() + torch.zeros_like(reduce(torch.add, aligned), dtype=table.dtype)
        clamped = tuple(
            index.clamp(0, extent - 1) for index, extent in zip(aligned, table.shape, strict=True)
        )
        return table[clamped] if clamped else table

    def _scatter(self, node: Scatter, operands: list[Tensor]) -> Tensor:
        table = self._table(node.table)
        *indices, value = operands
        axes = node.value.axes
        full = value.expand([self.settings.length(axis) for axis in axes])
        places = [
            index.clamp(0, max(extent - 1, 0)).expand(full.shape)
            for index, extent in zip(self._aligned(indices, node.indices, axes), table.shape, strict=True)
        ]
        result = torch.zeros(table.shape, dtype=full.dtype, device=full.device)
        result = result.index_put(tuple(places), full, accumulate=True) if full.numel() else result
        return _split(result, node.table.layout, self.settings.sizes)

    def _random(self, node: Random) -> Tensor:
        s = self.settings
        hk, g = s.positions_of("hk"), s.positions_of("g")
        heads = (hk[:, None] * s.sizes["g"] + g[None, :]).reshape(-1)
        bits = random_bits(
            s.positions_of("b"), heads, s.positions_of("q"), s.positions_of(KEY_AXIS), s.seed, node.ordinal
        )
        return bits.reshape(len(bits), len(hk), len(g), *bits.shape[2:])


def _split(tensor: Tensor, layout: tuple[Axis, ...], sizes: Mapping[Axis, int]) -> Tensor:
    """A tensor as it lies in memory, with ``h`` split into ``hk, g`` and axes in canonical order."""
    axes: list[Axis] = []
    for axis in layout:
        if axis == "h":
            d = len(axes)
            pair = (1, 1) if tensor.shape[d] == 1 else (sizes["hk"], sizes["g"])
            tensor = tensor.reshape(*tensor.shape[:d], *pair, *tensor.shape[d + 1 :])
        axes.extend(split_heads((axis,)))
    return tensor.permute([axes.index(axis) for axis in split_heads(layout)])


# ------------------------------------------------------------------------------------------- whole programs


def evaluate(
    graph: Graph,
    inputs: Values,
    *,
    seed: int = 0,
    rows: Mapping[Axis, Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """The outputs of a program in float64, each with the axes of its layout.

    ``inputs`` are the values of the graph's arguments, by name or in order; gradients flow to those that
    require one. ``seed`` is the 64-bit seed of dropout. ``rows`` computes only some positions of an axis that
    is not summed over: ``{"q": tensor([0, 17])}``.
    """
    values = by_name(graph, inputs) if isinstance(inputs, Mapping) else tuple(inputs)
    sizes = bind_sizes(
        graph, [_shape(argument, value) for argument, value in zip(graph.arguments, values, strict=True)]
    )
    results = evaluate_nodes(
        [output.node for output in graph.outputs],
        dict(zip(graph.arguments, values, strict=True)),
        sizes,
        rows,
        seed=seed,
        dtype=dtype,
    )
    lengths = {axis: len(rows[axis]) if rows and axis in rows else length for axis, length in sizes.items()}
    return tuple(
        _join(result, output.node.axes, output.layout, lengths)
        for result, output in zip(results, graph.outputs, strict=True)
    )


def _shape(argument: Input | Scalar, value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(argument, Input) else None


def _join(
    tensor: Tensor, axes: tuple[Axis, ...], layout: tuple[Axis, ...], lengths: Mapping[Axis, int]
) -> Tensor:
    """A value with its full lengths, ``hk, g`` joined to ``h`` and dimensions as in ``layout``."""
    tensor = tensor.expand([lengths[axis] for axis in axes])
    split = [part for axis in layout for part in (("hk", "g") if axis == "h" else (axis,))]
    tensor = tensor.permute([axes.index(axis) for axis in split])
    if "h" in layout:
        d = layout.index("h")
        tensor = tensor.reshape(
            *tensor.shape[:d], tensor.shape[d] * tensor.shape[d + 1], *tensor.shape[d + 2 :]
        )
    return tensor


def eager(
    graph: Graph,
    inputs: Values,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    rows: Mapping[Axis, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """The same computation done by torch in ``dtype``, one rounding an operation, without TF32.

    The yardstick of `tolerance`. Where the result in ``dtype`` is not finite it is that of fp32.
    """
    with _without_tf32():
        results = evaluate(graph, inputs, seed=seed, rows=rows, dtype=dtype)
        if dtype == torch.float32 or all(bool(torch.isfinite(result).all()) for result in results):
            return results
        wide = evaluate(graph, inputs, seed=seed, rows=rows, dtype=torch.float32)
    return tuple(torch.where(torch.isfinite(x), x.float(), y) for x, y in zip(results, wide, strict=True))


@contextmanager
def _without_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# ----------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Comparison:
    """How far a result is from the reference, and how far it may be."""

    max_error: float
    eager_error: float
    tolerance: float
    ok: bool
    reason: str

    def __str__(self) -> str:
        figures = f"error {self.max_error:.3g} (eager {self.eager_error:.3g}, allowed {self.tolerance:.3g})"
        return figures if self.ok else f"{figures}: {self.reason}"

    def require(self, label: str = "") -> None:
        """Raise AssertionError where the result is not within its tolerance."""
        if not self.ok:
            raise AssertionError(f"{label + ': ' if label else ''}{self}")


def ulp(value: float, dtype: torch.dtype) -> float:
    """The distance between neighbours of ``dtype`` at ``value``.

    In 16 bits no less than the smallest normal number of fp32: what is computed for them takes smaller ones
    for 0, as the hardware's powers do. What is computed for fp32 counts them.
    """
    kind = torch.finfo(dtype)
    least = kind.tiny * kind.eps
    if value == 0 or not math.isfinite(value):
        return float(least)
    if kind.bits == 16:
        least = max(least, torch.finfo(torch.float32).tiny)
    return float(max(2.0 ** math.floor(math.log2(abs(value))) * kind.eps, least))


def tolerance(ref: Tensor, eager: Tensor, dtype: torch.dtype, *, gradient: bool = False) -> float:
    """The largest error a result of ``dtype`` may have: ``2 max|eager - ref|`` and 1 ulp at ``max|ref|``.

    A gradient has 3 and 2 ulp. Places where ``ref`` or ``eager`` is not finite have no part in it.
    """
    factor, ulps = (3, 2) if gradient else (2, 1)
    exact = ref.double()
    finite = torch.isfinite(exact)
    return factor * _largest_error(eager, ref) + ulps * ulp(_largest(exact[finite].abs()), dtype)


def compare(out: Tensor, ref: Tensor, eager: Tensor, *, gradient: bool = False) -> Comparison:
    """``out`` against the reference, by the one rule of tolerance.

    Infinities and NaN agree in place (and sign) and then leave the comparison.
    """
    allowed = tolerance(ref, eager, out.dtype, gradient=gradient)
    eager_error = _largest_error(eager, ref)
    if out.shape != ref.shape:
        reason = f"the shape is {tuple(out.shape)}, not {tuple(ref.shape)}"
        return Comparison(math.inf, eager_error, allowed, False, reason)
    value, exact = out.detach().double(), ref.detach().double().to(out.device)
    wrong = ~torch.isfinite(value) | ~torch.isfinite(exact)
    wrong &= ~((value == exact) | (torch.isnan(value) & torch.isnan(exact)))
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        reason = (
            f"{value[place].item()} at {place}, not {exact[place].item()} ({int(wrong.sum())} such places)"
        )
        return Comparison(math.inf, eager_error, allowed, False, reason)
    error = _largest_error(value, exact)
    reason = ""
    if error > allowed:
        difference = torch.where(torch.isfinite(exact), (value - exact).abs(), 0.0)
        flat = int(difference.argmax())
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), difference.shape))
        reason = f"{value[place].item():.9g} at {place}, not {exact[place].item():.9g}"
    return Comparison(error, eager_error, allowed, not reason, reason)


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def _largest_error(x: Tensor, ref: Tensor) -> float:
    exact = ref.detach().double()
    value = x.detach().to(exact.device).double()
    finite = torch.isfinite(exact) & torch.isfinite(value)
    return _largest((value - exact).abs()[finite])
