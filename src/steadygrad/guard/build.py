"""What the user gave -> the pieces of a guard, each with the few others that it uses. Built once, in one place.

No piece knows the whole: `Pieces` is what `Guard` itself calls, and is handed to nobody. Nothing here holds the Guard,
so that one that is dropped goes at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steadygrad._version import __version__
from steadygrad.act.actor import Actor
from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.other_gradients import OtherGradients
from steadygrad.act.rates import Rates
from steadygrad.act.snapshots import Snapshots
from steadygrad.act.window import Window
from steadygrad.checkpoint.run import RunCheckpoints
from steadygrad.clip import Clipper, build_clipper
from steadygrad.config import GuardConfig
from steadygrad.config.switch import is_switched_off
from steadygrad.detect import Detector, standard_rules
from steadygrad.detect.rank_rules import split_rules
from steadygrad.diagnose.investigator import Investigator
from steadygrad.guard.backward import BackwardPass
from steadygrad.guard.epochs import Epochs
from steadygrad.guard.forward import ForwardPass
from steadygrad.guard.inquiry import Inquiry
from steadygrad.guard.judging import Judging
from steadygrad.guard.moment import Moment
from steadygrad.guard.optimizers import Optimizers
from steadygrad.guard.passes import Backward, Forward, Passes
from steadygrad.guard.plain import PlainLoop
from steadygrad.guard.preflight import foresee, foresee_uncopied, refuse_shards
from steadygrad.guard.range_test import RangeTest
from steadygrad.guard.rehearsal import MakeGuard
from steadygrad.guard.requests import Requests
from steadygrad.guard.rollback import Rollback
from steadygrad.guard.run_start import RunFiles, RunStart
from steadygrad.guard.saving import Saver
from steadygrad.guard.second_try import make_again
from steadygrad.guard.shutdown import Shutdown
from steadygrad.guard.stages import Stages, Stepping
from steadygrad.guard.state import GuardState
from steadygrad.guard.stepping import Stepper
from steadygrad.guard.summary import Summary
from steadygrad.guard.training import Training, check_given, keep_stateful
from steadygrad.guard.watched import Watched
from steadygrad.judgement import Judgement
from steadygrad.measure.ranks import Ranks, find_ranks
from steadygrad.prove import Prover
from steadygrad.prove.comparison import Comparison, Rehearse
from steadygrad.prove.paired import PairedTest
from steadygrad.prove.reference import References
from steadygrad.record import Recorder, RunDirectory, Sink
from steadygrad.record.rank_file import RankFile
from steadygrad.record.run_folder import RunFolder
from steadygrad.state.trained_parameters import find_trained_parameters, find_wrappers
from steadygrad.view.terminal import show_findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What a Guard calls."""

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
    closers: Sequence[Callable[[], None]]
    """What leaves a whole record, and a directory that is free, of a guard that nobody closed."""


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
    """Check what was given, and build from it. `close` gives what closes the guard, as long as there is one."""
    check_given(config, scaler, run_dir)
    trained = find_trained_parameters(model, optimizer)
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
    ranks = find_ranks(model, trained.named, process_group=process_group)
    if not training.off:
        ranks.check_alike(repr(config.to_dict()))
        refuse_shards(trained, config.clip)
    clipper = None if config.clip is None else build_clipper(config.clip)
    buffers = make_buffers(training, model)
    other_gradients = OtherGradients(training.model, training.optimizers, watch=not training.off)
    optimizers = Optimizers(training, buffers)
    watched = Watched(trained, config.measure, clipper=clipper, ranks=ranks, scaler=optimizers.scaler, buffers=buffers)
    files = make_files(training, run_dir, ranks, [name for name, _ in trained.named])
    moment, window = Moment(), Window()
    detector, own_detector = make_detectors(config, ranks)
    snapshots = make_snapshots(training, optimizers.rates, ranks, clipper=clipper, detector=detector)
    actor = Actor(config.policy, rates=optimizers.rates, snapshots=snapshots, clipper=clipper, window=window)
    checkpoints = make_checkpoints(training, run_dir, ranks, buffers)
    investigator = make_investigator(training, run_dir, ranks)
    judgement = Judgement(
        config,
        detector=detector,
        schedule_and_ema=optimizers.schedule_and_ema,
        actor=actor,
        recorder=Recorder([*sinks, *([] if files is None else files.sinks)]),
        own=own_detector,
        prover=make_prover(
            training,
            optimizers,
            snapshots,
            watched=watched,
            ranks=ranks,
            aside=functools.partial(_look_aside, investigator, buffers),
            rehearse=functools.partial(make_again, training, make_guard, watched, optimizers.rates, snapshots, ranks),
        ),
    )
    start = None if files is None else RunStart(files, ranks, checkpoints=checkpoints, investigator=investigator)
    rollback = Rollback(
        window,
        snapshots=snapshots,
        moment=moment,
        watched=watched,
        rates=optimizers.rates,
        buffers=buffers,
        ranks=ranks,
    )
    judging = Judging(
        judgement,
        watched=watched,
        rollback=rollback,
        buffers=buffers,
        ranks=ranks,
        inquiry=Inquiry(
            investigator,
            watched=watched,
            buffers=buffers,
            ranks=ranks,
            judgement=judgement,
            rank_file=None if files is None else files.rank_file,
            steps_every=config.record.steps_every,
        ),
        checkpoints=checkpoints,
    )
    saver = Saver(
        training,
        moment=moment,
        state=GuardState(
            moment,
            judging=judging,
            judgement=judgement,
            actor=actor,
            clipper=clipper,
            watched=watched,
            buffers=buffers,
        ),
        watched=watched,
        judgement=judgement,
        checkpoints=checkpoints,
        start=start,
    )
    shutdown = Shutdown(checkpoints, ranks=ranks, moment=moment, judging=judging, saver=saver, close=close)
    forward: Forward
    backward: Backward
    stepper: Stepping
    if training.off:
        forward = backward = stepper = PlainLoop(
            training,
            moment=moment,
            watched=watched,
            optimizers=optimizers,
            ranks=ranks,
            other_gradients=other_gradients,
        )
    else:
        forward = ForwardPass(
            config,
            moment=moment,
            watched=watched,
            rollback=rollback,
            buffers=buffers,
            investigator=investigator,
            other_gradients=other_gradients,
        )
        backward = BackwardPass(
            config,
            moment=moment,
            watched=watched,
            rollback=rollback,
            scaler=optimizers.scaler,
            ranks=ranks,
            judgement=judgement,
        )
        stepper = Stepper(
            config,
            moment=moment,
            watched=watched,
            optimizers=optimizers,
            rollback=rollback,
            buffers=buffers,
            judging=judging,
        )
        show_findings()
        for finding in (*foresee(trained), *foresee_uncopied(training, checkpoints)):
            judgement.note(finding)
        watched.reflex.hint()
    return Pieces(
        training=training,
        moment=moment,
        ranks=ranks,
        clipper=clipper,
        judgement=judgement,
        rollback=rollback,
        judging=judging,
        stages=Stages(
            Passes(forward, backward, moment=moment, rollback=rollback, judgement=judgement),
            stepper,
            moment=moment,
            judging=judging,
            saver=saver,
            shutdown=shutdown,
        ),
        epochs=Epochs(
            training,
            moment=moment,
            judging=judging,
            checkpoints=checkpoints,
            schedule_and_ema=optimizers.schedule_and_ema,
            ranks=ranks,
        ),
        saver=saver,
        shutdown=shutdown,
        requests=Requests(training, moment=moment, actor=actor, judgement=judgement),
        range_test=RangeTest(
            training,
            make_guard,
            moment=moment,
            ranks=ranks,
            clipper=clipper,
            buffers=buffers,
            judgement=judgement,
        ),
        summary=Summary(
            training,
            moment=moment,
            judgement=judgement,
            rates=optimizers.rates,
            snapshots=snapshots,
            watched=watched,
        ),
        closers=[judgement.close, checkpoints.close, *([] if start is None else [start.close])],
    )


