"""Programs: what is traced, what a graph is equal to, and when tracing is done again."""

import copy
import dataclasses
import functools
import math
import pickle
import re
import subprocess
import sys
import threading
import types

import pytest
import torch

import fagen as fg
from fagen.errors import DtypeError, UsageError
from fagen.ir import graph as ir
from fagen.ir.show import show_graph
from fagen.lang.program import Options, Program

Q, K, V = fg.Tensor["b h q d"], fg.Tensor["b hk kv d"], fg.Tensor["b hk kv dv"]


def constants_of(traced) -> set:
    nodes = ir.walk(output.node for output in traced.graph.outputs)
    return {node.value for node in nodes if isinstance(node, ir.Const)}


@fg.program
def plain(q: Q, k: K, v: V):
    """Attention and no more.

    Details.
    """
    s = fg.dot(q, k, over="d") * fg.rsqrt(fg.size("d"))
    return fg.dot(fg.softmax(s, over="kv"), v, over="kv"), fg.logsumexp(s)


def test_a_program_becomes_a_graph():
    graph = plain.trace().graph
    assert graph.name == "plain"
    assert graph.about == "Attention and no more."
    assert [a.name for a in graph.arguments] == ["q", "k", "v"]
    assert [a.position for a in graph.arguments] == [0, 1, 2]
    assert [(o.name, o.layout) for o in graph.outputs] == [
        ("out0", ("b", "h", "q", "dv")),
        ("out1", ("b", "h", "q")),
    ]
    assert repr(plain) == "<program plain>"


def test_outputs_follow_the_first_tensor():
    def program(first, outputs):
        @fg.program
        def made(q: fg.Tensor[first], k: K, v: V, w: fg.Tensor["t h"]):
            p = fg.softmax(fg.dot(q, k, over="d"))
            mixed = fg.dot(w, p, over="h")
            values = {"o": fg.dot(p, v, over="kv"), "p": p, "mixed": mixed, "d": fg.sum(q * k, over="kv")}
            return [values["o"], values["p"], values["mixed"], values["d"]]

        return [" ".join(o.layout) for o in made.trace().graph.outputs] == outputs

    assert program("b h q d", ["b h q dv", "b h q kv", "b t q kv", "b h q d"])
    assert program("b q h d", ["b q h dv", "b q h kv", "b t q kv", "b q h d"])
    assert program("q b h d", ["q b h dv", "q b h kv", "t q b kv", "q b h d"])


def test_tracing_again_gives_the_same_graph_and_does_no_work(monkeypatch):
    first = plain.trace()
    monkeypatch.setattr(Program, "_trace", lambda *_: pytest.fail("traced again"))
    assert plain.trace() is first


def test_names_are_labels():
    @fg.program
    def plain2(a: Q, b: K, c: V):
        t = fg.dot(a, b, over="d") * fg.rsqrt(fg.size("d"))
        return fg.dot(fg.softmax(t, over="kv"), c, over="kv"), fg.logsumexp(t)

    one, two = plain.trace().graph, plain2.trace().graph
    assert one != two
    assert [o.node.digest for o in one.outputs] == [o.node.digest for o in two.outputs]
    assert "a[b,h,q,d]" in show_graph(two)


def test_arguments_of_every_kind():
    @fg.program
    def program(
        q: Q,
        k: K,
        v: V,
        doc: fg.Tensor["b p", int],
        keep: fg.Tensor["kv", bool],
        temperature: fg.Tensor[""],
        scale: fg.Scalar,
        window: fg.Scalar[int],
    ):
        s = fg.dot(q, k, over="d") * scale / temperature
        mask = (doc[fg.b, fg.q] == doc[fg.b, fg.kv]) & keep & (fg.q - fg.kv <= window)
        return fg.dot(fg.softmax(fg.where(mask, s, -fg.inf)), v, over="kv")

    kinds = [(a.name, a.kind, isinstance(a, ir.Scalar)) for a in program.trace().graph.arguments]
    assert kinds[3:] == [
        ("doc", "int", False),
        ("keep", "bool", False),
        ("temperature", "float", False),
        ("scale", "float", True),
        ("window", "int", True),
    ]


