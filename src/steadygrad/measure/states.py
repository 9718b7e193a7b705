"""ParameterWatch: all weights and buffers -> a ParameterScan: which are not finite, and which do not move.

A parameter is recognised by a hash of its bits, one 64-bit number kept on its device. It takes one pass over the
weights every N steps: on CUDA two launches for all tensors of a dtype, and one copy to the host that `begin()` does
not wait for. Reads only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.facts import NUM_COLUMNS, ParameterScan, Reading
from steadygrad.measure.kernels import looks as plain_looks
from steadygrad.measure.kernels.looks import NAN, NONFINITE, NORM, NUM_NUMBERS
from steadygrad.measure.meter import triton_is_usable
from steadygrad.measure.ranks import Ranks
from steadygrad.measure.rows import is_readable, split_flat
from steadygrad.measure.transfer import Ticket, Transfer
from steadygrad.state.modules import list_buffers, list_modules, list_parameters
from steadygrad.state.shards import Fragment, in_optimizer, take_local
from steadygrad.state.trained_parameters import TrainedParameters

CHANGED = NUM_NUMBERS
WIDTH = NUM_NUMBERS + 1
"""Numbers per tensor: those of a scan, and whether its bits have changed since the previous one."""
ROUNDING = 1e-5
"""Share of the whole gradient's norm up to which a parameter's own may be mere rounding, which need not move it. That
of a bias before a BatchNorm is a sum that cancels: 1e-8 to 7e-7 of the whole, in float32 with batches of 8 to 256."""
SPACING = 2.0**-24
"""Share of a float32 weight below which a change is rounded off. With a coarser format `lost_updates` says so."""
FAILED = 2.0
"""In place of whether its bits have changed: a rank could not scan, so the maximum over ranks says it to all."""


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A tensor to scan."""

    name: str
    tensor: Tensor
    is_buffer: bool = False
    is_trained: bool = False
    is_weighed: bool = False
    """Whether its norm shows how far training has moved it."""


class PendingParameterScan:
    """A scan of the weights whose numbers are still being copied. Read it once."""

    def __init__(
        self,
        watch: ParameterWatch,
        subjects: Sequence[Subject] = (),
        ticket: Ticket | Callable[[], Ticket | None] | None = None,
        *,
        is_edited: bool = False,
    ) -> None:
        """`ticket`: the numbers, or what sends them when they are read; `is_edited`: by this rank's program."""
        self._watch, self._subjects, self._ticket, self._is_edited = watch, subjects, ticket, is_edited

    def read(self, step: int) -> ParameterScan:
        """Return the scan after `step`; pass the Reading of that step to the watch first."""
        # May be a collective: ranks read their scans at the same point.
        ticket = self._ticket() if callable(self._ticket) else self._ticket
        numbers = ticket.wait() if ticket is not None else ()
        pushed = self._watch.take_pushed(step)
        if ticket is None or FAILED in numbers[CHANGED : WIDTH * len(self._subjects) : WIDTH]:
            self._watch.drop_hashes()  # on all ranks, not only on the one that has none
            self._subjects = ()
        rows = [(subject, numbers[WIDTH * i : WIDTH * (i + 1)]) for i, subject in enumerate(self._subjects)]
        known = [(s.name, row[CHANGED]) for s, row in rows if s.is_trained and row[CHANGED] >= 0]
        visible = {s.name for s, row in rows if s.name in pushed and pushed[s.name] > SPACING * row[NORM]}
        visible = visible or set(pushed)  # with a rate that moves nothing at all, every parameter should have moved
        is_edited, rest = self._is_edited, numbers[WIDTH * len(self._subjects) :]
        if self._watch.has_many_ranks:
            is_edited, rest = len(rest) > 0 and rest[0] == 0.0, rest[WIDTH:]
        counts = {s: int(row[NONFINITE if not s.is_buffer or is_statistic(s.name) else NAN]) for s, row in rows}
        return ParameterScan(
            step=step,
            nonfinite_parameters={s.name: num for s, num in counts.items() if num and not s.is_buffer},
            nonfinite_buffers={s.name: num for s, num in counts.items() if num and s.is_buffer},
            unchanged=tuple(name for name, changed in known if not changed and name in visible),
            num_changed=sum(changed > 0 for _, changed in known),
            changed=tuple(name for name, changed in known if changed),
            steered=self._watch.list_steered(),
            norms={s.name: row[NORM] for s, row in rows if s.is_weighed},
            checksums=_read_checksums(self._subjects, rest),
            is_edited=is_edited,
        )


