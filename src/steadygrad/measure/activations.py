"""ActivationWatch: one forward of a model -> an ActivationScan: dead units, saturated outputs, an output that is stuck.

Forward hooks exist only while the watch is entered; each reduces an output to a few numbers on its own device, keeps
neither the output nor its graph, and waits for nothing. For a module called several times, the last call counts.
Nothing is measured inside compiled graphs, functional transforms and dispatch modes (selective checkpointing counts
the ops it sees). A failure ends the scan, never the training. Reads only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.hooks import RemovableHandle

from steadygrad.facts import ActivationScan, ActivationStats
from steadygrad.measure.rows import PIECE, PendingRows, is_readable, send_rows
from steadygrad.measure.transfer import Transfer
from steadygrad.measure.uncompiled import uncompiled
from steadygrad.state.hidden_hooks import is_recorded
from steadygrad.state.modules import list_modules
from steadygrad.state.tree import find_tensors

SATURATED = 0.99
"""How far from the middle of its range, as a share of the way to the bound, an element counts as saturated."""
FEWEST_ELEMENTS = 2
"""With fewer elements, a unit that is all zero says nothing."""
BOUNDS: dict[type[nn.Module], tuple[float, float]] = {
    nn.Tanh: (-1.0, 1.0),
    nn.Softsign: (-1.0, 1.0),
    nn.Sigmoid: (0.0, 1.0),
    nn.Hardsigmoid: (0.0, 1.0),
}
"""The ranges of stock modules; those of Hardtanh and ReLU6 are read from the module."""
RELU_LIKE = (nn.ReLU, nn.ReLU6, nn.Threshold, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish)
ACTIVATIONS = (*RELU_LIKE, nn.Hardtanh, *BOUNDS)
CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
CHANNELS_LAST = (nn.Linear, nn.Bilinear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.RNNBase)
OUTPUT = "output:"
"""Row of the model's own output; no module has a colon in its name."""


class PendingActivations:
    """A scan of one forward whose numbers are still being copied."""

    def __init__(self, rows: PendingRows, output: str = "") -> None:
        """`output`: the activation whose result is the model's output."""
        self._rows, self._output = rows, output

    def read(self, step: int) -> ActivationScan:
        """Return the numbers as a scan of `step`."""
        rows = self._rows.read()
        spread, size, equal = rows.pop(OUTPUT, (None, None, 0.0))
        modules = {name: ActivationStats(**_describe(row[0], row[1])) for name, row in rows.items()}
        return ActivationScan(
            step=step,
            modules=modules,
            output=self._output,
            output_std=spread,
            output_scale=size,
            inputs_differ=not equal,
        )


