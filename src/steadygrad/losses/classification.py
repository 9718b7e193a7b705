"""Losses of logits against labels: cross entropy with ignored labels, binary cross entropy, focal, and divergence.

Finite value and gradient for every logit that is finite or -inf; NaN is not hidden. All compute in fp32 and come back
in the dtype that the plain loss would give. No label, mask or count is read by the host: a batch in which everything is
ignored gives a zero connected to the graph, so that ranks stay in step.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor
from torch.nn import functional as F

from steadygrad.errors import UnsupportedError, UsageError
from steadygrad.losses.check import (
    require_fit,
    require_not_negative,
    require_number,
    require_pair,
    require_positive,
    require_same_shape,
    require_same_size,
    require_share,
    require_tensors,
)
from steadygrad.losses.precision import hold, hold_above, largest, narrow, widen
from steadygrad.losses.reduction import REDUCTIONS, reduce_loss, require_reduction, select
from steadygrad.losses.shapes import as_dim
from steadygrad.losses.softmax import safe_log_softmax


def masked_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ceiling: float | None = None,
    dim: int = 1,
    reduction: str = "mean",
) -> Tensor:
    """Return `F.cross_entropy` over class dimension `dim` (-1 for logits [batch, time, class]).

    A position is ignored if its label is `ignore_index`, if `mask` is False there, or if all its logits are -inf;
    its values do not matter. `label_smoothing` is spread over the classes that are not -inf. `z_loss` adds
    that much of the squared log-partition, which keeps logits from drifting. `ceiling` bounds the result; above it the
    gradient is 0.
    """
    require_reduction("masked_cross_entropy", reduction)
    _check_settings(label_smoothing, z_loss, ceiling, ignore_index)
    class_dim = _check_labels(logits, target, mask, weight, dim)
    rows, target = widen(logits).movedim(class_dim, -1), target.long()  # [..., C], [...]
    counts = target != ignore_index
    if rows.shape[-1]:
        counts = counts & (rows.detach().amax(-1) != -math.inf)  # a row with a NaN counts, and shows
    if mask is not None:
        counts = counts & mask.bool()
    # Before the softmax: a row of -inf gives NaN there, and a factor of 0 afterwards would keep it
    rows = select(rows, counts.unsqueeze(-1))
    labels = torch.where(counts, target, 0)  # ignore_index cannot be gathered from
    share = counts.to(rows.dtype)
    if weight is not None:
        share = select(_pick_class(weight.to(rows.dtype).expand_as(rows), labels), counts)
    losses = _smooth_nll(rows, labels, share, weight, label_smoothing)
    if z_loss:
        losses = losses + share * z_loss * _squared_partition(rows)
    loss = reduce_loss(select(losses, counts), reduction, weight=share)
    # A comparison that NaN fails, so that it passes; `clamp` would pass the value and drop its gradient
    return narrow(loss if ceiling is None else torch.where(loss > ceiling, ceiling, loss), logits, autocast_keeps=True)


def stable_bce_with_logits(
    logits: Tensor,
    target: Tensor,
    *,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`F.binary_cross_entropy_with_logits`, for infinite logits as well; `target` holds numbers in [0, 1] of any dtype.

    The mean is over what `mask` leaves.
    """
    factor = None if isinstance(weight, Real) else weight
    _check_binary("stable_bce_with_logits", logits, target, reduction, mask=mask, weight=factor, pos_weight=pos_weight)
    losses = bce_losses(logits, target, mask, pos_weight)
    losses = losses if weight is None else losses * weight
    return narrow(reduce_loss(losses, reduction, mask), logits, autocast_keeps=True)


