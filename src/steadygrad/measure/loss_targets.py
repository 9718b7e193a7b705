"""The targets of a loss -> a TargetScan: how far they lie outside what the output, or the loss, can express.

Two sources: nodes near the loss that saved their target, whose output comes from an activation of a known range; and
calls of losses that leave no node of their own (`kl_div`, and those for labels of -1 and 1). Each target is reduced to
three numbers on its device and sent with one asynchronous copy. Losses that return one value for each element are left
out: a mask may follow. Cost: a few passes over the target, in the first backwards and with the periodic scans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steadygrad.facts.program import TargetScan
from steadygrad.measure.loss_graph import LOSSES, find_losses, name_op, pass_views, shorten, spell
from steadygrad.measure.rows import is_readable, send_rows
from steadygrad.measure.saved import read_saved
from steadygrad.measure.transfer import Transfer

RANGES = {
    "Sigmoid": (0.0, 1.0),
    "Softmax": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Relu": (0.0, math.inf),
    "Softplus": (0.0, math.inf),
    "Exp": (0.0, math.inf),
}
"""What an activation can return."""
REGRESSIONS = frozenset(("MseLoss", "SmoothL1Loss", "HuberLoss"))
PROBABILITIES = frozenset(("BinaryCrossEntropyWithLogits", "BinaryCrossEntropy"))
TOLERANCE = 0.25
"""How far labels may lie outside 0 to 1: noisy labels of a discriminator go up to 1.2."""
CALLS = {
    "kl_div": (1, 0.0, math.inf),
    "cosine_embedding_loss": (2, -1.0, 1.0),
    "margin_ranking_loss": (2, -1.0, 1.0),
    "hinge_embedding_loss": (1, -1.0, 1.0),
    "soft_margin_loss": (1, -1.0, 1.0),
}
"""Loss without a node of its own -> place of its target among the arguments, and the range of that."""
MOST_ELEMENTS = 1 << 22
"""Larger targets are sampled."""


@dataclass(frozen=True, slots=True)
class LossTarget:
    """A loss with a target that should lie in a range, still on its device."""

    op: str
    fed_by: str
    """The activation that made the output, empty where the range is that of the loss."""
    low: float
    high: float
    numbers: Tensor
    """Lowest, highest, and the share of its variation that is out of range."""
    where: str = ""


def find_loss_targets(loss: Tensor) -> Iterator[LossTarget]:
    """Yield the losses near `loss` that average over their elements and whose targets have a range."""
    for node in find_losses(loss.grad_fn):
        kind = shorten(node)
        if kind not in REGRESSIONS | PROBABILITIES or node._saved_reduction == 0:
            continue
        if kind in PROBABILITIES:
            fed_by, bounds = "", (-TOLERANCE, 1 + TOLERANCE)
            target = read_saved(node, "target") if node._saved_weight is None else None
        else:
            prediction, given = (following for following, _ in node.next_functions[:2])
            # The output is what has a gradient: it may come second.
            target = read_saved(node, "target" if given is None else "self") if None in (prediction, given) else None
            inner = pass_views(prediction or given)[0]
            fed_by = "" if inner is None else shorten(inner)
            if fed_by not in RANGES:
                continue
            bounds = RANGES[fed_by]
        if target is not None and _is_measurable(target):
            yield LossTarget(LOSSES[kind], spell(fed_by), *bounds, numbers=_measure(target, *bounds))


def read_loss_call(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], find_place: Callable[[], str]
) -> LossTarget | None:
    """Return the target of a call of a loss in `CALLS`; None if it has no range, or a mask may follow."""
    place, low, high = CALLS[name]
    if kwargs.get("reduction") == "none" or kwargs.get("log_target") or any(one is True for one in args[4:]):
        return None
    target = kwargs.get("target", args[place] if len(args) > place else None)
    if not isinstance(target, Tensor) or not _is_measurable(target):
        return None
    output = kwargs.get("input", args[0] if args else None)
    inner = pass_views(output.grad_fn)[0] if isinstance(output, Tensor) and output.grad_fn is not None else None
    fed_by = spell(name_op(inner)) if inner is not None and name == "kl_div" else ""
    return LossTarget(name, fed_by, low, high, _measure(target, low, high), find_place())


class PendingTargets:
    """Numbers about a target that are still being copied."""

    def __init__(self, target: LossTarget, transfer: Transfer | None = None) -> None:
        self._of, self._rows = target, send_rows({"target": target.numbers}, transfer)

    def read(self, step: int) -> TargetScan:
        """Return them as a scan of `step`."""
        lowest, highest, lost = self._rows.read()["target"]
        return TargetScan(
            step=step,
            op=self._of.op,
            fed_by=self._of.fed_by,
            low=self._of.low,
            high=self._of.high,
            lowest=lowest,
            highest=highest,
            lost=lost,
            where=self._of.where,
        )


@torch.no_grad()
def _measure(target: Tensor, low: float, high: float) -> Tensor:
    """Return lowest, highest, and of the target's variation the share that a value between `low` and `high` misses."""
    values = target.detach().flatten()
    values = values[:: math.ceil(values.numel() / MOST_ELEMENTS)].double()
    missed = (values - values.clamp(low, high)).square().mean()
    varied = values.var(correction=0)
    lost = missed / (missed + varied).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.stack([values.amin(), values.amax(), lost])


def _is_measurable(target: Tensor) -> bool:
    return is_readable(target) and not target.is_complex() and target.numel() > 1
