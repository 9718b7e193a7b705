"""GuardCallback: Lightning's hooks -> the calls of a Guard, for any LightningModule.

Lightning keeps its loop, its precision plugin, its schedulers and its checkpoints. What is replaced, on the instances
of one `fit` only: the plugin's `optimizer_step` (the Guard measures, clips, steps or skips there), the trainer's
`gradient_clip_val` (the Guard clips), and `lr_scheduler_step` (the rate moves only for steps that were applied).
"""

# ruff: noqa: ARG002 - the arguments of a hook are Lightning's
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadygrad.act.accelerated import refuse_dropping
from steadygrad.act.patches import Patches
from steadygrad.adapters.enhanced import (
    EnhancedTrainingMixin,
    integrate_health_checks,
    replace_loss_function_with_stable_version,
)
from steadygrad.adapters.findings import Warnings, describe_error
from steadygrad.adapters.settings import adopt_settings, read_clipping
from steadygrad.config import ClipStrategy, GuardConfig
from steadygrad.config.switch import is_switched_off
from steadygrad.errors import TrainingHalted, UsageError
from steadygrad.extras import import_extra
from steadygrad.facts import StepRecord
from steadygrad.guard import Guard
from steadygrad.record import Sink

__all__ = [
    "EnhancedTrainingMixin",
    "GuardCallback",
    "integrate_health_checks",
    "replace_loss_function_with_stable_version",
]

Callback: Any = import_extra("lightning", "lightning.pytorch", "pytorch_lightning", what="this adapter").Callback


@dataclasses.dataclass(slots=True)
class _Seat:
    """One optimizer, its Guard, and its schedulers' pending moves."""

    optimizer: torch.optim.Optimizer
    guard: Guard
    schedule: HeldSchedule


