"""RankAgreement: do the ranks hold the same weights, and different batches? -> RankScans.

With each scan of the weights every rank writes the checksums on the board; batches of the first steps and of those
scans likewise. They are compared a few steps later, when all are there: no collective, no wait. Weights are compared
where DistributedDataParallel averages the gradients, or where the gradients themselves are equal bit for bit because
the program averages them; and only between ranks on the same kind of machine: another processor may round differently.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steadygrad.facts import RankScan
from steadygrad.measure.kernels.looks import hash_bits
from steadygrad.measure.rank_board import RankBoard
from steadygrad.measure.rows import PendingRows, is_readable, send_rows
from steadygrad.measure.transfer import Transfer
from steadygrad.state.live_objects import list_live
from steadygrad.state.trained_parameters import unwrap
from steadygrad.state.tree import find_tensors

FIRST_STEPS = (1, 2, 3)
"""Steps whose batches are compared besides those of the periodic scans; the first may be a warm-up of the program."""
MAX_TENSORS = 8
"""Most tensors of a batch to look at."""
MAX_GRADIENTS = 64
"""Most gradients to compare where nothing is known to average them."""
DIGITS = 8
"""Hexadecimal digits of a checksum."""


class PendingBatch:
    """A batch's checksum and its largest input, still being copied."""

    def __init__(self, rows: PendingRows, largest: str) -> None:
        self._rows, self._largest = rows, largest

    def read(self) -> tuple[str, str]:
        """Return (checksum, name of the largest floating tensor if it is all zeros)."""
        rows = self._rows.read()
        text = " ".join(f"{name}:{row[0]:.0f},{row[1]:.0f}" for name, row in sorted(rows.items()))
        is_zero = bool(self._largest) and rows[self._largest][2] == 0.0
        return _digest(text), self._largest if is_zero else ""


@torch.no_grad()
def look_at_batch(args: Sequence[Any], kwargs: Mapping[str, Any], transfer: Transfer) -> PendingBatch | None:
    """Queue a checksum of the batch; waits for nothing. None if it has no tensors that can be read."""
    rows: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    try:
        for path, tensor in find_tensors(args, kwargs):
            if len(rows) == MAX_TENSORS:
                break
            # A Parameter among the arguments is not data, and is equal on all ranks by design.
            if path not in rows and is_readable(tensor) and tensor.numel() and not isinstance(tensor, nn.Parameter):
                bits = hash_bits(tensor.detach())
                floats = tensor.is_floating_point()
                largest = tensor.detach().abs().amax() if floats else bits.new_ones(())
                # In halves: float64 holds 53 bits, the hash has 64.
                rows[path] = torch.stack([(bits & 0xFFFFFFFF).double(), (bits >> 32).double(), largest.double()])
                if floats and tensor.numel() > 1:
                    sizes[path] = tensor.numel()
        return PendingBatch(send_rows(rows, transfer), max(sizes, key=sizes.__getitem__, default="")) if rows else None
    except Exception:  # an unusual tensor, or no memory: measuring must never end the training
        return None


