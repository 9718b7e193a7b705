"""What a guard consists of, built from what the user gave: model, optimizers, settings -> Parts.

Each part knows its own subject and none of the others' order; that order is written in `guard.py`. What depends on the
list of parameters is made anew when the optimizer gets new ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad._version import __version__
from steadygrad.act.actor import Actor
from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.microbatches import Accumulated, MicrobatchGate
from steadygrad.act.other_gradients import OtherGradients
from steadygrad.act.rates import Rates
from steadygrad.act.reflex import Reflex
from steadygrad.act.scaler import ScalerDriver
from steadygrad.act.schedule_and_ema import ScheduleAndEma
from steadygrad.act.snapshots import Snapshots
from steadygrad.checkpoint.run import RunCheckpoints
from steadygrad.clip import build_clipper
from steadygrad.config import GuardConfig
from steadygrad.config.switch import is_switched_off
from steadygrad.detect import Detector, standard_rules
from steadygrad.detect.rank_rules import split_rules
from steadygrad.diagnose.investigator import Investigator
from steadygrad.errors import UsageError
from steadygrad.facts import Finding, Severity
from steadygrad.guard.preflight import refuse_shards
from steadygrad.guard.run_start import RunStart
from steadygrad.judgement import Judgement
from steadygrad.measure import Meter, Transfer
from steadygrad.measure.edits import EditWatch
from steadygrad.measure.origin import OwnGradients
from steadygrad.measure.periodic_scans import Looks, PeriodicScans
from steadygrad.measure.ranks import find_ranks
from steadygrad.measure.uncleared_gradients import UnclearedGradientsWatch, UsedMark
from steadygrad.measure.updates import UpdateMeter
from steadygrad.prove import Prover
from steadygrad.prove.comparison import Comparison, Rehearse
from steadygrad.prove.paired import PairedTest
from steadygrad.prove.reference import References
from steadygrad.record import Recorder, RunDirectory, Sink
from steadygrad.record.rank_file import RankFile
from steadygrad.record.run_folder import RunFolder
from steadygrad.state.collect import find_uncopied
from steadygrad.state.trained_parameters import find_trained_parameters, find_wrappers


@dataclass(slots=True)
class Moment:
    """Where the training is: the numbers of step and epoch, and what the step under way has gathered so far."""

    next_step: int = 0
    epoch: int = 0
    batches: Accumulated = field(default_factory=Accumulated)
    looks: Looks = field(default_factory=Looks)
    logged: dict[str, list[float | Tensor]] = field(default_factory=dict)
    """What `guard.log` was told, by name, a value for each microbatch that told one."""
    num_skipped_batches: int = 0
    """Batches that `guard.batches` left out after a rollback."""
    validation_loss: float | None = None
    """The newest finite one that `guard.validate` was told, before step `validated_at`."""
    validated_at: int | None = None
    is_driven: bool = False
    """Whether a framework runs backward and clears the gradients."""

    def take_step_number(self) -> int:
        """The number of the step that is made now."""
        self.next_step += 1
        return self.next_step - 1

    def end_step(self) -> None:
        """Forget what the step has gathered."""
        self.batches, self.looks, self.is_driven = Accumulated(), Looks(), False
        if self.logged:
            self.logged = {}


class Parts:
    """The parts of one guard; a part is found here by its name, and built here once."""

    def __init__(
        self,
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
    ) -> None:
        _check_given(config, scaler, run_dir)
        self.rehearse: Rehearse
        """Set by the Guard: steps made again from the initial weights at a lower rate."""
        self.config = config
        self.off = not enabled or is_switched_off()
        self.trained = find_trained_parameters(model, optimizer)
        self.model, self.optimizers = self.trained.model, self.trained.optimizers
        self.ranks = find_ranks(model, self.trained.named, process_group=process_group)
        if not self.off:
            self.ranks.check_alike(repr(config.to_dict()))
            refuse_shards(self.trained, config.clip)
        self.clipper = None if config.clip is None else build_clipper(config.clip)
        self.transfer = Transfer(slots=6)
        self.user_scaler, self.scaler = scaler, ScalerDriver(scaler, self.optimizers)
        if self.off:
            self.buffers = BufferKeeper(nn.Module())
        else:
            self.buffers = BufferKeeper(self.model, watch=True, wrappers=find_wrappers(model))
        self.other_gradients = OtherGradients(self.model, self.optimizers, watch=not self.off)
        self.rates = Rates(self.optimizers)
        self._watch_parameters()
        given = {"scheduler": scheduler, "scaler": scaler, "ema": ema}
        _check_extras(extras, taken=given)
        self.folder = None if run_dir is None else RunFolder(run_dir, locks=self.ranks.is_first and not self.off)
        self.stateful = _keep_stateful({**given, **extras})
        self._build_judgement(given, sinks)
        self.checkpoints = RunCheckpoints(
            run_dir,
            config.checkpoint,
            model=self.model,
            optimizers=self.optimizers,
            extras={**given, **extras},
            clip=None if config.clip is None else config.clip.kind,
            ranks=self.ranks,
        )
        self.investigator = Investigator(
            dataclasses.replace(config.diagnose, enabled=config.diagnose.enabled and not self.off),
            model=self.model,
            optimizers=self.optimizers,
            run_dir=run_dir,
            ddp=self.ranks.ddp if isinstance(self.ranks.ddp, nn.parallel.DistributedDataParallel) else None,
            notes=self.judgement.proves,
        )
        self.start = self._find_start()

    def _find_start(self) -> RunStart | None:
        """What decides which run this is; None without a run directory."""
        if self.folder is None:
            return None
        return RunStart(
            self.folder,
            self.ranks,
            record=self.record,
            rank_file=self.rank_file,
            checkpoints=self.checkpoints,
            investigator=self.investigator,
        )

    def _build_judgement(self, given: dict[str, Any], sinks: Iterable[Sink]) -> None:
        """What decides, acts and writes down; `given` is what steps along with the optimizer."""
        config, clip = self.config, self.config.clip
        self.schedule_and_ema = ScheduleAndEma(
            given["scheduler"],
            given["ema"],
            model=self.model,
            interval=config.scheduler_interval,
            buffers=self.buffers,
        )
        rules, own_rules = standard_rules(config.detect, clip_threshold=getattr(clip, "max_norm", None)), None
        if self.ranks.many:
            rules, own_rules = split_rules(rules)
        detector = Detector(rules)
        self.snapshots = Snapshots(
            self.model,
            self.optimizers,
            extras=_keep_stateful({**given, "clip": self.clipper, "detect": detector, "rates": self.rates}),
            config=config.snapshots,
            agree=self.ranks.find_common if self.ranks.many else None,
            owns_rate=self.rates.is_written_by,
            num_neighbours=self.ranks.num_neighbours,
        )
        self.actor = Actor(config.policy, rates=self.rates, snapshots=self.snapshots, clipper=self.clipper)
        self.judgement = Judgement(
            config,
            detector=detector,
            schedule_and_ema=self.schedule_and_ema,
            actor=self.actor,
            recorder=Recorder([*sinks, *self._make_files()]),
            own=None if own_rules is None else Detector(own_rules),
            prover=self._build_prover(),
        )

    def _build_prover(self) -> Prover | None:
        """What tests findings on finite numbers; None where they are acted on at once, or never."""
        if self.off or not (self.config.prove.enabled and self.config.policy.require_proof):
            return None
        comparison = Comparison(
            self.config.prove,
            PairedTest(self.model, self.optimizers, ranks=self.ranks),
            aside=self._look_aside,
            rehearse=lambda steps, start, factor: self.rehearse(steps, start, factor),
        )
        references = References(
            self.model,
            self.snapshots,
            edits=lambda: self.edits,
            settings=self.list_settings,
            maximises=self._maximises,
            ranks=self.ranks,
        )
        return Prover(
            self.config.prove,
            comparison=comparison,
            references=references,
            snapshots=self.snapshots,
            rate_factor=self.config.policy.start_lr_factor,
            ranks=self.ranks,
            exempt=self.config.policy.actions,
        )

    def _maximises(self) -> bool:
        return any(group.get("maximize") for optimizer in self.optimizers for group in optimizer.param_groups)

    @contextlib.contextmanager
    def _look_aside(self) -> Iterator[None]:
        """Around replays and trials: nothing of ours takes them for a step, and every buffer is put back."""
        with self.investigator.aside(), self.buffers.unchanged():
            yield

    def _watch_parameters(self) -> None:
        """Make what depends on the list of parameters."""
        named = self.trained.named
        constant_norm = None if self.clipper is None else self.clipper.constant_norm
        self.meter = Meter(named, self.config.measure.implementation, max_norm=constant_norm, ranks=self.ranks)
        self.ranks.watch(named)
        self.own_gradients = OwnGradients(self.ranks, named)
        self.updates = UpdateMeter(named, ranks=self.ranks)
        self.edits = EditWatch(named)
        self.uncleared_gradients = UnclearedGradientsWatch(named)
        self.used = UsedMark()
        self.reflex = Reflex(self.optimizers, self.clipper)
        self.gate = MicrobatchGate(
            [p for _, p in named],
            meter=self.meter,
            transfer=self.transfer,
            scaler=self.scaler,
            buffers=self.buffers,
        )
        self.periodic_scans = PeriodicScans(self.trained, self.config.measure, ranks=self.ranks)
        self.devices = sorted({p.device for _, p in named}, key=str)
        self._signature = _sign(self.optimizers)

    @property
    def has_new_parameters(self) -> bool:
        """Whether the optimizers have others than were watched so far: `add_param_group`, the usual way to unfreeze."""
        return _sign(self.optimizers) != self._signature

    def watch_new_parameters(self) -> None:
        """From now on these are watched too. Every step before must have been judged."""
        self.trained = find_trained_parameters(self.model, self.optimizers)
        self.own_gradients.close()
        self._watch_parameters()

    def zero_grad(self) -> None:
        """Let the gradients go."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def learning_rates(self) -> tuple[float, ...]:
        """The rates that the next step uses, of all groups; NaN for an optimizer that finds its own."""
        return self.rates.learning_rates()

    def list_settings(self) -> tuple[tuple[float, float], ...]:
        """Learning rate and weight decay of every group, as a step would use them now."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        decays = [float(group.get("weight_decay") or 0.0) * self.rates.weight_decay_factor for group in groups]
        return tuple((0.0 if math.isnan(rate) else rate, decay) for rate, decay in zip(self.learning_rates(), decays))

    def _make_files(self) -> list[Sink]:
        """The files of the run directory, which `RunStart` opens when it is known which run this is."""
        self.rank_file: RankFile | None = None
        self.record: RunDirectory | None = None
        if self.folder is None or self.off:
            return []
        if self.ranks.many:
            self.rank_file = RankFile(self.folder.path, self.ranks.rank, self.ranks.num, opens=False)
        if not self.ranks.is_first:
            return [] if self.rank_file is None else [self.rank_file]
        self.record = RunDirectory(
            self.folder.path,
            config=self.config.to_dict(),
            parameters=[name for name, _ in self.trained.named],
            versions={"steadygrad": __version__, "torch": torch.__version__},
            opens=False,
        )
        return [self.record]


def _sign(optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[int, ...]]:
    """What changes when parameters are added or exchanged, looked at in microseconds."""
    return [tuple(map(id, group["params"])) for optimizer in optimizers for group in optimizer.param_groups]


def foresee_uncopied(parts: Parts) -> list[Finding]:
    """A warning before the first step, when something cannot be copied and neither rollback nor resume will know it."""
    left_out = find_uncopied(parts.model, parts.optimizers, parts.stateful)
    found = [report_left_out(0, "snapshots and checkpoints, because it cannot be copied", left_out)] if left_out else []
    return [*found, *foresee_unsaved(parts, 0)]


def foresee_unsaved(parts: Parts, step: int) -> list[Finding]:
    """The same for what has no plain form, so that checkpoints lack it."""
    left_out = parts.checkpoints.find_left_out()
    return [report_left_out(step, "checkpoints", left_out)] if left_out else []


def report_left_out(step: int, where: str, what: Sequence[str]) -> Finding:
    """Some state will not be put back."""
    return Finding(
        kind="uncopied_state",
        severity=Severity.WARNING,
        step=step,
        message=f"left out of {where}: {', '.join(what)}",
        advice="Leave it out of the object's state_dict(), and make it anew where it is needed.",
    )


def _check_given(config: Any, scaler: Any, run_dir: Any) -> None:
    """What would fail far from here, with an error that names nobody."""
    if not isinstance(config, GuardConfig):
        how = "GuardConfig.load(path)" if isinstance(config, str | Path) else "GuardConfig.from_dict(values)"
        raise UsageError(f"Guard's config must be a GuardConfig, got {config!r:.80}. Make one: {how}.")
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise UsageError(f"Guard's scaler must be a torch.amp.GradScaler or None, got {type(scaler).__name__}.")
    if run_dir is not None and (not isinstance(run_dir, str | Path) or not str(run_dir)):
        raise UsageError(f"Guard's run_dir must be the path of a folder or None, got {run_dir!r}. Use runs/first.")


def _check_extras(extras: Mapping[str, Any], taken: Mapping[str, Any]) -> None:
    for name, extra in extras.items():
        if name in taken:
            raise UsageError(f"extras has {name!r}, which Guard takes as an argument of its own. Use {name}=... .")
        if not (hasattr(extra, "state_dict") and hasattr(extra, "load_state_dict")):
            raise UsageError(
                f"extras[{name!r}] is a {type(extra).__name__}, which cannot be saved. Give it state_dict() and "
                "load_state_dict()."
            )


def _keep_stateful(things: Mapping[str, Any]) -> dict[str, Any]:
    """Those that can be saved and put back; an EMA of one's own kind may have no state."""
    return {name: thing for name, thing in things.items() if hasattr(thing, "load_state_dict")}
