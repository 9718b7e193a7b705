"""A run's numbers -> the step at which it became unstable, or None: the definition, with nothing fitted.

A run becomes unstable at the first step at which either
- the loss is NaN or Inf, or the gradient is and no loss scaler is at work; with one, `OVERFLOWS` steps in a row after
  the first good one (a single overflow is the scaler's search); or
- the loss, smoothed by a trailing median of 5, rises above `FACTOR` times its running best *and* has lost at least
  `SHARE` of the progress since the start, stays there for `PATIENCE` steps, and does not come back: it is above that
  bound at `STAY` of all later steps. The step told is the first of the losses that were that high.

A rise that ends in NaN or Inf counts from where the rise began. What is seen too late to be confirmed (`PATIENCE` steps
before the end) is no instability; who uses a stable run's steps as healthy ones must leave out a horizon at its end.
"""

from __future__ import annotations

import numpy as np

FACTOR, SHARE, PATIENCE, STAY, OVERFLOWS = 2.0, 0.25, 16, 0.8, 8


def find_onset(losses: np.ndarray, norms: np.ndarray, scales: np.ndarray) -> int | None:
    """The step at which the run became unstable; `scales` are NaN where there is no loss scaler."""
    end = find_nonfinite(losses, norms, scales)
    if end is None:
        return find_divergence(losses)
    ruined = np.concatenate([losses[:end], np.full(PATIENCE, np.inf)])  # what rises into an Inf rose before it
    return find_divergence(ruined)


def find_nonfinite(losses: np.ndarray, norms: np.ndarray, scales: np.ndarray) -> int | None:
    """The first step that is not finite and no search of the scaler."""
    in_a_row, began = 0, False
    for t, (loss, norm, scale) in enumerate(zip(losses, norms, scales)):
        if not np.isfinite(loss) or (not np.isfinite(norm) and np.isnan(scale)):
            return t
        if np.isfinite(norm):
            in_a_row, began = 0, True
        else:
            in_a_row += 1
            if began and in_a_row == OVERFLOWS:
                return t - OVERFLOWS + 1
    return None


def find_divergence(losses: np.ndarray) -> int | None:
    """The first step of a rise of the loss that is not undone; losses are finite or Inf."""
    if len(losses) < PATIENCE:
        return None
    smooth = np.array([np.median(losses[max(0, t - 4) : t + 1]) for t in range(len(losses))])
    start, best = float(np.median(losses[:5])), np.minimum.accumulate(smooth)
    if not np.isfinite(start):
        return int(np.flatnonzero(~np.isfinite(losses))[0])
    bound = np.maximum(FACTOR * best, best + SHARE * (start - best))
    for t in np.flatnonzero(smooth > bound):
        later = smooth[t:] > bound[t]
        if len(later) >= PATIENCE and later[:PATIENCE].all() and later.mean() >= STAY:
            return _walk_back(losses, int(t), float(bound[t]))
    return None


def _walk_back(losses: np.ndarray, t: int, bound: float) -> int:
    """The trailing median sees a rise two steps late; the first high loss is where it began."""
    while t > 0 and losses[t - 1] > bound:
        t -= 1
    return t
