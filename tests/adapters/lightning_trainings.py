"""Small Lightning trainings for several tests: a module, its data, faults in the data, and one call of `fit`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

NUM_BATCHES = 8
Batch = tuple[Tensor, Tensor]


class Classifier(pl.LightningModule):
    """BatchNorm, and a mean over the labels that count: a bad batch breaks both."""

    def __init__(self, *, fused: bool | None = None, interval: str = "step", norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.net = nn.Sequential(nn.Linear(6, 16, bias=False), middle, nn.Tanh(), nn.Linear(16, 3))
        self.fused, self.interval = fused, interval

    def compute_loss(self, batch: Batch) -> Tensor:
        x, y = batch
        counts = (y != -100).float()
        losses = nn.functional.cross_entropy(self.net(x), y.clamp(min=0), reduction="none")
        return (losses * counts).sum() / counts.sum()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = self.compute_loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.fused)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


class ManualClassifier(Classifier):
    """The same with manual optimization."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.compute_loss(batch))
        optimizer.step()


def make_batches(count: int = NUM_BATCHES) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(8, 6, generator=generator),
            torch.randint(3, (8,), generator=generator),
        )
        for _ in range(count)
    ]


def spoil(batch: Batch, fault: str) -> Batch:
    x, y = (t.clone() for t in batch)
    if fault == "nan":
        x[0, 0] = math.nan
    elif fault == "masked":
        y.fill_(-100)
    else:
        x = x.clamp(-1, 1) * 3e38  # finite; the first layer's sums are not
    return x, y


def fit(
    module: pl.LightningModule,
    batches: Sequence[Any],
    *callbacks: Any,
    ckpt_path: Any = None,
    validation: Sequence[Any] | None = None,
    **options: Any,
) -> pl.Trainer:
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    trainer = pl.Trainer(callbacks=list(callbacks), **(settings | options))
    trainer.fit(module, load(batches), None if validation is None else load(validation), ckpt_path=ckpt_path)
    return trainer


def load(batches: Sequence[Any]) -> DataLoader[Any]:
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]  # a list is a data set


class ListLogger(DummyLogger):
    """Keeps every value."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append(dict(metrics))


def state_of(module: nn.Module, trainer: pl.Trainer) -> dict[str, Tensor]:
    """Return every tensor that the training has changed: weights, buffers, moments, counters."""
    state = {f"module.{name}": value.clone() for name, value in module.state_dict().items()}
    for number, optimizer in enumerate(trainer.optimizers):
        for i, moments in optimizer.state_dict()["state"].items():
            state |= {f"{number}.{i}.{name}": v.clone() for name, v in moments.items() if isinstance(v, Tensor)}
        for i, group in enumerate(optimizer.param_groups):
            state[f"{number}.{i}.lr"] = torch.tensor(float(group["lr"]))
    return state


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


def is_finite(module: nn.Module) -> bool:
    return all(bool(value.isfinite().all()) for value in module.state_dict().values())
