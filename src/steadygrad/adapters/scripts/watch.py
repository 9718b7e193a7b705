"""Watch: one optimizer of a script. Gradients -> whether this step may be taken; everything is recorded.

The order of a step: `begin` (the model is called), `measure` (the optimizer is about to step), then the caller takes or
skips the step, then `conclude`. After a skipped step, the buffers that the forward changed are restored. Reads one
small vector from the device per step, and two more where the script clips. While observing it only reads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.act.actor import Actor
from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.host_adam import HostAdam, can_step_on_host
from steadygrad.act.own_scale import OwnScale
from steadygrad.act.rates import Rates
from steadygrad.act.schedule_and_ema import ScheduleAndEma
from steadygrad.act.snapshots import Snapshots
from steadygrad.adapters.scripts.circumstances import Circumstances
from steadygrad.adapters.scripts.forward_scans import ForwardScans
from steadygrad.adapters.scripts.losses import Loss
from steadygrad.adapters.scripts.messages import Voice
from steadygrad.adapters.scripts.options import Options
from steadygrad.adapters.scripts.owners import find_owner
from steadygrad.adapters.scripts.record import Record
from steadygrad.adapters.scripts.step_diagnosis import StepDiagnosis
from steadygrad.adapters.scripts.together import Together
from steadygrad.adapters.scripts.trained import (
    describe_forgotten,
    describe_unreached,
    has_averages,
    list_parameters,
    list_trained_parameters,
    name_trained,
)
from steadygrad.adapters.scripts.unproven import Unproven
from steadygrad.config import Interval, Policy, SnapshotConfig
from steadygrad.detect import Detector, standard_rules
from steadygrad.detect.rank_agreement import describe_wait
from steadygrad.diagnose.step_arguments import name_inputs
from steadygrad.facts import Action, Cause, Reading
from steadygrad.judgement import Judgement
from steadygrad.judgement.raised import describe_raised
from steadygrad.measure import Measurement, Meter, StepContext, Transfer
from steadygrad.measure.edits import EditWatch
from steadygrad.measure.gradient_access import hold_nan
from steadygrad.measure.periodic_scans import Looks, PeriodicScans
from steadygrad.measure.program import ProgramWatch
from steadygrad.measure.rank_waits import RankWaits, call_weakly, watch_ranks
from steadygrad.measure.uncleared_gradients import UnclearedGradientsWatch, UsedMark

FIRST_STEPS = 3
"""Steps without any gradient after which an optimizer is reported; or steps each taken by a new one."""
NEVER = -(1 << 60)
OTHER_RANK = "another rank found values that are not finite (the step was skipped on all ranks)"


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
        # 1e-6 is the epsilon of torch's clip_grad_norm_.
        return min(1.0, self.max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0


class Watch:
    """Measures, and remembers what was measured before."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        options: Options,
        voice: Voice,
        number: int,
        choose_folder: Callable[[Watch], Path | None],
        list_optimizers: Callable[[], list[torch.optim.Optimizer]],
    ) -> None:
        """`number` counts the optimizers of this process; `choose_folder` is called at the first step.

        `list_optimizers` returns all that are alive, this one included.
        """
        self.optimizer, self._observe, self.voice = optimizer, options.observe, voice
        self._choose_folder, self._started_in, self.process = choose_folder, options.started_in, os.getpid()
        self.thread = threading.get_ident()
        """The thread whose backwards and clips are this optimizer's: where it was made, then where it steps."""
        self._list_optimizers = list_optimizers
        # Anything beyond skipping a step needs a loop that knows about it.
        self._config = dataclasses.replace(options.config, clip=None, on_nonfinite=Action.SKIP, policy=Policy.observe())
        self.owner, root = find_owner(list_parameters(optimizer))
        self._own_scale, self._is_made = OwnScale(optimizer), False
        self._program = ProgramWatch(
            list_trained_parameters(self.owner, optimizer), every=options.config.measure.scan_every
        )
        # While observing nothing is restored, so an empty module spares the copies.
        self._buffers = BufferKeeper(nn.Module()) if self._observe else BufferKeeper(self.owner, root=root)
        self._judgement: Judgement | None = None
        self._transfer = Transfer()
        self._step = 0
        self._looks, self._has_begun = Looks(), False
        self._cause: Cause | None = None
        self._clipped: _Clipped | None = None
        self._after_backward = UsedMark()
        self._reads_losses = False
        """Whether a loss was bad whose gradients were finite in the step."""
        self._reading: Reading | None = None
        self._signature: list[int] = []
        self._together = Together(str(number), optimizer, report=voice.say_loudly)
        self._diagnosis = StepDiagnosis(
            self._config.diagnose, self.owner, optimizer,
            buffers=self._buffers, together=self._together, run_dir=options.run_dir,
        )  # fmt: skip
        self._began_on: tuple[int, ...] = ()
        self._forward_scans: ForwardScans | None = None
        self._edits: EditWatch | None = None
        self._num_without_gradients = self._num_forgotten = 0
        self._taken_over_at = 0
        self._record: Record | None = None
        self._host_adam: HostAdam | None = None
        self._waits: RankWaits | None = None

    @property
    def has_stepped(self) -> bool:
        """Whether its optimizer has taken a step."""
        return self._judgement is not None

    def succeed(self, optimizer: torch.optim.Optimizer) -> None:
        """Go on with an optimizer of the same class and groups, created in place of the present one, which is gone."""
        is_brief = self._step - self._taken_over_at == 1 and has_averages(self.optimizer)
        self._num_forgotten, self._taken_over_at = self._num_forgotten + 1 if is_brief else 0, self._step
        self.optimizer.__dict__ = optimizer.__dict__  # as `share` does; everything here holds this very object
        self._own_scale = OwnScale(self.optimizer)
        self._signature, self._host_adam = [], None  # some parts hold the groups of the old one
        if self._num_forgotten == FIRST_STEPS and self._judgement is not None:
            self._judgement.note(describe_forgotten(optimizer, self._step))

    # --- a step -----------------------------------------------------------------------------------------------------

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Called when the model, or a part of it, is called for training."""
        if not self._has_begun:  # the first microbatch: changes since the last step are not the forward's
            self._has_begun = True
            self._buffers.begin(anew=True)
        if any(tensor.grad_fn is not None for _, tensor in name_inputs(args, kwargs)):
            return  # called with another model's output, whose graph is gone by the time of a replay
        # Held until the step is over, not copied.
        self._looks.batch = (args, kwargs)
        if self._forward_scans is not None:
            self._forward_scans.begin(self._step, self._looks, args, kwargs)
        self._diagnosis.note_call(module, args, kwargs)

    def note_backward(self, loss: Tensor) -> None:
        """Called when the script calls backward, in the script's own stack."""
        self._clipped = None  # new gradients are added
        if self._program.has_call:
            self._program.before_backward(self._step, loss)
        if self._forward_scans is not None:
            self._forward_scans.note_loss(loss)
        self._diagnosis.note_backward()

    def note_gradients(self, loss: Loss, *, has_many_ranks: bool) -> None:
        """Called when that backward is over, with the loss that it began from."""
        self._after_backward.note(("", p) for p in list_parameters(self.optimizer))
        # On a device this waits for the backward, so only once such a step was seen. Ranks measure together or not.
        if has_many_ranks or not (loss.value.is_cpu or self._reads_losses) or math.isfinite(loss.value.item()):
            return
        loss.left_nan = hold_nan(list_parameters(self.optimizer))

    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient other than zeros; reads them only if changed since the last backward."""
        return self._after_backward.is_there or any(_is_filled(p.grad) for p in list_parameters(self.optimizer))

    def hear_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Called when the model, or a part of it, is called for anything."""
        self._program.hear_call(module, args, kwargs)

    def is_about(self, parameters: set[int]) -> bool:
        """Whether these ids are all of this optimizer's parameters that have a gradient."""
        return {id(p) for p in list_parameters(self.optimizer) if p.grad is not None} <= parameters

    def note_clipping(self) -> None:
        """Note the gradients to report, since the script is about to clip them."""
        self._prepare()
        # Before the clip: afterwards one NaN is in every gradient, and the parameter that had it is not known.
        measurement = self._meter.measure()
        self._clipped = None if measurement is None or not measurement.names else _Clipped(measurement)

    def note_clipped(self, norm: Tensor, max_norm: float) -> None:
        """Note that the script has clipped; `norm` is the norm it found."""
        if self._clipped is not None:
            self._clipped.norm, self._clipped.max_norm = norm, float(max_norm)

    def begin_step(self) -> None:
        """Called when the optimizer is about to step, before a closure runs: what changed until now, the script did."""
        if self._edits is not None:
            self._edits.before_optimizer(self._step)

    def measure(self, around: Circumstances, make: Callable[[], Any] | None = None) -> bool:
        """Measure the gradients as the optimizer will get them; return whether the step must be skipped.

        `make` makes the step: an optimizer with a loss scale of its own is asked to leave an overflowed one out itself.
        """
        # Before our own ops below: the mode would trace them too.
        self._diagnosis.pause_live()
        if self._forward_scans is not None:
            # Before `_prepare`, which replaces the scans when parameters were added: an open mode would never be left.
            self._forward_scans.read(self._step, self._looks)
        self._prepare()
        self._periodic_scans.before_optimizer(self._looks, scale_is_known=around.loss_scale is not None)
        loss = around.add_up_losses()
        own = self._own_scale.now if around.loss_scale is None else None
        scale, told = (around.carried_scale, around.loss_scale) if own is None else (own, own)
        m = self._meter.measure(loss, scale=scale, told_scale=told)
        if m is None or not m.names:
            self._reading = None
            self._note_no_gradients(around)
            # The others wait for its word in this step too.
            return not self._observe and around.has_many_ranks and self._together.decide(False)
        self._num_without_gradients = NEVER  # so low that the count never gets to FIRST_STEPS
        reading = self._read(m, len(around.losses))
        if self._clipped is not None:
            reading = self._as_before_clipping(reading, self._clipped)
        # Ranks share gradients but not losses, unless they exchange them too.
        loss_counts = around.loss_counts and (not around.has_many_ranks or self._together.shares_numbers)
        is_nonfinite = reading.num_nonfinite > 0
        if reading.loss_is_nonfinite and not is_nonfinite:
            self._reads_losses = True
            # Gradients that the script has cleaned are its answer to the loss.
            is_nonfinite = loss_counts and not around.are_cleaned()
            reading = dataclasses.replace(reading, is_cleaned=loss_counts and not is_nonfinite)
        bad = is_nonfinite or bool(reading.bad_rates)
        self._reading = reading
        # `decide` is called whether this rank's step is bad or not: the others wait for its word.
        leave_out = not self._observe and (self._together.decide(bad) if around.has_many_ranks else bad)
        if leave_out and not bad:
            self.voice.say_few("skipped for another rank", f"step {self._step}: {OTHER_RANK}")
        if leave_out and make is not None and around.loss_scale is None and not around.has_many_ranks:
            reading = self._reading = self._leave_out(reading, make)
            if self._own_scale.has_taken:
                cleaned = self._meter.measure(loss)
                assert cleaned is not None
                self._reading, self._is_made = self._read(cleaned, len(around.losses)), True
                return False
        # Before the diagnosis: the replay must start from the buffers that the step started from.
        if leave_out and not _is_search(reading):
            self._buffers.restore()
        if is_nonfinite and not _is_search(reading):
            self._cause = self._diagnosis.find_cause(
                reading,
                self._named,
                loss=around.losses[-1].value if around.losses else None,
                has_many_ranks=around.has_many_ranks,
                began_on=self._began_on,
            )
        return leave_out

    def _leave_out(self, reading: Reading, make: Callable[[], Any]) -> Reading:
        """Have an optimizer with its own loss scale leave the step out; return the reading with that scale, if so."""
        self._own_scale.has_taken = False
        if not reading.num_nonfinite or reading.loss_is_nonfinite or reading.bad_rates:
            return reading
        scale = self._own_scale.leave_out(make)
        return reading if scale is None else dataclasses.replace(reading, loss_scale=scale)

    def _note_no_gradients(self, around: Circumstances) -> None:
        """Report an optimizer that has never got a gradient, though losses were computed."""
        self._num_without_gradients += bool(around.losses)
        if self._num_without_gradients != FIRST_STEPS or self._judgement is None:
            return
        self._judgement.note(describe_unreached(self.owner, self.optimizer, beside=self._list_optimizers()))

    def make_step(self, make: functools.partial[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a good step by `make`, or the same step quicker, unless the optimizer has made it already."""
        if self._is_made:
            self._is_made = False
            return None
        if self._observe or args or kwargs or not can_step_on_host(self.optimizer):
            return make(*args, **kwargs)
        if self._host_adam is None:
            self._host_adam = HostAdam(self.optimizer, make.func)
        return self._host_adam.step(make)

    def conclude(self, *, skipped: bool) -> None:
        """Judge the step after it was taken or skipped; keep the forward's changes to the buffers or undo them."""
        calls_no_module = not self._has_begun
        self._end_step(skipped=skipped)
        if calls_no_module:  # the next step begins here
            self._diagnosis.watch_live()

    def _end_step(self, *, skipped: bool) -> None:
        reading, self._reading, self._clipped, self._has_begun = self._reading, None, None, False
        # Dropped with `looks`: the batch, which must not live into the next step's forward.
        looks, cause, self._looks, self._cause = self._looks, self._cause, Looks(), None
        self._diagnosis.end_step()
        if reading is None:
            self._step += 1  # without gradients; other ranks may have had some, and count it
            return
        # The reading was made before it was known whether the step would be taken.
        if skipped != reading.skipped:
            reading = dataclasses.replace(reading, skipped=skipped)
        if skipped and not _is_search(reading):
            self._buffers.restore()
        else:
            self._buffers.accept()
        if not skipped:
            if self._edits is not None:
                self._edits.after_optimizer(reading.step)
            self._periodic_scans.after_optimizer(reading.step, looks)
            self._uncleared.after_step()
        self._step += 1
        if looks.rms is not None:
            reading = dataclasses.replace(reading, adam_rms=looks.rms.read())
        assert self._judgement is not None
        self._judgement.judge(reading, self._periodic_scans.read(reading, looks), find_cause=lambda *_: cause)

    def _read(self, m: Measurement, num_losses: int) -> Reading:
        numbers = m.take_to_host(self._transfer)
        groups = enumerate(self.optimizer.param_groups)
        rates = {place: float(rate) for place, group in groups if (rate := group.get("lr")) is not None}
        context = StepContext(
            step=self._step,
            learning_rates=tuple(rates.values()),
            num_microbatches=max(1, num_losses),
            stale=self._uncleared.take(),
            bad_rates={place: rate for place, rate in rates.items() if not math.isfinite(rate)},
        )
        self._began_on = self._meter.read_from_ranks(m, numbers).began_on
        return m.read(numbers, context, skipped=False)

    def _as_before_clipping(self, reading: Reading, clipped: _Clipped) -> Reading:
        """Report the numbers before clipping, which spreads a NaN to every gradient and makes all large norms equal."""
        m = clipped.measurement
        before = m.read(m.take_to_host(self._transfer), StepContext(step=reading.step), skipped=False)
        if (before.num_nonfinite > 0) != (reading.num_nonfinite > 0):
            return reading  # it went bad after the clipping, or was cleaned after it
        return dataclasses.replace(
            reading,
            grad_norm=before.grad_norm,
            finite_grad_norm=before.finite_grad_norm,
            num_nonfinite=before.num_nonfinite,
            num_nan=before.num_nan,
            gradients=before.gradients,
            clip_coefficient=clipped.coefficient,
        )

    def explain(self, error: BaseException) -> None:
        """Report an error that has ended the script in this step, if a replay of its calls finds a bad number."""
        if self._judgement is None or not self._has_begun:
            return
        cause = self._diagnosis.explain_raised(self._step)
        if cause is not None:
            self._judgement.note(describe_raised(error, self._step), cause)

    # --- around the steps -------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Prepare at the first step, and when parameters were added: only now is everything on its final device."""
        parameters = list_parameters(self.optimizer)
        # Runs each step, so only ids are compared; `_named` keeps the parameters alive, so no id is used again.
        signature = [id(p) for p in parameters]
        if signature == self._signature:
            return
        self._signature = signature
        if not {id(p) for p in parameters} <= {id(p) for p in self.owner.parameters()}:
            self._diagnosis.owner = self.owner = find_owner(parameters)[0]
        names = {id(p): name for name, p in self.owner.named_parameters()}
        named = tuple((names[id(p)], p) for p in parameters)
        trained = name_trained(self.owner, self.optimizer, named, beside=self._list_optimizers())
        self._named = named
        self._together.meet(self.owner, named)
        ranks = self._together.ranks
        self._meter = Meter(named, self._config.measure.implementation, ranks=ranks)
        self._edits = EditWatch(named)
        buffers = self._buffers
        self._periodic_scans = PeriodicScans(
            trained,
            self._config.measure,
            ranks=ranks,
            program=self._program,
            edits=self._edits,
            count_buffer_edits=lambda: buffers.num_edits,
        )
        self._periodic_scans.begin()
        self._forward_scans = ForwardScans(self._periodic_scans)
        self._uncleared = UnclearedGradientsWatch(named)
        if self._judgement is None:
            self._judgement = self._open_judgement([name for name, _ in named])
            hear = call_weakly(self._judgement, lambda judgement, fact: judgement.hear(fact))
            self._program.own_loads.report = hear
            self._waits = watch_ranks(
                None,
                # Weakly: a thread that is the last to drop the model ends its process group too, and may deadlock.
                call_weakly(self, lambda watch: watch._step, 0),
                call_weakly(self._judgement, lambda judgement, wait: judgement.note(describe_wait(wait))),
            )

    def _open_judgement(self, names: Sequence[str]) -> Judgement:
        # Disabled: a rollback needs a loop that knows about it. The Actor wants the object all the same.
        snapshots = Snapshots(self.owner, [self.optimizer], extras={}, config=SnapshotConfig(enabled=False))
        folder = self._choose_folder(self)
        record = self._record = Record(self.voice, observe=self._observe, started_in=self._started_in)
        record.open(folder, self._config, names)
        if record.folder is not None:
            self._diagnosis.use_folder(record.folder)
        record.report_start(list_parameters(self.optimizer), self.owner)
        judgement = Judgement(
            self._config,
            detector=Detector([Unproven(rule) for rule in standard_rules(self._config.detect)]),
            schedule_and_ema=ScheduleAndEma(
                None, None, model=self.owner, interval=Interval.STEP, buffers=self._buffers
            ),
            actor=Actor(self._config.policy, rates=Rates([self.optimizer]), snapshots=snapshots),
            recorder=record.recorder,
        )
        record.follow(self, judgement)
        return judgement

    def finish(self) -> None:
        """Close the record and print a summary now, instead of at exit."""
        if self._record is not None:
            self._record.finish()


def _is_search(reading: Reading) -> bool:
    """Whether this is an overflow in the search for a loss scale: not ours to judge, with good loss and buffers."""
    return reading.loss_scale is not None and not reading.loss_is_nonfinite


def _is_filled(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    # A sparse one has no `any`, and that of a shard would wait for the other ranks.
    is_plain = type(gradient) is Tensor and gradient.layout is torch.strided
    return not is_plain or bool(gradient.any())
