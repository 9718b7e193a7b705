"""A script whose optimizers search a loss scale themselves, as those that came before torch's GradScaler."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Halving(torch.optim.Optimizer):
    """Divides the gradients by its scale; leaves a step out and halves the scale when one is not finite."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.scale = inner, 2.0**40
        super().__init__(inner.param_groups, {})
        self.param_groups, self.state = inner.param_groups, inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        if not all(gradient.isfinite().all() for gradient in gradients):
            self.scale /= 2
            return
        for gradient in gradients:
            gradient.div_(self.scale)
        self.inner.step()


class LossScaler:
    """Backs off at once, and grows after many good steps. Compared by value, so it has no hash, as a dataclass."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.value, self.num_good = 2.0**40, 0

    def has_overflow(self, norm: Any) -> bool:
        return not 0 <= norm < float("inf")

    def update(self, overflow: bool) -> None:
        self.num_good = 0 if overflow else self.num_good + 1
        if overflow:
            self.value /= 4
        elif self.num_good % 100 == 0:
            self.value *= 2


class Masters(torch.optim.Optimizer):
    """Steps copies of the weights in one flat tensor, of its own class inside."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {"lr": 0.1})
        self.scaler = LossScaler()
        self.flat = nn.Parameter(torch.cat([p.detach().flatten() for p in self._list()]))
        self.inner = torch.optim.SGD([self.flat], 0.05, momentum=0.9)

    def _list(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def scale(self) -> float:
        return self.scaler.value

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.flat.grad = torch.cat([p.grad.flatten() for p in self._list()]) / self.scale
        overflow = self.scaler.has_overflow(self.flat.grad.norm())
        self.scaler.update(overflow)
        if overflow:
            return
        self.inner.step()
        for p, part in zip(self._list(), self.flat.split([p.numel() for p in self._list()])):
            p.copy_(part.view(p.shape))


class Cleaning(torch.optim.SGD):
    """Sets what is not finite in the gradients to 0, and steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                torch.nan_to_num_(p.grad, 0.0, 0.0, 0.0)
        super().step(closure)


def clean(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Do the same before a step of another optimizer."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.nan_to_num_(0.0, 0.0, 0.0)


def train_cleaned(kind: str, guard: Any = None) -> nn.Module:
    """Train a distance, whose gradient is NaN where it is 0: once in ten steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = Cleaning(model.parameters(), 0.05) if kind == "inside" else torch.optim.Adam(model.parameters(), 3e-3)
    if kind == "hook":
        optimizer.register_step_pre_hook(clean)
    take = optimizer.step if guard is None else guard(model, optimizer).step
    for number in range(150):
        x = torch.randn(32, 4)
        if number % 10 == 3:
            x[0, 0] = 0.0
        miss = model(x) - x[:, :2].tanh()
        distances = torch.where(x[:, 0] == 0, torch.zeros(()), (miss * x[:, :1]).square().sum(1).sqrt())
        optimizer.zero_grad()
        (distances.mean() + miss.square().mean()).backward()
        take()
    return model


def train(kind: str, num_steps: int = 250, guard: Any = None) -> tuple[nn.Module, Any]:
    """Train in fp16; `guard` makes a guard from model and optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    parameters = model.parameters()
    optimizer = Halving(torch.optim.Adam(parameters, 3e-3)) if kind == "halving" else Masters(parameters)
    take = optimizer.step if guard is None else guard(model, optimizer).step
    for _ in range(num_steps):
        x = torch.randn(64, 4)
        with torch.autocast("cpu", torch.float16):
            out = model(x)[:, 0]
        optimizer.zero_grad()
        (F.mse_loss(out.float(), x.sin().sum(1)) * optimizer.scale).backward()
        take()
    return model, optimizer


if __name__ == "__main__":
    for kind in ("halving", "masters"):
        model, optimizer = train(kind)
        print(kind, optimizer.scale, [p.double().sum().item() for p in model.parameters()])
    for kind in ("inside", "hook"):
        print(kind, [p.double().sum().item() for p in train_cleaned(kind).parameters()])
