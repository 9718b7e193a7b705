"""The user's arguments -> the pieces of a guard, each with only the few others that it uses. Built once, in one place.

No piece knows the whole: `Pieces` is for `Guard` itself and is not passed on. Nothing here holds a reference to the
Guard, so a guard that goes out of scope is freed at once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steadygrad.clip import Clipper
from steadygrad.config import GuardConfig
from steadygrad.config.switch import is_switched_off
from steadygrad.detect.rank_agreement import describe_wait
from steadygrad.guard.backward import BackwardPass
from steadygrad.guard.epochs import Epochs
from steadygrad.guard.forward import ForwardPass
from steadygrad.guard.inquiry import Inquiry
from steadygrad.guard.judging import Judging
from steadygrad.guard.moment import Moment
from steadygrad.guard.passes import Passes
from steadygrad.guard.plain import PlainLoop
from steadygrad.guard.preflight import foresee, foresee_schedule, foresee_uncopied
from steadygrad.guard.range_test import RangeTest
from steadygrad.guard.rehearsal import MakeGuard
from steadygrad.guard.requests import Requests
from steadygrad.guard.rollback import Rollback
from steadygrad.guard.saving import Saver
from steadygrad.guard.shutdown import Shutdown
from steadygrad.guard.sides import DeviceSide, HostSide, build_device_side, build_host_side
from steadygrad.guard.stages import Stages, Stepping
from steadygrad.guard.state import GuardState
from steadygrad.guard.stepping import Stepper
from steadygrad.guard.summary import Summary
from steadygrad.guard.training import Training, adapt_to_fragments, check_given
from steadygrad.judgement import Judgement
from steadygrad.measure.rank_waits import RankWaits, call_weakly, watch_ranks
from steadygrad.measure.ranks import Ranks
from steadygrad.record import Sink
from steadygrad.state.trained_parameters import find_trained_parameters
from steadygrad.view.terminal import show_findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The pieces that a Guard calls."""

    training: Training
    moment: Moment
    ranks: Ranks
    clipper: Clipper | None
    judgement: Judgement
    rollback: Rollback
    judging: Judging
    stages: Stages
    epochs: Epochs
    saver: Saver
    shutdown: Shutdown
    requests: Requests
    range_test: RangeTest
    summary: Summary
    waits: RankWaits | None
    closers: Sequence[Callable[[], None]]
    """Finalizers for a guard that was never closed: they complete its record and release its directory."""


def build(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    config: GuardConfig,
    scheduler: Any,
    scaler: torch.amp.GradScaler | None,
    ema: Any,
    run_dir: str | Path | None,
    sinks: Iterable[Sink],
    process_group: Any,
    extras: Mapping[str, Any],
    enabled: bool,
    make_guard: MakeGuard,
    close: Callable[[], Callable[[], None] | None],
) -> Pieces:
    """Check the arguments and build the pieces. `close` returns the guard's close function while the guard exists."""
    check_given(config, scaler, run_dir)
    trained = find_trained_parameters(model, optimizer)
    # Before any piece is built: snapshots begin to pin memory as soon as they are made.
    config = adapt_to_fragments(config) if trained.is_fragmented else config
    training = Training(
        model=trained.model,
        optimizers=trained.optimizers,
        config=config,
        scheduler=scheduler,
        scaler=scaler,
        ema=ema,
        extras=extras,
        off=not enabled or is_switched_off(),
    )
    device = build_device_side(training, trained, model, process_group)
    host = build_host_side(device, run_dir, sinks, make_guard)
    if not training.off:
        show_findings()
        for finding in (*foresee(trained), *foresee_schedule(training), *foresee_uncopied(training, host.checkpoints)):
            host.judgement.note(finding)
        device.watched.reflex.hint()
        with contextlib.suppress(Exception):  # shows again when a kernel is used, where it is handled
            device.watched.compile()
            host.snapshots.compile()
        _collect_garbage()
    return _assemble(device, host, make_guard, close)


@functools.cache
def _collect_garbage() -> None:
    """Once a process, do the collector's whole work now rather than in one of the first steps.

    Python goes through all objects when a quarter of them are newer than the last time it did, which is usually in the
    middle of the imports: 0.1 to 0.2 s, in a step that has nothing to do with it.
    """
    gc.collect()


