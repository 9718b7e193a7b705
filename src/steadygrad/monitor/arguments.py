"""Checks of what a monitor is given: a wrong value fails at once, with its name, the value found and what to write."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from steadygrad.errors import ConfigError


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def require(condition: bool, name: str, rule: str, value: object, hint: str) -> None:
    if not condition:
        raise ConfigError(f"{name} must {rule}, got {value!r}. {hint}")


def require_model(model: object, owner: str) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{owner}.model must be a torch.nn.Module, got {type(model).__name__}. Pass the model itself."
        )
