"""Two checkpoints -> what changed from the first to the second: tensors added, removed, of another shape or dtype, and
how far the elements of each moved. Reads chunk after chunk of both; equal bytes cost one comparison.

NaN where NaN was counts as unchanged, so that the numbers say what happened between the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from steadygrad.scan.checkpoint_scan import Progress
from steadygrad.scan.readers.chunks import ReaderPool, Readers, map_tensor, split_view
from steadygrad.scan.readers.formats import read_tensors
from steadygrad.scan.stored import StoredTensor


@dataclass(slots=True)
class TensorDiff:
    """One tensor of both checkpoints that is not the same in them."""

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    num_changed: int | None = 0
    """Elements that differ; None where the shapes do, and nothing can be compared."""
    num_new_nonfinite: int = 0
    """Finite in the first, NaN or Inf in the second."""
    max_change: float = 0.0
    """Over elements that are finite in both."""
    relative_change: float = 0.0
    """Norm of the difference over the norm of the first."""


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """What changed from `first` to `second`."""

    first: Path
    second: Path
    removed: tuple[str, ...]
    added: tuple[str, ...]
    changed: tuple[TensorDiff, ...]
    num_equal: int

    @property
    def is_empty(self) -> bool:
        return not (self.removed or self.added or self.changed)


def diff_checkpoints(first: str | Path, second: str | Path, progress: Progress | None = None) -> CheckpointDiff:
    """Compare two checkpoints of any format, tensor by tensor, by name."""
    olds, news = ({tensor.name: tensor for tensor in read_tensors(Path(path))} for path in (first, second))
    pairs = [(olds[name], news[name]) for name in olds if name in news]
    changed, done = [], 0
    with ReaderPool() as pool:
        for (old, _), diff in zip(pairs, pool.map(_diff_tensor, pairs)):
            changed += [diff] if diff is not None else []
            done += old.num_bytes
            if progress is not None:
                progress(done, old.name)
    return CheckpointDiff(
        first=Path(first),
        second=Path(second),
        removed=tuple(name for name in olds if name not in news),
        added=tuple(name for name in news if name not in olds),
        changed=tuple(changed),
        num_equal=len(pairs) - len(changed),
    )


def _diff_tensor(readers: Readers, pair: tuple[StoredTensor, StoredTensor]) -> TensorDiff | None:
    old, new = pair
    diff = TensorDiff(old.name, (old.shape, new.shape), (old.kind, new.kind))
    if old.shape != new.shape or old.dtype is None or new.dtype is None:
        diff.num_changed = None
        return diff if (old.shape, old.kind) != (new.shape, new.kind) else None
    moved = _Movement()
    for chunk, other in _pair_chunks(readers, old, new):
        moved.add(chunk, other)
    if moved.num_changed == 0 and old.kind == new.kind:
        return None
    diff.num_changed, diff.num_new_nonfinite, diff.max_change = moved.num_changed, moved.num_new, moved.largest
    size = math.sqrt(moved.before)
    diff.relative_change = math.sqrt(moved.squares) / size if size else math.inf if moved.squares else 0.0
    return diff


def _pair_chunks(readers: Readers, old: StoredTensor, new: StoredTensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of both with the same elements in the same order."""
    alike = (old.kind, old.stride, old.num_bytes) == (new.kind, new.stride, new.num_bytes)
    if alike and not old.has_gaps:
        # Two readers: a chunk is valid only until the next read of its own
        yield from zip(readers[0].iterate(old), readers[1].iterate(new))
    elif old.num_elements:
        parts = zip(*(split_view(map_tensor(one, one.shape, one.stride)) for one in (old, new)))
        yield from ((chunk.reshape(-1), other.reshape(-1)) for chunk, other in parts)


@dataclass(slots=True)
class _Movement:
    num_changed: int = 0
    num_new: int = 0
    largest: float = 0.0
    squares: float = 0.0
    before: float = 0.0
    """Of the first: the sum of squares of its finite elements."""
    scratch: list[Tensor] = field(default_factory=list)

    def add(self, chunk: Tensor, other: Tensor) -> None:
        if chunk.dtype == other.dtype and torch.equal(chunk.view(torch.uint8), other.view(torch.uint8)):
            finite = _as_doubles(chunk)
            self.before += float(finite.nan_to_num_(0.0, 0.0, 0.0).square_().sum())
            return
        old, new = _as_doubles(chunk), _as_doubles(other)
        fine_old, fine_new = old.isfinite(), new.isfinite()
        self.num_changed += int(((old != new) & ~(old.isnan() & new.isnan())).sum())  # NaN != NaN
        self.num_new += int((fine_old & ~fine_new).sum())
        self.before += float(old[fine_old].square().sum())
        both = fine_old & fine_new
        moved = (new[both] - old[both]).abs_()
        if moved.numel():
            self.largest = max(self.largest, float(moved.max()))
            self.squares += float(moved.square_().sum())


def _as_doubles(chunk: Tensor) -> Tensor:
    """Return a copy; of complex elements the parts."""
    parts = torch.view_as_real(chunk).reshape(-1) if chunk.is_complex() else chunk
    if parts.element_size() == 1 and parts.is_floating_point():
        parts = parts.float()  # float8 has few conversions
    # A copy, since callers square it in place and the chunk is the reader's buffer; float64 so that a square of a
    # large float32 does not overflow
    return parts.to(torch.float64, copy=True)
