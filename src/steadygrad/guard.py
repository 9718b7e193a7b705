"""Guard: one training step made safe and measured. The one place that spells out the order of the stages.

    forward, backward        the user's, or ours from the user's function
    measure                  gradients -> numbers on the device, one pass
    clip                     numbers -> clip coefficient on the device
    send                     one asynchronous copy to the host
    judge the step before    (fused optimizers on CUDA: its copy has long arrived)
    step or skip             inside the optimizer's kernel, or by one host read
    judge this step          (every other optimizer: the numbers are already here)

Judging is detect -> decide -> act -> record. On CUDA with fused optimizers it runs one step late, after forward and
backward of the next step are queued and before that step's optimizer is: the device never idles, and the weights that
produced a failure are still there. A bad step never touches a weight, whenever it is judged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from steadygrad._version import __version__
from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.followers import Followers
from steadygrad.act.precision import DTYPES
from steadygrad.act.reflex import Reflex, multiply
from steadygrad.act.sanitize import sanitize_gradients
from steadygrad.act.scaler import ScalerDriver
from steadygrad.clip import build_clipper
from steadygrad.config import GuardConfig
from steadygrad.decide import decide
from steadygrad.detect import Detector, standard_rules
from steadygrad.detect.nonfinite import NonfiniteGradient, NonfiniteLoss
from steadygrad.errors import NonFiniteError, TrainingHalted, UnsupportedError, UsageError
from steadygrad.facts import Action, Finding, Incident, Outcome, Reading, Severity, StepRecord, Verdict
from steadygrad.measure import Measurement, Meter, Ticket, Transfer
from steadygrad.measure.loss import check_loss, detach, find_loss
from steadygrad.measure.meter import COEFFICIENT, FOUND, LOSS, NUM_NONFINITE
from steadygrad.measure.scan import find_nonfinite
from steadygrad.measure.subjects import find_subjects
from steadygrad.measure.updates import UpdateMeter
from steadygrad.record import Recorder, RunDirectory, Sink
from steadygrad.view.progress import track

logger = logging.getLogger("steadygrad")
T = TypeVar("T")


@dataclass(slots=True)
class _Microbatches:
    """What the backward calls since the last step have left."""

    losses: list[Tensor] = field(default_factory=list)
    num: int = 0
    num_dropped: int = 0
    worst: tuple[Measurement, Sequence[float]] | None = None


@dataclass(slots=True)
class _Pending:
    """A step whose optimizer is queued and whose numbers are on their way."""

    measurement: Measurement
    ticket: Ticket
    facts: dict[str, Any]
    updates: Ticket | None = None


@dataclass(slots=True)
class _Counts:
    """Totals over the run."""

    num_steps: int = 0
    num_skipped: int = 0
    num_clipped: int = 0
    num_dropped_microbatches: int = 0
    norm_sum: float = 0.0
    norm_max: float = 0.0

    def add(self, reading: Reading) -> None:
        self.num_steps += 1
        self.num_skipped += reading.skipped
        self.num_clipped += reading.clipped
        self.num_dropped_microbatches += reading.num_dropped_microbatches
        if not reading.is_nonfinite:
            self.norm_sum += reading.grad_norm
            self.norm_max = max(self.norm_max, reading.grad_norm)


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
    ) -> None:
        self.config = config if config is not None else GuardConfig()
        self._subjects = find_subjects(model, optimizer)
        _refuse_many_ranks()
        self._off = os.environ.get("STEADYGRAD", "").lower() == "off"
        named, self._optimizers = self._subjects.named, self._subjects.optimizers
        self._user_scaler = scaler
        self._scaler = ScalerDriver(scaler, self._optimizers)
        self._updates = UpdateMeter(named)
        self._transfer = Transfer(slots=6)
        self._clipper = None if self.config.clip is None else build_clipper(self.config.clip)
        self._meter = Meter(
            named,
            self.config.measure.implementation,
            max_norm=None if self._clipper is None else self._clipper.constant_norm,
        )
        self._reflex = Reflex(self._optimizers, self._clipper)
        self._buffers = BufferKeeper(self._subjects.model)
        self._followers = Followers(
            scheduler,
            ema,
            model=self._subjects.model,
            interval=self.config.scheduler_interval,
            buffers=self._buffers,
        )
        threshold = getattr(self.config.clip, "max_norm", None)
        self._detector = Detector(standard_rules(self.config.detect, clip_threshold=threshold))
        self._recorder = Recorder([*sinks, *self._open_run(run_dir)])
        self._started = time.monotonic()
        self._microbatches = _Microbatches()
        self._pending: _Pending | None = None
        self._next_step = 0
        self._epoch = 0
        self._counts = _Counts()
        self._validation_loss: float | None = None
        self._closed = False
        self._complained: set[str] = set()
        self.findings: list[Finding] = []
        self.incidents: list[Incident] = []
        self.last: StepRecord | None = None
        self._last_reading: Reading | None = None
        if not self._off:
            self._foresee()
            self._reflex.hint()

    # --- the step ---------------------------------------------------------------------------------------------------

    def step(self, subject: Callable[..., Any] | Tensor | None = None, /, *args: Any, **kwargs: Any) -> Any:
        """One optimizer step: from a function (replayable), from a loss, or from gradients that are already there.

        Returns what the function returned, detached; the detached loss; or None.
        """
        self._check_open()
        if self._off:
            return self._plain_step(subject, *args, **kwargs)
        result = None if subject is None else self.backward(subject, *args, **kwargs)
        owns_backward = self._microbatches.num > 0
        try:
            self._optimize()
        finally:
            self._microbatches = _Microbatches()
            if owns_backward:
                self._zero_grad()
        return result

    def backward(self, subject: Callable[..., Any] | Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """Forward (when a function is given) and backward of one microbatch; `step()` comes after the last one."""
        self._check_open()
        if callable(subject) and not isinstance(subject, Tensor):
            if self._microbatches.num == 0:
                self._buffers.refresh()
            with self._autocast():
                result = subject(*args, **kwargs)
            loss = find_loss(result)
        else:
            if args or kwargs:
                raise UsageError(
                    "arguments were given beside a loss. Give a function and its arguments, or a loss alone."
                )
            result = loss = check_loss(subject)
        if self._off:
            self._plain_backward(loss)
        elif self.config.drop_bad_microbatches:
            self._backward_aside(loss)
        else:
            self._scaler.scale(loss).backward()
            self._microbatches.losses.append(loss.detach())
        self._microbatches.num += 1
        return detach(result)

    def _optimize(self) -> None:
        """Measure, clip, then step or skip: on the device where the optimizers allow it, by one host read elsewhere."""
        batches = self._microbatches
        if batches.num and batches.num == batches.num_dropped:
            self._skip_all_dropped()
            return
        if batches.num_dropped:
            self._average_the_kept()
        loss = _sum(batches.losses)
        scale = self._scaler.factor
        measurement = self._meter.measure(loss, scale=scale)
        if measurement is None:
            raise UsageError(
                "no parameter of the optimizer has a gradient. Run backward before guard.step(), and check that the loss "
                "depends on the model's parameters."
            )
        facts = {
            "step": self._take_step_number(),
            "num_microbatches": max(1, batches.num),
            "num_dropped_microbatches": batches.num_dropped,
        }
        if self._reflex.ready_for_device and self.config.on_nonfinite is not Action.SANITIZE:
            self._step_on_device(measurement, scale, facts)
        else:
            self._step_on_host(measurement, scale, facts)

    def _step_on_device(self, m: Measurement, scale: Tensor | None, facts: dict[str, Any]) -> None:
        """Fused optimizers on CUDA: nothing here waits for work of this step."""
        carried = self._reflex.clip(m, scale)
        ticket = self._transfer.send(m.packed)
        self._judge_pending()  # the step before; its scheduler moves the learning rate that this step uses
        facts["learning_rates"] = self._learning_rates()
        measure_updates = self._updates_are_due(facts["step"])
        if measure_updates:
            self._updates.before()
        self._reflex.step_on_device(m, carried)
        if scale is not None:
            self._scaler.update(bad_gradient=m.packed[NUM_NONFINITE] > 0, bad_loss=~m.packed[LOSS].isfinite())
        self._buffers.select(m.found)
        self._pending = _Pending(m, ticket, facts)
        if measure_updates:
            self._pending.updates = self._transfer.send(self._updates.after())

    def _step_on_host(self, m: Measurement, scale: Tensor | None, facts: dict[str, Any]) -> None:
        """Every other optimizer: one host read, then the host decides."""
        self._judge_pending()
        facts["learning_rates"] = self._learning_rates()
        measured = m
        if self.config.on_nonfinite is Action.SANITIZE:
            m = self._sanitize_if_bad(m, scale)
        carried = self._reflex.clip(m, scale)
        numbers = self._transfer.send(m.packed).wait()
        bad = numbers[FOUND] > 0
        reading = m.read(numbers, skipped=bad, **facts)
        if m is not measured:  # tell what was found, and what was made of it
            reading = _as_sanitized(
                measured.read(self._transfer.send(measured.packed).wait(), skipped=False, **facts), reading
            )
        measure_updates = not bad and self._updates_are_due(reading.step)
        if measure_updates:
            self._updates.before()
        if bad:
            self._reflex.skip_on_host()
            self._buffers.restore()
        else:
            self._reflex.step_on_host(m, numbers[COEFFICIENT] / (1.0 if carried is None else float(carried)))
            self._buffers.save()
        if scale is not None and not reading.loss_is_nonfinite:
            self._scaler.update(bad_gradient=measured.packed[NUM_NONFINITE] > 0, bad_loss=None)
        if measure_updates:
            reading = self._with_updates(reading, self._transfer.send(self._updates.after()))
        self._judge(reading)

    def _sanitize_if_bad(self, m: Measurement, scale: Tensor | None) -> Measurement:
        if not m.found.item():
            return m
        sanitize_gradients(m.gradients, self.config.sanitize_value)
        again = self._meter.measure(None, scale=scale)
        assert again is not None
        return again

    # --- accumulation -----------------------------------------------------------------------------------------------

    def _backward_aside(self, loss: Tensor) -> None:
        """Backward into fresh gradients, look at them, and add them to the others only if they are good."""
        parameters = [p for _, p in self._subjects.named]
        kept = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        self._scaler.scale(loss).backward()
        m = self._meter.measure(loss, scale=self._scaler.factor)
        numbers = None if m is None else self._transfer.send(m.packed).wait()
        if m is not None and numbers is not None and numbers[FOUND] > 0:
            self._microbatches.num_dropped += 1
            self._microbatches.worst = (m, numbers)
            self._tell_dropped(m, numbers)
            self._buffers.restore()
            for parameter, gradient in zip(parameters, kept):
                parameter.grad = gradient
            return
        _add_gradients(parameters, kept)
        self._buffers.save()
        self._microbatches.losses.append(loss.detach())

    def _average_the_kept(self) -> None:
        """The user divides by the number of microbatches; some are missing, so the average must count the others."""
        batches = self._microbatches
        factor = batches.num / (batches.num - batches.num_dropped)
        multiply([p.grad for _, p in self._subjects.named if p.grad is not None], factor)
        batches.losses = [loss * factor for loss in batches.losses]

    def _skip_all_dropped(self) -> None:
        """Every microbatch was bad: the step is skipped, and told with the last one's numbers."""
        worst = self._microbatches.worst
        assert worst is not None
        self._judge_pending()
        self._reflex.skip_on_host()
        m, numbers = worst
        self._judge(
            m.read(
                numbers,
                step=self._take_step_number(),
                skipped=True,
                learning_rates=self._learning_rates(),
                num_microbatches=self._microbatches.num,
                num_dropped_microbatches=self._microbatches.num_dropped,
            )
        )

    def _tell_dropped(self, m: Measurement, numbers: Sequence[float]) -> None:
        reading = m.read(numbers, step=self._next_step, skipped=True, learning_rates=())
        for finding in (*NonfiniteLoss().observe(reading), *NonfiniteGradient().observe(reading)):
            message = f"microbatch {self._microbatches.num}: {finding.message}"
            self._conclude(
                dataclasses.replace(finding, message=message),
                Verdict(action=Action.SKIP, reason="drop_bad_microbatches is on"),
                Outcome(action=Action.SKIP, message="the microbatch was left out"),
            )

    # --- judgement --------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until the host has judged every step."""
        self._judge_pending()

    def _judge_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        numbers = pending.ticket.wait()
        reading = pending.measurement.read(numbers, skipped=numbers[FOUND] > 0, **pending.facts)
        if pending.updates is not None:
            reading = self._with_updates(reading, pending.updates)
        self._judge(reading)

    def _judge(self, reading: Reading) -> None:
        """detect -> decide -> act -> record, for a step whose weights are still those it left."""
        if not reading.skipped:
            self._followers.after_applied()
        self._counts.add(reading)
        self._reflex.expects_clipping = reading.clipped
        self._last_reading = reading
        self.last = StepRecord.of(reading, time_seconds=time.monotonic() - self._started)
        findings = self._observe(reading)
        self._record_step(reading, findings)
        for finding in findings:
            verdict = decide(finding, reading, self.config.on_nonfinite)
            self._conclude(finding, verdict, _outcome(verdict, reading))

    def _observe(self, reading: Reading) -> list[Finding]:
        try:
            findings = self._detector.observe(reading)
            if reading.is_nonfinite and any(f.severity.rank > 0 for f in findings):
                findings += self._scan_parameters(reading.step)
        except Exception as error:  # a broken rule must not end a healthy training
            self._complain("detect", f"a rule failed on step {reading.step}, training goes on: {error!r}")
            return []
        return findings

    def _scan_parameters(self, step: int) -> list[Finding]:
        """A bad step makes it worth a pass over the weights: were they bad before it?"""
        bad = find_nonfinite(self._subjects.named)
        if not bad:
            return []
        return [
            Finding(
                kind="nonfinite_parameter",
                severity=Severity.CRITICAL,
                step=step,
                message=f"{len(bad)} parameters already held NaN or Inf before this step: {', '.join(bad[:5])}",
                advice="No skip can heal this. Load an earlier checkpoint; if the optimizer made them (Adam in half "
                "precision), keep the weights in float32 and use autocast.",
                evidence={"parameters": bad[:5], "num_parameters": len(bad)},
            )
        ]

    def _record_step(self, reading: Reading, findings: list[Finding]) -> None:
        config, step = self.config.record, reading.step
        assert self.last is not None
        if step % config.steps_every == 0 or reading.skipped:
            self._recorder.write_step(self.last)
        notable = any(f.severity.rank >= Severity.WARNING.rank for f in findings)
        if config.layers_every and (step % config.layers_every == 0 or notable):
            self._recorder.write_layers(step, reading.gradients)

    def _conclude(self, finding: Finding, verdict: Verdict, outcome: Outcome) -> None:
        """Write the finding down; it is an incident when it matters or when something was done about it."""
        self.findings.append(finding)
        level = logging.INFO if finding.severity is Severity.INFO else logging.WARNING
        logger.log(level, "step %d: %s (%s). %s", finding.step, finding.message, outcome.message, finding.advice)
        if finding.severity is not Severity.INFO or verdict.action in (Action.SKIP, Action.SANITIZE, Action.HALT):
            incident = Incident(step=finding.step, finding=finding, verdict=verdict, outcome=outcome)
            self.incidents.append(incident)
            self._recorder.write_incident(incident)
            self._call_back(incident)
        if verdict.action is Action.HALT:
            kind = NonFiniteError if finding.kind.startswith("nonfinite") else TrainingHalted
            raise kind(
                f"step {finding.step}: {finding.message}. No weight was touched. {finding.advice}",
                tuple(self.incidents),
            )

    def _call_back(self, incident: Incident) -> None:
        if self.config.on_incident is None:
            return
        try:
            self.config.on_incident(incident)
        except Exception as error:
            self._complain("on_incident", f"on_incident failed, training goes on: {error!r}")

    # --- around the step --------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over `loader` with a progress bar on a terminal."""
        total = len(loader) if isinstance(loader, Sized) else None
        yield from track(loader, describe=self._describe, total=total)

    def validate(self, loss: float | Tensor) -> None:
        """Tell the validation loss; a non-finite one is a finding and steers no scheduler."""
        self._check_open()
        self.flush()
        value = float(loss)
        if math.isfinite(value):
            self._validation_loss = value
            return
        self._conclude(
            Finding(
                kind="nonfinite_validation",
                severity=Severity.ERROR,
                step=max(0, self._next_step - 1),
                message=f"the validation loss is {value}",
                advice="Look at the validation data, and for divisions by an empty batch.",
                evidence={"loss": str(value)},
            ),
            Verdict(action=Action.NONE, reason="told, not acted on"),
            Outcome(action=Action.NONE, message="nothing was changed"),
        )

    def end_epoch(self) -> None:
        """The epoch is over: a scheduler by epoch moves."""
        self._check_open()
        self.flush()
        self._epoch += 1
        self._followers.after_epoch(self._validation_loss)

    def health(self) -> dict[str, bool]:
        """Whether model (buffers), gradients, losses and parameters are finite now; reads the weights once."""
        self.flush()
        last = self._last_reading
        parameters = not find_nonfinite(self._subjects.model.named_parameters())
        parts = {
            "model_healthy": parameters and not find_nonfinite(self._subjects.model.named_buffers()),
            "gradients_healthy": last is None or last.num_nonfinite == 0,
            "losses_healthy": last is None or not last.loss_is_nonfinite,
            "parameters_healthy": parameters,
        }
        return {**parts, "overall_healthy": all(parts.values())}

    def stats(self) -> dict[str, float | int | None]:
        """Counts and current numbers."""
        self.flush()
        last, counts = self._last_reading, self._counts
        num_healthy = max(1, counts.num_steps - counts.num_skipped)
        return {
            "current_learning_rate": self._learning_rates()[0],
            "current_gradient_norm": None if last is None else last.grad_norm,
            "current_loss": None if last is None else last.loss,
            "loss_scale": None if last is None else last.loss_scale,
            "mean_gradient_norm": counts.norm_sum / num_healthy,
            "max_gradient_norm": counts.norm_max,
            "num_steps": counts.num_steps,
            "num_skipped": counts.num_skipped,
            "num_clipped": counts.num_clipped,
            "num_dropped_microbatches": counts.num_dropped_microbatches,
            "num_incidents": len(self.incidents),
            "epoch": self._epoch,
        }

    def state_dict(self) -> dict[str, Any]:
        """What the guard itself remembers: step, detectors, clip state, counts. Weights and optimizers are not in it."""
        self.flush()
        return {
            "version": 1,
            "step": self._next_step,
            "epoch": self._epoch,
            "counts": dataclasses.asdict(self._counts),
            "validation_loss": self._validation_loss,
            "clip": {} if self._clipper is None else self._clipper.state_dict(),
            "detect": self._detector.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict()` was taken. Load model and optimizer first: the buffers are copied from now."""
        self.flush()
        if state.get("version") != 1:
            raise UsageError(f"this guard state has version {state.get('version')!r}, only 1 is known.")
        self._next_step, self._epoch = int(state["step"]), int(state["epoch"])
        self._counts = _Counts(**state["counts"])
        self._validation_loss = state["validation_loss"]
        if self._clipper is not None:
            self._clipper.load_state_dict(state["clip"])
        self._detector.load_state_dict(state["detect"])
        self._buffers.refresh()

    def close(self) -> None:
        """Judge what is pending and close the record. A closed guard refuses to step."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(TrainingHalted):  # the error on its way out is the one to show
            self.close()

    # --- small things -----------------------------------------------------------------------------------------------

    def _foresee(self) -> None:
        """What can be said before the first step."""
        for what, names in (
            ("trainable parameters of the model are in no optimizer", self._subjects.unoptimized),
            ("parameters of the optimizer are not in the model", self._subjects.foreign),
        ):
            if names:
                self._note(
                    "partial_overlap",
                    Severity.INFO,
                    f"{len(names)} {what}: {', '.join(names[:5])}",
                    "Freeze them with requires_grad_(False), or give both the same parameters.",
                )
        fragile = _find_underflowing_epsilon(self._optimizers)
        if fragile:
            self._note(
                "underflowing_epsilon",
                Severity.WARNING,
                fragile,
                "Keep the weights in float32 and use autocast, or set eps to 1e-4 or more.",
            )

    def _note(self, kind: str, severity: Severity, message: str, advice: str) -> None:
        self._conclude(
            Finding(kind=kind, severity=severity, step=0, message=message, advice=advice),
            Verdict(action=Action.NONE, reason="told, not acted on"),
            Outcome(action=Action.NONE, message="nothing was changed"),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this guard is closed. Make a new one to go on training.")

    def _take_step_number(self) -> int:
        self._next_step += 1
        return self._next_step - 1

    def _learning_rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups)

    def _updates_are_due(self, step: int) -> bool:
        every = self.config.measure.parameters_every
        return every > 0 and step % every == 0

    def _with_updates(self, reading: Reading, ticket: Ticket) -> Reading:
        norms, ratios = self._updates.read(ticket.wait())
        return dataclasses.replace(reading, parameter_norms=norms, update_ratios=ratios)

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.autocast is None:
            return contextlib.nullcontext()
        device = self._subjects.named[0][1].device.type
        dtype = DTYPES[self.config.autocast]
        return torch.autocast(device, dtype=dtype, enabled=dtype is not torch.float32)

    def _describe(self) -> str:
        if self.last is None:
            return ""
        loss = "" if self.last.loss is None else f"loss={self.last.loss:.4g}, "
        skipped = f", skipped={self._counts.num_skipped}" if self._counts.num_skipped else ""
        return f"{loss}grad={self.last.grad_norm:.3f}{skipped}"

    def _complain(self, what: str, message: str) -> None:
        if what not in self._complained:
            self._complained.add(what)
            logger.error(message)

    def _open_run(self, run_dir: str | Path | None) -> list[Sink]:
        if run_dir is None or self._off:
            return []
        return [
            RunDirectory(
                run_dir,
                config=self.config.to_dict(),
                parameters=[name for name, _ in self._subjects.named],
                versions={"steadygrad": __version__, "torch": torch.__version__},
            )
        ]

    # --- STEADYGRAD=off: the plain loop -----------------------------------------------------------------------------

    def _plain_backward(self, loss: Tensor) -> None:
        (loss if self._user_scaler is None else self._user_scaler.scale(loss)).backward()

    def _plain_step(self, subject: Callable[..., Any] | Tensor | None, *args: Any, **kwargs: Any) -> Any:
        result = None if subject is None else self.backward(subject, *args, **kwargs)
        owns_backward, self._microbatches = self._microbatches.num > 0, _Microbatches()
        for optimizer in self._optimizers:
            if self._user_scaler is None:
                optimizer.step()
            else:
                self._user_scaler.step(optimizer)
        if self._user_scaler is not None:
            self._user_scaler.update()
        if owns_backward:
            self._zero_grad()
        self._take_step_number()
        self._followers.after_applied()
        return result


def _sum(losses: list[Tensor]) -> Tensor | None:
    if len(losses) < 2:
        return losses[0] if losses else None
    return torch.stack([loss.double() for loss in losses]).sum()


def _add_gradients(parameters: Sequence[Tensor], kept: Sequence[Tensor | None]) -> None:
    """parameter.grad += kept, as autograd's own accumulation does it."""
    for parameter, before in zip(parameters, kept):
        if before is None:
            continue
        if parameter.grad is None:
            parameter.grad = before
        elif before.layout is torch.strided:
            parameter.grad = before.add_(parameter.grad)
        else:
            parameter.grad = before + parameter.grad


def _as_sanitized(found: Reading, used: Reading) -> Reading:
    """What was measured before the repair, with the clipping and the norm of what the optimizer got."""
    return dataclasses.replace(
        found, clip_coefficient=used.clip_coefficient, finite_grad_norm=used.finite_grad_norm, skipped=used.skipped
    )


def _outcome(verdict: Verdict, reading: Reading) -> Outcome:
    if verdict.action in (Action.SKIP, Action.HALT):
        return Outcome(action=verdict.action, message="the step was skipped, no weight was touched")
    if verdict.action is Action.SANITIZE:
        return Outcome(action=verdict.action, message=f"{reading.num_nonfinite} gradient elements were replaced")
    if verdict.action is Action.CLIP:
        before, after = {"grad_norm": reading.grad_norm}, {"grad_norm": reading.applied_norm}
        return Outcome(
            action=verdict.action, message=f"clipped to {reading.applied_norm:.4g}", before=before, after=after
        )
    return Outcome(action=Action.NONE, message="nothing was changed")


def _find_underflowing_epsilon(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Adam's epsilon becomes 0 in half-precision state: a zero gradient then divides 0 by 0 inside the optimizer."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            for parameter in group["params"]:
                if isinstance(eps, float) and parameter.dtype is torch.float16 and torch.tensor(eps).half() == 0:
                    return f"{type(optimizer).__name__}'s eps={eps:g} is 0 in float16, in which the weights are kept"
    return ""


def _refuse_many_ranks() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UnsupportedError(
            f"{distributed.get_world_size()} ranks train together here, and a Guard does not yet agree with the others on "
            "what to skip: ranks would part. Use it on one rank, or GradientHealthMonitor to look without acting."
        )
