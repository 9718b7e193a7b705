"""The graph of a loss -> a LossScan: which losses it is made of, what feeds them, norms that have nothing to normalise.

Names of nodes and plain numbers that they saved tell all of this, so nothing is read from a device. The labels that a
loss over classes saved are returned for `labels.py`. Cost: 0.1 ms near the loss, and once about 1 us a node of the
whole graph. Only before backward: afterwards the saved tensors are gone. Reads only.
"""

from __future__ import annotations

import functools
import math
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steadygrad.facts.program import LossCall
from steadygrad.measure.saved import read_saved

NEAR = 256
"""Nodes around the loss that are searched for loss functions."""
MAX_NODES = 100_000
"""Nodes of the whole graph that are searched for norms and masks."""
LOSSES = {
    "NllLoss": "nll_loss",
    "NllLoss2D": "nll_loss",
    "BinaryCrossEntropyWithLogits": "binary_cross_entropy_with_logits",
    "BinaryCrossEntropy": "binary_cross_entropy",
    "MseLoss": "mse_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "CtcLoss": "ctc_loss",
}
VIEWS = frozenset(
    (
        *("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Squeeze", "Unsqueeze", "Slice", "Select"),
        *("Narrow", "Clone", "ToCopy", "Alias", "Expand", "Index", "Split", "Unbind", "Movedim", "Swapaxes"),
    )
)
"""Ops that move values and do not change them."""
SUMS = frozenset(("Add", "Sub", "Mean", "Sum", "Div"))
"""Ops through which the parts of a loss are added up."""
RESHAPES = frozenset(("View", "UnsafeView", "ReshapeAlias"))
NAMES = {"Addmm": "linear", "Mm": "linear", "Linear": "linear", "Convolution": "convolution", "Bmm": "matmul"}
_ENDING = re.compile(r"Backward\d*$")
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_LEAF = "torch::autograd::AccumulateGrad"
HIDDEN = -1e4
"""Scores up to this are out of sight after a softmax."""
WRAPPED = 1 << 63
"""Negative numbers that a node saved come back as unsigned ones."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a loss over classes, still on their device."""

    target: Tensor
    ignore_index: int
    num_classes: int
    is_reduced: bool
    is_whole: bool
    """Whether this loss is all there is to differentiate."""
    outputs: Any
    """The node that made the loss's input."""


@dataclass(frozen=True, slots=True)
class Look:
    """What is near the loss."""

    calls: tuple[LossCall, ...]
    labels: tuple[Labels, ...]


def look_at_loss(loss: Tensor, *, where: str = "") -> Look:
    """Return the loss functions that `loss` is made of, those nearest to it.

    >>> import torch
    >>> x = torch.zeros(8, 4, requires_grad=True)
    >>> [(c.op, c.fed_by) for c in look_at_loss(torch.nn.functional.nll_loss(x.softmax(1), torch.arange(8) % 4)).calls]
    [('nll_loss', 'softmax')]
    """
    calls, labels = [], []
    for node in find_losses(loss.grad_fn):
        kind = shorten(node)
        inner, moved = pass_views(node.next_functions[0][0])  # the prediction comes first in all of LOSSES
        if inner is not None and shorten(inner) == "Log":
            before, more = pass_views(inner.next_functions[0][0])
            if before is not None and shorten(before) == "Softmax":
                calls += _describe_log_of_softmax(before, LOSSES[kind], where) if not (moved or more) else []
        shape = () if inner is None else find_shape(inner)
        fed_by = "" if inner is None else name_op(inner)
        op, dim, deeper = LOSSES[kind], None, None
        if op == "nll_loss" and fed_by != "LogSoftmax" and _adds_logsumexp(loss.grad_fn, inner):
            fed_by = "WrittenOut"
        if fed_by in ("LogSoftmax", "Softmax") and shape:
            dim = None if moved else _sign(inner._saved_dim) % len(shape)
            deeper = pass_views(inner.next_functions[0][0])[0]
        reshaped = _find_moved_classes(inner) if fed_by == "LogSoftmax" else ()
        expanded = _find_expanded(node.next_functions[0][0])
        calls.append(
            LossCall(
                op=op,
                fed_by=spell(fed_by),
                shape=shape,
                softmax_dim=dim,
                softmax_fed_by="" if deeper is None else spell(shorten(deeper)),
                expanded_from=expanded[0],
                expanded_to=expanded[1],
                reshaped_from=reshaped,
                where=where,
            )
        )
        target = read_saved(node, "target") if op == "nll_loss" and len(shape) > 1 else None
        if target is not None:
            classes = shape[1] if not moved or fed_by != "LogSoftmax" else shape[_sign(inner._saved_dim) % len(shape)]
            ignore, reduced = (
                _sign(node._saved_ignore_index),
                # A reduction of 0 is 'none'.
                node._saved_reduction != 0 and read_saved(node, "weight") is None,
            )
            labels.append(Labels(target, ignore, classes, reduced, node is loss.grad_fn, inner))
    return Look(tuple(calls), tuple(labels))


