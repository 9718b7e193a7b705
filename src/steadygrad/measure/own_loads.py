"""OwnLoadWatch: `load_state_dict` with tensors that are the module's own -> an IdleLoad: the load changes nothing.

`state_dict()` returns the weights themselves, not a copy. So `best = model.state_dict()` is the model as it is when it
is loaded again, and `target.load_state_dict(target.state_dict())` copies a network to itself. Two cases are certain:

- a state of the model in training that was taken before the last optimizer step or the last load, if nothing was
  written into it since (a state may be changed in place, and loading it afterwards is then only superfluous);
- a network that no optimizer holds and that loads itself again and again, its weights being the same each time.

One comparison of addresses a load; 64 weights are copied after a step while the program keeps a state, and only a load
that looks idle reads them. Reads only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from steadygrad.facts.program import IdleLoad
from steadygrad.measure.held import find_held
from steadygrad.measure.rows import is_readable
from steadygrad.measure.suspicious_ops import find_caller
from steadygrad.measure.torch_calls import listen_to_states
from steadygrad.state.modules import list_parameters
from steadygrad.state.trained_parameters import TrainedParameters

SAMPLE = 64
NUM_LOADS = 3
"""Loads of itself, with steps between them, that show a network to be copied to itself."""


@dataclass(slots=True)
class _Loads:
    num: int
    step: int
    sample: Tensor


class OwnLoadWatch:
    """Listens from the first step on; calls `report` within the load that it is about."""

    report: Callable[[IdleLoad], None] | None = None

    def __init__(self, trained: TrainedParameters) -> None:
        own = {id(p) for _, p in list_parameters(trained.model)}
        mine = [p for _, p in trained.named if id(p) in own and is_readable(p) and p.numel()]
        # The last one: first layers may be frozen.
        self._marked = mine[-1] if mine else None
        self._taken: Any = WeakIdKeyDictionary()
        """Tensors of a state -> when it was taken: version of the marked parameter, and step."""
        self._loads: weakref.WeakKeyDictionary[nn.Module, _Loads] = weakref.WeakKeyDictionary()
        self._version, self._step = -1, -1
        self._after: Tensor | None = None  # some weights after the last step or load, while a state is kept

    def end_step(self, step: int) -> None:
        """An optimizer step was made."""
        if self._marked is None:
            return
        if self._step < 0:
            listen_to_states(self)
        self._step = step
        self._note_weights(self._marked)

    def after_state(self, state: Mapping[str, Any]) -> None:
        """Note when a state of the model was taken."""
        mine = self._find_marked(state)
        if mine is not None and self._marked is not None:
            self._taken[mine] = (self._marked._version, self._step)

    def before_load(self, module: nn.Module, given: Mapping[str, Any]) -> None:
        """Judge a load."""
        if self.report is None or not _is_own(module, given):
            return
        mine = self._find_marked(given)
        is_idle = self._is_outdated(mine) if mine is not None else self._is_repeated(module)
        if is_idle:
            where, name = find_caller(), type(module).__name__
            self.report(IdleLoad(step=self._step, where=where, module=name, is_earlier=mine is not None))

    def after_load(self) -> None:
        """The weights may have been replaced."""
        if self._marked is not None:
            self._note_weights(self._marked)

    def _note_weights(self, marked: Tensor) -> None:
        self._version = marked._version
        self._after = _sample(marked).clone() if len(self._taken) else None

    def _find_marked(self, state: Mapping[str, Any]) -> Tensor | None:
        """Return the tensor of a state that is the marked parameter."""
        mine = self._marked
        tensors = (value for value in state.values() if isinstance(value, Tensor))
        return None if mine is None else next((one for one in tensors if _is_same(one, mine)), None)

    def _is_outdated(self, mine: Tensor) -> bool:
        """Whether the optimizer or a load has moved the weights since the state was taken, and nothing else has."""
        taken, after, marked = self._taken.get(mine), self._after, self._marked
        if taken is None or after is None or marked is None or marked._version != self._version:
            return False
        version, step = taken
        has_moved = bool(version < self._version or step < self._step)
        # What is written by `.data` has no version.
        return has_moved and torch.equal(_sample(marked), after)

    def _is_repeated(self, module: nn.Module) -> bool:
        """Whether a network that nothing else changes was often loaded with itself."""
        first = next((p for p in module.parameters() if p.is_floating_point() and p.numel()), None)
        if first is None:
            return False
        before = self._loads.get(module)
        if before is None:
            self._loads[module] = _Loads(1, self._step, _sample(first).clone())
        elif self._step > before.step and before.num:
            is_same = torch.equal(_sample(first), before.sample)
            # 0 for good: the program changes it by other means, as an average that is moved in place.
            before.num, before.step = before.num + 1 if is_same else 0, self._step
            if before.num == NUM_LOADS:
                held = find_held()
                return not any(id(p) in held for p in module.parameters())
        return False


def _is_own(module: nn.Module, given: Mapping[str, Any]) -> bool:
    """Return whether all tensors of a state are those of the module."""
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    places = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    own = dict[str, Tensor](places)
    return any(value.numel() for value in tensors.values()) and all(
        name in own and _is_same(value, own[name]) for name, value in tensors.items()
    )


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same memory."""
    return (
        one.device == other.device
        and one.shape == other.shape
        and is_readable(one)
        and is_readable(other)
        and one.data_ptr() == other.data_ptr()
        and one.stride() == other.stride()
    )


def _sample(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten()[:SAMPLE]
