"""Capture: training state -> a tree of plain values with numbered tensors.

The Collector walks parameters, buffers, optimizers and extras without copying a tensor or waiting for a device; where
the numbered tensors are copied to is the business of `snapshots.py`, and `restore.py` puts them back. An optimizer is
taken as it is: its groups, its `state` under any key, and what a `state_dict()` of its own adds. What cannot be copied
(a lock, an open file) is left out and named, never an error.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from steadygrad.state.modules import list_modules, list_parameters
from steadygrad.state.shards import MeshPlace, take_local
from steadygrad.state.tree import remake

ATOMS = frozenset({int, float, bool, str, bytes, type(None)})
"""Values that cannot change: a copy is the value itself."""
PARAMETER, BUFFER = "parameter ", "buffer "
"""Begins the name of a parameter among the sources."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in a tree where a tensor was. Of a DTensor the part of this rank is kept, and how to make it whole."""

    index: int
    mesh: MeshPlace | None = None


@dataclass(frozen=True, slots=True)
class AsItIs:
    """Stands in a tree for a value that cannot be copied: putting back leaves the very object there."""

    value: Any


@dataclass(slots=True)
class Source:
    """A tensor to copy. `late`: it cannot change before the next optimizer step, so the side stream may copy it."""

    tensor: Tensor
    late: bool
    name: str = ""
    """Name to report if it is not finite; empty if it is not checked."""
    must_be_finite: bool = True
    """False if it may hold non-finite values by design, such as a mask of -inf."""
    fits: bool = field(init=False)
    """Whether a copy of it can live in a block of bytes; sparse and other unusual tensors cannot."""
    is_looked_at: bool = field(init=False)
    """Whether it can be other than finite, and has a name to report."""
    layout: tuple[Any, ...] = field(init=False)
    """Dtype, shape and strides; empty if it does not fit."""
    num_bytes: int = field(init=False)
    """Size of its elements; 0 if it does not fit."""

    def __post_init__(self) -> None:
        tensor = self.tensor
        # Exactly Tensor, as detach() makes of a Parameter; a subclass may keep its numbers elsewhere.
        plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
        self.fits = plain and tensor.numel() > 0
        self.is_looked_at = bool(self.name) and self.fits and (tensor.is_floating_point() or tensor.is_complex())
        self.layout = (tensor.dtype, tensor.shape, tensor.stride()) if self.fits else ()
        self.num_bytes = tensor.numel() * tensor.element_size() if self.fits else 0


class Collector:
    """Walks state, numbers its tensors and copies the plain values. A tensor met twice is numbered once."""

    def __init__(self, shared: Iterable[object]) -> None:
        self.sources: list[Source] = []
        self.owner = ""
        """Name of the object whose state is being walked."""
        self.left_out: list[str] = []
        """What could not be copied, in a few words each."""
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # an id is a tensor's own only while it lives
        self._memo: dict[int, Any] = {id(thing): thing for thing in shared}  # deepcopy leaves these as they are

    def begin_with(self, template: Template) -> None:
        """Take over the tensors that a template has numbered."""
        # Copies: the extras that this walk adds must not get into the template.
        self.sources, self._numbers = list(template.sources), dict(template.numbers)
        self._alive = list(template.alive)

    def make_template(self, signature: list[int], state: State) -> Template:
        """Return what a later walk over the same tensors may reuse; extras are walked again each time."""
        return Template(
            signature=signature,
            sources=list(self.sources),
            numbers=dict(self._numbers),
            alive=list(self._alive),
            parameters=state.parameters,
            buffers=state.buffers,
            states=[optimizer.state for optimizer in state.optimizers],
        )

    def add(self, tensor: Tensor, *, late: bool, name: str = "", must_be_finite: bool = True) -> Slot:
        """Return the number of a tensor."""
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.sources)
            # detach() shares memory: nothing is copied yet, and a late copy sees what was written in between.
            self.sources.append(Source(take_local(tensor).detach(), late, name, must_be_finite))
            self._alive.append(tensor)
        return Slot(number, MeshPlace.of(tensor))

    def walk(self, value: Any, *, late: bool, name: str = "", must_be_finite: bool = True) -> Any:
        """Return `value` with slots for its tensors; dicts, lists and tuples are looked into."""
        kind = type(value)
        if kind in ATOMS:  # a detector's history is thousands of them, and deepcopy takes 1 µs for each
            return value
        if (kind is dict and ATOMS.issuperset(map(type, value.values()))) or (
            kind is list and ATOMS.issuperset(map(type, value))
        ):
            return value.copy()
        settings = {"late": late, "must_be_finite": must_be_finite}
        if isinstance(value, Tensor):
            return self.add(value, name=name, **settings)
        if isinstance(value, dict):
            made = copy.copy(value)  # keeps its kind, and the attributes that a module's state_dict carries
            for key, item in value.items():
                if type(item) not in ATOMS:
                    made[key] = self.walk(item, name=name and f"{name}.{key}", **settings)
            return made
        if isinstance(value, list | tuple | deque):
            return remake(value, [self.walk(item, name=name, **settings) for item in value])
        try:
            # One memo for everything: objects that share a part share its copy too.
            return copy.deepcopy(value, self._memo)
        except Exception as error:  # whatever a user's __deepcopy__ or __reduce__ raises
            self.left_out.append(f"a {type(value).__name__} of the {self.owner} ({error})")
            return AsItIs(value)


