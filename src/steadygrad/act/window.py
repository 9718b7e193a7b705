"""Window: the data skipped after a rollback, because what broke the run is often in neighbouring batches."""

from __future__ import annotations


class Window:
    """Counts the batches still to be skipped, or steps where the loop does not use `guard.batches`."""

    def __init__(self, *, enabled: bool = True) -> None:
        """`enabled=False`: a guard that is switched off leaves out nothing, whatever state it was given."""
        self._enabled = enabled
        self.num_left = 0
        self.is_new = False
        """Whether a rollback has happened since the last `take_new()`."""

    @property
    def is_open(self) -> bool:
        """Whether the next batch or step is skipped."""
        return self._enabled and self.num_left > 0

    def open(self, num: int) -> None:
        """Skip the next `num` after a rollback."""
        self.num_left, self.is_new = num, True

    def pass_one(self) -> None:
        """Count one as skipped."""
        self.num_left = max(0, self.num_left - 1)

    def take_new(self) -> bool:
        """Return whether a rollback has happened since the last call."""
        is_new, self.is_new = self.is_new, False
        return is_new

    def describe(self) -> str:
        """Describe which data is skipped."""
        if self.num_left == 0:
            return "no batch is skipped"
        return f"the next {f'{self.num_left} batches are' if self.num_left > 1 else 'batch is'} left out"
