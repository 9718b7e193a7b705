"""Guard: one training step made safe and measured. The one place that spells out the order of the stages.

    forward, backward        the user's, or ours from the user's function
    measure                  gradients -> numbers on the device, one pass
    clip                     numbers -> clip coefficient on the device
    judge the step before    (fused optimizers on CUDA: its copy has long arrived)
    step or skip             inside the optimizer's kernel, or by one host read
    send                     one asynchronous copy to the host
    judge this step          (every other optimizer: the numbers are already here)

Judging is detect -> decide -> act -> record (`judgement.py`). On CUDA with fused optimizers it runs when the numbers
have arrived: at once where the device has kept up with the host, else one step late, after forward and backward of the
next step are queued and before that step's optimizer is. So the device never idles, and the weights that produced a
failure are still there. A bad step never touches a weight, whenever it is judged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from steadygrad._version import __version__
from steadygrad.act.accelerated import AcceleratorDrive
from steadygrad.act.actor import Actor
from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.followers import Followers
from steadygrad.act.microbatches import Accumulated, MicrobatchGate
from steadygrad.act.precision import DTYPES
from steadygrad.act.random_state import capture_random, restore_random, unchanged_random
from steadygrad.act.rates import Rates
from steadygrad.act.reflex import Reflex
from steadygrad.act.sanitize import sanitize_gradients
from steadygrad.act.scaler import ScalerDriver
from steadygrad.act.snapshots import Snapshots
from steadygrad.checkpoint.run import RunCheckpoints, tell_unsaved
from steadygrad.checkpoint.sharded import ShardedStore
from steadygrad.checkpoint.signals import EXIT_CODE
from steadygrad.checkpoint.store import CheckpointStore, Save
from steadygrad.clip import build_clipper
from steadygrad.config import GuardConfig
from steadygrad.detect import Detector, standard_rules
from steadygrad.detect.nonfinite import NonfiniteGradient, NonfiniteLoss
from steadygrad.detect.own import split_facts, split_rules
from steadygrad.diagnose.capture import Capture
from steadygrad.diagnose.investigator import Investigator, tell_since_when
from steadygrad.errors import TrainingHalted, UsageError
from steadygrad.facts import Action, Cause, Fact, Finding, Incident, Outcome, Reading, StepRecord, Verdict
from steadygrad.judgement import Judgement
from steadygrad.measure import Measurement, Meter, Ticket, Transfer
from steadygrad.measure.foresee import foresee, refuse_shards
from steadygrad.measure.joining import join_uneven
from steadygrad.measure.lookout import Lookout, Looks
from steadygrad.measure.loss import check_loss, detach, find_loss
from steadygrad.measure.meter import COEFFICIENT, FOUND, LOSS, NUM_NONFINITE
from steadygrad.measure.origin import Origin, OwnGradients
from steadygrad.measure.ranks import Told, find_ranks
from steadygrad.measure.scan import find_nonfinite
from steadygrad.measure.stale import StaleWatch
from steadygrad.measure.subjects import find_subjects
from steadygrad.measure.updates import UpdateMeter
from steadygrad.record import Recorder, RunDirectory, Sink
from steadygrad.record.rank_file import RankFile
from steadygrad.view.progress import describe_step, track
from steadygrad.view.summary import summarise
from steadygrad.view.terminal import show_findings

T = TypeVar("T")


@dataclass(slots=True)
class _Pending:
    """A step whose optimizer is queued and whose numbers are on their way."""

    measurement: Measurement
    ticket: Ticket
    facts: dict[str, Any]
    looks: Looks
    updates: Ticket | None = None


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
    ) -> None:
        """`process_group`: the ranks that decide together; None: those of the model's DDP, or all there are."""
        self.config = config if config is not None else GuardConfig()
        self._subjects = find_subjects(model, optimizer)
        self._off = os.environ.get("STEADYGRAD", "").lower() == "off"
        self._rank_file: RankFile | None = None
        self._is_asked_to_stop = False
        self._ranks = find_ranks(model, self._subjects.named, process_group=process_group)
        if not self._off:
            self._ranks.check_alike(repr(self.config.to_dict()))
            refuse_shards(self._subjects, self.config.clip)
        self._optimizers = self._subjects.optimizers
        self._clipper = None if self.config.clip is None else build_clipper(self.config.clip)
        self._transfer = Transfer(slots=6)
        self._user_scaler, self._scaler = scaler, ScalerDriver(scaler, self._optimizers)
        self._buffers = BufferKeeper(self._subjects.model)
        self._watch_parameters()
        self._rates = Rates(self._optimizers)
        self._followers = Followers(
            scheduler,
            ema,
            model=self._subjects.model,
            interval=self.config.scheduler_interval,
            buffers=self._buffers,
            rates=self._rates,
        )
        threshold = getattr(self.config.clip, "max_norm", None)
        rules, own_rules = standard_rules(self.config.detect, clip_threshold=threshold), None
        if self._ranks.many:
            rules, own_rules = split_rules(rules)
        detector = Detector(rules)
        extras = {"scheduler": scheduler, "scaler": scaler, "ema": ema, "clip": self._clipper, "detect": detector}
        extras |= {"rates": self._rates}
        self._snapshots = Snapshots(
            self._subjects.model,
            self._optimizers,
            extras=_keep_stateful(extras),
            config=self.config.snapshots,
            agree=self._ranks.find_common if self._ranks.many else None,
        )
        self._actor = Actor(self.config.policy, rates=self._rates, snapshots=self._snapshots)
        self._judgement = Judgement(
            self.config,
            detector=detector,
            followers=self._followers,
            actor=self._actor,
            recorder=Recorder([*sinks, *self._open_run(run_dir)]),
            own=None if own_rules is None else Detector(own_rules),
        )
        self._checkpoints = RunCheckpoints(
            run_dir,
            self.config.checkpoint,
            model=self._subjects.model,
            optimizers=self._optimizers,
            extras={"scheduler": scheduler, "scaler": scaler, "ema": ema},
            clip=None if self.config.clip is None else self.config.clip.kind,
            ranks=self._ranks,
        )
        self._investigator = Investigator(
            dataclasses.replace(self.config.diagnose, enabled=self.config.diagnose.enabled and not self._off),
            model=self._subjects.model,
            optimizers=self._optimizers,
            run_dir=run_dir,
        )
        self._looks = Looks()
        self._random: dict[str, Any] | None = None
        weakref.finalize(self, self._judgement.close)  # a guard that nobody closed still leaves a whole record
        weakref.finalize(self, self._checkpoints.close)
        self._batches = Accumulated()
        self._pending: _Pending | None = None
        self._next_step = self._epoch = self._num_skipped_batches = 0
        self._validation_loss: float | None = None
        self._validated: tuple[int, float] | None = None
        self._drive: AcceleratorDrive | None = None
        self._is_driven = self._is_watching = False
        self._closed = False
        if not self._off:
            show_findings()
            for finding in foresee(self._subjects):
                self._judgement.note(finding)
            self._reflex.hint()

    # --- the step ---------------------------------------------------------------------------------------------------

    def step(self, subject: Callable[..., Any] | Tensor | None = None, /, *args: Any, **kwargs: Any) -> Any:
        """One optimizer step: from a function (replayable), from a loss, or from gradients that are already there.

        Returns what the function returned, detached; the detached loss; or None.
        """
        self._check_open()
        self._checkpoints.listen()
        result = None if subject is None else self.backward(subject, *args, **kwargs)
        if self._drive is not None and self._drive.is_accumulating:
            return result
        owns_backward = self._batches.num > 0 and not self._is_driven
        try:
            if self._off:
                self._optimize_plainly()
            elif self._actor.num_to_refuse:
                self._refuse()
            else:
                self._optimize()
        finally:
            self._batches, self._looks, self._is_driven = Accumulated(), Looks(), False
            self._investigator.take()
            self._scaler.end_step()
            if owns_backward:
                self._zero_grad()
            elif not self._off:
                self._stale.after_step()
        self._judge_if_arrived()
        self._save_if_due()
        return result

    def backward(self, subject: Callable[..., Any] | Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """Forward (when a function is given) and backward of one microbatch; `step()` comes after the last one."""
        self._check_open()
        self._ranks.asks_to_stop = self._checkpoints.signals.received is not None
        if self._batches.num == 0 and not self._off:
            self._begin_step(has_forward=callable(subject) and not isinstance(subject, Tensor))
        result = self._forward(subject, args, kwargs)
        if self._actor.num_to_refuse:
            self._batches.num += 1
            return detach(result)
        loss = find_loss(result) if result is not subject else check_loss(result)
        loss = loss if self._drive is None else self._drive.weigh(loss)
        self._batches.num += 1
        if not self._off:
            self._lookout.look_at_graph(self._next_step, self._looks, loss)
            self._ranks.start([loss] if self.config.drop_bad_microbatches else [*self._batches.losses, loss])
        if self.config.drop_bad_microbatches and not self._off:
            self._ranks.check_synchronised()
            dropped = self._gate.backward(loss, self._batches)
            if dropped is not None:
                self._tell_dropped(*dropped)
        else:
            self._scaler.scale(loss).backward()
            self._batches.losses.append(loss.detach())
            self._ranks.finish_backward(self._batches.losses)
        return detach(result)

    def _forward(self, subject: Callable[..., Any] | Tensor, args: Any, kwargs: Any) -> Any:
        """What the user's function returns, or the loss that was given."""
        if isinstance(subject, Tensor) or not callable(subject):
            if args or kwargs:
                raise UsageError(
                    "arguments were given beside a loss. Give a function and its arguments, or a loss alone."
                )
            return subject
        with self._autocast():
            if self._off:
                return subject(*args, **kwargs)
            if self._actor.num_to_refuse:  # a result for the caller, and no trace of it
                with torch.no_grad(), unchanged_random(self._devices):
                    return subject(*args, **kwargs)
            with self._watch(args, kwargs), self._investigator.watch(subject, args, kwargs):
                return subject(*args, **kwargs)

    @contextlib.contextmanager
    def _watch(self, args: Any, kwargs: Any) -> Iterator[None]:
        if self._is_watching:  # a framework's step inside of which the model says that it is called
            yield
            return
        self._is_watching = True
        try:
            with self._lookout.around_forward(self._next_step, self._looks, args, kwargs):
                yield
        finally:
            self._is_watching = False

    def _begin_step(self, *, has_forward: bool) -> None:
        """Before the first forward of a step, as far as it is ours: what must be known of the state before it."""
        if has_forward:
            self._buffers.refresh()
        if self._next_step == 0 and self._snapshots.due(0):
            self._snapshots.take(0)
        self._lookout.begin()
        # Judged late, a snapshot of this moment is taken when the generators have moved on.
        self._random = capture_random(self._devices) if self._pending and self._snapshots.due(self._next_step) else None

    def _optimize(self) -> None:
        """Measure, then step or skip: on the device where the optimizers allow it, by one host read elsewhere."""
        batches = self._batches
        self._looks.captures = self._investigator.take()
        self._notice_new_parameters()
        facts: dict[str, Any] = {
            "num_microbatches": max(1, batches.num),
            "num_dropped_microbatches": batches.num_dropped,
        }
        facts["stale"] = self._stale.take()
        self._looks.own_finite = self._own_gradients.take()
        if batches.all_dropped:
            self._skip_all_dropped(facts)
            return
        if batches.num_dropped:
            self._gate.average_the_kept(batches)
        scale = self._scaler.factor
        measurement = self._meter.measure(batches.loss, scale=scale, told_scale=self._scaler.now)
        if measurement is None:
            raise UsageError(
                "no parameter of the optimizer has a gradient. Run backward before guard.step(), and check that the "
                "loss depends on the model's parameters."
            )
        facts["step"] = self._take_step_number()
        if self._reflex.ready_for_device and self.config.on_nonfinite is not Action.SANITIZE:
            self._step_on_device(measurement, scale, facts)
        else:
            self._step_on_host(measurement, scale, facts)

    def _step_on_device(self, m: Measurement, scale: Tensor | None, facts: dict[str, Any]) -> None:
        """Fused optimizers on CUDA: nothing here waits for work of this step."""
        carried = self._reflex.clip(m, scale)
        complete = self._transfer.mark(m.packed.device)
        self._judge_pending()  # the step before; its scheduler moves the learning rate that this step uses
        if self._actor.num_to_refuse:  # rolled back: these gradients belong to weights that are gone
            self._refuse(step=facts["step"])
            return
        facts["learning_rates"] = self._prepare_optimizers()
        measure_updates = self._updates_are_due(facts["step"])
        if measure_updates:
            self._updates.before()
        self._reflex.step_on_device(m, carried)
        self._pending = _Pending(m, self._transfer.send(m.packed, after=complete), facts, self._looks)
        self._lookout.after_optimizer(facts["step"], self._looks)
        if self._scaler.now is not None:
            overflowed = (m.packed[NUM_NONFINITE] > 0) | self._batches.overflowed
            self._scaler.update(bad_gradient=overflowed, bad_loss=~m.packed[LOSS].isfinite())
        self._buffers.select(m.found)
        if measure_updates:
            self._pending.updates = self._transfer.send(self._updates.after())

    def _step_on_host(self, m: Measurement, scale: Tensor | None, facts: dict[str, Any]) -> None:
        """Every other optimizer: one host read, then the host decides."""
        self._judge_pending()
        facts["learning_rates"] = self._prepare_optimizers()
        repaired = self._sanitize_if_bad(m, scale) if self.config.on_nonfinite is Action.SANITIZE else None
        used = m if repaired is None else repaired
        carried = self._reflex.clip(used, scale)
        numbers = self._transfer.send(used.packed).wait()
        facts["spoilt_buffers"] = {} if numbers[FOUND] > 0 else self._buffers.find_spoilt()
        bad = numbers[FOUND] > 0 or bool(facts["spoilt_buffers"])
        reading = used.read(numbers, skipped=bad, **facts)
        told = self._meter.read_told(used, numbers)
        if repaired is not None:  # tell what was found, and what was made of it
            numbers_found = self._transfer.send(m.packed).wait()
            told = self._meter.read_told(m, numbers_found)
            reading = _as_repaired(m.read(numbers_found, skipped=False, **facts), reading)
        measure_updates = not bad and self._updates_are_due(reading.step)
        if measure_updates:
            self._updates.before()
        if bad:
            self._reflex.skip_on_host()
            self._buffers.restore()
        else:
            self._reflex.step_on_host(used, numbers[COEFFICIENT] / (1.0 if carried is None else float(carried)))
            if repaired is None:
                self._buffers.save()
            else:  # gradients can be repaired; statistics that saw a bad batch cannot
                self._buffers.restore()
            self._lookout.after_optimizer(reading.step, self._looks)
        if self._scaler.now is not None and not reading.loss_is_nonfinite:
            overflowed = (m.packed[NUM_NONFINITE] > 0) | self._batches.overflowed
            self._scaler.update(bad_gradient=overflowed, bad_loss=None)
        if measure_updates:
            reading = self._with_updates(reading, self._transfer.send(self._updates.after()))
        self._judge(reading, self._looks, told)

    def _prepare_optimizers(self) -> tuple[float, ...]:
        """The last moment before a weight can change; the learning rates that it will change with."""
        self._snapshots.before_optimizer()
        self._rates.before_step()
        return self._learning_rates()

    def _refuse(self, step: int | None = None) -> None:
        """A step of the window that a rollback leaves out: nothing of it stays."""
        self._buffers.restore()
        self._reflex.skip_on_host()
        self._actor.refuse_one()
        self._judgement.refuse(self._take_step_number() if step is None else step, self._learning_rates())
        if self._batches.num == 0:
            self._zero_grad()

    def _sanitize_if_bad(self, m: Measurement, scale: Tensor | None) -> Measurement | None:
        """The measurement of the repaired gradients; None when there was nothing to repair."""
        if not m.found.item():
            return None
        sanitize_gradients(m.gradients, self.config.sanitize_value)
        return self._meter.measure(None, scale=scale, told_scale=self._scaler.now)

    def _skip_all_dropped(self, facts: dict[str, Any]) -> None:
        """Every microbatch was bad: the step is skipped, and told with the last one's numbers."""
        assert self._batches.worst is not None
        m, numbers = self._batches.worst
        self._judge_pending()
        self._reflex.skip_on_host()
        if self._batches.overflowed:
            self._scaler.update(bad_gradient=torch.ones(()), bad_loss=None)
        facts |= {"step": self._take_step_number(), "learning_rates": self._learning_rates()}
        told = self._meter.read_told(m, numbers)
        self._judge(m.read(numbers, skipped=True, **facts), self._looks, told)

    def _tell_dropped(self, m: Measurement, numbers: Sequence[float]) -> None:
        reading = m.read(numbers, step=self._next_step, skipped=True, learning_rates=())
        for finding in (*NonfiniteLoss().observe(reading), *NonfiniteGradient().observe(reading)):
            self._judgement.conclude(
                dataclasses.replace(finding, message=f"microbatch {self._batches.num - 1}: {finding.message}"),
                Verdict(action=Action.SKIP, reason="drop_bad_microbatches is on"),
                Outcome(action=Action.SKIP, message="the microbatch was left out"),
            )

    def _optimize_plainly(self) -> None:
        """STEADYGRAD=off: the plain loop."""
        for optimizer in self._optimizers:
            if self._user_scaler is None:
                optimizer.step()
            else:
                self._user_scaler.step(optimizer)
        if self._user_scaler is not None:
            self._user_scaler.update()
        self._take_step_number()
        self._followers.after_applied()

    # --- steps that a framework drives ------------------------------------------------------------------------------

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
        guard._drive = drive
        return guard

    @contextlib.contextmanager
    def watch_forward(self, replay: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Around a forward that a framework runs; the arguments are its batch. `watch_backward`, `step()` come next.

        `replay(*args, **kwargs)` runs the same forward again and leaves no other trace; None: the model's call is all
        that a diagnosis can replay.
        """
        self._check_open()
        if self._off or self._is_watching:
            yield
            return
        if self._batches.num == 0:
            self._begin_step(has_forward=True)
        note = contextlib.nullcontext() if replay is None else self._investigator.watch(replay, args, kwargs)
        with self._watch(args, kwargs), note:
            yield

    def watch_backward(self, loss: Tensor) -> None:
        """A framework is about to run backward from `loss`. It clears the gradients itself."""
        self._check_open()
        self._is_driven = True
        self._batches.num += 1
        if self._off or self._actor.num_to_refuse:
            return
        self._lookout.look_at_graph(self._next_step, self._looks, loss)
        self._batches.losses.append(loss.detach())
        self._ranks.start(self._batches.losses)

    @property
    def num_microbatches(self) -> int:
        """Backward calls since the last step."""
        return self._batches.num

    @property
    def num_steps(self) -> int:
        """Steps tried so far, which is the number of the next one."""
        return self._next_step

    @property
    def is_judged(self) -> bool:
        """Whether every step has been judged; with fused optimizers on CUDA the last one may be on its way."""
        return self._pending is None

    def note(self, finding: Finding) -> None:
        """Write down what somebody else has found. Nothing is done about it."""
        if not self._off:
            self._judgement.note(finding)

    # --- judgement --------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until the host has judged every step. On many ranks call it on each, as all that steers training."""
        self._judge_pending()

    def _catch_up(self) -> None:
        """Judge what is pending for somebody who asks; on many ranks one may ask alone, and gets what is known."""
        if not self._ranks.many:
            self._judge_pending()

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop in which ranks may run out of data at different steps, in the place of `ddp.join()`.

        A rank without data keeps the others company until all are done, and then takes over their weights. Only for
        DistributedDataParallel. While it is open nothing is rolled back.
        """
        with join_uneven(self._ranks):
            yield

    def _judge_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        numbers = pending.ticket.wait()
        reading = pending.measurement.read(numbers, skipped=numbers[FOUND] > 0, **pending.facts)
        if pending.updates is not None:
            reading = self._with_updates(reading, pending.updates)
        self._judge(reading, pending.looks, self._meter.read_told(pending.measurement, numbers))

    def _judge_if_arrived(self) -> None:
        """Judge the step that was just queued if its numbers are here: the optimizer runs on the device meanwhile.

        On many ranks never: they must judge at the same point of their program, and numbers arrive when they do.
        """
        pending = None if self._ranks.many else self._pending
        if pending is None or pending.updates is not None or pending.looks.under_way:
            return
        if pending.ticket.ready:
            self._random = None  # nothing has been drawn since
            self._judge_pending()

    def _judge(self, reading: Reading, looks: Looks, told: Told) -> None:
        """Hand a step to judgement, then see to what follows from it: snapshots, or a rollback."""
        self._reflex.expects_clipping = reading.clipped
        if looks.rms is not None and not reading.skipped:
            reading = dataclasses.replace(reading, adam_rms=looks.rms.read())
        with self._buffers.as_saved() if reading.is_nonfinite else contextlib.nullcontext():
            facts = self._lookout.read(reading, looks)  # a late judgement comes after the next forward
        find_cause = functools.partial(self._find_cause, looks.captures)
        if self._ranks.many:
            facts, origin = self._consult_ranks(reading, facts, looks, told)
        else:
            origin = None
        healthy = self._judgement.judge(reading, facts, find_cause=find_cause, origin=origin)
        self._checkpoints.note_step(reading.step, healthy=healthy)
        if not self._follow_rollback() and healthy and self._snapshots.due(reading.step + 1):
            self._take_snapshot(reading.step + 1)

    def _consult_ranks(
        self, reading: Reading, facts: list[Fact], looks: Looks, told: Told
    ) -> tuple[list[Fact], Origin]:
        """Tell what this rank alone has seen, and learn where a bad step began. The facts that are everybody's."""
        self._is_asked_to_stop |= told.asks_to_stop
        if self._rank_file is not None and reading.step % self.config.record.steps_every == 0:
            self._rank_file.write_own(reading.step, told.own_loss)
        facts, own_facts = split_facts(facts)
        signs = [finding.message for finding in self._judgement.tell_own(reading, own_facts)]
        return facts, self._own_gradients.find_origin(reading, told, looks.own_finite, signs)

    def _find_cause(self, captures: Sequence[Capture], reading: Reading, findings: Sequence[Finding]) -> Cause | None:
        """Replay the step, from the buffers that it began with."""
        with self._buffers.as_saved():
            cause = self._investigator.investigate(captures, reading, findings)
        given = self._lookout.given_nonfinite
        return cause if cause is None or given is None else tell_since_when(cause, given)

    def _follow_rollback(self) -> bool:
        """After a rollback, what was remembered of weights and buffers is no more."""
        rolled_back = self._actor.take_rolled_back()
        if rolled_back:
            self._buffers.refresh(everything=True)
            self._lookout.forget()
        return rolled_back

    def _take_snapshot(self, step: int) -> None:
        """The state before `step`; judged late, that step's forward has already moved buffers and generators."""
        with self._buffers.as_saved(), unchanged_random(self._devices):
            if self._random is not None:
                restore_random(self._random)
            self._snapshots.take(step)

    def _with_updates(self, reading: Reading, ticket: Ticket) -> Reading:
        numbers = ticket.wait()
        norms, ratios = self._updates.read(numbers)
        norm = self._updates.read_norm(numbers)
        return dataclasses.replace(reading, parameter_norms=norms, update_ratios=ratios, update_norm=norm)

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

    # --- around the step --------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over `loader` with a progress bar on a terminal; leaves out the window that a rollback asks for."""
        total = len(loader) if isinstance(loader, Sized) else None
        for batch in track(self._checkpoints.iterate(loader), describe=self._describe, total=total):
            if self._actor.num_to_refuse:
                self._actor.refuse_one()
                self._num_skipped_batches += 1
                continue
            yield batch

    def validate(self, loss: float | Tensor) -> None:
        """Tell the validation loss; a non-finite one is a finding, and steers neither scheduler nor early stopping.

        On many ranks call it on each: their mean is what counts.
        """
        self._check_open()
        self.flush()
        value = self._ranks.take_mean(float(loss))
        if math.isfinite(value):
            self._validation_loss = value
            self._validated = (self._next_step, value)
            self._checkpoints.note_validation(self._next_step, value)
        if not self._off:
            self._judgement.validate(max(0, self._next_step - 1), self._epoch, value)
            self._follow_rollback()

    def end_epoch(self) -> None:
        """The epoch is over: a scheduler by epoch moves."""
        self._check_open()
        self.flush()
        if not self._off:
            self._judgement.end_epoch(max(0, self._next_step - 1), self._epoch)
            self._follow_rollback()
        self._epoch += 1
        self._checkpoints.end_epoch()
        self._followers.after_epoch(self._validation_loss)

    @property
    def epoch(self) -> int:
        """Epochs that have ended: `for epoch in range(guard.epoch, num_epochs)` goes on after a resume."""
        return self._epoch

    @property
    def should_stop(self) -> bool:
        """Whether early stopping (`Policy.early_stopping_patience`) has seen enough."""
        return self._judgement.stopping.should_stop

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and value of the best validation loss so far."""
        stopping = self._judgement.stopping
        return None if stopping.best is None or stopping.best_step is None else (stopping.best_step, stopping.best)

    def summary(self) -> str:
        """The run so far on one screen of text."""
        self._catch_up()
        rate = f"rate       learning rate {self._learning_rates()[0]:.4g}" + (
            f", {self._rates.factor:g} of its schedule" if self._rates.factor != 1.0 else ""
        )
        snapshots = f"snapshots  {self._snapshots.describe()}"
        return summarise(
            self._judgement.tally,
            self.incidents,
            max_norm=getattr(self.config.clip, "max_norm", None),
            extra=[rate, snapshots],
        )

    def health(self) -> dict[str, bool]:
        """Whether model (buffers too), gradients, losses and parameters are finite now; reads the weights once."""
        self._catch_up()
        last = self._judgement.last_reading
        parameters = not find_nonfinite(self._subjects.model.named_parameters())
        buffers = set(find_nonfinite(self._subjects.model.named_buffers()))
        parts = {
            "model_healthy": parameters and not buffers - self._lookout.born_nonfinite,
            "gradients_healthy": last is None or last.num_nonfinite == 0,
            "losses_healthy": last is None or not last.loss_is_nonfinite,
            "parameters_healthy": parameters,
        }
        return {**parts, "overall_healthy": all(parts.values())}

    def stats(self) -> dict[str, float | int | None]:
        """Counts and current numbers."""
        self._catch_up()
        last, tally = self._judgement.last_reading, self._judgement.tally
        return {
            "current_learning_rate": self._learning_rates()[0],
            "current_gradient_norm": None if last is None else last.grad_norm,
            "current_loss": None if last is None else last.loss,
            "loss_scale": None if last is None else last.loss_scale,
            "mean_gradient_norm": tally.norm_mean,
            "max_gradient_norm": tally.norm_max,
            "num_steps": tally.num_steps,
            "num_skipped": tally.num_skipped,
            "num_clipped": tally.num_clipped,
            "num_dropped_microbatches": tally.num_dropped_microbatches,
            "num_incidents": len(self.incidents),
            "num_rollbacks": tally.actions[Action.ROLLBACK.value],
            "num_skipped_batches": self._num_skipped_batches,
            "learning_rate_factor": self._rates.factor,
            "weight_decay_factor": self._rates.weight_decay_factor,
            "epoch": self._epoch,
        }

    def state_dict(self) -> dict[str, Any]:
        """What the guard itself remembers: step, detectors, clip state, totals. No weights, no optimizer state."""
        self.flush()
        return {
            "version": 1,
            "step": self._next_step,
            "epoch": self._epoch,
            "validation_loss": self._validation_loss,
            "clip": {} if self._clipper is None else self._clipper.state_dict(),
            "judgement": self._judgement.state_dict(),
            "actor": self._actor.state_dict(),
            "num_since_start": self._lookout.num_since,
            "num_skipped_batches": self._num_skipped_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict()` was taken. Load model and optimizer first: the buffers are copied from now."""
        self.flush()
        if state.get("version") != 1:
            raise UsageError(f"this guard state has version {state.get('version')!r}, only 1 is known.")
        self._next_step, self._epoch = int(state["step"]), int(state["epoch"])
        self._validation_loss = state["validation_loss"]
        if self._clipper is not None:
            self._clipper.load_state_dict(state["clip"])
        self._judgement.load_state_dict(state["judgement"])
        self._actor.load_state_dict(state["actor"])
        self._lookout.num_since = int(state["num_since_start"])
        self._num_skipped_batches = int(state["num_skipped_batches"])
        self._buffers.refresh()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self) -> Save | None:
        """Save the whole training, to be resumed bit for bit; returns when it may go on, the disk is written behind it.

        None when the state cannot be saved, because it is not finite for example: that is told as an incident. So is a
        disk that fails.
        """
        self._check_open()
        self.flush()
        self._judgement.flush_record()
        step, (validated, loss) = self._next_step, self._validated or (-1, 0.0)
        metrics = {self.config.checkpoint.best_by: loss} if validated == step else {}
        saved = self._checkpoints.save(
            step, self.state_dict(), accumulated=self._batches, buffers=self._buffers, metrics=metrics
        )
        self._tell_unsaved()
        return saved

    def _tell_unsaved(self) -> None:
        for failure in self._checkpoints.take_failures():
            self._judgement.note(tell_unsaved(self._next_step, failure))

    def resume(self, path: str | Path | None = None, *, strict: bool = True) -> int | None:
        """Go on from the newest good checkpoint of the run directory, or from `path`; the step that comes next.

        None when there is no checkpoint yet. Settings of the optimizer that are given otherwise now win, and are told.
        `strict=False` loads what fits a model that has changed.
        """
        self._check_open()
        self.flush()
        resumed = self._checkpoints.resume(path, strict=strict, buffers=self._buffers)
        if resumed is None:
            return None
        self._lookout.forget()
        self.load_state_dict(resumed.guard)
        self._batches = resumed.accumulated
        if self._batches.num:  # inside a step: its beginning is over
            self._lookout.begin()
        self._judgement.note(resumed.tell())
        self._checkpoints.finish_resume()
        return resumed.step

    @property
    def checkpoints(self) -> CheckpointStore | ShardedStore:
        """The checkpoints of the run directory: `list()`, `best`, `load()`."""
        return self._checkpoints.store

    def _save_if_due(self) -> None:
        """What comes by itself: a save every so many steps, and after a signal a last one and the end."""
        received = self._checkpoints.signals.received
        if self._ranks.many:  # a signal reaches ranks at different steps: all stop after the step that told them all
            received = (received or signal.SIGTERM) if self._is_asked_to_stop else None
        if received is not None:
            saved = self.save()
            where = None if saved is None else saved.wait()
            self.close()
            raise SystemExit(EXIT_CODE if where is not None else 128 + received)
        if self._checkpoints.is_due(self._next_step) and not self._ranks.is_joining:
            self.save()
        self._tell_unsaved()

    def close(self) -> None:
        """Judge what is pending and close the record. A closed guard refuses to step."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            if self._drive is not None:
                self._drive.detach()
            self._rates.close()
            self._own_gradients.close()
            self._investigator.close()
            self._checkpoints.close()
            self._tell_unsaved()
            self._judgement.close()
            if self._rank_file is not None:
                self._rank_file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
            return
        if self._ranks.many:
            self._pending = None  # the other ranks would not answer one that is on its way out
        with contextlib.suppress(TrainingHalted):  # the error on its way out is the one to show
            self.close()

    # --- small things -----------------------------------------------------------------------------------------------

    def _watch_parameters(self) -> None:
        """Make what depends on the list of parameters."""
        named = self._subjects.named
        constant_norm = None if self._clipper is None else self._clipper.constant_norm
        self._meter = Meter(named, self.config.measure.implementation, max_norm=constant_norm, ranks=self._ranks)
        self._ranks.watch(named)
        self._own_gradients = OwnGradients(self._ranks, named)
        self._updates = UpdateMeter(named, ranks=self._ranks)
        self._stale = StaleWatch(named)
        self._reflex = Reflex(self._optimizers, self._clipper)
        self._gate = MicrobatchGate(
            [p for _, p in named],
            meter=self._meter,
            transfer=self._transfer,
            scaler=self._scaler,
            buffers=self._buffers,
        )
        self._lookout = Lookout(self._subjects, self.config.measure, ranks=self._ranks)
        self._devices = sorted({p.device for _, p in named}, key=str)
        self._signature = _sign(self._optimizers)

    def _notice_new_parameters(self) -> None:
        """`add_param_group`, the usual way to unfreeze: the new ones are guarded from this step on."""
        if _sign(self._optimizers) == self._signature:
            return
        self._judge_pending()
        self._subjects = find_subjects(self._subjects.model, self._optimizers)
        self._own_gradients.close()
        self._watch_parameters()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this guard is closed. Make a new one to go on training.")

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _take_step_number(self) -> int:
        self._next_step += 1
        return self._next_step - 1

    def _learning_rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups)

    def _updates_are_due(self, step: int) -> bool:
        every = self.config.measure.parameters_every
        return every > 0 and step % every == 0

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.autocast is None:
            return contextlib.nullcontext()
        device = self._subjects.named[0][1].device.type
        dtype = DTYPES[self.config.autocast]
        return torch.autocast(device, dtype=dtype, enabled=dtype is not torch.float32)

    def _describe(self) -> str:
        return describe_step(self.last, self._judgement.tally.num_skipped)

    def _open_run(self, run_dir: str | Path | None) -> list[Sink]:
        if run_dir is None or self._off:
            return []
        if self._ranks.many:
            self._rank_file = RankFile(run_dir, self._ranks.rank, self._ranks.num)
        if not self._ranks.is_first:
            return [] if self._rank_file is None else [self._rank_file]
        return [
            RunDirectory(
                run_dir,
                config=self.config.to_dict(),
                parameters=[name for name, _ in self._subjects.named],
                versions={"steadygrad": __version__, "torch": torch.__version__},
            )
        ]


def _sign(optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[int, int, int]]:
    """What changes when parameters are added or exchanged, looked at in microseconds: sizes and ends of the groups."""
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    return [(len(params), id(params[0]), id(params[-1])) if params else (0, 0, 0) for params in groups]


def _keep_stateful(things: Mapping[str, Any]) -> dict[str, Any]:
    """Those that can be saved and put back; an EMA of one's own kind may have no state."""
    return {name: thing for name, thing in things.items() if hasattr(thing, "load_state_dict")}


def _as_repaired(found: Reading, used: Reading) -> Reading:
    """What was measured before the repair, with the clipping and the norm of what the optimizer got."""
    return dataclasses.replace(
        found, clip_coefficient=used.clip_coefficient, finite_grad_norm=used.finite_grad_norm, skipped=used.skipped
    )
