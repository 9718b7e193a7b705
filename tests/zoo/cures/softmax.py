"""Cures for softmax and attention."""

from __future__ import annotations

import torch
from torch import nn

from .cure import Cure, Names

ROWS = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
NOTHING = torch.tensor([[False, False, False], [True, True, False]])
SOMETHING = torch.tensor([[True, False, True], [True, True, False]])
EVERYTHING = torch.ones(2, 3, dtype=torch.bool)
VECTORS = torch.linspace(-1.0, 1.0, 24).view(1, 2, 3, 4)


def make_attention() -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(4, 1, batch_first=True)


def to_weights(result: torch.Tensor, names: Names) -> torch.Tensor:
    return torch.softmax(result, dim=-1)


CURES = {
    "softmax_over_nothing": Cure(
        broken="torch.softmax(x.masked_fill(~mask, -torch.inf), dim=-1)",
        also=("F.softmin(x.masked_fill(~mask, torch.inf), dim=-1)",),
        sick={"x": ROWS, "mask": NOTHING},
        healthy={"mask": SOMETHING},
    ),
    "log_softmax_over_nothing": Cure(
        broken="F.log_softmax(x.masked_fill(~mask, -torch.inf), dim=-1)",
        sick={"x": ROWS, "mask": NOTHING},
        healthy={"mask": EVERYTHING},
    ),
    "attention_over_nothing": Cure(
        broken="torch.softmax((q @ k.mT / 2).masked_fill(~mask, -torch.inf), -1) @ v",
        sick={"q": VECTORS, "k": VECTORS, "v": VECTORS, "mask": torch.tensor([[0, 0, 0], [1, 0, 1], [1, 1, 1]]).bool()},
        healthy={"mask": torch.tensor([[1, 0, 0], [1, 0, 1], [1, 1, 1]]).bool()},
        learned=("q", "k", "v"),
    ),
    "padding_hides_every_key": Cure(
        broken="attention(x, x, x, key_padding_mask=padding)[0]",
        sick={"x": VECTORS[0], "attention": make_attention(), "padding": torch.tensor([[1, 1, 1], [0, 0, 1]]).bool()},
        healthy={"padding": torch.tensor([[0, 1, 1], [0, 0, 1]]).bool()},
    ),
    "attention_overflow": Cure(
        broken="F.scaled_dot_product_attention(q, k, v)",
        sick={"q": VECTORS * 1e25, "k": VECTORS * 1e25, "v": VECTORS},
        learned=("q", "k", "v"),
    ),
    "attention_scores_overflow_in_half": Cure(
        broken="q @ k.mT",
        sick={"q": (VECTORS * 170).half(), "k": (VECTORS * 170).half()},
        learned=("q", "k"),
        apply=to_weights,
    ),
    "masks_add_up_to_infinity": Cure(
        broken="(x + lowest * ~mask) + lowest * ~causal",
        sick={"x": ROWS, "mask": NOTHING, "causal": NOTHING, "lowest": torch.finfo(torch.float32).min},
        healthy={"mask": SOMETHING, "causal": EVERYTHING},
        apply=to_weights,
    ),
    "mask_constant_overflow_in_half": Cure(
        broken="x + (~mask).half() * -1e9",
        sick={"x": ROWS.half(), "mask": NOTHING},
        healthy={"mask": EVERYTHING},
        apply=to_weights,
    ),
}
