"""Samples of all processes beside each other, with the gradient, and log-sum-exps joined over the processes.

Each process answers for its own samples and sums its own part of the combinations. What it returns is the loss of its
own samples; the mean over processes, which DistributedDataParallel takes of the gradients, is the loss of all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_rows(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[n, ...] -> [world * n, ...], in rank order; every process must bring the same n."""
    out: Tensor = _Gather.apply(local, group)  # type: ignore[no-untyped-call]
    return out


def join_sums(partial: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The log-sum-exp over processes, element by element."""
    return gather_rows(partial[None], group).logsumexp(0)


class _Gather(torch.autograd.Function):
    """all_gather; its gradient is the sum over processes of what each has for this one's rows."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group, ctx.num = group, len(local)
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        start = dist.get_rank(ctx.group) * ctx.num
        return grad[start : start + ctx.num], None
