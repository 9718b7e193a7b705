"""The recipe `clip6d`: CLIP over two to six modalities (images, captions in several languages, vectors), on Lightning.

`steadygrad train clip6d` trains it; `--predict photo.jpg` finds the nearest captions. torch and Lightning are imported
only when needed, so that the command line can list the fields without them.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from steadygrad_recipes.clip6d.config import Clip6dConfig

Config = Clip6dConfig
SUMMARY = "contrastive learning over two to six modalities, by Lightning"
_CLASSES = {
    "EnhancedLightningCLIPModule": "steadygrad_recipes.clip6d.module",
    "EnhancedTrainingMixin": "steadygrad.adapters.enhanced",
    "GradientHealthMonitor": "steadygrad.monitor",
    "ImprovedActivations": "steadygrad.nn",
    "StableLossFunctions": "steadygrad.losses",
    "add_gradient_checkpointing": "steadygrad.nn",
    "get_stable_loss_function": "steadygrad.losses",
}
"""Name -> module, for `__getattr__`."""
LOOP = "Lightning"
FIXED = ("seed", "num_synthetic", "val_share")
ALIASES = {"lr": "learning_rate"}
PREDICT = "find what is nearest to a picture or a text, or the zero-shot accuracy on a folder of classes"
QUICK = {
    "batch_size": 8,
    "epochs": 8,
    "learning_rate": 1e-3,
    "threads": 1,  # layers this small gain nothing from a second thread
    "model.embed_dim": 64,
    "model.image_size": 32,
    "model.patch_size": 8,
    "model.image_width": 64,
    "model.image_layers": 2,
    "model.text_width": 64,
    "model.text_layers": 1,
    "model.vector_width": 64,
}


def train(config: Clip6dConfig, *, run_dir: Path, resume: str | None, console: Any) -> int:
    """Train; returns the exit code."""
    from steadygrad_recipes.clip6d.fit import train_clip6d

    return train_clip6d(config, run_dir=run_dir, resume=resume, console=console)


def predict(config: Clip6dConfig, path: str, *, run_dir: Path, console: Any) -> int:
    """Print the captions nearest to an image, or to a text in any language; returns the exit code."""
    from steadygrad_recipes.clip6d.neighbours import find_captions

    return find_captions(config, path, run_dir=run_dir, console=console)


def check(*, console: Any) -> int:
    """Run the checks of the document that this recipe follows; returns how many failed."""
    from steadygrad_recipes.clip6d.check_setup import check_setup

    return check_setup(console.say)


def __getattr__(name: str) -> Any:
    """Import a class of this recipe when it is asked for: the command line needs none of them."""
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_CLASSES[name]), name)
