"""MlflowSink: facts -> an MLflow run, on this machine or a server: metrics, and a text for each incident.

The run that is active is used and stays open; one that was opened here is ended here. MLflow has no marks, so an
incident is a point of `incidents/<kind>` at its step, beside its text among the artifacts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from steadygrad.extras import import_extra
from steadygrad.facts import GradientTable, Incident, StepRecord
from steadygrad.record.series import VALIDATION, describe_incident, list_layers, list_step
from steadygrad.record.sink import Sink


class MlflowSink(Sink):
    """`MlflowSink()` uses the active run or starts one; `settings` are those of `mlflow.start_run`."""

    def __init__(self, *, every: int = 1, **settings: Any) -> None:
        """`every`: steps between two points of a curve; skipped steps are always sent."""
        self._mlflow = import_extra("mlflow", "mlflow", what="this sink")
        active = self._mlflow.active_run()
        self._owns_run = active is None
        run = self._mlflow.start_run(**settings) if active is None else active
        # Every call names the run: the script may start and end others meanwhile.
        self.run_id = run.info.run_id
        self._every = every
        self._kinds: Counter[str] = Counter()
        self._actions: Counter[str] = Counter()

    def write_step(self, record: StepRecord) -> None:
        """The scalars of a step."""
        if record.step % self._every == 0 or record.skipped:
            self._log(list_step(record), record.step)

    def write_layers(
        self, step: int, gradients: GradientTable, update_ratios: Mapping[str, float] | None = None
    ) -> None:
        """Aggregates over the layers."""
        self._log(list_layers(gradients, update_ratios), step)

    def write_validation(self, step: int, epoch: int, loss: float) -> None:  # noqa: ARG002
        """The validation loss, as a separate curve."""
        self._log({VALIDATION: loss}, step)

    def write_incident(self, incident: Incident) -> None:
        """A text under `incidents/`, and points that mark its step."""
        kind, action = incident.finding.kind, incident.outcome.action.value
        self._kinds[kind] += 1
        self._actions[action] += 1
        marks = {f"incidents/{kind}": self._kinds[kind], f"action/num_{action}": self._actions[action]}
        self._log({name: float(count) for name, count in marks.items()}, incident.step)
        name = f"incidents/step-{incident.step:08d}-{kind}.md"
        self._mlflow.log_text(describe_incident(incident), name, run_id=self.run_id)

    def close(self) -> None:
        """End the run if it was opened here."""
        if not self._owns_run:
            return
        active = self._mlflow.active_run()
        if active is not None and active.info.run_id == self.run_id:
            self._mlflow.end_run()
        else:  # the program has ended it, or has another one open, which end_run() would end
            self._mlflow.MlflowClient().set_terminated(self.run_id)

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        if numbers:
            self._mlflow.log_metrics(dict(numbers), step=step, run_id=self.run_id)
