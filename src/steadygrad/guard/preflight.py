"""Model, optimizers and what is saved with them -> Findings that are known before the first step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from steadygrad.checkpoint.run import RunCheckpoints
from steadygrad.config import AdaptiveUnitClip, ClipValue
from steadygrad.config.clip import ClipStrategy
from steadygrad.errors import UnsupportedError
from steadygrad.facts import Finding, Severity
from steadygrad.guard.training import Training, keep_stateful
from steadygrad.state.collect import find_uncopied
from steadygrad.state.shards import in_optimizer, is_sharded
from steadygrad.state.trained_parameters import TrainedParameters

SHOWN = 5
"""Number of names listed in a message; the rest are only counted."""


def foresee(trained: TrainedParameters) -> list[Finding]:
    """Find parameters that only the model or only the optimizers have, and an epsilon that underflows."""
    findings = [
        Finding(
            kind="partial_overlap",
            severity=Severity.INFO,
            step=0,
            message=f"{len(names)} {what}: {', '.join(names[:SHOWN])}",
            advice="Freeze them with requires_grad_(False), or give both the same parameters.",
            evidence={"parameters": list(names[:SHOWN]), "num_parameters": len(names)},
        )
        for what, names in (
            ("trainable parameters of the model are in no optimizer", trained.unoptimized),
            ("parameters of the optimizer are not in the model", trained.foreign),
        )
        if names
    ]
    fragile = _find_underflowing_epsilon(trained)
    if fragile:
        findings.append(
            Finding(
                kind="underflowing_epsilon",
                severity=Severity.WARNING,
                step=0,
                message=fragile,
                advice="Keep the weights in float32 and use autocast, or set eps to 1e-4 or more.",
            )
        )
    return findings


def foresee_schedule(training: Training) -> list[Finding]:
    """Warn of a scheduler that belongs to an optimizer of which no group is trained."""
    owner = getattr(training.scheduler, "optimizer", None)
    scheduled, trained = _list_groups([owner]), _list_groups(training.optimizers)
    if not scheduled or scheduled & trained:
        return []
    return [
        Finding(
            kind="foreign_schedule",
            severity=Severity.WARNING,
            step=0,
            message=f"the scheduler, a {type(training.scheduler).__name__}, belongs to another optimizer than those of "
            "this training: the learning rates will never follow it",
            advice="Create the scheduler after the optimizer, and from the same one.",
        )
    ]


def _list_groups(optimizers: Sequence[Any]) -> set[int]:
    """Return the identities of the groups of optimizers, and of those that they wrap or are wrapped in."""
    known: set[int] = set()
    for one in optimizers:
        inner = [thing for thing in getattr(one, "__dict__", {}).values() if isinstance(thing, torch.optim.Optimizer)]
        known.update(id(group) for each in (one, *inner) for group in getattr(each, "param_groups", None) or ())
    return known


def foresee_uncopied(training: Training, checkpoints: RunCheckpoints) -> list[Finding]:
    """Warn before the first step of state that cannot be copied, so that neither rollback nor resume restores it."""
    left_out = find_uncopied(training.model, training.optimizers, keep_stateful(training.saved))
    where = "snapshots and checkpoints, because it cannot be copied"
    found = [_report_left_out(0, where, left_out)] if left_out else []
    return [*found, *foresee_unsaved(checkpoints, 0)]


def foresee_unsaved(checkpoints: RunCheckpoints, step: int) -> list[Finding]:
    """Warn of state that cannot be reduced to plain values, so that checkpoints lack it."""
    left_out = checkpoints.find_left_out()
    return [_report_left_out(step, "checkpoints", left_out)] if left_out else []


def _report_left_out(step: int, where: str, what: Sequence[str]) -> Finding:
    """Report that some state will not be restored."""
    return Finding(
        kind="uncopied_state",
        severity=Severity.WARNING,
        step=step,
        message=f"left out of {where}: {', '.join(what)}",
        advice="Leave it out of the object's state_dict(), and create it again when it is needed.",
    )


def refuse_devices(kinds: Collection[str]) -> None:
    """Raise an error if parameters are on a kind of device that has no float64: what is measured is added up in it."""
    if "mps" in kinds:
        raise UnsupportedError(
            "the parameters are on 'mps', which has no float64, and a Guard adds up its numbers in float64. "
            "Train on 'cpu' or 'cuda', or set STEADYGRAD=off to run the plain loop."
        )


def refuse_shards(trained: TrainedParameters, clip: ClipStrategy | None) -> None:
    """Raise an error if gradients are sharded and clipping needs them whole."""
    sharded = [name for name, parameter in trained.named if is_sharded(parameter)]
    if sharded and isinstance(clip, AdaptiveUnitClip | ClipValue):
        raise UnsupportedError(
            f"{type(clip).__name__} needs every single gradient, and that of {sharded[0]!r} is sharded over several "
            "ranks. Use FixedNorm, ZClip, AutoClip or AdaGC, which need norms only."
        )


def _find_underflowing_epsilon(trained: TrainedParameters) -> str:
    """Find an Adam epsilon that rounds to 0 in half-precision state: a zero gradient then gives 0 / 0."""
    half = {id(in_optimizer(p)) for _, p in trained.named if p.dtype is torch.float16}
    for optimizer in trained.optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if not isinstance(eps, float) or torch.tensor(eps, device="cpu").half() != 0:
                continue
            if any(id(parameter) in half for parameter in group["params"]):
                return f"{type(optimizer).__name__}'s eps={eps:g} is 0 in float16, the dtype of the weights"
    return ""
