"""A learning rate that looks too high -> the losses of a lower one, from the initial weights and on the same batches.

The run's own recent steps are made again from where the run began, at the lower rate, and everything is put back bit
for bit. Costs as many training steps as are tried, so it is asked for only when the first steps of a run look harmful.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from steadygrad.act.random_state import restore_random
from steadygrad.diagnose.effects import Effects
from steadygrad.guard.parts import Parts
from steadygrad.guard.rehearsal import MakeGuard, Rehearsal
from steadygrad.prove.held import HeldStep
from steadygrad.prove.paired import CannotTestError


def try_lower_rate(parts: Parts, make_guard: MakeGuard, steps: Sequence[HeldStep], factor: float) -> list[float]:
    """The loss of each step, made from the initial weights with `factor` of the present learning rate."""
    if parts.ranks.many:
        raise CannotTestError("a lower rate is not tried on many ranks")
    last = steps[-1].captures[-1]
    effects = Effects(last.fn, last.args, last.kwargs)
    if effects.obstacle is not None:
        raise CannotTestError(f"the step function cannot be run again: {effects.obstacle}")
    rehearsal = Rehearsal(
        parts.model,
        parts.optimizers,
        [],
        make_guard=make_guard,
        extras={"scaler": parts.user_scaler},
    )
    try:
        with rehearsal.attempt(parts.config, parts.user_scaler) as guard:
            rates = parts.learning_rates()
            parts.snapshots.load_initial()
            _set_rates(parts, [rate * factor for rate in rates])
            return [_step(guard, step) for step in steps]
    finally:
        effects.undo()


def _set_rates(parts: Parts, rates: Sequence[float]) -> None:
    groups = [group for optimizer in parts.optimizers for group in optimizer.param_groups]
    for group, rate in zip(groups, rates):
        if math.isfinite(rate):
            group["lr"] = rate


def _step(guard: Any, step: HeldStep) -> float:
    for capture in step.captures:
        if capture.random is not None:
            restore_random(capture.random)
        with capture.autocast.enter():
            guard.backward(capture.fn, *capture.args, **capture.kwargs)
    guard.step()
    guard.flush()
    loss = guard.last.loss
    return math.nan if loss is None or guard.last.skipped else float(loss)
