"""The program: settings and a run directory in, a trained model, its record and its samples out.

A halted training continues automatically from its last good checkpoint, at a lower learning rate, a few times at
most; one that is resumed later keeps that rate, unless a different one is given.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from steadygrad.act.precision import half_matmul_works
from steadygrad.config import Precision
from steadygrad.config.plain import build, to_plain
from steadygrad.errors import TrainingHalted, UsageError
from steadygrad.trainer import load_trained
from steadygrad.trainer.batches import count_steps
from steadygrad.trainer.ranks import count_ranks, is_first, share_from_first
from steadygrad.trainer.setup import choose_device
from steadygrad_recipes.mmdit.config import MMDiTConfig, ModelConfig
from steadygrad_recipes.mmdit.data import Corpus, Rows, measure_rows, read_corpus, write_rows
from steadygrad_recipes.mmdit.metrics import Batch, measure_baseline
from steadygrad_recipes.mmdit.model import MMDiT, Shapes
from steadygrad_recipes.mmdit.sampling import draw_samples, spell
from steadygrad_recipes.mmdit.synthetic import make_corpus
from steadygrad_recipes.mmdit.texts import encode_texts, map_array, open_tokenizer
from steadygrad_recipes.mmdit.trainer import MMDiTTrainer
from steadygrad_recipes.tables import write_lines

VAL_BATCH = 64
LEFT_OUT = "left_out.txt"
NUM_SHOWN = 3
"""Number of sampled texts shown."""
Loader = DataLoader[Batch]


class Output(Protocol):
    """Where lines are printed."""

    def say(self, text: str = "", style: str = "") -> None:
        """Print one line."""


def train(config: MMDiTConfig, *, run_dir: Path, resume: str | None, console: Output) -> int:
    """Train, report, and leave samples in the run directory; returns 0 when the training reached its end."""
    corpus = load_corpus(config)
    for note in corpus.notes:
        console.say(note, "yellow")
    if corpus.left_out and is_first():
        write_lines(run_dir / LEFT_OUT, corpus.left_out)
        console.say(f"each is named in {run_dir / LEFT_OUT}", "yellow")
    config = check_precision(config, console)
    trainer = _start(config, corpus, run_dir, resume, console)
    loaders = make_loaders(config, corpus)
    warn_of_warmup(config, -(-len(loaders[0]) // count_ranks()), console)
    baseline = trainer.guess = measure_baseline(trainer.model, corpus.train, loaders[1], config)
    trainer = train_with_recovery(trainer, corpus, loaders, console)
    print_end(trainer, baseline, console)
    if trainer.monitor_training_health()["model_healthy"]:
        write_samples(trainer.trained, config, corpus.vocab, run_dir, console)
    return 0


def _start(config: MMDiTConfig, corpus: Corpus, run_dir: Path, resume: str | None, console: Output) -> MMDiTTrainer:
    description = Description.of(config, corpus)
    earlier = None
    if resume is not None:
        # Before `description.write` below replaces it
        earlier = share_from_first(lambda: Description.read(run_dir) if (run_dir / NAME).is_file() else None)
    if earlier is not None and earlier.asked_lr == config.optimizer.lr:
        config, description = _set_rate(config, earlier.lr), dataclasses.replace(description, lr=earlier.lr)
    if earlier is not None and earlier.vocab != description.vocab:
        raise UsageError(
            f"{run_dir} was trained with another vocabulary than that of this data: the same ids would be other words. "
            "Resume with the data that it began with, or start a new run."
        )
    if is_first():
        description.write(run_dir)
    trainer = make_trainer(config, corpus, run_dir, console)
    num = sum(p.numel() for p in trainer.model.parameters())
    rows = f"{len(corpus.train):,} rows to train on, {len(corpus.val):,} to validate on"
    console.say(f"MMDiT with {num:,} parameters on {trainer.device}: {rows}")
    if resume is not None:
        step = trainer.resume(resume)
        console.say("No checkpoint yet: starting from scratch" if step is None else f"Resuming at step {step}")
    return trainer


def train_with_recovery(
    trainer: MMDiTTrainer, corpus: Corpus, loaders: tuple[Loader, Loader], console: Output
) -> MMDiTTrainer:
    """Train to the end; after a halt, continue from the last good checkpoint, with the trainer that is returned."""
    left = trainer.recipe.training.max_recoveries
    while True:
        try:
            trainer.train(*loaders)
            return trainer
        except TrainingHalted as halted:
            console.say(f"HALTED: {halted}", "red")
            following = _recover(trainer, corpus, console) if left else None
            if following is None:
                raise
            trainer, left = following, left - 1


def _recover(halted: MMDiTTrainer, corpus: Corpus, console: Output) -> MMDiTTrainer | None:
    """Return a trainer that continues from the last good checkpoint, at a lower rate; None when there is none."""
    config, run_dir = halted.recipe, halted.run_dir
    if run_dir is None:
        return None
    rate = config.optimizer.lr * config.training.recovery_lr_factor
    trainer = make_trainer(_set_rate(config, rate), corpus, run_dir, console)
    # The baseline depends on the data, not on weights
    trainer.guess = halted.guess
    step = trainer.resume()
    if step is None:
        return None
    if is_first():
        # Written before the training goes on: a resume after a kill must find the lower rate
        dataclasses.replace(Description.read(run_dir), lr=rate).write(run_dir)
    console.say(f"Recovering from the last good checkpoint, at step {step}, with lr {rate:.3g}", "yellow")
    return trainer


def check_precision(config: MMDiTConfig, console: Output) -> MMDiTConfig:
    """Use fp32 instead of a half precision that would crash the process: some CPUs advertise it and fault on it."""
    dtype, on_cpu = config.training.dtype, choose_device(config.training.device).type == "cpu"
    if dtype is Precision.FP32 or not on_cpu or half_matmul_works(dtype):
        return config
    console.say(f"{dtype.value} does not work on this CPU: training in fp32", "yellow")
    return dataclasses.replace(config, training=dataclasses.replace(config.training, dtype=Precision.FP32))


def warn_of_warmup(config: MMDiTConfig, num_batches: int, console: Output) -> None:
    """Warn when the learning rate never reaches its setting: little data, and a warm-up meant for much."""
    training = config.training
    num_steps = count_steps(
        num_batches,
        epochs=training.epochs,
        accumulation=training.gradient_accumulation_steps,
        limit=training.max_steps,
    )
    if num_steps is not None and training.warmup_steps >= num_steps:
        console.say(
            f"The warm-up takes {training.warmup_steps} steps and the training has {num_steps}: lr never gets to "
            f"{config.optimizer.lr:g}. Lower --training.warmup-steps, or train for longer.",
            "yellow",
        )


def _set_rate(config: MMDiTConfig, rate: float) -> MMDiTConfig:
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=rate))


def load_corpus(config: MMDiTConfig) -> Corpus:
    """Read the rows of the user's folder, or generate them."""
    data = config.data
    if data.path is not None:
        return read_corpus(data)
    return make_corpus(data.num_synthetic, seed=config.training.seed, val_fraction=data.val_fraction)


