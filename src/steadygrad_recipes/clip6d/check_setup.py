"""`python -m steadygrad_recipes.clip6d.check_setup`: check in a second that monitor and stable losses work here.

Each check measures something that must hold (finite norms, finite logits, a backward that reaches every input); the
exit code is 1 if one does not. Needs only torch, no data and no Lightning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from steadygrad.losses import get_stable_loss_function
from steadygrad.monitor import GradientHealthMonitor

VERSIONS = ("Einsum-based", "Norm-based", "Cosine similarity to the mean", "Distance-based")
"""`stable_loss_version` -> its method."""
BATCH, WIDTH, NUM_MODALITIES = 16, 64, 3
Say = Callable[[str], Any]


def check_setup(say: Say = print) -> int:
    """Run both checks, print the results, and return the number of failures."""
    torch.manual_seed(0)
    _say_title("Testing Gradient Health Monitor", "=" * 32, say)
    num_failed = int(not check_monitor(say))
    say("")
    _say_title("Testing Stable Loss Functions", "=" * 30, say)
    num_failed += sum(not check_loss(version, say) for version in range(len(VERSIONS)))
    say("")
    say("ALL TESTS COMPLETED!" if not num_failed else f"{num_failed} TESTS FAILED!")
    return num_failed


def check_monitor(say: Say) -> bool:
    """Check the gradients of a small network, and again with one of them NaN: both must be reported correctly."""
    first = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(first, nn.GELU(), nn.Linear(WIDTH, 1))
    model(torch.randn(BATCH, WIDTH)).square().sum().backward()
    monitor = GradientHealthMonitor(model)
    stats = monitor.check_gradients()
    reference = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    is_right = abs(stats["global_grad_norm"] / float(reference) - 1) < 1e-4  # float32 sums taken in another order
    assert first.weight.grad is not None
    first.weight.grad[0, 0] = torch.nan
    passed = is_right and not stats["has_nan"] and not stats["has_inf"] and monitor.check_gradients()["has_nan"]
    say("✓ Gradient monitoring test passed!" if passed else "✗ Gradient monitoring test failed!")
    say(f"  Global norm: {stats['global_grad_norm']:.4f}")
    say(f"  Max norm: {stats['max_grad_norm']:.4f}")
    say(f"  Min norm: {stats['min_grad_norm']:.1e}")
    say(f"  Has NaN: {stats['has_nan']}")
    say(f"  Has Inf: {stats['has_inf']}")
    return passed


def check_loss(version: int, say: Say) -> bool:
    """Check the logits of features with one zero row, which divides by zero where nothing guards against it."""
    features = [torch.randn(BATCH, WIDTH) for _ in range(NUM_MODALITIES)]
    features[0][3] = 0.0
    inputs = [f.requires_grad_() for f in features]
    logits = get_stable_loss_function(loss_version=version, normalize=True, eps=1e-8)(*inputs)
    logits.mean().backward()
    logits = logits.detach()
    valid = bool(logits.isfinite().all())
    reached = all(f.grad is not None and bool(f.grad.isfinite().all()) and bool(f.grad.any()) for f in inputs)
    say(f"{_mark(valid and reached)} {VERSIONS[version]} (v{version}):")
    say(f"  Shape: {logits.shape}")
    say(f"  Range: [{float(logits.min()):.4f}, {float(logits.max()):.4f}]")
    say(f"  Mean: {float(logits.mean()):.4f}, Std: {float(logits.std()):.4f}")
    say(f"  Valid: {_mark(valid)}")
    say(f"  Backward pass: {_mark(reached)}")
    return valid and reached


def _say_title(title: str, line: str, say: Say) -> None:
    say(title)
    say(line)


def _mark(passed: bool) -> str:
    return "✓" if passed else "✗"


if __name__ == "__main__":
    sys.exit(1 if check_setup() else 0)
