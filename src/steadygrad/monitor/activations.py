"""ActivationMonitor: the outputs of a model's leaf modules -> statistics, dead units, saturated units.

Each output is reduced to a few sums and the extremes of its units, on its own device, in a forward hook that waits
for nothing and keeps neither the output nor its graph. A query costs one host read, however large the model.
Reads only: a hook that fails is reported and removed, and never affects the training.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from steadygrad.config.checks import is_number, is_positive, require_argument
from steadygrad.measure import Transfer
from steadygrad.measure.gradients import is_dtensor
from steadygrad.state.hidden_hooks import is_recorded

_log = logging.getLogger("steadygrad")

PIECE = 1 << 24
"""Elements of an output that are looked at together: bounds the temporary memory (a language model's logits)."""

MAX_WIDTHS = 16
"""Different numbers of units remembered for one module: a ReLU used in several places, sequences of several lengths."""

SATURATED = 0.99
"""How far from the middle of its range, as a share of the way to the bound, an element counts as saturated."""

BOUNDS: dict[type[nn.Module], tuple[float, float]] = {
    nn.Tanh: (-1.0, 1.0),
    nn.Softsign: (-1.0, 1.0),
    nn.Sigmoid: (0.0, 1.0),
    nn.Hardsigmoid: (0.0, 1.0),
}
"""The ranges of stock modules; those of Hardtanh and ReLU6 are read from the module."""

_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_CHANNELS_LAST = (nn.Linear, nn.Bilinear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.RNNBase)


class ActivationStats(TypedDict):
    """What `get_statistics` returns for a module, over the finite elements of all outputs observed."""

    mean: float
    std: float
    max_abs: float
    sparsity: float
    saturation: float | None
    num_nonfinite: int
    numel: int
    num_calls: int


class _Observed:
    """What one module has put out so far: five sums and a maximum, and the extremes of each unit, on the device."""

    def __init__(self, bounds: tuple[float, float] | None) -> None:
        self.bounds = bounds
        self.numel = self.num_calls = 0
        self.numbers: Tensor | None = None  # [6]: finite, sum, sum of squares, near zero, saturated; max_abs
        self.peaks: dict[int, Tensor] = {}  # width -> largest |x| of each unit
        self.depths: dict[int, Tensor] = {}  # width -> smallest way from the middle to a bound of each unit

    def admit(self, output: Tensor, dim: int, zero_threshold: float) -> None:
        # Ceiling division. Cut along dim 0 only: a batch of one is looked at whole, whatever its size.
        for piece in output.chunk(-(-output.numel() // PIECE)):
            # Half precision would round the thresholds.
            self._admit_piece(piece if piece.dtype is torch.float64 else piece.float(), dim, zero_threshold)
        self.numel += output.numel()
        self.num_calls += 1

    def _admit_piece(self, x: Tensor, dim: int, zero_threshold: float) -> None:
        finite = x.isfinite()
        # A select, not a product with the mask: 0 * Inf is NaN.
        values, magnitude = torch.where(finite, x, 0.0), x.abs()
        others = [d for d in range(x.dim()) if d != dim]
        num_deep = finite.new_zeros((), dtype=torch.int64)
        if self.bounds is not None:
            low, high = self.bounds
            depth = (x - (low + high) / 2).abs() / ((high - low) / 2)
            num_deep = (depth >= SATURATED).sum()
            _fold(self.depths, depth.amin(others), torch.minimum)
        _fold(self.peaks, magnitude.amax(others), torch.maximum)  # NaN stays NaN: neither dead nor saturated
        total, norm = values.sum(dtype=torch.float64), torch.linalg.vector_norm(values, dtype=torch.float64)
        num_zeros = (magnitude <= zero_threshold).sum()
        numbers = (finite.sum(), total, norm.square(), num_zeros, num_deep, values.abs().amax())
        new = torch.stack([number.double() for number in numbers])
        # New tensors rather than in-place sums: those made under inference_mode may not be written to outside it.
        if self.numbers is not None:
            old = self.numbers.to(new.device)
            new = torch.cat([old[:5] + new[:5], torch.maximum(old[5:], new[5:])])
        self.numbers = new

    def describe(self, numbers: Sequence[float]) -> ActivationStats:
        finite, total, squares, num_zeros, num_deep, max_abs = numbers
        mean = total / finite if finite else math.nan
        return ActivationStats(
            mean=mean,
            # Rounding can bring the variance below 0 where all elements are equal.
            std=math.sqrt(max(0.0, squares / finite - mean * mean)) if finite else math.nan,
            max_abs=max_abs,
            sparsity=num_zeros / self.numel,
            saturation=None if self.bounds is None else num_deep / self.numel,
            num_nonfinite=self.numel - int(finite),
            numel=self.numel,
            num_calls=self.num_calls,
        )


class ActivationMonitor:
    """Watches the outputs of the leaf modules of `model`, by forward hooks that wait for nothing.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    >>> with ActivationMonitor(model) as monitor:
    ...     output = model(torch.zeros(2, 4))
    >>> list(monitor.get_statistics())
    ['0', '1']

    `training_only` leaves out what runs in eval mode. `zero_threshold` is what `sparsity` calls zero. `bounds` adds
    (low, high) ranges of your own bounded modules, by class. A tuple, list or dict counts by its first tensor; outputs
    that are not real floating-point tensors are ignored. Functional calls (`F.relu`) are not modules and go unseen,
    nor is anything inside a `torch.compile`d graph, which these hooks neither break nor enter. A failing hook is
    reported once and all are removed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        training_only: bool = False,
        zero_threshold: float = 1e-6,
        bounds: Mapping[type[nn.Module], tuple[float, float]] | None = None,
    ) -> None:
        fits = isinstance(model, nn.Module)
        require_argument(fits, "ActivationMonitor.model", "be a torch.nn.Module", type(model), "Pass the model itself.")
        _require_zero_threshold(zero_threshold, "ActivationMonitor.zero_threshold")
        for kind, (low, high) in (bounds or {}).items():
            where = f"ActivationMonitor.bounds[{kind.__name__}]"
            require_argument(low < high, where, "be (low, high)", (low, high), "Put the smaller one first.")
        self.model = model
        self._training_only, self._zero_threshold = training_only, zero_threshold
        self._bounds = dict(bounds or {})
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.reset_statistics()

    def register_hooks(self) -> None:
        """Start observing; calling it again has no effect."""
        if self._handles:
            return
        if hasattr(self.model, "_orig_mod"):
            _log.warning(
                "ActivationMonitor sees nothing inside a torch.compile'd model (%s). Run the plain model to see it.",
                type(self.model._orig_mod).__name__,
            )
        for name, module in _leaves(self.model):
            # Bound to the monitor: a deep copy of the model gets a copy of the monitor, which observes the copy.
            self._handles.append(module.register_forward_hook(functools.partial(self._observe, name)))

    def remove_hooks(self) -> None:
        """Stop observing; the statistics are kept."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> ActivationMonitor:
        self.register_hooks()
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove_hooks()

    def reset_statistics(self) -> None:
        """Forget what was seen."""
        self._observed: dict[str, _Observed] = {}
        # Outputs of as many dimensions have their channels at dim 1: images, until a module says otherwise.
        self._channels_first_dims = 4

    def get_statistics(self) -> dict[str, ActivationStats]:
        """Return module name -> its statistics, with one host read. Modules that did not run are absent.

        `mean`, `std` (of the population) and `max_abs` are over finite elements; `sparsity` is the share of elements
        with |x| <= `zero_threshold`; `saturation` that of elements within 1 % of a bound, None for unbounded modules.
        """
        rows = {name: seen.numbers for name, seen in self._observed.items() if seen.numbers is not None}
        return {name: self._observed[name].describe(row) for name, row in _fetch(rows).items()}

    def detect_dead_neurons(self, threshold: float = 1e-6) -> dict[str, float]:
        """Module name -> share of units with |x| <= `threshold` in every output observed; one host read.

        Units are channels (dim 1) after convolutions and batch norms, the last dimension elsewhere.
        """
        _require_zero_threshold(threshold, "detect_dead_neurons(threshold)")
        counts = {name: _count(u <= threshold for u in seen.peaks.values()) for name, seen in self._observed.items()}
        return {name: count / sum(self._observed[name].peaks) for name, (count,) in _fetch(counts).items()}

    def detect_saturated(self, threshold: float = SATURATED) -> dict[str, float]:
        """Name of each bounded module -> share of its units that were near a bound in every output; one host read.

        Near is `threshold` of the way from the middle to a bound: |x| >= 0.99 for Tanh, 0.005 and 0.995 for Sigmoid.
        """
        fits = is_positive(threshold) and threshold <= 1
        require_argument(fits, "detect_saturated(threshold)", "lie in (0, 1]", threshold, "Use 0.99.")
        bounded = {name: seen.depths for name, seen in self._observed.items() if seen.depths}
        counts = {name: _count(u >= threshold for u in depths.values()) for name, depths in bounded.items()}
        return {name: count / sum(bounded[name]) for name, (count,) in _fetch(counts).items()}

    def _observe(self, name: str, module: nn.Module, _args: Any, output: Any) -> None:
        # Dynamo folds it to True, so nothing of the hook is left in a graph.
        if is_recorded() or (self._training_only and not module.training):
            return
        try:
            with torch.no_grad():
                self._admit(name, module, output)
        except Exception as error:  # monitoring must never end the training
            # Allowed inside a hook: torch walks a tuple made before the first of them was called.
            self.remove_hooks()
            _log.warning("ActivationMonitor failed at module %r and is off from here on: %r", name, error)

    def _admit(self, name: str, module: nn.Module, output: Any) -> None:
        values = _first_tensor(output)
        if values is None or not _is_measurable(values):
            return
        values = values if values.dim() >= 2 else values.reshape(1, -1)
        seen = self._observed.get(name) or _Observed(self._find_bounds(module))
        seen.admit(values, self._find_unit_dim(module, values.dim()), self._zero_threshold)
        self._observed[name] = seen  # only now: one that failed half-way has nothing to report

    def _find_unit_dim(self, module: nn.Module, num_dims: int) -> int:
        """1 or the last; what could be either (activation, dropout, pooling) is taken to follow what ran before it."""
        if isinstance(module, _CHANNELS_FIRST):
            self._channels_first_dims = num_dims
        elif isinstance(module, _CHANNELS_LAST):
            self._channels_first_dims = 0
        return 1 if num_dims == self._channels_first_dims else num_dims - 1

    def _find_bounds(self, module: nn.Module) -> tuple[float, float] | None:
        for kind in type(module).__mro__:  # the nearest class counts, and for the same class the user's range
            if kind in self._bounds:
                return self._bounds[kind]
            if kind is nn.Hardtanh:
                return float(module.min_val), float(module.max_val)  # type: ignore[arg-type]
            if kind in BOUNDS:
                return BOUNDS[kind]
        return None


def _leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules without children; a parametrization (weight norm) is part of its module."""
    for name, module in model.named_modules():
        children = {child for child, _ in module.named_children()} - {"parametrizations"}
        if not children and "parametrizations" not in name.split("."):
            yield name, module


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((value for value in values if isinstance(value, Tensor)), None)


def _is_measurable(values: Tensor) -> bool:
    return (
        values.is_floating_point()
        and not values.is_nested
        and values.layout is torch.strided
        and values.device.type != "meta"
        and not is_dtensor(values)
        and values.numel() > 0
    )


def _fold(kept: dict[int, Tensor], units: Tensor, fold: Any) -> None:
    """Fold the extremes of one output into those kept for its width."""
    width = units.numel()
    if width in kept:
        kept[width] = fold(kept[width].to(units.device), units)
    elif len(kept) < MAX_WIDTHS:
        kept[width] = units


def _count(masks: Iterator[Tensor]) -> Tensor:
    """Return how many are true in all masks together: [1]."""
    return torch.stack([mask.sum() for mask in masks]).sum().double().reshape(1)


def _fetch(rows: Mapping[str, Tensor]) -> dict[str, Sequence[float]]:
    """Return the numbers of all rows, equally long, with one host read."""
    if not rows:
        return {}
    first = next(iter(rows.values()))
    packed = torch.cat([row.to(first.device) for row in rows.values()])
    numbers, length = Transfer(slots=1).send(packed).wait(), len(first)
    return {name: numbers[i * length : (i + 1) * length] for i, name in enumerate(rows)}


def _require_zero_threshold(value: Any, name: str) -> None:
    require_argument(is_number(value) and value >= 0, name, "not be negative", value, "Use 1e-6.")
