"""Shutdown: a signal -> every guard of the process saves, and the process exits with a code that asks for a restart.

A step that has begun is finished. Guards that step in turn, like those of a GAN, stop at the end of a round, so that a
resume finds all of them at the same step; a round ends with the guard after which the first one was seen to step
again. If data or user code keeps the guard waiting, the signal is answered there (`checkpoint/signals.py`). Several
ranks stop together, after the step in which all have learned of it.
"""

from __future__ import annotations

import contextlib
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Self, TypeVar

from steadygrad.checkpoint.run import RunCheckpoints
from steadygrad.checkpoint.save import Save
from steadygrad.checkpoint.signals import EXIT_CODE, GRACE_SECONDS
from steadygrad.errors import TrainingHalted
from steadygrad.guard.judging import Judging
from steadygrad.guard.moment import Moment
from steadygrad.guard.saving import Saver
from steadygrad.measure.ranks import Ranks

T = TypeVar("T")


class _Rounds:
    """The order in which the registered guards step."""

    def __init__(self) -> None:
        self.members: list[weakref.ref[Shutdown]] = []
        self._last: weakref.ref[Shutdown] | None = None
        self._closers: weakref.WeakSet[Shutdown] = weakref.WeakSet()
        self.is_shutting_down = False
        """Whether the last save is under way; a repeated signal meanwhile changes nothing."""

    def join(self, member: Shutdown) -> None:
        self.members = [one for one in self.members if one() is not None]
        if not any(one() is member for one in self.members):
            self.members.append(weakref.ref(member))

    def leave(self, member: Shutdown) -> None:
        self.members = [one for one in self.members if one() not in (None, member)]
        self._closers.discard(member)

    def list_members(self) -> list[Shutdown]:
        return [member for one in self.members if (member := one()) is not None]

    def note_begin(self, member: Shutdown) -> None:
        if len(self.members) < 2:
            return  # a round of one
        last = None if self._last is None else self._last()
        if last is not None and self.is_first(member):
            self._closers.add(last)

    def note_end(self, member: Shutdown) -> None:
        if self._last is not None and self._last() is member:
            return
        if member in self.list_members():
            self._last = weakref.ref(member)

    def is_first(self, member: Shutdown) -> bool:
        """Return whether a round begins with `member`."""
        members = self.list_members()
        return not members or members[0] is member

    def ends_with(self, member: Shutdown) -> bool:
        """Return whether a round ends with the step of `member`."""
        # Runs at every step: the references are followed only if there are several.
        return len(self.members) < 2 or len(self.list_members()) < 2 or member in self._closers

    @property
    def is_known(self) -> bool:
        """Whether the end of a round has been seen."""
        return len(self.list_members()) < 2 or len(self._closers) > 0


# One for the process, since a signal is for all of its guards; it holds them weakly.
_rounds = _Rounds()


class _Step:
    """One call of the guard: forward, backward and step, or a part of them. Not a generator: made at every step."""

    __slots__ = ("_shutdown", "is_made")

    def __init__(self, shutdown: Shutdown) -> None:
        self._shutdown, self.is_made = shutdown, False

    def __enter__(self) -> Self:
        self._shutdown.watch.begin()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        # First: leave() refuses to save while a guard is busy.
        self._shutdown.watch.end()
        if isinstance(error, Exception):
            self._shutdown.after_error(error)
        elif error is None and self.is_made:
            self._shutdown.after_step()


