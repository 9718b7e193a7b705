"""HeldSteps: the batches of a few steps, held until they are tested, within a memory limit.

They are references while small; copies on the host if they would tie up much device memory; and fewer if even that is
too much. Nothing is held while there is no suspicion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steadygrad.diagnose.capture import Capture, read_version
from steadygrad.diagnose.step_arguments import name_inputs
from steadygrad.state.tree import map_tensors


@dataclass(frozen=True, slots=True)
class HeldStep:
    """One step that can be repeated."""

    captures: tuple[Capture, ...]
    loss: float
    """Its loss when it was first made."""


class HeldSteps:
    """Collects steps until there are `wanted` of them."""

    def __init__(self, *, wanted: int, max_bytes: int) -> None:
        self.wanted, self._max_bytes, self._num_bytes = wanted, max_bytes, 0
        self.steps: list[HeldStep] = []

    def add(self, captures: Sequence[Capture], loss: float) -> None:
        """Add a step; once the memory limit is reached, make do with those already held."""
        size = sum(tensor.nbytes for one in captures for _, tensor in name_inputs(one.args, one.kwargs))
        # In host memory four times the limit may be held.
        if not captures or self._num_bytes + size > 4 * self._max_bytes:
            self.wanted = len(self.steps)
            return
        if size * self.wanted > self._max_bytes:
            captures = [_move_to_host(capture) for capture in captures]
        self._num_bytes += size
        self.steps.append(HeldStep(tuple(captures), loss))

    @property
    def captures(self) -> list[Capture]:
        """The last microbatch of each step, for at most `wanted` steps; another rank may hold fewer."""
        return [step.captures[-1] for step in self.steps[: self.wanted]]

    @property
    def is_complete(self) -> bool:
        """Whether enough steps are held, or no more will be."""
        return len(self.steps) >= self.wanted


def _move_to_host(capture: Capture) -> Capture:
    """Return the same step with its batch on the host; it returns to its device when it is run."""
    devices = {tensor.device for _, tensor in name_inputs(capture.args, capture.kwargs)}
    if len(devices) != 1 or next(iter(devices)).type == "cpu":
        return capture
    args, kwargs = _move(capture.args, "cpu"), _move(dict(capture.kwargs), "cpu")
    fn, device = capture.fn, next(iter(devices))

    def run(*args: Any, **kwargs: Any) -> Any:
        return fn(*_move(args, device), **_move(kwargs, device))

    # The copies have counters of their own; a change is looked for by comparing with these.
    versions = tuple((name, read_version(tensor)) for name, tensor in name_inputs(args, kwargs))
    return dataclasses.replace(capture, fn=run, args=args, kwargs=kwargs, versions=versions)


def _move(value: Any, device: torch.device | str) -> Any:
    return map_tensors(value, lambda tensor: tensor.to(device))
