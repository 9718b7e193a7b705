"""Healthy and unhealthy steps -> which checkpoints are good, and which are suspect.

A checkpoint is proven by healthy steps beyond it. An unhealthy step makes every unproven checkpoint suspect until the
count, started again, is full. Counting begins when the state was taken, not when it reached the disk; the result is
written next to the checkpoint once it is there. If a mark cannot be written, only the mark is lost. Marks are not
fsynced, since that could make the training wait behind a checkpoint being written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygrad.checkpoint.catalogue import MARKS, read_marks
from steadygrad.disk.write import replace_file


@dataclass(slots=True)
class _Proof:
    """What is known about one checkpoint that is not good yet."""

    path: Path | None = None
    """None while it is being written."""
    num_healthy: int = 0
    suspect: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics reported while it was being written."""


class Proofs:
    """Counts steps for the training and writes marks to disk; safe to call from both threads."""

    def __init__(self, good_after: int) -> None:
        self._good_after = good_after
        self._open: dict[int, _Proof] = {}
        self._lock = threading.Lock()

    def begin(self, step: int, path: Path | None = None, *, suspect: str | None = None) -> None:
        """Start counting for the state taken before `step`, or for an unproven one loaded from `path`."""
        with self._lock:
            proof = self._open[step] = _Proof(path, suspect=suspect)
            self._settle(step, proof)

    def place(self, step: int, path: Path) -> None:
        """Note that it is on disk, and write next to it what was learnt meanwhile."""
        with self._lock:
            proof = self._open.get(step)
            if proof is None:
                return
            proof.path = path
            if proof.metrics:
                # Under the lock, or `add_metrics` could read the marks between this read and write and lose one of both
                write_marks(path, metrics=proof.metrics)
            self._settle(step, proof)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Record metrics learnt after the state was taken; return False if it is not one of these."""
        with self._lock:
            proof = self._open.get(step)
            if proof is not None and proof.path is None:
                proof.metrics.update(metrics)
            elif proof is not None and proof.path is not None:
                write_marks(proof.path, metrics=metrics)
            return proof is not None

    def drop(self, step: int) -> None:
        """Forget a checkpoint that never reached the disk, or is gone."""
        with self._lock:
            self._open.pop(step, None)

    def healthy(self, step: int) -> None:
        """Count step `step` as healthy."""
        with self._lock:
            for saved, proof in list(self._open.items()):
                # A checkpoint "before step n" holds the weights that step n used, so step n counts for it
                if saved <= step:
                    proof.num_healthy += 1
                    self._settle(saved, proof)

    def unhealthy(self, step: int, reason: str) -> None:
        """Count step `step` as unhealthy."""
        with self._lock:
            for saved, proof in list(self._open.items()):
                if saved <= step:
                    proof.num_healthy = 0
                    if proof.suspect is None:
                        # The first reason stays: later failures may only be consequences
                        proof.suspect = reason
                        self._settle(saved, proof)

    def _settle(self, step: int, proof: _Proof) -> None:
        if proof.path is None:
            return
        if proof.num_healthy >= self._good_after:
            del self._open[step]
            write_marks(proof.path, good=True, suspect=None)
        elif proof.suspect is not None:
            write_marks(proof.path, suspect=proof.suspect)


def write_marks(folder: Path, *, metrics: Mapping[str, float] | None = None, **changes: Any) -> None:
    """Change the marks of a checkpoint."""
    marks = read_marks(folder)
    made = dataclasses.replace(marks, metrics={**marks.metrics, **(metrics or {})}, **changes)
    if made != marks:
        with contextlib.suppress(OSError):
            replace_file(folder / MARKS, made.render())
