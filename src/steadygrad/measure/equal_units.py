"""Units of a layer that began equal -> those that are still equal after some steps: they learn the same thing.

A layer whose weights were all set to one number, or whose rows were copied from one, gives every unit the same output
and the same gradient, so that it stays as wide as one unit for good. Layers that begin at zero are left out: they come
apart with the first gradient, as LoRA's do. Cost: a small sample of each weight before the first step, and nothing
after the first look unless rows were equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from steadygrad.measure.rows import PendingRows, is_readable, send_rows
from steadygrad.measure.transfer import Transfer
from steadygrad.state.modules import list_modules

SAMPLED_ROWS, SAMPLED_COLUMNS = 4, 64
"""What of a weight is compared before the first step; the whole of it once it has moved."""
FEWEST_ROWS, FEWEST_COLUMNS = 4, 2
MOST_APART = 1e-4
"""Distance between two rows, as a share of how far they have moved, up to which they move together: rounding leaves
1e-6. Rows with gradients of their own are apart by a tenth and more, whatever the optimizer."""


class EqualUnits:
    """Call `begin` before the first step and `find` after some."""

    def __init__(self, model: nn.Module, trained: Iterable[Tensor], *, transfer: Transfer | None = None) -> None:
        self._model, self._trained = model, {id(parameter) for parameter in trained}
        self._transfer = transfer
        self._samples: dict[str, tuple[Tensor, Tensor]] = {}
        self._flags, self._groups = PendingRows(), list[list[str]]()
        self._first: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Sample the rows of all layers, and queue whether they are equal; waits for nothing."""
        alike: dict[tuple[torch.device, torch.dtype, torch.Size], list[tuple[str, Tensor, Tensor]]] = {}
        for name, weight in _list_layers(self._model):
            if id(weight) in self._trained:
                sample = weight[:SAMPLED_ROWS].flatten(1)[:, :SAMPLED_COLUMNS]
                alike.setdefault((sample.device, sample.dtype, sample.shape), []).append((name, weight, sample))
        flags: dict[str, Tensor] = {}
        for number, group in enumerate(alike.values()):
            samples = torch.stack([sample for _, _, sample in group])  # [layers, rows, columns]
            is_repeated = (samples == samples[:, :1]).flatten(1).all(1) & samples.ne(0).flatten(1).any(1)
            self._samples |= {name: (weight, one[0]) for (name, weight, _), one in zip(group, samples)}
            self._groups.append([name for name, _, _ in group])
            flags[str(number)] = is_repeated.double()
        self._flags = send_rows(flags, self._transfer)

    @torch.no_grad()
    def find(self) -> tuple[str, ...]:
        """Return the layers whose rows have moved and are still equal; the others are forgotten."""
        if self._samples:
            rows = self._flags.read()
            flagged = [
                name
                for number, names in enumerate(self._groups)
                for name, is_repeated in zip(names, rows[str(number)])
                if is_repeated
            ]
            self._first = {name: self._samples[name] for name in flagged}
            self._samples, self._flags, self._groups = {}, PendingRows(), []
        found = []
        for name, (weight, first) in list(self._first.items()):
            moved = (weight[:1].flatten()[:SAMPLED_COLUMNS] - first).abs().amax()
            if not moved > 0:
                continue
            if (weight - weight[:1]).abs().amax() <= MOST_APART * moved:
                found.append(name)
            else:
                del self._first[name]
        return tuple(found)


def _list_layers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield weights with one row for each unit, all of which see the same inputs."""
    for path, module in list_modules(model):
        is_shared = isinstance(module, nn.Linear) or (
            isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1
        )
        # As a parameter: reading a parametrized weight runs code of the program.
        weight = module._parameters.get("weight") if is_shared else None
        if weight is None or not is_readable(weight) or weight.dim() < 2:
            continue
        if len(weight) >= FEWEST_ROWS and weight[0].numel() >= FEWEST_COLUMNS:
            yield (f"{path}.weight" if path else "weight"), weight
