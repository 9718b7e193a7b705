"""One optimizer step in numbers: what was measured, and which of it is recorded.

A `Reading` has everything, also per parameter; a `StepRecord` holds its scalars. A table of gradients keeps the numbers
as they came from the device and decodes a row only when it is accessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


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
"""Columns of the table, in the order of GradientStats: norm, max_abs, num_nonfinite, num_nan, num_zeros."""


@dataclass(frozen=True, slots=True)
class GradientTable(Mapping[str, GradientStats]):
    """Per-parameter statistics of one step, decoded only for the parameters that are accessed.

    `cells` holds `NUM_COLUMNS` numbers for each name, row by row. Parameters without a gradient are absent.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    cells: Sequence[float] = field(repr=False)

    def row(self, index: int) -> GradientStats:
        """Return the statistics of the `index`-th parameter that had a gradient."""
        norm, max_abs, nonfinite, nan, zeros = self.cells[index * NUM_COLUMNS : (index + 1) * NUM_COLUMNS]
        return GradientStats(norm, max_abs, int(nonfinite), int(nan), int(zeros), self.numels[index])

    def __getitem__(self, name: str) -> GradientStats:
        try:
            return self.row(self.names.index(name))  # linear in the number of parameters
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
        """Return the parameters whose gradient holds a NaN or an Inf, in the order of the model."""
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
    missing: tuple[str, ...] = field(default=(), repr=False)
    """Trainable parameters held by an optimizer whose `.grad` was None at this step."""
    missing_share: float = 0.0
    """Their share of all trainable elements that the optimizers hold."""
    stale: tuple[str, ...] = field(default=(), repr=False)
    """Parameters whose `.grad` still held the previous step's when this step's first backward began: not cleared."""
    spoilt_buffers: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Buffers that this step's forward made NaN or Inf, with the number of bad elements; they were put back."""
    bad_rates: Mapping[int, float] = field(default_factory=dict, repr=False)
    """Position of a parameter group -> its learning rate, where that is NaN or Inf; the step was then skipped."""
    is_cleaned: bool = False
    """Whether the loss was NaN or Inf, and the program itself made its gradients finite before the step."""
    adam_rms: Mapping[str, float] | None = field(default=None, repr=False)
    """Adam family: name -> sqrt(mean(g^2 / max(v, eps^2))), v with bias correction, after this step entered it."""
    update_norm: float | None = None
    """Global L2 norm of what the optimizer added to the weights; None when it was not measured."""
    extra: Mapping[str, float] = field(default_factory=dict, repr=False)
    """What the program passed to `guard.log`, by name; empty with several ranks, whose values may differ."""

    # What follows from the numbers above. Not properties: thirty rules ask for it at every step.
    learning_rate: float | None = field(init=False, repr=False, compare=False)
    """The largest learning rate of the step; None when there is none."""
    loss_is_nonfinite: bool = field(init=False, repr=False, compare=False)
    """Whether a loss was given and is NaN or Inf."""
    is_nonfinite: bool = field(init=False, repr=False, compare=False)
    """Whether loss or gradients hold a NaN or an Inf."""
    clipped: bool = field(init=False, repr=False, compare=False)
    """Whether clipping engaged."""

    def __post_init__(self) -> None:
        """Work out what follows."""
        derive = object.__setattr__  # frozen; dataclasses.replace() comes through here too
        bad_loss = self.loss is not None and not math.isfinite(self.loss)
        # A group without a rate counts as NaN, which max() would return or not depending on its place.
        derive(self, "learning_rate", max([rate for rate in self.learning_rates if rate == rate], default=None))
        derive(self, "loss_is_nonfinite", bad_loss)
        derive(self, "is_nonfinite", bad_loss or self.num_nonfinite > 0)
        derive(self, "clipped", not self.skipped and self.clip_coefficient < 1.0)

    @property
    def is_plain(self) -> bool:
        """Whether it is a finite step that was made, with the numbers of every step alone: nothing measured beside."""
        return not (
            self.skipped
            or self.is_nonfinite
            or self.spoilt_buffers
            or self.bad_rates
            or self.loss_scale is not None
            or self.adam_rms
            or self.update_ratios
            or self.update_norm
        )

    @property
    def applied_norm(self) -> float:
        """The norm that reached the optimizer: 0 for a skipped step."""
        return 0.0 if self.skipped else self.finite_grad_norm * self.clip_coefficient


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step's scalars, as they are recorded."""

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
    extra: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the user's program logged beside the loss, with `guard.log`."""

    @classmethod
    def of(cls, reading: Reading, *, time_seconds: float, extra: Mapping[str, float] | None = None) -> StepRecord:
        """Return the scalars of a Reading; `time_seconds` is the wall clock since the run began."""
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
            extra=extra or {},
        )
