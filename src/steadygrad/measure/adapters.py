"""A model -> whether its frozen layers are trained through something small beside them. Names and flags only."""

from __future__ import annotations

from torch import nn

ADAPTERS = ("lora", "adapter", "prompt", "prefix", "soft")
"""Parts of names of parameters that are trained in place of a frozen model."""


def has_adapters(model: nn.Module) -> bool:
    """Return whether frozen layers are trained through something small beside them, as with LoRA or prompts."""
    if any(word in name for name, p in model.named_parameters() if p.requires_grad for word in ADAPTERS):
        return True
    return any(
        any(p.requires_grad for p in module.parameters(recurse=False))
        and any(not p.requires_grad for child in module.children() for p in child.parameters())
        for module in model.modules()
    )
