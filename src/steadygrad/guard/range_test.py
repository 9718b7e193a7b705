"""A guard's training, tried at rising learning rates -> a RateCurve; the training is left bit for bit as it was.

Each step is measured, clipped and judged by the guard's own rules at a rate that grows by the same factor every step,
until training breaks down or the range ends. The same few batches repeat, each with the random numbers of its first
use: subtracting the loss that it gave then, at the smallest rates, removes the noise of data and dropout. Parameter
groups keep their proportions, and no scheduler moves meanwhile.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from steadygrad.config import GuardConfig
from steadygrad.errors import UnsupportedError, UsageError
from steadygrad.facts import Finding, Reading, Severity
from steadygrad.guard.breakdown import BreakdownWatch, keep_reporting
from steadygrad.guard.moment import Moment
from steadygrad.guard.rate_curve import RateCurve, RatePoint, read_curve
from steadygrad.guard.rehearsal import MakeGuard, Rehearsal, draw_batches
from steadygrad.guard.sides import DeviceSide
from steadygrad.guard.training import Training
from steadygrad.judgement import Judgement
from steadygrad.measure.ranks import Ranks
from steadygrad.state.random_state import capture_random, restore_random

KIND = "learning_rate_test"
MIN_STEPS = 10
MIN_FIRST = 5
"""Least number of batches that repeat; otherwise a tenth of the steps."""
MAX_FACTOR = 2.0
"""Largest growth from step to step: the rules take a faster one for a restart, after which a loss may rise."""


class RangeTest:
    """Runs the range test on the training of a guard, without touching that guard's own state."""

    def __init__(
        self,
        training: Training,
        make_guard: MakeGuard,
        *,
        moment: Moment,
        ranks: Ranks,
        device: DeviceSide,
        judgement: Judgement,
    ) -> None:
        self._training, self._make_guard, self._moment, self._ranks = training, make_guard, moment, ranks
        self._clipper, self._watched, self._buffers = device.clipper, device.watched, device.buffers
        self._judgement = judgement

    def find_lr(
        self,
        fn: Callable[[Any], Any],
        loader: Iterable[Any],
        *,
        start: float,
        end: float,
        steps: int,
        microbatches: int,
    ) -> RateCurve:
        """Try the rates, put everything back and write one line to the record. All steps must be judged."""
        check_range(start, end, steps, microbatches)
        self._check_moment()
        training, moment = self._training, self._moment
        logged = moment.logged  # `fn` may call guard.log
        moment.logged = {}
        try:
            rehearsal = Rehearsal(
                training.model,
                training.optimizers,
                loader,
                make_guard=self._make_guard,
                extras={"scaler": training.scaler},
            )
            with self._watched.edits.aside():  # the program has not changed the weights
                curve = run_range(
                    rehearsal,
                    fn,
                    training.config,
                    start=start,
                    end=end,
                    steps=steps,
                    microbatches=microbatches,
                    scaler=training.scaler,
                    clip=None if self._clipper is None else self._clipper.state_dict(),
                )
        finally:
            moment.logged = logged
        self._buffers.forget()  # the test's forwards changed them, and they were put back: copy them again
        self._judgement.note(describe_test(moment.next_step, curve), write=True)
        return curve

    def _check_moment(self) -> None:
        if self._training.off:
            raise UsageError("find_lr needs the guard, and STEADYGRAD=off is set. Unset it for the test.")
        num_microbatches = self._moment.batches.num
        if num_microbatches:
            raise UsageError(
                f"find_lr was called with {num_microbatches} microbatches of a step under way. Call it after "
                "guard.step()."
            )
        if self._ranks.many:
            raise UnsupportedError(
                f"find_lr tries rates on one process, and {self._ranks.num} ranks train together here. Run it once on "
                "one rank, before the model is wrapped, and use that rate on all."
            )