def test_annotations_may_be_strings(tmp_path, monkeypatch):
    (tmp_path / "quoted.py").write_text(
        "from __future__ import annotations\nimport fagen as fg\n"
        "@fg.program\ndef one(q: fg.Tensor['b h q d'], k: fg.Tensor['b hk kv d']):\n"
        "    return fg.logsumexp(fg.dot(q, k, over='d'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import quoted

    assert [a.layout for a in quoted.one.trace().graph.arguments] == [
        ("b", "h", "q", "d"),
        ("b", "hk", "kv", "d"),
    ]


# ------------------------------------------------------------------------------------ what it reads changes


def windowed(window_of):
    """A program whose window is what ``window_of()`` reads."""

    def windowed(q: Q, k: K, v: V):
        s = fg.where(fg.q - fg.kv < window_of(), fg.dot(q, k, over="d"), -fg.inf)
        return fg.dot(fg.softmax(s), v, over="kv")

    return fg.program(windowed)


def uses(program, window) -> bool:
    """Whether the traced mask is ``q - kv < window``, alone."""
    expected = windowed(lambda: window).trace().graph
    return program.trace().graph.outputs[0].node is expected.outputs[0].node


GLOBAL_WINDOW = 128
SETTINGS = types.SimpleNamespace(window=128, inner=types.SimpleNamespace(window=128), windows=[128, 7])
BY_NAME = {"window": 128}
MODULE = types.ModuleType("settings_of_a_user")
MODULE.window = 128


class Model:
    shared = 128

    def __init__(self):
        self.window = 128

    def own(self):
        return self.window

    @property
    def computed(self):
        return self.window * 1

    def program(self, q: Q, k: K, v: V):
        s = fg.where(fg.q - fg.kv < self.window, fg.dot(q, k, over="d"), -fg.inf)
        return fg.dot(fg.softmax(s), v, over="kv")


class Slotted:
    __slots__ = ("window",)


@dataclasses.dataclass
class Settings:
    window: int = 128


def nested_helper():
    def deeper():
        return GLOBAL_WINDOW

    return deeper()


def test_a_factory_makes_programs_of_their_own_windows():
    def make(w):
        return windowed(lambda: w)

    assert uses(make(128), 128)
    assert uses(make(256), 256)


def test_a_closure_cell_that_changes():
    w = 128
    program = windowed(lambda: w)
    assert uses(program, 128)
    w = 256
    assert uses(program, 256)


@pytest.mark.parametrize("read", [lambda: GLOBAL_WINDOW, nested_helper], ids=["global", "nested helper"])
def test_a_global_that_changes(monkeypatch, read):
    program = windowed(read)
    assert uses(program, 128)
    monkeypatch.setitem(globals(), "GLOBAL_WINDOW", 256)
    assert uses(program, 256)


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (lambda: SETTINGS.window, lambda set_: set_(SETTINGS, "window", 256)),
        (lambda: SETTINGS.inner.window, lambda set_: set_(SETTINGS.inner, "window", 256)),
        (lambda: SETTINGS.windows[0], lambda set_: set_(SETTINGS, "windows", [256])),
        (lambda: Model.shared, lambda set_: set_(Model, "shared", 256)),
        (lambda: MODULE.window, lambda set_: set_(MODULE, "window", 256)),
    ],
    ids=["attribute", "nested attribute", "list replaced", "class attribute", "attribute of a module"],
)
def test_an_attribute_that_changes(monkeypatch, read, change):
    program = windowed(read)
    assert uses(program, 128)
    change(monkeypatch.setattr)
    assert uses(program, 256)


