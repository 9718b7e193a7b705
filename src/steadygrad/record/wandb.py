"""WandbSink: facts -> a Weights & Biases run, online or offline, with an alert for each kind of incident.

Every point carries `optimizer_step`, which is the x-axis of what is sent here; wandb's own step is left to the script,
whose logging may run at another pace. A run that was handed over stays open; one that was opened here is finished here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from steadygrad.errors import UsageError
from steadygrad.extras import import_extra
from steadygrad.facts import GradientTable, Incident, Severity, StepRecord
from steadygrad.record.logger import WANDB_STEP as STEP
from steadygrad.record.series import VALIDATION, describe_incident, list_layers, list_norms, list_step
from steadygrad.record.sink import Sink

PREFIXES = ("grad/*", "update/*", "health/*", "action/*", "extra/*", "incidents/*")
SECONDS_BETWEEN_ALERTS = 60
"""Of one title; wandb drops those in between. All incidents are in the run's log."""


class WandbSink(Sink):
    """`WandbSink(wandb.init(...))` uses that run; `WandbSink(project="a", mode="offline")` opens one."""

    def __init__(
        self, run: Any = None, *, every: int = 1, alerts: bool = True, histograms: bool = True, **settings: Any
    ) -> None:
        """`settings` are those of `wandb.init`; `every`: steps between two points, skipped steps are always sent."""
        self._wandb = import_extra("wandb", "wandb", what="this sink")
        self._owns_run = run is None
        self.run = self._open(settings) if run is None else run
        self._every, self._alerts, self._histograms = every, alerts, histograms
        self._actions: Counter[str] = Counter()
        # Without `step=` in log(): wandb drops points whose step is below its own, which the script may have moved on.
        self.run.define_metric(STEP, hidden=True)
        for prefix in PREFIXES:
            self.run.define_metric(prefix, step_metric=STEP)

    def _open(self, settings: Mapping[str, Any]) -> Any:
        try:
            return self._wandb.init(**settings)
        except self._wandb.errors.Error as error:  # no key, no connection
            raise UsageError(
                f"Weights & Biases opened no run: {error} Or set WANDB_MODE=offline, which keeps it on this disk."
            ) from None

    def write_step(self, record: StepRecord) -> None:
        """The scalars of a step."""
        if record.step % self._every == 0 or record.skipped:
            self.run.log({STEP: record.step, **list_step(record)})

    def write_layers(
        self, step: int, gradients: GradientTable, update_ratios: Mapping[str, float] | None = None
    ) -> None:
        """Aggregates, and how the norms spread over the layers."""
        numbers: dict[str, Any] = dict(list_layers(gradients, update_ratios))
        if numbers and self._histograms:
            numbers["grad/layer_norms"] = self._wandb.Histogram(list_norms(gradients))
        if numbers:
            self.run.log({STEP: step, **numbers})

    def write_validation(self, step: int, epoch: int, loss: float) -> None:  # noqa: ARG002
        """The validation loss, as a separate curve."""
        self.run.log({STEP: step, VALIDATION: loss})

    def write_incident(self, incident: Incident) -> None:
        """An alert, and the incident's text in the log."""
        finding, action = incident.finding, incident.outcome.action.value
        self._actions[action] += 1
        text = describe_incident(incident)
        self.run.log(
            {STEP: incident.step, f"action/num_{action}": self._actions[action], f"incidents/{finding.kind}": text}
        )
        if self._alerts:
            level = "WARN" if finding.severity.rank < Severity.ERROR.rank else "ERROR"
            self.run.alert(
                title=f"steadygrad: {finding.kind}", text=text, level=level, wait_duration=SECONDS_BETWEEN_ALERTS
            )

    def close(self) -> None:
        """Finish the run if it was opened here."""
        if self._owns_run:
            self.run.finish()
