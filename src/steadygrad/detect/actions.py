"""Rules about habits: clipping at most steps, skipping many, acting again and again.

One clip or skip is the guard at work; a habit says that something else is wrong, and a cap on skips keeps them from
hiding a defect (pytorch/torchtitan#916).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from steadygrad.config import DetectConfig
from steadygrad.detect.memory import Episode, Remembering
from steadygrad.facts import Action, ActionTaken, Fact, Finding, Reading, Severity


class FrequentClipping(Remembering):
    """More than half of the steps are clipped (info): large models train well, but the threshold sets the step."""

    name = "frequent_clipping"
    memory = ("_recent", "_episode")

    def __init__(self, config: DetectConfig) -> None:
        self._share, self._window = config.habits.clipped_share, config.habits.window
        self._recent: deque[int] = deque(maxlen=config.habits.window)
        self._num_clipped = 0  # ones in `_recent`
        self._episode = Episode(config.repeat_after, quiet=config.habits.window)

    def passes(self, reading: Reading) -> bool:
        """Take in a plain Reading after which the share is not too large."""
        recent, size = self._recent, self._window
        num, length = self._num_clipped + reading.clipped, len(recent) + 1
        if length > size:
            num, length = num - recent[0], size
        if length == size and num / length > self._share:
            return False
        recent.append(int(reading.clipped))
        self._num_clipped = num
        return True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned."""
        super().load_state_dict(state)
        self._num_clipped = self._recent.count(1)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return an info with the share."""
        if not isinstance(fact, Reading) or fact.skipped:
            return
        self._recent.append(int(fact.clipped))
        self._num_clipped = self._recent.count(1)
        share = self._num_clipped / len(self._recent)
        often = len(self._recent) == self._recent.maxlen and share > self._share
        if self._episode.is_due(fact.step, often):
            yield Finding(
                kind=self.name,
                severity=Severity.INFO,
                step=fact.step,
                message=f"{share:.0%} of the last {len(self._recent)} steps were clipped",
                advice="Reduce the learning rate or raise the clip threshold; ZClip adapts to the norm.",
                evidence={"share": share, "num_steps": len(self._recent)},
            )


class ManySkips(Remembering):
    """Many steps were not finite and skipped. The search for a loss scale before the first good step does not count."""

    name = "many_skips"
    memory = ("_skips", "_began", "_episode")

    def __init__(self, config: DetectConfig) -> None:
        self._num, self._window = config.habits.num_skips, config.habits.window
        self._skips: deque[int] = deque(maxlen=config.habits.num_skips)
        self._began = False
        self._episode = Episode(config.repeat_after, quiet=config.habits.window)

    def passes(self, _reading: Reading) -> bool:
        """A plain step was made."""
        self._began = True
        return True

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a warning at the first of the skips."""
        if not isinstance(fact, Reading):
            return
        if not (fact.skipped and fact.is_nonfinite):
            # Skipped though finite: refused after a rollback, neither a bad step nor a good one
            self._began = self._began or not fact.skipped
            return
        if not self._began and fact.loss_scale is not None and not fact.loss_is_nonfinite:
            return
        self._skips.append(fact.step)
        many = len(self._skips) == self._num and fact.step - self._skips[0] < self._window
        if self._episode.is_due(fact.step, many):
            yield Finding(
                kind=self.name,
                severity=Severity.WARNING,
                step=self._skips[0],
                message=f"{self._num} of the last {fact.step - self._skips[0] + 1} steps were not finite and skipped",
                advice="Skipping hides a defect here: find where the first one comes from.",
                evidence={"num_skips": self._num, "num_steps": fact.step - self._skips[0] + 1},
            )


class FrequentActions(Remembering):
    """The guard had to act again and again: the settings are wrong, not the step."""

    name = "frequent_actions"
    hears = (ActionTaken,)
    memory = ("_steps", "_episode")

    def __init__(self, config: DetectConfig) -> None:
        self._num, self._window = config.habits.num_actions, config.habits.action_window
        self._steps: deque[int] = deque(maxlen=config.habits.num_actions)
        self._episode = Episode(config.repeat_after, quiet=config.habits.action_window)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a warning at the last of the actions."""
        if not isinstance(fact, ActionTaken) or fact.action in (Action.NONE, Action.CLIP):
            return
        self._steps.append(fact.step)
        often = len(self._steps) == self._num and fact.step - self._steps[0] < self._window
        if self._episode.is_due(fact.step, often):
            yield Finding(
                kind=self.name,
                severity=Severity.WARNING,
                step=fact.step,
                message=f"{self._num} corrective actions in {fact.step - self._steps[0] + 1} steps",
                advice="Review data quality and hyperparameters: learning rate, warm-up, precision, the labels.",
                evidence={"num_actions": self._num, "num_steps": fact.step - self._steps[0] + 1},
            )
