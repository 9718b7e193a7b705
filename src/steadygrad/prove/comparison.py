"""Comparison: a reference and some batches -> a Proof. Says "unknown" where it cannot tell, and never raises.

Two batches acquit at once when the present weights are clearly worse on neither; only what looks like harm is
measured on all of them, and only then are the initial weights asked what had been learnt.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from steadygrad.act.snapshot import Snapshot
from steadygrad.config import ProveConfig
from steadygrad.diagnose.capture import Capture
from steadygrad.facts import Answer, Proof
from steadygrad.prove.held import HeldStep
from steadygrad.prove.paired import CannotTestError, PairedTest
from steadygrad.prove.rule import (
    find_excess,
    is_damaged,
    is_held_back,
    is_hit,
    is_rate_too_high,
    is_worse,
    is_worse_than_start,
)

logger = logging.getLogger("steadygrad")
NUM_QUICK = 2
"""Batches that acquit at once."""
NOISE = 0.05
"""Share of the excess by which two replays of one batch may differ; an op that is not deterministic proves nothing."""

Aside = Callable[[], contextlib.AbstractContextManager[Any]]
"""Around replays: no hook of ours hears of them."""
Rehearse = Callable[[Sequence[HeldStep], Snapshot, float], list[float]]
"""Losses of steps made again from a snapshot with a share of the present learning rate."""
Rule = Callable[[Sequence[float], Sequence[float], float], bool]
"""Last losses of the run, of the same steps made again, and the first of these -> whether the run was harmed."""


class Comparison:
    """Makes the tests of one training."""

    def __init__(self, config: ProveConfig, test: PairedTest, *, aside: Aside, rehearse: Rehearse) -> None:
        self._config, self._test, self._aside, self._rehearse = config, test, aside, rehearse

    def take_cost(self) -> float:
        """What the tests since this was last asked took, in training steps."""
        cost, self._test.cost = self._test.cost, 0.0
        return cost

    def compare(
        self, reference: Snapshot, captures: Sequence[Capture], step: int, *, initial: Snapshot | None, began_at: float
    ) -> Proof:
        """Were the present weights harmed? `began_at`: the run's first losses, where the initial weights are gone."""

        def run() -> Proof:
            now, then, first, damaged = self._run(reference, captures, initial, began_at)
            answer = Answer.DAMAGED if damaged else Answer.UNHARMED
            return Proof(
                answer=answer, step=step, reference=reference.step, now=tuple(now), then=tuple(then), first=first
            )

        return self._try(step, run)

    def compare_batch(self, reference: Snapshot, capture: Capture, step: int, *, began_at: float) -> Proof:
        """One batch stands out: is it the batch, or were the weights hit?"""

        def run() -> Proof:
            steps = self._test.prepare([capture])
            now = self._test.measure(steps)
            with self._test.under(reference):
                then = self._test.measure(steps)
            answer = Answer.DAMAGED if is_hit(now, then, began_at, config=self._config) else Answer.UNHARMED
            return Proof(answer=answer, step=step, reference=reference.step, now=tuple(now), then=tuple(then))

        return self._try(step, run)

    def compare_rate(
        self, steps: Sequence[HeldStep], initial: Snapshot, factor: float, step: int, *, first: float
    ) -> Proof:
        """Would a lower rate have come further on the same batches, from the initial weights? `first`: their loss."""
        return self._compare_again(
            steps, initial, factor, step, lambda now, lower, _: is_rate_too_high(now, lower, first, config=self._config)
        )

    def compare_fresh(self, steps: Sequence[HeldStep], reference: Snapshot, step: int) -> Proof:
        """Would earlier weights have come further on the same batches, at the same rate?"""
        return self._compare_again(
            steps,
            reference,
            1.0,
            step,
            lambda now, fresh, began_at: is_held_back(now, fresh, began_at, config=self._config),
        )

    def _compare_again(self, steps: Sequence[HeldStep], start: Snapshot, factor: float, step: int, rule: Rule) -> Proof:
        def run() -> Proof:
            num = 2 * self._config.num_batches
            self._test.cost += len(steps) + 4
            losses = self._rehearse(steps, start, factor)
            again = losses[-num:]
            now = [one.loss for one in steps[-num:]]
            answer = Answer.DAMAGED if rule(now, again, losses[0]) else Answer.UNHARMED
            return Proof(
                answer=answer,
                step=step,
                reference=start.step,
                now=tuple(now),
                then=tuple(again),
                rate_factor=factor,
            )

        return self._try(step, run)

    def _try(self, step: int, run: Callable[[], Proof]) -> Proof:
        try:
            with self._aside():
                return run()
        except CannotTestError as error:
            return Proof(answer=Answer.UNKNOWN, step=step, reason=error.reason, remedy=error.remedy)
        except Exception as error:  # a test that fails is no test; training goes on
            logger.error("the paired test after step %d failed, training goes on: %r", step, error)
            return Proof(answer=Answer.UNKNOWN, step=step, reason=f"the test failed with {error!r:.120}")

    def _run(
        self, reference: Snapshot, captures: Sequence[Capture], initial: Snapshot | None, began_at: float
    ) -> tuple[list[float], list[float], float | None, bool]:
        """Losses now, then and, if need be, of the initial weights; and whether the present ones were harmed."""
        test, config, is_start = self._test, self._config, reference.step == 0
        ratio = 1.0 if is_start else config.ratio
        steps = test.prepare(captures)
        now = test.measure(steps[:NUM_QUICK])
        with test.under(reference):
            then = test.measure(steps[:NUM_QUICK])
            if not any(is_worse([a], [b], ratio=ratio) for a, b in zip(now, then)):
                return now, then, None, False
            then += test.measure(steps[NUM_QUICK:], first=NUM_QUICK)
        now += test.measure(steps[NUM_QUICK:], first=NUM_QUICK)
        again = test.measure(steps[:1])
        if abs(again[0] - now[0]) > NOISE * abs(find_excess(now, then)):
            raise CannotTestError("the step gives another loss each time that it is run with the same random numbers")
        if is_start:
            return now, then, None, is_worse_than_start(now, then, config=config)
        if not is_worse(now, then, ratio=ratio):
            return now, then, None, False
        first = [began_at]
        if initial is not None:
            with test.under(initial):
                first = test.measure(steps)
        mean = sum(first) / len(first)
        return now, then, mean if math.isfinite(mean) else None, is_damaged(now, then, first, config=config)
