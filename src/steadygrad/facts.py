"""The nouns that pass between the stages: plain numbers, frozen, no torch.

A `Reading` is what was measured at one optimizer step, and the other Facts what was seen around it; a `Finding` is
what a rule says about Facts; a `Verdict` is what to do and why; an `Outcome` is what was done; an `Incident` joins them
for the record; a `StepRecord` is one step's scalars. Nothing here computes anything beyond looking at its own fields.
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
    TIGHTEN_CLIP = "tighten_clip"
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
"""Columns of the table, in the order of GradientStats: norm, max_abs, num_nonfinite, num_nan, num_zeros."""


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
    missing: tuple[str, ...] = field(default=(), repr=False)
    """Trainable parameters held by an optimizer whose `.grad` was None at this step."""
    missing_share: float = 0.0
    """Their share of all trainable elements that the optimizers hold."""
    stale: tuple[str, ...] = field(default=(), repr=False)
    """Parameters whose `.grad` still held the step before when this step's first backward began: nobody cleared it."""
    spoilt_buffers: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Buffers that this step's forward made NaN or Inf, with the number of bad elements; they were put back."""
    adam_rms: Mapping[str, float] | None = field(default=None, repr=False)
    """Adam family: name -> sqrt(mean(g^2 / max(v, eps^2))), v with bias correction, after this step entered it."""
    update_norm: float | None = None
    """Global L2 norm of what the optimizer added to the weights; None when it was not measured."""

    @property
    def learning_rate(self) -> float | None:
        """The largest learning rate of the step; None when there is none."""
        return max(self.learning_rates, default=None)

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
class Validation:
    """A validation loss that was told."""

    step: int
    """The last optimizer step before it."""
    epoch: int
    loss: float
    train_loss: float | None = None
    """Mean training loss since the validation before; None: the rules average the losses of the Readings themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """An epoch is over."""

    step: int
    """The last optimizer step of the epoch."""
    epoch: int
    """0 for the first epoch."""
    train_loss: float | None = None
    """Mean loss of the epoch's applied steps; NaN when steps were made and none was applied, None when none was made.
    Skipped steps are left out: one bad step must not make an epoch bad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterScan:
    """One look at all weights and buffers. The first one comes before the first step, with `step` -1."""

    step: int
    """The last optimizer step that was made before the look; -1 before the first."""
    nonfinite_parameters: Mapping[str, int] = field(default_factory=dict)
    """Name -> number of elements that are NaN or Inf; healthy parameters are absent."""
    nonfinite_buffers: Mapping[str, int] = field(default_factory=dict)
    """The same for the model's buffers."""
    unchanged: tuple[str, ...] = ()
    """Parameters that are bit for bit what they were at the scan before, although a step was applied between the two
    in which they had a gradient that was not zero and a learning rate above 0."""
    num_changed: int = 0
    """Parameters that differ from the scan before."""
    norms: Mapping[str, float] = field(default_factory=dict, repr=False)
    """L2 norms of the trained parameters that have two dimensions or more; empty when they were not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStats:
    """One tensor of a batch. Integer and bool tensors have `is_floating` False and `num_nonfinite` 0."""

    numel: int
    num_nonfinite: int = 0
    max_abs: float = 0.0
    """Over the finite elements."""
    num_zeros: int = 0
    num_ignored: int = 0
    """Elements of an integer tensor that equal the ignore index (-100)."""
    is_floating: bool = True
    is_binary: bool = False
    """Whether every element is 0 or 1, as in a mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputScan:
    """One look at the batch of a step; may come before or after that step's Reading."""

    step: int
    tensors: Mapping[str, InputStats]
    """Path inside the batch ('0', 'labels', 'x.1') -> its numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationStats:
    """What one module put out at one step."""

    dead_share: float | None = None
    """Share of units (channels, features) that were zero for the whole batch; None where units make no sense."""
    saturated_share: float | None = None
    """Share of elements within 1 % of a bound of a bounded activation; None for unbounded ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationScan:
    """One look at the outputs of the modules, in training mode."""

    step: int
    modules: Mapping[str, ActivationStats] = field(default_factory=dict)
    """Qualified module name -> its numbers."""
    output_std: float | None = None
    """Standard deviation of the model's output over the batch, averaged over the other dimensions; None when the output
    is no floating tensor or the batch has one sample."""
    output_scale: float | None = None
    """Root mean square of that output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """An element-wise op of two tensors, one of which depends on the model, whose result is larger than both."""

    op: str
    left: tuple[int, ...]
    right: tuple[int, ...]
    where: str = ""
    """file:line, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphScan:
    """One look at the program: model, optimizers, and the graph of the first step's loss."""

    step: int
    hidden: tuple[str, ...] = ()
    """Parameters in the graph that a module keeps in a plain list, tuple or dict, where `parameters()` misses them, and
    that no optimizer holds."""
    unoptimized: tuple[str, ...] = ()
    """Registered trainable parameters of the model that no optimizer holds."""
    foreign: tuple[str, ...] = ()
    """Parameters that an optimizer holds and the model does not."""
    broadcasts: tuple[Broadcast, ...] = ()
    double_softmaxes: tuple[str, ...] = ()
    """file:line where the input of a (log_)softmax or cross entropy is itself, views aside, the output of a
    (log_)softmax."""
    anomaly_mode: bool = False
    """Whether torch.autograd's anomaly mode is on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTaken:
    """Something was done about a finding above info. Clips and verdicts of `none` are not told."""

    step: int
    action: Action


Fact = Reading | Validation | EpochEnd | ParameterScan | InputScan | ActivationScan | GraphScan | ActionTaken
"""What a rule can be asked about."""


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
    """Who did it: the op, the line, the module, what its inputs looked like, which samples. `str()` tells it all."""

    kind: str
    """'nan' or 'inf': what was born, in backward what the gradients hold; 'error': the step raised; 'exploding',
    'vanishing', 'dead': finite, and wrong; 'unknown': no diagnosis could be made, `note` says why."""
    phase: str
    """'input', 'parameter', 'forward', 'backward' or 'optimizer'; 'unknown'."""
    op: str | None = None
    """In backward: the forward op whose derivative failed. 'input' or 'parameter' for what was bad on arrival."""
    module: str | None = None
    """Qualified name in the model; '' is the model itself, None is code outside of any module."""
    file: str | None = None
    line: int | None = None
    source: str | None = None
    inputs: tuple[str, ...] = ()
    explanation: str = ""
    fixes: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()
    """From where the value was born to where it hurts."""
    reproducible: str | None = None
    """What a second replay gave."""
    symptom: str = ""
    """What was seen: 'NaN loss', 'Inf gradient'."""
    name: str = ""
    """The explanation's name: 'sqrt_at_zero'. For an input, parameter or buffer: its own."""
    node: str | None = None
    """The autograd node that was running."""
    caller: str | None = None
    """The user's line that called into a library: 'train.py:12   loss = model(x)'."""
    samples: tuple[int, ...] = ()
    """Indices in the batch."""
    samples_note: str = ""
    """How many of how many, and what is special about them; or why it could not be said."""
    terms: tuple[str, ...] = ()
    """The terms of the loss, the bad ones first."""
    growth: float | None = None
    """Exploding or vanishing: factor a layer."""
    step: int | None = None
    rank: int | None = None
    batch: str | None = None
    """Where the batch was put, inside of the run directory."""
    note: str = ""
    """What limits this diagnosis."""

    def __str__(self) -> str:
        rows = (
            ("module", None if self.module is None else self.module or "(the model itself)"),
            ("line", self._spell_line()),
            ("called", self.caller),
            *(("input", text) for text in self.inputs),
            ("why", self.explanation),
            ("terms", " | ".join(self.terms)),
            ("samples", self.samples_note),
            ("chain", " > ".join(self.chain)),
            ("fixes", " | ".join(self.fixes)),
            ("again", self.reproducible),
            ("batch", self.batch),
            ("note", self.note),
        )
        return "\n".join([self.headline, *(f"  {name:<8} {text}" for name, text in rows if text)])

    @property
    def headline(self) -> str:
        """One line: what was seen, and where it was born."""
        step = "" if self.step is None else f"step {self.step}: "
        rank = "" if self.rank is None else f"rank {self.rank}: "
        what = self.symptom or self.kind
        if self.phase in ("input", "parameter"):
            return f"{step}{rank}{what}, already in the {self.phase} {self.name}"
        if self.op is None:
            return f"{step}{rank}{what}"
        where = (
            f"in {self.phase} of"
            if self.phase == "backward"
            else "in the optimizer's"
            if self.phase == "optimizer"
            else "by"
        )
        return f"{step}{rank}{what}, born {where} {self.op}"

    def _spell_line(self) -> str | None:
        if self.file is None:
            return None
        return f"{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line}   {self.source or ''}".rstrip()


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
    extra: Mapping[str, float] = field(default_factory=dict)
    """What the user's program told beside the loss, with `guard.log`."""

    @classmethod
    def of(cls, reading: Reading, *, time_seconds: float, extra: Mapping[str, float] | None = None) -> StepRecord:
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
            extra=extra or {},
        )
