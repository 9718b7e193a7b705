"""Cures for losses."""

from __future__ import annotations

import math

import torch

from .cure import Cure, half, t

ROWS = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
FIRST_MASKED = t(0, 1, 1).bool()
NONE_MASKED = t(1, 1, 1).bool()
TARGET = torch.tensor([[0.2, 0.4, 0.4], [0.1, 0.5, 0.4]])
FRAMES = torch.linspace(-1, 1, 16).view(4, 1, 4)

UPSAMPLED = "F.ctc_loss(F.log_softmax(x.repeat_interleave(2, 0), -1), target, 2 * input_lengths, target_lengths)"

CURES = {
    "every_label_ignored": Cure(
        broken="F.cross_entropy(x, target)",
        also=(
            "F.nll_loss(F.log_softmax(x, -1), target)",
            "F.cross_entropy(x[..., None], target[:, None])",
        ),
        sick={"x": ROWS, "target": torch.tensor([-100, -100])},
        healthy={"target": torch.tensor([1, -100])},
    ),
    "target_class_is_masked": Cure(
        broken="F.cross_entropy(x.masked_fill(~mask, -torch.inf), target)",
        sick={"x": ROWS, "mask": FIRST_MASKED, "target": torch.tensor([0, 1])},
        healthy={"mask": NONE_MASKED},
    ),
    "label_smoothing_over_masked_class": Cure(
        broken="F.cross_entropy(x.masked_fill(~mask, -torch.inf), target, label_smoothing=0.1)",
        sick={"x": ROWS, "mask": FIRST_MASKED, "target": torch.tensor([1, 1])},
        healthy={"mask": NONE_MASKED},
        differs={"F.cross_entropy(x.masked_fill(~mask, -torch.inf), target)": "does without label smoothing"},
    ),
    "binary_cross_entropy_in_half": Cure(
        broken="F.binary_cross_entropy(torch.sigmoid(x), target)",
        sick={"x": half(-200, 1), "target": half(0, 1)},
        healthy={"x": half(-2, 1)},
        tolerance=1e-2,
    ),
    "probability_out_of_range": Cure(
        broken="F.binary_cross_entropy(x, target)",
        sick={"x": t(1.5, 0.5), "target": t(1, 0)},
    ),
    "divergence_from_impossible": Cure(
        broken="F.kl_div(F.log_softmax(x.masked_fill(~mask, -torch.inf), -1), target, reduction='batchmean')",
        sick={"x": ROWS, "mask": FIRST_MASKED, "target": TARGET},
        healthy={"mask": NONE_MASKED},
    ),
    "divergence_of_impossible": Cure(
        broken="F.kl_div(F.log_softmax(x, -1), target, log_target=True, reduction='batchmean')",
        sick={"x": ROWS, "raw": torch.tensor([[0.0, 0.5, 0.5]])},
        healthy={"raw": torch.tensor([[0.2, 0.4, 0.4]])},
        derive=lambda names: {"target": names["raw"].log().masked_fill(names["raw"] == 0, -math.inf)},
    ),
    "ctc_infeasible": Cure(
        broken="F.ctc_loss(F.log_softmax(x, -1), target, input_lengths, target_lengths)",
        sick={
            "x": FRAMES,
            "target": torch.tensor([[1, 1, 1, 1]]),
            "input_lengths": torch.tensor([4]),
            "target_lengths": torch.tensor([4]),
        },
        healthy={"target": torch.tensor([[1, 2, 3, 1]]), "target_lengths": torch.tensor([2])},
        differs={UPSAMPLED: "has twice as many frames"},
    ),
    "squared_error_overflow_in_half": Cure(
        broken="F.mse_loss(x, y)",
        also=("F.huber_loss(x, y, delta=1e4)",),
        sick={"x": half(1000, 1), "y": half(0, 0)},
        healthy={"x": half(2, 1)},
        tolerance=1e-2,
    ),
    "squared_error_overflow": Cure(
        broken="F.mse_loss(x, y)",
        sick={"x": t(1e25, 1), "y": t(0, 0), "scale": 1e25},
        healthy={"x": t(2, 1), "scale": 1.0},
        differs={"F.huber_loss(x, y)": "is linear far away", "F.l1_loss(x, y)": "is linear"},
    ),
    "soft_margin_overflow": Cure(
        broken="F.soft_margin_loss(x, y)",
        sick={"x": t(-100, 1), "y": t(1, -1)},
        healthy={"x": t(-2, 1)},
    ),
}
