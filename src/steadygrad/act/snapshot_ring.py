"""SnapshotRing: the snapshots that are held, oldest first, within a bound of host memory, and which of them are good.

A snapshot is good once all its values are finite and enough healthy steps followed it. A good one is given up for a new
one only if a newer one is good too, so a training never loses its way back. `Snapshots` fills the ring and restores
from it; nothing here copies a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from steadygrad.act.host_memory import find_free_bytes
from steadygrad.act.pinned_memory import PinnedMemory
from steadygrad.act.snapshot import Snapshot
from steadygrad.config import SnapshotConfig
from steadygrad.state.collect import BUFFER, PARAMETER

FREE_SHARE = 4
"""Snapshots may use one part in this many of the free host memory; data loaders and the page cache need the rest."""
Agree = Callable[[Sequence[int]], Collection[int]]


class SnapshotRing:
    """The snapshots of one training."""

    def __init__(self, config: SnapshotConfig, *, agree: Agree | None, num_neighbours: int) -> None:
        self._config, self._agree, self._num_neighbours = config, agree, num_neighbours
        self._max_bytes = config.max_bytes or find_free_bytes() // FREE_SHARE // max(1, num_neighbours)
        self._were_finite: set[str] = set()
        self.list_meant: Callable[[], Collection[str]] = frozenset
        """Returns the parameters and buffers that are non-finite by design."""
        self._restored: Snapshot | None = None
        self.held: list[Snapshot] = []
        """Oldest first."""
        self.spare: list[PinnedMemory] = []
        """Memory for snapshots to come."""
        self.initial: Snapshot | None = None
        """The state before the first step, kept as long as there is room for it."""
        self.limit = config.keep
        """Snapshots that fit: `keep`, or fewer if they are large."""

    # --- memory -----------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Host memory that all snapshots take together."""
        kept = {id(s): s for s in (*self.held, *([self.initial] if self.initial is not None else []))}
        return sum(memory.num_bytes for memory in (*(s.pinned_memory for s in kept.values()), *self.spare))

    @property
    def is_ranked(self) -> bool:
        """Whether other ranks take snapshots as well."""
        return self._agree is not None

    @property
    def is_preparing(self) -> bool:
        """Whether memory for the next one is being pinned."""
        return any(memory.is_preparing for memory in self.spare)

    @property
    def has_place(self) -> bool:
        """Whether one more may be taken: there is room, or a snapshot that can be given up."""
        return len(self.held) < self.limit or self._find_victim() is not None

    @property
    def lacks_memory(self) -> bool:
        """Whether memory for the next one is still to be allocated. That of the initial state is not reused."""
        num_held = len({id(s) for s in (*self.held, self.initial) if s is not None})
        return not self.spare and num_held < self.limit + (self.initial is not None)

    def fits(self, memory: PinnedMemory, sizes: Sequence[int]) -> bool:
        """Whether `memory` for tensors of these sizes stays within the bound."""
        return self.num_bytes + sum(memory.plan(sizes)[1]) <= self._max_bytes

    def explain_no_room(self, sizes: Sequence[int], *, pinned: bool) -> str | None:
        """Return why not even one snapshot with tensors of these sizes fits; None if one does."""
        one = sum(PinnedMemory(pinned=pinned).plan(sizes)[1])
        if one <= self._max_bytes:
            self.limit = min(self._config.keep, self._max_bytes // max(1, one))
            return None
        return f"one would take {_in_units(one)} of host memory, and {self.describe_bound()}"

    def describe_bound(self) -> str:
        """Return how much host memory the snapshots may take, and why."""
        whose = "a quarter of what is free" if self._config.max_bytes is None else "SnapshotConfig.max_bytes"
        shared = self._config.max_bytes is None and self._num_neighbours > 1
        ranks = f" shared by {self._num_neighbours} ranks" if shared else ""
        return f"{whose}{ranks} is {_in_units(self._max_bytes)}"

    def find_memory(self, sizes: Sequence[int], *, pinned: bool) -> PinnedMemory | None:
        """Return memory for one more snapshot, within the bound; None if the ring must keep what it has."""
        while len(self.held) >= self.limit:
            if not self._discard_one():
                return None
        while True:
            memory = self.spare[-1] if self.spare else PinnedMemory(pinned=pinned)
            if self.fits(memory, sizes):
                self.spare = [spare for spare in self.spare if spare is not memory]
                return memory
            if self.spare:
                self.spare.clear()  # blocks of another layout
            elif self.initial is not None and self.initial not in self.held:
                self.initial = None
            elif not self._discard_one():
                return None

    def _find_victim(self) -> Snapshot | None:
        """Return the oldest good snapshot if a newer one is good; the only good one if there is room for just one."""
        good = [s for s in self.held if s.good]
        return good[0] if good and (len(good) > 1 or self.limit == 1) else None

    def _discard_one(self) -> bool:
        victim = self._find_victim()
        if victim is not None:
            self._discard(victim)
        return victim is not None

    def _discard(self, snapshot: Snapshot) -> None:
        self.held.remove(snapshot)
        if snapshot is not self.initial:
            self.spare.append(snapshot.pinned_memory)
        if snapshot is self._restored:
            self._restored = None

    def clear(self) -> None:
        """Drop everything, memory included."""
        self.held, self.spare, self._restored, self.initial = [], [], None, None

    # --- which ones are good ----------------------------------------------------------------------------------------

    def count_healthy(self, step: int) -> list[str]:
        """Count step `step` as healthy. Return why snapshots were dropped, one line for each that was not finite."""
        reasons = []
        for snapshot in [s for s in self.held if not s.good]:
            snapshot.num_healthy += step >= snapshot.step  # a late judgement may be of a step before it
            enough = snapshot.num_healthy >= self._config.good_after
            # Reading the check waits for the device, so it is read once it has arrived, or when it decides.
            if snapshot.finite is None and (enough or snapshot.has_been_checked):
                bad = self._find_nonfinite(snapshot)
                if bad:
                    reasons.append(_describe_dropped(snapshot.step, bad))
                    self._discard(snapshot)
                    continue
            snapshot.good = enough
        return reasons

    def count_unhealthy(self, step: int) -> None:
        """Count step `step` as unhealthy: snapshots not good yet start counting again, and later ones are dropped."""
        for snapshot in [s for s in self.held if not s.good]:
            snapshot.num_healthy = 0
            if snapshot.step > step:  # judged late: this was not known when it was taken
                self._discard(snapshot)

    def _find_nonfinite(self, snapshot: Snapshot) -> list[str]:
        """Return the names of tensors that must be finite and are not; wait for the check if needed."""
        bad = []
        for name, must_be_finite, is_finite in snapshot.values():
            if is_finite:
                self._were_finite.add(name)
            elif name in self._were_finite or must_be_finite:
                bad.append(name)
        if bad:
            meant = self.list_meant()
            # A parameter that was finite once is no longer excused; a metric comes and goes.
            given = {PARAMETER + name for name in meant} - self._were_finite
            bad = [name for name in bad if name not in given | {BUFFER + name for name in meant}]
        snapshot.finite = not bad
        return bad

    @property
    def newest_good(self) -> int | None:
        """Return the step of the newest good snapshot."""
        return next((s.step for s in reversed(self.held) if s.good), None)

    def list_good(self) -> list[Snapshot]:
        """Return the good snapshots that all ranks have, oldest first."""
        return self._keep_common([s for s in self.held if s.good])

    def _keep_common(self, snapshots: list[Snapshot]) -> list[Snapshot]:
        if self._agree is None:
            return snapshots
        common = self._agree([s.step for s in snapshots])
        return [s for s in snapshots if s.step in common]

    # --- going back -------------------------------------------------------------------------------------------------

    def choose(self, *, older: bool) -> Snapshot | None:
        """Return the newest good snapshot, or one `older` than the last restored; None if there is none.

        While none is good yet, the state before step 0 is returned if it is finite: no training has harmed it.
        """
        # A collective on many ranks; its result is the same on all, so all take the same branch below.
        good = self.list_good()
        if not good:
            untrained = [s for s in self.held if s.step == 0 and not older]
            finite = [s for s in untrained if s.finite or (s.finite is None and not self._find_nonfinite(s))]
            return next(iter(self._keep_common(finite)), None)
        if not older:
            return good[-1]
        last = self.held.index(self._restored if self._restored is not None else good[-1])
        return next((s for s in reversed(self.held[:last]) if s in good), None)

    def return_to(self, chosen: Snapshot) -> None:
        """Note that `chosen` was restored: the newer ones are of a past that did not happen."""
        for snapshot in self.held[self.held.index(chosen) + 1 :]:
            self._discard(snapshot)
        self._restored = chosen

    def condemn(self, step: int) -> None:
        """Discard snapshots newer than `step`: the weights have been harmed since."""
        for snapshot in [s for s in self.held if s.step > step]:
            self._discard(snapshot)

    def explain_nothing(self, *, older: bool) -> str:
        """Return why `choose` found nothing, and what to do."""
        if older and self.newest_good is not None:
            return (
                f"there is no good snapshot older than the one of step {self.newest_good}. Raise SnapshotConfig.keep, "
                "or load a checkpoint from disk."
            )
        return (
            f"there is no good snapshot to restore: {len(self.held)} were taken, and none has "
            f"{self._config.good_after} healthy steps after it yet. Lower SnapshotConfig.good_after or every, or load "
            "a checkpoint from disk."
        )

    def describe(self) -> str:
        """Return one sentence for a summary."""
        newest = "none good yet" if self.newest_good is None else f"newest good at step {self.newest_good}"
        fewer = f", room for {self.limit} of {self._config.keep}" if self.limit < self._config.keep else ""
        plural = "" if len(self.held) == 1 else "s"
        return f"{len(self.held)} snapshot{plural} in {_in_units(self.num_bytes)} of host memory{fewer}, {newest}"


def _describe_dropped(step: int, bad: list[str]) -> str:
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return f"the snapshot of step {step} was dropped, it is not finite: {', '.join(bad[:3])}{more}"


def _in_units(num_bytes: int) -> str:
    """Format a size in bytes."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
