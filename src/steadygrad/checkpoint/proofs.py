"""Steps that went well or badly -> which checkpoints are good, and which are suspect.

A checkpoint is proven by healthy steps beyond it. An unhealthy one makes every checkpoint that is not proven yet
suspect until the count, begun anew, is full. Counting begins when the state was taken, not when it reached the disk;
what was learnt is written beside the checkpoint once it is there. A mark that cannot be written is lost and nothing
else: it is not fsynced either, since that could make the training wait behind a checkpoint on its way to the disk.
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
    """None while it is on its way to the disk."""
    num_healthy: int = 0
    suspect: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Told while it was on its way."""


class Proofs:
    """Counts for the training, marks for the disk; both threads may call."""

    def __init__(self, good_after: int) -> None:
        self._good_after = good_after
        self._open: dict[int, _Proof] = {}
        self._lock = threading.Lock()

    def begin(self, step: int, path: Path | None = None, *, suspect: str | None = None) -> None:
        """The state before `step` was taken, or an unproven one was loaded from `path`."""
        with self._lock:
            self._open[step] = _Proof(path, suspect=suspect)

    def place(self, step: int, path: Path) -> None:
        """It is on disk: what was learnt meanwhile is written beside it."""
        with self._lock:
            proof = self._open.get(step)
            if proof is None:
                return
            proof.path = path
            if proof.metrics:
                write_marks(path, metrics=proof.metrics)
            self._settle(step, proof)

    def tell(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Metrics that were learnt after the state was taken; False when it is not one of these."""
        with self._lock:
            proof = self._open.get(step)
            if proof is not None and proof.path is None:
                proof.metrics.update(metrics)
            elif proof is not None and proof.path is not None:
                write_marks(proof.path, metrics=metrics)
            return proof is not None

    def drop(self, step: int) -> None:
        """It never came to the disk, or is gone."""
        with self._lock:
            self._open.pop(step, None)

    def healthy(self, step: int) -> None:
        """Step `step` was healthy."""
        with self._lock:
            for saved, proof in list(self._open.items()):
                if saved <= step:
                    proof.num_healthy += 1
                    self._settle(saved, proof)

    def unhealthy(self, step: int, reason: str) -> None:
        """Step `step` was not."""
        with self._lock:
            for saved, proof in self._open.items():
                if saved <= step:
                    proof.num_healthy = 0
                    if proof.suspect is None:
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
