"""Tunable: a training in the form that tuning needs: what is trained, on what, and how it is scored.

A script's function may return one, or just the four usual objects: model, optimizer, loss function, loader.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from steadygrad.act.precision import DTYPES, half_matmul_works
from steadygrad.checkpoint.workers import copy_loader
from steadygrad.config import GuardConfig, Precision
from steadygrad.config.trainer import SCHEDULES
from steadygrad.errors import UsageError
from steadygrad.measure.loss import find_loss
from steadygrad.trainer.batches import move_batch
from steadygrad.tune.settings import Settings


@dataclass(kw_only=True)
class Tunable:
    """The training to tune. Everything in it is left as it was."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    loss_fn: Callable[..., Any]
    """`loss_fn(batch)`; or `loss_fn(output, target)` for batches that are pairs of input and target."""
    loader: Iterable[Any]
    """Batches to train on."""
    val_loader: Iterable[Any] | None = None
    """Batches that a trial is scored on; with None its last training losses are the score."""
    evaluate: Callable[[], float] | None = None
    """A custom score, lower is better, instead of the loss on `val_loader`."""
    guard_config: GuardConfig = field(default_factory=GuardConfig)
    """Clipping, precision and rules that the training runs with."""
    schedule: str = "constant"
    """Learning rate after the warm-up: constant, or cosine, falling to 0."""
    warmup_steps: int = 0
    """Steps during which the learning rate rises."""
    accumulation_steps: int = 1
    """Number of batches in one step; the loss is divided by it here."""
    num_steps: int | None = None
    """Steps of the whole training, of which trials are small copies; None if unknown."""

    def __post_init__(self) -> None:
        _require(isinstance(self.model, nn.Module), "model", "be an nn.Module", self.model)
        given = list(self.optimizer) if isinstance(self.optimizer, Sequence) else [self.optimizer]
        fits = bool(given) and all(isinstance(one, torch.optim.Optimizer) for one in given)
        _require(fits, "optimizer", "be an optimizer or a list of them", self.optimizer)
        _require(callable(self.loss_fn), "loss_fn", "be callable", self.loss_fn)
        _require(isinstance(self.loader, Iterable), "loader", "give batches", self.loader)
        _require(self.schedule in SCHEDULES, "schedule", f"be one of {', '.join(SCHEDULES)}", self.schedule)
        self.optimizers: list[torch.optim.Optimizer] = given

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return next(self.model.parameters()).device

    def compute_loss(self, batch: Any) -> Tensor:
        """Return the loss of one batch."""
        return find_loss(self._call(batch))

    def _call(self, batch: Any) -> Any:
        """Return what `loss_fn` returns for one batch."""
        batch = move_batch(batch, self.device)
        if not self._takes_pairs:
            return self.loss_fn(batch)
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise UsageError(
                f"loss_fn takes output and target, and a batch of the loader is a {type(batch).__name__}, not a pair. "
                "Give a loss_fn that takes the batch."
            )
        inputs, targets = batch
        return self.loss_fn(self.model(inputs), targets)

    @property
    def _takes_pairs(self) -> bool:
        if isinstance(self.loss_fn, nn.Module) and self.loss_fn is not self.model:
            return True
        try:
            parameters = inspect.signature(self.loss_fn).parameters.values()
        except (TypeError, ValueError):
            return False
        needed = [
            p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        return len(needed) == 2

    @torch.no_grad()
    def measure_score(self, precision: Precision | None) -> float | None:
        """Return the score, lower is better; None without validation data. Leaves the model in eval mode."""
        self.model.eval()
        dtype = torch.float32 if precision is None else DTYPES[precision]
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not torch.float32):
            if self.evaluate is not None:
                return float(self.evaluate())
            if self.val_loader is None:
                return None
            losses = [_read_loss(self._call(batch)) for batch in self.val_loader]
        if not losses:
            raise UsageError("the validation loader has no batch. Give one with data, or none at all.")
        return math.fsum(losses) / len(losses)

    # --- settings ---------------------------------------------------------------------------------------------------

    @property
    def given(self) -> Settings:
        """The settings that the training came with."""
        groups = self.groups
        betas = next((group["betas"] for group in groups if "betas" in group), (None, None))
        decays = [float(group["weight_decay"]) for group in groups if "weight_decay" in group]
        precision = self.guard_config.autocast
        return Settings(
            lr=max(float(group.get("initial_lr", group["lr"])) for group in groups),
            warmup=self.warmup_steps / self.num_steps if self.num_steps else 0.0,
            clip=self.guard_config.clip,
            weight_decay=max(decays, default=None),
            beta1=betas[0],
            beta2=betas[1],
            precision=(Precision.FP32 if precision is None else precision).value,
            batch=find_batch_size(self.loader),
            accumulation=self.accumulation_steps,
        )

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def configure(self, settings: Settings) -> GuardConfig:
        """Return the guard's settings for a trial."""
        precision = None if settings.precision in (None, "fp32") else Precision(settings.precision)
        return dataclasses.replace(self.guard_config, clip=settings.clip, autocast=precision)

    def list_precisions(self) -> list[str]:
        """Return the precisions that work on this device; fp16 only on CUDA, where it is worth its loss scaler."""
        usual = ["fp32"]
        if self.device.type == "cuda":
            return [*usual, *(["bf16"] if torch.cuda.is_bf16_supported() else []), "fp16"]
        return [*usual, "bf16"] if half_matmul_works(Precision.BF16) else usual

    @property
    def num_samples(self) -> int | None:
        """Number of samples in the loader's data set, if it has a length."""
        data = getattr(self.loader, "dataset", None)
        return len(data) if isinstance(data, Sized) else None


