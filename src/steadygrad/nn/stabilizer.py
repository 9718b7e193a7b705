"""A module to put between layers, or around one, that keeps what passes through it in proportion.

Layer and batch norm act on activations [..., hidden_dim]. Weight and spectral norm act on a weight: on that of the
layer given, whose parametrization is set in place, or of its own linear layer, which starts as the identity. All
are torch's own; what they cannot normalise, a weight or a row of zeros or of NaN, is refused by name when the module is
built.
"""

from __future__ import annotations

import enum
import math

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized

from steadygrad.config.checks import is_number, is_whole
from steadygrad.errors import ConfigError

SPECTRAL_EPS = 1e-12  # torch divides by no less, and so does not normalise what is smaller


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
        momentum: float | None = 0.1,
    ) -> None:
        super().__init__()
        self.method = _as_method(method)
        _check_numbers(self.method, eps, momentum)
        if self.method in (StabilizerMethod.LAYER_NORM, StabilizerMethod.BATCH_NORM):
            self.norm = _build_norm(self.method, _require_dim(self.method, hidden_dim), layer, eps, momentum)
        else:
            inner = _make_identity(_require_dim(self.method, hidden_dim)) if layer is None else layer
            self.norm = _normalize_weight(self.method, inner)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_dim] -> the same shape, or what the layer gives."""
        norm = self.norm
        if self.method is not StabilizerMethod.BATCH_NORM:
            return norm(x)  # type: ignore[no-any-return]
        rows = x.reshape(-1, x.shape[-1])  # [N, hidden_dim]
        # A variance of one sample is 0 / 0: what was learnt so far stands in. One that is converted to SyncBatchNorm
        # looks at the samples of all ranks, and must not be left out on one.
        if isinstance(norm, nn.BatchNorm1d) and self.training and len(rows) < 2:
            normed = nn.functional.batch_norm(
                rows, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=False, eps=norm.eps
            )
        else:
            normed = norm(rows)
        return normed.reshape(x.shape)

    def extra_repr(self) -> str:
        return self.method.value


def _as_method(method: StabilizerMethod | str) -> StabilizerMethod:
    try:
        return StabilizerMethod(method)
    except ValueError:
        names = ", ".join(m.value for m in StabilizerMethod)
        raise ConfigError(f"GradientStabilizer.method must be one of {names}, got {method!r}.") from None


def _check_numbers(method: StabilizerMethod, eps: float, momentum: float | None) -> None:
    if not (is_number(eps) and 0 < eps < math.inf):
        raise ConfigError(
            f"GradientStabilizer({method.value!r}): eps must be a finite number above 0, got {eps!r}. 1e-5 is usual."
        )
    if momentum is not None and not (is_number(momentum) and 0 <= momentum <= 1):
        raise ConfigError(
            f"GradientStabilizer({method.value!r}): momentum must lie between 0 and 1, or be None for the mean of all "
            f"batches, got {momentum!r}. 0.1 is usual."
        )


def _require_dim(method: StabilizerMethod, hidden_dim: int | None) -> int:
    if hidden_dim is None or not is_whole(hidden_dim) or hidden_dim < 1:
        other = "" if method in (StabilizerMethod.LAYER_NORM, StabilizerMethod.BATCH_NORM) else ", or layer=,"
        raise ConfigError(
            f"GradientStabilizer({method.value!r}) needs hidden_dim{other} got hidden_dim={hidden_dim!r}. "
            "Give the size of the last dimension of its input."
        )
    return hidden_dim


def _build_norm(
    method: StabilizerMethod, hidden_dim: int, layer: nn.Module | None, eps: float, momentum: float | None
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
    # Its rows and its largest singular value are 1: either norm leaves it as it is.
    nn.init.eye_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def _normalize_weight(method: StabilizerMethod, layer: nn.Module) -> nn.Module:
    _check_layer(method, layer)
    weight = layer.weight
    if isinstance(weight, Tensor) and not weight.is_meta:  # on meta there are no values to look at yet
        # Before the parametrization, so that a refusal leaves the user's layer as it was.
        _check_rows(method, weight, type(layer).__name__)
    is_weight_norm = method is StabilizerMethod.WEIGHT_NORM
    (parametrizations.weight_norm if is_weight_norm else parametrizations.spectral_norm)(layer)
    return layer


def _check_layer(method: StabilizerMethod, layer: nn.Module) -> None:
    """Refuse a layer whose weight torch cannot take over."""
    where, kind = f"GradientStabilizer({method.value!r})", type(layer).__name__
    weight = getattr(layer, "weight", None)
    if isinstance(weight, UninitializedParameter):
        raise ConfigError(f"{where}: the weight of {kind} is not made yet. Run the layer once first.")
    if not isinstance(layer, nn.Module) or not isinstance(weight, Tensor) or weight.dim() < 2:
        raise ConfigError(f"{where} needs a layer with a weight matrix, got {kind}. Give a Linear or a convolution.")
    stacks = method is StabilizerMethod.SPECTRAL_NORM and is_parametrized(layer, "weight")  # torch's weight norm cannot
    if "weight" not in layer._parameters and not stacks:
        raise ConfigError(
            f"{where}: the weight of {kind} is computed from other parameters already, by a norm or parametrization "
            "of its own. Remove that first, or do without this one."
        )


@torch.no_grad()
def _check_rows(method: StabilizerMethod, weight: Tensor, kind: str) -> None:
    """Refuse a weight of which torch makes NaN or Inf."""
    is_weight_norm = method is StabilizerMethod.WEIGHT_NORM
    rows = torch.norm_except_dim(weight, 2, 0).flatten()  # in the precision of the weight, as weight norm has it
    num_nonfinite = int((~rows.isfinite()).sum())
    num_zero = int((rows <= (0 if is_weight_norm else SPECTRAL_EPS)).sum())
    where = f"GradientStabilizer({method.value!r})"
    if num_nonfinite:
        raise ConfigError(
            f"{where}: {num_nonfinite} of {len(rows)} rows of the weight of {kind} are not finite, or too large for a "
            f"length in {weight.dtype}. Repair or initialise them first."
        )
    # Spectral norm divides the whole weight by one number, so single rows of zeros do no harm.
    if num_zero == len(rows) or (num_zero and is_weight_norm):
        raise ConfigError(
            f"{where}: {num_zero} of {len(rows)} rows of the weight of {kind} are zero, or as good as, and have no "
            "direction: 0 / 0. Initialise them first."
        )