@dataclass(slots=True, kw_only=True)
class OptimizerState:
    """One optimizer, with slots for tensors."""

    groups: list[dict[str, Any]]
    """Its groups without `params`."""
    state: list[tuple[Any, Any]]
    """Its `state` as (key, value); a key is a parameter, or whatever its class uses beside parameters."""
    own: Any = None
    """What its own `state_dict()` returned; None where torch's `state_dict` says all that there is."""


@dataclass(slots=True, kw_only=True)
class State:
    """Everything that is put back, with slots for tensors. Parameters and modules are held as they are."""

    parameters: list[tuple[Tensor, Slot]]
    buffers: list[tuple[nn.Module, str, Slot | None]]
    optimizers: list[OptimizerState]
    extras: dict[str, Any]


@dataclass(slots=True, kw_only=True, eq=False)
class Template:
    """What was found the time before: the same tensors need not be walked again, which takes 10 µs for each."""

    signature: list[int]
    sources: list[Source]
    numbers: dict[int, int]
    alive: list[Tensor]
    parameters: list[tuple[Tensor, Slot]]
    buffers: list[tuple[nn.Module, str, Slot | None]]
    states: list[list[tuple[Any, Any]]]


def sign_state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[int] | None:
    """Return which tensors make up the state, and where they lie; None where they are not all plain ones."""
    found: list[int] = []
    for _, module in list_modules(model):
        for held in (module._parameters, module._buffers):
            for tensor in held.values():
                if not _sign(tensor, found):
                    return None
    for optimizer in optimizers:
        if has_own_state(optimizer):
            return None
        for group in optimizer.param_groups:
            if not all(_sign(parameter, found) for parameter in group["params"]):
                return None
        for key, state in optimizer.state.items():
            found.append(id(key))
            # A state that is not all tensors, such as a step counted in Python, must be read each time: no template.
            if not isinstance(state, dict) or not all(_sign(value, found) for value in state.values()):
                return None
    return found


def _sign(value: Any, found: list[int]) -> bool:
    if value is None:
        found.append(0)
        return True
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_meta:
        return False
    # The template holds its tensors, so no id is reused. The address reveals `p.data = ...`, which keeps the id.
    found += (id(value), value.data_ptr(), value.numel())
    return True


def settle_shards(model: nn.Module) -> None:
    """Let go of weights that FSDP2 has gathered: a forward without backward leaves them, and they outlive a restore."""
    for _, module in list_modules(model):
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            # This order: during a forward, reshard() does nothing where FSDP2 has reshard_after_forward=False.
            _end_forward(module)
            module.reshard()  # type: ignore[operator]


def _end_forward(module: Any) -> None:
    """Bring shards out of a forward that raised: they would keep what was gathered, and take it for the next one's."""
    with contextlib.suppress(AttributeError):  # another version of torch
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None and group._training_state.name != "IDLE":
            if group._all_gather_result is not None:
                group.wait_for_unshard()
            group._training_state = type(group._training_state).IDLE


def has_values(tensor: Tensor) -> bool:
    """Whether there is something to copy: a lazy parameter has no shape yet, one on meta has no memory."""
    return not is_lazy(tensor) and not tensor.is_meta


