"""The recipes that can be tuned: a recipe's config -> its trainer and loaders as a Target, built but not started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from steadygrad.trainer import Trainer
from steadygrad.trainer.batches import count_batches, count_steps
from steadygrad.trainer.task import split_terms
from steadygrad.tune.target import Field, Target, write_norm
from steadygrad.tune.tunable import Tunable


def open_seo(config: Any) -> Target:
    """Build the training of `seo`."""
    from steadygrad_recipes.seo.data import load_data
    from steadygrad_recipes.seo.program import build_model
    from steadygrad_recipes.seo.trainer import UltraOptimizedSEOTrainer

    data = load_data(config)
    trainer = UltraOptimizedSEOTrainer(build_model(config, data), config, tell=_keep_quiet)
    train, val = data.make_loaders(config.batch_size)
    fields = {
        "lr": Field(path="learning_rate", write=_write_rate(config.learning_rate)),
        "warmup": Field(path="warmup_steps", write=_write_warmup),
        "clip": Field(path="max_grad_norm", write=write_norm),
        "weight_decay": Field(path="weight_decay", write=_round),
        "precision": Field(path="precision"),
        "batch": Field(path="batch_size"),
        "accumulation": Field(path="accumulation_steps"),
    }
    num_steps = _count_steps(train, config.accumulation_steps, config.epochs, config.max_steps)
    return _make_target("seo", config, trainer, train, val, fields, num_steps, config.warmup_steps, config.schedule)


def open_cod(config: Any) -> Target:
    """Build the training of `cod`."""
    from steadygrad_recipes.cod.data import open_datasets, open_loaders
    from steadygrad_recipes.cod.trainer import CodTrainer

    train_set, test_set, _ = open_datasets(config)
    train, val = open_loaders(config, train_set, test_set)
    trainer = CodTrainer(config, tell=_keep_quiet)
    for index in range(1, len(trainer.stages)):
        # Stage after stage, as in a training: each finds the model as the last one left it
        trainer._prepare(index)
    fields = {
        "lr": Field(path="lr", write=_write_rate(config.lr)),
        "warmup": Field(path="warmup_share", write=_round),
        "clip": Field(path="grad_clip", write=write_norm),
        "weight_decay": Field(path="weight_decay", write=_round),
        "precision": Field(path="precision"),
        "batch": Field(path="batch_size"),
        "accumulation": Field(path="accumulation_steps"),
    }
    num_steps = _count_steps(train, config.accumulation_steps, config.epochs, None)
    warmup = round(config.warmup_share * num_steps)
    target = _make_target("cod", config, trainer, train, val, fields, num_steps, warmup, "cosine")
    target.note = "tuned in its last stage, in which everything is trained; stage 1 follows by the same factor"
    return target


def open_mmdit(config: Any) -> Target:
    """Build the training of `mmdit`."""
    from steadygrad_recipes.mmdit.program import load_corpus, make_loaders, make_trainer

    corpus = load_corpus(config)
    trainer = make_trainer(config, corpus, None, _Silence())
    train, val = make_loaders(config, corpus)
    training = config.training
    fields = {
        "lr": Field(path="optimizer.lr", write=_write_rate(config.optimizer.lr)),
        "warmup": Field(path="training.warmup_steps", write=_write_warmup),
        "clip": Field(path="optimizer.grad_clip_norm", write=write_norm),
        "weight_decay": Field(path="optimizer.weight_decay", write=_round),
        "beta2": Field(path="optimizer.beta2"),
        "precision": Field(path="training.dtype"),
        "batch": Field(path="training.train_batch_size"),
        "accumulation": Field(path="training.gradient_accumulation_steps"),
    }
    num_steps = _count_steps(train, training.gradient_accumulation_steps, training.epochs, training.max_steps)
    return _make_target("mmdit", config, trainer, train, val, fields, num_steps, training.warmup_steps, "cosine")


def _make_target(
    name: str,
    config: Any,
    trainer: Trainer,
    train: Iterable[Any],
    val: Iterable[Any],
    fields: Mapping[str, Field],
    num_steps: int,
    warmup_steps: int,
    schedule: str,
) -> Target:
    if trainer.config.seed is not None:
        torch.manual_seed(trainer.config.seed)  # as `Trainer.train` does
    tunable = Tunable(
        model=trainer.model,
        optimizer=trainer.optimizer,
        # `compute_loss` reads trainer.model, which is the very model that is tuned
        loss_fn=lambda batch: split_terms(trainer.compute_loss(batch))[0],
        loader=train,
        evaluate=lambda: trainer.evaluate(val)["loss"],
        guard_config=trainer.guard_config,
        schedule=schedule,
        warmup_steps=min(warmup_steps, num_steps),
        accumulation_steps=trainer.config.accumulation_steps,
        num_steps=num_steps,
    )
    return Target(name=name, tunable=tunable, fields=fields, config=config)


def _count_steps(loader: Iterable[Any], accumulation: int, epochs: int, limit: int | None) -> int:
    steps = count_steps(count_batches(loader), epochs=epochs, accumulation=accumulation, limit=limit)
    assert steps is not None  # the recipes' datasets have a length
    return steps


def _write_rate(given: float) -> Callable[[float, Target], float]:
    """Convert an optimizer's rate to the config's, by the factor, because a stage may train at a share of it."""
    return lambda rate, target: float(f"{given * rate / target.given.lr:.4g}")


def _write_warmup(share: float, target: Target) -> int:
    assert target.tunable.num_steps is not None
    return round(share * target.tunable.num_steps)


def _round(value: float, target: Target) -> float:  # noqa: ARG001
    return float(f"{value:.4g}")


def _keep_quiet(line: str) -> None:
    """Print nothing: the tuning reports its trials."""


class _Silence:
    """A console that discards its lines."""

    def say(self, text: str = "", style: str = "") -> None:
        """Discard the line."""
