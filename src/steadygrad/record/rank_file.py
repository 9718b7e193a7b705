"""RankFile: what one rank alone has seen -> `rank_3.jsonl` in the run directory; rank 0 writes all other files.

The first line of each start names the run, the rank, its machine and process; then come its own loss at each step, with
the time of day, and its own incidents. Lines are on disk within a second, so that the last line of a worker that hangs
shows when it stalled.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from pathlib import Path
from typing import TextIO

from steadygrad.errors import ConfigError
from steadygrad.facts import Incident
from steadygrad.record.encode import to_json
from steadygrad.record.run_directory import flush_at_fork, open_to_append
from steadygrad.record.sink import Sink

FLUSH_SECONDS = 1.0


class RankFile(Sink):
    """A Sink for the incidents of one rank, and the place for its own numbers."""

    def __init__(self, run_dir: str | Path, rank: int, num_ranks: int, *, run_id: str = "", opens: bool = True) -> None:
        """`opens=False`: lines are held in memory until `open()`."""
        self._rank, self._num_ranks = rank, num_ranks
        self.path = Path(run_dir) / f"rank_{rank}.jsonl"
        self._process = os.getpid()
        self._held: list[object] | None = []
        self._place: tuple[Path, str] | None = None
        self._file: TextIO | None = None
        self._flushed = 0.0
        if opens:
            self.open(Path(run_dir), run_id)

    def open_later(self, run_dir: Path, run_id: str) -> None:
        """Open the file with the first judged step.

        That step includes rank 0's numbers, so only then is rank 0 known to have moved the files of an earlier run.
        """
        self._place = run_dir, run_id

    def open(self, run_dir: Path, run_id: str) -> None:
        """Open the file and write the held lines."""
        self._place = None
        self.path = run_dir / self.path.name
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_to_append(self.path)
            flush_at_fork(self)
        except OSError as error:
            raise ConfigError(
                f"run_dir cannot be written to by rank {self._rank}: {error.strerror or error} ({self.path}). Give a "
                "folder that all ranks see."
            ) from error
        held, self._held = self._held or [], None  # before writing: `_write` would hold the lines again
        start = {
            "rank": self._rank,
            "num_ranks": self._num_ranks,
            "node": socket.gethostname(),
            "process": os.getpid(),
            "time": _now(),
        }
        self._write({"run": run_id, **start} if run_id else start, at_once=True)
        for line in held:
            self._write(line, at_once=True)

    def write_own(self, step: int, loss: float | None) -> None:
        """Write this rank's loss at a judged step, as a sign of life."""
        # In write_own and not in `_write`: incidents before the first judged step stay in memory until then.
        if self._place is not None:
            self.open(*self._place)
        self._write({"step": step, "loss": loss, "time": _now()})

    def write_incident(self, incident: Incident) -> None:
        """Write a line, which is on disk when this returns."""
        self._write({"step": incident.step, "incident": incident, "time": _now()}, at_once=True)

    def flush(self) -> None:
        """Write the buffered lines to disk."""
        if self._file is not None and os.getpid() == self._process:
            self._file.flush()

    def close(self) -> None:
        """Write the buffered lines, and write no more."""
        # In a forked child the buffer is a copy: closing the file would write the parent's lines a second time.
        if self._file is not None and os.getpid() == self._process:
            self._file.close()
            self._file = None

    def _write(self, line: object, *, at_once: bool = False) -> None:
        if self._held is not None:
            self._held.append(line)
        if self._file is None or os.getpid() != self._process:
            return
        self._file.write(to_json(line) + "\n")
        now = time.monotonic()
        if at_once or now - self._flushed > FLUSH_SECONDS:
            self._file.flush()
            self._flushed = now


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
