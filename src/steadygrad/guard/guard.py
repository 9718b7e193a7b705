"""Guard: one training step made safe and measured. What people call; the work is done elsewhere.

`stages.py` spells out the order of a step, `build.py` makes the pieces from what the user gave. Each call here checks
that the guard is open, lets no signal in between, and hands on.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

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
from steadygrad.view.progress import count_items, describe_step, track

T = TypeVar("T")


class Guard:
    """Watches every optimizer step of one model, and keeps the bad ones away from its weights.

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
        """`process_group`: the ranks that decide together; None: those of the model's DDP, or all there are.

        `extras`: more that checkpoints hold and a resume puts back, by name; anything with `state_dict()` and
        `load_state_dict()`. A rollback leaves them alone. `enabled=False` is the plain loop, as STEADYGRAD=off in the
        environment is: nothing is watched, clipped or skipped.
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
            close=weakref.WeakMethod(self.close),
        )
        self._training, self._moment, self._ranks = pieces.training, pieces.moment, pieces.ranks
        self._judgement, self._judging, self._rollback = pieces.judgement, pieces.judging, pieces.rollback
        self._stages, self._epochs, self._summary = pieces.stages, pieces.epochs, pieces.summary
        self._saver, self._shutdown = pieces.saver, pieces.shutdown
        self._requests, self._range_test = pieces.requests, pieces.range_test
        self._clipper, self._rates = pieces.clipper, pieces.rollback.rates  # a trial of steps sets both
        self._closed = False
        for close in pieces.closers:
            weakref.finalize(self, close)

    # --- the step ---------------------------------------------------------------------------------------------------

    def step(self, subject: Callable[..., Any] | Tensor | None = None, /, *args: Any, **kwargs: Any) -> Any:
        """One optimizer step: from a function (replayable), from a loss, or from gradients that are already there.

        Returns what the function returned, detached; the detached loss; or None.
        """
        self._check_open()
        return self._stages.step(subject, args, kwargs)

    def backward(self, subject: Callable[..., Any] | Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """Forward (when a function is given) and backward of one microbatch; `step()` comes after the last one."""
        self._check_open()
        return self._stages.backward(subject, args, kwargs)

    def log(self, **numbers: float | Tensor) -> None:
        """Numbers of the step under way that belong beside the loss in the record: the terms of a loss, an accuracy.

        A tensor is copied to the host without waiting for it; several microbatches of one step are averaged.
        """
        self._check_open()
        if not self._training.off and not is_replaying():
            self._moment.log(numbers)

    # --- steps that a framework drives --------------------------------------------------------------------------------

    @classmethod
    def from_accelerator(
        cls, accelerator: Any, model: nn.Module, optimizer: Any, *, scheduler: Any = None, **options: Any
    ) -> Self:
        """A Guard for a loop of accelerate; `options` are those of Guard.

        `accelerator.backward(loss)` and `accelerator.accumulate(model)` stay. `guard.step()`, or `optimizer.step()` as
        it was, does nothing until accelerate has all microbatches of a step.
        """
        drive = AcceleratorDrive(accelerator, model, optimizer, scheduler)
        guard = cls(drive.model, drive.optimizers, scheduler=drive.scheduler, scaler=drive.scaler, **options)
        drive.attach(guard)
        guard._stages.drive = drive
        return guard

    @contextlib.contextmanager
    def watch_forward(self, replay: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Around a forward that a framework runs; the arguments are its batch. `watch_backward`, `step()` come next.

        `replay(*args, **kwargs)` runs the same forward again and leaves no other trace; None: the model's call is all
        that a diagnosis can replay.
        """
        self._check_open()
        with self._stages.passes.forward.watch_forward(replay, args, kwargs):
            yield

    def watch_backward(self, loss: Tensor) -> None:
        """A framework is about to run backward from `loss`. It clears the gradients itself."""
        self._check_open()
        self._stages.passes.backward.watch_backward(loss)

    @property
    def num_microbatches(self) -> int:
        """Backward calls since the last step."""
        return self._moment.batches.num

    @property
    def num_steps(self) -> int:
        """Steps tried so far, which is the number of the next one."""
        return self._moment.next_step

    @property
    def is_judged(self) -> bool:
        """Whether every step has been judged; with fused optimizers on CUDA the last one may be on its way."""
        return self._judging.pending is None

    def note(self, finding: Finding) -> None:
        """Write down what somebody else has found. Nothing is done about it."""
        if not self._training.off:
            self._judgement.note(finding)

    # --- judgement ----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until the host has judged every step. On many ranks call it on each, as all that steers training."""
        self._judging.judge_pending()

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop in which ranks may run out of data at different steps, in the place of `ddp.join()`.

        A rank without data keeps the others company until all are done, and then takes over their weights. Only for
        DistributedDataParallel. While it is open nothing is rolled back and nothing is proven; nor is it proven
        afterwards, where the ranks have made different numbers of steps.
        """
        with join_uneven(self._ranks):
            yield
        self._ranks.note_steps(self._moment.next_step)

    @property
    def findings(self) -> list[Finding]:
        """What was found so far."""
        return self._judgement.findings

    @property
    def incidents(self) -> list[Incident]:
        """The findings that mattered, with what was done about them."""
        return self._judgement.incidents

    @property
    def last(self) -> StepRecord | None:
        """The newest step that was judged."""
        return self._judgement.last

    # --- around the step ----------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over `loader` with a progress bar on a terminal; leaves out the window that a rollback asks for."""
        total = count_items(loader)
        batches = self._shutdown.watch_data(loader)
        yield from self._rollback.leave_out(track(batches, describe=self._describe, total=total))

    def validate(self, loss: float | Tensor) -> None:
        """Tell the validation loss; a non-finite one is a finding, and steers neither scheduler nor early stopping.

        On many ranks call it on each: their mean is what counts.
        """
        self._check_open()
        with self._shutdown.busy():
            self._epochs.validate(read_number(loss, "guard.validate(loss)"))

    def end_epoch(self) -> None:
        """The epoch is over: a scheduler by epoch moves."""
        self._check_open()
        with self._shutdown.busy():
            self._epochs.end()

    def scale_lr(self, factor: float, reason: str) -> None:
        """Multiply the learning rate by `factor`, now and under whatever scheduler; the ledger says why.

        On many ranks call it on each.
        """
        self._check_open()
        self.flush()
        self._requests.scale(Action.SCALE_LR, factor, reason)

    def scale_weight_decay(self, factor: float, reason: str) -> None:
        """The same for the weight decay."""
        self._check_open()
        self.flush()
        self._requests.scale(Action.SCALE_WEIGHT_DECAY, factor, reason)

    @property
    def epoch(self) -> int:
        """Epochs that have ended: `for epoch in range(guard.epoch, num_epochs)` goes on after a resume."""
        return self._moment.epoch

    @property
    def should_stop(self) -> bool:
        """Whether early stopping (`Policy.early_stopping_patience`) has seen enough."""
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
        """Try rising learning rates on this training, and leave it bit for bit as it was.

        `fn(batch)` is what `guard.step` is given; `microbatches` batches make a step. `result.suggested` is the rate to
        train with, `result.plot(path)` draws what was seen, docs/tune.md says how it is read.
        """
        self._check_open()
        if self._stages.drive is not None:
            raise UsageError("find_lr cannot run accelerate's backward. Call it on a Guard of the model as it is.")
        self.flush()
        with self._shutdown.busy():
            return self._range_test.find_lr(fn, loader, start=start, end=end, steps=steps, microbatches=microbatches)

    def summary(self) -> str:
        """The run so far on one screen of text."""
        self._judging.catch_up()
        return self._summary.describe()

    def health(self) -> dict[str, bool]:
        """Whether model (buffers too), gradients, losses and parameters are finite now; reads the weights once."""
        self._judging.catch_up()
        return self._summary.tell_health()

    def stats(self) -> dict[str, float | int | None]:
        """Counts and current numbers."""
        self._judging.catch_up()
        return self._summary.tell_stats()

    def state_dict(self) -> dict[str, Any]:
        """What the guard itself remembers: step, detectors, clip state, totals. No weights, no optimizer state."""
        return self._saver.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict()` was taken. Load model and optimizer first: the buffers are copied from now."""
        self._saver.state.load_state_dict(state)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self) -> Save | None:
        """Save the whole training, to be resumed bit for bit; returns when it may go on, the disk is written behind it.

        None when the state cannot be saved, because it is not finite for example: that is told as an incident. So is a
        disk that fails.
        """
        self._check_open()
        with self._shutdown.busy():
            return self._saver.save()

    def resume(self, path: str | Path | None = None, *, strict: bool = True) -> int | None:
        """Go on from the newest good checkpoint of the run directory, or from `path`; the step that comes next.

        None when there is no checkpoint yet. Settings of the optimizer that are given otherwise now win, and are told.
        `strict=False` loads what fits a model that has changed.
        """
        self._check_open()
        with self._shutdown.busy():
            self.flush()
            return self._saver.resume(path, strict=strict)

    @property
    def checkpoints(self) -> CheckpointStore | ShardedStore:
        """The checkpoints of the run directory: `list()`, `best`, `load()`."""
        return self._saver.checkpoints.store

    def close(self) -> None:
        """Judge what is pending and close the record. A closed guard refuses to step."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._shutdown.stop()
            self._stages.close()
            self._saver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
            return
        if error is not None:
            self._shutdown.after_error(error)
        self._judging.drop_pending()
        with contextlib.suppress(TrainingHalted):  # the error on its way out is the one to show
            self.close()

    # --- small things -------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed and self._shutdown.exit_code is not None:
            raise SystemExit(self._shutdown.exit_code)
        if self._closed:
            raise UsageError("this guard is closed. Make a new one to go on training.")

    def _describe(self) -> str:
        return describe_step(self.last, self._judgement.tally.num_skipped)
