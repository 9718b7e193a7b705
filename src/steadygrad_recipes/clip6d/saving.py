"""RunSaver: everything a run does besides stepping, at the two moments when nothing else is under way.

After an optimizer step: evaluate and save when the step is due, stop at `max_steps`. After an epoch: evaluate, print
averages and maxima, save. Its own state goes into the checkpoints, with the random state and the position in the data,
so that a resumed run equals the uninterrupted one. It never steps or judges: that is the Guard's job.
"""

# ruff: noqa: ARG002 - the arguments of a hook are Lightning's
from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from steadygrad.adapters.lightning import GuardCallback
from steadygrad.checkpoint.resumed import describe_other_ranks
from steadygrad.checkpoint.signals import SignalWatch
from steadygrad.extras import import_extra
from steadygrad.guard import Guard
from steadygrad.state.random_state import capture_random, restore_random
from steadygrad.trainer.files import append_metrics
from steadygrad.trainer.guessing import report_training
from steadygrad.trainer.pace import Pace
from steadygrad.trainer.progress import Progress
from steadygrad.trainer.ranks import count_ranks, find_rank, gather_from_ranks, is_first
from steadygrad.view.progress import describe_step
from steadygrad_recipes.clip6d.config import Clip6dConfig
from steadygrad_recipes.clip6d.data import CaptionLoader, Corpus
from steadygrad_recipes.clip6d.evaluate import evaluate, guess_loss
from steadygrad_recipes.clip6d.sharding import release_encoders
from steadygrad_recipes.clip6d.storing import StoreIO
from steadygrad_recipes.stopping import leave

Callback: Any = import_extra("lightning", "lightning.pytorch", "pytorch_lightning", what="the recipe clip6d").Callback


