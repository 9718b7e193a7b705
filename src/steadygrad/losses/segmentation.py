"""Losses of masks: Dice, intersection over union, and the weighted pair of BCE and IoU known as structure loss.

Sums over pixels are formed in fp32: those of a 256 x 256 mask overflow fp16. An image without foreground in target and
prediction is a perfect match, not 0 / 0. Each sample gives one value (structure loss: each channel), then `reduction`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from steadygrad.config.checks import is_whole
from steadygrad.errors import ConfigError, UsageError
from steadygrad.losses.check import require_fit, require_not_negative, require_tensors
from steadygrad.losses.classification import bce_losses
from steadygrad.losses.precision import narrow, widen
from steadygrad.losses.reduction import reduce_loss, require_reduction, select
from steadygrad.losses.shapes import count_along


def dice(
    logits: Tensor,
    target: Tensor,
    *,
    smooth: float = 1.0,
    mask: Tensor | None = None,
    from_logits: bool = True,
    reduction: str = "mean",
) -> Tensor:
    """Return 1 - (2 · overlap + smooth) / (prediction + target + smooth) of each sample; `target` in [0, 1]."""
    _check_overlap("dice", logits, target, mask, smooth, reduction)
    overlap, total = _measure_overlap(logits, target, mask, from_logits=from_logits)
    return narrow(reduce_loss(_complement(2 * overlap, total, smooth), reduction), logits, autocast_keeps=True)


def iou(
    logits: Tensor,
    target: Tensor,
    *,
    smooth: float = 1.0,
    mask: Tensor | None = None,
    from_logits: bool = True,
    reduction: str = "mean",
) -> Tensor:
    """Return 1 - (overlap + smooth) / (union + smooth) of each sample; `target` in [0, 1]."""
    _check_overlap("iou", logits, target, mask, smooth, reduction)
    overlap, total = _measure_overlap(logits, target, mask, from_logits=from_logits)
    return narrow(reduce_loss(_complement(overlap, total - overlap, smooth), reduction), logits, autocast_keeps=True)


def structure_loss(
    logits: Tensor,
    target: Tensor,
    *,
    border_weight: float = 5.0,
    window: int = 31,
    smooth: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """Return weighted BCE + weighted IoU of each channel of [N, C, H, W] (or [N, H, W]), as in F3Net and PraNet.

    A pixel weighs 1 + border_weight · |mean of the target around it - its target|: borders count more. `window`, an odd
    number, is the side of the square around it.
    """
    _check_images(logits, target, border_weight, window, smooth, reduction)
    x, y = widen(logits), widen(target)
    # Rows, then columns: the same mean as over the square, ten times as fast.
    along = F.avg_pool2d(y, (window, 1), stride=1, padding=(window // 2, 0))
    around = F.avg_pool2d(along, (1, window), stride=1, padding=(0, window // 2))
    weight = 1 + border_weight * (around - y).abs()  # [N, C, H, W]
    # Divided before the sum over pixels, whose terms may be as large as fp32 allows
    share = weight / weight.sum((-2, -1), keepdim=True)
    bce = (share * bce_losses(x, y)).sum((-2, -1))  # [N, C]
    p = x.sigmoid()
    overlap, total = ((weight * v).sum((-2, -1)) for v in (p * y, p + y))
    losses = bce + _complement(overlap, total - overlap, smooth)
    return narrow(reduce_loss(losses, reduction), logits, autocast_keeps=True)


def _measure_overlap(
    logits: Tensor, target: Tensor, mask: Tensor | None, *, from_logits: bool
) -> tuple[Tensor, Tensor]:
    """Of each sample, the soft intersection and the sum of both areas."""
    x, y = widen(logits), widen(target)
    # Masked before the sigmoid, so that a NaN there has no gradient, and again after it: sigmoid(0) is 0.5
    p = x if not from_logits else (x if mask is None else select(x, mask)).sigmoid()
    if mask is not None:
        p, y = select(p, mask), select(y, mask)
    p, y = (_flatten_samples(v) for v in (p, y))
    return (p * y).sum(1), p.sum(1) + y.sum(1)  # each [N]


def _flatten_samples(x: Tensor) -> Tensor:
    """[N, ...] -> [N, pixels]; what has one dimension is one sample."""
    return x.flatten(1) if x.dim() > 1 else x.reshape(1, -1)


def _complement(part: Tensor, whole: Tensor, smooth: float) -> Tensor:
    """Return 1 - (part + smooth) / (whole + smooth); 0 where there is nothing to match."""
    nothing = whole + smooth <= 0  # NaN fails it and shows
    return torch.where(nothing, 0.0, 1 - (part + smooth) / torch.where(nothing, 1.0, whole + smooth))


def _check_overlap(
    function: str, logits: Tensor, target: Tensor, mask: Tensor | None, smooth: float, reduction: str
) -> None:
    """As many pixels in each sample, in one order; a channel of size 1 may be missing, one sample stands for all."""
    require_reduction(function, reduction)
    require_not_negative(function, "smooth", smooth, "1.0 is usual.")
    require_tensors(function, logits=logits, target=target, mask=mask)
    (first, num_logits), (second, num_target) = (_count_pixels(v) for v in (logits, target))
    sizes, others = ([s for s in v.shape[1:] if s != 1] for v in (logits, target))
    is_turned = len(sizes) == len(others) and sizes != others  # [N, C, H, W] against [N, H, W, C]
    if num_logits != num_target or is_turned or (first != second and 1 not in (first, second)):
        raise UsageError(
            f"{function} takes logits and target of one shape, [N, ...]; got {tuple(logits.shape)} and "
            f"{tuple(target.shape)}. Each sample must have the same pixels in the same order: use reshape or permute."
        )
    require_fit(function, "mask", mask, logits.shape, "logits")
    require_fit(function, "mask", mask, target.shape, "target")


def _count_pixels(x: Tensor) -> tuple[int, int]:
    """Return how many samples, and how many pixels in each."""
    samples = x.shape[0] if x.dim() > 1 else 1
    return samples, count_along(x, range(1 if x.dim() > 1 else 0, x.dim()))


def _check_images(
    logits: Tensor, target: Tensor, border_weight: float, window: int, smooth: float, reduction: str
) -> None:
    require_reduction("structure_loss", reduction)
    require_tensors("structure_loss", logits=logits, target=target)
    if logits.dim() not in (3, 4) or logits.shape != target.shape:
        raise UsageError(
            "structure_loss takes logits and target of one shape, [N, C, H, W] or [N, H, W]; got "
            f"{tuple(logits.shape)} and {tuple(target.shape)}. Add a channel with unsqueeze(1), or drop it."
        )
    if not is_whole(window) or window < 1 or window % 2 == 0:
        raise ConfigError(f"structure_loss's window must be an odd number of pixels, got {window!r}. 31 is usual.")
    require_not_negative("structure_loss", "border_weight", border_weight, "5.0 is usual.")
    require_not_negative("structure_loss", "smooth", smooth, "1.0 is usual.")
