"""Rules about the course of the loss: explosion, slow divergence, plateau.

An explosion is a loss that stays ten times above what it was (seed rule: ten times the epoch before). Divergence is
slower: block after block higher, until half of the progress is lost. Non-finite losses enter no history; inside a run
of exploded losses they count as exploded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from steadygrad.config import DetectConfig
from steadygrad.detect.loss import Restarts
from steadygrad.detect.medians import Blocks
from steadygrad.detect.memory import Episode, Remembering, Streak
from steadygrad.facts import EpochEnd, Fact, Finding, Reading, Severity
from steadygrad.stats import median

FEW = 8
"""Losses below which the history says little about noise. Then twice as many must be high, and must agree:"""
AGREEMENT = 6.0
"""... with this many of their own standard deviations (of the logarithm) between them and the history."""
FIRST, START = 4, 100
"""Losses that a run begins with, and steps in which the loss is compared with them."""
CLIMBED = 3.0
"""Times the first losses that the usual one is when the history has climbed along."""
NOTHING = 1e-6
"""A loss below this share of its gradient's norm is nothing: weights that move by a millionth would bring it to 0."""
USUAL_NOISES, OWN_NOISES = 8.0, 2.0
"""Standard errors of a block's median that a rise must come to: of the usual one, and of the block's own."""
ADVICE = "Lower the learning rate or lengthen the warm-up, clip gradients, and look at what changed at this step."


class FirstLoss(Remembering):
    """Notices a loss that begins as nothing and yet has a gradient: its value is not what the run minimises.

    So it is for GRPO, whose advantages have a mean of 0, and for every ratio to its own detached self. What is added to
    such a loss, as a penalty for leaving the first policy, can only rise.
    """

    memory = ("_is_known", "_is_surrogate")

    def __init__(self) -> None:
        self._is_known = self._is_surrogate = False

    @property
    def is_ordinary(self) -> bool:
        """Whether the first loss is known, and was something."""
        return self._is_known and not self._is_surrogate

    def is_surrogate(self, reading: Reading, loss: float) -> bool:
        """Return whether the first finite loss was nothing beside its gradient; call it at each step."""
        if not self._is_known and math.isfinite(loss):
            self._is_known = True
            self._is_surrogate = abs(loss) < NOTHING * reading.finite_grad_norm
        return self._is_surrogate


