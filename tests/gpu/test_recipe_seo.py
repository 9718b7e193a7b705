"""The SEO training on CUDA at a size that needs a GPU: bf16 and fp16, with one bad batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from steadygrad_recipes.seo.config import UltraOptimizedConfig
from steadygrad_recipes.seo.features import FEATURES
from steadygrad_recipes.seo.model import UltraOptimizedSEOMetricsModule
from steadygrad_recipes.seo.trainer import UltraOptimizedSEOTrainer

pytestmark = pytest.mark.gpu

SIZE = {"hidden": 1536, "num_layers": 8, "text_dim": 512, "num_buckets": 50_000, "max_words": 256}
"""About 107 million parameters."""


def make_batches(num: int, size: int = 256) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Scores that follow from the features; nine of ten are given."""
    draw = torch.Generator().manual_seed(0)
    rule = torch.randn(len(FEATURES), 5, generator=draw)
    batches = []
    for _ in range(num):
        features = torch.randn(size, len(FEATURES), generator=draw)
        words = torch.randint(0, SIZE["num_buckets"], (size, 256), generator=draw)
        scores = 50.0 + 10.0 * features @ rule
        batches.append((features, words, scores, torch.rand(scores.shape, generator=draw) > 0.1))
    return batches


def make_trainer(precision: str, **settings: object) -> UltraOptimizedSEOTrainer:
    values = {**SIZE, "precision": precision, "device": "cuda", "learning_rate": 3e-4, "dropout": 0.0, **settings}
    config = UltraOptimizedConfig(**values)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = UltraOptimizedSEOMetricsModule(config)
    features, _, scores, given = make_batches(1)[0]
    model.take_scales(features, scores, given)
    return UltraOptimizedSEOTrainer(model, config, tell=lambda _: None)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_learns_at_real_size_and_a_bad_batch_leaves_no_trace(precision: str) -> None:
    batches = make_batches(12)
    batches[5] = (torch.full_like(batches[5][0], math.nan), *batches[5][1:])
    trainer = make_trainer(precision, epochs=3)

    stats = trainer.train(batches, make_batches(14)[12:])

    assert sum(p.numel() for p in trainer.model.parameters()) > 100e6
    assert stats["num_skipped"] >= 3
    assert trainer.monitor_training_health()["overall_healthy"]
    losses = [entry["loss"] for entry in trainer.val_history]
    assert losses[-1] < 0.7 < 1.0  # 1 is the loss of predicting the mean
    assert (stats["loss_scale"] is not None) is (precision == "fp16")


def test_auto_selects_half_precision_on_a_gpu() -> None:
    assert make_trainer("auto", hidden=32, num_layers=1, num_buckets=64).guard_config.autocast is not None


def test_the_optimizer_is_fused_and_the_host_never_waits() -> None:
    trainer = make_trainer("bf16", hidden=32, num_layers=1, num_buckets=64)

    assert not isinstance(trainer.optimizer, list)
    assert trainer.optimizer.param_groups[0]["fused"] is True
