"""A rule about targets that no output can equal: seen in the targets themselves, without waiting for the loss."""

from __future__ import annotations

from steadygrad.detect.once import OnceRule, at
from steadygrad.facts import Finding
from steadygrad.facts.program import TargetScan

MOST_LOST = 0.1
"""Share of the targets' variation that an output may miss: noise around 0 behind a ReLU stays below it."""
MOST_LOST_LABELS = 0.01
"""The same for labels of a binary cross entropy, which have a tolerance already."""
LATER = 32
"""Steps after which targets of a regression must still be out of range. A network that makes its own targets, such as
the codes of a VQ-VAE, starts with arbitrary ones."""


class UnreachableTargets(OnceRule[TargetScan]):
    """Targets lie outside what the output or the loss can express: negative ones behind a ReLU, labels 0/1 for -1/1."""

    name = "unreachable_targets"
    hears = (TargetScan,)
    memory = ("_told", "_since")

    def __init__(self) -> None:
        self._since: dict[str, int] = {}

    def judge(self, fact: TargetScan) -> Finding | None:
        """Return the finding; about an activation only when a later scan agrees."""
        if fact.fed_by and fact.op != "kl_div":
            loss = f"{fact.op} {fact.fed_by}"
            if not fact.lost > MOST_LOST:
                self._since.pop(loss, None)
                return None
            if fact.step - self._since.setdefault(loss, fact.step) < LATER:
                return None
        found = _judge_targets(fact)
        if found is None:
            return None
        what, fix = found
        return self.report(
            step=self._since.get(f"{fact.op} {fact.fed_by}", fact.step),
            message=f"{fact.op}{at(fact.where)} has targets from {fact.lowest:.4g} to {fact.highest:.4g}, {what}",
            advice=fix,
            evidence={
                "op": fact.op,
                "fed_by": fact.fed_by,
                "lowest": fact.lowest,
                "highest": fact.highest,
                "share": fact.lost,
                "where": fact.where,
            },
        )


def _judge_targets(fact: TargetScan) -> tuple[str, str] | None:
    """Return what is wrong with these targets, and the fix."""
    if fact.op == "kl_div":
        if fact.lowest >= -MOST_LOST_LABELS:
            return None
        return (
            "and a probability is never negative: they are log-probabilities",
            "Pass log_target=True, or probabilities.",
        )
    if fact.low == -1 and not fact.fed_by:
        # A 0 beside -1 and 1 may stand for a pair that does not count.
        if (fact.lowest, fact.highest) != (0.0, 1.0):
            return None
        return (
            "where each must be -1 or 1: samples labelled 0 have a constant loss, and teach nothing",
            "Use 2 * labels - 1.",
        )
    if fact.fed_by:
        return (
            f"and its input comes from a {fact.fed_by}, which cannot return such values: {fact.lost:.0%} of their "
            "variation is out of reach",
            f"Remove the {fact.fed_by} from the output layer, or scale the targets into its range.",
        )
    if not fact.lost > MOST_LOST_LABELS:
        return None
    return (
        "and its labels are probabilities, from 0 to 1: beyond, the loss has no minimum and grows negative",
        "Scale the labels to 0 and 1 (-1 and 1: (labels + 1) / 2; a mask of 0 and 255: labels / 255).",
    )
