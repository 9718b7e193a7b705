"""Estimates of the sum over all combinations: from K random ones with their weight, or Symile's permutations without.

`sampled` draws K combinations and gives each the weight (N - 1) / K, N being the number of combinations: the estimate
of the sum is unbiased, so with growing K the loss is that of negatives="all". `permuted` shuffles each modality once
and weighs nothing: another loss, lower by about log((N - 1) / (B - 1)) as long as negatives dominate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steadygrad.losses.multiway.batch import Batch
from steadygrad.losses.multiway.similarity import CURVES, MASKED, build_columns, build_rows


def sum_sampled(batch: Batch, modality: int, num: int, generator: torch.Generator | None) -> Tensor:
    """Return [n]: log((N - 1) / K * sum of K random negatives), for each own sample."""
    others = [m for m in range(batch.num_modalities) if m != modality]
    drawn = [_draw(batch, m, num, generator) for m in others]  # each [K], shared by all own samples
    logits = _score(batch, modality, others, drawn)  # [n, K]
    own = torch.arange(batch.span.start, batch.span.stop, device=logits.device)
    # [M - 1, n, K] -> [n, K]
    itself = torch.stack([index == own[:, None] for index in drawn]).all(0)  # drawn by accident
    num_negatives = (~itself).sum(1).clamp(min=1)
    weight = _log_negatives(batch, others) - num_negatives.to(logits.dtype).log()
    return logits.masked_fill(itself, MASKED).logsumexp(1) + weight


def build_permuted(batch: Batch, modality: int, generator: torch.Generator | None) -> Tensor:
    """Return logits [n, B] of own samples with combinations of independently shuffled others, as Symile's `n`.

    MASKED at the sample's own place, where Symile puts the positive.
    """
    others = [m for m in range(batch.num_modalities) if m != modality]
    size, device = batch.num_samples, batch.scale.device
    drawn = [torch.randperm(size, generator=generator, device=_home(generator, device)).to(device) for _ in others]
    own = torch.arange(batch.span.start, batch.span.stop, device=device)
    itself = own[:, None] == torch.arange(size, device=device)
    return _score(batch, modality, others, drawn).masked_fill(itself, MASKED)


def _score(batch: Batch, modality: int, others: list[int], drawn: list[Tensor]) -> Tensor:
    """Return logits [n, K] of own samples at `modality` with the drawn vectors of the others."""
    whole = batch.num_modalities
    rows = build_rows([batch.features[modality][batch.span]], batch.scale, batch.similarity, num=whole, whole=whole)
    columns = build_columns([batch.features[m][index] for m, index in zip(others, drawn)], batch.similarity)
    # Autocast would round the logits to half precision
    with torch.autocast(rows.device.type, enabled=False):
        logits = CURVES[batch.similarity].value(rows @ columns.t())
    if batch.absent is None:
        return logits
    missing = torch.stack([batch.absent[m][index] for m, index in zip(others, drawn)]).any(0)
    return logits.masked_fill(missing, MASKED)


def _draw(batch: Batch, modality: int, num: int, generator: torch.Generator | None) -> Tensor:
    """Return `num` of the samples that have this modality, with repetition."""
    device = batch.scale.device
    home = _home(generator, device)
    if batch.present is None:
        return torch.randint(batch.num_samples, (num,), generator=generator, device=home).to(device)
    weights = batch.present[:, modality].to(home, torch.float32).clamp(min=1e-30)  # no sample has it: they are masked
    return torch.multinomial(weights, num, replacement=True, generator=generator).to(device)


def _log_negatives(batch: Batch, others: list[int]) -> Tensor:
    """Return log(N - 1), or log N where a sample lacks something and is not among its combinations; scalar or [n].

    From logarithms: N = B^(M-1) may be beyond fp32. Finite for N = 1, whose sum is empty anyway.
    """
    size = torch.full((), float(batch.num_samples), dtype=torch.float64, device=batch.scale.device)  # no wait
    counts = [size if batch.present is None else batch.present[:, m].sum().double() for m in others]
    total = torch.stack(counts).clamp(min=1).log().sum()
    # log(N - 1) = log N + log(1 - 1/N); -700 stands for log 0 and stays finite in later sums
    others_only = total + torch.log1p(-torch.exp(-total)).clamp(min=-700.0)
    if batch.present is not None:
        others_only = torch.where(batch.present.all(1)[batch.span], others_only, total)
    return others_only.to(batch.scale.dtype)


def _home(generator: torch.Generator | None, device: torch.device) -> torch.device:
    return device if generator is None else generator.device
