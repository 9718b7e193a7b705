"""Watch: one optimizer of a script. Gradients -> whether this step may be taken; everything is recorded.

The order of a step: `begin` (the model is called), `measure` (the optimizer is about to step), then the caller takes or
skips the step, then `conclude`. After a skipped step, the buffers that the forward changed are restored. Reads one
small vector from the device per step. While observing it only reads.
"""

from __future__ import annotations

import dataclasses
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.act.actor import Actor
from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.rates import Rates
from steadygrad.act.schedule_and_ema import ScheduleAndEma
from steadygrad.act.snapshots import Snapshots
from steadygrad.adapters.scripts.messages import Terminal
from steadygrad.adapters.scripts.owners import find_owner, find_unheld, list_parts
from steadygrad.config import GuardConfig, Interval, Policy, SnapshotConfig
from steadygrad.detect import Detector, standard_rules
from steadygrad.detect.gradient_flow import describe_no_gradient
from steadygrad.detect.rank_agreement import describe_wait
from steadygrad.diagnose.investigator import Investigator
from steadygrad.diagnose.step_arguments import name_inputs
from steadygrad.errors import ConfigError
from steadygrad.facts import Action, Cause, Incident, Reading
from steadygrad.judgement import Judgement
from steadygrad.measure import Measurement, Meter, StepContext, Transfer
from steadygrad.measure.periodic_scans import Looks, PeriodicScans
from steadygrad.measure.rank_waits import RankWaits, watch_ranks
from steadygrad.measure.uncleared_gradients import UnclearedGradientsWatch
from steadygrad.record import Recorder, Sink
from steadygrad.record.run_directory import make_record
from steadygrad.record.run_folder import RunFolder
from steadygrad.record.tally import Tally
from steadygrad.state.trained_parameters import TrainedParameters
from steadygrad.words import spell_count

