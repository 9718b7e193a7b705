"""EditWatch: did the program itself change the weights between two steps?

Pruning, a re-initialised head, `load_state_dict`, averaging, a clamp: all of them go through torch and move a tensor's
version counter, which ours alone moves inside a step. Such a change is the program's will. Corrupted memory moves no
counter, and neither does a write through `.data`. Two reads of a counter for each parameter a step, no wait.
"""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

HABIT = 3
"""Changes within the last `WINDOW` steps that make them a part of the training: a clamp, an average every few steps."""
WINDOW = 200

_read_version = operator.attrgetter("_version")


class EditWatch:
    """Notes the steps before which somebody else changed a trained parameter."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._parameters = [p for _, p in named if not p.is_inference()]
        self._versions: tuple[int, ...] | None = None
        self._recent: deque[int] = deque(maxlen=HABIT)
        self.last: int | None = None
        """The step before which the weights were last changed; None: never."""

    def before_optimizer(self, step: int) -> bool:
        """Whether the weights were changed since the last step of ours."""
        if not self._is_changed:
            return False
        self.last = step
        self._recent.append(step)
        return True

    def after_optimizer(self) -> None:
        """Our own step is over: this is what the counters are."""
        self._versions = tuple(map(_read_version, self._parameters))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, the weights are changed by us and put back: that is nobody's will."""
        was_changed = self._is_changed
        yield
        if self._versions is not None and not was_changed:
            self.after_optimizer()

    @property
    def _is_changed(self) -> bool:
        return self._versions is not None and self._versions != tuple(map(_read_version, self._parameters))

    def forget(self) -> None:
        """The weights were put back by us: the counters start anew with the next step."""
        self._versions = None

    def is_habit(self, step: int) -> bool:
        """Whether the program changes the weights again and again."""
        return len(self._recent) == HABIT and step - self._recent[0] <= WINDOW
