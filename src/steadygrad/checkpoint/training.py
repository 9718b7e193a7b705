"""One plain state, as `gather` made it -> the live training again, in this process or another.

Nothing is changed before everything has been compared: names, shapes, dtypes, groups, the optimizers' classes. State is
restored through `act.restore.Restorer`, in place and without the casts of `Optimizer.load_state_dict`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.microbatches import Accumulated
from steadygrad.act.restore import Restorer
from steadygrad.checkpoint.fitting import compare_weights, find_weights
from steadygrad.checkpoint.gather import (
    DEQUE,
    LEFT_OUT,
    PARAMETER,
    Optimizers,
    each_parameter,
    find_buffers,
    find_device,
    find_extra_state,
    list_left_out,
    name_class,
    name_parameters,
)
from steadygrad.checkpoint.load import Checkpoint
from steadygrad.errors import MismatchError
from steadygrad.state.collect import OptimizerState, Slot, State, has_own_state, has_values, settle_shards
from steadygrad.state.shards import MeshPlace, take_local

# --- compare ------------------------------------------------------------------------------------------------------


def compare_training(
    state: Mapping[str, Any], model: nn.Module, optimizers: Optimizers, extras: Mapping[str, Any]
) -> list[str]:
    """Describe briefly each thing that does not fit; empty if everything does."""
    weights = find_weights(model)
    problems = compare_weights(weights, state["model"]) + compare_dtypes(weights, state["model"])
    if len(state["optimizers"]) != len(optimizers):
        problems.append(f"{len(optimizers)} optimizers, saved were {len(state['optimizers'])}")
    problems += _find_unsaved(state, model, optimizers)
    names = name_parameters(model, optimizers)
    for i, (optimizer, kept) in enumerate(zip(optimizers, state["optimizers"])):
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        if groups != kept["params"]:
            problems.append(f"optimizer {i} has different parameter groups: {_compare_groups(groups, kept['params'])}")
        if not _is_same_class(optimizer, kept):
            problems.append(f"optimizer {i} is a {name_class(optimizer)}, the saved one was a {kept['class']}")
    saved = {*state["extras"], *state.get(LEFT_OUT, {})}
    problems += [f"no state of the {name} was saved" for name in extras if name not in saved]
    for name, extra in extras.items():
        kept = state["extras"].get(name)
        if isinstance(extra, nn.Module) and isinstance(kept, Mapping):
            problems += [f"{name}: {problem}" for problem in compare_weights(find_weights(extra), kept)]
    return problems


def compare_dtypes(own: Mapping[str, Tensor], saved: Mapping[str, Any]) -> list[str]:
    """Describe tensors of another dtype: a copy would round them, and their moments would not fit."""
    return [
        f"{name} is {_spell(tensor.dtype)}, the saved one {_spell(saved[name].dtype)}"
        for name, tensor in own.items()
        if isinstance(saved.get(name), Tensor) and saved[name].dtype != tensor.dtype
    ]


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_same_class(optimizer: torch.optim.Optimizer, kept: Mapping[str, Any]) -> bool:
    """Whether the saved state is of this class; older checkpoints do not record it."""
    return kept.get("class") in (None, name_class(optimizer))


def _compare_groups(own: list[list[str]], saved: list[list[str]]) -> str:
    if len(own) != len(saved):
        return f"{len(own)} groups, saved were {len(saved)}"
    here, there = {n for group in own for n in group}, {n for group in saved for n in group}
    added, gone = sorted(here - there), sorted(there - here)
    parts = [f"{what} {', '.join(names[:5])}" for what, names in (("new", added), ("gone", gone)) if names]
    return "; ".join(parts) or "in another order"


def _find_unsaved(state: Mapping[str, Any], model: nn.Module, optimizers: Optimizers) -> list[str]:
    """Return the weights that the checkpoint does not hold under any name they could be restored by."""
    saved = {*state["model"], *state["other_parameters"]}
    own = find_weights(model)  # these were compared already
    return [
        f"{name} is not in it under this name"
        for name, _ in each_parameter(model, optimizers)
        if name not in saved and name not in own and not name.startswith("optimizer ")
    ]


# --- put back -----------------------------------------------------------------------------------------------------


class _Hosts:
    """Loaded tensors, numbered for the Restorer, each with the device that it belongs on.

    That is the device it was saved from, unless the parameters have moved since: then it follows them.
    """

    def __init__(self, saved_devices: Mapping[int, str], parameters: Iterable[tuple[Tensor, Tensor]]) -> None:
        """`parameters`: pairs of the loaded and the live tensor."""
        self.tensors: list[Tensor] = []
        self.devices: list[torch.device] = []
        self._saved = saved_devices
        self._moved: dict[str, torch.device] = {}
        for loaded, live in parameters:
            self._moved.setdefault(self.name_device(loaded), take_local(live).device)

    def name_device(self, loaded: Tensor) -> str:
        """Return the device it was on when it was saved."""
        return self._saved.get(id(loaded), str(loaded.device))

    def number(self, tree: Any, device: torch.device | None = None) -> Any:
        """Return the tree with slots for its tensors; `device`: where they belong, if known."""
        if isinstance(tree, Tensor):
            self.tensors.append(take_local(tree))
            self.devices.append(device or self._find_device(tree))
            return Slot(len(self.tensors) - 1, MeshPlace.of(tree))
        if isinstance(tree, dict):
            if DEQUE in tree:
                return deque(self.number(tree[DEQUE], device), tree["maxlen"])
            return {key: self.number(value, device) for key, value in tree.items()}
        if isinstance(tree, list | tuple) and type(tree) is not torch.Size:
            return type(tree)(self.number(item, device) for item in tree)
        return tree

    def number_state(self, state: Any, loaded: Tensor, live: Tensor, *, step_on_device: bool | None) -> Any:
        """Number the optimizer's state of one parameter; what was on its device goes to its device again.

        A `step` is on the device for fused and capturable optimizers, and on the host for most others.
        """
        if not isinstance(state, dict):
            return self.number(state)
        # A moment was on its parameter's device and follows it; what was elsewhere stays there
        home, was = take_local(live).device, self.name_device(loaded)

        def place(key: Any, value: Any) -> torch.device | None:
            if not isinstance(value, Tensor):
                return None
            if key == "step" and step_on_device is not None:
                return home if step_on_device else torch.device("cpu")
            return home if self.name_device(value) == was else None

        return {key: self.number(value, place(key, value)) for key, value in state.items()}

    def _find_device(self, loaded: Tensor) -> torch.device:
        """Find where a tensor belongs: the host if it was there; it moves along if the training left its device."""
        saved = self.name_device(loaded)
        return find_device(saved) if saved == "cpu" else self._moved.get(saved) or find_device(saved)


@torch.no_grad()
def put_back(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizers: Optimizers,
    extras: Mapping[str, Any],
    *,
    strict: bool = True,
    settings: Container[int] | None = None,
    gradients: bool = True,
) -> list[str]:
    """Write the state over the live training; return what did not fit, or raise MismatchError with `strict`.

    A rollback leaves some of it alone: `settings` are the ids of the optimizers whose learning rates and other settings
    go back too (None: all), and without `gradients` the present ones stay.
    """
    state = checkpoint.state
    problems = compare_training(state, model, optimizers, extras)
    if problems and strict:
        raise MismatchError(
            f"{checkpoint.info.path} does not fit this training: {'; '.join(problems)}. Create model and optimizers as "
            "they were, or resume with strict=False to load what fits."
        )
    # Before the parameters are listed: weights that FSDP2 has gathered would receive the values instead of the shards
    settle_shards(model)
    loaded = {**state["model"], **state["other_parameters"]}
    live = dict(each_parameter(model, optimizers))
    hosts = _Hosts(checkpoint.devices, [(loaded[name], p) for name, p in live.items() if name in loaded])
    made = _number_state(state, model, optimizers, extras, hosts)
    restorer = Restorer(made, hosts.tensors, hosts.devices, shared=(), settings=settings, strict=strict)
    problems += restorer.restore(optimizers, extras)
    problems += list_left_out(state)
    for path, module in find_extra_state(model):
        if path in state["extra_state"]:
            module.set_extra_state(state["extra_state"][path])
    if gradients:
        _put_gradients(state["gradients"], model, optimizers)
    return problems


def _number_state(
    state: Mapping[str, Any], model: nn.Module, optimizers: Optimizers, extras: Mapping[str, Any], hosts: _Hosts
) -> State:
    saved = {**state["model"], **state["other_parameters"]}
    parameters = dict(each_parameter(model, optimizers))
    fitting = {name: p for name, p in parameters.items() if name in saved and saved[name].shape == p.shape}
    buffers = {**state["model"], **state["other_buffers"]}
    return State(
        parameters=[(p, hosts.number(saved[name])) for name, p in fitting.items()],
        buffers=[
            # Cast, since `compare_dtypes` has not seen the buffers that a state_dict omits
            (module, name, hosts.number(buffers[full].to(live.dtype), take_local(live).device))
            for persistent in (True, False)
            for full, module, name, live in find_buffers(model, persistent=persistent)
            if full in buffers and buffers[full].shape == live.shape
        ],
        optimizers=[
            _number_optimizer(optimizer, kept, {name: (saved[name], p) for name, p in fitting.items()}, hosts)
            for optimizer, kept in zip(optimizers, state["optimizers"])
        ],
        extras={name: hosts.number(tree) for name, tree in state["extras"].items() if name in extras},
    )


def _number_optimizer(
    optimizer: torch.optim.Optimizer,
    kept: Mapping[str, Any],
    parameters: Mapping[str, tuple[Tensor, Tensor]],
    hosts: _Hosts,
) -> OptimizerState:
    """Return groups and state for the Restorer; a group or class that was not saved keeps its live settings."""
    live = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    if not _is_same_class(optimizer, kept):
        return OptimizerState(groups=live, state=[])
    if LEFT_OUT in kept:
        return OptimizerState(groups=[{**group, **saved} for group, saved in zip(live, kept["groups"])], state=[])
    groups = [hosts.number(kept["groups"][i]) if i < len(kept["groups"]) else group for i, group in enumerate(live)]
    now, then = _find_device_stepped(optimizer.param_groups), any(_steps_on_device(g) for g in kept["groups"])
    state = []
    for name, value in kept["state"].items():
        if name in parameters:
            loaded, parameter = parameters[name]
            # None: nothing is known about the step count, so it goes to the device that it was saved from
            on_device = True if id(parameter) in now else False if then or hosts.name_device(loaded) == "cpu" else None
            state.append((parameter, hosts.number_state(value, loaded, parameter, step_on_device=on_device)))
    named = {(PARAMETER, name): parameter for name, (_, parameter) in parameters.items()}
    state += [(key, _find_keys(hosts.number(value), named)) for key, value in kept.get("other_state", {}).items()]
    own = kept.get("own") if has_own_state(optimizer) else None  # missing in older checkpoints
    return OptimizerState(groups=groups, state=state, own=hosts.number(own))


def _find_keys(tree: Any, named: Mapping[Any, Tensor]) -> Any:
    """Replace parameter names in the tree by the parameters."""
    if not isinstance(tree, dict):
        return tree
    return {named.get(key, key): _find_keys(value, named) for key, value in tree.items()}


def _steps_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("capturable"))


def _find_device_stepped(groups: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the ids of parameters whose step count is on their own device."""
    return {id(parameter) for group in groups if _steps_on_device(group) for parameter in group["params"]}


