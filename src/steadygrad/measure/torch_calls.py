"""Calls of torch's training functions -> those who listen: backward, clipping, saving, averages, seeds, states.

A guard sees the gradients, not what the program did to them. So a few functions of torch are wrapped, once and for the
process: `torch.autograd.backward`, `clip_grad_norm_` and `clip_grad_value_`, `torch.save`, `AveragedModel.forward`,
`torch.manual_seed`, `torch.set_rng_state`, `DataLoader.__iter__`, `Module.state_dict` and `Module.load_state_dict`
(which `loads.py` wraps as well). Each passes its arguments on unchanged. With no listener a wrapper costs under a
microsecond; a listener that fails is dropped and the call goes on.
Nothing happens inside a compiled graph, inside another backward, or while a step is replayed. Backward and clipping are
heard in the listener's own thread only: another thread may be inside its backward, which changes gradients without
holding the interpreter's lock, and reading them would crash.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from steadygrad.measure.saved import read_saved
from steadygrad.measure.suspicious_ops import find_caller

MAX_CHAIN = 16
"""Most operations to follow from the loss towards the model."""
SAME_VALUE = ("ToCopy", "View", "UnsafeView", "Squeeze", "Unsqueeze", "Clone", "Alias", "Reshape")
"""Operations that leave the value as it is."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A constant that the loss was multiplied or divided by."""

    value: Tensor
    """A scalar, not yet read from its device."""
    is_division: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardCall:
    """A backward from a scalar loss."""

    loss: Tensor
    factors: tuple[Factor, ...]
    """Constants applied to the loss, the last one first."""
    num_terms: int = 1
    """Terms of the sum behind them; 1 if they were not applied to a sum."""
    end: str
    """The operation behind them, such as 'NllLoss'."""
    where: str
    """file:line of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCall:
    """A call of a function that clips gradients, before it has changed anything."""

    name: str
    """'clip_grad_norm_' or 'clip_grad_value_'."""
    parameters: tuple[Tensor, ...]
    is_spent: bool
    """Whether it was given a generator that has nothing left."""
    max_norm: float = math.inf
    """The largest norm that it leaves; infinite if it clips by value, or if that is a tensor."""
    where: str


class Listener(Protocol):
    """Hears calls until `stop_listening` is called with it."""

    def before_backward(self, loss: Tensor) -> None: ...
    def after_backward(self, call: BackwardCall) -> None: ...
    def before_clip(self, call: ClipCall) -> None: ...
    def after_save(self, saved: Any, where: str) -> None: ...
    def before_average(self, average: AveragedModel) -> None: ...


class SeedListener(Protocol):
    """Hears of seeds until `stop_listening_to_seeds` is called with it."""

    def before_seed(self, seed: int) -> None: ...
    def before_restore(self) -> None: ...


class StateListener(Protocol):
    """Hears of states of modules."""

    def after_state(self, state: Mapping[str, Any]) -> None: ...
    def before_load(self, module: nn.Module, given: Mapping[str, Any]) -> None: ...
    def after_load(self) -> None: ...


class LoaderListener(Protocol):
    """Hears of DataLoaders."""

    def before_epoch(self, loader: DataLoader[Any]) -> None: ...


_listeners: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Each with the thread whose calls it hears."""
_to_saves: weakref.WeakSet[Any] = weakref.WeakSet()
_to_seeds: weakref.WeakSet[Any] = weakref.WeakSet()
_to_states: weakref.WeakSet[Any] = weakref.WeakSet()
_to_loaders: weakref.WeakSet[Any] = weakref.WeakSet()
_num_muted = 0
_is_installed = False


def listen(listener: Listener) -> None:
    """Let `listener`, which is held weakly, hear calls of this thread from now on; no longer those of another."""
    install()
    _listeners[listener] = threading.get_ident()
    _to_saves.add(listener)


def stop_listening(listener: Listener, *, to_saves: bool = False) -> None:
    """Leave `listener` out; without `to_saves` it still hears of saves and averages, which are rare."""
    _listeners.pop(listener, None)
    if to_saves:
        _to_saves.discard(listener)


def listen_to_seeds(listener: SeedListener) -> None:
    """Let `listener`, which is held weakly, hear of seeds from now on."""
    install()
    _to_seeds.add(listener)


def stop_listening_to_seeds(listener: SeedListener) -> None:
    """Leave `listener` out."""
    _to_seeds.discard(listener)


def listen_to_states(listener: StateListener) -> None:
    """Let `listener`, which is held weakly, hear of states from now on."""
    install()
    _to_states.add(listener)


def listen_to_loaders(listener: LoaderListener) -> None:
    """Let `listener`, which is held weakly, hear of loaders from now on."""
    install()
    _to_loaders.add(listener)


@contextlib.contextmanager
def calls_muted() -> Iterator[None]:
    """Ignore calls inside this context: we make them ourselves."""
    global _num_muted
    # For all threads: what another one calls in the meantime is not heard either.
    _num_muted += 1
    try:
        yield
    finally:
        _num_muted -= 1


