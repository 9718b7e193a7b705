"""Rules of one number that the forecast is compared with. They score each step from a run's finite losses and norms.

They are rated like the forecast, each with a threshold chosen on the same programs for the same false alarms. A score
uses only this step and those before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from traces import Run, Steps

Score = Callable[[np.ndarray, np.ndarray], np.ndarray]
FEWEST = 12
"""Values that a window needs before its spread is meaningful."""


def look_back(values: np.ndarray, window: int) -> np.ndarray:
    """Return [steps, window]: the values before each step, NaN before the start."""
    padded = np.concatenate([np.full(window, np.nan), values])
    return np.lib.stride_tricks.sliding_window_view(padded, window)[: len(values)]


def deviate(values: np.ndarray, window: int, least: float) -> np.ndarray:
    """Return standard deviations above the mean of the `window` values before; 0 while there are too few."""
    past = look_back(values, window)[FEWEST:]
    score = (values[FEWEST:] - np.nanmean(past, axis=1)) / np.maximum(np.nanstd(past, axis=1), least)
    return np.concatenate([np.zeros(len(values[:FEWEST])), score])


def average(values: np.ndarray, num_steps: float) -> np.ndarray:
    """Return an exponential average over about this many steps."""
    share, smooth = 1.0 / num_steps, values[:1].tolist()
    for value in values[1:].tolist():
        smooth.append(smooth[-1] + share * (value - smooth[-1]))
    return np.array(smooth)


def cusum_of_norm(losses: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """One-sided: sums of (z - 0.5) that never go below 0, z of the log norm from the last 64."""
    z = np.minimum(deviate(np.log(np.maximum(norms, 1e-30)), 64, 0.02), 10.0)
    return np.array(list(itertools.accumulate(z.tolist(), lambda total, one: max(0.0, total + one - 0.5))))


def norm_threshold(losses: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """The norm itself: one threshold for all runs, like `if norm > 100`."""
    return norms


def norm_over_median(losses: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """The norm over the median of the 64 before."""
    usual = np.concatenate([norms[:1], np.nanmedian(look_back(norms, 64)[1:], axis=1)])
    return norms / np.maximum(usual, 1e-30)


def loss_above_best(losses: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """A moving average of the loss over its lowest value so far."""
    smooth = average(losses, 4)
    return smooth / np.maximum(np.minimum.accumulate(smooth), 1e-12)


def loss_deviations(losses: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Standard deviations above the mean of the last 128 losses, as in OLMo-core."""
    return deviate(losses, 128, 1e-12)


def loss_trend(losses: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """An average of the log loss over 4 steps minus one over 32."""
    logs = np.log(np.maximum(losses, 1e-12))
    return average(logs, 4) - average(logs, 32)


RIVALS: dict[str, Score] = {
    "CUSUM on the norm": cusum_of_norm,
    "norm threshold": norm_threshold,
    "norm over its median": norm_over_median,
    "loss above its best": loss_above_best,
    "loss, standard deviations": loss_deviations,
    "loss trend": loss_trend,
}


def score_rival(rival: Score, runs: list[Run], steps: Steps) -> np.ndarray:
    """Return the rival's score at each of the judged steps; it never sees non-finite steps."""
    scores = np.zeros(len(steps.run))
    borders = np.flatnonzero(np.diff(steps.run, prepend=-1, append=-1))
    for begin, end in itertools.pairwise(borders):
        rows = runs[steps.run[begin]].rows[: steps.step[end - 1] + 1].astype(float)
        good = np.isfinite(rows[:, 0]) & np.isfinite(rows[:, 1]) & (rows[:, 5] == 0)
        run_scores = np.zeros(len(rows))
        run_scores[good] = rival(rows[good, 0], rows[good, 1])
        scores[begin:end] = run_scores[steps.step[begin:end]]
    return scores
