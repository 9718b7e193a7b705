"""TensorBoardSink: facts -> an event file that TensorBoard draws.

Scalars (`series.py` has their names), a histogram of the layers' norms, each incident as text. NaN and Inf are
written as scalars, and left out of histograms, which cannot hold them. Incidents are on disk when the call returns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from steadygrad.extras import import_extra
from steadygrad.facts import GradientTable, Incident, StepRecord
from steadygrad.record.series import VALIDATION, describe_incident, list_layers, list_norms, list_step
from steadygrad.record.sink import Sink

LOWEST = 1e-30
"""Value drawn for a norm of 0: histograms are over powers of ten, and dead layers should show."""


class TensorBoardSink(Sink):
    """`Guard(model, optimizer, sinks=[TensorBoardSink("runs/a/tensorboard")])`."""

    def __init__(self, log_dir: str | Path, *, every: int = 1, histograms: bool = True) -> None:
        """`every`: steps between two points of a curve; skipped steps are always drawn."""
        import_extra("tensorboard", "tensorboard", what="this sink")
        writer = import_extra("tensorboard", "torch.utils.tensorboard", what="this sink")
        self._writer = writer.SummaryWriter(str(log_dir))
        self._every, self._histograms = every, histograms
        self._actions: Counter[str] = Counter()

    def write_step(self, record: StepRecord) -> None:
        """Write the scalars of a step."""
        if record.step % self._every and not record.skipped:
            return
        self._write_scalars(list_step(record), record.step)

    def write_layers(
        self, step: int, gradients: GradientTable, update_ratios: Mapping[str, float] | None = None
    ) -> None:
        """Aggregates as scalars, and how the norms spread over the layers as a histogram of powers of ten."""
        self._write_scalars(list_layers(gradients, update_ratios), step)
        powers = [math.log10(max(norm, LOWEST)) for norm in list_norms(gradients)]
        if powers and self._histograms:
            import torch

            self._writer.add_histogram(
                "grad/layer_norm_log10", torch.tensor(powers, dtype=torch.float64, device="cpu"), step
            )

    def write_validation(self, step: int, epoch: int, loss: float) -> None:  # noqa: ARG002
        """Write the validation loss as a separate curve."""
        self._write_scalars({VALIDATION: loss}, step)

    def write_incident(self, incident: Incident) -> None:
        """Write text under `incidents/<kind>`, and how often that action was taken so far."""
        action = incident.outcome.action.value
        self._actions[action] += 1
        self._writer.add_text(f"incidents/{incident.finding.kind}", describe_incident(incident), incident.step)
        self._writer.add_scalar(f"action/num_{action}", self._actions[action], incident.step)
        self._writer.flush()

    def close(self) -> None:
        """Write buffered data and close the file."""
        self._writer.close()

    def _write_scalars(self, numbers: dict[str, float], step: int) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
