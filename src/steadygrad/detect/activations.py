"""Rules about the outputs of modules: dead units, saturation, an output that does not depend on the input.

Absolute shares are `info` (AUTOTRAINER: 70 % dead). A warning compares a module with what was usual for it, and needs
several scans in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from steadygrad.config import DetectConfig
from steadygrad.detect.memory import Episode, Remembering, Streak
from steadygrad.detect.nonfinite import SHOWN, show
from steadygrad.facts import ActivationScan, Fact, Finding, Severity
from steadygrad.stats import Baseline

LOOKS = 3
"""Scans in a row that a warning needs."""
FIRST_LOOKS = 8
"""Scans in which a module's usual share is learnt."""


class Shares(Remembering):
    """Which modules' share of bad units is above a limit, and which have risen there above all that was usual.

    Usual is the largest share of the first scans, and of every excursion that ended by itself: small batches vary.
    """

    memory = ("_usual", "_num_looks", "_doubts")

    def __init__(self, limit: float, rise: float) -> None:
        self._limit, self._rise = limit, rise
        self._usual: dict[str, float] = {}
        self._num_looks: dict[str, int] = {}
        self._doubts: dict[str, list[float]] = {}  # name -> step where it began, scans since, largest share

    def feed(self, step: int, shares: Mapping[str, float]) -> tuple[list[str], list[str], int]:
        """Return modules above the limit, those newly risen there, and the step where the first of these began."""
        risen = [name for name, share in shares.items() if self._feed_one(step, name, share)]
        start = min((int(self._doubts[name][0]) for name in risen), default=step)
        return [name for name, share in shares.items() if share >= self._limit], risen, start

    def _feed_one(self, step: int, name: str, share: float) -> bool:
        usual = self._usual.get(name)
        looks = self._num_looks[name] = self._num_looks.get(name, 0) + 1
        if usual is not None and share >= self._limit and share >= usual + self._rise:
            doubt = self._doubts.setdefault(name, [step, 0, share])
            doubt[1], doubt[2] = doubt[1] + 1, max(doubt[2], share)
            return doubt[1] == LOOKS  # equal, not above: reported once for each excursion
        passed = self._doubts.pop(name, None)
        if looks <= FIRST_LOOKS or passed:
            self._usual[name] = max(usual or 0.0, share, passed[2] if passed else 0.0)
        return False


class DeadActivation(Remembering):
    """Units of a module are zero for the whole batch. The finding's kind is `dead_units`, as from the gradients."""

    name = "dead_activation"
    hears = (ActivationScan,)
    memory = ("_shares", "_info")

    def __init__(self, config: DetectConfig) -> None:
        self._shares = Shares(config.flow.dead_share, config.flow.dead_rise)
        self._info = Episode(config.repeat_after, quiet=config.repeat_after)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a warning when units have died since the first scan, an info when most are dead."""
        if not isinstance(fact, ActivationScan):
            return
        shares = {name: m.dead_share for name, m in fact.modules.items() if m.dead_share is not None}
        high, risen, start = self._shares.feed(fact.step, shares)
        if risen or self._info.is_due(fact.step, bool(high)):
            names = risen or high
            yield Finding(
                kind="dead_units",
                severity=Severity.WARNING if risen else Severity.INFO,
                step=start,
                message=f"{max(shares[n] for n in names):.0%} of the units of {show(names)} do not fire for any sample",
                advice="Lower the learning rate, use LeakyReLU or GELU, and check the biases.",
                evidence={"modules": names[:SHOWN], "dead_share": [shares[n] for n in names[:SHOWN]]},
            )


class SaturatedActivation(Remembering):
    """A bounded activation sits at its bound, where its derivative is zero.

    No warning if its result is the model's output: a classifier that has become certain is there, and so are codes that
    are to become binary.
    """

    name = "saturated_activation"
    hears = (ActivationScan,)
    memory = ("_shares", "_info")

    def __init__(self, config: DetectConfig) -> None:
        self._shares = Shares(config.layers.saturated_share, config.flow.dead_rise)
        self._info = Episode(config.repeat_after, quiet=config.repeat_after)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a warning when it has got there since the first scan, an info when most elements are there."""
        if not isinstance(fact, ActivationScan):
            return
        shares = {name: m.saturated_share for name, m in fact.modules.items() if m.saturated_share is not None}
        high, risen, start = self._shares.feed(fact.step, shares)
        risen = [name for name in risen if name != fact.output]
        if risen or self._info.is_due(fact.step, bool(high)):
            names = risen or high
            yield Finding(
                kind=self.name,
                severity=Severity.WARNING if risen else Severity.INFO,
                step=start,
                message=f"{max(shares[n] for n in names):.0%} of the outputs of {show(names)} are at their bound",
                advice="Normalise the input, lower the learning rate, or scale the initialisation down.",
                evidence={"modules": names[:SHOWN], "saturated_share": [shares[n] for n in names[:SHOWN]]},
            )


class ConstantOutput(Remembering):
    """The model's output is the same for every sample: collapsed, or an input that does not reach the output."""

    name = "constant_output"
    hears = (ActivationScan,)
    memory = ("_baseline", "_streak", "_info", "_warning")

    def __init__(self, config: DetectConfig) -> None:
        self._limit = config.layers.constant_output
        # Only `is_warm` is asked of it: whether outputs have ever differed
        self._baseline = Baseline(window=32, min_values=2, patience=1000)
        self._streak = Streak()
        self._info = Episode(config.repeat_after, quiet=config.repeat_after)
        self._warning = Episode(config.repeat_after, quiet=config.repeat_after)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a warning when the output used to differ between samples, an info when it never did."""
        if not isinstance(fact, ActivationScan) or fact.output_std is None or fact.output_scale is None:
            return
        constant = fact.output_std <= self._limit * fact.output_scale
        length = self._streak.feed(fact.step, constant)
        if not constant:
            self._baseline.admit(fact.output_std)
        # Inputs that are all the same, as those of a single user, have the same output in a healthy model
        fell = self._baseline.is_warm and length >= LOOKS and fact.inputs_differ
        # Two episodes: an info that was reported before must not hold back the warning
        if (self._warning.is_due(fact.step, True)) if fell else self._info.is_due(fact.step, length >= LOOKS):
            yield Finding(
                kind=self.name,
                severity=Severity.WARNING if fell else Severity.INFO,
                step=self._streak.start,
                message=f"the output is the same for every sample (spread {fact.output_std:.2g}, size "
                f"{fact.output_scale:.2g})",
                advice="Check that the input reaches the output, and look for dead units and collapsed normalisation.",
                evidence={"output_std": fact.output_std, "output_scale": fact.output_scale},
            )
