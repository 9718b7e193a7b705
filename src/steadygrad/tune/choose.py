"""Trials -> the settings to train with, and the evidence for each of them. Pure.

Other settings than the given ones are chosen only if they did better in both orders of the data, or if the given ones
broke down. A range test alone does not replace a rate that works and is near the suggested one: short trials favour
higher rates than whole trainings do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steadygrad.tune.settings import Settings, find_changed
from steadygrad.tune.target import Target
from steadygrad.tune.trial import TrialResult, describe_trial

NUM_TOP = 3
NEAR = 3.0
"""Rates within this factor cannot be told apart by a test of a few dozen steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen, and why."""

    settings: Settings
    reason: str
    changed: tuple[str, ...]
    works: bool
    """Whether a trial with these settings ran to its end."""


def choose(given: Sequence[TrialResult], other: Sequence[TrialResult]) -> Choice:
    """Choose between the given settings and the best others, each tried in the same orders."""
    first, rival = given[0].settings, other[0].settings if other else given[0].settings
    given_works, other_works = all(one.is_good for one in given), bool(other) and all(one.is_good for one in other)
    if not given_works:
        broken = next(one for one in given if not one.is_good)
        if not other_works:
            return _keep(
                first, f"nothing that was tried works: with the given settings it {describe_trial(broken)}", False
            )
        scores = _spell(other)
        return _take(first, rival, f"the given settings {describe_trial(broken)}; with these {scores}")
    if not find_changed(first, rival):
        return _keep(first, f"the given settings are those that the tests suggest: {_spell(given)}", True)
    if not other_works:
        broken = next(one for one in other if not one.is_good) if other else given[0]
        return _keep(first, f"the given settings work, {_spell(given)}; the others: {describe_trial(broken)}", True)
    better = all(b.score < a.score for a, b in zip(given, other) if a.score is not None and b.score is not None)
    if better:
        return _take(first, rival, f"better in both orders of the data: {_spell(other)}, before {_spell(given)}")
    text = f"not better in both orders of the data: {_spell(other)}, with the given ones {_spell(given)}"
    return _keep(first, text, True)


def is_near(rate: float, other: float) -> bool:
    """Return whether a range test cannot tell two rates apart."""
    return 1 / NEAR <= rate / other <= NEAR


def keep_near(given: Sequence[TrialResult], suggested: float) -> Choice:
    """Choose the given settings, which work and whose rate is near the suggested one."""
    reason = f"the given rate works, {_spell(given)}, and the suggested {suggested:.3g} is within {NEAR:g} times of it"
    return _keep(given[0].settings, reason, True)


def _keep(settings: Settings, reason: str, works: bool) -> Choice:
    return Choice(settings=settings, reason=reason, changed=(), works=works)


def _take(before: Settings, after: Settings, reason: str) -> Choice:
    return Choice(settings=after, reason=reason, changed=tuple(find_changed(before, after)), works=True)


def _spell(results: Sequence[TrialResult]) -> str:
    return "loss " + " and ".join("-" if one.score is None else f"{one.score:.4g}" for one in results)


def gather_evidence(
    target: Target, choice: Choice, trials: Sequence[TrialResult], reasons: Mapping[str, str]
) -> list[tuple[str, str, str, str]]:
    """Return, for each setting examined, its name, its old and new value, and the reason."""
    rows = []
    for name in dict.fromkeys([*reasons, *choice.changed]):
        before, after = target.read_field(name, target.given), target.read_field(name, choice.settings)
        said = [reasons.get(name, ""), compare_trials(name, trials)]
        if name not in choice.changed:
            said.insert(0, "kept")
        rows.append((target.name_field(name), before, after, "; ".join(one for one in said if one)))
    return rows


def compare_trials(name: str, trials: Sequence[TrialResult]) -> str:
    """Describe what the best trials of a search used, compared with the others."""
    good = sorted((one for one in trials if one.is_good), key=lambda one: one.score or 0.0)
    if len(good) < 2 * NUM_TOP:
        return ""
    top, rest = good[:NUM_TOP], good[-NUM_TOP:]
    best = ", ".join(one.settings.describe().get(name, "-") for one in top)
    worst = ", ".join(one.settings.describe().get(name, "-") for one in rest)
    broken = [one.settings.describe().get(name, "-") for one in trials if one.why_ended]
    tail = f"; {len(broken)} broke, with {', '.join(broken[:NUM_TOP])}" if broken else ""
    return f"the best {NUM_TOP} of {len(good)} trials had {best}, the worst {worst}{tail}"
