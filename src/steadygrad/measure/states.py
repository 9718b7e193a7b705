"""ParameterWatch: all weights and buffers -> a ParameterScan: which are not finite, and which do not move.

A parameter is known again by a hash of its bits, one 64-bit number kept on its device: elements that change make
another number, up to one chance in billions. Reads the weights a few times, so it is asked for every N steps; the
numbers take one copy to the host, which `begin()` does not wait for. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from steadygrad.facts import NUM_COLUMNS, ParameterScan, Reading
from steadygrad.measure.ranks import Ranks
from steadygrad.measure.rows import PendingRows, is_readable, send_rows, split_flat
from steadygrad.measure.transfer import Transfer
from steadygrad.state.shards import take_local
from steadygrad.state.trained_parameters import TrainedParameters

PARAMETER, BUFFER, NORM = "parameter:", "buffer:", "norm:"
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
"""Knuth's multiplicative hash, 2^64 / the golden ratio, as a signed number."""


class PendingParameterScan:
    """A look at the weights whose numbers are on their way. Read once."""

    def __init__(self, watch: ParameterWatch, rows: PendingRows) -> None:
        self._watch, self._rows = watch, rows

    def read(self, step: int) -> ParameterScan:
        """The scan after `step`; tell the watch about the Reading of that step first."""
        rows, pushed = self._rows.read(), self._watch.take_pushed(step)
        parameters, buffers = _select(rows, PARAMETER), _select(rows, BUFFER)
        changed = {name: row[1] > 0 for name, row in parameters.items() if len(row) == 2}
        return ParameterScan(
            step=step,
            nonfinite_parameters={name: int(row[0]) for name, row in parameters.items() if row[0]},
            nonfinite_buffers={name: int(row[0]) for name, row in buffers.items() if row[0]},
            unchanged=tuple(name for name, moved in changed.items() if not moved and name in pushed),
            num_changed=sum(changed.values()),
            changed=tuple(name for name, moved in changed.items() if moved),
            norms={name: row[0] for name, row in _select(rows, NORM).items()},
        )


