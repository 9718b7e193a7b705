"""Facts -> Findings. Pure Python; one file per family of rules; `Detector` runs them all in order."""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from steadygrad.config import DetectConfig
from steadygrad.detect import (
    actions,
    activations,
    call_order,
    graph,
    inputs,
    leading,
    loss,
    loss_trend,
    model_scan,
    modes,
    parameters,
    precision,
    rank_agreement,
    schedule,
    stream,
    validation,
)
from steadygrad.detect import gradient_flow as flow
from steadygrad.detect import gradient_norm as norm
from steadygrad.detect import loss_program as program
from steadygrad.detect.base import FunctionRule, Rule, rule
from steadygrad.detect.eps_gradient import EpsGradient
from steadygrad.detect.instability import InstabilityForecast
from steadygrad.detect.loss_targets import UnreachableTargets
from steadygrad.detect.nonfinite import (
    NonfiniteBuffer,
    NonfiniteGradient,
    NonfiniteLoss,
    NonfiniteParameter,
    NonfiniteRate,
)
from steadygrad.detect.scaler import ScalerCollapse
from steadygrad.detect.start import RateTooHigh
from steadygrad.errors import ConfigError
from steadygrad.facts import Fact, Finding, Reading

logger = logging.getLogger("steadygrad")
Passes = Callable[[Any], bool]

__all__ = ["Detector", "FunctionRule", "Rule", "rule", "standard_rules"]


def standard_rules(config: DetectConfig, *, clip_threshold: float | None = None) -> list[Rule]:
    """Return the rules that every Guard runs, in the order their Findings are reported; then the user's own."""
    rules = _all_rules(config, clip_threshold)
    names = {one.name for one in rules} | {InstabilityForecast.name}
    unknown = [name for name in config.off if name not in names]
    if unknown:
        raise ConfigError(
            f"DetectConfig.off names no rule: {', '.join(unknown)}. There are {', '.join(sorted(names))}."
        )
    rules = [one for one in rules if one.name not in config.off]
    taken = {one.name for one in rules}
    for one in config.rules:
        if one.name in taken:
            raise ConfigError(
                f"DetectConfig.rules has a rule with the name {one.name!r}, which another rule has: both would be "
                "saved under it, and one would lose its history. Give yours another name, or put a standard rule's "
                "name into DetectConfig.off to replace it."
            )
        taken.add(one.name)
    return [*rules, *config.rules]


def _all_rules(config: DetectConfig, clip_threshold: float | None) -> list[Rule]:
    return [
        # not finite
        NonfiniteLoss(),
        NonfiniteGradient(),
        NonfiniteRate(),
        NonfiniteParameter(),
        NonfiniteBuffer(),
        inputs.NonfiniteInput(config),
        validation.NonfiniteValidation(),
        validation.NonfiniteEpoch(),
        # the loss
        RateTooHigh(config),
        loss.LossSpike(config),
        loss_trend.LossExplosion(config),
        loss_trend.Divergence(config),
        loss_trend.LossPlateau(config),
        loss.ZeroLoss(config),
        validation.Overfitting(config),
        # the gradients
        norm.ExplodingGradient(config),
        norm.HighGradientNorm(config, clip_threshold),
        norm.RisingNorm(config),
        flow.VanishingGradient(config),
        flow.DeadGradient(config),
        flow.ZeroGradient(),
        flow.MissingGradient(config),
        flow.StaleGradient(config),
        leading.AdamRms(config),
        leading.UpdateNorm(config),
        # periodic scans
        inputs.OutlierInput(config),
        inputs.AllLabelsMasked(config),
        activations.DeadActivation(config),
        activations.SaturatedActivation(config),
        activations.ConstantOutput(config),
        parameters.UnchangedParameter(config),
        parameters.UpdateRatio(config),
        # the program, once
        graph.UnregisteredLayers(),
        graph.SilentBroadcast(),
        graph.DoubleSoftmax(),
        graph.AnomalyMode(),
        program.WrongLossInput(),
        UnreachableTargets(),
        program.OneElementNorm(),
        program.MixedSamples(),
        program.MixedChannels(),
        program.VisibleLabels(),
        program.LabelsInInputs(),
        program.ShiftedLabels(),
        program.PaddingInLoss(),
        program.LostEnds(),
        program.SwappedMask(),
        # the mode of forwards, and the stream of batches
        modes.EvalWhileTraining(),
        modes.TrainModeValidation(),
        modes.DropoutInEvaluation(),
        modes.NormInEvaluation(),
        stream.RepeatedBatch(),
        stream.RepeatedOrder(),
        stream.FixedSeed(),
        stream.SortedLabels(),
        stream.ConstantLabels(),
        stream.IndependentLabels(),
        stream.ChangedDataset(),
        stream.SingleRow(),
        stream.PixelScale(),
        stream.WrongSplit(),
        EpsGradient(),
        # the program's calls, its model, its ranks and its number formats
        *(rule() for rule in (call_order.DividedTwice, call_order.ScaledGradient, call_order.ClearedGradient)),
        *(rule() for rule in (call_order.UselessClip, schedule.VanishedRate)),
        *(rule() for rule in (model_scan.OutOfReach, model_scan.Untied, model_scan.NotFrozen, model_scan.FrozenHead)),
        *(rule() for rule in (model_scan.LostWeights, model_scan.StaleSave, model_scan.IdleAverage)),
        model_scan.StaleStatistics(),
        model_scan.RestoredWeights(),
        model_scan.PartialSaved(),
        model_scan.SameUnits(),
        model_scan.IdleLoaded(),
        model_scan.WrongGroup(),
        *(rule() for rule in (rank_agreement.RanksDiffer, rank_agreement.SameBatch, rank_agreement.ZeroInput)),
        *(rule() for rule in (precision.LostUpdate, precision.UnheededAutocast, precision.FlushedGradient)),
        precision.Redrawn(),
        # habits
        ScalerCollapse(config),
        actions.FrequentClipping(config),
        actions.ManySkips(config),
        actions.FrequentActions(config),
        # what may come
        *([InstabilityForecast(config)] if config.forecast.enabled else []),
    ]


