"""Instability forecast: indicators -> the probability that the run becomes unstable within the next steps -> a Finding.

The model is a few boosted trees in `forecast_model.json`, with the calibration that turns their sum into a probability;
benchmarks/forecast/ makes it from thousands of short trainings. Reading it takes no learning library. It only looks: a
policy may act on the Finding, and its verdict then names it. Probabilities hold for runs like those it was made from,
half of which became unstable; in a run that is set up well they are probably too high.
"""

from __future__ import annotations

import bisect
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from steadygrad.config import DetectConfig
from steadygrad.detect.indicators import NAMES, WORDS, Indicators
from steadygrad.detect.memory import Episode, Remembering, Streak
from steadygrad.errors import ConfigError
from steadygrad.facts import Fact, Finding, Reading, Severity

FORMAT = 1
NUM_SHOWN = 3
"""How many indicators a Finding names."""
ADVICE = (
    "Lower the learning rate or lengthen its warm-up, or clip tighter. "
    'Policy(actions={"instability_forecast": Action.SCALE_LR}) does the first automatically.'
)

Node = tuple[int, float, int, int, float]
"""Indicator (-1 for a leaf), threshold (not above it: left), left, right, mean value below."""


@dataclass(frozen=True)
class Model:
    """Boosted trees over the indicators: `score` is their sum, and `calibrate` makes it a probability."""

    horizon: int
    threshold: float
    """Probability at which it is reported, chosen on different programs from those it was measured on."""
    patience: int
    """Steps in a row that it must be that high."""
    base: float
    trees: tuple[tuple[Node, ...], ...]
    scores: tuple[float, ...]
    probabilities: tuple[float, ...]

    def score(self, values: Sequence[float]) -> float:
        """Sum of the trees' answers."""
        total = self.base
        for tree in self.trees:
            node = tree[0]
            while node[0] >= 0:
                # Values are finite (`Indicators.values` bounds them); a NaN would silently go right everywhere
                node = tree[node[2] if values[node[0]] <= node[1] else node[3]]
            total += node[4]
        return total

    def calibrate(self, score: float) -> float:
        """Return the probability that belongs to a score: straight lines between the points that were measured."""
        i = bisect.bisect_right(self.scores, score)
        if i == 0 or i == len(self.scores):
            return self.probabilities[max(0, i - 1)]
        left, right = self.scores[i - 1], self.scores[i]
        share = (score - left) / (right - left)
        return self.probabilities[i - 1] + share * (self.probabilities[i] - self.probabilities[i - 1])

    def explain(self, values: Sequence[float]) -> dict[str, float]:
        """Return how much each indicator moved the score: the steps between mean values along each tree's path."""
        moved = dict.fromkeys(NAMES, 0.0)
        for tree in self.trees:
            node = tree[0]
            while node[0] >= 0:
                after = tree[node[2] if values[node[0]] <= node[1] else node[3]]
                moved[NAMES[node[0]]] += after[4] - node[4]
                node = after
        return moved


def read_model(horizon: int) -> Model:
    """Return the shipped model for this horizon."""
    models = _read_file()
    if str(horizon) not in models:
        known = ", ".join(sorted(models, key=int))
        raise ConfigError(f"ForecastConfig.horizon is {horizon}, and there is no model for it. There are {known}.")
    return parse_model(models[str(horizon)], horizon)


@functools.cache
def _read_file() -> dict[str, Any]:
    text = resources.files("steadygrad.detect").joinpath("forecast_model.json").read_text(encoding="utf-8")
    content = json.loads(text)
    assert content["format"] == FORMAT
    # Trees address indicators by position: another order would still run, with wrong answers
    assert tuple(content["indicators"]) == NAMES, "the model was fitted to different indicators: run fit.py again"
    models: dict[str, Any] = content["models"]
    return models


def parse_model(plain: Mapping[str, Any], horizon: int) -> Model:
    """Return a model from its plain form."""
    return Model(
        horizon=horizon,
        threshold=float(plain["threshold"]),
        patience=int(plain["patience"]),
        base=float(plain["base"]),
        trees=tuple(tuple(_parse_node(node) for node in tree) for tree in plain["trees"]),
        scores=tuple(plain["calibration"]["scores"]),
        probabilities=tuple(plain["calibration"]["probabilities"]),
    )


def _parse_node(plain: Sequence[float]) -> Node:
    indicator, threshold, left, right, value = plain
    return int(indicator), float(threshold), int(left), int(right), float(value)


class InstabilityForecast(Remembering):
    """Warns when the run will probably become unstable soon."""

    name = "instability_forecast"
    hears = (Reading,)
    memory = ("_indicators", "_streak", "_episode")

    def __init__(self, config: DetectConfig, model: Model | None = None) -> None:
        forecast = config.forecast
        self._model = model if model is not None else read_model(forecast.horizon)
        self._threshold = self._model.threshold if forecast.threshold is None else forecast.threshold
        self._indicators = Indicators()
        self._streak = Streak()
        self._episode = Episode(config.repeat_after, quiet=self._model.horizon)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a warning at the step where the probability became high; bad steps are left to other rules."""
        if not isinstance(fact, Reading):
            return
        # Before the return: skipped and bad steps count in the share of skips, although they are not judged
        self._indicators.observe(fact)
        if fact.loss is None or fact.skipped or fact.is_nonfinite or not self._indicators.is_warm:
            return
        values = self._indicators.values()
        probability = self._model.calibrate(self._model.score(values))
        length = self._streak.feed(fact.step, probability >= self._threshold)
        if self._episode.is_due(fact.step, length >= self._model.patience):
            yield self._describe(fact.step, probability, values)

    def _describe(self, step: int, probability: float, values: Sequence[float]) -> Finding:
        moved = self._model.explain(values)
        drivers = sorted((name for name in NAMES if moved[name] > 0.0), key=lambda name: -moved[name])[:NUM_SHOWN]
        numbers = dict(zip(NAMES, values))
        reasons = ", ".join(WORDS[name] for name in drivers)
        return Finding(
            kind=self.name,
            severity=Severity.WARNING,
            step=step,
            message=f"forecast: the run may become unstable within {self._model.horizon} steps "
            f"(probability {probability:.2f}): {reasons}",
            advice=ADVICE,
            evidence={
                "probability": probability,
                "threshold": self._threshold,
                "horizon": self._model.horizon,
                "indicators": drivers,
                "values": [numbers[name] for name in drivers],
                "contributions": [moved[name] for name in drivers],
            },
        )