def _put_gradients(gradients: Mapping[str, Tensor], model: nn.Module, optimizers: Optimizers) -> None:
    for name, parameter in each_parameter(model, optimizers):
        saved = gradients.get(name)
        fits = saved is not None and saved.shape == parameter.shape
        # A copy, so that the next backward does not add into the loaded state; None where nothing was saved, or it
        # would add to gradients of this process
        parameter.grad = saved.to(parameter.device, copy=True) if fits and saved is not None else None


# --- an unfinished step -------------------------------------------------------------------------------------------
# An unfinished step -> plain values -> the same step again: its microbatches, and the buffers before it.


def gather_accumulated(accumulated: Accumulated, model: nn.Module, buffers: BufferKeeper) -> dict[str, Any]:
    """Return the microbatches so far, and the buffers from before their first forward.

    A program that runs backward itself reports no microbatches; it is enough that its forward was seen.
    """
    before = {}
    if buffers.has_begun:
        # Cloned inside: on leaving, the buffers hold what the forwards made of them again
        with buffers.as_saved():
            before = {name: b.detach().clone() for name, b in model.named_buffers() if has_values(b)}
    if accumulated.num == 0:
        return {"num": 0, "buffers": before}
    return {
        "num": accumulated.num,
        "num_dropped": accumulated.num_dropped,
        "overflowed": accumulated.overflowed,
        "losses": list(accumulated.losses),
        "buffers": before,
    }


@torch.no_grad()
def put_accumulated(saved: Mapping[str, Any], model: nn.Module, buffers: BufferKeeper) -> Accumulated:
    """Return the saved microbatches; `buffers` receives what a skip of their step must restore."""
    buffers.forget()
    before = saved.get("buffers", {})
    if before:
        live = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers() if has_values(buffer)}
        # The keeper copies what the buffers hold: show it those from before the step, then write back the present ones
        _write(live, before)
        buffers.begin()
        _write(live, {name: now for name, (_, now) in live.items()})
    if not saved["num"]:
        return Accumulated()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return Accumulated(
        losses=[loss.to(device) for loss in saved["losses"]],
        num=saved["num"],
        num_dropped=saved["num_dropped"],
        overflowed=saved["overflowed"],
    )


def _write(live: Mapping[str, tuple[Tensor, Tensor]], values: Mapping[str, Tensor]) -> None:
    for name, (buffer, _) in live.items():
        if name in values and values[name].shape == buffer.shape:
            buffer.data.copy_(values[name])  # in place: the keeper holds this very tensor