class RankAgreement:
    """Writes what this rank holds, and compares once the others have written theirs."""

    def __init__(self, board: RankBoard, model: nn.Module, ddp: nn.Module | None) -> None:
        self._board, self._model = board, model
        self._ddp = ddp if ddp is not None else find_wrapper(model)
        self._machine = _describe_machine(model)
        self._open: dict[str, tuple[int, int, int]] = {}  # topic -> number of the note, its step, polls so far
        self._num_notes = 0
        self._names: list[str] = []

    @property
    def num_averaging(self) -> int:
        """Number of ranks over which the gradients are averaged; 0 if they are not, or not before each step."""
        # A communication hook may average seldom or with losses, so that ranks differ by design.
        if self._ddp is None or getattr(self._ddp, "_comm_hooks", None):
            return 0
        group: Any = self._ddp.process_group
        return dist.get_world_size(group)

    def write_weights(self, step: int, checksums: Mapping[str, int], gradients: Mapping[str, int]) -> None:
        """Write the checksums of the weights after `step`, and of its gradients if nothing is known to average them."""
        is_paused = not getattr(self._ddp, "require_backward_grad_sync", True)
        if is_paused or not (self.num_averaging or gradients):
            return
        self._names = list(checksums) if self.num_averaging else [name for name in checksums if name in gradients]
        head = f"{self._machine} {_digest(repr(self._names))}"
        self._write("weights", step, f"{head} {_join(checksums, self._names)} {_join(gradients, self._names)}")

    def write_batch(self, step: int, checksum: str, zero_input: str) -> None:
        """Write the checksum of the batch of `step`."""
        self._write("batch", step, f"{checksum} {zero_input}")

    def _write(self, topic: str, step: int, note: str) -> None:
        self._num_notes += 1
        self._board.write(topic, step + 1, note)  # the scan before the first step has -1
        self._open[topic] = (step + 1, step, 0)

    def compare(self) -> list[RankScan]:
        """Return the comparisons that have become possible; asks the store less and less often while it waits."""
        found: list[RankScan] = []
        for topic, (number, step, polls) in list(self._open.items()):
            self._open[topic] = (number, step, polls + 1)
            # Each poll is a request to the store.
            if polls & (polls - 1):  # ask at 0, 1, 2, 4, 8, ...
                continue
            notes = self._board.read(topic, number)
            if notes is not None:
                del self._open[topic]
                compare = self._compare_weights if topic == "weights" else self._compare_batches
                found += compare(step, notes)
        return found

    def _compare_weights(self, step: int, notes: Mapping[int, str]) -> list[RankScan]:
        mine = notes[self._board.rank].split(" ")
        for rank, note in notes.items():
            other = note.split(" ")
            if rank == self._board.rank or other[:2] != mine[:2]:
                continue
            # Where DDP averages, gradients are not sent: both columns are zeros, and count as equal.
            rows = zip(self._names, _cut(mine[2]), _cut(other[2]), _cut(mine[3]), _cut(other[3]))
            differing = tuple(name for name, one, another, push, pull in rows if one != another and push == pull)
            if differing:
                return [self._make(step, rank, differing=differing)]
        return [self._make(step, self._board.rank)]

    def _compare_batches(self, step: int, notes: Mapping[int, str]) -> list[RankScan]:
        checksum, zero_input = notes[self._board.rank].split(" ", 1)
        others = {rank: note.split(" ", 1) for rank, note in notes.items() if rank != self._board.rank}
        nonzero = [rank for rank, (_, zero) in others.items() if not zero]
        return [
            self._make(
                step,
                nonzero[0] if zero_input and nonzero else next(iter(others)),
                batch=checksum,
                same_batch=all(other == checksum for other, _ in others.values()),
                zero_input=zero_input if nonzero else "",
            )
        ]

    def _make(self, step: int, other: int, **seen: Any) -> RankScan:
        return RankScan(
            step=step,
            rank=self._board.rank,
            other=other,
            num_compared=len(self._names),
            gradients_are_averaged=self.num_averaging > 1 or bool(seen.get("differing")),
            **seen,
        )


def find_wrapper(model: nn.Module) -> nn.Module | None:
    """Return the DistributedDataParallel around `model`."""
    for wrapper in list_live(nn.parallel.DistributedDataParallel):
        # One that is being built has no modules yet.
        if "_modules" in vars(wrapper) and unwrap(wrapper) is model:
            return None if wrapper.parameters_to_ignore else wrapper
    return None


def _describe_machine(model: nn.Module) -> str:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return _digest(f"{device.type} {kind} {platform.machine()} {torch.__version__}")


@torch.no_grad()
def look_at_gradients(named: Sequence[tuple[str, Tensor]], transfer: Transfer) -> PendingRows:
    """Queue checksums of the gradients; waits for nothing."""
    rows: dict[str, Tensor] = {}
    for name, parameter in named:
        gradient = parameter.grad
        if gradient is not None and is_readable(gradient) and len(rows) < MAX_GRADIENTS:
            bits = hash_bits(gradient)
            rows[name] = torch.stack([(bits & 0xFFFFFFFF).double(), (bits >> 32).double()])
    return send_rows(rows, transfer)


def read_checksums(rows: PendingRows) -> dict[str, int]:
    """Return name -> checksum, without gradients that are all zeros."""
    return {name: int(low) ^ int(high) & 0xFFFFFFFF for name, (low, high) in rows.read().items() if low or high}


def _join(checksums: Mapping[str, int], names: Sequence[str]) -> str:
    return "".join(f"{checksums.get(name, 0) & 0xFFFFFFFF:0{DIGITS}x}" for name in names)


def _cut(values: str) -> list[str]:
    return [values[i : i + DIGITS] for i in range(0, len(values), DIGITS)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
