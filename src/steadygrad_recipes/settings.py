"""The settings that the recipe configs share, and their checks. Imports no torch.

A recipe inherits the settings, overrides defaults by redefining a field, and adds its own. `seo` uses those of
`TrainerConfig` instead, which has the same ones and more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from steadygrad.config.checks import is_number, require, require_booleans, require_whole
from steadygrad.config.trainer import CLIPS, POLICIES, STRATEGIES


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How long to train, and which checkpoints to keep."""

    epochs: int = 10
    """Passes over the training data."""
    eval_every: int = 1000
    """Steps between two evaluations, in addition to the one at the end of each epoch."""
    save_every: int = 1000
    """Steps between two checkpoints, in addition to the one at the end of each epoch."""
    keep_last: int = 3
    """Number of newest checkpoints to keep, in addition to the best one."""
    seed: int = 0
    """Seed of the weights, the order of the data and everything else that is random."""
    clip: str = "fixed_norm"
    """How to clip: none, fixed_norm, outliers, zclip, autoclip, adagc, adaptive_unit or value; see docs/clipping.md."""
    policy: str = "default"
    """What findings lead to: default, observe, patient, eager or strict; see docs/policies.md."""
    log_every: int = 100
    """Steps between two lines with loss, norm, rate and time left, if no bar shows them."""
    tensorboard: bool = False
    """Whether to also log norms, losses, rates and actions to TensorBoard, in the run directory."""
    wandb: bool = False
    """Whether to also log them to Weights & Biases; its own variables (WANDB_PROJECT, WANDB_MODE) are honoured."""
    strategy: str = "ddp"
    """How processes under torchrun share the model: ddp, a copy in each; fsdp, a part of every weight in each."""


@dataclass(frozen=True, kw_only=True)
class BatchSettings(TrainingSettings):
    """The same, plus the settings of one AdamW step."""

    batch_size: int = 16
    """Samples per forward pass."""
    accumulation_steps: int = 1
    """Batches whose gradients are accumulated into one optimizer step."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""


def require_numbers(owner: Any, *, zero: Iterable[str] = (), infinite: Iterable[str] = ()) -> None:
    """Check that booleans are booleans and numbers finite and above 0. `zero` may also be 0, `infinite` also Inf."""
    require_booleans(owner)
    for item in dataclasses.fields(owner):
        kind, _, other = str(item.type).partition(" | ")  # annotations are text
        value, hint = getattr(owner, item.name), f"The default is {item.default}."
        if kind not in ("int", "float") or (other == "None" and value is None):
            continue
        if kind == "int":
            require_whole(owner, item.name, least=0 if item.name in zero else 1, hint=hint)
            continue
        fits = is_number(value) and (0 < value < math.inf or (value == 0 and item.name in zero))
        rule = "be a finite number, not below 0" if item.name in zero else "be a finite number above 0"
        require(fits or (value == math.inf and item.name in infinite), owner, item.name, rule, hint)


def require_shared(owner: TrainingSettings) -> None:
    """Check the settings that are chosen by name."""
    require_choice(owner, "strategy", STRATEGIES)
    require_choice(owner, "clip", CLIPS)
    require_choice(owner, "policy", POLICIES)


def require_below_1(owner: Any, *names: str) -> None:
    """Check that each of these fields is a share or a decay: at least 0 and below 1."""
    for name in names:
        value, hint = getattr(owner, name), f"The default is {getattr(type(owner), name)}."
        require(is_number(value) and 0 <= value < 1, owner, name, "be at least 0 and below 1", hint)


def require_choice(owner: Any, name: str, choices: Iterable[object]) -> None:
    """Check that the field has one of these values."""
    rule = f"be one of {', '.join(map(str, choices))}"
    require(getattr(owner, name) in choices, owner, name, rule, f"The default is {getattr(type(owner), name)}.")
