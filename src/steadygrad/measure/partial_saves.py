"""PartialSaves: the names in what the program saves -> parameters that no file has and that cannot be had again.

A program that saves trained parameters only is right when the frozen ones come from elsewhere, as with adapters on a
pretrained model. It loses those that were trained in this run and frozen later, and frozen layers with the random
values that they were made with. Names of all saves are put together, with or without prefixes, so several files may
make up the model.
Costs a comparison of names at each save, and a host read at a save that leaves frozen layers out. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from steadygrad.facts.program_scans import PartialSave
from steadygrad.measure.adapters import has_adapters
from steadygrad.measure.rows import is_readable
from steadygrad.state.modules import list_parameters

APART = 10
"""Steps between two saves that count as two."""
NUM_SAVES = 2
FEWEST = 16
"""Elements of a weight from which its values look random or not."""
WRAPPERS = ("module.", "_orig_mod.")
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class PartialSaves:
    """Call `begin` before the first step, and `note` with the weights of each save."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trained_at_first: frozenset[str] = frozenset()
        self._saved: set[str] = set()
        self._num_saves, self._last = 0, -APART
        self._where = ""

    def begin(self) -> None:
        """Note what is trained at first."""
        self._trained_at_first = frozenset(name for name, p in list_parameters(self._model) if p.requires_grad)

    def note(self, states: Iterable[Mapping[str, Any]], num_steps: int, where: str) -> None:
        """Note the names in a save; one that has all trained parameters, and not all others, is partial."""
        names = {_strip(str(key)) for state in states for key, value in state.items() if isinstance(value, Tensor)}
        self._saved |= names
        parameters = dict(list_parameters(self._model))
        trained = {name for name, p in parameters.items() if p.requires_grad}
        is_partial = bool(trained) and trained <= names and not parameters.keys() <= names
        if is_partial and num_steps >= self._last + APART:
            self._num_saves, self._last, self._where = self._num_saves + 1, num_steps, where

    def find(self) -> PartialSave | None:
        """Return what saves so far have lost; None if nothing."""
        if self._num_saves < NUM_SAVES:
            return None
        frozen = {name for name, p in list_parameters(self._model) if not p.requires_grad}
        missing = [name for name in sorted(frozen) if not self._is_saved(name)]
        trained = tuple(name for name in missing if name in self._trained_at_first)
        lost = trained or tuple(name for name in missing if self._is_drawn(name))
        if not lost or (not trained and has_adapters(self._model)):
            return None
        return PartialSave(where=self._where, parameters=lost, was_trained=bool(trained))

    def _is_saved(self, name: str) -> bool:
        """Whether some save had it, under its own name or under that in a part of the model."""
        return name in self._saved or any(name.endswith(f".{key}") for key in self._saved)

    def _is_drawn(self, name: str) -> bool:
        """Whether this is the weight of a layer that has the values it was made with."""
        owner, _, attribute = name.rpartition(".")
        layer = self._model.get_submodule(owner)
        weight = layer._parameters.get("weight")
        if attribute != "weight" or not isinstance(layer, LAYERS) or weight is None or not is_readable(weight):
            return False
        return weight.numel() >= FEWEST and is_drawn(weight)


def is_drawn(weight: Tensor) -> bool:
    """Return whether a weight has values as torch draws them for a new layer: uniform up to a bound; a host read."""
    values = weight.detach().flatten(1).float()
    # torch's default for these layers: uniform up to 1 / sqrt(fan_in), with a deviation of that / sqrt(3).
    bound = values.shape[1] ** -0.5  # one over the root of the inputs of a unit
    largest, spread = float(values.abs().max()), float(values.std())
    return bool(0.9 * bound < largest <= bound * 1.0001 and abs(spread / (bound / 3**0.5) - 1) < 0.15)


def _strip(key: str) -> str:
    for wrapper in WRAPPERS:
        key = key.removeprefix(wrapper)
    return key
