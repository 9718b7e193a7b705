"""Thresholds of the rules, one value object per family. Absolute thresholds give `info`; see `DetectConfig`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from steadygrad.config.checks import (
    is_number,
    require,
    require_booleans,
    require_kinds,
    require_positive,
    set_names,
)


@dataclass(frozen=True, kw_only=True)
class LossThresholds:
    """What counts as trouble in the training loss."""

    spike_score: float = 6.0
    """Robust standard deviations above the recent level at which a loss is a spike, in Gaussian noise; heavier tails
    raise the limit by themselves. OLMo-core uses 6 standard deviations too."""
    spike_floor: float = 0.01
    """Smallest standard deviation assumed, as a share of the level: a loss without noise does not mean certainty."""
    level_window: int = 17
    """Losses whose median is the recent level. Short, so that early decay does not look like spread."""
    spread_window: int = 256
    """Distances from the level that make up the spread."""
    restart_ratio: float = 2.0
    """Growth of the learning rate in one step that counts as a restart, after which the loss may rise for a while."""
    restart_grace: int = 64
    """Steps after a restart in which only a loss above the run's first ones is a finding."""
    explosion_ratio: float = 10.0
    """Multiple of the previous epoch's or window's loss at which the loss has exploded."""
    explosion_patience: int = 8
    """Steps in a row that must be that high: single batches of one sample can reach it by chance."""
    recovery_steps: int = 16
    """Steps after a reported explosion within which the loss must recover; below `SnapshotConfig.good_after`, so that
    no snapshot of the broken state counts as good."""
    recovery_ratio: float = 3.0
    """Multiple of the loss before the explosion above which it has not recovered."""
    block: int = 16
    """Losses whose median is one point of the slow trend."""
    divergence_blocks: int = 4
    """Blocks in a row that must each be above the one before."""
    divergence_share: float = 0.5
    """Share of the progress since the start that must be lost."""
    plateau_steps: int = 1000
    """Steps without progress that are reported (info)."""
    plateau_improvement: float = 0.01
    """Least progress, as a share of the best level."""
    zero_patience: int = 3
    """Losses of exactly 0 in a row that are reported (info); one is enough where the others were far from 0."""

    def __post_init__(self) -> None:
        require_positive(self)
        require(self.level_window >= 3, self, "level_window", "be at least 3", "Use 17.")
        require(self.spread_window >= 16, self, "spread_window", "be at least 16", "Use 256.")
        require(self.block >= 4, self, "block", "be at least 4", "Use 16.")


@dataclass(frozen=True, kw_only=True)
class StartThresholds:
    """What counts as harm in the first steps of a run, all relative to how it began."""

    steps: int = 28
    """Steps that are examined; the state before the first one is kept for a rollback that long."""
    weight_growth: float = 1.4
    """Multiple of their initial norm that the weights must have reached within the first eight steps."""
    runaway_growth: float = 3.0
    """... and the multiple from which it is reported within `runaway_steps` instead of after `steps`."""
    runaway_steps: int = 12
    """Steps within which weights that ran that far must have made the loss or the gradient grow."""
    gradient_ratio: float = 2.0
    """Multiple of the first gradient norm that counts as growth."""
    loss_rise: float = 0.1
    """Share of the first loss by which it must have risen where the gradient did not grow."""
    lost_share: float = 0.75
    """Share of what had been learnt that a later loss must have given back: a gradient that grows while the loss falls
    does no harm. Progress of less than `loss_rise` counts as that much."""
    climb_ratio: float = 3.0
    """Multiple of the first losses at which the loss has climbed."""
    climb_patience: int = 8
    """Steps in a row that must be that high."""
    climb_score: float = 3.5
    """... and how far from the first ones, in standard deviations of their logarithms: batches of one sample vary."""
    ruin_ratio: float = 100.0
    """Multiple of the first gradient norm that the last one before NaN or Inf must reach."""
    thrown_ratio: float = 5.0
    """Multiple of the first loss that it must have jumped to, if it is flat and no lower afterwards."""
    learnt_share: float = 0.3
    """Share of the first loss below which the run has learnt something anyway."""
    recovered_share: float = 0.45
    """The same after `steps`, for weights that did not run so far."""
    usual_move: float = 0.1
    """How far eight steps should move the weights, as a share of their norm: where they ran away, this is what the rate
    is lowered to. 0.02 to 0.3 is usual."""
    adam_move: float = 0.25
    """The same for optimizers that divide by the gradient's size: their first steps are their largest, while those of
    SGD with a momentum of 0.9 move the weights about a third as far as eight later ones."""

    def __post_init__(self) -> None:
        require_positive(self)
        require(self.steps >= 24, self, "steps", "be at least 24", "Use 28.")
        require(self.weight_growth > 1, self, "weight_growth", "be above 1", "Use 1.4.")


