"""Small trainings of the recipes that run on one process or on several ranks, and what is compared afterwards."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadygrad.trainer import Trainer
from steadygrad.trainer.ranks import count_ranks, find_rank, gather_shards
from steadygrad_recipes.cod.config import CodConfig
from steadygrad_recipes.cod.data import MadeDataset, open_loaders
from steadygrad_recipes.cod.trainer import CodTrainer
from steadygrad_recipes.mmdit.config import DataConfig, MMDiTConfig, ModelConfig, OptimizerConfig, TrainingConfig
from steadygrad_recipes.mmdit.data import make_corpus, measure_rows
from steadygrad_recipes.mmdit.diffusion import Hidden
from steadygrad_recipes.mmdit.metrics import hide_batch
from steadygrad_recipes.mmdit.model import MMDiT
from steadygrad_recipes.mmdit.program import make_loaders
from steadygrad_recipes.mmdit.trainer import MMDiTTrainer
from steadygrad_recipes.seo.config import UltraOptimizedConfig
from steadygrad_recipes.seo.data import split_data
from steadygrad_recipes.seo.program import build_model
from steadygrad_recipes.seo.synthetic import make_rows
from steadygrad_recipes.seo.trainer import UltraOptimizedSEOTrainer


class Crash(Exception):
    """The process is gone."""


def train_recipe(
    name: str,
    *,
    run_dir: Path | None = None,
    strategy: str = "ddp",
    joined: int = 1,
    bad_step: int | None = None,
    crash_at: int | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train `name` on this rank; `joined`: ranks whose batches this one process has in one.

    `bad_step`: rank 1 gets NaN in that step; `crash_at`: the training ends there, after a checkpoint.
    """
    trainer, loaders = MAKERS[name](run_dir, strategy, joined)
    if bad_step is not None or crash_at is not None:
        _interfere(trainer, bad_step, crash_at)
    if resume:
        assert trainer.resume() is not None
    try:
        stats = trainer.train(*loaders)
    except Crash:
        return {}
    finally:
        if trainer.guard is not None:
            trainer.guard.close()
    averaged = {} if trainer.ema is None else gather_shards(trainer.ema.module.state_dict())
    return {
        "weights": detach(gather_shards(trainer.bare_model.state_dict())),
        "averaged": detach(averaged),
        "num_steps": stats["num_steps"],
        "num_skipped": stats["num_skipped"],
        "val": trainer.val_history,
        "train": trainer.train_history,
    }


def _interfere(trainer: Trainer, bad_step: int | None, crash_at: int | None) -> None:
    compute_loss = trainer.compute_loss

    def spoiled(batch: Any) -> Any:
        assert trainer.guard is not None
        step = trainer.guard.num_steps
        if crash_at is not None and step == crash_at:
            raise Crash
        loss, terms = compute_loss(batch)
        return (loss * torch.nan if step == bad_step and find_rank() == 1 else loss), terms

    trainer.compute_loss = spoiled  # type: ignore[method-assign]


def detach(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


# --- the recipes ------------------------------------------------------------------------------------------------------


@functools.cache
def seo_rows() -> list[Any]:
    rows = make_rows(80, seed=0)
    for row in rows[::3]:
        row.scores.pop(next(iter(row.scores)))  # missing scores: ranks have different numbers of them
    return rows


def make_seo(run_dir: Path | None, strategy: str, joined: int) -> Any:
    config = UltraOptimizedConfig(
        device="cpu", hidden=16, num_layers=2, text_dim=8, num_buckets=64, max_words=16, batch_size=8 * joined,
        dropout=0.0, epochs=2, strategy=strategy, save_every=2, ema_decay=0.5,
    )  # fmt: skip
    data = split_data(seo_rows(), [], config, seed=0)
    trainer = UltraOptimizedSEOTrainer(build_model(config, data), config, run_dir=run_dir, tell=lambda _: None)
    return trainer, data.make_loaders(config.batch_size)


def make_cod(run_dir: Path | None, strategy: str, joined: int) -> Any:
    config = CodConfig(
        device="cpu", model_size="tiny", image_size=64, num_made=16, batch_size=2 * joined, accumulation_steps=2,
        epochs=2, stage1_epochs=1, lr=0.002, mirror=False, num_pictures=0, ema_decay=0.5, strategy=strategy,
        save_every=1, precision="fp32",
    )  # fmt: skip
    trainer = CodTrainer(config, run_dir=run_dir, tell=lambda _: None)
    trainer.bare_model.keep_statistics = True  # as with trained weights: statistics of a rank's own batch would differ
    trainer.bare_model.train()
    return trainer, open_loaders(config, MadeDataset(16, 64, 0), MadeDataset(4, 64, 1))


class SteadyMMDiT(MMDiTTrainer):
    """Hides each row by itself, as a function of the row: the same in whichever batch it is."""

    def hide(self, batch: Any) -> Hidden:
        rows = []
        for index in range(len(batch["tokens"])):
            row = {name: value[index : index + 1] for name, value in batch.items()}
            seed = int(row["latents"].double().sum().abs() * 1e6) + int(row["tokens"].sum())
            rows.append(hide_batch(self.model, row, self.recipe, torch.Generator().manual_seed(seed)))
        return Hidden(**{name: torch.cat([getattr(row, name) for row in rows]) for name in vars(rows[0])})


def make_mmdit(run_dir: Path | None, strategy: str, joined: int) -> Any:
    training = TrainingConfig(
        epochs=2, train_batch_size=4 * joined, gradient_accumulation_steps=1, warmup_steps=2, dtype="fp32",
        device="cpu", strategy=strategy, save_every=2,
    )  # fmt: skip
    config = MMDiTConfig(
        data=DataConfig(num_synthetic=36),
        model=ModelConfig(hidden_size=16, num_layers=2, num_heads=2),
        optimizer=OptimizerConfig(lr=1e-3),
        training=training,
    )
    corpus = make_corpus(36, seed=0, val_fraction=0.1)
    torch.manual_seed(0)
    model = MMDiT(config.model, corpus.shapes)
    for name, value in measure_rows(corpus.train).items():
        model.get_buffer(name).copy_(value)
    trainer = SteadyMMDiT(model, config, run_dir=run_dir, tell=lambda _: None)
    return trainer, make_loaders(config, corpus)


MAKERS = {"seo": make_seo, "cod": make_cod, "mmdit": make_mmdit}


def train_and_go_on(name: str, run_dir: Path, crash_at: int) -> list[dict[str, Any]]:
    """An undisturbed training, and one that crashes and goes on."""
    whole = train_recipe(name, run_dir=run_dir / "whole")
    train_recipe(name, run_dir=run_dir / "cut", crash_at=crash_at)
    assert count_ranks() > 1
    return [whole, train_recipe(name, run_dir=run_dir / "cut", resume=True)]