class GuardCallback(Callback):  # type: ignore[misc]
    """`Trainer(callbacks=[GuardCallback()])` guards every optimizer step of `fit`.

    Several optimizers (manual optimization) get a Guard each, since they step separately: `guards`, in Lightning's
    order, and `run_dir/optimizer_0` and so on. `monitor` names the validation loss among the logged metrics.
    """

    def __init__(
        self,
        config: GuardConfig | None = None,
        *,
        run_dir: str | Path | None = None,
        sinks: Iterable[Sink] = (),
        monitor: str = "val_loss",
    ) -> None:
        super().__init__()
        if config is not None and config.drop_bad_microbatches:
            refuse_dropping("Lightning")
        self._config, self._run_dir, self._sinks, self._monitor = config, run_dir, tuple(sinks), monitor
        self._patches = Patches()
        self._clip: ClipStrategy | None = None
        self._seats: list[_Seat] = []
        self._losses: list[Tensor] = []
        self._batch: Any = None
        self._saved: list[Mapping[str, Any]] = []
        self._warnings = Warnings()

    @property
    def guards(self) -> list[Guard]:
        """One Guard per optimizer; empty before training starts and with STEADYGRAD=off."""
        return [seat.guard for seat in self._seats]

    @property
    def guard(self) -> Guard:
        """The first Guard: the only one unless optimization is manual."""
        if not self._seats:
            raise UsageError("no training has started yet, so there is no guard. Use it during or after fit().")
        return self._seats[0].guard

    # --- beginning and end ------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take over clipping before Lightning finds that it cannot clip (16-mixed with a fused optimizer)."""
        if stage != "fit" or is_switched_off():
            return
        # First: our own None, left by a fit that never came to its teardown, would be read as the user's setting.
        self._patches.undo()
        by_value = str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)) == "value"
        self._clip = read_clipping(trainer.gradient_clip_val, by_value=by_value)
        self._patches.replace(trainer, "gradient_clip_val", None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create and connect the guards, now that everything is loaded and on its device."""
        if is_switched_off():
            return
        config, self._warnings = adopt_settings(self._config, self._clip), Warnings()
        self._seats = [
            self._seat(trainer, pl_module, number, config, alone=len(trainer.optimizers) == 1)
            for number in range(len(trainer.optimizers))
        ]
        for seat, state in zip(self._seats, self._saved):
            seat.guard.load_state_dict(state)
        self._saved = []
        self._tie_optimizers(trainer)
        self._tie_schedulers(trainer, pl_module)
        if pl_module.automatic_optimization:
            self._tie_forward(trainer, pl_module)

    def _seat(self, trainer: Any, pl_module: Any, number: int, config: GuardConfig, *, alone: bool) -> _Seat:
        schedule, optimizer = HeldSchedule(), trainer.optimizers[number]
        run_dir = self._run_dir
        if run_dir is not None and not alone:
            run_dir = Path(run_dir) / f"optimizer_{number}"
        guard = Guard(
            trainer.strategy.model or pl_module,
            optimizer,
            config=config,
            scheduler=schedule,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            run_dir=run_dir,
            sinks=self._sinks,
        )
        schedule.follow(guard)
        return _Seat(optimizer, guard, schedule)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Judge the last step and close the record; what was found stays readable."""
        for guard in self.guards:
            guard.close()
            self._warnings.check(guard)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the trainer as it was."""
        self._patches.undo()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Record the exception, unless it is our own, and let it propagate."""
        if self._seats and isinstance(exception, Exception) and not isinstance(exception, TrainingHalted):
            self.guard.note(describe_error(exception, self.guard))
        for guard in self.guards:
            guard.__exit__(type(exception), exception, None)
        self._patches.undo()

    # --- the step ---------------------------------------------------------------------------------------------------

    def _tie_optimizers(self, trainer: Any) -> None:
        """Connect the Guard: Lightning runs the closure (forward, backward) and its hooks as usual, the Guard steps."""
        plugin, scaler = trainer.precision_plugin, getattr(trainer.precision_plugin, "scaler", None)

        def optimizer_step(optimizer: Any, model: Any, closure: Callable[[], Any], **_kwargs: Any) -> Any:
            result = closure()
            has_gradient = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
            # A fused optimizer unscales inside its kernel; here it would be done a second time.
            if scaler is not None and has_gradient and not getattr(optimizer, "_step_supports_amp_scaling", False):
                scaler.unscale_(optimizer)  # hooks may read the gradients
            # Lightning's own: calls on_before_optimizer_step, and clips nothing, since gradient_clip_val is None.
            plugin._after_closure(model, optimizer)
            if has_gradient:
                self._step(optimizer)
            # A scaler refuses to step where nothing was unscaled; Lightning leaves that step out as well.
            elif scaler is None:
                optimizer.step()  # training_step returned None: nothing to guard, nothing changes
            return result

        self._patches.replace(plugin, "optimizer_step", optimizer_step)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        seat = next(seat for seat in self._seats if seat.optimizer is optimizer)
        # With several optimizers, only the one that steps shows whose losses they were.
        for loss in self._losses:
            seat.guard.watch_backward(loss)
        self._losses.clear()
        seat.guard.step()
        if len(self._seats) > 1:  # the others start from the buffers as this step left them
            self._begin(self._batch)

    def _begin(self, batch: Any) -> None:
        for guard in self.guards:
            with guard.watch_forward(None, batch):
                pass

    def _tie_forward(self, trainer: Any, pl_module: Any) -> None:
        """Connect the forward for automatic optimization: the Guard sees exactly the forward and can replay it."""
        run_forward = trainer.strategy.training_step
        guard = self.guard

        def training_step(batch: Any, *args: Any) -> Any:
            # `run_forward` is the original: a replay must not be watched as another forward.
            def replay(batch: Any) -> Any:
                with _muted(pl_module):
                    return run_forward(batch, *args)

            with guard.watch_forward(replay, batch):
                return run_forward(batch, *args)

        self._patches.replace(trainer.strategy, "training_step", training_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Manual optimization: forward, backward and steps are the user's, so save the buffers as they are now."""
        self._losses.clear()
        self._batch = batch
        if self._seats and not pl_module.automatic_optimization:
            self._begin(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Receive a loss, divided for accumulation and scaled. It belongs to the optimizer that steps next."""
        if not self._seats:
            return
        scale = getattr(trainer.precision_plugin, "scaler", None)
        # On the device: get_scale() would make the host wait in every microbatch.
        scale = None if scale is None else scale._get_scale_async()
        loss = loss if scale is None else loss / scale
        if len(self._seats) == 1:
            self.guard.watch_backward(loss)
        else:
            self._losses.append(loss.detach())

    # --- what follows a step ----------------------------------------------------------------------------------------

    def _tie_schedulers(self, trainer: Any, pl_module: Any) -> None:
        """Let per-step schedulers advance for applied steps only; per-epoch ones are left to Lightning."""
        move = pl_module.lr_scheduler_step

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            by_step = any(c.scheduler is scheduler and c.interval == "step" for c in trainer.lr_scheduler_configs)
            seat = next((s for s in self._seats if s.optimizer is getattr(scheduler, "optimizer", None)), None)
            if seat is None or not by_step:
                move(scheduler, metric)
            else:
                seat.schedule.ask(lambda: move(scheduler, metric))

        self._patches.replace(pl_module, "lr_scheduler_step", lr_scheduler_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Send the last step's numbers to the loggers whenever Lightning logs."""
        if not self._seats or not trainer._logger_connector.should_update_logs:
            return
        for number, guard in enumerate(self.guards):
            # Waits for the device, so only at the steps at which Lightning logs.
            guard.flush()
            self._warnings.check(guard)
            suffix = f"/optimizer_{number}" if len(self._seats) > 1 else ""
            if guard.last is not None:
                values = {
                    "grad/global_norm": guard.last.grad_norm,
                    "grad/clip_coefficient": guard.last.clip_coefficient,
                    "health/num_skipped": float(guard.stats()["num_skipped"] or 0),
                }
                pl_module.log_dict({f"{name}{suffix}": value for name, value in values.items()})

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the validation loss, and stop if early stopping says so; not for `validate()` outside `fit()`."""
        loss = trainer.callback_metrics.get(self._monitor)
        # Without patches no fit is running: this is a plain validate().
        if trainer.sanity_checking or self._patches.is_empty or not self._seats or loss is None:
            return
        for guard in self.guards:
            guard.validate(float(loss))
        trainer.should_stop = trainer.should_stop or any(guard.should_stop for guard in self.guards)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the epoch."""
        for guard in self.guards:
            guard.end_epoch()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the guards' state for Lightning's checkpoint."""
        return {"guards": [guard.state_dict() for guard in self.guards]} if self._seats else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state until training starts: model and optimizers must be loaded first."""
        self._saved = list(state.get("guards", ()))


@contextlib.contextmanager
def _muted(pl_module: Any) -> Iterator[None]:
    """Discard what the module logs inside: a replay is not a training step."""
    patches = Patches()
    for name in ("log", "log_dict"):
        patches.replace(pl_module, name, lambda *_args, **_kwargs: None)
    try:
        yield
    finally:
        patches.undo()


# --- the schedule that waits for a step ---------------------------------------------------------------------------
# HeldSchedule: a framework's own changes of the learning rate, made only for steps that were applied.
#
# The framework asks after each step. If the step has been judged, the answer is immediate; with fused optimizers on
# CUDA the change waits until the Guard reports that the step was applied, which happens before the next step.


class HeldSchedule:
    """Passed to a Guard as its scheduler."""

    def __init__(self) -> None:
        self._guard: Guard | None = None
        self._waiting: list[tuple[StepRecord | None, Callable[[], None]]] = []

    def follow(self, guard: Guard) -> None:
        """Set the guard that reports which steps were applied."""
        self._guard = guard

    def ask(self, move: Callable[[], None]) -> None:
        """Request a change of the learning rate for the step just taken; called by the framework."""
        assert self._guard is not None
        if not self._guard.is_judged:
            self._waiting.append((self._guard.last, move))
        elif self._guard.last is not None and not self._guard.last.skipped:
            move()

    def step(self) -> None:
        """Called by Guard when the step after `guard.last` was applied. Older requests were for skipped steps."""
        waiting, self._waiting = self._waiting, []
        for before, move in waiting:
            if self._guard is not None and before is self._guard.last:
                move()
