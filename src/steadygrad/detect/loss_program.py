"""Rules about the loss as it is written: what feeds it, and which labels count in it.

Facts about the program, checked in the first steps: certain ones are warnings at once.
"""

from __future__ import annotations

from steadygrad.detect.nonfinite import SHOWN, show
from steadygrad.detect.once import OnceRule, at
from steadygrad.facts import Finding
from steadygrad.facts.program import (
    ExchangedArguments,
    LabelScan,
    LeakedLabel,
    LossCall,
    LossScan,
    MaskScan,
    MixedAxes,
    VisibleLabel,
)

RAW = frozenset(("linear", "convolution", "softmax", "sigmoid", "relu", "tanh"))
"""Ops whose output is not a log-probability."""
ALIGNED, UNALIGNED = 0.99, 0.6
"""Share of labels that equal a token from which they are that token, and up to which they are not."""
FEWEST_LABELS = 32
PADDING_SHARE = 0.2
"""Share of the counted labels that may be padding."""


class WrongLossInput(OnceRule[LossScan | ExchangedArguments]):
    """A loss gets the wrong input: probabilities for log-probabilities, a sigmoid for logits, labels for outputs."""

    name = "wrong_loss_input"
    hears = (LossScan, ExchangedArguments)

    def judge(self, fact: LossScan | ExchangedArguments) -> Finding | None:
        """Return the finding about the first loss that is wrong."""
        if isinstance(fact, ExchangedArguments):
            return self.report(
                step=fact.step,
                message=f"{fact.op} gets its arguments in the wrong order{at(fact.where)}: the first one is labels, "
                "zeros and ones without a gradient, and the model's output is taken for the target",
                advice=f"Put the output first: {fact.op}(output, labels).",
                evidence={"op": fact.op, "where": fact.where},
            )
        for call in fact.calls:
            found = _judge_input(call)
            if found is not None:
                what, fix = found
                return self.report(
                    step=fact.step,
                    message=f"{what}{at(call.where)}",
                    advice=fix,
                    evidence={"op": call.op, "fed_by": call.fed_by, "shape": list(call.shape), "where": call.where},
                )
        return None


def _judge_input(call: LossCall) -> tuple[str, str] | None:
    """Return what is wrong with the input of a loss, and the fix."""
    if call.op == "nll_loss" and call.fed_by in RAW:
        what = "probabilities" if call.fed_by in ("softmax", "sigmoid") else f"the output of a {call.fed_by}"
        return (
            f"nll_loss gets {what} but expects log-probabilities: the loss has no lower bound, or stays near -1",
            "Use F.cross_entropy on the logits, or log_softmax before nll_loss.",
        )
    if call.op in ("ctc_loss", "kl_div") and call.fed_by in RAW:
        return (
            f"{call.op} gets the output of a {call.fed_by} but expects log-probabilities",
            "Put log_softmax over the classes before it.",
        )
    if call.op == "nll_loss" and call.softmax_dim is not None and len(call.shape) > 1 and call.softmax_dim != 1:
        return (
            f"the softmax before nll_loss runs over dimension {call.softmax_dim} of {call.shape}, the samples, and not "
            "over the classes: samples compete with each other",
            "Use dim=1 (or F.cross_entropy on the logits).",
        )
    if call.op == "nll_loss" and call.reshaped_from:
        return (
            f"cross_entropy gets scores of {call.reshaped_from} that were reshaped to {call.shape}: a reshape does "
            "not reorder elements, so each score ends up at another class and position",
            "Use transpose(1, 2), movedim(-1, 1) or permute, or flatten the positions: scores.flatten(0, 1).",
        )
    if call.op == "nll_loss" and call.fed_by == "log_softmax" and call.softmax_fed_by == "sigmoid":
        return (
            "cross_entropy gets the output of a sigmoid: logits between 0 and 1 can never be certain",
            "Give cross_entropy the logits, without an activation.",
        )
    if call.op == "binary_cross_entropy_with_logits" and call.fed_by in ("sigmoid", "softmax", "log_softmax"):
        return (
            f"binary_cross_entropy_with_logits gets the output of a {call.fed_by}: it applies a sigmoid itself, so the "
            "predicted probability stays between 0.5 and 0.73",
            "Remove the activation, or use binary_cross_entropy.",
        )
    if "softmax" in call.fed_by and call.shape and call.shape[-1] == 1 and call.softmax_dim == len(call.shape) - 1:
        return (
            f"the softmax before {call.op} runs over a single class: its output is always 1, and nothing is learnt",
            "Use a sigmoid for one output, or two outputs.",
        )
    return None


