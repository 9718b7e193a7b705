"""Rules about the stream of batches: what comes again, in which order, and what the labels have to do with it.

What a program may do on purpose (full-batch training, an unshuffled epoch) is not reported as a warning; where the
DataLoader shows that it was not meant (several batches, a sampler that shuffles, several workers), it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from steadygrad.detect.memory import Remembering
from steadygrad.detect.once import OnceRule, at
from steadygrad.facts import Fact, Finding, Reading, Severity
from steadygrad.facts.program import (
    LabelDependence,
    LabelScan,
    PixelScan,
    RepeatedSeed,
    SingleSample,
    SplitScan,
    StoredDataChange,
    StreamScan,
)

FEWEST_ROWS = 8
"""Samples in a batch below which one class among them says nothing."""
NUM_PURE = 4
"""Batches of a single class, for each of two classes, that show sorted data."""
PURE_SHARE = 0.9
NUM_CONSTANT, FEWEST_CONSTANT = 32, 256
"""Batches, and labels in them, that are all of one class."""
FEWEST_SAMPLES = 1000
"""Samples that a permutation test needs here."""
CERTAIN_SCORE = 4.0
"""Standard deviations above shuffled labels from which labels depend on inputs."""
NO_BETTER = 0.97
"""Share of the entropy of the labels above which a loss is that of a guess."""


class RepeatedBatch(OnceRule[StreamScan]):
    """The same content repeats in new tensors: a stuck loader, or workers that do the same work."""

    name = "repeated_batch"
    hears = (StreamScan,)

    def judge(self, fact: StreamScan) -> Finding | None:
        """Return the finding; an info where a stuck stream may be full-batch training, without a DataLoader."""
        if fact.pattern == "order":
            return None
        if fact.pattern == "repeated":
            is_certain = fact.num_workers > 1
            message = f"each batch comes {fact.period} times in a row, in new tensors"
            message += f"; the DataLoader has {fact.num_workers} workers" if is_certain else ""
            advice = (
                "Workers draw the same random numbers or read the same part of an iterable dataset: seed by "
                "torch.utils.data.get_worker_info().seed, and split the data by worker."
            )
        else:
            is_certain = (fact.num_loader_batches or 0) > 1 or (fact.is_given and fact.num_loader_batches is None)
            message = f"all {fact.num_batches} batches so far have the same content, in new tensors"
            if fact.num_loader_batches is not None:
                message += f"; the DataLoader has {fact.num_loader_batches}"
            advice = "Iterate over the loader: next(iter(loader)) starts again with the first batch each time."
        return self.report(
            severity=Severity.WARNING if is_certain else Severity.INFO,
            step=fact.step - fact.num_batches + 1,
            message=f"{message} (compared by checksum)",
            advice=advice,
            evidence={"pattern": fact.pattern, "period": fact.period, "num_batches": fact.num_batches},
        )


class RepeatedOrder(OnceRule[StreamScan]):
    """Every epoch has the batches in the same order although the sampler is meant to shuffle."""

    name = "repeated_order"
    hears = (StreamScan,)

    def judge(self, fact: StreamScan) -> Finding | None:
        """Return the finding, a warning only if the sampler shuffles."""
        if fact.pattern != "order":
            return None
        return self.report(
            severity=Severity.WARNING if fact.shuffles else Severity.INFO,
            step=fact.step - fact.period + 1,
            message=f"the batches of an epoch ({fact.period}) came again in the same order"
            + (", although the sampler shuffles" if fact.shuffles else "")
            + f" (compared by checksum of {fact.tensor!r})",
            advice="Call sampler.set_epoch(epoch) at the start of each epoch: its order depends on nothing else."
            if fact.is_distributed
            else "Do not seed the sampler's generator again for each epoch."
            if fact.shuffles
            else "Pass shuffle=True to the DataLoader, unless the order is intended.",
            evidence={"period": fact.period, "tensor": fact.tensor, "shuffles": fact.shuffles},
        )


class FixedSeed(OnceRule[RepeatedSeed]):
    """The program sets the same seed in every step: dropout, noise and augmentation are the same each time.

    Programs that set other seeds, that put states of generators back, or that draw nothing are left alone. It is an
    info where the seed may serve to draw a fixed tensor again.
    """

    name = "repeated_seed"
    hears = (RepeatedSeed,)

    def judge(self, fact: RepeatedSeed) -> Finding | None:
        """Return the finding, with the place."""
        return self.report(
            severity=Severity.WARNING if fact.repeats else Severity.INFO,
            step=fact.step,
            message=f"torch.manual_seed({fact.seed}){at(fact.where)} is called in every step, and the last "
            f"{fact.num_steps} drew the same random numbers"
            + (f": {fact.repeats} never change" if fact.repeats else ""),
            advice="Set the seed once, before the training; for numbers that must stay the same, use a separate "
            "torch.Generator.",
            evidence={"seed": fact.seed, "num_steps": fact.num_steps, "where": fact.where, "repeats": fact.repeats},
        )


class SortedLabels(OnceRule[LabelScan]):
    """Nearly every batch has labels of a single class, first of one, then of another: the data is sorted by class.

    Batches of one class alone are normal where a class is rare, so at least two classes must have several of them. So
    are those of a discriminator, which gets one class and the other in turn: in sorted data none comes back so soon.
    """

    name = "sorted_labels"
    hears = (LabelScan,)
    memory = ("_pure", "_num_scans", "_told", "_last", "_num_returns")

    def __init__(self) -> None:
        self._pure: dict[str, int] = {}
        self._num_scans = self._num_returns = 0
        self._last = ""  # label of the last batch of one class

    def judge(self, fact: LabelScan) -> Finding | None:
        """Return the finding if this scan shows it."""
        if fact.num_counted < FEWEST_ROWS:
            return None
        if fact.num_counted > fact.num_rows:  # more than one label a sample
            return None
        self._num_scans += 1
        if fact.lowest == fact.highest:
            label = str(fact.lowest)
            self._num_returns += label in self._pure and label != self._last
            self._pure[label], self._last = self._pure.get(label, 0) + 1, label
        often = [label for label, number in self._pure.items() if number >= NUM_PURE]
        num_pure = sum(self._pure.values())
        if len(often) < 2 or num_pure < PURE_SHARE * self._num_scans or 3 * self._num_returns > num_pure:
            return None
        return self.report(
            step=fact.step,
            message=f"{num_pure} of {self._num_scans} batches have labels of one class only, first "
            f"{' then '.join(often[:3])}: the data is sorted by class, and the model forgets each class with the next",
            advice="Shuffle: DataLoader(..., shuffle=True), or shuffle the dataset before it is split.",
            evidence={"num_pure": num_pure, "num_scans": self._num_scans, "classes": often[:5]},
        )


class ConstantLabels(Remembering):
    """Every label so far is the same class, out of three or more: a column was mixed up, or a mapping lost.

    Labels that the step makes itself, or that the program made once for all batches, are left out: in contrastive
    learning they are 0 on purpose.
    """

    name = "constant_labels"
    hears = (LabelScan,)
    memory = ("_label", "_num_labels", "_num_scans", "_is_over")

    def __init__(self) -> None:
        self._label: int | None = None
        self._num_labels = self._num_scans = 0
        self._is_over = False

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Report once, after `NUM_CONSTANT` batches."""
        if not isinstance(fact, LabelScan) or self._is_over or not fact.num_counted:
            return
        label = fact.lowest if self._label is None else self._label
        # One other label settles it for the whole run
        if not (fact.is_given and fact.lowest == fact.highest == label) or fact.num_classes < 3:
            self._is_over = True
            return
        self._label, self._num_labels, self._num_scans = label, self._num_labels + fact.num_counted, self._num_scans + 1
        if self._num_scans < NUM_CONSTANT or self._num_labels < FEWEST_CONSTANT:
            return
        self._is_over = True
        yield Finding(
            kind=self.name,
            severity=Severity.WARNING,
            step=fact.step,
            message=f"all {self._num_labels} labels of {self._num_scans} batches are class {label}, of "
            f"{fact.num_classes} classes: there is nothing to distinguish",
            advice="Check how labels are read and mapped to classes, and that the data is shuffled.",
            evidence={"label": label, "num_labels": self._num_labels, "num_classes": fact.num_classes},
        )


