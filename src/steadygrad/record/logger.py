"""LoggerSink: facts -> any tracker: `.log(dict, step=...)`, `.log(dict)`, `.log(name, value)`, Lightning's loggers,
TensorBoard's SummaryWriter.

The names are the same as in every other sink. Incidents arrive as `incidents/<kind>` with their text. The logger
belongs to the caller and is never closed here.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from steadygrad.errors import UsageError
from steadygrad.facts import GradientTable, Incident, StepRecord
from steadygrad.record.series import VALIDATION, describe_incident, list_layers, list_step
from steadygrad.record.sink import Sink

WANDB_STEP = "optimizer_step"
"""Name of the x-axis of these curves in Weights & Biases."""
_ON_THAT_AXIS: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""Run of Weights & Biases -> first parts of the names that it draws over this x-axis."""


class LoggerSink(Sink):
    """`Guard(model, optimizer, sinks=[LoggerSink(tracker)])`."""

    def __init__(self, logger: Any, *, every: int = 1) -> None:
        """`every`: steps between two calls with a step's numbers; skipped steps are always sent."""
        self._sender = find_sender(logger)
        if self._sender is None:
            raise UsageError(
                f"LoggerSink needs an object with .log(dict, step=...), got {type(logger).__name__}. Pass a tracker's "
                "run; text for Python's logging comes from the logger 'steadygrad' without a sink."
            )
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
        assert self._sender is not None
        self._sender(values, step)


Sender = Callable[[Mapping[str, Any], int], None]
"""Passes the numbers of a step on."""


def find_sender(logger: Any) -> Sender | None:
    """Return how to pass numbers to a logger; None if it has no method that takes them.

    Judged by the signature: a TypeError from a call could be the logger's own.
    """
    log, log_metrics, add_scalar = (getattr(logger, name, None) for name in ("log", "log_metrics", "add_scalar"))
    if isinstance(logger, logging.Logger | logging.LoggerAdapter):  # has a `log` as well, for text
        return None
    if (run := _find_wandb_run(logger)) is not None:
        return lambda values, step: _log_to_wandb(run, values, step)
    if callable(log_metrics):  # Lightning's and MLflow's
        return lambda values, step: log_metrics(_keep_numbers(values), step=step)
    if not callable(log):
        return _use_writer(add_scalar) if callable(add_scalar) else None
    parameters = _read_parameters(log)
    takes_step = "step" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    # `log(name, value)`. Not `log(values, step)`, which has two required parameters as well.
    if len(required := _list_required(parameters)) == 2 and required[1] != "step":
        return lambda values, step: _log_each(log, values, step if takes_step else None)
    if takes_step:
        return lambda values, step: log(dict(values), step=step)
    return lambda values, step: log(dict(values))  # noqa: ARG005


def _use_writer(add_scalar: Callable[..., Any]) -> Sender:
    """Return how to pass numbers to TensorBoard's SummaryWriter, which takes one at a time."""

    def send(values: Mapping[str, Any], step: int) -> None:
        for name, value in _keep_numbers(values).items():
            add_scalar(name, value, step)

    return send


def _find_wandb_run(logger: Any) -> Any:
    """Return the run of Weights & Biases that this is, or that is open in the module `wandb`; None if it is neither."""
    # By name: wandb is not imported for this
    if getattr(logger, "__name__", None) == "wandb":
        return getattr(logger, "run", None)
    return logger if type(logger).__module__.startswith("wandb.") else None


def _log_to_wandb(run: Any, values: Mapping[str, Any], step: int) -> None:
    """Log at `step`, or at the run's own step where that is ahead.

    wandb ignores numbers whose step is below its own, with a warning each time; and it counts calls, not steps, in a
    script that logs without `step=`.
    """
    known = _ON_THAT_AXIS.setdefault(run, set())
    for prefix in {name.partition("/")[0] for name in values if "/" in name} - known:
        run.define_metric(f"{prefix}/*", step_metric=WANDB_STEP)
        known.add(prefix)
    numbers = {WANDB_STEP: step, **values}
    if step < run.step:  # asks wandb's own process: half a millisecond
        run.log(numbers)
    else:
        run.log(numbers, step=step)


def _log_each(log: Any, values: Mapping[str, Any], step: int | None) -> None:
    for name, value in values.items():
        log(name, value) if step is None else log(name, value, step=step)


def _keep_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _list_required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, p in parameters.items() if p.kind in positional and p.default is p.empty]


def _read_parameters(log: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(log).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return {}
