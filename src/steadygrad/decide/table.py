"""The policy table: from the kind of a finding to the actions that answer it, mildest first.

Kinds that are not listed are reported and not acted on: a spike, a dead layer or a slow trend needs a person. Kinds
about finite numbers are acted on only with proof that the weights were harmed (`prove/`), and then by going back to
better weights; `Policy.eager()` acts on the symptom at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from steadygrad.config import Policy
from steadygrad.facts import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One action of a ladder."""

    action: Action
    factor: float | None = None
    """What the setting is multiplied by. With `rollback`: 1 also undoes rate changes, less lowers the learning rate."""
    after: int = 1
    """Non-finite steps in a row at which it is due; 1 for findings that are not about a step."""


Ladder = tuple[Rung, ...]


def build_table(policy: Policy) -> Mapping[str, Ladder]:
    """Return a policy's ladders by kind of finding; the user's own answers replace ours."""
    lower = Rung(action=Action.SCALE_LR, factor=policy.lr_factor)
    lower_much = Rung(action=Action.SCALE_LR, factor=policy.explosion_lr_factor)
    decay_more = Rung(action=Action.SCALE_WEIGHT_DECAY, factor=policy.weight_decay_factor)
    go_back = Rung(action=Action.ROLLBACK)
    undo = Rung(action=Action.ROLLBACK, factor=1.0)  # rate changes did not help, so undo them too
    begin_anew = Rung(action=Action.ROLLBACK, factor=policy.start_lr_factor)
    bad_step = (
        Rung(action=Action.SKIP),
        Rung(action=Action.SCALE_LR, factor=policy.lr_factor, after=policy.nonfinite_steps_to_scale_lr),
        dataclasses.replace(undo, after=policy.nonfinite_steps_to_rollback),
    )
    table: dict[str, Ladder] = {
        "nonfinite_loss": bad_step,
        "nonfinite_gradient": bad_step,
        "nonfinite_rate": (Rung(action=Action.SKIP),),  # neither another rate nor other weights would help
        "nonfinite_parameter": (go_back,),
        "nonfinite_buffer": (go_back,),
        "nonfinite_epoch": (lower,),
        "rate_too_high": (begin_anew,),
    }
    if policy.require_proof:
        table |= {"loss_explosion": (go_back,), "unrecovered_loss": (go_back,), "divergence": (go_back,)}
    else:
        table |= {
            "loss_explosion": (lower_much, go_back),
            "unrecovered_loss": (undo,),
            "divergence": (lower, go_back),
            "overfitting": (decay_more,),
            # The weights may be fine and the data empty or bad: no proof that a lower rate would help.
            "nonfinite_validation": (lower,),
        }
    clip_more = Rung(action=Action.TIGHTEN_CLIP, factor=policy.clip_factor)
    usual = {Action.SCALE_LR: lower, Action.SCALE_WEIGHT_DECAY: decay_more, Action.TIGHTEN_CLIP: clip_more}
    own = {kind: (usual.get(action, Rung(action=action)),) for kind, action in policy.actions.items()}
    return table | own
