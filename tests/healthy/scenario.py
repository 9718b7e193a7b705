"""What a healthy training is, and the two ways to run one: in the plain loop, and on a Guard.

A scenario is a function that writes its training as a user would: it builds a model, asks its `Trial` for a loop, takes
its steps and says what it should have come to. The trial hands out the plain loop or a Guard; everything else is the
same code. Nothing here may draw random numbers, so that both runs see the same ones.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from steadygrad import Action, Guard, GuardConfig, Severity

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
HARMLESS = (Action.NONE, Action.CLIP)


class PlainLoop:
    """The loop that everybody writes, with the methods of a Guard."""

    def __init__(self, optimizer: Optimizers, *, scheduler: Any = None, scaler: Any = None) -> None:
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._scheduler, self._scaler = scheduler, scaler
        self._num_microbatches = 0

    def backward(self, subject: Callable[..., Any] | Tensor, /, *args: Any) -> Any:
        """Forward, when a function is given, and backward; the first microbatch of a step clears the gradients."""
        if self._num_microbatches == 0:
            for optimizer in self._optimizers:
                optimizer.zero_grad()
        self._num_microbatches += 1
        result = subject if isinstance(subject, Tensor) else subject(*args)
        loss = find_loss(result)
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        return result

    def step(self, subject: Callable[..., Any] | Tensor | None = None, /, *args: Any) -> Any:
        """One optimizer step; without a subject, on the gradients that are there."""
        result = None if subject is None else self.backward(subject, *args)
        for optimizer in self._optimizers:
            if self._scaler is None:
                optimizer.step()
            else:
                self._scaler.step(optimizer)
        if self._scaler is not None:
            self._scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()
        self._num_microbatches = 0
        return result


MakeLoop = Callable[..., PlainLoop]
"""Takes a model, its optimizers, and a PlainLoop's options."""


def make_plain(model: nn.Module, optimizer: Optimizers, **options: Any) -> PlainLoop:
    return PlainLoop(optimizer, **options)


def find_loss(result: Any) -> Tensor:
    """The loss in what a step function returned: a tensor, a mapping with `loss`, or a tuple that begins with it."""
    if isinstance(result, dict):
        return result["loss"]
    return result[0] if isinstance(result, tuple) else result


class Loop:
    """One model in training, plain or guarded: takes steps in each of a Guard's forms and keeps the losses."""

    def __init__(self, inner: PlainLoop | Guard, model: nn.Module, ema: Any) -> None:
        self._inner, self._model = inner, model
        self._ema = ema if isinstance(inner, PlainLoop) else None  # a Guard keeps it up to date by itself
        self.losses: list[float] = []

    def step(self, subject: Callable[..., Any] | Tensor | None = None, /, *args: Any) -> Any:
        """`guard.step(fn, *args)`, `guard.step(loss)` or `guard.step()`."""
        result = self._inner.step(subject, *args)
        if result is not None:
            self.losses.append(find_loss(result).item())
        if self._ema is not None:
            self._ema.update_parameters(self._model)
        return result

    def backward(self, subject: Callable[..., Any] | Tensor, /, *args: Any) -> Any:
        """`guard.backward(fn, *args)`: one microbatch."""
        result = self._inner.backward(subject, *args)
        self.losses.append(find_loss(result).item())
        return result

    @property
    def final(self) -> float:
        """Median of the last 50 losses."""
        return statistics.median(self.losses[-50:])


