"""Losses of logits against labels: cross entropy with ignored labels, binary cross entropy, focal, and divergence.

Finite value and gradient for every logit that is finite or -inf; NaN is not hidden. All compute in fp32 and come back
in the dtype that the plain loss would give. No label, mask or count is read by the host: a batch in which everything is
ignored gives a zero connected to the graph, so that ranks stay in step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from steadygrad.errors import ConfigError, UnsupportedError
from steadygrad.losses.precision import largest, narrow, widen
from steadygrad.losses.reduction import REDUCTIONS, reduce_loss, require_reduction, select
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
    """`F.cross_entropy` over class dimension `dim` (-1 for logits [batch, time, class]).

    A place takes no part if its label is `ignore_index`, if `mask` is False there, or if all its logits are -inf;
    nothing that stands there matters. `label_smoothing` is spread over the classes that are not -inf. `z_loss` adds
    that much of the squared log-partition, which keeps logits from drifting. `ceiling` bounds the result; above it the
    gradient is 0.
    """
    require_reduction(reduction)
    _check_labels(target, label_smoothing)
    rows = widen(logits).movedim(dim if logits.dim() > 1 else 0, -1)  # [..., C]
    counts = target != ignore_index
    if rows.shape[-1]:
        counts = counts & (rows.detach().amax(-1) != -math.inf)
    if mask is not None:
        counts = counts & mask.bool()
    rows = select(rows, counts.unsqueeze(-1))
    labels = torch.where(counts, target, 0)
    share = counts.to(rows.dtype) if weight is None else select(weight.to(rows.dtype)[labels], counts)
    losses = _smooth_nll(rows, labels, share, weight, label_smoothing)
    if z_loss:
        losses = losses + share * z_loss * _squared_partition(rows)
    loss = reduce_loss(select(losses, counts), reduction, weight=share)
    return narrow(loss if ceiling is None else loss.clamp(max=ceiling), logits, autocast_keeps=True)


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
    """Binary focal loss (arXiv 1708.02002): alpha_t · (1 - p_t)^gamma · cross entropy; no alpha_t if alpha is None.

    The power is formed as exp(gamma · log(1 - p_t)), whose gradient is finite also for gamma below 1.
    """
    if gamma < 0:
        raise ConfigError(f"focal's gamma must not be negative, got {gamma}. Use 2.0, or 0.0 for plain cross entropy.")
    x, y = _clean(logits, target, mask)
    near = x.clamp(-1e30, 1e30)  # beyond, the power is 0 or 1 and its derivative would be 0 * inf
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
    """KL(target || input), as `F.kl_div`: `input` holds log-probabilities, `target` probabilities or their logarithms.

    Classes that the target gives no probability count 0, also where the input is -inf (plain: NaN). `from_logits` takes
    logits on both sides, over class dimension `dim`. "batchmean", the default, divides by the first dimension: that is
    the divergence; "mean" divides by the number of elements, as torch's default does.
    """
    require_reduction(reduction, ("batchmean", *REDUCTIONS))
    log_q, wide = widen(input), widen(target)
    if mask is not None:
        log_q, wide = select(log_q, mask), select(wide, mask)
    if from_logits:
        log_q, wide = safe_log_softmax(log_q, dim), safe_log_softmax(wide, dim)
    losses = _kl_of_logs(log_q, wide) if log_target or from_logits else _kl_of_probabilities(log_q, wide)
    losses = losses if mask is None else select(losses, mask)
    if reduction == "batchmean":
        rows = max(input.shape[0], 1) if input.dim() else 1
        return narrow(reduce_loss(losses, "sum") / rows, input, autocast_keeps=True)
    return narrow(reduce_loss(losses, reduction, mask), input, autocast_keeps=True)


def bce_losses(logits: Tensor, target: Tensor, mask: Tensor | None = None, pos_weight: Tensor | None = None) -> Tensor:
    """Binary cross entropy of each element, in fp32; 0 where masked."""
    x, y = _clean(logits, target, mask)
    losses = F.binary_cross_entropy_with_logits(x, y, pos_weight=pos_weight, reduction="none")
    return losses if mask is None else select(losses, mask)


def _clean(logits: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both in fp32, masked places selected out, infinite logits at the largest number: inf * 0 is NaN."""
    x, y = widen(logits), widen(target)
    if mask is not None:
        x, y = select(x, mask), select(y, mask)
    return x.clamp(-largest(x), largest(x)), y.to(x.dtype)


def _smooth_nll(rows: Tensor, labels: Tensor, share: Tensor, weight: Tensor | None, smoothing: float) -> Tensor:
    """Weighted negative log-likelihood of each row, mixed with the mean over the classes that are not -inf."""
    logs = rows.log_softmax(-1)
    nll = -share * logs.gather(-1, labels.unsqueeze(-1)).squeeze(-1).clamp(min=-largest(rows))
    if not smoothing:
        return nll
    possible = rows.detach() > -math.inf
    spread = select(logs if weight is None else logs * weight.to(logs.dtype), possible).sum(-1)
    return (1 - smoothing) * nll - smoothing * spread / possible.sum(-1).clamp(min=1)


def _squared_partition(rows: Tensor) -> Tensor:
    return rows.logsumexp(-1).clamp(-1e18, 1e18).square()  # its square stays in fp32


def _kl_of_logs(log_q: Tensor, log_p: Tensor) -> Tensor:
    p = log_p.exp()
    log_p, log_q = (select(v, p > 0).clamp(min=-largest(v)) for v in (log_p, log_q))
    return p * (log_p - log_q)


def _kl_of_probabilities(log_q: Tensor, p: Tensor) -> Tensor:
    has_mass = p > 0
    log_q = select(log_q, has_mass).clamp(min=-largest(log_q))
    return torch.where(has_mass, p * (torch.where(has_mass, p, 1.0).log() - log_q), p * 0)


def _check_labels(target: Tensor, smoothing: float) -> None:
    if target.is_floating_point():
        raise UnsupportedError(
            f"masked_cross_entropy takes class indices, got {target.dtype} as target. For probabilities use stable_kl."
        )
    if not 0.0 <= smoothing <= 1.0:
        raise ConfigError(f"label_smoothing must be between 0 and 1, got {smoothing}. 0.1 is usual.")
