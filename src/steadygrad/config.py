"""Settings: frozen, keyword-only, checked on construction, without torch.

Each value object owns its fields and says under each what it means. A wrong value fails here, before the first step,
with the field's name, the value found and what to write instead. `GuardConfig.load` reads YAML or TOML and names
every unknown or wrong field at once.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import enum
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from steadygrad.errors import ConfigError
from steadygrad.facts import Action, Incident, Severity


def _require(condition: bool, owner: object, name: str, rule: str, hint: str) -> None:
    if not condition:
        value = getattr(owner, name)
        raise ConfigError(f"{type(owner).__name__}.{name} must {rule}, got {value!r}. {hint}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # NaN is not


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_whole(owner: object, name: str, *, least: int, hint: str, why: str = "") -> None:
    value = getattr(owner, name)
    _require(_is_whole(value) and value >= least, owner, name, f"be a whole number, at least {least}{why}", hint)


def _require_booleans(owner: Any) -> None:
    """Every field of `owner` whose default is a boolean must be one: text such as "no" would count as true."""
    for item in dataclasses.fields(owner):
        if isinstance(item.default, bool):
            fits = isinstance(getattr(owner, item.name), bool)
            _require(fits, owner, item.name, "be True or False", f"The default is {item.default}.")


def _set_names(owner: object, name: str, example: str) -> None:
    """Keep the field as a tuple of text; one text alone is refused, its letters would become the names."""
    value = getattr(owner, name)
    fits = isinstance(value, list | tuple | set | frozenset) and all(isinstance(one, str) for one in value)
    meant = value if isinstance(value, str) else example
    _require(fits, owner, name, "be a tuple of names", f"Write {name}=({meant!r},).")
    object.__setattr__(owner, name, tuple(value))


def _require_positive(owner: Any, *, but: tuple[str, ...] = ()) -> None:
    """Every field of `owner` whose default is a number must be a positive one, and a whole one where the default is."""
    for item in dataclasses.fields(owner):
        value = getattr(owner, item.name)
        optional = item.type == "int | None" and value is not None
        if item.name in but or not (_is_number(item.default) or optional):
            continue
        whole = optional or isinstance(item.default, int)
        fits = _is_number(value) and value > 0 and (isinstance(value, int) or not whole)
        rule = "be a whole number above 0" if whole else "be a number above 0"
        _require(fits, owner, item.name, rule, f"The default is {item.default}.")


# --- clip strategies: the settings; `steadygrad.clip` builds the state on the device -----------------------------


@dataclass(frozen=True, kw_only=True)
class FixedNorm:
    """Scale all gradients by min(1, max_norm / norm), as `clip_grad_norm_` does."""

    kind: ClassVar[str] = "fixed_norm"

    max_norm: float = 1.0
    """Largest global L2 norm that reaches the optimizer."""

    def __post_init__(self) -> None:
        _require(
            _is_number(self.max_norm) and self.max_norm > 0,
            self,
            "max_norm",
            "be above 0",
            "Use 1.0, or clip=None for no clipping.",
        )


@dataclass(frozen=True, kw_only=True)
class ClipValue:
    """Clamp each gradient element to [-value, value]."""

    kind: ClassVar[str] = "value"

    value: float = 1.0
    """Largest absolute value of one element."""

    def __post_init__(self) -> None:
        _require(_is_number(self.value) and self.value > 0, self, "value", "be above 0", "Use 1.0.")


@dataclass(frozen=True, kw_only=True)
class ZClip:
    """Clip a norm that lies more than `z` standard deviations above its moving average (arXiv 2504.02507)."""

    kind: ClassVar[str] = "zclip"

    alpha: float = 0.97
    """Decay of the moving mean and variance of the norm."""
    z: float = 2.5
    """Score above which a norm is a spike."""
    warmup: int = 25
    """Healthy steps that only collect; `max_norm` still holds."""
    max_norm: float | None = 1.0
    """Upper bound that holds at all times; None for none."""
    eps: float = 1e-6
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        _require(
            _is_number(self.alpha) and 0 < self.alpha < 1, self, "alpha", "lie between 0 and 1", "The paper uses 0.97."
        )
        _require(_is_number(self.z) and self.z > 0, self, "z", "be above 0", "The paper uses 2.5.")
        _require_whole(self, "warmup", least=2, why=", a variance needs two values", hint="The paper uses 25.")
        _require(
            self.max_norm is None or (_is_number(self.max_norm) and self.max_norm > 0),
            self,
            "max_norm",
            "be above 0, or None",
            "Use 1.0.",
        )
        _require(_is_number(self.eps) and self.eps > 0, self, "eps", "be above 0", "Use 1e-6.")


@dataclass(frozen=True, kw_only=True)
class AutoClip:
    """Clip at a percentile of the norms seen so far (Seetharaman et al. 2020), over a bounded history."""

    kind: ClassVar[str] = "autoclip"

    percentile: float = 10.0
    """Percentile of the past norms that becomes the threshold."""
    window: int = 4096
    """Norms remembered; the original keeps all of them, without bound."""

    def __post_init__(self) -> None:
        _require(
            _is_number(self.percentile) and 0 <= self.percentile <= 100,
            self,
            "percentile",
            "lie between 0 and 100",
            "The paper uses 10.",
        )
        _require_whole(self, "window", least=2, hint="Use 4096.")


@dataclass(frozen=True, kw_only=True)
class AdaptiveUnitClip:
    """Clip each unit's gradient to a share of that unit's weight norm (AGC of the NFNet paper, arXiv 2102.06171)."""

    kind: ClassVar[str] = "adaptive_unit"

    ratio: float = 0.01
    """lambda: largest gradient norm of a unit relative to its weight norm."""
    eps: float = 1e-3
    """Floor under the weight norm, so that a unit that starts at zero can still move."""
    exclude: tuple[str, ...] = ()
    """Parameter names, or parts of them, to leave alone; the paper leaves out the last layer."""

    def __post_init__(self) -> None:
        _require(_is_number(self.ratio) and self.ratio > 0, self, "ratio", "be above 0", "The paper uses 0.01.")
        _require(_is_number(self.eps) and self.eps > 0, self, "eps", "be above 0", "The paper uses 1e-3.")
        _set_names(self, "exclude", "head")


@dataclass(frozen=True, kw_only=True)
class AdaGC:
    """Clip each tensor against its own moving norm (arXiv 2502.11034); a global clip while that is collected."""

    kind: ClassVar[str] = "adagc"

    relative: float = 1.05
    """lambda_rel: how far above its own average a tensor's norm may go."""
    beta: float = 0.98
    """Decay of the moving norm of each tensor."""
    warmup: int = 100
    """Healthy steps with the global clip, during which the smallest norm of each tensor is kept."""
    max_norm: float = 1.0
    """lambda_abs: the global norm allowed during the warm-up."""

    def __post_init__(self) -> None:
        _require(_is_number(self.relative) and self.relative > 0, self, "relative", "be above 0", "Use 1.05.")
        _require(_is_number(self.beta) and 0 < self.beta < 1, self, "beta", "lie between 0 and 1", "Use 0.98.")
        _require_whole(self, "warmup", least=1, hint="Use 100.")
        _require(_is_number(self.max_norm) and self.max_norm > 0, self, "max_norm", "be above 0", "Use 1.0.")


