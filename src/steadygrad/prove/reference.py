"""References: which earlier weights the present ones may be compared with, and which state to go back to.

A reference must be verified, from before the trouble, as large as the model is now, not older than a change that the
program made to the weights itself, and trained at a rate and a weight decay no lower than the present ones: a schedule
that raises them raises the loss by design. Where only the last is missing, the initial weights serve, and then the
present ones must be worse than having learnt nothing.
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
"""Times the rate, or the weight decay, of a reference beyond which its weights are no fair comparison."""

FALLING = 0.99
"""Share of its first value below which a rate is on its way down."""

Settings = tuple[tuple[float, float], ...]
"""Learning rate and weight decay of each group."""


class References:
    """Finds earlier weights for one training."""

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
        """The newest fair reference; raises CannotTestError where there is none. Every rank makes this call."""
        if self._maximises():
            raise CannotTestError("the optimizer maximises what it is given, so a rising number is no harm")
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
        """The newest verified weights from before the trouble, unless something presses harder on the present ones.

        Every rank makes this call: shards are not alike, nor need rates be.
        """
        fair = [s for s in self._list_before(finding) if self._is_fair(s)]
        common = self._ranks.find_common([s.step for s in fair])
        return next((s for s in reversed(fair) if s.step in common), None)

    def is_waiting(self, finding: Finding) -> bool:
        """Whether there are such weights, which only the raised rate or weight decay makes unfair. On every rank."""
        before = self._list_before(finding)
        return all(self._ranks.gather(finding.kind != "rate_too_high" and not self._maximises() and bool(before)))

    def _list_before(self, finding: Finding) -> list[Snapshot]:
        since = self._find_change() or 0
        return [s for s in self._snapshots.list_good() if since <= s.step <= finding.step and self._fits(s)]

    def _find_change(self) -> int | None:
        """The step before which the program last changed the weights, on any rank; None: never."""
        return max((step for step in self._ranks.gather(self._edits().last) if step is not None), default=None)

    def find_initial(self) -> Snapshot | None:
        """The weights before the first step, unless the program has replaced them since. Every rank makes this call."""
        initial = self._snapshots.initial
        usable = initial is not None and self._edits().last is None and self._fits(initial)
        return initial if all(self._ranks.gather(usable)) else None

    @property
    def is_rate_falling(self) -> bool:
        """Whether the program lowers its rate by itself: a high one at the start is then a part of its schedule."""
        first = () if self._snapshots.initial is None else self._snapshots.initial.settings
        now, then = (max((rate for rate, _ in some), default=0.0) for some in (self._settings(), first))
        return now < FALLING * then

    def find_way_back(self, finding: Finding) -> int:
        """The newest verified state from before the trouble; the start when the rate was too high from there on."""
        good = [s.step for s in self._snapshots.list_good() if s.step <= finding.step]
        return 0 if find_kind(finding.kind).at_start else max(good, default=0)

    def find_factor(self, finding: Finding) -> float | None:
        """What brings the rate back to that of the way back; None when it was not raised, or the rule itself says."""
        if find_kind(finding.kind).at_start:
            return None
        step = self.find_way_back(finding)
        settings = next((s.settings for s in self._snapshots.list_good() if s.step == step), ())
        now, then = (max((rate for rate, _ in some), default=0.0) for some in (self._settings(), settings))
        return then / now if now > RAISED * then > 0 else None

    def _is_fair(self, snapshot: Snapshot) -> bool:
        """Whether nothing presses harder on the weights now than it did then."""
        now = self._settings()
        return len(now) == len(snapshot.settings) and all(
            rate <= RAISED * old_rate and decay <= RAISED * old_decay
            for (rate, decay), (old_rate, old_decay) in zip(now, snapshot.settings)
        )

    def _fits(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot has every parameter of the model as it is now."""
        held = {id(p): snapshot.hosts[slot.index] for p, slot in snapshot.state.parameters}
        for parameter in self._model.parameters():
            host, local = held.get(id(parameter)), take_local(parameter)
            if host is None or (host.shape, host.dtype) != (local.shape, local.dtype):
                return False
        return True
