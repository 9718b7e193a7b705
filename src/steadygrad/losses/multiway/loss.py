"""M feature matrices -> one contrastive loss over M modalities.

For anchor modality m and sample i: log-sum-exp of the logits of all combinations that have i at m, less the logit of
the sample with itself. What "all combinations" are, `negatives` says; how they are summed, `impl`; this file only
checks the arguments, joins the parts and reduces.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from steadygrad.errors import UnsupportedError, UsageError
from steadygrad.losses.multiway import naive
from steadygrad.losses.multiway.batch import Batch, score_positives
from steadygrad.losses.multiway.check import (
    Impl,
    Negatives,
    Reduction,
    check_choices,
    check_features,
    check_scale,
    choose_anchors,
)
from steadygrad.losses.multiway.engine import Engine
from steadygrad.losses.multiway.fibre import build_fibres, sum_fibres
from steadygrad.losses.multiway.precision import choose_precision
from steadygrad.losses.multiway.sampled import build_permuted, sum_sampled
from steadygrad.losses.multiway.similarity import CURVES, Similarity, build_columns, build_rows
from steadygrad.losses.multiway.sweep import sum_combinations
from steadygrad.losses.multiway.tiled import TiledEngine

if TYPE_CHECKING:
    from steadygrad.losses.multiway.triton import Tiles


def multiway_contrastive(
    features: Sequence[Tensor],
    logit_scale: Tensor | float,
    *,
    similarity: Similarity = "mip",
    negatives: Negatives = "all",
    anchors: Literal["all"] | Sequence[int] = "all",
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    present: Tensor | None = None,
    impl: Impl = "auto",
    precision: str = "auto",
    num_samples: int = 1024,
    generator: torch.Generator | None = None,
    gather: bool = False,
    group: dist.ProcessGroup | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return the contrastive loss of M = 2..8 matrices [B, D], row i of each belonging to sample i; CLIP's at M=2.

    Features are normalised and `logit_scale` is exponentiated by the caller, as for CLIP (see `MultiwayScale`).
    `present` [B, M] is False where a sample lacks a modality: such a vector is neither a negative nor an anchor, and
    the sample's positive is made of what it has. `anchors` chooses modalities. `reduction="none"` returns [B, anchors].
    `precision` is that of the matmuls: on CUDA bf16 for bf16 features, for others fp16 with TF32's accuracy (TF32
    itself with `present`), and three products of fp16 for norm and distance (fp32), unless set; sums are fp32.
    `gather=True` takes the samples of all processes of `group` as the batch and returns the loss of this one's own.
    """
    check_choices(similarity, negatives, reduction, impl, precision, label_smoothing, num_samples)
    check_features(features, present)
    check_scale(logit_scale)
    chosen = choose_anchors(anchors, len(features))
    batch = _make_batch(features, logit_scale, similarity, present, gather=gather, group=group)
    masked = present is not None
    engine = None if impl == "naive" else _choose_engine(impl, precision, features, similarity, tiles, masked=masked)
    if negatives == "all":
        table, positives = _sum_all(batch, engine)
        # A collective; each process has summed its own rows of the first index against everything
        table = join_sums(table, group) if gather else table
        # All in order are a view. Not table[chosen]: a list of indices is copied to the device, and the host waits
        in_order = chosen == list(range(len(features)))
        sums = batch.own(table.t() if in_order else torch.stack([table[m] for m in chosen], 1))  # [n, anchors]
    else:
        positives = batch.own(naive.score_positives(batch) if engine is None else score_positives(batch))
        sums = torch.stack([_sum_some(batch, engine, m, negatives, num_samples, generator) for m in chosen], 1)
    # log(exp(sum of negatives) + exp(positive)) - positive; softplus would cut at 20, which is 2e-9 off
    losses = -torch.nn.functional.logsigmoid(positives[:, None] - sums)
    if label_smoothing:
        average = average_fibres if negatives == "fibre" else average_combinations
        means = torch.stack([average(batch, m, positives) for m in chosen], 1)
        losses = losses + label_smoothing * (positives[:, None] - means)
    return _reduce(losses, batch, chosen, reduction)


def _sum_all(batch: Batch, engine: Engine | None) -> tuple[Tensor, Tensor]:
    """Return the sums over all combinations [M, B], and the own samples' positives [n]."""
    if engine is None:
        return naive.sum_combinations(batch), batch.own(naive.score_positives(batch))
    if engine.fuses:
        from steadygrad.losses.multiway import fused  # imports Triton

        if fused.can_fuse(batch, engine):
            table, positives = fused.sum_combinations(batch, engine)  # type: ignore[arg-type]
            return table, batch.own(positives)
    return sum_combinations(batch, engine), batch.own(score_positives(batch))


def _sum_some(
    batch: Batch,
    engine: Engine | None,
    modality: int,
    negatives: Negatives,
    num_samples: int,
    generator: torch.Generator | None,
) -> Tensor:
    """Return [n]: the log-sum-exp over the negatives of the own samples at one modality."""
    if negatives == "fibre":
        return naive.sum_fibres(batch, modality) if engine is None else sum_fibres(batch, engine, modality)
    if negatives == "sampled":
        return sum_sampled(batch, modality, num_samples, generator)
    return build_permuted(batch, modality, generator).logsumexp(1)


