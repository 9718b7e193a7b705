"""Capture: training state -> a tree of plain values with numbered tensors -> the same state again.

The Collector walks parameters, buffers, optimizers, extras and random generators without copying a tensor or waiting
for a device; where the numbered tensors are copied to is the business of `snapshots.py`. The Restorer writes the copies
over the live state, in place wherever a tensor still fits, so that graphs, optimizers and users keep their objects.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from steadygrad.act.random_state import capture_random, restore_random
from steadygrad.measure.shards import MeshPlace, is_dtensor, take_local


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in a tree where a tensor was. Of a DTensor the part of this rank is kept, and how to make it whole."""

    index: int
    mesh: MeshPlace | None = None


@dataclass(slots=True)
class Source:
    """A tensor to copy. `late`: it cannot change before the next optimizer step, so the side stream may copy it."""

    tensor: Tensor
    late: bool
    name: str = ""
    """What to call it when it is not finite; empty: nobody looks."""
    must_be_finite: bool = True
    """False: it may never have been finite (a mask of -inf), which is no fault."""


class Collector:
    """Walks state, numbers its tensors and copies the plain values. A tensor met twice is numbered once."""

    def __init__(self, shared: Iterable[object]) -> None:
        self.sources: list[Source] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # an id is a tensor's own only while it lives
        self._memo: dict[int, Any] = {id(thing): thing for thing in shared}  # deepcopy leaves these as they are

    def add(self, tensor: Tensor, *, late: bool, name: str = "", must_be_finite: bool = True) -> Slot:
        """The number of a tensor."""
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.sources)
            self.sources.append(Source(take_local(tensor).detach(), late, name, must_be_finite))
            self._alive.append(tensor)
        return Slot(number, MeshPlace.of(tensor))

    def walk(self, value: Any, *, late: bool, name: str = "", must_be_finite: bool = True) -> Any:
        """`value` with slots for its tensors; dicts, lists and tuples are looked into."""
        settings = {"late": late, "must_be_finite": must_be_finite}
        if isinstance(value, Tensor):
            return self.add(value, name=name, **settings)
        if isinstance(value, dict):
            made = copy.copy(value)  # keeps its kind, and the attributes that a module's state_dict carries
            for key, item in value.items():
                made[key] = self.walk(item, name=name and f"{name}.{key}", **settings)
            return made
        if isinstance(value, list | tuple):
            return _remake(value, [self.walk(item, name=name, **settings) for item in value])
        return copy.deepcopy(value, self._memo)


def _remake(like: Any, items: list[Any]) -> Any:
    """A list, tuple or named tuple of the kind of `like`."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


@dataclass(slots=True, kw_only=True)
class State:
    """Everything that is put back, with slots for tensors. Parameters and modules are held as they are."""

    parameters: list[tuple[Tensor, Slot]]
    buffers: list[tuple[nn.Module, str, Slot | None]]
    optimizers: list[tuple[list[dict[str, Any]], list[tuple[Any, Any]]]]
    """For each its groups without `params`, and its state as (key, value)."""
    extras: dict[str, Any]
    rng: dict[str, Any]


def settle_shards(model: nn.Module) -> None:
    """Let go of weights that FSDP2 has gathered: a forward without backward leaves them, and they outlive a restore."""
    for module in model.modules():
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            module.reshard()  # type: ignore[operator]


def collect_state(
    collector: Collector,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    extras: Mapping[str, Any],
) -> State:
    """Everything that a step can change, with its tensors numbered."""
    settle_shards(model)
    names = {id(p): name for name, p in model.named_parameters()}
    held = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    unique = {id(p): p for p in (*model.parameters(), *held)}
    parameters = [
        (p, collector.add(p, late=True, name=f"parameter {names.get(i, '(not of the model)')}"))
        for i, p in unique.items()
        if not is_lazy(p)
    ]
    return State(
        parameters=parameters,
        buffers=list(_collect_buffers(collector, model)),
        optimizers=[_collect_optimizer(optimizer, collector, names) for optimizer in optimizers],
        extras={name: _collect_extra(name, extra, collector) for name, extra in extras.items()},
        rng=capture_random({p.device for p in unique.values()}),
    )


def _collect_buffers(collector: Collector, model: nn.Module) -> Iterator[tuple[nn.Module, str, Slot | None]]:
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            label = f"buffer {path}.{name}" if path else f"buffer {name}"
            slot = None
            if buffer is not None and not is_lazy(buffer):
                slot = collector.add(buffer, late=False, name=label, must_be_finite=False)
            yield module, name, slot


def _collect_optimizer(
    optimizer: torch.optim.Optimizer, collector: Collector, names: Mapping[int, str]
) -> tuple[list[dict[str, Any]], list[tuple[Any, Any]]]:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    state = [
        (key, collector.walk(value, late=True, name=f"optimizer state of {names.get(id(key), 'a parameter')}"))
        for key, value in optimizer.state.items()
    ]
    return [collector.walk(group, late=False) for group in groups], state


SCALER_FIELDS = ("_scale", "_growth_tracker", "_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval")


def _collect_extra(name: str, extra: Any, collector: Collector) -> Any:
    """Its state_dict. A GradScaler's would wait for the device, so its fields are read instead."""
    if isinstance(extra, torch.amp.GradScaler):
        return {key: collector.walk(getattr(extra, key), late=False) for key in SCALER_FIELDS if hasattr(extra, key)}
    if isinstance(extra, nn.Module):
        return collector.walk(extra.state_dict(), late=True, name=name, must_be_finite=False)
    return collector.walk(extra.state_dict(), late=False)