def test_contents_that_change():
    in_list, in_dict = windowed(lambda: SETTINGS.windows[0]), windowed(lambda: BY_NAME["window"])
    assert uses(in_list, 128)
    assert uses(in_dict, 128)
    SETTINGS.windows[0] = BY_NAME["window"] = 256
    assert uses(in_list, 256)
    assert uses(in_dict, 256)
    SETTINGS.windows[0] = BY_NAME["window"] = 128
    assert uses(in_list, 128)
    assert uses(in_dict, 128)


@pytest.mark.parametrize("how", ["own", "computed", "slots", "dataclass", "getattr", "vars"])
def test_state_of_an_object_that_changes(how):
    model, slotted, settings = Model(), Slotted(), Settings()
    slotted.window = 128
    reads = {
        "own": model.own,
        "computed": lambda: model.computed,
        "slots": lambda: slotted.window,
        "dataclass": lambda: settings.window,
        "getattr": lambda: getattr(model, "win" + "dow"),
        "vars": lambda: vars(model)["window"],
    }
    program = windowed(reads[how])
    assert uses(program, 128)
    model.window = slotted.window = settings.window = 256
    assert uses(program, 256)


def test_a_bound_method_as_a_program():
    model = Model()
    program = fg.program(model.program)
    assert program.name == "program"
    assert uses(program, 128)
    model.window = 256
    assert uses(program, 256)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.zeros(4))
        self.window = 128
        self.inner = torch.nn.Linear(3, 3)
        self.program = fg.program(self.attend)

    def attend(self, q: Q, k: K):
        s = fg.dot(q, k, over="d") + fg.capture(self.slopes, "h") * self.inner.in_features
        return fg.logsumexp(fg.where(fg.q - fg.kv < self.window, s, -fg.inf))


def test_a_method_of_a_torch_module(monkeypatch):
    layer = Layer()
    first = layer.program.trace()
    assert first.captured[0] is layer.slopes
    layer.slopes = torch.nn.Parameter(torch.ones(4))
    second = layer.program.trace()
    assert second.captured[0] is layer.slopes
    assert second.graph is first.graph
    layer.inner.in_features = 5
    assert 5.0 in constants_of(layer.program.trace())
    layer.window = 256
    assert 256 in constants_of(layer.program.trace()) or 255 in constants_of(layer.program.trace())
    monkeypatch.setattr(Program, "_trace", lambda *_: pytest.fail("traced again"))
    layer.program.trace()


def test_a_default_is_a_constant_of_the_program():
    def function(q: Q, k: K, v: V, window=128):
        s = fg.where(fg.q - fg.kv < window, fg.dot(q, k, over="d"), -fg.inf)
        return fg.dot(fg.softmax(s), v, over="kv")

    program = fg.program(function)
    assert uses(program, 128)
    function.__defaults__ = (256,)
    assert uses(program, 256)
    assert program.trace(window=64).graph.outputs == windowed(lambda: 64).trace().graph.outputs
    assert uses(fg.program(functools.partial(function, window=32)), 32)
    graph, values = program.bind((1, 2, 3), {"window": 64})
    assert graph is program.trace(window=64).graph
    assert values == (1, 2, 3)


def test_an_argument_may_have_a_default():
    @fg.program
    def program(q: Q, k: K, v: V, strength: fg.Scalar = 0.5):
        return fg.dot(fg.softmax(strength * fg.dot(q, k, over="d")), v, over="kv")

    assert program.bind((1, 2, 3), {})[1] == (1, 2, 3, 0.5)
    assert program.bind((1, 2, 3, 4.0), {})[1] == (1, 2, 3, 4.0)
    assert program.bind((1, 2, 3), {"strength": 4.0})[1] == (1, 2, 3, 4.0)
    assert program.bind((1, 2), {"v": 3})[1] == (1, 2, 3, 0.5)
    program.function.__defaults__ = (0.25,)
    assert program.bind((1, 2, 3), {})[1] == (1, 2, 3, 0.25)


def test_code_that_is_exchanged():
    def function():
        return 128

    program = windowed(function)
    assert uses(program, 128)
    function.__code__ = (lambda: 256).__code__
    assert uses(program, 256)


