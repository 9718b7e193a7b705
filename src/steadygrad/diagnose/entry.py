"""The ways to ask for a diagnosis: of a function and its arguments, or of a step that was captured before it ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from steadygrad.diagnose.argument_names import spell_ordinal
from steadygrad.diagnose.capture import AutocastState, Capture
from steadygrad.diagnose.diagnosis import Diagnosis, unknown
from steadygrad.diagnose.effects import Effects
from steadygrad.diagnose.meeting import Meeting
from steadygrad.diagnose.optimizers import find_optimizers
from steadygrad.diagnose.replay import Step
from steadygrad.diagnose.step_arguments import find_model
from steadygrad.diagnose.unrepeated import Rest, describe_unrepeated
from steadygrad.facts import Cause

FINITE_KINDS = ("exploding", "vanishing", "dead")


def diagnose(
    fn: Callable[..., Any],
    /,
    *args: Any,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    **kwargs: Any,
) -> Cause | None:
    """Run the step `fn(*args, **kwargs)` again and name what broke it; None when it is healthy.

    `fn` returns what a training step returns: a scalar loss, a dict with `loss`, a tuple that starts with it. `model`
    gives the modules their names; without it the first module among the arguments, or that the function refers to, is
    taken. When loss and gradients are fine, the step of `optimizer` (without it: of those that hold the model's
    parameters) is tried and undone. Weights, buffers, gradients, generators and the batch are afterwards as they were,
    bit for bit, also when `fn` raises; an exception that no bad value explains is passed on. A `fn` that gives neither
    a loss nor a gradient is refused with a UsageError: nothing can be said about it.

    >>> import torch
    >>> layer = nn.Linear(2, 2)
    >>> cause = diagnose(lambda x: (layer(x) * 0).norm(dim=1).log().sum(), torch.ones(3, 2))
    >>> cause.kind, cause.phase, cause.op
    ('inf', 'forward', 'aten.log')
    """
    model = model if model is not None else find_model(fn, args, kwargs)
    capture = Capture(
        fn=fn, args=args, kwargs=kwargs, model=model, random=None, autocast=AutocastState.take(), versions=()
    )
    found = find_optimizers(capture.inner_model) if optimizer is None else optimizer
    optimizers = [found] if isinstance(found, Optimizer) else found
    step = dataclasses.replace(Step.of(capture), optimizers=tuple(optimizers), effects=Effects(fn, args, kwargs))
    cause = Diagnosis(step, optimizers=optimizers).make()
    return None if cause is None else _qualify(cause, capture, changed=())


def diagnose_capture(
    capture: Capture,
    *,
    scale: float = 1.0,
    suspect: str | None = None,
    optimizers: Sequence[Optimizer] = (),
    expects: str | None = None,
    effects: Effects | None = None,
    rest: Rest | None = None,
    **how: Any,
) -> Cause | None:
    """Diagnose a step that was captured before it ran. Never raises: failures are reported in the Cause.

    `scale` is the loss scale it ran with; `suspect` ('exploding', 'vanishing', 'dead') what its numbers look like;
    `expects` ('nan', 'inf') what was seen when it ran: a healthy replay is then reported as such, with what to suspect.
    Weights and buffers must be those that the step began with. `effects`: what the step does to objects of the
    program's own, put back after each replay. `rest`: what of the step is not in its replay. `how`: the fields of a
    Step that say who replays it, this rank alone or all ranks together.
    """
    changed: tuple[str, ...] = ()
    try:
        step = dataclasses.replace(Step.of(capture, scale), effects=effects, **how)
        changed = capture.find_changes()
        diagnosis = Diagnosis(step, optimizers=optimizers, suspect=suspect)
        cause = diagnosis.make()
        if expects is not None and (cause is None or cause.kind in FINITE_KINDS):
            cause = describe_unrepeated(step, expects, changed, diagnosis.fingerprints, rest)
    # The training goes on, and the reason stands in the incident.
    except Exception as error:
        cause = unknown(f"the replay raised {error!r:.200}")
    return None if cause is None else _qualify(cause, capture, changed)


def _qualify(cause: Cause, capture: Capture, changed: Sequence[str]) -> Cause:
    """Add to the cause what makes the replay differ from the step itself."""
    limits = []
    if changed:
        limits.append(f"{', '.join(changed)} of the batch changed in place after the step: the replay is not exact.")
    if capture.is_compiled:
        limits.append("Compiled code was replayed eagerly: fusion and random numbers may differ.")
    if capture.is_model_call and cause.phase != "unknown":
        limits.append("Only the model's forward was replayed: give guard.step the function, not its loss.")
    if not limits:
        return cause
    reproducible = cause.reproducible
    if reproducible is not None and not (capture.is_model_call and len(limits) == 1):
        reproducible = reproducible.replace("bit for bit", "the same kind")
    return dataclasses.replace(cause, note=" ".join([*limits, cause.note]).strip(), reproducible=reproducible)


def diagnose_captures(
    captures: Sequence[Capture], *, expects: str | None = None, meeting: Meeting | None = None, **settings: Any
) -> tuple[Cause | None, Capture | None]:
    """Diagnose the microbatches of a step, in order: the first Cause, and the microbatch that it is about.

    `settings` are those of `diagnose_capture`. That the failure does not recur is reported after the last one. Ranks
    that replay together (`meeting`) stop after the same microbatch, the first that is bad on one of them.
    """
    for place, capture in enumerate(captures):
        is_last = place == len(captures) - 1
        cause = diagnose_capture(capture, expects=expects if is_last else None, meeting=meeting, **settings)
        # A rank that went on alone would wait for the others in its next replay.
        if meeting is not None and not is_last and meeting.is_true_anywhere(cause is not None) and cause is None:
            return None, None
        if cause is not None:
            many = len(captures) > 1 and cause.phase != "unknown"
            # A loss given alone may come from several calls; whether each had its own backward is not known here.
            which = f"microbatch {place} of {len(captures)}, counted from 0"
            if capture.is_model_call:
                which = f"the {spell_ordinal(place)} of {len(captures)} calls of the model"
            note = f"In {which}. {cause.note}" if many else cause.note
            return dataclasses.replace(cause, note=note.strip()), capture
    return None, None