ClipStrategy = FixedNorm | ClipValue | ZClip | AutoClip | AdaptiveUnitClip | AdaGC


# --- the parts of GuardConfig -------------------------------------------------------------------------------------


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
    """Which kernel measures the gradients; `auto` takes Triton on CUDA where it is there, foreach otherwise."""

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
    """Steps between two looks at the batch, the activations, the weights and Adam's ratio (a few passes over the
    weights, no wait); the first step's graph is looked at too. 0: only after a bad step."""

    def __post_init__(self) -> None:
        kernel = _as_enum(Implementation, self.implementation, "MeasureConfig.implementation")
        object.__setattr__(self, "implementation", kernel)
        for name in ("scan_every", "parameters_every"):
            _require_whole(self, name, least=0, hint="0 switches it off.")


# --- detect: thresholds of the rules, a value object for each family -------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LossThresholds:
    """What counts as trouble in the training loss."""

    spike_score: float = 6.0
    """Robust standard deviations above the recent level at which a loss is a spike, in Gaussian noise; heavier tails
    raise the limit by themselves. OLMo-core uses 6 standard deviations too."""
    spike_floor: float = 0.01
    """Least standard deviation assumed, as a share of the level: a loss without noise is not certainty."""
    level_window: int = 17
    """Losses whose median is the recent level. Short, so that early decay does not look like spread."""
    spread_window: int = 256
    """Distances from the level that make up the spread."""
    restart_ratio: float = 2.0
    """A learning rate that grows by this factor in one step is a restart: the loss may rise for a while."""
    restart_grace: int = 64
    """Steps after a restart in which only a loss above the run's first ones is a finding."""
    explosion_ratio: float = 10.0
    """Times the loss of the epoch or window before at which the loss has exploded."""
    explosion_patience: int = 8
    """Steps in a row that must be that high: single batches of one sample can be."""
    recovery_steps: int = 16
    """Steps after an explosion was told in which the loss must come back; below `SnapshotConfig.good_after`, so that no
    snapshot of the wreck counts as good."""
    recovery_ratio: float = 3.0
    """Times the loss before the explosion above which it has not come back."""
    block: int = 16
    """Losses whose median is one point of the slow trend."""
    divergence_blocks: int = 4
    """Blocks in a row that must each be above the one before."""
    divergence_share: float = 0.5
    """Share of the progress since the start that must be lost."""
    plateau_steps: int = 1000
    """Steps without progress that are told (info)."""
    plateau_improvement: float = 0.01
    """Least progress, as a share of the best level."""
    zero_patience: int = 3
    """Losses of exactly 0 in a row that are told (info); one is enough where the others were far from 0."""

    def __post_init__(self) -> None:
        _require_positive(self)
        _require(self.level_window >= 3, self, "level_window", "be at least 3", "Use 17.")
        _require(self.spread_window >= 16, self, "spread_window", "be at least 16", "Use 256.")
        _require(self.block >= 4, self, "block", "be at least 4", "Use 16.")


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
    """How much more than the parameter's own usual share it must be for a warning: an embedding is always sparse."""
    dead_patience: int = 10
    """Steps in a row that a finding needs."""
    missing_patience: int = 10
    """Steps in a row without a gradient that are told."""
    missing_share: float = 0.5
    """Share of all trainable elements that must be without a gradient for a warning: an unused pooler is common."""

    def __post_init__(self) -> None:
        _require_positive(self)