# --- single pieces ----------------------------------------------------------------------------------------------------


def make_buffers(training: Training, model: nn.Module) -> BufferKeeper:
    """`model`: as it was given, with its wrappers, through which it may be called."""
    if training.off:
        return BufferKeeper(nn.Module())
    return BufferKeeper(training.model, watch=True, wrappers=find_wrappers(model))


def make_files(training: Training, run_dir: str | Path | None, ranks: Ranks, names: Sequence[str]) -> RunFiles | None:
    """The files of the run directory, which `RunStart` opens when it is known which run this is."""
    if run_dir is None:
        return None
    folder = RunFolder(run_dir, locks=ranks.is_first and not training.off)
    if training.off:
        return RunFiles(folder=folder)
    return RunFiles(
        folder=folder,
        record=make_record(folder.path, training.config, names, opens=False) if ranks.is_first else None,
        rank_file=RankFile(folder.path, ranks.rank, ranks.num, opens=False) if ranks.many else None,
    )


def make_record(
    path: Path, config: GuardConfig, names: Sequence[str], *, run_id: str = "", opens: bool = True
) -> RunDirectory:
    """The record of a run whose parameters are `names`."""
    versions = {"steadygrad": __version__, "torch": torch.__version__}
    return RunDirectory(path, config=config.to_dict(), parameters=names, versions=versions, run_id=run_id, opens=opens)


