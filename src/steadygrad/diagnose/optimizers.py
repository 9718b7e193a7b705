"""A healthy step and its optimizer -> the Origin of a value that the optimizer's own arithmetic makes not finite.

Adam's epsilon rounds to 0 in half precision, and 0 / 0 reaches the weights although loss and gradients are fine. The
optimizer's step is run on the replayed gradients, traced, and undone: weights, state and counters are as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from steadygrad.diagnose.blame import Blame, Hurt, Origin
from steadygrad.diagnose.frames import StackReader
from steadygrad.diagnose.keep import undone
from steadygrad.diagnose.ranges import RangeTable
from steadygrad.diagnose.replay import Run, Step, call_user, observe
from steadygrad.diagnose.trace import Trace
from steadygrad.state.live_objects import list_live


@dataclass(frozen=True, slots=True)
class OptimizerOrigin:
    """Where in an optimizer's step a value was born, and which parameter it spoils."""

    origin: Origin
    trace: Trace
    blame: Blame
    optimizer: Optimizer
    parameter: str


_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Those that were found before: looking at all objects of the process takes a tenth of a second."""


def find_optimizers(model: nn.Module | None) -> list[Optimizer]:
    """Return the optimizers alive that hold a parameter of `model`, found among all objects."""
    wanted = set() if model is None else {id(parameter) for parameter in model.parameters()}
    if not wanted:
        return []
    known = [optimizer for optimizer in _seen if _holds(optimizer, wanted)]
    if not known:
        _seen.update(list_live(Optimizer))
        known = [optimizer for optimizer in _seen if _holds(optimizer, wanted)]
    return known


def _holds(optimizer: Optimizer, wanted: set[int]) -> bool:
    return any(id(p) in wanted for group in getattr(optimizer, "param_groups", ()) for p in group["params"])


def trace_optimizers(step: Step, optimizers: Sequence[Optimizer]) -> OptimizerOrigin | None:
    """Run the step, then each optimizer; return the first that corrupts a parameter."""
    # A hook may do anything outside torch, which a replay could not undo.
    usable = [optimizer for optimizer in optimizers if not _has_hooks(optimizer)]
    if not usable:
        return None
    # Inside the replay its gradients are there, and its keeper restores the weights that the optimizer changes.
    with step.replay() as run:
        for optimizer in usable:
            found = _trace_one(step, run, optimizer)
            if found is not None:
                return found
    return None


def _trace_one(step: Step, run: Run, optimizer: Optimizer) -> OptimizerOrigin | None:
    trace = Trace(StackReader({}, call_user))
    with undone([optimizer]):
        try:
            with observe(run.keeper, trace), torch.no_grad():
                call_user(optimizer.step, (), {})
        except Exception:  # one that needs a closure, or a scaler
            return None
        names = {id(parameter): name for name, parameter in step.named_leaves}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        table = RangeTable()
        slots = [(names.get(id(p), "a parameter"), p, table.add(p)) for p in held]
        table.read()
        bad = [(name, p, table[slot]) for name, p, slot in slots if table[slot].is_nonfinite]
        reads = [(name, trace.find_read(p), range) for name, p, range in bad]
        # After find_read, which may add a range.
        trace.ranges.read()
    blame = Blame(trace.events, trace.ranges)
    for name, read, range in reads:
        origin = None if read is None else blame.find_origin([Hurt(f"parameter {name}", read, range)])
        if origin is not None and not origin.event.is_given:
            return OptimizerOrigin(origin, trace, blame, optimizer, name)
    return None


def _has_hooks(optimizer: Optimizer) -> bool:
    """Whether a step would run the user's hooks."""
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    everywhere = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    return any(everywhere) or any(bool(getattr(optimizer, name, None)) for name in hooks)
