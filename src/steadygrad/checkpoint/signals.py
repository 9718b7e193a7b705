"""SIGTERM and SIGINT -> a request that the training answers after its step; a second one ends it at once.

Schedulers of clusters send SIGTERM and wait a little: time for the step that is under way and for a checkpoint. A
program that is busy between two steps is given `GRACE_SECONDS` to come back to the guard; then the signal is answered
where the program is. Only the process that asked listens; its forked children get the signal as if nobody had. A
handler of the user's own is left alone. In a notebook or at a prompt SIGINT stays a KeyboardInterrupt, since there it
stops a cell, not a program. Several guards of one process hear the same signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: "try again later". torchrun restarts on it, a job script can requeue on it."""
GRACE_SECONDS = 5.0
"""For a program to reach the next step. Clusters kill 30 s after SIGTERM, and the save takes part of that."""
DEFAULTS: dict[signal.Signals, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
DATA_LOADER = "torch.utils.data._utils.signal_handling"
Answer = Callable[[signal.Signals], None]


class SignalWatch:
    """Listens between `start()` and `stop()`; `received` is the signal that came, or None."""

    def __init__(self, answer: Answer | None = None) -> None:
        """`answer` saves and ends the process; it is called where the program is when it keeps the guard waiting."""
        self.received: signal.Signals | None = None
        self.answer = answer
        self._depth = 0
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

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Around a call of the guard: inside, state is half changed, and a signal waits until the call is over."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def is_busy(self) -> bool:
        """Whether a call of the guard is under way."""
        return self._depth > 0

    @property
    def is_overdue(self) -> bool:
        """Whether the grace is over, so that the signal must be answered as soon as possible."""
        return self.received is not None and _switchboard.is_overdue


class _Switchboard:
    """The handlers of this process, and who listens."""

    def __init__(self) -> None:
        self._listeners: list[SignalWatch] = []
        self._owner = -1
        self._installed: dict[signal.Signals, Any] = {}
        self._timer: threading.Timer | None = None
        self._hook: Any = None
        self._expects_reminder = False
        self.is_overdue = False

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
        self._settle()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._expects_reminder and os.getpid() == self._owner:
            self._expects_reminder, self.is_overdue = False, True
            self._answer_here(signal.Signals(number))
            return
        heard = any(watch.received is not None for watch in self._listeners)
        if os.getpid() != self._owner or heard or not self._listeners:
            _end(number, frame)
            return
        for watch in self._listeners:
            watch.received = signal.Signals(number)
        # Not the logger: its lock may be held by the very code that was interrupted.
        name = signal.Signals(number).name
        os.write(2, f"steadygrad: {name}: finishing the step, then saving; send it again to end at once\n".encode())
        _let_workers_go()
        self._watch_for_errors()
        self._remind_later(number)

    def _answer_here(self, number: signal.Signals) -> None:
        """The program has not come back to the guard: answer between two of its instructions, outside of our own."""
        if any(watch.is_busy for watch in self._listeners):
            return
        for watch in list(self._listeners):
            if watch.answer is not None and watch.received is not None:
                watch.answer(number)

    def _remind_later(self, number: int) -> None:
        def remind() -> None:
            self._expects_reminder = True
            signal.pthread_kill(threading.main_thread().ident or 0, number)  # wakes a sleep, which a flag would not

        self._timer = threading.Timer(GRACE_SECONDS, remind)
        self._timer.daemon = True
        with contextlib.suppress(RuntimeError):  # no more threads: the next step answers
            self._timer.start()

    def _watch_for_errors(self) -> None:
        """An error that ends the program after the signal, often because of it, must not cost the state."""
        before = sys.excepthook

        def save_first(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            before(kind, error, trace)
            waiting = [watch for watch in self._listeners if watch.received is not None]
            halts = any(base.__name__ == "TrainingHalted" for base in kind.__mro__)  # our own: the state is bad
            if os.getpid() == self._owner and waiting and not halts:
                self._answer_here(waiting[0].received or signal.SIGTERM)

        self._hook, self._hook_before = save_first, before
        sys.excepthook = save_first

    def _settle(self) -> None:
        """Nobody listens any more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._hook is not None and sys.excepthook is self._hook:
            sys.excepthook = self._hook_before
        self._timer = self._hook = None
        self._expects_reminder = self.is_overdue = False


_switchboard = _Switchboard()


def _let_workers_go() -> None:
    """A signal to the whole group ends the workers of a DataLoader, whose parent would raise wherever it is.

    In the middle of an optimizer's step, for example. Without them the next batch is an error in its place.
    """
    child = getattr(signal, "SIGCHLD", None)
    if child is not None and getattr(signal.getsignal(child), "__module__", None) == DATA_LOADER:
        signal.signal(child, lambda *_: None)


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