def _read_loss(result: Any) -> float:
    """Return the loss that `find_loss` would find, from a result without a graph."""
    if isinstance(result, Mapping):
        return float(result["loss"])
    return float(result[0] if isinstance(result, tuple | list) else getattr(result, "loss", result))


def find_batch_size(loader: Any) -> int | None:
    """Return the batch size of a DataLoader that can be resized; None for other loaders."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    plain = type(loader.batch_sampler) is BatchSampler  # a subclass may not take another size
    return loader.batch_size if plain else None


def resize_batches(loader: Any, batch: int | None) -> Any:
    """Return the same loader with batches of another size, drawn in the same order."""
    if batch is None or batch == find_batch_size(loader):
        return loader
    # The same sampler object, so that it draws the same order from the same generator
    sampler = BatchSampler(loader.sampler, batch, loader.drop_last)
    return copy_loader(loader, batch_sampler=sampler, batch_size=batch)


def make_tunable(result: Any, where: str) -> Tunable:
    """Turn the result of a script's function into a Tunable."""
    if isinstance(result, Tunable):
        return result
    names = ("model", "optimizer", "loss_fn", "loader")
    if isinstance(result, Mapping):
        unknown = set(result) - {item.name for item in dataclasses.fields(Tunable)}
        if unknown or not set(names) <= set(result):
            raise UsageError(f"{where} returned a dict with {', '.join(map(str, result))}. Give {', '.join(names)}.")
        return Tunable(**result)
    if not isinstance(result, tuple | list) or len(result) != len(names):
        raise UsageError(
            f"{where} returned a {type(result).__name__}{_count(result)}. Let it return (model, optimizer, loss_fn, "
            "loader), or a steadygrad.tune.Tunable."
        )
    return Tunable(**dict(zip(names, result)))


def _count(result: Any) -> str:
    return f" of {len(result)}" if isinstance(result, Sized) else ""


def _require(fits: bool, name: str, rule: str, value: object) -> None:
    if not fits:
        raise UsageError(f"Tunable.{name} must {rule}, got {type(value).__name__}. See docs/tune.md for an example.")
