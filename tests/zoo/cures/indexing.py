"""Cures for indices and selections."""

from __future__ import annotations

import torch

from .cure import Cure, t

ROWS = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])

CURES = {
    "where_computes_both_branches": Cure(
        broken="torch.where(x > 0, x.sqrt(), 0.0)",
        also=(
            "x.sqrt() * (x > 0)",
            "torch.where(x > 0, x.log(), 0.0)",
            "x.sqrt().masked_fill(x <= 0, 0.0)",
        ),
        sick={"x": t(0, 1, 4)},
        healthy={"x": t(2, 1, 4)},
    ),
    "embedding_out_of_range": Cure(
        broken="F.embedding(index, table)",
        sick={"index": torch.tensor([0, 7]), "table": ROWS},
        healthy={"index": torch.tensor([0, 1])},
        learned=("table",),
    ),
    "index_out_of_range": Cure(
        broken="x[index]",
        also=(
            "x.gather(1, index[:, None])",
            "x.index_select(0, index)",
        ),
        sick={"index": torch.tensor([0, 7]), "x": ROWS},
        healthy={"index": torch.tensor([0, 1])},
    ),
    "label_out_of_range": Cure(
        broken="F.cross_entropy(x, target)",
        sick={"x": ROWS, "target": torch.tensor([1, 5])},
        healthy={"target": torch.tensor([1, 2])},
    ),
}
