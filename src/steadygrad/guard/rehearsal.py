"""Rehearsal: a training -> any number of trial steps on it -> the same training, bit for bit.

Everything that a step can change is copied once: weights, buffers, optimizer and loss scaler, random generators, the
loader's own generators, existing gradients. `attempt()` opens a separate guard on the same model, which writes nothing
and acts on nothing, and puts everything back when it ends, however it ends. State that a model keeps outside its
buffers, and what the user's hooks do outside the model, cannot be put back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from steadygrad.act.restore import Restorer
from steadygrad.checkpoint.position import find_generators
from steadygrad.checkpoint.workers import copy_loader
from steadygrad.config import DiagnoseConfig, GuardConfig, Policy, ProveConfig, SnapshotConfig
from steadygrad.errors import UsageError
from steadygrad.facts import Action
from steadygrad.state.collect import Collector, collect_state
from steadygrad.state.muted_warnings import warnings_muted
from steadygrad.state.random_state import capture_random, restore_random

T = TypeVar("T")
MakeGuard = Callable[..., Any]
logger = logging.getLogger("steadygrad")


class Rehearsal:
    """The state of one training, restored after each attempt."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        loader: Iterable[Any],
        *,
        make_guard: MakeGuard,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        """`extras`: other state that a step changes, such as a loss scaler; `make_guard` is the class Guard."""
        refuse_iterator(loader)
        self.model, self.optimizers, self.loader = model, list(optimizers), loader
        self._make_guard = make_guard
        self._extras = {name: extra for name, extra in (extras or {}).items() if extra is not None}
        self._shared = [model, *self.optimizers, *self._extras.values()]
        self._generators = [(one, one.get_state()) for one in find_generators(loader)]
        self._loader_state = loader.state_dict() if _has_state(loader) else None  # type: ignore[attr-defined]
        collector = Collector(self._shared)
        with torch.no_grad():
            self._state = collect_state(collector, model, self.optimizers, self._extras)
            # copy=True: for a tensor in host memory, .to() alone would return the live one.
            self._hosts = [source.tensor.to("cpu", copy=True) for source in collector.sources]
        self._devices = [source.tensor.device for source in collector.sources]
        self._random = capture_random({p.device for p in model.parameters()})

    @property
    def random(self) -> Mapping[str, Any]:
        """State of the random generators before any attempt."""
        return self._random

    @contextlib.contextmanager
    def attempt(self, config: GuardConfig, scaler: torch.amp.GradScaler | None = None) -> Iterator[Any]:
        """Open a guard to try steps with; afterwards everything is as before."""
        gradients = self._set_gradients_aside()
        modes = [(module, module.training) for module in self.model.modules()]
        with _quiet_log():
            try:
                with warnings_muted():  # the training's own guard has reported these already
                    guard = self._make_guard(self.model, self.optimizers, config=watch_only(config), scaler=scaler)
                try:
                    yield guard
                finally:
                    guard.close()
            finally:
                self.put_back()
                for module, mode in modes:
                    module.training = mode  # not train(mode), which recurses and may be overridden
                for parameter, gradient in gradients:
                    parameter.grad = gradient

    def put_back(self) -> None:
        """Put everything back; the random generators last."""
        for generator, state in self._generators:
            generator.set_state(state)
        if self._loader_state is not None:
            self.loader.load_state_dict(self._loader_state)  # type: ignore[attr-defined]
        with torch.no_grad():
            restorer = Restorer(self._state, self._hosts, self._devices, shared=self._shared)
            restorer.restore(self.optimizers, self._extras)
        restore_random(self._random)

    def _set_gradients_aside(self) -> list[tuple[Tensor, Tensor | None]]:
        held = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        parameters = {id(p): p for p in (*self.model.parameters(), *held)}
        aside = [(p, p.grad) for p in parameters.values()]
        for parameter, _ in aside:
            parameter.grad = None
        return aside


def watch_only(config: GuardConfig) -> GuardConfig:
    """Return settings that measure, clip and judge the same, but act on, write, copy and replay nothing."""
    return dataclasses.replace(
        config,
        on_nonfinite=Action.SKIP,
        prove=ProveConfig(enabled=False),
        policy=Policy(act=False),
        snapshots=SnapshotConfig(enabled=False),
        diagnose=DiagnoseConfig(enabled=False),
        measure=dataclasses.replace(config.measure, scan_every=0),
        on_incident=None,
    )


def draw_batches(loader: Iterable[T]) -> Iterator[T]:
    """Yield the batches of a loader, pass after pass, without disturbing a pass that the program has under way."""
    own: Iterable[T] = loader
    if isinstance(loader, DataLoader):
        # torchdata: a position that was loaded and not used yet belongs to the program's next pass.
        changes = {"next_iter_state": None} if hasattr(loader, "next_iter_state") else {}
        # A copy: iter() on a loader with persistent workers restarts the pass that is under way.
        own = copy_loader(loader, persistent_workers=False, **changes)
    while True:
        num = 0
        for batch in own:
            num += 1
            yield batch
        if num == 0:
            raise UsageError("the loader has no batch, so nothing can be tried. Pass one with data.")


def refuse_iterator(loader: Any) -> None:
    """Refuse a one-shot iterator: batches drawn here would be missing from the training."""
    if isinstance(loader, Iterator):
        raise UsageError(
            f"the loader is a {type(loader).__name__}, whose batches can be drawn only once: those tried here would be "
            "missing in the training. Give the loader itself, or a list of some batches."
        )


def _has_state(loader: Any) -> bool:
    """Return whether the loader must restore its own state; a DataLoader is copied instead."""
    own = callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
    return own and not isinstance(loader, DataLoader)


@contextlib.contextmanager
def _quiet_log() -> Iterator[None]:
    """Silence the log: findings of an attempt are not findings of the run."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
