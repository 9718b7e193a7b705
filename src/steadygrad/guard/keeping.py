"""Keeper: what a Guard remembers, and the checkpoints that hold it with the whole training.

A save is due every so many steps, and after a signal a last time: then the process ends with a code that asks to be
started again. A resume puts back every part in the order in which they lean on each other. What cannot be saved is
told, and never ends a training.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from steadygrad.checkpoint.run import tell_unsaved
from steadygrad.checkpoint.signals import EXIT_CODE
from steadygrad.checkpoint.store import Save
from steadygrad.errors import UsageError
from steadygrad.guard.arrivals import Arrivals
from steadygrad.guard.parts import Moment, Parts


class Keeper:
    """Takes down where a training is, and puts it back there."""

    def __init__(self, parts: Parts, moment: Moment, arrivals: Arrivals) -> None:
        self._parts, self._moment, self._arrivals = parts, moment, arrivals

    def state_dict(self) -> dict[str, Any]:
        """What the guard itself remembers; all steps are judged first."""
        self._arrivals.judge_pending()
        return {
            "version": 1,
            "step": self._moment.next_step,
            "epoch": self._moment.epoch,
            "validation_loss": self._moment.validation_loss,
            "clip": {} if self._parts.clipper is None else self._parts.clipper.state_dict(),
            "judgement": self._parts.judgement.state_dict(),
            "actor": self._parts.actor.state_dict(),
            "num_since_start": self._parts.lookout.num_since,
            "num_skipped_batches": self._moment.num_skipped_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Model and optimizer are loaded already: the buffers are copied from now."""
        self._load(state)
        self._parts.buffers.forget()

    def _load(self, state: Mapping[str, Any]) -> None:
        self._arrivals.judge_pending()
        if not isinstance(state, Mapping) or state.get("version") != 1:
            found = f"version {state.get('version')!r}" if isinstance(state, Mapping) else type(state).__name__
            raise UsageError(f"this is no state of a Guard that is known here: {found}. Give what state_dict() gave.")
        self._moment.next_step, self._moment.epoch = int(state["step"]), int(state["epoch"])
        self._moment.validation_loss, self._moment.validated_at = state["validation_loss"], None
        if self._parts.clipper is not None:
            self._parts.clipper.load_state_dict(state["clip"])
        self._parts.judgement.load_state_dict(state["judgement"])
        self._parts.actor.load_state_dict(state["actor"])
        self._parts.lookout.num_since = int(state["num_since_start"])
        self._moment.num_skipped_batches = int(state["num_skipped_batches"])

    def save(self) -> Save | None:
        """Save the whole training; None, and told, when that cannot be."""
        state = self.state_dict()
        self._parts.judgement.flush_record()
        step = self._moment.next_step
        metrics = {}
        if self._moment.validated_at == step and self._moment.validation_loss is not None:
            metrics[self._parts.config.checkpoint.best_by] = self._moment.validation_loss
        saved = self._parts.checkpoints.save(
            step,
            state,
            accumulated=self._moment.batches,
            buffers=self._parts.buffers,
            metrics=metrics,
            used_gradients=self._parts.used.is_there,
        )
        self.tell_unsaved()
        return saved

    def save_if_due(self, close: Callable[[], None]) -> None:
        """What comes by itself: a save every so many steps, and after a signal a last one, `close()` and the end."""
        received = self._parts.checkpoints.signals.received
        if self._parts.ranks.many:  # a signal reaches ranks at different steps: all stop after the one that told all
            received = (received or signal.SIGTERM) if self._arrivals.is_asked_to_stop else None
        if received is not None:
            saved = self.save()
            where = None if saved is None else saved.wait()
            close()
            raise SystemExit(EXIT_CODE if where is not None else 128 + received)
        if self._parts.checkpoints.is_due(self._moment.next_step) and not self._parts.ranks.is_joining:
            self.save()
        self.tell_unsaved()

    def tell_unsaved(self) -> None:
        """Note what could not be saved since this was last asked."""
        for failure in self._parts.checkpoints.take_failures():
            self._parts.judgement.note(tell_unsaved(self._moment.next_step, failure))

    def resume(self, path: str | Path | None, *, strict: bool) -> int | None:
        """Put back the training as a checkpoint has it; the step that comes next, None without a checkpoint."""
        self._arrivals.judge_pending()
        resumed = self._parts.checkpoints.resume(path, strict=strict, buffers=self._parts.buffers)
        if resumed is None:
            return None
        self._parts.lookout.forget()
        self._load(resumed.guard)
        self._moment.batches = resumed.accumulated
        if self._moment.batches.num:  # inside a step: its beginning is over
            self._parts.lookout.begin()
        self._parts.judgement.note(resumed.tell())
        self._parts.checkpoints.finish_resume()
        return resumed.step
