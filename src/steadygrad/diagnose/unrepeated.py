"""A step that failed when it ran, and does not when it is replayed -> a Cause that says what to suspect.

A replay runs forward and backward. What the program does to its gradients afterwards, a microbatch that is no longer
held and hooks that act on a gradient when it is complete are not in it: each is named before the hardware is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steadygrad.diagnose.diagnosis import unknown
from steadygrad.diagnose.replay import Run, Step
from steadygrad.diagnose.symptoms import find_symptoms
from steadygrad.facts import Cause
from steadygrad.measure.gradient_access import GradientAccess
from steadygrad.measure.rows import is_readable

HARDWARE = "suspect the hardware, or code that keeps state in Python"
OUTSIDE = (
    "The model's forward is healthy when it is replayed: look at the loss, at the code around the model, and at code "
    "that changes the gradients before the step. To have the loss replayed too, give guard.step the function, or run: "
    "steadygrad diagnose RUN --entry MODULE:FUNCTION"
)
"""Reported when only a part of the step could be replayed, and that part did nothing wrong."""
BETWEEN = "between backward() and the step"
FIXES = ("torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)", "max_norm / (norm + 1e-6)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What of the step is not in its replay."""

    access: GradientAccess = GradientAccess.NONE
    num_microbatches: int = 1
    num_replayed: int = 1


def describe_unrepeated(
    step: Step, kind: str, changed: Sequence[str], known: Sequence[tuple[int, ...]] = (), rest: Rest | None = None
) -> Cause:
    """Return what to suspect, with the help of two more replays.

    On all ranks together no more are made: `known` fingerprints have to do.
    """
    if changed or step.is_model_call:
        why = "the replay was healthy; the batch has changed since" if changed else OUTSIDE
        return unknown(why, kind=kind, reproducible="no: the replay is not exact")
    # Another replay here would be one that the other ranks do not make.
    prints, zeros = (list(known[:2]) if step.meeting is not None else []), ""
    while len(prints) < 2:
        with step.replay() as run:
            prints.append(find_symptoms(run, step.model).fingerprint)
            zeros = _describe_zeros(run)
    rest = rest or Rest()
    if rest.num_replayed < rest.num_microbatches:
        part = f"the last {rest.num_replayed} of {rest.num_microbatches} microbatches were replayed, and are healthy"
        return unknown(part, kind=kind, reproducible="no: the replay is not of the whole step")
    if prints[0] != prints[1]:
        suspect = "two replays are healthy and differ: an op of the step is not deterministic"
        return unknown(suspect, kind=kind, reproducible=f"no: {suspect}")
    # On several ranks the gradients are also written to when they are exchanged.
    if rest.access is GradientAccess.CHANGED and not step.is_alone and step.meeting is None:
        return _describe_change(kind, zeros)
    suspect = f"two replays are healthy and equal bit for bit: {_name_suspects(step, rest)}"
    return unknown(suspect, kind=kind, reproducible=f"no: {suspect}")


def _name_suspects(step: Step, rest: Rest) -> str:
    """Return what a replay leaves out, the hardware last."""
    hooked = [name for name, leaf in step.named_leaves if _has_hook(leaf)]
    left_out = [f"the hook on the gradient of {hooked[0]}, which no replay runs"] if hooked else []
    if rest.access is not GradientAccess.NONE:
        left_out.append(f"code that changes the gradients {BETWEEN}")
    if rest.num_microbatches > 1:
        left_out.append("an overflow where the gradients of the microbatches are added up")
    return f"suspect {', or '.join(left_out)}; if there is none, {HARDWARE}" if left_out else HARDWARE


def _has_hook(leaf: Tensor) -> bool:
    """Whether the program acts on a gradient when it is complete; our own hooks only look."""
    hooks = (getattr(leaf, "_post_accumulate_grad_hooks", None) or {}).values()
    return any(not str(getattr(hook, "__module__", "")).startswith("steadygrad") for hook in hooks)


def _describe_change(kind: str, zeros: str) -> Cause:
    seen = {"nan": "NaN", "inf": "Inf"}[kind]
    why = f"the loss and its gradients are finite when replayed, and the program changed the gradients {BETWEEN}"
    return Cause(
        kind=kind,
        phase="unknown",
        name="gradients_changed_after_backward",
        symptom=f"{seen} gradient, finite in the replay and changed by the program {BETWEEN}",
        explanation=f"{why}: look at its own clipping or scaling first{zeros}",
        fixes=FIXES,
        reproducible="no: two replays of forward and backward are healthy and equal bit for bit",
    )


def _describe_zeros(run: Run) -> str:
    """Return how many gradients have a norm of 0, by which a clip of the program's own may divide."""
    gradients = [one for one in run.grads.values() if is_readable(one)]
    if not gradients:
        return ""
    num = int(torch.stack([(one == 0).all().cpu() for one in gradients]).sum())
    if num == len(gradients):
        return " (all gradients are 0 in the replay: a division by their norm gives NaN or Inf)"
    return f" ({num} of {len(gradients)} gradients are all 0: a division by the norm of one gives NaN)" if num else ""
