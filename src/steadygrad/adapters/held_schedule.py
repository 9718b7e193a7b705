"""HeldSchedule: a framework's own moves of the learning rate, made only for steps that were applied.

The framework asks after each step. If the step has been judged the answer is at once; with fused optimizers on CUDA it
is on its way, and the move waits until the Guard says that the step was applied, which is before the next step.
"""

from __future__ import annotations

from collections.abc import Callable

from steadygrad.facts import StepRecord
from steadygrad.guard import Guard


class HeldSchedule:
    """Given to a Guard as its scheduler."""

    def __init__(self) -> None:
        self._guard: Guard | None = None
        self._waiting: list[tuple[StepRecord | None, Callable[[], None]]] = []

    def follow(self, guard: Guard) -> None:
        """The guard that says which steps were applied."""
        self._guard = guard

    def ask(self, move: Callable[[], None]) -> None:
        """The framework wants to move the learning rate for the step that was just made."""
        assert self._guard is not None
        if not self._guard.is_judged:
            self._waiting.append((self._guard.last, move))
        elif self._guard.last is not None and not self._guard.last.skipped:
            move()

    def step(self) -> None:
        """Guard: the step after `guard.last` was applied. What waits for an older one was asked for a skipped step."""
        waiting, self._waiting = self._waiting, []
        for before, move in waiting:
            if self._guard is not None and before is self._guard.last:
                move()
