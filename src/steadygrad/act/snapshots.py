"""Snapshots: the whole training state -> copies in host memory -> the same state again, bit for bit.

A snapshot holds parameters, buffers, optimizer state and other objects passed in (scheduler, scaler, EMA, clip state).
What belongs to the user is not restored: the random generators, which would draw the same batches again, and the
learning rates, unless their scheduler was passed in. Taking one never waits for the device: pinned blocks are reused,
parameters and moments are copied on a side stream while the next forward runs, and whether all values are finite is
read later. A snapshot is good once it is finite and enough healthy steps followed it; only a good one is restored.
Memory is bounded. Gradients, the data position and the step number are not included: the Guard keeps them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from steadygrad.act.host_memory import find_free_bytes
from steadygrad.act.pinned_memory import PinnedMemory, count_bytes
from steadygrad.act.restore import Restorer
from steadygrad.act.snapshot import Snapshot
from steadygrad.act.snapshot_copier import Copier, look
from steadygrad.config import SnapshotConfig
from steadygrad.errors import UsageError
from steadygrad.state.collect import Collector, Source, State, Template, collect_state, settle_shards, sign_state

logger = logging.getLogger("steadygrad")
FREE_SHARE = 4
"""Snapshots may use one part in this many of the free host memory; data loaders and the page cache need the rest."""
MIN_EVERY = 10
"""Steps between two snapshots at the very start of a run."""
DENSE_BYTES = 64 << 20
"""States above this are not copied more often early in a run: on an H200 that cost GPT-2 124M 6 % of those steps."""


class Stateful(Protocol):
    """An object whose state a snapshot can include."""

    def state_dict(self) -> Any:
        """Return the object's state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Load what `state_dict()` returned."""


