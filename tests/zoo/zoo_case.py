"""Defines a case of the zoo: a small training that breaks at a known step, with a known op, line and module.

A case is a function that builds a Training; the decorator states the truth. The line to blame ends in `# culprit`, and
a second one that is also correct in `# culprit too`. Everything is seeded, so a case is always the same.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OUTSIDE = None
"""The module of code outside of any module."""
ROOT = ""
"""The model itself."""

Loss = Callable[[nn.Module, Any], Any]
CASES: dict[str, Case] = {}


class Training:
    """A model, an optimizer, batches, and the user's loss function."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        loss: Loss,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: Any = None,
        clip: float | None = None,
        loop: Callable[[Training, Any], Tensor] | None = None,
        guarded_loop: Callable[[Training, Any, Any], Any] | None = None,
    ) -> None:
        self.model, self.batches, self._loss = model, list(batches), loss
        self.optimizer = optimizer if optimizer is not None else sgd(model)
        self.autocast, self.scaler, self.scheduler, self.clip = autocast, scaler, scheduler, clip
        self.loop, self.guarded_loop = loop, guarded_loop

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Return the result of the user's function, under the case's autocast."""
        with torch.autocast("cpu", dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            return self._loss(model, batch)

    def guarded_step(self, guard: Any, batch: Any) -> None:
        """The same step under a Guard."""
        if self.guarded_loop is not None:
            self.guarded_loop(self, guard, batch)
        else:
            guard.step(self.loss, self.model, batch)

    def step(self, batch: Any) -> Tensor:
        """One step of the unguarded loop."""
        if self.loop is not None:
            return self.loop(self, batch)
        self.optimizer.zero_grad(set_to_none=True)
        result = self.loss(self.model, batch)
        loss = result["loss"] if isinstance(result, dict) else result
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss.detach()


@dataclass(frozen=True, kw_only=True)
class Case:
    """The truth about one training."""

    name: str
    build_training: Callable[[], Training]
    kinds: tuple[str, ...]
    """Accepted values of `Cause.kind`; empty if a replay shows nothing."""
    step: int = 0
    phase: str = "forward"
    ops: tuple[str, ...] = ()
    module: str | None = OUTSIDE
    guarded: tuple[str, ...] = ()
    """Kinds of finding, one of which a Guard must report at the step; empty: not tested, or healthy."""
    seen: str = ""
    """The public report from which it was reduced."""
    late: int = 0
    """Steps by which a Guard may notice it later or earlier, if it builds up."""
    lines: tuple[int, ...] = field(default=())

    @property
    def is_healthy(self) -> bool:
        """Whether there must be no finding."""
        return not self.kinds and not self.guarded

    def build(self) -> Training:
        """Build a new training, always the same."""
        torch.manual_seed(0)
        training = self.build_training()
        torch.manual_seed(99)
        return training


def case(
    kinds: str = "",
    *,
    phase: str = "forward",
    ops: str = "",
    module: str | None = OUTSIDE,
    step: int = 0,
    guarded: str = "",
    seen: str = "",
    late: int = 0,
) -> Callable[[Callable[[], Training]], Callable[[], Training]]:
    """Register a case; several kinds or ops are separated by spaces, ops are written without `aten.`."""

    def register(build: Callable[[], Training]) -> Callable[[], Training]:
        lines, first = inspect.getsourcelines(build)
        marked = [first + i for i, text in enumerate(lines) if re.search(r"# culprit( too)?$", text.rstrip())]
        name = build.__name__
        assert name not in CASES, f"two cases are called {name}"
        plain = ("input", "parameter")
        CASES[name] = Case(
            name=name,
            build_training=build,
            kinds=tuple(kinds.split()),
            step=step,
            phase=phase,
            ops=tuple(op if op in plain else f"aten.{op}" for op in ops.split()),
            module=module,
            guarded=tuple(guarded.split()),
            seen=seen,
            late=late,
            lines=tuple(marked),
        )
        return build

    return register


# --- parts of cases ---------------------------------------------------------------------------------------------------


def sgd(model: nn.Module, lr: float = 0.01, **settings: Any) -> torch.optim.SGD:
    """Plain SGD."""
    return torch.optim.SGD(model.parameters(), lr=lr, **settings)


def adam(model: nn.Module, lr: float = 1e-3, **settings: Any) -> torch.optim.Adam:
    """Plain Adam."""
    return torch.optim.Adam(model.parameters(), lr=lr, **settings)


def stack(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers with an activation between each two."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1])


def points(num: int, *, size: int = 8, width: int = 8, out: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Batches of a linear regression with a little noise."""
    weight = torch.randn(width, out) / width**0.5
    batches = []
    for _ in range(num):
        x = torch.randn(size, width)
        batches.append((x, x @ weight + 0.05 * torch.randn(size, out)))
    return batches


def classes(num: int, *, size: int = 16, width: int = 8, k: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Batches of k clouds."""
    centres = 1.5 * torch.randn(k, width)
    batches = []
    for _ in range(num):
        y = torch.randint(k, (size,))
        batches.append((centres[y] + torch.randn(size, width), y))
    return batches


def mse(model: nn.Module, batch: Any) -> Tensor:
    """Mean squared error of (x, y)."""
    return F.mse_loss(model(batch[0]), batch[1])


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of (x, y)."""
    return F.cross_entropy(model(batch[0]), batch[1])
