"""What `load_state_dict` did to a module: how much matched, and a sample of what was loaded.

Recorded as soon as steadygrad and torch are both imported, because weights are loaded before a Guard is created.
A record is a few strings and up to 64 elements of each tensor, queued without a wait; it lives as long as its module.
Models are read, never changed; the call, its result and its errors are torch's own.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.facts import Load
from steadygrad.measure.rows import is_readable
from steadygrad.measure.suspicious_ops import find_caller
from steadygrad.state.modules import list_modules

SAMPLE = 64
"""Most elements of a tensor to keep."""
MAX_SAMPLED = 256
"""Most tensors of a module to sample."""


@dataclass(frozen=True, slots=True)
class _Record:
    where: str
    num_given: int
    num_matched: int
    example: str
    wanted: str
    num_missing: int
    num_renamed: int
    samples: dict[str, Tensor]
    number: int


_records: weakref.WeakKeyDictionary[nn.Module, _Record] = weakref.WeakKeyDictionary()
_trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that have been trained: what is loaded into them later may be put back on purpose, as between two folds."""
_later: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""Where such modules were loaded last."""
_num_records = 0
_is_installed = False
_depth = 0


def install() -> None:
    """Record the calls of `Module.load_state_dict` from now on."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    load = nn.Module.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        global _depth
        # Loads inside a load, as by hooks or modules that pass parts on, are not recorded by themselves.
        _depth += 1
        try:
            result = load(self, state_dict, *args, **kwargs)
        finally:
            _depth -= 1
        if not _depth and not torch.compiler.is_compiling():
            with contextlib.suppress(Exception):  # the load itself has worked
                _record(self, state_dict)
        return result

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _record(module: nn.Module, given: Mapping[str, Any]) -> None:
    global _num_records
    if module in _trained:
        _later[module] = find_caller()
        return
    # keep_vars: Parameters as such, by which _is_weight knows them.
    own = module.state_dict(keep_vars=True)
    tensors = [key for key, value in given.items() if isinstance(value, Tensor)]
    matched = [key for key in tensors if key in own]
    _num_records += 1
    _records[module] = _Record(
        where=find_caller(),
        num_given=len(tensors),
        num_matched=len(matched),
        example=next((key for key in tensors if key not in own), ""),
        wanted=next((key for key in own if key not in given), ""),
        num_missing=sum(key not in given for key in own),
        num_renamed=_count_renamed(own, given),
        samples={key: _sample(own[key]) for key in matched[:MAX_SAMPLED] if _is_weight(own[key])},
        number=_num_records,
    )


def _count_renamed(own: Mapping[str, Any], given: Mapping[str, Any]) -> int:
    """Return how many tensors of the module were given under its name for them with a prefix more, or less."""
    spare = {key: value.shape for key, value in given.items() if isinstance(value, Tensor) and key not in own}
    longer = {(ending, shape) for key, shape in spare.items() for ending in _list_endings(key)}
    missing = [(key, value.shape) for key, value in own.items() if key not in given and isinstance(value, Tensor)]
    return sum(
        (key, shape) in longer or any(spare.get(ending) == shape for ending in _list_endings(key))
        for key, shape in missing
    )


def _list_endings(key: str) -> Iterator[str]:
    """Yield a key without its first parts."""
    parts = key.split(".")
    yield from (".".join(parts[i:]) for i in range(1, len(parts)))


def _is_weight(tensor: Any) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.dim() > 1 and is_readable(tensor) and tensor.is_floating_point()


@torch.no_grad()
def _sample(tensor: Tensor) -> Tensor:
    """Return some elements of a tensor, spread over it, as a copy."""
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].clone()


def take_loads(model: nn.Module) -> list[Load]:
    """Return the last load of the model and of each of its parts, unless a later one brought them weights.

    Call it before the first step: reads a few numbers from the device for each load, and forgets them.
    """
    found = _find_loads(model)
    for _, module in list_modules(model):
        _records.pop(module, None)
        _trained.add(module)
    return found


def find_later_load(model: nn.Module) -> str:
    """Return file:line of the last load of a model in training; empty if there was none."""
    return _later.get(model, "")


def _find_loads(model: nn.Module) -> list[Load]:
    names = {module: name for name, module in list_modules(model)}
    found = [(names[module], record) for module, record in list(_records.items()) if module in names]
    return [
        Load(
            where=record.where,
            module=name,
            num_given=record.num_given,
            num_matched=record.num_matched,
            example=record.example,
            wanted=record.wanted,
            num_missing=record.num_missing,
            num_renamed=record.num_renamed,
            kept=_correlate(model.get_submodule(name), record.samples),
        )
        for name, record in found
        if not any(_is_made_up_for(name, record, other, later) for other, later in found)
    ]


def _is_made_up_for(name: str, record: _Record, other: str, later: _Record) -> bool:
    """Whether a later load filled the same part, one around it or one inside it."""
    is_related = not name or not other or f"{other}.".startswith(f"{name}.") or f"{name}.".startswith(f"{other}.")
    return later.number > record.number and later.num_matched > 0 and is_related


@torch.no_grad()
def _correlate(module: nn.Module, samples: Mapping[str, Tensor]) -> float | None:
    """Return the correlation of the loaded elements with those that are there now; None if there is nothing to say.

    Nor is there where some layers of a class are as loaded and others are not: an initialisation by class, which is
    what overwrites weights by mistake, would have left none of them out. Those were chosen.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    kept: set[type] = set()
    changed: set[type] = set()
    for key, then, now in _pair(module, samples):
        (kept if torch.equal(then, now) else changed).add(type(module.get_submodule(key.rpartition(".")[0])))
        if then.std() > 0 and now.std() > 0:
            pairs.append(((then - then.mean()) / then.std(), (now - now.mean()) / now.std()))
    if not pairs or kept & changed:
        return None
    then, now = (torch.cat(side) for side in zip(*pairs))
    product = torch.dot(then, now) / (then.norm() * now.norm())
    return float(product) if torch.isfinite(product) else None


def _pair(module: nn.Module, samples: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each sampled tensor, its elements as they were loaded, and those that are there now."""
    own = dict(module.named_parameters(remove_duplicate=False))
    for key, then in samples.items():
        parameter = own.get(key)
        if parameter is None or not is_readable(parameter):
            continue
        now = _sample(parameter)
        if now.shape == then.shape and then.numel() > 1:
            yield key, then.double().cpu(), now.double().cpu()
