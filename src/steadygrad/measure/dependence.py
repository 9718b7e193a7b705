"""DependenceWatch: inputs, outputs and labels of some steps -> a LabelDependence: do the labels depend on the inputs?

A permutation test: the variance of inputs and outputs between the classes, against the same with labels shuffled.
Made twice in a run, from 64 steps each, and only while the loss is as high as that of a guess. Cost: nothing once a
model has learnt; otherwise a small copy a step for these steps, and one product of matrices. Reads only.
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
HIGH = 0.5
"""Share of the logarithm of the number of classes above which a loss may be that of a guess."""


class DependenceWatch:
    """Collects samples while the loss is high; `take` returns the result."""

    def __init__(self, transfer: Transfer | None = None) -> None:
        self._transfer = transfer
        self._features: list[Tensor] = []
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
            self._until, self._features, self._labels = step + NUM_STEPS, [], []
        if step >= self._until:
            return
        try:
            self._keep(labels, args, kwargs)
            if step == self._until - 1 and self._features:
                self._finish(step)
        except Exception:  # an unusual batch: collecting ends, until the next start
            self._until = -1

    def take(self, step: int) -> list[LabelDependence]:
        """Return the result, if there is one by `step`."""
        if self._pending is None or self._pending[0] > step:
            return []
        when, num_samples, rows = self._pending
        self._pending = None
        spread, mean, std, entropy = rows.read()["dependence"]
        return [
            LabelDependence(
                step=when,
                num_samples=num_samples,
                spread=spread,
                shuffled_mean=mean,
                shuffled_std=std,
                entropy=entropy,
            )
        ]

    @torch.no_grad()
    def _keep(self, labels: Labels, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        target = labels.target.detach().reshape(-1)
        num_rows = len(target)
        parts = []
        for _, tensor in find_tensors(args, kwargs):
            fits = tensor.is_floating_point() and tensor.dim() > 1 and len(tensor) == num_rows
            if fits and tensor.device == target.device and is_readable(tensor):
                rows = tensor.detach()[:NUM_ROWS].reshape(min(NUM_ROWS, num_rows), -1)
                parts.append(rows[:, :: max(1, rows.shape[1] // NUM_COLUMNS)][:, :NUM_COLUMNS].float())
                break
        outputs = read_saved(labels.outputs, "result")
        if outputs is not None and outputs.dim() == 2 and len(outputs) == num_rows:
            parts.append(outputs.detach()[:NUM_ROWS, :NUM_COLUMNS].float())
        if not parts or labels.target.dim() != 1:
            self._until = -1
            return
        self._features.append(torch.cat(parts, 1))
        # Ignored labels, which are negative by default, join class 0.
        self._labels.append(target[:NUM_ROWS].clamp(min=0) % NUM_GROUPS)

    @torch.no_grad()
    def _finish(self, step: int) -> None:
        features, labels = torch.cat(self._features), torch.cat(self._labels)
        self._features, self._labels = [], []
        # A feature that never varies would be 0 / 0.
        features = (features - features.mean(0)) / features.std(0).clamp(min=1e-12)
        groups = torch.arange(NUM_GROUPS, device=labels.device)
        one_hot = (labels[:, None] == groups).to(features.dtype)  # [samples, groups]
        spread = _spread(one_hot, features)
        generator = torch.Generator().manual_seed(step)  # of our own: the program's random numbers stay as they are
        orders = [torch.randperm(len(labels), generator=generator).to(labels.device) for _ in range(NUM_SHUFFLES)]
        shuffled = torch.stack([_spread(one_hot[order], features) for order in orders])
        shares = one_hot.double().mean(0)
        # An empty class would be 0 * log(0), which is NaN.
        entropy = -(shares * shares.clamp(min=1e-30).log()).sum()
        row = torch.stack([spread.double(), shuffled.mean().double(), shuffled.std().double(), entropy])
        self._pending = (step, len(labels), send_rows({"dependence": row}, self._transfer))


def _spread(one_hot: Tensor, features: Tensor) -> Tensor:
    """Return the sum over classes of size times squared distance of the class's mean from the mean of all."""
    sums = one_hot.T @ features  # [groups, features], of features with mean 0
    return (sums.square().sum(1) / one_hot.sum(0).clamp(min=1)).sum()
