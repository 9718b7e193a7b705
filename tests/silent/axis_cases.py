"""Axes that a reshape mixes inside each sample, and healthy programs with such reshapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, adam, case
from torch import Tensor, nn

Built = tuple[nn.Module, torch.optim.Optimizer, Train]


def _build(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], *shape: int) -> Built:
    """Train on noise of `shape` for each sample, with a class for each sample."""

    def train(guard: Any) -> None:
        for _ in range(5):
            guard.step(loss, torch.randn(16, *shape), torch.randint(4, (16,)))

    return model, adam(model), train


def _make_images(inputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


@case("wrong_loss_input", "discuss.pytorch.org: scores.view(N, C, T) for the cross entropy of a sequence")
def classes_moved_by_view(bug: bool) -> Built:
    model = nn.Linear(8, 5)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        scores = model(x)  # [samples, time, classes]
        return F.cross_entropy(
            scores.view(16, 5, 7) if bug else scores.transpose(1, 2), (x[..., 0] > 0).long() + y[:, None]
        )

    return _build(model, loss, 7, 8)


@case("mixed_channels", "discuss.pytorch.org: images of [N, H, W, C] are reshaped to [N, C, H, W]")
def channels_moved_by_reshape(bug: bool) -> Built:
    model = _make_images(3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        image = x.reshape(16, 3, 8, 8) if bug else x.permute(0, 3, 1, 2)
        return F.cross_entropy(model(image / 2), y)

    return _build(model, loss, 8, 8, 3)


@case("mixed_channels", "the tokens of a vision transformer are reshaped to a map of features")
def tokens_moved_by_reshape(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.images = nn.Linear(8, 6), _make_images(6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.tokens(x)  # [samples, 4 * 4 tokens, features]
            return self.images((h if bug else h.transpose(1, 2)).reshape(16, 6, 4, 4))

    model = Net()
    return _build(model, lambda x, y: F.cross_entropy(model(x), y), 16, 8)


@case(None, "a layer makes all of an image at once, so the order of its numbers is free")
def image_from_one_layer(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.images = nn.Linear(8, 4 * 4 * 6), _make_images(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.images(self.inner(x).view(16, 4, 4, 6).reshape(16, 6, 4, 4))

    model = Net()
    return _build(model, lambda x, y: F.cross_entropy(model(x), y), 8)


@case(None, "places are folded and unfolded again, with as many channels as places")
def places_unfolded(bug: bool) -> Built:
    model = _make_images(16)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x.reshape(16, 16, 4, 4)), y)  # [samples, channels, places]

    return _build(model, loss, 16, 16)


@case(None, "one channel, or one place: nothing can be mixed")
def nothing_to_mix(bug: bool) -> Built:
    model, scores = _make_images(1), nn.Linear(8, 4)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        one_place = scores(x.flatten(1)[:, None, :8]).view(16, 4, 1)
        return F.cross_entropy(model(x.reshape(16, 1, 8, 8)), y) + F.cross_entropy(one_place, y[:, None])

    return _build(nn.ModuleList([model, scores]), loss, 8, 8, 1)


@case(None, "heads are split and joined, and a sequence goes through a convolution")
def heads_and_convolutions(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.conv, self.out = nn.Linear(8, 8), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x).view(16, 6, 2, 4).transpose(1, 2)  # [samples, heads, time, features]
            h = (h @ h.transpose(2, 3)).softmax(-1) @ h
            h = h.transpose(1, 2).reshape(16, 6, 8)
            return self.out(self.conv(h.transpose(1, 2)).mean(2))

    model = Net()
    return _build(model, lambda x, y: F.cross_entropy(model(x), y), 6, 8)