class Restorer:
    """Writes one snapshot over the live state; tensors that still fit are written in place."""

    def __init__(
        self, state: State, hosts: Sequence[Tensor], devices: Sequence[torch.device], *, shared: Iterable[object]
    ) -> None:
        self._state, self._hosts, self._devices = state, hosts, devices
        self._memo: dict[int, Any] = {id(thing): thing for thing in shared}

    def restore(self, optimizers: Sequence[torch.optim.Optimizer], extras: Mapping[str, Any]) -> None:
        """Parameters, buffers, optimizers, extras; the random generators last, so that nothing here moves them."""
        for parameter, slot in self._state.parameters:
            take_local(parameter).data.copy_(self._hosts[slot.index])
        for module, name, kept in self._state.buffers:
            module._buffers[name] = None if kept is None else self._put(module._buffers.get(name), kept)
        for optimizer, (groups, state) in zip(optimizers, self._state.optimizers):
            self._put_optimizer(optimizer, groups, state)
        for name, saved in self._state.extras.items():
            self._put_extra(extras[name], saved)
        restore_random(self._state.rng)

    def _put(self, live: Any, saved: Any) -> Any:
        """What `saved` stands for; dicts and tensors of `live` are reused where they fit."""
        if isinstance(saved, Slot):
            host, device = self._hosts[saved.index], self._devices[saved.index]
            if saved.mesh is None:
                return self._put_tensor(live, host, device)
            if is_dtensor(live) and MeshPlace.of(live) == saved.mesh:
                self._put_tensor(take_local(live), host, device)
                return live
            return saved.mesh.make_whole(host.to(device, copy=True))
        if isinstance(saved, dict):
            return self._put_dict(live, saved)
        if isinstance(saved, list | tuple):
            fits = isinstance(live, list | tuple) and len(live) == len(saved)
            return _remake(saved, [self._put(live[i] if fits else None, item) for i, item in enumerate(saved)])
        return copy.deepcopy(saved, self._memo)

    def _put_dict(self, live: Any, saved: dict[Any, Any], spare: Sequence[str] = ()) -> dict[Any, Any]:
        made: dict[Any, Any] = live if isinstance(live, dict) else copy.copy(saved)
        for key in [key for key in made if key not in saved and key not in spare]:
            del made[key]
        for key, item in saved.items():
            made[key] = self._put(live.get(key) if made is live else None, item)
        return made

    def _put_tensor(self, live: Any, host: Tensor, device: torch.device) -> Tensor:
        fits = (
            isinstance(live, Tensor)
            and (live.shape, live.dtype, live.device, live.layout) == (host.shape, host.dtype, device, host.layout)
            and host.layout in (torch.strided, torch.sparse_coo)
        )
        if not fits:
            return host.to(device, copy=True)
        assert isinstance(live, Tensor)
        if host.layout is not torch.strided:
            return live.copy_(host)  # not through .data, whose indices are its own
        if torch._debug_has_internal_overlap(live) == 1:  # expanded: cannot be written, and hardly ever changes
            return live if torch.equal(live.cpu(), host) else host.to(device, copy=True)
        live.data.copy_(host)
        return live

    def _put_optimizer(self, optimizer: torch.optim.Optimizer, groups: list[Any], state: list[Any]) -> None:
        """Not by its own load_state_dict, which casts the state to the dtype of the parameters."""
        for group, saved in zip(optimizer.param_groups, groups):
            self._put_dict(group, saved, spare=("params",))
        kept = {id(key) for key, _ in state}
        for key in [key for key in optimizer.state if id(key) not in kept]:
            del optimizer.state[key]
        for key, saved in state:
            optimizer.state[key] = self._put(optimizer.state.get(key), saved)

    def _put_extra(self, extra: Any, saved: Any) -> None:
        if isinstance(extra, torch.amp.GradScaler):
            self._put_scaler(extra, saved)
        elif isinstance(extra, nn.Module):  # copies into its own tensors, so that the host's can be given as they are
            extra.load_state_dict(self._fill(saved))
        else:
            extra.load_state_dict(self._put(None, saved))

    def _put_scaler(self, scaler: torch.amp.GradScaler, saved: dict[str, Any]) -> None:
        for name, value in saved.items():
            setattr(scaler, name, self._put(getattr(scaler, name), value))

    def _fill(self, saved: Any) -> Any:
        """The tree with the host's own tensors in it."""
        if isinstance(saved, Slot):
            host = self._hosts[saved.index]
            return host if saved.mesh is None else saved.mesh.make_whole(host.to(self._devices[saved.index]))
        if isinstance(saved, dict):
            made = copy.copy(saved)
            for key, item in saved.items():
                made[key] = self._fill(item)
            return made
        if isinstance(saved, list | tuple):
            return _remake(saved, [self._fill(item) for item in saved])
        return copy.deepcopy(saved, self._memo)