def run_range(
    rehearsal: Rehearsal,
    fn: Callable[[Any], Any],
    config: GuardConfig,
    *,
    start: float,
    end: float,
    steps: int,
    microbatches: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    clip: Any = None,
    tell: Callable[[RatePoint], None] | None = None,
) -> RateCurve:
    """Make steps at rates from `start` to `end`; call `tell` after each."""
    check_range(start, end, steps, microbatches)
    # Two more passes over the weights in each step: every point shows how large its update was.
    config = dataclasses.replace(config, measure=dataclasses.replace(config.measure, parameters_every=1))
    rates, points, why = RateSetter(rehearsal.optimizers), [], ""
    num_first = max(MIN_FIRST, steps // 10)
    watch = BreakdownWatch(num_first=num_first)
    with rehearsal.attempt(config, scaler) as guard:
        if clip is not None and guard._clipper is not None:
            guard._clipper.load_state_dict(clip)
        batches = Repeated(draw_batches(rehearsal.loader), num_first, microbatches, rates.devices)
        for rate in spread_rates(start, end, steps):
            rates.set(rate)
            num_found = len(guard.findings)
            reading = make_step(guard, fn, batches.draw())
            change = batches.compare(reading.loss)
            found = guard.findings[num_found:]
            points.append(make_point(rate, reading, change, found))
            if tell is not None:
                tell(points[-1])
            why = watch.observe(reading, found, change) or ""
            if why:
                break
        findings = keep_reporting(guard.findings)
    return read_curve(points, base_rate=rates.base, why_ended=why, start=watch.start, findings=findings)


class Repeated:
    """The first batches of a loader, repeated, each with the same random numbers."""

    def __init__(
        self, batches: Iterator[Any], num_first: int, microbatches: int, devices: Sequence[torch.device]
    ) -> None:
        self._source, self._num_first, self._microbatches = batches, num_first, microbatches
        self._devices = devices
        self._kept: list[tuple[list[Any], dict[str, Any]]] = []
        self._losses: list[float | None] = []
        self._count = 0

    def draw(self) -> list[Any]:
        """Return the batches of the next step and set the random generators for it."""
        if self._count < self._num_first:
            batches = list(islice(self._source, self._microbatches))
            # After drawing: a loader without workers draws from these generators too.
            self._kept.append((batches, capture_random(self._devices)))
        batches, state = self._kept[self._count % self._num_first]
        restore_random(state)
        return batches

    def compare(self, loss: float | None) -> float | None:
        """Return `loss` minus the first loss of the batches drawn last."""
        place, self._count = self._count % self._num_first, self._count + 1
        if len(self._losses) < self._num_first:
            self._losses.append(loss)
        first = self._losses[place]
        if loss is None or first is None or not math.isfinite(first) or not math.isfinite(loss):
            return None
        return loss - first


def make_step(guard: Any, fn: Callable[[Any], Any], batches: Iterable[Any]) -> Reading:
    """Make one optimizer step from all these microbatches and return its reading, judged."""
    for batch in batches:
        guard.backward(fn, batch)
    guard.step()
    # Waits for the device at each step: whether to go on to the next rate depends on this reading.
    guard.flush()
    reading: Reading = guard._judgement.last_reading
    return reading


def make_point(rate: float, reading: Reading, change: float | None, findings: Sequence[Finding]) -> RatePoint:
    """Return what is kept of one step."""
    ratios = [ratio for ratio in (reading.update_ratios or {}).values() if math.isfinite(ratio)]
    return RatePoint(
        rate=rate,
        loss=reading.loss,
        change=change,
        grad_norm=reading.grad_norm,
        update_ratio=statistics.median(ratios) if ratios else None,
        clipped=reading.clipped,
        skipped=reading.skipped,
        kinds=tuple(dict.fromkeys(finding.kind for finding in keep_reporting(findings))),
    )


def spread_rates(start: float, end: float, steps: int) -> list[float]:
    """Return rates from `start` to `end`, each the same factor above the one before."""
    return [start * (end / start) ** (i / (steps - 1)) for i in range(steps)]


class RateSetter:
    """Sets the learning rate of all groups; each keeps its ratio to the highest."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        given = [float(group.get("initial_lr", group["lr"])) for group in self._groups]
        self.base = max(given)
        """The highest rate that the groups were created with."""
        self._shares = [rate / self.base for rate in given] if self.base > 0 else [1.0] * len(given)
        self.devices = sorted({p.device for group in self._groups for p in group["params"]}, key=str)

    def set(self, rate: float) -> None:
        """Set the highest group's rate; write a tensor rate in place, because captured graphs may hold it."""
        for group, share in zip(self._groups, self._shares):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * share)
            else:
                group["lr"] = rate * share


def describe_test(step: int, curve: RateCurve) -> Finding:
    """Return the finding that records a test in one line."""
    low, high = curve.points[0].rate, curve.points[-1].rate
    return Finding(
        kind=KIND,
        severity=Severity.INFO,
        step=step,
        message=f"learning rates from {low:.3g} to {high:.3g} were tried in {len(curve.points)} steps and undone; "
        f"suggested: {curve.suggested:.3g}",
        evidence={"suggested": curve.suggested, "largest_quiet": curve.largest_quiet, "num_steps": len(curve.points)},
    )


def check_range(start: float, end: float, steps: int, microbatches: int = 1) -> None:
    """Raise UsageError if these settings make no valid test."""
    if not 0 < start < end < math.inf:
        raise UsageError(
            f"find_lr goes from start to end, got start={start:g} and end={end:g}. Give 0 < start < end, 1e-7 and 10 "
            "for example."
        )
    if type(steps) is not int:
        raise UsageError(
            f"find_lr takes a whole number of steps, got {steps!r}. Give at least {MIN_STEPS}; 100 is good."
        )
    if steps < MIN_STEPS:
        raise UsageError(f"find_lr got steps={steps}, too few to see a slope. Give at least {MIN_STEPS}; 100 is good.")
    factor = (end / start) ** (1 / (steps - 1))
    if factor > MAX_FACTOR:
        least = math.ceil(math.log(end / start, MAX_FACTOR)) + 1
        raise UsageError(
            f"find_lr would multiply the rate by {factor:.3g} from one step to the next: {steps} steps are too few "
            f"from {start:g} to {end:g}. Give at least {least} steps, or a narrower range."
        )
    if microbatches < 1:
        raise UsageError(f"find_lr got microbatches={microbatches}. Give the number of batches of one step, 1 or more.")
