"""One call's inputs, made fit for the arithmetic: features in fp32 or fp64, zeros where a modality is absent.

What stands in an absent place is never read: not its value, not a NaN in it, and no gradient goes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from steadygrad.losses.multiway.similarity import CURVES, EPS, Similarity, build_columns, build_rows


@dataclass(frozen=True)
class Batch:
    """M feature matrices [B, D] of one device and dtype, the scale, and which rows this process answers for."""

    features: tuple[Tensor, ...]
    scale: Tensor
    similarity: Similarity
    present: Tensor | None  # [B, M] bool
    span: slice  # this process's samples

    @property
    def num_modalities(self) -> int:
        """M."""
        return len(self.features)

    @property
    def num_samples(self) -> int:
        """B, of all processes."""
        return len(self.features[0])

    @property
    def absent(self) -> tuple[Tensor, ...] | None:
        """For each modality [B], True where it is missing."""
        return None if self.present is None else tuple((~self.present).unbind(1))

    @property
    def num_present(self) -> int | Tensor:
        """How many modalities a sample has: M, or [B, 1]."""
        if self.present is None:
            return self.num_modalities
        # Samples with fewer than 2 are not counted in the loss; 2 keeps num * (num - 1) from being 0 for them
        return self.present.sum(1, keepdim=True).clamp(min=2).to(self.features[0].dtype)

    @property
    def aligned(self) -> tuple[Tensor, ...]:
        """The features of a sample beside each other, an absent one replaced by what changes nothing.

        For sums that is zero. For a product of unit vectors it is the unit vector of equal entries: the product of the
        others keeps its direction and the logit its size.
        """
        if self.present is None or self.similarity != "mip":
            return self.features
        neutral = self.features[0].shape[1] ** -0.5
        return tuple(torch.where(here[:, None], f, neutral) for f, here in zip(self.features, self.present.unbind(1)))

    @cached_property
    def others(self) -> list[list[Tensor]]:
        """For each modality views of the own samples that multiply (or add up) to what all others of them do."""
        views = [self.own(view) for view in self.aligned]
        if self.similarity != "mip":
            return [views[:m] + views[m + 1 :] for m in range(len(views))]
        # Prefix and suffix products: dividing the whole product by one vector fails where that is 0
        before, after = _multiply_up(views), _multiply_up(views[::-1])[::-1]
        return [before[m - 1 : m] * (m > 0) + after[m + 1 : m + 2] for m in range(len(views))]

    def own(self, tensor: Tensor) -> Tensor:
        """Return the rows of this process's samples."""
        return tensor if self.span == slice(0, self.num_samples) else tensor[self.span]


def _multiply_up(views: Sequence[Tensor]) -> list[Tensor]:
    """Return the products of the first, of the first two, and so on."""
    return list(accumulate(views, torch.mul))


def score_positives(batch: Batch) -> Tensor:
    """Return the logit of each sample with itself [B], never rounded below fp32."""
    if batch.similarity == "distance":
        return -batch.scale * (_measure_spread(batch) + EPS).sqrt()  # [B]
    views, middle = batch.aligned, count_left(batch.num_modalities)
    rows = build_rows(views[:middle], batch.scale, batch.similarity, num=batch.num_present, whole=batch.num_modalities)
    columns = build_columns(views[middle:], batch.similarity)  # rows, columns: [B, K]
    return CURVES[batch.similarity].value((rows * columns).sum(-1))


def score_stacked(features: Tensor, scale: Tensor, similarity: Similarity) -> Tensor:
    """Return as `score_positives` for sums of features [M, B, D] that are all present, in fewer operations."""
    num = len(features)
    if similarity == "distance":
        gaps = features - features.mean(0)
        return -scale * (gaps.square().sum((0, 2)) / num + EPS).sqrt()
    own = features.sum(0).square().sum(1)  # [B]
    if similarity == "norm":
        return scale * (own + EPS).sqrt()
    return (own - features.square().sum((0, 2))) * (scale / (num * (num - 1)))


def _measure_spread(batch: Batch) -> Tensor:
    """Return [B]: the mean square distance of a sample's vectors from their centre.

    Not as a difference of squares, which in fp32 is nothing but rounding where the vectors agree.
    """
    num = batch.num_present
    center = torch.stack(batch.features).sum(0) / num  # [B, D]; absent features are zero
    gaps = torch.stack(batch.features, 1) - center[:, None]  # [B, M, D]
    if batch.present is not None:
        gaps = torch.where(batch.present[:, :, None], gaps, 0.0)
    return gaps.square().sum((1, 2)) / (num if isinstance(num, int) else num[:, 0])


def count_left(num_modalities: int) -> int:
    """How many modalities form the rows: the larger half, since rows are built panel by panel and columns are kept."""
    return (num_modalities + 1) // 2
