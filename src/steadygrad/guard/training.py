"""The user's arguments, checked -> the training to guard."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steadygrad.config import GuardConfig
from steadygrad.errors import ConfigError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model with its optimizers, what steps along with them, and the settings of the guard."""

    model: nn.Module
    """The user's own module, without wrappers."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    config: GuardConfig
    scheduler: Any = None
    scaler: torch.amp.GradScaler | None = None
    ema: Any = None
    extras: Mapping[str, Any]
    """More objects for checkpoints to save, by name."""
    off: bool
    """Whether this is the plain loop: nothing is watched, clipped or skipped."""

    def __post_init__(self) -> None:
        """Refuse extras that cannot be saved, or that have their own argument."""
        for name, extra in self.extras.items():
            if name in self.along:
                raise UsageError(f"extras has {name!r}, which is an argument of Guard. Use {name}=... .")
            if not (hasattr(extra, "state_dict") and hasattr(extra, "load_state_dict")):
                raise UsageError(
                    f"extras[{name!r}] is a {type(extra).__name__}, which cannot be saved. Give it state_dict() and "
                    "load_state_dict()."
                )

    @property
    def along(self) -> dict[str, Any]:
        """What steps along with the optimizers, by the names of Guard's arguments; None for what was not passed."""
        return {"scheduler": self.scheduler, "scaler": self.scaler, "ema": self.ema}

    @property
    def saved(self) -> dict[str, Any]:
        """What checkpoints hold beside model and optimizers."""
        return {**self.along, **self.extras}


def check_given(config: Any, scaler: Any, run_dir: Any) -> None:
    """Refuse arguments that would otherwise fail far from here, with an error that names no culprit."""
    if not isinstance(config, GuardConfig):
        how = "GuardConfig.load(path)" if isinstance(config, str | Path) else "GuardConfig.from_dict(values)"
        raise UsageError(f"Guard's config must be a GuardConfig, got {config!r:.80}. Make one: {how}.")
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise UsageError(f"Guard's scaler must be a torch.amp.GradScaler or None, got {type(scaler).__name__}.")
    if run_dir is not None and (not isinstance(run_dir, str | Path) or not str(run_dir)):
        raise UsageError(f"Guard's run_dir must be the path of a folder or None, got {run_dir!r}. Use runs/first.")


def adapt_to_fragments(config: GuardConfig) -> GuardConfig:
    """Return the settings for weights that an engine keeps: they cannot be copied, put back or saved from here.

    Without snapshots there is nothing to roll back to, and nothing to prove a suspicion with.
    """
    if config.checkpoint.every is not None:
        raise ConfigError(
            f"GuardConfig.checkpoint.every is {config.checkpoint.every}, but the weights are in shards that only their "
            "engine can save. Leave it None, and save with the engine: engine.save_checkpoint for DeepSpeed, "
            "torch.distributed.checkpoint.state_dict for FSDP1."
        )
    return dataclasses.replace(
        config,
        snapshots=dataclasses.replace(config.snapshots, enabled=False),
        prove=dataclasses.replace(config.prove, enabled=False),
        checkpoint=dataclasses.replace(config.checkpoint, signals=False),
    )


def keep_stateful(things: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects that can be saved and restored; a custom EMA may have no state."""
    return {name: thing for name, thing in things.items() if hasattr(thing, "load_state_dict")}