class Snapshots:
    """A ring of snapshots of one training.

    >>> model = nn.Linear(2, 1)
    >>> snapshots = Snapshots(model, [torch.optim.SGD(model.parameters())], config=SnapshotConfig(good_after=1))
    >>> snapshots.take(0), snapshots.healthy_step(0), snapshots.restore()
    (True, [], 0)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        extras: Mapping[str, Stateful] | None = None,
        config: SnapshotConfig | None = None,
        agree: Callable[[Sequence[int]], Collection[int]] | None = None,
        owns_rate: Callable[[torch.optim.Optimizer], bool] = lambda _: False,
        num_neighbours: int = 1,
    ) -> None:
        """`agree`: on many ranks, reduces the steps this rank could return to, to those that every rank could.

        `owns_rate`: whether an optimizer writes its own learning rate, which is then restored with its state.
        `num_neighbours`: ranks on this machine, which share its free memory.
        """
        self._agree, self._owns_rate = agree, owns_rate
        self._model, self._optimizers = model, list(optimizers)
        self._extras: dict[str, Any] = {name: extra for name, extra in (extras or {}).items() if extra is not None}
        self._shared = [model, *self._optimizers, *self._extras.values()]  # never copied, even if referred to
        self._config = config if config is not None else SnapshotConfig()
        self._ring: list[Snapshot] = []  # oldest first
        self._spare: list[PinnedMemory] = []
        self._sizes: list[int] = []  # of the tensors of a snapshot
        self._max_bytes = self._config.max_bytes or find_free_bytes() // FREE_SHARE // max(1, num_neighbours)
        self._lacks_memory = False
        self._template: Template | None = None
        self._limit = self._config.keep
        self._last_taken: int | None = None
        self._restored: Snapshot | None = None
        self._in_trouble = False
        self.is_held = False
        """True while a suspicion is being tested: no snapshot is taken, and none becomes good."""
        self.initial: Snapshot | None = None
        """The state before the first step, kept as long as there is room for it."""
        self.second_try: Snapshot | None = None
        """Result of repeating the steps since the snapshot of the same step; restoring that one restores this."""
        self._were_finite: set[str] = set()
        self._told: set[str] = set()
        self._copier = Copier()
        self.off: str | None = None if self._config.enabled else "SnapshotConfig.enabled is False"
        """Why there are no snapshots; None when there are."""
        self.is_too_large = False
        """Whether they are off because one does not fit into the host's free memory."""
        self.misfits: list[str] = []
        """What the last restore had to leave unchanged."""
        self.num_again = 0
        """Steps after the last restored snapshot that were repeated, and therefore count."""
        self._is_pinned = any(parameter.is_cuda for parameter in model.parameters())
        if self.off is None and self._is_pinned:
            self._prepare()

    def compile(self) -> None:
        """On CUDA, load the kernels now, so that no step waits for them."""
        device = next((p.device for p in self._model.parameters() if p.is_cuda), None)
        if self.off is None and device is not None:
            self._copier.compile(device)

    # --- when -------------------------------------------------------------------------------------------------------

    def effective_every(self, step: int) -> int:
        """Return the steps between snapshots at `step`: a fifth of the run so far, between 10 and `every`.

        A run of 200 steps thus takes about a dozen. Never so dense that the ring is full before its oldest is good. A
        large state, whose copy slows a step measurably, is copied every `every` steps, first after half of them.
        """
        if self._ring and self._ring[-1].pinned_memory.num_bytes > DENSE_BYTES:
            # From half a period on, so that a snapshot and the periodic scans do not fall on the same step.
            return max(1, self._config.every // 2) if self._last_taken == 0 else self._config.every
        patience = -(-self._config.good_after // max(1, self._limit - 1))
        return max(min(self._config.every, max(MIN_EVERY, step // 5)), min(self._config.every, patience))

    def effective_skip(self, step: int) -> int:
        """Return the batches to skip after a rollback at `step`: a twentieth of the steps, at most `skip_batches`."""
        return min(self._config.skip_batches, max(1, step // 20))

    def due(self, step: int) -> bool:
        """Whether a snapshot should be taken before step `step`; never while the last step was not healthy."""
        self._copier.advance()
        if self.off is not None or self._in_trouble or self.is_held or not self._has_place():
            return False
        if self._lacks_memory and self._is_pinned and step > 0:
            # The optimizer has created its state by now: pin memory for all of it.
            self._lacks_memory = False
            self._prepare()
        return self._last_taken is None or step - self._last_taken >= self.effective_every(step)

    # --- take -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, step: int, settings: tuple[tuple[float, float], ...] = ()) -> bool:
        """Copy the state before step `step`; return False if it was not copied: off, in trouble, or no room yet.

        On CUDA the copies are still running when this returns. Call `before_optimizer()` before anything changes
        parameters, optimizer state or EMA; buffers may change at once.
        """
        if self.off is not None or self._in_trouble or not self._has_place():
            return False
        self.before_optimizer()
        collector, state = self._collect()
        hosts = self._make_hosts(collector.sources)
        if hosts is None:
            return False
        pinned_memory, copies, largest = hosts
        snapshot = Snapshot(
            step, state, pinned_memory, copies, [s.tensor.device for s in collector.sources], largest, settings=settings
        )
        pairs = list(zip(collector.sources, copies))
        if self._is_pinned:
            look(snapshot, [(s, host) for s, host in pairs if not s.tensor.is_cuda])
        self._copier.copy(snapshot, [(s, host) for s, host in pairs if self._is_kept_in_blocks(s)])
        self._ring.append(snapshot)
        if step == 0:
            self.initial = snapshot
        self._last_taken = step
        # The memory of the initial state is not reused, so one more than `keep` is needed.
        num_held = len({id(s) for s in (*self._ring, self.initial) if s is not None})
        self._lacks_memory = not self._spare and num_held < self._limit + (self.initial is not None)
        return True

    def _prepare(self) -> None:
        """Have memory pinned in the background for the next snapshot, assuming the state keeps its size."""
        if not self._sizes or self._last_taken == 0:  # the optimizer creates its state in the first step
            sources = self._collect()[0].sources
            self._sizes = [count_bytes(source.tensor) for source in sources if self._is_kept_in_blocks(source)]
        sizes = self._sizes
        spare = PinnedMemory(pinned=True)
        if self.bytes_held + sum(spare.plan(sizes)[1]) <= self._max_bytes:
            # Before the first step it is not known how much device memory training needs.
            spare.prepare(
                sizes, then=None if self._last_taken is None else self._copier.make_reserve(spare, self._model)
            )
            self._spare.append(spare)

    def _collect(self) -> tuple[Collector, State]:
        collector, signature = Collector(self._shared), sign_state(self._model, self._optimizers)
        template = self._template if signature is not None else None
        if template is not None and template.signature == signature:
            state = collect_state(collector, self._model, self._optimizers, self._extras, template)
        else:
            state = collect_state(collector, self._model, self._optimizers, self._extras)
            self._template = None if signature is None else collector.make_template(signature, state)
        for what in collector.left_out:  # what is missing at the start is a finding; state may also appear later
            if what not in self._told:
                self._told.add(what)
                logger.info("left out of snapshots, because it cannot be copied: %s", what)
        return collector, state

    def before_optimizer(self) -> None:
        """Make the device, not the host, wait for pending copies before it changes what is being copied."""
        self._copier.before_optimizer()

    def _make_hosts(self, sources: list[Source]) -> tuple[PinnedMemory, list[Tensor], Tensor] | None:
        """Return a host tensor for each source and one for the check's results; None if there is no memory."""
        self._is_pinned = any(source.tensor.is_cuda for source in sources)  # a model may have moved
        wanted = [source.tensor for source in sources if self._is_kept_in_blocks(source)]
        pinned_memory = self._find_pinned_memory(wanted)
        if pinned_memory is None:
            return None
        try:
            room = iter(pinned_memory.make_room(wanted))
            largest = torch.empty(len(sources), dtype=torch.float64, pin_memory=self._is_pinned)
        except (RuntimeError, MemoryError) as error:
            self._switch_off(f"host memory could not be taken ({str(error).partition(chr(10))[0]})")
            return None
        # Sparse and other unusual tensors are copied synchronously: they are rare and small.
        hosts = [next(room) if self._is_kept_in_blocks(s) else s.tensor.to("cpu", copy=True) for s in sources]
        return pinned_memory, hosts, largest

    def _is_kept_in_blocks(self, source: Source) -> bool:
        """Whether it goes into blocks. With state on CUDA, only CUDA tensors do: blocks are fetched as a whole."""
        return source.fits and (source.tensor.is_cuda or not self._is_pinned)

    # --- memory -----------------------------------------------------------------------------------------------------

    @property
    def _bound(self) -> str:
        return _in_units(self._max_bytes)

    @property
    def bytes_held(self) -> int:
        """Host memory that all snapshots take together."""
        kept = {id(s): s for s in (*self._ring, *([self.initial] if self.initial is not None else []))}
        return sum(
            pinned_memory.num_bytes for pinned_memory in (*(s.pinned_memory for s in kept.values()), *self._spare)
        )

    def _find_pinned_memory(self, tensors: Sequence[Tensor]) -> PinnedMemory | None:
        """Return memory for one more snapshot, within the bound; None if the ring must keep what it has."""
        sizes = self._sizes = [count_bytes(tensor) for tensor in tensors]
        pinned = self._is_pinned
        one = sum(PinnedMemory(pinned=pinned).plan(sizes)[1])
        if one > self._max_bytes:
            whose = "a quarter of what is free" if self._config.max_bytes is None else "SnapshotConfig.max_bytes"
            self._switch_off(f"one would take {_in_units(one)} of host memory, and {whose} is {self._bound}")
            return None
        self._limit = min(self._config.keep, self._max_bytes // max(1, one))
        while len(self._ring) >= self._limit:
            if not self._discard_one():
                return None
        while True:
            pinned_memory = self._spare[-1] if self._spare else PinnedMemory(pinned=pinned)
            if self.bytes_held + sum(pinned_memory.plan(sizes)[1]) <= self._max_bytes:
                self._spare = [spare for spare in self._spare if spare is not pinned_memory]
                return pinned_memory
            if self._spare:
                self._spare.clear()  # blocks of another layout
            elif self.initial is not None and self.initial not in self._ring:
                self.initial = None
            elif not self._discard_one():
                return None

    def _has_place(self) -> bool:
        return len(self._ring) < self._limit or self._find_victim() is not None

    def _find_victim(self) -> Snapshot | None:
        """Return the oldest good snapshot if a newer one is good; the only good one if there is room for just one."""
        good = [s for s in self._ring if s.good]
        return good[0] if good and (len(good) > 1 or self._limit == 1) else None

    def _discard_one(self) -> bool:
        victim = self._find_victim()
        if victim is not None:
            self._discard(victim)
        return victim is not None

    def _discard(self, snapshot: Snapshot) -> None:
        self._ring.remove(snapshot)
        if snapshot is not self.initial:
            self._spare.append(snapshot.pinned_memory)
        if snapshot is self._restored:
            self._restored = None

    def _switch_off(self, reason: str) -> None:
        """Do without snapshots, for lack of memory."""
        self.off, self.is_too_large = reason, True
        logger.warning("no snapshots: %s. A rollback goes to the newest good checkpoint, if there is one.", reason)
        self.before_optimizer()
        self._ring, self._spare, self._restored, self.initial = [], [], None, None

    # --- which ones are good ----------------------------------------------------------------------------------------

    def healthy_step(self, step: int) -> list[str]:
        """Count step `step` as healthy. Return why snapshots were dropped, one line for each that was not finite."""
        self._in_trouble = False
        reasons = []
        for snapshot in [s for s in self._ring if not s.good]:
            snapshot.num_healthy += step >= snapshot.step
            enough = snapshot.num_healthy >= self._config.good_after
            if snapshot.finite is None and (enough or snapshot.has_been_checked):
                bad = self._find_nonfinite(snapshot)
                if bad:
                    reasons.append(_tell_dropped(snapshot.step, bad))
                    self._discard(snapshot)
                    continue
            snapshot.good = enough
        return reasons

    def unhealthy(self, step: int) -> None:
        """Count step `step` as unhealthy: snapshots not good yet start counting again, and later ones are dropped."""
        self._in_trouble = True
        for snapshot in [s for s in self._ring if not s.good]:
            snapshot.num_healthy = 0
            if snapshot.step > step:  # judged late: this was not known when it was taken
                self._discard(snapshot)

    def _find_nonfinite(self, snapshot: Snapshot) -> list[str]:
        """Return the names of tensors that must be finite and are not; wait for the check if needed."""
        bad = []
        for name, must_be_finite, is_finite in snapshot.values():
            if is_finite:
                self._were_finite.add(name)
            elif must_be_finite or name in self._were_finite:
                bad.append(name)
        snapshot.finite = not bad
        return bad

    # --- put back ---------------------------------------------------------------------------------------------------

    @property
    def can_restore(self) -> bool:
        """Whether `restore()` has something to restore."""
        return self._choose(older=False) is not None

    @property
    def newest_good(self) -> int | None:
        """Return the step of the newest good snapshot."""
        return next((s.step for s in reversed(self._ring) if s.good), None)

    def list_good(self) -> list[Snapshot]:
        """Return the good snapshots that all ranks have, oldest first."""
        return self._keep_common([s for s in self._ring if s.good])

    def condemn(self, step: int) -> None:
        """Discard snapshots newer than `step`: the weights have been harmed since."""
        for snapshot in [s for s in self._ring if s.step > step]:
            self._discard(snapshot)

    @torch.no_grad()
    def restore(self, *, older: bool = False) -> int:
        """Restore the newest good snapshot in place and return its step; newer ones are discarded.

        `older` goes further back than the previous restore, or than the newest good one if there was none. While none
        is good yet, the state before step 0 is used if it is finite: no training has harmed it. Gradients are left as
        they are. If a second try began at that snapshot, training continues from its result and its steps count as
        taken, so a schedule stays where it is.
        """
        chosen = self._choose(older=older)
        if chosen is None:
            raise UsageError(self._explain_nothing(older=older))
        settle_shards(self._model)
        again = self.second_try if self.second_try is not None and self.second_try.step == chosen.step else None
        self.misfits = self._put_back(chosen, self._extras, but=() if again is None else ("scheduler",))
        self.num_again = 0 if again is None else again.num_again
        if again is not None:
            self.load(again, clipper=self._extras.get("clip"))
        for snapshot in self._ring[self._ring.index(chosen) + 1 :]:
            self._discard(snapshot)
        self._restored, self._in_trouble = chosen, False
        return chosen.step

    @torch.no_grad()
    def load(self, snapshot: Snapshot, *, clipper: Stateful | None) -> None:
        """Load weights, buffers, optimizers and the loss scaler for a trial; the caller restores the present ones.

        Schedules, averages and our own histories stay as they are: a trial is not part of the run. `clipper` belongs to
        the trial and gets the state that the run's clipper had then; clipping less would be an unfair advantage.
        """
        self._put_back(snapshot, self._list_tried(clipper))

    @torch.no_grad()
    def copy_second_try(self, start: Snapshot, num_steps: int, *, clipper: Stateful | None) -> Snapshot:
        """Copy the state that a trial of `num_steps` steps from `start` reached: everything that `load` loads."""
        collector = Collector(self._shared)
        state = collect_state(collector, self._model, self._optimizers, self._list_tried(clipper))
        tensors = [source.tensor for source in collector.sources]
        hosts, devices = [t.to("cpu", copy=True) for t in tensors], [t.device for t in tensors]
        return Snapshot(
            start.step, state, PinnedMemory(pinned=False), hosts, devices, torch.empty(0), num_again=num_steps
        )

    def _list_tried(self, clipper: Stateful | None) -> dict[str, Any]:
        """Return what a trial changes besides the model and the optimizers."""
        tried = {"scaler": self._extras.get("scaler"), "clip": clipper}
        return {name: extra for name, extra in tried.items() if extra is not None}

    def _put_back(self, snapshot: Snapshot, extras: Mapping[str, Any], but: Sequence[str] = ()) -> list[str]:
        """Write a snapshot over the live state, with those `extras` it holds; return what had to be left unchanged."""
        self.before_optimizer()
        snapshot.wait()
        held = {name: saved for name, saved in snapshot.state.extras.items() if name in extras and name not in but}
        # Rates go with their scheduler: one that is not in the snapshot has moved on, and so have its rates.
        settings = {id(o) for o in self._optimizers if "scheduler" in held or self._owns_rate(o)}
        state = dataclasses.replace(snapshot.state, extras=held)
        restorer = Restorer(state, snapshot.hosts, snapshot.devices, shared=self._shared, settings=settings)
        return restorer.restore(self._optimizers, extras)

    def _choose(self, *, older: bool) -> Snapshot | None:
        good = self._keep_common([s for s in self._ring if s.good])
        if not good:
            untrained = [s for s in self._ring if s.step == 0 and not older]
            finite = [s for s in untrained if s.finite or (s.finite is None and not self._find_nonfinite(s))]
            return next(iter(self._keep_common(finite)), None)
        if not older:
            return good[-1]
        last = self._ring.index(self._restored if self._restored is not None else good[-1])
        return next((s for s in reversed(self._ring[:last]) if s in good), None)

    def _keep_common(self, snapshots: list[Snapshot]) -> list[Snapshot]:
        if self._agree is None:
            return snapshots
        common = self._agree([s.step for s in snapshots])
        return [s for s in snapshots if s.step in common]

    def _explain_nothing(self, *, older: bool) -> str:
        if self.off is not None:
            return f"there is no snapshot to restore: snapshots are off, because {self.off}."
        if older and self.newest_good is not None:
            return (
                f"there is no good snapshot older than the one of step {self.newest_good}. Raise SnapshotConfig.keep, "
                "or load a checkpoint from disk."
            )
        return (
            f"there is no good snapshot to restore: {len(self._ring)} were taken, and none has "
            f"{self._config.good_after} healthy steps after it yet. Lower SnapshotConfig.good_after or every, or load "
            "a checkpoint from disk."
        )

    def describe(self) -> str:
        """Return one sentence for a summary."""
        if self.off is not None:
            return f"no snapshots: {self.off}"
        newest = "none good yet" if self.newest_good is None else f"newest good at step {self.newest_good}"
        fewer = f", room for {self._limit} of {self._config.keep}" if self._limit < self._config.keep else ""
        plural = "" if len(self._ring) == 1 else "s"
        return f"{len(self._ring)} snapshot{plural} in {_in_units(self.bytes_held)} of host memory{fewer}, {newest}"


def _tell_dropped(step: int, bad: list[str]) -> str:
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return f"the snapshot of step {step} was dropped, it is not finite: {', '.join(bad[:3])}{more}"


def _in_units(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
