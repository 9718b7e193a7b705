"""ModelWatch: how model and optimizers fit together, looked at again and again -> ModelScans.

Before the first step: what was loaded, what is frozen, which weights are equal. With each periodic scan: parameters
that became trainable, were added or replaced and that no optimizer holds; tied weights that came apart. Whenever the
program saves: whether the file holds the weights from before the first step. Whenever an AveragedModel of this model,
or a copy (`copies.py`), is called: whether it was ever updated. Names and flags are read on the host; the first scan
and a save read a few numbers from the device, later scans of a healthy run none.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from steadygrad.facts import Misspelt, ModelScan
from steadygrad.measure.adapters import has_adapters
from steadygrad.measure.copies import CopyWatch
from steadygrad.measure.equal_units import EqualUnits
from steadygrad.measure.groups import find_doubled, find_misspelt, find_not_frozen
from steadygrad.measure.held import find_held
from steadygrad.measure.loads import take_loads
from steadygrad.measure.partial_saves import PartialSaves, is_drawn
from steadygrad.measure.rows import is_readable
from steadygrad.measure.torch_calls import BackwardCall, ClipCall, listen, stop_listening
from steadygrad.measure.transfer import Transfer
from steadygrad.state.code_names import list_names
from steadygrad.state.modules import list_modules, list_parameters
from steadygrad.state.trained_parameters import TrainedParameters

SAMPLE, NUM_SAMPLED = 256, 8
"""Elements of a parameter, and parameters, that are compared with what the program saves."""
FEWEST_STEPS = 10
"""Steps after which a save must hold other weights than the first ones."""
MOST = 0.5
"""Share of the model's elements that must be frozen before a frozen last layer is suspicious."""
FREEZING = ("requires_grad", "requires_grad_")
MAX_DEPTH = 3
"""Nested dicts of a saved object that are searched for weights."""


