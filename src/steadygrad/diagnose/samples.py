"""A failing step -> the samples of its batch that make it fail, by running it on parts of the batch.

Rows that were bad where the value was born are tried first: if the step fails on those and not on the rest, they are
it. Otherwise halves are tried, and halves of those. An answer is given only if the step is healthy without the samples
found; a step that cannot be split (samples need each other) is reported as such. The number of runs is bounded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from steadygrad.diagnose.batches import count_samples, take_samples
from steadygrad.diagnose.cause_builder import spell_indices
from steadygrad.diagnose.replay import Step
from steadygrad.diagnose.step_arguments import name_inputs
from steadygrad.diagnose.symptoms import find_symptoms

MAX_WORK = 4.5
"""Replays of parts of the batch, counted by the samples in them: so many whole batches at most."""
LEAST_WORK = 0.1
LEAST_WORK_ON_CUDA = 0.5
"""What the smallest part costs: launching its kernels takes as long as launching those of a whole batch."""
FEW = 4
"""Samples that are all tried, however many of them fail."""
OUTLIER = 30.0
"""Multiple of the other samples' largest magnitude from which a sample's own is reported."""


class CannotSplit(Exception):
    """A part of the batch is not informative."""


class SampleSearch:
    """Runs a step on parts of its batch."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._size = count_samples(step.args, step.kwargs)
        on_cuda = any(tensor.is_cuda for _, tensor in name_inputs(step.args, step.kwargs))
        self._work, self._least_work = 0.0, LEAST_WORK_ON_CUDA if on_cuda else LEAST_WORK

    def find(self, rows: Sequence[int] = (), num_rows: int = 0) -> tuple[tuple[int, ...], str]:
        """Return the samples, and a sentence about them. `rows` were bad where the value was born."""
        size = self._size
        if size is None:
            return (), "no tensor of the batch has samples along its first dimension"
        if size == 1:
            return (), "the batch is one sample"
        try:
            found = self._check_rows(rows) if num_rows == size and 0 < len(rows) < size else None
            found = found or self._bisect()
        except CannotSplit as reason:
            if num_rows == size and 0 < len(rows) < size:
                return tuple(rows), f"{self._spell(rows)}, by the rows of the op; {reason}"
            return (), str(reason)
        if len(found) == size:
            return found, f"all {size} in the batch, each alone"
        remark = describe_samples(self._step, found, size)
        return found, self._spell(found) + (f": {remark}" if remark else "")

    def read_rows(self, rows: Sequence[int], num_rows: int) -> tuple[tuple[int, ...], str]:
        """Return the samples by the rows that were bad where the value was born; nothing is run."""
        if num_rows != self._size or not 0 < len(rows) < num_rows:
            return (), ""
        return tuple(rows), f"{self._spell(rows)}, by the rows of the op"

    def _spell(self, found: Sequence[int]) -> str:
        return f"{len(found)} of {self._size} in the batch ({spell_indices(tuple(found))})"

    def _check_rows(self, rows: Sequence[int]) -> tuple[int, ...] | None:
        assert self._size is not None
        rest = [index for index in range(self._size) if index not in set(rows)]
        return tuple(rows) if not self._fails(rest) and self._fails(rows) else None

    def _bisect(self) -> tuple[int, ...]:
        assert self._size is not None
        everything = list(range(self._size))
        found: list[int] = []
        self._try_single_ones()
        parts: list[Sequence[int]] = [everything]
        while parts:
            parts = [half for part in parts for half in self._find_bad_halves(part)]
            found += [part[0] for part in parts if len(part) == 1]
            parts = [part for part in parts if len(part) > 1]
        found.sort()
        rest = [index for index in everything if index not in set(found)]
        # The proof: without them the step is healthy. Samples that only fail together are not found by halving.
        if rest and self._fails(rest):
            raise CannotSplit("could not be determined: the step fails without the samples that fail alone")
        return tuple(found)

    def _try_single_ones(self) -> None:
        """Where any sample fails there is nothing to search for; three runs say so, for the price of one bisection."""
        assert self._size is not None
        tried = (0, self._size // 2, self._size - 1)
        if self._size > FEW and all(self._fails([index]) for index in tried):
            raise CannotSplit(
                f"samples {tried[0]}, {tried[1]} and {tried[2]} each fail on their own: no single one is to blame"
            )

    def _find_bad_halves(self, part: Sequence[int]) -> list[Sequence[int]]:
        halves = part[: len(part) // 2], part[len(part) // 2 :]
        bad = [half for half in halves if self._fails(half)]
        if not bad:
            raise CannotSplit("could not be determined: the step fails on the batch, not on its parts")
        return bad

    def _fails(self, indices: Sequence[int]) -> bool:
        size = self._size
        assert size is not None
        # Counted before the run, so that the bound is never exceeded.
        self._work += max(self._least_work, len(indices) / size)
        if self._work > MAX_WORK:
            raise CannotSplit("could not be determined within the runs that a diagnosis may take: many samples fail")
        step = dataclasses.replace(
            self._step,
            args=tuple(take_samples(arg, indices, size) for arg in self._step.args),
            kwargs={name: take_samples(value, indices, size) for name, value in self._step.kwargs.items()},
            # Spares the backward of every part that fails in its forward.
            stops_at_bad_loss=True,
        )
        with step.replay() as run:
            symptoms = find_symptoms(run, step.model)
        if symptoms.error is not None:
            raise CannotSplit(f"could not be determined: on a part of the batch the step raises {symptoms.error!r:.80}")
        return symptoms.hurts


@torch.no_grad()
def describe_samples(step: Step, found: Sequence[int], size: int) -> str:
    """Return what the samples found have in common and no other has; empty when nothing stands out."""
    for name, tensor in step.spell_inputs():
        if tensor.dim() and tensor.shape[0] == size and tensor.is_floating_point() and tensor.numel():
            # Copies the whole input to the host, once for a diagnosis; in double, since float8 has few ops.
            remark = _compare(tensor.detach().reshape(size, -1).double().cpu(), found)
            if remark:
                return f"{remark} in {name}"
    return ""


def _compare(rows: Tensor, found: Sequence[int]) -> str:
    """Return what tells the rows at `found` from all others, empty if nothing does; `rows`: [samples, elements]."""
    bad = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
    bad[list(found)] = True
    finite = rows.isfinite().all(1)
    # [samples]; infinities become the largest float64 and stay far above any other.
    largest = rows.nan_to_num(0.0).abs().amax(1)
    constant = (rows == rows[:, :1]).all(1) if rows.shape[1] > 1 else torch.zeros_like(bad)
    usual = float(largest[~bad].max()) if bool((~bad).any()) else math.inf
    for words, holds in (
        ("values that are not finite", ~finite),
        ("only zeros", (rows == 0).all(1)),
        ("one value everywhere", constant),
        ("values far larger than the others'", largest > OUTLIER * usual),
    ):
        if torch.equal(holds, bad):
            return words
    return ""
