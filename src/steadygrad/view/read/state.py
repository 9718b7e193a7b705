"""A run directory -> its state: running, finished, halted, stopped, failed, killed or stalled. Read-only.

`run.json` says how each start ended; a start that says nothing still runs if the process of `run.lock` is alive, and
was killed if it is gone. A bare log and a record without either are in no known state.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steadygrad.record.run_folder import PART
from steadygrad.record.run_lock import NAME, Holder, find_holder

SILENT_SECONDS = 300.0
"""A training that has written nothing for this long counts as stalled; a validation may well take a minute."""
SILENT_STEPS = 30
"""The same in steps of its usual length, for slow trainings: the longer of both counts."""


class State(enum.StrEnum):
    """Whether a run goes on, and if not, how it ended."""

    RUNNING = "running"
    STALLED = "stalled"
    """Its process is there, or cannot be checked, and writes nothing."""
    FINISHED = "finished"
    HALTED = "halted"
    """Ended on purpose by the policy."""
    STOPPED = "stopped"
    """Ended by a signal or by Ctrl-C."""
    FAILED = "failed"
    """Ended by an error of the program."""
    KILLED = "killed"
    """Its process is gone without a word."""
    UNKNOWN = "unknown"

    @property
    def is_open(self) -> bool:
        """Whether more steps may come."""
        return self in (State.RUNNING, State.STALLED)


def find_state(
    path: Path, about: Mapping[str, Any], *, silent_seconds: float | None, step_seconds: float, within: Path | None
) -> State:
    """Return the state of a run whose files were last written `silent_seconds` ago; a step takes `step_seconds`."""
    ended = find_end(about)
    if ended:
        how = ended.get("how")
        # A word of a newer version must not raise
        return State(how) if how in ("finished", "halted", "stopped", "failed") else State.FINISHED
    holder = _find_holder(path, within)
    if holder is Holder.GONE:
        return State.KILLED
    if holder is Holder.NONE or silent_seconds is None:
        return State.RUNNING if holder is Holder.ALIVE else State.UNKNOWN
    is_silent = silent_seconds > max(SILENT_SECONDS, SILENT_STEPS * step_seconds)
    return State.STALLED if is_silent else State.RUNNING


def find_end(about: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the newest start in run.json says about its end; empty if it has not ended, or was killed."""
    resumed = about.get("resumed")
    starts = [about, *(one for one in resumed if isinstance(one, dict))] if isinstance(resumed, list) else [about]
    ended = starts[-1].get("ended")
    return ended if isinstance(ended, dict) else {}


def _find_holder(path: Path, within: Path | None) -> Holder:
    """Return who holds the run; the lock of a further guard of a training is in the folder above."""
    folder = path.parent if PART.fullmatch(path.name) and not (path / NAME).exists() else path
    # The lock is read and its process looked up: not for a link that leads out of the folder
    if within is not None and not (folder / NAME).resolve().is_relative_to(within):
        return Holder.NONE
    return find_holder(folder)
