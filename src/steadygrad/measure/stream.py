"""StreamWatch: the batches that were trained on, one after another -> StreamScans: batches and epochs that come again.

A batch becomes a checksum of a few kilobytes. Content is compared only between different tensors: programs that use
the very same tensors again mean to. When a pattern shows, the DataLoaders alive are looked up once, which tells whether
it was meant. Cost: about 10 us a tensor on the CPU; on a device a few small kernels and one asynchronous copy a step,
for the first `MOST_ON_DEVICE` steps. Reads only; a failure ends the watch, never the training.
"""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from steadygrad.facts.program import SingleSample, StreamScan
from steadygrad.measure.loaders import Loader, list_loaders
from steadygrad.measure.rows import PendingRows, is_readable, send_rows
from steadygrad.measure.transfer import Transfer

MOST_TENSORS = 4
FEWEST_ELEMENTS = 8
"""Elements below which a tensor says nothing about its batch."""
PIECE_BYTES, NUM_PIECES = 1024, 4
"""What of a tensor goes into its checksum."""
SAMPLE = 1024
"""Elements of a tensor on a device that go into it."""
MOST_ON_HOST, MOST_ON_DEVICE = 1024, 1024
"""Batches that are compared."""
NUM_WHOLE = 64
"""Batches whose tensors are all compared; of later ones a single tensor, for the order of epochs."""
NUM_STUCK = 16
"""Batches with the same content after which a loader counts as stuck."""
NUM_RUNS = 6
"""Different batches, each of which came several times, after which that is a pattern."""
SHORTEST_EPOCH = 8
ENOUGH = 64
"""Batches of a second epoch in the order of the first that prove it."""
FEW_STEPS = 8
"""Steps in which shapes are compared."""


@dataclass(slots=True)
class _Sequence:
    """The checksums of one tensor of the batch, or of all of them together."""

    marks: list[int]
    is_over: bool = False

    def find_repeats(self) -> tuple[str, int] | None:
        """Return 'stuck' or 'repeated' with how often each comes, once it is certain."""
        marks = self.marks
        if len(marks) >= NUM_STUCK and marks[0] == marks[-1] and len(set(marks)) == 1:
            return "stuck", len(marks)
        if len(marks) < 2 * NUM_RUNS or (marks[1] != marks[0] and marks[2] != marks[1]):
            return None
        runs = [1]
        for one, next_one in itertools.pairwise(marks):
            if one == next_one:
                runs[-1] += 1
            else:
                runs.append(1)
        # The first run and the last may be incomplete.
        whole = runs[1:-1]
        if len(whole) >= NUM_RUNS and len(set(whole)) == 1 and whole[0] > 1:
            return "repeated", whole[0]
        return None

    def find_order(self) -> int | None:
        """Return the length of an epoch once a second one has come in the same order."""
        marks = self.marks
        if len(marks) < 2 * SHORTEST_EPOCH or marks[-1] not in (self._first or self._index()):
            return None
        period = len(marks) - 1 - self._first[marks[-1]]
        enough = min(period, ENOUGH)
        if period < SHORTEST_EPOCH or len(marks) < period + enough or len(self._first) < period:
            return None
        return period if marks[-enough:] == marks[-enough - period : -period] else None

    _first: dict[int, int] = None  # type: ignore[assignment]

    def _index(self) -> dict[int, int]:
        self._first = {}
        for i, mark in enumerate(self.marks):
            self._first.setdefault(mark, i)
        return self._first


NOTHING = PendingRows()


