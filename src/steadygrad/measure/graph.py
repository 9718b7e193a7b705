"""GraphWatch: the first forward and its loss -> a GraphScan: mistakes that are visible in the program itself.

A torch function mode sees each call of the user's code with its arguments: shapes that broadcast by accident, a
softmax of a softmax. The loss's graph then shows which leaves it was made from. Marks on tensors are weak and live as
long as the watch is entered. Where anything is compiled no mode is entered (it would be traced into the graph), nor
where an eval-mode attention layer would leave its fast path because of it. Whatever fails gives an empty scan, never
an exception. Reads only; the cost falls on the first step.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from steadygrad.facts import Broadcast, GraphScan
from steadygrad.measure.call_in_place import call_in_place
from steadygrad.measure.cuts import CutWatch
from steadygrad.measure.exchanged_arguments import Suspect
from steadygrad.measure.graph_leaves import find_leaves
from steadygrad.measure.loss_targets import LossTarget
from steadygrad.measure.mixed_axes import ReshapeWatch
from steadygrad.measure.suspicious_ops import SuspiciousOps
from steadygrad.state.modules import list_buffers, list_modules, list_parameters
from steadygrad.state.trained_parameters import TrainedParameters

FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules that leave their fast path in eval mode when a torch function mode is active."""
MAX_DEPTH = 8
"""How deep to search nested containers for parameters."""

OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters registered there are not hidden."""


class GraphWatch:
    """Enter it around the first forward, then read it with the loss.

    >>> model = nn.Linear(3, 1)
    >>> from steadygrad.state.trained_parameters import find_trained_parameters
    >>> watch = GraphWatch(find_trained_parameters(model, torch.optim.SGD(model.parameters())))
    >>> with watch:
    ...     loss = (model(torch.ones(4, 3)) - torch.ones(4)).square().mean()
    >>> [(found.left, found.right) for found in watch.read(0, loss).broadcasts]
    [((4, 1), (4,))]
    """

    def __init__(self, trained: TrainedParameters) -> None:
        self._trained = trained
        self._mode: CallWatch | None = None
        self._stack = contextlib.ExitStack()
        self._broadcasts: tuple[Broadcast, ...] = ()
        self._double_softmaxes: tuple[str, ...] = ()
        self.loss_places: dict[str, str] = {}
        """Loss functions that were called, and file:line of the last call."""
        self.loss_targets: list[LossTarget] = []
        """Targets of losses that leave no node of their own in the graph."""
        self.exchanged: list[Suspect] = []
        """Calls of losses in which only the target has a gradient."""
        self.reshapes, self.cuts = ReshapeWatch(), CutWatch()
        self.has_watched = False
        """Whether it was ever entered: else `reshapes` and `cuts` know nothing, not even that there is no hook."""

    def __enter__(self) -> Self:
        try:
            if self._mode is None and may_enter(self._trained.model):
                buffers = {id(b) for _, b in list_buffers(self._trained.model)}
                self.reshapes.constants = buffers
                self._mode = CallWatch(SuspiciousOps(constants=buffers), self.reshapes, self.cuts)
        except Exception:
            self._mode = None
        if self._mode is not None:
            self._stack.enter_context(self._mode)
            self.has_watched = True
        return self

    @property
    def is_watching(self) -> bool:
        """Whether a forward is being watched now, of which more may follow."""
        return self._mode is not None

    def __exit__(self, *exception: object) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            self._stack.close()
            self._broadcasts = tuple(mode.suspicious_ops.broadcasts)
            self._double_softmaxes = tuple(mode.suspicious_ops.double_softmaxes)
            self.loss_places = mode.suspicious_ops.loss_places
            self.loss_targets = mode.suspicious_ops.loss_targets
            self.exchanged = mode.suspicious_ops.exchanged

    def read(self, step: int, loss: Tensor | None) -> GraphScan:
        """Return what was seen while entered, and what `loss` was made from; before or after its backward."""
        try:
            return GraphScan(
                step=step,
                hidden=() if loss is None else _find_hidden(self._trained, loss),
                unoptimized=self._trained.unoptimized,
                foreign=self._trained.foreign,
                broadcasts=self._broadcasts,
                double_softmaxes=self._double_softmaxes,
                anomaly_mode=torch.is_anomaly_enabled(),
            )
        except Exception:
            return GraphScan(step=step)


class CallWatch(TorchFunctionMode):
    """Passes each call on to `suspicious_ops`, `reshapes` and `cuts`; one failure there ends the watch."""

    def __init__(self, suspicious_ops: SuspiciousOps, reshapes: ReshapeWatch, cuts: CutWatch) -> None:
        super().__init__()
        self.suspicious_ops, self.reshapes, self.cuts = suspicious_ops, reshapes, cuts
        self._broken = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if self._broken:
            return call_in_place(func, args, kwargs)
        if torch.is_grad_enabled():  # results without a graph are marked all the same
            self._try(self.suspicious_ops.before, func, args, kwargs)
        result = call_in_place(func, args, kwargs)
        self._try(self._see, func, args, kwargs, result)
        return result

    def _see(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.suspicious_ops.after(func, args, kwargs, result)
        self.reshapes.after(func, args, result)
        self.cuts.after(func, args, kwargs, result)

    def _try(self, look: Callable[..., None], *call: Any) -> None:
        try:
            if not self._broken:
                look(*call)
        except Exception:
            # What was not seen may include a hook, and then we must not differentiate through the graph.
            self._broken = self.reshapes.has_hooks = True


def may_enter(model: nn.Module) -> bool:
    """Return whether entering a mode would have no effect on the program."""
    for _, module in list_modules(model):
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:  # the latter by module.compile()
            return False
        if isinstance(module, FAST_PATHS) and not module.training:
            return False
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # holds the backend of every torch.compile in this process
    return not any(callable(backend) for backend in getattr(dynamo, "cached_backends", {}).values())


def _find_hidden(trained: TrainedParameters, loss: Tensor) -> tuple[str, ...]:
    """Return the untrained leaves of the graph, under the names of the containers that hide them."""
    known = {id(p) for _, p in list_parameters(trained.model)} | {id(p) for _, p in trained.named}
    unknown = {id(leaf) for leaf in find_leaves(loss) if id(leaf) not in known}
    if not unknown:
        return ()
    names: dict[int, str] = {}
    for name, tensor in _find_contained(trained.model):
        if id(tensor) in unknown:
            names.setdefault(id(tensor), name)
    return tuple(names.values())


def _find_contained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in the plain lists, tuples and dicts that modules keep as attributes."""
    seen: set[int] = set()
    for path, module in list_modules(model):
        for attribute, value in vars(module).items():
            if isinstance(value, list | tuple | dict) and attribute not in OWN:
                yield from _search(value, f"{path}.{attribute}" if path else attribute, seen, MAX_DEPTH)


def _search(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif id(value) in seen or not depth:
        return
    elif isinstance(value, nn.Module):
        seen.add(id(value))
        for name, parameter in value.named_parameters():
            yield f"{path}.{name}", parameter
        for name, inner in _find_contained(value):
            yield f"{path}.{name}", inner
    elif isinstance(value, list | tuple | Mapping):
        seen.add(id(value))
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _search(item, f"{path}.{key}", seen, depth - 1)
