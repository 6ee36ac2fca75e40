"""Random programs: rows of scores to weights, by sums and maxima of each row.

A program is a few lines of Python over a namespace ``X``: with `language` they build a graph.
"""

import random
import re
from types import SimpleNamespace

import fagen as fg
from streams import K, Q, V, scores

SEED = 2024

# Values that are not negative, and 0 where masked; t are the scores, and s, which are -inf where masked.
NUMERATORS = [
    "X.exp(s)",
    "X.exp(0.5 * s)",
    "X.relu(s)",
    "X.sigmoid(s)",
    "X.where(X.mask, t * t, 0.0)",
    "X.where(X.mask, abs(t) + 0.5, 0.0)",
    "X.relu(s) * X.sigmoid(t)",
    "X.where(X.odd, X.exp(s), 0.0)",
    "X.exp(s) + X.relu(s)",
]
SIGNED = ["X.where(X.mask, t, 0.0)", "X.where(X.mask, X.tanh(t) - 0.3, 0.0)", "X.relu(s) * X.tanh(t)"]
FACTORS = [
    "{x} / {l}",
    "{x} * (1 / {l})",
    "{x} / X.sqrt({l})",
    "{x} * {l}",
    "{x} / (1 + {l})",
    "{x} * X.log(1 + {l})",
]
KEEPING = [
    "X.relu({x})",
    "abs({x})",
    "X.where(X.odd, {x}, 0.0)",
    "X.sqrt(abs({x}))",
    "({x}) * X.tanh(t)",
    "2.5 * ({x})",
    "({x}) * X.sigmoid(t)",
    "({x}) / (1 + t * t)",
    "X.maximum({x}, 0.0)",
    "X.where(X.odd, {x}, 0.5 * ({x}))",
]
SPOILING = [
    "X.tanh({x})",
    "X.relu(abs({x}) - 0.1)",
    "abs({x}) + 0.2",
    "X.sigmoid({x})",
    "({x}) / (1 + abs({x}))",
    "X.maximum(abs({x}), 0.1)",
    "({x}) * ({x}) + ({x})",
    "abs({x}) + X.sigmoid(t)",
    "X.where(abs({x}) > 0.2, {x}, 0.0)",
]


class Writer:
    """Draws the lines of a program, from statistics to weights."""

    def __init__(self, draw):
        self.draw = draw
        self.lines = ["t = X.scores", "s = X.where(X.mask, t, -X.inf)"]
        self.sums, self.maxima = [], []
        self.saturated = None

    def line(self, letter, value):
        name = f"{letter}{len(self.lines)}"
        self.lines.append(f"{name} = {value}")
        return name

    def statistic(self):
        kind = self.draw.choice(["sum", "sum", "max", "softmax", "signed", "later"])
        if kind == "sum":
            self.sums.append(self.line("l", f"X.sum({self.draw.choice(NUMERATORS)})"))
        elif kind == "signed":
            total = self.line("c", f"X.sum({self.draw.choice(SIGNED)})")
            self.sums.append(self.line("l", f"{total} * {total} + 0.5"))
        elif kind == "max":
            self.maxima.append(self.line("m", f"X.max({self.draw.choice(['s', '0.5 * s', 's + 1.0'])})"))
        elif kind == "softmax":
            m = self.line("m", "X.max(s)")
            self.maxima.append(m)
            self.sums.append(self.line("l", f"X.sum(X.exp(s - {m}))"))
            self.saturated = m, self.sums[-1]
        elif self.sums:
            value = self.factored(self.draw.choice(NUMERATORS))
            if self.draw.random() < 0.3:
                value = self.draw.choice(SPOILING).format(x=value)
            self.sums.append(self.line("l", f"X.sum(X.where(X.mask, abs({value}), 0.0)) + 0.1"))

    def factored(self, x, beside=""):
        """``x`` with a factor: of a sum that is not yet in it or ``beside`` it, or it might cancel."""
        others = [name for name in self.sums if not re.search(rf"\b{name}\b", x + beside)]
        return self.draw.choice(FACTORS).format(x=x, l=self.draw.choice(others)) if others else x

    def exponential(self):
        """With a maximum, where there is one."""
        if self.saturated and self.draw.random() < 0.5:
            m, l = self.saturated  # noqa: E741
            return self.draw.choice(
                [f"X.exp(s - {m}) / {l}", f"X.exp(s - ({m} + X.log({l})))", f"X.exp(s - {m})"]
            )
        if self.maxima:
            m = self.draw.choice(self.maxima)
            form = self.draw.choice(
                ["s - {m}", "s - {m}", "2 * (s - {m})", "s - 0.5 * {m}", "s - 2 * {m}", "s + X.bias - {m}"]
            )
            return f"X.exp({form.format(m=m)})"
        return "X.exp(s)"

    def weights(self):
        x = self.draw.choice([self.exponential, lambda: self.draw.choice(NUMERATORS + SIGNED)])()
        for _ in range(self.draw.randint(1, 2)):
            x = self.factored(x)
        if self.draw.random() < 0.25:  # two exponentials may be out of range: a product has one
            if self.draw.random() < 0.5:
                x = f"{x} * {self.factored(self.draw.choice(NUMERATORS[2:6]), beside=x)}"
            else:
                others = NUMERATORS[2:6] if "m" in x else NUMERATORS  # exp(s - m) + exp(s) has a factor
                x = f"{x} + {self.factored(self.draw.choice(others))}"
        for _ in range(self.draw.randint(0, 2)):
            x = self.draw.choice(KEEPING).format(x=x)
        if self.draw.random() < 0.3:
            x = self.draw.choice(SPOILING).format(x=x)
        for _ in range(self.draw.randint(0, 1)):
            x = self.draw.choice(KEEPING).format(x=x)
        return x


def written(number):
    """The lines of a program."""
    writer = Writer(random.Random(f"{SEED} {number}"))
    for _ in range(writer.draw.randint(1, 3)):
        writer.statistic()
    lines = [f"w = X.where(X.mask, {writer.weights()}, 0.0)"]
    for line in writer.lines[::-1]:  # without statistics that nothing uses
        name = line.split()[0]
        if name in ("s", "t") or any(re.search(rf"\b{name}\b", later) for later in lines):
            lines.insert(0, line)
    return "\n".join(lines)


def run(lines, namespace):
    variables = {"X": namespace}
    exec(lines, variables)
    return variables["w"]


def language(q, k, masked, bias):
    """The program as a user writes it."""
    names = ("inf", "where", "exp", "log", "sqrt", "tanh", "relu", "sigmoid", "maximum")
    return SimpleNamespace(
        **{name: getattr(fg, name) for name in names},
        sum=lambda x: fg.sum(x, over="kv"),
        max=lambda x: fg.max(x, over="kv"),
        scores=scores(q, k),
        mask=fg.sliding_window(6, 2) if masked else fg.kv >= 0,
        odd=fg.kv % 2 == 1,
        bias=bias,
    )


def graph_of(lines, masked):
    def plain(q: Q, k: K, v: V):
        return fg.dot(run(lines, language(q, k, masked, None)), v, over="kv")

    def biased(q: Q, k: K, v: V, bias: fg.Tensor["q kv"]):
        return fg.dot(run(lines, language(q, k, masked, bias)), v, over="kv")

    return fg.program(biased if "X.bias" in lines else plain).trace().graph
