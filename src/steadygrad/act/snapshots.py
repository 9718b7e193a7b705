"""Snapshots: the whole training state -> copies in host memory -> the same state again, bit for bit.

A snapshot holds parameters, buffers, optimizer state and other objects passed in (scheduler, scaler, EMA, clip state).
What belongs to the user is not restored: the random generators, which would draw the same batches again, and the
learning rates, unless their scheduler was passed in. Taking one never waits for the device: pinned blocks are reused,
parameters and moments are copied on a side stream while the next forward runs, and whether all values are finite is
read later. Only a good one is restored: finite, and followed by enough healthy steps. `SnapshotRing` holds them within
a bound of memory. Gradients, the data position and the step number are not included: the Guard keeps them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from steadygrad.act.pinned_memory import PinnedMemory
from steadygrad.act.restore import Restorer
from steadygrad.act.snapshot import Snapshot
from steadygrad.act.snapshot_copier import Copier, look
from steadygrad.act.snapshot_ring import Agree, SnapshotRing
from steadygrad.config import SnapshotConfig
from steadygrad.errors import UsageError
from steadygrad.state.collect import Collector, Source, State, Template, collect_state, settle_shards, sign_state

logger = logging.getLogger("steadygrad")
MIN_EVERY = 10
"""Steps between two snapshots at the very start of a run."""
DENSE_BYTES = 64 << 20
"""States above this are not copied more often early in a run: on an H200 that cost GPT-2 124M 6 % of those steps."""


SETTLED = 8
"""Steps after which a large state is walked to pin memory for all of it: 25 ms of host work for GPT-2 774M, which the
device does not notice once the host is ahead of it."""


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
        agree: Agree | None = None,
        owns_rate: Callable[[torch.optim.Optimizer], bool] = lambda _: False,
        num_neighbours: int = 1,
    ) -> None:
        """`agree`: on many ranks, reduces the steps this rank could return to, to those that every rank could.

        `owns_rate`: whether an optimizer writes its own learning rate, which is then restored with its state.
        `num_neighbours`: ranks on this machine, which share its free memory.
        """
        self._owns_rate = owns_rate
        self._model, self._optimizers = model, list(optimizers)
        self._extras: dict[str, Any] = {name: extra for name, extra in (extras or {}).items() if extra is not None}
        self._shared = [model, *self._optimizers, *self._extras.values()]  # never copied, even if referred to
        self._config = config if config is not None else SnapshotConfig()
        self._ring = SnapshotRing(self._config, agree=agree, num_neighbours=num_neighbours)
        self._sizes: list[int] = []  # of the tensors of a snapshot
        self._is_large = False  # not asked of the snapshots that are held: all ranks must take theirs at the same steps
        self._lacks_memory = False
        self._template: Template | None = None
        self._last_taken: int | None = None
        self._in_trouble = False
        self.is_held = False
        """True while a suspicion is being tested: no snapshot is taken, and none becomes good."""
        self.second_try: Snapshot | None = None
        """Result of repeating the steps since the snapshot of the same step; restoring that one restores this."""
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
        if self.off is None:
            logger.info("up to %d snapshots in host memory: %s", self._config.keep, self._ring.describe_bound())
            if self._is_pinned:
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
        if self._is_large:
            # From half a period on, so that a snapshot and the periodic scans do not fall on the same step.
            return max(1, self._config.every // 2) if self._last_taken == 0 else self._config.every
        patience = -(-self._config.good_after // max(1, self._ring.limit - 1))
        return max(min(self._config.every, max(MIN_EVERY, step // 5)), min(self._config.every, patience))

    def effective_skip(self, step: int) -> int:
        """Return the batches to skip after a rollback at `step`: a twentieth of the steps, at most `skip_batches`."""
        return min(self._config.skip_batches, max(1, step // 20))

    def due(self, step: int) -> bool:
        """Whether a snapshot should be taken before step `step`; never while the last step was not healthy.

        On CUDA it waits until its memory is pinned, so that training does not.
        """
        # Asked once after each healthy step, so a copy that is under way moves on here.
        self._copier.advance()
        if self.off is not None or self._in_trouble or self.is_held:
            return False
        is_soon = self._last_taken is not None and step - self._last_taken < self.effective_every(step)
        if (is_soon and not self._lacks_memory) or not self._ring.has_place:
            return False
        if self._lacks_memory and self._is_pinned and step >= (SETTLED if self._is_large else 1):
            # The optimizer has created its state by now: pin memory for all of it.
            self._lacks_memory = False
            self._prepare()
        if is_soon:
            return False
        if not self._ring.held or not self._is_pinned or self._has_memory():  # the first is worth a wait
            return True
        if self._ring.is_ranked:
            # All ranks take theirs at the same steps, so that there are some that all can return to: at the next one.
            self._last_taken = step
        return False

    def _has_memory(self) -> bool:
        """Return whether a snapshot can be taken without a wait; if not, have its memory pinned beside training.

        Pinning 10 GB takes 2.5 s, in which training would stand still.
        """
        if self._ring.is_preparing:
            return False
        # As it is now: an average of the weights, for example, gains its tensors after the first step.
        self._note_sizes(self._collect()[0].sources)
        memory = self._ring.find_memory(self._sizes, pinned=True)
        if memory is None:
            return False
        if memory.plan(self._sizes)[1]:
            self._begin_pinning(memory, self._sizes)
            return False
        self._ring.spare.append(memory)
        return True

    # --- take -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, step: int, settings: tuple[tuple[float, float], ...] = ()) -> bool:
        """Copy the state before step `step`; return False if it was not copied: off, in trouble, or no room yet.

        On CUDA the copies are still running when this returns. Call `before_optimizer()` before anything changes
        parameters, optimizer state or EMA; buffers may change at once.
        """
        if self.off is not None or self._in_trouble or not self._ring.has_place:
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
        self._ring.held.append(snapshot)
        if step == 0:
            self._ring.initial = snapshot
        self._last_taken = step
        self._lacks_memory = self._ring.lacks_memory
        return True

    def _prepare(self) -> None:
        """Have memory pinned in the background for the next snapshot, assuming the state keeps its size."""
        if not self._sizes or self._last_taken == 0:  # the optimizer creates its state in the first step
            self._note_sizes(self._collect()[0].sources)
        sizes = self._sizes
        spare = PinnedMemory(pinned=True)
        if self._ring.fits(spare, sizes):
            self._begin_pinning(spare, sizes)

    def _note_sizes(self, sources: Sequence[Source]) -> list[int]:
        """Remember and return the sizes of the tensors that go into blocks."""
        self._sizes = [source.num_bytes for source in sources if self._is_kept_in_blocks(source)]
        self._is_large = sum(self._sizes) > DENSE_BYTES
        return self._sizes

    def _begin_pinning(self, memory: PinnedMemory, sizes: Sequence[int]) -> None:
        # Before the first step it is not known how much device memory training needs.
        is_running = self._last_taken is not None
        then = self._copier.make_reserve(memory, self._model) if is_running else None
        memory.prepare(sizes, then, slowly=is_running)
        self._ring.spare.append(memory)

    def excuse(self, list_meant: Callable[[], Collection[str]]) -> None:
        """Set what returns the names of parameters and buffers that are non-finite by design."""
        self._ring.list_meant = list_meant

    def list_meant(self) -> frozenset[str]:
        """Return these names."""
        return frozenset(self._ring.list_meant())

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
        wanted = [source for source in sources if self._is_kept_in_blocks(source)]
        sizes = self._note_sizes(sources)
        no_room = self._ring.explain_no_room(sizes, pinned=self._is_pinned)
        if no_room is not None:
            self._switch_off(no_room)
            return None
        pinned_memory = self._ring.find_memory(sizes, pinned=self._is_pinned)
        if pinned_memory is None:
            return None
        try:
            room = iter(pinned_memory.make_room(wanted))
            largest = torch.empty(len(sources), dtype=torch.float64, pin_memory=self._is_pinned, device="cpu")
        except (RuntimeError, MemoryError) as error:
            self._switch_off(f"host memory could not be allocated ({str(error).partition(chr(10))[0]})")
            return None
        # Sparse and other unusual tensors are copied synchronously: they are rare and small.
        hosts = [next(room) if self._is_kept_in_blocks(s) else s.tensor.to("cpu", copy=True) for s in sources]
        return pinned_memory, hosts, largest

    def _is_kept_in_blocks(self, source: Source) -> bool:
        """Whether it goes into blocks. With state on CUDA, only CUDA tensors do: blocks are fetched as a whole."""
        return source.fits and (source.tensor.is_cuda or not self._is_pinned)

    def _switch_off(self, reason: str) -> None:
        """Do without snapshots, for lack of memory."""
        self.off, self.is_too_large = reason, True
        logger.warning(
            "no snapshots: %s. A rollback goes to the newest good checkpoint: give the Guard a run_dir, and call "
            "guard.save() or set CheckpointConfig.every, so that there is one.",
            reason,
        )
        self.before_optimizer()  # copies that are under way must be over before their memory is freed
        self._ring.clear()

    # --- what is known of them --------------------------------------------------------------------------------------

    @property
    def bytes_held(self) -> int:
        """Host memory that all snapshots take together."""
        return self._ring.num_bytes

    @property
    def initial(self) -> Snapshot | None:
        """The state before the first step, kept as long as there is room for it."""
        return self._ring.initial

    def healthy_step(self, step: int) -> list[str]:
        """Count step `step` as healthy. Return why snapshots were dropped, one line for each that was not finite."""
        self._in_trouble = False
        return self._ring.count_healthy(step)

    def unhealthy(self, step: int) -> None:
        """Count step `step` as unhealthy: snapshots not good yet start counting again, and later ones are dropped."""
        self._in_trouble = True
        self._ring.count_unhealthy(step)

    @property
    def newest_good(self) -> int | None:
        """Return the step of the newest good snapshot."""
        return self._ring.newest_good

    def list_good(self) -> list[Snapshot]:
        """Return the good snapshots that all ranks have, oldest first."""
        return self._ring.list_good()

    def condemn(self, step: int) -> None:
        """Discard snapshots newer than `step`: the weights have been harmed since."""
        self._ring.condemn(step)

    def describe(self) -> str:
        """Return one sentence for a summary."""
        return self._ring.describe() if self.off is None else f"no snapshots: {self.off}"

    # --- put back ---------------------------------------------------------------------------------------------------

    @property
    def can_restore(self) -> bool:
        """Whether `restore()` has something to restore."""
        return self._ring.choose(older=False) is not None

    @torch.no_grad()
    def restore(self, *, older: bool = False) -> int:
        """Restore the newest good snapshot in place and return its step; newer ones are discarded.

        `older` goes further back than the previous restore, or than the newest good one if there was none. While none
        is good yet, the state before step 0 is used if it is finite: no training has harmed it. Gradients are left as
        they are. If a second try began at that snapshot, training continues from its result and its steps count as
        taken, so a schedule stays where it is.
        """
        chosen = self._ring.choose(older=older)
        if chosen is None and self.off is not None:
            raise UsageError(f"there is no snapshot to restore: snapshots are off, because {self.off}.")
        if chosen is None:
            raise UsageError(self._ring.explain_nothing(older=older))
        # FSDP2: weights that a forward has gathered would outlive the restore, and be used in its place.
        settle_shards(self._model)
        again = self.second_try if self.second_try is not None and self.second_try.step == chosen.step else None
        # The snapshot first: it also has the extras, such as EMA and histories, that a second try leaves alone.
        self.misfits = self._put_back(chosen, self._extras, but=() if again is None else ("scheduler",))
        self.num_again = 0 if again is None else again.num_again
        if again is not None:
            self.load(again, clipper=self._extras.get("clip"))
        self._ring.return_to(chosen)
        self._in_trouble = False
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
            start.step,
            state,
            PinnedMemory(pinned=False),
            hosts,
            devices,
            torch.empty(0, device="cpu"),
            num_again=num_steps,
        )

    def _list_tried(self, clipper: Stateful | None) -> dict[str, Any]:
        """Return what a trial changes besides the model and the optimizers."""
        tried = {"scaler": self._extras.get("scaler"), "clip": clipper}
        return {name: extra for name, extra in tried.items() if extra is not None}

    def _put_back(self, snapshot: Snapshot, extras: Mapping[str, Any], but: Sequence[str] = ()) -> list[str]:
        """Write a snapshot over the live state, with those `extras` it holds; return what had to be left unchanged."""
        self.before_optimizer()
        # The device waits for copies out of the tensors that are about to be written, the host for this snapshot's own.
        snapshot.wait()
        held = {name: saved for name, saved in snapshot.state.extras.items() if name in extras and name not in but}
        # Rates go with their scheduler: one that is not in the snapshot has moved on, and so have its rates.
        settings = {id(o) for o in self._optimizers if "scheduler" in held or self._owns_rate(o)}
        state = dataclasses.replace(snapshot.state, extras=held)
        restorer = Restorer(state, snapshot.hosts, snapshot.devices, shared=self._shared, settings=settings)
        return restorer.restore(self._optimizers, extras)
