"""SIGTERM and Ctrl-C -> a checkpoint after the step, then exit code 75, where a framework runs the loop.

Trainings on Trainer do this by their guard. With several processes a signal ends the run at once, as the framework
has it: ranks get it at different steps, and none may save alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

from steadygrad.checkpoint.signals import EXIT_CODE, SignalWatch
from steadygrad.trainer.ranks import count_ranks


@contextlib.contextmanager
def listen() -> Iterator[SignalWatch]:
    """Listen for signals inside; `received` of the watch says whether one came."""
    watch = SignalWatch()
    if count_ranks() == 1:
        watch.start()
    try:
        yield watch
    finally:
        watch.stop()


def leave() -> NoReturn:
    """End the process, once the checkpoint is written; a job script can requeue on this code."""
    raise SystemExit(EXIT_CODE)
