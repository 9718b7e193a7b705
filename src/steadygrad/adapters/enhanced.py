"""Monitor gradients and activations from inside a training module, with two lines of code.

`EnhancedTrainingMixin` and its companion functions keep the names under which a well-known 6-dimensional CLIP training
used them. They observe, and clip if requested; to skip bad steps use `GuardCallback`. Needs no framework: a plain
`nn.Module` works as well as a LightningModule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.errors import UsageError
from steadygrad.losses import get_stable_loss_function
from steadygrad.monitor import ActivationMonitor, GradientHealth, GradientHealthMonitor

logger = logging.getLogger("steadygrad")


class EnhancedTrainingMixin:
    """Mixin for a training module: `class Mine(EnhancedTrainingMixin, LightningModule)`.

    >>> class Mine(EnhancedTrainingMixin, nn.Linear):
    ...     def __init__(self):
    ...         super().__init__(2, 1)
    ...         self.setup_gradient_monitoring(enable_activation_monitoring=True, log_frequency=1000)
    >>> module = Mine()
    >>> module(torch.ones(1, 2)).sum().backward()
    >>> module.check_and_log_gradients(step=1, apply_clipping=True)["has_nan"]
    False
    """

    enable_gradient_monitoring: bool = False
    enable_activation_monitoring: bool = False
    gradient_monitor: GradientHealthMonitor | None = None
    activation_monitor: ActivationMonitor | None = None

    def setup_gradient_monitoring(
        self,
        enable_gradient_monitoring: bool = True,
        enable_activation_monitoring: bool = False,
        gradient_clip_threshold: float = 1.0,
        log_frequency: int = 100,
        enable_detailed_logging: bool = False,
    ) -> None:
        """Set up monitoring. Call it in `__init__`; for activations, after creating the layers: each gets a hook."""
        self.enable_gradient_monitoring = enable_gradient_monitoring
        self.enable_activation_monitoring = enable_activation_monitoring
        self._monitor_settings: dict[str, Any] = {
            "grad_clip_threshold": gradient_clip_threshold,
            "log_frequency": log_frequency,
            "enable_detailed_logging": enable_detailed_logging,
        }
        if enable_activation_monitoring:
            module = _as_module(self)
            if not any(module.children()) and not any(module.parameters()):
                raise UsageError(
                    f"{type(self).__name__} has no layers yet, so there are no activations to monitor. Call "
                    "setup_gradient_monitoring after the layers are created, at the end of __init__."
                )
            self.activation_monitor = ActivationMonitor(module, training_only=True)
            self.activation_monitor.register_hooks()

    def check_and_log_gradients(
        self, step: int, apply_clipping: bool = False, max_grad_norm: float | None = None
    ) -> GradientHealth | dict[str, Any]:
        """Return the result of `check_gradients`; {} when off. Call it between backward and the optimizer's step.

        Numbers go to the module's logger; text is printed every `log_frequency` steps and when something is wrong.
        `max_grad_norm` defaults to `gradient_clip_threshold`. Non-finite gradients are left as they are.
        """
        if not self.enable_gradient_monitoring:
            return {}
        module = _as_module(self)
        if self.gradient_monitor is None:  # only now: layers may have been added after the setup
            self.gradient_monitor = GradientHealthMonitor(module, **self._monitor_settings)
        limit = self.gradient_monitor.grad_clip_threshold if max_grad_norm is None else max_grad_norm
        stats = _check(module, self.gradient_monitor, step, limit if apply_clipping else None)
        if apply_clipping and getattr(self, "_trainer", None) is not None:
            norm = stats["global_grad_norm"]
            values = {"grad_norm_before_clip": norm, "grad_norm_after_clip": min(norm, limit)}
            self.log_dict(values)  # type: ignore[attr-defined]  # LightningModule's
        return stats

    def get_activation_statistics(self) -> dict[str, Any]:
        """Return `activations` (statistics by module) and `dead_neurons` (share by module, if above 0); {} when off."""
        if self.activation_monitor is None:
            return {}
        dead = {name: share for name, share in self.activation_monitor.detect_dead_neurons().items() if share > 0}
        return {"activations": self.activation_monitor.get_statistics(), "dead_neurons": dead}


def integrate_health_checks(
    module: nn.Module,
    loss: Tensor,
    step: int,
    apply_gradient_clipping: bool = True,
    max_grad_norm: float = 1.0,
) -> dict[str, Any]:
    """Return `loss`, and `gradient_stats` if there are gradients. Call it after backward; works with any module."""
    result: dict[str, Any] = {"loss": loss}
    if not any(p.grad is not None for p in module.parameters()):
        return result
    if isinstance(module, EnhancedTrainingMixin):
        stats = module.check_and_log_gradients(step, apply_gradient_clipping, max_grad_norm)
        return {**result, "gradient_stats": stats} if stats else result
    monitor = getattr(module, "gradient_monitor", None)
    if not isinstance(monitor, GradientHealthMonitor):
        monitor = GradientHealthMonitor(module, enable_detailed_logging=False)
        object.__setattr__(module, "gradient_monitor", monitor)
    limit = max_grad_norm if apply_gradient_clipping else None
    return {**result, "gradient_stats": _check(module, monitor, step, limit)}


def _check(module: nn.Module, monitor: GradientHealthMonitor, step: int, max_norm: float | None) -> GradientHealth:
    """Measure, report, and clip if requested; for gradients that still carry a loss scale, the limit is scaled too."""
    trainer = getattr(module, "_trainer", None)
    scaler = _find_scaler(trainer)
    stats = monitor.check_gradients(scaler=scaler)
    monitor.log_statistics(stats, step=step, logger=_find_voice(module, getattr(trainer, "logger", None)))
    if max_norm is not None:
        # get_scale() reads from the device: the host waits, but only for a caller who asked for clipping under fp16.
        monitor.apply_gradient_clipping(max_norm * (1.0 if scaler is None else scaler.get_scale()))
    return stats


def replace_loss_function_with_stable_version(
    module: Any, loss_version: int = 1, normalize: bool = True, eps: float = 1e-8
) -> Callable[..., Tensor]:
    """Replace `module.calculate_loss` by a stable function; the original becomes `calculate_loss_original`."""
    stable = get_stable_loss_function(loss_version=loss_version, normalize=normalize, eps=eps)
    if hasattr(module, "calculate_loss"):
        module.calculate_loss_original = module.calculate_loss
    module.calculate_loss = stable
    logger.info("%s.calculate_loss is now the stable version %d.", type(module).__name__, loss_version)
    return stable


def _as_module(mixed: object) -> nn.Module:
    if not isinstance(mixed, nn.Module):
        raise UsageError(
            f"{type(mixed).__name__} is not a Module. Write class Mine(EnhancedTrainingMixin, LightningModule)."
        )
    return mixed


def _find_scaler(trainer: Any) -> torch.amp.GradScaler | None:
    """Return the scaler whose scale the gradients still carry."""
    scaler: torch.amp.GradScaler | None = getattr(getattr(trainer, "precision_plugin", None), "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return None
    # Private to GradScaler, which has no public answer. unscale_ sets the stage, update() forgets it.
    states = scaler._per_optimizer_states.values()
    return None if any(state["stage"].name == "UNSCALED" for state in states) else scaler


class _Voice:
    """A Lightning logger with the `.log(dict, step=...)` method that monitors call."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def log(self, values: dict[str, float], step: int) -> None:
        self.logger.log_metrics(values, step=step)


def _find_voice(module: nn.Module, logger: Any) -> _Voice | None:
    """Return the same object for the same logger, so that a monitor can remember that a logger is broken."""
    if logger is None:
        return None
    voice = vars(module).get("_gradient_voice")
    if voice is None or voice.logger is not logger:
        voice = _Voice(logger)
        object.__setattr__(module, "_gradient_voice", voice)
    return voice
