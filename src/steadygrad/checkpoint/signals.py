"""SIGTERM and SIGINT -> a request that the training answers after its step; a second one ends it at once.

Schedulers of clusters send SIGTERM and wait a little: time for the step that is under way and for a checkpoint. Only
the process that asked listens; its forked children get the signal as if nobody had. A handler of the user's own is
left alone. In a notebook or at a prompt SIGINT stays a KeyboardInterrupt, since there it stops a cell, not a program.
Several guards of one process hear the same signal.
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
        self._started = False

    def start(self) -> None:
        """Listen, where that is possible: in the main thread, for signals that nobody handles yet."""
        if not self._started:
            self._started = True
            if threading.current_thread() is threading.main_thread():
                _switchboard.add(self)

    def stop(self) -> None:
        """Listen no more; the last one puts back what was there before."""
        self._started = False
        if threading.current_thread() is threading.main_thread():
            _switchboard.remove(self)


class _Switchboard:
    """The handlers of this process, and who listens."""

    def __init__(self) -> None:
        self._listeners: list[SignalWatch] = []
        self._owner = -1
        self._installed: dict[signal.Signals, Any] = {}

    def add(self, watch: SignalWatch) -> None:
        if self._owner != os.getpid():  # a child of the process that listened
            self._owner, self._listeners, self._installed = os.getpid(), [], {}
        self._listeners.append(watch)
        for number, default in DEFAULTS.items():
            if number is signal.SIGINT and is_interactive():
                continue
            if signal.getsignal(number) in (default, signal.SIG_DFL):
                self._installed[number] = signal.signal(number, self._receive)

    def remove(self, watch: SignalWatch) -> None:
        if watch in self._listeners:
            self._listeners.remove(watch)
        if self._listeners or os.getpid() != self._owner:
            return
        for number, before in self._installed.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, before)
        self._installed = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        heard = any(watch.received is not None for watch in self._listeners)
        if os.getpid() != self._owner or heard or not self._listeners:
            _end(number, frame)
            return
        for watch in self._listeners:
            watch.received = signal.Signals(number)
        # Not the logger: its lock may be held by the very code that was interrupted.
        name = signal.Signals(number).name
        os.write(2, f"steadygrad: {name}: finishing the step, then saving; send it again to end at once\n".encode())


_switchboard = _Switchboard()


def _end(number: int, frame: FrameType | None) -> None:
    """As if nobody listened."""
    default = DEFAULTS[signal.Signals(number)]
    signal.signal(number, default)
    if callable(default):
        default(number, frame)
    os.kill(os.getpid(), number)


def is_interactive() -> bool:
    """Whether a person sits at a prompt or a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules
