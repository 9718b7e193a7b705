"""A live training -> one plain state: what a checkpoint holds.

Weights and every buffer, optimizers, scheduler, scaler, EMA, random generators, gradients that are still accumulating.
Parameters are identified by name, so that changes to a model are reported tensor by tensor. The tensors are the live
ones: copy them before training continues.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.act.restore import is_setting
from steadygrad.checkpoint.fitting import find_weights
from steadygrad.checkpoint.plain import PLAIN
from steadygrad.state.collect import AsItIs, Collector, OptimizerState, Slot, collect_state, has_values
from steadygrad.state.random_state import capture_lasting_random

Optimizers = Sequence[torch.optim.Optimizer]
DEQUE = "$deque"
"""Key of the dict that replaces a deque."""
LEFT_OUT = "left_out"
"""Key of what could not be saved: a sentence for an optimizer, name -> sentence for a training."""
PARAMETER = "$parameter"
"""Marks, with a name, a dict key that was a parameter."""


def gather_training(model: nn.Module, optimizers: Optimizers, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of everything. Its tensors are the live ones: copy them before training continues."""
    collector = Collector([model, *optimizers, *extras.values()])
    captured = collect_state(collector, model, optimizers, extras)
    names = name_parameters(model, optimizers)
    weights = find_weights(model)

    def fill(tree: Any) -> Any:
        return _fill(tree, collector)

    kept = {name: fill(tree) for name, tree in captured.extras.items()}
    states = {path: module.get_extra_state() for path, module in find_extra_state(model)}
    left_out = {name: describe_missing(name) for name in extras if name not in kept}
    left_out |= {
        name: _leave_out(f"the state of the {name}", tree) for name, tree in kept.items() if find_unsaved(tree)
    }
    left_out |= {path: _leave_out(f"the extra state of {path}", t) for path, t in states.items() if find_unsaved(t)}

    return {
        "model": weights,
        # What a state_dict omits or names differently: activation checkpointing drops its wrapper's name there.
        "other_parameters": {name: p for name, p in each_parameter(model, optimizers) if name not in weights},
        "other_buffers": {
            name: buffer
            for persistent in (True, False)
            for name, _, _, buffer in find_buffers(model, persistent=persistent)
            if not persistent or name not in weights
        },
        "extra_state": {path: tree for path, tree in states.items() if path not in left_out},
        "optimizers": [
            _gather_optimizer(optimizer, kept, names, fill) for optimizer, kept in zip(optimizers, captured.optimizers)
        ],
        "extras": {name: tree for name, tree in kept.items() if name not in left_out},
        LEFT_OUT: left_out,
        "gradients": _gather_gradients(optimizers, names),
        "random": plain_random(capture_lasting_random({p.device for _, p in each_parameter(model, optimizers)})),
    }


def _gather_gradients(optimizers: Optimizers, names: Mapping[int, str]) -> dict[str, Tensor]:
    """Return the gradients that a step awaits. A parameter that no optimizer holds keeps stale ones, so skip it."""
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return {names[id(p)]: p.grad for p in held if p.grad is not None}


def _gather_optimizer(
    optimizer: torch.optim.Optimizer, kept: OptimizerState, names: Mapping[int, str], fill: Callable[[Any], Any]
) -> dict[str, Any]:
    gathered = {
        "class": name_class(optimizer),
        "groups": fill(kept.groups),
        "params": [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups],
    }
    state = {
        "state": {names[id(key)]: fill(value) for key, value in kept.state if id(key) in names},
        # State that belongs to no single parameter: a count of all steps, madgrad's k.
        "other_state": {
            key: _name_keys(fill(value), names) for key, value in kept.state if not isinstance(key, Tensor)
        },
        "own": fill(kept.own),
    }
    unsaved = find_unsaved(state)
    if unsaved is None:
        return gathered | state
    settings = [{k: v for k, v in group.items() if is_setting(optimizer, k)} for group in gathered["groups"]]
    left_out = _leave_out(f"the state of {type(optimizer).__name__}", state)
    return gathered | {"groups": settings, "state": {}, LEFT_OUT: left_out}


def _leave_out(what: str, tree: Any) -> str:
    return f"{what} holds a {find_unsaved(tree)}, which cannot be saved and starts over"


