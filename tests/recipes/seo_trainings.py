"""Small SEO trainings that the tests share."""

from __future__ import annotations

import functools
from typing import Any

from steadygrad_recipes.seo.config import UltraOptimizedConfig
from steadygrad_recipes.seo.data import SEOData, split_data
from steadygrad_recipes.seo.program import build_model
from steadygrad_recipes.seo.readers import Row
from steadygrad_recipes.seo.synthetic import make_rows
from steadygrad_recipes.seo.trainer import UltraOptimizedSEOTrainer

SMALL: dict[str, Any] = {
    "device": "cpu",
    "hidden": 32,
    "num_layers": 1,
    "text_dim": 16,
    "num_buckets": 512,
    "max_words": 64,
    "batch_size": 16,
}


@functools.cache
def rows() -> list[Row]:
    return make_rows(200, seed=0)


def make_training(
    given: list[Row] | None = None, kind: type[UltraOptimizedSEOTrainer] = UltraOptimizedSEOTrainer, **settings: Any
) -> tuple[UltraOptimizedSEOTrainer, SEOData]:
    """A trainer and its data; `settings` are those of the config, and `run_dir`."""
    run_dir = settings.pop("run_dir", None)
    config = UltraOptimizedConfig(**{**SMALL, **settings})
    data = split_data(rows() if given is None else given, [], config, seed=0)
    return kind(build_model(config, data), config, run_dir=run_dir, tell=lambda _: None), data


def train(trainer: UltraOptimizedSEOTrainer, data: SEOData) -> dict[str, Any]:
    return trainer.train(*data.make_loaders(trainer.config.batch_size))
