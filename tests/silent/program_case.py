"""A silent error as a small training with a healthy twin: the same code, built with `bug=True` or `bug=False`.

A builder returns a model, an optimizer and a function that trains with the `step` it is handed: `step(fn, *args)` makes
one optimizer step from a loss function, as `guard.step` does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from steadygrad import Finding, Guard, GuardConfig, Severity

Train = Callable[[Any], None]
Build = Callable[[bool], tuple[nn.Module, torch.optim.Optimizer, Train]]


@dataclass(frozen=True)
class ProgramCase:
    """One kind of error; `kind` is the finding that names it, None for a training with nothing to find."""

    name: str
    kind: str | None
    reference: str
    build: Build


CASES: dict[str, ProgramCase] = {}


def case(kind: str | None, reference: str = "") -> Callable[[Build], Build]:
    """Register a builder under its name."""

    def register(build: Build) -> Build:
        CASES[build.__name__] = ProgramCase(build.__name__, kind, reference, build)
        return build

    return register


def run(one: ProgramCase, *, bug: bool, config: GuardConfig | None = None) -> list[Finding]:
    """Train on a Guard; return what it found above info."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model, optimizer, train = one.build(bug)
    guard = Guard(model, optimizer, config=config)
    train(guard)
    guard.flush()
    guard.close()
    return [finding for finding in guard.findings if finding.severity is not Severity.INFO]


def clusters(num: int, rows: int = 16, width: int = 8, classes: int = 4) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of points around the centres of their classes."""
    centres = torch.randn(classes, width)
    for _ in range(num):
        y = torch.randint(classes, (rows,))
        yield centres[y] + torch.randn(rows, width), y


def sequences(num: int, rows: int = 8, length: int = 12, vocabulary: int = 16) -> Iterator[torch.Tensor]:
    """Yield tokens of a random walk on a ring: each follows from the last."""
    for _ in range(num):
        steps = torch.randint(1, 4, (rows, length)).cumsum(1) + torch.randint(vocabulary, (rows, 1))
        yield steps % (vocabulary - 1) + 1


def mlp(*sizes: int, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    """Return a network with ReLU between its layers."""
    layers: list[nn.Module] = []
    for i, (size, next_size) in enumerate(zip(sizes, sizes[1:])):  # noqa: RUF007  (also the index is needed)
        layers.append(nn.Linear(size, next_size))
        if i < len(sizes) - 2:
            layers += [nn.BatchNorm1d(next_size)] if norm else []
            layers += [nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers)


def adam(model: nn.Module, rate: float = 1e-3) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(model.parameters(), rate)
