"""Tiny training programs: each has an architecture and a task, a loss above 0, and a step of about a millisecond.

`PROGRAMS` maps a name to a function without arguments that makes one `Program` under torch's current seed. `HELD_OUT`
names those that no model is ever trained on: neither their architecture nor their task occurs among the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Draw = Callable[[int], tuple[Tensor, ...]]
HELD_OUT = ("adding_rnn", "gan", "contrastive", "vae", "mixer", "graph")


@dataclass(frozen=True)
class Program:
    """A model, the data of its batches, and the loss of one batch; the first tensor of a batch is its input."""

    model: nn.Module
    draw: Draw
    loss: Callable[..., Tensor]


def stack(widths: list[int], activation: type[nn.Module]) -> nn.Sequential:
    """Return linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Linear(a, b), *([activation()] if i < len(widths) - 2 else [])]
    return nn.Sequential(*layers)


def pick(*choices: float) -> float:
    """Pick one under torch's seed."""
    return choices[int(torch.randint(len(choices), ()))]


def clusters(num_classes: int, width: int, spread: float, noise: float) -> Draw:
    """Points around centres; some of the labels are wrong."""
    centres = torch.randn(num_classes, width)

    def draw(n: int) -> tuple[Tensor, ...]:
        labels = torch.randint(num_classes, (n,))
        points = centres[labels] + spread * torch.randn(n, width)
        wrong = torch.rand(n) < noise
        return points, torch.where(wrong, torch.randint(num_classes, (n,)), labels)

    return draw


def images(num_classes: int, size: int, noise: float) -> Draw:
    """Patterns with one channel, shifted and noisy."""
    patterns = torch.randn(num_classes, 1, size, size)

    def draw(n: int) -> tuple[Tensor, ...]:
        labels = torch.randint(num_classes, (n,))
        shift = int(torch.randint(3, ()))
        return patterns[labels].roll(shift, -1) + noise * torch.randn(n, 1, size, size), labels

    return draw


def classify(model: nn.Module) -> Callable[..., Tensor]:
    """Return the cross entropy of the model's output."""
    return lambda x, y: F.cross_entropy(model(x), y)


# --- training programs -----------------------------------------------------------------------------------------------


def mlp_regression() -> Program:
    """Fit the outputs of a wider network."""
    width = int(pick(8, 16, 32))
    teacher, model = stack([width, 32, 1], nn.Tanh), stack([width, 32, 32, 1], nn.ReLU)
    noise = pick(0.0, 0.1, 0.5)

    @torch.no_grad()
    def draw(n: int) -> tuple[Tensor, ...]:
        x = torch.randn(n, width)
        return x, 3.0 * teacher(x) + noise * torch.randn(n, 1)

    return Program(model, draw, lambda x, y: F.mse_loss(model(x), y))


def mlp_classes() -> Program:
    model = stack([16, 32, 32, 8], nn.GELU if pick(0, 1) else nn.ReLU)
    return Program(model, clusters(8, 16, pick(0.5, 1.0, 2.0), pick(0.0, 0.1)), classify(model))


def deep_tanh() -> Program:
    """Ten layers without normalisation."""
    model = stack([16, *[24] * 9, 4], nn.Tanh if pick(0, 1) else nn.SiLU)
    return Program(model, clusters(4, 16, pick(0.5, 1.5), 0.05), classify(model))


def deep_linear() -> Program:
    """A product of matrices that should become the target matrix; gradients grow with a power of the weights."""
    depth = int(pick(3, 4, 5))
    target = torch.randn(8, 8) / math.sqrt(8)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(depth)])

    def draw(n: int) -> tuple[Tensor, ...]:
        x = torch.randn(n, 8)
        return x, x @ target.T

    return Program(model, draw, lambda x, y: (model(x) - y).square().sum(-1).mean())


def conv_classes() -> Program:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 16, 6),
    )  # fmt: skip
    return Program(model, images(6, 8, pick(0.5, 1.0, 2.0)), classify(model))


def conv_normalised() -> Program:
    """The same with BatchNorm or GroupNorm."""
    norm = (lambda: nn.BatchNorm2d(8)) if pick(0, 1) else (lambda: nn.GroupNorm(2, 8))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), norm(), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1), norm(), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 16, 6),
    )  # fmt: skip
    return Program(model, images(6, 8, pick(0.5, 1.0, 2.0)), classify(model))


class Attention(nn.Module):
    """One head of causal self-attention and a feed-forward part, normalised before or not at all."""

    def __init__(self, width: int, *, norm: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.LayerNorm(width) if norm else nn.Identity() for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = stack([width, 2 * width, width], nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (batch, length, length)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        x = x + self.out(scores.masked_fill(mask, -1e9).softmax(-1) @ v)
        return x + self.feed(self.second(x))


class Language(nn.Module):
    """Predict the next token of a Markov chain."""

    def __init__(self, vocabulary: int, width: int, depth: int, *, norm: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(0.1 * torch.randn(12, width))
        self.blocks = nn.Sequential(*[Attention(width, norm=norm) for _ in range(depth)])
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places)))


