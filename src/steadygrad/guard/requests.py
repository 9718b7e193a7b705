"""What the user's own program asks a Guard to do -> done the way the policy does it, and recorded.

A learning rate scaled here stays scaled under any scheduler, a rollback takes it into account, and the ledger says
why. If the guard is switched off, only the optimizer's number is changed.
"""

from __future__ import annotations

import math

from steadygrad.act.actor import Actor
from steadygrad.errors import UsageError
from steadygrad.facts import Action, Finding, Severity, Verdict
from steadygrad.guard.moment import Moment
from steadygrad.guard.training import Training
from steadygrad.judgement import Event, Judgement

KEYS = {Action.SCALE_LR: "lr", Action.SCALE_WEIGHT_DECAY: "weight_decay"}
"""Action -> the key that it scales in an optimizer's groups."""


class Requests:
    """Carries out requests of the program."""

    def __init__(self, training: Training, *, moment: Moment, actor: Actor, judgement: Judgement) -> None:
        self._training, self._moment, self._judgement = training, moment, judgement
        self.actor = actor

    def scale(self, action: Action, factor: float, reason: str) -> None:
        """Multiply a setting of every optimizer by `factor`. All steps must be judged."""
        key = KEYS[action]
        if not isinstance(factor, int | float) or not math.isfinite(factor) or factor <= 0:
            raise UsageError(f"a factor of {factor!r} for the {key}. Give a number above 0: 0.5 halves it.")
        if self._training.off:
            for optimizer in self._training.optimizers:
                for group in optimizer.param_groups:
                    if key in group:  # SparseAdam has no weight decay
                        group[key] *= factor
            return
        step = self._moment.last_step
        verdict = Verdict(action=action, reason=reason, factor=factor)
        outcome = self.actor.carry_out(verdict, None, step=step)
        finding = Finding(kind="asked_for", severity=Severity.INFO, step=step, message=reason, acted_at=step)
        self._judgement.conclude([Event(finding, verdict, outcome)])
