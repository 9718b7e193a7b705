"""TrackioSink: facts -> a trackio run on this machine, with an alert and a text for each incident.

A run that was handed over stays open; one that was opened here is finished here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from steadygrad.extras import import_extra
from steadygrad.facts import GradientTable, Incident, Severity, StepRecord
from steadygrad.record.series import VALIDATION, describe_incident, list_layers, list_norms, list_step
from steadygrad.record.sink import Sink


class TrackioSink(Sink):
    """`TrackioSink(trackio.init(...))` uses that run; `TrackioSink(project="a")` opens one."""

    def __init__(
        self, run: Any = None, *, every: int = 1, alerts: bool = True, histograms: bool = False, **settings: Any
    ) -> None:
        """`settings` are those of `trackio.init`; `every`: steps between two points, skipped steps are always sent."""
        self._trackio = import_extra("trackio", "trackio", what="this sink")
        self._owns_run = run is None
        self.run = self._trackio.init(**settings) if run is None else run
        self._every, self._alerts, self._histograms = every, alerts, histograms
        self._actions: Counter[str] = Counter()

    def write_step(self, record: StepRecord) -> None:
        """The scalars of a step."""
        if record.step % self._every == 0 or record.skipped:
            self.run.log(list_step(record), step=record.step)

    def write_layers(
        self, step: int, gradients: GradientTable, update_ratios: Mapping[str, float] | None = None
    ) -> None:
        """Aggregates and, on request, how the norms spread over the layers."""
        numbers: dict[str, Any] = dict(list_layers(gradients, update_ratios))
        if numbers and self._histograms:
            numbers["grad/layer_norms"] = self._trackio.Histogram(list_norms(gradients))
        if numbers:
            self.run.log(numbers, step=step)

    def write_validation(self, step: int, epoch: int, loss: float) -> None:  # noqa: ARG002
        """The validation loss, as a separate curve."""
        self.run.log({VALIDATION: loss}, step=step)

    def write_incident(self, incident: Incident) -> None:
        """An alert, the incident's text, and how often that action was taken so far, as a mark at its step."""
        finding, action = incident.finding, incident.outcome.action.value
        self._actions[action] += 1
        text = describe_incident(incident)
        shown = self._trackio.Markdown(text)
        self.run.log(
            {f"action/num_{action}": self._actions[action], f"incidents/{finding.kind}": shown}, step=incident.step
        )
        if self._alerts:
            levels = self._trackio.AlertLevel
            level = levels.WARN if finding.severity.rank < Severity.ERROR.rank else levels.ERROR
            self.run.alert(title=f"steadygrad: {finding.kind} at step {incident.step}", text=text, level=level)

    def close(self) -> None:
        """Finish the run if it was opened here."""
        if self._owns_run:
            self.run.finish()
