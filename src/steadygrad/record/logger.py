"""LoggerSink: facts -> anything with `.log(dict, step=...)` or `.log(dict)`: your own tracker, Comet, Aim, Fabric.

The names are the same as in every other sink. Incidents arrive as `incidents/<kind>` with their text. The logger
belongs to the caller and is never closed here.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from steadygrad.errors import UsageError
from steadygrad.facts import GradientTable, Incident, StepRecord
from steadygrad.record.series import VALIDATION, describe_incident, list_layers, list_step
from steadygrad.record.sink import Sink


class LoggerSink(Sink):
    """`Guard(model, optimizer, sinks=[LoggerSink(tracker)])`."""

    def __init__(self, logger: Any, *, every: int = 1) -> None:
        """`every`: steps between two calls with a step's numbers; skipped steps are always sent."""
        log = getattr(logger, "log", None)
        if not callable(log) or isinstance(logger, logging.Logger | logging.LoggerAdapter):
            raise UsageError(
                f"LoggerSink needs an object with .log(dict, step=...), got {type(logger).__name__}. Pass a tracker's "
                "run; text for Python's logging comes from the logger 'steadygrad' without a sink."
            )
        self._log, self._takes_step = log, _takes_step(log)
        self._every = every
        self._actions: Counter[str] = Counter()

    def write_step(self, record: StepRecord) -> None:
        """Log the numbers of a step."""
        if record.step % self._every == 0 or record.skipped:
            self._send(list_step(record), record.step)

    def write_layers(
        self, step: int, gradients: GradientTable, update_ratios: Mapping[str, float] | None = None
    ) -> None:
        """Log aggregates over the parameters."""
        if numbers := list_layers(gradients, update_ratios):
            self._send(numbers, step)

    def write_validation(self, step: int, epoch: int, loss: float) -> None:  # noqa: ARG002
        """Log the validation loss."""
        self._send({VALIDATION: loss}, step)

    def write_incident(self, incident: Incident) -> None:
        """Log the text, and how often that action was taken so far."""
        action = incident.outcome.action.value
        self._actions[action] += 1
        name = f"incidents/{incident.finding.kind}"
        self._send({f"action/num_{action}": self._actions[action], name: describe_incident(incident)}, incident.step)

    def _send(self, values: Mapping[str, Any], step: int) -> None:
        if self._takes_step:
            self._log(dict(values), step=step)
        else:
            self._log(dict(values))


def _takes_step(log: Any) -> bool:
    """Return whether `log` takes a step, judged by its signature: a TypeError from a call could be the logger's own."""
    try:
        parameters = inspect.signature(log).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return "step" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
