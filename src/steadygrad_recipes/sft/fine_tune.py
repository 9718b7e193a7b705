"""SftConfig -> a fine-tuned model in the run directory, trained by transformers' Trainer under our callback.

`train_model` combines what exists: `stable_training_arguments`, `GuardCallback`, `safe_compute_loss`,
sealed checkpoints, and a Trainer whose row order depends only on seed and epoch. `protect=False` and STEADYGRAD=off
give the plain Trainer. Nothing is written outside the run directory.
"""

# ruff: noqa: ARG002 - the arguments of an event are the Trainer's
from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from steadygrad.adapters.transformers import (
    GuardCallback,
    SafeLoss,
    safe_compute_loss,
    stable_training_arguments,
)
from steadygrad.config import GuardConfig, Precision
from steadygrad.config.switch import is_switched_off
from steadygrad.errors import ConfigError, TrainingHalted, UsageError
from steadygrad.extras import import_extra
from steadygrad.trainer.choices import choose_clip, choose_policy, open_trackers
from steadygrad.trainer.files import append_metrics
from steadygrad.trainer.guessing import report_training
from steadygrad.trainer.progress import Progress
from steadygrad.trainer.ranks import count_ranks, first_rank_first, is_first, join_ranks, share_from_first
from steadygrad.words import spell_count
from steadygrad_recipes.sft.checkpoints import SealCheckpoints, StopOnSignal, find_checkpoint
from steadygrad_recipes.sft.config import SftConfig
from steadygrad_recipes.sft.console import Console, NormKeeper, TrainingVoice
from steadygrad_recipes.sft.data import Examples, count_known, read_examples
from steadygrad_recipes.sft.metrics import (
    Checker,
    Scores,
    answer,
    check_answer,
    guess_loss,
    load_checker,
    score,
    score_commonest,
)
from steadygrad_recipes.sft.model import add_lora, open_model
from steadygrad_recipes.sft.quiet import quiet_libraries, use_few_threads
from steadygrad_recipes.sft.rows import Encoded, EpochSampler, Padder, encode_all
from steadygrad_recipes.stopping import listen
from steadygrad_recipes.tables import write_lines

_transformers = import_extra("transformers", "transformers", what="the recipe sft")
_Trainer: Any = _transformers.Trainer
_TrainerCallback: Any = _transformers.TrainerCallback

MERGED = "merged"
"""Folder of the model with the LoRA matrices merged into it."""
MODEL = "model"
"""Folder of the trained weights, inside the run directory."""
SCORES = "scores.json"
LEFT_OUT = "left_out.txt"
"""List of the rows that could not be used, in the run directory."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The results of a training."""

    trainer: Any
    scores: Scores
    baseline: Scores
    callback: GuardCallback | None
    safe_loss: SafeLoss | None


