"""Ranks: the processes that train together, and the one exchange per step that makes their numbers equal.

Under DistributedDataParallel gradients are equal on all ranks, NaN included, and only the losses are exchanged: one
small all-reduce, started before backward. For sharded gradients (FSDP2, tensor parallelism), or gradients that nothing
makes equal, the whole table of statistics is exchanged after backward. Equal numbers then lead every rank to the same
decision without further communication. The exchange has the same size on every rank, whatever it has seen, so that no
rank waits for another. A single process exchanges nothing.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steadygrad.errors import UsageError
from steadygrad.facts import NUM_COLUMNS
from steadygrad.state.shards import count_shards, is_dtensor

LOSS_SUM, NUM_LOSSES, STOP, NUM_FIXED = range(4)
"""The exchange: losses summed, how many there were, how many ranks ask to stop, then bits of the bad ranks."""
RANKS_A_NUMBER = 48
"""Bits that a float64 sums without loss: each rank adds its own power of two when its loss is not finite."""
NO_GRADIENTS = 2.0**50
"""What a rank without gradients counts as non-finite, more than any parameter has: no rank steps, and all know why."""
SUMMED = (0, 2, 3, 4)
"""Columns of the table that are summed over shards (the norm as a square); for the largest element take the maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FromRanks:
    """What the ranks exchanged besides the numbers of the Reading."""

    began_on: tuple[int, ...] = ()
    """The ranks whose own loss was not finite."""
    asks_to_stop: bool = False
    """Whether some rank received a signal."""
    own_loss: float | None = None
    """This rank's loss, before it was averaged."""


