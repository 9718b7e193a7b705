"""What was seen around the steps: validations, ends of epochs, scans of weights, batches, activations and the graph.

With the `Reading` of each step they are the Facts that rules judge. Each names its step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from steadygrad.facts.incident import Action
from steadygrad.facts.program import ProgramFact
from steadygrad.facts.program_scans import ProgramScan
from steadygrad.facts.reading import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """A validation loss reported by the program."""

    step: int
    """The last optimizer step before it."""
    epoch: int
    loss: float
    train_loss: float | None = None
    """Mean training loss since the previous validation; with None the rules average the losses of the Readings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """The end of an epoch."""

    step: int
    """The last optimizer step of the epoch."""
    epoch: int
    """0 for the first epoch."""
    train_loss: float | None = None
    """Mean loss of the epoch's applied steps; NaN when steps were made and none was applied, None when none was made.
    Skipped steps are left out: one bad step must not make an epoch bad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """The program waits for all findings, as it does when the run ends: what the whole run shows is judged now."""

    step: int
    """The last optimizer step before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterScan:
    """One scan of all weights and buffers. The first one comes before the first step, with `step` -1."""

    step: int
    """The last optimizer step before the scan; -1 before the first."""
    nonfinite_parameters: Mapping[str, int] = field(default_factory=dict)
    """Name -> number of elements that are NaN or Inf; healthy parameters are absent."""
    nonfinite_buffers: Mapping[str, int] = field(default_factory=dict)
    """The same for the model's buffers."""
    unchanged: tuple[str, ...] = ()
    """Parameters that are bit for bit what they were at the scan before, although a step was applied between the two
    in which they had a gradient that was not zero or mere rounding, and a learning rate above 0."""
    num_changed: int = 0
    """Parameters that differ from the scan before."""
    changed: tuple[str, ...] = field(default=(), repr=False)
    """... and their names."""
    steered: tuple[tuple[str, ...], ...] = field(default=(), repr=False)
    """For each optimizer whose update is not torch's alone: the parameters it holds, some of which it may leave as they
    are, because their turn has not come or because a hook puts them back to a bound."""
    norms: Mapping[str, float] = field(default_factory=dict, repr=False)
    """L2 norms of the trained parameters that have two dimensions or more; empty when they were not measured."""
    checksums: Mapping[str, int] = field(default_factory=dict, repr=False)
    """32 bits that depend on every bit of a trained parameter, as this rank alone holds it."""
    is_edited: bool = False
    """Whether the program has written to weights since the scan before, and the step was finite; not on many ranks."""


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
    """One scan of the batch of a step; may come before or after that step's Reading."""

    step: int
    tensors: Mapping[str, InputStats]
    """Path inside the batch ('0', 'labels', 'x.1') -> its numbers."""

    @property
    def is_nonfinite(self) -> bool:
        """Whether any element of the batch is NaN or infinite."""
        return any(tensor.num_nonfinite for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationStats:
    """The output of one module at one step."""

    dead_share: float | None = None
    """Share of units (channels, features) that were zero for the whole batch; None where units make no sense."""
    saturated_share: float | None = None
    """Share of elements within 1 % of a bound of a bounded activation; None for unbounded ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationScan:
    """One scan of the outputs of the modules, in training mode."""

    step: int
    modules: Mapping[str, ActivationStats] = field(default_factory=dict)
    """Qualified module name -> its numbers."""
    output: str = ""
    """Name of the module among them whose result is the model's output."""
    output_std: float | None = None
    """Standard deviation of the model's output over the batch, averaged over the other dimensions; None when the output
    is no floating tensor or the batch has one sample."""
    output_scale: float | None = None
    """Root mean square of that output."""
    inputs_differ: bool = True
    """Whether the model got inputs that differ from sample to sample."""


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
    """One scan of the program: model, optimizers, and the graph of the first step's loss."""

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
    """An action was taken on a finding above info. Clips and verdicts of `none` are not included."""

    step: int
    action: Action


Scan = ParameterScan | InputScan | ActivationScan | GraphScan
Fact = Reading | Validation | EpochEnd | Flush | Scan | ActionTaken | ProgramFact | ProgramScan
"""What a rule can judge."""
