"""Losses whose mean is over nothing, whose target is impossible, or whose probabilities reached 0."""

from __future__ import annotations

from steadygrad.diagnose.explanations.conditions import (
    HALF,
    comes_from,
    either,
    goes_to,
    has_infs,
    in_dtype,
    is_empty,
    is_op,
    unless,
)
from steadygrad.diagnose.explanations.entry import BACKWARD, FORWARD, Entry
from steadygrad.diagnose.explanations.evidence import count_infs, join, show_largest, show_shape

NLL = ("nll_loss", "nll_loss_forward", "nll_loss2d", "nll_loss2d_forward", "nll_loss_nd")
MASKS = ("masked_fill", "where", "scatter", "index_put", "add")

ENTRIES = (
    Entry(
        name="every_label_ignored",
        ops=NLL,
        phases=FORWARD,
        kinds=("nan",),
        why="every label is the ignore index, or every class in the batch has weight 0: the mean is over "
        "nothing, 0 / 0",
        evidence=show_shape("target"),
        fixes=(
            "F.cross_entropy(x, target, reduction='sum') / (target != -100).sum().clamp_min(1)",
            "steadygrad.losses.masked_cross_entropy(x, target)",
        ),
    ),
    Entry(
        name="target_class_is_masked",
        ops=(*NLL, *MASKS),
        phases=FORWARD,
        kinds=("inf",),
        conditions=(either(goes_to(*NLL), unless(is_op(*MASKS))),),
        why="the target is a class whose logit was masked with -inf, so its log-probability is -inf",
        evidence=count_infs(),
        fixes=(
            "F.cross_entropy(x.masked_fill(~mask, -1e4), target)",
            "F.cross_entropy(x.masked_fill(~mask, -torch.inf), target.masked_fill(~mask[target], -100))",
        ),
    ),
    Entry(
        name="label_smoothing_over_masked_class",
        ops=("sum", "mean", "add"),
        phases=FORWARD,
        conditions=(has_infs(), comes_from("log_softmax"), unless(comes_from(*NLL, "xlogy"))),
        why="label smoothing gives every class some target, and a masked class has log-probability -inf",
        evidence=count_infs(),
        fixes=(
            "F.cross_entropy(x.masked_fill(~mask, -1e4), target, label_smoothing=0.1)",
            "F.cross_entropy(x.masked_fill(~mask, -torch.inf), target)",
        ),
    ),
    Entry(
        name="binary_cross_entropy_in_half",
        ops=("binary_cross_entropy",),
        phases=BACKWARD,
        conditions=(in_dtype(*HALF),),
        why="the derivative divides by p * (1 - p), guarded by 1e-12, which is 0 in float16",
        evidence=show_largest(),
        fixes=(
            "F.binary_cross_entropy_with_logits(x, target)",
            "F.binary_cross_entropy(torch.sigmoid(x.float()), target.float())",
            "steadygrad.losses.stable_bce_with_logits(x, target)",
        ),
    ),
    Entry(
        name="probability_out_of_range",
        ops=("binary_cross_entropy",),
        phases=FORWARD,
        kinds=("error",),
        why="binary_cross_entropy takes probabilities, and one is not between 0 and 1 or is NaN",
        evidence=show_largest(),
        fixes=("F.binary_cross_entropy_with_logits(x, target)", "F.binary_cross_entropy(torch.sigmoid(x), target)"),
    ),
    Entry(
        name="divergence_from_impossible",
        ops=("mul", "sub", "sum", "mean", "neg"),
        phases=FORWARD,
        kinds=("inf",),
        conditions=(either(has_infs(0), has_infs(1)), comes_from("xlogy")),
        why="the divergence is infinite: the target gives weight to a class that the prediction rules out with -inf",
        evidence=join(count_infs(0), count_infs(1)),
        fixes=(
            "F.kl_div(F.log_softmax(x.masked_fill(~mask, -1e4), -1), target, reduction='batchmean')",
            "steadygrad.losses.stable_kl(F.log_softmax(x.masked_fill(~mask, -1e4), -1), target)",
        ),
    ),
    Entry(
        name="divergence_of_impossible",
        ops=("mul", "sub"),
        phases=FORWARD,
        kinds=("nan",),
        conditions=(either(has_infs(0), has_infs(1)), comes_from("exp"), comes_from("sub")),
        why="a target log-probability of -inf gives exp(-inf) * (-inf - x) = 0 * -inf = NaN",
        evidence=count_infs(),
        fixes=(
            "F.kl_div(F.log_softmax(x, -1), target.exp(), reduction='batchmean')",
            "F.kl_div(F.log_softmax(x, -1), target.clamp_min(-1e4), log_target=True, reduction='batchmean')",
            "steadygrad.losses.stable_kl(F.log_softmax(x, -1), target, log_target=True)",
        ),
    ),
    Entry(
        name="ctc_infeasible",
        ops=("ctc_loss", "cudnn_ctc_loss"),
        why="the target needs more frames than the input has: one for each label, one more between equal ones",
        evidence=show_shape("log_probs"),
        fixes=(
            "F.ctc_loss(F.log_softmax(x, -1), target, input_lengths, target_lengths, zero_infinity=True)",
            "F.ctc_loss(F.log_softmax(x.repeat_interleave(2, 0), -1), target, 2 * input_lengths, target_lengths)",
        ),
    ),
    Entry(
        name="squared_error_overflow_in_half",
        ops=("mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss"),
        phases=FORWARD,
        kinds=("inf",),
        conditions=(in_dtype(*HALF),),
        why="the squared error of anything above 255.9 is too large for float16",
        evidence=show_largest(0, 1),
        fixes=("F.mse_loss(x.float(), y.float())", "F.mse_loss(x.to(torch.bfloat16), y.to(torch.bfloat16))"),
    ),
    Entry(
        name="squared_error_overflow",
        ops=("mse_loss", "smooth_l1_loss", "huber_loss"),
        phases=FORWARD,
        kinds=("inf",),
        conditions=(unless(is_empty()),),
        why="predictions or targets are so large that their squared difference overflows",
        evidence=show_largest(0, 1),
        fixes=("F.huber_loss(x, y)", "F.mse_loss(x / scale, y / scale)", "F.l1_loss(x, y)"),
    ),
    Entry(
        name="soft_margin_overflow",
        ops=("soft_margin_loss",),
        why="soft_margin_loss computes log(1 + exp(-y * x)) as it stands, and exp overflows above 88.7",
        evidence=show_largest(),
        fixes=("F.softplus(-y * x).mean()", "F.binary_cross_entropy_with_logits(x, (y + 1) / 2)"),
    ),
)
