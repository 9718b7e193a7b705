"""CodConfig -> the two stages: what is trainable in each, with which learning rates, schedule and loss scale.

Stage 1 trains decoder and head on a frozen backbone. Stage 2 trains everything, at half the learning rate and the
backbone at a tenth of that, with a loss scaler that starts low and grows slowly: this is where the training blew up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from steadygrad.trainer import Stage
from steadygrad.trainer.stages import shape_rate
from steadygrad_recipes.cod.config import CodConfig

MakeScaler = Callable[[dict[str, Any]], torch.amp.GradScaler]


def make_stages(config: CodConfig, *, fused: bool, make_scaler: MakeScaler | None) -> list[Stage]:
    """Return both stages, the first only if it has epochs. `make_scaler` is set when gradients are float16."""

    def schedule(optimizer: torch.optim.Optimizer, num_steps: int | None) -> Any:
        assert num_steps is not None
        return make_cycle(optimizer, num_steps, config.warmup_share)

    first = Stage(
        name="stage 1",
        epochs=config.stage1_epochs,
        prepare=freeze_backbone,
        optimizer=lambda model: make_optimizer(model, config, stage=1, fused=fused),
        scheduler=schedule,
        scaler=None if make_scaler is None else lambda: make_scaler({}),
    )
    second = Stage(
        name="stage 2",
        epochs=config.epochs - config.stage1_epochs,
        prepare=free_backbone,
        optimizer=lambda model: make_optimizer(model, config, stage=2, fused=fused),
        scheduler=schedule,
        scaler=None if make_scaler is None else lambda: make_scaler(config.stage2_scaler),
    )
    return [first, second] if config.stage1_epochs else [second]


def freeze_backbone(model: nn.Module) -> None:
    """Stage 1: freeze the backbone, if the network has one under that name."""
    for parameter in list_backbone(model):
        # Weights only: batch norms of a backbone without loaded weights still update their statistics
        parameter.requires_grad_(False)


def list_backbone(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of `model.backbone`; none for a network without one."""
    backbone = getattr(model, "backbone", None)
    return list(backbone.parameters()) if isinstance(backbone, nn.Module) else []


def free_backbone(model: nn.Module) -> None:
    """Stage 2: train everything."""
    model.requires_grad_(True)


def make_optimizer(model: nn.Module, config: CodConfig, *, stage: int, fused: bool) -> torch.optim.Optimizer:
    """Return AdamW: decoder and head in its first group, in stage 2 the backbone in its second."""
    backbone = list_backbone(model)
    known = {id(parameter) for parameter in backbone}  # by id: comparing tensors compares elements
    main = [parameter for parameter in model.parameters() if id(parameter) not in known]
    groups: list[dict[str, Any]] = [{"params": main, "lr": config.lr if stage == 1 else config.stage2_lr}]
    if stage == 2 and backbone:
        groups.append({"params": backbone, "lr": config.stage2_backbone_lr})
    return torch.optim.AdamW(groups, weight_decay=config.weight_decay, fused=fused)


def make_cycle(
    optimizer: torch.optim.Optimizer, num_steps: int, warmup_share: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """Raise each group's rate from 0 to its peak linearly, then lower it to 0 along a cosine."""
    warmup = round(warmup_share * num_steps)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: shape_rate(step, warmup, num_steps))