class ParameterWatch:
    """Call `scan(-1)` before the first step, `note_step` for each Reading, and `scan(step)` periodically."""

    def __init__(
        self, trained: TrainedParameters, *, transfer: Transfer | None = None, ranks: Ranks | None = None
    ) -> None:
        self._model, self._named = trained.model, trained.named
        self._ranks = ranks if ranks is not None else Ranks()
        self._transfer = transfer
        groups = [group for optimizer in trained.optimizers for group in optimizer.param_groups]
        of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        self._groups = {name: of[id(in_optimizer(p))] for name, p in trained.named}
        # RMSprop has no bias correction: its first steps are ten times what its rate says, and how far they move the
        # weights means nothing.
        odd = {id(p) for o in trained.optimizers if isinstance(o, torch.optim.RMSprop) for p in _held_by(o)}
        # How far a gradient moves its weights, times the rate; a normalised step hardly depends on its size.
        pairs = [(group, _step_length(o, group)) for o in trained.optimizers for group in o.param_groups]
        lengths = {id(p): length for group, length in pairs for p in group["params"]}
        self._lengths = {name: lengths[id(in_optimizer(p))] for name, p in trained.named}
        names = {id(in_optimizer(p)): name for name, p in trained.named}
        self._holdings = [(o, tuple(names[id(p)] for p in _held_by(o) if id(p) in names)) for o in trained.optimizers]
        self._weighed = {name for name, p in trained.named if id(in_optimizer(p)) not in odd}
        self._last: tuple[list[str], Tensor] | None = None  # names and hashes of the previous scan
        self._looks: dict[torch.device, Looker] = {}
        self._subjects: list[Subject] = []
        self._signature: list[object] | None = None
        self._is_listed = self._is_listed_by_all = False
        self._still = set(self._groups)  # parameters that no step should have moved since the previous scan
        # Those that a step should have moved, that step, and how far it moves them with all that follow from it.
        self._pushed: dict[str, tuple[int, float]] = {}

    def compile(self) -> None:
        """Compile or load the kernels of a scan now, and those that compare it with the one before."""
        # With several ranks a scan is a collective.
        if not self._ranks.many:
            self.scan(-1)
            self.scan(-1)
            self.forget()

    def note_step(self, reading: Reading) -> None:
        """Remember which parameters this step should have moved; costs nothing once all are expected to move."""
        # `not ... > 0` and not `<= 0`, so that NaN counts as no push.
        if not self._still or reading.skipped or not reading.clip_coefficient > 0:
            return
        table, least = reading.gradients, ROUNDING * reading.finite_grad_norm
        for name, norm in zip(table.names, table.cells[::NUM_COLUMNS]):
            if norm > least and name in self._still and self._has_rate(name, reading.learning_rates):
                self._still.remove(name)
                rate = reading.learning_rates[self._groups[name]] * reading.clip_coefficient
                self._pushed[name] = reading.step, rate * norm * self._lengths[name]

    @property
    def has_many_ranks(self) -> bool:
        """Whether other ranks scan too, and exchange their numbers."""
        return self._ranks.many

    def begin(self, *, shares_later: bool = False, is_edited: bool = False) -> PendingParameterScan:
        """Queue a scan of the current weights; waits for nothing.

        `shares_later`: the ranks exchange their numbers when the scan is read. At this moment another rank may be in
        a collective of the model, in a step of another form. `is_edited`: the program changed weights since the
        previous scan. The scan says so if it did on every rank.
        """
        try:
            subjects, numbers, halves = self._look_or_say_failed()

            def send() -> Ticket | None:
                if not self._know_all_sizes():
                    return None
                shared = torch.cat([self._share(numbers, subjects, is_edited=is_edited).reshape(-1), halves])
                return (self._transfer or Transfer(slots=1)).send(shared)

            return PendingParameterScan(self, subjects, send if shares_later else send(), is_edited=is_edited)
        except Exception:  # an unusual tensor, or no memory: measuring must never end the training
            # It may hold the hashes of the very scan that failed, and that was never read.
            self.drop_hashes()
            return PendingParameterScan(self)

    def _look_or_say_failed(self) -> tuple[list[Subject], Tensor, Tensor]:
        """Return the tensors scanned [N], their numbers [N, 4], and this rank's hashes in halves [2 N]."""
        try:
            subjects = self._find_subjects()
            numbers = self._look_at(subjects)
            # Now and not when they are sent: by then another scan may have replaced self._last.
            return subjects, numbers, self._split_hashes()
        except Exception:
            if not self._ranks.many:
                raise
            # The other ranks wait for this one in the exchange. In host memory: the device's may be what is lacking.
            self.drop_hashes()
            numbers = torch.zeros(len(self._subjects), WIDTH, dtype=torch.float64, device="cpu")
            numbers[:, CHANGED] = FAILED
            return self._subjects, numbers, numbers.new_empty(0)

    def _split_hashes(self) -> Tensor:
        """Return both halves of this rank's own hashes, as float64 holds them: [2 * N]."""
        assert self._last is not None
        hashes = self._last[1]
        return torch.cat([hashes & 0xFFFFFFFF, hashes >> 32]).double()

    def scan(self, step: int) -> ParameterScan:
        """Scan and read at once: one host read."""
        return self.begin().read(step)

    def take_pushed(self, step: int) -> dict[str, float]:
        """Return how far steps up to `step` should have moved parameters since the previous scan; start afresh."""
        pushed = {name: length for name, (when, length) in self._pushed.items() if when <= step}
        self._pushed = {name: push for name, push in self._pushed.items() if push[0] > step}
        self._still = set(self._groups) - self._pushed.keys()
        return pushed

    def list_steered(self) -> tuple[tuple[str, ...], ...]:
        """Return the parameters of each optimizer that may leave some of them where they are."""
        return tuple(names for optimizer, names in self._holdings if _may_hold_still(optimizer))

    def drop_hashes(self) -> None:
        """Have the next scan compare with nothing."""
        self._last = None

    def forget(self) -> None:
        """Forget the hashes after the weights were replaced (rollback, load): the next scan compares with nothing."""
        self.drop_hashes()
        self.take_pushed(1 << 62)

    def _find_subjects(self) -> list[Subject]:
        """Return the tensors to scan: those of the previous scan while the model holds the very same ones."""
        signature = _sign_tensors(self._model)
        if signature is None or signature != self._signature:
            self._signature, self._subjects = signature, list(self._list_subjects())
        self._is_listed = True
        return self._subjects

    def _know_all_sizes(self) -> bool:
        """Return whether every rank knows the size of the exchange: one that has never listed its tensors does not.

        A host exchange, until it is so: with the first scan, whose numbers are waited for where they are sent.
        """
        if self._ranks.many and not self._ranks.is_joining and not self._is_listed_by_all:
            self._is_listed_by_all = bool(self._ranks.find_least(int(self._is_listed)))
            return self._is_listed_by_all
        return True

    def _list_subjects(self) -> Iterator[Subject]:
        """Yield the model's parameters, those that only an optimizer holds, and buffers that can be non-finite."""
        seen: set[int | str] = set()
        fragments = [(name, p) for name, p in self._named if isinstance(p, Fragment)]  # before what they stand for
        for name, whole in (*fragments, *list_parameters(self._model), *self._named):
            tensor = take_local(whole)
            # By name too: a replaced parameter would otherwise appear twice, the old one last.
            if id(whole) in seen or name in seen or not is_readable(tensor):
                continue
            seen |= {id(whole), name}
            is_trained = name in self._groups
            if is_trained or _can_be_nonfinite(tensor):
                is_there = tensor.numel() > 0 or self._ranks.many  # a shard may be empty, and still needs its row
                weighed = name in self._weighed and whole.dim() > 1 and tensor.is_floating_point() and is_there
                yield Subject(name, tensor, is_trained=is_trained, is_weighed=weighed)
        for name, buffer in list_buffers(self._model):
            tensor = take_local(buffer)
            if is_readable(tensor) and _can_be_nonfinite(tensor):
                yield Subject(name, tensor, is_buffer=True)

    @torch.no_grad()
    def _look_at(self, subjects: Sequence[Subject]) -> Tensor:
        """Return float64 [N, 4]: the scan, and whether the hash changed; -1 where there is none to compare with."""
        numbers, hashes = self._look_on_each_device(subjects)
        names = [subject.name for subject in subjects]
        last, self._last = self._last, (names, hashes)
        changed = torch.full((len(names), 1), -1.0, dtype=torch.float64, device=numbers.device)
        if last is not None and last[1].device == hashes.device:
            if last[0] == names:
                # Compared where they are: no host read.
                changed = (hashes != last[1]).double().unsqueeze(1)
            else:  # parameters came or went: compare those that stayed
                places = {name: i for i, name in enumerate(last[0])}
                stayed = [(i, places[name]) for i, name in enumerate(names) if name in places]
                now, then = torch.tensor(stayed, device=hashes.device, dtype=torch.int64).reshape(-1, 2).unbind(1)
                changed[now, 0] = (hashes[now] != last[1][then]).double()
        return torch.cat([numbers, changed], 1)

    def _look_on_each_device(self, subjects: Sequence[Subject]) -> tuple[Tensor, Tensor]:
        by_device: dict[torch.device, list[int]] = {}
        for i, subject in enumerate(subjects):
            by_device.setdefault(subject.tensor.device, []).append(i)
        parts = [self._look_on(device, [subjects[i] for i in rows]) for device, rows in by_device.items()]
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return torch.empty(0, NUM_NUMBERS, dtype=torch.float64, device="cpu"), torch.empty(
                0, dtype=torch.int64, device="cpu"
            )
        device = parts[0][0].device
        order = torch.tensor([i for rows in by_device.values() for i in rows], device=device).argsort()
        numbers, hashes = (torch.cat([part[k].to(device) for part in parts])[order] for k in range(2))
        return numbers, hashes

    def _look_on(self, device: torch.device, subjects: Sequence[Subject]) -> tuple[Tensor, Tensor]:
        if device not in self._looks:
            self._looks[device] = Looker(device)
        return self._looks[device].look(subjects)

    def _share(self, numbers: Tensor, subjects: Sequence[Subject], *, is_edited: bool) -> Tensor:
        """Combine the ranks: norms of whole weights, and the maximum of the rest, so that all know what one sees.

        A last row then says whether some rank's program has not edited the weights.
        """
        if not self._ranks.many:
            return numbers
        # Filled on the device: a number sent there would make the host wait.
        numbers = torch.cat([numbers, numbers.new_full((1, WIDTH), float(not is_edited))])
        if self._ranks.is_joining:  # not all ranks would answer, and none may act on what it alone sees
            numbers[:-1] = 0.0
            numbers[:-1, CHANGED] = -1.0
            numbers[-1] = 1.0
            return numbers
        shared = self._ranks.find_largest(numbers)
        weighed = [i for i, subject in enumerate(subjects) if subject.is_weighed]
        if weighed:
            whole = dict((*self._model.named_parameters(), *self._named))
            norms = self._ranks.combine_norms(numbers[weighed, NORM], [whole[subjects[i].name] for i in weighed])
            shared[weighed, NORM] = norms
        return shared

    def _has_rate(self, name: str, rates: tuple[float, ...]) -> bool:
        group = self._groups[name]
        return group < len(rates) and rates[group] > 0


