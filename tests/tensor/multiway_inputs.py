"""Features, scales and tolerances for the tests of the multiway loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from steadygrad.losses.multiway import align_gain, multiway_contrastive


def make_features(
    num: int, size: int, dim: int, *, dtype: torch.dtype = torch.float64, device: str = "cpu", noise: float = 1.0
) -> list[Tensor]:
    """Unit vectors that share a direction by sample, so that positives are prominent and gradients are not tiny."""
    common = torch.randn(size, dim, dtype=torch.float64)
    rows = [common + noise * torch.randn(size, dim, dtype=torch.float64) for _ in range(num)]
    units = [torch.nn.functional.normalize(row, dim=1) for row in rows]
    return [unit.to(device=device, dtype=dtype).requires_grad_() for unit in units]


def make_scale(num: int, dim: int, *, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    """CLIP's scale, for a product of `num` vectors: logits of a few units."""
    return torch.tensor(14.0 * align_gain(num, dim), dtype=dtype, device=device, requires_grad=True)


def evaluate(features: list[Tensor], scale: Tensor, **options: Any) -> list[Tensor]:
    """Return the loss, and its gradients by scale and features."""
    loss = multiway_contrastive(features, scale, **options)
    weights = torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype, device=loss.device)  # negative ones too
    total = loss if loss.dim() == 0 else (loss * weights.view_as(loss)).sum()
    return [loss, *torch.autograd.grad(total, [scale, *features])]


def assert_same(found: list[Tensor], expected: list[Tensor], *, rtol: float, atol: float = 0.0) -> None:
    """Each tensor within `rtol` of the expected one's largest entry: small entries are sums of large ones."""
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        largest = float(b.detach().abs().max())
        torch.testing.assert_close(
            a, b.to(a.dtype), rtol=rtol, atol=max(atol, rtol * largest), msg=_say(f"tensor {place} of {len(found)}")
        )


def _say(where: str) -> Callable[[str], str]:
    return lambda text: f"{where}: {text}"
