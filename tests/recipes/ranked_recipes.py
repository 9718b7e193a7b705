"""Small trainings of the recipes that run on one process or on several ranks, and what is compared afterwards."""

from __future__ import annotations

import contextlib
import functools
import os
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
from steadygrad_recipes.mmdit.data import measure_rows
from steadygrad_recipes.mmdit.diffusion import Hidden
from steadygrad_recipes.mmdit.metrics import hide_batch
from steadygrad_recipes.mmdit.model import MMDiT
from steadygrad_recipes.mmdit.program import make_loaders
from steadygrad_recipes.mmdit.synthetic import make_corpus
from steadygrad_recipes.mmdit.trainer import MMDiTTrainer
from steadygrad_recipes.seo.config import UltraOptimizedConfig
from steadygrad_recipes.seo.data import split_data
from steadygrad_recipes.seo.program import build_model
from steadygrad_recipes.seo.synthetic import make_rows
from steadygrad_recipes.seo.trainer import UltraOptimizedSEOTrainer

RARELY = 1000
"""Steps between two checkpoints, where none is needed before the end of an epoch."""


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
    saves = crash_at is not None or resume  # in the middle of an epoch; most of a small training's time
    if name in FRAMEWORKS:
        assert run_dir is not None
        if count_ranks() > 1:  # as torchrun sets them
            os.environ |= {"LOCAL_WORLD_SIZE": str(count_ranks()), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        more = {"strategy": strategy} if strategy != "ddp" else {}
        return FRAMEWORKS[name](
            run_dir=run_dir, joined=joined, bad_step=bad_step, crash_at=crash_at, resume=resume, saves=saves, **more
        )
    trainer, loaders = MAKERS[name](run_dir, strategy, joined, saves)
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


def make_seo(run_dir: Path | None, strategy: str, joined: int, saves: bool) -> Any:
    config = UltraOptimizedConfig(
        device="cpu", hidden=16, num_layers=2, text_dim=8, num_buckets=64, max_words=16, batch_size=8 * joined,
        dropout=0.0, epochs=2, strategy=strategy, save_every=2 if saves else RARELY, ema_decay=0.5,
    )  # fmt: skip
    data = split_data(seo_rows(), [], config, seed=0)
    trainer = UltraOptimizedSEOTrainer(build_model(config, data), config, run_dir=run_dir, tell=lambda _: None)
    return trainer, data.make_loaders(config.batch_size)


def make_cod(run_dir: Path | None, strategy: str, joined: int, saves: bool) -> Any:
    config = CodConfig(
        device="cpu", model_size="tiny", image_size=64, num_made=16, batch_size=2 * joined, accumulation_steps=2,
        epochs=2, stage1_epochs=1, lr=0.002, mirror=False, num_pictures=0, ema_decay=0.5, strategy=strategy,
        save_every=1 if saves else RARELY, precision="fp32",
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


def make_mmdit(run_dir: Path | None, strategy: str, joined: int, saves: bool) -> Any:
    training = TrainingConfig(
        epochs=2, train_batch_size=4 * joined, gradient_accumulation_steps=1, warmup_steps=2, dtype="fp32",
        device="cpu", strategy=strategy, save_every=2 if saves else RARELY,
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


# --- those that a framework runs --------------------------------------------------------------------------------------


def train_clip6d(
    *,
    run_dir: Path,
    strategy: str = "ddp",
    joined: int = 1,
    bad_step: int | None = None,
    crash_at: int | None = None,
    resume: bool = False,
    saves: bool = True,
) -> dict[str, Any]:
    """The same of clip6d, under Lightning's Trainer."""
    from steadygrad_recipes.clip6d.config import Clip6dConfig, ModelConfig
    from steadygrad_recipes.clip6d.fit import build_module, fit, open_corpus

    sizes = ModelConfig(
        embed_dim=16, image_size=16, patch_size=8, image_width=16, image_layers=1, text_width=16, text_layers=1,
        vector_width=16, heads=2, context=16,
    )  # fmt: skip
    config = Clip6dConfig(
        modalities=("image", "en", "vector"), batch_size=4 * joined, epochs=2, num_synthetic=24, val_share=0.3,
        warmup_steps=1, learning_rate=1e-3, save_every=1 if saves else RARELY, keep_last=9, threads=1, device="cpu",
        model=sizes, strategy=strategy,
    )  # fmt: skip
    corpus = open_corpus(config, run_dir, Silence())
    module = build_module(config, corpus)
    training_step = module.training_step

    def spoiled(batch: Any, batch_idx: int) -> Any:
        step = module.trainer.global_step
        if crash_at is not None and step == crash_at:
            raise Crash
        loss = training_step(batch, batch_idx)
        return loss * torch.nan if step == bad_step and find_rank() == 1 else loss

    module.training_step = spoiled
    try:
        saver = fit(module, corpus, config, run_dir=run_dir, resume="latest" if resume else None, console=Silence())
    except Crash:
        return {}
    assert saver.guard is not None
    stats = saver.guard.stats()
    return {
        "weights": detach(gather_shards(module.state_dict())),
        "averaged": {},
        "num_steps": stats["num_steps"],
        "num_skipped": stats["num_skipped"],
        "val": [{"loss": entry["val_loss"]} for entry in saver._progress.val_history],
        "train": saver._progress.train_history,
    }


def train_sft(
    *,
    run_dir: Path,
    joined: int = 1,
    bad_step: int | None = None,
    crash_at: int | None = None,
    resume: bool = False,
    saves: bool = True,
) -> dict[str, Any]:
    """The same of sft, under transformers' Trainer."""
    from steadygrad_recipes.sft import fine_tune
    from steadygrad_recipes.sft.config import SftConfig, TinyModel

    config = SftConfig(
        num_synthetic=36, largest_amount=9, epochs=2, batch_size=4 * joined, warmup_steps=2, max_length=48,
        max_new_tokens=4, num_answers=4, save_every=1 if saves else RARELY, keep_last=9, lora_rank=4, use_cpu=True,
        safe_loss=False, tiny=TinyModel(width=16, num_layers=1, num_heads=2), log_every=1,
    )  # fmt: skip
    compute_loss = fine_tune.SftTrainer.compute_loss

    class Spoiled(fine_tune.SftTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            step = self.state.global_step
            if crash_at is not None and step == crash_at and self.model.training:
                raise Crash
            loss = compute_loss(self, *args, **kwargs)
            bad = step == bad_step and find_rank() == 1 and self.model.training
            return loss * torch.nan if bad else loss

    usual, fine_tune.SftTrainer = fine_tune.SftTrainer, Spoiled  # type: ignore[misc]
    try:
        trained = fine_tune.train_model(config, run_dir=run_dir, console=Silence(), resume="latest" if resume else None)
    except Crash:
        return {}
    finally:
        fine_tune.SftTrainer = usual  # type: ignore[misc]
    assert trained.callback is not None
    stats = trained.callback.guard.stats()
    log = trained.trainer.state.log_history
    return {
        "weights": detach({n: p for n, p in trained.trainer.model.named_parameters() if p.requires_grad}),
        "averaged": {},
        "num_steps": stats["num_steps"],
        "num_skipped": stats["num_skipped"],
        "val": [{"loss": line["eval_loss"]} for line in log if "eval_loss" in line],
        "train": [{"loss": line["loss"]} for line in log if "loss" in line],
    }


class Silence:
    """A console that shows nothing."""

    def say(self, *_: Any, **__: Any) -> None: ...

    def show_table(self, *_: Any) -> None: ...

    @contextlib.contextmanager
    def track(self, *_: Any) -> Any:
        yield lambda *_: None


FRAMEWORKS = {"clip6d": train_clip6d, "sft": train_sft}
MAKERS = {"seo": make_seo, "cod": make_cod, "mmdit": make_mmdit}


CRASH_AT = {"seo": 6, "cod": 3, "mmdit": 6, "clip6d": 3, "sft": 6}
"""A step within the second epoch: the first one's order of the data would be right also if the epoch were forgotten."""


def train_all_ways(name: str, strategy: str, run_dir: Path) -> dict[str, dict[str, Any]]:
    """On this rank: an undisturbed training, one with a fault on rank 1, one that crashes and goes on."""
    train_recipe(name, strategy=strategy, run_dir=run_dir / "cut", crash_at=CRASH_AT[name])
    return {
        "whole": train_recipe(name, strategy=strategy, run_dir=run_dir / "whole"),
        "spoiled": train_recipe(name, strategy=strategy, run_dir=run_dir / "spoiled", bad_step=1),
        "resumed": train_recipe(name, strategy=strategy, run_dir=run_dir / "cut", resume=True),
    }
