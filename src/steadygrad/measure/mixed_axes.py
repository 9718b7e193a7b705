"""Calls of reshape, and of layers that expect time first -> MixedAxes: places where samples see each other.

A reshape that exchanges the batch's axis with another one and keeps all sizes does not move a single element: samples
are cut up and put together again. `transpose` was meant. The relative shift of Transformer-XL does this on purpose,
after a `cat` or `pad`. A recurrent or attention layer without `batch_first` that is given as many "time steps" as there
are labels reads the batch as one sequence. Likewise a reshape that is to put the channels first before a convolution
mixes them with the places. Shapes only; the first training forward only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadygrad.facts.program import MixedAxes
from steadygrad.measure.loss_graph import find_shape, moves_last_to_second, pass_views
from steadygrad.measure.marks import Marks
from steadygrad.measure.suspicious_ops import find_caller
from steadygrad.state.modules import list_modules

RESHAPES = frozenset(("view", "reshape", "view_as", "reshape_as"))
PADDERS = frozenset(("cat", "concat", "pad", "concatenate"))
CONVOLUTIONS = frozenset(("conv1d", "conv2d", "conv3d"))
SCALINGS = frozenset(
    (
        *("to", "float", "half", "bfloat16", "contiguous", "clone", "div", "true_divide", "mul", "sub", "add"),
        *("__truediv__", "__mul__", "__sub__", "__add__"),
    )
)
"""What may stand between a reshape of the data and the convolution."""
SUMS = frozenset(("add", "__add__", "__radd__", "__iadd__", "add_"))
HOOKS = frozenset(("register_hook", "retain_grad"))
TIME_FIRST = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class ReshapeWatch:
    """Sees each call after it is made."""

    def __init__(self) -> None:
        self.found: list[tuple[tuple[int, ...], tuple[int, ...], str]] = []
        # By identity, and weak: a mark must not keep an activation alive.
        self._padded = Marks()
        self._channels = Marks()  # tensors whose channels were moved by a reshape
        self.found_channels: list[tuple[str, str]] = []
        self.constants: Collection[int] = ()
        """Identities of the model's buffers."""
        self._prefixes = Marks()  # the first rows of a buffer or parameter
        self.found_positions: list[tuple[int, str, str]] = []
        self.has_hooks = False
        """Whether a backward of our own through this graph would be noticed: by hooks on tensors, or by recomputing."""

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        """Note reshapes that exchange the first axis with another, or move channels before a convolution."""
        name = getattr(func, "__name__", "")
        self.has_hooks = self.has_hooks or name in HOOKS or _saves_through_hooks()
        if not isinstance(result, Tensor) or not args:
            return
        source = args[0]
        is_padded = isinstance(source, Tensor) and source in self._padded
        if name in PADDERS or (is_padded and (name in RESHAPES or name == "__getitem__")):
            self._padded[result] = True
        elif name in RESHAPES and isinstance(source, Tensor):
            shapes = tuple(source.shape), tuple(result.shape)
            self.found += [(*shapes, find_caller())] if exchanges_first(*shapes) else []
            if moves_last_to_second(*shapes) and not _is_free(source):
                self._channels[result] = f"a reshape of {shapes[0]} to {shapes[1]}", find_caller()
        elif isinstance(source, Tensor) and source in self._channels:
            self.found_channels += [self._channels[source]] if name in CONVOLUTIONS else []
            if name in SCALINGS and result.shape == source.shape:
                self._channels[result] = self._channels[source]
        elif name == "__getitem__" and isinstance(source, Tensor) and _is_prefix(source, args[1]):
            if isinstance(source, nn.Parameter) or id(source) in self.constants:
                self._prefixes[result] = True
        elif name in SUMS and len(args) > 1:
            self._compare_positions(args[0], args[1])

    def _compare_positions(self, left: Any, right: Any) -> None:
        """Note a sum in which the first rows of a table are broadcast over the second axis."""
        for table, other in ((left, right), (right, left)):
            if not isinstance(table, Tensor) or not isinstance(other, Tensor) or table not in self._prefixes:
                continue
            num, shapes = len(other), (tuple(table.shape), tuple(other.shape))
            if other.dim() == 3 and other.shape[1] not in (1, num) and shapes[0] == (num, 1, other.shape[2]):
                what = f"a sum of {shapes[1]} and the first {num} rows of a table, {shapes[0]},"
                self.found_positions.append((num, what, find_caller()))

    def report_positions(self, step: int, num_labels: int) -> list[MixedAxes]:
        """Return a sum that treats the samples, one for each of the `num_labels` labels, as time steps."""
        return [
            MixedAxes(step=step, kind="positions", what=what, where=where)
            for num, what, where in self.found_positions[:1]
            if num == num_labels
        ]

    def report(self, step: int, num_rows: int) -> list[MixedAxes]:
        """Return those in which the batch, of `num_rows` samples, is one of the two axes."""
        found = [MixedAxes(step=step, kind="channels", what=what, where=at) for what, at in self.found_channels[:1]]
        return found + [
            MixedAxes(step=step, kind="reshape", what=f"a reshape of {source} to {result}", where=where)
            for source, result, where in self.found[:1]
            if num_rows in (source[0], result[0])
        ]


