"""What was seen of the user's program: its losses and labels, the mode of its forwards, its stream of batches.

Facts like those of `looks.py`, for the rules about errors that never crash. Plain numbers; each names its step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCall:
    """A loss in the graph of a step, and the op that made its input."""

    op: str
    """'nll_loss', 'cross_entropy', 'binary_cross_entropy_with_logits', ..."""
    fed_by: str
    """'softmax', 'log_softmax', 'sigmoid', 'linear', ...; views and casts are passed through. Empty if unknown.

    'written_out' before a `nll_loss` to which the same loss adds the logsumexp of its scores.
    """
    shape: tuple[int, ...] = ()
    """Shape of its input."""
    softmax_dim: int | None = None
    """Dimension of the (log_)softmax that made its input, counted in `shape`; None if there is none."""
    softmax_fed_by: str = ""
    """What made the input of that softmax."""
    expanded_from: tuple[int, ...] = ()
    """Shape of the prediction before it was expanded to that of the target; empty if it was not."""
    expanded_to: tuple[int, ...] = ()
    reshaped_from: tuple[int, ...] = ()
    """Shape with the classes last, if a reshape that moved no element put them second."""
    where: str = ""
    """file:line, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScan:
    """One scan of the graph of a step, from the loss down."""

    step: int
    calls: tuple[LossCall, ...] = ()
    one_element_norms: tuple[str, ...] = ()
    """Norms that normalise a single element each, so that their output is constant: 'group_norm of shape (4, 8, 1, 1)
    in 8 groups'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetScan:
    """The targets of one loss, against what its output, or the loss itself, can express."""

    step: int
    op: str
    """'mse_loss', 'binary_cross_entropy_with_logits', 'cosine_embedding_loss', ..."""
    fed_by: str
    """The activation that made the output, if the range is that of the activation: 'relu'."""
    low: float
    high: float
    lowest: float
    highest: float
    lost: float
    """Mean squared distance of the targets from the range, as a share of that and their variance together."""
    where: str = ""
    """file:line, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisions:
    """The divisions in the graph of a step."""

    step: int
    smallest: float
    """Absolute value of the smallest divisor that is a tensor; infinite if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelScan:
    """The labels of one loss over classes, against the tokens and the mask that the model was called with."""

    step: int
    num_counted: int
    """Labels that are not ignored."""
    num_classes: int
    lowest: int
    highest: int
    num_rows: int
    """Samples in the batch."""
    is_given: bool = False
    """Whether the labels are a tensor of the batch that was passed to the step function, and not one that the program
    keeps and passes beside each new batch."""
    is_reduced: bool = True
    """Whether the loss averages or adds up its elements itself, so that no mask can follow."""
    matches: Mapping[int, float] = field(default_factory=dict)
    """Offset -> share of the counted labels that equal the token so many places further on; empty without tokens."""
    is_causal: bool = False
    """Whether a mask that hides later tokens, or a recurrent layer, was seen in the graph."""
    num_at_end: int = 0
    """Counted labels at the last token of their row: 0 where labels that lie ahead were taken from the same tokens."""
    num_at_padding: int = 0
    """Counted labels at places that the mask calls padding."""
    num_lost_ends: int = 0
    """Padded rows whose last real token is the padding token itself and whose label there is ignored."""
    num_padded_rows: int = 0
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskScan:
    """The padding masks that attention got, against the tokens that the model was called with."""

    step: int
    num_swapped_rows: int
    """Rows in which every mask hides all tokens but the padding at one end; 0 if some attention sees the others."""
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangedArguments:
    """A loss whose input is labels, zeros and ones without a gradient, and whose target is a model's output."""

    step: int
    op: str
    """'cross_entropy', 'binary_cross_entropy_with_logits', ..."""
    where: str = ""
    """file:line, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelDependence:
    """How far inputs tell labels apart, against the same labels shuffled."""

    step: int
    num_samples: int
    spread: float
    """Variance of the inputs and outputs between classes."""
    shuffled_mean: float
    """... and its mean and standard deviation over random assignments of the labels."""
    shuffled_std: float
    product_score: float = 0.0
    """Standard deviations by which products of two inputs differ more between classes than under shuffled labels."""
    neighbour_score: float = 0.0
    """Standard deviations by which nearest neighbours share their label more often than chance."""
    entropy: float
    """Of the labels: the loss of a model that knows how frequent each class is and nothing else, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedAxes:
    """A place where samples of a batch probably see each other."""

    step: int
    what: str
    """'reshape of (32, 6, 8) to (6, 32, 8)'"""
    kind: str
    """'reshape': axes exchanged by a reshape; 'channels': those of an image, before a convolution; 'batch_first': a
    layer that expects time first got samples first; 'gradient': one sample's output has a gradient with respect to
    other samples; 'positions': encodings of time steps are added to samples."""
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakedLabel:
    """A column of the input table that follows the labels exactly."""

    step: int
    tensor: str
    """Path inside the model's arguments."""
    column: int
    num_rows: int
    """Rows that were compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleLabel:
    """A language model's output that depends on the token it is to predict."""

    step: int
    place: int
    """Place of the output in its row; the label is the token one further on."""
    share: float
    """Its gradient there, as a share of the largest one at the other places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutGraph:
    """An op without a gradient, whose result goes into the loss and is all that some parameters do for it."""

    step: int
    op: str
    """'argmax'; 'sample' for a draw from a distribution."""
    parameters: tuple[str, ...]
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedSeed:
    """A seed that the program sets in every step, so that each draws the same random numbers."""

    step: int
    seed: int
    num_steps: int
    """Steps in a row that drew the same numbers."""
    where: str = ""
    repeats: str = ""
    """What never changes because of it; empty if it may be a tensor that is meant to stay the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeScan:
    """The training flags that a forward ran with; sent when they differ from the forwards of its sort before."""

    step: int
    """The step it belongs to, or the last step before it."""
    is_evaluation: bool
    """Without gradients and between two steps, as in a validation."""
    is_first: bool = True
    """Whether it is the first such forward since a step; the second one, with another input, is sent too."""
    is_training: bool
    """The model's own flag; False in training if it is the only one that is set."""
    is_hollow: bool = False
    """Whether a module says that it is in training mode and nothing inside it is, though most of it is trained."""
    dropouts_on: int = 0
    """Dropout layers in training mode with a probability above 0."""
    dropouts_off: int = 0
    norms_on: int = 0
    """BatchNorm layers that update running statistics."""
    norms_off: int = 0
    """... and those that use them although they keep them."""
    spectral_norms_off: int = 0
    """Spectral norms whose iteration is off, so that they divide by a number that no longer follows the weights."""
    fresh_norms: tuple[str, ...] = ()
    """Of the latter: names of those that have never seen a batch, whose statistics are still mean 0 and variance 1."""
    stray: tuple[str, ...] = ()
    """Dropout and BatchNorm layers in training mode inside a model in evaluation mode."""
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomEvaluation:
    """What was active as in training while the model was in evaluation mode."""

    step: int
    calls: tuple[str, ...] = ()
    """'dropout at file:line'"""
    norms: tuple[str, ...] = ()
    """'batch_norm at file:line', with running statistics that it updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The weights that the model was called with between two steps, compared with those from before the first one."""

    step: int
    is_restored: bool
    """Whether every call ran with the first weights, although the step before had moved them."""
    where: str = ""
    """file:line of the last `load_state_dict` of the model, if there was one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamScan:
    """What the batches so far have in common. `loader` describes the DataLoader found, if it was looked for."""

    step: int
    tensor: str
    """Path inside the batch."""
    pattern: str
    """'stuck': every batch has the same content; 'repeated': each comes several times in a row; 'order': the second
    epoch brings the batches of the first in the same order."""
    period: int
    """For 'repeated' how often each comes, for 'order' the number of batches."""
    num_batches: int
    """Batches that were compared."""
    num_workers: int = 0
    """Of the DataLoader."""
    num_loader_batches: int | None = None
    """Length of the DataLoader whose batches these are; None if none was found."""
    shuffles: bool = False
    """Whether its sampler is meant to shuffle."""
    is_distributed: bool = False
    """Whether the sampler needs `set_epoch` to do so."""
    is_given: bool = False
    """Whether the batch was passed to the step function in a container, as loaders make it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDataChange:
    """Data kept in a dataset has changed although it was only read."""

    step: int
    name: str
    """'InPlace.x'"""
    changed_share: float
    """Share of the sampled elements that changed since the scan before."""
    correlation: float
    """Between the elements before and after."""
    mean: tuple[float, float]
    """Of the sampled elements: at the first scan and now."""
    std: tuple[float, float]
    by_rows: bool
    """Whether a single step has been seen to change some rows and leave others: those that its batch has read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelScan:
    """Images on a grid of 256 values that is not the one of their statistics."""

    step: int
    tensor: str
    """Path inside the model's arguments."""
    statistics: str
    """Those that they were normalised with: 'ImageNet'."""
    pattern: str
    """'divided_twice' (by 255), 'not_divided', 'normalised_twice'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitScan:
    """A dataset's split that overlaps, or a sampler with too few weights."""

    step: int
    num_samples: int
    """Of the whole dataset."""
    num_weights: int = 0
    """Of the sampler; 0 if this is about a split."""
    num_evaluated: int = 0
    num_shared: int = 0
    """Samples of the evaluated part that are trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleLoad:
    """A `load_state_dict` that was given the module's own tensors, and so changed nothing."""

    step: int
    where: str
    """file:line of the load."""
    module: str
    """Class of the module."""
    is_earlier: bool
    """Whether the weights have moved since the state was taken, which should have been brought back; otherwise a
    network that is not trained was loaded with itself several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleSample:
    """A tensor of the batch with one row among others with many, though its rows look like theirs."""

    step: int
    tensor: str
    shape: tuple[int, ...]
    other: str
    other_shape: tuple[int, ...]


ProgramFact = (
    LossScan
    | TargetScan
    | Divisions
    | LabelScan
    | MaskScan
    | ExchangedArguments
    | LabelDependence
    | MixedAxes
    | VisibleLabel
    | LeakedLabel
    | RepeatedSeed
    | CutGraph
    | ModeScan
    | RandomEvaluation
    | Restored
    | StreamScan
    | StoredDataChange
    | SingleSample
    | IdleLoad
    | PixelScan
    | SplitScan
)
"""Facts about the program, seen by each rank for itself."""
