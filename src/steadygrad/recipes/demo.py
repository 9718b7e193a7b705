"""The demo: one small training three times, clean, with faults, and with the same faults under a Guard.

A causal transformer learns to continue noisy waves that are made here. Two faults go in where real ones do: one
gradient element becomes Inf at one step, one sample of a batch is NaN at a later one. All three runs start from the
same weights, see the same batches and clip at the same norm; the unguarded loop is the one that people write. Nothing
is printed here: a `Listener` hears what happens while it happens, and `Comparison` says how it ended.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steadygrad.config import FixedNorm, GuardConfig
from steadygrad.errors import UsageError
from steadygrad.facts import Incident
from steadygrad.guard import Guard
from steadygrad.testing import poison_batches, poison_gradient

MAX_NORM = 1.0
LEAST_PROGRESS = 0.9
"""Share of the clean run's progress that the guarded run must have made to count as a survivor. It learns from two
batches less, and noise of the last batches moves the loss by a few percent."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Sizes of the demo. The default takes about ten seconds on one slow core, `quick()` about one."""

    width: int = 48
    num_layers: int = 2
    context: int = 24
    batch_size: int = 32
    num_steps: int = 240
    learning_rate: float = 3e-3
    gradient_fault_step: int = 100
    batch_fault_step: int = 170
    device: str = "cpu"

    @classmethod
    def quick(cls, device: str = "cpu") -> DemoSettings:
        """The same story, smaller: for tests."""
        return cls(
            width=16,
            num_layers=1,
            context=16,
            batch_size=16,
            num_steps=80,
            learning_rate=1e-2,
            gradient_fault_step=30,
            batch_fault_step=50,
            device=device,
        )


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """How one of the three trainings went. Steps count from 0; None: it never happened."""

    name: str
    final_loss: float
    """On waves that were in no batch."""
    weights_are_finite: bool
    num_steps: int
    num_skipped: int
    first_bad_loss: int | None
    """The first step whose loss was not finite."""
    first_bad_weight: int | None
    """The step after which a weight was not finite for the first time."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The three runs beside each other."""

    initial_loss: float
    clean: RunSummary
    unguarded: RunSummary
    guarded: RunSummary
    incidents: tuple[Incident, ...]
    num_faults: int

    @property
    def unguarded_died(self) -> bool:
        """Whether loss and weights of the unguarded run ended as NaN or Inf."""
        return not self.unguarded.weights_are_finite and not math.isfinite(self.unguarded.final_loss)

    @property
    def progress(self) -> float:
        """How much of the clean run's progress the guarded run made; NaN when there is nothing to compare."""
        possible = self.initial_loss - self.clean.final_loss
        return (self.initial_loss - self.guarded.final_loss) / possible if possible > 0 else math.nan

    @property
    def guarded_survived(self) -> bool:
        """Whether the guarded run skipped the bad steps and no other, and learned what the clean run did."""
        return (
            self.guarded.weights_are_finite
            and self.guarded.first_bad_weight is None
            and self.guarded.num_skipped == self.num_faults
            and self.progress >= LEAST_PROGRESS
        )


class Listener(Protocol):
    """Hears the demo while it runs."""

    def begin(self, name: str, num_steps: int) -> None:
        """A training starts."""
        ...

    def step(self, name: str, step: int, loss: float) -> None:
        """A step is done."""
        ...

    def lose(self, name: str, step: int, what: str) -> None:
        """`what`, the loss or the weights, is not finite from this step on."""
        ...

    def incident(self, incident: Incident) -> None:
        """The guard has found something."""
        ...

    def end(self, summary: RunSummary) -> None:
        """The training is over."""
        ...


# --- the model and its data ------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.num_heads, d // self.num_heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, D/H]
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        added: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + added


