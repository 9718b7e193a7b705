"""DependenceWatch: inputs, outputs and labels of some steps -> a LabelDependence: do the labels depend on the inputs?

Permutation tests: the variance between the classes of inputs, outputs and products of two inputs, against the same
with labels shuffled; and whether nearest neighbours share their label more often than chance. Inputs of few values
(tokens, bits, one-hot) are not tested: a sum modulo n or a parity of them looks like chance to all such tests.
Made twice in a run, from 64 steps each, and only while the loss is as high as that of a guess. Cost: nothing once a
model has learnt; otherwise a small copy a step for these steps, and some products of matrices. Reads only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.facts.program import LabelDependence
from steadygrad.measure.loss_graph import Labels
from steadygrad.measure.rows import PendingRows, is_readable, send_rows
from steadygrad.measure.saved import read_saved
from steadygrad.measure.transfer import Transfer
from steadygrad.state.tree import find_tensors

STARTS = (192, 1024)
"""Steps at which collecting begins."""
NUM_STEPS = 64
NUM_ROWS, NUM_COLUMNS = 64, 32
"""Samples kept of a batch, and elements kept of an input."""
NUM_GROUPS = 32
"""Classes beyond this many are put together."""
NUM_SHUFFLES = 64
NUM_PRODUCT_SHUFFLES = 16
"""Fewer, since there are up to 496 products; their standard deviation is then known to about a fifth."""
FEWEST_VALUES = 16
"""Different values that a column takes at least, if its numbers are measured and not codes."""
VARIED_SHARE = 0.25
"""Share of the columns that must take so many: borders of images are constant."""
NUM_TOGETHER = 512
"""Samples whose distances to all others are computed at once: 8 MiB."""
HIGH = 0.5
"""Share of the logarithm of the number of classes above which a loss may be that of a guess."""


class DependenceWatch:
    """Collects samples while the loss is high; `take` returns the result."""

    def __init__(self, transfer: Transfer | None = None) -> None:
        self._transfer = transfer
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._until = -1
        self._pending: tuple[int, int, PendingRows] | None = None

    @property
    def has_news(self) -> bool:
        """Whether `take` may return something."""
        return self._pending is not None

    def note(
        self, step: int, last_loss: float | None, labels: Labels, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Keep a sample of this step, if it is one of those to look at."""
        is_high = last_loss is not None and last_loss > HIGH * math.log(max(2, labels.num_classes))
        if step in STARTS and is_high and labels.is_reduced and labels.is_whole:
            self._until, self._inputs, self._outputs, self._labels = step + NUM_STEPS, [], [], []
        if step >= self._until:
            return
        try:
            self._keep(labels, args, kwargs)
            if step == self._until - 1 and self._inputs:
                self._finish(step)
        except Exception:  # an unusual batch: collecting ends, until the next start
            self._until = -1

    def take(self, step: int) -> list[LabelDependence]:
        """Return the result, if there is one by `step`."""
        if self._pending is None or self._pending[0] > step:
            return []
        when, num_samples, rows = self._pending
        self._pending = None
        spread, mean, std, entropy, product_score, neighbour_score, is_varied = rows.read()["dependence"]
        if not is_varied:
            return []
        return [
            LabelDependence(
                step=when,
                num_samples=num_samples,
                spread=spread,
                shuffled_mean=mean,
                shuffled_std=std,
                entropy=entropy,
                product_score=product_score,
                neighbour_score=neighbour_score,
            )
        ]

    @torch.no_grad()
    def _keep(self, labels: Labels, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        target = labels.target.detach().reshape(-1)
        inputs = _choose_inputs(target, args, kwargs)
        if inputs is None or labels.target.dim() != 1:
            self._until = -1
            return
        self._inputs.append(inputs)
        outputs = read_saved(labels.outputs, "result")
        if outputs is not None and outputs.dim() == 2 and len(outputs) == len(target):
            self._outputs.append(outputs.detach()[:NUM_ROWS, :NUM_COLUMNS].float())
        # Ignored labels, which are negative by default, join class 0.
        self._labels.append(target[:NUM_ROWS].clamp(min=0) % NUM_GROUPS)

    @torch.no_grad()
    def _finish(self, step: int) -> None:
        raw, labels = torch.cat(self._inputs), torch.cat(self._labels)
        outputs = self._outputs if len(self._outputs) == len(self._inputs) else []
        self._inputs, self._outputs, self._labels = [], [], []
        inputs = _standardize(raw)
        features = torch.cat([inputs, *([_standardize(torch.cat(outputs))] if outputs else [])], 1)
        groups = torch.arange(NUM_GROUPS, device=labels.device)
        one_hot = (labels[:, None] == groups).to(features.dtype)  # [samples, groups]
        generator = torch.Generator().manual_seed(step)  # of our own: the program's random numbers stay as they are
        orders = [
            torch.randperm(len(labels), generator=generator, device="cpu").to(labels.device)
            for _ in range(NUM_SHUFFLES)
        ]
        spread, mean, std = _compare(one_hot, features, orders)
        products = _compare(one_hot, _multiply(inputs), orders[:NUM_PRODUCT_SHUFFLES])
        shares = one_hot.double().mean(0)
        # An empty class would be 0 * log(0), which is NaN.
        entropy = -(shares * shares.clamp(min=1e-30).log()).sum()
        scores = (products[0] - products[1]) / products[2].clamp(min=1e-30), _score_neighbours(inputs, labels, shares)
        row = torch.stack([value.double() for value in (spread, mean, std, entropy, *scores, _is_varied(raw))])
        self._pending = (step, len(labels), send_rows({"dependence": row}, self._transfer))


def _choose_inputs(target: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return some columns of the first input with a row for each label: [samples, columns]; None without one."""
    num_rows = len(target)
    for _, tensor in find_tensors(args, kwargs):
        fits = tensor.is_floating_point() and tensor.dim() > 1 and len(tensor) == num_rows
        if fits and tensor.device == target.device and is_readable(tensor):
            rows = tensor.detach()[:NUM_ROWS].reshape(min(NUM_ROWS, num_rows), -1)
            return rows[:, :: max(1, rows.shape[1] // NUM_COLUMNS)][:, :NUM_COLUMNS].float()
    return None


def _standardize(features: Tensor) -> Tensor:
    # A feature that never varies would be 0 / 0.
    return (features - features.mean(0)) / features.std(0).clamp(min=1e-12)


def _is_varied(inputs: Tensor) -> Tensor:
    """Return whether enough columns take many different values, without a host read."""
    num_values = 1 + (inputs.sort(0).values.diff(dim=0) != 0).sum(0)
    return (num_values >= FEWEST_VALUES).double().mean() >= VARIED_SHARE


def _multiply(inputs: Tensor) -> Tensor:
    """Return the standardized products of each two columns, and the squares: [samples, pairs]."""
    one, other = torch.triu_indices(inputs.shape[1], inputs.shape[1], device=inputs.device)
    return _standardize(inputs[:, one] * inputs[:, other])


def _score_neighbours(inputs: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
    """Return by how many standard deviations more nearest neighbours share their label than chance would have it."""
    nearest = []
    squares, places = inputs.square().sum(1), torch.arange(len(inputs), device=inputs.device)
    for start in range(0, len(inputs), NUM_TOGETHER):
        distances = squares - 2 * inputs[start : start + NUM_TOGETHER] @ inputs.T  # [some, samples]
        itself = places[start : start + NUM_TOGETHER, None] == places
        nearest.append(distances.masked_fill(itself, torch.inf).argmin(1))  # a sample is not its own neighbour
    chance = shares.square().sum()
    agreement = (labels[torch.cat(nearest)] == labels).double().mean()
    return (agreement - chance) / (chance * (1 - chance) / len(labels)).sqrt().clamp(min=1e-30)


def _compare(one_hot: Tensor, features: Tensor, orders: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the spread of the features, and the mean and standard deviation of those under shuffled labels."""
    shuffled = torch.stack([_spread(one_hot[order], features) for order in orders])
    return _spread(one_hot, features), shuffled.mean(), shuffled.std()


def _spread(one_hot: Tensor, features: Tensor) -> Tensor:
    """Return the sum over classes of size times squared distance of the class's mean from the mean of all."""
    sums = one_hot.T @ features  # [groups, features], of features with mean 0
    return (sums.square().sum(1) / one_hot.sum(0).clamp(min=1)).sum()
