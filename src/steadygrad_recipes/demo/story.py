"""The demo's two trainings: the loop that people write, and the same loop with a Guard. Settings in, a Comparison out.

Both start from the same weights, see the same text in the same order and get the same faults at the same steps. Each
writes a run directory, so that one report shows them side by side. Nothing is printed here: a `Listener` is notified
of what happens as it happens.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn

from steadygrad._version import __version__
from steadygrad.config import FixedNorm, GuardConfig, MeasureConfig, RecordConfig
from steadygrad.errors import UsageError
from steadygrad.facts import Action, Incident, StepRecord
from steadygrad.guard import Guard
from steadygrad.record import RunDirectory
from steadygrad_recipes.demo.faults import Fault, FaultPlan, Faults
from steadygrad_recipes.demo.model import TextModel
from steadygrad_recipes.demo.own_file import put_into
from steadygrad_recipes.demo.text import decode, encode, make_texts

MAX_NORM = 1.0
UNGUARDED, GUARDED = "unguarded", "guarded"
PROMPT = "the old "
NUM_WRITTEN = 44
"""Number of letters that a trained model writes: about one sentence."""
NUM_UNSEEN = 6
"""Number of batches held out for the end."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Sizes of the demo. The default takes about a minute on two slow cores, `quick()` a few seconds."""

    width: int = 64
    num_layers: int = 2
    context: int = 64
    batch_size: int = 32
    num_steps: int = 400
    learning_rate: float = 3e-3
    faults: FaultPlan = field(default_factory=FaultPlan)
    device: str = "cpu"

    @classmethod
    def quick(cls, device: str = "cpu") -> DemoSettings:
        """Return the same demo, smaller: for tests."""
        plan = FaultPlan(jump_step=80, jump_length=12, empty_step=130, nan_step=150)
        return cls(
            width=32,
            num_layers=1,
            context=32,
            batch_size=16,
            num_steps=180,
            learning_rate=1e-2,
            faults=plan,
            device=device,
        )


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """How one of the trainings went. Steps count from 0; None: it never happened."""

    name: str
    losses: tuple[float, ...] = field(repr=False)
    """The training loss of each step."""
    final_loss: float
    """Loss on text that was in no batch."""
    written: str
    """How the trained model continues `PROMPT`; empty when it has no probabilities left."""
    weights_are_finite: bool
    num_skipped: int = 0
    """Steps whose gradients were kept from the weights, not counting those that a rollback skips."""
    num_rollbacks: int = 0
    num_left_out: int = 0
    """Batches that the rollbacks skipped."""
    first_bad_loss: int | None = None
    """The first step whose loss was not finite."""
    first_bad_weight: int | None = None
    """The step after which a weight was not finite for the first time."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The two runs side by side."""

    unguarded: RunSummary
    guarded: RunSummary
    incidents: tuple[Incident, ...]
    faults: tuple[Fault, ...]

    @property
    def unguarded_died(self) -> bool:
        """Whether loss and weights of the unguarded run ended as NaN or Inf."""
        return not self.unguarded.weights_are_finite and not math.isfinite(self.unguarded.final_loss)

    @property
    def loss_before_faults(self) -> float:
        """Mean loss of the guarded run over its last ten steps before the first fault."""
        first = self.faults[0].step
        before = self.guarded.losses[max(0, first - 10) : first]
        return sum(before) / len(before)

    @property
    def guarded_survived(self) -> bool:
        """Whether no weight was ever bad, each fault was handled, and the run kept learning after the faults."""
        kinds = {finding.kind for incident in self.incidents for finding in incident.findings}
        return (
            self.guarded.weights_are_finite
            and self.guarded.first_bad_weight is None
            and self.guarded.num_skipped == 2  # the empty text, the NaN
            and self.guarded.num_rollbacks >= 1  # the learning rate
            and {"nonfinite_gradient", "nonfinite_input"} <= kinds
            and self.guarded.final_loss < self.loss_before_faults
        )


class Listener(Protocol):
    """Is notified of what happens while the demo runs."""

    def begin(self, name: str, num_steps: int) -> None:
        """A training starts."""
        ...

    def fault(self, name: str, fault: Fault) -> None:
        """A fault is injected, just before its step."""
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


