"""Images that were scaled twice or not at all, and healthy images of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, adam, case
from torch import Tensor, nn

Built = tuple[nn.Module, torch.optim.Optimizer, Train]
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def _train(convert: Callable[[Tensor], Tensor], channels: int = 3, num: int = 6) -> Built:
    """Train on noisy pictures of 8 bits, as `convert` makes them."""
    body = nn.Sequential(nn.Conv2d(channels, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(8, 4))

    def train(guard: Any) -> None:
        pictures = torch.rand(4, channels, 16, 16) * 120 + 60
        for _ in range(num):
            y = torch.randint(4, (16,))
            x = (pictures[y] + 40 * torch.randn(16, channels, 16, 16)).clamp(0, 255).byte()
            guard.step(lambda x, y: F.cross_entropy(model(x), y), convert(x), y)

    return model, adam(model), train


def normalize(x: Tensor) -> Tensor:
    """Return images with ImageNet's statistics undone."""
    return (x - MEAN) / DEVIATION


@case("pixel_scale", "4uiiurz1/pytorch-nested-unet#62: divided in the dataset, and again by Normalize")
def pixels_divided_twice(bug: bool) -> Built:
    return _train(lambda x: normalize(x.float() / 255 / (255 if bug else 1)))


@case("pixel_scale", "the same without statistics")
def plain_pixels_divided_twice(bug: bool) -> Built:
    return _train(lambda x: x.float() / 255 / (255 if bug else 1), channels=1)


@case("pixel_scale", "toandaominh1997/EfficientDet.Pytorch#137: pixels up to 255, statistics for 0 to 1")
def pixels_not_divided(bug: bool) -> Built:
    return _train(lambda x: normalize(x.float() / (1 if bug else 255)))


@case("pixel_scale", "normalised in the dataset, and again in the model")
def normalised_twice(bug: bool) -> Built:
    return _train(lambda x: normalize(normalize(x.float() / 255)) if bug else normalize(x.float() / 255))


@case("pixel_scale", "the same with 0.5 and 0.5")
def halved_twice(bug: bool) -> Built:
    return _train(lambda x: (x.float() / 255 - 0.75) * 4 if bug else (x.float() / 255 - 0.5) * 2)


@case(None, "raw pixels up to 255, which the model scales itself or not")
def raw_pixels(bug: bool) -> Built:
    return _train(lambda x: x.float())


@case(None, "pixels minus their mean, as Caffe's models get them")
def mean_subtracted(bug: bool) -> Built:
    return _train(lambda x: x.float() - 255 * MEAN)


@case(None, "pixels of which only the odd ones occur, between -1 and 1")
def odd_pixels(bug: bool) -> Built:
    return _train(lambda x: (x // 2 * 2 + 1).float() / 127.5 - 1)


@case(None, "images of few grey levels: drawings, masks, boards")
def few_levels(bug: bool) -> Built:
    return _train(lambda x: (x // 32).float() / 255 / 255)


@case(None, "images of 16 bits, dark")
def dark_images_of_16_bits(bug: bool) -> Built:
    return _train(lambda x: x.float() / 65535, channels=1)


@case(None, "counts that are standardised by their own mean and deviation")
def counts(bug: bool) -> Built:
    return _train(lambda x: (x.float() - x.float().mean()) / x.float().std(), channels=1)


@case(None, "noise")
def noise(bug: bool) -> Built:
    return _train(lambda x: torch.randn(len(x), 3, 16, 16))


@case(None, "interpolated and normalised")
def interpolated(bug: bool) -> Built:
    return _train(lambda x: normalize(F.interpolate(x.float() / 255, scale_factor=1.5, mode="bilinear")))