class Trial:
    """One run of a scenario: gives it its loops, and takes down what it did besides changing weights."""

    def __init__(self, config: GuardConfig | None, make_loop: MakeLoop | None = None) -> None:
        """`config=None` is the plain run, or one in the loop that `make_loop` builds (benchmarks/peers/harm.py)."""
        self._config, self._make_loop = config, make_loop or make_plain
        self.modules: list[nn.Module] = []
        """Everything whose weights are compared; a scenario adds target networks, teachers and averages."""
        self.loops: list[Loop] = []
        self.guards: list[Guard] = []
        self.effects: dict[str, Any] = {}
        """What the program changed outside of its weights: calls counted, items drawn, lines read."""
        self.shortfalls: list[str] = []

    def loop(self, model: nn.Module, optimizer: Optimizers, *, ema: Any = None, **options: Any) -> Loop:
        """A plain loop, or one on a Guard; `options` are a scheduler and a scaler."""
        self.modules += [model] if ema is None else [model, ema]
        if self._config is None:
            loop = Loop(self._make_loop(model, optimizer, **options), model, ema)
        else:
            self.guards.append(Guard(model, optimizer, config=self._config, ema=ema, **options))
            loop = Loop(self.guards[-1], model, ema)
        self.loops.append(loop)
        return loop

    def run(
        self, model: nn.Module, optimizer: Optimizers, num_steps: int, loss: Callable[[int], Any], **options: Any
    ) -> Loop:
        """The commonest loop of all: `num_steps` times `guard.step(loss, number)`."""
        loop = self.loop(model, optimizer, **options)
        for number in range(num_steps):
            loop.step(loss, number)
        return loop

    def expect(self, what: str, value: float, *, above: float = -math.inf, below: float = math.inf) -> None:
        """Say what a healthy end looks like; NaN is never healthy."""
        if not above < value < below:
            self.shortfalls.append(f"{what} is {value:.4g}, not between {above:.4g} and {below:.4g}")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one run of a scenario ended."""

    losses: list[list[float]] = field(repr=False)
    """Of each loop, in the order of their creation."""
    weights: dict[str, Tensor] = field(repr=False)
    effects: dict[str, Any] = field(repr=False)
    shortfalls: list[str]
    """What the run was built for and did not reach."""
    actions: list[str]
    """What a Guard did beyond clipping, as "step: kind -> action"."""
    warnings: list[str]
    """Kinds of finding of severity warning or worse."""
    halted: str | None
    seconds: float

    def compare(self, plain: Ending) -> list[str]:
        """Where this run differs from the plain one; empty when it does not by one bit."""
        names = [name for name in plain.weights if not _same(plain.weights[name], self.weights.get(name))]
        differences = [f"weights differ: {', '.join(names[:4])}"] if names else []
        if self.losses != plain.losses:
            differences.append("losses differ")
        for name, effect in plain.effects.items():
            if self.effects.get(name) != effect:
                differences.append(f"{name}: {_shorten(self.effects.get(name))} for {_shorten(effect)}")
        return differences


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A healthy training whose loss would worry somebody who looks at nothing else."""

    name: str
    family: str
    """The module that has it."""
    about: str
    """Why its loss is unusual, and why it is healthy."""
    play: Callable[[Trial], None] = field(repr=False)

    def train(self, *, seed: int = 0, config: GuardConfig | None = None, make_loop: MakeLoop | None = None) -> Ending:
        """Run it once: plain, on Guards with `config`, or in the loops that `make_loop` builds."""
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        trial, halted, start = Trial(config, make_loop), None, time.perf_counter()
        try:
            self.play(trial)
            for guard in trial.guards:
                guard.flush()
        except Exception as error:
            if config is None and make_loop is None:
                raise
            halted = f"{type(error).__name__}: {error}"  # TrainingHalted, or a crash that the plain run does not have
        seconds = time.perf_counter() - start
        # Whoever replays a step must put every random state back.
        trial.effects["next random numbers"] = (torch.rand(()).item(), random.random(), np.random.rand())
        ending = _end(trial, halted, seconds)
        for guard in trial.guards:
            guard.close()
        return ending


SCENARIOS: dict[str, Scenario] = {}


def scenario(play: Callable[[Trial], None]) -> Callable[[Trial], None]:
    """Register a function as a scenario of its module."""
    if play.__name__ in SCENARIOS:
        raise ValueError(f"Two scenarios are called {play.__name__}. Rename one of them.")
    if not play.__doc__:
        raise ValueError(
            f"{play.__name__} does not say why its loss is unusual and why it is healthy. Add a docstring."
        )
    family = play.__module__.rpartition(".")[2]
    SCENARIOS[play.__name__] = Scenario(name=play.__name__, family=family, about=play.__doc__, play=play)
    return play


def _end(trial: Trial, halted: str | None, seconds: float) -> Ending:
    if not all(math.isfinite(loss) for loop in trial.loops for loss in loop.losses):
        trial.shortfalls.append("a loss is not finite")
    acted = [i for guard in trial.guards for i in guard.incidents if i.outcome.action not in HARMLESS]
    findings = [f for guard in trial.guards for f in guard.findings if f.severity is not Severity.INFO]
    return Ending(
        losses=[loop.losses for loop in trial.loops],
        weights={
            f"{number}.{name}": value
            for number, module in enumerate(trial.modules)
            for name, value in module.state_dict().items()
        },
        effects=trial.effects,
        shortfalls=trial.shortfalls,
        actions=[f"{i.step}: {i.finding.kind} -> {i.outcome.action.value}" for i in acted],
        warnings=sorted({finding.kind for finding in findings}),
        halted=halted,
        seconds=seconds,
    )


def _same(plain: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(plain, other)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
