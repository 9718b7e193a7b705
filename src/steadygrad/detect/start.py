"""The start of a run: is the learning rate so high that the first steps throw the weights away?

All evidence is distance from where the run itself began: its first loss, its first gradient norm, the norm of the
weights it was given. One sign alone is not a finding, since healthy runs have each of them: a loss that overshoots in
the first steps, a norm that doubles, weights that grow. The rule looks at the first `StartThresholds.steps` readings
only; after a rollback to the start it begins again.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from steadygrad.config.detect import DetectConfig
from steadygrad.detect.memory import Remembering, Streak
from steadygrad.facts import Answer, Fact, Finding, InputScan, ParameterScan, Reading, Severity
from steadygrad.stats import median

ADVICE = "Lower the learning rate, or warm it up over the first hundreds of steps."
STEADY = 40.0
"""Growth of the weights beyond which it was exponential, and says nothing about how much too high the rate is."""
FAR = 10.0
"""Standard deviations of the settled losses' logarithms between them and the loss that the first steps made."""
SETTLED = 16
"""Last losses of the start, in two halves: the second must be lower than the first, or nothing is learnt."""


class RateTooHigh(Remembering):
    """The first steps do harm: the weights run away, the loss climbs, or it jumped up and has been flat since.

    Numbers, over a transformer, a CNN and an RNN with SGD and Adam: eight steps at a rate that trains well make the
    norm of the weights 1.00 to 1.04 times what it was, at three times that rate up to 1.23 times, at thirty times 1.5
    to 6.7 times. An RNN that starts as the identity has 1.06 there, but its loss is thrown to 16 to 45 times the first.

    A gradient that grows while the loss falls does no harm: a small GPT learns well at a rate that makes its weights
    1.7 times as large. Of the runs with such a growth, those that were ruined gave back 0.88 times and more of what
    they had learnt; that GPT gives back 0.2 to 0.6 times, and once in eight seeds 1.1 times.
    """

    name = "rate_too_high"
    memory = (
        *("_steps", "_losses", "_norms", "_weights", "_growth"),
        *("_pushes", "_rates", "_num_weighed", "_climb", "_told", "_is_ruined", "_spoilt_batch"),
    )

    def __init__(self, config: DetectConfig) -> None:
        self._config = config.start
        self._steps: list[int] = []
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._weights: dict[str, float] = {}  # norms of the weights before the first step
        self._growth: float | None = None  # how many times that they were, all together, a few steps later
        self._num_weighed = 0  # after how many steps that was
        self._pushes: list[float] = []  # norms of the gradients as the optimizer got them
        self._rates: list[float] = []
        self._climb = Streak()
        self._told = False
        self._is_ruined = False
        self._spoilt_batch = -1  # the last step whose batch was not finite

    def passes(self, _reading: Reading) -> bool:
        """After the start nothing is taken in."""
        return self._is_ruined or len(self._losses) >= self._config.steps

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return an error, once; and once more when the run is ruined while that is still being tested."""
        # After the start this is all that the rule costs
        if self._is_ruined or len(self._losses) >= self._config.steps:
            return
        if isinstance(fact, InputScan):
            if fact.is_nonfinite:
                self._spoilt_batch = fact.step
        elif isinstance(fact, ParameterScan):
            self._weigh(fact.norms, is_first=fact.step < 0)
        elif isinstance(fact, Reading) and fact.loss is not None:
            harm = self._find_ruin(fact.step) if fact.is_nonfinite else self._find_harm(fact, fact.loss)
            if harm and (fact.is_nonfinite or not self._told):
                self._told, self._is_ruined = True, fact.is_nonfinite
                found = self._describe(harm)
                # A run that is not finite any more needs no paired test: the judge acts on this word alone
                proof = {"proof": Answer.NONFINITE.value} if fact.is_nonfinite else {}
                yield dataclasses.replace(found, evidence={**found.evidence, **proof})

    def _weigh(self, norms: Mapping[str, float], *, is_first: bool) -> None:
        """Measure the weights' growth. Ignore those that begin at zero, which must grow, and a single trained layer."""
        if is_first and self._losses:
            return  # a resumed run looks at the weights it was given; they are not the run's first ones
        if not self._losses:
            self._weights = {name: norm for name, norm in norms.items() if 0 < norm < math.inf}
        elif len(self._weights) > 1 and self._growth is None and all(name in norms for name in self._weights):
            grown = math.hypot(*(norms[name] for name in self._weights)) / math.hypot(*self._weights.values())
            self._growth = grown if math.isfinite(grown) else None
            self._num_weighed = len(self._losses) + 1  # the scan comes before the Reading of the step it follows

    def _find_harm(self, reading: Reading, loss: float) -> str:
        """Describe the harm that this finite step shows; empty if none."""
        if reading.skipped:
            return ""
        self._steps.append(reading.step)
        self._losses.append(loss)
        self._norms.append(reading.finite_grad_norm)
        self._pushes.append(reading.applied_norm)
        self._rates.append(reading.learning_rate or 0.0)
        return self._find_climb(reading.step) or self._find_runaway() or self._find_wreck()

    def _find_climb(self, step: int) -> str:
        """Loss after loss is far above the first two, further than they are from each other, and gradients grow."""
        first, norm, loss = max(self._losses[:2]), max(self._norms[:2]), self._losses[-1]
        high = loss > self._config.climb_ratio * first > 0 and self._norms[-1] > self._config.gradient_ratio * norm
        length = self._climb.feed(step, high)
        if length < self._config.climb_patience:
            return ""
        score = min(_score(self._losses[-length:], first), _score(self._norms[-length:], norm))
        if score < self._config.climb_score:  # batches of one sample vary as much
            return ""
        return f"the loss has climbed from {first:.4g} to {loss:.4g} since the first steps, and does not come back"

    def _find_runaway(self) -> str:
        """The weights are no longer those that were given, what was learnt was given back, and little is learnt since.

        If they ran far it is reported within a few steps, else at the end of the start: some runs recover from it.
        """
        growth, config, num = self._growth, self._config, len(self._losses)
        if growth is None or growth < config.weight_growth:
            return ""
        far = growth >= config.runaway_growth
        # Far: judged only within the first `runaway_steps`. Otherwise: only at the last step of the start
        if num > config.runaway_steps if far else num < config.steps:
            return ""
        # 1e-38 is near the smallest normal float32: a first norm of 0 must not become a division by 0
        first, gradient = self._losses[0], max(self._norms) / max(self._norms[0], 1e-38)
        least = config.loss_rise * abs(first)
        if gradient < config.gradient_ratio and max(self._losses) - first < least:
            return ""
        if _find_given_back(self._losses, least) < config.lost_share:
            return ""
        learnt = config.learnt_share if far else config.recovered_share
        if median(sorted(self._losses[-4 if far else -SETTLED // 2 :])) < learnt * first:
            return ""
        return f"the first steps made the norm of the weights {growth:.3g} times what it was, and little was learnt"

    def _find_wreck(self) -> str:
        """The loss was thrown far up, came down to no less than it was, and has lain flat there since."""
        if len(self._losses) < self._config.steps:
            return ""
        settled, first, highest = self._losses[-SETTLED:], self._losses[0], max(self._losses[:-SETTLED])
        if min(settled) <= 0 or first <= 0:  # logarithms follow
            return ""
        half = SETTLED // 2
        early, level = median(sorted(settled[:half])), median(sorted(settled[half:]))
        noise = _noise([math.log(value) for value in settled])
        thrown = highest > self._config.thrown_ratio * max(first, level)
        falls = math.log(early / level) > 2.0 * noise or level < self._config.learnt_share * first
        if not thrown or falls or math.log(highest / level) < FAR * noise:
            return ""
        return f"the first steps drove the loss from {first:.4g} to {highest:.4g}, and it stays there: {level:.4g}"

    def _find_ruin(self, step: int) -> str:
        """Loss and gradient grew from the first step on until they were not finite, which was not the batch's doing."""
        # A NaN in the data after growing losses would otherwise send the run back to its start
        if len(self._losses) < 2 or step == self._spoilt_batch:
            return ""
        loss, norm = self._losses[-1] / max(self._losses[0], 1e-38), self._norms[-1] / max(self._norms[0], 1e-38)
        if self._losses[0] <= 0 or loss < self._config.climb_ratio or norm < self._config.ruin_ratio:
            return ""
        return f"loss and gradient grew {loss:.2g} and {norm:.2g} times from the first step until they were not finite"

    def _find_beginning(self) -> int:
        """Return the first step whose loss or gradient shows the harm that those before it did."""
        loss, norm, config = self._losses[0], self._norms[0], self._config
        for step, later, grown in zip(self._steps[1:], self._losses[1:], self._norms[1:]):
            if later - loss > config.loss_rise * abs(loss) or grown > config.gradient_ratio * norm:
                return step
        return self._steps[0]

    def _is_normalised(self, move: float) -> bool:
        """Whether the weights went further than their gradients can have pushed them: the optimizer divides by a size.

        SGD adds a gradient at most once in each step, whatever its momentum, so this holds for Adam and its like only.
        """
        num = self._num_weighed
        # Only the steps before the scan: later ones did not move the weights that it measured
        furthest = num * max(self._rates[:num], default=0.0) * sum(self._pushes[:num])
        return 0 < furthest < move * math.hypot(*self._weights.values())

    def _describe(self, harm: str) -> Finding:
        evidence = {"first_loss": self._losses[0], "loss": self._losses[-1], "num_steps": len(self._losses)}
        if self._growth is not None:
            evidence["weight_growth"] = self._growth
            if self._config.weight_growth <= self._growth < STEADY:
                move = _find_move(self._growth)
                usual = self._config.adam_move if self._is_normalised(move) else self._config.usual_move
                evidence["lr_factor"] = min(1.0, usual / move)
        return Finding(
            kind=self.name,
            severity=Severity.ERROR,
            step=self._find_beginning(),
            message=f"the learning rate is too high: {harm}",
            advice=ADVICE,
            evidence=evidence,
        )


def _find_move(growth: float) -> float:
    """Return how far weights went, as a share of their norm: steps are at right angles to them, near enough."""
    return math.sqrt(growth**2 - 1.0)


def _find_given_back(losses: Sequence[float], least: float) -> float:
    """Return the largest share of what was learnt that a later loss gave back; progress counts as `least` or more."""
    lowest, share = losses[0], 0.0
    for loss in losses[1:]:
        share = max(share, (loss - lowest) / max(losses[0] - lowest, least, 1e-38))
        lowest = min(lowest, loss)
    return share


def _score(values: Sequence[float], first: float) -> float:
    """Return how far values lie above `first`, in standard deviations of their logarithms."""
    logs = [math.log(max(value, 1e-38)) for value in values]
    return (sum(logs) / len(logs) - math.log(max(first, 1e-38))) / max(_noise(logs), 1e-9)


def _noise(values: Sequence[float]) -> float:
    """Return the standard deviation of values about their trend, from the distances between neighbours."""
    steps = [abs(b - a) for a, b in itertools.pairwise(values)]
    return sum(steps) / len(steps) / 1.1284  # mean distance of two Gaussian values, in standard deviations
