"""M feature matrices [B, D] -> the four kinds of logits over their combinations, with finite gradients.

`StableLossFunctions` and `get_stable_loss_function` keep the names and numbers of a well-known n-dimensional CLIP
training; below are the safe pieces of this package. These give *logits*: two of the four are as large as B^M. For the
loss itself, without that tensor, use `multiway_contrastive`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from steadygrad.errors import ConfigError, UsageError
from steadygrad.losses.check import require_same_shape, require_tensors
from steadygrad.losses.elementwise import power_of_two_near, safe_div, safe_log, safe_sqrt
from steadygrad.losses.precision import hold_above, narrow, widen, without_autocast
from steadygrad.losses.vectors import least_norm, safe_normalize


class StableLossFunctions:
    """Safe pieces with one `eps`, and n-way similarities whose values are held in [clamp_min, clamp_max]."""

    def __init__(self, eps: float = 1e-8, clamp_min: float = -100.0, clamp_max: float = 100.0) -> None:
        if not (math.isfinite(eps) and eps > 0):
            raise ConfigError(f"StableLossFunctions.eps must be a positive number, got {eps}. The default is 1e-8.")
        if not clamp_min < clamp_max:
            raise ConfigError(
                f"StableLossFunctions.clamp_min must be below clamp_max, got {clamp_min} and {clamp_max}. "
                "The defaults are -100 and 100."
            )
        self.eps, self.clamp_min, self.clamp_max = eps, clamp_min, clamp_max

    def stable_norm(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return `x` brought to unit norm (the vector, not the number)."""
        return safe_normalize(x, dim, eps=self.eps)

    def stable_division(self, numerator: Tensor, denominator: Tensor) -> Tensor:
        """Return the quotient, held in the clamp; the sign of the denominator is kept."""
        return self._hold(safe_div(numerator, denominator, eps=self.eps))

    def stable_sqrt(self, x: Tensor) -> Tensor:
        """Return sqrt(x) from eps on, a straight line below, 0 for what rounding has made negative."""
        return safe_sqrt(x, eps=self.eps)

    def stable_log(self, x: Tensor) -> Tensor:
        """Return log(max(x, eps))."""
        return safe_log(x, eps=self.eps)

    def stable_mean_n_vectors(self, *vectors: Tensor) -> Tensor:
        """Return the mean of M tensors of one shape; each is divided first, so that the sum cannot overflow."""
        _check_features("stable_mean_n_vectors", vectors, least=1)
        for v in vectors[1:]:
            require_same_shape("stable_mean_n_vectors", first=vectors[0], another=v)
        return torch.stack([widen(v) / len(vectors) for v in vectors]).sum(0).to(vectors[0].dtype)

    def stable_einsum_similarity(self, *features: Tensor, normalize: bool = True) -> Tensor:
        """Return [B]^M: the sum over D of the product of one row of each."""
        wide, logs = _bring_near_one(self._prepare("stable_einsum_similarity", features, normalize=normalize))
        middle = (len(wide) + 1) // 2
        with without_autocast(wide[0].device):
            # [B^middle, D] @ [D, B^(M - middle)]
            logits = _multiply_rows(wide[:middle]) @ _multiply_rows(wide[middle:]).mT
        shape = [len(f) for f in wide]
        return narrow(self._hold(_scale_back(logits.reshape(shape), logs.sum())), features[0], autocast_keeps=False)

    def stable_norm_based_similarity(self, *features: Tensor, normalize: bool = True) -> Tensor:
        """Return [B]^M: the norm of the sum of one row of each, from tables of pairs; nothing of size B^M · D."""
        wide = self._prepare("stable_norm_based_similarity", features, normalize=normalize)
        wide, log = _bring_near_one(wide, together=True)
        squares = _along(wide[0].square().sum(-1), 0, len(wide))
        for m, f in enumerate(wide[1:], start=1):
            squares = squares + _along(f.square().sum(-1), m, len(wide))
        with without_autocast(wide[0].device):
            for m, f in enumerate(wide):
                for n in range(m + 1, len(wide)):
                    squares = squares + 2 * _along(f @ wide[n].mT, m, len(wide), n)
        norms = _scale_back(safe_sqrt(squares, eps=self.eps), log)
        return narrow(self._hold(norms), features[0], autocast_keeps=False)

    def stable_cosine_similarity_nd(self, *features: Tensor, normalize: bool = True) -> Tensor:
        """Return [B, B]: the geometric mean over the M features of |cosine| of row i with the mean of the rows j."""
        wide = self._prepare("stable_cosine_similarity_nd", features, normalize=normalize, one_batch=True)
        centre = self.stable_norm(self.stable_mean_n_vectors(*wide))
        with without_autocast(centre.device):
            logs = [self.stable_log((f @ centre.mT).abs()) for f in wide]
        return narrow(self._hold(self.stable_mean_n_vectors(*logs).exp()), features[0], autocast_keeps=False)

    def stable_euclidean_distance_nd(self, *features: Tensor, normalize: bool = True) -> Tensor:
        """Return [B, B]: minus the mean over the M features of the distance of row i to the mean of the rows j."""
        wide = self._prepare("stable_euclidean_distance_nd", features, normalize=normalize, one_batch=True)
        centre = self.stable_mean_n_vectors(*wide)
        gaps = [f.unsqueeze(1) - centre.unsqueeze(0) for f in wide]  # each [B, B, D]
        # Not square(): its derivative doubles the gap, which may leave fp32, and 0 * inf is NaN.
        squares = [(gap * gap).sum(-1) for gap in gaps]  # each [B, B]
        far = self.stable_mean_n_vectors(*[(s + self.eps).sqrt() for s in squares])
        return narrow(self._hold(-far), features[0], autocast_keeps=False)

    def _prepare(
        self, function: str, features: Sequence[Tensor], *, normalize: bool, one_batch: bool = False
    ) -> list[Tensor]:
        _check_features(function, features, least=2)
        _check_matrices(function, features, one_batch=one_batch)
        return [safe_normalize(widen(f), eps=max(self.eps, least_norm(f))) if normalize else widen(f) for f in features]

    def _hold(self, x: Tensor) -> Tensor:
        held = torch.where(x > self.clamp_max, self.clamp_max, x)  # a NaN, and its gradient, pass: see `precision.hold`
        return hold_above(held, self.clamp_min)


