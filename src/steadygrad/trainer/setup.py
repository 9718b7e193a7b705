"""TrainerConfig -> the device, the GuardConfig, the scaler, the average and the Guard that a Trainer works with."""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from steadygrad.act.precision import choose_precision
from steadygrad.config import GuardConfig, Precision
from steadygrad.config.trainer import TrainerConfig
from steadygrad.errors import UsageError
from steadygrad.guard import Guard
from steadygrad.trainer.choices import choose_clip, choose_policy
from steadygrad.trainer.ranks import count_ranks, find_local_rank


def check_given(model: Any, config: Any, loss_fn: Any) -> None:
    """Refuse arguments that would otherwise fail far from here, with an error that names no culprit."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"Trainer's model must be a torch.nn.Module, got {type(model).__name__}.")
    if not isinstance(config, TrainerConfig):
        raise UsageError(f"Trainer's config must be a TrainerConfig, got {config!r:.80}. Use TrainerConfig(epochs=3).")
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError(f"Trainer's loss_fn must be a function of output and target, got {loss_fn!r:.80}.")


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, of torch on every device, and of numpy if it has been imported."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)  # numpy takes no more than 32 bits


def choose_device(name: str) -> torch.device:
    """Return the device of that name; `auto` means CUDA if available, and each rank has its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and count_ranks() > 1 and torch.cuda.is_available():
        return torch.device("cuda", find_local_rank() % torch.cuda.device_count())
    try:
        torch.zeros(1, device=name)
    # torch built without CUDA raises AssertionError
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"cannot train on device {name!r}: {reason}. Use cpu, or auto.") from None
    return torch.device(name)


def make_guard_config(config: TrainerConfig, given: GuardConfig | None, device: torch.device) -> GuardConfig:
    """Return the Guard's settings; in a `given` one, whatever differs from the defaults is kept."""
    usual, made = GuardConfig(), given if given is not None else GuardConfig()
    changes: dict[str, Any] = {}
    if made.clip == usual.clip:
        changes["clip"] = choose_clip(config.clip, config.max_grad_norm)
    if made.autocast is None and config.precision != "fp32":
        changes["autocast"] = _choose_precision(config.precision, device)
    policy = made.policy if config.policy is None else choose_policy(config.policy)
    if policy.early_stopping_patience is None:
        policy = dataclasses.replace(policy, early_stopping_patience=config.patience)
    changes["policy"] = policy
    if made.checkpoint.keep_last == usual.checkpoint.keep_last:
        changes["checkpoint"] = dataclasses.replace(made.checkpoint, keep_last=config.keep_last)
    return dataclasses.replace(made, **changes)


def _choose_precision(name: str, device: torch.device) -> Precision | None:
    """Return the precision; `auto` is the best of a GPU, and fp32 on a CPU, where half precision is rarely faster."""
    if name != "auto":
        return Precision(name)
    return choose_precision(device) if device.type == "cuda" else None


def make_scaler(config: GuardConfig, device: torch.device) -> torch.amp.GradScaler | None:
    """Return a loss scaler if gradients are float16, whose range is narrow."""
    return torch.amp.GradScaler(device.type) if config.autocast is Precision.FP16 else None


def make_average(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """Return an exponential moving average of the weights, on the same device; buffers are copied as they are."""
    return None if decay is None else WarmAverage(model, decay)


class WarmAverage(AveragedModel):
    """An exponential moving average whose decay rises to `decay`: that of step n is at most (1 + n) / (10 + n).

    With a fixed 0.999 the average of a short run would be little but its initial weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, multi_avg_fn=self._average)
        self._decay = decay

    def _average(self, averaged: Any, current: Any, num_averaged: Any) -> None:  # noqa: ARG002 - torch's signature
        num = int(self.n_averaged)  # a buffer on the CPU: nothing waits for the device
        get_ema_multi_avg_fn(min(self._decay, (1 + num) / (10 + num)))(averaged, current, num)


def go_on_counting(before: Guard, after: Guard) -> None:
    """Carry steps, epochs, totals and loaders over to the next stage; baselines and budgets start afresh."""
    old, new = before.state_dict(), after.state_dict()
    judgement = {**new["judgement"], "tally": old["judgement"]["tally"]}
    numbers = {name: old[name] for name in ("step", "epoch", "num_skipped_batches")}
    after.load_state_dict({**new, **numbers, "judgement": judgement})
    # A stage that was resumed at its end has restored the loader's random state, and made no pass that would use it
    after._saver.checkpoints.follow(before._saver.checkpoints)
