"""The smaller parts of GuardConfig: what is measured, kept and recorded, and how often."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from steadygrad.config.checks import (
    as_enum,
    require_booleans,
    require_positive,
    require_whole,
)


class Interval(enum.StrEnum):
    """When a scheduler handed to Guard is stepped."""

    STEP = "step"
    EPOCH = "epoch"


class Precision(enum.StrEnum):
    """The number format of autocast."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Implementation(enum.StrEnum):
    """Which kernel measures the gradients; `auto` uses Triton on CUDA if it is installed, foreach otherwise."""

    AUTO = "auto"
    REFERENCE = "reference"
    FOREACH = "foreach"
    TRITON = "triton"


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """What is measured beyond the gradients."""

    implementation: Implementation = Implementation.AUTO
    """Which kernel measures the gradients."""
    parameters_every: int = 0
    """Steps between two readings of parameter norms and update-to-weight ratios (two more passes over the weights
    and a copy of them while the optimizer runs); 0: never."""

    scan_every: int = 100
    """Steps between two scans of the batch, the activations, the weights and Adam's ratio (a few passes over the
    weights, no wait); the first step's graph is scanned too. 0: only after a bad step."""

    def __post_init__(self) -> None:
        kernel = as_enum(Implementation, self.implementation, "MeasureConfig.implementation")
        object.__setattr__(self, "implementation", kernel)
        for name in ("scan_every", "parameters_every"):
            require_whole(self, name, least=0, hint="0 switches it off.")


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig:
    """Copies of the training state in host memory, to roll back to.

    The defaults follow PaLM (back about 100 steps, skip 200 to 500 batches), scaled down at the start of a run.
    """

    every: int = 100
    """Steps between two snapshots; early in a run they come closer together."""
    keep: int = 3
    """Snapshots held at a time; fewer when `max_bytes` has no room for them."""
    good_after: int = 20
    """Healthy steps beyond a snapshot before it counts as good."""
    max_bytes: int | None = None
    """Host memory for all of them; None: a quarter of what is free when the Guard is created, shared by the ranks of
    the machine. When not even one fits, there are none, and the summary says so."""
    skip_batches: int = 200
    """Batches skipped after a rollback; fewer early in a run."""
    enabled: bool = True
    """False: no snapshots, so nothing to roll back to."""

    def __post_init__(self) -> None:
        require_booleans(self)
        require_positive(self)


@dataclass(frozen=True, kw_only=True)
class DiagnoseConfig:
    """When a bad step is replayed to find what broke it, and what is kept of it."""

    enabled: bool = True
    """False: no replay, and nothing is kept for one."""
    first: int = 3
    """How many of a run's first bad steps are all replayed."""
    cooldown: int = 100
    """Steps between replays after those: a replay costs as much as several steps."""
    keep_batches: bool = True
    """Keep the batch of a replayed step in the run directory's `batches/`."""
    max_bytes: int = 256 << 20
    """Size limit for all kept batches together."""
    max_batches: int = 16
    """Batches kept at most."""

    def __post_init__(self) -> None:
        require_booleans(self)
        require_positive(self)


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """What is written into the run directory."""

    steps_every: int = 1
    """Steps between two lines of steps.jsonl; skipped steps are always written."""
    layers_every: int = 100
    """Steps between two lines of layers.jsonl; steps with a finding above info are always written; 0: never."""

    def __post_init__(self) -> None:
        require_whole(self, "steps_every", least=1, hint="Use 1.")
        require_whole(self, "layers_every", least=0, hint="0 switches it off.")
