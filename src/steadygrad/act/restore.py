"""Restorer: a captured state -> the live training, in place wherever a tensor still fits.

Graphs, optimizers and users keep their objects. Everything is compared before the first byte is written: what no longer
fits (a weight that was resized since) is left unchanged and named. A rollback leaves the settings of the groups alone
unless the scheduler that writes them goes back too: the user's own scheduler has moved on, and so must its rates.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.state.collect import AsItIs, OptimizerState, Slot, State, has_own_state
from steadygrad.state.shards import MeshPlace, is_dtensor, take_local
from steadygrad.state.tree import remake

SETTINGS = ("lr", "weight_decay", "momentum", "betas")
"""Keys that users and schedulers write into the groups of any optimizer, and suffixes of keys such as `initial_lr`."""


def is_setting(optimizer: torch.optim.Optimizer, key: str) -> bool:
    """Whether `key` of the groups is the user's. torch's optimizers never write there; others keep counts there."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return True
    return key in SETTINGS or key.endswith(("_lr", "_momentum"))


class Restorer:
    """Writes one captured state over the live one."""

    def __init__(
        self,
        state: State,
        hosts: Sequence[Tensor],
        devices: Sequence[torch.device],
        *,
        shared: Iterable[object],
        settings: Container[int] | None = None,
        strict: bool = False,
    ) -> None:
        """`settings`: ids of the optimizers whose learning rates and other settings go back too; None: all.

        `strict`: raise if something cannot load its state.
        """
        self._state, self._hosts, self._devices = state, hosts, devices
        self._settings, self._strict = settings, strict
        self._memo: dict[int, Any] = {id(thing): thing for thing in shared}

    def restore(self, optimizers: Sequence[torch.optim.Optimizer], extras: Mapping[str, Any]) -> list[str]:
        """Restore everything that fits; return a short description of each thing that does not.

        Code that is not ours and may raise runs first, so that it cannot leave the weights half restored.
        """
        pairs = [(parameter, self._hosts[slot.index]) for parameter, slot in self._state.parameters]
        resized = {id(parameter): parameter for parameter, host in pairs if take_local(parameter).shape != host.shape}
        problems = [f"a parameter of shape {tuple(p.shape)} had a different shape then" for p in resized.values()]
        for name, saved in self._state.extras.items():
            problems += self._put_extra(name, extras[name], saved)
        for optimizer, kept in zip(optimizers, self._state.optimizers):
            problems += self._put_own(optimizer, kept.own)
        for parameter, host in pairs:
            if id(parameter) not in resized:
                take_local(parameter).data.copy_(host)
        for module, name, place in self._state.buffers:
            module._buffers[name] = None if place is None else self._put(module._buffers.get(name), place)
        for optimizer, kept in zip(optimizers, self._state.optimizers):
            self._put_optimizer(optimizer, kept, resized)
        return problems

    # --- trees ------------------------------------------------------------------------------------------------------

    def _put(self, live: Any, saved: Any) -> Any:
        """Return the value that `saved` describes, reusing dicts and tensors of `live` where they fit."""
        if isinstance(saved, Slot):
            host, device = self._hosts[saved.index], self._devices[saved.index]
            if saved.mesh is None:
                return self._put_tensor(live, host, device)
            if is_dtensor(live) and MeshPlace.of(live) == saved.mesh:
                self._put_tensor(take_local(live), host, device)
                return live
            return saved.mesh.make_whole(host.to(device, copy=True))
        if isinstance(saved, AsItIs):
            return saved.value
        if isinstance(saved, dict):
            return self._put_dict(live, saved)
        if isinstance(saved, list | tuple | deque):
            fits = isinstance(live, list | tuple | deque) and len(live) == len(saved)
            return remake(saved, [self._put(live[i] if fits else None, item) for i, item in enumerate(saved)])
        # A copy, since the state may be restored again. The memo maps the training's own objects to themselves: a
        # reference to the model stays one.
        return copy.deepcopy(saved, self._memo)

    def _put_dict(self, live: Any, saved: dict[Any, Any]) -> dict[Any, Any]:
        # In place: a wrapper and its inner optimizer may hold this very dict.
        made: dict[Any, Any] = live if isinstance(live, dict) else copy.copy(saved)
        for key in [key for key in made if key not in saved]:
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
            # copy=True: `host` lies in memory that another snapshot will use.
            return host.to(device, copy=True)
        assert isinstance(live, Tensor)
        if host.layout is not torch.strided:
            return live.copy_(host)  # not through .data, which has its own indices
        if torch._debug_has_internal_overlap(live) == 1:  # expanded: cannot be written, and rarely changes
            return live if torch.equal(live.cpu(), host) else host.to(device, copy=True)
        live.data.copy_(host)  # past autograd: a plain copy_ would invalidate graphs that saved this tensor
        return live

    # --- optimizers -------------------------------------------------------------------------------------------------

    def _put_own(self, optimizer: torch.optim.Optimizer, own: Any) -> list[str]:
        """Load state kept outside groups and `state` through the optimizer's own load_state_dict."""
        if own is None or not has_own_state(optimizer):
            return []
        tree = self._put(None, own)
        links = _link_groups(optimizer)
        try:
            live = optimizer.state_dict()
            if not self._takes_settings(optimizer):
                _keep_settings(optimizer, tree, live)
            _keep_later_groups(tree, live)
            optimizer.load_state_dict(tree)
        except Exception as error:  # third-party class; groups and `state` are still restored
            if self._strict:
                raise
            return [f"{type(optimizer).__name__} could not load its own state: {error}"]
        finally:
            _relink_groups(links)
        return []

    def _put_optimizer(
        self, optimizer: torch.optim.Optimizer, kept: OptimizerState, resized: Mapping[int, Tensor]
    ) -> None:
        """Restore groups and state without torch's load_state_dict, which casts state to the parameters' dtype."""
        # Groups that were added since have no saved one, and stay as they are.
        for group, saved in zip(optimizer.param_groups, kept.groups):
            for key in [key for key in (group.keys() | saved.keys()) - {"params"} if self._goes_back(optimizer, key)]:
                if key in saved:
                    group[key] = self._put(group.get(key), saved[key])
                else:
                    del group[key]
        # A resized parameter keeps its present state, which fits; the saved one does not.
        kept_keys = {_identify(key) for key, _ in kept.state} | resized.keys()
        state: dict[Any, Any] = optimizer.state
        for key in [key for key in state if _identify(key) not in kept_keys]:
            del state[key]
        dtypes = {id(p): self._hosts[slot.index].dtype for p, slot in self._state.parameters}
        for key, saved in kept.state:
            if id(key) not in resized:
                put = self._put(state.get(key), saved)
                then = dtypes.get(id(key))
                state[key] = put if then is None or then == key.dtype else _cast(put, then, key.dtype)

    def _goes_back(self, optimizer: torch.optim.Optimizer, key: str) -> bool:
        return self._takes_settings(optimizer) or not is_setting(optimizer, key)

    def _takes_settings(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._settings is None or id(optimizer) in self._settings

    # --- extras -----------------------------------------------------------------------------------------------------

    def _put_extra(self, name: str, extra: Any, saved: Any) -> list[str]:
        # The fields that state/collect.py took: GradScaler.state_dict() would have waited for the device.
        if isinstance(extra, torch.amp.GradScaler):
            for field, value in saved.items():
                setattr(extra, field, self._put(getattr(extra, field), value))
            return []
        tree = self._fill(saved) if isinstance(extra, nn.Module) else self._put(None, saved)
        if isinstance(extra, nn.Module):  # copies into its own tensors, so the host's can be passed directly
            if not self._strict and _shapes(extra.state_dict()) != _shapes(tree):
                return [f"the {name} has different tensors now"]
            extra.load_state_dict(tree)
            return []
        try:
            extra.load_state_dict(tree)
        except Exception as error:  # the user's own class
            if self._strict:
                raise
            return [f"the {name} could not load its state: {error!r}"]
        return []

    def _fill(self, saved: Any) -> Any:
        """Return the tree with the host's own tensors filled in."""
        if isinstance(saved, Slot):
            host = self._hosts[saved.index]
            return host if saved.mesh is None else saved.mesh.make_whole(host.to(self._devices[saved.index]))
        if isinstance(saved, AsItIs):
            return saved.value
        if isinstance(saved, dict):
            made = copy.copy(saved)
            for key, item in saved.items():
                made[key] = self._fill(item)
            return made
        if isinstance(saved, list | tuple | deque):
            return remake(saved, [self._fill(item) for item in saved])
        return copy.deepcopy(saved, self._memo)


Links = list[tuple[torch.optim.Optimizer, list[dict[str, Any]], list[dict[str, Any]]]]


def _link_groups(optimizer: torch.optim.Optimizer) -> Links:
    """Return the groups of an optimizer and of those it wraps: wrapper, inner optimizer and schedulers share them."""
    inner = [thing for thing in vars(optimizer).values() if isinstance(thing, torch.optim.Optimizer)]
    return [(one, one.param_groups, list(one.param_groups)) for one in (optimizer, *inner)]


def _relink_groups(links: Links) -> None:
    """Copy new groups into the old dicts: loading creates new ones, which a wrapper and its inner one don't share."""
    for optimizer, groups, known in links:
        loaded = optimizer.param_groups
        if len(loaded) != len(known):
            continue
        for old, new in zip(known, loaded):
            if new is not old:
                contents = dict(new)
                old.clear()
                old.update(contents)
        groups[:] = known
        if optimizer.param_groups is not groups:
            with contextlib.suppress(AttributeError):  # a wrapper's property, which follows its inner optimizer
                optimizer.param_groups = groups


def _keep_settings(optimizer: torch.optim.Optimizer, saved: Any, live: Any) -> None:
    """Write the settings of the live state_dict into the saved one, wherever both have groups."""
    if not isinstance(saved, dict) or not isinstance(live, Mapping):
        return
    for key in saved.keys() & live.keys():
        if key == "param_groups":
            for group, now in zip(saved[key], live[key]):
                group |= {name: now[name] for name in group.keys() & now.keys() if is_setting(optimizer, name)}
        else:
            _keep_settings(optimizer, saved[key], live[key])


def _keep_later_groups(saved: Any, live: Any) -> None:
    """Keep groups added since, without state: `load_state_dict` refuses a different number of groups."""
    if not isinstance(saved, dict) or not isinstance(live, Mapping):
        return
    for key in saved.keys() & live.keys():
        if key == "param_groups":
            saved[key] = [*saved[key], *live[key][len(saved[key]) :]]
        else:
            _keep_later_groups(saved[key], live[key])


def _identify(key: Any) -> Any:
    """Return a comparable key: parameters compare by identity, every other key by value."""
    return id(key) if isinstance(key, Tensor) else ("key", key)


def _cast(state: Any, then: torch.dtype, now: torch.dtype) -> Any:
    """Cast the state of a parameter whose dtype has changed: tensors that had its old dtype get its new one."""
    if not isinstance(state, dict):
        return state
    return {k: v.to(now) if isinstance(v, Tensor) and v.dtype == then else v for k, v in state.items()}


def _shapes(state: Any) -> dict[Any, Any]:
    return {name: value.shape for name, value in state.items() if isinstance(value, Tensor)}