class Shutdown:
    """One guard's part in answering a signal."""

    def __init__(
        self,
        checkpoints: RunCheckpoints,
        *,
        ranks: Ranks,
        moment: Moment,
        judging: Judging,
        saver: Saver,
        close: Callable[[], Callable[[], None] | None],
    ) -> None:
        """`close` returns the guard's close function while the guard exists."""
        self._checkpoints, self._ranks, self._moment = checkpoints, ranks, moment
        self._judging, self._saver, self._close = judging, saver, close
        self.watch = checkpoints.signals
        mine = weakref.ref(self)  # the registry must not keep a dropped guard alive
        self.watch.answer = lambda _: None if (shutdown := mine()) is None else shutdown._leave_between()
        self._began = self._step_seconds = 0.0
        self._has_batch = self._has_joined = False
        self.is_torn = False
        """Whether an optimizer step has begun and not ended: the weights may be half updated, so they are not saved."""
        self.exit_code: int | None = None
        """Exit code of the process; if the program caught the exit and went on, it is raised again at the next step."""

    # --- where a signal is answered ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Wrap a call that is not a step; a signal that arrives meanwhile is answered after it."""
        with self.watch.busy():
            yield
        if self.watch.received is not None and not self._ranks.many:
            self.leave()

    def around_step(self) -> _Step:
        """Wrap forward, backward and step; a signal is answered after the step, or when an error propagates."""
        return _Step(self)

    def before_step(self, *, has_gradients: bool) -> None:
        """Prepare for a step; leave instead if a signal came and another step might take too long."""
        if not self._has_joined and self._checkpoints.has_place:
            # From the first step on, not from construction: before it there is nothing to save.
            self._checkpoints.listen()
            _rounds.join(self)
            self._has_joined = True
        self.watch.expect_workers()
        _rounds.note_begin(self)
        self._began = time.monotonic()
        # One of several ranks must not leave here: the others would wait for it in their next collective.
        if self.watch.received is None or self._ranks.many:
            return
        is_slow = self._step_seconds > GRACE_SECONDS or self.watch.is_overdue or not _rounds.is_known
        # A batch that was drawn counts as used in the data position, so a resume would miss it.
        if is_slow and _rounds.is_first(self) and not has_gradients and not self._has_batch:
            self.leave()

    def send_to_ranks(self) -> None:
        """Pass a signal on to the other ranks, along with the losses of the next backward."""
        self._ranks.asks_to_stop = self.watch.received is not None

    def after_step(self) -> None:
        """Answer a signal that came during the step."""
        _rounds.note_end(self)
        self._step_seconds, self._has_batch = time.monotonic() - self._began, False
        if self._ranks.many:  # a signal reaches ranks at different steps: all stop after the step that shared it
            if self._judging.is_asked_to_stop:
                self.leave()
        elif self.watch.received is not None and (_rounds.ends_with(self) or self.watch.is_overdue):
            self.leave()

    @property
    def ends_round(self) -> bool:
        """Return whether every guard that steps in turn with this one has stepped in this round."""
        return _rounds.ends_with(self)

    def after_error(self, error: BaseException) -> None:
        """Handle a foreign error that left weights and moments intact; after a signal, the signal often caused it."""
        is_own = isinstance(error, TrainingHalted) or not isinstance(error, Exception)
        if self.watch.received is not None and not self._ranks.many and not is_own:
            self.leave(error)

    def watch_data(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches and track their position.

        A loader whose workers also received the signal fails, and that ends the training.
        """
        iterator = iter(self._checkpoints.iterate(loader))
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                self.after_error(error)
                raise
            self._has_batch = True
            yield batch

    # --- the answer -------------------------------------------------------------------------------------------------

    def leave(self, error: BaseException | None = None) -> None:
        """Save and close all guards of the process, then exit; not while one of them is in the middle of a step."""
        received = self.watch.received or signal.SIGTERM
        members = [one for one in _rounds.list_members() if one._checkpoints.is_listening] or [self]
        if _rounds.is_shutting_down or any(member.watch.is_busy or member.is_torn for member in members):
            return
        _rounds.is_shutting_down = True
        try:
            code = self._save_and_close(members, received)
        finally:
            _rounds.is_shutting_down = False  # a program may catch the exit and go on
        raise SystemExit(code) from error

    @staticmethod
    def _save_and_close(members: list[Shutdown], received: signal.Signals) -> int:
        saves = [member._save() for member in members]  # guards of one directory save together, under one token
        # Without a save there is nothing to restart from: then the code is that of a process which the signal ended.
        code = EXIT_CODE if all(save is not None and save.wait() is not None for save in saves) else 128 + received
        for member in members:
            member.exit_code = code
            close = member._close()
            if close is not None:
                with contextlib.suppress(TrainingHalted):
                    _close_stopped(close, code)
        return code

    def _leave_between(self) -> None:
        """Do the same when interrupting the program between two instructions."""
        if not self._ranks.many:
            self.leave()

    def _save(self) -> Save | None:
        with self.watch.busy():  # a repeated signal is held back
            return self._saver.save(is_between=not self._moment.batches.num)

    def stop(self) -> None:
        """Stop listening: the guard is closed."""
        _rounds.leave(self)


def _close_stopped(close: Callable[[], None], code: int) -> None:
    """Close a guard while the exit is being handled, so that its record says that it was stopped, not finished."""
    try:
        raise SystemExit(code)
    except SystemExit:
        close()