def _reduce(losses: Tensor, batch: Batch, chosen: list[int], reduction: Reduction) -> Tensor:
    """Return anchors that are not there count nothing, and give no gradient."""
    if batch.present is None:
        return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()
    valid = batch.present[:, chosen] & (batch.present.sum(1, keepdim=True) >= 2)
    losses = torch.where(valid[batch.span], losses, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    share = len(losses) / batch.num_samples  # of all samples: the mean over processes is then the mean over anchors
    return losses.sum() / (valid.sum().clamp(min=1) * share)


def _make_batch(
    features: Sequence[Tensor],
    logit_scale: Tensor | float,
    similarity: Similarity,
    present: Tensor | None,
    *,
    gather: bool,
    group: dist.ProcessGroup | None,
) -> Batch:
    dtype = torch.float64 if features[0].dtype == torch.float64 else torch.float32
    device, size = features[0].device, len(features[0])
    if isinstance(logit_scale, Tensor):
        scale = logit_scale.to(device, dtype).reshape(())
    else:
        scale = torch.full((), float(logit_scale), dtype=dtype, device=device)  # filled there: no copy to wait for
    wide = [feature.to(dtype) for feature in features]
    if present is not None:
        # A select, not a product with the mask: what stands in an absent place may be NaN
        wide = [torch.where(here[:, None], f, 0.0) for f, here in zip(wide, present.unbind(1))]
    rank = 0
    if gather:
        if not dist.is_initialized():
            raise UsageError(
                "gather=True in multiway_contrastive, and torch.distributed has no process group. "
                "Call torch.distributed.init_process_group first, or leave gather=False."
            )
        rank = dist.get_rank(group)
        # One collective for all modalities, and one for `present`: all processes must pass it, or none
        wide = list(gather_rows(torch.stack(wide, 1), group).unbind(1))
        present = None if present is None else gather_rows(present.to(torch.uint8), group).bool()
    return Batch(tuple(wide), scale, similarity, present, slice(rank * size, (rank + 1) * size))


def _choose_engine(
    impl: str,
    precision: str,
    features: Sequence[Tensor],
    similarity: Similarity,
    tiles: Tiles | None,
    *,
    masked: bool,
) -> Engine:
    device, dtype = features[0].device, features[0].dtype
    chosen = choose_precision(precision, dtype, device, similarity=similarity, masked=masked)
    if impl == "triton" and chosen == "fp64":
        raise UnsupportedError(
            f"impl='triton' of multiway_contrastive with precision={chosen!r}. "
            "It is written for fp32 and below: use impl='tiled' or 'auto', or pass float32 features."
        )
    fits = chosen not in ("fp64", "fp32")  # cuBLAS is the faster one there
    if impl == "triton" or (impl == "auto" and fits and device.type == "cuda" and _has_triton()):
        from steadygrad.losses.multiway.triton import TritonEngine

        return TritonEngine(chosen, tiles, curve=CURVES[similarity].name)
    return TiledEngine(chosen, CURVES[similarity])


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


# --- many ranks ---------------------------------------------------------------------------------------------------
# Samples of all processes beside each other, with the gradient, and log-sum-exps joined over the processes.
#
# Each process answers for its own samples and sums its own part of the combinations. What it returns is the loss of its
# own samples; the mean over processes, which DistributedDataParallel takes of the gradients, is the loss of all.


def gather_rows(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[n, ...] -> [world * n, ...], in rank order; every process must bring the same n."""
    out: Tensor = _Gather.apply(local, group)  # type: ignore[no-untyped-call]
    return out


def join_sums(partial: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the log-sum-exp over processes, element by element."""
    return gather_rows(partial[None], group).logsumexp(0)


class _Gather(torch.autograd.Function):
    """all_gather; its gradient is the sum over processes of what each has for this one's rows."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group, ctx.num = group, len(local)
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local.contiguous(), group=group)  # every process, in the same order of calls
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        # A copy: all_reduce writes in place, and autograd may have given this gradient to another node too
        grad = grad.contiguous().clone()
        # In backward: a process that skips its backward pass leaves the others waiting here
        dist.all_reduce(grad, group=ctx.group)
        start = dist.get_rank(ctx.group) * ctx.num
        return grad[start : start + ctx.num], None


# --- smoothing ----------------------------------------------------------------------------------------------------
# Label smoothing: the mean logit over all classes of each anchor, without writing the classes out.
#
# `mip` and `cosine` are linear in each vector, so the mean over combinations is the logit of the mean vectors.


def average_combinations(batch: Batch, modality: int, positives: Tensor) -> Tensor:
    """Return [n]: the mean over all combinations that have the own sample at `modality`."""
    whole = batch.num_modalities
    others = [m for m in range(whole) if m != modality]
    rows = build_rows([batch.features[modality][batch.span]], batch.scale, batch.similarity, num=whole, whole=whole)
    columns = build_columns([_average(batch, m) for m in others], batch.similarity)
    mean = (rows * columns).sum(-1)
    if batch.present is None:
        return mean
    # The positive of a sample that lacks something is not among the combinations: one class more.
    num = reduce(torch.mul, [batch.present[:, m].sum().to(mean.dtype) for m in others])
    complete = batch.present.all(1)[batch.span]
    return torch.where(complete, mean, (mean * num + positives) / (num + 1))


def average_fibres(batch: Batch, modality: int, positives: Tensor) -> Tensor:
    """Return [n]: the mean over the vectors that may stand at `modality`; the positive is always one of them."""
    del positives
    rows, columns = build_fibres(batch, modality)  # [n, K], [B, K]
    if batch.present is None:
        return (rows * columns.mean(0)).sum(-1)
    here = batch.present[:, modality, None].to(columns.dtype)
    mean = (columns[:, :-2] * here).sum(0) / here.sum().clamp(min=1)  # the last two columns are the mask
    return (rows[:, :-2] * mean).sum(-1)


def _average(batch: Batch, modality: int) -> Tensor:
    feature = batch.features[modality]
    if batch.present is None:
        return feature.mean(0)
    return feature.sum(0) / batch.present[:, modality].sum().clamp(min=1)  # absent ones are zero
