"""A rule -> the same rule for a script, in which harm on finite numbers cannot be proven.

A loss that rises or jumps may have been harmed or may be meant to (a curriculum, targets that grow, an adversary that
catches up). A Guard tells them apart by the paired test. A script's steps are never tested, so here every such finding
is an info: an alarm about a healthy training would be harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from steadygrad.detect.base import Rule
from steadygrad.facts import Answer, Fact, Finding, Proof, Severity
from steadygrad.facts.kinds import find_kind
from steadygrad.prove.words import report_answer

NOT_TESTED = "the steps of a script are not tested, a Guard's are"


class Unproven:
    """Runs a rule, and lowers to an info what would need a proof."""

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
    # "proof" is there already where the numbers have become non-finite, which needs no test.
    if finding.severity is Severity.INFO or not find_kind(finding.kind).needs_proof or "proof" in finding.evidence:
        return finding
    return report_answer(finding, Proof(answer=Answer.UNKNOWN, step=finding.step, reason=NOT_TESTED))