class LossExplosion(Remembering):
    """The loss is ten times that of the epoch before, or has stayed ten times above the window before.

    What is done about it may not help: weights that an explosion has wrecked stay wrecked at a lower learning rate. So
    the rule checks again `recovery_steps` later, and reports a loss that has not recovered (`unrecovered_loss`).
    """

    name = "loss_explosion"
    memory = (
        "_history",
        "_high",
        "_streak",
        "_restarts",
        "_epoch_loss",
        "_level",
        "_told_at",
        "_began",
        "_since",
        "_first",
        "_is_signed",
        "_rise",
        "_first_loss",
    )

    def __init__(self, config: DetectConfig) -> None:
        self._ratio, self._patience = config.loss.explosion_ratio, config.loss.explosion_patience
        self._history: deque[float] = deque(maxlen=config.window)
        self._high: list[float] = []
        self._streak = Streak()
        self._restarts = Restarts(config.loss)
        self._epoch_loss: float | None = None
        self._recovery_steps, self._recovery_ratio = config.loss.recovery_steps, config.loss.recovery_ratio
        self._level: float | None = None  # the loss before a reported explosion that is being watched
        self._told_at = self._began = 0
        self._first: list[float] = []  # the losses that the run began with
        self._is_signed = False
        self._rise = Streak()
        self._first_loss = FirstLoss()
        self._since: deque[float] = deque(maxlen=config.loss.explosion_patience)
        self._least = 0.0  # no size in the history is below this

    def passes(self, reading: Reading) -> bool:
        """Take in a loss below ten times the lowest, while nothing else is going on."""
        loss = reading.loss
        if loss is None:
            return True
        if self._high or self._level is not None or reading.step < START or len(self._first) < FIRST:
            return False
        if not self._history or not self._first_loss.is_ordinary:
            return False
        if loss > self._ratio * self._least:
            self._least = min(self._history)
            if loss > self._ratio * self._least:
                return False
        self._restarts.feed(reading)
        self._history.append(abs(loss))
        self._least = min(self._least, abs(loss))
        return True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned."""
        super().load_state_dict(state)
        self._least = 0.0

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return an error at the step where the loss left its range, or at the end of the epoch that did."""
        self._least = 0.0
        if isinstance(fact, EpochEnd):
            yield from self._observe_epoch(fact)
        elif isinstance(fact, Reading) and fact.loss is not None:
            if self._first_loss.is_surrogate(fact, fact.loss):
                return
            if self._level is not None:
                yield from self._watch_recovery(fact.step, fact.loss, self._level)
            rises = self._rises_from_the_start(fact.step, fact.loss)
            if rises is not None:
                yield rises
                return
            yield from self._observe_step(fact, fact.loss)

    def _rises_from_the_start(self, step: int, loss: float) -> Finding | None:
        """A loss that climbs from its first steps on has no history to stand out from: it is compared with those."""
        self._is_signed |= loss < 0 and step < START  # later ones are of no use here
        if len(self._first) < FIRST:
            if math.isfinite(loss):
                self._first.append(abs(loss))
            return None
        began_at = max(self._first)
        # `_told_at` is 0 until something was reported; losses of both signs begin anywhere, maybe near 0
        if step >= START or began_at <= 0 or self._told_at or self._is_signed:
            return None
        far = math.isfinite(loss) and loss > self._ratio * began_at
        climbed = far and not self._high and self._usual() > CLIMBED * began_at  # else the history itself will show it
        if self._rise.feed(step, climbed) < self._patience:
            return None
        start = self._rise.start
        self._rise.feed(step, False)
        self._level, self._told_at, self._began = began_at, step, start
        self._since.clear()
        return self._describe(start, began_at, loss)

    def _watch_recovery(self, step: int, loss: float, level: float) -> Iterable[Finding]:
        self._since.append(loss if math.isfinite(loss) else math.inf)  # a NaN would spoil the sort below
        if step - self._told_at < self._recovery_steps:
            return
        self._level = None
        now = median(sorted(self._since))
        if now > self._recovery_ratio * level:
            yield Finding(
                kind="unrecovered_loss",
                severity=Severity.ERROR,
                step=self._began,
                message=f"the loss was {level:.6g}, exploded, and {step - self._told_at} steps later is {now:.6g}",
                advice="Go back to earlier weights, and find out what happened at that step.",
                evidence={"before": level, "now": now},
            )

    def _observe_step(self, reading: Reading, loss: float) -> Iterable[Finding]:
        in_grace = self._restarts.feed(reading)
        if self._is_ordinary(loss):
            self._history.append(abs(loss))
            return
        usual = self._usual()
        high = usual > 0 and (not math.isfinite(loss) or loss > self._ratio * usual)
        if self._restarts.forgive(loss, in_grace):
            high = False
        if not high:
            self._streak.feed(reading.step, False)
            # High ones that did not last are part of the noise; without them the history would be of low ones only.
            self._history.extend([*self._high, abs(loss)] if math.isfinite(loss) else self._high)
            self._high.clear()
            return
        if math.isfinite(loss):
            self._high.append(loss)
        elif not self._high:  # NaN out of the blue is not an explosion
            return
        few = len(self._history) < FEW
        if self._streak.feed(reading.step, True) >= self._patience * (2 if few else 1):
            if not few or self._agree(usual):
                yield self._describe(self._streak.start, usual, median(sorted(self._high)))
                self._level, self._told_at, self._began = usual, reading.step, self._streak.start
                self._since.clear()
            self._history.clear()  # the new normal, until the next one
            self._history.extend(self._high)
            self._high.clear()
            self._streak.feed(reading.step, False)

    def _is_ordinary(self, loss: float) -> bool:
        """Whether nothing is going on and the loss is below ten times the lowest, as at most steps. Saves sorting."""
        if self._high or not self._history or not math.isfinite(loss):
            return False
        return loss <= self._ratio * min(self._history)

    def _usual(self) -> float:
        """Return the median size in the window; the largest of it while there are few; inf while there is none."""
        if not self._history:
            return math.inf
        values = sorted(self._history)
        return values[-1] if len(values) < FEW else median(values)

    def _agree(self, usual: float) -> bool:
        """Whether the exploded losses lie further from the history than they do from each other."""
        # All are above ten times a usual loss that is above 0, so they have logarithms
        logs = [math.log(v) for v in self._high]
        mean = sum(logs) / len(logs)
        deviation = math.sqrt(sum((v - mean) ** 2 for v in logs) / len(logs))
        return mean - math.log(usual) > AGREEMENT * deviation

    def _observe_epoch(self, fact: EpochEnd) -> Iterable[Finding]:
        loss, before = fact.train_loss, self._epoch_loss
        if loss is None or not math.isfinite(loss):
            return
        self._epoch_loss = loss
        if before is not None and before > 0 and loss > self._ratio * before:
            yield self._describe(fact.step, before, loss)
            if self._level is None:
                self._level, self._told_at, self._began = before, fact.step, fact.step
                self._since.clear()

    def _describe(self, step: int, before: float, after: float) -> Finding:
        return Finding(
            kind=self.name,
            severity=Severity.ERROR,
            step=step,
            message=f"Training loss exploded from {before:.6g} to {after:.6g}",
            advice=ADVICE,
            evidence={"before": before, "after": after, "ratio": after / before},
        )


