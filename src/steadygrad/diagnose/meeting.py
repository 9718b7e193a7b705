"""Meeting: ranks that replay a step together agree before each of its collectives.

A rank whose replay raises would leave the others waiting for ever in theirs. So before each collective all ranks
say which one they are about to make, or that they are done, or that they failed. If one failed, or if they are about to
make different ones, all of them give up at that point. Costs a small exchange for each collective, in replays only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DONE, FAILED = "done", "failed"


class CollectiveError(RuntimeError):
    """A replay would have waited for other ranks that do not come."""


class Meeting:
    """What ranks exchange during one replay; `exchange` returns each rank's message."""

    def __init__(self, exchange: Callable[[Any], list[Any]]) -> None:
        self._exchange = exchange
        self._is_over = False

    def is_true_anywhere(self, word: bool) -> bool:
        """Return whether some rank says True. Call it between two replays, on every rank."""
        return any(self._exchange(word))

    def begin(self) -> None:
        """Begin a replay, on every rank."""
        self._is_over = False

    def before_call(self, name: str) -> None:
        """Call it before a collective; raise on all ranks if they do not all come."""
        if self._is_over:  # the program went on after the error: it still must not be waited for
            raise CollectiveError("the replay is over on another rank")
        words = set(self._exchange(name)) - {DONE}
        if words != {name}:
            self._is_over = True
            why = "it failed on another rank" if FAILED in words else "the ranks are at different places of it"
            raise CollectiveError(f"the replay was given up: {why}")

    def finish(self, *, failed: bool) -> None:
        """Call it after the replay, and stay until all ranks are done or know that one failed."""
        while not self._is_over:
            words = set(self._exchange(FAILED if failed else DONE))
            self._is_over = words == {DONE} or FAILED in words or len(words - {DONE}) > 1