@dataclass(frozen=True, kw_only=True)
class LayerThresholds:
    """What counts as trouble in activations, inputs, weights and updates, which are looked at now and then."""

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
    """Scans in a row without a change that are told."""
    large_update: float = 0.1
    """Update-to-weight ratio of the median parameter that is told (info); about 1e-3 is usual."""
    small_update: float = 1e-7
    """The same at the low end: float32 rounds an update of 6e-8 away."""
    adam_rms: float = 2.3
    """RMS of g^2/v of a tensor that is told (info): the spikes of arXiv 2304.13013 come 1 to 8 steps later."""
    adam_rms_ratio: float = 3.0
    """Times the tensor's usual RMS at which it becomes a warning."""
    min_values: int = 8
    """Looks before a baseline judges."""

    def __post_init__(self) -> None:
        _require_positive(self)
        _require(self.min_values >= 2, self, "min_values", "be at least 2", "Use 8.")


@dataclass(frozen=True, kw_only=True)
class ValidationThresholds:
    """What counts as trouble in the validation loss."""

    overfitting_patience: int = 3
    """Validations since the best one, while the training loss falls, before it is a finding."""
    overfitting_score: float = 6.0
    """How far above the best ones the last ones must be, in standard deviations of the validation noise."""

    def __post_init__(self) -> None:
        _require_positive(self)


