"""GuardCallback: the events of transformers' Trainer -> the calls of a Guard.

The Trainer clips before any callback and shows callbacks no gradients, so the callback finds its trainer and ties a
Guard to the trainer's accelerator: measuring, clipping, stepping and skipping happen in `optimizer.step()`. What is
replaced, on this trainer's instances and during `train()` only: `accelerator.backward` and `clip_grad_norm_`, the
optimizer's `step`, and the trainer's `compute_loss` (to see the batch), `training_step` (to record its errors: trl
computes rewards there) and `log` (to write true numbers).
"""

# ruff: noqa: ARG002 - the arguments of an event are the Trainer's
from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.act.patches import Patches
from steadygrad.act.precision import choose_precision
from steadygrad.adapters.findings import Warnings, describe_error
from steadygrad.adapters.safe_loss import SafeLoss, safe_compute_loss
from steadygrad.adapters.settings import adopt_settings, read_clipping
from steadygrad.checkpoint.resumed import describe_other_ranks
from steadygrad.config import GuardConfig, Precision
from steadygrad.config.switch import is_switched_off
from steadygrad.errors import SteadygradError, UsageError
from steadygrad.extras import import_extra
from steadygrad.guard import Guard
from steadygrad.record import Sink

__all__ = [
    "GradientMonitoringCallback",
    "GuardCallback",
    "SafeLoss",
    "safe_compute_loss",
    "stable_training_arguments",
]

_transformers = import_extra("transformers", "transformers", what="this adapter")
TrainerCallback: Any = _transformers.TrainerCallback

NOT_FINITE = (
    "Look at callback.guard.incidents for the step and its cause; safe_compute_loss(trainer) keeps the loss usable."
)
STATE_FILE = "steadygrad.pt"
"""The file with the Guard's state, next to the Trainer's own files in each of its checkpoints."""
NUM_RANKS = "num_ranks"
"""Key in that file, beside the Guard's own: how many processes saved it."""