class OneElementNorm(OnceRule[LossScan]):
    """A norm over a single element: its output is constant, so no gradient passes through it."""

    name = "one_element_norm"
    hears = (LossScan,)

    def judge(self, fact: LossScan) -> Finding | None:
        """Return the finding if this scan shows it."""
        if not fact.one_element_norms:
            return None
        return self.report(
            step=fact.step,
            message=f"{show(fact.one_element_norms)} normalises one element at a time: the result is its bias whatever "
            "the input, and nothing before it gets a gradient",
            advice="Use fewer groups, or normalise before the dimensions shrink to 1.",
            evidence={"norms": list(fact.one_element_norms[:SHOWN])},
        )


MIXED = {
    "reshape": (
        " is meant to swap the batch with another axis but does not reorder elements: it joins pieces of different "
        "samples",
        "Use transpose or permute to exchange axes.",
    ),
    "batch_first": (
        " with as many time steps as there are samples: each sample reads the others as its past",
        "Create the layer with batch_first=True, or transpose its input.",
    ),
    "positions": (
        " gives each sample the encoding of its position in the batch, the same one at every time step",
        "Slice by the length of the sequence, and add along it: table[:x.size(1)].transpose(0, 1), shape (1, T, D).",
    ),
    "gradient": (
        ": samples see each other, and the model cannot be used for a single one",
        "Look for an operation over dimension 0 (mean, softmax, attention, cumsum) or a reshape after a transpose.",
    ),
}
"""Kind of MixedAxes -> what is wrong, and the fix."""


class MixedSamples(OnceRule[MixedAxes]):
    """Samples of a batch see each other: axes were exchanged, or the batch is read as a sequence."""

    name = "mixed_samples"
    hears = (MixedAxes,)

    def judge(self, fact: MixedAxes) -> Finding | None:
        """Return the finding, with the shapes."""
        if fact.kind == "channels":
            return None
        why, fix = MIXED[fact.kind]
        return self.report(
            step=fact.step,
            message=f"{fact.what}{at(fact.where)}{why}",
            advice=fix,
            evidence={"what": fact.what, "where": fact.where},
        )


class MixedChannels(OnceRule[MixedAxes]):
    """A convolution gets channels that a reshape has mixed with the positions in the image."""

    name = "mixed_channels"
    hears = (MixedAxes,)

    def judge(self, fact: MixedAxes) -> Finding | None:
        """Return the finding, with the shapes."""
        if fact.kind != "channels":
            return None
        return self.report(
            step=fact.step,
            message=f"{fact.what}{at(fact.where)} is meant to move the channels to the front but does not reorder "
            "elements: each channel that the convolution gets holds pieces of all channels",
            advice="Move the axis with permute(0, 3, 1, 2), movedim(-1, 1) or transpose(1, 2), and reshape afterwards.",
            evidence={"what": fact.what, "where": fact.where},
        )


class ShiftedLabels(OnceRule[LabelScan]):
    """The labels of a language model are the tokens two positions ahead, or the tokens it reads.

    Compared with the tokens of the model's call, place by place. Labels equal to the tokens are right for an
    autoencoder, so they are reported only for a model that cannot see later tokens. Labels that were shifted
    twice have none left for the last token of a row; where it has one, a forecast two places ahead is meant.
    """

    name = "shifted_labels"
    hears = (LabelScan,)
    memory = ("_told", "_is_fine")

    def __init__(self) -> None:
        self._is_fine = False

    def judge(self, fact: LabelScan) -> Finding | None:
        """Return the finding, unless another loss of the step has labels one place on."""
        if fact.num_counted < FEWEST_LABELS:
            return None
        share = fact.matches.get(1, 0.0)
        # Kept for good: where one loss has labels one place on, another may differ on purpose
        self._is_fine |= share >= ALIGNED
        if self._is_fine or share > UNALIGNED:
            return None
        twice = fact.matches.get(2, 0.0) >= ALIGNED and not fact.num_at_end
        none = fact.matches.get(0, 0.0) >= ALIGNED and fact.is_causal
        if not (twice or none):
            return None
        what = "the token after the next" if twice else "the token itself"
        return self.report(
            step=fact.step,
            message=f"the label of each token is {what}, not the next one{at(fact.where)}: "
            + ("labels were shifted twice" if twice else "labels were not shifted, and the model learns to copy"),
            advice="Shift once: either the model does it (pass labels=input_ids), or you do."
            if twice
            else "Compare logits[:, :-1] with tokens[:, 1:].",
            evidence={f"match_{offset}": value for offset, value in fact.matches.items()} | {"where": fact.where},
        )