def run_demo(run_dir: str | Path, settings: DemoSettings, listener: Listener) -> Comparison:
    """Train twice; the runs are written to `run_dir`, which must not contain any yet."""
    folder = Path(run_dir)
    taken = [name for name in (UNGUARDED, GUARDED, "run.json") if (folder / name).exists()]
    if taken:
        raise UsageError(f"{folder} already holds a run ({taken[0]}). Give another directory, or delete this one.")
    try:  # created now, so that an unwritable directory fails before any training
        (folder / GUARDED).mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}. Give another directory.") from None
    with _one_thread(settings.device):
        return _Demo(settings, listener, put_into(folder)).compare(folder)


class _Demo:
    def __init__(self, settings: DemoSettings, listener: Listener, own: ModuleType) -> None:
        """`own`: the module that holds the model."""
        self._settings, self._listener = settings, listener
        torch.manual_seed(1)
        model = own.TextModel(width=settings.width, num_layers=settings.num_layers, context=settings.context)
        self._model: TextModel = model.to(settings.device)
        num_batches = settings.num_steps + NUM_UNSEEN
        texts = make_texts(num_batches, settings.batch_size, settings.context + 1, seed=2).to(settings.device)
        self._texts, self._unseen = texts[:-NUM_UNSEEN], texts[-NUM_UNSEEN:]

    def compare(self, folder: Path) -> Comparison:
        unguarded = self._train_plain(folder / UNGUARDED)
        guarded, incidents = self._train_guarded(folder / GUARDED)
        faults = self._settings.faults.list()
        return Comparison(unguarded=unguarded, guarded=guarded, incidents=incidents, faults=faults)

    def _train_plain(self, run_dir: Path) -> RunSummary:
        model, optimizer = self._start(UNGUARDED)
        with contextlib.closing(PlainRecord(run_dir, model, optimizer)) as record:

            def step(tokens: Tensor, weights: Tensor) -> Tensor:
                loss: Tensor = model(tokens=tokens, weights=weights)
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
                record.write(loss.item(), norm.item(), MAX_NORM)
                return loss.detach()

            return self._train(UNGUARDED, model, optimizer, step)

    def _train_guarded(self, run_dir: Path) -> tuple[RunSummary, tuple[Incident, ...]]:
        model, optimizer = self._start(GUARDED)
        config = GuardConfig(
            clip=FixedNorm(max_norm=MAX_NORM),
            measure=MeasureConfig(parameters_every=5),
            record=RecordConfig(layers_every=5),
            on_incident=self._listener.incident,
        )
        with Guard(model, optimizer, config=config, run_dir=run_dir) as guard:

            def step(tokens: Tensor, weights: Tensor) -> Tensor:
                loss: Tensor = guard.step(model, tokens=tokens, weights=weights)
                return loss

            return self._train(GUARDED, model, optimizer, step, guard), tuple(guard.incidents)

    def _start(self, name: str) -> tuple[TextModel, torch.optim.Optimizer]:
        self._listener.begin(name, self._settings.num_steps)
        # Before the optimizer is built: both runs start from these weights and change their own
        model = copy.deepcopy(self._model)
        return model, torch.optim.AdamW(model.parameters(), lr=self._settings.learning_rate, fused=True)

    def _train(
        self,
        name: str,
        model: TextModel,
        optimizer: torch.optim.Optimizer,
        step: Callable[[Tensor, Tensor], Tensor],
        guard: Guard | None = None,
    ) -> RunSummary:
        """Run the loop that both share: only `step` differs."""
        watch = _Watch(name, model, self._listener)
        faults = Faults(self._settings.faults, optimizer)
        planned = {fault.step: fault for fault in self._settings.faults.list()}
        for number, tokens in enumerate(self._texts):
            if number in planned:
                self._listener.fault(name, planned[number])
            watch.look(number, step(*faults.spoil(number, tokens)))
        return watch.end(self._unseen, guard)


