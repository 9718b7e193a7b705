"""Save: one checkpoint being written to disk, which a caller can wait for."""

from __future__ import annotations

import threading
import time
from pathlib import Path


class Save:
    """One save, in progress or done."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.stall_seconds = 0.0
        """How long the training waited for it."""
        self.durable_seconds: float | None = None
        """How long it took until it was on disk under its name."""
        self.error: str | None = None
        """Why it failed; None while it has not."""
        self.path: Path | None = None
        """Where it is, once it is on disk."""
        self._begin = time.perf_counter()
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it is on disk and verified, or has failed."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> Path | None:
        """Wait for it; return its folder, or None if it failed or timed out."""
        self._done.wait(timeout)
        return self.path if self.done and self.error is None else None

    def _place(self, path: Path) -> None:
        self.path, self.durable_seconds = path, time.perf_counter() - self._begin

    def _finish(self, error: str | None = None) -> None:
        # Before the event: a waiter reads it as soon as it wakes
        self.error = error
        self._done.set()
