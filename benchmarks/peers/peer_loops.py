"""The peers in the plain loop of a small training, each wired as documented, at its defaults.

harm.py and silent.py pass these loops to trainings that are written for a Guard. They count what a peer does to the
steps and what it reports; a peer that raises ends the training.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from healthy.scenario import PlainLoop, find_loss


class Peer:
    """What a peer does at each step; this one does nothing."""

    num_withheld = num_alarms = 0

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], folder: Path) -> None:
        self.model, self.optimizers = model, optimizers

    def clip(self) -> None:
        """Act between backward and step; gradients are unscaled."""

    def step(self, index: int, loss: Tensor | None) -> None:
        """Step one optimizer."""
        self.optimizers[index].step()

    def watch(self, loss: Tensor) -> None:
        """Observe after the step."""


class ClipGradNorm(Peer):
    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class ZClip(Peer):
    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], folder: Path) -> None:
        from zclip import ZClip

        super().__init__(model, optimizers, folder)
        self._zclip = ZClip()

    def clip(self) -> None:
        self._zclip.step(self.model)


class SpikeDetection(Peer):
    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], folder: Path) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.utilities.spike import SpikeDetection

        super().__init__(model, optimizers, folder)
        self._fabric = Fabric(accelerator="cpu", devices=1)
        self._spikes = SpikeDetection(exclude_batches_path=folder)
        self._count = 0

    def watch(self, loss: Tensor) -> None:
        self._spikes.on_train_batch_end(self._fabric, loss, None, self._count)
        self._count += 1


class StabilityGuard(Peer):
    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], folder: Path) -> None:
        from stabilityguard import GuardedOptimizer

        super().__init__(model, optimizers, folder)
        self._guarded = [GuardedOptimizer(optimizer, model, log_dir=str(folder)) for optimizer in optimizers]

    def step(self, index: int, loss: Tensor | None) -> None:
        guarded = self._guarded[index]
        guarded.step(loss=None if loss is None else loss.item())
        self.num_withheld = self.num_alarms = sum(one._total_skips for one in self._guarded)


class TrainPulse(Peer):
    """Its alerts, except those about slow steps: in steps of milliseconds, other programs on the machine cause them."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], folder: Path) -> None:
        from trainpulse import TrainingCallback

        super().__init__(model, optimizers, folder)
        self._callback, self._count, self._norm = TrainingCallback(), 0, 0.0

    def clip(self) -> None:
        self._callback.on_step_begin(self._count)
        norms = [p.grad.norm() for p in self.model.parameters() if p.grad is not None]
        self._norm = float(torch.stack(norms).norm()) if norms else 0.0

    def watch(self, loss: Tensor) -> None:
        self._callback.on_step_end(self._count, loss=loss.item(), grad_norm=self._norm)
        self._count += 1
        self.num_alarms = sum(alert.detector != "step_time" for alert in self._callback.monitor.alerts)


PEERS: dict[str, type[Peer]] = {
    "torch clip_grad_norm_": ClipGradNorm,
    "zclip": ZClip,
    "Lightning SpikeDetection": SpikeDetection,
    "stabilityguard GuardedOptimizer": StabilityGuard,
    "trainpulse": TrainPulse,
}
"""Peers by their names in wiring.py."""


class PeerLoop(PlainLoop):
    """The plain loop with a peer in it."""

    def __init__(self, model: nn.Module, optimizer: Any, *, kind: type[Peer], folder: Path, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self.peer = kind(model, self._optimizers, folder)
        self._loss: Tensor | None = None

    def backward(self, subject: Any, /, *args: Any) -> Any:
        result = super().backward(subject, *args)
        self._loss = find_loss(result).detach()
        return result

    def step(self, subject: Any = None, /, *args: Any) -> Any:
        result = None if subject is None else self.backward(subject, *args)
        if self._scaler is not None:
            for optimizer in self._optimizers:
                self._scaler.unscale_(optimizer)
        self.peer.clip()
        for index in range(len(self._optimizers)):
            self.peer.step(index, self._loss)
        if self._scaler is not None:
            self._scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()
        self._num_microbatches = 0
        if self._loss is not None:
            self.peer.watch(self._loss)
        return result
