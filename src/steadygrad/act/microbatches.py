"""Microbatches: what the backward calls between two steps accumulated, and how a bad one is kept out.

By default gradients accumulate in `.grad`, as in plain torch, and one bad microbatch makes the whole step bad. With
`drop`, each microbatch runs into fresh gradients, is measured (one host read), and is added to the others only if it is
good. This needs a second set of gradients: a gradient can be bad while its loss is fine, and cannot be removed from a
sum afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.scaler import LossScale
from steadygrad.clip.edit import multiply
from steadygrad.measure import Measurement, Meter, Transfer
from steadygrad.measure.gradient_access import Signature
from steadygrad.measure.measurement import FOUND, LOSS


@dataclass(slots=True)
class Accumulated:
    """The microbatches of one step."""

    losses: list[Tensor] = field(default_factory=list)
    num: int = 0
    num_dropped: int = 0
    worst: tuple[Measurement, Sequence[float]] | None = None
    """The numbers of the microbatch dropped last."""
    overflowed: bool = False
    """Whether one was dropped for non-finite gradients with a finite loss: the loss scale may be too high."""

    signature: Signature | None = None
    """Of the gradients, as `guard.backward` left them."""

    @property
    def all_dropped(self) -> bool:
        """Whether nothing is left to step with."""
        return self.num > 0 and self.num == self.num_dropped

    @property
    def loss(self) -> Tensor | None:
        """Sum of the microbatches' losses; None when the user ran backward without the Guard."""
        if len(self.losses) < 2:
            return self.losses[0] if self.losses else None
        # float64: a sum of fp16 losses may overflow, and one of bf16 losses keeps 8 bits.
        return torch.stack([loss.double() for loss in self.losses]).sum()


class MicrobatchGate:
    """Runs backward into fresh gradients, and adds only good ones to the sum."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        meter: Meter,
        transfer: Transfer,
        scaler: LossScale,
        buffers: BufferKeeper,
    ) -> None:
        self._parameters = list(parameters)
        self._meter, self._transfer, self._scaler, self._buffers = meter, transfer, scaler, buffers

    def backward(self, loss: Tensor, batches: Accumulated) -> tuple[Measurement, Sequence[float]] | None:
        """Run backward for one microbatch. Return its numbers if it was dropped, None if it was added."""
        kept = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._scaler.scale(loss).backward()
        m = self._meter.measure(loss, scale=self._scaler.factor, told_scale=self._scaler.now)
        numbers = None if m is None else m.take_to_host(self._transfer)
        if m is not None and numbers is not None:
            self._meter.check_gradients(m, numbers)
        if m is None or numbers is None or numbers[FOUND] == 0:
            _add_gradients(self._parameters, kept)
            self._buffers.begin(anew=True)  # a later bad microbatch returns to this state
            batches.losses.append(loss.detach())
            return None
        self._buffers.put_back()
        for parameter, gradient in zip(self._parameters, kept):
            parameter.grad = gradient
        batches.num_dropped += 1
        batches.overflowed |= math.isfinite(numbers[LOSS])
        batches.worst = (m, numbers)
        return batches.worst

    def average_the_kept(self, batches: Accumulated) -> None:
        """Rescale the sum: the user divides by the number of all microbatches, but only the kept ones are in it."""
        factor = batches.num / (batches.num - batches.num_dropped)
        multiply([p.grad for p in self._parameters if p.grad is not None], factor)
        batches.losses = [loss * factor for loss in batches.losses]


@torch.no_grad()
def _add_gradients(parameters: Sequence[Tensor], kept: Sequence[Tensor | None]) -> None:
    """Compute `parameter.grad += kept` the way autograd accumulates."""
    for parameter, before in zip(parameters, kept):
        if before is None:
            continue
        if parameter.grad is None:
            parameter.grad = before
        elif before.layout is torch.strided:
            # Into the tensor that was there first, as autograd does: others may hold it.
            parameter.grad = before.add_(parameter.grad)
        else:
            parameter.grad = parameter.grad + before  # dense operand first: sparse + dense is not supported
