"""Losses of masks: Dice, intersection over union, and the weighted pair of BCE and IoU known as structure loss.

Sums over pixels are formed in fp32: those of a 256 x 256 mask overflow fp16. An image without foreground in target and
prediction is a perfect match, not 0 / 0. Each sample gives one value (structure loss: each channel), then `reduction`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from steadygrad.errors import ConfigError, UsageError
from steadygrad.losses.classification import bce_losses
from steadygrad.losses.precision import narrow, widen
from steadygrad.losses.reduction import reduce_loss, select


def dice(
    logits: Tensor,
    target: Tensor,
    *,
    smooth: float = 1.0,
    mask: Tensor | None = None,
    from_logits: bool = True,
    reduction: str = "mean",
) -> Tensor:
    """1 - (2 · overlap + smooth) / (prediction + target + smooth) of each sample; `target` in [0, 1]."""
    overlap, total = _measure_overlap(logits, target, mask, from_logits=from_logits)
    return narrow(reduce_loss(_complement(2 * overlap, total, smooth, "dice"), reduction), logits, autocast_keeps=True)


def iou(
    logits: Tensor,
    target: Tensor,
    *,
    smooth: float = 1.0,
    mask: Tensor | None = None,
    from_logits: bool = True,
    reduction: str = "mean",
) -> Tensor:
    """1 - (overlap + smooth) / (union + smooth) of each sample; `target` in [0, 1]."""
    overlap, total = _measure_overlap(logits, target, mask, from_logits=from_logits)
    return narrow(
        reduce_loss(_complement(overlap, total - overlap, smooth, "iou"), reduction), logits, autocast_keeps=True
    )


def structure_loss(
    logits: Tensor,
    target: Tensor,
    *,
    border_weight: float = 5.0,
    window: int = 31,
    smooth: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """Weighted BCE + weighted IoU of each channel of [N, C, H, W] (or [N, H, W]), as in F3Net and PraNet.

    A pixel weighs 1 + border_weight · |mean of the target around it - its target|: borders count more. `window`, an odd
    number, is the side of the square around it.
    """
    if logits.dim() not in (3, 4) or logits.shape != target.shape:
        raise UsageError(
            "structure_loss takes logits and target of one shape, [N, C, H, W] or [N, H, W]; got "
            f"{tuple(logits.shape)} and {tuple(target.shape)}. Add a channel with unsqueeze(1), or drop it."
        )
    if window < 1 or window % 2 == 0:
        raise ConfigError(f"structure_loss's window must be an odd number of pixels, got {window}. 31 is usual.")
    x, y = widen(logits), widen(target)
    # Rows, then columns: the same mean as over the square, ten times as fast.
    along = F.avg_pool2d(y, (window, 1), stride=1, padding=(window // 2, 0))
    around = F.avg_pool2d(along, (1, window), stride=1, padding=(0, window // 2))
    weight = 1 + border_weight * (around - y).abs()  # [N, C, H, W]
    share = weight / weight.sum((-2, -1), keepdim=True)
    bce = (share * bce_losses(x, y)).sum((-2, -1))
    p = x.sigmoid()
    overlap, total = ((weight * v).sum((-2, -1)) for v in (p * y, p + y))
    losses = bce + _complement(overlap, total - overlap, smooth, "structure_loss")
    return narrow(reduce_loss(losses, reduction), logits, autocast_keeps=True)


def _measure_overlap(
    logits: Tensor, target: Tensor, mask: Tensor | None, *, from_logits: bool
) -> tuple[Tensor, Tensor]:
    """Of each sample, the soft intersection and the sum of both areas."""
    x, y = widen(logits), widen(target)
    p = x if not from_logits else (x if mask is None else select(x, mask)).sigmoid()
    if mask is not None:
        p, y = select(p, mask), select(y, mask)
    p, y = (v.flatten(1) if v.dim() > 1 else v.reshape(1, -1) for v in (p, y))
    return (p * y).sum(1), p.sum(1) + y.sum(1)


def _complement(part: Tensor, whole: Tensor, smooth: float, name: str) -> Tensor:
    """1 - (part + smooth) / (whole + smooth); 0 where there is nothing to match."""
    if smooth < 0:
        raise ConfigError(f"{name}'s smooth must not be negative, got {smooth}. 1.0 is usual.")
    nothing = whole + smooth <= 0
    return torch.where(nothing, 0.0, 1 - (part + smooth) / torch.where(nothing, 1.0, whole + smooth))
