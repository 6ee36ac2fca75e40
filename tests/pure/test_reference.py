"""The reference against what torch computes by other means, and against the rules of meaning at the edges."""

import math
import random

import pytest
import torch

import fagen as fg
from fagen.errors import UsageError
from fagen.ir import graph as ir
from fagen.ir.reference import (
    apply,
    compare,
    eager,
    evaluate,
    evaluate_nodes,
    philox,
    random_bits,
    tolerance,
    ulp,
)
from fagen.lang.attention import attention


def tensors(*shapes, seed=0, dtype=torch.float64, grad=True):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [t.requires_grad_() if grad else t for t in made]


def run(traced, q, k, v, **options):
    return evaluate(traced.graph, (q, k, v, *traced.captured), **options)


def gradients(outputs, leaves, seed=7):
    generator = torch.Generator().manual_seed(seed)
    incoming = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]
    loss = sum((o.where(o.isfinite(), 0.0) * g).sum() for o, g in zip(outputs, incoming, strict=True))
    return torch.autograd.grad(loss, leaves)


# ------------------------------------------------------------------------------------- against plain torch


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_attention_with_every_part_equals_torch_and_its_gradients(kv_heads, layout):
    b, h, q_len, kv_len, d, dv = 2, 6, 17, 23, 8, 12
    q, k, v, slopes, sink, bias = tensors(
        (b, h, q_len, d), (b, kv_heads, kv_len, d), (b, kv_heads, kv_len, dv), (h,), (h,), (h, 1, kv_len)
    )
    traced = attention(
        mask=fg.causal() & fg.sliding_window(9),
        score=[fg.softcap(3.0), fg.alibi(slopes)],
        scale=-0.3,
        bias=bias,
        sink=sink,
        return_lse=True,
        layout=layout,
    )
    given = (q, k, v) if layout == "bhsd" else tuple(t.transpose(1, 2) for t in (q, k, v))
    out, lse = run(traced, *given)
    if layout == "bshd":
        out = out.transpose(1, 2)

    rows, columns = torch.arange(q_len)[:, None], torch.arange(kv_len)[None]
    s = 3 * torch.tanh(q @ k.repeat_interleave(h // kv_heads, 1).mT * -0.3 / 3)
    s = s + slopes[:, None, None] * (columns - rows) + bias
    place = rows + kv_len - q_len
    s = s.masked_fill((columns > place) | (place - columns > 9), -math.inf)
    full = torch.cat([s, sink[None, :, None, None].expand(b, h, q_len, 1)], -1)
    expected = full.softmax(-1)[..., :-1] @ v.repeat_interleave(h // kv_heads, 1), full.logsumexp(-1)

    torch.testing.assert_close(out, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected[1], rtol=1e-12, atol=1e-12)
    leaves = [q, k, v, slopes, sink, bias]
    for mine, theirs in zip(gradients((out, lse), leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


def test_gradcheck_of_a_program_with_every_operation():
    @fg.program
    def program(
        q: fg.Tensor["b h q d"],
        k: fg.Tensor["b hk kv d"],
        v: fg.Tensor["b hk kv dv"],
        table: fg.Tensor["h r"],
        t: fg.Scalar,
    ):
        s = fg.dot(q, k, over="d") * fg.rsqrt(fg.size("d")) / t
        s = s + table[fg.h, (fg.q - fg.kv) // 2 + 2] * fg.cos(s) - fg.sin(s)
        s = fg.gelu(s) + fg.sigmoid(s) * fg.tanh(s, exact=True) + fg.relu(s - 0.01)
        s = fg.maximum(s, fg.minimum(s * 2, 0.3)) + abs(s) + s % 0.7
        p = fg.exp2(s) / fg.sqrt(fg.sum(fg.exp(2 * s), over="kv"))
        return fg.dot(p, v, over="kv"), fg.log2(fg.max(p, over="kv")), fg.log(fg.sum(p, over="kv"))

    leaves = tensors((1, 4, 3, 5), (1, 2, 4, 5), (1, 2, 4, 2), (4, 5))
    scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    graph = program.trace().graph
    assert torch.autograd.gradcheck(lambda *args: evaluate(graph, args), (*leaves, scale))


def test_second_derivatives_and_those_in_forward_mode():
    def named(q, k, v):
        return evaluate(attention(mask=fg.causal(), score=fg.softcap(3.0)).graph, (q, k, v))[0]

    def eager(q, k, v):
        s = 3 * torch.tanh(q @ k.mT / 6)
        return s.masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf).softmax(-1) @ v

    leaves = tuple(tensors((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 2)))
    assert torch.autograd.gradgradcheck(named, leaves, fast_mode=True)
    tangents = tuple(torch.randn_like(leaf) for leaf in leaves)
    mine = torch.autograd.functional.jvp(named, leaves, tangents)
    torch.testing.assert_close(mine, torch.autograd.functional.jvp(eager, leaves, tangents))


def test_contraction_over_query_heads_and_an_axis_of_ones_own():
    @fg.program
    def talking(
        q: fg.Tensor["b h q d"], k: fg.Tensor["b hk kv d"], v: fg.Tensor["b t kv dv"], w: fg.Tensor["t h"]
    ):
        p = fg.softmax(fg.dot(q, k, over="d"), over="kv")
        return fg.dot(fg.dot(w, p, over="h"), v, over="kv")

    q, k, v, w = tensors((2, 4, 3, 5), (2, 2, 6, 5), (2, 3, 6, 7), (3, 4))
    (out,) = evaluate(talking.trace().graph, (q, k, v, w))
    p = (q @ k.repeat_interleave(2, 1).mT).softmax(-1)
    torch.testing.assert_close(out, torch.einsum("th,bhqk,btkd->btqd", w, p, v))


def test_inputs_may_have_any_strides_and_broadcast():
    q, k, v = tensors((2, 5, 3, 4), (1, 1, 6, 4), (2, 3, 1, 2), grad=False)
    (out,) = evaluate(attention().graph, (q.transpose(1, 2), k, v))
    expected = (q.transpose(1, 2) @ k.mT).mul(0.5).softmax(-1) @ v.expand(2, 3, 6, 2)
    torch.testing.assert_close(out, expected)


def test_broadcast_along_a_contracted_axis_counts_every_place():
    q, k, v = tensors((1, 1, 2, 5), (1, 1, 3, 1), (1, 1, 3, 2))
    (out,) = evaluate(attention(scale=1.0).graph, (q, k, v, 1.0))
    expected = (q @ k.expand(1, 1, 3, 5).mT).softmax(-1) @ v
    torch.testing.assert_close(out, expected)
    for mine, theirs in zip(gradients((out,), [q, k, v]), gradients((expected,), [q, k, v]), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_sampled_rows_are_rows_of_the_whole():
    q, k, v = tensors((2, 3, 40, 4), (2, 3, 50, 4), (2, 3, 50, 6))
    flags = torch.arange(50) % 7 == 0
    traced = attention(
        mask=fg.causal() | fg.global_tokens(flags),
        score=lambda s: s + fg.h * fg.q * 0.01,
        dropout=0.3,
        return_lse=True,
    )
    whole = run(traced, q, k, v, seed=99)
    rows = torch.tensor([39, 0, 17, 8])
    part = run(traced, q, k, v, seed=99, rows={"q": rows})
    torch.testing.assert_close(part[0], whole[0][:, :, rows])
    torch.testing.assert_close(part[1], whole[1][:, :, rows])


# ------------------------------------------------------------------------------------------- at the edges


def test_a_row_without_a_key_gives_zero_minus_infinity_and_zero_gradients():
    q, k, v = tensors((1, 2, 6, 4), (1, 2, 3, 4), (1, 2, 3, 4))
    out, lse = run(attention(mask=fg.causal(), return_lse=True), q, k, v)  # rows 0, 1, 2 have no key
    assert (out[:, :, :3] == 0).all()
    assert (lse[:, :, :3] == -math.inf).all()
    assert lse[:, :, 3:].isfinite().all()
    dq, dk, dv = torch.autograd.grad((out.sum() + lse.sum()), [q, k, v])
    assert (dq[:, :, :3] == 0).all()
    assert all(g.isfinite().all() for g in (dq, dk, dv))
    out, lse = run(attention(mask=fg.causal(), return_lse=True), q, k, v)
    only_empty = torch.autograd.grad(out[:, :, :3].sum() + lse[:, :, :3].sum(), [q, k, v])
    assert all((g == 0).all() for g in only_empty)


def test_an_empty_row_with_a_sink_has_the_sink_as_its_lse():
    q, k, v, sink = tensors((1, 2, 6, 4), (1, 2, 3, 4), (1, 2, 3, 4), (2,))
    out, lse = run(attention(mask=fg.causal(), sink=sink, return_lse=True), q, k, v)
    assert (out[:, :, :3] == 0).all()
    torch.testing.assert_close(lse[:, :, :3], sink[None, :, None].expand(1, 2, 3))
    dq, dk, dsink = torch.autograd.grad(lse[:, :, :3].sum(), [q, k, sink])
    assert (dq == 0).all()
    assert (dk == 0).all()
    torch.testing.assert_close(dsink, torch.full((2,), 3.0, dtype=torch.float64))


def test_a_sink_of_minus_infinity_is_no_sink():
    q, k, v = tensors((1, 2, 6, 4), (1, 2, 3, 4), (1, 2, 3, 4))
    sink = torch.full((2,), -math.inf, dtype=torch.float64)
    with_sink = run(attention(mask=fg.causal(), sink=sink), q, k, v)
    without = run(attention(mask=fg.causal()), q, k, v)
    torch.testing.assert_close(with_sink, without)
    for mine, theirs in zip(gradients(with_sink, [q, k, v]), gradients(without, [q, k, v]), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "bias"])
def test_what_is_masked_reaches_neither_results_nor_gradients(where, poison):
    q, k, v, bias = tensors((1, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4), (2, 5, 5), grad=False)
    clean = {"q": q, "k": k, "v": v, "bias": bias}
    dirty = {name: t.clone() for name, t in clean.items()}
    if where == "bias":
        dirty["bias"][:, 0, 1:] = poison
    else:
        dirty[where][:, :, 4] = poison
    # Key 4 is seen by nobody, and row 4 sees nothing: its q is masked at every key.
    mask = (fg.kv <= fg.q) & (fg.kv < 4) & (fg.q < 4)
    t = torch.tensor(1.1, dtype=torch.float64, requires_grad=True)

    def both(values):
        leaves = [value.clone().requires_grad_() for value in values.values()]
        traced = attention(
            mask=mask,
            score=[fg.softcap(2.0), lambda s: s * fg.capture(t, "")],
            bias=leaves[3],
            return_lse=True,
        )
        outputs = run(traced, *leaves[:3])
        return outputs, gradients(outputs, [*leaves, t])

    for mine, theirs in zip(sum(both(dirty), ()), sum(both(clean), ()), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_nan_in_an_allowed_key_reaches_the_rows_that_see_it():
    q, k, v = tensors((1, 1, 4, 4), (1, 1, 4, 4), (1, 1, 4, 4), grad=False)
    k[0, 0, 2] = math.nan
    (out,) = run(attention(mask=fg.causal()), q, k, v)
    assert out[0, 0, :2].isfinite().all()
    assert out[0, 0, 2:].isnan().all()


def test_a_very_low_finite_bias_is_no_mask():
    q, k, v = tensors((1, 1, 3, 4), (1, 1, 3, 4), (1, 1, 3, 4), grad=False)
    bias = torch.full((3, 3), torch.finfo(torch.float32).min)
    (out,) = run(attention(bias=bias), q, k, v)
    torch.testing.assert_close(out[0, 0], v[0, 0].mean(0).expand(3, 4))


def test_softcap_comes_before_the_mask():
    q, k, v = tensors((1, 1, 2, 4), (1, 1, 2, 4), (1, 1, 2, 4), grad=False)
    (out,) = run(attention(mask=fg.causal(), score=fg.softcap(1.0)), q * 0, k, v)
    torch.testing.assert_close(out[0, 0, 0], v[0, 0, 0])


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("batch", [0, 2])
def test_lengths_of_zero(lengths, batch):
    q_len, kv_len = lengths
    q, k, v = tensors((batch, 2, q_len, 4), (batch, 1, kv_len, 4), (batch, 1, kv_len, 5))
    out, lse = run(attention(mask=fg.causal(), return_lse=True, dropout=0.5), q, k, v)
    assert out.shape == (batch, 2, q_len, 5)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    dq, dk, dv = torch.autograd.grad(out.sum() + lse.sum(), [q, k, v])
    assert all((g == 0).all() and g.shape == t.shape for g, t in zip((dq, dk, dv), (q, k, v), strict=True))


def test_ties_of_a_maximum_share_its_gradient():
    x = torch.tensor([[1.0, 3.0, 3.0]], dtype=torch.float64, requires_grad=True)
    node = ir.largest(ir.Input("x", 0, ("q", "kv"), "float", False), "kv")
    (value,) = evaluate_nodes([node], {node.x: x}, {"q": 1, "kv": 3})
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert gradient.tolist() == [[0.0, 0.5, 0.5]]


def test_integers_divide_as_python_does():
    for step in (-7, -2, -1, 2, 7):
        quotient, remainder = evaluate_nodes(
            [((fg.q - 9) // step).node, ((fg.q - 9) % step).node], {}, {"q": 19}
        )
        assert quotient.tolist() == [i // step for i in range(-9, 10)]
        assert remainder.tolist() == [i % step for i in range(-9, 10)]


def test_an_integer_divided_by_nothing_is_0_as_in_the_kernels():
    step = fg.scalar(0)
    (held,) = step.captures
    nodes = [((fg.q - 2) // step).node, ((fg.q - 2) % step).node]
    assert [x.tolist() for x in evaluate_nodes(nodes, {held.node: 0}, {"q": 5})] == [[0] * 5] * 2


def test_indices_are_clamped_into_the_table_and_gradients_add_up_there():
    table = torch.arange(4.0, dtype=torch.float64, requires_grad=True)
    held = fg.capture(table, "r")
    expr = held[fg.q - 3]
    (value,) = evaluate_nodes([expr.node], {held.node: table}, {"q": 9})
    assert value.tolist() == [0, 0, 0, 0, 1, 2, 3, 3, 3]
    value.sum().backward()
    assert table.grad.tolist() == [4, 1, 1, 3]


def test_scatter_is_the_adjoint_of_load():
    rng = random.Random(3)
    table = ir.Input("t", 0, ("h", "r"), "float", False)
    value = ir.Input("x", 1, ("h", "q"), "float", False)
    indices = (ir.index("h"), ir.sub(ir.mul(ir.index("q"), ir.Const(2)), ir.Const(3)))
    t, x = tensors((4, 5), (4, 6), seed=rng.randrange(100))
    sizes = {"hk": 2, "g": 2, "q": 6, "r": 5}
    loaded, scattered = evaluate_nodes(
        [ir.load(table, indices), ir.Scatter(table, indices, value)], {table: t, value: x}, sizes
    )
    (expected,) = torch.autograd.grad((loaded.reshape(4, 6) * x).sum(), t)
    torch.testing.assert_close(scattered.reshape(4, 5), expected)


def test_a_quotient_by_a_sum_over_keys_is_zero_where_that_is_zero():
    x = torch.tensor([[0.0, 0.0], [1.0, 3.0]], dtype=torch.float64, requires_grad=True)
    node = ir.Input("x", 0, ("q", "kv"), "float", False)
    share = ir.div(node, ir.total(node, "kv"))
    (value,) = evaluate_nodes([share], {node: x}, {"q": 2, "kv": 2})
    assert value.tolist() == [[0, 0], [0.25, 0.75]]
    (gradient,) = torch.autograd.grad(value[:, 0].sum(), x)
    torch.testing.assert_close(gradient, torch.tensor([[0, 0], [3 / 16, -1 / 16]], dtype=torch.float64))


def test_apply_refuses_nothing_and_selects_gradients():
    x = torch.tensor([math.nan, 2.0], dtype=torch.float64, requires_grad=True)
    y = apply("tanh", x)
    (gradient,) = torch.autograd.grad(y, x, torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert gradient[0] == 0
    assert gradient[1] == pytest.approx(1 - math.tanh(2.0) ** 2)


def test_values_may_be_given_in_the_place_of_nodes():
    symbol = ir.Symbol("m", ("b", "q"), "float")
    node = ir.sub(ir.to_float(ir.index("q")), symbol)
    (value,) = evaluate_nodes([node], {symbol: torch.tensor([[5.0]])}, {"b": 2, "q": 3})
    assert value.tolist() == [[-5.0, -4.0, -3.0]]
    with pytest.raises(UsageError, match="m was given no value"):
        evaluate_nodes([node], {}, {"b": 2, "q": 3})


def test_a_tile_is_a_part_of_the_whole():
    traced = attention(mask=fg.causal())
    mask = traced.graph.outputs[0].node
    q, k, v = tensors((1, 2, 9, 4), (1, 2, 11, 4), (1, 2, 11, 3), grad=False)
    environment = dict(zip(traced.graph.arguments, (q, k, v), strict=True))
    sizes = {"b": 1, "hk": 2, "g": 1, "q": 9, "kv": 11, "d": 4, "dv": 3}
    (whole,) = evaluate_nodes([mask], environment, sizes)
    (part,) = evaluate_nodes([mask], environment, sizes, {"q": torch.tensor([3, 4]), "hk": torch.tensor([1])})
    torch.testing.assert_close(part, whole[:, 1:, :, 3:5])


# ------------------------------------------------------------------------------------------------ dropout


def test_philox_gives_the_words_of_its_authors():
    # Known answers of Random123, kat_vectors, philox4x32 10.
    for counter, key, words in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ):
        found = philox([torch.tensor([c]) for c in counter], key)
        assert tuple(int(word) for word in found) == words


def philox_of_one(b, h, q, kv, seed, ordinal):
    """The language's sentence on dropout, element by element, in Python integers."""
    c = [b, h, (q // 16) * 8 + q % 8, (kv // 16) * 4 + (kv % 8) // 2]
    k = [seed % 2**32, (seed // 2**32 + ordinal) % 2**32]
    for _ in range(10):
        a, d = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [d // 2**32 ^ c[1] ^ k[0], d % 2**32, a // 2**32 ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    number = 4 * ((q % 16) // 8) + 2 * ((kv % 16) // 8) + kv % 2
    return c[number // 2] // (1 if number % 2 == 0 else 2**16) % 2**16


def test_dropout_bits_are_those_of_the_language():
    seed, rng = 0x1234_5678_9ABC_DEF0, random.Random(5)
    q, kv = torch.arange(40), torch.arange(50)
    bits = random_bits(torch.arange(2), torch.arange(3), q, kv, seed, ordinal=0xFFFFFFFF)
    assert bits.shape == (2, 3, 40, 50)
    for _ in range(300):
        place = rng.randrange(2), rng.randrange(3), rng.randrange(40), rng.randrange(50)
        assert int(bits[place]) == philox_of_one(*place, seed, 0xFFFFFFFF), place
    assert len(bits.unique()) > 0.9 * 65536 * (1 - math.exp(-bits.numel() / 65536))


def test_dropout_drops_by_bits_scales_and_leaves_the_statistics():
    q, k, v = tensors((1, 2, 20, 4), (1, 1, 30, 4), (1, 1, 30, 30))
    v = torch.eye(30, dtype=torch.float64)[None, None]
    plain, lse = run(attention(return_lse=True), q, k, v)
    dropped, same = run(attention(dropout=0.25, return_lse=True), q, k, v, seed=77)
    keep = random_bits(torch.arange(1), torch.arange(2), torch.arange(20), torch.arange(30), 77) >= 16384
    torch.testing.assert_close(dropped, torch.where(keep, plain / 0.75, 0.0))
    torch.testing.assert_close(same, lse, rtol=0, atol=0)


def test_dropout_of_all_gives_zeros_and_of_none_the_same_graph():
    q, k, v = tensors((1, 2, 5, 4), (1, 2, 6, 4), (1, 2, 6, 4))
    (out,) = run(attention(dropout=1.0), q, k, v)
    assert (out == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), [q, k, v]))
    assert attention(dropout=0.0).graph is attention().graph


# ------------------------------------------------------------------------------------------- the yardstick


def test_eager_rounds_every_operation_to_the_input_dtype():
    q, k, v = tensors((1, 2, 60, 32), (1, 2, 70, 32), (1, 2, 70, 32), dtype=torch.bfloat16, grad=False)
    traced = attention(mask=fg.causal())
    (ref,) = run(traced, q, k, v)
    (out,) = eager(traced.graph, (q, k, v), torch.bfloat16)
    assert out.dtype == torch.bfloat16
    s = q @ k.mT * torch.tensor(32**-0.5)
    s = s.masked_fill(torch.arange(70) > torch.arange(60)[:, None] + 10, -math.inf)
    usual = s.softmax(-1) @ v
    mine, theirs = (float((x.double() - ref).abs().max()) for x in (out, usual))
    assert theirs / 3 < mine < theirs * 3
    (exact,) = eager(traced.graph, (q, k, v), torch.float32)
    assert float((exact.double() - ref).abs().max()) < 1e-5


def test_eager_redoes_in_fp32_what_fp16_cannot_hold():
    q = torch.full((1, 1, 1, 16), 150.0, dtype=torch.float16)
    (out,) = eager(attention(scale=1.0).graph, (q, q, q, 1.0), torch.float16)  # the score is 360,000
    assert out.isfinite().all()
    assert (out == 150).all()


def test_tolerance_is_twice_the_error_of_eager_and_an_ulp():
    ref = torch.tensor([1.5, -3.0, math.inf], dtype=torch.float64)
    yardstick = torch.tensor([1.5 + 2**-8, -3.0, math.inf], dtype=torch.float64)
    ulp_at_3 = 2.0 * 2**-7
    assert tolerance(ref, yardstick, torch.bfloat16) == pytest.approx(2 * 2**-8 + ulp_at_3)
    assert tolerance(ref, yardstick, torch.bfloat16, gradient=True) == pytest.approx(3 * 2**-8 + 2 * ulp_at_3)
    assert ulp(1.0, torch.float32) == 2**-23
    assert ulp(0.0, torch.float16) == 2**-24


def test_what_lies_below_the_smallest_normal_number_may_be_0_in_16_bits():
    ref = torch.tensor([2.0**-127, -(2.0**-130), 0.0], dtype=torch.float64)
    assert compare(torch.zeros(3, dtype=torch.bfloat16), ref, ref).ok
    assert not compare(torch.zeros(3, dtype=torch.bfloat16), 4 * ref, 4 * ref).ok
    assert not compare(torch.full((3,), 2.0**-127).bfloat16(), 0 * ref, 0 * ref).ok
    for wider in (torch.float32, torch.float64):
        assert not compare(torch.zeros(3, dtype=wider), ref, ref).ok
    assert ulp(2.0**-20, torch.float16) == 2**-24


def test_comparison_accepts_the_allowed_error_and_no_more():
    ref = torch.tensor([1.0, 2.0, -math.inf, math.nan], dtype=torch.float64)
    good = ref.float() + torch.tensor([0.0, 2.0**-22, 0, 0])
    assert compare(good, ref, ref.float()).ok
    bad = ref.float() + torch.tensor([0.0, 2.0**-20, 0, 0])
    result = compare(bad, ref, ref.float())
    assert not result.ok
    assert "2.00000095 at (1,), not 2" in result.reason
    with pytest.raises(AssertionError, match="case 3: "):
        result.require("case 3")


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan, -1e30])
def test_comparison_holds_infinities_to_their_place_and_sign(value):
    ref = torch.tensor([1.0, -math.inf], dtype=torch.float64)
    assert not compare(torch.tensor([1.0, value]), ref, ref.float()).ok
    assert not compare(torch.tensor([math.nan, -math.inf]), ref, ref.float()).ok
    assert not compare(torch.tensor([1.0]), ref, ref.float()).ok
