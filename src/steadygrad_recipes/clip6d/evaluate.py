"""A module and the validation samples -> loss, retrieval, and the loss of a guess.

Leaves no trace: mode and random state are restored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from steadygrad.state.random_state import unchanged_random
from steadygrad.trainer.evaluating import in_eval_mode
from steadygrad_recipes.clip6d.config import Clip6dConfig
from steadygrad_recipes.clip6d.data import Corpus, iterate_validation
from steadygrad_recipes.clip6d.module import join_features, present_of
from steadygrad_recipes.clip6d.retrieval import measure_recall

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@torch.no_grad()
def evaluate(module: Any, corpus: Corpus, config: Clip6dConfig) -> dict[str, float]:
    """Return `val_loss`, a mean over whole batches (a short one is easier), and R@k over all samples."""
    losses: list[Tensor] = []
    seen = []
    dtype, device = DTYPES.get(config.precision), find_device(module)
    with without_trace(module), torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        for batch in iterate_validation(corpus, config):
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            features, present = module.encode(batch), present_of(batch, len(module.modalities))
            # A short batch has fewer negatives and a lower loss; taken only if it is the only one
            if len(present) == config.batch_size or not losses:
                losses.append(module.compute_loss(features, present).float())
            seen.append(({name: f.float().cpu() for name, f in features.items()}, present.cpu()))
    recall = measure_recall(*join_features(seen), multiplies=module.multiplies)
    return {"val_loss": float(torch.stack(losses).mean()), **recall}


@torch.no_grad()
def guess_loss(module: Any, corpus: Corpus, config: Clip6dConfig) -> float:
    """Return the `val_loss` of vectors that are all equal: every combination is as likely as any other."""
    losses: list[Tensor] = []
    device = find_device(module)
    with without_trace(module):
        for batch in iterate_validation(corpus, config):
            present = present_of(batch, len(module.modalities)).to(device)
            if len(present) == config.batch_size or not losses:
                equal = {name: torch.ones(len(present), 32, device=device) for name in module.modalities}
                losses.append(module.compute_loss(equal, present).float())
    return float(torch.stack(losses).mean())


def find_device(module: Any) -> torch.device:
    """Return where the module is."""
    device: torch.device = next(module.parameters()).device
    return device


@contextlib.contextmanager
def without_trace(module: Any) -> Iterator[None]:
    """Put the module into eval mode inside this context; restore the mode of each part and the random state."""
    with in_eval_mode(module), unchanged_random([find_device(module)]):
        yield
