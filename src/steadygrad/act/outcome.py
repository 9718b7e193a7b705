"""What the reflex did to a step, in words: the Outcome that goes into the record beside the Verdict."""

from __future__ import annotations

from steadygrad.facts import Action, Outcome, Reading

UNTOUCHED = Outcome(action=Action.NONE, message="nothing was changed")


def tell_reflex(action: Action, reading: Reading) -> Outcome:
    """The Outcome of an action that the step itself has already carried out."""
    if action in (Action.SKIP, Action.HALT) and reading.skipped:
        return Outcome(action=action, message="the step was skipped, no weight was touched")
    if action is Action.HALT:
        return Outcome(action=action, message="training was halted")
    if action is Action.SANITIZE:
        return Outcome(action=action, message=f"{reading.num_nonfinite} gradient elements were replaced")
    if action is Action.CLIP:
        return Outcome(
            action=action,
            message=f"clipped to {reading.applied_norm:.4g}",
            before={"grad_norm": reading.grad_norm},
            after={"grad_norm": reading.applied_norm},
        )
    return UNTOUCHED
