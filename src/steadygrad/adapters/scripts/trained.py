"""What an optimizer of a script trains, what it should train and does not: from the model found for it. Reads only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from steadygrad.facts import Finding, Severity
from steadygrad.state.trained_parameters import TrainedParameters

SHOWN = 5
"""Names listed in a message."""


def list_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, each once."""
    return list({id(p): p for group in optimizer.param_groups for p in group["params"]}.values())


def list_trained_parameters(owner: nn.Module, optimizer: Optimizer) -> TrainedParameters:
    """Return the parameters of an optimizer under their names in `owner`."""
    names = {id(p): name for name, p in owner.named_parameters()}
    named = tuple((names[id(p)], p) for p in list_parameters(optimizer) if id(p) in names)
    return TrainedParameters(model=owner, optimizers=(optimizer,), named=named, unoptimized=(), foreign=())


def name_trained(
    owner: nn.Module, optimizer: Optimizer, named: Sequence[tuple[str, Tensor]], *, beside: Sequence[Optimizer]
) -> TrainedParameters:
    """Return the parameters by name, with those that no living optimizer holds. `beside`: all living optimizers.

    A tensor that the optimizer holds beside a model, and that gets no gradient, was a part of the model once.
    """
    held = {id(p) for one in beside for p in list_parameters(one)}
    left_out = [name for name, p in owner.named_parameters() if p.requires_grad and id(p) not in held]
    # A plain nn.Module with parts is the one that `owners.py` has gathered.
    loose = owner._parameters if type(owner) is nn.Module and owner._modules else {}
    foreign = [name for name, p in loose.items() if p is not None and p.grad is None]
    return TrainedParameters(
        model=owner, optimizers=(optimizer,), named=tuple(named), unoptimized=tuple(left_out), foreign=tuple(foreign)
    )


def has_averages(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has learnt anything about its gradients."""
    return any(
        torch.is_tensor(value) and value.shape == p.shape and value.dim()
        for p in list_parameters(optimizer)
        for value in optimizer.state.get(p, {}).values()
    )


def describe_forgotten(optimizer: Optimizer, step: int) -> Finding:
    """Describe an optimizer that is created for each step, and so never has the averages that it works with."""
    return Finding(
        kind="forgotten_state",
        severity=Severity.WARNING,
        step=step,
        message=f"a new {type(optimizer).__name__} is created for every step, without the averages of the last one",
        advice="Create the optimizer once, before the loop. To change a rate, set it in optimizer.param_groups.",
    )


def describe_unreached(owner: nn.Module, optimizer: Optimizer, *, beside: Sequence[Optimizer]) -> Finding:
    """Describe an optimizer none of whose parameters ever gets a gradient."""
    held = {id(p) for one in beside for p in list_parameters(one)}
    others = [name for name, p in owner.named_parameters() if p.grad is not None and id(p) not in held]
    reached = f"; the loss reaches {', '.join(others[:SHOWN])}, which no optimizer has" if others else ""
    return Finding(
        kind="missing_gradient",
        severity=Severity.WARNING,
        step=0,
        message=f"{type(optimizer).__name__} has never received a gradient for any of its parameters{reached}",
        advice="Create the optimizer after the model has its final parameters: after LoRA, .to(device), a new head.",
    )