def _describe_log_of_softmax(node: Any, op: str, where: str) -> list[LossCall]:
    """Describe log(softmax(x)) as the log_softmax that it is."""
    shape = find_shape(node)
    dim = _sign(node._saved_dim) % len(shape) if shape else None
    return [LossCall(op=op, fed_by="log_softmax", shape=shape, softmax_dim=dim, where=where)]


def _adds_logsumexp(root: Any, scores: Any) -> bool:
    """Return whether the loss also adds the logsumexp of these scores: the log_softmax before `nll_loss`, written out.

    As it is, and not squared, as a penalty on it would be.
    """
    waiting, seen = deque([root]), {root}
    while waiting and len(seen) < NEAR:
        node = waiting.popleft()
        kind = "" if node is None else shorten(node)
        if kind == "Logsumexp" and pass_views(node.next_functions[0][0])[0] is scores:
            return True
        new = {following for following, _ in node.next_functions} - seen if kind in SUMS or kind in VIEWS else ()
        seen.update(new)
        waiting.extend(new)
    return False


def find_one_element_norms(loss: Tensor) -> tuple[str, ...]:
    """Return the group and layer norms whose groups have one element: their output does not depend on their input."""
    found: list[str] = []
    for node in walk(loss.grad_fn):
        kind = shorten(node)
        if kind == "NativeGroupNorm" and node._saved_C // node._saved_group * node._saved_HxW == 1:
            found.append(f"group_norm of shape {find_shape(node)} in {node._saved_group} groups")
        elif kind == "NativeLayerNorm" and all(size == 1 for size in node._saved_normalized_shape):
            found.append(f"layer_norm of shape {find_shape(node)} over its last dimension of size 1")
    return tuple(dict.fromkeys(found))


