"""Window: the data after a rollback that is left out, because what broke the run often lies in neighbouring batches."""

from __future__ import annotations


class Window:
    """Counts batches, or steps where the loop does not use `guard.batches`, that are still to be left out."""

    def __init__(self, *, enabled: bool = True) -> None:
        """`enabled=False`: a guard that is switched off leaves out nothing, whatever state it was given."""
        self._enabled = enabled
        self.num_left = 0
        self.is_new = False
        """Whether the rollback has happened since this was last taken."""

    @property
    def is_open(self) -> bool:
        """Whether what comes now is left out."""
        return self._enabled and self.num_left > 0

    def open(self, num: int) -> None:
        """A rollback has happened: leave out the next `num`."""
        self.num_left, self.is_new = num, True

    def pass_one(self) -> None:
        """One of them has been left out."""
        self.num_left = max(0, self.num_left - 1)

    def take_new(self) -> bool:
        """Whether a rollback has happened since this was last asked."""
        is_new, self.is_new = self.is_new, False
        return is_new

    def describe(self) -> str:
        """What of the data is left out."""
        if self.num_left == 0:
            return "no batch is left out"
        return f"the next {f'{self.num_left} batches are' if self.num_left > 1 else 'batch is'} left out"
