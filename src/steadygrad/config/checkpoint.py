"""CheckpointConfig: when checkpoints are written, which ones stay, and what makes one good."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steadygrad.config.checks import is_number, is_whole, require, require_booleans, require_whole


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What a CheckpointStore keeps, and when a Guard saves by itself."""

    every: int | None = None
    """Steps between two saves that a Guard makes by itself; None: only `guard.save()` and signals save."""
    keep_last: int = 3
    """How many of the newest checkpoints to keep."""
    keep_best: int = 1
    """How many checkpoints with the lowest `best_by` to keep as well."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this are never removed; None: no such rule."""
    best_by: str = "val_loss"
    """The metric that makes a checkpoint the best one; lower is better, and a non-finite one never counts."""
    good_after: int = 20
    """Healthy steps beyond a checkpoint before it counts as good; 0: it does as soon as it is on disk."""
    asynchronous: bool = True
    """True: a save returns when the state has been copied to host memory, and a thread writes it."""
    clean: bool = False
    """True: non-finite values are replaced in the saved copy, which is marked as cleaned. False: such a state is
    refused."""
    clean_value: float = 0.0
    """What `clean` writes in their place."""
    signals: bool = True
    """Whether a Guard with a run directory answers SIGTERM and SIGINT by finishing the step, saving and exiting."""

    def __post_init__(self) -> None:
        require_booleans(self)
        require_whole(self, "keep_last", least=1, hint="After a crash, the newest one is all you have. Use 3.")
        for name in ("keep_best", "good_after"):
            require_whole(self, name, least=0, hint="0 switches it off.")
        for name in ("every", "keep_every"):
            value = getattr(self, name)
            fits = value is None or (is_whole(value) and value > 0)
            require(fits, self, name, "be None or a whole number above 0", "For example 1000.")
        text = isinstance(self.best_by, str) and bool(self.best_by)
        require(text, self, "best_by", "be the name of a metric", 'Use "val_loss".')
        fits = is_number(self.clean_value) and math.isfinite(self.clean_value)
        require(fits, self, "clean_value", "be a finite number", "Use 0.0.")
