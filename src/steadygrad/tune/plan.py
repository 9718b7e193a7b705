"""Plan: how many steps a tuning takes, so that it costs a tenth of the training if its length is known. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from steadygrad.errors import UsageError

SHARE = 0.1
"""Share of the whole training's steps to spend on all trials together."""
RANGE_STEPS = (30, 100)
"""Least and most steps of the range test."""
TRIAL_STEPS = (12, 200)
"""Least and most steps of a trial."""
NUM_TRIALS = (4, 20)
"""Least and most trials of a search if the user sets no number."""
NUM_COMPARED = 4
"""Trials outside the search: the given settings and the chosen ones, each in two orders of the data."""
BELOW, ABOVE = 1e4, 300.0
"""The range test goes from the given rate divided by BELOW to the given rate times ABOVE: even for a rate a hundred
times too high, the start must be low enough that nothing happens yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Number of steps of each part."""

    range_steps: int
    trial_steps: int
    num_trials: int
    """Number of trials of the search; 0 for no search."""

    @property
    def num_steps(self) -> int:
        """Total number of steps if no trial breaks down or is given up."""
        return self.range_steps + (NUM_COMPARED + self.num_trials) * self.trial_steps


def make_plan(num_steps: int | None, *, trials: int | None, steps: int | None) -> Plan:
    """Plan a tuning. `num_steps`: of the whole training, if known; `trials` of a search and `steps` of a trial, if the
    user sets them; `trials=0` means no search."""
    if trials is not None and trials < 0:
        raise UsageError(f"--trials must not be negative, got {trials}. {NUM_TRIALS[1]} is a good number.")
    if steps is not None and steps < TRIAL_STEPS[0]:
        raise UsageError(f"--steps must be at least {TRIAL_STEPS[0]} for a trial to say something, got {steps}.")
    if num_steps is None:
        return Plan(
            range_steps=RANGE_STEPS[1], trial_steps=steps or 50, num_trials=NUM_TRIALS[1] if trials is None else trials
        )
    budget = SHARE * num_steps
    range_steps = _bound(budget / 3 if trials == 0 else budget / 6, RANGE_STEPS)
    if trials is None:
        trials = _bound((budget - range_steps) / (steps or TRIAL_STEPS[0]) - NUM_COMPARED, NUM_TRIALS)
    trial_steps = _bound((budget - range_steps) / (NUM_COMPARED + trials), TRIAL_STEPS)
    return Plan(range_steps=range_steps, trial_steps=steps or trial_steps, num_trials=trials)


def _bound(value: float, limits: tuple[int, int]) -> int:
    return max(limits[0], min(limits[1], int(value)))
