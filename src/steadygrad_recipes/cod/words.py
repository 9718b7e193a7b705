"""Training numbers -> the lines shown on the console: the bar, the metrics, the norms, the warnings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BAR_WIDTH = 8
HIGH_NORM = 5.0
"""Gradients above this multiple of the clipping threshold are worth a warning."""

CAREFUL_CLIP = 0.3
"""The threshold to try when norms are high."""


def spell_bar(epoch: int, epochs: int, done: int, total: int, seconds: float, loss: float, norm: float | None) -> str:
    """Epoch 44/140: 100%|████████| 125/125 [05:45<00:00, loss=2.37, grad=0.423]"""
    share = done / max(1, total)
    full = "█" * round(BAR_WIDTH * share)
    left = seconds / share - seconds if share else 0.0
    grad = "" if norm is None else f", grad={norm:.3f}"
    times = f"{_spell_time(seconds)}<{_spell_time(left)}"
    return f"Epoch {epoch}/{epochs}: {share:4.0%}|{full:<{BAR_WIDTH}}| {done}/{total} [{times}, loss={loss:.2f}{grad}]"


def spell_metrics(metrics: Mapping[str, Any]) -> str:
    """Loss: 2.3700 | IoU: 0.5845 | Dice: 0.7350 | MAE: 0.0421 | S-measure: 0.7312"""
    return (
        f"Loss: {metrics['loss']:.4f} | IoU: {metrics['val_iou']:.4f} | Dice: {metrics['val_dice']:.4f} | "
        f"MAE: {metrics['val_mae']:.4f} | S-measure: {metrics['val_s_measure']:.4f}"
    )


def spell_norms(metrics: Mapping[str, Any]) -> str:
    """Gradient norm - Avg: 0.381, Max: 0.498"""
    return f"   Gradient norm - Avg: {metrics['grad_norm_mean']:.3f}, Max: {metrics['grad_norm_max']:.3f}"


def spell_high_norm(norm: float, grad_clip: float) -> str:
    """Format the early warning."""
    return f"⚠️  High gradient norm detected: {norm:.2f} (clipped to {grad_clip:g})"


def spell_advice(grad_clip: float) -> str:
    """Consider reducing --grad-clip to 0.3 or --lr by 50%."""
    lower_clip = f"--grad-clip to {CAREFUL_CLIP:g} or " if grad_clip > CAREFUL_CLIP else ""
    return f"   Consider reducing {lower_clip}--lr by 50%."


def spell_bad_loss(batch: int, loss: float) -> list[str]:
    """Format the error about a loss that cannot be used."""
    return [f"❌ NaN/Inf detected in loss at batch {batch}!", f"   Loss: {loss}"]


def spell_bad_gradients(batch: int, norm: float) -> list[str]:
    """Format the error about gradients that cannot be used."""
    return [
        f"❌ NaN/Inf detected in gradients at batch {batch}!",
        f"   Gradient norm: {norm}",
        "   This indicates gradient explosion.",
    ]


def _spell_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
