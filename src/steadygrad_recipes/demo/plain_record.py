"""PlainRecord: what a loop without a guard could write down by itself -> a run directory, for the report to compare.

Loss, norm and learning rate of each step; no finding, no incident: nobody has looked.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

from steadygrad._version import __version__
from steadygrad.facts import StepRecord
from steadygrad.record import RunDirectory


class PlainRecord:
    """Writes steps.jsonl of one run."""

    def __init__(self, run_dir: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = [name for name, _ in model.named_parameters()]
        versions = {"torch": torch.__version__, "steadygrad": __version__}
        self._files = RunDirectory(run_dir, config={}, parameters=names, versions=versions)
        self._optimizer = optimizer
        self._started, self._next_step = time.perf_counter(), 0

    def write(self, loss: float, grad_norm: float, max_norm: float) -> None:
        """One step; `grad_norm` is the one before clipping."""
        clipped = grad_norm > max_norm
        record = StepRecord(
            step=self._next_step,
            loss=loss,
            grad_norm=grad_norm,
            clip_coefficient=max_norm / grad_norm if clipped else 1.0,
            clipped=clipped,
            skipped=False,
            num_nonfinite=0,
            learning_rates=tuple(group["lr"] for group in self._optimizer.param_groups),
            loss_scale=None,
            num_microbatches=1,
            num_dropped_microbatches=0,
            time_seconds=time.perf_counter() - self._started,
        )
        self._files.write_step(record)
        self._next_step += 1

    def close(self) -> None:
        """Put everything on disk."""
        self._files.close()
