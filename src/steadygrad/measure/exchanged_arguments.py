"""A call of a loss over classes -> ExchangedArguments: the labels came first, and the model's output second.

torch accepts both orders where the labels are numbers from 0 to 1 (one-hot, binary), and the gradient then goes to the
target: nothing that the model learns is right. A target with a gradient may be meant, as in a reverse cross entropy
with a teacher. So the input must have no gradient and consist of zeros and ones, both of them, as labels do and no
output does, while the target has other values. Two flags are reduced on the device and sent with one asynchronous
copy, and only if the input has no gradient and the target has one. Reads only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steadygrad.facts.program import ExchangedArguments
from steadygrad.measure.loss_graph import LOSSES, find_losses, shorten
from steadygrad.measure.rows import is_readable, send_rows
from steadygrad.measure.saved import read_saved
from steadygrad.measure.transfer import Transfer

CALLS = frozenset(("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits"))
BINARY = frozenset(("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"))
"""Nodes of those that leave one."""
FEWEST = 4
"""Elements below which outputs may be zeros and ones by chance."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A loss whose target has a gradient and whose input has none."""

    op: str
    looks_exchanged: Tensor
    """A bool on its device."""
    where: str = ""


def read_call(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], find_place: Callable[[], str]
) -> Suspect | None:
    """Return a call of a loss in `CALLS` if only its target has a gradient."""
    first, second, *_ = (*args[:2], *[kwargs[key] for key in ("input", "target") if key in kwargs], None, None)
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return None
    if first.requires_grad or second.grad_fn is None or not _is_comparable(first, second):
        return None
    return Suspect(name, _look(first, second), find_place())


def find_suspects(loss: Tensor) -> Iterator[Suspect]:
    """Yield the binary losses near `loss` in whose graph only the target has a gradient."""
    for node in find_losses(loss.grad_fn):
        kind = shorten(node)
        if kind not in BINARY or node.next_functions[0][0] is not None:
            continue
        first, second = read_saved(node, "self"), read_saved(node, "target")
        if first is not None and second is not None and _is_comparable(first, second):
            yield Suspect(LOSSES[kind], _look(first, second))


class PendingExchange:
    """A flag that is still being copied."""

    def __init__(self, suspect: Suspect, transfer: Transfer | None = None) -> None:
        self._of = suspect
        self._rows = send_rows({"exchanged": suspect.looks_exchanged.double()[None]}, transfer)

    def read(self, step: int) -> ExchangedArguments | None:
        """Return the loss if its arguments look exchanged."""
        if not self._rows.read()["exchanged"][0]:
            return None
        return ExchangedArguments(step=step, op=self._of.op, where=self._of.where)


@torch.no_grad()
def _look(first: Tensor, second: Tensor) -> Tensor:
    """Return, on the device, whether `first` is labels of zeros and ones, and `second` is not."""
    zeros, ones = first == 0, first == 1
    are_labels = (zeros | ones).all() & zeros.any() & ones.any()
    return are_labels & ((second != 0) & (second != 1)).any()


def _is_comparable(first: Tensor, second: Tensor) -> bool:
    return all(is_readable(one) and one.is_floating_point() and one.numel() >= FEWEST for one in (first, second))
