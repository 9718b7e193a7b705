"""A trial: settings, tried for a few steps from the same state as every other -> a score, or why it broke down.

Weights and random numbers are the same, and so are the data for the same `order`. It ends at the step where it breaks
down. A trial is the whole training in miniature: the rate rises and falls over its steps as over the run's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from steadygrad.checkpoint.position import find_generators
from steadygrad.config import Precision
from steadygrad.guard.breakdown import BreakdownWatch, keep_reporting
from steadygrad.guard.range_test import RateSetter, make_step
from steadygrad.guard.rehearsal import Rehearsal, draw_batches
from steadygrad.tune.settings import Settings
from steadygrad.tune.tunable import Tunable, find_batch_size, resize_batches

TAIL = 4
"""Without validation, a trial is scored by the mean of the last 1 / TAIL of its losses."""
ORDER_SEED = 7919
MIN_STEPS = 5

Report = Callable[[float, float], bool]
"""Takes the finished share of the trial and its mean loss so far; returns whether to give up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The result of one trial."""

    settings: Settings
    score: float | None
    """Loss on validation data, or mean of the last training losses; None if it did not get that far."""
    num_steps: int
    num_batches: int
    losses: tuple[float | None, ...] = field(repr=False)
    why_ended: str = ""
    """Why it broke down; empty if it did not."""
    given_up: bool = False
    """Whether it was stopped because others did better."""
    kinds: tuple[str, ...] = ()
    """Kinds of the findings above info."""
    order: int = 0

    @property
    def is_good(self) -> bool:
        """Whether it ran to its end and has a score."""
        return self.score is not None and not self.why_ended and not self.given_up


def run_trial(
    tunable: Tunable,
    rehearsal: Rehearsal,
    settings: Settings,
    *,
    steps: int,
    start: tuple[float, float] | None,
    order: int = 0,
    report: Report | None = None,
) -> TrialResult:
    """Try `settings` on as much data as `steps` steps with the given settings use."""
    num_steps = scale_steps(tunable, settings, steps)
    level, spread = start if start is not None else (None, 0.0)
    watch = BreakdownWatch(num_first=3, level=level, spread=spread)
    losses: list[float | None] = []
    why, given_up, score = "", False, None
    config = tunable.configure(settings)
    with rehearsal.attempt(config, make_scaler(tunable, settings)) as guard:
        if order:
            # Inside the attempt, which puts the generators back, and before the first batch is drawn
            change_order(rehearsal, order)
        rates = RateSetter(rehearsal.optimizers)
        set_optimizers(tunable, settings)
        batches = draw_batches(resize_batches(tunable.loader, settings.batch))
        for i in range(num_steps):
            rates.set(settings.lr * scale_rate(i, num_steps, settings.warmup, tunable.schedule))
            num_found = len(guard.findings)
            # `islice` of one running iterator: each step takes the batches behind those of the last
            reading = make_step(
                guard, lambda b: tunable.compute_loss(b) / settings.accumulation, islice(batches, settings.accumulation)
            )
            losses.append(reading.loss)
            why = watch.observe(reading, guard.findings[num_found:]) or ""
            if why:
                break
            if report is not None and report((i + 1) / num_steps, mean_tail(losses, num_steps)):
                given_up = True
                break
        kinds = tuple(dict.fromkeys(finding.kind for finding in keep_reporting(guard.findings)))
        if not why and not given_up:
            # Inside the attempt: on leaving it, the weights are put back
            measured = tunable.measure_score(config.autocast)
            score = mean_tail(losses, num_steps) if measured is None else measured
            if not math.isfinite(score):
                score, why = None, "the loss on the validation data was not finite"
    return TrialResult(
        settings=settings,
        score=score,
        num_steps=len(losses),
        num_batches=len(losses) * settings.accumulation,
        losses=tuple(losses),
        why_ended=why,
        given_up=given_up,
        kinds=kinds,
        order=order,
    )


def scale_steps(tunable: Tunable, settings: Settings, steps: int) -> int:
    """Return the number of steps that use as much data as `steps` with the given settings."""
    base = (find_batch_size(tunable.loader) or 1) * tunable.accumulation_steps
    size = (settings.batch or find_batch_size(tunable.loader) or 1) * settings.accumulation
    return max(MIN_STEPS, round(steps * base / size))


def scale_rate(step: int, num_steps: int, warmup: float, schedule: str) -> float:
    """Return the share of the peak rate at a step: linear rise, then constant or a cosine decay."""
    rising = round(warmup * num_steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    if schedule == "constant":
        return 1.0
    return 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1, num_steps - rising)))


def set_optimizers(tunable: Tunable, settings: Settings) -> None:
    """Set weight decay and betas if they differ from the given ones; groups keep their ratio to the highest decay, and
    those without decay stay without."""
    given, betas = tunable.given, (settings.beta1, settings.beta2)
    for group in tunable.groups:
        if settings.weight_decay != given.weight_decay and "weight_decay" in group:
            share = float(group["weight_decay"]) / given.weight_decay if given.weight_decay else 1.0
            group["weight_decay"] = (settings.weight_decay or 0.0) * share
        if betas != (given.beta1, given.beta2) and "betas" in group:
            group["betas"] = (*betas, *group["betas"][2:])


def make_scaler(tunable: Tunable, settings: Settings) -> torch.amp.GradScaler | None:
    """Return a new loss scaler if gradients are float16."""
    return torch.amp.GradScaler(tunable.device.type) if settings.precision == Precision.FP16.value else None


def change_order(rehearsal: Rehearsal, order: int) -> None:
    """Change the order of the data and the dropout; the attempt puts the generators back."""
    seed = (torch.initial_seed() + ORDER_SEED * order) % (1 << 63)
    torch.manual_seed(seed)
    for generator in find_generators(rehearsal.loader):
        generator.manual_seed(seed)


def mean_tail(losses: list[float | None], num_steps: int) -> float:
    """Return the mean of the last available losses; NaN if there are none."""
    known = [x for x in losses[-max(3, num_steps // TAIL) :] if x is not None and math.isfinite(x)]
    return math.fsum(known) / len(known) if known else math.nan


def describe_trial(result: TrialResult) -> str:
    """Describe the result in a few words."""
    if result.why_ended:
        return f"broke after {result.num_steps} steps: {result.why_ended}"
    if result.given_up:
        return f"given up after {result.num_steps} steps: others did better"
    return f"loss {result.score:.4g} after {result.num_steps} steps"


def to_plain_result(result: TrialResult) -> dict[str, Any]:
    """Return the result as plain values that JSON can hold."""
    values: dict[str, Any] = {
        name: getattr(result, name) for name in ("score", "num_steps", "num_batches", "why_ended", "given_up", "order")
    }
    losses = [None if x is None or not math.isfinite(x) else x for x in result.losses]
    return {**values, "settings": result.settings.to_dict(), "kinds": list(result.kinds), "losses": losses}


def from_plain_result(values: dict[str, Any]) -> TrialResult:
    """Rebuild a result from `to_plain_result`."""
    known = {**values, "settings": Settings.from_dict(values["settings"])}
    known |= {"kinds": tuple(values["kinds"]), "losses": tuple(values["losses"])}
    return TrialResult(**known)