@dataclass(frozen=True, kw_only=True)
class HabitThresholds:
    """What counts as too often."""

    window: int = 100
    """Steps in which clips and skips are counted."""
    clipped_share: float = 0.5
    """Share of clipped steps that is told (info)."""
    num_skips: int = 10
    """Skipped steps in the window that are a warning."""
    num_actions: int = 5
    """Actions in `action_window` steps that are a warning."""
    action_window: int = 1000
    """Steps in which actions are counted."""
    scaler_overflows: int = 5
    """Overflows in a row, after a scale that worked, at which the loss scale is collapsing."""
    least_scale: float = 1.0
    """Loss scale below which an overflow is no search any more."""
    rising_block: int = 64
    """Norms whose median is one point of the norm's slow trend."""
    rising_blocks: int = 6
    """Blocks in a row that must each be above the one before."""
    rising_ratio: float = 3.0
    """Growth of the norm over them that is told (info); a warning when the loss did not fall meanwhile."""

    def __post_init__(self) -> None:
        _require_positive(self)
        _require(self.clipped_share <= 1, self, "clipped_share", "be a share up to 1", "Use 0.5.")


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
    """Norms above this many times the clip threshold are told (info)."""
    window: int = 128
    """Steps that make up the baseline."""
    min_values: int = 32
    """Steps before the baseline judges."""
    repeat_after: int = 1000
    """Steps after which a condition that goes on is told again."""
    loss: LossThresholds = field(default_factory=LossThresholds)
    flow: FlowThresholds = field(default_factory=FlowThresholds)
    layers: LayerThresholds = field(default_factory=LayerThresholds)
    validation: ValidationThresholds = field(default_factory=ValidationThresholds)
    habits: HabitThresholds = field(default_factory=HabitThresholds)
    off: tuple[str, ...] = ()
    """Names of rules to leave out."""
    rules: tuple[Any, ...] = field(default=(), metadata={"plain": False})
    """Rules of your own, asked after the others; see `steadygrad.detect.rule`. Not read from files."""

    def __post_init__(self) -> None:
        _require_positive(self)
        _require(self.window >= 8, self, "window", "be at least 8", "Use 128.")
        _require(2 <= self.min_values <= self.window, self, "min_values", "lie between 2 and the window", "Use 32.")
        _set_names(self, "off", "loss_spike")
        _require(isinstance(self.rules, list | tuple), self, "rules", "be a tuple of rules", "Write rules=(mine,).")
        object.__setattr__(self, "rules", tuple(self.rules))
        kinds = (LossThresholds, FlowThresholds, LayerThresholds, ValidationThresholds, HabitThresholds)
        for name, kind in zip(("loss", "flow", "layers", "validation", "habits"), kinds):
            _require(isinstance(getattr(self, name), kind), self, name, f"be a {kind.__name__}", "See the default.")
        for one in self.rules:
            _require(
                hasattr(one, "observe") and hasattr(one, "name"),
                self,
                "rules",
                "hold rules",
                "Decorate a function with `@steadygrad.detect.rule('its_name')`.",
            )


