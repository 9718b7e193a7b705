"""Monitoring without acting: for users who keep their own training loop and want to know how it is doing.

Gradients are measured by the same one pass as under Guard. Nothing here changes training, with the one exception that
is asked for by name: `GradientHealthMonitor.apply_gradient_clipping`.
"""

from steadygrad.monitor.activations import ActivationMonitor, ActivationStats
from steadygrad.monitor.gradients import GradientHealth, GradientHealthMonitor

__all__ = ["ActivationMonitor", "ActivationStats", "GradientHealth", "GradientHealthMonitor"]
