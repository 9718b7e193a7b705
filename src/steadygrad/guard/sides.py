"""The two sides of a guard, built from a training: one handles tensors in every step, the other judges numbers.

Only the builder holds a whole side. Hooks on the model are registered here, buffers first: they fire in reverse order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from steadygrad.act.actor import Actor
from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.other_gradients import OtherGradients
from steadygrad.act.rates import Rates
from steadygrad.act.snapshots import Snapshots
from steadygrad.act.window import Window
from steadygrad.checkpoint.run import RunCheckpoints
from steadygrad.clip import Clipper, build_clipper
from steadygrad.config import GuardConfig
from steadygrad.detect import Detector, standard_rules
from steadygrad.detect.rank_rules import split_rules
from steadygrad.diagnose.investigator import Investigator
from steadygrad.guard.optimizers import Optimizers
from steadygrad.guard.preflight import refuse_devices, refuse_shards
from steadygrad.guard.proving import is_proving, make_prover
from steadygrad.guard.rehearsal import MakeGuard
from steadygrad.guard.run_start import RunStart, make_files
from steadygrad.guard.training import Training, keep_stateful
from steadygrad.guard.watched import Watched
from steadygrad.judgement import Judgement
from steadygrad.judgement.speaker import Speaker
from steadygrad.measure.ranks import Ranks, find_ranks
from steadygrad.record import Recorder, Sink
from steadygrad.record.rank_file import RankFile
from steadygrad.state.trained_parameters import TrainedParameters, find_wrappers


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSide:
    """The pieces that handle tensors, in every step."""

    training: Training
    ranks: Ranks
    clipper: Clipper | None
    buffers: BufferKeeper
    other_gradients: OtherGradients
    optimizers: Optimizers
    watched: Watched


def build_device_side(
    training: Training, trained: TrainedParameters, model: nn.Module, process_group: Any
) -> DeviceSide:
    """Build the device side; `model` is as the user passed it, with its wrappers."""
    config = training.config
    ranks = find_ranks(model, trained.named, process_group=process_group)
    if not training.off:
        # Before the checks below: one of them may raise on this rank alone, and the others would wait in this exchange.
        ranks.check_alike(repr(config.to_dict()))
        refuse_devices({parameter.device.type for _, parameter in trained.named})
        refuse_shards(trained, config.clip)
    clipper = None if config.clip is None else build_clipper(config.clip)
    buffers = make_buffers(training, model)
    other_gradients = OtherGradients(training.model, training.optimizers, watch=not training.off)
    optimizers = Optimizers(training, buffers)
    watched = Watched(trained, config.measure, clipper=clipper, ranks=ranks, scaler=optimizers.scaler, buffers=buffers)
    if not training.off and config.measure.scan_every:
        watched.listen((trained.model, *find_wrappers(model)))
    return DeviceSide(
        training=training,
        ranks=ranks,
        clipper=clipper,
        buffers=buffers,
        other_gradients=other_gradients,
        optimizers=optimizers,
        watched=watched,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSide:
    """The pieces that judge, act and record, from numbers."""

    window: Window
    snapshots: Snapshots
    actor: Actor
    checkpoints: RunCheckpoints
    investigator: Investigator
    judgement: Judgement
    rank_file: RankFile | None
    start: RunStart | None


def build_host_side(
    device: DeviceSide, run_dir: str | Path | None, sinks: Iterable[Sink], make_guard: MakeGuard
) -> HostSide:
    """Build the host side; `sinks` receive the record in addition to the files of `run_dir`."""
    training, ranks, rates = device.training, device.ranks, device.optimizers.rates
    config = training.config
    files = make_files(training, run_dir, ranks, [name for name, _ in device.watched.trained.named])
    detector, own_detector = make_detectors(config, ranks)
    snapshots = make_snapshots(training, rates, ranks, clipper=device.clipper, detector=detector)
    window = Window(enabled=not training.off)
    checkpoints = make_checkpoints(training, run_dir, ranks, device.buffers)
    actor = Actor(
        config.policy,
        rates=rates,
        snapshots=snapshots,
        clipper=device.clipper,
        window=window,
        restore_checkpoint=functools.partial(checkpoints.roll_back, rates.is_written_by),
    )
    investigator = make_investigator(training, run_dir, ranks)
    prover = make_prover(
        training,
        device.optimizers,
        snapshots,
        watched=device.watched,
        buffers=device.buffers,
        ranks=ranks,
        investigator=investigator,
        make_guard=make_guard,
    )
    judgement = Judgement(
        config,
        detector=detector,
        schedule_and_ema=device.optimizers.schedule_and_ema,
        actor=actor,
        recorder=Recorder([*sinks, *([] if files is None else files.sinks)]),
        own=own_detector,
        prover=prover,
        speaker=None if training.off else Speaker(training.model, training.optimizers),
        is_first=ranks.is_first,
    )
    return HostSide(
        window=window,
        snapshots=snapshots,
        actor=actor,
        checkpoints=checkpoints,
        investigator=investigator,
        judgement=judgement,
        rank_file=None if files is None else files.rank_file,
        start=None if files is None else RunStart(files, ranks, checkpoints=checkpoints, investigator=investigator),
    )


# --- single pieces ----------------------------------------------------------------------------------------------------


def make_buffers(training: Training, model: nn.Module) -> BufferKeeper:
    """Build the keeper of buffers; `model` keeps its wrappers, since it may be called through them."""
    if training.off:
        return BufferKeeper(nn.Module())  # copies nothing and hooks nothing
    return BufferKeeper(training.model, watch=True, wrappers=find_wrappers(model))


def make_detectors(config: GuardConfig, ranks: Ranks) -> tuple[Detector, Detector | None]:
    """Build the rules; with several ranks, separate ones for what all have seen and what each alone has seen."""
    rules = standard_rules(config.detect, clip_threshold=getattr(config.clip, "max_norm", None))
    if not ranks.many:
        return Detector(rules), None
    rules, own_rules = split_rules(rules)
    return Detector(rules), Detector(own_rules)


def make_snapshots(
    training: Training, rates: Rates, ranks: Ranks, *, clipper: Clipper | None, detector: Detector
) -> Snapshots:
    """Build the snapshots that a rollback returns to; they leave out the user's extras."""
    enabled = training.config.snapshots.enabled and not training.off  # memory is pinned as soon as they are made
    return Snapshots(
        training.model,
        training.optimizers,
        extras=keep_stateful({**training.along, "clip": clipper, "detect": detector, "rates": rates}),
        config=dataclasses.replace(training.config.snapshots, enabled=enabled),
        agree=ranks.find_common if ranks.many else None,
        owns_rate=rates.is_written_by,
        num_neighbours=ranks.num_neighbours,
    )


def make_checkpoints(
    training: Training, run_dir: str | Path | None, ranks: Ranks, buffers: BufferKeeper
) -> RunCheckpoints:
    """Build the store that saves the whole training."""
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
    """Build what replays bad steps, and captures steps for the prover."""
    diagnose = training.config.diagnose
    return Investigator(
        dataclasses.replace(diagnose, enabled=diagnose.enabled and not training.off),
        model=training.model,
        optimizers=training.optimizers,
        run_dir=run_dir,
        ddp=ranks.ddp if isinstance(ranks.ddp, nn.parallel.DistributedDataParallel) else None,
        notes=is_proving(training),
    )