def collect_state(
    collector: Collector,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    extras: Mapping[str, Any],
    template: Template | None = None,
) -> State:
    """Return everything that a step can change, with its tensors numbered; those of a `template` as they were."""
    if template is not None:
        collector.begin_with(template)
        return State(
            parameters=template.parameters,
            buffers=template.buffers,
            optimizers=[_collect_optimizer(o, collector, {}, s) for o, s in zip(optimizers, template.states)],
            extras=_collect_extras(extras, collector),
        )
    settle_shards(model)
    named = list_parameters(model)
    names = {id(p): name for name, p in named}
    held = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    unique = {id(p): p for p in (*(p for _, p in named), *held)}
    parameters = [
        (p, collector.add(p, late=True, name=PARAMETER + names.get(i, "(not of the model)")))
        for i, p in unique.items()
        if has_values(p)
    ]
    return State(
        parameters=parameters,
        buffers=list(_collect_buffers(collector, model)),
        optimizers=[_collect_optimizer(optimizer, collector, names) for optimizer in optimizers],
        extras=_collect_extras(extras, collector),
    )


def find_uncopied(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], extras: Mapping[str, Any]
) -> list[str]:
    """Return what of a training cannot be copied, in a few words each; copies no tensor."""
    collector = Collector([model, *optimizers, *extras.values()])
    collect_state(collector, model, optimizers, extras)
    return collector.left_out


def _collect_buffers(collector: Collector, model: nn.Module) -> Iterator[tuple[nn.Module, str, Slot | None]]:
    for path, module in list_modules(model):
        for name, buffer in module._buffers.items():
            label = f"{BUFFER}{path}.{name}" if path else f"{BUFFER}{name}"
            if buffer is None:
                yield module, name, None
            elif has_values(buffer):
                # Not late: a forward may write it before the next optimizer step.
                yield module, name, collector.add(buffer, late=False, name=label, must_be_finite=False)


def _collect_optimizer(
    optimizer: torch.optim.Optimizer,
    collector: Collector,
    names: Mapping[int, str],
    state: list[tuple[Any, Any]] | None = None,
) -> OptimizerState:
    collector.owner = type(optimizer).__name__
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    if state is None:
        state = [
            (key, collector.walk(value, late=True, name=f"optimizer state of {names.get(id(key), 'a parameter')}"))
            for key, value in optimizer.state.items()
        ]
    return OptimizerState(
        # Not late: torch's schedulers write a learning rate that is a tensor in place, between two optimizer steps.
        groups=[collector.walk(group, late=False) for group in groups],
        state=state,
        own=_collect_own(optimizer, collector) if has_own_state(optimizer) else None,
    )


def has_own_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its class saves or loads by itself: Lookahead's slow weights are in no `state` of torch's."""
    kind, base = type(optimizer), torch.optim.Optimizer
    replaced = {"state_dict", "load_state_dict"} & vars(optimizer).keys()
    return bool(replaced) or kind.state_dict is not base.state_dict or kind.load_state_dict is not base.load_state_dict


def _collect_own(optimizer: torch.optim.Optimizer, collector: Collector) -> Any:
    try:
        return collector.walk(optimizer.state_dict(), late=True)
    except Exception as error:  # ZeroRedundancyOptimizer's must be gathered before, for one
        collector.left_out.append(f"the state_dict() of the {type(optimizer).__name__} ({error})")
        return None


SCALER_FIELDS = ("_scale", "_growth_tracker", "_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval")


def _collect_extras(extras: Mapping[str, Any], collector: Collector) -> dict[str, Any]:
    collected = {}
    for name, extra in extras.items():
        collector.owner = name
        try:
            collected[name] = _collect_extra(name, extra, collector)
        except Exception as error:  # the user's own state_dict(): the training goes on without it
            collector.left_out.append(f"the state of the {name} ({error!r})")
    return collected


def _collect_extra(name: str, extra: Any, collector: Collector) -> Any:
    """Return its state_dict. A GradScaler's would wait for the device, so its fields are read instead."""
    if isinstance(extra, torch.amp.GradScaler):
        return {key: collector.walk(getattr(extra, key), late=False) for key in SCALER_FIELDS if hasattr(extra, key)}
    if isinstance(extra, nn.Module):
        return collector.walk(extra.state_dict(), late=True, name=name, must_be_finite=False)
    if getattr(extra, "gives_copies", False):  # our own histories: hundreds of lists of plain numbers
        return extra.state_dict()
    return collector.walk(extra.state_dict(), late=False)
