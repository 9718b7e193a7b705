"""A module and the validation samples -> loss and retrieval. Leaves no trace: mode and random state are restored."""

from __future__ import annotations

from typing import Any

import torch

from steadygrad.state.random_state import unchanged_random
from steadygrad_recipes.clip6d.config import Clip6dConfig
from steadygrad_recipes.clip6d.data import Corpus, iterate_validation
from steadygrad_recipes.clip6d.module import join_features, present_of
from steadygrad_recipes.clip6d.retrieval import measure_recall

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@torch.no_grad()
def evaluate(module: Any, corpus: Corpus, config: Clip6dConfig) -> dict[str, float]:
    """Return `val_loss`, a mean over whole batches (a short one is easier), and R@k over all samples."""
    device, was_training = next(module.parameters()).device, module.training
    losses: list[torch.Tensor] = []
    seen = []
    dtype = DTYPES.get(config.precision)
    module.eval()
    try:
        with unchanged_random([device]), torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            for batch in iterate_validation(corpus, config):
                batch = {name: tensor.to(device) for name, tensor in batch.items()}
                features, present = module.encode(batch), present_of(batch, len(module.modalities))
                if len(present) == config.batch_size or not losses:
                    losses.append(module.compute_loss(features, present).float())
                seen.append(({name: f.float().cpu() for name, f in features.items()}, present.cpu()))
    finally:
        module.train(was_training)
    recall = measure_recall(*join_features(seen), multiplies=module.multiplies)
    return {"val_loss": float(torch.stack(losses).mean()), **recall}
