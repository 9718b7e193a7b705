"""PixelWatch: images that the model is called with -> a PixelScan: are they scaled as their statistics expect?

Pixels of 8 bits lie on a grid of 256 values, and stay on one when they are divided by 255 and normalised. So an image
tells how it was made: with the usual statistics (ImageNet, CIFAR, CLIP, 0.5) undone, pixels divided once are multiples
of 1/255, pixels divided twice multiples of 1/255 squared, and pixels that were not divided whole numbers. Only images
that lie on a wrong grid, and on no right one, in two batches, are reported; those that were interpolated after their
conversion lie on none. Cost: reductions of 6,000 pixels in the first call, with one asynchronous copy, and in the
second if the first was suspicious or is not known yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.facts.program import PixelScan
from steadygrad.measure.rows import PendingRows, is_readable, send_rows
from steadygrad.measure.transfer import Transfer
from steadygrad.state.tree import find_tensors

NUM_BATCHES = 2
NUM_SAMPLED = 2048
"""Pixels of each channel."""
FEWEST_PIXELS = 8
"""Of an image's height and width."""
STATISTICS = {
    "0 and 1": ((0.0,) * 3, (1.0,) * 3),
    "0.5 and 0.5": ((0.5,) * 3, (0.5,) * 3),
    "ImageNet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "CIFAR": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "CIFAR (0.2023)": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "CLIP": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "MNIST": ((0.1307,) * 3, (0.3081,) * 3),
}
"""Name -> means and standard deviations of the channels, for pixels between 0 and 1."""
NEAR = 0.02
"""Distance from a whole number: rounding of float32 leaves 0.004 where the pixels were divided twice."""
ON_GRID = 0.9
"""Share of the pixels on a grid; others may have been erased or padded. By chance it is 2 * NEAR."""
FEWEST_LEVELS = 32
"""Different values, below which an image is a drawing or a mask, and may lie on any grid."""
PATTERNS = ("right", "divided_twice", "not_divided", "normalised_twice")


class PixelWatch:
    """Looks at the first calls; `take` returns what is certain."""

    def __init__(self, transfer: Transfer | None = None) -> None:
        self._transfer = transfer
        self._pending: list[tuple[int, str, PendingRows]] = []
        self._found: set[tuple[str, str]] | None = None
        self._num_left = self._num_noted = NUM_BATCHES

    @property
    def wants_more(self) -> bool:
        """Whether the next call is to be looked at."""
        return self._num_noted > 0

    @property
    def has_news(self) -> bool:
        """Whether `take` may return something."""
        return bool(self._pending)

    def note(self, step: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Look at the images of a call."""
        self._num_noted -= 1
        for name, tensor in find_tensors(args, kwargs):
            if _are_images(tensor):
                self._pending.append((step, name, send_rows({"pixels": _measure(tensor)}, self._transfer)))
                return
        self._num_noted = 0

    def take(self, step: int) -> list[PixelScan]:
        """Return what two batches agree on."""
        ready = [one for one in self._pending if one[0] <= step]
        self._pending = [one for one in self._pending if one[0] > step]
        for _, _, rows in ready:
            found = _judge(rows.read()["pixels"])
            self._found = found if self._found is None else self._found & found
            self._num_left -= 1
            if not _is_suspicious(self._found):  # one batch is enough to acquit
                self._num_noted = self._num_left = 0
        if self._num_left or not ready or self._found is None or not _is_suspicious(self._found):
            return []
        when, name, _ = ready[-1]
        statistics, pattern = min(self._found, key=lambda one: [*STATISTICS].index(one[0]))
        return [PixelScan(step=when, tensor=name, statistics=statistics, pattern=pattern)]


def _is_suspicious(found: set[tuple[str, str]]) -> bool:
    """Return whether images lie on wrong grids and on no right one."""
    return bool(found) and not any(pattern == "right" for _, pattern in found)


def _are_images(tensor: Tensor) -> bool:
    return (
        tensor.dim() == 4
        and tensor.shape[1] in (1, 3)
        and min(tensor.shape[2:]) >= FEWEST_PIXELS
        and tensor.dtype in (torch.float32, torch.float64)  # half precision has left the grid
        and not tensor.requires_grad  # made by another network
        and is_readable(tensor)
    )


@torch.no_grad()
def _measure(images: Tensor) -> Tensor:
    """Return share and number of different values on each grid: [statistics, patterns, 2], flattened."""
    channels = images.detach().transpose(0, 1).flatten(1)  # [channels, pixels]
    channels = channels[:, :: max(1, channels.shape[1] // NUM_SAMPLED)][:, :NUM_SAMPLED].double()
    grids = []
    for means, deviations in STATISTICS.values():
        values = _undo(channels, means, deviations)
        again = _undo(values, means, deviations)
        grids += [values * 255, values * 255**2, values, again * 255]
    return _look_at_grids(torch.stack(grids).flatten(1))


def _undo(channels: Tensor, means: Sequence[float], deviations: Sequence[float]) -> Tensor:
    # Plain numbers: a tensor of them would be copied to the device, and wait for it.
    return torch.stack([values * d + m for values, m, d in zip(channels, means, deviations)])


def _look_at_grids(values: Tensor) -> Tensor:
    """Return, for each row, the share of values that are whole numbers from 0 to 255, and how many differ; flattened.

    All rows at once: thirty times these operations would take as long as a small step.
    """
    whole = values.round()
    fits = ((values - whole).abs() < NEAR) & (whole >= 0) & (whole <= 255)
    # Marks for the values that are there: quicker than to sort them. The last column is for all others.
    seen = values.new_zeros(len(values), 257).scatter_(1, torch.where(fits, whole, 256.0).long(), 1.0)
    return torch.stack([fits.double().mean(1), seen[:, :256].sum(1)], 1).flatten()


def _judge(numbers: Sequence[float]) -> set[tuple[str, str]]:
    """Return (statistics, pattern) of the grids that the images lie on."""
    names = [(statistics, pattern) for statistics in STATISTICS for pattern in PATTERNS]
    pairs = zip(names, numbers[::2], numbers[1::2])
    found = {name for name, share, levels in pairs if share >= ON_GRID and levels >= FEWEST_LEVELS}
    # Raw pixels are whole numbers as they are, and nothing was normalised.
    return found - {("0 and 1", "not_divided"), ("0 and 1", "normalised_twice")}
