"""GuardConfig: everything that can be set on a Guard."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygrad.config.checkpoint import CheckpointConfig
from steadygrad.config.checks import (
    as_enum,
    is_number,
    require,
    require_booleans,
    require_kinds,
)
from steadygrad.config.clip import ClipStrategy, OutlierClip
from steadygrad.config.detect import DetectConfig
from steadygrad.config.parts import DiagnoseConfig, Interval, MeasureConfig, Precision, RecordConfig, SnapshotConfig
from steadygrad.config.plain import build, read_mapping, to_plain
from steadygrad.config.policy import Policy
from steadygrad.config.prove import ProveConfig
from steadygrad.errors import ConfigError
from steadygrad.facts import Action, Incident


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Everything that can be set on a Guard.

    >>> GuardConfig(clip=FixedNorm(max_norm=0.5), on_nonfinite=Action.SKIP).clip
    FixedNorm(max_norm=0.5)
    """

    clip: ClipStrategy | None = field(default_factory=OutlierClip)
    """How gradients are clipped; None: not at all. The default touches only a step whose norm is a hundred times the
    run's usual one: a fixed norm of 1.0 clips most steps of most small models, and changes how they train."""
    on_nonfinite: Action = Action.SKIP
    """What to do about a NaN or Inf in loss or gradients: SKIP the step, SANITIZE the gradients, or RAISE."""
    sanitize_value: float = 0.0
    """What SANITIZE writes in place of each non-finite gradient element."""
    drop_bad_microbatches: bool = False
    """With accumulation, drop only the bad microbatch instead of the whole step, and average over the others. Costs one
    host read per microbatch and a second set of gradients: a gradient can be bad while its loss is fine, so each
    microbatch must be checked before it is added."""
    autocast: Precision | None = None
    """Autocast opened around fn and the loss; None: whatever the caller has open."""
    scheduler_interval: Interval = Interval.STEP
    """When a scheduler handed to Guard is stepped: after each applied step, or at `end_epoch()`."""
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    detect: DetectConfig = field(default_factory=DetectConfig)
    prove: ProveConfig = field(default_factory=ProveConfig)
    policy: Policy = field(default_factory=Policy)
    snapshots: SnapshotConfig = field(default_factory=SnapshotConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    diagnose: DiagnoseConfig = field(default_factory=DiagnoseConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    on_incident: Callable[[Incident], None] | None = None
    """Called with each Incident."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "on_nonfinite", as_enum(Action, self.on_nonfinite, "GuardConfig.on_nonfinite"))
        object.__setattr__(
            self, "scheduler_interval", as_enum(Interval, self.scheduler_interval, "GuardConfig.scheduler_interval")
        )
        if self.autocast is not None:
            object.__setattr__(self, "autocast", as_enum(Precision, self.autocast, "GuardConfig.autocast"))
        require_booleans(self)
        allowed = (Action.SKIP, Action.SANITIZE, Action.HALT)
        require(
            self.on_nonfinite in allowed,
            self,
            "on_nonfinite",
            "be Action.SKIP, Action.SANITIZE or Action.RAISE",
            "SKIP is the safe choice.",
        )
        require(
            self.clip is None or isinstance(self.clip, ClipStrategy),
            self,
            "clip",
            "be a clip strategy or None",
            "For example clip=FixedNorm(max_norm=1.0).",
        )
        require(
            is_number(self.sanitize_value) and math.isfinite(self.sanitize_value),
            self,
            "sanitize_value",
            "be a finite number",
            "Use 0.0.",
        )
        require(
            self.on_incident is None or callable(self.on_incident),
            self,
            "on_incident",
            "be callable or None",
            "It is called with each Incident.",
        )
        require_kinds(self, _PARTS)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GuardConfig:
        """Build from nested plain values, as read from a file; one error names every wrong field."""
        return typing.cast(GuardConfig, build(cls, values))

    @classmethod
    def load(cls, path: str | Path) -> GuardConfig:
        """Read a YAML or TOML file."""
        path = Path(path)
        try:
            return cls.from_dict(read_mapping(path))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that `from_dict` reads back; callables are left out."""
        return typing.cast(dict[str, Any], to_plain(self))


_PARTS = {
    "measure": MeasureConfig,
    "detect": DetectConfig,
    "prove": ProveConfig,
    "policy": Policy,
    "snapshots": SnapshotConfig,
    "checkpoint": CheckpointConfig,
    "diagnose": DiagnoseConfig,
    "record": RecordConfig,
}