class IndependentLabels(Remembering):
    """The labels have nothing to do with the inputs: the loss is that of a guess, and a permutation test agrees."""

    name = "independent_labels"
    hears = (LabelDependence, Reading)
    memory = ("_losses", "_told")

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=64)
        self._told = False

    def passes(self, reading: Reading) -> bool:
        """Take in any plain Reading: findings come with tests of the labels."""
        if reading.loss is not None:
            self._losses.append(reading.loss)
        return True

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Report once."""
        if isinstance(fact, Reading):
            if fact.loss is not None and not fact.loss_is_nonfinite:
                self._losses.append(fact.loss)
            return
        if not isinstance(fact, LabelDependence) or self._told or not self._losses:
            return
        loss = sum(self._losses) / len(self._losses)
        score = (fact.spread - fact.shuffled_mean) / max(fact.shuffled_std, 1e-30)
        best = max(score, fact.product_score, fact.neighbour_score)
        if fact.num_samples < FEWEST_SAMPLES or best > CERTAIN_SCORE or loss < NO_BETTER * fact.entropy:
            return
        if not fact.entropy > 0:  # labels of one class: there is nothing to guess
            return
        self._told = True
        yield Finding(
            kind=self.name,
            severity=Severity.WARNING,
            step=fact.step,
            message=f"no sign that the labels depend on the inputs: {fact.num_samples} samples differ between classes "
            f"as much as with shuffled labels ({score:+.1f} standard deviations), and the loss of {loss:.3g} is that "
            f"of a guess ({fact.entropy:.3g})",
            advice="Check that inputs and labels are shuffled, sorted and split together.",
            evidence={"score": score, "loss": loss, "entropy": fact.entropy, "num_samples": fact.num_samples},
        )


class ChangedDataset(OnceRule[StoredDataChange]):
    """The data kept in a dataset is changed each time it is read, so inputs drift from epoch to epoch.

    A step then changes the rows that its batch reads. Data of which only the whole ever changes is left alone: the
    program does that itself, as a curriculum that lowers the contrast after each epoch.
    """

    name = "changed_dataset"
    hears = (StoredDataChange,)
    memory = ("_counts", "_told")

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def judge(self, fact: StoredDataChange) -> Finding | None:
        """Return the finding when the same array was transformed between two looks, twice."""
        if fact.changed_share < 0.3 or abs(fact.correlation) < 0.5:
            # Barely touched, or replaced by other data (a cache that is refilled): not the same data transformed
            self._counts.pop(fact.name, None)
            return None
        self._counts[fact.name] = self._counts.get(fact.name, 0) + 1
        if self._counts[fact.name] < 2 or not fact.by_rows:
            return None
        return self.report(
            step=fact.step,
            message=f"inputs drift because {fact.name} itself changes: mean {fact.mean[0]:.3g} to {fact.mean[1]:.3g}, "
            f"standard deviation {fact.std[0]:.3g} to {fact.std[1]:.3g} between two scans of the stored data",
            advice="__getitem__ changes the stored data in place: use x.sub(...), not x.sub_(...), or clone() first.",
            evidence={"name": fact.name, "changed_share": fact.changed_share, "correlation": fact.correlation},
        )


class WrongSplit(OnceRule[SplitScan | LabelScan]):
    """Validation samples are trained on, or only the first few samples are ever drawn: a split or sampler is wrong."""

    name = "wrong_split"
    hears = (SplitScan, LabelScan)
    memory = ("_num_classes", "_told")

    def __init__(self) -> None:
        self._num_classes = 0

    def judge(self, fact: SplitScan | LabelScan) -> Finding | None:
        """Return the finding; one about weights only if there are as many as classes."""
        if isinstance(fact, LabelScan):
            self._num_classes = fact.num_classes
            return None
        if not fact.num_weights:
            return self.report(
                step=fact.step,
                message=f"{fact.num_shared} of the {fact.num_evaluated} samples of the validation are trained on: both "
                f"parts together are as large as the dataset ({fact.num_samples}), but they overlap",
                advice="Take both parts from one call of random_split, or pass the same "
                "generator=torch.Generator().manual_seed(0) to each.",
                evidence={"num_shared": fact.num_shared, "num_evaluated": fact.num_evaluated},
            )
        if fact.num_weights != max(2, self._num_classes):
            return None
        return self.report(
            step=fact.step,
            message=f"the WeightedRandomSampler has {fact.num_weights} weights, one for each class, for "
            f"{fact.num_samples} samples: it draws only the first {fact.num_weights} samples",
            advice="Pass one weight for each sample: class_weights[labels].",
            evidence={"num_weights": fact.num_weights, "num_samples": fact.num_samples},
        )


class PixelScale(OnceRule[PixelScan]):
    """Images were divided by 255 twice or not at all, or normalised twice: they are not what the statistics are for."""

    name = "pixel_scale"
    hears = (PixelScan,)

    def judge(self, fact: PixelScan) -> Finding | None:
        """Return the finding: the watch reports only images that lie on the wrong grid."""
        by = "" if fact.statistics == "0 and 1" else f" normalised with the statistics {fact.statistics}"
        message = {
            "divided_twice": f"the pixels{by} were divided by 255 twice: they lie between 0 and 1/255",
            "not_divided": f"the pixels{by} lie between 0 and 255, and the statistics are for pixels between 0 and 1",
            "normalised_twice": f"the images were normalised twice with the statistics {fact.statistics}",
        }
        return self.report(
            step=fact.step,
            message=f"{message[fact.pattern]} (input {fact.tensor})",
            advice="Look at one batch: images.amin(), images.amax(). ToTensor divides bytes by 255, albumentations' "
            "Normalize expects 0 to 255, and a model may normalise what it is given.",
            evidence={"pattern": fact.pattern, "statistics": fact.statistics, "tensor": fact.tensor},
        )


class SingleRow(OnceRule[SingleSample]):
    """One tensor of the batch has a single row where the others have one for each sample: it is broadcast to all."""

    name = "single_row"
    hears = (SingleSample,)

    def judge(self, fact: SingleSample) -> Finding | None:
        """Return the finding if this scan shows it."""
        return self.report(
            step=fact.step,
            message=f"{fact.tensor!r} of the batch has shape {fact.shape} where {fact.other!r} has {fact.other_shape}: "
            "one sample's data is used for all",
            advice="Stack it for all samples in the collate function; expand it there if it is meant for all.",
            evidence={"tensor": fact.tensor, "shape": list(fact.shape), "other": fact.other},
        )
