"""Small trainings shared by the tests: a model, data, and the plain loop that a Guard must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def make_model(device: str = "cpu", *, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    middle: list[nn.Module] = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(6, 16), *middle, nn.Tanh(), nn.Linear(16, 3)).to(device)


def make_batches(count: int, device: str = "cpu", *, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(size, 6, generator=generator).to(device),
            torch.randint(3, (size,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def loss_of(model: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1])


def train_plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    *,
    max_norm: float | None = None,
    scheduler: Any = None,
    ema: Any = None,
) -> None:
    fn = loss_of(model)
    for batch in batches:
        fn(batch).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if ema is not None:
            ema.update_parameters(model)


def tensors_of(value: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return a copy of every tensor in a nested state, by path."""
    if isinstance(value, Tensor):
        return {prefix: value.detach().clone()}
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in tensors_of(item, f"{prefix}.{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, item in enumerate(value) for k, v in tensors_of(item, f"{prefix}.{i}").items()}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {prefix: torch.tensor(value)}
    return {}


def snapshot(*things: Any) -> dict[str, Tensor]:
    """Return weights, buffers and optimizer state of modules and optimizers."""
    return {k: v for i, thing in enumerate(things) for k, v in tensors_of(thing.state_dict(), str(i)).items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Assert bit-for-bit equality; a zero on one side equals a missing tensor on the other (lazily created moments)."""
    for key in left.keys() | right.keys():
        a, b = left.get(key), right.get(key)
        if a is None or b is None:
            present = a if a is not None else b
            assert present is not None
            assert not present.any(), f"{key} is on one side only, and not zero"
        else:
            assert torch.equal(a, b), f"{key} differs by {(a.double() - b.double()).abs().max()}"


def clone(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)