def make_detectors(config: GuardConfig, ranks: Ranks) -> tuple[Detector, Detector | None]:
    """The rules; on many ranks those about what all have seen, and those about what one has seen alone."""
    rules = standard_rules(config.detect, clip_threshold=getattr(config.clip, "max_norm", None))
    if not ranks.many:
        return Detector(rules), None
    rules, own_rules = split_rules(rules)
    return Detector(rules), Detector(own_rules)


def make_snapshots(
    training: Training, rates: Rates, ranks: Ranks, *, clipper: Clipper | None, detector: Detector
) -> Snapshots:
    """What a rollback goes back to; what the user saves beside the model stays as it is."""
    return Snapshots(
        training.model,
        training.optimizers,
        extras=keep_stateful({**training.along, "clip": clipper, "detect": detector, "rates": rates}),
        config=training.config.snapshots,
        agree=ranks.find_common if ranks.many else None,
        owns_rate=rates.is_written_by,
    )


def make_checkpoints(
    training: Training, run_dir: str | Path | None, ranks: Ranks, buffers: BufferKeeper
) -> RunCheckpoints:
    """Saves of the whole training."""
    config = training.config
    return RunCheckpoints(
        run_dir,
        config.checkpoint,
        model=training.model,
        optimizers=training.optimizers,
        extras=training.saved,
        clip=None if config.clip is None else config.clip.kind,
        buffers=buffers,
        ranks=ranks,
    )


def make_investigator(training: Training, run_dir: str | Path | None, ranks: Ranks) -> Investigator:
    """What replays bad steps, and notes steps for whoever tests findings on them."""
    diagnose = training.config.diagnose
    return Investigator(
        dataclasses.replace(diagnose, enabled=diagnose.enabled and not training.off),
        model=training.model,
        optimizers=training.optimizers,
        run_dir=run_dir,
        ddp=ranks.ddp if isinstance(ranks.ddp, nn.parallel.DistributedDataParallel) else None,
        notes=is_proving(training),
    )


def is_proving(training: Training) -> bool:
    """Whether findings on finite numbers are tested; else they are acted on at once, or never."""
    config = training.config
    return not training.off and config.prove.enabled and config.policy.require_proof


def make_prover(
    training: Training,
    optimizers: Optimizers,
    snapshots: Snapshots,
    *,
    watched: Watched,
    ranks: Ranks,
    aside: Callable[[], contextlib.AbstractContextManager[None]],
    rehearse: Rehearse,
) -> Prover | None:
    """What tests findings on finite numbers, if that is wanted. Replays and trials are made inside of `aside`."""
    if not is_proving(training):
        return None
    config = training.config
    test = PairedTest(training.model, training.optimizers, ranks=ranks)
    return Prover(
        config.prove,
        comparison=Comparison(config.prove, test, aside=aside, rehearse=rehearse),
        references=References(
            training.model,
            snapshots,
            edits=lambda: watched.edits,
            settings=optimizers.rates.list_settings,
            maximises=optimizers.maximise,
            ranks=ranks,
        ),
        snapshots=snapshots,
        rate_factor=config.policy.start_lr_factor,
        ranks=ranks,
        exempt=config.policy.actions,
    )


@contextlib.contextmanager
def _look_aside(investigator: Investigator, buffers: BufferKeeper) -> Iterator[None]:
    """Around replays and trials: nothing of ours takes them for a step, and every buffer is put back."""
    with investigator.aside(), buffers.unchanged():
        yield