class ModelWatch:
    """Call `begin` before the first step, and `scan` periodically."""

    def __init__(self, trained: TrainedParameters, *, transfer: Transfer | None = None) -> None:
        self._trained, self._model = trained, trained.model
        self._untrained: frozenset[str] = frozenset()
        self._foreign: frozenset[int] = frozenset()
        self._pairs: list[tuple[str, str]] = []
        self._first: dict[str, Tensor] = {}
        self._optimizers = list(trained.optimizers)
        self._misspelt: list[Misspelt] = []
        self._stale_saves: list[str] = []
        self._has_good_save = False
        self._last_save = 0
        self._averages: weakref.WeakSet[AveragedModel] = weakref.WeakSet()
        self._has_idle_average = False
        self._copies, self._partial_saves = CopyWatch(trained.model), PartialSaves(trained.model)
        self._equal_units = EqualUnits(trained.model, [p for _, p in trained.named], transfer=transfer)
        self.num_steps = 0

    def count_step(self) -> None:
        """A step was made."""
        self.num_steps = self._copies.num_steps = self.num_steps + 1

    def begin(self) -> ModelScan:
        """Look at the model before its first optimizer step."""
        model = self._model
        own = {id(p) for _, p in list_parameters(model)}
        self._untrained = frozenset(name for name, p in self._list_unheld())
        self._foreign = frozenset(id(p) for _, p in self._trained.named if id(p) not in own)
        self._pairs = _find_twins(model)
        self._first = {name: _sample(p) for name, p in self._list_sampled()}
        self._misspelt = find_misspelt(self._optimizers)
        self._partial_saves.begin()
        self._equal_units.begin()
        listen(self)
        stop_listening(self)  # to all but saves and averages
        head, share = _find_frozen_head(model)
        return ModelScan(
            step=-1,
            loads=tuple(take_loads(model)),
            not_frozen=tuple(_find_unkept_promises(model)),
            freed_by_flag=tuple(find_not_frozen(self._trained)),
            doubled=tuple(find_doubled(self._trained)),
            frozen_head=head,
            frozen_share=share,
            tables=tuple(name for kind in (nn.Embedding, nn.EmbeddingBag) for name, _ in _list_weights(model, kind)),
        )

    def close(self) -> None:
        """Hear of no more saves and averages."""
        stop_listening(self, to_saves=True)
        self._copies.close()

    def scan(self, step: int) -> ModelScan:
        """Look again, after `step`."""
        with contextlib.suppress(Exception):  # a copy may be half-built or lazy: the rest of the scan goes on
            self._copies.search(self._first, _sample)
        own = {id(p) for _, p in list_parameters(self._model)}
        gone = [name for name, p in self._trained.named if id(p) not in own and id(p) not in self._foreign]
        new = {name: p for name, p in self._list_unheld() if name not in self._untrained}
        if new:
            held = find_held()
            new = {name: p for name, p in new.items() if id(p) not in held}
        return ModelScan(
            step=step,
            unfrozen=tuple(new),
            replaced=tuple(gone),
            came_apart=tuple(pair for pair in self._pairs if self._differs(*pair)),
            equal_units=self._equal_units.find(),
            misspelt=tuple(one for one in find_misspelt(self._optimizers) if one in self._misspelt),
            stale_save=self._stale_saves[-1] if len(self._stale_saves) > 1 and not self._has_good_save else "",
            idle_average=self._has_idle_average,
            idle_copy=self._copies.idle or ("", ""),
            stale_statistics=self._copies.stale or ("", ""),
            partial_save=self._partial_saves.find(),
            num_steps=self.num_steps,
        )

    def _list_unheld(self) -> Iterator[tuple[str, Tensor]]:
        """Yield trainable parameters that none of the watched optimizers holds."""
        held = {id(p) for o in self._trained.optimizers for group in o.param_groups for p in group["params"]}
        for name, parameter in list_parameters(self._model):
            if parameter.requires_grad and id(parameter) not in held:
                yield name, parameter

    def _differs(self, one: str, other: str) -> bool:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        a, b = parameters.get(one), parameters.get(other)
        return a is not None and b is not None and a is not b and not torch.equal(a, b)

    def before_average(self, average: AveragedModel) -> None:
        """Note that an average was called that holds the weights it was made with."""
        if self.num_steps < FEWEST_STEPS or average.training or average in self._averages:
            return
        self._averages.add(average)
        if type(average.module) is type(self._model):
            self._has_idle_average |= int(average.n_averaged) == 0  # a host read, once for each average

    # --- saves --------------------------------------------------------------------------------------------------------

    def before_backward(self, loss: Tensor) -> None:
        """Backwards are heard elsewhere."""

    def after_backward(self, call: BackwardCall) -> None:
        """Their ends too."""

    def before_clip(self, call: ClipCall) -> None:
        """And so are clips."""

    def after_save(self, saved: Any, where: str) -> None:
        """Compare saved weights with the first ones and with the present ones, and their names with the model's."""
        self._partial_saves.note(_find_states(saved, MAX_DEPTH), self.num_steps, where)
        if self.num_steps < FEWEST_STEPS or self._has_good_save or not self._first:
            return
        for state in _find_states(saved, MAX_DEPTH):
            stored = {name: state[key] for name in self._first for key in (name, f"module.{name}") if key in state}
            if len(stored) < len(self._first):
                continue
            now = dict(self._list_sampled())
            if not all(_sample(stored[name]).shape == first.shape for name, first in self._first.items()):
                continue
            is_first = all(_is_equal(_sample(stored[name]), first) for name, first in self._first.items())
            has_moved = any(not _is_equal(_sample(now[name]), self._first[name]) for name in now)
            if not is_first:
                self._has_good_save = True
            elif has_moved and self.num_steps >= self._last_save + FEWEST_STEPS:
                self._stale_saves.append(where)
                self._last_save = self.num_steps

    def _list_sampled(self) -> Iterator[tuple[str, Tensor]]:
        trained = [(n, p) for n, p in self._trained.named if is_readable(p) and p.numel() and p.is_floating_point()]
        yield from sorted(trained, key=lambda pair: -pair[1].numel())[:NUM_SAMPLED]


# --- what is read once ------------------------------------------------------------------------------------------------


