"""GuardState: a guard's own state, to a plain dict and back. No weights, no optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steadygrad.act.actor import Actor
from steadygrad.act.buffers import BufferKeeper
from steadygrad.clip import Clipper
from steadygrad.errors import UsageError
from steadygrad.guard.judging import Judging
from steadygrad.guard.moment import Moment
from steadygrad.guard.watched import Watched
from steadygrad.judgement import Judgement


class GuardState:
    """Gathers the state from the pieces that hold it, and distributes it again."""

    def __init__(
        self,
        moment: Moment,
        *,
        judging: Judging,
        judgement: Judgement,
        actor: Actor,
        clipper: Clipper | None,
        watched: Watched,
        buffers: BufferKeeper,
    ) -> None:
        self._moment, self._judging, self._judgement = moment, judging, judgement
        self._actor, self._clipper, self._watched, self._buffers = actor, clipper, watched, buffers

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every piece by name, after judging all steps."""
        self._judging.judge_pending()
        return {
            "version": 1,
            "step": self._moment.next_step,
            "epoch": self._moment.epoch,
            "validation_loss": self._moment.validation_loss,
            "clip": {} if self._clipper is None else self._clipper.state_dict(),
            "judgement": self._judgement.state_dict(),
            "actor": self._actor.state_dict(),
            "num_since_start": self._watched.periodic_scans.num_since,
            "num_skipped_batches": self._moment.num_skipped_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state after model and optimizer, then copy the buffers as they are now."""
        self.load(state)
        self._buffers.forget()

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state if the buffers were already restored with the model."""
        # Before anything is loaded: the pending step belongs to the histories that are about to be replaced.
        self._judging.judge_pending()
        if not isinstance(state, Mapping) or state.get("version") != 1:
            found = f"version {state.get('version')!r}" if isinstance(state, Mapping) else type(state).__name__
            raise UsageError(f"this version does not know this Guard state: {found}. Pass what state_dict() returned.")
        self._moment.next_step, self._moment.epoch = int(state["step"]), int(state["epoch"])
        self._moment.validation_loss, self._moment.validated_at = state["validation_loss"], None
        if self._clipper is not None:
            self._clipper.load_state_dict(state["clip"])
        self._judgement.load_state_dict(state["judgement"])
        self._actor.load_state_dict(state["actor"])
        self._watched.periodic_scans.num_since = int(state["num_since_start"])
        self._moment.num_skipped_batches = int(state["num_skipped_batches"])