def _assemble(
    device: DeviceSide, host: HostSide, make_guard: MakeGuard, close: Callable[[], Callable[[], None] | None]
) -> Pieces:
    """Connect the stages and the other pieces that a Guard calls."""
    training, ranks, buffers, watched = device.training, device.ranks, device.buffers, device.watched
    judgement, checkpoints, rates = host.judgement, host.checkpoints, device.optimizers.rates
    moment = Moment()
    rollback = Rollback(
        host.window,
        snapshots=host.snapshots,
        moment=moment,
        watched=watched,
        rates=rates,
        buffers=buffers,
        ranks=ranks,
    )
    for one in (checkpoints, host.snapshots):
        one.excuse(lambda: watched.periodic_scans.meant_nonfinite | buffers.meant_nonfinite)
    judging = make_judging(device, host, rollback)
    state = GuardState(
        moment,
        judging=judging,
        judgement=judgement,
        actor=host.actor,
        clipper=device.clipper,
        watched=watched,
        buffers=buffers,
    )
    saver = Saver(
        training,
        moment=moment,
        state=state,
        watched=watched,
        judgement=judgement,
        checkpoints=checkpoints,
        start=host.start,
    )
    shutdown = Shutdown(checkpoints, ranks=ranks, moment=moment, judging=judging, saver=saver, close=close)
    passes, stepper = make_loop(device, host, moment, rollback, judging)
    # Weakly: the watch listens for as long as it lives.
    watched.program.own_loads.report = call_weakly(judgement, lambda judgement, fact: judgement.hear(fact))
    waits = None
    if ranks.many and not training.off:
        # Weakly: a thread that is the last to drop the model ends its process group too, which can deadlock in gloo.
        waits = watch_ranks(
            ranks.group,
            call_weakly(moment, lambda moment: moment.next_step, 0),
            call_weakly(judgement, lambda judgement, wait: judgement.note(describe_wait(wait))),
        )
    return Pieces(
        training=training,
        moment=moment,
        ranks=ranks,
        clipper=device.clipper,
        judgement=judgement,
        rollback=rollback,
        judging=judging,
        stages=Stages(passes, stepper, moment=moment, judging=judging, saver=saver, shutdown=shutdown),
        epochs=Epochs(
            training,
            moment=moment,
            judging=judging,
            checkpoints=checkpoints,
            schedule_and_ema=device.optimizers.schedule_and_ema,
            ranks=ranks,
        ),
        saver=saver,
        shutdown=shutdown,
        requests=Requests(training, moment=moment, actor=host.actor, judgement=judgement),
        range_test=RangeTest(
            training,
            make_guard,
            moment=moment,
            ranks=ranks,
            device=device,
            judgement=judgement,
        ),
        summary=Summary(
            training,
            moment=moment,
            judgement=judgement,
            rates=rates,
            snapshots=host.snapshots,
            watched=watched,
            start=host.start,
        ),
        waits=waits,
        closers=[
            *([] if waits is None else [waits.close]),
            judgement.close,
            checkpoints.close,
            *([] if host.start is None else [host.start.close]),
        ],
    )


def make_judging(device: DeviceSide, host: HostSide, rollback: Rollback) -> Judging:
    """Build what hands steps to judgement and, for bad ones, consults the other ranks and a replay."""
    inquiry = Inquiry(
        host.investigator,
        watched=device.watched,
        buffers=device.buffers,
        ranks=device.ranks,
        judgement=host.judgement,
        rank_file=host.rank_file,
        steps_every=device.training.config.record.steps_every,
    )
    return Judging(
        host.judgement,
        watched=device.watched,
        rollback=rollback,
        buffers=device.buffers,
        ranks=device.ranks,
        inquiry=inquiry,
        checkpoints=host.checkpoints,
    )


def make_loop(
    device: DeviceSide, host: HostSide, moment: Moment, rollback: Rollback, judging: Judging
) -> tuple[Passes, Stepping]:
    """Build what runs forward, backward and step; one object does all three if the guard is switched off."""
    config, watched, optimizers = device.training.config, device.watched, device.optimizers
    if device.training.off:
        plain = PlainLoop(
            device.training,
            moment=moment,
            watched=watched,
            optimizers=optimizers,
            ranks=device.ranks,
            other_gradients=device.other_gradients,
        )
        return Passes(plain, plain, moment=moment, rollback=rollback, judgement=host.judgement), plain
    forward = ForwardPass(
        config,
        moment=moment,
        watched=watched,
        rollback=rollback,
        buffers=device.buffers,
        investigator=host.investigator,
        other_gradients=device.other_gradients,
    )
    backward = BackwardPass(
        config,
        moment=moment,
        watched=watched,
        rollback=rollback,
        scaler=optimizers.scaler,
        ranks=device.ranks,
        judgement=host.judgement,
    )
    stepper = Stepper(
        config,
        moment=moment,
        watched=watched,
        optimizers=optimizers,
        rollback=rollback,
        buffers=device.buffers,
        judging=judging,
    )
    passes = Passes(
        forward, backward, moment=moment, rollback=rollback, judgement=host.judgement, inquiry=judging.inquiry
    )
    return passes, stepper
