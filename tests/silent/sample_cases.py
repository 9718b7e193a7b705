"""Errors in what the samples of a batch hold, and healthy programs in which samples are easily mistaken for time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, adam, case, clusters, mlp
from torch import Tensor, nn

Built = tuple[nn.Module, torch.optim.Optimizer, Train]


@case(None, "a recurrent layer, batch first, and as many time steps as samples")
def as_many_steps_as_samples(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x)[0][:, -1])

    model = Net()

    def train(guard: Any) -> None:
        for x, y in clusters(6, rows=8):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x.view(8, 1, 8).repeat(1, 4, 1).view(8, 8, 4), y)

    return model, adam(model), train


@case(None, "the same, with time steps that a convolution makes")
def as_many_steps_behind_a_convolution(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.rnn, self.out = nn.Conv1d(1, 4, 4, stride=4), nn.LSTM(4, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(self.conv(x).permute(2, 0, 1))[0][-1])  # [steps, samples, features]

    model = Net()

    def train(guard: Any) -> None:
        for x, y in clusters(6, rows=8):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x.repeat(1, 4)[:, None], y)

    return model, adam(model), train


def _train_on_tables(loss: Any, make_column: Any, num: int = 70) -> Train:
    """Train on points of four classes beside a column that is made from their labels."""

    def train(guard: Any) -> None:
        for x, y in clusters(num):
            guard.step(loss, torch.cat([x, make_column(y).float()[:, None]], 1), y)

    return train


@case("labels_in_inputs", "the column of the target was not dropped from the features")
def label_among_the_features(bug: bool) -> Built:
    model = mlp(9, 16, 4)
    column = (lambda y: y) if bug else (lambda y: y[torch.randperm(len(y))])
    return model, adam(model), _train_on_tables(lambda x, y: F.cross_entropy(model(x), y), column)


@case("labels_in_inputs", "the same for two classes and a table that was standardised with its target")
def standardised_label_among_the_features(bug: bool) -> Built:
    model = mlp(9, 16, 1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(x), (y > 1).float()[:, None])

    def column(y: Tensor) -> Tensor:
        return ((y > 1).float() - 0.5) / 0.47 if bug else y % 2

    return model, adam(model), _train_on_tables(loss, column)


@case(None, "a feature that tells the class in all but a few rows")
def a_very_good_feature(bug: bool) -> Built:
    model = mlp(9, 16, 4)
    train = _train_on_tables(
        lambda x, y: F.cross_entropy(model(x), y), lambda y: torch.where(torch.rand(len(y)) < 0.99, y, 3 - y)
    )
    return model, adam(model), train


@case(None, "the number of the task is a feature, and each task has labels of its own; another is a time in seconds")
def tasks_and_times(bug: bool) -> Built:
    model = mlp(10, 16, 4)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        times = 1.7e9 + 1e4 * torch.rand(len(y), 1)
        return F.cross_entropy(model(torch.cat([x, times], 1)) / 1e9, y)

    return model, adam(model), _train_on_tables(loss, lambda y: y // 2)


@case(None, "an event so rare that a feature follows it by chance")
def rare_events(bug: bool) -> Built:
    model = mlp(9, 16, 2)

    def train(guard: Any) -> None:
        for step, (x, _) in enumerate(clusters(70)):
            rare = torch.zeros(16, dtype=torch.long)
            rare[0] = step % 20 == 3
            guard.step(lambda x, y: F.cross_entropy(model(x), y), torch.cat([x, rare[:, None].float()], 1), rare)

    return model, adam(model), train


@case(None, "the value to predict is one of two coordinates: a boundary condition of a differential equation")
def boundary_values(bug: bool) -> Built:
    model = mlp(2, 16, 1)

    def train(guard: Any) -> None:
        for _ in range(70):
            x = torch.rand(16, 2)
            guard.step(lambda x: F.mse_loss(model(x), x[:, :1]), x)

    return model, adam(model), train


class Positions(nn.Module):
    """Encodings of [place, 1, feature], time first as in torch's tutorial, in front of attention."""

    def __init__(self, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.out, self.add = nn.Linear(4, 6), nn.Linear(6, 4), add
        self.register_buffer("table", torch.randn(64, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.add(self.inner(x), self.table)
        return self.out(((h @ h.transpose(1, 2)).softmax(-1) @ h).mean(1))


@case("mixed_samples", "pytorch tutorial's PositionalEncoding, time first, in a model that is batch first")
def positions_of_samples(bug: bool) -> Built:
    def add(x: Tensor, table: Tensor) -> Tensor:
        return x + table[: x.size(0)] if bug else x + table[: x.size(1)].transpose(0, 1)

    model = Positions(add)

    def train(guard: Any) -> None:
        for x, y in clusters(5):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x.view(16, 2, 4), y)

    return model, adam(model), train


@case(None, "the same encodings in a model that is time first")
def positions_of_steps(bug: bool) -> Built:
    class TimeFirst(Positions):
        def forward(self, x: Tensor) -> Tensor:
            h = (self.inner(x.transpose(0, 1)) + self.table[: x.size(1)]).transpose(0, 1)
            return self.out(((h @ h.transpose(1, 2)).softmax(-1) @ h).mean(1))

    model = TimeFirst(lambda x, table: x)

    def train(guard: Any) -> None:
        for x, y in clusters(5):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x.view(16, 2, 4), y)
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x.view(16, 2, 4).repeat(1, 8, 1), y)

    return model, adam(model), train


@case(None, "the first of many vectors that belong to the samples: a short batch takes as many as it has")
def conditions_of_samples(bug: bool) -> Built:
    model, many = Positions(lambda x, table: x + many[: x.size(0)]), torch.randn(64, 1, 6)

    def train(guard: Any) -> None:
        for x, y in clusters(5):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x.view(16, 2, 4), y)

    return model, adam(model), train


@case(None, "words of a sentence have a place and a tag each, in a batch of one sentence")
def places_in_one_sentence(bug: bool) -> Built:
    class Tagger(Positions):
        def forward(self, x: Tensor) -> Tensor:
            return self.out((self.inner(x)[:, None] + self.table[: len(x)])[:, 0])

    model = Tagger(lambda x, table: x)

    def train(guard: Any) -> None:
        for x, y in clusters(5):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x[:, :4], y)

    return model, adam(model), train
