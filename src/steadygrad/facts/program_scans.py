"""What was seen of the program around the steps: calls in the wrong order, weights out of the optimizer's reach, ranks
that came apart, numbers that a format cannot hold. Facts for rules about errors that never crash.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CallScan:
    """The calls between two optimizer steps, early in a run."""

    step: int
    num_backwards: int = 0
    num_cleared: int = 0
    """Backwards of the step that found none of the gradients that the one before had left."""
    divisors: tuple[tuple[float, ...], ...] = ()
    """For each backward: the constants that its loss was divided by (a product with 1/4 counts as 4), but for the one
    that makes a sum of as many terms their mean."""
    scale: float = 1.0
    """Largest power of two, of a kind that a GradScaler applies, that a loss was multiplied by."""
    end: str = ""
    """The operation that made the last loss, constants aside: 'NllLoss'."""
    num_averaging: int = 0
    """Ranks over which DistributedDataParallel averages the gradients; 0 without it."""
    norm_after_backward: float | None = None
    """Norm of the gradients right after the last backward; None if unknown."""
    norm_at_clip: float | None = None
    """Norm of the gradients when they were clipped after the last backward; None if they were not."""
    norm_at_step: float | None = None
    """Norm of the gradients that the optimizer was given, with any scale that they still carry."""
    scale_is_known: bool = False
    """Whether the step divides by the loss scale itself."""
    clip_is_spent: bool = False
    """Whether a clip call was given a generator with nothing left in it."""
    clip_is_early: bool = False
    """Whether the gradients were clipped before the last backward added to them, and not since; not if that one stands
    at another line, as the backward of another loss does."""
    clip_is_of_copy: bool = False
    """Whether the only clip was given tensors with the shapes of the parameters that no optimizer holds: copies."""
    norm_of_copy: float | None = None
    """Norm of the gradients of those; None if they have none."""
    max_norm: float = math.inf
    """The norm that the clip allows; infinite if unknown."""
    clip: str = "clip_grad_norm_"
    """The function that clipped, if one did."""
    where_backward: str = ""
    where_clip: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A `load_state_dict` of the model or a part of it, before the first step."""

    where: str
    module: str
    """Name of the part that was loaded; empty for the model itself."""
    num_given: int
    num_matched: int
    example: str = ""
    """A key that was given and matched nothing."""
    wanted: str = ""
    """A key of the module that was not given."""
    num_missing: int = 0
    """Keys of the module that were not given."""
    num_renamed: int = 0
    """... and those of them that were given with a prefix more, or less, and the same shape."""
    kept: float | None = None
    """Correlation of the weights before the first step with those that were loaded; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialSave:
    """Saves that hold what is trained and leave out frozen parameters which exist nowhere else."""

    where: str
    """file:line of the last one."""
    parameters: tuple[str, ...]
    was_trained: bool
    """Whether they were trained in this run and frozen later; else they still have their random initial values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misspelt:
    """An option in a parameter group that the optimizer does not know."""

    group: int
    name: str
    meant: str
    """The option that the optimizer has."""
    value: float
    used: float
    """What it uses instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelScan:
    """One scan of how model and optimizers fit together. The first comes before the first step."""

    step: int
    unfrozen: tuple[str, ...] = ()
    """Parameters that became trainable, or were added, since the first scan, and that no optimizer holds."""
    replaced: tuple[str, ...] = ()
    """Parameters that an optimizer holds and the model no longer has."""
    came_apart: tuple[tuple[str, str], ...] = ()
    """Pairs of names: an embedding and an output layer that began with the same values and differ now."""
    not_frozen: tuple[str, ...] = ()
    """Modules whose `train()` would freeze parameters, as their settings ask, and that have none frozen."""
    freed_by_flag: tuple[str, ...] = ()
    """'body.requires_grad = False' and the like, which freeze nothing, where an optimizer trains the parameters."""
    misspelt: tuple[Misspelt, ...] = ()
    doubled: tuple[str, ...] = ()
    """Parameters that stand twice in one group."""
    frozen_head: str = ""
    """Name of the last layer, if it is frozen at its random initial values and most of the model is frozen too."""
    frozen_share: float = 0.0
    tables: tuple[str, ...] = field(default=(), repr=False)
    """Weights of embeddings: a step has a gradient for the rows that its batch looks up, and zeros elsewhere."""
    loads: tuple[Load, ...] = ()
    equal_units: tuple[str, ...] = ()
    """Weights whose rows began equal, have moved and are still equal after `num_steps` steps."""
    stale_save: str = ""
    """file:line of a `torch.save` that repeatedly wrote the weights from before the first step."""
    partial_save: PartialSave | None = None
    idle_average: bool = False
    """Whether an AveragedModel of this model was called after `num_steps` steps and has never been updated."""
    idle_copy: tuple[str, str] = ("", "")
    """Name of a copy of the model that is called an average, was evaluated several times and still holds the weights
    from before the first step; and file:line of an evaluation. Empty if there is none."""
    stale_statistics: tuple[str, str] = ("", "")
    """The same for a copy whose weights follow the model's, and whose BatchNorm statistics do not."""
    num_steps: int = 0
    """Steps made so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankScan:
    """What this rank and another hold, compared."""

    step: int
    """The step after which both were looked at."""
    rank: int
    other: int
    differing: tuple[str, ...] = ()
    """Parameters that differ between the two."""
    num_compared: int = 0
    gradients_are_averaged: bool = False
    """Whether DistributedDataParallel makes the gradients of the ranks equal."""
    same_batch: bool = False
    """Whether both trained on the same batch."""
    batch: str = ""
    """Checksum of this rank's batch."""
    zero_input: str = ""
    """This rank's largest input, if it is all zeros and the other rank's is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionScan:
    """What the number formats do to this training."""

    step: int
    stuck_share: float | None = None
    """Share of the half-precision elements with a gradient that the last `num_steps` steps left as they were."""
    dtype: str = ""
    num_steps: int = 0
    is_full_rate: bool = False
    """Whether the learning rate is at its usual size: not in a warm-up, not at the end of a decay."""
    is_own_optimizer: bool = True
    """Whether the optimizer is torch's own, which rounds updates to the weights' format."""
    unheeded_autocast: str = ""
    """Format that autocast asked for when the model was called, if none of its layers ran in it."""
    is_float16: bool = False
    """Whether layers of the model ran in float16."""
    has_scale: bool = False
    """Whether the loss was scaled for that."""
    zero_share: float = 0.0
    """Median share, over the larger parameters, of gradient elements that are exactly 0."""
    redrawn: tuple[str, ...] = field(default=(), repr=False)
    """Modules that draw random numbers and started from another state when backward recomputed them; innermost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWait:
    """A rank that has waited for the others for half of the time after which the process group gives up."""

    step: int
    rank: int
    num_ranks: int
    seconds: float
    place: str
    """'in all_reduce at train.py:41'"""
    others: Mapping[int, str] = field(default_factory=dict)
    """Rank -> its place, for those that have made no step for a while either."""
    timeout_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskChange:
    """The program has masked weights, as `torch.nn.utils.prune` does, or written to them: what is 0 now is its will."""

    step: int


ProgramScan = CallScan | ModelScan | RankScan | PrecisionScan | MaskChange
"""What rules about the program judge, beside the facts of `program.py`."""
