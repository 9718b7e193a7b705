"""Stepper: gradients that are there -> the optimizer's step, or none.

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
from collections.abc import Sequence

import torch
from torch import Tensor

from steadygrad.act.sanitize import sanitize_gradients
from steadygrad.clip.outliers import OutlierClipper
from steadygrad.detect.nonfinite import NonfiniteGradient, NonfiniteLoss
from steadygrad.errors import UsageError
from steadygrad.facts import Action, Outcome, Reading, Verdict
from steadygrad.guard.judging import Judging, Pending
from steadygrad.guard.parts import Moment, Parts
from steadygrad.judgement import Event
from steadygrad.measure import Measurement
from steadygrad.measure.logged import send_logged
from steadygrad.measure.meter import COEFFICIENT, FOUND, LOSS, NUM_NONFINITE, StepContext


class Stepper:
    """Makes the step of the present moment."""

    def __init__(self, parts: Parts, moment: Moment, judging: Judging) -> None:
        self._parts, self._moment, self._judging = parts, moment, judging

    def step(self) -> None:
        """Measure, then step or skip: on the device where the optimizers allow it, by one host read elsewhere."""
        parts, batches, looks = self._parts, self._moment.batches, self._moment.looks
        looks.captures = parts.investigator.take()
        if parts.has_new_parameters:
            self._judging.judge_pending()
            parts.watch_new_parameters()
        context = StepContext(
            step=self._moment.next_step,
            num_microbatches=max(1, batches.num),
            num_dropped_microbatches=batches.num_dropped,
            stale=parts.uncleared_gradients.take(),
        )
        looks.own_finite = parts.own_gradients.take()
        if self._moment.logged:
            looks.logged = send_logged(self._moment.logged, parts.transfer)
        if batches.all_dropped:
            self._skip_all_dropped(context)
            return
        if batches.num_dropped:
            parts.gate.average_the_kept(batches)
        if isinstance(parts.clipper, OutlierClipper):
            parts.clipper.prepare(self._moment.next_step)
        if parts.clipper is not None:
            parts.meter.max_norm = parts.clipper.constant_norm  # a policy may have lowered it
        scale = parts.scaler.factor
        measurement = parts.meter.measure(batches.loss, scale=scale, told_scale=parts.scaler.now)
        if measurement is None:
            raise UsageError(
                "no parameter of the optimizer has a gradient. Run backward before guard.step(), and check that the "
                "loss depends on the model's parameters."
            )
        self._moment.take_step_number()
        if parts.reflex.ready_for_device and parts.config.on_nonfinite is not Action.SANITIZE:
            self._step_on_device(measurement, scale, context)
        else:
            self._step_on_host(measurement, scale, context)

    def _step_on_device(self, m: Measurement, scale: Tensor | None, context: StepContext) -> None:
        """Fused optimizers on CUDA: nothing here waits for work of this step."""
        parts, looks = self._parts, self._moment.looks
        carried = parts.reflex.clip(m, scale)
        complete = parts.transfer.mark(m.packed.device)
        self._judging.judge_pending()  # the step before; its scheduler moves the learning rate that this step uses
        if parts.actor.num_to_refuse:  # rolled back: these gradients belong to weights that are gone
            self.refuse(step=context.step)
            return
        context = dataclasses.replace(context, learning_rates=self._prepare_optimizers())
        measure_updates = self._updates_are_due(context.step)
        if measure_updates:
            parts.updates.before()
        with parts.rates.held():
            parts.reflex.step_on_device(m, carried)
        parts.edits.after_optimizer()
        self._judging.pending = pending = Pending(m, parts.transfer.send(m.packed, after=complete), context, looks)
        parts.periodic_scans.after_optimizer(context.step, looks)
        if parts.scaler.now is not None:
            overflowed = (m.packed[NUM_NONFINITE] > 0) | self._moment.batches.overflowed
            parts.scaler.update(bad_gradient=overflowed, bad_loss=~m.packed[LOSS].isfinite())
        parts.buffers.select(m.found)
        if measure_updates:
            pending.updates = parts.transfer.send(parts.updates.after())

    def _step_on_host(self, m: Measurement, scale: Tensor | None, context: StepContext) -> None:
        """Every other optimizer: one host read, then the host decides."""
        parts, looks = self._parts, self._moment.looks
        self._judging.judge_pending()
        context = dataclasses.replace(context, learning_rates=self._prepare_optimizers())
        repaired = self._sanitize_if_bad(m, scale) if parts.config.on_nonfinite is Action.SANITIZE else None
        used = m if repaired is None else repaired
        carried = parts.reflex.clip(used, scale)
        numbers = parts.transfer.send(used.packed).wait()
        spoilt = {} if numbers[FOUND] > 0 else parts.buffers.find_spoilt()
        bad = numbers[FOUND] > 0 or bool(spoilt)
        reading = used.read(numbers, context, skipped=bad, spoilt_buffers=spoilt)
        told = parts.meter.read_told(used, numbers)
        if repaired is not None:  # tell what was found, and what was made of it
            numbers_found = parts.transfer.send(m.packed).wait()
            told = parts.meter.read_told(m, numbers_found)
            reading = _as_repaired(m.read(numbers_found, context, skipped=False, spoilt_buffers=spoilt), reading)
        measure_updates = not bad and self._updates_are_due(reading.step)
        if measure_updates:
            parts.updates.before()
        if bad:
            parts.reflex.skip_on_host()
            parts.buffers.restore()
        else:
            with parts.rates.held():
                parts.reflex.step_on_host(used, numbers[COEFFICIENT] / (1.0 if carried is None else float(carried)))
            parts.edits.after_optimizer()
            if repaired is None:
                parts.buffers.accept()
            else:  # gradients can be repaired; statistics that saw a bad batch cannot
                parts.buffers.restore()
            parts.periodic_scans.after_optimizer(reading.step, looks)
        if parts.scaler.now is not None and not reading.loss_is_nonfinite:
            overflowed = (m.packed[NUM_NONFINITE] > 0) | self._moment.batches.overflowed
            parts.scaler.update(bad_gradient=overflowed, bad_loss=None)
        if measure_updates:
            reading = self._judging.add_updates(reading, parts.transfer.send(parts.updates.after()))
        self._judging.judge(reading, looks, told)

    def step_plainly(self) -> None:
        """STEADYGRAD=off: the plain loop."""
        scaler = self._parts.user_scaler
        for optimizer in self._parts.optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        self._moment.take_step_number()
        self._parts.schedule_and_ema.after_applied()

    def refuse(self, step: int | None = None) -> None:
        """A step of the window that a rollback leaves out: nothing of it stays."""
        parts = self._parts
        parts.buffers.restore()
        parts.reflex.skip_on_host()
        parts.actor.refuse_one()
        parts.judgement.refuse(self._moment.take_step_number() if step is None else step, parts.learning_rates())
        if self._moment.batches.num == 0:
            parts.zero_grad()

    def tell_dropped(self, m: Measurement, numbers: Sequence[float]) -> None:
        """A microbatch was bad, and was left out."""
        reading = m.read(numbers, StepContext(step=self._moment.next_step), skipped=True)
        verdict = Verdict(action=Action.SKIP, reason="drop_bad_microbatches is on")
        outcome = Outcome(action=Action.SKIP, message="the microbatch was left out")
        where = f"microbatch {self._moment.batches.num - 1}"
        found = (*NonfiniteLoss().observe(reading), *NonfiniteGradient().observe(reading))
        named = [dataclasses.replace(one, message=f"{where}: {one.message}") for one in found]
        self._parts.judgement.conclude([Event(finding, verdict, outcome) for finding in named])

    def _skip_all_dropped(self, context: StepContext) -> None:
        """Every microbatch was bad: the step is skipped, and told with the last one's numbers."""
        parts, batches = self._parts, self._moment.batches
        assert batches.worst is not None
        m, numbers = batches.worst
        self._judging.judge_pending()
        parts.reflex.skip_on_host()
        if batches.overflowed:
            parts.scaler.update(bad_gradient=torch.ones(()), bad_loss=None)
        self._moment.take_step_number()
        context = dataclasses.replace(context, learning_rates=parts.learning_rates())
        told = parts.meter.read_told(m, numbers)
        self._judging.judge(m.read(numbers, context, skipped=True), self._moment.looks, told)

    def _sanitize_if_bad(self, m: Measurement, scale: Tensor | None) -> Measurement | None:
        """The measurement of the repaired gradients; None when there was nothing to repair."""
        if not m.found.item():
            return None
        sanitize_gradients(m.gradients, self._parts.config.sanitize_value)
        return self._parts.meter.measure(None, scale=scale, told_scale=self._parts.scaler.now)

    def _prepare_optimizers(self) -> tuple[float, ...]:
        """The last moment before a weight can change; the learning rates that it will change with."""
        self._parts.snapshots.before_optimizer()
        self._parts.edits.before_optimizer(self._moment.next_step - 1)
        return self._parts.learning_rates()

    def _updates_are_due(self, step: int) -> bool:
        every = self._parts.config.measure.parameters_every
        return every > 0 and step % every == 0


def _as_repaired(found: Reading, used: Reading) -> Reading:
    """What was measured before the repair, with the clipping and the norm of what the optimizer got."""
    return dataclasses.replace(
        found, clip_coefficient=used.clip_coefficient, finite_grad_norm=used.finite_grad_norm, skipped=used.skipped
    )
