"""The model that the peers train: small, healthy, and with one line that a chosen batch breaks.

Each fault has ground truth: op, line of this file, module, sample. The faulty batch comes at step `FAULT`, after every
peer's warm-up; all others are healthy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, BATCH, FAULT, NUM_STEPS, SAMPLE = 16, 8, 40, 50, 3
FAULTS = {
    "NaN in the batch": "none",
    "0 / 0 in forward": "divide",
    "exp overflows": "overflow",
    "sqrt at 0, in backward only": "root",
}
OPS = {"none": r"$^", "divide": r"\baten\.div\b|Div", "overflow": r"\baten\.exp\b|\bExp", "root": r"aten\.sqrt|Sqrt"}


class Stretch(nn.Module):
    """The module that breaks."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:  # [B, D]
        if self.way == "divide":
            return x / x.norm(dim=1, keepdim=True)  # divide
        if self.way == "overflow":
            return torch.exp(x)  # overflow
        if self.way == "root":
            return x * torch.sqrt(x.square().sum(1, keepdim=True))  # root
        return x


class Net(nn.Module):
    """A linear layer without a bias, so that a sample of zeros reaches `stretch` as zeros; then a head."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.stretch = nn.Linear(WIDTH, WIDTH, bias=False), Stretch(way)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:  # [B, D] -> [B]
        return self.head(self.stretch(self.first(x))).squeeze(1)


def compute_loss(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, and the output that it is computed from."""
    output = model(x)
    return F.mse_loss(output, x.nan_to_num().sum(1).tanh()), output


def make_batches(way: str) -> Iterator[Tensor]:
    """Return healthy batches, and the faulty one."""
    generator = torch.Generator().manual_seed(0)
    for step in range(NUM_STEPS):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        if step == FAULT:
            x[SAMPLE] = {"none": torch.nan, "overflow": 1e4}.get(way, 0.0)
        yield x


def find_line(way: str) -> int:
    """Return the line of this file that `way` breaks."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {way}"))


def names_in(said: str, way: str) -> dict[str, bool]:
    """Return which parts of the truth appear in a peer's own output."""
    if way == "none":  # the input is the cause: nothing in the model is
        return {
            "op": bool(re.search(r"\binputs?\b", said)),
            "line": False,
            "module": False,
            "sample": bool(re.search(rf"(samples?|index)\W+{SAMPLE}\b", said)),
        }
    return {
        "op": bool(re.search(OPS[way], said)),
        "line": bool(re.search(rf"subject\.py\"?(:|, line ){find_line(way)}\b", said)),
        "module": bool(re.search(r"\bstretch\b", said)),
        "sample": bool(re.search(rf"(samples?|index)\W+{SAMPLE}\b", said)),
    }