@dataclass(frozen=True, kw_only=True)
class FlowThresholds:
    """What counts as trouble in the gradients of single parameters."""

    vanishing_norm: float = 1e-7
    """Global norm below which gradients are called vanishing (info); the threshold of SageMaker Debugger."""
    vanishing_ratio: float = 1e-3
    """First to last parameter's norm below which they vanish on the way back (info); AUTOTRAINER."""
    vanishing_first: float = 1e-4
    """... and how small the first one's norm must be as well; AUTOTRAINER."""
    vanishing_depth_ratio: float = 1e-6
    """Median norm of the first quarter of the parameters to that of the last at which it becomes a warning."""
    vanishing_patience: int = 5
    """Steps in a row that a warning needs: a layer that starts at zero passes nothing back for one step."""
    dead_share: float = 0.7
    """Share of zeros in a gradient, or of units that never fire, that is called dead; AUTOTRAINER."""
    dead_rise: float = 0.4
    """How far above the parameter's own usual share it must be for a warning: an embedding is always sparse."""
    dead_patience: int = 10
    """Steps in a row that a finding needs."""
    missing_patience: int = 10
    """Steps in a row without a gradient that are reported."""
    missing_share: float = 0.5
    """Share of all trainable elements that must be without a gradient for a warning: an unused pooler is common."""

    def __post_init__(self) -> None:
        require_positive(self)


@dataclass(frozen=True, kw_only=True)
class LayerThresholds:
    """What counts as trouble in activations, inputs, weights and updates, which are scanned periodically."""

    saturated_share: float = 0.7
    """Share of elements at a bound above which an activation is saturated (info)."""
    constant_output: float = 1e-6
    """Spread of the output over the batch, as a share of its size, below which it is constant (info)."""
    outlier_score: float = 10.0
    """Robust standard deviations above its own baseline, of the logarithm, at which an input's maximum, an update or an
    Adam ratio is an outlier."""
    outlier_ratio: float = 10.0
    """... and how many times the usual value it must be as well."""
    unchanged_patience: int = 3
    """Scans in a row without a change that are reported."""
    large_update: float = 0.1
    """Update-to-weight ratio of the median parameter that is reported (info); about 1e-3 is usual."""
    small_update: float = 1e-7
    """The same at the low end: float32 rounds an update of 6e-8 away."""
    adam_rms: float = 2.3
    """RMS of g^2/v of a tensor that is reported (info): the spikes of arXiv 2304.13013 come 1 to 8 steps later."""
    adam_rms_ratio: float = 3.0
    """Multiple of the tensor's usual RMS at which it becomes a warning."""
    min_values: int = 8
    """Scans before a baseline judges."""

    def __post_init__(self) -> None:
        require_positive(self)
        require(self.min_values >= 2, self, "min_values", "be at least 2", "Use 8.")


@dataclass(frozen=True, kw_only=True)
class ValidationThresholds:
    """What counts as trouble in the validation loss."""

    overfitting_patience: int = 3
    """Validations since the best one, while the training loss falls, before it is a finding."""
    overfitting_score: float = 6.0
    """How far above the best ones the last ones must be, in standard deviations of the validation noise."""

    def __post_init__(self) -> None:
        require_positive(self)