def make_trainer(config: MMDiTConfig, corpus: Corpus, run_dir: Path | None, console: Output) -> MMDiTTrainer:
    """Build a trainer with a new model, the same for the same seed."""
    torch.manual_seed(config.training.seed)
    with choose_device(config.training.device):
        model = MMDiT(config.model, corpus.shapes)
    for name, value in measure_rows(corpus.train).items():
        model.get_buffer(name).copy_(value)
    return MMDiTTrainer(model, config, run_dir=run_dir, tell=console.say)


def make_loaders(config: MMDiTConfig, corpus: Corpus) -> tuple[Loader, Loader]:
    """Return batches for training, in random order, and for validation."""
    size = config.training.train_batch_size
    pinned = choose_device(config.training.device).type == "cuda"
    # Not dropped if it is the only batch
    train_loader = DataLoader(corpus.train, size, shuffle=True, drop_last=len(corpus.train) >= size, pin_memory=pinned)
    return train_loader, DataLoader(corpus.val, VAL_BATCH)


def print_end(trainer: MMDiTTrainer, baseline: Mapping[str, float], console: Output) -> None:
    """Print the result, next to what is possible without a model."""
    last = trainer.val_history[-1] if trainer.val_history else {}
    for name, without in baseline.items():
        if name in last:
            console.say(f"validation {name} {last[name]:.4f}, without a model {without:.4f}")


def sample(config: MMDiTConfig, *, run_dir: Path, console: Output) -> int:
    """Sample new texts and latents from the best checkpoint of a run."""
    description = Description.read(run_dir)
    model = description.make_model()
    step = load_trained(run_dir, model)
    console.say(f"Sampling from the checkpoint of step {step}")
    vocab = None if description.vocab is None else tuple(description.vocab)
    write_samples(model.to(choose_device(config.training.device)), config, vocab, run_dir, console)
    return 0