def focal(
    logits: Tensor,
    target: Tensor,
    *,
    alpha: float | None = 0.25,
    gamma: float = 2.0,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the binary focal loss (arXiv 1708.02002): alpha_t · (1 - p_t)^gamma · BCE; no alpha_t if alpha is None.

    The power is formed as exp(gamma · log(1 - p_t)), whose gradient is finite even for gamma below 1.
    """
    factor = alpha if isinstance(alpha, Tensor) else None
    _check_binary("focal", logits, target, reduction, mask=mask, alpha=factor)
    if alpha is not None:
        require_share("focal", "alpha", alpha, "Use 0.25, or None to weigh both classes alike.")
    require_not_negative("focal", "gamma", gamma, "Use 2.0, or 0.0 for plain cross entropy.")
    x, y = _clean(logits, target, mask)
    near = hold(x, 1e30)  # beyond, the power is 0 or 1 and its derivative would be 0 * inf
    # For a label of 0 or 1 one side is -inf, which logaddexp leaves out of value and gradient
    miss = torch.logaddexp(F.logsigmoid(near) + (1 - y).log(), F.logsigmoid(-near) + y.log())  # log(1 - p_t)
    losses = (gamma * miss).exp() * bce_losses(x, y)
    if alpha is not None:
        losses = losses * (alpha * y + (1 - alpha) * (1 - y))
    losses = losses if mask is None else select(losses, mask)
    return narrow(reduce_loss(losses, reduction, mask), logits, autocast_keeps=True)


def stable_kl(
    input: Tensor,
    target: Tensor,
    *,
    log_target: bool = False,
    from_logits: bool = False,
    mask: Tensor | None = None,
    dim: int = -1,
    reduction: str = "batchmean",
) -> Tensor:
    """Return KL(target || input), as `F.kl_div`: `input` holds log-probabilities, `target` probabilities or their logs.

    Classes that the target gives no probability count 0, even where the input is -inf (plain: NaN). `from_logits` takes
    logits on both sides, over class dimension `dim`. "batchmean", the default, divides by the first dimension: that is
    the divergence; "mean" divides by the number of elements, as torch's default does.
    """
    require_reduction("stable_kl", reduction, ("batchmean", *REDUCTIONS))
    axis = _check_divergence(input, target, mask, dim if from_logits else None)
    log_q, wide = widen(input), widen(target)
    if mask is not None:
        log_q, wide = select(log_q, mask), select(wide, mask)
    if from_logits:
        log_q, wide = safe_log_softmax(log_q, axis), safe_log_softmax(wide, axis)
    losses = _kl_of_logs(log_q, wide) if log_target or from_logits else _kl_of_probabilities(log_q, wide)
    losses = losses if mask is None else select(losses, mask)
    if reduction == "batchmean":
        rows = max(losses.shape[0], 1) if losses.dim() else 1
        return narrow(reduce_loss(losses, "sum") / rows, input, autocast_keeps=True)
    return narrow(reduce_loss(losses, reduction, mask), input, autocast_keeps=True)


def bce_losses(logits: Tensor, target: Tensor, mask: Tensor | None = None, pos_weight: Tensor | None = None) -> Tensor:
    """Return the binary cross entropy of each element, in fp32; 0 where masked."""
    x, y = _clean(logits, target, mask)
    losses = F.binary_cross_entropy_with_logits(x, y, pos_weight=pos_weight, reduction="none")
    return losses if mask is None else select(losses, mask)


def _clean(logits: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both in fp32, masked places selected out, infinite logits at the largest number: inf * 0 is NaN."""
    x, y = widen(logits), widen(target)
    if mask is not None:
        x, y = select(x, mask), select(y, mask)
    return hold(x, largest(x)), y.to(x.dtype)


def _pick_class(rows: Tensor, labels: Tensor) -> Tensor:
    """Return the element of each row's label.

    Labels are not looked at before: on CUDA the host would wait. One that is out of range torch finds here on the CPU;
    on CUDA its kernel does, with a device-side assert.
    """
    try:
        return rows.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        raise UsageError(
            f"masked_cross_entropy got a class in target that the logits, with {rows.shape[-1]} classes, do not have "
            f"({error}). Count classes from 0, and mark places that are to be left out with ignore_index, or a mask."
        ) from error


def _smooth_nll(rows: Tensor, labels: Tensor, share: Tensor, weight: Tensor | None, smoothing: float) -> Tensor:
    """Return the weighted negative log-likelihood of each row, mixed with the mean over classes that are not -inf."""
    logs = rows.log_softmax(-1)
    # Held: a label whose logit is -inf has -inf here, and times a share of 0 that is NaN
    nll = -share * hold_above(_pick_class(logs, labels), -largest(rows))
    if not smoothing:
        return nll
    # A class at -inf is ruled out: its log-probability would make the sum infinite
    possible = rows.detach() > -math.inf
    spread = select(logs if weight is None else logs * weight.to(logs.dtype), possible).sum(-1)
    return (1 - smoothing) * nll - smoothing * spread / possible.sum(-1).clamp(min=1)


def _squared_partition(rows: Tensor) -> Tensor:
    return hold(rows.logsumexp(-1), 1e18).square()  # its square stays in fp32


def _kl_of_logs(log_q: Tensor, log_p: Tensor) -> Tensor:
    p = log_p.exp()
    # A NaN is selected although it fails `p > 0`: it must show
    log_p, log_q = (hold_above(select(v, (p > 0) | v.isnan()), -largest(v)) for v in (log_p, log_q))
    return p * (log_p - log_q)


def _kl_of_probabilities(log_q: Tensor, p: Tensor) -> Tensor:
    has_mass, counts = p > 0, (p > 0) | log_q.isnan()
    log_q = hold_above(select(log_q, counts), -largest(log_q))
    # `p * 0`, not 0: a NaN in p fails both conditions and must still show
    return torch.where(counts, p * (torch.where(has_mass, p, 1.0).log() - log_q), p * 0)


def _check_settings(smoothing: float, z_loss: float, ceiling: float | None, ignore_index: int) -> None:
    name = "masked_cross_entropy"
    require_share(name, "label_smoothing", smoothing, "0.1 is usual.")
    require_not_negative(name, "z_loss", z_loss, "1e-4 is usual.")
    require_number(name, "ignore_index", ignore_index, "-100 is usual.")
    if ceiling is not None:
        require_positive(name, "ceiling", ceiling, "100.0 is usual, None means no ceiling.")


def _check_labels(logits: Tensor, target: Tensor, mask: Tensor | None, weight: Tensor | None, dim: int) -> int:
    """Return the class dimension, after all that stands along and beside it has been seen to fit."""
    name = "masked_cross_entropy"
    require_tensors(name, logits=logits, target=target, mask=mask, weight=weight)
    if target.is_floating_point():
        raise UnsupportedError(
            f"{name} takes class indices, got {target.dtype} of shape {tuple(target.shape)} as target. "
            "For probabilities use stable_kl; for indices that came as floats write target.long()."
        )
    if not logits.dim():
        raise UsageError(f"{name} got logits without dimensions, shape (). Give them one for the classes.")
    class_dim = as_dim(logits, dim if logits.dim() > 1 else 0, name)
    num_classes, places = logits.shape[class_dim], (*logits.shape[:class_dim], *logits.shape[class_dim + 1 :])
    if tuple(target.shape) != places:
        raise UsageError(
            f"{name} got target of shape {tuple(target.shape)} for logits of shape {tuple(logits.shape)} with classes "
            f"along dimension {class_dim}. Give target the shape {places}, or pass dim=-1 if classes stand last."
        )
    require_fit(name, "mask", mask, places, "target")
    if weight is not None and tuple(weight.shape) != (num_classes,):
        raise UsageError(
            f"{name} got weight of shape {tuple(weight.shape)} for logits of shape {tuple(logits.shape)}, with "
            f"{num_classes} classes along dimension {class_dim}. Give weight the shape ({num_classes},)."
        )
    return class_dim


def _check_binary(function: str, logits: Tensor, target: Tensor, reduction: str, **beside: Tensor | None) -> None:
    """Require logits and target of one shape; masks and weights may be repeated to it."""
    require_reduction(function, reduction)
    require_tensors(function, logits=logits, target=target, **beside)
    require_same_shape(function, logits=logits, target=target)
    for name, value in beside.items():
        require_fit(function, name, value, logits.shape, "logits")


def _check_divergence(input: Tensor, target: Tensor, mask: Tensor | None, dim: int | None) -> int:
    """Return the class dimension of logits, counted from the end: one of the two may have fewer dimensions."""
    require_tensors("stable_kl", input=input, target=target, mask=mask)
    shape = require_pair("stable_kl", input=input, target=target)
    require_fit("stable_kl", "mask", mask, shape, "input and target")
    if dim is None or not input.dim():
        return -1
    axis = as_dim(input, dim, "stable_kl") - input.dim()
    require_same_size("stable_kl", axis, input=input, target=target)
    return axis
