"""ForwardScans: what Guard looks at while a forward runs, between a script's call of its model and its optimizer.

A Guard wraps the step function; here the scans begin when the model is called and end when the optimizer steps, with
the script's own code in between. A mode of the script's own may be open there, so nothing begins while one is open, and
ours is left only while it is the innermost. Begins with the second step: the first shows which parameters there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steadygrad.measure.periodic_scans import Looks, PeriodicScans


class ForwardScans:
    """Runs the scans of `periodic` that belong around a forward."""

    def __init__(self, periodic: PeriodicScans) -> None:
        self._periodic = periodic
        self._open = contextlib.ExitStack()
        self._num_modes = 0
        self._is_open = False
        self._loss: Tensor | None = None

    def begin(self, step: int, looks: Looks, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin when the model is called, if something is due."""
        # One may be open from an earlier microbatch, or from a forward that no step followed.
        self.end()
        if self._is_open or _count_modes() or not self._periodic.looks_at_forward(step):
            return
        self._open.enter_context(self._periodic.around_forward(step, looks, args, kwargs))
        self._is_open, self._num_modes = True, _count_modes()

    def note_loss(self, loss: Tensor) -> None:
        """Backward is called: torch has set our mode aside, so it cannot be left in here."""
        if self._is_open:
            self._loss = loss

    def read(self, step: int, looks: Looks) -> None:
        """End, and look at the graph of the loss."""
        self.end()
        loss, self._loss = self._loss, None
        if loss is not None and not self._is_open:
            self._periodic.look_at_graph(step, looks, loss)

    def end(self) -> None:
        """Stop looking, unless a mode of the script's own, opened since, must be left first."""
        if self._is_open and _count_modes() == self._num_modes:
            self._is_open = False
            self._open.close()


def _count_modes() -> int:
    # Private to torch: no public function says how many modes are open.
    return torch._C._len_torch_function_stack()
