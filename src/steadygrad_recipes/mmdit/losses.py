"""Model answers -> `text_loss` and `latent_loss`, each a finite number for finite answers.

The text loss is the cross entropy over hidden words, the latent loss the squared error between unit vectors. Both come
from `steadygrad.losses`: a batch in which nothing is hidden gives a zero connected to the graph, and no epsilon is
needed. NaN is not hidden: the Guard must see it.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from steadygrad.losses import Loss, masked_cross_entropy, normalized_mse
from steadygrad.losses.precision import hold
from steadygrad_recipes.mmdit.config import LossConfig
from steadygrad_recipes.mmdit.diffusion import Hidden


class JointLoss:
    """Both losses and their weighted sum."""

    def __init__(self, config: LossConfig) -> None:
        self.config = config
        scale = config.loss_scale
        self._sum = Loss(text_loss=scale * config.text_loss_weight, latent_loss=scale * config.latent_loss_weight)

    def __call__(
        self, logits: Tensor, prediction: Tensor, hidden: Hidden, *, text_share: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return `loss`, the weighted sum times `loss_scale`, and the two losses without their weights.

        `text_share`: hidden words of this batch, relative to the mean over ranks.
        """
        text = masked_cross_entropy(logits, hidden.words, mask=hidden.is_hidden, dim=-1, ceiling=self.config.ceiling)
        text = text if text_share is None else text * text_share
        return self._sum(text_loss=text, latent_loss=self._compare(prediction, hidden.target))

    def _compare(self, prediction: Tensor, target: Tensor) -> Tensor:
        if self.config.normalize_latents:
            loss = normalized_mse(prediction, target)
        else:
            loss = F.mse_loss(prediction.float(), target)
        return hold(loss, self.config.ceiling)
