"""Tuning: a target -> a range test, trials, perhaps a search -> a Choice with its evidence.

Finished results are kept in the run directory, so that an interrupted tuning can be resumed. At the end, the target's
model, optimizer, random generators and loader are as they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from steadygrad.guard import Guard
from steadygrad.guard.range_test import run_range
from steadygrad.guard.rate_curve import RateCurve
from steadygrad.guard.rehearsal import Rehearsal
from steadygrad.tune.choose import Choice, choose, gather_evidence, is_near, keep_near
from steadygrad.tune.ledger import Ledger
from steadygrad.tune.plan import ABOVE, BELOW, Plan
from steadygrad.tune.search import Search
from steadygrad.tune.settings import Settings
from steadygrad.tune.space import make_space
from steadygrad.tune.target import Target
from steadygrad.tune.trial import Report, TrialResult, describe_trial, make_scaler, run_trial

NUM_LOWER = 5
"""Number of lower rates to try if the given one breaks down, each a quarter of the last, as long as that helps."""
NUM_CONFIRMED = 3
"""Number of best trials of a search to repeat in a second order of the data, until one holds up."""
Advance = Callable[[int, str], None]
Track = Callable[[str, int], AbstractContextManager[Advance]]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The result of a tuning."""

    target: Target
    curve: RateCurve
    choice: Choice
    evidence: list[tuple[str, str, str, str]]
    """Setting, value before, value after, reason."""
    compared: list[TrialResult]
    """The given settings and the chosen ones, in two orders."""
    searched: list[TrialResult]
    num_steps: int
    """Total number of steps tried."""