# --- decide: what is done about a finding ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is done about findings, how often, and what comes next when it does not help.

    One non-finite step is skipped; three in a row lower the learning rate; ten roll back; the third rollback halts.

    >>> Policy.patient().change_hyperparameters
    False
    """

    act: bool = True
    """False: only watch. Non-finite steps are still kept from the weights, as `GuardConfig.on_nonfinite` says."""
    change_hyperparameters: bool = True
    """Whether learning rate and weight decay may be changed; if not, what would come next takes their place."""
    halt_at: Severity | None = None
    """End the run at the first finding this severe."""
    actions: Mapping[str, Action] = field(default_factory=dict)
    """Your own answers to findings above info, by kind: `{"loss_spike": Action.ROLLBACK}`; `none` only tells it."""
    nonfinite_steps_to_scale_lr: int = 3
    """Non-finite steps in a row that lower the learning rate."""
    nonfinite_steps_to_rollback: int = 10
    """Non-finite steps in a row that roll back."""
    lr_factor: float = 0.5
    """What the learning rate is multiplied by after non-finite steps, epochs and validations, and on divergence."""
    explosion_lr_factor: float = 0.1
    """... and after a loss explosion."""
    weight_decay_factor: float = 1.5
    """What the weight decay is multiplied by on overfitting."""
    rollbacks_to_halt: int = 3
    """The rollback in `budget_steps` that halts instead."""
    max_lr_changes: int = 3
    """Changes of the learning rate in `budget_steps`; a rollback takes the place of a further one."""
    max_weight_decay_changes: int = 3
    """Changes of the weight decay in `budget_steps`; further ones are left out."""
    max_skips: int = 250
    """Skipped steps in `budget_steps`; one more halts: a run that skips a quarter of its data hides a defect."""
    budget_steps: int = 1000
    """Steps in which the budgets count."""
    cooldown_steps: int = 100
    """Steps after a change of learning rate or weight decay in which there is no other of the same sort."""
    ramp_back_steps: int | None = None
    """Healthy steps over which a lowered learning rate climbs back to its schedule; None: it stays lowered."""
    early_stopping_patience: int | None = None
    """Validations without a better loss after which training should stop; None: never."""
    early_stopping_min_delta: float = 0.0
    """How much lower a validation loss must be to count as better."""

    def __post_init__(self) -> None:
        if self.halt_at is not None:
            object.__setattr__(self, "halt_at", _as_enum(Severity, self.halt_at, "Policy.halt_at"))
        _require_booleans(self)
        example = 'Write actions={"loss_spike": Action.ROLLBACK}.'
        _require(isinstance(self.actions, Mapping), self, "actions", "be a mapping of kind to Action", example)
        answers = {k: _as_enum(Action, v, f"Policy.actions[{k!r}]") for k, v in dict(self.actions).items()}
        object.__setattr__(self, "actions", answers)
        for kind, action in answers.items():
            if action in (Action.CLIP, Action.SKIP, Action.SANITIZE):
                raise ConfigError(
                    f"Policy.actions[{kind!r}] cannot be {action.value!r}: it happens before a step is judged. "
                    "Use GuardConfig.clip or GuardConfig.on_nonfinite, or Action.ROLLBACK."
                )
        _require_positive(self, but=("early_stopping_min_delta",))
        delta = self.early_stopping_min_delta
        _require(_is_number(delta) and delta >= 0, self, "early_stopping_min_delta", "not be negative", "Use 0.0.")
        for name in ("lr_factor", "explosion_lr_factor"):
            _require(getattr(self, name) < 1, self, name, "be below 1", "It lowers the learning rate.")
        _require(self.weight_decay_factor > 1, self, "weight_decay_factor", "be above 1", "Use 1.5.")
        _require(
            self.nonfinite_steps_to_scale_lr < self.nonfinite_steps_to_rollback,
            self,
            "nonfinite_steps_to_scale_lr",
            "be below nonfinite_steps_to_rollback",
            "Use 3 and 10.",
        )

    @classmethod
    def observe(cls) -> Policy:
        """Only watch."""
        return cls(act=False)

    @classmethod
    def strict(cls) -> Policy:
        """Halt at the first finding above info."""
        return cls(halt_at=Severity.WARNING)

    @classmethod
    def patient(cls) -> Policy:
        """Skip and roll back, but never change a hyperparameter."""
        return cls(change_hyperparameters=False)


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
    max_bytes: int = 8 << 30
    """Host memory for all of them; when not even one fits, there are none, and that is told."""
    skip_batches: int = 200
    """Batches left out after a rollback; fewer early in a run."""
    enabled: bool = True
    """False: no snapshots, so nothing to roll back to."""

    def __post_init__(self) -> None:
        _require_booleans(self)
        _require_positive(self)


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """What is written into the run directory."""

    steps_every: int = 1
    """Steps between two lines of steps.jsonl; skipped steps are always written."""
    layers_every: int = 100
    """Steps between two lines of layers.jsonl; steps with a finding above info are always written; 0: never."""

    def __post_init__(self) -> None:
        _require_whole(self, "steps_every", least=1, hint="Use 1.")
        _require_whole(self, "layers_every", least=0, hint="0 switches it off.")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Everything that can be set on a Guard.

    >>> GuardConfig(clip=FixedNorm(max_norm=0.5), on_nonfinite=Action.SKIP).clip
    FixedNorm(max_norm=0.5)
    """

    clip: ClipStrategy | None = field(default_factory=FixedNorm)
    """How gradients are clipped; None: not at all."""
    on_nonfinite: Action = Action.SKIP
    """What a NaN or Inf in loss or gradients leads to: SKIP the step, SANITIZE the gradients, or RAISE."""
    sanitize_value: float = 0.0
    """What SANITIZE writes in place of each non-finite gradient element."""
    drop_bad_microbatches: bool = False
    """With accumulation, leave out only the bad microbatch instead of the whole step, and let the average count the
    others only. Costs one host read and one set of gradients a microbatch: a gradient can be bad when its loss is
    fine, so each microbatch must be looked at on its own before it is added."""
    autocast: Precision | None = None
    """Autocast opened around fn and the loss; None: whatever the caller has open."""
    scheduler_interval: Interval = Interval.STEP
    """When a scheduler handed to Guard is stepped: after each applied step, or at `end_epoch()`."""
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    detect: DetectConfig = field(default_factory=DetectConfig)
    policy: Policy = field(default_factory=Policy)
    snapshots: SnapshotConfig = field(default_factory=SnapshotConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    on_incident: Callable[[Incident], None] | None = None
    """Called with each Incident."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "on_nonfinite", _as_enum(Action, self.on_nonfinite, "GuardConfig.on_nonfinite"))
        object.__setattr__(
            self, "scheduler_interval", _as_enum(Interval, self.scheduler_interval, "GuardConfig.scheduler_interval")
        )
        if self.autocast is not None:
            object.__setattr__(self, "autocast", _as_enum(Precision, self.autocast, "GuardConfig.autocast"))
        _require_booleans(self)
        allowed = (Action.SKIP, Action.SANITIZE, Action.HALT)
        _require(
            self.on_nonfinite in allowed,
            self,
            "on_nonfinite",
            "be Action.SKIP, Action.SANITIZE or Action.RAISE",
            "SKIP is the safe choice.",
        )
        _require(
            self.clip is None or isinstance(self.clip, ClipStrategy),
            self,
            "clip",
            "be a clip strategy or None",
            "For example clip=FixedNorm(max_norm=1.0).",
        )
        _require(
            _is_number(self.sanitize_value) and math.isfinite(self.sanitize_value),
            self,
            "sanitize_value",
            "be a finite number",
            "Use 0.0.",
        )
        _require(
            self.on_incident is None or callable(self.on_incident),
            self,
            "on_incident",
            "be callable or None",
            "It is called with each Incident.",
        )
        for name, kind in (
            ("measure", MeasureConfig),
            ("detect", DetectConfig),
            ("policy", Policy),
            ("snapshots", SnapshotConfig),
            ("record", RecordConfig),
        ):
            _require(isinstance(getattr(self, name), kind), self, name, f"be a {kind.__name__}", "See the default.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GuardConfig:
        """Build from nested plain values, as a file has them; every wrong field is named in one error."""
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
        """Plain values that `from_dict` reads back; callables are left out."""
        return typing.cast(dict[str, Any], _plain(self))


# --- reading plain values ------------------------------------------------------------------------------------------


def read_mapping(path: Path) -> Mapping[str, Any]:
    """The mapping in a .yaml, .yml or .toml file."""
    if not path.is_file():
        raise ConfigError("no such file. Give the path of a YAML or TOML file.")
    if path.suffix == ".toml":
        import tomllib

        try:
            return tomllib.loads(_read_text(path))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"not valid TOML: {error}.") from None
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"the ending {path.suffix!r} is not known. Use .yaml, .yml or .toml.")
    try:
        import yaml
    except ImportError:
        raise ConfigError("reading YAML needs PyYAML. Run: pip install 'steadygrad[yaml]', or use TOML.") from None
    try:
        values = yaml.safe_load(_read_text(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}.") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"the file must hold a mapping of fields, found {type(values).__name__}.")
    return values


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text ({error.reason} at byte {error.start}). Save the file as UTF-8.") from None


def build(cls: type, values: Mapping[str, Any]) -> Any:
    """An instance of the dataclass `cls` from plain values; all errors in one ConfigError."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{cls.__name__} must be given as a mapping of field to value, got {values!r}. {{}} will do.")
    errors: list[str] = []
    made = _build(cls, values, "", errors)
    if errors:
        raise ConfigError("\n  ".join([f"{len(errors)} wrong field(s):", *errors]))
    return made