class SftTrainer(_Trainer):  # type: ignore[misc]
    """transformers' Trainer, with a row order that does not depend on earlier random draws."""

    def __init__(self, *args: Any, group_by_length: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group_by_length = group_by_length

    # A private method of transformers' Trainer; older versions pass no dataset
    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        rows = self.train_dataset if train_dataset is None else train_dataset
        lengths = [len(row["input_ids"]) for row in rows]
        step_size = self.args.train_batch_size * self.args.gradient_accumulation_steps * max(1, self.args.world_size)
        group_size = step_size if self._group_by_length else None
        return EpochSampler(lengths, self.args.seed, group_size, find_epoch=self._find_epoch)

    def _find_epoch(self) -> int:
        """Return the epoch that begins, or that a resume continues; the state counts parts of epochs too."""
        return int(self.state.epoch or 0)


class MetricsFile(_TrainerCallback):  # type: ignore[misc]
    """Append each validation to the run's `metrics.jsonl`, as the other recipes do."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Write one line, on the first process."""
        if state.is_world_process_zero and metrics and "eval_loss" in metrics:
            where = {"step": state.global_step, "epoch": state.epoch}
            append_metrics(self._run_dir, where | {"val_loss": float(metrics["eval_loss"])})


class LearningJudge(_TrainerCallback):  # type: ignore[misc]
    """Reports a run that did no better than a guess, or whose first losses exploded, before the guard closes."""

    def __init__(self, guards: GuardCallback, start: Progress, guess: float | None, run_dir: Path) -> None:
        self._guards, self._start, self._guess, self._run_dir = guards, start, guess, run_dir

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the validation losses, those before a resume included, with the guess."""
        guard, start = self._guards.guard, self._start
        guard.flush()
        losses = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry]
        report_training(guard, self._run_dir, losses, self._guess, first=start.first_loss, peak=start.peak)


class EpochEvents(_TrainerCallback):  # type: ignore[misc]
    """Validate and save at the end of each epoch in addition to every so many steps, but not twice at one step."""

    def __init__(self) -> None:
        self._validated = self._saved = -1

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that this step was validated."""
        self._validated = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that this step was saved."""
        self._saved = state.global_step

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask the Trainer for what has not been done at this step."""
        control.should_evaluate = args.eval_strategy != "no" and self._validated != state.global_step
        control.should_save = self._saved != state.global_step


def train_model(config: SftConfig, *, run_dir: Path, console: Console, resume: str | None = None) -> Trained:
    """Train, save, answer the held-out prompts. `resume`: 'latest', a run directory or one of its checkpoints."""
    join_ranks()
    checkpoint = None
    if resume == "best":
        raise UsageError(
            "--resume best: sft keeps no best checkpoint, its Trainer continues from the newest. Use --resume latest, "
            "or one of the folders in RUN/checkpoints."
        )
    if resume is not None:
        place = run_dir if resume == "latest" else Path(resume)
        checkpoint = share_from_first(lambda: find_checkpoint(place, console.say))
        console.say(f"Resuming from {checkpoint}.")
    examples = read_examples(
        config.data,
        config.validation,
        share=config.validation_share,
        num_synthetic=config.num_synthetic,
        largest_amount=config.largest_amount,
        seed=config.seed,
        skip_bad_rows=config.skip_bad_rows,
        hub=config.hub,
    )
    checker = load_checker(config.checker)
    if checker is not None:
        # Now, not after hours of training
        check_answer(checker, examples.training[0].completion, examples.training[0].completion)
    if examples.left_out and is_first():
        run_dir.mkdir(parents=True, exist_ok=True)
        write_lines(run_dir / LEFT_OUT, examples.left_out)
    with quiet_libraries(), use_few_threads(config):
        trained = _train(config, examples, run_dir, console, checkpoint, checker)
    if is_first():
        _write_scores(run_dir / SCORES, trained.scores, trained.baseline)
    return trained


def _train(
    config: SftConfig, examples: Examples, run_dir: Path, console: Console, checkpoint: Path | None, checker: Checker
) -> Trained:
    _transformers.set_seed(config.seed)
    with first_rank_first():
        # Rank 0 first: it may build the model, and the others read what it wrote
        base, tokenizer = open_model(config, run_dir, examples.training)
    model = add_lora(base, config)
    training = encode_all(tokenizer, examples.training, config.max_length, config.long_prompts)
    validation = encode_all(tokenizer, examples.validation, config.max_length, config.long_prompts)
    for line in describe_data(examples, training, validation, config):
        console.say(line)
    if config.protect and training.num_unlabelled == len(training.rows):
        raise ConfigError(
            f"none of the {len(training.rows)} rows to train on has a label left: each prompt alone fills "
            f"max_length={config.max_length}. Raise it, or use long_prompts=cut_start."
        )
    trainer, callback, safe_loss, voice = build_trainer(
        config, model, tokenizer, training, validation, run_dir, console
    )
    try:
        with listen() as watch:
            trainer.add_callback(StopOnSignal(watch))
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    except BaseException:
        # While it is handled: the record then says that the run was stopped, or failed, and not that it finished.
        # A UsageError: it ended before there was a guard
        with contextlib.suppress(TrainingHalted, UsageError):
            if callback is not None:
                callback.guard.close()
        raise
    finally:
        voice.close()
    trainer.save_model(str(run_dir / MODEL))
    scores, baseline = score_together(config, trainer.model, tokenizer, examples, checker)
    if config.merge and config.lora_rank:
        save_merged(trainer.model, tokenizer, run_dir / MERGED)
    return Trained(trainer, scores, baseline, callback, safe_loss)


def build_trainer(
    config: SftConfig,
    model: Any,
    tokenizer: Any,
    training: Encoded,
    validation: Encoded,
    run_dir: Path,
    console: Console,
) -> tuple[SftTrainer, GuardCallback | None, SafeLoss | None, TrainingVoice]:
    """Build a Trainer with everything attached that the config asks for."""
    protected = config.protect and not is_switched_off()
    norms = NormKeeper()
    voice = TrainingVoice(console, norms, guarded=protected)
    callback, held_out = None, validation.drop_unlabelled()
    guards: list[Any] = []
    if protected:
        start = Progress()
        sinks = [norms, start, *open_trackers(config, run_dir)]
        callback = GuardCallback(make_guard_config(config), run_dir=run_dir, sinks=sinks)
        guards = [LearningJudge(callback, start, guess_loss(training.rows, held_out), run_dir), callback]
    trainer = SftTrainer(
        model=model,
        args=make_arguments(config, run_dir, validates=bool(held_out)),
        train_dataset=training.rows,
        eval_dataset=held_out or None,
        data_collator=Padder(tokenizer.pad_token_id),
        processing_class=tokenizer,
        # LearningJudge before the guard, which closes when the training ends; the seal after all that write files
        callbacks=[*guards, voice, MetricsFile(run_dir), EpochEvents(), SealCheckpoints()],
        group_by_length=config.group_by_length,
    )
    trainer.remove_callback(_transformers.PrinterCallback)
    safe_loss = safe_compute_loss(trainer) if protected and config.safe_loss else None
    return trainer, callback, safe_loss, voice


def make_guard_config(config: SftConfig) -> GuardConfig:
    """Return the guard's settings; by default the same clipping as the plain Trainer's."""
    policy = dataclasses.replace(choose_policy(config.policy), early_stopping_patience=config.patience or None)
    return GuardConfig(clip=choose_clip(config.clip, config.max_grad_norm), policy=policy)


def make_arguments(config: SftConfig, run_dir: Path, *, validates: bool = True) -> Any:
    """Return TrainingArguments; `stable_training_arguments` chooses what the config leaves open."""
    return stable_training_arguments(
        output_dir=str(run_dir / "checkpoints"),
        num_train_epochs=config.epochs,
        max_steps=config.max_steps or -1,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulation_steps,
        learning_rate=config.rate,
        warmup_steps=config.warmup_steps,
        lr_scheduler_type=config.schedule,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        gradient_checkpointing=config.gradient_checkpointing,
        logging_steps=config.log_every,
        eval_strategy="steps" if validates else "no",
        eval_steps=config.eval_every,
        save_strategy="steps",
        save_steps=config.save_every,
        save_total_limit=config.keep_last,
        seed=config.seed,
        report_to=[],
        disable_tqdm=True,
        use_cpu=config.use_cpu or (count_ranks() > 1 and not torch.cuda.is_available()),  # else each trains alone
        **_choose_sharding(config),
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available() and not config.use_cpu,
        **_choose_formats(config),
    )


def _choose_formats(config: SftConfig) -> dict[str, bool]:
    """Return the Trainer's two precision switches; empty where the machine decides."""
    if config.precision is None:
        return {}
    on_cpu = config.use_cpu or not torch.cuda.is_available()
    if config.precision is Precision.FP16 and on_cpu:
        raise ConfigError(
            "SftConfig.precision is fp16, and this training runs on the CPU, where the Trainer has no fp16. Use bf16, "
            "or leave it out; to see fp16 overflow on a CPU set base_precision=fp16."
        )
    return {"bf16": config.precision is Precision.BF16, "fp16": config.precision is Precision.FP16}


def _choose_sharding(config: SftConfig) -> dict[str, Any]:
    """Return the Trainer's settings for several ranks: DDP, or FSDP2 with each transformer block sharded by itself."""
    if count_ranks() == 1:
        return {}
    if config.strategy == "ddp":
        return {"ddp_find_unused_parameters": False}
    if config.use_cpu or not torch.cuda.is_available():
        raise ConfigError(
            "SftConfig.strategy is fsdp, and transformers' Trainer shards a model on GPUs only; here is a CPU. Use ddp."
        )
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}


