"""UltraOptimizedSEOMetricsModule: features and words of a page -> a score for each metric.

The means and spreads of features and scores are buffers, computed once from the training pages: a checkpoint holds
everything a prediction needs. Scores go in and come out in their own units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from steadygrad_recipes.seo.config import UltraOptimizedConfig
from steadygrad_recipes.seo.features import FEATURES
from steadygrad_recipes.seo.synthetic import METRICS


class Block(nn.Module):
    """A residual block: normalise, widen, narrow."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # [B, D]
        added: Tensor = self.down(self.dropout(nn.functional.gelu(self.up(self.norm(x)))))
        return x + added


class UltraOptimizedSEOMetricsModule(nn.Module):
    """One trunk, one small head per metric."""

    feature_mean: Tensor
    feature_std: Tensor
    score_mean: Tensor
    score_std: Tensor

    def __init__(
        self,
        config: UltraOptimizedConfig | None = None,
        *,
        num_features: int = len(FEATURES),
        metrics: Sequence[str] = METRICS,
    ) -> None:
        super().__init__()
        config = config if config is not None else UltraOptimizedConfig()
        self.metrics = tuple(metrics)
        self.words = nn.Embedding(config.num_buckets, config.text_dim, padding_idx=0)
        self.inlet = nn.Linear(num_features + config.text_dim, config.hidden)
        self.trunk = nn.Sequential(*(Block(config.hidden, config.dropout) for _ in range(config.num_layers)))
        self.norm = nn.LayerNorm(config.hidden)
        self.heads = nn.ModuleList([_make_head(config.hidden) for _ in self.metrics])
        self.register_buffer("feature_mean", torch.zeros(num_features))
        self.register_buffer("feature_std", torch.ones(num_features))
        self.register_buffer("score_mean", torch.zeros(len(self.metrics)))
        self.register_buffer("score_std", torch.ones(len(self.metrics)))

    @torch.no_grad()
    def take_scales(self, features: Tensor, scores: Tensor, given: Tensor) -> None:
        """Set the means and spreads from the training pages and the scores that were given."""
        mean = features.mean(0)
        self.feature_mean.copy_(mean)
        # A feature that is the same on all pages would divide by 0
        self.feature_std.copy_((features - mean).square().mean(0).sqrt().clamp_min(1e-3))
        num = given.sum(0).clamp_min(1)
        mean = torch.where(given, scores, 0.0).sum(0) / num  # [M]; a missing score is 0 in `scores`
        self.score_mean.copy_(mean)
        self.score_std.copy_((torch.where(given, scores - mean, 0.0).square().sum(0) / num).sqrt().clamp_min(1e-3))

    def standardise(self, scores: Tensor) -> Tensor:
        """Return scores in units of their spread, as the loss sees them."""
        return (scores - self.score_mean) / self.score_std

    def forward(self, features: Tensor, words: Tensor | None = None) -> Tensor:  # [B, F], [B, W] -> [B, M]
        """Return standardised scores."""
        known = (features - self.feature_mean) / self.feature_std
        x = self.inlet(torch.cat([known, self._pool(features, words)], dim=-1))
        x = self.norm(self.trunk(x))
        return torch.cat([head(x) for head in self.heads], dim=-1)

    def predict(self, features: Tensor, words: Tensor | None = None) -> Tensor:
        """Return scores in their own units."""
        scores: Tensor = self(features, words).float() * self.score_std + self.score_mean  # [B, M]
        return scores

    def _pool(self, features: Tensor, words: Tensor | None) -> Tensor:
        """Return the mean of the word vectors; zeros for a page without words."""
        if words is None:
            return features.new_zeros(len(features), self.words.embedding_dim)
        num = (words != 0).sum(1, keepdim=True).clamp_min(1)
        # `padding_idx` keeps row 0 at zero, so the sum holds words only
        mean: Tensor = self.words(words).sum(1) / num
        return mean


def _make_head(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width // 2 or 1), nn.GELU(), nn.Linear(width // 2 or 1, 1))
