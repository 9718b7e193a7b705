"""Defines the step at which a run became unstable, or None, from its numbers alone; nothing is fitted.

A run becomes unstable at the first step at which either
- the loss is NaN or Inf, or the gradient is and no loss scaler is active; with a scaler, `OVERFLOWS` steps in a row
  after the first good one (a single overflow is part of the scaler's search); or
- the loss, smoothed by a trailing median of 5, rises above `FACTOR` times its running best *and* has lost at least
  `SHARE` of the progress since the start, stays there for `PATIENCE` steps, and does not come back: it is above that
  bound at `STAY` of all later steps. The step returned is the first of the losses that were that high.

A rise that ends in NaN or Inf counts from the beginning of the rise. A rise too late to be confirmed (`PATIENCE` steps
before the end) is not an instability; to use the steps of a stable run as healthy ones, leave out a horizon at its end.
"""

from __future__ import annotations

import numpy as np

FACTOR, SHARE, PATIENCE, STAY, OVERFLOWS = 2.0, 0.25, 16, 0.8, 8


def find_onset(losses: np.ndarray, norms: np.ndarray, scales: np.ndarray) -> int | None:
    """Return the step at which the run became unstable; `scales` are NaN without a loss scaler."""
    end = find_nonfinite(losses, norms, scales)
    if end is None:
        return find_divergence(losses)
    ruined = np.concatenate([losses[:end], np.full(PATIENCE, np.inf)])  # a rise that ends in Inf began before it
    return find_divergence(ruined)


def find_nonfinite(losses: np.ndarray, norms: np.ndarray, scales: np.ndarray) -> int | None:
    """Return the first step that is not finite and not part of the scaler's search."""
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
    """Return the first step of a rise of the loss that is never undone; losses are finite or Inf."""
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
    """Return the first high loss: the trailing median sees a rise two steps late."""
    while t > 0 and losses[t - 1] > bound:
        t -= 1
    return t