class Detector:
    """Runs every rule on every Fact."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = list(rules)
        self._listeners: dict[type, list[Rule]] = {}
        self._quick: tuple[list[Rule], list[Passes]] | None = None
        self.gives_copies = all(type(one).__module__.startswith(f"{__name__}.") for one in self._rules)
        """Whether `state_dict` returns plain values that nothing changes afterwards; a user's rule may not."""

    def observe(self, fact: Fact) -> list[Finding]:
        """Return all Findings about this Fact."""
        if isinstance(fact, Reading) and fact.is_plain:
            rules = self._pass_on(fact)
        else:
            rules = self._find_listeners(type(fact))
        findings: list[Finding] = []
        for one in rules:
            try:
                findings.extend(one.observe(fact))
            except Exception as error:  # a broken rule must not silence another one or end the training
                self._switch_off(one, error)
        return findings

    def _pass_on(self, reading: Reading) -> list[Rule]:
        """Let the rules take in a plain Reading the quick way; return those that want to observe it."""
        if self._quick is None:
            heard = [one for one in self._find_listeners(Reading) if getattr(one, "hears_plain", True)]
            self._quick = heard, [getattr(one, "passes", _never_passes) for one in heard]
        rules, quick = self._quick
        passed: list[bool] = []
        while len(passed) < len(rules):
            try:
                # At nearly every step the only pass, without a line of Python between two rules. What was appended
                # before one of them failed stays.
                passed.extend(map(operator.call, quick[len(passed) :], itertools.repeat(reading)))
            except Exception as error:
                self._switch_off(rules[len(passed)], error)
                passed.append(True)
        return [] if all(passed) else [one for one, has_passed in zip(rules, passed) if not has_passed]

    def _switch_off(self, one: Rule, error: Exception) -> None:
        self._rules.remove(one)
        self._listeners, self._quick = {}, None  # both still hold it; new ones, because the old are in use
        logger.error("the rule %s failed and is switched off, training continues: %r", one.name, error)

    def _find_listeners(self, kind: type) -> list[Rule]:
        """Return the rules that take this kind of Fact, in order."""
        listeners = self._listeners.get(kind)
        if listeners is None:
            # A user's rule may be any class with the four members of Rule: those of Remembering are optional
            listeners = [one for one in self._rules if not getattr(one, "hears", ()) or kind in one.hears]  # type: ignore[attr-defined]
            self._listeners[kind] = listeners
        return listeners

    def state_dict(self) -> dict[str, Any]:
        """Return each rule's history under its name."""
        # A rule that failed is gone from the list: its history is not saved, and a resumed run starts it fresh
        return {one.name: one.state_dict() for one in self._rules}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the histories of the rules that still exist; a new rule starts fresh."""
        for one in self._rules:
            if one.name in state:
                one.load_state_dict(state[one.name])


def _never_passes(_reading: Reading) -> bool:
    return False