def test_a_helper_that_is_replaced(monkeypatch):
    program = windowed(lambda: nested_helper() * 1)
    assert uses(program, 128)
    monkeypatch.setitem(globals(), "nested_helper", lambda: 256)
    assert uses(program, 256)


@pytest.mark.parametrize(
    "width",
    [
        lambda own, one: (own if one else math).tau,
        lambda own, one: ((one and own) or math).tau,
    ],
)
def test_an_attribute_of_one_or_the_other(width):
    own = types.SimpleNamespace(tau=128)
    program = windowed(lambda: width(own, True))
    assert uses(program, 128)
    own.tau = 256
    assert uses(program, 256)


def test_names_of_trusted_modules_are_not_looked_for_elsewhere():
    own = types.SimpleNamespace(tau=128)
    program = windowed(lambda: int(own.tau + 0 * math.pi))
    assert uses(program, 128)
    first = program.trace()
    own.pi = 3
    assert program.trace() is first
    (watch, _, _) = next(iter(program._traced.values()))
    assert {name for owner, name, _ in watch._attributes if owner is own} <= {"tau"}


def test_what_cannot_be_watched_is_read_each_time():
    counter = iter(range(100, 200))
    program = windowed(lambda: next(counter))
    assert uses(program, 100)
    assert uses(program, 101)


def test_values_of_a_tensor_that_change_in_place():
    width = torch.tensor(128)
    program = windowed(width.item)
    assert uses(program, 128)
    first = program.trace()
    assert program.trace() is first
    width.fill_(256)
    assert uses(program, 256)


def test_two_lambdas_on_one_line():
    one, two = windowed(lambda: 128), windowed(lambda: 256)  # their source is the same line
    assert uses(one, 128)
    assert uses(two, 256)


def test_programs_without_state_are_not_traced_again(monkeypatch):
    program = windowed(lambda: nested_helper() + Model.shared - SETTINGS.inner.window)
    first = program.trace()
    monkeypatch.setattr(Program, "_trace", lambda *_: pytest.fail("traced again"))
    monkeypatch.setitem(globals(), "UNRELATED", 3)
    monkeypatch.setattr(SETTINGS, "unrelated", 5, raising=False)
    assert program.trace() is first


def test_a_captured_tensor_replaced_by_another_is_an_argument():
    tables = [torch.zeros(4), torch.ones(4)]

    @fg.program
    def program(q: Q, k: K):
        return fg.logsumexp(fg.dot(q, k, over="d") + fg.capture(tables[0], "h", name="table"))

    first = program.trace()
    assert [a.name for a in first.graph.arguments] == ["q", "k", "table"]
    assert first.captured == (tables[0],)
    tables[0] = tables[1]
    second = program.trace()
    assert second.graph is first.graph
    assert second.captured[0] is tables[1]


# ---------------------------------------------------------------------------------------- captures, scalars


def attention_over(mask):
    from fagen.lang.attention import attention

    return attention(mask=mask)


def test_a_fresh_capture_gives_the_same_graph_object():
    def traced(ids):
        doc = fg.capture(ids, "b p", name="doc")
        return attention_over(doc[fg.b, fg.q] == doc[fg.b, fg.kv])

    a, b = torch.zeros(1, 3, dtype=torch.int32), torch.ones(1, 3, dtype=torch.int32)
    held = [fg.capture(torch.zeros(2), "p") for _ in range(3)]  # other captures alive move the slots
    first = traced(a)
    del held[1]
    second = traced(b)
    del held
    third = traced(b)
    assert first.graph is second.graph is third.graph
    assert first.captured == (a,)
    assert second.captured[0] is b
    assert [(x.name, x.position) for x in first.graph.arguments] == [("q", 0), ("k", 1), ("v", 2), ("doc", 3)]


