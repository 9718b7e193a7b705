"""OutlierClip: scale the gradients of a step only when their norm is many times what is usual in this run.

Usual is what all but one in 32 of the last `window` healthy norms stayed below, at the time when that was highest. Not
their median: where episodes grow longer, or a new loss term starts, norms rise a hundredfold within steps and swing by
more than ten times the median, and that is healthy training. Not the present ones alone: where most samples are learnt,
norms fall to almost nothing, and a rare one has the norm that every sample had at first; clipping it would keep what is
rare from ever being learnt. An outlier does not count towards what is usual, unless `warmup` of them have come and
outnumber the usual norms in between: then they are the new usual.

The norms are kept on the host: each step's arrives there anyway, and the threshold goes into the measuring kernel as a
plain number, so that clipping costs no launch and no wait. A step's threshold uses the norms up to the step before
last, however fast the device is, so equal runs clip alike. Nothing is clipped until `warmup` norms are known.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steadygrad.clip.base import limit
from steadygrad.config import OutlierClip
from steadygrad.measure import Measurement

NO_LIMIT = 3e38
"""Above every norm, and still a float32: infinity would make the coefficient of an infinite norm NaN."""

EPS = 1e-6
RARE = 32
"""One in this many norms may be an outlier. Actor-critics, with norms up to 100 times the median, then have none."""


class OutlierClipper:
    """The last usual norms by time and by size, recent outliers, and one norm that is too new to count."""

    edits_gradients = False

    def __init__(self, settings: OutlierClip) -> None:
        self._settings = settings
        self._norms: deque[float] = deque()
        self._sorted: list[float] = []
        self._outliers: deque[float] = deque()
        self._newest: tuple[int, float] | None = None
        self._highest = 0.0  # of what has been usual so far
        self._threshold: float | None = None  # None when the norms have changed since
        self.constant_norm: float | None = NO_LIMIT

    def clip(self, m: Measurement) -> Tensor:
        """Return the factor for all gradients."""
        return limit(m.norm, torch.tensor(self.constant_norm or NO_LIMIT, dtype=torch.float64, device="cpu"))

    def prepare(self, step: int) -> None:
        """Set the threshold of `step`."""
        if self._newest is not None and self._newest[0] <= step - 2:
            self._admit(self._newest[1])
            self._newest = None
        # The kernels divide by norm + 1e-6, as torch does. Without the same above the line, all norms far below 1e-6
        # would be clipped to nearly nothing.
        self.constant_norm = self._find_threshold() + EPS

    def hear(self, step: int, norm: float) -> None:
        """Record a healthy step's norm before clipping; call in step order."""
        if self._newest is not None:
            self._admit(self._newest[1])
        self._newest = (step, norm) if 0 < norm < math.inf else None

    def _admit(self, norm: float) -> None:
        if norm > self._find_threshold():
            self._outliers.append(norm)
            if len(self._outliers) >= self._settings.warmup:
                self._norms, self._sorted, self._outliers = self._outliers, sorted(self._outliers), deque()
                self._threshold = None
            return
        if self._outliers:
            self._outliers.popleft()
        self._threshold = None
        self._norms.append(norm)
        bisect.insort(self._sorted, norm)
        if len(self._norms) > self._settings.window:
            # The very number is there: both lists hold the same ones.
            del self._sorted[bisect.bisect_left(self._sorted, self._norms.popleft())]

    def _find_threshold(self) -> float:
        if self._threshold is None:
            num = len(self._sorted)
            is_known = len(self._norms) >= self._settings.warmup
            if is_known:
                self._highest = max(self._highest, self._sorted[num - 1 - num // RARE])
            self._threshold = min(NO_LIMIT, self._settings.ratio * self._highest) if is_known else NO_LIMIT
        return self._threshold

    def state_dict(self) -> dict[str, Any]:
        """Return the norms; empty before the first step."""
        newest = {} if self._newest is None else {"newest": list(self._newest)}
        outliers = {"outliers": list(self._outliers)} if self._outliers else {}
        highest = {"highest": self._highest} if self._highest else {}
        return {"norms": list(self._norms), **highest, **outliers, **newest} if self._norms or newest else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned."""
        self._norms = deque(float(norm) for norm in state.get("norms", ()))
        self._sorted, self._threshold = sorted(self._norms), None
        self._outliers = deque(float(norm) for norm in state.get("outliers", ()))
        self._highest = float(state.get("highest", 0.0))
        newest = state.get("newest")
        self._newest = None if newest is None else (int(newest[0]), float(newest[1]))
