"""Trainer: data loaders in, a trained model out; the training loop that the recipes share.

The Guard does everything numerical: forward and backward, clipping, skipping, judging, checkpoints, the record. The
Trainer does only what surrounds a step: epochs, stages, evaluation, averages, and when to save. Each stage has its own
Guard, which continues counting where the last one stopped. What is due after a step is derived from the progress that
is saved with it, so that a training killed at any point continues as if nothing had happened. Under torchrun the
processes train together (`ranks.py`), and rank 0 prints and writes.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.config import GuardConfig
from steadygrad.config.plain import to_plain
from steadygrad.config.switch import is_switched_off
from steadygrad.config.trainer import TrainerConfig
from steadygrad.errors import UsageError
from steadygrad.facts import Incident, StepRecord
from steadygrad.guard import Guard
from steadygrad.record import Sink
from steadygrad.scan.foreign import load_checkpoint
from steadygrad.state.random_state import unchanged_random
from steadygrad.trainer.batches import count_batches, count_steps, move_batch, size_window
from steadygrad.trainer.choices import StaysOpen, open_trackers
from steadygrad.trainer.evaluating import in_eval_mode, look_at_model, make_autocast
from steadygrad.trainer.files import Start, append_metrics, find_start, load_model, save_model
from steadygrad.trainer.guessing import report_training
from steadygrad.trainer.pace import Pace, describe_metrics, spell_numbers
from steadygrad.trainer.progress import Progress, note_epoch
from steadygrad.trainer.ranks import (
    begin_epoch,
    count_ranks,
    find_rank,
    gather_shards,
    hold_gradients,
    is_first,
    join_batch_norms,
    join_ranks,
    release_shards,
    replicate_model,
    shard_model,
    share_from_first,
    share_loader,
    share_weights,
)
from steadygrad.trainer.setup import (
    check_given,
    choose_device,
    go_on_counting,
    make_average,
    make_guard_config,
    make_scaler,
    seed_generators,
)
from steadygrad.trainer.stages import Stage
from steadygrad.trainer.task import Metrics, Task, split_terms

logger = logging.getLogger("steadygrad.trainer")


class Trainer(Task):
    """Trains one model under one Guard.

    >>> model = nn.Linear(3, 1)
    >>> batches = [(torch.ones(2, 3), torch.zeros(2, 1))] * 4
    >>> trainer = Trainer(model, TrainerConfig(epochs=2, device="cpu"), loss_fn=nn.functional.mse_loss)
    >>> trainer.train(batches)["num_steps"]
    8
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainerConfig | None = None,
        *,
        loss_fn: Callable[..., Tensor] | None = None,
        stages: Sequence[Stage] | None = None,
        run_dir: str | Path | None = None,
        guard_config: GuardConfig | None = None,
        sinks: Iterable[Sink] = (),
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """`tell` is called with a line at the end of each epoch; without it the line goes to the log.

        Under torchrun every process builds one; `tell` and `sinks` are those of rank 0.
        """
        self.config = config if config is not None else TrainerConfig()
        check_given(model, self.config, loss_fn)
        join_ranks()
        self.device = choose_device(self.config.device)
        self.model = self._place(model.to(self.device))
        self.stages = list(stages) if stages else [Stage()]
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.guard_config = make_guard_config(self.config, guard_config, self.device)
        self.guard: Guard | None = None
        self._loss_fn, self._sinks = loss_fn, list(sinks) if is_first() else []
        # A stage's guard closes its sinks; the next stage's writes to the same trackers
        self._trackers = [StaysOpen(tracker) for tracker in open_trackers(self.config, self.run_dir)]
        self._tell = (logger.info if tell is None else tell) if is_first() else logger.debug
        self._progress, self._pace = Progress(), Pace()
        self._num_planned: int | None = None
        """Steps of all stages; None: unknown."""
        self._resume_from: Start | None = None
        self._earlier_incidents: list[Incident] = []
        self._prepare(0)

    def _place(self, model: nn.Module) -> nn.Module:
        """Return the model for this rank, alike on all of them, and make its average."""
        if count_ranks() > 1:
            model = join_batch_norms(model) if self.device.type == "cuda" else model
            # Before the average copies them, and before they are sharded, when no rank has a whole one to send
            share_weights(model)
        self.ema = make_average(model, self.config.ema_decay)
        if count_ranks() > 1 and self.config.strategy == "fsdp":
            for one in (model, None if self.ema is None else self.ema.module):
                if one is not None:
                    shard_model(one, self.device)
        return model

    # --- training ---------------------------------------------------------------------------------------------------

    def train(self, train_loader: Iterable[Any], val_loader: Iterable[Any] | None = None) -> dict[str, Any]:
        """Train through all stages, or continue from the checkpoint that `resume()` found; return final statistics."""
        if count_batches(train_loader) == 0:
            raise UsageError("the training loader has no batch. Pass more data, or use drop_last=False.")
        start, self._resume_from = self._resume_from, None
        first = 0 if start is None else start.stage
        if start is None and self.config.seed is not None:
            # Not on a resume, which restores the generators
            seed_generators(self.config.seed + find_rank())
        train_loader = share_loader(train_loader, self.config.seed)
        if self.stage is not self.stages[0]:  # all stages have been trained before
            self._prepare(0)
        # One after the other: `prepare` of a stage finds the model as the stages before it left it
        for index in range(1, first + 1):
            self._prepare(index)
        for index in range(first, len(self.stages)):
            if index > first:
                self._prepare(index)
            self._begin_stage(index, train_loader, start if index == first else None)
            self._train_stage(train_loader, val_loader)
            if self._has_reached_limit:
                break
        for tracker in self._trackers:
            tracker.end()
        return self.get_training_stats()

    def _prepare(self, index: int) -> None:
        """Prepare the model and create the optimizer of a stage."""
        self.stage, self.model = self.stages[index], self.bare_model
        self.model.train()
        if self.stage.prepare is not None:
            self.stage.prepare(self.model)
        if count_ranks() > 1 and self.config.strategy == "ddp":  # anew: what is trainable has changed
            self.model = replicate_model(self.model, self.device)
        self.optimizer = self.build_optimizer(self.stage)

    def _begin_stage(self, index: int, loader: Iterable[Any], start: Start | None) -> None:
        before = self.guard
        self.scheduler = self.build_scheduler(self.stage, self._count_steps(loader))
        self._num_planned = self._count_all(loader)
        scaler = make_scaler(self.guard_config, self.device) if self.stage.scaler is None else self.stage.scaler()
        self.guard = Guard(
            self.model,
            self.optimizer,
            enabled=self.config.protect,
            extras={"trainer": self._progress},
            config=self.guard_config,
            scheduler=self.scheduler,
            scaler=scaler,
            ema=self.ema,
            run_dir=self.run_dir,
            sinks=[self._progress, *self._sinks, *self._trackers],
        )
        if start is not None:
            self.guard.resume(start.path)
            return
        if before is not None:
            self._earlier_incidents += before.incidents
            go_on_counting(before, self.guard)
        self._progress.stage, self._progress.first_epoch = index, self.guard.epoch

    def _train_stage(self, train_loader: Iterable[Any], val_loader: Iterable[Any] | None) -> None:
        assert self.guard is not None
        with self.guard as guard:
            self._pace.begin(guard.num_steps)
            self._do_what_is_due(guard, val_loader)
            if self._progress.num_batches and self._is_over(guard):  # the checkpoint was made before this epoch's end
                self._end_epoch(guard, val_loader)
            while guard.epoch - self._progress.first_epoch < self._num_epochs and not self._is_over(guard):
                self._train_epoch(guard, train_loader, val_loader)
                self._end_epoch(guard, val_loader)
            if self.stage is self.stages[-1] or self._has_reached_limit:
                self._judge_learning(guard, val_loader)

    def _judge_learning(self, guard: Guard, val_loader: Iterable[Any] | None) -> None:
        """Report a run that did no better than a guess, or whose first losses exploded."""
        guard.flush()
        if not self.is_protected:
            return
        progress, guess = self._progress, None if val_loader is None else self._guess(val_loader)
        losses = [entry["loss"] for entry in (*self.val_history, *self.step_history) if "loss" in entry]
        report_training(guard, self.run_dir, losses, guess, first=progress.first_loss, peak=progress.peak)

    def _guess(self, val_loader: Iterable[Any]) -> float | None:
        with unchanged_random([self.device]), torch.no_grad():
            return self.guess_loss(val_loader)

    @property
    def _num_epochs(self) -> int:
        return self.config.epochs if self.stage.epochs is None else self.stage.epochs

    @property
    def _has_reached_limit(self) -> bool:
        limit = self.config.max_steps
        return limit is not None and self.guard is not None and self.guard.num_steps >= limit

    def _is_over(self, guard: Guard) -> bool:
        return guard.should_stop or self._has_reached_limit

    def _save(self, guard: Guard) -> None:
        if self.run_dir is not None:
            # Before the save, which contains the progress: a resumed run must not save this step again
            self._progress.saved = guard.num_steps
            guard.save()

    def _train_epoch(self, guard: Guard, loader: Iterable[Any], val_loader: Iterable[Any] | None) -> None:
        num_batches, accumulation = count_batches(loader), self.config.accumulation_steps
        begin_epoch(loader, guard.epoch)
        for batch in guard.batches(loader):
            window = size_window(self._progress.num_batches, num_batches, accumulation)
            # Before the step, whose checkpoint must count the batch that it used
            self._progress.num_batches += 1
            ready = self.prepare_batch(move_batch(batch, self.device))
            with hold_gradients(self.model, hold=guard.num_microbatches + 1 < window):
                loss, terms = guard.backward(self._run_microbatch, ready, window)
            if terms:
                guard.log(**terms)
            if guard.num_microbatches < window:
                continue
            guard.step()
            if not self.is_protected:
                # Waits for the device at each step; with a guard the loss arrives with the judged step
                self._progress.add(float(loss), None)
            self._hear()
            self._do_what_is_due(guard, val_loader)
            if self._is_over(guard):
                return

    def _run_microbatch(self, batch: Any, window: int) -> tuple[Tensor, dict[str, Any]]:
        loss, terms = split_terms(self.compute_loss(batch))
        return (loss if window == 1 else loss / window), terms

    def _hear(self) -> None:
        for record in self._progress.take_heard():
            self.end_step(record)
            self._print_progress(record)

    def _print_progress(self, record: StepRecord) -> None:
        """Print a line every `log_every` steps, where no bar on a terminal shows the same."""
        if not is_first() or not _is_multiple(record.step + 1, self.config.log_every) or sys.stderr.isatty():
            return
        self._tell(self._pace.describe(record, self._num_planned, self._progress.num_skipped))

    def _do_what_is_due(self, guard: Guard, val_loader: Iterable[Any] | None) -> None:
        """Evaluate and save by steps; after a resume, also do what was still due when the checkpoint was taken."""
        step, config = guard.num_steps, self.config
        if not step or guard.num_microbatches:
            return
        if val_loader is not None and _is_multiple(step, config.eval_every) and self._progress.evaluated != step:
            metrics = self._evaluate_now(guard, val_loader, by_steps=True)
            self._tell(f"Step {step}: {spell_numbers(metrics, 'val_')}")
        if _is_multiple(step, config.save_every) and self._progress.saved != step:
            self._save(guard)

    def _evaluate_now(self, guard: Guard, val_loader: Iterable[Any], *, by_steps: bool = False) -> Metrics:
        """Evaluate the averaged model if there is one, without side effects on training."""
        with self._as_evaluated(), unchanged_random([self.device]), torch.no_grad(), self.autocast():
            found = {name: float(value) for name, value in self.evaluate(val_loader).items()}
        # Rank 0's numbers for all: early stopping must come at the same step everywhere
        metrics = share_from_first(lambda: found)
        where = {"step": guard.num_steps, "epoch": guard.epoch}
        if self.run_dir is not None and is_first():
            line = {**where, "stage": self.stage.name} | {f"val_{name}": value for name, value in metrics.items()}
            append_metrics(self.run_dir, line)
        self._progress.evaluated, self._progress.last_metrics = guard.num_steps, metrics
        if by_steps:
            self._progress.step_history.append({**where, **metrics})
        if "loss" in metrics:
            # Last: a signal that has come is answered here, and its checkpoint must contain the evaluation as made
            guard.validate(metrics["loss"])
        return metrics

    @contextlib.contextmanager
    def _as_evaluated(self) -> Iterator[None]:
        """Make `self.model` the model to evaluate, in eval mode, inside this context."""
        trained = self.model
        self.model = self.bare_model if self.ema is None else self.ema.module
        try:
            with in_eval_mode(self.model):
                yield
        finally:
            if count_ranks() > 1:
                release_shards(self.model)
            self.model = trained

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return an autocast context with the training's precision, for code outside a step."""
        return make_autocast(self.guard_config.autocast, self.device)

    def _end_epoch(self, guard: Guard, val_loader: Iterable[Any] | None) -> None:
        """Evaluate, note the epoch's averages and maxima, and save; an epoch cut by the step limit stays open."""
        progress, is_cut = self._progress, self._has_reached_limit
        if is_cut and progress.saved != guard.num_steps:  # inside the epoch, so that a higher limit continues here
            self._save(guard)
        if guard.num_microbatches:  # the data's length was unknown, or a rollback left some of it out
            guard.step()
        # The last step is judged late: otherwise its numbers would count for the next epoch
        guard.flush()
        self._hear()
        metrics: Metrics | None = None
        if val_loader is not None:
            fresh = progress.evaluated != guard.num_steps
            metrics = self._evaluate_now(guard, val_loader) if fresh else progress.last_metrics
        where = {"epoch": guard.epoch, "stage": self.stage.name, "step": guard.num_steps}
        result = {**where, **progress.average_epoch(), "learning_rate": self._learning_rate}
        # After the evaluation, with nothing between that answers a signal: its checkpoint has all of this or none
        note_epoch(progress.train_history, result)
        if metrics is not None:
            note_epoch(progress.val_history, {**where, **metrics})
            result = result | {f"val_{name}": value for name, value in metrics.items()}
        line = self.describe_epoch(result)
        if not is_cut:
            progress.begin_epoch()
            guard.end_epoch()
        self._tell(line)
        self.end_epoch(result)
        if not is_cut:
            self._save(guard)

    def describe_epoch(self, metrics: Mapping[str, Any]) -> str:
        """Format the line for the end of an epoch."""
        number = metrics["epoch"] - self._progress.first_epoch + 1
        stage = f" ({self.stage.name})" if len(self.stages) > 1 else ""
        return f"Epoch {number}/{self._num_epochs}{stage}: {describe_metrics(metrics)}"

    def _count_steps(self, loader: Iterable[Any]) -> int | None:
        accumulation, limit = self.config.accumulation_steps, self.config.max_steps
        return count_steps(count_batches(loader), epochs=self._num_epochs, accumulation=accumulation, limit=limit)

    def _count_all(self, loader: Iterable[Any]) -> int | None:
        """Return the number of steps of all stages."""
        num, limit = count_batches(loader), self.config.max_steps
        epochs = [self.config.epochs if stage.epochs is None else stage.epochs for stage in self.stages]
        return count_steps(num, epochs=sum(epochs), accumulation=self.config.accumulation_steps, limit=limit)

    # --- going on ---------------------------------------------------------------------------------------------------

    def resume(self, path: str | Path | None = None) -> int | None:
        """Let `train()` continue from the run's newest good checkpoint, its `best`, or `path`; return its step.

        Return None if the run directory has no checkpoint yet: `train()` then starts afresh. From a file of another
        program only the weights are taken, and 0 is returned: optimizer, schedule and epochs start afresh.
        """
        if path is not None and Path(path).is_file():
            self._take_weights(Path(path))
            return 0
        num_stages = len(self.stages)
        self._resume_from = share_from_first(lambda: find_start(self.run_dir, path, num_stages=num_stages))
        return None if self._resume_from is None else self._resume_from.step

    def _take_weights(self, path: Path) -> None:
        load_checkpoint(path, self.bare_model)
        if self.ema is not None:
            # Or the average would start from the random weights of the constructor
            self.ema.module.load_state_dict(self.bare_model.state_dict())
        self._tell(f"The weights of {path} are loaded; optimizer, schedule and epochs start over.")

    # --- asking -----------------------------------------------------------------------------------------------------

    @property
    def is_protected(self) -> bool:
        """Whether a guard is active: `TrainerConfig.protect` is set and STEADYGRAD=off is not."""
        return self.config.protect and not is_switched_off()

    @property
    def train_history(self) -> list[dict[str, Any]]:
        """One entry per epoch: `loss`, `grad_norm_mean`, `grad_norm_max`, `learning_rate`, `num_skipped`, ..."""
        return self._progress.train_history

    @property
    def val_history(self) -> list[dict[str, Any]]:
        """One entry per epoch: the result of `evaluate`."""
        return self._progress.val_history

    @property
    def step_history(self) -> list[dict[str, Any]]:
        """One entry per evaluation by steps."""
        return self._progress.step_history

    @property
    def incidents(self) -> list[Incident]:
        """Incidents from the guards of all stages."""
        return self._earlier_incidents + ([] if self.guard is None else self.guard.incidents)

    @property
    def _learning_rate(self) -> float:
        factor = 1.0 if self.guard is None else self.guard.stats()["learning_rate_factor"] or 1.0
        return float(self._optimizers[0].param_groups[0]["lr"]) * factor

    def monitor_training_health(self) -> dict[str, bool]:
        """Return whether model, gradients, losses and parameters are finite now, each and overall."""
        if self.guard is not None:
            return self.guard.health()
        return look_at_model(self.bare_model)

    def get_training_stats(self) -> dict[str, Any]:
        """Return the guard's counts and current values, and the histories."""
        numbers: dict[str, Any] = {"current_learning_rate": self._learning_rate, "current_gradient_norm": None}
        if self.guard is not None:
            numbers = {**self.guard.stats(), "best": self.guard.best}
        return {
            **numbers,
            "stage": self.stage.name,
            "train_history": list(self.train_history),
            "val_history": list(self.val_history),
            "step_history": list(self.step_history),
        }

    # --- files ------------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: str | Path, include_optimizer: bool = True) -> None:
        """Write model, history and settings to one file, after replacing non-finite values by 0.

        The file is for passing a model on. To continue a training exactly, use the run directory's own checkpoints.
        """
        optimizers = self._optimizers if include_optimizer else []
        histories = {"train_history": self.train_history, "val_history": self.val_history}
        about = {"config": to_plain(self.config), **histories}
        save_model(path, self.bare_model, optimizers, about, gather=gather_shards, writes=is_first())  # on all ranks

    def load_checkpoint(self, path: str | Path, *, trust: bool = False) -> bool:
        """Load the model, and the optimizer if included, from a file of `save_checkpoint`; return False on failure.

        Code in the file never runs unless you `trust` it; non-finite values are replaced by 0 and reported.
        """
        content = load_model(path, self.bare_model, self._optimizers, trust=trust)
        if content is None:
            return False
        self._progress.train_history = list(content.get("train_history", []))
        self._progress.val_history = list(content.get("val_history", []))
        return True

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]


def _is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
