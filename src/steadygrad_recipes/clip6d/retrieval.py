"""Features of M modalities -> how often each finds its own sample in each other: R@1, R@5, R@10 for every pair.

With three or more, also how often a modality is found from all the others together, by what the loss compares: their
sum or their product. A product says nothing about pairs: it stays the same when two modalities flip the signs of the
same entries, but their cosines with a third do not. A tie counts against the query, and so does a value that is not
finite: features that are all equal, or NaN, find nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

RANKS = (1, 5, 10)
REST = "(rest)"
"""All modalities except the one being looked for; no modality can have this name."""


def rank_matches(queries: Tensor, gallery: Tensor) -> Tensor:
    """For each query, count the others at least as near as its own, which is row i of the gallery. [N, D] each."""
    scores = F.normalize(queries.float(), dim=-1) @ F.normalize(gallery.float(), dim=-1).mT
    own = scores.diagonal().unsqueeze(1)
    nearer = (scores >= own).sum(1) - 1  # its own is among them
    # NaN fails `>=`, so such a query would seem to find its own first
    bad = ~(own.squeeze(1).isfinite() & scores.isfinite().all(1))
    return torch.where(bad, len(scores), nearer)


def measure_recall(features: Mapping[str, Tensor], present: Tensor, *, multiplies: bool = False) -> dict[str, float]:
    """Return `R@1/image->en` and so on for every pair both ways, `R@1/(rest)->en` for three or more, and both means.

    A pair counts the samples that have both modalities, according to `present` [N, M]; the rest counts those that
    have all of them. `features` are in the same order. `multiplies`: the rest is a product, not a sum.
    """
    pairs: dict[str, float] = {}
    for i, (query, queries) in enumerate(features.items()):
        for j, (target, gallery) in enumerate(features.items()):
            both = present[:, i] & present[:, j]
            if i != j and int(both.sum()) >= 2:
                pairs |= _count_found(f"{query}->{target}", queries[both], gallery[both])
    whole = present.all(1)
    joint: dict[str, float] = {}
    if len(features) >= 3 and int(whole.sum()) >= 2:
        for target, gallery in features.items():
            rest = torch.stack(
                [F.normalize(f[whole].float(), dim=-1) for name, f in features.items() if name != target]
            )
            joint |= _count_found(f"{REST}->{target}", rest.prod(0) if multiplies else rest.sum(0), gallery[whole])
    means = {f"R@{k}": _average(pairs, k) for k in RANKS} | ({f"{REST} R@1": _average(joint, 1)} if joint else {})
    return means | pairs | joint


def _count_found(name: str, queries: Tensor, gallery: Tensor) -> dict[str, float]:
    ranks = rank_matches(queries, gallery)
    return {f"R@{k}/{name}": float((ranks < k).float().mean()) for k in RANKS}


def _average(found: Mapping[str, float], k: int) -> float:
    values = [value for name, value in found.items() if name.startswith(f"R@{k}/")]
    return sum(values) / len(values) if values else 0.0


def expect_by_chance(num: int) -> dict[str, float]:
    """Return the rate of guessing among `num`."""
    return {f"R@{k}": min(1.0, k / num) for k in RANKS}


def list_pairs(metrics: Mapping[str, float], modalities: Sequence[str]) -> list[tuple[str, ...]]:
    """Format table rows: each pair once, `R@1 5 10` both ways in percent; then each modality from the rest, one way."""

    def spell(query: str, target: str) -> list[str]:
        return [f"{100 * metrics[f'R@{k}/{query}->{target}']:.1f}" for k in RANKS]

    pairs = [(a, b) for i, a in enumerate(modalities) for b in modalities[i + 1 :] if f"R@1/{a}->{b}" in metrics]
    rows = [(f"{a} - {b}", *spell(a, b), *spell(b, a)) for a, b in pairs]
    found = [name for name in modalities if f"R@1/{REST}->{name}" in metrics]
    return rows + [(f"{REST} - {name}", *spell(REST, name), *[""] * len(RANKS)) for name in found]
