"""Each peer in a training step, wired as its own documentation says, at its defaults.

A maker takes model, optimizer and a folder and returns one whole step: forward, backward, clip at 1.0, step. compare.py
reads what a peer reports by itself: on the terminal, in a log, in a warning or by raising. A peer that is not installed
is left out; `reimplemented` marks a rule that we wrote because its package cannot be installed with this torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Loss = Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]
Step = Callable[[Loss, Tensor], None]
Make = Callable[[nn.Module, Optimizer, Path], Step]


def apply_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    """End every loop alike: step and clear the gradients."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def make_plain(model: nn.Module, optimizer: Optimizer, folder: Path) -> Step:
    """clip_grad_norm_ and step."""

    def step(loss_of: Loss, batch: Tensor) -> None:
        loss_of(model, batch)[0].backward()
        apply_gradients(model, optimizer)

    return step


def make_strict_clip(model: nn.Module, optimizer: Optimizer, folder: Path) -> Step:
    def step(loss_of: Loss, batch: Tensor) -> None:
        loss_of(model, batch)[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_anomaly(model: nn.Module, optimizer: Optimizer, folder: Path) -> Step:
    plain = make_plain(model, optimizer, folder)

    def step(loss_of: Loss, batch: Tensor) -> None:
        with torch.autograd.detect_anomaly():
            plain(loss_of, batch)

    return step


def make_lightning(model: nn.Module, optimizer: Optimizer, folder: Path) -> Step:
    from lightning.fabric import Fabric
    from lightning.fabric.utilities.spike import SpikeDetection

    fabric, spikes = Fabric(accelerator="cpu", devices=1), SpikeDetection(exclude_batches_path=folder)
    count = [0]

    def step(loss_of: Loss, batch: Tensor) -> None:
        loss = loss_of(model, batch)[0]
        loss.backward()
        apply_gradients(model, optimizer)
        spikes.on_train_batch_end(fabric, loss.detach(), batch, count[0])
        count[0] += 1

    return step


def make_transformers(model: nn.Module, optimizer: Optimizer, folder: Path) -> Step:
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(model)
    return make_plain(model, optimizer, folder)


def make_wandb(model: nn.Module, optimizer: Optimizer, folder: Path) -> Step:
    os.environ["WANDB_SILENT"] = "true"
    import wandb

    run = wandb.init(mode="offline", dir=folder, project="peers", reinit="finish_previous")
    wandb.watch(model, log="all", log_freq=1)

    def step(loss_of: Loss, batch: Tensor) -> None:
        loss = loss_of(model, batch)[0]
        loss.backward()
        apply_gradients(model, optimizer)
        run.log({"loss": float(loss)})

    step.close = run.finish  # type: ignore[attr-defined]
    return step


def make_composer(model: nn.Module, optimizer: Optimizer, folder: Path) -> Step:
    """NaNMonitor after the loss; OptimizerMonitor reads the norm of each gradient every tenth batch."""
    count = [0]

    def step(loss_of: Loss, batch: Tensor) -> None:
        loss = loss_of(model, batch)[0]
        if torch.isnan(loss):
            raise RuntimeError("Train loss contains a NaN.")
        loss.backward()
        if count[0] % 10 == 0:
            for parameter in model.parameters():
                parameter.grad.norm().item()
        count[0] += 1
        apply_gradients(model, optimizer)

    return step


def make_stabilityguard(model: nn.Module, optimizer: Optimizer, folder: Path) -> Step:
    from stabilityguard import GuardedOptimizer

    guarded = GuardedOptimizer(optimizer, model, log_dir=str(folder))

    def step(loss_of: Loss, batch: Tensor) -> None:
        loss = loss_of(model, batch)[0]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        guarded.step(loss=loss.item())
        guarded.zero_grad()

    return step


def make_trainscope(model: nn.Module, optimizer: Optimizer, folder: Path) -> Step:
    from trainscope import TrainScope, TrainScopeConfig

    scope = TrainScope(model, optimizer, TrainScopeConfig(run_dir=str(folder))).attach()

    def step(loss_of: Loss, batch: Tensor) -> None:
        loss = loss_of(model, batch)[0]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scope.step(loss.item())
        optimizer.step()
        optimizer.zero_grad()

    step.close = scope.detach  # type: ignore[attr-defined]
    return step


def make_trainpulse(model: nn.Module, optimizer: Optimizer, folder: Path) -> Step:
    from trainpulse import TrainingCallback

    callback, count = TrainingCallback(), [0]

    def step(loss_of: Loss, batch: Tensor) -> None:
        callback.on_step_begin(count[0])
        loss = loss_of(model, batch)[0]
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        before = len(callback.monitor.alerts)
        callback.on_step_end(count[0], loss=loss.item(), grad_norm=norm.item())
        for alert in callback.monitor.alerts[before:]:
            print(alert)
        count[0] += 1

    return step


def make_torchguard(model: nn.Module, optimizer: Optimizer, folder: Path) -> Step:
    """Flags for each sample of the output; read where torch.compile's region would end."""
    from torchguard import err, flags

    def step(loss_of: Loss, batch: Tensor) -> None:
        loss, output = loss_of(model, batch)
        rows = output.detach().reshape(len(output) if output.dim() else 1, -1)
        found = err.push(err.new(rows), err.NAN, model, where=torch.isnan(rows).any(-1))
        found = err.push(found, err.INF, model, where=torch.isinf(rows).any(-1))
        if err.has_any(found):
            print(flags.repr(found))
        loss.backward()
        apply_gradients(model, optimizer)

    return step


def make_zclip(model: nn.Module, optimizer: Optimizer, folder: Path) -> Step:
    from zclip import ZClip

    zclip = ZClip()

    def step(loss_of: Loss, batch: Tensor) -> None:
        loss_of(model, batch)[0].backward()
        zclip.step(model)
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_guard(model: nn.Module, optimizer: Optimizer, folder: Path) -> Step:
    from steadygrad import Guard

    guard = Guard(model, optimizer)

    def step(loss_of: Loss, batch: Tensor) -> None:
        guard.step(functools.partial(loss_of, model), batch)

    return step


PEERS: dict[str, tuple[str | None, Make]] = {
    "torch clip_grad_norm_": (None, make_plain),
    "torch clip_grad_norm_, error_if_nonfinite": (None, make_strict_clip),
    "torch detect_anomaly": (None, make_anomaly),
    "Lightning SpikeDetection": ("lightning", make_lightning),
    "transformers DebugUnderflowOverflow": ("transformers", make_transformers),
    "wandb.watch, log all, every step": ("wandb", make_wandb),
    "Composer NaNMonitor, OptimizerMonitor": (None, make_composer),
    "stabilityguard GuardedOptimizer": ("stabilityguard", make_stabilityguard),
    "trainscope": ("trainscope", make_trainscope),
    "trainpulse": ("trainpulse", make_trainpulse),
    "torchguard, on the output": ("torchguard", make_torchguard),
    "zclip": ("zclip", make_zclip),
    "steadygrad Guard": ("steadygrad", make_guard),
}
"""Peer -> the package that it needs, and its wiring."""
REIMPLEMENTED = {"Composer NaNMonitor, OptimizerMonitor": "reimplemented: mosaicml 0.32.1 needs torch below 2.7.1"}


def find_source(name: str) -> str | None:
    """Return the package and version of a peer, such as 'zclip 1.0.0', or None if it is not installed."""
    if name in REIMPLEMENTED:
        return REIMPLEMENTED[name]
    package = PEERS[name][0]
    if package is None:
        return f"torch {torch.__version__}"
    with contextlib.suppress(metadata.PackageNotFoundError):
        return f"{package} {metadata.version(package)}"
    return None


def close(step: Any) -> None:
    """Close what a peer has opened."""
    getattr(step, "close", lambda: None)()
