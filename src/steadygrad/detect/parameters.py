"""Rules about the weights and how far a step moves them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from steadygrad.config import DetectConfig
from steadygrad.detect.memory import Episode, Keyed, Remembering
from steadygrad.detect.nonfinite import SHOWN, show
from steadygrad.facts import Fact, Finding, ParameterScan, Reading, Severity
from steadygrad.stats import Baseline, median
from steadygrad.words import spell_count

NUM_STILL = 2
"""Scans after which a model that has not moved at all is reported: a warm-up from 0 moves nothing at first."""
FULL_RATE, USUAL_NORM = 0.01, 0.1
"""Shares of the largest rate, and of the gradient norm of steps that moved weights, from which a step must move them:
a decay ends at rates that rounding swallows, and a run that has converged has gradients that it does."""


class UnchangedParameter(Remembering):
    """A parameter has a gradient and a learning rate, but does not move.

    One that has never moved while others do is stuck (a copy is trained instead, or its optimizer never steps): a
    warning, and so is a model of which nothing has moved since the first step, or nothing moves any more although rate
    and gradient are what they were (the optimizer's step was replaced or compiled away). One that moved before has
    updates that rounding swallows (bfloat16, a small learning rate): an info, since decays end like that. An optimizer
    that is not torch's, or that has a hook after its step, decides itself what it moves: blocks in turns, binary
    weights that seldom flip, coefficients that a bound holds. Once it has moved anything, nothing of it is reported.
    """

    name = "unchanged_parameter"
    hears = (ParameterScan, Reading)
    memory = ("_num_scans", "_moved", "_first", "_info", "_told", "_largest", "_rate", "_norm", "_usual_norm")

    def __init__(self, config: DetectConfig) -> None:
        self._patience = config.layers.unchanged_patience
        self._num_scans: dict[str, int] = {}
        self._first: dict[str, int] = {}
        self._moved: set[str] = set()
        self._told: set[str] = set()
        self._info = Episode(config.repeat_after, quiet=config.repeat_after)
        self._rate = self._norm = 0.0  # of the last step that was applied
        self._largest = self._usual_norm = 0.0

    def passes(self, reading: Reading) -> bool:
        """Take in any plain Reading: findings come with scans of the weights."""
        self._rate, self._norm = reading.learning_rate or 0.0, reading.finite_grad_norm * reading.clip_coefficient
        if self._rate > self._largest:
            self._largest = self._rate
        return True

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Report when the same parameters stood still for `unchanged_patience` scans."""
        if isinstance(fact, Reading) and not (fact.skipped or fact.is_nonfinite):
            self._rate, self._norm = fact.learning_rate or 0.0, fact.applied_norm
            self._largest = max(self._largest, self._rate)
        if not isinstance(fact, ParameterScan):
            return
        self._moved.update(fact.changed)
        # The norm of the last applied step: what is known to have been enough to move weights
        if fact.num_changed:
            self._usual_norm = self._norm
        left = {name for names in fact.steered if not self._moved.isdisjoint(names) for name in names}
        unchanged = [name for name in fact.unchanged if name not in left]
        for name in self._num_scans.keys() - set(unchanged):
            del self._num_scans[name], self._first[name]
        for name in unchanged:
            self._num_scans[name] = self._num_scans.get(name, 0) + 1
            self._first.setdefault(name, max(0, fact.step))
        still = [name for name, scans in self._num_scans.items() if scans >= self._patience]
        if not self._moved and not fact.num_changed:  # nothing at all, twice: no end of a decay looks like this
            still = [name for name, scans in self._num_scans.items() if scans >= NUM_STILL]
        is_start = not self._moved
        stuck = [name for name in still if name not in self._moved | self._told and (fact.num_changed or is_start)]
        if self._has_stopped(fact):
            stuck = [name for name, scans in self._num_scans.items() if scans >= NUM_STILL and name not in self._told]
        self._told.update(stuck)
        # Not due for an empty `still`: every set is a superset of nothing
        if stuck or self._info.is_due(fact.step, not self._told.issuperset(still)):
            names = stuck or still
            yield Finding(
                kind=self.name,
                severity=Severity.WARNING if stuck else Severity.INFO,
                step=min(self._first[name] for name in names),
                message=f"a gradient does not move {spell_count(len(names), 'parameter')}: {show(names)}",
                advice="Check that the optimizer holds these tensors, not copies; keep float32 weights."
                if stuck
                else "Their updates are lost to rounding: keep float32 weights, or stop here.",
                evidence={"parameters": names[:SHOWN], "num_parameters": len(names), "num_changed": fact.num_changed},
            )

    def _has_stopped(self, scan: ParameterScan) -> bool:
        """Whether nothing that used to move does, at a rate and with a gradient that used to move it."""
        is_full = 0 < FULL_RATE * self._largest <= self._rate
        is_pushed = is_full and self._norm >= USUAL_NORM * self._usual_norm > 0
        return bool(self._moved) and not scan.num_changed and self._moved <= set(scan.unchanged) and is_pushed


class UpdateRatio(Remembering):
    """How far a step moves the weights, relative to their size: about 1e-3 is usual.

    Absolute bounds are an info on the median parameter. A warning needs a parameter far above its own usual ratio per
    unit of learning rate, so that warm-up and restarts do not count.
    """

    name = "update_ratio"
    hears_plain = False
    memory = ("_baselines", "_large", "_small", "_warning")

    def __init__(self, config: DetectConfig) -> None:
        layers = self._config = config.layers
        self._baselines = Keyed(lambda: Baseline(window=64, min_values=layers.min_values, relative_floor=0.0))
        self._large = Episode(config.repeat_after, quiet=config.repeat_after)
        self._small = Episode(config.repeat_after, quiet=config.repeat_after)
        self._warning = Episode(config.repeat_after)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Look at the steps at which ratios were measured."""
        if not isinstance(fact, Reading) or not fact.update_ratios or fact.skipped or not fact.learning_rate:
            return
        usable = {n: r for n, r in fact.update_ratios.items() if 0 < r < 1e6}  # a weight of size 0 has no ratio
        if not usable:
            return
        middle = median(sorted(usable.values()))
        if self._large.is_due(fact.step, middle > self._config.large_update):
            yield self._make(
                Severity.INFO, fact.step, f"a step moves the median parameter by {middle:.2g} of its size", middle
            )
        if self._small.is_due(fact.step, middle < self._config.small_update):
            yield self._make(
                Severity.INFO, fact.step, f"a step moves the median parameter by only {middle:.2g}", middle
            )
        yield from self._compare(fact, usable, fact.learning_rate)

    def _compare(self, reading: Reading, ratios: Mapping[str, float], rate: float) -> Iterable[Finding]:
        far: dict[str, float] = {}
        for name, ratio in ratios.items():
            baseline, value = self._baselines[name], math.log(ratio / rate)
            # Scored before it is admitted: a value must not be part of what it is compared with
            score, usual = baseline.score(value), baseline.median if len(baseline) else math.inf
            baseline.admit(value)
            if score > self._config.outlier_score and value > usual + math.log(self._config.outlier_ratio):
                far[name] = ratio
        if far and self._warning.is_due(reading.step, True):
            worst = max(far, key=far.__getitem__)
            message = f"a step moved {worst} by {far[worst]:.2g} of its size, far more than its usual share"
            yield self._make(Severity.WARNING, reading.step, message, far[worst])

    def _make(self, severity: Severity, step: int, message: str, ratio: float) -> Finding:
        return Finding(
            kind=self.name,
            severity=severity,
            step=step,
            message=message,
            advice="Lower the learning rate or lengthen the warm-up."
            if ratio > self._config.small_update
            else "Raise the learning rate, or keep float32 weights: such updates are lost to rounding.",
            evidence={"ratio": ratio},
        )
