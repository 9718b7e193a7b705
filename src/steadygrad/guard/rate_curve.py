"""RateCurve: what a range test measured at each learning rate -> the rates that matter, and one to train with.

Plain numbers, no torch. The suggested rate is never above the largest rate without a finding.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygrad.facts import Finding
from steadygrad.record.encode import to_plain
from steadygrad.stats import MAD_TO_SIGMA

BELOW_EDGE = 4.0
"""The suggestion stays this factor below the edge: a ramp finds the edge late, on weights that have adapted."""
BELOW_FINDING = 2.0
"""... and this factor below the first finding."""
LEAST_FALL = 3.0
"""The loss must fall by this many standard deviations of the noise for its slope to count."""
USUAL_FACTOR = 1.2
"""Growth of the rate per step that the suggestion is calibrated for: 100 steps from 1e-7 to 10. On a faster ramp the
weights have moved less when a rate is reached, so the loss falls fastest at a higher rate, in proportion to the
logarithm of the factor: the rates up to r sum to r / log(factor)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePoint:
    """One step of a range test."""

    rate: float
    loss: float | None
    change: float | None
    """Loss minus the loss of the same batch, with the same random numbers, at the start."""
    grad_norm: float
    update_ratio: float | None
    """Ratio of update to weight, for the median parameter."""
    clipped: bool
    skipped: bool
    kinds: tuple[str, ...]
    """Kinds of the findings at this step, above info."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCurve:
    """The result of `guard.find_lr`. Rates are those of the parameter group with the highest one."""

    points: tuple[RatePoint, ...] = field(repr=False)
    smoothed: tuple[float, ...] = field(repr=False)
    """For each point, the starting level plus the change since, smoothed over neighbours; NaN where unknown."""
    base_rate: float
    """The rate that the optimizer was created with."""
    largest_quiet: float
    """Largest rate without a finding at or below it."""
    steepest: float | None
    """Rate at which the loss fell fastest; None if it did not fall."""
    edge: float | None
    """Rate at which training broke down; None if it did not within the range."""
    why_ended: str
    """What happened at the edge."""
    suggested: float
    """Rate to train with."""
    reason: str
    """Why `suggested` was chosen, in a sentence."""
    start: tuple[float, float] | None
    """Level and spread of the first losses."""
    findings: tuple[Finding, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        edge = "none up to the end of the range" if self.edge is None else f"{self.edge:.3g}: {self.why_ended}"
        steepest = "the loss did not fall" if self.steepest is None else f"{self.steepest:.3g}"
        return "\n".join(
            (
                f"suggested  {self.suggested:.3g} ({self.reason})",
                f"steepest   {steepest}",
                f"quiet      up to {self.largest_quiet:.3g}",
                f"edge       {edge}",
            )
        )

    def plot(self, path: str | Path) -> Path:
        """Draw loss, norm and update ratio over the rate, as PNG, SVG or PDF."""
        from steadygrad.view.rate_plot import plot_rates  # and with it the report's plots: not for every Guard

        return plot_rates(self.to_dict(), path)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        plain: dict[str, Any] = to_plain(self)
        return plain


def read_curve(
    points: Sequence[RatePoint],
    *,
    base_rate: float,
    why_ended: str,
    start: tuple[float, float] | None,
    findings: Sequence[Finding] = (),
) -> RateCurve:
    """Derive the curve from its points; with `why_ended` the last one is the edge."""
    level = 0.0 if start is None else start[0]
    smoothed = smooth([p.loss if p.change is None else level + p.change for p in points])
    edge = points[-1].rate if why_ended else None
    loud = next((i for i, p in enumerate(points) if p.kinds or (why_ended and i == len(points) - 1)), None)
    largest_quiet = points[-1].rate if loud is None else points[max(0, loud - 1)].rate
    last = len(points) - (1 if why_ended else 0)
    steepest = find_steepest(points[:last], smoothed[:last], start)
    factor = points[1].rate / points[0].rate if len(points) > 1 else USUAL_FACTOR
    good = None if steepest is None else steepest * math.log(USUAL_FACTOR) / math.log(factor)
    suggested, reason = suggest_rate(base_rate, good, largest_quiet, edge, is_quiet=loud is None)
    return RateCurve(
        points=tuple(points),
        smoothed=tuple(smoothed),
        base_rate=base_rate,
        largest_quiet=largest_quiet,
        steepest=steepest,
        edge=edge,
        why_ended=why_ended,
        suggested=suggested,
        reason=reason,
        start=start,
        findings=tuple(findings),
    )


def smooth(losses: Sequence[float | None]) -> list[float]:
    """Smooth by a median of three, then a mean over a symmetric window of a tenth of all points."""
    known = [math.nan if x is None or not math.isfinite(x) else x for x in losses]
    calm = [_median(known[max(0, i - 1) : i + 2]) for i in range(len(known))]
    half = max(1, round(len(known) / 20))
    return [_mean(calm[max(0, i - half) : i + half + 1]) for i in range(len(calm))]


def find_steepest(
    points: Sequence[RatePoint], smoothed: Sequence[float], start: tuple[float, float] | None
) -> float | None:
    """Return the rate at which the smoothed loss falls fastest per factor of the rate; None if only noise falls."""
    if len(points) < 5 or start is None:
        return None
    level, num = start[0], len(smoothed)
    known = [x for x in smoothed if math.isfinite(x)]
    if not known or level - min(known) < max(LEAST_FALL * measure_noise(points), 1e-3 * abs(level)):
        return None
    # min() would return a NaN that comes first: nothing compares below it.
    lowest = min(range(num), key=lambda i: smoothed[i] if math.isfinite(smoothed[i]) else math.inf)
    half = max(2, round(num / 20))
    slopes = {}
    for i in range(half, min(lowest + 1, num - half)):
        window = range(i - half, i + half + 1)
        slopes[i] = _slope([math.log(points[j].rate) for j in window], [smoothed[j] for j in window])
    falling = {i: slope for i, slope in slopes.items() if slope < 0}
    return points[min(falling, key=lambda i: falling[i])].rate if falling else points[lowest].rate


def measure_noise(points: Sequence[RatePoint]) -> float:
    """Return the spread of the losses of repeated batches at rates that are still small."""
    # In its first use each batch is compared with itself, which gives exactly 0.
    num_first = sum(point.change == 0.0 for point in points[: len(points) // 2])
    second = [p.change for p in points[num_first : 2 * num_first] if p.change is not None and math.isfinite(p.change)]
    if len(second) < 3:
        return 0.0
    middle = statistics.median(second)
    return MAD_TO_SIGMA * statistics.median(abs(x - middle) for x in second)


def suggest_rate(
    base: float, good: float | None, largest_quiet: float, edge: float | None, *, is_quiet: bool
) -> tuple[float, str]:
    """Return the rate to train with, and why."""
    bounds = [
        (largest_quiet if is_quiet else largest_quiet / BELOW_FINDING, "half of the largest rate with no finding")
    ]
    if edge is not None:
        bounds.append((edge / BELOW_EDGE, f"a {BELOW_EDGE:g}th of the rate at which training broke"))
    bound, why = min(bounds, key=lambda one: one[0])
    if good is None:
        rate = min(base, bound)
        if rate == base:
            return rate, "the loss did not fall beyond its noise in the test, so the rate stays as it is"
        return rate, f"the loss did not fall beyond its noise in the test; {why}"
    if good <= bound:
        return good, "where the loss fell fastest, for a ramp of the usual length, and nothing was found up to it"
    return bound, f"{why}; the loss fell fastest at {good:.3g}, for a ramp of the usual length"


def _median(values: Sequence[float]) -> float:
    known = [x for x in values if math.isfinite(x)]
    return statistics.median(known) if known else math.nan


def _mean(values: Sequence[float]) -> float:
    known = [x for x in values if math.isfinite(x)]
    return math.fsum(known) / len(known) if known else math.nan


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the least-squares slope; 0 if the values are not finite."""
    if not all(map(math.isfinite, y)):
        return 0.0
    mean_x, mean_y = _mean(x), _mean(y)
    return math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / math.fsum((a - mean_x) ** 2 for a in x)


def restore_curve(values: Mapping[str, Any]) -> RateCurve:
    """Rebuild the curve from `to_dict()`, without the texts of its findings."""
    points = [
        RatePoint(
            **{
                **point,
                # float(): to_dict() writes NaN and Inf as text.
                "loss": None if point["loss"] is None else float(point["loss"]),
                "change": None if point["change"] is None else float(point["change"]),
                "grad_norm": float(point["grad_norm"]),
                "kinds": tuple(point["kinds"]),
            }
        )
        for point in values["points"]
    ]
    start = None if values["start"] is None else (float(values["start"][0]), float(values["start"][1]))
    return read_curve(points, base_rate=values["base_rate"], why_ended=values["why_ended"], start=start)
