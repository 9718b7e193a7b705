"""Readings -> Findings. Pure Python; one file a family of rules; `Detector` asks them all in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steadygrad.config import DetectConfig
from steadygrad.detect.base import Rule
from steadygrad.detect.gradient_norm import ExplodingGradient, HighGradientNorm
from steadygrad.detect.nonfinite import NonfiniteGradient, NonfiniteLoss
from steadygrad.facts import Finding, Reading

__all__ = ["Detector", "Rule", "standard_rules"]


def standard_rules(config: DetectConfig, *, clip_threshold: float | None = None) -> list[Rule]:
    """The rules that every Guard asks, in the order in which their Findings are told."""
    return [
        NonfiniteLoss(),
        NonfiniteGradient(),
        ExplodingGradient(config),
        HighGradientNorm(config, clip_threshold),
    ]


class Detector:
    """Asks every rule about every Reading."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = list(rules)

    def observe(self, reading: Reading) -> list[Finding]:
        """All Findings about this step."""
        return [finding for rule in self._rules for finding in rule.observe(reading)]

    def state_dict(self) -> dict[str, Any]:
        """Each rule's history under its name."""
        return {rule.name: rule.state_dict() for rule in self._rules}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the histories of the rules that are still there; a new rule starts fresh."""
        for rule in self._rules:
            if rule.name in state:
                rule.load_state_dict(state[rule.name])
