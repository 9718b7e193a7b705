"""References: which earlier weights to compare the present ones with, and which state to go back to.

A reference must be verified, from before the trouble, of the model's present size, no older than the program's own
last change to the weights, and trained at a rate and a weight decay no lower than the present ones: a schedule that
raises them raises the loss by design. If only the last condition fails, the initial weights serve instead, and then
the present ones must be worse than having learned nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from steadygrad.act.snapshot import Snapshot
from steadygrad.act.snapshots import Snapshots
from steadygrad.facts import Finding
from steadygrad.facts.kinds import find_kind
from steadygrad.measure.edits import EditWatch
from steadygrad.measure.ranks import Ranks
from steadygrad.prove.paired import CannotTestError
from steadygrad.state.shards import take_local

RAISED = 1.5
"""A reference is unfair if rate or weight decay is now more than this many times the reference's."""

FALLING = 0.99
"""A rate is falling if it is below this share of its first value."""

ASCENT = "the optimizer maximises what it is given, so a rising number does no harm"

Settings = tuple[tuple[float, float], ...]
"""Learning rate and weight decay of each group."""


class References:
    """Finds earlier weights of one training."""

    def __init__(
        self,
        model: nn.Module,
        snapshots: Snapshots,
        *,
        edits: Callable[[], EditWatch],
        settings: Callable[[], Settings],
        maximises: Callable[[], bool],
        ranks: Ranks,
    ) -> None:
        self._maximises, self._ranks = maximises, ranks
        self._model, self._snapshots, self._edits, self._settings = model, snapshots, edits, settings

    def find(self, finding: Finding) -> Snapshot:
        """Return the newest fair reference; raise CannotTestError if there is none. Call it on every rank."""
        if self.is_ascent:
            raise CannotTestError(ASCENT)
        fair = None if find_kind(finding.kind).at_start else self.find_fair(finding)
        if fair is not None:
            return fair
        initial = self.find_initial()
        if initial is not None:
            return initial
        changed = self._find_change()
        if changed is not None:
            raise CannotTestError(
                f"the program changed the weights itself before step {changed}, and nothing verified is newer"
            )
        raise CannotTestError(f"there are no earlier weights to compare with ({self._snapshots.describe()})")

    def find_fair(self, finding: Finding) -> Snapshot | None:
        """Return the newest verified weights from before the trouble, unless rate or decay have been raised since.

        Call it on every rank: their shards differ, and their rates may.
        """
        fair = [s for s in self._list_before(finding) if self._is_fair(s)]
        common = self._ranks.find_common([s.step for s in fair])
        return next((s for s in reversed(fair) if s.step in common), None)

    def is_waiting(self, finding: Finding) -> bool:
        """Return whether only a raised rate or weight decay makes such weights unfair. Call it on every rank."""
        before = self._list_before(finding)
        return all(self._ranks.gather(finding.kind != "rate_too_high" and not self.is_ascent and bool(before)))

    def _list_before(self, finding: Finding) -> list[Snapshot]:
        since = self._find_change() or 0
        return [s for s in self._snapshots.list_good() if since <= s.step <= finding.step and self._fits(s)]

    def _find_change(self) -> int | None:
        """Return the step before which the program last changed the weights, on any rank; None if never."""
        return max((step for step in self._ranks.gather(self._edits().last) if step is not None), default=None)

    def find_initial(self) -> Snapshot | None:
        """Return the weights before the first step, unless the program replaced them since. Call it on every rank."""
        initial = self._snapshots.initial
        usable = initial is not None and self._edits().last is None and self._fits(initial)
        # Gathered even if this rank has none: the others wait for its answer.
        return initial if all(self._ranks.gather(usable)) else None

    @property
    def is_ascent(self) -> bool:
        """Return whether the run is meant to go up: by `maximize`, or by a rate that was negative from the start.

        A rate that turns negative later is more likely that of a schedule which runs on past its end.
        """
        first = () if self._snapshots.initial is None else self._snapshots.initial.settings
        rates = zip(self._settings(), first)
        return self._maximises() or any(now < 0 and then < 0 for (now, _), (then, _) in rates)

    @property
    def is_rate_falling(self) -> bool:
        """Return whether the program itself lowers its rate: a high one at the start is then part of its schedule."""
        first = () if self._snapshots.initial is None else self._snapshots.initial.settings
        now, then = (max((rate for rate, _ in some), default=0.0) for some in (self._settings(), first))
        return now < FALLING * then

    def find_way_back(self, finding: Finding) -> int:
        """Return the newest verified step before the trouble; the start if the rate was too high from there on."""
        good = [s.step for s in self._snapshots.list_good() if s.step <= finding.step]
        return 0 if find_kind(finding.kind).at_start else max(good, default=0)

    def find_factor(self, finding: Finding) -> float | None:
        """Return the factor back to the rate of the earlier state; None if it was not raised, or the rule gives one."""
        if find_kind(finding.kind).at_start:
            return None
        step = self.find_way_back(finding)
        settings = next((s.settings for s in self._snapshots.list_good() if s.step == step), ())
        now, then = (max((rate for rate, _ in some), default=0.0) for some in (self._settings(), settings))
        return then / now if now > RAISED * then > 0 else None

    def _is_fair(self, snapshot: Snapshot) -> bool:
        """Return whether rate and weight decay have not been raised by more than `RAISED` since then."""
        now = self._settings()
        return len(now) == len(snapshot.settings) and all(
            rate <= RAISED * old_rate and decay <= RAISED * old_decay
            for (rate, decay), (old_rate, old_decay) in zip(now, snapshot.settings)
        )

    def _fits(self, snapshot: Snapshot) -> bool:
        """Return whether a snapshot has every parameter of the present model."""
        held = {id(p): snapshot.hosts[slot.index] for p, slot in snapshot.state.parameters}
        for parameter in self._model.parameters():
            host, local = held.get(id(parameter)), take_local(parameter)
            if host is None or (host.shape, host.dtype) != (local.shape, local.dtype):
                return False
        return True