def _build(cls: type, values: Mapping[str, Any], path: str, errors: list[str]) -> Any:
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    arguments: dict[str, Any] = {}
    wrong: set[str] = set()
    for name, value in values.items():
        where = f"{path}{name}"
        if name not in known:
            errors.append(f"{where}: unknown; {cls.__name__} has {', '.join(sorted(known))}.")
            continue
        before = len(errors)
        arguments[name] = _convert(hints[name], value, where, errors)
        if len(errors) > before:
            wrong.add(name)
            del arguments[name]
    return _construct(cls, arguments, wrong, path.rstrip(".") or cls.__name__, errors)


def _construct(cls: type, arguments: dict[str, Any], wrong: set[str], where: str, errors: list[str]) -> Any:
    """An instance of `cls`; each field that it refuses is told, and left at its default to find the next one.

    An error whose rule speaks of a field already told (`min_values` of a wrong `window`) is left out: it may be none.
    """
    while True:
        try:
            return cls(**arguments)
        except (ConfigError, TypeError) as error:
            rule = str(error).partition(", got ")[0]
            if not any(re.search(rf"\b{name}\b", rule) for name in wrong):
                errors.append(f"{where}: {error}")
            refused = re.match(rf"{cls.__name__}\.(\w+)", rule)  # how each of our messages begins
            if refused is None or refused[1] not in arguments:
                return None
            wrong.add(refused[1])
            del arguments[refused[1]]


