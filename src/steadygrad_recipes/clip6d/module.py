"""EnhancedLightningCLIPModule: up to six modalities -> one contrastive loss, as a LightningModule that monitors itself.

Under a `GuardCallback` the Guard clips and skips, and this module only observes; in a Trainer without one it clips at
`gradient_clip_value` itself, once per step. The [B]^M tensor of logits is built only on request.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from steadygrad.adapters.lightning import EnhancedTrainingMixin, GuardCallback
from steadygrad.extras import import_extra
from steadygrad.losses import MultiwayScale, get_stable_loss_function, multiway_contrastive, safe_normalize
from steadygrad.nn import add_gradient_checkpointing
from steadygrad.state.shards import is_dtensor
from steadygrad.trainer.ranks import count_ranks, is_first
from steadygrad.trainer.stages import shape_rate
from steadygrad_recipes.clip6d.config import IMAGE, VECTOR, ModelConfig
from steadygrad_recipes.clip6d.encoders import ImageEncoder, TextEncoder, VectorEncoder, pad_tokens
from steadygrad_recipes.clip6d.pretrained import GAP, open_encoders, require_tokenizer
from steadygrad_recipes.clip6d.retrieval import measure_recall
from steadygrad_recipes.clip6d.tokens import FILL

LightningModule: Any = import_extra(
    "lightning", "lightning.pytorch", "pytorch_lightning", what="the recipe clip6d"
).LightningModule

SIMILARITIES = ("mip", "norm", "cosine", "distance")
"""`stable_loss_version` -> the similarity of `multiway_contrastive`."""
EXPLODING = 100.0
"""The monitor's own threshold above which a norm is worth a warning."""
VANISHING = 1e-7
"""And the one below which a parameter's norm is."""


