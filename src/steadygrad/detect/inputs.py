"""Rules about the batch: values that are not finite, far larger than usual, or labels that are all masked.

-inf in an additive mask and NaN in targets that are masked before use are legal, so a non-finite input alone is an
`info`; together with a non-finite step it is the suspect. The scan of a step may come before or after its Reading.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from steadygrad.config import DetectConfig
from steadygrad.detect.memory import Episode, Keyed, Remembering
from steadygrad.detect.nonfinite import SHOWN, show
from steadygrad.facts import Fact, Finding, InputScan, Reading, Severity
from steadygrad.stats import Baseline
from steadygrad.words import spell_count


class Pairs(Remembering):
    """Brings the scan of a batch and the Reading of its step together, whichever comes first."""

    memory = ("_step", "_bad", "_waiting", "_waiting_step")

    def __init__(self, *, zero_is_bad: bool = False) -> None:
        self._zero_is_bad = zero_is_bad
        self._step = -1
        self._bad = False
        self._waiting: dict[str, Any] | None = None
        self._waiting_step = -1

    @property
    def is_waiting(self) -> bool:
        """Whether a scan waits for the Reading of its step."""
        return self._waiting is not None

    def passes(self, reading: Reading) -> bool:
        """Take in a finite Reading if no scan waits for one; return whether it did."""
        if self._waiting is not None:
            return False
        self._step, self._bad = reading.step, self._zero_is_bad and reading.loss == 0.0
        return True

    def feed(self, fact: Reading | InputScan, found: Mapping[str, Any] | None) -> tuple[bool, Mapping[str, Any]] | None:
        """Return (was the step bad, what the scan found) once both are known; `found` is what the rule saw."""
        if isinstance(fact, Reading):
            self._step, self._bad = fact.step, fact.is_nonfinite or (self._zero_is_bad and fact.loss == 0.0)
            # Dropped also when it is of another step: a scan comes right before or after its own Reading, or not at all
            waiting, self._waiting = self._waiting, None
            return (self._bad, waiting) if waiting and self._waiting_step == fact.step else None
        if not found:
            return None
        if fact.step == self._step:
            return self._bad, found
        self._waiting, self._waiting_step = dict(found), fact.step
        return None


class NonfiniteInput(Remembering):
    """A tensor of the batch holds NaN or Inf. If it does so in healthy steps too, it is not blamed for a bad one."""

    name = "nonfinite_input"
    memory = ("_pairs", "_legal", "_info")

    def __init__(self, config: DetectConfig) -> None:
        self._pairs = Pairs()
        self._legal: set[str] = set()
        self._info = Episode(config.repeat_after, quiet=config.repeat_after)

    def passes(self, reading: Reading) -> bool:
        """Take in a plain Reading without a scan."""
        return self._pairs.passes(reading)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return an error when the step of this batch was not finite, else an info."""
        if not isinstance(fact, Reading | InputScan):
            return
        scan = fact.tensors.items() if isinstance(fact, InputScan) else ()
        pair = self._pairs.feed(fact, {name: t.num_nonfinite for name, t in scan if t.num_nonfinite} if scan else None)
        if pair is None:
            return
        bad, counts = pair
        names = [name for name in counts if not bad or name not in self._legal]
        # What was harmless at a healthy step, like -inf in a mask, is never blamed later
        if not bad:
            self._legal.update(names)
        if names and (bad or self._info.is_due(fact.step, True)):
            num_nonfinite = sum(counts[name] for name in names)
            yield Finding(
                kind=self.name,
                severity=Severity.ERROR if bad else Severity.INFO,
                step=fact.step,
                message=f"the batch holds NaN or Inf in {_show(names)} ({spell_count(num_nonfinite, 'element')})",
                advice="Clean the data set, or replace missing values before the model sees them."
                if bad
                else "Loss and gradients are finite, so it is probably masked. Mask before the arithmetic, not after.",
                evidence={"tensors": names[:SHOWN], "num_nonfinite": num_nonfinite},
            )