def test_captures_are_numbered_by_first_use_whatever_their_slots():
    def traced(swap):
        names = ("two", "one") if swap else ("one", "two")
        made = {name: fg.capture(torch.zeros(3), "p", name="t") for name in names}
        return attention_over(made["one"][fg.q] < made["two"][fg.kv]), made

    first, _ = traced(False)
    second, again = traced(True)
    assert first.graph is second.graph
    assert second.captured[0] is again["one"].captures[0].value
    assert [a.name for a in first.graph.arguments] == ["q", "k", "v", "t", "t_2"]


def test_a_capture_that_is_simplified_away_is_no_argument():
    held = fg.capture(torch.zeros(3, dtype=torch.int32), "p")
    traced = attention_over((held[fg.q] - held[fg.q] + fg.kv) <= fg.q)
    assert len(traced.graph.arguments) == 3
    assert traced.captured == ()


def test_scalars_are_arguments():
    def traced(x):
        return attention_over(fg.q - fg.kv <= fg.scalar(x))

    assert traced(3).graph is traced(500).graph
    assert traced(500).captured == (500,)
    assert traced(2.5).graph is not traced(3).graph  # a float is another kind of argument


def test_dead_graphs_leave_no_captures_behind():
    import gc
    import weakref

    class Held:
        shape, dtype = (3,), torch.int32

    tensor = Held()
    reference = weakref.ref(tensor)
    traced = attention_over(fg.capture(tensor, "p")[fg.kv] > 0)
    assert traced.captured == (tensor,)
    del tensor, traced
    gc.collect()
    assert reference() is None


def test_threads_trace_at_once():
    graphs, errors = [], []

    def work(i):
        try:
            for _ in range(50):
                doc = fg.capture(torch.full((1, 3), i, dtype=torch.int32), "b p")
                traced = attention_over((doc[fg.b, fg.q] == doc[fg.b, fg.kv]) & fg.causal())
                assert int(traced.captured[0][0, 0]) == i
                graphs.append(traced.graph)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len({id(graph) for graph in graphs}) == 1


def test_a_copied_model_keeps_its_program():
    model = {"program": plain, "size": [1]}
    assert copy.deepcopy(model)["program"] is plain
    assert copy.copy(plain) is plain


def written(q: Q, k: K, v: V):
    return fg.dot(fg.dot(q, k, over="d"), v, over="kv")


made = fg.program(written)


@fg.program
def defined_again(q: Q, k: K, v: V):
    return fg.dot(fg.dot(q, k, over="d"), v, over="kv")


first_defined = defined_again


@fg.program
def defined_again(q: Q, k: K, v: V):
    return fg.dot(2 * fg.dot(q, k, over="d"), v, over="kv")


def gone(q: Q, k: K, v: V):
    return fg.dot(fg.dot(q, k, over="d"), v, over="kv")


without_a_name = fg.program(gone)
del gone


def test_a_program_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps({"program": plain}))["program"] is plain
    other = plain.options(deterministic=True)
    found = pickle.loads(pickle.dumps(other))
    assert (found.function, found.option) == (plain.function, Options(deterministic=True))
    assert found.trace().graph is plain.trace().graph
    found = pickle.loads(pickle.dumps(made))
    assert isinstance(found, fg.api.Program)
    assert found.function is written

    @fg.program
    def local(q: Q, k: K):
        return fg.dot(q, k, over="d")

    for nameless in (local, fg.program(lambda q, k: q * k)):
        with pytest.raises(UsageError, match="has no name in its module, by which it could be pickled"):
            pickle.dumps(nameless)


def test_a_program_whose_name_leads_to_another_is_not_pickled():
    assert pickle.loads(pickle.dumps(defined_again)) is defined_again
    part = functools.update_wrapper(functools.partial(written, v=None), written)
    for lost in (first_defined, without_a_name, fg.program(part), first_defined.options(family="simt")):
        name = f"{lost.function.__module__}.{lost.function.__qualname__}"
        with pytest.raises(UsageError, match=f"cannot be pickled, as {re.escape(name)} is not this program"):
            pickle.dumps(lost)


# -------------------------------------------------------------------------------------------------- options


