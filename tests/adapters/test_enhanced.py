"""EnhancedTrainingMixin and its functions: in a plain loop, in Lightning, and under a loss scale."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_trainings import Classifier, ListLogger, fit, make_batches
from torch import Tensor, nn

from steadygrad import UsageError
from steadygrad.adapters.lightning import (
    EnhancedTrainingMixin,
    integrate_health_checks,
    replace_loss_function_with_stable_version,
)


class Plain(EnhancedTrainingMixin, nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.setup_gradient_monitoring(**settings)  # before the layers, as in many programs
        self.net = nn.Linear(4, 2)


class Enhanced(EnhancedTrainingMixin, Classifier):
    """Two lines in a module's code."""

    def __init__(self, *, apply_clipping: bool = True) -> None:
        super().__init__(norm=False)
        self.setup_gradient_monitoring(enable_activation_monitoring=True, gradient_clip_threshold=0.3)
        self.apply_clipping = apply_clipping

    def on_after_backward(self) -> None:
        self.check_and_log_gradients(step=self.global_step, apply_clipping=self.apply_clipping)


def norm_of(module: nn.Module) -> float:
    return float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in module.parameters()])))


def test_a_check_returns_the_statistics_and_clips_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    module = Plain(gradient_clip_threshold=0.5, log_frequency=10)
    (module.net(torch.ones(3, 4)) * 10).sum().backward()
    before = norm_of(module)

    stats = module.check_and_log_gradients(step=10)
    assert stats["global_grad_norm"] == pytest.approx(before)
    assert norm_of(module) == before
    assert "Step 10 - Gradient Health" in capsys.readouterr().out

    module.check_and_log_gradients(step=11, apply_clipping=True)
    assert norm_of(module) == pytest.approx(0.5, rel=1e-4)
    module.check_and_log_gradients(step=12, apply_clipping=True, max_grad_norm=0.1)
    assert norm_of(module) == pytest.approx(0.1, rel=1e-4)


def test_disabled_it_does_nothing() -> None:
    module = Plain(enable_gradient_monitoring=False)
    module.net(torch.ones(3, 4)).sum().backward()
    assert module.check_and_log_gradients(step=0, apply_clipping=True) == {}
    assert module.get_activation_statistics() == {}


def test_activation_monitoring_needs_layers_to_hook() -> None:
    with pytest.raises(UsageError, match="after the layers"):
        Plain(enable_activation_monitoring=True)


def test_in_lightning_numbers_are_logged_and_gradients_are_clipped() -> None:
    logger, module = ListLogger(), Enhanced()
    reference = Classifier(norm=False)
    reference.compute_loss(make_batches(1)[0]).backward()

    fit(module, make_batches(4), logger=logger)

    norms = [line["grad/global_norm"] for line in logger.lines if "grad/global_norm" in line]
    assert len(norms) == 4
    assert norms[0] == pytest.approx(norm_of(reference), rel=1e-5)
    lines = [line for line in logger.lines if "grad_norm_after_clip" in line]
    assert lines[0]["grad_norm_before_clip"] == pytest.approx(norms[0], rel=1e-5)
    assert lines[0]["grad_norm_after_clip"] == pytest.approx(0.3)
    statistics = module.get_activation_statistics()
    assert statistics["activations"]["net.3"]["num_calls"] == 4
    assert isinstance(statistics["dead_neurons"], dict)


def test_under_a_loss_scale_norms_are_unscaled_and_clipping_is_correct() -> None:
    class Seen(Enhanced):
        seen: float

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen = norm_of(self)

    logger, module = ListLogger(), Seen()
    precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    fit(module, make_batches(1), logger=logger, plugins=[precision])

    norm = next(line["grad/global_norm"] for line in logger.lines if "grad/global_norm" in line)
    assert 0.3 < norm < 5
    assert module.seen == pytest.approx(0.3, rel=1e-2)


def test_any_module_can_be_checked_after_backward() -> None:
    module = nn.Linear(4, 2)
    loss = (module(torch.ones(3, 4)) * 10).sum()
    assert integrate_health_checks(module, loss, 0) == {"loss": loss}, "nothing to look at before backward"
    loss.backward()

    result = integrate_health_checks(module, loss, 0, max_grad_norm=0.5)

    assert result["loss"] is loss
    assert result["gradient_stats"]["global_grad_norm"] > 10
    assert norm_of(module) == pytest.approx(0.5, rel=1e-4)
    kept = integrate_health_checks(module, loss, 1, apply_gradient_clipping=False)
    assert kept["gradient_stats"]["global_grad_norm"] == pytest.approx(0.5, rel=1e-4)


def test_nan_gradients_are_reported_and_unchanged() -> None:
    module = Plain()
    (module.net(torch.ones(3, 4)) * math.nan).sum().backward()
    result = integrate_health_checks(module, torch.tensor(math.nan), 3)
    assert result["gradient_stats"]["has_nan"]
    assert all(bool(p.grad.isnan().all()) for p in module.parameters())


def test_a_loss_function_is_replaced_and_the_old_one_is_kept() -> None:
    class Module:
        def calculate_loss(self, *features: Tensor) -> Tensor:
            return features[0] / features[1].norm()

    module = Module()
    old = module.calculate_loss
    stable = replace_loss_function_with_stable_version(module, loss_version=1)

    assert module.calculate_loss is stable
    assert module.calculate_loss_original == old
    features = [torch.zeros(4, 3, requires_grad=True) for _ in range(3)]
    module.calculate_loss(*features).sum().backward()
    assert all(bool(f.grad.isfinite().all()) for f in features if f.grad is not None)
