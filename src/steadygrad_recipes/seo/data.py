"""Rows -> tensors, a split, and loaders. The one place that decides how a feature, score or word is encoded."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from steadygrad.errors import UsageError
from steadygrad.words import spell_count
from steadygrad_recipes.seo.config import UltraOptimizedConfig
from steadygrad_recipes.seo.features import split_words
from steadygrad_recipes.seo.readers import Row, list_features, read_rows
from steadygrad_recipes.seo.synthetic import make_rows

NAMES = "seo.json"
"""File in the run directory: which features go in, which metrics come out."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the tensors' columns."""

    features: tuple[str, ...]
    metrics: tuple[str, ...]

    def write(self, run_dir: Path) -> None:
        """Save them with the run, for predictions."""
        names = {"features": self.features, "metrics": self.metrics}
        (run_dir / NAMES).write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, run_dir: Path) -> Names:
        """Load those of a run."""
        try:
            names = json.loads((run_dir / NAMES).read_text(encoding="utf-8"))
            return cls(tuple(names["features"]), tuple(names["metrics"]))
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(
                f"{run_dir} is not a finished run of seo: {error}. Train one, or give --run-dir."
            ) from None


@dataclass(frozen=True, slots=True)
class SEOData:
    """A set of pages, ready for training."""

    names: Names
    train: TensorDataset | Subset[Any]
    val: TensorDataset | Subset[Any]
    left_out: list[str]
    """Rows that could not be used, each with its place and reason."""

    def make_loaders(self, batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """Return batches of features, words, scores and which are given: shuffled for training, else in order."""
        return DataLoader(self.train, batch_size, shuffle=True), DataLoader(self.val, 256)

    def train_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return features and scores of the training pages, and which were given; the model derives its scales."""
        columns = zip(*(self.train[i] for i in range(len(self.train))))
        features, _, scores, given = (torch.stack(column) for column in columns)
        return features, scores, given


def load_data(config: UltraOptimizedConfig) -> SEOData:
    """Load the pages that the config names, or synthetic ones."""
    seed = 0 if config.seed is None else config.seed
    if config.data is None:
        return split_data(make_rows(config.num_synthetic, seed), [], config, seed)
    read = read_rows(config.data)
    return split_data(read.rows, read.left_out, config, seed)


def split_data(rows: list[Row], left_out: list[str], config: UltraOptimizedConfig, seed: int) -> SEOData:
    """Build the tensors of all rows, and split off validation pages at random, the same for the same seed."""
    if len(rows) < 5:
        found = "".join(f" Left out: {reason}." for reason in left_out[:3])
        are = "is" if len(rows) < 2 else "are"
        pages = spell_count(len(rows), "page")
        raise UsageError(f"there {are} {pages} with scores, too few to train and validate on.{found} Give at least 5.")
    # The order of columns is the order of weights: it is saved with the run and must not depend on a set's order
    names = Names(list_features(rows), tuple(dict.fromkeys(name for row in rows for name in row.scores)))
    tensors = encode_rows(rows, names, config)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    num_val = max(1, round(config.val_share * len(rows)))
    whole = TensorDataset(*tensors)
    return SEOData(names, Subset(whole, order[num_val:]), Subset(whole, order[:num_val]), left_out)


def encode_rows(rows: list[Row], names: Names, config: UltraOptimizedConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return features [N, F], word numbers [N, W], scores [N, M] (0 where missing), and which of those exist [N, M]."""
    features = torch.tensor([[_squash(row.features.get(name, 0.0)) for name in names.features] for row in rows])
    words = torch.tensor([encode_text(row.text, config) for row in rows], dtype=torch.long)
    scores = torch.tensor([[row.scores.get(name, 0.0) for name in names.metrics] for row in rows])
    given = torch.tensor([[name in row.scores for name in names.metrics] for row in rows])
    return features.reshape(len(rows), len(names.features)), words, scores, given


def _squash(value: float) -> float:
    """Return the signed logarithm, because counts differ by orders of magnitude."""
    return math.copysign(math.log1p(abs(value)), value)


def encode_text(text: str, config: UltraOptimizedConfig) -> list[int]:
    """Return the numbers of the first words, padded with 0; a word's number is the same in every process."""
    words = split_words(text)[: config.max_words]
    # Not hash(), which differs from process to process; number 0 is padding
    numbers = [1 + zlib.crc32(word.encode()) % (config.num_buckets - 1) for word in words]
    return numbers + [0] * (config.max_words - len(numbers))
