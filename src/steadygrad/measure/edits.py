"""EditWatch: did the program itself change the weights between two steps?

Pruning, a re-initialised head, `load_state_dict`, averaging, a clamp: all go through torch and advance a tensor's
version counter, which only our own step should do. Such a change is intended. Corrupted memory does not advance the
counter, and neither does a write through `.data`. Costs two reads of a counter per parameter and step, and no wait.
"""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

HABIT = 3
"""This many changes within `WINDOW` steps count as part of the training: a clamp, an average every few steps."""
WINDOW = 200

_read_version = operator.attrgetter("_version")


class EditWatch:
    """Notes the steps before which the program changed a trained parameter."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        # Inference tensors have no version counter.
        self._parameters = [p for _, p in named if not p.is_inference()]
        self._versions: tuple[int, ...] | None = None
        self._recent: deque[int] = deque(maxlen=HABIT)
        self.last: int | None = None
        """The step before which the weights were last changed; None if never."""

    def before_optimizer(self, step: int) -> bool:
        """Return whether the weights were changed since our last step."""
        if not self._is_changed:
            return False
        self.last = step
        self._recent.append(step)
        return True

    def after_optimizer(self) -> None:
        """Remember the counters after our own step."""
        self._versions = tuple(map(_read_version, self._parameters))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Ignore changes inside this context: we make them ourselves, and undo them."""
        # A change by the program before this context must still be seen after it.
        was_changed = self._is_changed
        try:
            yield
        finally:
            if self._versions is not None and not was_changed:
                self.after_optimizer()

    @property
    def _is_changed(self) -> bool:
        return self._versions is not None and self._versions != tuple(map(_read_version, self._parameters))

    def forget(self) -> None:
        """Start afresh with the next step, after we put the weights back ourselves."""
        self._versions = None

    def is_habit(self, step: int) -> bool:
        """Return whether the program keeps changing the weights."""
        return len(self._recent) == HABIT and step - self._recent[0] <= WINDOW