NUM_WITHOUT = 3
"""Steps without any gradient that are reported."""
NO_LOSS = "a script does not tell how it computes its loss."


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """The loss that a backward started from."""

    value: Tensor
    is_scaled: bool
    """Whether it carries the loss scale, if there is one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """The circumstances of a step about to be taken, as far as they can be known from a script."""

    losses: Sequence[Loss] = ()
    """The loss of each backward since the last step."""
    loss_counts: bool = True
    """Whether a bad loss alone makes the step bad."""
    carried_scale: Tensor | None = None
    """The loss scale that the gradients still carry."""
    loss_scale: Tensor | None = None
    """The current loss scale."""
    may_skip: bool = True
    """Whether all ranks see what this one sees."""


@dataclasses.dataclass(slots=True)
class _Clipped:
    """Gradients as they were before the script clipped them."""

    measurement: Measurement
    norm: Tensor | float = 0.0
    max_norm: float = 1.0

    @property
    def coefficient(self) -> float:
        """What the script multiplied them by; 1 if that was not a number."""
        norm = float(self.norm)
        return min(1.0, self.max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0


class Watch:
    """Measures, and remembers what was measured before."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        config: GuardConfig,
        observe: bool,
        terminal: Terminal,
        run_dir: Path | None,
    ) -> None:
        self.optimizer, self._observe, self._terminal, self._run_dir = optimizer, observe, terminal, run_dir
        # Anything beyond skipping a step needs a loop that knows about it.
        self._config = dataclasses.replace(config, clip=None, on_nonfinite=Action.SKIP, policy=Policy.observe())
        self.owner = find_owner(_list_parameters(optimizer))
        self._buffers = BufferKeeper(nn.Module() if observe else self.owner)
        settings = self._config.diagnose
        self._investigator = Investigator(settings, model=self.owner, optimizers=[optimizer], run_dir=run_dir)
        self._investigator.close()  # its own hook would end up in what the script saves; `begin` reports calls to it
        self._judgement: Judgement | None = None
        self._transfer = Transfer()
        self._step = 0
        self._looks, self._has_begun = Looks(), False
        self._cause: Cause | None = None
        self._clipped: _Clipped | None = None
        self._reading: Reading | None = None
        self._signature: list[int] = []
        self._num_without = 0
        self._given = {id(p): name for name, p in self.owner.named_parameters()}
        self._waits: RankWaits | None = None
        self._finish: weakref.finalize[..., Watch] | None = None
        self._give_back: Callable[[], None] | None = None

    # --- a step -----------------------------------------------------------------------------------------------------

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Called when the model, or a part of it, is called for training."""
        if not self._has_begun:  # the first microbatch: changes since the last step are not the forward's
            self._has_begun = True
            self._buffers.begin(anew=True)
        if any(tensor.grad_fn is not None for _, tensor in name_inputs(args, kwargs)):
            return  # called with another model's output, whose graph is gone by the time of a replay
        self._looks.batch = (args, kwargs)
        if self._config.diagnose.enabled:
            self._investigator.hear(module, args, kwargs)

    def is_about(self, parameters: set[int]) -> bool:
        """Whether these ids are all of this optimizer's parameters that have a gradient."""
        return {id(p) for p in _list_parameters(self.optimizer) if p.grad is not None} <= parameters

    def note_clipping(self) -> None:
        """Note the gradients to report, since the script is about to clip them."""
        self._prepare()
        measurement = self._meter.measure()
        self._clipped = None if measurement is None else _Clipped(measurement)

    def note_clipped(self, norm: Tensor, max_norm: float) -> None:
        """Note that the script has clipped; `norm` is the norm it found."""
        if self._clipped is not None:
            self._clipped.norm, self._clipped.max_norm = norm, float(max_norm)

    def forget_clipping(self) -> None:
        """Forget the clipping, since new gradients are added."""
        self._clipped = None

    def measure(self, around: Circumstances) -> bool:
        """Measure the gradients as the optimizer will get them; return whether the step must be skipped."""
        self._prepare()
        self._periodic_scans.before_optimizer(self._looks, scale_is_known=around.loss_scale is not None)
        loss = _add_up(around)
        m = self._meter.measure(loss, scale=around.carried_scale, told_scale=around.loss_scale)
        if m is None:
            self._reading = None
            self._note_no_gradient(around)
            return False
        reading = self._read(m, len(around.losses))
        if self._clipped is not None:
            reading = self._as_before_clipping(reading, self._clipped)
        bad = reading.num_nonfinite > 0 or (around.loss_counts and reading.loss_is_nonfinite)
        self._reading = reading
        leave_out = bad and around.may_skip and not self._observe
        if leave_out and not _is_search(reading):
            self._buffers.restore()
        if bad and not _is_search(reading):
            self._cause = self._diagnose(reading)
        return leave_out

    def _note_no_gradient(self, around: Circumstances) -> None:
        """Report an optimizer that steps after backward, again and again, and has never had a gradient."""
        if self._step or not around.losses or not around.loss_counts or self._judgement is None:
            return
        self._num_without += 1
        if self._num_without == NUM_WITHOUT:
            self._judgement.note(describe_no_gradient(NUM_WITHOUT))

    def conclude(self, *, skipped: bool) -> None:
        """Judge the step after it was taken or skipped; keep the forward's changes to the buffers or undo them."""
        reading, self._reading, self._clipped, self._has_begun = self._reading, None, None, False
        looks, cause, self._looks, self._cause = self._looks, self._cause, Looks(), None
        self._investigator.take()  # release the batches
        if reading is None:
            return
        reading = dataclasses.replace(reading, skipped=skipped)
        if skipped and not _is_search(reading):
            self._buffers.restore()
        else:
            self._buffers.accept()
        if not skipped:
            self._periodic_scans.after_optimizer(reading.step, looks)
        self._uncleared.after_step()
        self._step += 1
        if looks.rms is not None:
            reading = dataclasses.replace(reading, adam_rms=looks.rms.read())
        assert self._judgement is not None
        self._judgement.judge(reading, self._periodic_scans.read(reading, looks), find_cause=lambda *_: cause)

    def _read(self, m: Measurement, num_losses: int) -> Reading:
        numbers = self._transfer.send(m.packed).wait()
        rates = tuple(float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group)
        context = StepContext(
            step=self._step,
            learning_rates=rates,
            num_microbatches=max(1, num_losses),
            stale=self._uncleared.take(),
        )
        return m.read(numbers, context, skipped=False)

    def _as_before_clipping(self, reading: Reading, clipped: _Clipped) -> Reading:
        """Report the numbers before clipping, which spreads a NaN to every gradient and makes all large norms equal."""
        m = clipped.measurement
        before = m.read(self._transfer.send(m.packed).wait(), StepContext(step=reading.step), skipped=False)
        if before.num_nonfinite == 0 < reading.num_nonfinite:
            return reading  # it went bad after the clipping
        return dataclasses.replace(
            reading,
            grad_norm=before.grad_norm,
            finite_grad_norm=before.finite_grad_norm,
            num_nonfinite=before.num_nonfinite,
            num_nan=before.num_nan,
            gradients=before.gradients,
            clip_coefficient=clipped.coefficient,
        )

    def _diagnose(self, reading: Reading) -> Cause | None:
        """Diagnose before the step is taken: while observing, this is the last moment with good weights."""
        with self._buffers.unchanged():
            cause = self._investigator.investigate(self._investigator.take(), reading, ())
        return None if cause is None or cause.kind == "error" else _tell_limits(cause)

    # --- around the steps -------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Prepare at the first step, and when parameters were added: only now is everything on its final device."""
        parameters = _list_parameters(self.optimizer)
        signature = [id(p) for p in parameters]
        if signature == self._signature:
            return
        self._signature = signature
        if not {id(p) for p in parameters} <= {id(p) for p in self.owner.parameters()}:
            self.owner = find_owner(parameters)
        names = {id(p): name for name, p in self.owner.named_parameters()}
        named = tuple((names[id(p)], p) for p in parameters)
        known = {id(p) for part in list_parts(self.owner) for p in part.parameters()}
        trained = TrainedParameters(
            model=self.owner,
            optimizers=(self.optimizer,),
            named=named,
            unoptimized=find_unheld(self.owner),
            foreign=tuple(self._given[id(p)] for p in parameters if id(p) in self._given and id(p) not in known),
        )
        self._uncleared = UnclearedGradientsWatch(named)
        self._meter = Meter(named, self._config.measure.implementation)
        self._periodic_scans = PeriodicScans(trained, self._config.measure)
        self._periodic_scans.begin()
        if self._judgement is None:
            self._judgement = judgement = self._open_judgement([name for name, _ in named])
            here = weakref.ref(self)
            self._waits = watch_ranks(
                None,
                lambda: getattr(here(), "_step", 0),
                lambda wait: judgement.note(describe_wait(wait)),
            )

    def _open_judgement(self, names: Sequence[str]) -> Judgement:
        snapshots = Snapshots(self.owner, [self.optimizer], extras={}, config=SnapshotConfig(enabled=False))
        recorder = Recorder([*self._open_run(names), self._terminal])
        judgement = Judgement(
            self._config,
            detector=Detector(standard_rules(self._config.detect)),
            schedule_and_ema=ScheduleAndEma(
                None, None, model=self.owner, interval=Interval.STEP, buffers=self._buffers
            ),
            actor=Actor(self._config.policy, rates=Rates([self.optimizer]), snapshots=snapshots),
            recorder=recorder,
        )
        # Runs when the optimizer is freed or the script ends, so none of these may refer to the optimizer.
        name, ledger = type(self.optimizer).__name__, (judgement.tally, judgement.incidents)
        self._finish = weakref.finalize(
            self, _finish, os.getpid(), name, recorder, ledger, self._terminal, self._run_dir, self._give_back
        )
        return judgement

    def finish(self) -> None:
        """Close the record and print a summary now, instead of at exit."""
        if self._finish is not None:
            self._finish()

    def _open_run(self, names: Sequence[str]) -> list[Sink]:
        if self._run_dir is None:
            return []
        try:
            folder = RunFolder(self._run_dir)
            self._give_back = folder.release
            folder.settle()
            if folder.is_used:  # each start of a script is a separate run
                folder.begin_anew()
            return [make_record(folder.path, self._config, names, run_id=folder.run_id)]
        except ConfigError as error:
            self._terminal.say(f"no record is written: {error}")
            self._run_dir = None
            return []


