"""A module to put between layers, or around one, that keeps what passes through it in proportion.

Layer and batch norm act on activations [..., hidden_dim]. Weight and spectral norm act on a weight: on that of the
layer given, whose parametrization is set in place, or of a linear layer of its own, which starts as the identity. All
are torch's own; what they cannot normalise, a weight or a row of zeros, is refused by name when the module is built.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from steadygrad.errors import ConfigError


class StabilizerMethod(enum.Enum):
    LAYER_NORM = "layer_norm"
    BATCH_NORM = "batch_norm"
    WEIGHT_NORM = "weight_norm"
    SPECTRAL_NORM = "spectral_norm"


class GradientStabilizer(nn.Module):
    """Normalises activations (layer, batch norm) or the weight of a layer (weight, spectral norm)."""

    def __init__(
        self,
        method: StabilizerMethod | str = StabilizerMethod.LAYER_NORM,
        hidden_dim: int | None = None,
        *,
        layer: nn.Module | None = None,
        eps: float = 1e-5,
        momentum: float = 0.1,
    ) -> None:
        super().__init__()
        self.method = _as_method(method)
        if self.method in (StabilizerMethod.LAYER_NORM, StabilizerMethod.BATCH_NORM):
            self.norm = _build_norm(self.method, _require_dim(self.method, hidden_dim), layer, eps, momentum)
        else:
            inner = _make_identity(_require_dim(self.method, hidden_dim)) if layer is None else layer
            self.norm = _normalize_weight(self.method, inner)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_dim] -> the same shape, or what the layer gives."""
        if not isinstance(self.norm, nn.BatchNorm1d):
            return self.norm(x)  # type: ignore[no-any-return]
        rows = x.reshape(-1, x.shape[-1])
        if self.training and len(rows) < 2:  # a variance of one sample is 0 / 0: what was learnt so far stands in
            norm = self.norm
            normed = nn.functional.batch_norm(
                rows, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=False, eps=norm.eps
            )
        else:
            normed = self.norm(rows)
        return normed.reshape(x.shape)

    def extra_repr(self) -> str:
        return self.method.value


def _as_method(method: StabilizerMethod | str) -> StabilizerMethod:
    try:
        return StabilizerMethod(method)
    except ValueError:
        names = ", ".join(m.value for m in StabilizerMethod)
        raise ConfigError(f"GradientStabilizer.method must be one of {names}, got {method!r}.") from None


def _require_dim(method: StabilizerMethod, hidden_dim: int | None) -> int:
    if not isinstance(hidden_dim, int) or hidden_dim < 1:
        other = "" if method in (StabilizerMethod.LAYER_NORM, StabilizerMethod.BATCH_NORM) else ", or layer=,"
        raise ConfigError(
            f"GradientStabilizer({method.value!r}) needs hidden_dim{other} got hidden_dim={hidden_dim!r}. "
            "Give the size of the last dimension of its input."
        )
    return hidden_dim


def _build_norm(
    method: StabilizerMethod, hidden_dim: int, layer: nn.Module | None, eps: float, momentum: float
) -> nn.Module:
    if layer is not None:
        raise ConfigError(
            f"GradientStabilizer({method.value!r}) normalises activations and takes no layer, got "
            f"{type(layer).__name__}. Put it behind the layer, or use weight_norm or spectral_norm."
        )
    if method is StabilizerMethod.LAYER_NORM:
        return nn.LayerNorm(hidden_dim, eps=eps)
    return nn.BatchNorm1d(hidden_dim, eps=eps, momentum=momentum)


def _make_identity(hidden_dim: int) -> nn.Linear:
    linear = nn.Linear(hidden_dim, hidden_dim)
    nn.init.eye_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def _normalize_weight(method: StabilizerMethod, layer: nn.Module) -> nn.Module:
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() < 2:
        raise ConfigError(
            f"GradientStabilizer({method.value!r}) needs a layer with a weight matrix, got {type(layer).__name__}. "
            "Give a Linear or a convolution."
        )
    rows = torch.linalg.vector_norm(weight.detach().flatten(1).double(), dim=1)
    num_zero = int((rows == 0).sum())
    if num_zero == len(rows) or (num_zero and method is StabilizerMethod.WEIGHT_NORM):
        raise ConfigError(
            f"GradientStabilizer({method.value!r}): {num_zero} of {len(rows)} rows of the weight of "
            f"{type(layer).__name__} are zero and have no direction: 0 / 0. Initialise them first."
        )
    is_weight_norm = method is StabilizerMethod.WEIGHT_NORM
    (parametrizations.weight_norm if is_weight_norm else parametrizations.spectral_norm)(layer)
    return layer