def transformer() -> Program:
    model = Language(16, 16, int(pick(1, 2)), norm=bool(pick(0, 1, 1)))
    chain = (2.0 * torch.randn(16, 16)).softmax(-1)

    def draw(n: int) -> tuple[Tensor, ...]:
        rows = [torch.randint(16, (n,))]
        for _ in range(12):
            rows.append(torch.multinomial(chain[rows[-1]], 1)[:, 0])
        return (torch.stack(rows, 1),)  # (batch, 13)

    return Program(model, draw, lambda x: F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()))


def autoencoder() -> Program:
    """Pass a few hidden factors through a narrow layer."""
    mix = torch.randn(4, 24)
    model = stack([24, 16, 4, 16, 24], nn.ReLU if pick(0, 1) else nn.Tanh)

    def draw(n: int) -> tuple[Tensor, ...]:
        return (torch.randn(n, 4) @ mix + 0.1 * torch.randn(n, 24),)

    return Program(model, draw, lambda x: F.mse_loss(model(x), x))


class Gated(nn.Module):
    """A GRU that answers after the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(5, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 16)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state)


def gru_memory() -> Program:
    """Repeat the first symbol after six steps of noise."""
    model = Gated()

    def draw(n: int) -> tuple[Tensor, ...]:
        symbols = torch.randint(4, (n,))
        x = 0.3 * torch.randn(n, 7, 5)
        x[:, 0, :4] += F.one_hot(symbols, 4)
        return x, symbols

    return Program(model, draw, classify(model))


def value_learning() -> Program:
    """Learn values from their own estimates, off policy: the estimates can feed back on themselves."""
    model = stack([6, 24, 1], nn.Tanh) if pick(0, 1) else stack([6, 24, 24, 1], nn.ReLU)
    discount, push = pick(0.8, 0.95, 0.99), pick(1.0, 1.1, 1.3)
    move = push * torch.linalg.qr(torch.randn(6, 6))[0]

    def draw(n: int) -> tuple[Tensor, ...]:
        state = torch.randn(n, 6)
        return state, state @ move + 0.1 * torch.randn(n, 6), state[:, :1].tanh() + 0.3 * torch.randn(n, 1)

    def loss(state: Tensor, after: Tensor, reward: Tensor) -> Tensor:
        with torch.no_grad():
            target = reward + discount * model(after)
        return F.mse_loss(model(state), target)

    return Program(model, draw, loss)


def linear_model() -> Program:
    """Least squares or logistic regression on badly scaled features."""
    model = nn.Linear(12, 1)
    scales, truth = torch.logspace(-1, 0.5, 12), torch.randn(12, 1)
    binary = bool(pick(0, 1))

    def draw(n: int) -> tuple[Tensor, ...]:
        x = torch.randn(n, 12) * scales
        y = x @ truth + 0.3 * torch.randn(n, 1)
        return x, (y > 0).float() if binary else y

    loss = F.binary_cross_entropy_with_logits if binary else F.mse_loss
    return Program(model, draw, lambda x, y: loss(model(x), y))


class Factors(nn.Module):
    """Ratings as products of embeddings."""

    def __init__(self, num: int, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Embedding(num, width), nn.Embedding(num, width)

    def forward(self, pairs: Tensor) -> Tensor:
        return (self.left(pairs[:, 0]) * self.right(pairs[:, 1])).sum(-1)


def ratings() -> Program:
    model = Factors(20, 6)
    truth = torch.randn(20, 3) @ torch.randn(3, 20)

    def draw(n: int) -> tuple[Tensor, ...]:
        pairs = torch.randint(20, (n, 2))
        return pairs, truth[pairs[:, 0], pairs[:, 1]] + 0.2 * torch.randn(n)

    return Program(model, draw, lambda pairs, y: F.mse_loss(model(pairs), y))


# --- held-out programs -----------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A recurrent network without gates."""

    def __init__(self, gain: float, activation: str) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(2, 16, nonlinearity=activation), nn.Linear(16, 1)
        with torch.no_grad():
            self.cell.weight_hh.copy_(gain * torch.eye(16))

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 16)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state)


def adding_rnn() -> Program:
    """Add the two marked numbers of a sequence."""
    model = Plain(pick(0.9, 1.0, 1.1), "relu" if pick(0, 1) else "tanh")

    def draw(n: int) -> tuple[Tensor, ...]:
        numbers, marks = torch.rand(n, 8), torch.zeros(n, 8)
        marks.scatter_(1, torch.rand(n, 8).topk(2, 1).indices, 1.0)
        return torch.stack([numbers, marks], -1), (numbers * marks).sum(1, keepdim=True)

    return Program(model, draw, lambda x, y: F.mse_loss(model(x), y))


