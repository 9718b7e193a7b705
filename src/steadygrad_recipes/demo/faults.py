"""Three faults from real trainings, each at its own step. Both runs of the demo get the same ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from steadygrad.testing import jump_lr
from steadygrad_recipes.demo.text import PADDING

EMPTY_SAMPLE, NAN_SAMPLE = 7, 11


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong, when, and how it comes about."""

    step: int
    what: str
    origin: str


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """The steps of the faults, and how wrong the learning rate is."""

    jump_step: int = 120
    jump_length: int = 15
    jump_factor: float = 300.0
    empty_step: int = 240
    nan_step: int = 310

    def list(self) -> tuple[Fault, Fault, Fault]:
        """Return the faults in the order in which they occur."""
        jump = f"the learning rate is {self.jump_factor:g} times too high for {self.jump_length} steps"
        return (
            Fault(step=self.jump_step, what=jump, origin="a schedule gone wrong"),
            Fault(
                step=self.empty_step,
                what="one text of the batch is empty",
                origin="one line of the model cannot handle it",
            ),
            Fault(step=self.nan_step, what="the weight of one text is NaN", origin="a data pipeline divided 0 by 0"),
        )


class Faults:
    """Applies the plan to one optimizer and its batches."""

    def __init__(self, plan: FaultPlan, optimizer: torch.optim.Optimizer) -> None:
        self._plan = plan
        until = plan.jump_step + plan.jump_length
        self._set_rate = jump_lr(optimizer, at=plan.jump_step, until=until, factor=plan.jump_factor)

    def spoil(self, step: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a step trains on, and the weight of each text; called before each step with its texts."""
        self._set_rate(step)
        weights = torch.ones(len(tokens), device=tokens.device)
        if step == self._plan.empty_step:
            tokens = tokens.clone()  # both runs read the same texts
            tokens[EMPTY_SAMPLE] = PADDING
        if step == self._plan.nan_step:
            weights[NAN_SAMPLE] = math.nan
        return tokens, weights