class ActivationWatch:
    """Enter it around one forward, then read it.

    >>> model = nn.Sequential(nn.Linear(2, 4), nn.Tanh())
    >>> watch = ActivationWatch(model)
    >>> with watch:
    ...     output = model(torch.zeros(3, 2))
    >>> list(watch.read(step=0).modules)
    ['1']
    """

    def __init__(self, model: nn.Module, *, transfer: Transfer | None = None) -> None:
        self._model, self._transfer = model, transfer
        self._handles: list[RemovableHandle] = []
        self._rows: dict[str, Tensor] = {}
        self._pending = PendingRows()
        self._channels_first_dims = 4
        self._last_result = ("", 0, 0)  # the last activation: name, address and size of its result
        self._output = ""

    def __enter__(self) -> Self:
        self._rows, self._pending = {}, PendingRows()
        self._last_result, self._output = ("", 0, 0), ""
        self._channels_first_dims = 4  # as for images, until a module shows otherwise
        if not self._handles:
            for name, module in _list_watched(self._model):
                observe = functools.partial(self._observe, name)
                self._handles.append(nn.Module.register_forward_hook(module, observe, with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        # Before anything that can fail: no hook may stay on the model.
        self._remove_hooks()
        try:
            self._pending = send_rows(self._rows, self._transfer)
        except Exception:  # measuring must never end the training
            self._pending = PendingRows()
        self._rows = {}

    @property
    def pending(self) -> PendingActivations:
        """Return the scan of the last forward, to be read later; entering the watch again does not affect it."""
        return PendingActivations(self._pending, self._output)

    def read(self, step: int) -> ActivationScan:
        """Return the scan of the last forward, as that of `step`."""
        return self.pending.read(step)

    @uncompiled
    def _observe(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if is_recorded() or not module.training or _get_current_dispatch_mode() is not None:
            return
        try:
            with torch.no_grad():
                given = [tensor for _, tensor in find_tensors(args, kwargs)] if name == OUTPUT else []
                self._admit(name, module, given, output)
        except Exception:  # measuring must never end the training
            # Allowed inside a hook: torch walks a tuple made before the first of them was called.
            self._remove_hooks()
            self._rows = {}

    def _admit(self, name: str, module: nn.Module, given: Sequence[Tensor], output: Any) -> None:
        values = find_output(output)
        if values is None:
            return
        if name == OUTPUT:
            self._note_output(values, given)
            return
        dim = self._find_unit_dim(module, values.dim())
        if _is_activation(module):
            self._rows[name] = torch.stack([_measure_dead(module, values, dim), _measure_saturated(module, values)])
            self._last_result = name, values.data_ptr(), values.numel()

    def _note_output(self, values: Tensor, given: Sequence[Tensor]) -> None:
        """Note the model's own output, and which activation made it: a view of its result counts too."""
        name, place, size = self._last_result
        self._output = name if (values.data_ptr(), values.numel()) == (place, size) else ""
        if len(values) > 1:
            self._rows[OUTPUT] = torch.cat([_measure_spread(values), _are_alike(given, values)])

    def _find_unit_dim(self, module: nn.Module, num_dims: int) -> int:
        """Return the dimension of the units, 1 or the last; an activation follows the module that ran before it."""
        if isinstance(module, CHANNELS_FIRST):
            self._channels_first_dims = num_dims
        elif isinstance(module, CHANNELS_LAST):
            self._channels_first_dims = 0
        return 1 if num_dims == self._channels_first_dims else num_dims - 1

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def find_output(output: Any) -> Tensor | None:
    """Return the floating-point output of a module: `logits` by name, otherwise the first that is not a scalar."""
    if isinstance(output, Mapping):
        output = [output["logits"]] if "logits" in output else list(output.values())
    values = output if isinstance(output, list | tuple) else [output]
    fitting = (v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim() and v.numel())
    return next((v.detach() for v in fitting if is_readable(v)), None)


def _list_watched(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules to watch, the model itself last; none of a model that is compiled."""
    activations, others = [], []
    for name, module in list_modules(model):
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
            return []
        if _is_activation(module):
            activations.append((name, module))
        elif isinstance(module, CHANNELS_FIRST + CHANNELS_LAST):
            others.append((name, module))
    # The others only say which dimension the units of an activation are in.
    return [*(others if activations else ()), *activations, (OUTPUT, model)]


def _is_activation(module: nn.Module) -> bool:
    return isinstance(module, ACTIVATIONS)


def _find_bounds(module: nn.Module) -> tuple[float, float] | None:
    if isinstance(module, nn.Hardtanh):  # ReLU6 too
        return float(module.min_val), float(module.max_val)
    return next((bounds for kind, bounds in BOUNDS.items() if isinstance(module, kind)), None)


def _measure_dead(module: nn.Module, values: Tensor, dim: int) -> Tensor:
    """Return the share of units that are zero throughout, NaN if units make no sense: float64 scalar."""
    num_units = values.shape[dim]
    if not isinstance(module, RELU_LIKE) or values.dim() < 2 or values.numel() < FEWEST_ELEMENTS * num_units:
        return values.new_full((), torch.nan, dtype=torch.float64)
    others = [d for d in range(values.dim()) if d != dim]
    # Two reductions rather than one over a mask: no temporary as large as the output.
    return ((values.amax(others) == 0) & (values.amin(others) == 0)).double().mean()


def _measure_saturated(module: nn.Module, values: Tensor) -> Tensor:
    """Return the share of elements near a bound, NaN for unbounded modules: float64 scalar."""
    bounds = _find_bounds(module)
    if bounds is None or not bounds[0] < bounds[1]:
        return values.new_full((), torch.nan, dtype=torch.float64)
    middle, half = (bounds[0] + bounds[1]) / 2, (bounds[1] - bounds[0]) / 2
    pieces = values.chunk(-(-values.numel() // PIECE))
    # float(): half precision would round the threshold.
    counts = [((piece.float() - middle).abs() >= SATURATED * half).sum() for piece in pieces]
    return torch.stack(counts).sum().double() / values.numel()


def _measure_spread(values: Tensor) -> Tensor:
    """Return the standard deviation over the batch, averaged over the rest, and root mean square: float64 [2]."""
    values = _thin_out(values)
    values = values if values.dtype is torch.float64 else values.float()
    scale = torch.linalg.vector_norm(values, dtype=torch.float64) / values.numel() ** 0.5
    return torch.stack([values.std(0, correction=0).mean(dtype=torch.float64), scale])


def _are_alike(tensors: Sequence[Tensor], output: Tensor) -> Tensor:
    """Return whether all samples of the inputs are the same, on the output's device: float64 [1]; 0 without inputs."""
    samples = [_thin_out(t) for t in tensors if t.dim() and len(t) == len(output) and is_readable(t)]
    alike = [(one == one[:1]).all().to(output.device, non_blocking=True) for one in samples]
    return torch.stack(alike).all().double().reshape(1) if alike else output.new_zeros(1, dtype=torch.float64)


def _thin_out(values: Tensor) -> Tensor:
    """Return at most about PIECE elements, by strides: a second copy of a language model's logits may not fit."""
    for dim in (*range(values.dim() - 1, 0, -1), 0):
        stride = min(-(-values.numel() // PIECE), max(1, values.shape[dim] // 2))
        if stride > 1:
            values = values[(slice(None),) * dim + (slice(None, None, stride),)]
    return values


def _describe(dead: float, saturated: float) -> dict[str, float]:
    """Return the shares that are not NaN."""
    shares = {"dead_share": dead, "saturated_share": saturated}
    return {name: share for name, share in shares.items() if share == share}