class StreamWatch:
    """Notes each batch that is trained on; `take` returns the patterns that have shown."""

    def __init__(self, transfer: Transfer | None = None) -> None:
        self._transfer = transfer
        # By identity: `==` of tensors compares elements.
        self._seen: Any = WeakIdKeyDictionary()
        self._whole = _Watched()
        self._parts: dict[str, _Watched] = {}
        self._pending: list[tuple[int, dict[str, int | None], PendingRows, bool]] = []
        self._facts: list[StreamScan | SingleSample] = []
        self._is_over = self._has_found_single = False
        self._rows = self._num_noted = 0
        self._singles: dict[str, tuple[tuple[int, ...], int | None]] = {}

    @property
    def is_on(self) -> bool:
        """Whether further batches are compared."""
        return not self._is_over

    @property
    def has_news(self) -> bool:
        """Whether `take` may return something."""
        return bool(self._pending or self._facts)

    def note_batch(self, step: int, tensors: Sequence[tuple[str, Tensor]], *, is_given: bool) -> None:
        """Note the batch of `step`; `is_given`: as the program passed it, and not as the model gets it."""
        if self._is_over:
            return
        try:
            self._note(step, tensors, is_given)
        except Exception:  # an unusual batch, or no memory: the training goes on without this watch
            self._is_over = True

    def take(self, step: int) -> list[StreamScan | SingleSample]:
        """Return the patterns that have shown by `step`."""
        try:
            waiting = self._pending
            # Before they are read: what fails once is not read again.
            self._pending = [one for one in waiting if one[0] > step]
            for when, marks, rows, is_given in waiting:
                if when <= step:
                    self._admit(when, marks if rows is NOTHING else {**marks, **_read_marks(rows)}, is_given)
        except Exception:
            self._is_over = True
        facts, self._facts = self._facts, []
        return facts

    def _note(self, step: int, tensors: Sequence[tuple[str, Tensor]], is_given: bool) -> None:
        marks: dict[str, int | None] = {}
        rows: dict[str, Tensor] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        on_device = False
        for path, tensor in tensors if self._num_noted < NUM_WHOLE else self._choose_one(tensors):
            if len(marks) + len(rows) == MOST_TENSORS:
                break
            if tensor.numel() < FEWEST_ELEMENTS or not tensor.dim() or not is_readable(tensor):
                continue
            shapes[path] = tuple(tensor.shape)
            if self._is_known(tensor):
                marks[path] = None
            elif tensor.device.type == "cpu":
                marks[path] = _sum_on_host(tensor)
            else:
                rows[path], on_device = sum_on_device(tensor), True
        if not shapes:
            return
        self._num_noted += 1
        self._rows = max(shape[0] for shape in shapes.values())
        tokens = {path for path, tensor in tensors if path in shapes and tensor.dtype in (torch.int64, torch.int32)}
        self._look_for_single(step, shapes, marks, tokens)
        self._pending.append((step, marks, send_rows(rows, self._transfer) if rows else NOTHING, is_given))
        self._is_over = self._num_noted >= (MOST_ON_DEVICE if on_device else MOST_ON_HOST)

    def _choose_one(self, tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return the tensor whose order is followed: labels, which augmentation leaves alone, or else the first."""
        self._whole.is_over = True
        following = {path for path, part in self._parts.items() if not part.is_over}
        left = [(path, tensor) for path, tensor in tensors if path in following]
        return [one for one in left if not one[1].is_floating_point()][:1] or left[:1]

    def _is_known(self, tensor: Tensor) -> bool:
        """Whether the program has used this very tensor, or the same part of the same one, as a batch before."""
        # Slices of one tensor are new objects each time; their base stays the same.
        base = tensor if tensor._base is None else tensor._base
        place = (tensor.storage_offset(), tuple(tensor.shape))
        places = self._seen.setdefault(base, set())
        if place in places:
            return True
        places.add(place)
        return False

    def _admit(self, step: int, marks: Mapping[str, int | None], is_given: bool) -> None:
        for path, mark in marks.items():
            part = self._parts.setdefault(path, _Watched())
            if part.admit(mark):
                period = part.sequence.find_order()
                if period is not None:
                    part.is_over = True
                    self._report(step, path, "order", period, is_given)
        if self._whole.is_over and all(part.is_over for part in self._parts.values()):
            self._is_over = True
            return
        known = [mark for mark in marks.values() if mark is not None]
        whole = None if len(known) < len(marks) else zlib.crc32(repr(known).encode())
        if self._whole.admit(whole):
            found = self._whole.sequence.find_repeats()
            if found is not None:
                self._whole.is_over = True
                self._report(step, next(iter(marks)), found[0], found[1], is_given)

    def _report(self, step: int, path: str, pattern: str, period: int, is_given: bool) -> None:
        loader = find_loader(self._rows, period if pattern == "repeated" else 0, idle=pattern == "stuck")
        self._facts.append(
            StreamScan(
                step=step,
                tensor=path,
                pattern=pattern,
                period=period,
                num_batches=len(self._whole.sequence.marks),
                is_given=is_given,
                **describe_loader(loader),
            )
        )

    def _look_for_single(
        self,
        step: int,
        shapes: Mapping[str, tuple[int, ...]],
        marks: Mapping[str, int | None],
        tokens: set[str],
    ) -> None:
        """Find a tensor with one row, whose content changes, among others with as many rows as the batch.

        Others of its shape, or, for the only tokens of a batch, any: a processor that joins the texts of all samples.
        """
        if self._has_found_single or step >= FEW_STEPS or self._rows < 4:
            return
        for path, shape in shapes.items():
            if shape[0] != 1 or len(shape) < 2:
                continue
            like = [name for name, other in shapes.items() if other == (self._rows, *shape[1:])]
            if not like and path in tokens and not any(len(shapes[other]) > 1 for other in tokens - {path}):
                like = [name for name, other in shapes.items() if other[0] == self._rows]
                like = like if len(like) > 1 else []  # inputs and labels
            if not like:
                continue
            before = self._singles.get(path)
            self._singles[path] = (shape, marks.get(path))
            changes = before is not None and before[0] == shape and before[1] != marks.get(path)
            if changes and marks.get(path) is not None:
                self._has_found_single = True
                self._facts.append(
                    SingleSample(step=step, tensor=path, shape=shape, other=like[0], other_shape=shapes[like[0]])
                )


class _Watched:
    """A sequence, until the same tensors are used again or its pattern was found."""

    def __init__(self) -> None:
        self.sequence = _Sequence([])
        self.is_over = False

    def admit(self, mark: int | None) -> bool:
        """Add a checksum; None for a tensor that was used before, which ends the watch."""
        if mark is None:
            self.is_over = True
        elif not self.is_over:
            sequence = self.sequence
            if sequence._first is not None:
                sequence._first.setdefault(mark, len(sequence.marks))
            sequence.marks.append(mark)
        return not self.is_over


def find_loader(num_rows: int, period: int = 0, *, idle: bool = False) -> Loader | None:
    """Return the loader that probably made these batches: of that size, or whose workers explain the period."""
    loaders = list_loaders(idle=idle)
    if period:
        return next((one for one in loaders if one.num_workers > 1 and period % one.num_workers == 0), None)
    fitting = [one for one in loaders if one.batch_size in (num_rows, None)]
    return max(fitting, key=lambda one: one.num_batches, default=None)


def describe_loader(loader: Loader | None) -> dict[str, Any]:
    """Return what a StreamScan says of it."""
    if loader is None:
        return {}
    return {
        "num_workers": loader.num_workers,
        "num_loader_batches": loader.num_batches or None,
        "shuffles": loader.shuffles,
        "is_distributed": loader.is_distributed,
    }


def _sum_on_host(tensor: Tensor) -> int:
    values = tensor.detach()
    if not values.is_contiguous():
        # Only the rows that are read: a copy of the whole batch takes long.
        values = values[: max(1, SAMPLE * len(values) // values.numel())].contiguous()
    size, start = values.numel() * values.element_size(), values.data_ptr()
    if size <= PIECE_BYTES * NUM_PIECES:
        # The start value separates equal bytes of different sizes.
        return zlib.crc32(ctypes.string_at(start, size), values.numel())
    mark, gap = size, (size - PIECE_BYTES) // (NUM_PIECES - 1)
    for i in range(NUM_PIECES):
        mark = zlib.crc32(ctypes.string_at(start + i * gap, PIECE_BYTES), mark)
    return mark


@torch.no_grad()
def sum_on_device(tensor: Tensor) -> Tensor:
    """Return two weighted sums of a sample: float64 [2] on the tensor's device."""
    values = tensor.detach()
    values = values.reshape(-1) if values.is_contiguous() else values[: max(1, SAMPLE * len(values) // values.numel())]
    values = values.reshape(-1)
    sample = values[:: max(1, values.numel() // SAMPLE)][:SAMPLE].double()
    places = torch.arange(len(sample), dtype=torch.float64, device=sample.device)
    # 1 / the plastic number: fractions of its multiples do not repeat, so elements that change places change the sum.
    return torch.stack([(sample * (places * 0.7548776662466927 + 0.3).frac()).sum(), sample.sum()])


def _read_marks(rows: PendingRows) -> dict[str, int]:
    # hash(nan) differs from object to object, so batches with a NaN never count as equal.
    return {path: hash(tuple(row)) for path, row in rows.read().items()}
