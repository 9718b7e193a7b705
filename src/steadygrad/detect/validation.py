"""Rules about validation and epochs: a loss that is not finite, and overfitting."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from steadygrad.config import DetectConfig
from steadygrad.detect.memory import Remembering
from steadygrad.detect.nonfinite import spell
from steadygrad.facts import EpochEnd, Fact, Finding, Reading, Severity, Validation
from steadygrad.stats import MAD_TO_SIGMA, median

NOISE_POINTS = 12
"""Validations from which the noise is taken: the first ones fall steeply."""


class NonfiniteValidation(Remembering):
    """The validation loss is NaN or Inf."""

    name = "nonfinite_validation"
    hears = (Validation,)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return an error at the last step before the validation."""
        if not isinstance(fact, Validation) or math.isfinite(fact.loss):
            return
        yield Finding(
            kind=self.name,
            severity=Severity.ERROR,
            step=max(0, fact.step),
            message=f"the validation loss is {spell(fact.loss)}",
            advice="Look at the validation data, for divisions by an empty batch, and at BatchNorm's statistics.",
            evidence={"loss": str(fact.loss), "epoch": fact.epoch},
        )


class NonfiniteEpoch(Remembering):
    """The mean training loss of an epoch is NaN or Inf: none of its steps could be used."""

    name = "nonfinite_epoch"
    hears = (EpochEnd,)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return an error at the last step of the epoch."""
        if not isinstance(fact, EpochEnd) or fact.train_loss is None or math.isfinite(fact.train_loss):
            return
        yield Finding(
            kind=self.name,
            severity=Severity.ERROR,
            step=max(0, fact.step),
            message=f"the training loss of epoch {fact.epoch} is {spell(fact.train_loss)}",
            advice="Lower the learning rate, and look at the first bad step of this epoch.",
            evidence={"loss": str(fact.train_loss), "epoch": fact.epoch},
        )


class Overfitting(Remembering):
    """The validation loss rises while the training loss falls.

    The seed's rule compares two epochs, so a single noisy one is a finding. Here the best must be
    `overfitting_patience` validations ago, and the median of the last three `overfitting_score` standard deviations
    above the lowest such median. The noise is taken from the second differences: a smooth fall and rise has small ones.
    """

    name = "overfitting"
    memory = ("_validations", "_steps", "_best", "_sum", "_count", "_told")

    def __init__(self, config: DetectConfig) -> None:
        self._config = config.validation
        self._validations: deque[float] = deque(maxlen=64)
        self._best: list[float | None] = [math.inf, None]  # validation and training loss
        self._steps: list[int] = []  # of the validations since the best
        self._sum, self._count = 0.0, 0
        self._told = False

    def passes(self, reading: Reading) -> bool:
        """Take in any plain Reading: findings come with validations."""
        if reading.loss is not None:
            self._sum, self._count = self._sum + reading.loss, self._count + 1
        return True

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a warning at the first validation that was above the best."""
        if isinstance(fact, Reading):
            if fact.loss is not None and math.isfinite(fact.loss) and not fact.skipped:
                self._sum, self._count = self._sum + fact.loss, self._count + 1
        elif isinstance(fact, Validation) and math.isfinite(fact.loss):
            yield from self._observe_validation(fact, self._take_train_loss(fact))

    def _take_train_loss(self, fact: Validation) -> float | None:
        own = self._sum / self._count if self._count else None
        # Also when the caller passes a training loss: the sum is of the steps since the last validation
        self._sum, self._count = 0.0, 0
        given = fact.train_loss
        return own if given is None or not math.isfinite(given) else given

    def _observe_validation(self, fact: Validation, train: float | None) -> Iterable[Finding]:
        self._validations.append(fact.loss)
        best, best_train = self._best
        assert best is not None
        if fact.loss <= best:
            self._best, self._steps, self._told = [fact.loss, train], [], False
            return
        self._steps.append(max(0, fact.step))
        learns = train is not None and best_train is not None and train < best_train
        far = _rise(self._validations) > self._config.overfitting_score * _noise(self._validations)
        if learns and far and len(self._steps) >= self._config.overfitting_patience and not self._told:
            self._told = True
            assert train is not None
            assert best_train is not None
            yield Finding(
                kind=self.name,
                severity=Severity.WARNING,
                step=self._steps[0],
                message=f"the validation loss rose from {best:.4g} to {fact.loss:.4g} while the training loss fell "
                f"from {best_train:.4g} to {train:.4g}",
                advice="Stop at the best validation, or add data, augmentation, dropout or weight decay.",
                evidence={
                    "best": best,
                    "loss": fact.loss,
                    "train_loss": train,
                    "num_validations": len(self._steps),
                },
            )


def _rise(values: Sequence[float]) -> float:
    """Return how far the last median of three lies above the lowest one."""
    points = list(values)
    smooth = [median(sorted(points[i : i + 3])) for i in range(len(points) - 2)]
    return smooth[-1] - min(smooth) if smooth else 0.0


def _noise(values: Sequence[float]) -> float:
    """Return the standard deviation of the noise in a smooth curve; inf when there are too few points to say."""
    points = list(values)[-NOISE_POINTS:]
    if len(points) < 5:
        return math.inf
    # The variance of a second difference is 1 + 4 + 1 = 6 times that of the noise; 1.2533 is sqrt(pi / 2), from mean
    # distance to standard deviation
    second = sorted(abs(a - 2.0 * b + c) for a, b, c in zip(points, points[1:], points[2:]))
    mean = sum(second) / len(second)  # of few points, the median alone is too often small by chance
    return max(MAD_TO_SIGMA * median(second), 1.2533 * mean) / math.sqrt(6.0)