def _is_prefix(source: Tensor, index: Any) -> bool:
    """Return whether `source[index]` takes the first rows of a longer table."""
    first = index[0] if isinstance(index, tuple) and index else index
    is_first = isinstance(first, slice) and not first.start and first.step is None and isinstance(first.stop, int)
    return is_first and source.dim() == 3 and 0 < first.stop < len(source)


def _is_free(source: Tensor) -> bool:
    """Return whether a layer has made each sample as one row of numbers: what they stand for is not settled yet."""
    node = pass_views(source.grad_fn)[0]
    return node is not None and find_shape(node) == (len(source), source[0].numel())


def _saves_through_hooks() -> bool:
    """Whether what is saved for backward goes through hooks, as in a checkpoint; True where torch does not say."""
    find = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return find is None or find(True) is not None


class TimeFirstWatch:
    """Listens to layers that expect time first, during one forward."""

    def __init__(self, model: nn.Module) -> None:
        self._calls: list[tuple[str, tuple[int, ...]]] = []
        self._handles: list[RemovableHandle] = []
        for name, module in list_modules(model):
            if isinstance(module, TIME_FIRST) and not _is_batch_first(module):
                self._handles.append(nn.Module.register_forward_pre_hook(module, self._make_hook(name)))

    def close(self) -> None:
        """Stop listening."""
        while self._handles:
            self._handles.pop().remove()

    def report(self, step: int, num_labels: int) -> list[MixedAxes]:
        """Return a layer that read samples as time steps, if each of the `num_labels` labels is one sample's.

        A second size of 1 is a single sequence, whose steps have a label each.
        """
        found = [
            (name, shape) for name, shape in self._calls if shape[0] == num_labels and shape[1] not in (1, num_labels)
        ]
        return [
            MixedAxes(step=step, kind="batch_first", what=f"layer {name!r}, which expects time first, got {shape}")
            for name, shape in found[:1]
        ]

    def _make_hook(self, name: str) -> Callable[[nn.Module, Any], None]:
        def hear(_module: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], Tensor) and args[0].dim() == 3 and len(self._calls) < 64:
                self._calls.append((name, tuple(args[0].shape)))

        return hear


def exchanges_first(source: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Return whether `result` is `source` with its first size exchanged with another one, and both are above 1.

    >>> exchanges_first((32, 6, 8), (6, 32, 8)), exchanges_first((32, 6, 8), (32, 48))
    (True, False)
    """
    if len(source) != len(result) or len(source) < 2 or source[0] == result[0]:
        return False
    places = [i for i, (one, other) in enumerate(zip(source, result)) if one != other]
    if len(places) != 2 or places[0] != 0:
        return False
    other = places[1]
    return source[0] == result[other] > 1 and source[other] == result[0] > 1


def _is_batch_first(module: nn.Module) -> bool:
    attention = getattr(module, "self_attn", module)
    return bool(getattr(attention, "batch_first", False))