@dataclass(frozen=True, kw_only=True)
class HabitThresholds:
    """What counts as too often: clips, skips, actions, overflows, and a norm that keeps rising."""

    window: int = 100
    """Steps in which clips and skips are counted."""
    clipped_share: float = 0.5
    """Share of clipped steps that is reported (info)."""
    num_skips: int = 10
    """Skipped steps in the window that are a warning."""
    num_actions: int = 5
    """Actions in `action_window` steps that are a warning."""
    action_window: int = 1000
    """Steps in which actions are counted."""
    scaler_overflows: int = 5
    """Overflows in a row, after a scale that worked, at which the loss scale is collapsing."""
    least_scale: float = 1.0
    """Loss scale below which an overflow is no longer part of the search for a scale."""
    rising_block: int = 64
    """Norms whose median is one point of the norm's slow trend."""
    rising_blocks: int = 6
    """Blocks in a row that must each be above the one before."""
    rising_ratio: float = 3.0
    """Growth of the norm over these blocks that is reported (info); a warning if the loss did not fall meanwhile."""

    def __post_init__(self) -> None:
        require_positive(self)
        require(self.clipped_share <= 1, self, "clipped_share", "be a share up to 1", "Use 0.5.")


@dataclass(frozen=True, kw_only=True)
class ForecastConfig:
    """The forecast of instability: a learnt rule that looks ahead, where the others judge the present."""

    enabled: bool = False
    """Whether `instability_forecast` is among the rules. docs/forecast.md has the numbers that set the default."""
    horizon: int = 32
    """Steps ahead; there is a model for each horizon that can be chosen."""
    threshold: float | None = None
    """Probability from which it is reported; None: the model's own, which was chosen for few false alarms."""

    def __post_init__(self) -> None:
        require_booleans(self)
        require_positive(self)
        fits = self.threshold is None or (is_number(self.threshold) and 0 < self.threshold < 1)
        require(fits, self, "threshold", "lie between 0 and 1, or be None", "None takes the model's own.")


@dataclass(frozen=True, kw_only=True)
class DetectConfig:
    """Thresholds of the rules. Absolute ones are `info`; a `warning` needs distance from the run's own baseline."""

    exploding_norm: float = 100.0
    """Global gradient norm above which a step is called exploding (info)."""
    exploding_score: float = 20.0
    """Robust standard deviations above the baseline of log norms at which it becomes a warning."""
    exploding_ratio: float = 10.0
    """... and how many times the median norm it must be as well."""
    exploding_early_ratio: float = 1000.0
    """Before the baseline judges: how many times the largest norm so far is a warning."""
    early_warning_factor: float = 5.0
    """Norms above this many times the clip threshold are reported (info)."""
    window: int = 128
    """Steps that make up the baseline."""
    min_values: int = 32
    """Steps before the baseline judges."""
    repeat_after: int = 1000
    """Steps after which a continuing condition is reported again."""
    start: StartThresholds = field(default_factory=StartThresholds)
    loss: LossThresholds = field(default_factory=LossThresholds)
    flow: FlowThresholds = field(default_factory=FlowThresholds)
    layers: LayerThresholds = field(default_factory=LayerThresholds)
    validation: ValidationThresholds = field(default_factory=ValidationThresholds)
    habits: HabitThresholds = field(default_factory=HabitThresholds)
    forecast: ForecastConfig = field(default_factory=ForecastConfig)
    off: tuple[str, ...] = ()
    """Names of rules to leave out."""
    rules: tuple[Any, ...] = field(default=(), metadata={"plain": False})
    """Your own rules, run after the others; see `steadygrad.detect.rule`. Not read from files."""

    def __post_init__(self) -> None:
        require_positive(self)
        require(self.window >= 8, self, "window", "be at least 8", "Use 128.")
        require(2 <= self.min_values <= self.window, self, "min_values", "lie between 2 and the window", "Use 32.")
        set_names(self, "off", "loss_spike")
        require(isinstance(self.rules, list | tuple), self, "rules", "be a tuple of rules", "Write rules=(mine,).")
        object.__setattr__(self, "rules", tuple(self.rules))
        require_kinds(self, _PARTS)
        for one in self.rules:
            require(
                hasattr(one, "observe") and hasattr(one, "name"),
                self,
                "rules",
                "hold rules",
                "Decorate a function with `@steadygrad.detect.rule('its_name')`.",
            )


_PARTS = {
    "loss": LossThresholds,
    "flow": FlowThresholds,
    "layers": LayerThresholds,
    "validation": ValidationThresholds,
    "habits": HabitThresholds,
    "start": StartThresholds,
    "forecast": ForecastConfig,
}