class _Watch:
    """Checks loss and weights after each step, and notifies the listener when they are lost."""

    def __init__(self, name: str, model: TextModel, listener: Listener) -> None:
        self._name, self._model, self._listener = name, model, listener
        self._started = time.perf_counter()
        self._losses: list[float] = []
        self._first_bad_loss: int | None = None
        self._first_bad_weight: int | None = None

    def look(self, step: int, loss: Tensor) -> None:
        value = loss.item()  # waits for the device at each step, which a real training should not
        self._losses.append(value)
        self._listener.step(self._name, step, value)
        if self._first_bad_loss is None and not math.isfinite(value):
            self._first_bad_loss = step
            self._listener.lose(self._name, step, "loss")
        if self._first_bad_weight is None and not weights_are_finite(self._model):
            self._first_bad_weight = step
            self._listener.lose(self._name, step, "weights")

    def end(self, unseen: Tensor, guard: Guard | None) -> RunSummary:
        incidents = guard.incidents if guard is not None else []
        num_bad = len({one.step for one in incidents if one.outcome.action is Action.SKIP})
        num_left_out = int(guard.stats()["num_skipped"] or 0) - num_bad if guard is not None else 0
        summary = RunSummary(
            name=self._name,
            losses=tuple(self._losses),
            final_loss=evaluate(self._model, unseen),
            written=write_sentence(self._model, unseen.device),
            weights_are_finite=weights_are_finite(self._model),
            num_skipped=num_bad,
            num_rollbacks=sum(one.outcome.action is Action.ROLLBACK for one in incidents),
            num_left_out=num_left_out,
            first_bad_loss=self._first_bad_loss,
            first_bad_weight=self._first_bad_weight,
            seconds=time.perf_counter() - self._started,
        )
        self._listener.end(summary)
        return summary


@torch.no_grad()
def weights_are_finite(model: nn.Module) -> bool:
    """Return whether all weights are finite."""
    return bool(torch.stack([p.isfinite().all() for p in model.parameters()]).all())


@torch.no_grad()
def evaluate(model: TextModel, unseen: Tensor) -> float:
    """Return the mean loss over batches that were not trained on."""
    weights = torch.ones(unseen.shape[1], device=unseen.device)
    return torch.stack([model(tokens=tokens, weights=weights) for tokens in unseen]).mean().item()


def write_sentence(model: TextModel, device: torch.device) -> str:
    """Return how the model continues the prompt, up to the first full stop; empty when it cannot."""
    text = decode(model.write_on(encode(PROMPT).to(device), NUM_WRITTEN))
    if text == PROMPT:
        return ""
    return text[: text.index(".") + 1] if "." in text else text


@contextlib.contextmanager
def _one_thread(device: str) -> Iterator[None]:
    """Use one thread: tensors this small gain nothing from a second, and on a busy machine threads only wait."""
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- the record of the unguarded run ------------------------------------------------------------------------------
# PlainRecord: what a loop without a guard could record by itself -> a run directory, for the report to compare.
#
# Loss, norm and learning rate of each step; no findings and no incidents, because nothing checks the steps.


class PlainRecord:
    """Writes steps.jsonl of one run."""

    def __init__(self, run_dir: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = [name for name, _ in model.named_parameters()]
        versions = {"torch": torch.__version__, "steadygrad": __version__}
        self._files = RunDirectory(run_dir, config={}, parameters=names, versions=versions)
        self._optimizer = optimizer
        self._started, self._next_step = time.perf_counter(), 0

    def write(self, loss: float, grad_norm: float, max_norm: float) -> None:
        """Write one step; `grad_norm` is the norm before clipping."""
        clipped = grad_norm > max_norm
        record = StepRecord(
            step=self._next_step,
            loss=loss,
            grad_norm=grad_norm,
            clip_coefficient=max_norm / grad_norm if clipped else 1.0,
            clipped=clipped,
            skipped=False,
            num_nonfinite=0,
            learning_rates=tuple(group["lr"] for group in self._optimizer.param_groups),
            loss_scale=None,
            num_microbatches=1,
            num_dropped_microbatches=0,
            time_seconds=time.perf_counter() - self._started,
        )
        self._files.write_step(record)
        self._next_step += 1

    def close(self) -> None:
        """Flush everything to disk."""
        self._files.close()
