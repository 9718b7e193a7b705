"""Recorder: hands every fact to every sink. A sink that breaks is told once and switched off; training goes on."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from steadygrad.facts import GradientTable, Incident, StepRecord

logger = logging.getLogger("steadygrad")


class Sink(Protocol):
    """Where facts go. Each call comes from the host, after the step was judged."""

    def write_step(self, record: StepRecord) -> None:
        """One step's scalars."""
        ...

    def write_layers(self, step: int, gradients: GradientTable) -> None:
        """The per-parameter numbers of a step.

        A sink that takes a third argument, `update_ratios`, is also given name -> update / weight where that was
        measured, and None where it was not.
        """
        ...

    def write_incident(self, incident: Incident) -> None:
        """One event; must be safe on disk when this returns."""
        ...

    def close(self) -> None:
        """Write what is still held back."""
        ...


class Recorder:
    """Many sinks behind one call."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = list(sinks)

    def write_step(self, record: StepRecord) -> None:
        """One step's scalars, to every sink."""
        self._each(lambda sink: sink.write_step(record))

    def write_layers(
        self, step: int, gradients: GradientTable, update_ratios: Mapping[str, float] | None = None
    ) -> None:
        """The per-parameter numbers of a step, to every sink; the ratios to those that take them."""
        self._each(lambda sink: _write_layers(sink.write_layers, step, gradients, update_ratios))

    def write_validation(self, step: int, epoch: int, loss: float) -> None:
        """A validation loss, to every sink that has `write_validation`; one of one's own may do without."""
        self._each(lambda sink: getattr(sink, "write_validation", _nothing)(step, epoch, loss))

    def write_incident(self, incident: Incident) -> None:
        """One event, to every sink."""
        self._each(lambda sink: sink.write_incident(incident))

    def flush(self) -> None:
        """What is held back, of every sink that holds something back."""
        self._each(lambda sink: getattr(sink, "flush", _nothing)())

    def close(self) -> None:
        """Close every sink."""
        for sink in tuple(self._sinks):
            try:
                sink.close()
            except Exception as error:
                _tell(sink, error)
        self._sinks.clear()

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                call(sink)
            except Exception as error:
                self._sinks.remove(sink)
                _tell(sink, error)
                with contextlib.suppress(Exception):  # told once; now only its files matter
                    sink.close()


def _write_layers(
    write: Callable[..., None], step: int, gradients: GradientTable, update_ratios: Mapping[str, float] | None
) -> None:
    """Asked by its signature: a sink of one's own that knows nothing of ratios must go on working."""
    if update_ratios is not None and "update_ratios" in inspect.signature(write).parameters:
        write(step, gradients, update_ratios=update_ratios)
    else:
        write(step, gradients)


def _nothing(*_: object) -> None:
    """For a sink that does not care."""


def _tell(sink: Sink, error: Exception) -> None:
    logger.error("%s failed and is switched off, training goes on: %r", type(sink).__name__, error)
