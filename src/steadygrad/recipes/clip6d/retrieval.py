"""Features of M modalities -> how often each finds its own sample in each other: R@1, R@5, R@10 for every pair.

A tie counts against the query, and so does what is not finite: features that are all alike, or NaN, find nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

RANKS = (1, 5, 10)


def rank_matches(queries: Tensor, gallery: Tensor) -> Tensor:
    """For each query how many others are at least as near as its own, row i of the gallery. [N, D] each."""
    scores = F.normalize(queries.float(), dim=-1) @ F.normalize(gallery.float(), dim=-1).mT
    own = scores.diagonal().unsqueeze(1)
    nearer = (scores >= own).sum(1) - 1
    bad = ~(own.squeeze(1).isfinite() & scores.isfinite().all(1))
    return torch.where(bad, len(scores), nearer)


def measure_recall(features: Mapping[str, Tensor], present: Tensor) -> dict[str, float]:
    """`R@1/image->en` and so on for every pair both ways, and their means `R@1`, `R@5`, `R@10`.

    Of a pair those samples count that have both, [N, M] in `present`; `features` are in its order.
    """
    names = list(features)
    found: dict[str, float] = {}
    for i, query in enumerate(names):
        for j, target in enumerate(names):
            both = present[:, i] & present[:, j]
            if i == j or int(both.sum()) < 2:
                continue
            ranks = rank_matches(features[query][both], features[target][both])
            found |= {f"R@{k}/{query}->{target}": float((ranks < k).float().mean()) for k in RANKS}
    means = {f"R@{k}": _average([v for name, v in found.items() if name.startswith(f"R@{k}/")]) for k in RANKS}
    return means | found


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def expect_by_chance(num: int) -> dict[str, float]:
    """What guessing finds among `num`."""
    return {f"R@{k}": min(1.0, k / num) for k in RANKS}


def list_pairs(metrics: Mapping[str, float], modalities: Sequence[str]) -> list[tuple[str, ...]]:
    """Rows of a table: each pair once, `R@1 5 10` there and back in percent."""
    rows = []
    for i, a in enumerate(modalities):
        for b in modalities[i + 1 :]:
            if f"R@1/{a}->{b}" in metrics:
                ways = [[f"{100 * metrics[f'R@{k}/{q}->{t}']:.1f}" for k in RANKS] for q, t in ((a, b), (b, a))]
                rows.append((f"{a} - {b}", *ways[0], *ways[1]))
    return rows