class WaveModel(nn.Module):
    """Predicts the next value of a wave from those before; its forward is the mean squared error."""

    def __init__(self, width: int, num_layers: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList([Block(width, num_heads=4) for _ in range(num_layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, waves: Tensor) -> Tensor:  # [B, T + 1] -> scalar
        x = self.embed(waves[:, :-1, None]) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(self.norm(x)).squeeze(-1), waves[:, 1:])


def make_waves(num_batches: int, batch_size: int, length: int) -> Tensor:
    """Sums of two sines of random frequency and phase, with noise: [num_batches, batch_size, length]."""
    generator = torch.Generator().manual_seed(2)
    shape = (num_batches, batch_size, 2, 1)
    frequency = 0.1 + 0.9 * torch.rand(shape, generator=generator)
    phase = 2 * math.pi * torch.rand(shape, generator=generator)
    noise = 0.05 * torch.randn(num_batches, batch_size, length, generator=generator)
    return torch.sin(frequency * torch.arange(length) + phase).sum(2) + noise


# --- the three trainings ---------------------------------------------------------------------------------------------


class _Watch:
    """Looks at loss and weights after each step, until they are lost, and tells the listener."""

    def __init__(self, name: str, model: nn.Module, listener: Listener) -> None:
        self._name, self._model, self._listener = name, model, listener
        self._started = time.perf_counter()
        self.first_bad_loss: int | None = None
        self.first_bad_weight: int | None = None

    def look(self, step: int, loss: Tensor) -> None:
        value = float(loss)
        self._listener.step(self._name, step, value)
        if self.first_bad_loss is None and not math.isfinite(value):
            self.first_bad_loss = step
            self._listener.lose(self._name, step, "loss")
        if self.first_bad_weight is None and not weights_are_finite(self._model):
            self.first_bad_weight = step
            self._listener.lose(self._name, step, "weights")

    def end(self, num_steps: int, num_skipped: int, unseen: Tensor) -> RunSummary:
        summary = RunSummary(
            name=self._name,
            final_loss=evaluate(self._model, unseen),
            weights_are_finite=weights_are_finite(self._model),
            num_steps=num_steps,
            num_skipped=num_skipped,
            first_bad_loss=self.first_bad_loss,
            first_bad_weight=self.first_bad_weight,
            seconds=time.perf_counter() - self._started,
        )
        self._listener.end(summary)
        return summary


@torch.no_grad()
def weights_are_finite(model: nn.Module) -> bool:
    """Whether every weight is neither NaN nor Inf."""
    return bool(torch.stack([p.isfinite().all() for p in model.parameters()]).all())


@torch.no_grad()
def evaluate(model: nn.Module, unseen: Tensor) -> float:
    """Mean loss over batches that were not trained on."""
    return float(torch.stack([model(waves) for waves in unseen]).mean())


def make_plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """The step that people write."""

    def step(waves: Tensor) -> Tensor:
        loss: Tensor = model(waves)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def run_demo(run_dir: str | Path, settings: DemoSettings, listener: Listener) -> Comparison:
    """Train three times; the guarded run writes its record into `run_dir`, which must not hold a run yet."""
    folder = Path(run_dir)
    if (folder / "run.json").exists():
        raise UsageError(f"{folder} already holds a run. Give another directory, or delete this one.")
    try:  # now, so that a directory that cannot be written costs no training
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.log").touch()
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}. Give another directory.") from None
    with _one_thread(settings.device):
        return _Demo(settings, listener).compare(folder)


class _Demo:
    def __init__(self, settings: DemoSettings, listener: Listener) -> None:
        self._settings, self._listener = settings, listener
        torch.manual_seed(1)
        self._model = WaveModel(settings.width, settings.num_layers, settings.context).to(settings.device)
        waves = make_waves(settings.num_steps + 8, settings.batch_size, settings.context + 1).to(settings.device)
        self._batches, self._unseen = waves[: settings.num_steps], waves[settings.num_steps :]

    def compare(self, run_dir: Path) -> Comparison:
        clean = self._train_plain("clean", faults=False)
        unguarded = self._train_plain("unguarded", faults=True)
        guarded, incidents = self._train_guarded(run_dir)
        return Comparison(
            initial_loss=evaluate(self._model, self._unseen),
            clean=clean,
            unguarded=unguarded,
            guarded=guarded,
            incidents=incidents,
            num_faults=2,
        )

    def _train_plain(self, name: str, *, faults: bool) -> RunSummary:
        model, optimizer = self._start(name)
        step, watch = make_plain_step(model, optimizer), _Watch(name, model, self._listener)
        for number, waves in enumerate(self._inject(model) if faults else self._batches):
            watch.look(number, step(waves))
        return watch.end(len(self._batches), 0, self._unseen)

    def _train_guarded(self, run_dir: Path) -> tuple[RunSummary, tuple[Incident, ...]]:
        name = "guarded"
        model, optimizer = self._start(name)
        watch = _Watch(name, model, self._listener)
        config = GuardConfig(clip=FixedNorm(max_norm=MAX_NORM), on_incident=self._listener.incident)
        with Guard(model, optimizer, config=config, run_dir=run_dir) as guard:
            for number, waves in enumerate(self._inject(model)):
                watch.look(number, guard.step(model, waves))
            num_skipped = guard.stats()["num_skipped"]
            incidents = tuple(guard.incidents)
        return watch.end(len(self._batches), int(num_skipped or 0), self._unseen), incidents

    def _start(self, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        self._listener.begin(name, len(self._batches))
        model = copy.deepcopy(self._model)
        return model, torch.optim.AdamW(model.parameters(), lr=self._settings.learning_rate, fused=True)

    def _inject(self, model: nn.Module) -> Iterable[Tensor]:
        """The batches with one that is bad; and a backward of `model` that gives a bad gradient."""
        weight = model.get_parameter("blocks.0.up.weight")
        poison_gradient(weight, at={self._settings.gradient_fault_step}, value=math.inf)
        return poison_batches(self._batches, at={self._settings.batch_fault_step}, value=math.nan)


@contextlib.contextmanager
def _one_thread(device: str) -> Iterator[None]:
    """Tensors this small gain nothing from a second thread, and on a busy machine threads wait for each other."""
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
