"""EditWatch: did the program itself change the weights, between two steps or inside the optimizer's?

Pruning, a re-initialised head, `load_state_dict`, averaging, a clamp: all go through torch and advance a tensor's
version counter, which only our own step should do. A hook of the optimizer that resets weights writes more often than a
step does. Such a change is intended. Corrupted memory does not advance the counter, and neither does a write through
`.data`. Costs two reads of a counter per parameter and step, and no wait.
"""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

USUAL_STEPS = 50
"""Steps whose writes are what the optimizer usually does: Lookahead's average every five or ten belongs to it."""

_read_version = operator.attrgetter("_version")


class EditWatch:
    """Notes the steps before which the program changed a trained parameter."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        # Inference tensors have no version counter.
        self._parameters = [p for _, p in named if not p.is_inference()]
        self._versions: tuple[int, ...] | None = None
        self._before: tuple[int, ...] | None = None
        self._num_writes: deque[int] = deque(maxlen=USUAL_STEPS)  # the most that each step made to one parameter
        self.last: int | None = None
        """The step before which the weights were last changed; None if never."""

    def before_optimizer(self, step: int) -> bool:
        """Return whether the weights were changed since our last step."""
        self._before = self._read()
        if self._versions is None or self._versions == self._before:
            return False
        self.last = step
        return True

    def after_optimizer(self, step: int) -> None:
        """Remember the counters after our own step, and notice one that wrote more often than the last steps did."""
        self._versions, before = self._read(), self._before
        if before is None or not before:
            return
        num = max(map(operator.sub, self._versions, before))
        if len(self._num_writes) == USUAL_STEPS and num > max(self._num_writes):
            self.last = step + 1
        self._num_writes.append(num)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Ignore changes inside this context: we make them ourselves, and undo them."""
        # A change by the program before this context must still be seen after it.
        was_changed = self._versions is not None and self._versions != self._read()
        try:
            yield
        finally:
            if self._versions is not None and not was_changed:
                self._versions = self._read()

    def forget(self) -> None:
        """Start afresh with the next step, after we put the weights back ourselves."""
        self._versions = None

    def _read(self) -> tuple[int, ...]:
        return tuple(map(_read_version, self._parameters))