class Looker:
    """Scans the tensors of one device: by kernels over a table of addresses on CUDA, one by one elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._has_kernels = device.type == "cuda" and triton_is_usable()
        self._shapes: list[tuple[int, torch.dtype]] = []
        self._kernels: Any = None

    def look(self, subjects: Sequence[Subject]) -> tuple[Tensor, Tensor]:
        """Return numbers float64 [N, 3] and hashes int64 [N]."""
        tensors = [subject.tensor for subject in subjects]
        if not self._has_kernels:
            return plain_looks.look_at(tensors, [subject.is_trained for subject in subjects])
        from steadygrad.measure.kernels import triton_looks

        fast = [i for i, tensor in enumerate(tensors) if triton_looks.fits(tensor)]
        others = sorted(set(range(len(tensors))) - set(fast))
        parts = []
        if fast:
            parts.append(self._look_fast([tensors[i] for i in fast]))
        if others:
            parts.append(plain_looks.look_at([tensors[i] for i in others], [subjects[i].is_trained for i in others]))
        if len(parts) == 1:
            return parts[0]
        order = torch.tensor([*fast, *others], device="cpu").argsort().to(tensors[0].device, non_blocking=True)
        numbers, hashes = (torch.cat([part[k] for part in parts])[order] for k in range(2))
        return numbers, hashes

    def _look_fast(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        from steadygrad.measure.kernels.triton_looks import WeightLook

        shapes = [(tensor.numel(), tensor.dtype) for tensor in tensors]
        if shapes != self._shapes:
            self._shapes, self._kernels = shapes, WeightLook(tensors)
        found: tuple[Tensor, Tensor] = self._kernels.look(tensors)
        return found


def _sign_tensors(model: nn.Module) -> list[object] | None:
    """Return which plain tensors a model holds, and their dtypes; None if some are of another kind."""
    found: list[object] = []
    for _, module in list_modules(model):
        for held in (module._parameters, module._buffers):
            for tensor in held.values():
                # A DTensor may get another local tensor and stay the same object, so such models are listed each time.
                if tensor is not None and type(tensor) not in (Tensor, nn.Parameter):
                    return None
                found += (id(tensor), None if tensor is None else tensor.dtype)
    return found


def _can_be_nonfinite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _read_checksums(subjects: Sequence[Subject], halves: Sequence[float]) -> dict[str, int]:
    low, high = halves[: len(subjects)], halves[len(subjects) :]
    pairs = zip(subjects, low, high)
    return {s.name: int(one) ^ int(other) & 0xFFFFFFFF for s, one, other in pairs if s.is_trained}  # & binds before ^


def is_statistic(name: str) -> bool:
    """Return whether a buffer holds statistics of a norm, where an Inf is a fault; in masks and priors it is normal."""
    return name.rpartition(".")[2].startswith("running_")


def count_bad(name: str, buffer: Tensor) -> Tensor:
    """Return how many elements of a buffer are not allowed in it."""
    return _count_nonfinite(buffer, infinite=is_statistic(name))


def _count_nonfinite(tensor: Tensor, *, infinite: bool = True) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    pieces = [_plain(piece) for piece in split_flat(tensor)]
    return torch.stack([(~p.isfinite() if infinite else p.isnan()).sum() for p in pieces]).sum().double()


def _step_length(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> float:
    momentum = group["momentum"] if isinstance(optimizer, torch.optim.SGD) else 1.0
    return 1 / (1 - momentum) if momentum < 1 else math.inf


def _may_hold_still(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step may leave a parameter with a gradient where it is: torch's own update never does."""
    kinds = (kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim."))
    is_torchs = any(kind is not torch.optim.Optimizer for kind in kinds)
    # As set by register_step_post_hook(): a hook there may clamp weights, or put some back.
    return not is_torchs or bool(getattr(optimizer, "_optimizer_step_post_hooks", None))


def _held_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _plain(piece: Tensor) -> Tensor:
    return piece.float() if piece.element_size() == 1 else piece  # float8 has few operators
