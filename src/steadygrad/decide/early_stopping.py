"""EarlyStopping: validation losses -> whether to go on. Pure; a non-finite loss is neither better nor worse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from steadygrad.errors import ConfigError


class EarlyStopping:
    """Says stop after `patience` validations in a row that were not better than the best one by `min_delta`.

    >>> stopping = EarlyStopping(patience=2)
    >>> [stopping.observe(step, loss) for step, loss in enumerate([1.0, 0.5, 0.6, 0.7])]
    [False, False, False, True]
    >>> stopping.best, stopping.best_step
    (0.5, 1)
    """

    def __init__(self, *, patience: int = 10, min_delta: float = 0.0) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ConfigError(f"EarlyStopping.patience must be a whole number above 0, got {patience!r}. Use 10.")
        if not min_delta >= 0 or math.isinf(min_delta):  # so written that NaN is refused
            raise ConfigError(f"EarlyStopping.min_delta must be 0 or a positive number, got {min_delta!r}. Use 0.0.")
        self.patience, self.min_delta = patience, min_delta
        self.best: float | None = None
        """The lowest validation loss so far."""
        self.best_step: int | None = None
        """The step at which it was observed: the weights to keep."""
        self.num_bad = 0
        """Finite validations since the last one that was better by `min_delta`."""
        self._mark: float | None = None

    @property
    def should_stop(self) -> bool:
        """Whether patience has run out."""
        return self.num_bad >= self.patience

    def observe(self, step: int, loss: float) -> bool:
        """Record one validation loss and return whether to stop."""
        if not math.isfinite(loss):
            return self.should_stop
        # Many small gains add up to one that counts, so patience compares with its own mark, not with the best loss.
        if self._mark is None or loss < self._mark - self.min_delta:
            self._mark, self.num_bad = loss, 0
        else:
            self.num_bad += 1
        if self.best is None or loss < self.best:
            self.best, self.best_step = loss, step
        return self.should_stop

    def state_dict(self) -> dict[str, Any]:
        """Return the best loss, its step, and how long ago it was."""
        return {"best": self.best, "best_step": self.best_step, "num_bad": self.num_bad, "mark": self._mark}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned."""
        self.best, self.best_step = state["best"], state["best_step"]
        self._mark, self.num_bad = state["mark"], int(state["num_bad"])
