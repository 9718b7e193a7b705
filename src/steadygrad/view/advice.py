"""The numbers of a run -> settings for the next one, each with a one-sentence reason. Plain numbers, no torch.

The clip threshold comes from the norms seen, the warm-up from when they settled, the learning rate from the size of
the updates and from the guard's actions. A run that is too short or inconclusive gives no advice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from steadygrad.facts import Action, Incident
from steadygrad.record.tally import MAX_NORMS, Tally
from steadygrad.view.read.incident_log import find_acted, find_action, look
from steadygrad.view.read.run import RunReader
from steadygrad.view.read.tail import as_number
from steadygrad.words import spell_share

MIN_STEPS = 50
"""A run with fewer norms than this is too short to give advice."""
OFTEN = 0.5
"""Above this share of clipped steps, the threshold sets the size of nearly every step."""
RARELY = 10.0
"""A threshold this many times the 95th percentile of the norms would let most spikes through."""
SETTLED = 2.0
"""Norms count as settled within this factor of their level."""
USUAL_RATIO = 1e-3
"""Usual ratio of update to weight, for the median parameter."""
FAR_RATIO = 10.0
"""Factor by which the ratio must differ from the usual one to give advice."""
MOST_CHANGE = 10.0
"""Largest factor by which to advise changing a rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One setting for the next run."""

    setting: str
    """'clip threshold', 'warm-up' or 'learning rate'."""
    value: float
    reason: str

    def __str__(self) -> str:
        number = f"{self.value:.0f} steps" if self.setting == "warm-up" else f"{self.value:.2g}"
        return f"{self.setting} {number}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The numbers that advice is based on."""

    norms: Sequence[tuple[int, float]]
    """Step and gradient norm, finite and above 0, in order."""
    rates: Sequence[tuple[int, float]] = ()
    """Step and learning rate, in order."""
    ratios: Sequence[float] = ()
    """Ratio of update to weight for the median parameter, in order."""
    threshold: float | None = None
    """The fixed norm at which gradients were clipped."""
    num_clipped: int = 0
    num_applied: int = 0
    lowered: float | None = field(default=None)
    """The highest rate of the run after the guard lowered it, if it did."""


def advise(seen: Seen) -> list[Advice]:
    """Return what to set next time; empty if the run gives no reason to change anything."""
    if len(seen.norms) < MIN_STEPS:
        return []
    settled = find_settled(seen.norms)
    made = (_advise_clip(seen, settled), _advise_warmup(seen, settled), _advise_rate(seen))
    return [one for one in made if one is not None]


# --- from where -----------------------------------------------------------------------------------------------------


def see_run(run: RunReader) -> Seen:
    """Collect the numbers from a run directory."""
    steps = run.steps
    norms = zip(*steps.curves["grad_norm"].points())
    rates = zip(*steps.curves["learning_rate"].points())
    return Seen(
        norms=[(int(step), norm) for step, norm in norms if norm > 0],
        rates=[(int(step), rate) for step, rate in rates],
        ratios=_median_ratios(run),
        threshold=run.clip_threshold,
        num_clipped=steps.num_clipped,
        num_applied=steps.num_steps - steps.num_skipped,
        lowered=_find_lowered(run, max(steps.curves["learning_rate"].points()[1], default=None)),
    )


def see_tally(
    tally: Tally, incidents: Sequence[Incident], *, max_norm: float | None, rate: float | None = None
) -> Seen:
    """Collect the numbers from a guard's memory, which no longer holds the first steps of a long run."""
    first = max(0, tally.num_measured - MAX_NORMS)
    known = _find_standing(
        [(i.step, i.outcome.before, i.outcome.after) for i in incidents if i.outcome.action is Action.SCALE_LR],
        [(i.outcome.before, i.outcome.after) for i in incidents if i.outcome.action is Action.ROLLBACK],
    )
    given = max((before for before, _ in known), default=None)
    return Seen(
        norms=[(first + i, norm) for i, norm in enumerate(tally.norms) if norm > 0],
        rates=[] if rate is None else [(tally.num_steps, rate)],
        ratios=list(tally.ratios),
        threshold=max_norm,
        num_clipped=tally.num_clipped,
        num_applied=tally.num_steps - tally.num_skipped,
        lowered=_lower(given, known),
    )


def _median_ratios(run: RunReader) -> list[float]:
    """Return the median parameter's ratio for each column of the table."""
    rows = list(run.ratios.rows().values())
    columns = zip(*rows) if rows else ()
    known = ([x for x in column if x is not None and math.isfinite(x)] for column in columns)
    return [10 ** statistics.median(column) for column in known if column]


def _find_lowered(run: RunReader, highest: float | None) -> float | None:
    changes: list[tuple[int, Any, Any]] = []
    returns: list[tuple[Any, Any]] = []
    for row in run.incidents.shown():
        before, after = (look(row, "outcome", key) for key in ("before", "after"))
        if find_action(row) == Action.SCALE_LR.value:
            changes.append((find_acted(row), before, after))
        elif find_action(row) == Action.ROLLBACK.value:
            returns.append((before, after))
    return _lower(highest, _find_standing(changes, returns))


def _find_standing(
    changes: Iterable[tuple[int, Any, Any]], returns: Sequence[tuple[Any, Any]]
) -> list[tuple[float, float]]:
    """Return the rate before and after each change that was not undone: a rollback of the weights undoes rates too.

    `changes`: step, and the outcome's rates before and after; `returns`: the outcome's steps, from where and to where.
    """
    # A rollback goes from the later step (`before`) to the earlier one (`after`)
    spans = [(as_number(look(after, "step")), as_number(look(before, "step"))) for before, after in returns]
    known = [(first, last) for first, last in spans if first is not None and last is not None]
    standing = (
        (_highest(before), _highest(after))
        for step, before, after in changes
        if not any(first <= step < last for first, last in known)
    )
    return [(before, after) for before, after in standing if before is not None and after is not None]


