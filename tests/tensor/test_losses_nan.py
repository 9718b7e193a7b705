"""A NaN in the inputs must reach the gradient: a guard that steps after `backward` sees nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steadygrad import Guard, losses

LABELS = torch.tensor([1, 0, 2, 3])
SOME = torch.tensor([[1.0, 0.0, 0.3, 0.7]]).repeat(4, 1)
SHARES = SOME / SOME.sum(1, keepdim=True)
OTHER = torch.linspace(-1, 1, 16).view(4, 4)

# Each maps [4, 4] to a tensor. Linear ones have a constant gradient, and are listed below.
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "masked_cross_entropy": lambda x: losses.masked_cross_entropy(x, LABELS),
    "masked_cross_entropy, sum": lambda x: losses.masked_cross_entropy(x, LABELS, reduction="sum"),
    "masked_cross_entropy, z_loss": lambda x: losses.masked_cross_entropy(x, LABELS, z_loss=1e-2, label_smoothing=0.1),
    "masked_cross_entropy, ceiling": lambda x: losses.masked_cross_entropy(x, LABELS, ceiling=100.0),
    "stable_bce_with_logits": lambda x: losses.stable_bce_with_logits(x, SOME),
    "stable_bce_with_logits, sum": lambda x: losses.stable_bce_with_logits(x, SOME, reduction="sum"),
    "focal": lambda x: losses.focal(x, SOME),
    "stable_kl, logits": lambda x: losses.stable_kl(x, OTHER, from_logits=True),
    "normalized_mse": lambda x: losses.normalized_mse(x, OTHER),
    "dice": lambda x: losses.dice(x, SOME),
    "iou": lambda x: losses.iou(x, SOME),
    "structure_loss": lambda x: losses.structure_loss(x[None, None], SOME[None, None]),
    "info_nce": lambda x: losses.info_nce(x, OTHER),
    "clip_loss": lambda x: losses.clip_loss(x, OTHER),
    "safe_norm": losses.safe_norm,
    "safe_normalize": losses.safe_normalize,
    "safe_std": losses.safe_std,
    "safe_sqrt": losses.safe_sqrt,
    "safe_log": losses.safe_log,
    "safe_div": lambda x: losses.safe_div(1.0, x),
    "safe_acos": losses.safe_acos,
    "safe_asin": losses.safe_asin,
    "safe_atan2": lambda x: losses.safe_atan2(x, OTHER),
    "safe_softmax": losses.safe_softmax,
    "safe_log_softmax": losses.safe_log_softmax,
    **{
        f"version {version}": lambda x, version=version: losses.get_stable_loss_function(version)(x, OTHER)
        for version in range(4)
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_a_nan_reaches_the_gradient(name: str, dtype: torch.dtype) -> None:
    x = (torch.rand(4, 4) * 0.8 + 0.1).to(dtype)
    x[2, 1] = math.nan
    result = LOSSES[name](x.requires_grad_())
    assert result.isnan().any()
    (grad,) = torch.autograd.grad(result.sum(), x)
    assert grad[2, 1].isnan()


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (losses.stable_bce_with_logits, F.binary_cross_entropy_with_logits),
        (lambda x, y: losses.masked_cross_entropy(x, LABELS), lambda x, y: F.cross_entropy(x, LABELS)),
        (lambda x, y: losses.masked_mean(x * y), lambda x, y: (x * y).mean()),
        (
            lambda x, y: losses.stable_kl(x, y, reduction="sum"),
            lambda x, y: F.kl_div(x, y, reduction="sum"),
        ),
    ],
    ids=["bce", "cross entropy", "mean", "kl"],
)
def test_elements_next_to_a_nan_keep_their_gradient(ours: Callable[..., Tensor], plain: Callable[..., Tensor]) -> None:
    x = torch.randn(4, 4)
    x[2, 1] = math.nan
    x.requires_grad_()
    grads = [torch.autograd.grad(loss(x, SHARES), x)[0] for loss in (ours, plain)]
    torch.testing.assert_close(*grads, equal_nan=True)
    assert grads[0][0].abs().max() > 0


def test_a_guard_that_sees_only_gradients_skips_a_step_with_a_nan_loss() -> None:
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.Adam(model.parameters(), lr=0.1))
    for step in range(8):
        x, offset = torch.randn(8, 4), torch.zeros(8)
        if step == 5:
            offset[0] = math.nan
        before = model.weight.detach().clone()
        model.zero_grad()
        losses.stable_bce_with_logits(model(x).squeeze(-1) + offset, (x[:, 1] > 0).float()).backward()
        guard.step()
        if step == 5:
            assert torch.equal(model.weight, before)
    guard.flush()
    assert [(finding.kind, finding.step) for finding in guard.findings] == [("nonfinite_gradient", 5)]
    guard.close()


def test_a_nan_where_the_target_has_no_mass_reaches_the_gradient_as_in_torch() -> None:
    log_q, p = torch.tensor([[math.nan, -1.0]]), torch.tensor([[0.0, 1.0]])
    assert F.kl_div(log_q, p, reduction="sum").isnan()
    assert losses.stable_kl(log_q, p).isnan()
    assert losses.stable_kl(log_q, p.log(), log_target=True).isnan()
    assert losses.stable_kl(torch.tensor([[-math.inf, -1.0]]), p) == 1.0


@pytest.mark.parametrize("size", [1e-38, 1e-36, 1e-30, 1.0, 1e30, 3e38])
def test_a_mean_has_the_size_of_its_elements(size: float) -> None:
    x = torch.full((1000,), size, requires_grad=True)
    mean = losses.masked_mean(x)
    torch.testing.assert_close(mean, torch.tensor(size), rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(mean, x)
    torch.testing.assert_close(grad, torch.full_like(x, 1e-3))
    mixed = torch.tensor([3e38, 3e38, -3e38, -3e38], requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(losses.masked_mean(mixed), mixed)[0], torch.full((4,), 0.25))


def test_infinite_rows_do_not_affect_the_gradient_of_others() -> None:
    logits = torch.zeros(4, 3)
    logits[:2, 1] = -math.inf  # that of the label
    target = torch.tensor([1, 1, 0, 0])
    logits.requires_grad_()
    loss = losses.masked_cross_entropy(logits, target, reduction="sum")
    assert loss == torch.finfo(torch.float32).max
    (grad,) = torch.autograd.grad(loss, logits)
    assert grad.isfinite().all()
    plain = torch.zeros(4, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(F.cross_entropy(plain, target, reduction="sum"), plain)
    torch.testing.assert_close(grad[2:], expected[2:])


def test_an_infinite_vector_has_an_infinite_norm_and_a_huge_deviation_is_clamped() -> None:
    assert losses.safe_norm(torch.tensor([math.inf, 1.0])) == math.inf
    assert losses.safe_norm(torch.tensor([[math.inf, 1.0], [3.0, 4.0]]), dim=1).tolist() == [math.inf, 5.0]
    top = torch.finfo(torch.float32).max
    far = torch.tensor([top, -top], requires_grad=True)
    std = losses.safe_std(far)
    assert std == top
    assert torch.autograd.grad(std, far)[0].isfinite().all()


def test_the_norm_of_tiny_float64_vectors_is_exact() -> None:
    x = torch.tensor([3e-200, 4e-200], dtype=torch.float64, requires_grad=True)
    norm = losses.safe_norm(x)
    torch.testing.assert_close(norm.item(), 5e-200, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(norm, x)[0].tolist(), [0.6, 0.8])


def test_a_learned_temperature_below_its_floor_can_recover() -> None:
    temperature = torch.tensor(0.004, requires_grad=True)
    x = F.normalize(torch.randn(4, 8), dim=1)
    loss = losses.info_nce(x + torch.randn(4, 8), x, temperature=temperature)
    (grad,) = torch.autograd.grad(loss, temperature)
    assert grad != 0
    assert grad.isfinite()
