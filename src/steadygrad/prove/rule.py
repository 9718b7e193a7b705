"""Losses of two sets of weights on the same batches -> were the present weights harmed? Pure numbers.

The level of a loss alone says nothing about the weights: data, targets and objective move it too. But they affect both
sets of weights alike, so only the difference counts, and it must be large, on every batch, and a real share of what the
run had learned: a loss that goes from 1e-9 to 1e-6 for a while is a thousand times worse and yet harmless.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from steadygrad.config import ProveConfig

AHEAD = 0.8
"""Share of batches on which a second try must be ahead: 13 of 16 happen by chance once in a hundred times."""
DISSENT, MOST_DISSENT = 8, 4
"""One batch in this many need not be worse; where weights may be wrecked, one in the latter."""
WRECKED = 4.0
"""Multiple of the untrained weights' loss that only wrecked weights have."""
LEARNT = 0.3
"""A run has learned something once its loss is below this share of the first, however its first steps went."""
NOTABLE = 0.01
"""Harm below this share of what was learned does not count: losses on memorised data jump from 1e-14 to 1e-5."""

CURVATURE = 0.25
"""Share by which the slope of a loss may differ between its gradient and two of its values near by."""


def is_worse(now: Sequence[float], then: Sequence[float], *, ratio: float, dissent: int = DISSENT) -> bool:
    """Return whether the present weights are `ratio` times as bad; for losses that may be negative, just worse.

    This must hold on every batch, but one in `dissent` may dissent: wrecked weights are sometimes right about a small
    batch. A non-finite present loss counts as infinitely bad; a non-finite earlier one proves nothing.
    """
    if not now or not all(map(math.isfinite, then)):
        return False
    pairs = [(a if math.isfinite(a) else math.inf, b) for a, b in zip(now, then)]
    positive = all(b > 0 for _, b in pairs)
    num_worse = sum(a > b and (not positive or a >= ratio * b) for a, b in pairs)
    return num_worse >= len(now) - len(now) // dissent and _mean(now) > _mean(then)


def is_damaged(now: Sequence[float], then: Sequence[float], first: Sequence[float], *, config: ProveConfig) -> bool:
    """Return whether the present weights were harmed; `first`: losses of the initial weights on the same batches, NaN
    if unknown."""
    if not is_worse(now, then, ratio=config.ratio):
        return _is_wrecked(now, then, first, config=config)
    if any(map(math.isnan, first)):
        return True
    learnt = _mean(first) - _mean(then)
    if learnt <= 0:  # new data, unknown to the earlier weights: compare with having learned nothing
        return is_worse(now, first, ratio=config.ratio)
    return _mean(now) - _mean(then) >= config.share * learnt


def _is_wrecked(now: Sequence[float], then: Sequence[float], first: Sequence[float], *, config: ProveConfig) -> bool:
    """Return whether the present weights are several times worse than untrained ones, where the earlier ones are good.

    A network that has collapsed to one class is right about a small batch that holds no other: one in four may dissent.
    """
    if not all(v > 0 and math.isfinite(v) for v in (*then, *first)):
        return False
    is_learnt = bool(then) and _mean(then) <= LEARNT * _mean(first)
    is_wrecked = is_learnt and _mean(now) >= WRECKED * _mean(first)
    return is_wrecked and is_worse(now, then, ratio=config.ratio, dissent=MOST_DISSENT)


def is_hit(now: Sequence[float], then: Sequence[float], began_at: float, *, config: ProveConfig) -> bool:
    """Return whether one step did harm worth a look; `began_at`: the run's first loss, NaN if unknown."""
    if not is_worse(now, then, ratio=2 * config.ratio):  # a single batch is noisier than eight
        return False
    share = NOTABLE if min(then) > 0 else config.share  # a ratio means nothing for losses that may be negative
    # So written that an unknown start, NaN, counts as harm.
    return not find_excess(now, then) < share * abs(began_at - _mean(then))


def is_spike_of_weights(now: Sequence[float], then: Sequence[float], limit: float) -> bool:
    """Return whether a spike, a loss above `limit`, is one to the present weights and none to earlier ones.

    A batch that is a spike to both is to blame itself; one that is a spike to neither has been learnt meanwhile.
    """
    return _mean(then) <= limit < _mean(now)


def is_worse_than_start(now: Sequence[float], first: Sequence[float], *, config: ProveConfig) -> bool:
    """Return whether the present weights are worse than the initial ones: more was lost than was ever learned.

    A loss that may be negative can begin at any number, so no share of it says how much worse is much: it proves
    nothing until it is infinite.
    """
    if not is_worse(now, first, ratio=1.0):
        return False
    excess = find_excess(now, first)
    return math.isinf(excess) or (min(*first, *now) > 0 and excess >= config.excess * _mean(first))


def is_slope(by_gradient: float, by_values: float) -> bool:
    """Return whether a gradient is the slope of the loss: both predict the same change, up to its curvature."""
    if not (math.isfinite(by_gradient) and math.isfinite(by_values)):
        return False
    return abs(by_gradient - by_values) <= CURVATURE * max(abs(by_gradient), abs(by_values))


def is_rate_too_high(now: Sequence[float], lower: Sequence[float], first: float, *, config: ProveConfig) -> bool:
    """Return whether a lower rate, started from the initial weights on the same batches, is clearly ahead of the run.

    A run that has come down from `first`, its very first loss, by itself needs no help.
    """
    if len(now) < 2 or not all(map(math.isfinite, lower)):
        return False
    if not all(map(math.isfinite, now)):
        return True
    if _mean(now) < LEARNT * first or not _leads(now, lower):
        return False
    return find_excess(now, lower) >= config.lead * abs(_mean(now))


def is_held_back(now: Sequence[float], fresh: Sequence[float], began_at: float, *, config: ProveConfig) -> bool:
    """Return whether earlier weights, trained on the same batches, are far ahead: then the data is not to blame.

    `began_at` is their loss before that: the run must lack a real share of what they learned. Losses that may be
    negative allow no ratio, and prove nothing.
    """
    if not all(v > 0 for v in fresh) or not _leads(now, fresh):
        return False
    lacks = find_excess(now, fresh)
    return _mean(now) >= config.fresh_ratio * _mean(fresh) and lacks >= config.lead * (began_at - _mean(fresh))


def _leads(now: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether the other side is ahead on nearly every batch; both train, so a few may go either way."""
    return sum(b < a or not math.isfinite(a) for a, b in zip(now, other)) >= AHEAD * len(now)


def find_excess(now: Sequence[float], then: Sequence[float]) -> float:
    """Return how much worse the present weights are, on average."""
    return _mean(now) - _mean(then)


def _mean(values: Sequence[float]) -> float:
    # NaN and -inf count as infinitely bad: as they are, they would fail every comparison, or pass for the best loss.
    return sum(v if math.isfinite(v) else math.inf for v in values) / len(values)
