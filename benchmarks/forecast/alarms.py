"""Turns the scores of steps into alarms and rates them. The forecast and the rules it is compared with share this code.

An alarm begins when the score has reached the threshold `patience` times in a row, and lasts until the score has stayed
below it for `horizon` steps; it is reported once. An alarm that lasts into the last `horizon` steps before the onset is
a forecast, and its lead is the number of steps from its beginning to the onset; every other alarm is false. Healthy
steps are those of stable runs and those further than `horizon` from the onset.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from traces import Run, Steps


@dataclass(frozen=True)
class Alarms:
    """What one rule did on many runs."""

    num_false: int
    num_healthy_steps: int
    leads: list[int]
    """Leads of the onsets that were forecast."""
    num_onsets: int
    """Number of onsets in runs with at least one judged step before them."""

    @property
    def false_per_1000(self) -> float:
        return 1000.0 * self.num_false / max(1, self.num_healthy_steps)

    @property
    def share_forecast(self) -> float:
        return len(self.leads) / max(1, self.num_onsets)


def find_episodes(high: np.ndarray, steps: np.ndarray, *, patience: int, quiet: int) -> list[tuple[int, int]]:
    """Return the first and last step of each alarm."""
    episodes: list[list[int]] = []
    length = 0
    for step, is_high in zip(steps.tolist(), high.tolist()):
        length = length + 1 if is_high else 0
        if length < patience:
            continue
        if episodes and step - episodes[-1][1] <= quiet + 1:
            episodes[-1][1] = step
        else:
            episodes.append([step, step])
    return [(first, last) for first, last in episodes]


def judge_alarms(
    scores: np.ndarray, threshold: float, steps: Steps, runs: Sequence[Run], horizon: int, *, patience: int
) -> Alarms:
    """Judge every alarm of every run."""
    high = scores >= threshold
    borders = np.flatnonzero(np.diff(steps.run, prepend=-1, append=-1))
    num_false, leads, num_onsets = 0, [], 0
    for begin, end in itertools.pairwise(borders):
        onset = runs[steps.run[begin]].onset
        num_onsets += onset is not None
        if not high[begin:end].any():
            continue
        episodes = find_episodes(high[begin:end], steps.step[begin:end], patience=patience, quiet=horizon)
        right = [] if onset is None else [first for first, last in episodes if last >= onset - horizon]
        num_false += len(episodes) - len(right)
        if right and onset is not None:
            leads.append(onset - right[0])
    return Alarms(num_false, int((steps.left > horizon).sum()), leads, num_onsets)


def choose_threshold(
    scores: np.ndarray, steps: Steps, runs: Sequence[Run], horizon: int, *, patience: int, budget: float
) -> float:
    """Return the lowest threshold with at most `budget` false alarms per 1000 healthy steps."""
    candidates = np.unique(np.quantile(scores, 1.0 - np.logspace(-5, -0.5, 60)))
    low, high = 0, len(candidates) - 1
    while low < high:  # a higher threshold gives fewer alarms, except that a low one may merge several
        middle = (low + high) // 2
        alarms = judge_alarms(scores, float(candidates[middle]), steps, runs, horizon, patience=patience)
        low, high = (low, middle) if alarms.false_per_1000 <= budget else (middle + 1, high)
    return float(candidates[low])
