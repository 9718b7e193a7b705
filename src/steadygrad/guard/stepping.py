"""Stepper: gradients -> the optimizer's step, or none.

    measure                  gradients -> numbers on the device, one pass
    clip                     numbers -> clip coefficient on the device
    judge the step before    (fused optimizers on CUDA: its copy has long arrived)
    step or skip             inside the optimizer's kernel, or by one host read
    send                     one asynchronous copy to the host
    judge this step          (every other optimizer: the numbers are already here)

A bad step never touches a weight, whenever it is judged.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.sanitize import sanitize_gradients
from steadygrad.config import GuardConfig
from steadygrad.errors import UsageError
from steadygrad.facts import Action, Reading
from steadygrad.guard.judging import Judging, Pending
from steadygrad.guard.moment import Moment
from steadygrad.guard.optimizers import Optimizers
from steadygrad.guard.rollback import Rollback
from steadygrad.guard.watched import Watched
from steadygrad.measure import Measurement
from steadygrad.measure.gradient_access import GradientAccess, sign_gradients
from steadygrad.measure.logged import send_logged
from steadygrad.measure.measurement import COEFFICIENT, FOUND, LOSS, NUM_NONFINITE, StepContext


class Stepper:
    """Makes the current step, or skips it."""

    def __init__(
        self,
        config: GuardConfig,
        *,
        moment: Moment,
        watched: Watched,
        optimizers: Optimizers,
        rollback: Rollback,
        buffers: BufferKeeper,
        judging: Judging,
    ) -> None:
        self._config, self._moment, self._watched, self._optimizers = config, moment, watched, optimizers
        self._rollback, self._buffers, self._judging = rollback, buffers, judging

    def step(self) -> None:
        """Measure, then step or skip: on the device if the optimizers allow it, otherwise by one host read."""
        if self._rollback.is_open:
            self._refuse(self._moment.take_step_number())
            return
        watched, batches, looks = self._watched, self._moment.batches, self._moment.looks
        if watched.has_new_parameters:
            # Its numbers are read by the meters of the parameters so far, which are about to be replaced.
            self._judging.judge_pending()
            watched.watch_new_parameters()
        context = StepContext(
            step=self._moment.next_step,
            num_microbatches=max(1, batches.num),
            num_dropped_microbatches=batches.num_dropped,
            stale=watched.uncleared_gradients.take(),
        )
        looks.own_finite = watched.own_gradients.take()
        if looks.access is GradientAccess.POSSIBLE and batches.signature is not None:
            is_same = sign_gradients(watched.trained.named) == batches.signature
            looks.access = GradientAccess.POSSIBLE if is_same else GradientAccess.CHANGED
        if self._moment.logged:
            looks.logged = send_logged(self._moment.logged, watched.transfer)
        if batches.all_dropped:
            self._skip_all_dropped(context)
            return
        if batches.num_dropped:
            watched.gate.average_the_kept(batches)
        watched.periodic_scans.begin_ranked()
        scale = self._optimizers.scaler.factor
        watched.periodic_scans.before_optimizer(looks, scale_is_known=scale is not None)
        measurement = watched.measure(batches.loss, step=context.step, scale=scale)
        if measurement is None:
            raise UsageError(
                "no parameter of the optimizer has a gradient. Run backward before guard.step(), clear gradients after "
                "the step and not before it, and check that the loss depends on the model's parameters."
            )
        # After the check: a call without gradients is a mistake, not an attempt that counts as a step.
        self._moment.take_step_number()
        if watched.reflex.ready_for_device and self._config.on_nonfinite is not Action.SANITIZE:
            self._step_on_device(measurement, scale, context)
        else:
            self._step_on_host(measurement, scale, context)

    def _step_on_device(self, m: Measurement, scale: Tensor | None, context: StepContext) -> None:
        """Fused optimizers on CUDA: nothing here waits for work of this step, if no learning rate is on the device."""
        watched, optimizers, looks = self._watched, self._optimizers, self._moment.looks
        carried = watched.reflex.clip(m, scale)
        # Marked before the optimizer is queued: the copy of the numbers waits for this point, not for the step.
        complete = watched.transfer.mark(m.packed.device)
        self._judging.judge_pending()  # the previous step: its scheduler sets the learning rate that this step uses
        if self._rollback.is_open:  # just rolled back: these gradients belong to discarded weights
            self._refuse(context.step)
            return
        self._prepare_optimizers(context)
        if context.bad_rates:
            self._skip_for_rate(m, context)
            return
        measure_updates = self._updates_are_due(context.step)
        if measure_updates:
            watched.updates.before()
        with optimizers.rates.held():
            watched.reflex.step_on_device(m, carried)
        watched.edits.after_optimizer(context.step)
        # Pending holds `m`: a side stream copies from its memory, which must not be reused before that is done.
        self._judging.pending = pending = Pending(m, watched.transfer.send(m.packed, after=complete), context, looks)
        watched.periodic_scans.after_optimizer(context.step, looks)
        if optimizers.scaler.now is not None:
            overflowed = (m.packed[NUM_NONFINITE] > 0) | self._moment.batches.overflowed
            optimizers.scaler.update(bad_gradient=overflowed, bad_loss=~m.packed[LOSS].isfinite())
        self._buffers.select(m.found)  # by the flag on the device: the host does not know it yet
        if measure_updates:
            pending.updates = watched.transfer.send(watched.updates.after())

    def _step_on_host(self, m: Measurement, scale: Tensor | None, context: StepContext) -> None:
        """Every other optimizer: one host read, then the host decides."""
        watched, optimizers, looks = self._watched, self._optimizers, self._moment.looks
        self._judging.judge_pending()  # there is one only if the step before went through the device
        if self._rollback.is_open:  # as on the device: these gradients belong to discarded weights
            self._refuse(context.step)
            return
        self._prepare_optimizers(context)
        repaired = self._sanitize_if_bad(m, scale) if self._config.on_nonfinite is Action.SANITIZE else None
        used = m if repaired is None else repaired
        carried = watched.reflex.clip(used, scale)
        numbers = used.take_to_host(watched.transfer)  # the one host read of this path, without a loss scale
        watched.meter.check_gradients(used, numbers)
        spoilt = {} if numbers[FOUND] > 0 else self._buffers.find_spoilt()
        bad = numbers[FOUND] > 0 or bool(spoilt) or bool(context.bad_rates)
        reading = used.read(numbers, context, skipped=bad, spoilt_buffers=spoilt)
        from_ranks = watched.meter.read_from_ranks(used, numbers)
        if repaired is not None:  # report what was found, and how it was repaired
            numbers_found = m.take_to_host(watched.transfer)
            from_ranks = watched.meter.read_from_ranks(m, numbers_found)
            reading = _as_repaired(m.read(numbers_found, context, skipped=False, spoilt_buffers=spoilt), reading)
        measure_updates = not bad and self._updates_are_due(reading.step)
        if measure_updates:
            watched.updates.before()
        has_taken = False
        if bad and not watched.has_many_ranks and _may_be_overflow(reading):
            reading, has_taken = self._ask_optimizer(used, reading, scale, context)
            bad = not has_taken
        if bad:
            watched.reflex.skip_on_host()
            self._buffers.restore()
        else:
            if not has_taken:
                with optimizers.rates.held():
                    divisor = 1.0 if carried is None or not optimizers.scaler.unscales else float(carried)
                    watched.reflex.step_on_host(used, numbers[COEFFICIENT] / divisor)
            watched.edits.after_optimizer(context.step)
            if repaired is None:
                self._buffers.accept()
            else:  # gradients can be repaired; statistics that saw a bad batch cannot
                self._buffers.restore()
            watched.periodic_scans.after_optimizer(reading.step, looks)
        # A bad loss says nothing about the loss scale, so that stays as it is.
        if optimizers.scaler.now is not None and not reading.loss_is_nonfinite:
            # Of `m`, not `used`: what was repaired has still overflowed.
            overflowed = (m.packed[NUM_NONFINITE] > 0) | self._moment.batches.overflowed
            optimizers.scaler.update(bad_gradient=overflowed, bad_loss=None)
        if measure_updates:
            reading = self._judging.add_updates(reading, watched.transfer.send(watched.updates.after()))
        self._judging.judge(reading, looks, from_ranks)

    def _ask_optimizer(
        self, m: Measurement, reading: Reading, scale: Tensor | None, context: StepContext
    ) -> tuple[Reading, bool]:
        """Have the optimizer deal with bad gradients, if it does; return the reading, and whether it took the step."""
        watched, scaler = self._watched, self._optimizers.scaler
        left = scaler.leave_out(lambda: watched.reflex.step_on_host(m, 1.0))
        if left is not None:
            return dataclasses.replace(reading, loss_scale=left), False
        if not scaler.has_taken:
            return reading, False
        # It has cleaned its gradients: those are what counts.
        cleaned = watched.measure(self._moment.batches.loss, step=reading.step, scale=scale)
        assert cleaned is not None
        return cleaned.read(cleaned.take_to_host(watched.transfer), context, skipped=False), True

    def let_go(self, *, owns_backward: bool) -> None:
        """Clear the gradients of the finished step, unless that is left to the caller."""
        if owns_backward:
            self._optimizers.zero_grad()
        else:
            self._watched.used.note(self._watched.trained.named)
            self._watched.uncleared_gradients.after_step()

    def end_step(self) -> None:
        """End the step: the next gradients will be scaled again."""
        self._optimizers.scaler.end_step()

    def _refuse(self, step: int) -> None:
        """Leave out a step in the window after a rollback."""
        self._rollback.refuse()
        self._judging.write_refused(step, self._optimizers.rates.learning_rates())
        if self._moment.batches.num == 0:
            self._optimizers.zero_grad()

    def _skip_all_dropped(self, context: StepContext) -> None:
        """Skip a step whose microbatches were all bad, and report it with the numbers of the last one."""
        watched, optimizers, batches = self._watched, self._optimizers, self._moment.batches
        assert batches.worst is not None
        m, numbers = batches.worst
        self._judging.judge_pending()
        watched.reflex.skip_on_host()
        if batches.overflowed:
            optimizers.scaler.update(bad_gradient=torch.ones((), device="cpu"), bad_loss=None)
        self._moment.take_step_number()
        context.learning_rates = optimizers.rates.learning_rates()
        from_ranks = watched.meter.read_from_ranks(m, numbers)
        self._judging.judge(m.read(numbers, context, skipped=True), self._moment.looks, from_ranks)

    def _skip_for_rate(self, m: Measurement, context: StepContext) -> None:
        """Skip a step whose learning rate would make every weight NaN; a host read does not matter any more."""
        watched = self._watched
        numbers = m.take_to_host(watched.transfer)
        watched.reflex.skip_on_host()
        self._buffers.restore()
        from_ranks = watched.meter.read_from_ranks(m, numbers)
        self._judging.judge(m.read(numbers, context, skipped=True), self._moment.looks, from_ranks)

    def _sanitize_if_bad(self, m: Measurement, scale: Tensor | None) -> Measurement | None:
        """Repair bad gradients and measure them again; return None if there was nothing to repair."""
        if not m.found.item():
            return None
        sanitize_gradients(m.gradients, self._config.sanitize_value)
        # Without the loss, which nothing repairs: the flag is then about the gradients alone. On many ranks this is a
        # collective; `found` is the same on all of them, so all get here or none.
        return self._watched.meter.measure(None, scale=scale, told_scale=self._optimizers.scaler.now)

    def _prepare_optimizers(self, context: StepContext) -> None:
        """Prepare at the last point before a weight can change, and note the learning rates of this step."""
        self._rollback.snapshots.before_optimizer()  # a side stream may still copy the weights as they are
        self._watched.edits.before_optimizer(self._moment.next_step - 1)
        rates = self._optimizers.rates
        context.learning_rates = rates.learning_rates()
        context.bad_rates = rates.find_bad(context.learning_rates)

    def _updates_are_due(self, step: int) -> bool:
        every = self._config.measure.parameters_every
        return every > 0 and step % every == 0


def _may_be_overflow(reading: Reading) -> bool:
    """Whether a bad step may be the search for a loss scale: nothing but its gradients is bad."""
    return reading.num_nonfinite > 0 and not reading.loss_is_nonfinite and not reading.bad_rates


def _as_repaired(found: Reading, used: Reading) -> Reading:
    """Return the reading from before the repair, with the clipping and norm that the optimizer got."""
    return dataclasses.replace(
        found, clip_coefficient=used.clip_coefficient, finite_grad_norm=used.finite_grad_norm, skipped=used.skipped
    )
