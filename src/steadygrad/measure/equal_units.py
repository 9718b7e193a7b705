"""Units of a layer that began equal -> those that are still equal after some steps: they learn the same thing.

A layer whose weights were all set to one number, or whose rows were copied from one, gives every unit the same output
and the same gradient, so that it stays as wide as one unit for good. Layers that begin at zero are left out: they come
apart with the first gradient, as LoRA's do. Cost: a small sample of each weight and one host read before the first
step, and nothing afterwards unless rows were equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from steadygrad.measure.rows import is_readable

SAMPLED_ROWS, SAMPLED_COLUMNS = 4, 64
"""What of a weight is compared first."""
FEWEST_ROWS, FEWEST_COLUMNS = 4, 2
MOST_APART = 1e-4
"""Distance between two rows, as a share of how far they have moved, up to which they move together: rounding leaves
1e-6. Rows with gradients of their own are apart by a tenth and more, whatever the optimizer."""


class EqualUnits:
    """Call `begin` before the first step and `find` after some."""

    def __init__(self, model: nn.Module, trained: Iterable[Tensor]) -> None:
        self._model, self._trained = model, {id(parameter) for parameter in trained}
        self._first: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Remember the layers whose rows are equal."""
        layers = [(name, weight) for name, weight in _list_layers(self._model) if id(weight) in self._trained]
        if not layers:
            return
        device = layers[0][1].device
        flags = torch.stack([_is_repeated(weight).to(device) for _, weight in layers]).tolist()
        for (name, weight), is_repeated in zip(layers, flags):
            if is_repeated and bool((weight == weight[:1]).all()):
                self._first[name] = (weight, weight[0].clone())

    @torch.no_grad()
    def find(self) -> tuple[str, ...]:
        """Return the layers whose rows have moved and are still equal; the others are forgotten."""
        found = []
        for name, (weight, first) in list(self._first.items()):
            moved = (weight[0] - first).abs().amax()
            if not moved > 0:
                continue
            if (weight - weight[:1]).abs().amax() <= MOST_APART * moved:
                found.append(name)
            else:
                del self._first[name]
        return tuple(found)


def _is_repeated(weight: Tensor) -> Tensor:
    sample = weight.flatten(1)[:SAMPLED_ROWS, :SAMPLED_COLUMNS]
    return (sample == sample[:1]).all() & sample.ne(0).any()


def _list_layers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield weights with one row for each unit, all of which see the same inputs."""
    for path, module in model.named_modules():
        is_shared = isinstance(module, nn.Linear) or (
            isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1
        )
        # As a parameter: reading a parametrized weight runs code of the program.
        weight = module._parameters.get("weight") if is_shared else None
        if weight is None or not is_readable(weight) or weight.dim() < 2:
            continue
        if len(weight) >= FEWEST_ROWS and weight[0].numel() >= FEWEST_COLUMNS:
            yield (f"{path}.weight" if path else "weight"), weight
