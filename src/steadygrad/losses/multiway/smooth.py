"""Label smoothing: the mean logit over all classes of each anchor, without writing the classes out.

`mip` and `cosine` are linear in each vector, so the mean over combinations is the logit of the mean vectors.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from steadygrad.losses.multiway.batch import Batch
from steadygrad.losses.multiway.fibre import build_fibres
from steadygrad.losses.multiway.similarity import build_columns, build_rows


def average_combinations(batch: Batch, modality: int, positives: Tensor) -> Tensor:
    """[n]: the mean over all combinations that have the own sample at `modality`."""
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
    """[n]: the mean over the vectors that may stand at `modality`; the positive is always one of them."""
    del positives
    rows, columns = build_fibres(batch, modality)
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