class ParameterWatch:
    """Call `scan(-1)` before the first step, `note_step` for each Reading, and `scan(step)` now and then."""

    def __init__(
        self, trained: TrainedParameters, *, transfer: Transfer | None = None, ranks: Ranks | None = None
    ) -> None:
        self._model, self._named = trained.model, trained.named
        self._ranks = ranks if ranks is not None else Ranks()
        self._transfer = transfer
        groups = [group for optimizer in trained.optimizers for group in optimizer.param_groups]
        of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        self._groups = {name: of[id(p)] for name, p in trained.named}
        # RMSprop has no bias correction: its first steps are ten times what its rate says, and how far they move the
        # weights tells nothing.
        odd = {id(p) for o in trained.optimizers if isinstance(o, torch.optim.RMSprop) for p in _held_by(o)}
        self._weighed = {name for name, p in trained.named if id(p) not in odd}
        self._hashes: dict[str, Tensor] = {}
        self._still = set(self._groups)  # parameters that nothing has pushed since the scan before
        self._pushed: dict[str, int] = {}  # those that something has, and the step that did

    def note_step(self, reading: Reading) -> None:
        """Remember whom this step should have moved; costs nothing once everybody is expected to move."""
        if not self._still or reading.skipped or not reading.clip_coefficient > 0:
            return
        table = reading.gradients
        for name, norm in zip(table.names, table.cells[::NUM_COLUMNS]):
            if norm > 0 and name in self._still and self._has_rate(name, reading.learning_rates):
                self._still.remove(name)
                self._pushed[name] = reading.step

    def begin(self) -> PendingParameterScan:
        """Queue a look at the weights as they are now; waits for nothing."""
        try:
            rows = self._share(self._look_at_all())
            return PendingParameterScan(self, send_rows(rows, self._transfer))
        except Exception:  # a tensor of its own kind, or no memory: looking must never end the training
            self._hashes = {}
            return PendingParameterScan(self, PendingRows())

    def scan(self, step: int) -> ParameterScan:
        """`begin()` and read: one host read."""
        return self.begin().read(step)

    def take_pushed(self, step: int) -> set[str]:
        """Whom the steps up to `step` should have moved since the scan before; starts anew."""
        pushed = {name for name, when in self._pushed.items() if when <= step}
        self._pushed = {name: when for name, when in self._pushed.items() if when > step}
        self._still = set(self._groups) - self._pushed.keys()
        return pushed

    def forget(self) -> None:
        """The weights were replaced (rollback, load): the next scan compares with nothing."""
        self._hashes = {}
        self.take_pushed(1 << 62)

    @torch.no_grad()
    def _look_at_all(self) -> dict[str, Tensor]:
        rows = {PARAMETER + name: self._look(name, tensor) for name, tensor in self._parameters()}
        for name, tensor in self._parameters():
            is_there = tensor.numel() > 0 or self._ranks.many  # a part may be empty, and must have its row all the same
            if name in self._weighed and tensor.dim() > 1 and tensor.is_floating_point() and is_there:
                rows[NORM + name] = _measure_norm(tensor).reshape(1)
        for name, tensor in self._model.named_buffers():
            tensor = take_local(tensor)
            if is_readable(tensor):
                rows[BUFFER + name] = count_bad(name, tensor).reshape(1)
        return rows

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters, then those that only an optimizer holds."""
        seen: set[int | str] = set()
        for name, tensor in (*self._model.named_parameters(), *self._named):
            # By name too: a parameter that was exchanged would else stand here twice, the one that is gone last.
            if id(tensor) not in seen and name not in seen and is_readable(take_local(tensor)):
                seen |= {id(tensor), name}
                yield name, take_local(tensor)

    def _share(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """On many ranks norms of whole weights, and of all other numbers the largest: what one sees, all must know."""
        if not self._ranks.many or not rows:
            return rows
        if self._ranks.is_joining:  # not all would answer, and what one sees alone none may act on
            return {}
        device = next(iter(rows.values())).device
        names = [key for key in rows if key.startswith(NORM)]
        others = [key for key in rows if key not in set(names)]
        packed = self._ranks.find_largest(torch.cat([rows[key].to(device) for key in others]))
        shared = dict(zip(others, packed.split([rows[key].numel() for key in others])))
        if names:
            whole = dict((*self._model.named_parameters(), *self._named))
            norms = torch.cat([rows[key].to(device) for key in names])
            norms = self._ranks.combine_norms(norms, [whole[key.removeprefix(NORM)] for key in names])
            shared |= dict(zip(names, norms.split(1)))
        return shared

    def _look(self, name: str, tensor: Tensor) -> Tensor:
        """Non-finite elements, and for a parameter seen before whether it changed: float64 [1] or [2]."""
        count = _count_nonfinite(tensor)
        if name not in self._groups:
            return count.reshape(1)
        new, old = _hash_bits(tensor), self._hashes.get(name)
        self._hashes[name] = new
        if old is None or old.device != new.device:
            return count.reshape(1)
        return torch.stack([count, (new != old).double()])

    def _has_rate(self, name: str, rates: tuple[float, ...]) -> bool:
        group = self._groups[name]
        return group < len(rates) and rates[group] > 0


def _select(rows: Mapping[str, Sequence[float]], kind: str) -> dict[str, Sequence[float]]:
    return {key.removeprefix(kind): row for key, row in rows.items() if key.startswith(kind)}


def is_statistic(name: str) -> bool:
    """Whether a buffer holds statistics of a norm, where an infinity is a fault: masks and priors are made of them."""
    return name.rpartition(".")[2].startswith("running_")


def count_bad(name: str, buffer: Tensor) -> Tensor:
    """How many elements of a buffer are not what it may hold."""
    return _count_nonfinite(buffer, infinite=is_statistic(name))


def _count_nonfinite(tensor: Tensor, *, infinite: bool = True) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    pieces = [_plain(piece) for piece in split_flat(tensor)]
    return torch.stack([(~p.isfinite() if infinite else p.isnan()).sum() for p in pieces]).sum().double()


def _held_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _measure_norm(tensor: Tensor) -> Tensor:
    """In float32 at least: the norm of many half-precision elements does not fit their own range."""
    pieces = [piece.float() if piece.element_size() < 4 else piece for piece in split_flat(tensor)]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(piece).double() for piece in pieces]))
    return norm


def _plain(piece: Tensor) -> Tensor:
    return piece.float() if piece.element_size() == 1 else piece  # float8 has few operators


def _hash_bits(tensor: Tensor) -> Tensor:
    """A number that depends on every bit of every element: int64 scalar."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    return torch.stack([_hash_piece(piece) for piece in split_flat(tensor)]).sum()


def _hash_piece(piece: Tensor) -> Tensor:
    """Sum of mixed bit patterns. Without the mixing one ulp up here and one ulp down there would cancel."""
    if piece.dtype is torch.bool:
        piece = piece.to(torch.int8)
    bits = piece.view(INTEGERS[piece.element_size()])
    mixed = bits.to(torch.int64) * MULTIPLIER  # not in place: the bits of a float64 are the parameter itself
    return mixed.bitwise_xor_(mixed >> 32).sum()
