"""AdamW with random rounding to bfloat16, in plain torch: the specification of the kernel, and what runs on a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def update(
    lists: Sequence[Sequence[Tensor]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    seed: int,
    found: Tensor | None = None,
    scale: Tensor | None = None,
    rounds: bool = True,
) -> None:
    """Update in place. `lists`: parameters, gradients, both moments, and counters that include this step."""
    if found is not None and bool(found):
        return
    for i, (param, gradient, first, second, counter) in enumerate(zip(*lists)):
        step = float(counter)
        p, g, m, v = (tensor.float() for tensor in (param, gradient, first, second))
        if scale is not None:
            g = g / scale.float()
        p = (p.double() - lr * weight_decay * p.double()).float()
        m = (betas[0] * m.double() + (1 - betas[0]) * g.double()).float()
        v = (betas[1] * v.double() + (1 - betas[1]) * g.double() * g.double()).float()
        correction = torch.tensor(1 - betas[0] ** step, dtype=torch.float32)
        root = torch.tensor(math.sqrt(1 - betas[1] ** step), dtype=torch.float32)
        below = ((v.double().sqrt().float() / root).double() + eps).float()  # torch's float32 root is off by a unit
        p = p - torch.tensor(lr / float(correction), dtype=torch.float32) * m / below
        generator = torch.Generator(p.device).manual_seed(hash((seed, int(step), i)) % (1 << 63))
        for target, values in ((param, p), (first, m), (second, v)):
            is_random = rounds and target.dtype is torch.bfloat16
            target.copy_(round_at_random(values, generator) if is_random else values)


def round_at_random(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round float32 to one of its two neighbours in bfloat16, the nearer one more often: the mean is `values`."""
    bits = torch.randint(1 << 16, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    raised = (values.view(torch.int32) + bits) & ~0xFFFF
    return torch.where(values.isfinite(), raised.view(torch.float32), values).bfloat16()