def install() -> None:
    """Wrap the functions, unless that was done before."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    # Tensor.backward looks this name up at each call, so it is heard too.
    _wrap(torch.autograd, "backward", _around_backward)
    # Where programs find them, not where they are defined: pickle looks there for a function that was imported before.
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        _wrap(nn.utils, name, _around_clip)
    _wrap(torch, "save", _around_save)
    _wrap(AveragedModel, "forward", _around_average)
    _wrap(nn.Module, "state_dict", _around_state)
    _wrap(nn.Module, "load_state_dict", _around_load)
    _wrap(DataLoader, "__iter__", _around_epoch)
    _wrap(torch, "manual_seed", _around_seed)
    for place in (torch, torch.random):  # fork_rng calls the one where it is defined
        _wrap(place, "set_rng_state", _around_restore)


def _wrap(place: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(place, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        is_heard = _listeners or _to_saves or _to_seeds or _to_states or _to_loaders
        if _num_muted or torch.compiler.is_compiling() or not is_heard:
            return original(*args, **kwargs)
        return around(original, *args, **kwargs)

    if inspect.ismodule(place):
        wrapped.__module__ = place.__name__  # pickle finds a function by this: the seed of spawned workers, for one
    setattr(place, name, wrapped)


def _around_backward(run: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
    call = None
    is_inside = torch._C._current_graph_task_id() != -1  # activation checkpointing runs a backward inside another
    if _listeners and not is_inside and isinstance(tensors, Tensor) and tensors.numel() == 1:
        # Before it runs: backward frees what the graph has saved.
        with contextlib.suppress(Exception):
            call = _describe_backward(tensors)
        _notify(_list_here(), lambda one: one.before_backward(tensors))
    run(tensors, *args, **kwargs)
    if call is not None:
        _notify(_list_here(), lambda one: one.after_backward(call))


def _around_clip(clip: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
    if not _listeners:
        return clip(parameters, *args, **kwargs)
    is_iterator = hasattr(parameters, "__next__")
    found = (parameters,) if isinstance(parameters, Tensor) else tuple(parameters)
    name = clip.__name__
    limit = kwargs.get("max_norm", args[0] if args else None) if name == "clip_grad_norm_" else None
    call = ClipCall(
        name=name,
        parameters=found,
        is_spent=is_iterator and not found,
        max_norm=float(limit) if isinstance(limit, (int, float)) else math.inf,
        where=find_caller(),
    )
    _notify(_list_here(), lambda one: one.before_clip(call))
    if not is_iterator:
        return clip(parameters, *args, **kwargs)
    return clip((p for p in found), *args, **kwargs)  # a generator again: torch warns of an empty one


def _around_save(save: Callable[..., Any], obj: Any, *args: Any, **kwargs: Any) -> Any:
    # First the program's own save: a listener must not delay it.
    result = save(obj, *args, **kwargs)
    where = find_caller()
    with calls_muted():
        _notify(_to_saves, lambda one: one.after_save(obj, where))
    return result


def _around_average(forward: Callable[..., Any], average: AveragedModel, *args: Any, **kwargs: Any) -> Any:
    _notify(_to_saves, lambda one: one.before_average(average))
    return forward(average, *args, **kwargs)


def _around_state(take: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    state = take(module, *args, **kwargs)
    if _to_states and not args and "destination" not in kwargs:  # not the part of a larger module
        _notify(_to_states, lambda one: one.after_state(state))
    return state


def _around_load(load: Callable[..., Any], module: nn.Module, given: Any, *args: Any, **kwargs: Any) -> Any:
    _notify(_to_states, lambda one: one.before_load(module, given))
    result = load(module, given, *args, **kwargs)
    _notify(_to_states, lambda one: one.after_load())
    return result


def _around_epoch(begin: Callable[..., Any], loader: DataLoader[Any]) -> Any:
    _notify(_to_loaders, lambda one: one.before_epoch(loader))
    return begin(loader)


def _around_seed(set_seed: Callable[..., Any], seed: Any) -> Any:
    _notify(_to_seeds, lambda one: one.before_seed(int(seed)))
    return set_seed(seed)


def _around_restore(restore: Callable[..., Any], new_state: Any) -> Any:
    _notify(_to_seeds, lambda one: one.before_restore())
    return restore(new_state)


def _list_here() -> list[Any]:
    here = threading.get_ident()
    alive = (reference() for reference in _listeners.keyrefs())  # a copy: other threads may begin to listen meanwhile
    return [listener for listener in alive if listener is not None and _listeners.get(listener) == here]


def _notify(listeners: Iterable[Any], hear: Callable[[Any], None]) -> None:
    for one in list(listeners):
        try:
            hear(one)
        except Exception:  # an unusual tensor, or no memory: the program's own call has worked
            stop_listening(one, to_saves=True)
            stop_listening_to_seeds(one)
            _to_states.discard(one)
            _to_loaders.discard(one)


def _describe_backward(loss: Tensor) -> BackwardCall:
    factors: list[Factor] = []
    node: Any = loss.grad_fn
    name = ""
    for _ in range(MAX_CHAIN):
        name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
        constant = _find_constant(node) if name in ("Mul", "Div") else None
        if constant is not None:
            factors.append(Factor(constant, is_division=name == "Div"))
        elif name not in SAME_VALUE:
            break
        node = next((following for following, _ in node.next_functions if following is not None), None)
    return BackwardCall(loss=loss, factors=tuple(factors), num_terms=_count_terms(node), end=name, where=find_caller())


def _count_terms(node: Any) -> int:
    """Return how many terms `a + b + ...` adds up, at most `MAX_CHAIN` additions deep; 1 for anything else."""
    waiting, num_terms, num_sums = [node], 0, 0
    while waiting:
        one = waiting.pop()
        if type(one).__name__.startswith("AddBackward") and num_sums < MAX_CHAIN:
            num_sums += 1
            waiting += [following for following, _ in one.next_functions if following is not None]
        else:
            num_terms += 1
    return num_terms


def _find_constant(node: Any) -> Tensor | None:
    """Return the scalar without a gradient that this product or quotient has as its other operand."""
    if len([following for following, _ in node.next_functions if following is not None]) != 1:
        return None
    saved = read_saved(node, "other")
    saved = saved if saved is not None else read_saved(node, "self")
    return saved if saved is not None and saved.numel() == 1 and not saved.requires_grad else None