def _convert(hint: Any, value: Any, where: str, errors: list[str]) -> Any:
    """`value` as the annotation `hint` wants it; on failure an error is added and None returned."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    options = tuple(o for o in options if o is not type(None))
    if any(dataclasses.is_dataclass(o) for o in options):
        return _convert_object(options, value, where, errors)
    for option in options:
        if isinstance(option, type) and issubclass(option, enum.Enum):
            try:
                return _as_enum(option, value, where)
            except ConfigError as error:
                errors.append(str(error))
                return None
        if option is bool and isinstance(value, bool):
            return value
        if option is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if option is float and isinstance(value, int | float | str) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):  # text too: YAML 1.1 reads 1e-3 as text
                return float(value)
        if option is str and isinstance(value, str):
            return value
        if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
            return tuple(value)
        if typing.get_origin(option) is collections.abc.Mapping and isinstance(value, Mapping):
            return dict(value)
    names = " or ".join(getattr(o, "__name__", str(o)) for o in options)
    one_text = isinstance(value, str) and any(typing.get_origin(option) is tuple for option in options)
    errors.append(f"{where}: must be {names}, got {value!r}." + (f" Write [{value!r}]." if one_text else ""))
    return None


def _convert_object(options: tuple[Any, ...], value: Any, where: str, errors: list[str]) -> Any:
    if not isinstance(value, Mapping):
        errors.append(f"{where}: must be a mapping of fields, got {value!r}.")
        return None
    if len(options) == 1:
        return _build(options[0], value, f"{where}.", errors)
    kinds = {option.kind: option for option in options}
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        errors.append(f"{where}.kind: must be one of {', '.join(kinds)}, got {kind!r}.")
        return None
    return _build(kinds[kind], {k: v for k, v in value.items() if k != "kind"}, f"{where}.", errors)


def _as_enum(cls: type[enum.Enum], value: Any, where: str) -> Any:
    try:
        return value if isinstance(value, cls) else cls(value)
    except ValueError:
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        names = ", ".join(dict.fromkeys(name.lower() for name in cls.__members__))
        raise ConfigError(f"{where}: must be one of {names}, got {value!r}.") from None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = {"kind": value.kind} if hasattr(value, "kind") else {}
        plain = [f for f in dataclasses.fields(value) if f.metadata.get("plain", True)]
        fields = {f.name: getattr(value, f.name) for f in plain}
        return kind | {name: _plain(v) for name, v in fields.items() if not callable(v)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    return value