def write_samples(
    model: MMDiT, config: MMDiTConfig, vocab: tuple[str, ...] | None, run_dir: Path, console: Output
) -> Rows:
    """Write `samples/samples.safetensors`, which can be trained on again, and `samples/samples.txt`, for reading."""
    texts, latents = read_given(model, config, vocab)
    rows = draw_samples(model, config.sampling, config.diffusion, texts=texts, latents=latents)
    if not is_first():  # it took part: each rank has only a part of a sharded model
        return rows
    folder = run_dir / "samples"
    write_rows(folder / "samples.safetensors", rows)
    words = config.data.tokenizer
    # The folder may be gone by now; the vocabulary is in the run
    tokenizer = open_tokenizer(words) if words is not None and Path(words).exists() else None
    lines = spell(rows, vocab, tokenizer)
    (folder / "samples.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for line in lines[:NUM_SHOWN]:
        console.say(f"  {line}", "dim")
    console.say(f"{len(rows)} samples are in {folder}")
    return rows


def read_given(
    model: MMDiT, config: MMDiTConfig, vocab: tuple[str, ...] | None
) -> tuple[Rows | None, torch.Tensor | None]:
    """Return the text, or the latents, that the samples are to fit; None for what is sampled."""
    sampling, shapes = config.sampling, model.shapes
    if sampling.latents is not None:
        given = map_array(Path(sampling.latents))
        shape, wanted = list(given.shape), (shapes.num_latents, shapes.latent_dim)
        given = given[None] if given.dim() == 2 else given
        if tuple(given.shape[1:]) != wanted:
            raise UsageError(f"{sampling.latents} has {shape}, and the model wants [N, {wanted[0]}, {wanted[1]}].")
        given = given.float()
        bad = [row for row, latents in enumerate(given) if not bool(latents.isfinite().all())]
        if bad or not len(given):
            what = f"row {bad[0]} is NaN or Inf" if bad else "there is no row"
            raise UsageError(f"{sampling.latents}: {what}. Texts are sampled for latents that are numbers.")
        return None, given
    if sampling.text is None:
        return None, None
    if config.data.tokenizer is not None:
        tokenizer = open_tokenizer(config.data.tokenizer)
        tokens, mask, _ = encode_texts([sampling.text], tokenizer, shapes.text_length)
        has_word = bool(sampling.text.strip())
        if not has_word or tokenizer.unk_token_id in tokens[0].tolist():
            what = "has words that the tokenizer does not know" if has_word else "has no word"
            raise UsageError(f"sampling.text: {sampling.text!r} {what}. Use words that the model was trained on.")
    else:
        ids = find_words(sampling.text, vocab)[: shapes.text_length]
        tokens, mask = torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)
    more = (0, shapes.text_length - tokens.shape[1])
    num = sampling.num_samples
    tokens, mask = F.pad(tokens.long(), more).expand(num, -1), F.pad(mask, more).expand(num, -1)
    return Rows(tokens, mask, torch.empty(num, 0)), None


def find_words(text: str, vocab: tuple[str, ...] | None) -> list[int]:
    """Return the ids of a text's words; UsageError names a word that the model does not know."""
    if vocab is None:
        raise UsageError(
            "sampling.text needs a vocab.json beside the data, or --data.tokenizer: ids have no words here."
        )
    unknown = [word for word in text.split() if word not in vocab]
    if unknown or not text.split():
        known = ", ".join(vocab[:12])
        raise UsageError(f"sampling.text: {', '.join(unknown) or 'no word'} is not in the vocabulary ({known}, ...).")
    return [vocab.index(word) for word in text.split()]


# --- what the run is ----------------------------------------------------------------------------------------------
# `mmdit.json` of a run directory: the shape of the model, so that samples need no data, and its learning rates.
#
# Written to a temporary file and renamed. It holds plain values only.


NAME = "mmdit.json"


@dataclass(frozen=True)
class Description:
    """The contents of that file."""

    shapes: dict[str, Any]
    model: dict[str, Any]
    vocab: list[str] | None
    asked_lr: float
    """The learning rate in the settings."""
    lr: float
    """The one used in training: lower after a recovery."""

    @classmethod
    def of(cls, config: MMDiTConfig, corpus: Corpus) -> Description:
        """Return the description of a new training."""
        words = None if corpus.vocab is None else list(corpus.vocab)
        rate = config.optimizer.lr
        return cls(dataclasses.asdict(corpus.shapes), to_plain(config.model), words, rate, rate)

    @classmethod
    def read(cls, run_dir: Path) -> Description:
        """Read the description of a run."""
        try:
            return cls(**json.loads((run_dir / NAME).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"{run_dir} is not a run of mmdit: {NAME} cannot be used ({error}). Train first, or give --run-dir."
            ) from None

    def write(self, run_dir: Path) -> None:
        """Write it, atomically."""
        run_dir.mkdir(parents=True, exist_ok=True)
        aside = run_dir / f"{NAME}.tmp"
        aside.write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")
        aside.replace(run_dir / NAME)  # atomic: a kill leaves the old file or the new one

    def make_model(self) -> MMDiT:
        """Build an untrained model of this shape."""
        return MMDiT(build(ModelConfig, self.model), Shapes(**self.shapes))
