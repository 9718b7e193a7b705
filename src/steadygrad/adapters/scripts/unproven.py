"""A rule -> the same rule for a script, in which harm on finite numbers cannot be proven.

A loss that rises for a while may have been harmed or may be meant to rise (a curriculum, a reward that grows, an
adversary that catches up). A Guard tells them apart by the paired test, and where that has no answer it reports a mere
warning as an info. A script's step is never tested, so here it always is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from steadygrad.detect.base import Rule
from steadygrad.facts import Fact, Finding, Severity
from steadygrad.facts.kinds import find_kind


class Unproven:
    """Runs a rule, and lowers its warnings that would need a proof."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.name = rule.name
        self.hears: tuple[type[Fact], ...] = getattr(rule, "hears", ())
        self.hears_plain: bool = getattr(rule, "hears_plain", True)
        self.passes: Callable[[Any], bool] | None = getattr(rule, "passes", None)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return what the rule says about this Fact."""
        return [_weigh(finding) for finding in self._rule.observe(fact)]

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's history."""
        return self._rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the rule's history."""
        self._rule.load_state_dict(state)


def _weigh(finding: Finding) -> Finding:
    kind = find_kind(finding.kind)
    if finding.severity is Severity.WARNING and kind.needs_proof and not kind.is_spike:
        return dataclasses.replace(finding, severity=Severity.INFO)
    return finding