class Ranks:
    """A group of ranks that decides as one. `Ranks()` is a single process."""

    def __init__(
        self, group: Any = None, *, named: Sequence[tuple[str, Tensor]] = (), ddp: nn.Module | None = None
    ) -> None:
        self.group = group
        self.num: int = 1 if group is None else dist.get_world_size(group)
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.nodes: tuple[str, ...] = ()
        """Name of each rank's machine."""
        self.ddp = ddp
        self.asks_to_stop = False
        """Set when this rank received a signal; the others learn of it with the next step."""
        self.is_joining = False
        """Whether we are inside `guard.join()`, where a rank without data only shadows the others."""
        self._is_uneven = False
        self._layouts: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}
        self.watch(named)
        self._device = _find_device(group, named)
        self._bits = _make_bits(self.num, self.rank, self._device)
        # On the device from the start: sending a number there later makes the host wait.
        self._heads = {
            asks: torch.tensor([0.0, 1.0, float(asks)], dtype=torch.float64, device=self._device)
            for asks in (False, True)
        }
        self._under_way: tuple[Tensor, dist.Work | None] | None = None
        self._said: Tensor | None = None

    def watch(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Set the parameters that all ranks train from now on."""
        self._rows = {name: i for i, (name, _) in enumerate(named)}
        # They hold positions and weights of the old parameters.
        self._layouts.clear()

    @property
    def many(self) -> bool:
        """Whether ranks must agree; true also for an explicitly requested group of one."""
        return self.group is not None

    @property
    def is_first(self) -> bool:
        """Whether this rank writes for all."""
        return self.rank == 0

    @property
    def shares_tables(self) -> bool:
        """Whether gradients may differ between the ranks when they are measured."""
        return self.many and self.ddp is None

    # --- the losses -------------------------------------------------------------------------------------------------

    def start(self, losses: Sequence[Tensor]) -> None:
        """Start exchanging the losses before a backward in which DDP makes the gradients equal."""
        if self.ddp is None or not self.many:
            return
        with torch.no_grad():
            # Left from an earlier microbatch, or a backward that raised: all ranks started it, so all must end it.
            self._drop()
            if self.ddp.require_backward_grad_sync and not self.is_joining:
                # Before backward, to run beside it; no rank may leave it out, whatever its own loss is.
                self._send(self._fill(_add(losses)))

    def check_synchronised(self) -> None:
        """Raise an error if DDP is set not to synchronise the gradients of this backward."""
        if self.many and self.ddp is not None and not self.ddp.require_backward_grad_sync:
            raise UsageError(
                "drop_bad_microbatches cannot work under no_sync(): each rank has gradients of its own there, and "
                "would drop others than the rest. Leave out no_sync(), or switch drop_bad_microbatches off."
            )

    def finish_backward(self, losses: Sequence[Tensor]) -> None:
        """Exchange after backward, inside `guard.join()`: ranks without data shadow DDP first and this afterwards."""
        if self.is_joining and self.ddp is not None and self.ddp.require_backward_grad_sync:
            with torch.no_grad():
                self._send(self._fill(_add(losses)))

    @torch.no_grad()
    def shadow(self) -> None:
        """Take part in the exchange without contributing a loss."""
        self._send(self._fill(None))
        self._drop()

    def spread(self, loss: Tensor | None) -> Tensor | None:
        """Return the mean loss of all ranks, non-finite if one is; or `loss` itself if tables are exchanged later."""
        return loss if not self.many or self.shares_tables else self._spread(loss)

    @torch.no_grad()
    def _spread(self, loss: Tensor | None) -> Tensor | None:
        if self._under_way is None:
            self._send(self._fill(loss))
        numbers = self._receive()
        self._say(numbers, loss)
        return None if loss is None else numbers[LOSS_SUM] / numbers[NUM_LOSSES]

    def _fill(self, loss: Tensor | None) -> Tensor:
        """Return this rank's part of the exchange. No host read."""
        # A copy: all_reduce writes into it.
        head = self._heads[self.asks_to_stop].clone()
        if loss is None:
            head[NUM_LOSSES] = 0.0
            return torch.cat([head, torch.zeros_like(self._bits)])
        loss = loss.detach().to(self._device).double()
        # One rank's NaN makes the sum NaN, and with it the mean on every rank.
        head[LOSS_SUM] = loss
        return torch.cat([head, torch.where(loss.isfinite(), 0.0, self._bits)])

    def _send(self, numbers: Tensor) -> None:
        # The tensor is held until it is waited for: the collective writes into its memory.
        self._under_way = (numbers, dist.all_reduce(numbers, group=self.group, async_op=True))

    def _receive(self) -> Tensor:
        assert self._under_way is not None
        (numbers, work), self._under_way = self._under_way, None
        if work is not None:
            # With NCCL this makes the stream wait, not the host.
            work.wait()
        return numbers

    def _drop(self) -> None:
        if self._under_way is not None:  # started on every rank, so it must be completed on every rank
            self._receive()

    def _say(self, numbers: Tensor, own_loss: Tensor | None) -> None:
        own = numbers.new_zeros(1) if own_loss is None else own_loss.detach().to(numbers.device).double().reshape(1)
        # Its own loss comes last, where read() finds it.
        self._said = torch.cat([numbers, own])

    # --- the tables -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def share(
        self, table: Tensor, names: Sequence[str], gradients: Sequence[Tensor], loss: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Make the rows of `table` [N, 5] those of the whole gradients.

        Returns the rows of all parameters [P, 5], and the mean loss. An element that several ranks hold counts as a
        fraction on each, so that a NaN in one copy alone is seen too. A rank without gradients has N = 0 rows.
        """
        device = table.device
        rows, weights = self._find_layout(tuple(names), gradients, device)
        # A row for each parameter, with or without a gradient here: the exchange must have the same size on all ranks.
        full = table.new_zeros(len(self._rows), NUM_COLUMNS).index_copy(0, rows, table)
        parts = full.clone()
        parts[:, 0].square_()
        parts.index_copy_(0, rows, parts[rows] * weights[:, None])
        if not names:
            parts[0, 2] = NO_GRADIENTS
        numbers = torch.cat([self._fill(loss), parts[:, SUMMED].to(self._device).flatten()])
        largest = full[:, 1].clone().to(self._device)  # [P]
        works = [  # both are queued before the first is waited for
            dist.all_reduce(numbers, group=self.group, async_op=True),
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group, async_op=True),
        ]
        for work in works:
            work.wait()
        head, sums = numbers[: NUM_FIXED + len(self._bits)], numbers[NUM_FIXED + len(self._bits) :]
        full[:, SUMMED] = sums.view(-1, len(SUMMED)).to(device)
        full[:, 0].sqrt_()  # squares of norms were summed
        full[:, 2:] = (full[:, 2:] - 1e-6).ceil()  # thirds of a count do not add up to it exactly
        full[:, 1] = largest.to(device)
        # A view into `packed`: the host reads the numbers of all ranks.
        table.copy_(full[rows])
        self._say(head.to(device), loss)
        return full, None if loss is None else (head[LOSS_SUM] / head[NUM_LOSSES]).to(device)

    def _find_layout(
        self, names: tuple[str, ...], gradients: Sequence[Tensor], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the positions of these parameters among all, and the share that this rank counts, [N] and [N]."""
        layout = self._layouts.get(names)
        if layout is None or layout[0].device != device:
            # Kept for later steps: sending a table from pageable memory makes the host wait.
            rows = torch.tensor([self._rows[name] for name in names], dtype=torch.int64, device=device)
            weights = torch.tensor([count_shards(g) / self.num for g in gradients], dtype=torch.float64, device=device)
            layout = self._layouts[names] = rows, weights
        return layout

    @torch.no_grad()
    def combine_norms(self, norms: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Turn norms of this rank's parts of `tensors` into norms of the whole tensors."""
        if not self.shares_tables:
            return norms
        weights = torch.tensor([count_shards(t) / self.num for t in tensors], dtype=torch.float64, device=norms.device)
        return self._reduce(norms.square() * weights, dist.ReduceOp.SUM).sqrt()

    @torch.no_grad()
    def find_largest(self, numbers: Tensor) -> Tensor:
        """Return the element-wise maximum over all ranks."""
        return self._reduce(numbers, dist.ReduceOp.MAX) if self.many else numbers

    def _reduce(self, numbers: Tensor, op: Any) -> Tensor:
        # A copy: all_reduce works in place, and the numbers are the caller's.
        moved = numbers.to(self._device, copy=True)
        dist.all_reduce(moved, op, group=self.group)
        return moved.to(numbers.device)

    # --- what goes to the host --------------------------------------------------------------------------------------

    def take_said(self) -> Tensor | None:
        """Return what is sent to the host after the measurement; None for a single process."""
        said, self._said = self._said, None
        return said

    def read(self, said: Sequence[float], *, has_loss: bool) -> FromRanks:
        """Decode the exchanged values on the host."""
        if not said:
            return FromRanks()
        bits = [int(number) for number in said[NUM_FIXED:-1]]
        bad = [i for i in range(self.num) if bits[i // RANKS_A_NUMBER] >> i % RANKS_A_NUMBER & 1]
        return FromRanks(
            began_on=tuple(bad), asks_to_stop=said[STOP] > 0, own_loss=float(said[-1]) if has_loss else None
        )

    # --- seldom, on the host ----------------------------------------------------------------------------------------

    def check_alike(self, about: str) -> None:
        """Raise an error on every rank unless all have the same parameters and settings; collect machine names."""
        if not self.many:
            return
        # Not sorted: rows are exchanged by position.
        mine = (len(self._rows), _digest(repr(list(self._rows))), _digest(about), socket.gethostname())
        others = self.gather(mine)
        for i, what in enumerate(("number of parameters", "names or order of parameters", "settings")):
            differing = [rank for rank, other in enumerate(others) if other[i] != others[0][i]]
            if differing:
                raise UsageError(
                    f"{self.num} ranks train together, and the {what} of rank {differing[0]} differ from those of rank "
                    f"0 ({others[differing[0]][i]}, {others[0][i]}). Use the same model, optimizer and GuardConfig on "
                    "all ranks, or give Guard the process_group of those that train together."
                )
        self.nodes = tuple(other[3] for other in others)

    def gather(self, value: Any) -> list[Any]:
        """Return the plain value of each rank, by rank."""
        if not self.many:
            return [value]
        values: list[Any] = [None] * self.num
        # Pickles, and waits on the host: not for healthy steps.
        dist.all_gather_object(values, value, group=self.group)
        return values

    @property
    def why_apart(self) -> str | None:
        """Why nothing that needs every rank may begin; None if it may. The same on all ranks that train."""
        if self.is_joining:
            return "a rank may have no more data"
        return "the ranks have made different numbers of steps" if self._is_uneven else None

    def note_steps(self, num_steps: int) -> int:
        """Compare step counts after `guard.join()`: ranks with fewer steps may come to other conclusions.

        Return the largest.
        """
        counts: set[int] = set(self.gather(num_steps))
        self._is_uneven |= len(counts) > 1
        return max(counts)

    def find_least(self, value: int) -> int:
        """Return the minimum over all ranks."""
        least: int = min(self.gather(value))
        return least

    def take_mean(self, value: float) -> float:
        """Return the mean over all ranks."""
        values = self.gather(value)
        return float(sum(values)) / len(values)

    def find_common(self, steps: Sequence[int]) -> set[int]:
        """Return the steps that every rank has; empty while a rank may be out of data, since it would not answer."""
        if self.is_joining:
            return set()
        return set.intersection(*map(set, self.gather(list(steps))))

    @property
    def num_neighbours(self) -> int:
        """Number of ranks on this machine, including this one."""
        return self.nodes.count(self.nodes[self.rank]) if self.many and self.nodes else 1

    def name(self, rank: int) -> str:
        """Return 'rank 3', or 'rank 3 (on b12)' if there are several machines."""
        return f"rank {rank} (on {self.nodes[rank]})" if len(set(self.nodes)) > 1 else f"rank {rank}"


def find_ranks(model: nn.Module, named: Sequence[tuple[str, Tensor]], *, process_group: Any = None) -> Ranks:
    """Return the ranks that train `model` together: the given group, that of its DDP, or all."""
    if not dist.is_available() or not dist.is_initialized():
        return Ranks()
    ddp = _find_ddp(model, named)
    if process_group is not None:
        return Ranks(process_group, named=named, ddp=ddp)
    group = ddp.process_group if ddp is not None else dist.group.WORLD
    return Ranks(group, named=named, ddp=ddp) if dist.get_world_size(group) > 1 else Ranks()


def _find_ddp(model: nn.Module, named: Sequence[tuple[str, Tensor]]) -> Any:
    """Return the wrapper that makes all these gradients equal; None if some are sharded or left out."""
    while isinstance(getattr(model, "_orig_mod", None), nn.Module):
        model = model._orig_mod  # type: ignore[assignment]
    if not isinstance(model, nn.parallel.DistributedDataParallel) or model.parameters_to_ignore:
        return None
    own = {id(p) for p in model.parameters()}
    return model if all(id(p) in own and not is_dtensor(p) for _, p in named) else None


def _find_device(group: Any, named: Sequence[tuple[str, Tensor]]) -> torch.device:
    """Return the device of the exchange: that of the parameters, if the group can communicate there."""
    device = named[0][1].device if named else torch.device("cpu")
    # Private: the devices that the backends of a group communicate on.
    if group is None or device.type in {kind.type for kind in group._device_types}:
        return device
    other: torch.device = group._device_types[0]
    return torch.device(other.type, torch.cuda.current_device()) if other.type == "cuda" else other


def _make_bits(num: int, rank: int, device: torch.device) -> Tensor:
    bits = [0.0] * -(-num // RANKS_A_NUMBER)
    bits[rank // RANKS_A_NUMBER] = float(1 << rank % RANKS_A_NUMBER)
    return torch.tensor(bits, dtype=torch.float64, device=device)


def _add(losses: Sequence[Tensor]) -> Tensor | None:
    if len(losses) < 2:
        return losses[0] if losses else None
    return torch.stack([loss.detach().double() for loss in losses]).sum()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
