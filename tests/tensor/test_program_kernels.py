"""The checks that load their kernels when a Guard is created are the real ones, and none of them fails."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from steadygrad.measure.program import ProgramWatch
from steadygrad.state.trained_parameters import find_trained_parameters


class Loud(ProgramWatch):
    """Raises exceptions that a ProgramWatch would hide."""

    def _try(self, call: Any, *args: Any) -> Any:
        return call(*args)


def test_every_check_of_the_first_steps_runs_before_them() -> None:
    model = nn.Linear(4, 2)
    trained = find_trained_parameters(model, torch.optim.SGD(model.parameters(), 0.1))
    Loud(trained, every=100).compile(torch.device("cpu"))