class OutlierInput(Remembering):
    """The largest value of an input is far above its usual level, compared on a log scale."""

    name = "outlier_input"
    hears = (InputScan,)
    memory = ("_baselines", "_episode")

    def __init__(self, config: DetectConfig) -> None:
        layers = self._config = config.layers
        self._baselines = Keyed(lambda: Baseline(window=64, min_values=layers.min_values, relative_floor=0.0))
        self._episode = Episode(config.repeat_after)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a warning that names the tensor."""
        if not isinstance(fact, InputScan):
            return
        worst: tuple[float, str, float, float] | None = None
        for name, tensor in fact.tensors.items():
            # Token ids have no usual size; NaN fails the comparison
            if not tensor.is_floating or not 0 < tensor.max_abs < math.inf:
                continue
            baseline, value = self._baselines[name], math.log(tensor.max_abs)
            usual = math.exp(baseline.median) if len(baseline) else math.inf
            # Scored before it is admitted: a value must not be part of what it is compared with
            score, ratio = baseline.score(value), tensor.max_abs / usual
            baseline.admit(value)
            if score > self._config.outlier_score and ratio > self._config.outlier_ratio:
                worst = max(worst or (0.0, "", 0.0, 0.0), (ratio, name, tensor.max_abs, usual))
        if worst is not None and self._episode.is_due(fact.step, True):
            ratio, name, largest, usual = worst
            yield Finding(
                kind=self.name,
                severity=Severity.WARNING,
                step=fact.step,
                message=f"the largest value of {_spell(name)} in the batch is {largest:.4g}, usually {usual:.3g}",
                advice="Look at this batch: a unit, a missing-value code, or a sample that was not normalised.",
                evidence={"tensor": name, "max_abs": largest, "median": usual, "ratio": ratio},
            )


class AllLabelsMasked(Remembering):
    """Every label of the batch is ignored: the mean loss is 0/0, or 0.

    Seen as integer labels that are all -100, or as a mask of zeros and ones that is all zero although it never was
    before, and only when the step went wrong: a batch without labels may have another loss to learn from. An empty mask
    of which the program made a 0, as it should, is an info.
    """

    name = "all_labels_masked"
    memory = ("_pairs", "_masks", "_episode", "_is_finite")

    def __init__(self, config: DetectConfig) -> None:
        self._pairs = Pairs(zero_is_bad=True)
        self._masks: set[str] = set()  # binary tensors that had a one in them before
        self._is_finite = True  # the last step
        self._episode = Episode(config.repeat_after)

    def passes(self, reading: Reading) -> bool:
        """Take in a plain Reading without a scan."""
        if not self._pairs.passes(reading):
            return False
        self._is_finite = True
        return True

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a finding that names the tensor."""
        if not isinstance(fact, Reading | InputScan):
            return
        if isinstance(fact, Reading):
            self._is_finite = not fact.is_nonfinite
            if not self._pairs.is_waiting:
                self._pairs.feed(fact, None)
                return
        tensors = fact.tensors if isinstance(fact, InputScan) else {}
        labels = [name for name, t in tensors.items() if t.numel and t.num_ignored == t.numel]
        empty = [name for name, t in tensors.items() if t.numel == t.num_zeros and name in self._masks]
        # After `empty` was taken: a mask must have had a one in it at an earlier step
        self._masks.update(name for name, t in tensors.items() if t.is_binary and t.num_zeros < t.numel)
        pair = self._pairs.feed(fact, dict.fromkeys(labels, True) | dict.fromkeys(empty, False))
        if pair is None or not pair[0] or not self._episode.is_due(fact.step, True):
            return
        labels = [name for name, is_label in pair[1].items() if is_label]
        names = labels or list(pair[1])
        yield Finding(
            kind=self.name,
            severity=Severity.WARNING if labels or not self._is_finite else Severity.INFO,
            step=fact.step,
            message=f"every element of {_show(names)} is masked, so this batch has nothing to learn from",
            advice="Drop samples without labels (a prompt beyond the maximal length), or divide by max(1, count).",
            evidence={"tensors": names[:SHOWN]},
        )


def _spell(name: str) -> str:
    """Return the name of a tensor of the batch; 'item 0' for one that is known by its place."""
    return f"item {name}" if name[:1].isdigit() else name


def _show(names: list[str]) -> str:
    return show([_spell(name) for name in names])
