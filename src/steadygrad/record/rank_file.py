"""RankFile: what one rank alone has seen -> `rank_3.jsonl` of the run directory, which rank 0 writes otherwise.

The first line of each start names the rank, its machine and process; then come its own loss at each step, with the time
of day, and its own incidents. Lines are on disk within a second, so that the newest one of a worker that hangs says
when it stood still.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from pathlib import Path
from typing import TextIO

from steadygrad.errors import ConfigError
from steadygrad.facts import GradientTable, Incident, StepRecord
from steadygrad.record.encode import to_json
from steadygrad.record.run_directory import open_to_append

FLUSH_SECONDS = 1.0


class RankFile:
    """A Sink for the incidents of one rank, and the place for its own numbers."""

    def __init__(self, run_dir: str | Path, rank: int, num_ranks: int) -> None:
        self.path = Path(run_dir) / f"rank_{rank}.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO | None = open_to_append(self.path)
        except OSError as error:
            raise ConfigError(
                f"run_dir cannot be written to by rank {rank}: {error.strerror or error} ({self.path}). Give a folder "
                "that all ranks see."
            ) from error
        self._flushed = 0.0
        self._write(
            {
                "rank": rank,
                "num_ranks": num_ranks,
                "node": socket.gethostname(),
                "process": os.getpid(),
                "time": _now(),
            },
            at_once=True,
        )

    def write_own(self, step: int, loss: float | None) -> None:
        """This rank's loss at a step that was judged: a sign of life."""
        self._write({"step": step, "loss": loss, "time": _now()})

    def write_step(self, record: StepRecord) -> None:
        """Rank 0 writes what is equal on all ranks."""

    def write_layers(self, step: int, gradients: GradientTable) -> None:
        """Rank 0 writes what is equal on all ranks."""

    def write_incident(self, incident: Incident) -> None:
        """A line, on disk when this returns."""
        self._write({"step": incident.step, "incident": incident, "time": _now()}, at_once=True)

    def close(self) -> None:
        """Write what is held back."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: object, *, at_once: bool = False) -> None:
        if self._file is None:
            return
        self._file.write(to_json(line) + "\n")
        now = time.monotonic()
        if at_once or now - self._flushed > FLUSH_SECONDS:
            self._file.flush()
            self._flushed = now


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