def test_options_make_another_program_with_the_same_graph():
    program = plain.options(deterministic=True)
    assert program.option == Options(deterministic=True)
    assert program.options(family="simt").option == Options(True, "simt")
    assert plain.option == Options()
    assert program.trace() is plain.trace()


# ------------------------------------------------------------------------------------------------- mistakes


def test_binding_a_call_by_place_and_by_name():
    assert plain.bind((1, 2, 3), {})[1] == (1, 2, 3)
    assert plain.bind((1,), {"v": 3, "k": 2})[1] == (1, 2, 3)
    for args, kwargs, sentence in (
        ((1, 2, 3, 4), {}, "plain: 4 arguments were given; it takes q, k, v"),
        ((1, 2), {}, "plain: v was not given; it takes q, k, v"),
        ((1, 2, 3), {"x": 1}, "plain: the argument x is unknown"),
        ((1, 2, 3), {"q": 1}, "plain: the argument q was given twice"),
    ):
        with pytest.raises(UsageError, match=sentence):
            plain.bind(args, kwargs)


def no_axes(q: Q, k): ...
def many(*q: Q): ...
def nothing(q: Q): ...
def a_number(q: Q):
    return 3


def a_mask(q: Q, k: K):
    return fg.kv <= fg.q


def unused(q: Q, k: K, v: V):
    return fg.logsumexp(fg.dot(q, k, over="d"))


def unknown_axis(q: Q, k: K):
    return fg.logsumexp(fg.dot(q, k, over="d") + fg.size("window"))


def no_keys(q: Q):
    return fg.where(fg.kv < 3, 1.0, 0.0) * fg.sum(q, over="d")


def unknown_name(q: "fg.Tensr['b']"): ...


def raw_tensor(q: Q, k: K):
    return fg.logsumexp(fg.dot(q, k, over="d") + torch.zeros(3))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (
            no_axes,
            r'no_axes: the parameter k declares no axes and has no default; write k: fg.Tensor\["b h q d"\]',
        ),
        (many, r"many: the parameter \*q declares no axes; name each argument"),
        (nothing, "nothing: it returns nothing; return an expression, or several"),
        (a_number, "a_number: it returns 3, which is no expression"),
        (a_mask, "a_mask: it returns kv <= q, which holds no floating-point values; return fg.where"),
        (unused, r"unused: no output depends on the argument v\[b,hk,kv,dv\]; use it, or leave it out"),
        (
            unknown_axis,
            "unknown_axis: the length of window is used, and no argument has that axis; the axes are",
        ),
        (
            no_keys,
            "no_keys: the position along kv is used, and no argument has that axis; the axes are b, d, h, q",
        ),
        (
            unknown_name,
            "unknown_name: an annotation names something unknown .*Tensr.*; write axes as a string",
        ),
        (
            raw_tensor,
            r"raw_tensor: a tensor of shape \(3,\) stands in an expression; name its axes: fg.capture",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_mistake_names_the_program(function, sentence):
    with pytest.raises((UsageError, DtypeError), match=sentence):
        fg.program(function).trace()


def test_a_program_is_a_function():
    with pytest.raises(DtypeError, match="program takes a function, not 3"):
        fg.program(3)


# ---------------------------------------------------------------------------------------------- a new start


def test_digests_are_equal_in_another_process():
    code = (
        "import fagen as fg\n"
        "from fagen.lang.attention import attention\n"
        "t = attention(mask=fg.causal() & fg.chunked(64) | fg.prefix_lm(7), score=fg.alibi(), dropout=.1)\n"
        "print([o.node.digest.hex() for o in t.graph.outputs], t.graph)\n"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_names_of_our_own_modules_are_looked_for_nowhere_else():
    module = torch.nn.Module()
    module.width = 128
    program = windowed(lambda: module.width)
    program.trace()
    (watch, _, _) = next(iter(program._traced.values()))
    assert {name for owner, name, _ in watch._attributes if owner is module} == {"width"}