class EnhancedLightningCLIPModule(EnhancedTrainingMixin, LightningModule):  # type: ignore[misc]
    """CLIP over two to six modalities.

    A batch is a dict of modality -> [B, ...], with `present` [B, M] where samples lack something.
    """

    def __init__(
        self,
        learning_rate: float = 1e-4,
        enable_gradient_monitoring: bool = True,
        enable_activation_monitoring: bool = False,
        use_stable_loss: bool = True,
        stable_loss_version: int = 1,
        gradient_clip_value: float = 1.0,
        *,
        modalities: Sequence[str] = ("image", "en", "de", "es", "zh", "vector"),
        vector_dim: int = 32,
        model: ModelConfig | None = None,
        negatives: str = "all",
        label_smoothing: float = 0.0,
        weight_decay: float = 0.01,
        warmup_steps: int = 20,
        max_steps: int | None = None,
        log_frequency: int = 100,
        gather: bool = False,
    ) -> None:
        """`gather`: compare each sample with those of all ranks while training."""
        super().__init__()
        self.learning_rate, self.weight_decay, self.warmup_steps = learning_rate, weight_decay, warmup_steps
        self.max_steps = max_steps
        self.use_stable_loss, self.stable_loss_version = use_stable_loss, stable_loss_version
        self.gradient_clip_value, self.log_frequency = gradient_clip_value, log_frequency
        self.negatives, self.label_smoothing, self.gather = negatives, label_smoothing, gather
        self.modalities = tuple(modalities)
        model = ModelConfig() if model is None else model
        self._make_encoders(model, vector_dim)
        similarity: Any = SIMILARITIES[stable_loss_version]
        self.logit_scale = MultiwayScale(len(self.modalities), model.embed_dim, similarity=similarity)
        self.calculate_loss: Callable[..., Tensor] = (
            get_stable_loss_function(loss_version=stable_loss_version, normalize=True, eps=1e-8)
            if use_stable_loss
            else compute_plain_logits
        )
        if model.gradient_checkpointing and any(isinstance(m, ImageEncoder | TextEncoder) for m in self.children()):
            add_gradient_checkpointing(model=self, modules_to_checkpoint=["transformer", "ResidualAttentionBlock"])
        self.setup_gradient_monitoring(
            enable_gradient_monitoring=enable_gradient_monitoring,
            enable_activation_monitoring=enable_activation_monitoring,
            gradient_clip_threshold=gradient_clip_value,
            log_frequency=log_frequency,
        )
        self._seen: list[tuple[dict[str, Tensor], Tensor]] = []

    def _make_encoders(self, model: ModelConfig, vector_dim: int) -> None:
        self.texts = tuple(name for name in self.modalities if name not in (IMAGE, VECTOR))
        self.fill = FILL if model.pretrained is None else GAP
        trained = None if model.pretrained is None else open_encoders(model)
        if IMAGE in self.modalities:
            self.image_encoder = ImageEncoder(model) if trained is None else trained[0]
        if self.texts:
            self.text_encoder = TextEncoder(model) if trained is None else trained[1]
        if self.texts and trained is not None:
            require_tokenizer(model, trained[1])
        if VECTOR in self.modalities:
            self.vector_encoder = VectorEncoder(vector_dim, model)

    @property
    def multiplies(self) -> bool:
        """Whether similarity is measured by the product of the vectors rather than by their sum."""
        return not self.use_stable_loss or self.stable_loss_version == 0

    # --- features, logits, loss -------------------------------------------------------------------------------------

    def encode(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return modality -> [B, D], not normalised, in the order of `modalities`. One pass serves all languages."""
        features: dict[str, Tensor] = {}
        if self.texts:
            rows = self.text_encoder(pad_tokens([batch[name] for name in self.texts], self.fill))
            features |= dict(zip(self.texts, rows.chunk(len(self.texts))))  # each [B, D]
        if IMAGE in self.modalities:
            features[IMAGE] = self.image_encoder(batch[IMAGE])
        if VECTOR in self.modalities:
            features[VECTOR] = self.vector_encoder(batch[VECTOR])
        return {name: features[name] for name in self.modalities}

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of all combinations, as `calculate_loss` does: for inspection; the loss needs none."""
        return self.calculate_loss(*self.encode(batch).values())

    def compute_loss(self, features: Mapping[str, Tensor], present: Tensor | None = None) -> Tensor:
        """Return the loss of a batch."""
        if not self.use_stable_loss:
            scale = self.logit_scale.log_scale.exp()  # CLIP's, whatever the number of modalities
            return average_cross_entropy(self.calculate_loss(*features.values()) * scale)
        return multiway_contrastive(
            [safe_normalize(f) for f in features.values()],
            self.logit_scale(),
            similarity=cast(Any, SIMILARITIES[self.stable_loss_version]),
            negatives=cast(Any, self.negatives),
            label_smoothing=self.label_smoothing,
            present=present,
            # Not in an evaluation: all ranks have the same validation samples, which would be their own negatives
            gather=self.gather and self.training and count_ranks() > 1,
        )

    # --- Lightning's hooks ------------------------------------------------------------------------------------------

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002 - Lightning's
        """Run forward and return the loss."""
        present = batch.get("present")
        loss = self.compute_loss(self.encode(batch), present)
        self.log("loss", loss.detach(), prog_bar=True)
        self.log("train_loss", loss.detach())
        return loss

    def on_after_backward(self) -> None:
        """Inspect the gradients once they are complete; clip them where no Guard does."""
        trainer = self.trainer
        is_whole = (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        guarded = any(isinstance(c, GuardCallback) and c.guards for c in trainer.callbacks)
        # Each inspection waits for the device; a Guard measures every step without waiting.
        is_due = not (guarded and self.device.type == "cuda") or self.global_step % self.log_frequency == 0
        # Gradients are equal on all ranks, unless they are sharded: then all must take part
        is_due = is_due and (is_first() or not guarded or any(map(is_dtensor, self.parameters())))
        if self.enable_gradient_monitoring and is_whole and is_due:
            stats = self.check_and_log_gradients(
                step=self.global_step, apply_clipping=not guarded, max_grad_norm=self.gradient_clip_value
            )
            self.log("grad", stats["global_grad_norm"], prog_bar=True)
            if guarded:
                self._warn_once_an_epoch(stats)

        if self.enable_activation_monitoring and is_whole and self.global_step % self.log_frequency == 0 and is_first():
            self._print_activations()

    def _warn_once_an_epoch(self, stats: Mapping[str, Any]) -> None:
        """Silence a warning until the next epoch: large norms are clipped, and some gradients are 0 by construction.

        Those of the biases of attention's keys are: softmax ignores what is added to a whole row.
        """
        monitor = self.gradient_monitor
        if monitor is not None and stats["global_grad_norm"] > EXPLODING:
            monitor.exploding_threshold = math.inf
        if monitor is not None and stats["min_grad_norm"] < VANISHING:
            monitor.vanishing_threshold = 0.0

    def _print_activations(self) -> None:
        """Print what the activations since the last print were like, and record the share of units that never fired."""
        found = self.get_activation_statistics()
        if self.activation_monitor is not None:
            # Over all steps since the first, a unit that died later would never count as dead
            self.activation_monitor.reset_statistics()
        dead = found["dead_neurons"]
        worst = max(dead, key=dead.__getitem__, default=None)
        share = sum(dead.values()) / max(1, len(found["activations"]))
        spread = [float(one["std"]) for one in found["activations"].values() if math.isfinite(float(one["std"]))]
        most = f", most in {worst} ({dead[worst]:.1%})" if worst is not None else ""
        print(
            f"Step {self.global_step} - Activations: {len(found['activations'])} layers, "
            f"std {min(spread, default=0.0):.3g} to {max(spread, default=0.0):.3g}, dead units {share:.1%}{most}"
        )
        self.log("dead_units", share)
        for callback in self.trainer.callbacks:
            if isinstance(callback, GuardCallback) and callback.guards:
                callback.guard.log(dead_units=share)

    def on_train_epoch_start(self) -> None:
        """Allow the warnings about large and small norms again."""
        if self.gradient_monitor is not None:
            self.gradient_monitor.exploding_threshold = EXPLODING
            self.gradient_monitor.vanishing_threshold = VANISHING

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW; the rate rises for `warmup_steps`, then follows a cosine to zero over all steps."""
        decayed = [p for p in self.parameters() if p.dim() >= 2]  # no decay for biases, norms and the logit scale
        others = [p for p in self.parameters() if p.dim() < 2]
        sharded, whole = ([p for p in others if is_dtensor(p) == wanted] for wanted in (True, False))
        groups = [
            {"params": decayed, "weight_decay": self.weight_decay},
            *({"params": some, "weight_decay": 0.0} for some in (sharded, whole) if some),  # no kernel takes both
        ]
        fused = True if decayed[0].is_cuda else None
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, fused=fused)
        total, warmup = int(self.trainer.estimated_stepping_batches), self.warmup_steps
        total = total if self.max_steps is None else min(total, self.max_steps)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: shape_rate(step, warmup, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_validation_epoch_start(self) -> None:
        """Forget the features of the previous validation."""
        self._seen.clear()

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:  # noqa: ARG002 - Lightning's
        """Log the loss of this batch, and keep its features for retrieval over the whole set."""
        features = self.encode(batch)
        present = present_of(batch, len(self.modalities))
        self.log("val_loss", self.compute_loss(features, batch.get("present")), batch_size=len(present))
        # On the host: the features of the whole set need not fit beside the model
        self._seen.append(({name: f.float().cpu() for name, f in features.items()}, present.cpu()))

    def on_validation_epoch_end(self) -> None:
        """Log R@1, R@5, R@10 for every pair, and for each modality from all the others."""
        self.log_dict(measure_recall(*join_features(self._seen), multiplies=self.multiplies))
        self._seen.clear()


def present_of(batch: Mapping[str, Tensor], num_modalities: int) -> Tensor:
    """Return the batch's table of what is present; all True when it has none."""
    if "present" in batch:
        return batch["present"]
    return torch.ones(len(next(iter(batch.values()))), num_modalities, dtype=torch.bool)


def join_features(seen: Sequence[tuple[dict[str, Tensor], Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    """Concatenate several batches into one."""
    names = seen[0][0]
    return {name: torch.cat([f[name] for f, _ in seen]) for name in names}, torch.cat([present for _, present in seen])


# --- plain logits -------------------------------------------------------------------------------------------------
# 6DIMCOCO's logits before they were stabilised, and torch's own mean: for comparison, with `use_stable_loss=False`.
#
# The product of all M unit vectors for every one of B^M combinations, by einsum, and a cross entropy along each axis
# with ones on the diagonal. It vanishes in two ways at once. Six unit vectors of length D have products of about
# D^-2.5, which CLIP's scale leaves at zero. And `cross_entropy` averages over B^(M-1) rows, of which B have a label,
# so that loss and gradients shrink by B^(M-2). A zero vector is 0 / 0.


def compute_plain_logits(*features: Tensor) -> Tensor:
    """Return [B]^M: the sum over D of the product of one row of each, divided by their norms without any epsilon."""
    units = [f / f.norm(dim=-1, keepdim=True) for f in features]
    letters = string.ascii_lowercase[: len(units)]
    half = (len(units) + 1) // 2
    first, second = letters[:half], letters[half:]
    left, right = _multiply(first, units[:half]), _multiply(second, units[half:])
    return torch.einsum(f"{first}z,{second}z->{letters}", left, right)


def _multiply(letters: str, units: Sequence[Tensor]) -> Tensor:
    """Return [B, ..., B, D]: every product of one row of each."""
    return torch.einsum(",".join(f"{letter}z" for letter in letters) + f"->{letters}z", *units)


def average_cross_entropy(logits: Tensor) -> Tensor:
    """Return the mean over all axes of the cross entropy with ones on the diagonal."""
    size, num = len(logits), logits.dim()
    labels = torch.zeros_like(logits)
    diagonal = torch.arange(size, device=logits.device)
    labels[(diagonal,) * num] = 1.0
    # Classes are along dimension 1 for cross_entropy; the labels are symmetric in all axes
    return torch.stack([F.cross_entropy(logits.transpose(1, m), labels) for m in range(num)]).mean()
