"""Guard: one training step made safe and measured. The public class; the work is done elsewhere.

`stages.py` spells out the order of a step, `build.py` builds the pieces from the user's arguments. Each method here
checks that the guard is open, holds signals back until the call is over, and delegates.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn

from steadygrad.act.accelerated import AcceleratorDrive
from steadygrad.checkpoint.save import Save
from steadygrad.checkpoint.sharded import ShardedStore
from steadygrad.checkpoint.store import CheckpointStore
from steadygrad.config import GuardConfig
from steadygrad.diagnose import is_replaying
from steadygrad.errors import TrainingHalted, UsageError
from steadygrad.facts import Action, Finding, Incident, StepRecord
from steadygrad.guard.build import build
from steadygrad.guard.joining import join_uneven
from steadygrad.guard.rate_curve import RateCurve
from steadygrad.measure.loss import read_number
from steadygrad.record import Sink
from steadygrad.view.notebook import NotebookChart, render_guard
from steadygrad.view.progress import count_items, describe_step, track

T = TypeVar("T")


class Guard:
    """Watches every optimizer step of one model and keeps bad steps away from its weights.

    >>> model = nn.Linear(3, 1)
    >>> guard = Guard(model, torch.optim.AdamW(model.parameters()))
    >>> result = guard.step(lambda x: model(x).square().mean(), torch.ones(2, 3))
    >>> guard.last.step, guard.last.skipped
    (0, False)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        config: GuardConfig | None = None,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        ema: Any = None,
        run_dir: str | Path | None = None,
        sinks: Iterable[Sink] = (),
        process_group: Any = None,
        extras: Mapping[str, Any] | None = None,
        enabled: bool = True,
    ) -> None:
        """`process_group`: the ranks that decide together; None means those of the model's DDP, or all ranks.

        `extras`: more objects, by name, for checkpoints to save and a resume to restore; anything with `state_dict()`
        and `load_state_dict()`. A rollback leaves them alone. `enabled=False` runs the plain loop, like STEADYGRAD=off
        in the environment: nothing is watched, clipped or skipped.
        """
        self.config = config if config is not None else GuardConfig()
        pieces = build(
            model,
            optimizer,
            config=self.config,
            scheduler=scheduler,
            scaler=scaler,
            ema=ema,
            run_dir=run_dir,
            sinks=sinks,
            process_group=process_group,
            extras=extras or {},
            enabled=enabled,
            make_guard=Guard,
            close=weakref.WeakMethod(self.close),  # Shutdown keeps it, and must not keep the guard alive
        )
        self._training, self._moment, self._ranks = pieces.training, pieces.moment, pieces.ranks
        self._judgement, self._judging, self._rollback = pieces.judgement, pieces.judging, pieces.rollback
        self._stages, self._epochs, self._summary = pieces.stages, pieces.epochs, pieces.summary
        self._saver, self._shutdown = pieces.saver, pieces.shutdown
        self._requests, self._range_test = pieces.requests, pieces.range_test
        self._clipper, self._rates = pieces.clipper, pieces.rollback.rates  # range tests and second tries set both
        self._is_fragmented = pieces.rollback.is_fragmented
        self._waits, self._closed = pieces.waits, False
        # Called when the guard is freed or the interpreter exits; they hold pieces, never the guard itself.
        for close in reversed(pieces.closers):  # the newest finalizer is called first
            weakref.finalize(self, close)

    # --- the step ---------------------------------------------------------------------------------------------------

    def step(self, subject: Callable[..., Any] | Tensor | None = None, /, *args: Any, **kwargs: Any) -> Any:
        """Make one optimizer step: from a function (replayable), from a loss, or from gradients already computed.

        Return the function's result, detached; or the loss, detached; or None.
        """
        self._check_open()
        return self._stages.step(subject, args, kwargs)

    def backward(self, subject: Callable[..., Any] | Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """Run forward (for a function) and backward of one microbatch; call `step()` after the last one."""
        self._check_open()
        return self._stages.backward(subject, args, kwargs)

    def log(self, **numbers: float | Tensor) -> None:
        """Record numbers of the current step beside its loss, such as the terms of the loss or an accuracy.

        A tensor is copied to the host without waiting for it; values from several microbatches of a step are averaged.
        """
        self._check_open()
        if not self._training.off and not is_replaying():  # a replay calls the user's function once more
            self._moment.log(numbers)

    # --- steps that a framework drives --------------------------------------------------------------------------------

    @classmethod
    def from_accelerator(
        cls, accelerator: Any, model: nn.Module, optimizer: Any, *, scheduler: Any = None, **options: Any
    ) -> Self:
        """Return a Guard for a loop that uses accelerate; `options` are those of Guard.

        Keep `accelerator.backward(loss)` and `accelerator.accumulate(model)`. `guard.step()`, or `optimizer.step()` as
        before, does nothing until accelerate has all microbatches of a step.
        """
        from steadygrad.act.zero import is_engine

        if is_engine(model):
            return cls.from_deepspeed(model, **options)
        drive = AcceleratorDrive(accelerator, model, optimizer, scheduler)
        guard = cls(drive.model, drive.optimizers, scheduler=drive.scheduler, scaler=drive.scaler, **options)
        # From here on the patched objects of accelerate keep the guard alive, until close() detaches them.
        drive.attach(guard)
        guard._stages.drive = drive
        return guard

    @classmethod
    def from_deepspeed(cls, engine: Any, *, config: GuardConfig | None = None, **options: Any) -> Self:
        """Return a Guard for the engine that `deepspeed.initialize` returned; `options` are those of Guard.

        Keep `engine(batch)`, `engine.backward(loss)` and `engine.step()`: the engine's step asks the guard. Scheduler,
        clipping, loss scale and checkpoints stay the engine's.
        """
        from steadygrad.act.engine import EngineDrive  # and with it readers of checkpoints: only for DeepSpeed

        drive = EngineDrive(engine)
        config = drive.choose(config if config is not None else GuardConfig())
        group = options.pop("process_group", None) or drive.group
        scaler: Any = drive.scaler
        guard = cls(engine.module, drive.optimizer, config=config, scaler=scaler, process_group=group, **options)
        guard._stages.drive = drive
        if not guard._training.off:
            drive.attach(guard, guard._ranks.gather)
        return guard

    @contextlib.contextmanager
    def watch_forward(self, replay: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Watch a forward that a framework runs inside this context; call `watch_backward` and `step()` next.

        The arguments are the batch. `replay(*args, **kwargs)` must run the same forward again without side effects;
        with None, a diagnosis can replay only the call of the model.
        """
        self._check_open()
        with self._stages.passes.forward.watch_forward(replay, args, kwargs):
            yield

    def watch_backward(self, loss: Tensor) -> None:
        """Prepare for a framework to run backward from `loss`. The framework clears the gradients itself."""
        self._check_open()
        self._stages.passes.backward.watch_backward(loss)

    @property
    def num_microbatches(self) -> int:
        """Number of backward calls since the last step."""
        return self._moment.batches.num

    @property
    def num_steps(self) -> int:
        """Number of steps tried so far, which is also the number of the next one."""
        return self._moment.next_step

    @property
    def is_judged(self) -> bool:
        """Whether every step has been judged; with fused optimizers on CUDA the last one may still be pending."""
        return self._judging.pending is None

    def note(self, finding: Finding) -> None:
        """Record a finding made outside the guard. No action is taken on it."""
        if not self._training.off:
            self._judgement.note(finding)

    # --- judgement ----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until the host has judged every step, and the run as a whole. With several ranks, call it on each."""
        self._judging.flush(self._moment.last_step)

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Wrap a loop in which ranks may run out of data at different steps; use it instead of `ddp.join()`.

        A rank without data takes part in the others' collectives until all are done, then takes over their weights.
        Only for DistributedDataParallel. While the context is open, nothing is rolled back and nothing is proven;
        nor is anything proven afterwards if the ranks have made different numbers of steps. All go on counting from the
        largest of these numbers.
        """
        with join_uneven(self._ranks):
            yield
        # A collective, so after the context: inside it a rank without data only shadows the others.
        # All have the weights of the rank that made the most steps, so its count holds for all. Scans and saves, which
        # come every so many steps and are collectives, then come at the same step of each.
        behind = self._ranks.note_steps(self._moment.next_step) - self._moment.next_step
        self._moment.next_step += behind
        self._judging.note_steps_of_others(behind)

    @property
    def findings(self) -> list[Finding]:
        """All findings so far."""
        return self._judgement.findings

    @property
    def incidents(self) -> list[Incident]:
        """The findings that mattered, each with the action taken."""
        return self._judgement.incidents

    @property
    def last(self) -> StepRecord | None:
        """Record of the newest judged step."""
        return self._judgement.last

    # --- around the step ----------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over `loader`, with a progress bar on a terminal; leave out the window that a rollback skips."""
        total = count_items(loader)
        # Innermost: a batch that a rollback leaves out still advances the data position and the bar.
        batches = self._shutdown.watch_data(loader)
        yield from self._rollback.leave_out(track(batches, describe=self._describe, total=total))

    def validate(self, loss: float | Tensor) -> None:
        """Report a validation loss; a non-finite one is a finding and affects neither scheduler nor early stopping.

        With several ranks, call it on each: their mean counts.
        """
        self._check_open()
        with self._shutdown.busy():
            self._epochs.validate(read_number(loss, "guard.validate(loss)"))

    def end_epoch(self) -> None:
        """End the epoch: step a scheduler that moves by epoch."""
        self._check_open()
        with self._shutdown.busy():
            self._epochs.end()

    def scale_lr(self, factor: float, reason: str) -> None:
        """Multiply the learning rate by `factor`, which persists under any scheduler; `reason` is recorded.

        With several ranks, call it on each.
        """
        self._check_open()
        self._judging.judge_pending()
        self._requests.scale(Action.SCALE_LR, factor, reason)

    def scale_weight_decay(self, factor: float, reason: str) -> None:
        """Multiply the weight decay by `factor`; otherwise as `scale_lr`."""
        self._check_open()
        self._judging.judge_pending()
        self._requests.scale(Action.SCALE_WEIGHT_DECAY, factor, reason)

    @property
    def epoch(self) -> int:
        """Number of finished epochs: `for epoch in range(guard.epoch, num_epochs)` continues after a resume."""
        return self._moment.epoch

    @property
    def should_stop(self) -> bool:
        """Whether early stopping (`Policy.early_stopping_patience`) asks to stop."""
        return self._judgement.stopping.should_stop

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and value of the best validation loss so far."""
        stopping = self._judgement.stopping
        return None if stopping.best is None or stopping.best_step is None else (stopping.best_step, stopping.best)

    def find_lr(
        self,
        fn: Callable[[Any], Any],
        loader: Iterable[Any],
        *,
        start: float = 1e-7,
        end: float = 10.0,
        steps: int = 100,
        microbatches: int = 1,
    ) -> RateCurve:
        """Try rising learning rates on this training, then restore it bit for bit.

        `fn(batch)` is the function passed to `guard.step`; `microbatches` batches make a step. `result.suggested` is
        the rate to train with, `result.plot(path)` draws the curve; docs/tune.md explains how to read it.
        """
        self._check_open()
        if self._stages.drive is not None:
            raise UsageError("find_lr cannot run a framework's backward. Call it on a Guard of the plain model.")
        self._judging.judge_pending()
        with self._shutdown.busy():
            return self._range_test.find_lr(fn, loader, start=start, end=end, steps=steps, microbatches=microbatches)

    def summary(self) -> str:
        """Return the run so far in ten lines: steps, loss, norms, clipping, what went wrong and where, the report."""
        self._judging.catch_up()
        return self._summary.describe()

    def show(self) -> NotebookChart:
        """Show a chart in a notebook that follows the training: loss, norm, what broke; call it before the loop.

        Return it; elsewhere it follows the training without being shown.
        """
        self._check_open()
        chart = NotebookChart()
        self._judgement.add_sink(chart)
        chart.display()
        return chart

    def _repr_html_(self) -> str:
        return render_guard(self._judgement.tally, self.incidents, self.last)

    def health(self) -> dict[str, bool]:
        """Return whether model (with buffers), gradients, losses and parameters are finite now; reads weights once."""
        self._judging.catch_up()
        return self._summary.assess_health()

    def stats(self) -> dict[str, float | int | None]:
        """Return counts and current values."""
        self._judging.catch_up()
        return self._summary.list_stats()

    def state_dict(self) -> dict[str, Any]:
        """Return the guard's own state: step, detectors, clip state, totals. No weights, no optimizer state."""
        return self._saver.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from where `state_dict()` was taken. Load model and optimizer first: the buffers are copied now."""
        self._saver.state.load_state_dict(state)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self) -> Save | None:
        """Save the whole training for a bit-exact resume; return once it may continue, and write to disk meanwhile.

        Return None if the state cannot be saved, for example because it is not finite: that is reported as an incident.
        So is a disk that fails.
        """
        self._check_saving()
        with self._shutdown.busy():
            return self._saver.save()

    def resume(self, path: str | Path | None = None, *, strict: bool = True) -> int | None:
        """Resume from the newest good checkpoint of the run directory, or from `path`; return the next step.

        Return None if there is no checkpoint yet. Optimizer settings passed now override the saved ones; each override
        is reported. `strict=False` loads what still fits a model that has changed.
        """
        self._check_saving()
        with self._shutdown.busy():
            self._judging.judge_pending()
            return self._saver.resume(path, strict=strict)

    @property
    def checkpoints(self) -> CheckpointStore | ShardedStore:
        """The checkpoints of the run directory: `list()`, `best`, `load()`."""
        return self._saver.checkpoints.store

    @property
    def param_groups(self) -> NoReturn:
        """Not there: only `scaler.step(guard)` looks for it, and this error says what to write instead."""
        raise AttributeError(
            "a Guard is not an optimizer. Give it the scaler, Guard(model, optimizer, scaler=scaler), and call "
            "guard.step(loss): it scales, unscales, steps and updates the scaler. Call neither scaler.step nor "
            "scaler.update yourself."
        )

    def close(self) -> None:
        """Judge pending steps and close the record. A closed guard refuses to step."""
        if self._closed:
            return
        try:
            # May raise a halt; hooks, record and directory are released all the same.
            self.flush()
        finally:
            self._closed = True
            if self._waits is not None:
                self._waits.close()
            self._shutdown.stop()
            self._stages.close()
            self._saver.close()  # last: it waits for the disk and unlocks the run directory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
            return
        if error is not None:
            # Saves and raises SystemExit if a signal has come: the signal is often what caused the error.
            self._shutdown.after_error(error)
        self._judging.drop_pending()
        with contextlib.suppress(TrainingHalted):  # do not mask the error that is already propagating
            self.close()

    # --- small things -------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed and self._shutdown.exit_code is not None:
            raise SystemExit(self._shutdown.exit_code)
        if self._closed:
            raise UsageError("this guard is closed. Create a new one to keep training.")

    def _check_saving(self) -> None:
        self._check_open()
        if self._stages.drive is not None:
            self._stages.drive.check_saving()
        elif self._is_fragmented:
            raise UsageError(
                "these weights are in the flat shards of FSDP1, which only FSDP can save. Use "
                "torch.distributed.checkpoint.state_dict, with guard.state_dict() beside it; or fully_shard (FSDP2), "
                "whose shards a guard saves."
            )

    def _describe(self) -> str:
        return describe_step(self.last, self._judgement.tally.num_skipped)
