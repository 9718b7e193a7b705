"""A million numbers -> a few thousand points, without losing a spike: the smallest and the largest of each bucket.

Buckets are as narrow as `max_buckets` allows: when there are more, neighbours are joined and the width doubles. So
memory is bounded, numbers may arrive bit by bit, and those of a resumed run that goes back a few steps fall into
existing buckets. Non-finite values are left out: count them elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

MAX_BUCKETS = 4096
"""Each gives two points: more than a screen has columns, so that zooming in still shows something new."""
WORTH_SLICING = 16
"""Bucket width from which min() and max() over a slice beat a loop over its values."""


class Curve:
    """Smallest and largest value of each bucket of steps."""

    def __init__(self, *, max_buckets: int = MAX_BUCKETS) -> None:
        self._max_buckets = max_buckets
        self.width = 1
        """Number of steps in a bucket."""
        self._buckets: dict[int, list[float]] = {}  # key -> [step of low, low, step of high, high]

    def extend(self, steps: Sequence[int], values: Sequence[float | None]) -> None:
        """Add values; leave out None and non-finite ones."""
        pairs = [(step, value) for step, value in zip(steps, values) if value is not None and math.isfinite(value)]
        if pairs:
            self.extend_finite(*zip(*pairs))

    def extend_finite(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add values that are known to be finite."""
        if self.width >= WORTH_SLICING and _count_up(steps):
            # The width may double meanwhile: a slice then covers part of a bucket, and its two extremes are still all
            # it needs
            for first, last in _slice_buckets(steps, self.width):
                part = values[first:last]
                low, high = min(part), max(part)
                self._add(steps[first + part.index(low)], low)
                self._add(steps[first + part.index(high)], high)
            return
        for step, value in zip(steps, values):
            self._add(step, value)

    def _add(self, step: int, value: float) -> None:
        bucket = self._buckets.get(step // self.width)
        if bucket is None:
            self._buckets[step // self.width] = [step, value, step, value]
            if len(self._buckets) > self._max_buckets:
                self._widen()
            return
        if value < bucket[1]:
            bucket[0], bucket[1] = step, value
        if value > bucket[3]:
            bucket[2], bucket[3] = step, value

    def _widen(self) -> None:
        while len(self._buckets) > self._max_buckets:  # may take several rounds if steps are far apart
            self._double()

    def _double(self) -> None:
        joined: dict[int, list[float]] = {}
        for key, bucket in self._buckets.items():
            other = joined.setdefault(key >> 1, bucket)  # the bucket itself: the old table is not used again
            if bucket[1] < other[1]:
                other[0], other[1] = bucket[0], bucket[1]
            if bucket[3] > other[3]:
                other[2], other[3] = bucket[2], bucket[3]
        self._buckets = joined
        self.width *= 2

    def join(self, other: Curve) -> None:
        """Add all that another curve holds."""
        self._widen_to(other.width)
        other._widen_to(self.width)  # changes `other`, which is used up here
        for low_step, low, high_step, high in other._buckets.values():
            self._add(int(low_step), low)
            self._add(int(high_step), high)

    def _widen_to(self, width: int) -> None:
        while self.width < width:
            self._double()

    def points(self) -> tuple[list[int], list[float]]:
        """Return steps and values, in the order of the steps."""
        pairs: list[tuple[int, float]] = []
        for key in sorted(self._buckets):
            low_step, low, high_step, high = self._buckets[key]
            pairs += sorted({(int(low_step), low), (int(high_step), high)})
        return [step for step, _ in pairs], [value for _, value in pairs]

    def spans(self) -> list[tuple[float, float]]:
        """Return (smallest, largest) of each bucket, in the order of the steps."""
        return [(self._buckets[key][1], self._buckets[key][3]) for key in sorted(self._buckets)]

    def __bool__(self) -> bool:
        return bool(self._buckets)


class Share:
    """Counts for how many steps of each bucket a condition was true."""

    def __init__(self, *, max_buckets: int = MAX_BUCKETS, width: int = 1) -> None:
        self._max_buckets, self.width = max_buckets, width
        self._buckets: dict[int, list[int]] = {}  # key -> [hits, all, first step hit]

    def extend(self, steps: Sequence[int], hits: Sequence[bool]) -> None:
        """Add steps, and whether the condition was true for each."""
        slices = _slice_buckets(steps, self.width) if _count_up(steps) else ((i, i + 1) for i in range(len(steps)))
        for first, last in slices:
            num_hits = sum(hits[first:last])
            self._add(steps[first + hits[first:last].index(True) if num_hits else first], num_hits, last - first)

    def _add(self, step: int, num_hits: int, num_steps: int) -> None:
        """Add to a bucket; `step` is where the condition was first true, if it was."""
        bucket = self._buckets.setdefault(step // self.width, [0, 0, step])
        if num_hits:
            # Without a hit so far, bucket[2] only holds the step that made the bucket
            bucket[2] = min(bucket[2], step) if bucket[0] else step
        bucket[0] += num_hits
        bucket[1] += num_steps
        while len(self._buckets) > self._max_buckets:
            self._widen()

    def _widen(self) -> None:
        joined: dict[int, list[int]] = {}
        for key, bucket in self._buckets.items():
            other = joined.setdefault(key >> 1, bucket)
            if other is not bucket:  # else it was put there just now, and adding it would count it twice
                hit_steps = [one[2] for one in (other, bucket) if one[0]]
                other[:] = [other[0] + bucket[0], other[1] + bucket[1], min(hit_steps or [other[2]])]
        self._buckets = joined
        self.width *= 2

    def join(self, other: Share) -> None:
        """Add all that another holds."""
        while self.width != other.width:
            (self if self.width < other.width else other)._widen()
        for num_hits, num_steps, step in other._buckets.values():
            self._add(step, num_hits, num_steps)

    def points(self) -> tuple[list[int], list[float]]:
        """Return the middle of each bucket, and the share there.

        A last bucket that is less than half as full as the one before is counted with that one: one of its four steps
        would be drawn as a peak of 25 %.
        """
        keys = sorted(self._buckets)
        counts = [self._buckets[key][:2] for key in keys]
        if len(keys) > 1 and 2 * counts[-1][1] < counts[-2][1]:
            (hits, steps), _ = counts.pop(), keys.pop()
            counts[-1] = [counts[-1][0] + hits, counts[-1][1] + steps]
        middle = self.width // 2
        return [key * self.width + middle for key in keys], [hits / steps for hits, steps in counts]

    def hits(self) -> list[tuple[int, int]]:
        """Return (first step, count) for each bucket in which the condition was ever true."""
        buckets = (self._buckets[key] for key in sorted(self._buckets))
        return [(step, num_hits) for num_hits, _, step in buckets if num_hits]


class Clock:
    """Seconds since the start at a bounded number of steps, evenly spread; between them, interpolate."""

    def __init__(self, *, max_points: int = 400) -> None:
        self._max_points, self._width = max_points, 1
        self._points: dict[int, tuple[int, float]] = {}  # key -> the last step in its bucket, and its time

    def extend(self, steps: Sequence[int], seconds: Sequence[float]) -> None:
        """Add the time at each step."""
        for i in (*range(0, len(steps) - 1, max(1, self._width // 2)), len(steps) - 1):
            self._points[steps[i] // self._width] = (steps[i], seconds[i])
            while len(self._points) > self._max_points:
                self._width *= 2
                # In the order of the steps, so that the last one of each wider bucket stays
                self._points = {step // self._width: (step, time) for step, time in sorted(self._points.values())}

    def join(self, other: Clock, offset: float) -> None:
        """Add the times of another, that many seconds later."""
        steps, seconds = other.points()
        for step, time in zip(steps, seconds):
            self.extend([step], [offset + time])

    def points(self) -> tuple[list[int], list[float]]:
        """Return steps and seconds, in the order of the steps."""
        known = sorted(self._points.values())
        return [step for step, _ in known], [time for _, time in known]


def _count_up(steps: Sequence[int]) -> bool:
    """Return whether the steps are consecutive, as in a run that records them all."""
    return len(steps) > 0 and tuple(steps) == tuple(range(steps[0], steps[0] + len(steps)))


def _slice_buckets(steps: Sequence[int], width: int) -> Iterator[tuple[int, int]]:
    """Yield where each bucket begins and ends in consecutive steps."""
    start = steps[0]
    edges = range((start // width + 1) * width - start, len(steps), width)
    yield from pairwise((0, *edges, len(steps)))
