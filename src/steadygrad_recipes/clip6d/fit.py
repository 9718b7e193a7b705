"""A config -> data, module, trainer, one fit: puts a training of this recipe together."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from steadygrad.adapters.lightning import GuardCallback
from steadygrad.checkpoint import CheckpointStore
from steadygrad.checkpoint.run import FOLDER
from steadygrad.config import GuardConfig
from steadygrad.config.switch import is_switched_off
from steadygrad.errors import UsageError
from steadygrad.extras import import_extra
from steadygrad.trainer.choices import choose_clip, choose_policy, open_trackers
from steadygrad.trainer.progress import Progress
from steadygrad.trainer.ranks import count_ranks, first_rank_first, is_first, join_ranks, share_from_first
from steadygrad_recipes.clip6d.captions import write_left_out
from steadygrad_recipes.clip6d.config import PRECISIONS, Clip6dConfig, choose_gather
from steadygrad_recipes.clip6d.data import CaptionLoader, Corpus, read_corpus
from steadygrad_recipes.clip6d.encoders import count_parameters
from steadygrad_recipes.clip6d.module import EnhancedLightningCLIPModule
from steadygrad_recipes.clip6d.retrieval import RANKS, expect_by_chance, list_pairs
from steadygrad_recipes.clip6d.saving import RunSaver
from steadygrad_recipes.clip6d.sharding import ShardedStrategy
from steadygrad_recipes.clip6d.storing import StoreIO, find_start
from steadygrad_recipes.clip6d.synthetic import write_synthetic
from steadygrad_recipes.stopping import listen

LEFT_OUT = "left_out.jsonl"
"""File in the run directory that lists the rows of the data that could not be used."""


def train_clip6d(config: Clip6dConfig, *, run_dir: Path, resume: str | None, console: Any) -> int:
    """Train, report on the console, and return the exit code."""
    join_ranks()
    with _use_threads(config.threads):
        return _train(config, run_dir, resume, console)


def _train(config: Clip6dConfig, run_dir: Path, resume: str | None, console: Any) -> int:
    corpus = open_corpus(config, run_dir, console)
    module = build_module(config, corpus)
    console.say(
        f"{' + '.join(config.modalities)}: {len(corpus.train)} samples to train, {len(corpus.val)} to validate, "
        f"{count_parameters(module):,} parameters"
    )
    if count_ranks() > 1:
        which = "all ranks" if module.gather else "its own rank"
        console.say(f"{count_ranks()} ranks; each sample is compared with those of {which}")
    saver = fit(module, corpus, config, run_dir=run_dir, resume=resume, console=console)
    print_retrieval(saver.metrics, corpus, config, console)
    return 0


def open_corpus(config: Clip6dConfig, run_dir: Path, console: Any) -> Corpus:
    """Return the data that the config names, or a set made in the run directory; report rows that were left out."""
    folder = find_folder(config, run_dir)
    if config.data is None:
        console.say(f"No data was given: {config.num_synthetic} images with captions were generated, in {folder}")
    corpus = read_corpus(config, folder)
    num = write_left_out(corpus.left_out, run_dir / LEFT_OUT) if is_first() else 0
    if num:
        first = corpus.left_out[0]
        console.say(f"{num} rows were left out, each with its reason in {run_dir / LEFT_OUT}", "yellow")
        console.say(f"The first: {first.file}: {first.reason}: {first.row}", "yellow")
    return corpus


def find_folder(config: Clip6dConfig, run_dir: Path) -> Path:
    """Return the folder of the data; without one, make it, unless the run has already done so."""
    if config.data is not None:
        return Path(config.data)
    with first_rank_first():
        return write_synthetic(run_dir / "data", num=config.num_synthetic, seed=config.seed)


def build_module(config: Clip6dConfig, corpus: Corpus) -> EnhancedLightningCLIPModule:
    """Build the module, with the same weights for the same seed."""
    # Equal weights on all ranks, before DDP or sharding
    torch.manual_seed(config.seed)
    return EnhancedLightningCLIPModule(
        learning_rate=config.learning_rate,
        enable_gradient_monitoring=config.enable_gradient_monitoring,
        enable_activation_monitoring=config.enable_activation_monitoring,
        use_stable_loss=config.use_stable_loss,
        stable_loss_version=config.stable_loss_version,
        gradient_clip_value=config.gradient_clip_value,
        modalities=config.modalities,
        vector_dim=corpus.vector_dim,
        model=config.model,
        negatives=config.negatives,
        label_smoothing=config.label_smoothing,
        weight_decay=config.weight_decay,
        warmup_steps=config.warmup_steps,
        max_steps=config.max_steps,
        log_frequency=config.log_frequency,
        gather=choose_gather(config, count_ranks()),
    )


def fit(
    module: EnhancedLightningCLIPModule,
    corpus: Corpus,
    config: Clip6dConfig,
    *,
    run_dir: Path,
    resume: str | None,
    console: Any,
) -> RunSaver:
    """Run one fit of Lightning's Trainer, from the start or from a checkpoint."""
    run_dir.mkdir(parents=True, exist_ok=True)
    loader, progress = CaptionLoader(corpus, config), Progress()
    guards = build_guards(config, run_dir, progress) if config.protect and not is_switched_off() else None
    # Rank 0 decides: ranks that see another newest checkpoint would resume apart
    start = share_from_first(lambda: find_start(resume, run_dir))
    if resume is not None:
        console.say("No checkpoint yet: starting from scratch" if start is None else f"Resuming at step {start[1]}")
    with (
        CheckpointStore(run_dir / FOLDER, keep_last=config.keep_last) as store,
        _quiet_lightning(),
        _interrupted_by_name(),
        listen() as watch,
    ):
        io = StoreIO(store)
        saver = RunSaver(
            config, corpus, loader, guards=guards, progress=progress, io=io, run_dir=run_dir, console=console,
            watch=watch,
        )  # fmt: skip
        # The order of hooks: a step is guarded before it is evaluated and saved
        trainer = build_trainer(config, [saver] if guards is None else [guards, saver], io, run_dir)
        trainer.fit(module, loader, ckpt_path=None if start is None else start[0])
    return saver


