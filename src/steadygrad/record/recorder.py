"""Recorder: sends every fact to every sink. A sink that breaks is reported once and switched off; training goes on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from steadygrad.facts import GradientTable, Incident, StepRecord
from steadygrad.record.sink import LooseSink, Sink, as_sink

logger = logging.getLogger("steadygrad")


class Recorder(Sink):
    """Many sinks behind one."""

    def __init__(self, sinks: Iterable[Any] = ()) -> None:
        self._sinks = [as_sink(sink) for sink in sinks]

    def add(self, sink: Any) -> None:
        """Send facts to one more sink from now on."""
        self._sinks.append(as_sink(sink))

    def write_step(self, record: StepRecord) -> None:
        """Send one step's scalars to every sink."""
        self._each(lambda sink: sink.write_step(record))

    def write_layers(
        self, step: int, gradients: GradientTable, update_ratios: Mapping[str, float] | None = None
    ) -> None:
        """Send the per-parameter numbers of a step to every sink."""
        self._each(lambda sink: sink.write_layers(step, gradients, update_ratios=update_ratios))

    def write_validation(self, step: int, epoch: int, loss: float) -> None:
        """Send a validation loss to every sink."""
        self._each(lambda sink: sink.write_validation(step, epoch, loss))

    def write_incident(self, incident: Incident) -> None:
        """Send one event to every sink."""
        self._each(lambda sink: sink.write_incident(incident))

    def flush(self) -> None:
        """Flush every sink."""
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        """Close every sink."""
        for sink in tuple(self._sinks):
            try:
                sink.close()
            # Whatever a sink raises: a record must never end the training. The others are closed too.
            except Exception as error:
                _report(sink, error)
        self._sinks.clear()

    def _each(self, call: Callable[[Sink], None]) -> None:
        # A copy: a sink that fails is removed meanwhile.
        for sink in tuple(self._sinks):
            try:
                call(sink)
            except Exception as error:
                self._sinks.remove(sink)
                _report(sink, error)
                with contextlib.suppress(Exception):  # already reported; now only its files matter
                    sink.close()


def _report(sink: Sink, error: Exception) -> None:
    name = type(sink.target if isinstance(sink, LooseSink) else sink).__name__
    logger.error("%s failed and is switched off, training continues: %r", name, error)
