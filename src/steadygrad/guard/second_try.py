"""Past steps -> their losses when repeated from earlier weights, or at a lower rate.

The run's own steps are trained once more from one of its snapshots, then everything is put back bit for bit. The
resulting state is kept: if it turns out to be better, training can continue from it without losing a step. Costs as
many training steps as are tried, so it runs only on suspicion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from steadygrad.act.rates import Rates
from steadygrad.act.snapshot import Snapshot
from steadygrad.act.snapshots import Snapshots
from steadygrad.diagnose.effects import Effects
from steadygrad.diagnose.replay import replaying
from steadygrad.guard.rehearsal import MakeGuard, Rehearsal
from steadygrad.guard.training import Training
from steadygrad.guard.watched import Watched
from steadygrad.measure.ranks import Ranks
from steadygrad.prove.held import HeldStep
from steadygrad.prove.paired import CannotTestError
from steadygrad.state.random_state import restore_random


def make_again(
    training: Training,
    make_guard: MakeGuard,
    watched: Watched,
    rates: Rates,
    snapshots: Snapshots,
    ranks: Ranks,
    steps: Sequence[HeldStep],
    start: Snapshot,
    factor: float,
) -> list[float]:
    """Return the loss of each step, repeated from the state of `start` at `factor` times the present learning rate."""
    if ranks.many:
        raise CannotTestError("steps are not repeated on several ranks")
    last = steps[-1].captures[-1]
    effects = Effects(last.fn, last.args, last.kwargs)
    if effects.obstacle is not None:
        raise CannotTestError(f"the step function cannot be run again: {effects.obstacle}")
    rehearsal = Rehearsal(
        training.model,
        training.optimizers,
        [],
        make_guard=make_guard,
        extras={"scaler": training.scaler},
    )
    try:
        # `aside` is outermost: the end of the attempt writes the weights once more, to put them back.
        with watched.edits.aside(), replaying(), rehearsal.attempt(training.config, training.scaler) as guard:
            snapshots.load(start, clipper=guard._clipper)
            guard._rates.load_state_dict(rates.state_dict())
            guard._rates.scale_lr(factor)
            losses = [_step(guard, step) for step in steps]
            # Inside: the end of the attempt puts the present state back.
            snapshots.second_try = snapshots.copy_second_try(start, len(steps), clipper=guard._clipper)
            return losses
    finally:
        effects.undo()


def _step(guard: Any, step: HeldStep) -> float:
    for capture in step.captures:
        if capture.random is not None:
            restore_random(capture.random)
        with capture.autocast.enter():
            guard.backward(capture.fn, *capture.args, **capture.kwargs)
    guard.step()
    guard.flush()
    loss = guard.last.loss
    # NaN fails the comparisons in prove/rule.py, so a skipped step proves nothing.
    return math.nan if loss is None or guard.last.skipped else float(loss)
