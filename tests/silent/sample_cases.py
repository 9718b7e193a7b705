"""Errors in what the samples of a batch hold, and healthy programs in which samples are easily mistaken for time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, adam, case, clusters
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
