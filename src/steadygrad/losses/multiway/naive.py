"""The specification: every combination is written out, compared and summed. B^M * M * D numbers: for small B only.

Nothing here is shared with the fast versions, so each checks the other; autograd makes the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steadygrad.losses.multiway.batch import Batch
from steadygrad.losses.multiway.similarity import EPS, MASKED, Similarity


def compare(views: Tensor, scale: Tensor, similarity: Similarity, here: Tensor | None = None) -> Tensor:
    """Return logits [...] of views [..., M, D]; `here` [..., M] says which of the M are there."""
    whole, dim = views.shape[-2:]
    if here is None:
        here = torch.ones(views.shape[:-1], dtype=torch.bool, device=views.device)
    num = here.sum(-1).clamp(min=2).to(views.dtype)
    if similarity == "mip":
        return scale * torch.where(here[..., None], views, dim**-0.5).prod(-2).sum(-1)
    views = torch.where(here[..., None], views, 0.0)
    total = views.sum(-2)
    if similarity == "cosine":
        gram = (views[..., :, None, :] * views[..., None, :, :]).sum(-1)  # autocast would round a matmul
        pairs = torch.triu(gram, diagonal=1).sum((-1, -2))
        return scale * pairs / (num * (num - 1) / 2)
    if similarity == "norm":
        return scale * whole / num * (total.square().sum(-1) + EPS).sqrt()
    spread = torch.where(here[..., None], views - (total / num[..., None])[..., None, :], 0.0)
    return -scale * (spread.square().sum((-1, -2)) / num + EPS).sqrt()


def score_positives(batch: Batch) -> Tensor:
    """Return [B]."""
    return compare(torch.stack(batch.features, 1), batch.scale, batch.similarity, batch.present)


def sum_combinations(batch: Batch) -> Tensor:
    """Return [M, B]: over all combinations of present vectors that have sample i at modality m, but itself."""
    size, num = batch.num_samples, batch.num_modalities
    index = torch.cartesian_prod(*[torch.arange(size, device=batch.scale.device)] * num)  # [B^M, M]
    views = torch.stack([f[index[:, m]] for m, f in enumerate(batch.features)], 1)  # [B^M, M, D]
    logits = compare(views, batch.scale, batch.similarity)
    if batch.present is not None:
        here = torch.stack([batch.present[index[:, m], m] for m in range(num)], 1).all(1)
        logits = logits.masked_fill(~here, MASKED)
    logits = logits.masked_fill((index == index[:, :1]).all(1), MASKED)
    own = index[:, 0]
    logits = logits.masked_fill((own < batch.span.start) | (own >= batch.span.stop), MASKED)
    table = logits.view([size] * num)
    return torch.stack([table.movedim(m, 0).reshape(size, -1).logsumexp(1) for m in range(num)])


def sum_fibres(batch: Batch, modality: int) -> Tensor:
    """[n]: for each own sample, over which other vector stands at `modality`, the rest being the sample's own."""
    size = batch.num_samples
    own = torch.stack(batch.features, 1)[batch.span]  # [n, M, D]
    # `repeat` copies; an expanded view could not be written to below
    views = own[:, None].repeat(1, size, 1, 1)  # [n, B, M, D]
    views[:, :, modality] = batch.features[modality]
    itself = torch.eye(size, dtype=torch.bool, device=views.device)[batch.span]
    if batch.present is None:
        return compare(views, batch.scale, batch.similarity).masked_fill(itself, MASKED).logsumexp(1)
    here = batch.present[batch.span][:, None].repeat(1, size, 1)
    here[:, :, modality] = True  # rows without it are not counted as anchors
    logits = compare(views, batch.scale, batch.similarity, here)
    return logits.masked_fill(itself | ~batch.present[:, modality], MASKED).logsumexp(1)
