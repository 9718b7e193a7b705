"""guard_trainer: torchtitan's Trainer -> a Guard that its steps go through.

torchtitan clips before its optimizers step and offers no hook there, so three methods of this one trainer are replaced:
`forward_backward_step` (the batch and its loss become known), `optimizers.step` (the Guard makes it, or skips it), and
`lr_schedulers.step` (holds after a skipped step). torchtitan is never imported: its objects are passed in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadygrad.act.patches import Patches
from steadygrad.config import GuardConfig
from steadygrad.config.switch import is_switched_off
from steadygrad.errors import UnsupportedError, UsageError
from steadygrad.guard import Guard
from steadygrad.record import Sink


def guard_trainer(
    trainer: Any, *, config: GuardConfig | None = None, run_dir: str | Path | None = None, sinks: Iterable[Sink] = ()
) -> Guard:
    """Return the Guard of a `torchtitan.trainer.Trainer`; call it between `config.build()` and `trainer.train()`.

    Clipping stays torchtitan's: norms are those after it. A bad loss counts as 0 in torchtitan's own log, which would
    end the training otherwise; the guard's record has the true one. `guard.close()` restores the trainer.
    """
    for name in ("model_parts", "optimizers", "lr_schedulers", "forward_backward_step"):
        if not hasattr(trainer, name):
            raise UsageError(
                f"guard_trainer's argument must be torchtitan's Trainer, got {type(trainer).__name__}, which has no "
                f"{name}. Pass what config.build() returned."
            )
    if len(trainer.model_parts) != 1:
        raise UnsupportedError(
            f"torchtitan trains {len(trainer.model_parts)} pipeline stages here, each with its own parameters. Guard a "
            "run without pipeline parallelism."
        )
    # torchtitan has clipped already when its optimizers step: a second clip would work on the first one's result.
    config = dataclasses.replace(config if config is not None else GuardConfig(), clip=None)
    guard = Guard(
        trainer.model_parts[0], list(trainer.optimizers.optimizers), config=config, run_dir=run_dir, sinks=sinks
    )
    if not is_switched_off():
        guard._stages.drive = _Drive(trainer, guard)
    return guard


class _Drive:
    """torchtitan runs the loop: its optimizers' step is the Guard's."""

    is_accumulating = False

    def __init__(self, trainer: Any, guard: Guard) -> None:
        self._patches = Patches()
        run, advance = trainer.forward_backward_step, trainer.lr_schedulers.step

        def forward_backward_step(**kwargs: Any) -> Tensor:
            # Not replayable: this function runs backward too.
            with guard.watch_forward(None, kwargs.get("input_dict"), kwargs.get("labels")):
                loss: Tensor = run(**kwargs)
            guard.watch_backward(loss.detach())
            # torchtitan ends the training at a loss that is not finite, also when its step was skipped.
            return torch.where(loss.isfinite(), loss, torch.zeros_like(loss))

        def step(*_args: Any, **_kwargs: Any) -> None:
            guard.step()

        def advance_rate(*args: Any, **kwargs: Any) -> None:
            # Whether the rate may move depends on a step that is still running: the host waits for it here.
            guard.flush()
            if guard.last is None or not guard.last.skipped:
                advance(*args, **kwargs)

        self._patches.replace(trainer, "forward_backward_step", forward_backward_step)
        self._patches.replace(trainer.optimizers, "step", step)
        self._patches.replace(trainer.lr_schedulers, "step", advance_rate)

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the loss as it is: torchtitan divides it by the number of tokens."""
        return loss

    def check_saving(self) -> None:
        """Allow it: the shards are torch's own."""

    def detach(self) -> None:
        """Leave the trainer as it was."""
        self._patches.undo()
