"""LiveTrace: a step that runs now, with every op watched -> its Cause, without running anything again.

For programs whose step cannot be replayed. Results are the same to the bit, but the step is several times slower, and
each op is checked on the host: so it is used for a few steps, after a failure that no replay explained. What a step
has done is looked at when it is over; a tensor is never kept.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from steadygrad.diagnose.argument_names import spell_inputs
from steadygrad.diagnose.blame import Blame, Hurt
from steadygrad.diagnose.calls import find_scalars, find_tensors, have_no_values, have_parts, read_signature
from steadygrad.diagnose.capture import Capture
from steadygrad.diagnose.cause_builder import CauseBuilder, describe_given, name_owners
from steadygrad.diagnose.closeup import View, look_at_operands, look_at_result
from steadygrad.diagnose.frames import StackReader
from steadygrad.diagnose.ranges import Range
from steadygrad.diagnose.step_arguments import name_inputs, name_modules
from steadygrad.diagnose.trace import Trace
from steadygrad.facts import Cause

MOST_VIEWS = 8
"""Calls with a bad result that are looked at closely: the first ones are where it began."""
MOST_CALLS = 1_000_000
"""Calls after which nothing more is noted: the program calls its model without ever stepping its optimizer."""
NOTE = "Found while the step ran, not in a replay."


class LiveTrace(TorchDispatchMode):
    """Watches ops from `start` to `stop`. Compiled code must not run inside: it would be compiled differently."""

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._modules = model, name_modules(model)
        self._trace = Trace(StackReader(self._modules))
        self._views: dict[int, View] = {}
        self._process = os.getpid()
        self.is_running = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside."""
        return False

    def start(self) -> None:
        """Watch from now on, unless the program has its own mode open: leaving it would end this one instead."""
        if _get_current_dispatch_mode() is None:
            # Entered without `with`, since the step lies between two hooks: `stop` must find it innermost again.
            self.__enter__()  # type: ignore[no-untyped-call]
            self.is_running = True

    def stop(self) -> bool:
        """Stop watching; return False if the program has its own mode open, which must be left first."""
        if self.is_running and _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.is_running = False
        return not self.is_running

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if have_parts(types):
            return NotImplemented
        is_elsewhere = os.getpid() != self._process  # a worker forked while the step ran
        if self._trace.num_calls >= MOST_CALLS or is_elsewhere or have_no_values(types):
            return func(*args, **kwargs)
        number = self._trace.num_calls
        result = self._trace.call(func, args, kwargs)
        # `_is_bad` waits for the device at each op, until enough bad results were looked at.
        if len(self._views) < MOST_VIEWS and any(map(_is_bad, find_tensors(result))):
            self._look(number, func, args, kwargs, result)
        return result

    def _look(self, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Look closely, unless the call has changed what it was given."""
        signature = read_signature(func)
        if not signature.is_mutable:
            view = View(operands=look_at_operands(signature, args, kwargs))
            view.scalars = find_scalars(signature, args, kwargs)
            look_at_result(view, result)
            self._views[number] = view

    def find_cause(self, loss: Tensor | None, gradients: Mapping[str, Tensor], call: Capture | None) -> Cause | None:
        """Return what made `loss` or the bad `gradients` go wrong; None if it was not seen. Call `stop` first.

        `call`: the call of the model whose arguments are the batch.
        """
        found = [("loss", loss), *((f"gradient of {name}", gradient) for name, gradient in gradients.items())]
        hurts = [
            Hurt(name, read, _measure(tensor))
            for name, tensor in found
            if tensor is not None and _is_bad(tensor) and (read := self._trace.find_read(tensor)) is not None
        ]
        # After the last find_read, which may add a range.
        self._trace.ranges.read()
        blame = Blame(self._trace.events, self._trace.ranges)
        origin = blame.find_origin(hurts)
        if origin is None:
            return None
        builder = CauseBuilder(self._trace, blame, origin, self._modules, self._views)
        if origin.event.is_given:
            inputs = [] if call is None else spell_inputs(call.fn, call.args, call.kwargs, call.call)
            owner = name_owners(self._trace, dict(inputs), self._model).get(builder.find_given_key() or 0)
            if owner is not None or not origin.event.constant:
                batch = [] if call is None else name_inputs(call.args, call.kwargs)
                return dataclasses.replace(describe_given(builder, owner, batch), note=NOTE)
        return dataclasses.replace(builder.build(), note=NOTE)


def _is_bad(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return not bool(torch.isfinite(tensor).all())


def _measure(tensor: Tensor) -> Range:
    low, high = torch.aminmax(tensor.detach().float())
    return Range(float(low), float(high))