class Adversaries(nn.Module):
    """A generator and a discriminator, trained at once."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = stack([4, 24, 2], nn.ReLU), stack([2, 24, 24, 1], nn.LeakyReLU)

    def forward(self, real: Tensor, seed: Tensor) -> Tensor:
        made = self.generator(seed)
        yes, no = self.judge(real), self.judge(made.detach())
        frozen = {name: p.detach() for name, p in self.judge.named_parameters()}
        fooled = torch.func.functional_call(self.judge, frozen, (made,))
        return F.softplus(-yes).mean() + F.softplus(no).mean() + F.softplus(-fooled).mean()


def gan() -> Program:
    """Generate points on a ring."""
    model = Adversaries()

    def draw(n: int) -> tuple[Tensor, ...]:
        angle = 2 * math.pi * torch.rand(n)
        ring = torch.stack([angle.cos(), angle.sin()], 1)
        return ring + 0.05 * torch.randn(n, 2), torch.randn(n, 4)

    return Program(model, draw, model)


class Towers(nn.Module):
    """Two encoders and a learnt temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = stack([12, 24, 8], nn.ReLU), stack([10, 24, 8], nn.ReLU)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        logits = self.log_scale.exp() * left @ right.T
        target = torch.arange(len(a))
        return F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)


def contrastive() -> Program:
    """Two views of the same hidden factors."""
    model = Towers()
    first, second = torch.randn(4, 12), torch.randn(4, 10)

    def draw(n: int) -> tuple[Tensor, ...]:
        hidden = torch.randn(max(4, n), 4)
        return hidden @ first + 0.3 * torch.randn(max(4, n), 12), hidden @ second + 0.3 * torch.randn(max(4, n), 10)

    return Program(model, draw, model)


class Variational(nn.Module):
    """Reconstruction and divergence; the standard deviation goes through an exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = stack([16, 24, 6], nn.ReLU), stack([3, 24, 16], nn.ReLU)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, -1)
        hidden = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).sum(-1)
        return ((self.decode(hidden) - x).square().sum(-1) + divergence).mean()


def vae() -> Program:
    model = Variational()
    mix = torch.randn(3, 16)

    def draw(n: int) -> tuple[Tensor, ...]:
        return ((torch.randn(n, 3) @ mix).tanh() + 0.1 * torch.randn(n, 16),)

    return Program(model, draw, model)


class Mixer(nn.Module):
    """Mixes patches over positions, then over channels; residual."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 12, 2, stride=2)
        self.norms = nn.ModuleList([nn.LayerNorm(12) if norm else nn.Identity() for _ in range(4)])
        self.places = nn.ModuleList([stack([16, 16, 16], nn.GELU) for _ in range(2)])
        self.channels = nn.ModuleList([stack([12, 24, 12], nn.GELU) for _ in range(2)])
        self.head = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)  # (batch, 16, 12)
        for i, (places, channels) in enumerate(zip(self.places, self.channels)):
            x = x + places(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


def mixer() -> Program:
    """Classify which of six shapes was drawn, at a random brightness."""
    model = Mixer(norm=bool(pick(0, 1)))
    grid = torch.linspace(-1, 1, 8)
    shapes = torch.stack([((i + 1) * (grid[:, None] * math.cos(i) + grid * math.sin(i))).sin() for i in range(6)])

    def draw(n: int) -> tuple[Tensor, ...]:
        labels = torch.randint(6, (n,))
        bright = 0.5 + torch.rand(n, 1, 1, 1)
        return bright * shapes[labels][:, None] + 0.3 * torch.randn(n, 1, 8, 8), labels

    return Program(model, draw, classify(model))


class Graph(nn.Module):
    """Three rounds of messages between neighbours, summed and not averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = nn.ModuleList([nn.Linear(6 if i == 0 else 12, 12) for i in range(3)])
        self.head = nn.Linear(12, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for one in self.rounds:
            nodes = (nodes + edges @ nodes if nodes.shape[-1] == 6 else nodes + 0.5 * edges @ nodes).clamp(-1e30, 1e30)
            nodes = one(nodes).relu()
        return self.head(nodes.sum(1))


def graph() -> Program:
    """Sum how similar neighbours are."""
    model = Graph()

    def draw(n: int) -> tuple[Tensor, ...]:
        edges = (torch.rand(n, 8, 8) < 0.25).float().triu(1)
        edges = edges + edges.transpose(1, 2)
        nodes = torch.randn(n, 8, 6)
        alike = (edges * (nodes @ nodes.transpose(1, 2) / 6)).sum((1, 2))
        return nodes, edges, alike[:, None]

    return Program(model, draw, lambda nodes, edges, y: F.mse_loss(model(nodes, edges), y))


TRAINED_ON = (
    *(mlp_regression, mlp_classes, deep_tanh, deep_linear, conv_classes, conv_normalised),
    *(transformer, autoencoder, gru_memory, value_learning, linear_model, ratings),
)
PROGRAMS: dict[str, Callable[[], Program]] = {
    make.__name__: make for make in (*TRAINED_ON, adding_rnn, gan, contrastive, vae, mixer, graph)
}
