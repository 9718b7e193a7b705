"""Names from a config file or the command line -> the clip strategy, the policy and the trackers that they mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from steadygrad.config import AdaGC, AdaptiveUnitClip, AutoClip, ClipValue, FixedNorm, OutlierClip, Policy, ZClip
from steadygrad.config.clip import ClipStrategy
from steadygrad.record import Sink
from steadygrad.trainer.ranks import is_first

_CLIPS: dict[str, Callable[[float | None], ClipStrategy | None]] = {
    "none": lambda norm: None,  # noqa: ARG005
    "fixed_norm": lambda norm: None if norm is None else FixedNorm(max_norm=norm),
    "outliers": lambda norm: OutlierClip(),  # noqa: ARG005
    "zclip": lambda norm: ZClip(max_norm=norm),
    "autoclip": lambda norm: AutoClip(),  # noqa: ARG005
    "adagc": lambda norm: AdaGC() if norm is None else AdaGC(max_norm=norm),
    "adaptive_unit": lambda norm: AdaptiveUnitClip(),  # noqa: ARG005
    "value": lambda norm: ClipValue() if norm is None else ClipValue(value=norm),
}
_POLICIES: dict[str, Callable[[], Policy]] = {
    "default": Policy,
    "observe": Policy.observe,
    "patient": Policy.patient,
    "eager": Policy.eager,
    "strict": Policy.strict,
}


class Choices(Protocol):
    """The settings that every recipe has."""

    @property
    def tensorboard(self) -> bool:
        """Whether to write TensorBoard's event file."""

    @property
    def wandb(self) -> bool:
        """Whether to open a run of Weights & Biases."""


def choose_clip(name: str, max_norm: float | None) -> ClipStrategy | None:
    """Return the clip strategy of this name; `max_norm` is its threshold, if it has one."""
    return _CLIPS[name](max_norm)


def choose_policy(name: str) -> Policy:
    """Return the policy of this name."""
    return _POLICIES[name]()


def open_trackers(settings: Choices, run_dir: Path | None) -> list[Sink]:
    """Return the trackers that are asked for, on rank 0: TensorBoard writes into the run directory."""
    sinks: list[Sink] = []
    if not is_first():
        return sinks
    if settings.tensorboard:
        from steadygrad.record.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink("runs/tensorboard" if run_dir is None else run_dir / "tensorboard"))
    if settings.wandb:
        from steadygrad.record.wandb import WandbSink

        place: dict[str, Any] = {} if run_dir is None else {"dir": str(run_dir), "name": run_dir.name}
        sinks.append(WandbSink(**place))
    return sinks


class StaysOpen(Sink):
    """A tracker that several guards write to, one after the other: it is closed by `end()`, not with a guard."""

    def __init__(self, tracker: Sink) -> None:
        self._tracker = tracker
        self.write_step = tracker.write_step  # type: ignore[method-assign]
        self.write_layers = tracker.write_layers  # type: ignore[method-assign]
        self.write_validation = tracker.write_validation  # type: ignore[method-assign]
        self.write_incident = tracker.write_incident  # type: ignore[method-assign]
        self.flush = tracker.flush  # type: ignore[method-assign]

    def end(self) -> None:
        """Close the tracker."""
        self._tracker.close()
