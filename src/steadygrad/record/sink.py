"""Sink: the base of everything that facts are sent to. Subclass it and override what you want to receive.

Every method runs on the host, after the step was judged. A sink that raises is reported once and switched off.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from steadygrad.facts import GradientTable, Incident, StepRecord


class Sink:
    """Receives facts and ignores them; each method is there to be overridden."""

    def write_step(self, record: StepRecord) -> None:
        """Receive one step's scalars."""

    def write_layers(
        self, step: int, gradients: GradientTable, update_ratios: Mapping[str, float] | None = None
    ) -> None:
        """Receive the per-parameter numbers of a step.

        `update_ratios` is name -> norm of the update / norm of the weight, or None where that was not measured.
        """

    def write_validation(self, step: int, epoch: int, loss: float) -> None:
        """Receive a validation loss."""

    def write_incident(self, incident: Incident) -> None:
        """Receive one event; it must be safe on disk when this returns."""

    def flush(self) -> None:
        """Write buffered data."""

    def close(self) -> None:
        """Write buffered data; nothing more will come."""


class LooseSink(Sink):
    """Wraps any object with some of a sink's methods: sinks need not subclass Sink."""

    def __init__(self, target: Any) -> None:
        self.target = target
        for name in ("write_step", "write_validation", "write_incident", "flush", "close"):
            if callable(method := getattr(target, name, None)):
                setattr(self, name, method)
        self._write_layers: Any = getattr(target, "write_layers", super().write_layers)
        # Asked once, by signature: a TypeError from a call could as well be the sink's own.
        self._takes_ratios = _takes(self._write_layers, "update_ratios")

    def write_layers(
        self, step: int, gradients: GradientTable, update_ratios: Mapping[str, float] | None = None
    ) -> None:
        """Pass the numbers on, and the ratios to a method that takes them."""
        if self._takes_ratios:
            self._write_layers(step, gradients, update_ratios=update_ratios)
        else:
            self._write_layers(step, gradients)


def as_sink(target: Any) -> Sink:
    """Return `target` itself if it is a Sink, otherwise a Sink around it."""
    return target if isinstance(target, Sink) else LooseSink(target)


def _takes(method: Any, name: str) -> bool:
    """Return whether a method has a parameter of that name; a builtin without a signature has none."""
    try:
        return name in inspect.signature(method).parameters
    except (TypeError, ValueError):
        return False
