"""Training: a small GPT learns to add, once with fagen's attention and once with each of torch's own.

Runs that start from the same seed and differ in nothing but who computes attention drift apart, as each
rounds differently. fagen's run must stay as close to torch's as these stay to each other, up to a factor of
two. On a GPU 300 steps; without one a few steps of a tiny model, on the emulator.
"""

import itertools
import time

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import fagen as fg

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
STEPS, BATCH, LENGTH, LAYERS, WIDTH, HEADS = (300, 32, 256, 4, 256, 4) if on_gpu else (8, 2, 48, 1, 32, 2)
LETTERS = "0123456789+=\n"


def texts(seed, count):
    """Random sums such as ``17+325=342``, a line each, as numbers of letters: (count, LENGTH + 1)."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        text = ""
        while len(text) <= LENGTH:
            a, b = torch.randint(1000, (2,), generator=draw).tolist()
            text += f"{a}+{b}={a + b}\n"
        rows.append([LETTERS.index(letter) for letter in text[: LENGTH + 1]])
    return torch.tensor(rows, device=device)


class Block(nn.Module):
    """Attention and a perceptron, each added to what came in."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(self.before(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))


class GPT(nn.Module):
    """The next letter of each position, from all before it."""

    def __init__(self, attend):
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(attend) for _ in range(LAYERS)))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS))

    def forward(self, x):
        x = self.letters(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.last(self.blocks(x)))


def losses(attend):
    """The loss of every step of a training from the one seed."""
    torch.manual_seed(0)
    model = GPT(attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(STEPS):
        text = DATA[step % len(DATA)]
        with torch.autocast(device, torch.bfloat16):
            loss = cross_entropy(model(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found).cpu()


def by_torch(backend):
    def attend(q, k, v):
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def by_fagen(q, k, v):
    return fg.attention(q, k, v, mask=fg.causal())


def apart(one, other):
    return (one - other).abs().max().item()


DATA = texts(1, min(STEPS, 50) * BATCH).view(-1, BATCH, LENGTH + 1)
BACKENDS = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
if on_gpu:
    BACKENDS.append(SDPBackend.EFFICIENT_ATTENTION)

theirs, start = {}, time.perf_counter()
for backend in BACKENDS:
    theirs[backend.name] = losses(by_torch(backend))
mine = losses(by_fagen)
print(f"{len(theirs) + 1} runs of {STEPS} steps in {time.perf_counter() - start:.0f} s")

steps = [*range(0, STEPS - 1, max(STEPS // 6, 1)), STEPS - 1]
print("losses of steps     ", *(f"{step:6d}" for step in steps))
for name, curve in {"fagen": mine, **theirs}.items():
    print(f"{name:<20}", *(f"{curve[step]:.4f}" for step in steps))
usual = max(apart(one, other) for one, other in itertools.combinations(theirs.values(), 2))
largest = max(apart(mine, curve) for curve in theirs.values())
print(f"torch's runs differ by up to {usual:.2e}, fagen's from them by up to {largest:.2e}")
assert mine[-1] < mine[0]
assert largest <= 2 * usual
