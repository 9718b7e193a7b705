"""SIGTERM and SIGINT -> a request that the training answers after its step; a second one ends it at once.

Schedulers of clusters send SIGTERM and wait a little: time for the step that is under way and for a checkpoint. Only
the process that asked listens; its forked children get the signal as if nobody had. A handler of the user's own is
left alone. In a notebook or at a prompt SIGINT stays a KeyboardInterrupt, since there it stops a cell, not a program.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: "try again later". torchrun restarts on it, a job script can requeue on it."""
DEFAULTS: dict[signal.Signals, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}


class SignalWatch:
    """Listens between `start()` and `stop()`; `received` is the signal that came, or None."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._owner = os.getpid()
        self._installed: dict[signal.Signals, Any] = {}
        self._started = False

    def start(self) -> None:
        """Listen, where that is possible: in the main thread, for signals that nobody handles yet."""
        if self._started:
            return
        self._started = True
        if threading.current_thread() is not threading.main_thread():
            return
        self._owner = os.getpid()
        for number, default in DEFAULTS.items():
            if number is signal.SIGINT and is_interactive():
                continue
            if signal.getsignal(number) in (default, signal.SIG_DFL):
                self._installed[number] = signal.signal(number, self._receive)

    def stop(self) -> None:
        """Put back what was there before."""
        if threading.current_thread() is not threading.main_thread() or os.getpid() != self._owner:
            return
        for number, before in self._installed.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, before)
        self._installed, self._started = {}, False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner or self.received is not None:
            self._end(number, frame)
        self.received = signal.Signals(number)
        # Not the logger: its lock may be held by the very code that was interrupted.
        text = f"steadygrad: {self.received.name}: finishing the step, then saving; send it again to end at once\n"
        os.write(2, text.encode())

    def _end(self, number: int, frame: FrameType | None) -> None:
        """As if nobody listened."""
        default = DEFAULTS[signal.Signals(number)]
        signal.signal(number, default)
        if callable(default):
            default(number, frame)
        os.kill(os.getpid(), number)


def is_interactive() -> bool:
    """Whether a person sits at a prompt or a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules
