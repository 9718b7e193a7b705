"""Rules and settings that record every Reading of a Guard, and its newest record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from steadygrad import DetectConfig, FixedNorm, Guard, GuardConfig, Reading, StepRecord

QUIET = GuardConfig(clip=FixedNorm(max_norm=1e9))
"""Measures and never clips."""


class Tape:
    """A custom rule that only records every Reading of the run."""

    name = "tape"

    def __init__(self) -> None:
        self.readings: list[Reading] = []

    def observe(self, fact: Any) -> Iterable[Any]:
        if isinstance(fact, Reading):
            self.readings.append(fact)
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


def listen(**settings: Any) -> tuple[Tape, GuardConfig]:
    tape = Tape()
    return tape, GuardConfig(detect=DetectConfig(rules=(tape,)), **settings)


def last_of(guard: Guard) -> StepRecord:
    guard.flush()
    assert guard.last is not None
    return guard.last


def sgd(model: nn.Module, lr: float = 0.1, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **settings)
