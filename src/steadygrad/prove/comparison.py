"""Comparison: a reference and some batches -> a Proof. Answers "unknown" if it cannot decide, and never raises.

Two batches acquit at once if the present weights are clearly worse on neither; only what looks like harm is measured
on all of them, and only then are the initial weights measured too, to see how much had been learned.
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
from steadygrad.diagnose.replay import Step
from steadygrad.facts import Answer, Proof
from steadygrad.prove.held import HeldStep
from steadygrad.prove.paired import CannotTestError, PairedTest
from steadygrad.prove.rule import (
    MOST_DISSENT,
    find_excess,
    is_damaged,
    is_held_back,
    is_hit,
    is_rate_too_high,
    is_slope,
    is_worse,
    is_worse_than_start,
)

logger = logging.getLogger("steadygrad")
NUM_QUICK = 2
"""Number of batches that can acquit at once."""
NUM_SLOPES = 4
"""Number of batches on which the gradient is compared with the values of the loss."""
SHARES = (1 / 64, 1 / 8, 1 / 512)
"""Shares of the way to other weights at which values are taken: large for half precision, small for a steep loss."""
NEARER = (0.0, 1 - 1 / 4096)
"""Shares of the way to the earlier weights at which the slope is tested, one after the other."""
NOISE = 0.05
"""Share of the excess by which two replays of one batch may differ; a nondeterministic op proves nothing."""

Aside = Callable[[], contextlib.AbstractContextManager[Any]]
"""Opens a context for replays in which none of our hooks fires."""
Rehearse = Callable[[Sequence[HeldStep], Snapshot, float], list[float]]
"""Returns the losses of steps repeated from a snapshot at a fraction of the present learning rate."""
Rule = Callable[[Sequence[float], Sequence[float], float], bool]
"""Last losses of the run, those of the same steps repeated, and the first of these -> whether the run was harmed."""


class Comparison:
    """Runs the tests of one training."""

    def __init__(self, config: ProveConfig, test: PairedTest, *, aside: Aside, rehearse: Rehearse) -> None:
        self._config, self._test, self._aside, self._rehearse = config, test, aside, rehearse

    def take_cost(self) -> float:
        """Return the cost of the tests since the last call, in training steps."""
        cost, self._test.cost = self._test.cost, 0.0
        return cost

    def compare(
        self,
        reference: Snapshot,
        captures: Sequence[Capture],
        step: int,
        *,
        initial: Snapshot | None,
        began_at: float,
        is_repeated: bool = False,
    ) -> Proof:
        """Test whether the present weights were harmed; `began_at`: first loss, if the initial weights are gone.

        `is_repeated`: the same loss was tested before, so it is known not to be a surrogate.
        """

        def run() -> Proof:
            now, then, first, damaged = self._run(reference, captures, initial, began_at)
            if damaged and not is_repeated:
                self._require_slope(reference, captures)
            answer = Answer.DAMAGED if damaged else Answer.UNHARMED
            return Proof(
                answer=answer, step=step, reference=reference.step, now=tuple(now), then=tuple(then), first=first
            )

        return self._try(step, run)

    def compare_batch(self, reference: Snapshot, capture: Capture, step: int, *, began_at: float) -> Proof:
        """Test whether an outlying loss comes from its batch alone, or whether the weights were hit."""

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
        """Test whether a lower rate does better on the same batches from the initial weights; `first`: their loss."""
        return self._compare_again(
            steps, initial, factor, step, lambda now, lower, _: is_rate_too_high(now, lower, first, config=self._config)
        )

    def compare_fresh(self, steps: Sequence[HeldStep], reference: Snapshot, step: int) -> Proof:
        """Test whether earlier weights do better when trained on the same batches at the same rate."""
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
            damaged = rule(now, again, losses[0])
            if damaged:
                self._require_slope(start, [one.captures[-1] for one in steps[-num:]])
            answer = Answer.DAMAGED if damaged else Answer.UNHARMED
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
        except Exception as error:  # a test that fails proves nothing; training goes on
            logger.error("the paired test after step %d failed, training continues: %r", step, error)
            return Proof(answer=Answer.UNKNOWN, step=step, reason=f"the test failed with {error!r:.120}")

    def _require_slope(self, reference: Snapshot, captures: Sequence[Capture]) -> None:
        """Raise an error if the loss is a surrogate, whose gradient is not the slope of its values.

        The value of a policy gradient's loss (advantage times log probability, a ratio to its own detached self) says
        nothing about the policy: a penalty that is added to it is all that differs between two sets of weights, and
        those that have learned nothing pay none. Of four batches one may dissent, as where a loss is not smooth. Around
        wrecked weights it never is, so the test is repeated close to the earlier ones.
        """
        steps = self._test.prepare(captures[:NUM_SLOPES])
        for share in NEARER:
            with self._test.under(reference, share) if share else contextlib.nullcontext():
                if self._has_slope(steps, reference):
                    return
        raise CannotTestError("the gradient is not the slope of the loss, so a lower loss need not be better")

    def _has_slope(self, steps: Sequence[Step], reference: Snapshot) -> bool:
        """Return whether the gradient at the current weights is the slope of the loss on the way to the reference."""
        test = self._test
        by_gradient = [test.measure_slope(step, reference) for step in steps]
        left = {number for number, slope in enumerate(by_gradient) if math.isfinite(slope)}
        num_dissenting = len(left) // NUM_SLOPES
        if not left:  # a backward that fails when it is repeated says nothing about the loss
            return True
        for share in SHARES:
            ends = []
            for end in (share, -share):
                with test.under(reference, end):
                    ends.append({number: test.measure([steps[number]], first=number)[0] for number in sorted(left)})
            slopes = {number: (ends[0][number] - ends[1][number]) / (2 * share) for number in left}
            left = {number for number, slope in slopes.items() if not is_slope(by_gradient[number], slope)}
            if len(left) <= num_dissenting:
                return True
        return False

    def _run(
        self, reference: Snapshot, captures: Sequence[Capture], initial: Snapshot | None, began_at: float
    ) -> tuple[list[float], list[float], float | None, bool]:
        """Return the losses of present, earlier and, if needed, initial weights; and whether harm was done."""
        test, config, is_start = self._test, self._config, reference.step == 0
        ratio = 1.0 if is_start else config.ratio
        steps = test.prepare(captures)
        now = test.measure(steps[:NUM_QUICK])
        with test.under(reference):
            then = test.measure(steps[:NUM_QUICK])
            # All these losses are means over the ranks, so all ranks take the same branch here and below.
            if not any(is_worse([a], [b], ratio=ratio) for a, b in zip(now, then)):
                return now, then, None, False
            then += test.measure(steps[NUM_QUICK:], first=NUM_QUICK)
        now += test.measure(steps[NUM_QUICK:], first=NUM_QUICK)
        # Outside `under`: the present weights once more, against now[0].
        again = test.measure(steps[:1])
        if abs(again[0] - now[0]) > NOISE * abs(find_excess(now, then)):
            raise CannotTestError("the step gives a different loss each time it is run with the same random numbers")
        if is_start:
            return now, then, None, is_worse_than_start(now, then, config=config)
        if not is_worse(now, then, ratio=ratio, dissent=MOST_DISSENT):
            return now, then, None, False
        first = [began_at]
        if initial is not None:
            with test.under(initial):
                first = test.measure(steps)
        mean = sum(first) / len(first)
        return now, then, mean if math.isfinite(mean) else None, is_damaged(now, then, first, config=config)
