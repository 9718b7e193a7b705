"""Parts of models that keep gradients healthy: activations and advice on them, norms, checkpointing, gradient noise."""

from steadygrad.nn.activations import ImprovedActivations, get_activation_function_recommendations
from steadygrad.nn.checkpointing import add_gradient_checkpointing
from steadygrad.nn.noise import GradientNoise, add_gradient_noise
from steadygrad.nn.stabilizer import GradientStabilizer, StabilizerMethod

__all__ = [
    "GradientNoise",
    "GradientStabilizer",
    "ImprovedActivations",
    "StabilizerMethod",
    "add_gradient_checkpointing",
    "add_gradient_noise",
    "get_activation_function_recommendations",
]