def _finish(
    process: int,
    name: str,
    recorder: Recorder,
    ledger: tuple[Tally, list[Incident]],
    terminal: Terminal,
    run_dir: Path | None,
    give_back: Callable[[], None] | None,
) -> None:
    """Close the record and print a summary; a forked process prints nothing."""
    if os.getpid() != process:
        return
    tally, incidents = ledger
    recorder.close()
    if give_back is not None:
        give_back()
    where = "" if run_dir is None else f"; record in {run_dir}"
    steps, told = spell_count(tally.num_steps, "step"), spell_count(len(incidents), "incident")
    terminal.say(f"{name}: {steps}, {tally.num_skipped} skipped, {told}{where}")


def _is_search(reading: Reading) -> bool:
    """Whether this is an overflow in the search for a loss scale: not ours to judge, with good loss and buffers."""
    return reading.loss_scale is not None and not reading.loss_is_nonfinite


def _list_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return list({id(p): p for group in optimizer.param_groups for p in group["params"]}.values())


def _add_up(around: Circumstances) -> Tensor | None:
    """Return the loss of the step, without its scale, on the device where it was computed."""
    if not around.losses:
        return None
    device = around.losses[-1].value.device
    scale = 1.0 if around.loss_scale is None else around.loss_scale.to(device)
    values = [(loss.value.to(device).float(), loss.is_scaled) for loss in around.losses]
    return torch.stack([value / scale if is_scaled else value for value, is_scaled in values]).sum()


def _tell_limits(cause: Cause) -> Cause:
    """Rephrase the cause for a script; omit lines that belong to the replay and not to the model."""
    note = cause.note.replace("give guard.step the function, not its loss.", NO_LOSS)
    if cause.file is not None and Path(cause.file).name == "contextlib.py":
        cause = dataclasses.replace(cause, file=None, line=None, source=None, caller=None)
    return dataclasses.replace(cause, note=note)