def _highest(rates: Any) -> float | None:
    """Return the highest rate of all groups in an outcome."""
    known = map(as_number, rates.values()) if isinstance(rates, dict) else ()
    return max((rate for rate in known if rate is not None), default=None)


def _lower(rate: float | None, changes: Iterable[tuple[float, float]]) -> float | None:
    """Return the rate after all changes; None if there were none, or they did not lower it."""
    factor = math.prod(after / before for before, after in changes if before > 0)
    return None if rate is None or factor >= 1 else rate * factor


# --- what it says ---------------------------------------------------------------------------------------------------


def find_settled(norms: Sequence[tuple[int, float]]) -> int:
    """Return the first step after which the norm stays within a factor of its level in the second half."""
    values = [norm for _, norm in norms]
    level = statistics.median(values[len(values) // 2 :])
    width = max(5, len(values) // 50)
    blocks = [(norms[i][0], statistics.median(values[i : i + width])) for i in range(0, len(values) - width + 1, width)]
    away = [i for i, (_, middle) in enumerate(blocks) if not level / SETTLED <= middle <= level * SETTLED]
    first = away[-1] + 1 if away else 0
    return blocks[first][0] if first < len(blocks) else norms[-1][0]


def _advise_clip(seen: Seen, settled: int) -> Advice | None:
    after = sorted(norm for step, norm in seen.norms if step >= settled)
    if len(after) < MIN_STEPS // 2:
        return None
    high = after[int(0.95 * len(after))]
    why = f"95 % of the norms{' since they settled' if settled else ''} were below it"
    if seen.threshold is None:
        return Advice(setting="clip threshold", value=high, reason=f"{why}, and nothing was clipped by a fixed norm")
    share = spell_share(seen.num_clipped, seen.num_applied)
    if seen.num_clipped > OFTEN * max(1, seen.num_applied) and high > seen.threshold:
        return Advice(
            setting="clip threshold",
            value=high,
            reason=f"{why}; {seen.threshold:g} clipped {share} of the steps, so it scaled training and caught no spike",
        )
    if seen.threshold > RARELY * high:
        times = seen.threshold / high
        reason = f"{why}; {seen.threshold:g} lets through a spike of {times:.0f} times that"
        return Advice(setting="clip threshold", value=high, reason=reason)
    return None


def _advise_warmup(seen: Seen, settled: int) -> Advice | None:
    first, last = seen.norms[0][0], seen.norms[-1][0]
    if first > 0:
        return None  # the start is no longer in memory
    peak = find_peak(seen.rates)
    if settled > (last - first) // 2:
        return None
    began, level = _level(seen.norms, 0, settled), _level(seen.norms, settled, last + 1)
    if settled > 0 and began is not None and level is not None and (peak is None or settled > 1.5 * peak):
        way = "above" if began > level else "below"
        rises = "" if not peak else f", and the rate had reached its height at step {peak}"
        return Advice(
            setting="warm-up",
            value=_round_up(settled),
            reason=f"until step {settled} the norm was {max(began, level) / min(began, level):.2g} times {way} what it "
            f"settled at{rises}",
        )
    if peak is not None and peak >= 20 and settled < peak / 4:
        least = max(_round_up(settled), _round_up(peak // 10))
        return Advice(
            setting="warm-up",
            value=least,
            reason=f"the norm had settled by step {settled}, and the rate kept rising until step {peak}",
        )
    return None


def _advise_rate(seen: Seen) -> Advice | None:
    rate = max((rate for _, rate in seen.rates), default=None)
    if seen.lowered is not None:
        reason = "the guard had to lower the rate by as much, and the run continued with it"
        return Advice(setting="learning rate", value=seen.lowered, reason=reason)
    if rate is None or len(seen.ratios) < 3:
        return None
    ratio = statistics.median(seen.ratios[len(seen.ratios) // 4 :])
    if USUAL_RATIO / FAR_RATIO <= ratio <= USUAL_RATIO * FAR_RATIO or ratio <= 0:
        return None
    factor = min(MOST_CHANGE, max(1 / MOST_CHANGE, USUAL_RATIO / ratio))
    way = "slowly" if ratio < USUAL_RATIO else "fast"
    return Advice(
        setting="learning rate",
        value=rate * factor,
        reason=f"a step changed the median parameter by {ratio:.2g} of its size, too {way}: {USUAL_RATIO:g} is usual",
    )


def find_peak(rates: Sequence[tuple[int, float]]) -> int | None:
    """Return the step at which a rising rate peaked; None if it did not rise from the start."""
    if len(rates) < 2 or rates[0][1] >= 0.9 * max(rate for _, rate in rates):
        return None
    highest = max(rate for _, rate in rates)
    until = next(step for step, rate in rates if rate >= 0.999 * highest)
    rising = [rate for step, rate in rates if step <= until]
    return until if all(b >= a * 0.999 for a, b in pairwise(rising)) else None


def _level(norms: Sequence[tuple[int, float]], first: int, last: int) -> float | None:
    values = [norm for step, norm in norms if first <= step < last]
    return statistics.median(values) if values else None


def _round_up(steps: int) -> int:
    """Round up to one or two digits, as one would write by hand."""
    if steps <= 10:
        return steps
    unit = int(10 ** (len(str(steps)) - 1)) // 2
    return -(-steps // unit) * unit