def build_guards(config: Clip6dConfig, run_dir: Path, progress: Progress) -> GuardCallback:
    """Build the Guard of this training, which clips at `gradient_clip_value`, skips, decides and records."""
    policy = dataclasses.replace(choose_policy(config.policy), early_stopping_patience=config.patience)
    guard = GuardConfig(clip=choose_clip(config.clip, config.gradient_clip_value), policy=policy)
    return GuardCallback(guard, run_dir=run_dir, sinks=[progress, *open_trackers(config, run_dir)])


def build_trainer(config: Clip6dConfig, callbacks: list[Any], io: StoreIO, run_dir: Path) -> Any:
    """Build Lightning's Trainer, without a logger and files of its own."""
    lightning = import_extra("lightning", "lightning.pytorch", "pytorch_lightning", what="the recipe clip6d")
    device = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("Clip6dConfig.device is cuda, and torch sees no CUDA device here. Use --device cpu.")
    if config.precision == "fp16" and device == "cpu":
        raise UsageError("Clip6dConfig.precision is fp16, which needs a CUDA device; here is a CPU. Use bf16 or fp32.")
    return lightning.Trainer(
        max_epochs=config.epochs,
        accelerator="gpu" if device == "cuda" else "cpu",
        **spread(config),
        precision=PRECISIONS[config.precision],
        accumulate_grad_batches=config.accumulation_steps,
        callbacks=callbacks,
        plugins=[io],
        default_root_dir=run_dir,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def spread(config: Clip6dConfig) -> dict[str, Any]:
    """Return Lightning's settings for the processes that torchrun has started; one device without it."""
    num = count_ranks()
    if num == 1:
        return {"devices": 1}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", num))
    strategy = "ddp" if config.strategy == "ddp" else ShardedStrategy()
    # CaptionLoader already gives each rank its part
    return {"devices": local, "num_nodes": num // local, "strategy": strategy, "use_distributed_sampler": False}


@contextlib.contextmanager
def _use_threads(num: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before if num is None else num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _interrupted_by_name() -> Iterator[None]:
    """Raise the KeyboardInterrupt that Lightning turns into an exit, with SIGINT ignored from then on."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as left:
        if isinstance(left.__context__, KeyboardInterrupt):
            raise left.__context__ from None
        raise
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Silence Lightning's hints about loggers, workers and devices: they were chosen here on purpose."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(lightning|pytorch_lightning)\.")
            yield
    finally:
        logger.setLevel(level)


def print_retrieval(metrics: dict[str, float], corpus: Corpus, config: Clip6dConfig, console: Any) -> None:
    """Format a table: how often each modality finds its own sample in each other one, next to the rate of guessing."""
    rows = list_pairs(metrics, config.modalities)
    if not rows:
        return
    header = ("pair", *(f"R@{k}" for k in RANKS), *(f"back R@{k}" for k in RANKS))
    console.show_table(header, rows, [""] * len(rows))
    chance = ", ".join(f"{name} {100 * value:.1f}" for name, value in expect_by_chance(len(corpus.val)).items())
    console.say(f"(percent of {len(corpus.val)} validation samples; by chance {chance})", "dim")