class Divergence(Remembering):
    """The loss rises block after block, or has jumped and stays there, and half of the progress is lost.

    Numbers: four blocks of 16 in a row rise by chance once in 120, so the rise must also be eight standard errors, a
    tenth of the level, and half of the way from the start to the best; a jump must be all that in each of four blocks.
    While the learning rate is above what it was at the best block, the loss must be above where it started: a restart
    raises it, and that is meant.
    """

    name = "divergence"
    memory = (
        "_blocks",
        "_noises",
        "_last",
        "_first",
        "_best",
        "_best_rate",
        "_rising",
        "_high",
        "_episode",
        "_first_loss",
    )

    def __init__(self, config: DetectConfig) -> None:
        self._config = config.loss
        self._blocks = Blocks(config.loss.block)
        self._noises: deque[float] = deque(maxlen=16)
        self._last: float | None = None
        self._first: float | None = None
        self._best = math.inf
        self._best_rate = math.inf
        self._rising, self._high = Streak(), Streak()
        self._first_loss = FirstLoss()
        self._episode = Episode(config.repeat_after, quiet=config.repeat_after)

    def passes(self, reading: Reading) -> bool:
        """Take in a loss that completes no block."""
        if reading.loss is None:
            return True
        if self._blocks.is_nearly_full or not self._first_loss.is_ordinary:
            return False
        self._blocks.add(reading.step, reading.loss)
        return True

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a warning at the step where the rise began."""
        if not isinstance(fact, Reading) or fact.loss is None or self._first_loss.is_surrogate(fact, fact.loss):
            return
        level = self._blocks.add(fact.step, fact.loss)
        if level is None:
            return
        self._noises.append(self._blocks.noise)
        length = self._rising.feed(self._blocks.start, self._last is not None and level > self._last)
        self._last = level
        if self._first is None:
            self._first = level
        if level < self._best:
            # inf without a rate: no later rate then counts as a restart
            self._best, self._best_rate = level, fact.learning_rate or math.inf
        is_far = self._is_far(level, fact.learning_rate)
        stays = self._high.feed(self._blocks.start, is_far)
        active = is_far and (length >= self._config.divergence_blocks or stays >= self._config.divergence_blocks)
        if self._episode.is_due(fact.step, active):
            rises = length >= self._config.divergence_blocks
            num_steps = (length if rises else stays) * self._config.block
            been = "has been rising" if rises else "has been far above its best"
            yield Finding(
                kind=self.name,
                severity=Severity.WARNING,
                step=self._rising.start if rises else self._high.start,
                message=f"the loss {been} for {num_steps} steps, from {self._best:.4g} to {level:.4g}",
                advice=ADVICE,
                evidence={"best": self._best, "level": level, "first": self._first, "num_blocks": length},
            )

    def _is_far(self, level: float, rate: float | None) -> bool:
        assert self._first is not None
        rise, progress = level - self._best, max(0.0, self._first - self._best)
        # One block's own noise may be small by chance; where a run has been hurt it is large.
        noise = max(USUAL_NOISES * median(sorted(self._noises)), OWN_NOISES * self._blocks.noise)
        enough = max(noise, 0.1 * abs(self._best), self._config.divergence_share * progress)
        restarted = rate is not None and rate > 1.5 * self._best_rate
        return rise > enough and (not restarted or level > self._first)


class LossPlateau(Remembering):
    """No progress for a long while (info). SageMaker Debugger's loss_not_decreasing, on medians of blocks."""

    name = "loss_plateau"
    memory = ("_blocks", "_best", "_best_step", "_episode")

    def __init__(self, config: DetectConfig) -> None:
        self._config = config.loss
        self._blocks = Blocks(4 * config.loss.block)
        self._best = math.inf
        self._best_step = 0
        self._episode = Episode(config.repeat_after, quiet=config.repeat_after)

    def passes(self, reading: Reading) -> bool:
        """Take in a loss that completes no block."""
        if reading.loss is None:
            return True
        if self._blocks.is_nearly_full:
            return False
        self._blocks.add(reading.step, reading.loss)
        return True

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return an info at the step after which the loss got no better."""
        if not isinstance(fact, Reading) or fact.loss is None:
            return
        level = self._blocks.add(fact.step, fact.loss)
        if level is None:
            return
        better = self._best - self._config.plateau_improvement * abs(self._best)
        if math.isinf(self._best) or level < better:
            self._best, self._best_step = level, fact.step
        waited = fact.step - self._best_step
        if self._episode.is_due(fact.step, waited >= self._config.plateau_steps):
            yield Finding(
                kind=self.name,
                severity=Severity.INFO,
                step=self._best_step,
                message=f"the loss has not fallen below {self._best:.4g} for {waited} steps",
                advice="If it should still fall: change the learning rate, or check which parameters are trained.",
                evidence={"best": self._best, "level": level, "num_steps": waited},
            )
