"""What the configs of the recipes share: the settings of any training, and their checks. Imports no torch.

A recipe inherits the settings, changes defaults by naming a field again, and adds its own. `seo` has those of
`TrainerConfig` instead, which are the same and more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from steadygrad.config.checks import is_number, require, require_booleans, require_whole


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How long is trained, and what is kept of it."""

    epochs: int = 10
    """Passes over the training data."""
    eval_every: int = 1000
    """Steps between two evaluations, beside the one at each epoch's end."""
    save_every: int = 1000
    """Steps between two checkpoints, beside the one at each epoch's end."""
    keep_last: int = 3
    """Newest checkpoints that stay, beside the best one."""
    seed: int = 0
    """Seed of the weights, the order of the data and everything else that is random."""


@dataclass(frozen=True, kw_only=True)
class BatchSettings(TrainingSettings):
    """The same, and what one step of AdamW is made of."""

    batch_size: int = 16
    """Samples of a forward pass."""
    accumulation_steps: int = 1
    """Batches whose gradients make one optimizer step."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""


def require_numbers(owner: Any, *, zero: Iterable[str] = (), infinite: Iterable[str] = ()) -> None:
    """Booleans must be ones; numbers must be finite and above 0. `zero`: those that may be 0; `infinite`: Inf."""
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


def require_below_1(owner: Any, *names: str) -> None:
    """Each of these fields must be a share or a decay: at least 0 and below 1."""
    for name in names:
        value, hint = getattr(owner, name), f"The default is {getattr(type(owner), name)}."
        require(is_number(value) and 0 <= value < 1, owner, name, "be at least 0 and below 1", hint)


def require_choice(owner: Any, name: str, choices: Iterable[object]) -> None:
    """The field must have one of these values."""
    rule = f"be one of {', '.join(map(str, choices))}"
    require(getattr(owner, name) in choices, owner, name, rule, f"The default is {getattr(type(owner), name)}.")