def describe_missing(name: str) -> str:
    """Describe something whose `state_dict()` raised."""
    return f"the state of the {name} was not saved and starts over"


def list_left_out(state: Mapping[str, Any]) -> list[str]:
    """Return what a gathered state lacks because it has no plain form; older checkpoints name only optimizers."""
    optimizers = [kept[LEFT_OUT] for kept in state["optimizers"] if LEFT_OUT in kept]
    return [*optimizers, *state.get(LEFT_OUT, {}).values()]


def _name_keys(tree: Any, names: Mapping[int, str]) -> Any:
    """Replace dict keys that are parameters, as TRAC uses them, by their names."""
    if not isinstance(tree, dict):
        return tree
    return {
        (PARAMETER, names[id(key)]) if id(key) in names else key: _name_keys(value, names)
        for key, value in tree.items()
    }


def find_unsaved(tree: Any) -> str | None:
    """Return the class of something in a tree that has no plain form, such as an optimizer's own object."""
    if isinstance(tree, Mapping):
        return next(filter(None, map(find_unsaved, tree.values())), None)
    if type(tree) in (list, tuple, set, dict):
        return next(filter(None, map(find_unsaved, tree)), None)
    is_plain = isinstance(tree, Tensor | enum.Enum) or type(tree) in PLAIN or type(tree).__module__ == "numpy"
    return None if is_plain else type(tree).__name__


def name_class(thing: object) -> str:
    """Return the module and name of the object's class."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def name_parameters(model: nn.Module, optimizers: Optimizers) -> dict[int, str]:
    """Map ids to names, for the model's parameters and those that only an optimizer holds."""
    names = {id(p): name for name, p in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                names.setdefault(id(parameter), f"optimizer {i} group {g} parameter {k}")  # the model's own name wins
    return names


def each_parameter(model: nn.Module, optimizers: Optimizers) -> Iterator[tuple[str, Tensor]]:
    names = name_parameters(model, optimizers)
    for parameter in (*model.parameters(), *_only_in_optimizers(model, optimizers)):
        if has_values(parameter):
            yield names[id(parameter)], parameter


def _only_in_optimizers(model: nn.Module, optimizers: Optimizers) -> list[Tensor]:
    own = {id(p) for p in model.parameters()}
    held = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
    return [p for i, p in held.items() if i not in own]


def find_buffers(model: nn.Module, *, persistent: bool) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (full name, module, name, buffer) of the buffers that a state_dict includes, or of those it omits."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if (
                buffer is not None
                and has_values(buffer)
                and (name in module._non_persistent_buffers_set) is not persistent
            ):
                yield f"{path}.{name}" if path else name, module, name, buffer


def find_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:  # the base class's own raises
            yield path, module


def _fill(tree: Any, collector: Collector) -> Any:
    """Replace tensor numbers in the tree by the live tensors."""
    if isinstance(tree, Slot):
        tensor = collector.sources[tree.index].tensor
        # The local shard becomes a DTensor again: saved as a plain tensor, it would pass for the whole parameter
        return tensor if tree.mesh is None else tree.mesh.make_whole(tensor)
    if isinstance(tree, AsItIs):
        return None
    if isinstance(tree, dict):
        return {key: _fill(value, collector) for key, value in tree.items() if not isinstance(value, AsItIs)}
    if isinstance(tree, deque):
        return {DEQUE: [_fill(item, collector) for item in tree], "maxlen": tree.maxlen}
    if isinstance(tree, list | tuple) and not hasattr(tree, "_fields"):
        return type(tree)(_fill(item, collector) for item in tree)
    return tree


def plain_random(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the random state with devices as strings."""
    return {**state, "cuda": {str(device): generator for device, generator in state["cuda"].items()}}


def live_random(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the random state as `restore_random` takes it, without generators of devices that are not available."""
    here = {device: generator for device, generator in state["cuda"].items() if find_device(device).type == "cuda"}
    return {**state, "cuda": {torch.device(device): generator for device, generator in here.items()}}


def find_device(saved: str) -> torch.device:
    """Return the device of that name, or the closest one available."""
    device = torch.device(saved)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return device if (device.index or 0) < torch.cuda.device_count() else torch.device("cuda", 0)