class Tuning:
    """One worker's part of a tuning."""

    def __init__(
        self,
        target: Target,
        plan: Plan,
        ledger: Ledger,
        *,
        search: Search | None = None,
        tell: Tell | None = None,
        track: Track | None = None,
    ) -> None:
        self._target, self._plan, self._ledger, self._search = target, plan, ledger, search
        self._tell: Tell = tell if tell is not None else lambda _: None
        self._track: Track = track if track is not None else lambda *_: nullcontext(lambda *_: None)
        tunable = target.tunable
        self._rehearsal = Rehearsal(tunable.model, tunable.optimizers, tunable.loader, make_guard=Guard)

    def run(self) -> Tuned:
        """Run the whole tuning."""
        curve = self._find_range()
        if self._search is not None:
            self._search_settings(self._search, curve, leads=True)
        choice, compared = self._decide(curve)
        searched = [] if self._search is None else self._search.results
        reasons = dict.fromkeys([] if self._search is None else _spread(self._search.names), "")
        reasons["lr"] = f"range test: {curve.suggested:.3g} suggested, {curve.reason}"
        tried = [*self._ledger.trials, *searched]
        return Tuned(
            target=self._target,
            curve=curve,
            choice=choice,
            evidence=gather_evidence(self._target, choice, searched, reasons),
            compared=compared,
            searched=searched,
            num_steps=len(curve.points) + sum(one.num_steps for one in tried),
        )

    def help(self) -> None:
        """Run only trials of a search; the worker that leads it chooses and writes."""
        assert self._search is not None
        # Into this worker's ledger, where `_start` finds the level that a trial is judged by
        self._ledger.keep_curve(curve := self._search.wait_for_curve())
        self._search_settings(self._search, curve, leads=False)

    # --- the range test ---------------------------------------------------------------------------------------------

    def _find_range(self) -> RateCurve:
        curve = self._ledger.curve
        if curve is None:
            shared = None if self._search is None else self._search.curve
            curve = shared if shared is not None else self._run_range()
            self._ledger.keep_curve(curve)
        for line in str(curve).splitlines():
            self._tell(f"  {line}")
        return curve

    def _run_range(self) -> RateCurve:
        tunable, given, steps = self._target.tunable, self._target.given, self._plan.range_steps
        self._tell(f"Range test: up to {steps} steps from a rate of {given.lr / BELOW:.3g} to {given.lr * ABOVE:.3g}")
        with self._track("range test", steps) as advance:
            done = _count_up()
            return run_range(
                self._rehearsal,
                lambda batch: tunable.compute_loss(batch) / tunable.accumulation_steps,
                tunable.configure(given),
                start=given.lr / BELOW,
                end=given.lr * ABOVE,
                steps=steps,
                microbatches=tunable.accumulation_steps,
                scaler=make_scaler(tunable, given),
                tell=lambda point: advance(next(done), f"rate {point.rate:.2g}"),
            )

    # --- trials -----------------------------------------------------------------------------------------------------

    def _try(self, settings: Settings, order: int, report: Report | None = None) -> TrialResult:
        return run_trial(
            self._target.tunable,
            self._rehearsal,
            settings,
            steps=self._plan.trial_steps,
            start=self._start,
            order=order,
            report=report,
        )

    @property
    def _start(self) -> tuple[float, float] | None:
        curve = self._ledger.curve
        return None if curve is None else curve.start

    def _try_once(self, settings: Settings, order: int, name: str) -> TrialResult:
        result = self._ledger.find_trial(settings, order) or self._find_searched(settings, order)
        if result is None:
            with self._track(name, self._plan.trial_steps) as advance:
                result = self._try(settings, order, _show(advance, self._plan.trial_steps))
            self._ledger.keep_trial(result)
            self._tell(f"{name}, rate {settings.lr:.3g}, order {order} of the data: {describe_trial(result)}")
        return result

    def _find_searched(self, settings: Settings, order: int) -> TrialResult | None:
        """Return the result of the same trial in the search, which a repetition would only reproduce."""
        done = [] if self._search is None else self._search.results
        return next((one for one in done if one.is_good and (one.settings, one.order) == (settings, order)), None)

    def _try_orders(self, settings: Settings, name: str) -> list[TrialResult]:
        """Try settings in two orders of the data; the second only if the first held up."""
        first = self._try_once(settings, 0, name)
        return [first, self._try_once(settings, 1, name)] if first.is_good else [first]

    # --- the search -------------------------------------------------------------------------------------------------

    def _search_settings(self, search: Search, curve: RateCurve, *, leads: bool) -> None:
        space = make_space(self._target, search.names, curve)
        if leads:
            search.suggest(space, dataclasses.replace(self._target.given, lr=curve.suggested))
            search.keep_curve(curve)  # last, because the other workers start once it is there
        total = self._plan.num_trials
        with self._track("search", total) as advance:

            def tell(number: int, result: TrialResult) -> None:
                advance(min(total, number + 1), describe_trial(result)[:40])
                words = result.settings.describe()
                told = ", ".join(f"{name} {words.get(name, '-')}" for name in _spread(search.names))
                self._tell(f"Trial {number}: {told}: {describe_trial(result)}")

            search.run(space, total, lambda settings, report: self._try(settings, 0, report), tell, leads=leads)

    # --- the choice -------------------------------------------------------------------------------------------------

    def _decide(self, curve: RateCurve) -> tuple[Choice, list[TrialResult]]:
        given = self._try_orders(self._target.given, "Given settings")
        works = all(one.is_good for one in given)
        if works and self._search is None and is_near(self._target.given.lr, curve.suggested):
            return keep_near(given, curve.suggested), given
        candidates = self._list_best() or [self._descend(curve, can_stay=works)]
        other: list[TrialResult] = []
        for settings in candidates:
            other = self._try_orders(settings, "Suggested settings")
            if all(one.is_good for one in other):
                break
        return choose(given, other), [*given, *other]

    def _list_best(self) -> list[Settings]:
        """Return the best settings of a search."""
        good = [] if self._search is None else [one for one in self._search.results if one.is_good]
        best = sorted(good, key=lambda one: one.score if one.score is not None else 0.0)
        return [one.settings for one in best[:NUM_CONFIRMED]]

    def _descend(self, curve: RateCurve, *, can_stay: bool) -> Settings:
        """Return the suggested rate or, if it or the given one breaks down, the best of successively lower ones."""
        best: TrialResult | None = None
        for i in range(NUM_LOWER):
            settings = dataclasses.replace(self._target.given, lr=float(f"{curve.suggested / 4**i:.4g}"))
            result = self._try_once(settings, 0, "Suggested settings")
            if result.score is not None and result.is_good:
                if best is not None and best.score is not None and result.score >= best.score:
                    break
                best = result
                if can_stay:
                    break
        return settings if best is None else best.settings


def _spread(names: tuple[str, ...]) -> list[str]:
    """Return the settings that the names of a search stand for."""
    return [one for name in names for one in (("beta1", "beta2") if name == "betas" else (name,))]


def _count_up() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


def _show(advance: Advance, total: int) -> Report:
    def report(share: float, loss: float) -> bool:
        advance(round(share * total), f"loss {loss:.4g}")
        return False

    return report


def describe_request(target: str, config: Any, plan: Plan, search: tuple[str, ...]) -> dict[str, Any]:
    """Return what must be unchanged for a tuning to be resumed."""
    return {
        "target": target,
        "config": config,
        "range_steps": plan.range_steps,
        "trial_steps": plan.trial_steps,
        "search": list(search),
    }
