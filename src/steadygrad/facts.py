"""The nouns that pass between the stages: plain numbers, frozen, no torch.

A `Reading` is what was measured at one optimizer step; a `Finding` is what a rule says about Readings; a `Verdict` is
what to do and why; an `Outcome` is what was done; an `Incident` joins them for the record; a `StepRecord` is one
step's scalars. Nothing here computes anything beyond looking at its own fields.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Number = int | float
Evidence = Mapping[str, "Number | str | Sequence[Number | str]"]


class Severity(enum.StrEnum):
    """How much a Finding matters. A healthy run has none above `info`."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """Position in the order of declaration, so that severities can be compared."""
        return list(Severity).index(self)


class Action(enum.StrEnum):
    """What a Verdict can ask for. `RAISE` is another name for `HALT`."""

    NONE = "none"
    CLIP = "clip"
    SKIP = "skip"
    SANITIZE = "sanitize"
    SCALE_LR = "scale_lr"
    SCALE_WEIGHT_DECAY = "scale_weight_decay"
    ROLLBACK = "rollback"
    HALT = "halt"
    RAISE = "halt"


@dataclass(frozen=True, slots=True)
class GradientStats:
    """One parameter's gradient: `norm` and `max_abs` over its finite elements, and how many were not finite."""

    norm: float
    max_abs: float
    num_nonfinite: int
    num_nan: int
    num_zeros: int
    numel: int

    @property
    def num_inf(self) -> int:
        """Elements that are plus or minus infinity."""
        return self.num_nonfinite - self.num_nan

    @property
    def zero_share(self) -> float:
        """Share of elements that are exactly zero; 0 for a gradient without elements."""
        return self.num_zeros / self.numel if self.numel else 0.0


NUM_COLUMNS = 5
"""Columns of the table of statistics, in the order of GradientStats: norm, max_abs, num_nonfinite, num_nan, num_zeros."""


@dataclass(frozen=True, slots=True)
class GradientTable(Mapping[str, GradientStats]):
    """Per-parameter statistics of one step, decoded only for the parameters that somebody asks about.

    `cells` holds `NUM_COLUMNS` numbers for each name, row by row. Parameters without a gradient are absent.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    cells: Sequence[float] = field(repr=False)

    def row(self, index: int) -> GradientStats:
        """The statistics of the `index`-th parameter that had a gradient."""
        norm, max_abs, nonfinite, nan, zeros = self.cells[index * NUM_COLUMNS : (index + 1) * NUM_COLUMNS]
        return GradientStats(norm, max_abs, int(nonfinite), int(nan), int(zeros), self.numels[index])

    def __getitem__(self, name: str) -> GradientStats:
        try:
            return self.row(self.names.index(name))
        except ValueError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def norms(self) -> dict[str, float]:
        """Name -> L2 norm over the finite elements."""
        return {name: self.cells[i * NUM_COLUMNS] for i, name in enumerate(self.names)}

    def nonfinite(self) -> dict[str, GradientStats]:
        """The parameters whose gradient holds a NaN or an Inf, in the order of the model."""
        return {name: self.row(i) for i, name in enumerate(self.names) if self.cells[i * NUM_COLUMNS + 2] > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was measured at one optimizer step.

    `grad_norm` is the global norm before clipping: NaN when a gradient held a NaN, inf when it held an Inf, as torch
    gives it. `finite_grad_norm` is the norm of the finite elements, always a number. `loss` is the sum over the
    step's microbatches, None when the caller ran backward alone.
    """

    step: int
    loss: float | None
    grad_norm: float
    finite_grad_norm: float
    num_nonfinite: int
    num_nan: int
    clip_coefficient: float
    skipped: bool
    learning_rates: tuple[float, ...]
    loss_scale: float | None = None
    num_microbatches: int = 1
    num_dropped_microbatches: int = 0
    gradients: GradientTable = field(default_factory=lambda: GradientTable((), (), ()), repr=False)
    parameter_norms: Mapping[str, float] | None = field(default=None, repr=False)
    update_ratios: Mapping[str, float] | None = field(default=None, repr=False)

    @property
    def loss_is_nonfinite(self) -> bool:
        """Whether a loss was given and is NaN or Inf."""
        return self.loss is not None and not math.isfinite(self.loss)

    @property
    def is_nonfinite(self) -> bool:
        """Whether loss or gradients hold a NaN or an Inf."""
        return self.num_nonfinite > 0 or self.loss_is_nonfinite

    @property
    def clipped(self) -> bool:
        """Whether clipping engaged."""
        return not self.skipped and self.clip_coefficient < 1.0

    @property
    def applied_norm(self) -> float:
        """The norm that reached the optimizer: 0 for a skipped step."""
        return 0.0 if self.skipped else self.finite_grad_norm * self.clip_coefficient


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule says: `kind` and `severity`, the step where it happened, numbers as evidence, what to do."""

    kind: str
    severity: Severity
    step: int
    message: str
    advice: str = ""
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Who did it: the op, the line, the module, and what its inputs looked like."""

    kind: str
    phase: str
    op: str | None = None
    module: str | None = None
    file: str | None = None
    line: int | None = None
    source: str | None = None
    inputs: tuple[str, ...] = ()
    explanation: str = ""
    fixes: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()
    reproducible: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do about a Finding, and why."""

    action: Action
    reason: str
    factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was done: the numbers before and after."""

    action: Action
    message: str
    before: Mapping[str, Number] = field(default_factory=dict)
    after: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Everything about one event, as it is written down."""

    step: int
    finding: Finding
    verdict: Verdict
    outcome: Outcome
    cause: Cause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step's scalars, as they are written down."""

    step: int
    loss: float | None
    grad_norm: float
    clip_coefficient: float
    clipped: bool
    skipped: bool
    num_nonfinite: int
    learning_rates: tuple[float, ...]
    loss_scale: float | None
    num_microbatches: int
    num_dropped_microbatches: int
    time_seconds: float

    @classmethod
    def of(cls, reading: Reading, *, time_seconds: float) -> StepRecord:
        """The scalars of a Reading; `time_seconds` is the wall clock since the run began."""
        return cls(
            step=reading.step,
            loss=reading.loss,
            grad_norm=reading.grad_norm,
            clip_coefficient=reading.clip_coefficient,
            clipped=reading.clipped,
            skipped=reading.skipped,
            num_nonfinite=reading.num_nonfinite,
            learning_rates=reading.learning_rates,
            loss_scale=reading.loss_scale,
            num_microbatches=reading.num_microbatches,
            num_dropped_microbatches=reading.num_dropped_microbatches,
            time_seconds=time_seconds,
        )