class GuardCallback(TrainerCallback):  # type: ignore[misc]
    """`Trainer(..., callbacks=[GuardCallback()])` guards every optimizer step of `train()`."""

    def __init__(
        self,
        config: GuardConfig | None = None,
        *,
        run_dir: str | Path | None = None,
        sinks: Iterable[Sink] = (),
    ) -> None:
        self._config, self._run_dir, self._sinks = config, run_dir, tuple(sinks)
        self._patches = Patches()
        self._guard: Guard | None = None
        self._window: Tensor | None = None
        self._num_skipped_logged = 0
        self._warnings = Warnings()
        self._reported_error = 0
        """The id of an exception on its way out, which passes several of our functions."""

    @property
    def guard(self) -> Guard:
        """The Guard, with findings, incidents and the last step; readable during training and after it."""
        if self._guard is None:
            raise UsageError("no training has started yet, so there is no guard. Use it during or after train().")
        return self._guard

    # --- beginning and end ------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Connect the Guard: model, optimizer and scheduler are ready, and loaded if training resumes."""
        self._release()  # after a training that raised, or that restarts with smaller batches
        self._guard = None
        if is_switched_off():
            return
        trainer, checkpoint = _find_trainer()
        self._guard = Guard.from_accelerator(
            trainer.accelerator,
            trainer.model_wrapped,
            trainer.optimizer,
            config=adopt_settings(self._config, read_clipping(args.max_grad_norm)),
            run_dir=self._run_dir,
            sinks=self._sinks,
        )
        self._window, self._num_skipped_logged, self._warnings, self._reported_error = None, 0, Warnings(), 0
        self._resume(checkpoint, args.world_size)
        self._tie(trainer)

    def _tie(self, trainer: Any) -> None:
        guard = self.guard
        # Before compute_loss is replaced below, which hides the SafeLoss.
        if isinstance(trainer.compute_loss, SafeLoss):
            self._patches.replace(trainer.compute_loss, "guard", guard)
        compute_loss, training_step, log = trainer.compute_loss, trainer.training_step, trainer.log

        def watched_compute_loss(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not model.training:
                return compute_loss(model, inputs, *args, **kwargs)
            # A copy, since some trainers remove items. Not replayable: they also count and gather in there.
            with guard.watch_forward(None, dict(inputs) if isinstance(inputs, Mapping) else inputs):
                result = self._let_errors_through(compute_loss, model, inputs, *args, **kwargs)
            self._add_to_window(result[0] if isinstance(result, tuple) else result)
            return result

        def watched_training_step(*args: Any, **kwargs: Any) -> Any:
            return self._let_errors_through(training_step, *args, **kwargs)

        def true_log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            self._correct(logs)
            log(logs, *args, **kwargs)

        self._patches.replace(trainer, "compute_loss", watched_compute_loss)
        self._patches.replace(trainer, "training_step", watched_training_step)
        self._patches.replace(trainer, "log", true_log)
        # Clipping would spread one NaN everywhere. The norm is logged once the Guard has measured it.
        self._patches.replace(trainer.accelerator, "clip_grad_norm_", lambda *_args, **_kwargs: math.nan)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Judge the last step and close the record; what was found stays readable."""
        self._release()
        if self._guard is not None:
            self._warnings.check(self._guard)

    def _release(self) -> None:
        # First: whatever closing raises, the trainer is as it was.
        self._patches.undo()
        if self._guard is not None:
            self._guard.close()

    # --- the step ---------------------------------------------------------------------------------------------------

    def _let_errors_through(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            is_reported = isinstance(call, SafeLoss) or id(error) == self._reported_error
            if not is_reported and not isinstance(error, SteadygradError):
                self.guard.note(describe_error(error, self.guard))
            # Its id, not the error: that holds its frames, and with them the batch and the graph.
            self._reported_error = id(error)
            raise

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Judge the last step and advance the scheduler before the Trainer records its position."""
        if self._guard is not None and (control.should_log or control.should_save or control.should_evaluate):
            # Waits for the device, so not at every step: only where the Trainer is about to read or save its state.
            self._guard.flush()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the epoch."""
        if self._guard is not None:
            self._guard.end_epoch()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Report the validation loss, and stop if early stopping says so; not for `evaluate()` outside `train()`."""
        if self._guard is None or self._patches.is_empty or not metrics or "eval_loss" not in metrics:
            return
        self._guard.validate(metrics["eval_loss"])
        control.should_training_stop = control.should_training_stop or self._guard.should_stop

    # --- true numbers -----------------------------------------------------------------------------------------------

    def _add_to_window(self, loss: Any) -> None:
        """Add the loss to the sum since the last log, on the device: not finite if any loss was not."""
        if isinstance(loss, Tensor):
            # No host read here: this runs for every microbatch. NaN and Inf survive the sum.
            loss = loss.detach().float().sum()
            self._window = loss if self._window is None else self._window + loss

    def _correct(self, logs: dict[str, float]) -> None:
        """Correct the logged loss: the Trainer omits non-finite losses from its mean, which must then be non-finite."""
        if "loss" not in logs:
            return
        guard = self.guard
        guard.flush()
        # Read here only, once for each line of the log.
        total = 0.0 if self._window is None else float(self._window)
        self._window = None
        if not math.isfinite(total):
            logs["loss"] = total
        if guard.last is not None:
            logs["grad_norm"] = guard.last.grad_norm
            logs["learning_rate"] = guard.last.learning_rates[0]  # the schedule's, unless the Guard has lowered it
        num_skipped = int(guard.stats()["num_skipped"] or 0)
        if num_skipped > self._num_skipped_logged:
            logs["num_skipped_steps"] = num_skipped
        self._num_skipped_logged = num_skipped

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Warn of a gradient norm or a loss in the log that is not finite, and of a loss that stays exactly 0."""
        for name in ("loss", "grad_norm"):
            value = (logs or {}).get(name)
            if isinstance(value, float) and not math.isfinite(value):
                self._warnings.warn_once(name, f"step {state.global_step}: {name} is {value}.", NOT_FINITE)
        if self._guard is not None:
            self._warnings.check(self._guard)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the Guard's state next to the Trainer's own files."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._guard is None:
            return
        guard_state = self._guard.state_dict()  # on every rank: a state in shards is put together by all of them
        if args.should_save and folder.is_dir():
            self._write_state({**guard_state, NUM_RANKS: args.world_size}, folder / STATE_FILE)

    def _write_state(self, guard_state: Any, path: Path) -> None:
        aside = path.with_name(f"{path.name}.tmp")
        try:
            torch.save(guard_state, aside)
            aside.replace(path)
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError where a disk is full
            aside.unlink(missing_ok=True)
            self._warnings.warn_once(
                "save",
                f"the guard's state was not saved to {path}: {error}.",
                "After a resume, its history starts from scratch.",
            )

    def _resume(self, checkpoint: str | None, num_ranks: int) -> None:
        path = None if checkpoint is None else Path(checkpoint) / STATE_FILE
        if path is not None and path.is_file():
            # A checkpoint may come from anywhere: weights_only refuses everything that would run code.
            guard_state = torch.load(path, weights_only=True)
            num_saved = guard_state.pop(NUM_RANKS, num_ranks)  # earlier versions did not save it
            self.guard.load_state_dict(guard_state)
            self._num_skipped_logged = int(self.guard.stats()["num_skipped"] or 0)
            found = describe_other_ranks(self.guard.num_steps, num_saved, num_ranks)
            if found is not None:
                self.guard.note(found)


GradientMonitoringCallback = GuardCallback
"""Another name of GuardCallback, which stays."""


def _find_trainer() -> tuple[Any, str | None]:
    """Return the Trainer whose training loop is calling, and the checkpoint that it resumes from.

    Callbacks receive everything but the trainer itself, so the loop's own frame is looked up.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        # Other methods of the Trainer may be on the stack: the loop is the one that knows what it resumes from.
        if isinstance(owner, _transformers.Trainer) and "resume_from_checkpoint" in frame.f_locals:
            checkpoint = frame.f_locals["resume_from_checkpoint"]
            return owner, str(checkpoint) if isinstance(checkpoint, str | Path) else None
        frame = frame.f_back
    raise UsageError(
        "GuardCallback was called outside the training loop of a transformers.Trainer. Pass it as "
        "Trainer(callbacks=[GuardCallback()]) and call trainer.train()."
    )


# --- arguments ----------------------------------------------------------------------------------------------------
# stable_training_arguments: TrainingArguments that start a fine-tuning on the safe side.


WARMUP_STEPS = 50
MAX_GRAD_NORM = 1.0


def stable_training_arguments(*, arguments_class: Any = None, **overrides: Any) -> Any:
    """Return TrainingArguments with bf16 if the GPU has it, else fp16; warm-up; clipping; label names for PEFT models.

    `overrides` always win. `arguments_class` is for trainers with their own arguments:
    `stable_training_arguments(arguments_class=trl.SFTConfig, output_dir="out")`.

    PEFT wraps the model's `forward`, so the Trainer cannot find the names of its labels: hence the label names.
    """
    arguments_class = arguments_class or _transformers.TrainingArguments
    settings: dict[str, Any] = {
        "max_grad_norm": MAX_GRAD_NORM,
        "warmup_steps": WARMUP_STEPS,
        "label_names": ["labels"],
        **_choose_half_precision(overrides),
    }
    return arguments_class(**(settings | overrides))


def _choose_half_precision(overrides: dict[str, Any]) -> dict[str, bool]:
    """Return bf16 or fp16 as this GPU supports it; neither if the caller chose a precision or there is no GPU."""
    if overrides.get("bf16") or overrides.get("fp16") or overrides.get("use_cpu") or not torch.cuda.is_available():
        return {"bf16": False, "fp16": False}
    chosen = choose_precision("cuda")
    # bf16=False where the GPU has bf16 asks for float32, not for fp16 with its loss scale.
    if chosen is Precision.BF16 and overrides.get("bf16") is False:
        return {"bf16": False, "fp16": False}
    return {"bf16": chosen is Precision.BF16, "fp16": chosen is Precision.FP16}