def get_stable_loss_function(loss_version: int = 0, normalize: bool = True, eps: float = 1e-8) -> Callable[..., Tensor]:
    """Return logits of M features: 0 product (einsum), 1 norm of the sum, 2 cosine, 3 distance; the first two [B]^M."""
    functions = StableLossFunctions(eps=eps)
    versions = (
        functions.stable_einsum_similarity,
        functions.stable_norm_based_similarity,
        functions.stable_cosine_similarity_nd,
        functions.stable_euclidean_distance_nd,
    )
    if loss_version not in range(len(versions)):
        raise ConfigError(
            f"loss_version must be 0 (product), 1 (norm), 2 (cosine) or 3 (distance), got {loss_version!r}. "
            "1 is a good start."
        )
    chosen = versions[loss_version]

    def compute_logits(*features: Tensor) -> Tensor:
        return chosen(*features, normalize=normalize)

    return compute_logits


def _bring_near_one(features: Sequence[Tensor], *, together: bool = False) -> tuple[list[Tensor], Tensor]:
    """Features whose products stay in fp32, and the logarithms to base 2 of what they were divided by, each or all.

    Those whose entries are all below 4096 are left as they are: eight of them can be multiplied.
    """
    sizes = torch.stack([f.detach().abs().amax() if f.numel() else f.new_zeros(()) for f in features])
    sizes = sizes.amax().expand(len(features)) if together else sizes
    # A select on the device: to ask for the largest entry would make the host wait
    logs = torch.where((sizes > 4096) & sizes.isfinite(), power_of_two_near(sizes), 1.0).log2()
    scaled = [f / log.exp2() for f, log in zip(features, logs)]
    return scaled, logs[0] if together else logs


def _scale_back(x: Tensor, log: Tensor) -> Tensor:
    return x * log.clamp(max=126).exp2()  # beyond, every number that is not 0 is held anyway


def _multiply_rows(features: Sequence[Tensor]) -> Tensor:
    """[B1, D], [B2, D], ... -> [B1 · B2 · ..., D]: every product of one row of each."""
    rows = features[0]
    for f in features[1:]:
        rows = (rows.unsqueeze(1) * f.unsqueeze(0)).flatten(0, 1)
    return rows


def _along(table: Tensor, first: int, num_dims: int, second: int | None = None) -> Tensor:
    """Return a view of `table` whose dimensions stand at `first` (and `second`) among `num_dims`."""
    shape = [1] * num_dims
    shape[first] = table.shape[0]
    if second is not None:
        shape[second] = table.shape[1]
    return table.reshape(shape)


def _check_features(function: str, features: Sequence[Tensor], *, least: int) -> None:
    if len(features) < least:
        raise UsageError(f"{function} got {len(features)} feature tensor(s), at least {least} are needed, each [B, D].")
    require_tensors(function, **{f"features[{m}]": f for m, f in enumerate(features)})


def _check_matrices(function: str, features: Sequence[Tensor], *, one_batch: bool) -> None:
    """Each [B, D], all with one D; with one B too where rows are put together by their number."""
    first = features[0]
    for m, feature in enumerate(features):
        fits = feature.dim() == 2 and first.dim() == 2 and feature.shape[1] == first.shape[1]
        if not fits or (one_batch and len(feature) != len(first)):
            raise UsageError(
                f"{function} got features[{m}] of shape {tuple(feature.shape)} and features[0] of shape "
                f"{tuple(first.shape)}. Give all as [B, D], with one D{' and one B' if one_batch else ''}."
            )