class VisibleLabels(OnceRule[VisibleLabel]):
    """A language model sees the tokens that it should predict: nothing hides the later ones.

    Its loss falls far below that of a healthy one, and what it generates is worthless. Labels that are the next tokens
    make it a language model, and the gradient of an output with respect to its own label shows that it is seen.
    Encoders, taggers, prefixes and sentences that are summed up in a vector are left alone.
    """

    name = "visible_labels"
    hears = (VisibleLabel,)

    def judge(self, fact: VisibleLabel) -> Finding | None:
        """Return the finding, with the place."""
        return self.report(
            step=fact.step,
            message=f"the output at position {fact.place} depends on token {fact.place + 1}, the label it should "
            "predict: the model sees what comes next in training, but not when it generates",
            advice="Hide later tokens in every layer that mixes positions: is_causal=True, or a mask above the "
            "diagonal added before the softmax; pad a convolution on the left only; no bidirectional layer.",
            evidence={"place": fact.place, "share": fact.share},
        )


class LabelsInInputs(OnceRule[LeakedLabel]):
    """A column of the input table is the label: the model learns to copy it, and fails where the label is not known."""

    name = "labels_in_inputs"
    hears = (LeakedLabel,)

    def judge(self, fact: LeakedLabel) -> Finding | None:
        """Return the finding, with the column."""
        return self.report(
            step=fact.step,
            message=f"column {fact.column} of the input follows the label exactly, in all {fact.num_rows} rows: "
            "the model learns to copy it",
            advice="Leave the label's column out of the features; in use, the model has no label to read.",
            evidence={"column": fact.column, "num_rows": fact.num_rows, "tensor": fact.tensor},
        )


class PaddingInLoss(OnceRule[LabelScan]):
    """Labels at padding count in the loss: the model is mostly trained to predict padding."""

    name = "padding_in_loss"
    hears = (LabelScan,)

    def judge(self, fact: LabelScan) -> Finding | None:
        """Return the finding, with the share."""
        if not fact.is_reduced or fact.num_counted < FEWEST_LABELS:
            return None
        share = fact.num_at_padding / fact.num_counted
        if share <= PADDING_SHARE:
            return None
        return self.report(
            step=fact.step,
            message=f"{share:.0%} of the labels that count are at positions that the mask marks as "
            f"padding{at(fact.where)}: the loss looks low, and most of the gradient teaches the model to predict "
            "padding",
            advice="Set these labels to -100 (ignore_index): labels.masked_fill(mask == 0, -100).",
            evidence={"num_at_padding": fact.num_at_padding, "num_counted": fact.num_counted, "where": fact.where},
        )


class LostEnds(OnceRule[LabelScan]):
    """The end of every sequence is masked out of the labels, because padding and end are the same token."""

    name = "lost_ends"
    hears = (LabelScan,)

    def judge(self, fact: LabelScan) -> Finding | None:
        """Return the finding if this scan shows it."""
        if fact.num_padded_rows < 4:
            return None
        if fact.num_lost_ends < 0.9 * fact.num_padded_rows:
            return None
        return self.report(
            step=fact.step,
            message=f"the last real token of {fact.num_lost_ends} of {fact.num_padded_rows} padded rows is the padding "
            f"token, and its label is ignored{at(fact.where)}: the model never learns where to stop",
            advice="Use a separate padding token, or mask labels by the attention mask instead of by the token.",
            evidence={"num_rows": fact.num_padded_rows, "num_lost": fact.num_lost_ends, "where": fact.where},
        )


class SwappedMask(OnceRule[MaskScan]):
    """A mask keeps the padding and hides everything else."""

    name = "swapped_mask"
    hears = (MaskScan,)

    def judge(self, fact: MaskScan) -> Finding | None:
        """Return the finding if this scan shows it."""
        if fact.num_swapped_rows < 2:
            return None
        return self.report(
            step=fact.step,
            message="attention sees only positions where a single token is repeated, and none where tokens vary, in "
            f"{fact.num_swapped_rows} rows{at(fact.where)}: it attends to padding only",
            advice="Invert it: an attention mask is 1 at real tokens; torch's key_padding_mask is True at padding.",
            evidence={"num_rows": fact.num_swapped_rows},
        )