def find_divisors(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that the graph divides by."""
    for node in walk(loss.grad_fn):
        divisor = read_saved(node, "other") if shorten(node) == "Div" else None
        if divisor is not None:
            yield divisor


def find_masks(loss: Tensor) -> Iterator[Tensor | bool]:
    """Yield the masks of attention scores, True where one is hidden; True alone for one that is causal by a flag."""
    for node in walk(loss.grad_fn):
        kind = shorten(node)
        if kind.startswith("ScaledDotProduct"):
            if getattr(node, "_saved_is_causal", False):
                yield True
            elif (mask := read_saved(node, "attn_mask")) is not None:
                yield ~mask if mask.dtype is torch.bool else mask < HIDDEN
        elif kind == "Softmax":
            mask = _read_hidden(pass_views(node.next_functions[0][0])[0])
            if mask is not None:
                yield mask


def sees_all(loss: Tensor, length: int) -> bool:
    """Return whether some attention over `length` positions has no mask that `find_masks` knows."""
    return any(_is_unmasked(node, length) for node in walk(loss.grad_fn))


def _is_unmasked(node: Any, length: int) -> bool:
    kind = shorten(node)
    if kind.startswith("ScaledDotProduct"):
        if getattr(node, "_saved_is_causal", False) or read_saved(node, "attn_mask") is not None:
            return False
        keys = read_saved(node, "key")
        return keys is None or keys.shape[-2:-1] == (length,)
    if kind != "Softmax" or find_shape(node)[2:][-1:] != (length,):
        return False
    return _read_hidden(pass_views(node.next_functions[0][0])[0]) is None


def _read_hidden(node: Any) -> Tensor | None:
    """Return the mask by which scores were replaced before a softmax: True where one is hidden."""
    kind = "" if node is None else shorten(node)
    if kind == "MaskedFill":
        return read_saved(node, "mask")
    condition = read_saved(node, "condition") if kind == "Where" else None
    if condition is None:
        return None
    keeps_true = node.next_functions[0][0] is not None  # the scores are what the gradient goes to
    return ~condition if keeps_true else condition


def walk(root: Any) -> Iterator[Any]:
    """Yield the nodes of a graph, nearest first, at most `MAX_NODES`."""
    # Holds the nodes, and so their Python objects: a new object could have the id of one that was seen.
    waiting, seen = deque([root]), {root}
    while waiting and len(seen) < MAX_NODES:
        node = waiting.popleft()
        if node is None:
            continue
        yield node
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)


def find_losses(root: Any) -> Iterator[Any]:
    """Yield the nodes of loss functions near the root; what is below one of them is the model."""
    waiting, seen = deque([root]), {root}
    while waiting and len(seen) < NEAR:
        node = waiting.popleft()
        if node is None:
            continue
        if shorten(node) in LOSSES:
            yield node
            continue
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)


def pass_views(node: Any) -> tuple[Any, bool]:
    """Return the node behind views and casts, and whether there were any."""
    moved = False
    while node is not None and shorten(node) in VIEWS:
        node, moved = node.next_functions[0][0], True
    return node, moved


def _find_expanded(node: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes before and after a tensor was expanded, if `node` did that; else two empty ones."""
    if node is None or shorten(node) != "Expand" or node.next_functions[0][0] is None:
        return (), ()
    before, after = find_shape(node.next_functions[0][0]), find_shape(node)
    return (before, after) if before != after else ((), ())


def _find_moved_classes(softmax: Any) -> tuple[int, ...]:
    """Return the shape of scores, classes last, that were reshaped right before a softmax to have them second."""
    node = softmax.next_functions[0][0]
    if node is None or shorten(node) not in RESHAPES or node.next_functions[0][0] is None:
        return ()
    before, after = find_shape(node.next_functions[0][0]), find_shape(node)
    return before if moves_last_to_second(before, after) else ()


def moves_last_to_second(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Return whether a reshape moves the last axis to the second place, and keeps the size of what is between.

    >>> moves_last_to_second((8, 49, 32), (8, 32, 7, 7)), moves_last_to_second((8, 32, 49), (8, 32, 7, 7))
    (True, False)
    """
    if len(before) < 3 or len(after) < 3 or before[0] != after[0] or before[1] == after[1]:
        return False
    return before[-1] == after[1] > 1 and math.prod(before[1:-1]) == math.prod(after[2:]) > 1


def find_shape(node: Any) -> tuple[int, ...]:
    """Return the shape of what a node's op returned; empty if it is unknown."""
    metadata = getattr(node, "_input_metadata", ())
    return tuple(int(size) for size in metadata[0].shape) if metadata else ()


def shorten(node: Any) -> str:
    """Return the name of a node's op: 'Addmm'."""
    return _shorten(node.name())


@functools.lru_cache(maxsize=4096)  # a graph has thousands of nodes, and torch a few hundred kinds of them
def _shorten(name: str) -> str:
    return _ENDING.sub("", name)


def name_op(node: Any) -> str:
    """Return the name of a node's op; a product to which a parameter is added is a linear layer."""
    kind = shorten(node)
    if kind == "Add":
        below = [pass_views(following)[0] for following, _ in node.next_functions]
        kinds = {"" if one is None else shorten(one) for one in below}
        # torch splits a layer in two where its input is not contiguous.
        return "Addmm" if kinds in ({"Mm", _LEAF}, {"Bmm", _LEAF}) else kind
    return kind


def read_dim(node: Any) -> int:
    """Return the dimension that a node saved, negative ones as such."""
    return _sign(node._saved_dim)


def spell(kind: str) -> str:
    return NAMES.get(kind) or _WORD.sub("_", kind).lower()


def _sign(number: int) -> int:
    return number - 2 * WRAPPED if number >= WRAPPED else number
