"""Losses, and the pieces that losses are made of, with finite values and gradients on what a training run produces."""

from steadygrad.losses.classification import focal, masked_cross_entropy, stable_bce_with_logits, stable_kl
from steadygrad.losses.elementwise import safe_acos, safe_asin, safe_atan2, safe_div, safe_log, safe_sqrt
from steadygrad.losses.embedding import clip_loss, info_nce, normalized_mse
from steadygrad.losses.multiway import MultiwayScale, align_gain, multiway_contrastive, spread_gain
from steadygrad.losses.ndim import StableLossFunctions, get_stable_loss_function
from steadygrad.losses.reduction import masked_mean
from steadygrad.losses.segmentation import dice, iou, structure_loss
from steadygrad.losses.softmax import safe_log_softmax, safe_softmax
from steadygrad.losses.terms import Loss, find_bad_terms
from steadygrad.losses.vectors import safe_norm, safe_normalize, safe_std

__all__ = [
    "Loss",
    "MultiwayScale",
    "StableLossFunctions",
    "align_gain",
    "clip_loss",
    "dice",
    "find_bad_terms",
    "focal",
    "get_stable_loss_function",
    "info_nce",
    "iou",
    "masked_cross_entropy",
    "masked_mean",
    "multiway_contrastive",
    "normalized_mse",
    "safe_acos",
    "safe_asin",
    "safe_atan2",
    "safe_div",
    "safe_log",
    "safe_log_softmax",
    "safe_norm",
    "safe_normalize",
    "safe_softmax",
    "safe_sqrt",
    "safe_std",
    "spread_gain",
    "stable_bce_with_logits",
    "stable_kl",
    "structure_loss",
]