def describe_data(examples: Examples, training: Encoded, validation: Encoded, config: SftConfig) -> Iterator[str]:
    """Yield lines on how much data there is, and on rows that were left out, were cut, or have no label."""
    yield f"{spell_count(len(training.rows), 'row')} to train on, {len(validation.rows)} to validate on."
    num_known = count_known(examples)
    if num_known:
        yield (
            f"{spell_count(num_known, 'row')} to validate on with a prompt, or a text, that is trained on too: a good "
            "score there may be learned by heart."
        )
    if examples.left_out:
        yield f"{spell_count(len(examples.left_out), 'row')} left out, listed in {LEFT_OUT}: {examples.left_out[0]}"
    cut = training.num_cut + validation.num_cut
    if cut:
        yield f"{spell_count(cut, 'row')} longer than max_length={config.max_length}: {config.long_prompts.value}."
    if training.num_unlabelled:
        yield (
            f"{spell_count(training.num_unlabelled, 'row')} to train on without a label left: the prompt alone fills "
            "max_length. Raise it, or use long_prompts=cut_start."
        )
    if validation.num_unlabelled:
        yield f"{spell_count(validation.num_unlabelled, 'row')} without a label left out of the validation loss."


def score_together(
    config: SftConfig, model: Any, tokenizer: Any, examples: Examples, checker: Checker
) -> tuple[Scores, Scores]:
    """Return the scores of the model and of the trivial baseline; rank 0 answers, unless every rank has only a part."""
    if config.strategy == "fsdp":
        # All ranks generate together: each forward gathers the shards of all
        return _score(config, model, tokenizer, examples, checker)
    return share_from_first(lambda: _score(config, model, tokenizer, examples, checker))


def _score(
    config: SftConfig, model: Any, tokenizer: Any, examples: Examples, checker: Checker
) -> tuple[Scores, Scores]:
    asked = [example for example in examples.validation if example.prompt][: config.num_answers]
    texts = answer(model, tokenizer, asked, max_new_tokens=config.max_new_tokens)
    found = score(texts, asked, config.tolerance, checker)
    return found, score_commonest(examples.training, asked, config.tolerance, checker)


def save_merged(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write one ordinary model, for programs that know nothing of LoRA."""
    merged = model.merge_and_unload()  # changes the model in place, so it comes after the scores
    if is_first():
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _write_scores(path: Path, scores: Scores, baseline: Scores) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"scores": asdict(scores), "commonest_answer": asdict(baseline)}) + "\n", encoding="utf-8"
    )