class RunSaver(Callback):  # type: ignore[misc]
    """Comes after the GuardCallback in the trainer's list, so that a step is guarded before it is saved."""

    def __init__(
        self,
        config: Clip6dConfig,
        corpus: Corpus,
        loader: CaptionLoader,
        *,
        guards: GuardCallback | None,
        progress: Progress,
        io: StoreIO,
        run_dir: Path,
        console: Any,
        watch: SignalWatch,
    ) -> None:
        super().__init__()
        self._config, self._corpus, self._loader, self._guards = config, corpus, loader, guards
        self._progress, self._io, self._run_dir, self._console = progress, io, run_dir, console
        self._watch = watch
        self._random: dict[str, Any] | None = None
        self._num_saved: int | None = None
        """Number of ranks that saved the checkpoint; None: nothing was resumed."""
        self._devices: list[torch.device] = []
        self._pace, self._num_planned = Pace(), 0
        loader.describe = self._describe

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last evaluation."""
        return self._progress.last_metrics

    @property
    def guard(self) -> Guard | None:
        """The training's guard; None without protection."""
        return self._guards.guard if self._guards is not None and self._guards.guards else None

    def _describe(self) -> str:
        guard = self.guard
        return "" if guard is None else describe_step(guard.last, int(guard.stats()["num_skipped"] or 0))

    # --- Lightning's hooks ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the device, now that the module is on it, warn if other ranks saved, and start the clock."""
        self._devices = [pl_module.device]
        found = describe_other_ranks(trainer.global_step, self._num_saved or count_ranks(), count_ranks())
        if found is not None and self.guard is not None:
            self.guard.note(found)
        self._pace.begin(trainer.global_step)
        limit = self._config.max_steps
        planned = int(trainer.estimated_stepping_batches)
        self._num_planned = planned if limit is None else min(planned, limit)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Restore the random state at the first batch after a resume, undoing what was drawn during start-up."""
        if self._random is not None:
            restore_random(self._random)
            self._random = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Evaluate and save when the step just taken is due; at an epoch's last step that is left to the epoch end."""
        accumulates = (batch_idx + 1) % trainer.accumulate_grad_batches != 0 and not trainer.is_last_batch
        if accumulates:
            return
        self._hear()
        if self.guard is None:
            self._count_unguarded(trainer)
        step, config = trainer.global_step, self._config
        self._print_progress(step)
        if config.max_steps is not None and step >= config.max_steps:
            trainer.should_stop = True
        if trainer.is_last_batch or trainer.should_stop:
            return
        if step % config.eval_every == 0:
            self._evaluate(trainer, pl_module)
            self._console.say(f"Step {step}: {_spell(self.metrics)}")
        if step % config.save_every == 0 or self._watch.received is not None:
            self._save(trainer)
        self._leave_if_asked()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the epoch's numbers, then save everything."""
        if self.guard is not None:
            # Before its averages: the last step is judged late
            self.guard.flush()
        self._hear()
        self._evaluate(trainer, pl_module)
        epoch = {"epoch": trainer.current_epoch, "step": trainer.global_step, **self._progress.average_epoch()}
        self._progress.begin_epoch()
        epoch["learning_rate"] = max(group["lr"] for group in trainer.optimizers[0].param_groups)
        self._progress.train_history.append(epoch)
        self._progress.val_history.append({**self.metrics})
        self._console.say(describe_epoch(epoch, self.metrics, self._config.epochs))
        self._save(trainer, ends_epoch=True)
        self._leave_if_asked()
        if trainer.should_stop or trainer.current_epoch + 1 >= self._config.epochs:
            self._judge_learning(pl_module)

    def _judge_learning(self, pl_module: Any) -> None:
        """Report a run that did no better than a guess, or whose first losses exploded; the guard closes after this."""
        if self.guard is None:
            return
        guess, progress = guess_loss(pl_module, self._corpus, self._config), self._progress
        losses = [entry["val_loss"] for entry in progress.val_history]
        report_training(self.guard, self._run_dir, losses, guess, first=progress.first_loss, peak=progress.peak)

    def _leave_if_asked(self) -> None:
        if self._watch.received is not None:
            leave()

    def _print_progress(self, step: int) -> None:
        """Print a line every `log_every` steps, where no bar on a terminal shows the same."""
        last = None if self.guard is None else self.guard.last
        if last is not None and step % self._config.log_every == 0 and not sys.stderr.isatty():
            self._console.say(self._pace.describe(last, self._num_planned, self._progress.num_skipped))

    # --- the work ---------------------------------------------------------------------------------------------------

    def _count_unguarded(self, trainer: Any) -> None:
        """Count this step for the epoch; without a guard nothing else does."""
        loss, norm = (trainer.callback_metrics.get(name) for name in ("loss", "grad"))
        self._progress.add(None if loss is None else float(loss), None if norm is None else float(norm))

    def _hear(self) -> None:
        """Report the judged steps to the store, which decides by them which checkpoints are good."""
        # Rank 0 alone writes, so it alone marks checkpoints
        for record in self._progress.take_heard() if is_first() else ():
            if record.skipped:
                self._io.store.unhealthy_step(record.step, "it was skipped")
            else:
                self._io.store.healthy_step(record.step)

    def _evaluate(self, trainer: Any, pl_module: Any) -> None:
        """Evaluate at most once per step: an epoch may end where an evaluation was due."""
        step = trainer.global_step
        if self._progress.evaluated == step:
            return
        # Saved with the checkpoint: a resume at this step does not evaluate again
        self._progress.evaluated = step
        self._progress.last_metrics = evaluate(pl_module, self._corpus, self._config)
        release_encoders(pl_module)
        line = {"step": step, "epoch": trainer.current_epoch, **self.metrics}
        if is_first():
            append_metrics(self._run_dir, line)
        if self.guard is not None:
            self.guard.validate(self.metrics["val_loss"])
            trainer.should_stop = trainer.should_stop or self.guard.should_stop

    def _save(self, trainer: Any, *, ends_epoch: bool = False) -> None:
        self._io.ends_epoch = ends_epoch
        evaluated = self._progress.evaluated == trainer.global_step
        self._io.metrics = {"val_loss": self.metrics["val_loss"]} if evaluated else {}
        trainer.save_checkpoint(self._run_dir / "checkpoints")

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return progress, position in the data and the random generators of every rank."""
        random = capture_random(self._devices)
        random["cuda"] = {str(device): state for device, state in random["cuda"].items()}
        # A collective: Lightning builds a checkpoint on all ranks, also those that do not write
        every = gather_from_ranks(random)
        return {"progress": self._progress.state_dict(), "loader": self._loader.state_dict(), "random": every}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore progress and position now, and the random state before the first batch."""
        self._progress.load_state_dict(state["progress"])
        self._loader.load_state_dict(state["loader"])
        every = state["random"]
        every = [every] if isinstance(every, Mapping) else every  # of a run that knew one process only
        self._num_saved = len(every)
        # Kept for the first batch: Lightning draws numbers between this and that
        self._random = dict(every[find_rank() % len(every)])


def describe_epoch(epoch: Mapping[str, Any], metrics: Mapping[str, float], num_epochs: int) -> str:
    """Format the line at the end of an epoch."""
    skipped = f", skipped={epoch['num_skipped']:.0f}" if epoch["num_skipped"] else ""
    return (
        f"Epoch {epoch['epoch'] + 1}/{num_epochs}: loss={epoch['loss']:.4g}, {_spell(metrics)}, "
        f"grad avg={epoch['grad_norm_mean']:.4g} max={epoch['grad_norm_max']:.4g}, "
        f"lr={epoch['learning_rate']:.4g}{skipped}"
    )


def _spell(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:.4g}" for name, value in metrics.items() if "/" not in name)
