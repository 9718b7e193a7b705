"""SIGTERM and SIGINT -> a request that the training answers after its step; a second one ends it at once.

Cluster schedulers send SIGTERM and wait a little: time to finish the current step and write a checkpoint. A program
that is busy between two steps gets `GRACE_SECONDS` to return to the guard; then the signal is answered wherever the
program is. Only the process that started listening does so; its forked children handle signals as usual. The user's own
handlers are left alone. In a notebook or at a prompt SIGINT stays a KeyboardInterrupt, since there it stops a cell, not
a program. Several guards of one process receive the same signal.

The workers of a DataLoader often get the signal too, and torch raises in their parent wherever that is: in the middle
of an optimizer's step, or while the program is already exiting. `_answer_dead_workers` holds that error back if a
signal caused it; the next batch then raises an error instead.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: "try again later". torchrun restarts on it, a job script can requeue on it."""
GRACE_SECONDS = 5.0
"""Time for a program to reach the next step. Clusters kill 30 s after SIGTERM, and the save needs part of that."""
REPEAT_SECONDS = 0.1
"""A repeated signal within this time is the same request: `timeout` signals the program and then its group."""
LATE_SECONDS = 1.0
"""Time to wait for our own signal after a worker died of it: SLURM and systemd signal one process after another."""
RETRY_SECONDS, MOST_RETRIES = 0.1, 100
"""How often, and how many times, to retry when the program is where a signal must not be answered."""
DEFAULTS: dict[signal.Signals, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
# Where torch defines its SIGCHLD handler: private, so only the name of its module is compared
DATA_LOADER = "torch.utils.data._utils.signal_handling"
Answer = Callable[[signal.Signals], None]
_read_handler: Callable[[int], Any] = signal._signal.getsignal  # type: ignore[attr-defined]
"""`signal.getsignal` without its detour through an Enum, which takes longer than the rest of a step's check."""


class SignalWatch:
    """Listens between `start()` and `stop()`; `received` is the signal that came, or None."""

    def __init__(self, answer: Answer | None = None) -> None:
        """`answer` saves and ends the process; if the grace period expires, it is called wherever the program is."""
        self.received: signal.Signals | None = None
        self.answer = answer
        self._depth = 0
        self._started = False

    def start(self) -> None:
        """Listen where possible: in the main thread, for signals that have no handler yet."""
        if not self._started:
            self._started = True
            if threading.current_thread() is threading.main_thread():
                _switchboard.add(self)

    def stop(self) -> None:
        """Stop listening; the last watch to stop restores the previous handlers."""
        self._started = False
        if threading.current_thread() is threading.main_thread():
            _switchboard.remove(self)

    def expect_workers(self) -> None:
        """Check, at the start of a step, for a DataLoader with workers created since the last one."""
        if self._started and threading.current_thread() is threading.main_thread():
            _switchboard.keep_workers_quiet()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Wrap a call of the guard: inside, state is partly changed, so a signal waits until the call is over."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Begin what `busy` wraps."""
        self._depth += 1

    def end(self) -> None:
        """End it."""
        self._depth -= 1

    @property
    def is_busy(self) -> bool:
        """Whether a call of the guard is in progress."""
        return self._depth > 0

    @property
    def is_overdue(self) -> bool:
        """Whether the grace period is over, so that the signal must be answered as soon as possible."""
        return self.received is not None and _switchboard.is_overdue


class _Switchboard:
    """The signal handlers of this process, and the watches that listen."""

    def __init__(self) -> None:
        self._listeners: list[SignalWatch] = []
        self._owner = -1
        self._installed: dict[signal.Signals, Any] = {}
        self._timer: threading.Timer | None = None
        # Reentrant: a handler runs in the main thread, perhaps while `remove` holds the lock there
        self._timer_lock = threading.RLock()  # once handlers are restored, a reminder would kill the process
        self._num_retries = 0
        self._heard_at = 0.0
        self._hook: Any = None
        self._expects_reminder = False
        self._is_printing = False
        self.is_overdue = False
        self.has_left = False
        """Whether a signal was answered and the process is ending."""

    def add(self, watch: SignalWatch) -> None:
        if self._owner != os.getpid():  # a child of the process that listened
            # A fork inherits the lists, but the handlers and watches in them are the parent's
            self._owner, self._listeners, self._installed = os.getpid(), [], {}
        self._listeners.append(watch)
        self.has_left = False
        self.keep_workers_quiet()
        for number, default in DEFAULTS.items():
            if number is signal.SIGINT and is_interactive():
                continue
            if signal.getsignal(number) in (default, signal.SIG_DFL):  # any other handler is the user's
                self._installed[number] = signal.signal(number, self._receive)

    def remove(self, watch: SignalWatch) -> None:
        if watch in self._listeners:
            self.has_left = self.has_left or self.has_heard
            self._listeners.remove(watch)
        if self._listeners or os.getpid() != self._owner:
            return
        with self._timer_lock:
            self._settle()
            for number, before in self._installed.items():
                if signal.getsignal(number) == self._receive:  # `==`: each access makes a new bound method
                    signal.signal(number, before)
        self._installed = {}
        theirs = _find_kept_back()
        # Left wrapped while the process ends: workers that the same signal kills would raise during the exit
        if theirs is not None and not self.has_left:
            signal.signal(signal.SIGCHLD, theirs)

    def keep_workers_quiet(self) -> None:
        """Wrap torch's handler for dead workers; torch installs it with the first DataLoader that has any."""
        theirs = _read_handler(signal.SIGCHLD)  # runs at each step
        if getattr(theirs, "__module__", None) == DATA_LOADER and callable(theirs):
            # torch installs its handler once in a process, so wrapping it once is enough
            signal.signal(signal.SIGCHLD, functools.partial(_answer_dead_workers, theirs))

    @property
    def listens(self) -> bool:
        """Whether a guard is listening for signals in this process."""
        return bool(self._listeners) and os.getpid() == self._owner

    @property
    def has_heard(self) -> bool:
        """Whether a signal came that has not been answered yet."""
        return any(watch.received is not None for watch in self._listeners)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # First: this is our own reminder, which would otherwise count as a second signal and end the process
        if self._expects_reminder and os.getpid() == self._owner:
            self._expects_reminder, self.is_overdue = False, True
            if (self._is_printing or _is_unraisable(frame)) and self._num_retries < MOST_RETRIES:
                self._num_retries += 1
                self._remind_later(number, RETRY_SECONDS)
            else:
                self._answer_here(signal.Signals(number))
            return
        # Before the next test, for which any signal after the first is a second one
        if os.getpid() == self._owner and self.has_heard and time.monotonic() - self._heard_at < REPEAT_SECONDS:
            return
        if os.getpid() != self._owner or self.has_heard or not self._listeners:
            _end(number, frame)
            return
        self._heard_at = time.monotonic()
        for watch in self._listeners:
            watch.received = signal.Signals(number)
        # Not the logger: the interrupted code may hold its lock.
        name = signal.Signals(number).name
        os.write(2, f"steadygrad: {name}: finishing the step, then saving; send it again to end at once\n".encode())
        self.keep_workers_quiet()
        self._watch_for_errors()
        self._remind_later(number, GRACE_SECONDS)

    def _answer_here(self, number: signal.Signals) -> None:
        """Answer between two instructions of the program, outside our own code: it has not returned to the guard."""
        # The state is half changed; the guard answers by itself when its call ends, since `is_overdue` is set
        if any(watch.is_busy for watch in self._listeners):
            return
        for watch in list(self._listeners):  # a copy: answering closes the guard, which removes its watch
            if watch.answer is not None and watch.received is not None:
                watch.answer(number)

    def _remind_later(self, number: int, seconds: float) -> None:
        def remind() -> None:
            with self._timer_lock:
                if self._timer is timer:  # not one that was replaced or cancelled while it waited for the lock
                    # Before the signal, which the main thread may handle at once
                    self._expects_reminder = True
                    # A signal wakes a sleep; a flag would not.
                    signal.pthread_kill(threading.main_thread().ident or 0, number)

        self._timer = timer = threading.Timer(seconds, remind)
        timer.daemon = True  # a program that ends meanwhile need not wait for it
        with contextlib.suppress(RuntimeError):  # no more threads: the next step answers
            timer.start()

    def _watch_for_errors(self) -> None:
        """Save even if an error ends the program after the signal, as often happens because of it."""
        before = sys.excepthook

        def save_first(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._is_printing = True  # the interpreter clears what a signal raises while it prints a traceback
            # The traceback first: answering ends the process
            before(kind, error, trace)
            self._is_printing = False
            waiting = [watch for watch in self._listeners if watch.received is not None]
            halts = any(base.__name__ == "TrainingHalted" for base in kind.__mro__)  # our own: the state is bad
            if os.getpid() == self._owner and waiting and not halts:
                self._answer_here(waiting[0].received or signal.SIGTERM)

        self._hook, self._hook_before = save_first, before
        sys.excepthook = save_first

    def _settle(self) -> None:
        """Clean up when no watch listens any more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._hook is not None and sys.excepthook is self._hook:  # a hook installed after ours stays
            sys.excepthook = self._hook_before
        self._timer = self._hook = None
        self._expects_reminder = self._is_printing = self.is_overdue = False
        self._num_retries = 0


_switchboard = _Switchboard()


def _answer_dead_workers(theirs: Callable[[int, FrameType | None], None], number: int, frame: FrameType | None) -> None:
    """Handle the end of a child: torch's handler raises for a failed worker; hold that back if a signal ended it."""
    if _switchboard.has_heard or _switchboard.has_left:
        return
    try:
        theirs(number, frame)
    except RuntimeError:
        until = time.monotonic() + LATE_SECONDS
        while _switchboard.listens and not _switchboard.has_heard and time.monotonic() < until:
            time.sleep(RETRY_SECONDS)  # our own signal is handled in here
        if not _switchboard.has_heard:
            raise


def _find_kept_back() -> Any:
    """Return torch's handler if ours wraps it."""
    handler = signal.getsignal(signal.SIGCHLD)
    if isinstance(handler, functools.partial) and handler.func is _answer_dead_workers:
        return handler.args[0]
    return None


def _is_unraisable(frame: FrameType | None) -> bool:
    """Whether the program is in a destructor or a weak reference's callback, which swallow what is raised in them."""
    while frame is not None:
        code = frame.f_code
        # Compared by code object, since a frame holds no function
        if code.co_name == "__del__" or code is weakref.finalize.__call__.__code__:
            return True
        frame = frame.f_back
    return False


def _end(number: int, frame: FrameType | None) -> None:
    """Act as the default handler would."""
    default = DEFAULTS[signal.Signals(number)]
    signal.signal(number, default)
    if callable(default):
        default(number, frame)  # for SIGINT it raises KeyboardInterrupt, and the kill below is not reached
    os.kill(os.getpid(), number)


def is_interactive() -> bool:
    """Whether this is an interactive prompt or a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules
