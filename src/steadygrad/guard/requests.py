"""What the user's own program asks a Guard to do -> done as the policy would have it done, and written down.

A learning rate that is scaled here stays scaled under any scheduler, a rollback knows of it, and the ledger says why.
Switched off, the optimizer's number is changed and nothing else.
"""

from __future__ import annotations

import math
from typing import Any

from steadygrad.errors import UsageError
from steadygrad.facts import Action, Finding, Severity, Verdict
from steadygrad.guard.parts import Moment, Parts
from steadygrad.judgement import Event

KEYS = {Action.SCALE_LR: "lr", Action.SCALE_WEIGHT_DECAY: "weight_decay"}
"""Action -> what it scales in an optimizer's groups."""


def read_number(value: Any, where: str) -> float:
    """A number that a program tells; UsageError for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"{where} was given {value!r:.80}. Give it one number: loss.mean() for example.") from None


def scale_setting(parts: Parts, moment: Moment, action: Action, factor: float, reason: str) -> None:
    """Multiply a setting of every optimizer by `factor`. All steps are judged."""
    key = KEYS[action]
    if not isinstance(factor, int | float) or not math.isfinite(factor) or factor <= 0:
        raise UsageError(f"a factor of {factor!r} for the {key}. Give a number above 0: 0.5 halves it.")
    if parts.off:
        for optimizer in parts.optimizers:
            for group in optimizer.param_groups:
                group[key] *= factor
        return
    step = max(0, moment.next_step - 1)
    verdict = Verdict(action=action, reason=reason, factor=factor)
    outcome = parts.actor.carry_out(verdict, None, step=step)
    finding = Finding(kind="asked_for", severity=Severity.INFO, step=step, message=reason, acted_at=step)
    parts.judgement.conclude([Event(finding, verdict, outcome)])