def _find_twins(model: nn.Module) -> list[tuple[str, str]]:
    """Return embeddings and output layers with equal values that are not the same parameter: a tie that was lost."""
    embeddings, linears = _list_weights(model, nn.Embedding), _list_weights(model, nn.Linear)
    return [
        (one, other)
        for one, a in embeddings
        for other, b in linears
        if a is not b and a.shape == b.shape and a.device == b.device and is_readable(a) and is_readable(b)
        # Weights that are all one number (zeros, ones) are equal by chance.
        and a.data_ptr() != b.data_ptr() and torch.equal(a, b) and bool((a != a.flatten()[0]).any())
    ]  # fmt: skip


def _list_weights(model: nn.Module, kind: type[nn.Module]) -> list[tuple[str, Tensor]]:
    """Return the weights of such layers that are parameters: reading a parametrized one runs code, as spectral norm."""
    weights = [(f"{n}.weight", m._parameters.get("weight")) for n, m in list_modules(model) if isinstance(m, kind)]
    return [(name, weight) for name, weight in weights if weight is not None]


def _find_frozen_head(model: nn.Module) -> tuple[str, float]:
    """Return the last layer, if it is frozen with the values that torch draws for a new one; and the frozen share."""
    parameters = list_parameters(model)
    frozen = sum(p.numel() for _, p in parameters if not p.requires_grad)
    share = frozen / max(1, sum(p.numel() for _, p in parameters))
    layers = [(n, m) for n, m in list_modules(model) if isinstance(m, nn.Linear)]
    if not layers or share <= MOST:
        return "", share
    name, head = layers[-1]
    is_last = parameters[-1][0].rpartition(".")[0] == name
    weight = head._parameters.get("weight")
    if (
        weight is None
        or not is_last
        or weight.requires_grad
        or not is_readable(weight)
        or weight.numel() < 16
        or has_adapters(model)
    ):
        return "", share
    return (name if _is_new(weight, head._parameters.get("bias")) else ""), share


def _is_new(weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a layer has random values: those of torch's default, or around 0 beside a bias of exactly 0."""
    if is_drawn(weight):
        return True
    values = weight.detach().float()
    largest, spread = float(values.abs().max()), float(values.std())
    is_centred = spread > 0 and abs(float(values.mean())) < 4 * spread / values.numel() ** 0.5
    return bias is not None and is_centred and largest < 6 * spread and not bool(bias.any())


def _find_unkept_promises(model: nn.Module) -> Iterator[str]:
    """Yield modules whose own `train()` freezes parameters, as a setting of theirs asks, and that have none frozen."""
    for name, module in list_modules(model):
        if type(module).train is nn.Module.train or not module.training:
            continue
        setting = _find_freezing_setting(module)
        parameters = list(module.parameters())
        if setting and parameters and all(p.requires_grad for p in parameters):
            yield f"{name or type(module).__name__} ({setting})"


def _find_freezing_setting(module: nn.Module) -> str:
    """Return the setting that makes `train()` freeze, such as 'frozen_stages=1'; from names in its code, not run."""
    names = list_names(type(module).train)
    for called in [getattr(type(module), name, None) for name in names]:
        names = names | (list_names(called) if isinstance(called, types.FunctionType) else set())
    if not names & {*FREEZING}:
        return ""
    for name in sorted(names):
        value = inspect.getattr_static(module, name, None)
        if ("freez" in name or "froz" in name) and isinstance(value, int) and value > 0:
            return f"{name}={value}"
    return ""


def _find_states(saved: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield mappings from names to tensors inside a saved object."""
    if isinstance(saved, nn.Module):
        with contextlib.suppress(Exception):  # a state_dict() of the program's own
            yield saved.state_dict()
    elif isinstance(saved, Mapping):
        if any(isinstance(value, Tensor) for value in saved.values()):
            yield saved
        elif depth:
            for value in saved.values():
                yield from _find_states(value, depth - 1)


@torch.no_grad()
def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].clone()


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return bool(torch.equal(one.cpu(), other.cpu().to(one.dtype)))
